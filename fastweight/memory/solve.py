"""Regression rules with scalar gain, chunk by chunk: falcon-1, falcon-3, the delta rules (SPEC section 6, KERNELS 5.1).

Rows are (token, live pair of its window); with window 1 rows, pairs and tokens are the same. Per chunk with start state S:

    R = T (Y - residual .* X S)      T = (I + (X X^T .* couples) Diag(gain))^-1, strictly causal in the tokens
    U = gain .* R                    what each row writes
    O = (Q X^T .* reads) U + read .* (Q S)
    S' = total S + X^T (rest .* U)

couples, reads, rest decay from after a write; residual and read from the chunk's start (memory/decay.py). Nothing is
divided by a carry or by a gain, so both may be 0. Only the scan over S is serial: three products a chunk, each way.
The backward is written out (T^T appears once; the adjoint of T itself is never formed) and sums the gradient of
log_decay without cancellation. Saved: inputs, T, R and the chunk states.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastweight.memory.decay import Crossing, Decay, decays
from fastweight.memory.triangular import unit_lower_inverse
from fastweight.memory.window import Window


class _Rows(NamedTuple):
    """Per-row factors of M chunks: [M, CR, 1]. couples is [M, CR, CR]."""

    gain: Tensor
    residual: Tensor
    rest: Tensor
    couples: Tensor


def _rows(decay: Decay, gain: Tensor, window: Window) -> _Rows:
    assert decay.residual is not None and decay.couples is not None, "a regression rule has a residual"
    couples = decay.couples
    if window.size > 1:
        couples = couples.repeat_interleave(window.size, 1).repeat_interleave(window.size, 2)
    factors = window.row_gain(gain), window.row_tokens(decay.residual), window.row_tokens(decay.rest)
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
        n, N = q.shape[:2]
        Q, X, Y, g = (z.flatten(0, 1) for z in (q, x, y, gain))
        decay = decays(log_decay.flatten(0, 1), read_before, residual_before)
        rows = _rows(decay, g, window)
        system = window.square(torch.bmm(X, X.mT)) * rows.couples * rows.gain.mT
        T = unit_lower_inverse(system)
        residues, states, last = _scan(X, Y, T, rows, decay.total, S, window, n)
        U = residues * rows.gain
        reads = window.columns(torch.bmm(Q, X.mT)) * _spread_tokens(decay.reads, window)
        O = torch.bmm(reads, U).baddbmm_(Q * decay.read[..., None], states)
        ctx.save_for_backward(q, x, y, gain, log_decay, T, residues, states)
        ctx.window, ctx.before = window, (read_before, residual_before)
        return O.view(n, N, -1, y.shape[-1]), last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, y, gain, log_decay, T, R, S = ctx.saved_tensors
        window: Window = ctx.window
        read_before, residual_before = ctx.before
        n, N = q.shape[:2]
        Q, X, g = (z.flatten(0, 1) for z in (q, x, gain))
        dO = grads[0].reshape(n * N, *grads[0].shape[2:])
        decay = decays(log_decay.flatten(0, 1), read_before, residual_before)
        rows = _rows(decay, g, window)
        reads = _spread_tokens(decay.reads, window)
        P = window.columns(torch.bmm(Q, X.mT))

        # U through the outputs of its own chunk, then through the chunks after it.
        Qr = Q * decay.read[..., None]
        dU_read = torch.bmm((P * reads).mT, dO)
        dS_read = torch.bmm(Qr.mT, dO)
        dE, dNext, dS = _scan_back(X, T, rows, decay.total, dU_read, dS_read, grads[1], window, n)

        U = R * rows.gain
        dF = window.fold(dE * rows.residual).neg_()  # gradient of X S [M, J, V]
        dPU = torch.bmm(dO, U.mT).mul_(reads)
        coupled = torch.bmm(dE, R.mT).mul_(rows.couples)
        gram = window.square(torch.bmm(X, X.mT))
        dG = window.fold_square(coupled * rows.gain.mT)
        dP = window.fold_columns(dPU)
        dOS = torch.bmm(dO, S.mT)
        written = window.fold(U * rows.rest)
        dXS, dXU = torch.bmm(dF, S.mT), torch.bmm(written, dNext.mT)
        dQ = torch.bmm(dP, X).addcmul_(dOS, decay.read[..., None])
        dX = torch.bmm(dP.mT, Q).sub_(torch.bmm(dG + dG.mT, X)).add_(dXS).add_(dXU)
        dY = window.fold(dE)

        coupled.mul_(gram)
        to_end = (R * window.rows(torch.bmm(X, dNext))).sum(-1, keepdim=True) * rows.rest  # of gain, per row
        drow = (R * dU_read).sum(-1, keepdim=True) + to_end - coupled.sum(1)[..., None]
        crossing = Crossing(_fold_tokens(dPU.mul_(P), 1, window.size), read_before)
        between = _fold_tokens(coupled.mul_(rows.gain.mT), window.size, window.size)
        crossing.add_between(between.neg_(), residual_before)
        crossing.add_from_start((Q * dOS).sum(-1).mul_(decay.read), read_before)
        from_start = _from_start(X, dF, dXS, dE, S, rows, window)
        crossing.add_from_start(from_start, residual_before)
        whole = (S * dNext).sum((-2, -1)).mul_(decay.total)
        dlog = crossing.gradient((to_end * rows.gain).view(*g.shape, -1).sum(-1), whole)
        dgain = window.fold_gain(drow.squeeze(-1))
        shaped = (dQ.view_as(q), dX.view_as(x), dY.view_as(y), dgain.view_as(gain), dlog.view_as(gain))
        return *shaped, dS, None, None, None


def _spread_tokens(reads: Float[Tensor, "M C C"], window: Window) -> Float[Tensor, "M C CR"]:
    return reads if window.size == 1 else reads.repeat_interleave(window.size, dim=2)


def _fold_tokens(z: Tensor, rows: int, columns: int) -> Float[Tensor, "M C C"]:
    """Sums the rows and columns that belong to one token."""
    if rows == columns == 1:
        return z
    return z.view(len(z), z.shape[1] // rows, rows, z.shape[2] // columns, columns).sum((2, 4))


def _from_start(X: Tensor, dF: Tensor, dXS: Tensor, dE: Tensor, S: Tensor, rows: _Rows, window: Window) -> Tensor:
    """Gradient of log residual_t: minus residual .* (X S) . dE, summed over the rows of each token."""
    if window.size == 1:
        return (X * dXS).sum(-1)
    products = window.rows(torch.bmm(X, S)).mul_(dE).sum(-1, keepdim=True) * rows.residual
    return products.view(len(X), -1, window.size).sum(-1).neg_()


def _scan(
    X: Tensor, Y: Tensor, T: Tensor, rows: _Rows, total: Tensor, S: Tensor, window: Window, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The serial part: residues R of every chunk [M, CR, V], every start state [M, K, V], and the last state."""
    N = len(S)
    Yr = window.rows(Y)
    R, states = torch.empty_like(Yr), S.new_empty(n * N, *S.shape[1:])
    total = total.view(-1, 1, 1)
    write = rows.gain * rows.rest
    single = window.size == 1
    Xe, Xw = (X * rows.residual, (X * write).mT) if single else (X, X.mT)
    for i in range(n):
        at = slice(i * N, (i + 1) * N)
        states[at] = S
        if single:
            residue = torch.bmm(T[at], torch.baddbmm(Yr[at], Xe[at], S, alpha=-1), out=R[at])
            added = residue
        else:
            seen = window.rows(torch.bmm(X[at], S), i)
            residue = torch.bmm(T[at], torch.addcmul(Yr[at], seen, rows.residual[at], value=-1), out=R[at])
            added = window.fold(residue * write[at], i)
        S = torch.baddbmm(S * total[at], Xw[at], added)
    return R, states, S


def _scan_back(
    X: Tensor,
    T: Tensor,
    rows: _Rows,
    total: Tensor,
    dU_read: Tensor,
    dS_read: Tensor,
    dS: Tensor,
    window: Window,
    n: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The serial part backwards: dE (of Y - residual X S) [M, CR, V], of every end state, of the first start state."""
    N = len(dS)
    dE, ends = torch.empty_like(dU_read), torch.empty_like(dS_read)
    total = total.view(-1, 1, 1)
    TT = T.mT
    gained = dU_read * rows.gain
    write = rows.gain * rows.rest
    single = window.size == 1
    Xw, Xe = (X * write, (X * rows.residual).mT) if single else (X, X.mT)
    for i in reversed(range(n)):
        at = slice(i * N, (i + 1) * N)
        ends[at] = dS
        if single:
            dR = torch.baddbmm(gained[at], Xw[at], dS)
            back = torch.bmm(TT[at], dR, out=dE[at])
        else:
            dR = torch.addcmul(gained[at], window.rows(torch.bmm(X[at], dS), i), write[at])
            back = window.fold(torch.bmm(TT[at], dR, out=dE[at]) * rows.residual[at], i)
        dS = torch.baddbmm(torch.addcmul(dS_read[at], total[at], dS), Xe[at], back, alpha=-1)
    return dE, ends, dS
