"""Regression rules with scalar gain and window 1, chunk by chunk: falcon-1 and the delta rules (SPEC section 6).

Per chunk with start state S:

    R  = T (Y - residual .* X S)     T = (I + (X X^T .* couples) Diag(gain))^-1
    O  = (Q X^T .* reads) (gain .* R) + read .* (Q S)
    S' = total S + X^T (write .* R)     write = rest gain

couples, reads, rest decay from after a write; residual and read from the chunk's start (memory/decay.py). Nothing is
divided by a carry or by a gain, so both may be 0. Only the scan over S is serial: three products a chunk, each way.
The backward is written out (T^T appears once; the adjoint of T itself is never formed) and sums the gradient of
log_decay without cancellation. Saved: inputs, T, R and the chunk states; what is C x C otherwise lives for one slab.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.backward import exact_backward
from fastweight.memory.decay import Crossing, decays
from fastweight.memory.modes import as_new
from fastweight.memory.slabs import flat, slabs
from fastweight.memory.triangular import unit_lower_inverse


class Solve(torch.autograd.Function):
    """(q, x, y, gain, log_decay, S) in chunk layout [n, N, ...] -> (o, last S). See the module for the equations."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "n N C K"],
        x: Float[Tensor, "n N C K"],
        y: Float[Tensor, "n N C V"],
        gain: Float[Tensor, "n N C"],
        log_decay: Float[Tensor, "n N C"],
        S: Float[Tensor, "N K V"],
        read_before: bool,
        residual_before: bool,
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(y)
        kept: list[Tensor] = []
        for part in slabs(q):
            inputs = flat(part, q, x, y, gain, log_decay, o)
            T, R, states, S = _forward(inputs, S, read_before, residual_before)
            kept += [T, R, states]
        ctx.save_for_backward(q, x, gain, log_decay, *kept)
        ctx.before = read_before, residual_before
        return as_new(o), S

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, gain, log_decay, *kept = ctx.saved_tensors
        do, dS = grads[0].contiguous(), grads[1]
        results = [torch.empty_like(z) for z in (q, x, do, gain, log_decay)]
        for i, part in reversed(list(enumerate(slabs(q)))):
            inputs = flat(part, q, x, gain, log_decay, do)
            dS = _backward(inputs, kept[3 * i : 3 * i + 3], flat(part, *results), dS, *ctx.before)
        return *results, dS, None, None


def _forward(
    inputs: list[Tensor], S: Tensor, read_before: bool, residual_before: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some chunks in a row: writes O, returns T, R, the start states and the last one."""
    Q, X, Y, g, log_decay, O = inputs
    decay = decays(log_decay, read_before, residual_before)
    residual, couples = decay.of_residual()
    T = unit_lower_inverse(torch.bmm(X, X.mT).mul_(couples).mul_(g[:, None]))
    R, states = torch.empty_like(Y), S.new_empty(len(X), *S.shape[1:])
    seen, written = X * residual[..., None], (X * (g * decay.rest)[..., None]).mT
    N, total = len(S), decay.total.view(-1, 1, 1)
    for i in range(len(X) // N):
        at = slice(i * N, (i + 1) * N)
        states[at] = S
        torch.bmm(T[at], torch.baddbmm(Y[at], seen[at], S, alpha=-1), out=R[at])
        S = torch.baddbmm(S * total[at], written[at], R[at])
    torch.bmm(torch.bmm(Q, X.mT).mul_(decay.reads), R * g[..., None], out=O)
    O.baddbmm_(Q * decay.read[..., None], states)
    return T, R, states, S


def _backward(
    inputs: list[Tensor],
    kept: list[Tensor],
    results: list[Tensor],
    dS: Tensor,
    read_before: bool,
    residual_before: bool,
) -> Tensor:
    """The same chunks backwards: fills `results`, returns the gradient of their start state."""
    Q, X, g, log_decay, dO = inputs
    T, R, S = kept
    dQ, dX, dY, dgain, dlog = results
    decay = decays(log_decay, read_before, residual_before)
    residual, couples = decay.of_residual()
    P = torch.bmm(Q, X.mT)
    gain, read, residual, write = (z[..., None] for z in (g, decay.read, residual, g * decay.rest))

    # U = gain .* R through the outputs of its own chunk, then through the chunks after it.
    dU = torch.bmm((P * decay.reads).mT, dO)
    dR_read, dNext = dU * gain, torch.bmm((Q * read).mT, dO)
    seen, written, TT = (X * residual).mT, X * write, T.mT
    N, total = len(dS), decay.total.view(-1, 1, 1)
    for i in reversed(range(len(X) // N)):
        at = slice(i * N, (i + 1) * N)
        # dY is the gradient of Y - residual .* X S.
        torch.bmm(TT[at], torch.baddbmm(dR_read[at], written[at], dS), out=dY[at])
        before = torch.baddbmm(torch.addcmul(dNext[at], total[at], dS), seen[at], dY[at], alpha=-1)
        dNext[at] = dS
        dS = before

    dPU = torch.bmm(dO, (R * gain).mT).mul_(decay.reads)
    coupled = torch.bmm(dY, R.mT).mul_(couples)  # minus the gradient of (X X^T) Diag(gain)
    dG = coupled * g[:, None]
    dOS, dYS, RdS = torch.bmm(dO, S.mT), torch.bmm(dY, S.mT), torch.bmm(R, dNext.mT)
    torch.bmm(dPU, X, out=dQ).addcmul_(dOS, read)
    torch.bmm(dPU.mT, Q, out=dX).baddbmm_(dG + dG.mT, X, alpha=-1)
    dX.addcmul_(dYS, residual, value=-1).addcmul_(RdS, write)

    coupled.mul_(torch.bmm(X, X.mT))
    to_end = (X * RdS).sum(-1).mul_(decay.rest)  # per unit of gain
    torch.sub((R * dU).sum(-1).add_(to_end), coupled.sum(1), out=dgain)
    crossing = Crossing(dPU.mul_(P), read_before)
    crossing.add_between(coupled.mul_(g[:, None]).neg_(), residual_before)
    crossing.add_from_start((Q * dOS).sum(-1).mul_(decay.read), read_before)
    crossing.add_from_start((X * dYS).sum(-1).mul_(residual[..., 0]).neg_(), residual_before)
    whole = torch.linalg.vecdot(S.flatten(1), dNext.flatten(1)).mul_(decay.total)
    dlog.copy_(crossing.gradient(to_end * g, whole))
    return dS
