"""Decay inside a chunk: factors that never exceed 1, and gradients that never cancel.

With u_t the sum of log_decay up to t inside the chunk, everything decays by exp(a_t - u_s) with s before t, where a is
u itself ("up to and with t") or u_{t-1} ("up to the token before"; the same factors one row later). The exponent is
masked before exp is taken. At strong decay u reaches hundreds, where a float32 difference would lose digits: sums are
taken in float64, and the differences too unless all of them are small.

The gradient of log_decay_r is the sum of everything that decays across r: a rectangle of rows t >= r and columns s < r.
It is summed as such. The usual shortcut (row sums minus column sums, then a reverse cumulative sum) subtracts large
numbers from each other and loses the small gradient that strong decay leaves.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.modes import doubled, may_look

_WEAK = 16.0  # up to this |u| a float32 difference is good to 1e-6 relative


class Decay(NamedTuple):
    """Decay factors of M chunks of C tokens; `read` and `residual` say with or without the token's own decay.

    read, residual: from the chunk's start to the read, to the residual. rest: from after token t to the chunk's end.
    total: over the whole chunk. reads, couples: [t, s] from after write s to the read and to the residual of t.
    """

    read: Float[Tensor, "M C"]
    rest: Float[Tensor, "M C"]
    total: Float[Tensor, " M"]
    reads: Float[Tensor, "M C C"]
    residual: Float[Tensor, "M C"] | None
    couples: Float[Tensor, "M C C"] | None

    def of_residual(self) -> tuple[Float[Tensor, "M C"], Float[Tensor, "M C C"]]:
        """residual and couples, for a rule that has them."""
        assert self.residual is not None, "decays was not asked for the residual's factors"
        assert self.couples is not None, "decays was not asked for the residual's factors"
        return self.residual, self.couples


def decays(log_decay: Float[Tensor, "M C"], read_before: bool, residual_before: bool | None) -> Decay:
    """All factors of a chunk; residual_before None leaves out what only regression rules need."""
    u = doubled(log_decay).cumsum(dim=-1)
    dtype = log_decay.dtype
    until = u.exp().to(dtype)
    before = torch.cat((torch.ones_like(until[:, :1]), until[:, :-1]), dim=-1)
    after_square = _between(u, dtype)
    before_square = _down(after_square) if read_before or residual_before else None
    reads = before_square if read_before else after_square
    assert reads is not None, "read_before asks for the square that it returns"
    residual = couples = None
    if residual_before is not None:
        residual = before if residual_before else until
        couples = before_square if residual_before else after_square.tril(-1)
    rest = (u[:, -1:] - u).exp().to(dtype)
    return Decay(before if read_before else until, rest, until[:, -1], reads, residual, couples)


def _between(u: Float[Tensor, "M C"], dtype: torch.dtype) -> Float[Tensor, "M C C"]:
    """exp(u_t - u_s) for s <= t, else 0."""
    if may_look(u) and bool((u[:, -1] > -_WEAK).all()):
        u = u.to(dtype)
    exponent = (u[:, :, None] - u[:, None, :]).to(dtype)
    hidden = torch.ones(u.shape[-1], u.shape[-1], dtype=torch.bool, device=u.device).triu(1)
    return exponent.masked_fill_(hidden, float("-inf")).exp_()


class Crossing:
    """Collects the products that decay inside M chunks and gives the gradient of log_decay."""

    def __init__(self, between: Float[Tensor, "M C C"], before: bool) -> None:
        """between[t, s]: what decays from after s up to t (`before`: up to t - 1)."""
        self.square = _up(between) if before else between
        self.since_start = torch.zeros_like(between[:, 0])

    def add_between(self, between: Float[Tensor, "M C C"], before: bool) -> None:
        self.square = self.square + (_up(between) if before else between)

    def add_from_start(self, value: Float[Tensor, "M C"], before: bool) -> None:
        """value[t] decays from the chunk's start up to t (`before`: up to t - 1)."""
        self.since_start = self.since_start + (_up(value) if before else value)

    def gradient(self, to_end: Float[Tensor, "M C"], whole: Float[Tensor, " M"]) -> Float[Tensor, "M C"]:
        """to_end[s] decays from after s to the chunk's end, `whole` over all of it."""
        grad = self.since_start.flip(-1).cumsum(-1).flip(-1) + whole[:, None]
        if to_end.shape[-1] > 1:
            written = self.square.cumsum(dim=-1)[:, 1:, :-1].tril()  # [M, t, r]: columns s < r, rows t >= r, r >= 1
            grad[:, 1:] += written.sum(dim=1) + to_end[:, :-1].cumsum(-1)
        return grad


def _up(rows: Tensor) -> Tensor:
    """Row t moved to t - 1: what decays up to t - 1 is what decays up to and with the token before."""
    return torch.cat((rows[:, 1:], torch.zeros_like(rows[:, :1])), dim=1)


def _down(rows: Tensor) -> Tensor:
    """Row t - 1 moved to t."""
    return torch.cat((torch.zeros_like(rows[:, :1]), rows[:, :-1]), dim=1)
