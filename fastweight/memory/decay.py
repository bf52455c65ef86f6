"""Decay inside a chunk: factors that never exceed 1, and gradients that never cancel.

With u_t the sum of log_decay up to t inside the chunk, everything decays by exp(a_t - u_s) with s before t, where a is u
itself ("up to and with t") or u_{t-1} ("up to the token before"). Sums and differences are taken in float64: at strong
decay u reaches hundreds and float32 differences would lose digits. The exponent is masked before exp is taken.

The gradient of log_decay_r is the sum of everything that decays across r: a rectangle of rows t >= r and columns s < r.
It is summed as such. The usual shortcut (row sums minus column sums, then a reverse cumulative sum) subtracts large
numbers from each other and loses the small gradient that strong decay leaves.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


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


def decays(log_decay: Float[Tensor, "M C"], read_before: bool, residual_before: bool | None) -> Decay:
    """All factors of a chunk; residual_before None leaves out what only regression rules need."""
    u = log_decay.double().cumsum(dim=-1)
    before = torch.cat((torch.zeros_like(u[:, :1]), u[:, :-1]), dim=-1)
    read = before if read_before else u
    residual = None if residual_before is None else before if residual_before else u
    dtype = log_decay.dtype
    return Decay(
        read=read.exp().to(dtype),
        rest=(u[:, -1:] - u).exp().to(dtype),
        total=u[:, -1].exp().to(dtype),
        reads=_between(read, u, -1 if read_before else 0, dtype),
        residual=None if residual is None else residual.exp().to(dtype),
        couples=None if residual is None else _between(residual, u, -1, dtype),
    )


def _between(until: Tensor, u: Tensor, diagonal: int, dtype: torch.dtype) -> Tensor:
    """exp(until_t - u_s) on and below `diagonal`, 0 above."""
    exponent = (until[:, :, None] - u[:, None, :]).to(dtype)
    hidden = torch.ones(u.shape[-1], u.shape[-1], dtype=torch.bool, device=u.device).triu(diagonal + 1)
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
        C = to_end.shape[-1]
        written = self.square.cumsum(dim=-1)[:, :, :-1].tril(-1)  # [M, t, r-1]: columns s < r, rows t >= r
        grad = self.since_start.flip(-1).cumsum(-1).flip(-1) + whole[:, None]
        if C > 1:
            grad[:, 1:] += written.sum(dim=1) + to_end[:, :-1].cumsum(-1)
        return grad


def _up(rows: Tensor) -> Tensor:
    """Row t moved to t - 1: what decays up to t - 1 is what decays up to and with the token before."""
    return torch.cat((rows[:, 1:], torch.zeros_like(rows[:, :1])), dim=1)
