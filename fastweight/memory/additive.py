"""Inner-product rules with scalar gain, chunk by chunk: falcon-1a, falcon-3a, linear attention (SPEC section 6).

Per chunk with start state S (all M chunks at once but for the scan over S itself):

    W[t, j] = sum of reads[t, s] gain_s over the tokens s with pair j in their window
    O       = (Q X^T .* W) Y + read .* (Q S)
    S'      = total S + X^T (c .* Y)        c_j = sum of rest_s gain_s over the same tokens

Hand-written backward: it saves the inputs and the chunk states (K V / C numbers a token and head) and nothing C x C.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweight.memory.decay import Crossing, decays
from fastweight.memory.window import Window


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
        window: Window,
        read_before: bool,
    ) -> tuple[Tensor, Tensor]:
        n, N = q.shape[:2]
        Q, X, Y, g = (z.flatten(0, 1) for z in (q, x, y, gain))
        decay = decays(log_decay.flatten(0, 1), read_before, None)
        W = window.spread(decay.reads * g[:, None])
        c = window.spread((decay.rest * g)[:, None])[:, 0]
        added = torch.bmm((X * c[..., None]).mT, Y).unflatten(0, (n, N))
        states, last = _scan(added, decay.total.view(n, N, 1, 1), S)
        O = torch.bmm(torch.bmm(Q, X.mT).mul_(W), Y)
        O.baddbmm_(Q * decay.read[..., None], states.flatten(0, 1))
        ctx.save_for_backward(q, x, y, gain, log_decay, states)
        ctx.window, ctx.read_before = window, read_before
        return O.view(n, N, -1, y.shape[-1]), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, y, gain, log_decay, states = ctx.saved_tensors
        window: Window = ctx.window
        n, N = q.shape[:2]
        Q, X, Y, g = (z.flatten(0, 1) for z in (q, x, y, gain))
        dO, S = grads[0].reshape(n * N, *grads[0].shape[2:]), states.flatten(0, 1)
        decay = decays(log_decay.flatten(0, 1), ctx.read_before, None)
        weight = decay.reads * g[:, None]
        W = window.spread(weight)
        c = window.spread((decay.rest * g)[:, None])[:, 0]
        P = torch.bmm(Q, X.mT)

        dS_read = torch.bmm((Q * decay.read[..., None]).mT, dO).unflatten(0, (n, N))
        dstates, dS = _scan_back(dS_read, decay.total.view(n, N, 1, 1), grads[1])
        dNext = dstates.flatten(0, 1)  # gradient of each chunk's end state

        dOS = torch.bmm(dO, S.mT)
        dXc = torch.bmm(Y, dNext.mT)  # gradient of c .* x [M, J, K]
        dPW = torch.bmm(dO, Y.mT)
        dP = dPW * W
        dQ = torch.bmm(dP, X).addcmul_(dOS, decay.read[..., None])
        dX = torch.bmm(dP.mT, Q).addcmul_(dXc, c[..., None])
        dY = torch.bmm(P.mul(W).mT, dO).baddbmm_(X * c[..., None], dNext)
        dweight = window.gather(dPW.mul_(P))
        drest = window.gather((X * dXc).sum(-1)[:, None])[:, 0]  # gradient of rest_s gain_s
        dgain = (dweight * decay.reads).sum(1).addcmul_(drest, decay.rest)

        crossing = Crossing(dweight.mul_(weight), ctx.read_before)
        crossing.add_from_start((Q * dOS).sum(-1).mul_(decay.read), ctx.read_before)
        whole = (S * dNext).sum((-2, -1)).mul_(decay.total)
        dlog = crossing.gradient(drest * decay.rest * g, whole)
        shaped = (dQ.view_as(q), dX.view_as(x), dY.view_as(y), dgain.view_as(gain), dlog.view_as(gain))
        return *shaped, dS, None, None


def _scan(added: Tensor, total: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """S_{i+1} = total_i S_i + added_i: every start state, and the last one."""
    states = torch.empty_like(added)
    for i in range(len(added)):
        states[i] = S
        S = torch.addcmul(added[i], total[i], S)
    return states, S


def _scan_back(added: Tensor, total: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
    """The same backwards in time: the gradient of every chunk's end state, and of the first start state."""
    ends = torch.empty_like(added)
    for i in reversed(range(len(added))):
        ends[i] = dS
        dS = torch.addcmul(added[i], total[i], dS)
    return ends, dS
