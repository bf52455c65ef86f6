"""Packed sequences <-> rows of equal length, without host loops over tokens.

cu_seqlens cuts one row of T tokens into N sequences. Sequences of similar length go together into one padded batch (a
bucket: lengths within a factor of two), so the forms only ever see dense rows with a mask at their end, padding never
more than doubles the work, and thousands of short documents cost a few batches. The bounds are read on the host: on a
GPU this is one synchronisation.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor


class Bucket(NamedTuple):
    """Some sequences as a padded batch. rows: which ones [M]. tokens: their places [M, L]. mask: None if all real."""

    rows: Int[Tensor, " M"]
    tokens: Int[Tensor, "M L"]
    mask: Bool[Tensor, "M L"] | None

    def take(self, packed: Tensor) -> Tensor:
        """The tokens of this bucket, [1, T, ...] -> [M, L, ...]."""
        return packed[0][self.tokens]


def buckets(cu_seqlens: Int[Tensor, " N+1"]) -> list[Bucket]:
    """Splits N >= 1 sequences by length; empty sequences come as a bucket of width 0."""
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    sizes = lengths.tolist()
    groups: dict[int, list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(size.bit_length(), []).append(row)
    found = []
    for members in groups.values():
        rows = torch.tensor(members, device=cu_seqlens.device)
        width = max(sizes[row] for row in members)
        offset = torch.arange(width, device=cu_seqlens.device)
        inside = offset < lengths[rows, None]
        # Padding repeats a real token of the sequence: finite values, and the mask makes it an identity step.
        index = starts[rows, None] + torch.minimum(offset, (lengths[rows, None] - 1).clamp(min=0))
        padded = any(sizes[row] != width for row in members)
        found.append(Bucket(rows, index, inside if padded else None))
    return found


def merge(parts: list[Tensor], found: list[Bucket]) -> Tensor:
    """The inverse of `Bucket.take` over all buckets: [M, L, ...] each -> [1, T, ...]."""
    flat, places = [], []
    for part, bucket in zip(parts, found, strict=True):
        keep = bucket.mask if bucket.mask is not None else torch.ones_like(bucket.tokens, dtype=torch.bool)
        flat.append(part[keep])
        places.append(bucket.tokens[keep])
    order = torch.cat(places).argsort()
    return torch.cat(flat)[order][None]
