"""Token shards into training sequences of one length, in an order that needs no memory.

Item i is a pure function of (seed, epoch, i), where epoch = i // windows per epoch: a run that starts again at item i
sees what it would have seen. The order is a keyed permutation computed index by index (a Feistel network; indices that
fall outside the range are sent through again), so a billion windows need no table in any worker.

Traps: Trainer and DataLoader need a length and an IndexError past it, so `epochs` fixes one; the last tokens of a split
that fill no window are left out, the same ones in each epoch.
"""

import hashlib
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastweight.data.shards import Shards

Packing = Literal["contiguous", "documents"]
ROUNDS = 6
WORD = 2**64 - 1
IGNORED = -100  # label that the loss leaves out


class Windows(Dataset[dict[str, Tensor]]):
    """Sequences of `length` tokens, one after another from the split, shuffled anew in each epoch.

    An item has "input_ids" and "labels", int64 [length]; the model shifts labels itself. With packing "documents" also
    "position_ids" [length], which return to 0 where a document (or the window) begins, so that the model lets no
    document see another; the first token of each document is then no label, for the token before it belongs to
    another document. With "contiguous" the text runs on over end-of-text tokens.

    Args:
        shards: the split.
        length: tokens of a sequence.
        seed: of the order.
        packing: "contiguous" or "documents".
        epochs: how often the split is gone through; len() is `per_epoch * epochs`.
        shuffle: False keeps the order of the split.

    Raises ValueError for a split shorter than one sequence and for unknown values.
    """

    def __init__(
        self,
        shards: Shards,
        length: int,
        *,
        seed: int = 0,
        packing: Packing = "contiguous",
        epochs: int = 1,
        shuffle: bool = True,
    ) -> None:
        if length < 2:
            raise ValueError(f"length: got {length}, expected at least 2 tokens")
        if packing not in ("contiguous", "documents"):
            raise ValueError(f"packing: got {packing!r}, expected 'contiguous' or 'documents'")
        if epochs < 1:
            raise ValueError(f"epochs: got {epochs}, expected at least 1")
        self.shards, self.length, self.seed, self.packing, self.shuffle = shards, length, seed, packing, shuffle
        self.per_epoch = shards.num_tokens // length
        self.epochs = epochs
        if self.per_epoch == 0:
            raise ValueError(f"length: got {length}, expected at most the {shards.num_tokens} tokens of {shards.split}")

    def __len__(self) -> int:
        return self.per_epoch * self.epochs

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"index: got {index}, expected 0 to {len(self) - 1}")
        start = self.window(index) * self.length
        ids = torch.from_numpy(self.shards.tokens(start, start + self.length))
        labels = ids.clone()
        if self.packing == "contiguous":
            return {"input_ids": ids, "labels": labels}
        starts = self.shards.document_starts(start, start + self.length) - start
        labels[torch.from_numpy(starts)] = IGNORED
        return {"input_ids": ids, "labels": labels, "position_ids": _positions(starts, self.length)}

    def window(self, index: int) -> int:
        """Which window of the split, counted from its beginning, item `index` is."""
        epoch, at = divmod(index, self.per_epoch)
        return permuted(at, self.per_epoch, _keys(self.seed, epoch)) if self.shuffle else at


def permuted(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where the keyed permutation of range(size) sends an index."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        index = left << half | right
        if index < size:
            return index


def _mix(word: int) -> int:
    """A 64-bit word, well stirred."""
    word = (word ^ (word >> 31)) * 0x9E3779B97F4A7C15 & WORD
    word = (word ^ (word >> 29)) * 0xD6E8FEB86659FD93 & WORD
    return word ^ (word >> 32)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def _positions(starts: np.ndarray, length: int) -> Tensor:
    """Distance of each token to the last start at or before it, the beginning of the window being one."""
    at = np.arange(length)
    last = np.zeros(length, np.int64)
    last[starts] = starts
    return torch.from_numpy(at - np.maximum.accumulate(last))
