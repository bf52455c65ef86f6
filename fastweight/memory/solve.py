"""Regression rules with scalar gain, chunk by chunk: falcon-1, falcon-3, the delta rules (SPEC section 6, KERNELS 5.1).

Rows are (token, live pair of its window); with window 1 rows, pairs and tokens are the same. Per chunk with start state S:

    R = T (Y - residual .* X S)      T = (I + (X X^T .* couples) Diag(gain))^-1, strictly causal in the tokens
    U = gain .* R                    what each row writes
    O = (Q X^T .* reads) U + read .* (Q S)
    S' = total S + X^T (rest .* U)

couples, reads, rest decay from after a write; residual and read from the chunk's start (memory/decay.py). Nothing is
divided by a carry or by a gain, so both may be 0. Only the scan over S is serial: three products a chunk, each way.
The backward is written out (T^T appears once; the adjoint of T itself is never formed) and sums the gradient of
log_decay without cancellation. Saved: inputs, T, R and the chunk states; what is C x C otherwise lives for one slab.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweight.memory.decay import Crossing, Decay, decays
from fastweight.memory.slabs import flat, slabs
from fastweight.memory.triangular import unit_lower_inverse
from fastweight.memory.window import Window


class _Rows(NamedTuple):
    """Per-row factors of M chunks [M, CR, 1], and the decay between rows [M, CR, CR]."""

    gain: Tensor
    residual: Tensor
    rest: Tensor
    write: Tensor
    couples: Tensor


def _rows(decay: Decay, gain: Tensor, window: Window) -> _Rows:
    assert decay.residual is not None and decay.couples is not None, "a regression rule has a residual"
    couples = decay.couples
    if window.size > 1:
        couples = couples.repeat_interleave(window.size, 1).repeat_interleave(window.size, 2)
    row_gain, rest = window.row_gain(gain), window.row_tokens(decay.rest)
    factors = row_gain, window.row_tokens(decay.residual), rest, row_gain * rest
    return _Rows(*(factor[..., None] for factor in factors), couples)


class Solve(torch.autograd.Function):
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
        residual_before: bool,
    ) -> tuple[Tensor, Tensor]:
        o = y.new_empty(*q.shape[:3], y.shape[-1])
        kept: list[Tensor] = []
        for part in slabs(q):
            inputs = flat(part, q, x, y, gain, log_decay, o)
            *saved, S = _forward(*inputs, S, window.part(part, len(S)), read_before, residual_before)
            kept += saved
        ctx.save_for_backward(q, x, gain, log_decay, *kept)
        ctx.window, ctx.before = window, (read_before, residual_before)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, gain, log_decay, *kept = ctx.saved_tensors
        do, dS = grads[0].contiguous(), grads[1]
        dq, dx, dgain, dlog = (torch.empty_like(z) for z in (q, x, gain, log_decay))
        dy = x.new_empty(*x.shape[:3], do.shape[-1])
        for i, part in reversed(list(enumerate(slabs(q)))):
            inputs = flat(part, q, x, gain, log_decay, do)
            results = flat(part, dq, dx, dy, dgain, dlog)
            window = ctx.window.part(part, len(dS))
            dS = _backward(inputs, kept[3 * i : 3 * i + 3], results, dS, window, *ctx.before)
        return dq, dx, dy, dgain, dlog, dS, None, None, None


def _forward(
    Q: Tensor,
    X: Tensor,
    Y: Tensor,
    g: Tensor,
    log_decay: Tensor,
    O: Tensor,
    S: Tensor,
    window: Window,
    read_before: bool,
    residual_before: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some chunks in a row: writes O, returns T, R, the start states and the last one."""
    decay = decays(log_decay, read_before, residual_before)
    rows = _rows(decay, g, window)
    gram = window.square(torch.bmm(X, X.mT))
    T = unit_lower_inverse(gram.mul_(rows.couples).mul_(rows.gain.mT))
    R, states, last = _scan(X, Y, T, rows, decay.total, S, window)
    reads = window.columns(torch.bmm(Q, X.mT)).mul_(_spread_tokens(decay.reads, window))
    torch.bmm(reads, R * rows.gain, out=O)
    O.baddbmm_(Q * decay.read[..., None], states)
    return T, R, states, last


def _backward(
    inputs: list[Tensor],
    kept: list[Tensor],
    results: list[Tensor],
    dS: Tensor,
    window: Window,
    read_before: bool,
    residual_before: bool,
) -> Tensor:
    """The same chunks backwards: fills `results`, returns the gradient of their start state."""
    Q, X, g, log_decay, dO = inputs
    T, R, S = kept
    dQ, dX, dY, dgain, dlog = results
    decay = decays(log_decay, read_before, residual_before)
    rows = _rows(decay, g, window)
    reads = _spread_tokens(decay.reads, window)
    P = window.columns(torch.bmm(Q, X.mT))

    # U through the outputs of its own chunk, then through the chunks after it.
    dU_read = torch.bmm((P * reads).mT, dO)
    dS_read = torch.bmm((Q * decay.read[..., None]).mT, dO)
    dE, dNext, dS = _scan_back(X, T, rows, decay.total, dU_read, dS_read, dS, window)

    U = R * rows.gain
    dPU = torch.bmm(dO, U.mT).mul_(reads)
    coupled = torch.bmm(dE, R.mT).mul_(rows.couples)  # minus the gradient of (X X^T) Diag(gain), decayed
    dG = window.fold_square(coupled * rows.gain.mT)
    dP = window.fold_columns(dPU)
    dOS = torch.bmm(dO, S.mT)
    dXS = torch.bmm(window.fold(dE * rows.residual), S.mT).neg_()
    dXU = torch.bmm(window.fold(R * rows.write), dNext.mT)
    torch.bmm(dP, X, out=dQ).addcmul_(dOS, decay.read[..., None])
    torch.bmm(dP.mT, Q, out=dX).sub_(torch.bmm(dG + dG.mT, X)).add_(dXS).add_(dXU)
    dY.copy_(window.fold(dE))

    coupled.mul_(window.square(torch.bmm(X, X.mT)))
    to_end = (R * window.rows(torch.bmm(X, dNext))).sum(-1, keepdim=True).mul_(rows.rest)  # per unit of gain
    drow = (R * dU_read).sum(-1, keepdim=True).add_(to_end).sub_(coupled.sum(1)[..., None])
    dgain.copy_(window.fold_gain(drow.squeeze(-1)))
    crossing = Crossing(_fold_tokens(dPU.mul_(P), 1, window.size), read_before)
    between = _fold_tokens(coupled.mul_(rows.gain.mT), window.size, window.size)
    crossing.add_between(between.neg_(), residual_before)
    crossing.add_from_start((Q * dOS).sum(-1).mul_(decay.read), read_before)
    crossing.add_from_start(_from_start(X, dXS, dE, S, rows, window), residual_before)
    whole = torch.linalg.vecdot(S.flatten(1), dNext.flatten(1)).mul_(decay.total)
    dlog.copy_(crossing.gradient((to_end * rows.gain).view(*g.shape, -1).sum(-1), whole))
    return dS


def _spread_tokens(reads: Float[Tensor, "M C C"], window: Window) -> Float[Tensor, "M C CR"]:
    return reads if window.size == 1 else reads.repeat_interleave(window.size, dim=2)


def _fold_tokens(z: Tensor, rows: int, columns: int) -> Float[Tensor, "M C C"]:
    """Sums the rows and columns that belong to one token."""
    if rows == columns == 1:
        return z
    return z.view(len(z), z.shape[1] // rows, rows, z.shape[2] // columns, columns).sum((2, 4))


def _from_start(X: Tensor, dXS: Tensor, dE: Tensor, S: Tensor, rows: _Rows, window: Window) -> Tensor:
    """Gradient of log residual_t: minus residual .* (X S) . dE, summed over the rows of each token."""
    if window.size == 1:
        return (X * dXS).sum(-1)
    products = window.rows(torch.bmm(X, S)).mul_(dE).sum(-1, keepdim=True).mul_(rows.residual)
    return products.view(len(X), -1, window.size).sum(-1).neg_()


def _scan(
    X: Tensor, Y: Tensor, T: Tensor, rows: _Rows, total: Tensor, S: Tensor, window: Window
) -> tuple[Tensor, Tensor, Tensor]:
    """The serial part: residues R of every chunk [M, CR, V], every start state [M, K, V], and the last state."""
    N = len(S)
    Yr = window.rows(Y)
    R, states = torch.empty_like(Yr), S.new_empty(len(X), *S.shape[1:])
    total = total.view(-1, 1, 1)
    single = window.size == 1
    Xe, Xw = (X * rows.residual, (X * rows.write).mT) if single else (X, X.mT)
    for i in range(len(X) // N):
        at = slice(i * N, (i + 1) * N)
        states[at] = S
        if single:
            added = torch.bmm(T[at], torch.baddbmm(Yr[at], Xe[at], S, alpha=-1), out=R[at])
        else:
            seen = window.rows(torch.bmm(X[at], S), i)
            torch.bmm(T[at], torch.addcmul(Yr[at], seen, rows.residual[at], value=-1), out=R[at])
            added = window.fold(R[at] * rows.write[at], i)
        S = torch.baddbmm(S * total[at], Xw[at], added)
    return R, states, S


def _scan_back(
    X: Tensor, T: Tensor, rows: _Rows, total: Tensor, dU_read: Tensor, dS_read: Tensor, dS: Tensor, window: Window
) -> tuple[Tensor, Tensor, Tensor]:
    """The serial part backwards: dE (of Y - residual X S) [M, CR, V], of every end state, of the first start state."""
    N = len(dS)
    dE, ends = torch.empty_like(dU_read), torch.empty_like(dS_read)
    total = total.view(-1, 1, 1)
    TT = T.mT
    gained = dU_read * rows.gain
    single = window.size == 1
    Xw, Xe = (X * rows.write, (X * rows.residual).mT) if single else (X, X.mT)
    for i in reversed(range(len(X) // N)):
        at = slice(i * N, (i + 1) * N)
        ends[at] = dS
        if single:
            back = torch.bmm(TT[at], torch.baddbmm(gained[at], Xw[at], dS), out=dE[at])
        else:
            dR = torch.addcmul(gained[at], window.rows(torch.bmm(X[at], dS), i), rows.write[at])
            back = window.fold(torch.bmm(TT[at], dR, out=dE[at]) * rows.residual[at], i)
        dS = torch.baddbmm(torch.addcmul(dS_read[at], total[at], dS), Xe[at], back, alpha=-1)
    return dE, ends, dS
