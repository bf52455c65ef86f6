"""Regression rules with a window, chunk by chunk: falcon-3 (SPEC section 6).

The unknowns are the residuals of the C R rows (token, pair of its window); rows of one token never couple. But all that
enters are J = C + R - 1 targets Y and predictions F = X S of pairs, so the solved system is folded once into maps
between pairs, and nothing of width K or V ever has C R rows:

    T  = (I + (gram .* couples) Diag(gain))^-1       over rows; row factors repeat over the rows of a token
    B  = T [ E | -Diag(residual) E ]                 rows of R = B [Y; F], E selects the pair of a row
    O  = A [Y; F] + read .* (Q S)                    A = (Q X^T E^T .* reads) Diag(gain) B        [C, 2J]
    S' = total S + X^T Z,   Z = D [Y; F]             D = E^T Diag(gain rest) B                    [J, 2J]

Serial are three products a chunk. The backward goes through the same maps. Saved: inputs, T, chunk states.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.backward import exact_backward
from fastweight.memory.decay import Crossing, decays
from fastweight.memory.modes import as_new, doubled
from fastweight.memory.slabs import flat, slabs
from fastweight.memory.triangular import unit_lower_inverse
from fastweight.memory.window import Band

LARGEST_PLAIN = 64  # rows of a system that is inverted in the dtype of its inputs


class Sliding(torch.autograd.Function):
    """(q, x, y, gain, log_decay, S) in chunk layout [n, N, ...] -> (o, last S). See the module for the equations."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "n N C K"],
        x: Float[Tensor, "n N J K"],
        y: Float[Tensor, "n N J V"],
        gain: Float[Tensor, "n N C"],
        log_decay: Float[Tensor, "n N C"],
        S: Float[Tensor, "N K V"],
        window: Band,
        read_before: bool,
        residual_before: bool,
    ) -> tuple[Tensor, Tensor]:
        o = y.new_empty(*q.shape[:3], y.shape[-1])
        states = S.new_empty(*q.shape[:2], *S.shape[1:])
        inverses = []
        for part in slabs(q):
            Q, X, Y, g, log, O, start = flat(part, q, x, y, gain, log_decay, o, states)
            maps = _maps(Q, X, g, log, window.part(part, len(S)), read_before, residual_before)
            F, S = _scan(X, Y, maps, S, start)
            torch.bmm(maps.A, torch.cat((Y, F), dim=1), out=O).baddbmm_(Q * maps.read, start)
            inverses.append(maps.T)
        ctx.save_for_backward(q, x, y, gain, log_decay, states, *inverses)
        ctx.window, ctx.before = window, (read_before, residual_before)
        return as_new(o), S

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, y, gain, log_decay, states, *inverses = ctx.saved_tensors
        do, dS = grads[0].contiguous(), grads[1]
        results = [torch.empty_like(z) for z in (q, x, y, gain, log_decay)]
        for part, T in zip(reversed(slabs(q)), reversed(inverses), strict=True):
            inputs = flat(part, q, x, y, gain, log_decay, states, do)
            window = ctx.window.part(part, len(dS))
            dS = _backward(inputs, T, flat(part, *results), dS, window, *ctx.before)
        return *results, dS, None, None, None


class _Maps(NamedTuple):
    """The folded system of M chunks and what its backward needs again; row factors are [M, CR, 1]."""

    T: Float[Tensor, "M CR CR"]
    B: Float[Tensor, "M CR 2J"]
    A: Float[Tensor, "M C 2J"]
    D: Float[Tensor, "M J 2J"]
    reads: Float[Tensor, "M C CR"]
    couples: Float[Tensor, "M CR CR"]
    gram: Float[Tensor, "M CR CR"]
    read: Float[Tensor, "M C 1"]
    gain: Tensor
    residual: Tensor
    rest: Tensor
    total: Float[Tensor, "M 1 1"]


def _maps(
    Q: Tensor,
    X: Tensor,
    g: Tensor,
    log_decay: Tensor,
    window: Band,
    read_before: bool,
    residual_before: bool,
    T: Tensor | None = None,
) -> _Maps:
    """All of a chunk that does not depend on the state, for M chunks at once."""
    decay = decays(log_decay, read_before, residual_before)
    residual, couples = decay.of_residual()
    R = window.size
    gain, residual, rest = (z.repeat_interleave(R, dim=1)[..., None] for z in (g, residual, decay.rest))
    couples = couples.repeat_interleave(R, dim=1).repeat_interleave(R, dim=2)
    gram = window.columns(window.rows(torch.bmm(X, X.mT)))
    if T is None:
        T = _inverse((gram * couples).mul_(gain.mT))
    B = torch.cat((window.fold_columns(T), window.fold_columns(T * residual.mT).neg_()), dim=-1)
    reads = decay.reads.repeat_interleave(R, dim=2)
    A = torch.bmm((window.columns(torch.bmm(Q, X.mT)) * reads).mul_(gain.mT), B)
    D = window.fold(B * (gain * rest))
    total = decay.total.view(-1, 1, 1)
    return _Maps(T, B, A, D, reads, couples, gram, decay.read[..., None], gain, residual, rest, total)


def _inverse(L: Float[Tensor, "M CR CR"]) -> Float[Tensor, "M CR CR"]:
    """(I + L)^-1; of a system larger than the default chunk's in float64, where the errors of long sums would show."""
    if L.shape[-1] <= LARGEST_PLAIN:
        return unit_lower_inverse(L)
    return unit_lower_inverse(doubled(L)).to(L.dtype)


def _scan(X: Tensor, Y: Tensor, maps: _Maps, S: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """The serial part: fills the start states, returns the predictions F [M, J, V] and the last state."""
    N, J = len(S), X.shape[1]
    Z, F = torch.bmm(maps.D[..., :J], Y), torch.empty_like(Y)
    D, XT = maps.D[..., J:], X.mT
    for i in range(len(X) // N):
        at = slice(i * N, (i + 1) * N)
        states[at] = S
        torch.bmm(X[at], S, out=F[at])
        S = torch.baddbmm(S * maps.total[at], XT[at], torch.baddbmm(Z[at], D[at], F[at]))
    return F, S


def _backward(
    inputs: list[Tensor],
    T: Tensor,
    results: list[Tensor],
    dS: Tensor,
    window: Band,
    read_before: bool,
    residual_before: bool,
) -> Tensor:
    """Some chunks in a row backwards: fills `results`, returns the gradient of their start state."""
    Q, X, Y, g, log_decay, S, dO = inputs
    dQ, dX, dY, dgain, dlog = results
    maps = _maps(Q, X, g, log_decay, window, read_before, residual_before, T)
    N, J, XT = len(dS), X.shape[1], X.mT

    dZ, dNext = torch.empty_like(Y), torch.bmm((Q * maps.read).mT, dO)
    dF = torch.bmm(maps.A[..., J:].mT, dO)  # without what comes from later chunks, then with it
    DT = maps.D[..., J:].mT
    for i in reversed(range(len(X) // N)):
        at = slice(i * N, (i + 1) * N)
        torch.bmm(X[at], dS, out=dZ[at])
        dF[at].baddbmm_(DT[at], dZ[at])
        before = torch.baddbmm(torch.addcmul(dNext[at], maps.total[at], dS), XT[at], dF[at])
        dNext[at] = dS
        dS = before

    pairs = torch.cat((Y, torch.bmm(X, S)), dim=1)  # [Y; F]
    dA, dD = torch.bmm(dO, pairs.mT), torch.bmm(dZ, pairs.mT)
    torch.bmm(maps.A[..., :J].mT, dO, out=dY).baddbmm_(maps.D[..., :J].mT, dZ)
    dOS = torch.bmm(dO, S.mT)
    dP, dG, between, row_grads = _maps_backward(Q, X, dA, dD, maps, window)
    torch.bmm(dP, X, out=dQ).addcmul_(dOS, maps.read)
    torch.bmm(dP.mT, Q, out=dX).baddbmm_(dG + dG.mT, X).baddbmm_(dF, S.mT)
    dX.baddbmm_(torch.bmm(maps.D, pairs), dNext.mT)

    dgain_row, dresidual_row, dwrite_row = row_grads
    per_token = (*g.shape, window.size)
    torch.sum((dgain_row + dwrite_row * maps.rest).view(per_token), dim=-1, out=dgain)
    crossing = Crossing(between[0], read_before)
    crossing.add_between(between[1], residual_before)
    crossing.add_from_start((Q * dOS).sum(-1).mul_(maps.read[..., 0]), read_before)
    crossing.add_from_start((dresidual_row * maps.residual).view(per_token).sum(-1), residual_before)
    whole = torch.linalg.vecdot(S.flatten(1), dNext.flatten(1)).mul_(maps.total.flatten())
    dlog.copy_(crossing.gradient((dwrite_row * maps.gain * maps.rest).view(per_token).sum(-1), whole))
    return dS


def _maps_backward(
    Q: Tensor, X: Tensor, dA: Tensor, dD: Tensor, maps: _Maps, window: Band
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Through the folded system: gradients of Q X^T [C, J] and X X^T [J, J], what decays between tokens (to the reads
    and to the residuals, [C, C] each), and per row [M, CR, 1] the gradients of gain, residual and gain rest."""
    M, C = Q.shape[:2]
    R, J = window.size, X.shape[1]
    P = window.columns(torch.bmm(Q, X.mT))
    dD_rows = window.rows(dD)
    weight = (P * maps.reads).mul_(maps.gain.mT)
    dB = torch.baddbmm(dD_rows * (maps.gain * maps.rest), weight.mT, dA)
    dwrite = (dD_rows * maps.B).sum(-1, keepdim=True)
    dweight = torch.bmm(dA, maps.B.mT).mul_(maps.reads)  # of P Diag(gain)
    lead = torch.bmm(maps.T.mT, dB)  # of [E | -residual E]
    dresidual = -(lead[..., J:] * window.select).sum(-1, keepdim=True)
    coupled = torch.bmm(lead, maps.B.mT).mul_(maps.couples)  # minus the gradient of gram Diag(gain)
    dG = window.fold(window.fold_columns(coupled * maps.gain.mT)).neg_()
    dP = window.fold_columns(dweight * maps.gain.mT)
    coupled.mul_(maps.gram)
    dweight.mul_(P)
    dgain = (dweight.sum(1) - coupled.sum(1))[..., None]
    to_reads = dweight.mul_(maps.gain.mT).view(M, C, C, R).sum(-1)
    to_residuals = coupled.mul_(maps.gain.mT).view(M, C, R, C, R).sum((2, 4)).neg_()
    return dP, dG, (to_reads, to_residuals), (dgain, dresidual, dwrite)
