"""Which documents lie where, and what the tokens before a rank leave it: the last few real ones of its open document.

A rank holds tokens [low, high) of the whole. At most one of its documents began on an earlier rank (it `continues`),
and at most one goes on behind its last token (it is `open`). Rows of a dense batch are all of both kinds, except that
they begin on rank 0. Trap: packed documents cut the whole at `rank * T`, so every rank must hold T tokens.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fastweight.parallel.group import Place, gather


class Layout(NamedTuple):
    """The documents of one rank.

    rows: states in and out, of all documents of the whole. continues: the row (packed) that began on an earlier rank,
    or None; dense rows continue on all ranks but the first. head: tokens here of what continues. opened: first token
    here of what goes on behind, T where nothing does. first_rank: the rank where what continues here began.
    documents: rows that have their first token here, empty ones included; bounds: theirs, counted from `head`.
    owner: the rank that has the last token of each row.
    """

    packed: bool
    continues: int | None
    head: int
    opened: int
    goes_on: bool
    first_rank: int
    documents: list[int]
    bounds: list[int]
    owner: list[int]

    @classmethod
    def of(cls, place: Place, rows: int, T: int, cu_seqlens: Int[Tensor, " N+1"] | None) -> "Layout":
        """rows: of a dense batch, or documents."""
        rank, last = place.rank, place.size - 1
        if cu_seqlens is None:
            head = T if rank else 0
            every = [] if rank else list(range(rows))
            return cls(False, 0 if rank else None, head, 0, rank < last, 0, every, [], [last] * rows)
        cu, low = cu_seqlens.tolist(), rank * T
        high = low + T
        spans = list(pairwise(cu))

        def rank_of(token: int) -> int:
            return min(token // T, last) if T else last

        begins = [rank_of(a) for a, _ in spans]
        continues = next((d for d, (a, b) in enumerate(spans) if a < low < b), None)
        head = 0 if continues is None else min(spans[continues][1], high) - low
        documents = [d for d in range(rows) if begins[d] == rank]
        bounds = [0]
        for d in documents:
            bounds.append(bounds[-1] + min(spans[d][1], high) - spans[d][0])
        open_one = next((a for a, b in spans if a < high < b), None)
        opened = T if open_one is None else max(open_one - low, 0)
        owner = [rank_of(b - 1) if b > a else rank_of(a) for a, b in spans]
        first = rank if continues is None else begins[continues]
        return cls(True, continues, head, opened, open_one is not None, first, documents, bounds, owner)

    @property
    def passes(self) -> bool:
        """Whether what came in goes on behind the last token."""
        return self.continues is not None and self.goes_on and self.opened == 0

    def row(self, state: Tensor) -> Tensor:
        """The rows of a tensor [rows, ...] that continue here."""
        return state if not self.packed else state[self.continues : self.continues + 1]  # type: ignore[operator]

    def cu(self, device: torch.device) -> Int[Tensor, " n+1"]:
        """Bounds of the documents that begin here."""
        return torch.tensor(self.bounds, device=device, dtype=torch.int32)


def last_real(
    tensors: list[Tensor], mask: Bool[Tensor, "B T"] | None, opened: int, number: int
) -> tuple[list[Tensor], Bool[Tensor, "B n"]]:
    """The last `number` real tokens from `opened` on, [B, number, ...], newest last, and which of the places are."""
    B, T = tensors[0].shape[:2]
    device = tensors[0].device
    if mask is None:
        at = torch.arange(T - number, T, device=device).expand(B, number)
        real = at >= opened
    else:
        real = mask & (torch.arange(T, device=device) >= opened)
        # Behind as many places of nothing as may be missing, real tokens last and in order.
        padded = torch.nn.functional.pad(real, (number, 0))
        order = padded.to(torch.uint8).argsort(dim=1, stable=True)[:, T:]
        real, at = padded.gather(1, order), order - number
    return [_real(t, at, real) for t in tensors], real


def _real(tensor: Tensor, at: Tensor, real: Tensor) -> Tensor:
    axes = (1,) * (tensor.ndim - 2)
    if tensor.shape[1] == 0:
        return tensor.new_zeros(*at.shape, *tensor.shape[2:])
    index = at.clamp(min=0).reshape(*at.shape, *axes).expand(*at.shape, *tensor.shape[2:])
    return tensor.gather(1, index).masked_fill(~real.reshape(*real.shape, *axes), 0)


def joined(gathered: Tensor, layout: Layout, rank: int) -> Tensor:
    """What the ranks before left of a document that continues, [size, B, n, ...] as [B, ranks n, ...]."""
    before = gathered[layout.first_rank : rank]
    return before.movedim(0, 1).flatten(1, 2)


def whole(place: Place, tokens: Tensor) -> Tensor:
    """Tokens [B, T, ...] of all ranks in order, without gradients; equally many on each."""
    (parts,) = gather(place, None, tokens.detach())
    return parts.movedim(0, 1).flatten(1, 2)
