"""Where the pairs of a window sit inside a chunk, so that nothing with a K axis is copied R times.

A chunk of C tokens touches J = C + R - 1 pairs. The rows of its system are (token t, live pair): C * R of them. `rows`
spreads pairs over rows, `fold` adds rows up per pair; three layouts share that interface:

    Single    R = 1: rows, pairs and tokens are the same
    Band      pairs in order, one a token: row (t, a) is pair t + a, so `rows` is an overlapping view
    Selected  masked tokens lie in between: a 0/1 matrix per chunk says which pair a row is

Row a counts from the oldest (a = 0) to the newest (a = R - 1). `alive` [M, C, R] is 0 where a window is not full.
M counts chunks and sequences together; m is M, or the sequences of one chunk alone (then `chunk` says which).
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Single:
    """Window 1: every map is the identity."""

    size: int = 1

    def rows(self, z: Tensor, chunk: int | None = None) -> Tensor:
        return z

    fold = columns = fold_columns = square = fold_square = spread = gather = rows

    def row_gain(self, gain: Float[Tensor, "M C"]) -> Float[Tensor, "M CR"]:
        return gain

    fold_gain = row_tokens = row_gain

    def part(self, chunks: slice, N: int) -> "Single":
        return self


@dataclass(frozen=True)
class _Rows:
    """What Band and Selected share, built on rows, fold, columns and fold_columns."""

    size: int
    alive: Float[Tensor, "M C R"]

    def square(self, z: Float[Tensor, "M J J"]) -> Float[Tensor, "M CR CR"]:
        return self.columns(self.rows(z))

    def fold_square(self, z: Float[Tensor, "M CR CR"]) -> Float[Tensor, "M J J"]:
        return self.fold(self.fold_columns(z))

    def spread(self, w: Float[Tensor, "M D C"]) -> Float[Tensor, "M D J"]:
        """w[., s] given to every live pair of token s, summed per pair."""
        return self.fold_columns((w[..., None] * self.alive[:, None]).flatten(2))

    def gather(self, w: Float[Tensor, "M D J"]) -> Float[Tensor, "M D C"]:
        """The adjoint of `spread`."""
        return (self.columns(w).unflatten(-1, (-1, self.size)) * self.alive[:, None]).sum(-1)

    def row_gain(self, gain: Float[Tensor, "M C"]) -> Float[Tensor, "M CR"]:
        """The weight of every row: the token's gain where the row is live."""
        return (gain[..., None] * self.alive).flatten(1)

    def fold_gain(self, rows: Float[Tensor, "M CR"]) -> Float[Tensor, "M C"]:
        """The adjoint of `row_gain`."""
        return (rows.view_as(self.alive) * self.alive).sum(-1)

    def row_tokens(self, value: Float[Tensor, "M C"]) -> Float[Tensor, "M CR"]:
        """A value per token, repeated over its rows."""
        return value.repeat_interleave(self.size, dim=-1)

    def part(self, chunks: slice, N: int) -> Self:
        """The windows of some chunks, N sequences each."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "size"}
        return replace(self, **{name: z[chunks.start * N : chunks.stop * N] for name, z in tensors.items()})


@dataclass(frozen=True)
class Band(_Rows):
    """Row (t, a) is pair t + a."""

    def rows(self, z: Float[Tensor, "m J D"], chunk: int | None = None) -> Float[Tensor, "m CR D"]:
        return z.unfold(1, self.size, 1).transpose(2, 3).reshape(len(z), -1, z.shape[2])

    def fold(self, z: Float[Tensor, "m CR D"], chunk: int | None = None) -> Float[Tensor, "m J D"]:
        z = z.view(len(z), -1, self.size, z.shape[2])
        C = z.shape[1]
        out = z.new_zeros(len(z), C + self.size - 1, z.shape[3])
        for a in range(self.size):
            out[:, a : a + C] += z[:, :, a]
        return out

    def columns(self, z: Float[Tensor, "M D J"]) -> Float[Tensor, "M D CR"]:
        return z.unfold(2, self.size, 1).reshape(len(z), z.shape[1], -1)

    def fold_columns(self, z: Float[Tensor, "M D CR"]) -> Float[Tensor, "M D J"]:
        z = z.view(len(z), z.shape[1], -1, self.size)
        C = z.shape[2]
        out = z.new_zeros(len(z), z.shape[1], C + self.size - 1)
        for a in range(self.size):
            out[:, :, a : a + C] += z[..., a]
        return out


@dataclass(frozen=True)
class Selected(_Rows):
    """Row (t, a) is the pair j with select[(t, a), j] = 1."""

    select: Float[Tensor, "M CR J"]

    def _at(self, chunk: int | None, m: int) -> Tensor:
        return self.select if chunk is None else self.select[chunk * m : (chunk + 1) * m]

    def rows(self, z: Float[Tensor, "m J D"], chunk: int | None = None) -> Float[Tensor, "m CR D"]:
        return torch.bmm(self._at(chunk, len(z)), z)

    def fold(self, z: Float[Tensor, "m CR D"], chunk: int | None = None) -> Float[Tensor, "m J D"]:
        return torch.bmm(self._at(chunk, len(z)).mT, z)

    def columns(self, z: Float[Tensor, "M D J"]) -> Float[Tensor, "M D CR"]:
        return torch.bmm(z, self.select.mT)

    def fold_columns(self, z: Float[Tensor, "M D CR"]) -> Float[Tensor, "M D J"]:
        return torch.bmm(z, self.select)


Window = Single | Band | Selected
