"""Where the chunks of a call lie: one dense batch or packed sequences, as the small tables that every kernel reads.

Trap: nothing here may wait for the device, so packed tables have room for the most chunks that the token count allows;
a chunk number past the last real one carries sequence -1 and its program returns at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Sequences, tokens, and the numbering of their chunks; `stride` tokens a chunk."""

    sequences: int
    tokens: int
    length: int  # tokens of each sequence, dense only
    chunks: int  # chunks of each sequence, dense only
    slots: int  # chunk numbers in all
    cu: Tensor | None = None
    chunk_seq: Tensor | None = None
    chunk_start: Tensor | None = None

    @classmethod
    def of(cls, batch: int, length: int, cu_seqlens: Tensor | None, stride: int = 64) -> "Geometry":
        """Tables of a dense batch, or of the packed sequences that cu_seqlens [N+1] bounds."""
        if cu_seqlens is None:
            chunks = -(-length // stride)
            return cls(batch, batch * length, length, chunks, batch * chunks)
        sequences = cu_seqlens.numel() - 1
        slots = length // stride + sequences
        counts = (cu_seqlens[1:] - cu_seqlens[:-1] + stride - 1) // stride
        start = torch.zeros(sequences + 1, dtype=torch.int32, device=cu_seqlens.device)
        torch.cumsum(counts, 0, dtype=torch.int32, out=start[1:])
        numbers = torch.arange(slots, device=cu_seqlens.device, dtype=torch.int32)
        owner = torch.searchsorted(start[1:], numbers, right=True, out_int32=True)
        owner = torch.where(numbers < start[-1], owner, -1).to(torch.int32)
        return cls(sequences, length, length, 0, slots, cu_seqlens, owner, start)


def previous_unmasked(mask: Tensor) -> Tensor:
    """Flat index of the last unmasked token before each token [B, T], -1 where the whole batch has none before it."""
    flat = mask.reshape(-1)
    index = torch.arange(flat.numel(), device=flat.device, dtype=torch.int32)
    seen = torch.cummax(torch.where(flat, index, -1), 0).values
    return torch.nn.functional.pad(seen[:-1], (1, 0), value=-1).contiguous()
