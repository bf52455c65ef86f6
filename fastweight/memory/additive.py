"""Inner-product rules with scalar gain, chunk by chunk: falcon-1a, falcon-3a, linear attention (SPEC section 6).

Per chunk with start state S:

    W[t, j] = sum of reads[t, s] gain_s over the tokens s with pair j in their window
    O       = (Q X^T .* W) Y + read .* (Q S)
    S'      = total S + X^T (c .* Y)        c_j = sum of rest_s gain_s over the same tokens

Hand-written backward: it saves the inputs and the chunk states (K V / C numbers a token and head) and nothing C x C.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.backward import exact_backward
from fastweight.memory.decay import Crossing, decays
from fastweight.memory.modes import as_new
from fastweight.memory.slabs import flat, slabs
from fastweight.memory.window import Band


class Additive(torch.autograd.Function):
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
        window: Band | None,
        read_before: bool,
    ) -> tuple[Tensor, Tensor]:
        o = y.new_empty(*q.shape[:3], y.shape[-1])
        states = S.new_empty(*q.shape[:2], *S.shape[1:])
        for part in slabs(q):
            inputs = flat(part, q, x, y, gain, log_decay, o, states)
            S = _forward(inputs, S, window and window.part(part, len(S)), read_before)
        ctx.save_for_backward(q, x, y, gain, log_decay, states)
        ctx.window, ctx.read_before = window, read_before
        return as_new(o), S

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, y, gain, log_decay, states = ctx.saved_tensors
        do, dS = grads[0].contiguous(), grads[1]
        results = [torch.empty_like(z) for z in (q, x, y, gain, log_decay)]
        for part in reversed(slabs(q)):
            inputs = flat(part, q, x, y, gain, log_decay, states, do)
            window = ctx.window and ctx.window.part(part, len(dS))
            dS = _backward(inputs, flat(part, *results), dS, window, ctx.read_before)
        return *results, dS, None, None


def _forward(inputs: list[Tensor], S: Tensor, window: Band | None, read_before: bool) -> Tensor:
    """Some chunks in a row: writes O and the start states, returns the last state."""
    Q, X, Y, g, log_decay, O, states = inputs
    decay = decays(log_decay, read_before, None)
    c = _spread((decay.rest * g)[:, None], window).mT  # [M, J, 1]
    added = torch.bmm((X * c).mT, Y)
    N, total = len(S), decay.total.view(-1, 1, 1)
    for i in range(len(X) // N):
        at = slice(i * N, (i + 1) * N)
        states[at] = S
        S = torch.addcmul(added[at], total[at], S)
    W = _spread(decay.reads * g[:, None], window)
    torch.bmm(torch.bmm(Q, X.mT).mul_(W), Y, out=O)
    O.baddbmm_(Q * decay.read[..., None], states)
    return S


def _backward(
    inputs: list[Tensor], results: list[Tensor], dS: Tensor, window: Band | None, read_before: bool
) -> Tensor:
    """The same chunks backwards: fills `results`, returns the gradient of their start state."""
    Q, X, Y, g, log_decay, S, dO = inputs
    dQ, dX, dY, dgain, dlog = results
    decay = decays(log_decay, read_before, None)
    weight = decay.reads * g[:, None]
    W = _spread(weight, window)
    c = _spread((decay.rest * g)[:, None], window).mT
    P = torch.bmm(Q, X.mT)

    dNext = torch.bmm((Q * decay.read[..., None]).mT, dO)  # turned into the gradient of each chunk's end state
    N, total = len(dS), decay.total.view(-1, 1, 1)
    for i in reversed(range(len(X) // N)):
        at = slice(i * N, (i + 1) * N)
        before = torch.addcmul(dNext[at], total[at], dS)
        dNext[at] = dS
        dS = before

    dOS = torch.bmm(dO, S.mT)
    dXc = torch.bmm(Y, dNext.mT)  # gradient of c .* x [M, J, K]
    dPW = torch.bmm(dO, Y.mT)
    dP = dPW * W
    torch.bmm(dP, X, out=dQ).addcmul_(dOS, decay.read[..., None])
    torch.bmm(dP.mT, Q, out=dX).addcmul_(dXc, c)
    dweight = _gather(dPW.mul_(P), window)
    torch.bmm(P.mul_(W).mT, dO, out=dY).baddbmm_(X * c, dNext)
    drest = _gather((X * dXc).sum(-1)[:, None], window)[:, 0]  # gradient of rest_s gain_s
    torch.addcmul((dweight * decay.reads).sum(1), drest, decay.rest, out=dgain)

    crossing = Crossing(dweight.mul_(weight), read_before)
    crossing.add_from_start((Q * dOS).sum(-1).mul_(decay.read), read_before)
    whole = torch.linalg.vecdot(S.flatten(1), dNext.flatten(1)).mul_(decay.total)
    dlog.copy_(crossing.gradient(drest * decay.rest * g, whole))
    return dS


def _spread(w: Float[Tensor, "M D C"], window: Band | None) -> Float[Tensor, "M D J"]:
    """From tokens to the pairs of their windows."""
    return w if window is None else window.spread(w)


def _gather(w: Float[Tensor, "M D J"], window: Band | None) -> Float[Tensor, "M D C"]:
    return w if window is None else window.gather(w)
