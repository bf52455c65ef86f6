"""Where the pairs of a window sit inside a chunk, so that nothing with a K or V axis is copied R times.

A chunk of C tokens touches J = C + R - 1 pairs. The rows of its system are (token t, pair of its window): C R of them,
row (t, a) with a from the oldest (0) to the newest (R - 1). `columns` spreads pairs over rows along the last axis,
`fold` adds rows up per pair. Two layouts share that interface:

    Band      pairs in order, one a token: row (t, a) is pair t + a, the same for every chunk
    Selected  masked tokens lie in between: a 0/1 matrix per chunk says which pair a row is

A window that is not full needs no mask: the pairs it lacks have x = 0 and so write nothing, predict nothing.
M counts chunks and sequences together.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Band:
    """Row (t, a) is pair t + a. select: [C R, J]."""

    size: int
    select: Float[Tensor, "CR J"]

    @classmethod
    def of(cls, R: int, C: int, like: Tensor) -> "Band":
        row = torch.arange(C, device=like.device)[:, None] + torch.arange(R, device=like.device)
        return cls(R, torch.nn.functional.one_hot(row.flatten(), C + R - 1).to(like.dtype))

    def rows(self, z: Float[Tensor, "M J D"]) -> Float[Tensor, "M CR D"]:
        """Pairs -> rows."""
        return torch.matmul(self.select, z)

    def fold(self, z: Float[Tensor, "M CR D"]) -> Float[Tensor, "M J D"]:
        """Rows -> pairs, summed: the adjoint of `rows`."""
        return torch.matmul(self.select.mT, z)

    def columns(self, z: Float[Tensor, "M D J"]) -> Float[Tensor, "M D CR"]:
        return torch.matmul(z, self.select.mT)

    def fold_columns(self, z: Float[Tensor, "M D CR"]) -> Float[Tensor, "M D J"]:
        return torch.matmul(z, self.select)

    def spread(self, w: Float[Tensor, "M D C"]) -> Float[Tensor, "M D J"]:
        """w[., s] given to every pair of token s, summed per pair."""
        return torch.matmul(w, self._live)

    def gather(self, w: Float[Tensor, "M D J"]) -> Float[Tensor, "M D C"]:
        """The adjoint of `spread`."""
        return torch.matmul(w, self._live.mT)

    @property
    def _live(self) -> Float[Tensor, "... C J"]:
        return self.select.unflatten(-2, (-1, self.size)).sum(-2)

    def part(self, chunks: slice, N: int) -> "Band":
        """The windows of some chunks, N sequences each."""
        return self


class Selected(Band):
    """Row (t, a) is the pair j with select[m, (t, a), j] = 1. select: [M, C R, J]."""

    def part(self, chunks: slice, N: int) -> "Selected":
        return replace(self, select=self.select[chunks.start * N : chunks.stop * N])
