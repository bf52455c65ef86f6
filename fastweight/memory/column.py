"""Rules with a gain per value column, falcon-2 and falcon-2a: substitution on the shared Gram matrix (SPEC section 6).

Every column has its own decay, so nothing of size C x C can be inverted once for all. But columns couple through the
one matrix X X^T only: inside a sub-block of up to SUB tokens the recurrence is run as it stands, on vectors over all
blocks, heads and columns at once,

    r_t = y_t - residual_t .* (X S)_t - sum_{s<t} G_ts z_s      z_s: what token s wrote, decayed up to t - 1
    z_s <- carry_t .* z_s,   z_t = gain_t .* r_t,   o_t = read_t .* (Q S)_t + sum_{s<=t} P_ts z_s

No factor exceeds 1 and nothing is divided. For chunks of one sub-block (the default) the map from right-hand sides to r
is tabulated per column for all chunks together, and only three small products a chunk stay serial. Longer chunks, the
masked form among them, pass what a sub-block wrote to the rows after it through G and P, never through a state.
The backward is the same recurrence run in reverse; the gradient of each carry is summed where it acts.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.memory.backward import exact_backward
from fastweight.memory.modes import as_new
from fastweight.memory.slabs import flat, slabs
from fastweight.memory.writes import Residual

SUB = 8


def column_block(
    q: Float[Tensor, "n N C K"],
    x: Float[Tensor, "n N C K"],
    y: Float[Tensor, "n N C V"],
    gain: Float[Tensor, "n N C V"],
    log_decay: Float[Tensor, "n N C V"],
    S: Float[Tensor, "N K V"],
    read_before: bool,
    residual: Residual,
) -> tuple[Float[Tensor, "n N C V"], Float[Tensor, "N K V"]]:
    """Outputs and last state, n chunks of C tokens for N heads."""
    assert residual != "after-decay", "no rule with a gain per column takes its residual after the decay"
    regression = residual == "before-decay"
    if q.shape[2] <= SUB:
        return ColumnScan.apply(q, x, y, gain, log_decay, S, read_before, regression)  # type: ignore[return-value]
    outputs = []
    # unbind, not indexing: the backward of n slices would fill n tensors of full size.
    for chunk in zip(*(z.unbind(0) for z in (q, x, y, gain, log_decay)), strict=True):
        o, S = _long_chunk(list(chunk), S, read_before, regression)
        outputs.append(o)
    return torch.stack(outputs), S


def _long_chunk(
    chunk: list[Float[Tensor, "N C _"]], S: Tensor, read_before: bool, regression: bool
) -> tuple[Tensor, Tensor]:
    """One chunk of several sub-blocks: each passes on its writes by X X^T and Q X^T."""
    q, x, y, gain, log_decay = chunk
    G, P = _product(x, x.mT), _product(q, x.mT)
    seen, read = _product(x, S), _product(q, S)  # rows of later sub-blocks against the state at the block's start
    total = torch.ones_like(S[:, :1])
    outputs, written = [], y[:, :0]
    starts = range(0, y.shape[1], SUB)
    for i, parts in zip(starts, zip(*(z.split(SUB, dim=1) for z in (y, gain, log_decay)), strict=True), strict=True):
        b = parts[0].shape[1]
        local = G[:, i : i + b, i : i + b], P[:, i : i + b, i : i + b]
        o, new = ColumnLocal.apply(seen[:, :b], read[:, :b], *parts, *local, read_before, regression)  # type: ignore
        outputs.append(o)
        carry = parts[2].sum(dim=1, keepdim=True).exp()
        seen = carry * seen[:, b:] + _product(G[:, i + b :, i : i + b], new)
        read = carry * read[:, b:] + _product(P[:, i + b :, i : i + b], new)
        written = torch.cat((carry * written, new), dim=1)
        total = total * carry
    return torch.cat(outputs, dim=1), total * S + _product(x.mT, written)


class _Product(torch.autograd.Function):
    """torch.bmm whose gradient does not depend on autocast."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.bmm(a, b)

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return torch.bmm(grads[0], b.mT), torch.bmm(a.mT, grads[0])


def _product(a: Float[Tensor, "N i j"], b: Float[Tensor, "N j k"]) -> Float[Tensor, "N i k"]:
    return _Product.apply(a, b)  # type: ignore[return-value]


class _Factors(NamedTuple):
    """Decay factors of M sub-blocks, [M, C, V] (total [M, 1, V]): see memory/decay.py for the names."""

    carry: Tensor
    read: Tensor
    residual: Tensor
    rest: Tensor
    total: Tensor


def _factors(log_decay: Float[Tensor, "M C V"], read_before: bool) -> _Factors:
    u = log_decay.cumsum(dim=1)
    until = u.exp()
    before = torch.cat((torch.ones_like(until[:, :1]), until[:, :-1]), dim=1)
    # Summed from the end, so that the factors of the last tokens are not differences of large sums.
    after = (log_decay.flip(1).cumsum(dim=1).flip(1) - log_decay).exp()
    return _Factors(log_decay.exp(), before if read_before else until, before, after, until[:, -1:])


def _decayed(U: Float[Tensor, "M C V"], carry: Tensor) -> list[Tensor]:
    """z after every token: item t is [M, t+1, V], what tokens 0..t wrote, decayed up to and with t."""
    z, history = U[:, :0], []
    for t in range(U.shape[1]):
        z = torch.cat((z * carry[:, t : t + 1], U[:, t : t + 1]), dim=1)
        history.append(z)
    return history


def _reads(P: Float[Tensor, "M C C"], history: list[Tensor], read_before: bool) -> Float[Tensor, "M C V"]:
    """sum_s P_ts z_s over the writes inside the block."""
    rows = []
    for t in range(len(history)):
        if not read_before:
            rows.append(torch.bmm(P[:, t : t + 1, : t + 1], history[t]))
        elif t:
            rows.append(torch.bmm(P[:, t : t + 1, :t], history[t - 1]))
        else:
            rows.append(torch.zeros_like(history[0]))
    return torch.cat(rows, dim=1)


def _solution(G: Float[Tensor, "M C C"], gain: Tensor, carry: Tensor) -> Float[Tensor, "M C C V"]:
    """T with r_t = sum_s T[t, s] rhs_s per column: the substitution, run on unit right-hand sides."""
    M, C, V = gain.shape
    T, z = gain.new_zeros(M, C, C, V), gain.new_zeros(M, C, C, V)
    T.diagonal(dim1=1, dim2=2).fill_(1)
    for t in range(C):
        if t:
            coupled = torch.bmm(G[:, t : t + 1, :t], z[:, :t, :t].reshape(M, t, t * V))
            T[:, t, :t] = coupled.view(M, t, V).neg_()
            z[:, :t, :t] *= carry[:, t, None, None]
        z[:, t, : t + 1] = T[:, t, : t + 1] * gain[:, t, None]
    return T


def _substitute(G: Float[Tensor, "M C C"], gain: Tensor, carry: Tensor, rhs: Tensor) -> Float[Tensor, "M C V"]:
    """The residuals r of one right-hand side, by the recurrence itself."""
    rows, z = [], rhs[:, :0]
    for t in range(rhs.shape[1]):
        now = slice(t, t + 1)
        row = torch.baddbmm(rhs[:, now], G[:, now, :t], z, alpha=-1) if t else rhs[:, now]
        z = torch.cat((z * carry[:, now], row * gain[:, now]), dim=1)
        rows.append(row)
    return torch.cat(rows, dim=1)


class _Local(NamedTuple):
    """Gradients of what happens inside M sub-blocks: of the writes, of Q X^T and X X^T, of log_decay."""

    dU: Float[Tensor, "M C V"]
    dP: Float[Tensor, "M C C"]
    dG: Float[Tensor, "M C C"]
    dlog: Float[Tensor, "M C V"]


def _local_backward(
    dO: Tensor,
    dW: Tensor,
    gain: Tensor | None,
    U: Tensor,
    P: Tensor,
    G: Tensor | None,
    carry: Tensor,
    read_before: bool,
) -> _Local:
    """The recurrence in reverse. dW: gradient of the writes decayed to the block's end; no gain and G: no residual."""
    history = _decayed(U, carry)
    dP, dG = torch.zeros_like(P), torch.zeros_like(P)
    dU, dcarry = torch.empty_like(U), torch.zeros_like(U)
    dz = dW.clone()  # of z after token t, while t runs down
    for t in reversed(range(U.shape[1])):
        now, upto = slice(t, t + 1), slice(0, t if read_before else t + 1)
        if not read_before:
            dz[:, upto] += P[:, now, upto].mT * dO[:, now]
            dP[:, now, upto] = torch.bmm(dO[:, now], history[t].mT)
        dU[:, t] = dz[:, t]
        if t == 0:
            break
        before, earlier = history[t - 1], dz[:, :t]
        dcarry[:, t] = (earlier * before).sum(1)
        earlier *= carry[:, now]
        if read_before:
            earlier += P[:, now, upto].mT * dO[:, now]
            dP[:, now, upto] = torch.bmm(dO[:, now], before.mT)
        if G is not None and gain is not None:
            dE = gain[:, now] * dU[:, now]
            earlier -= G[:, now, :t].mT * dE
            dG[:, now, :t] = -torch.bmm(dE, before.mT)
    return _Local(dU, dP, dG, dcarry * carry)


def _read_adjoint(P: Tensor, dO: Tensor, carry: Tensor, read_before: bool) -> Float[Tensor, "M C V"]:
    """Gradient of every write through the reads of its own block."""
    dz = torch.zeros_like(dO)
    for t in reversed(range(dO.shape[1])):
        now, later = slice(t, t + 1), t if read_before else t + 1
        if read_before:
            dz[:, :t] *= carry[:, now]
        dz[:, :later] += P[:, now, :later].mT * dO[:, now]
        if not read_before:
            dz[:, :t] *= carry[:, now]
    return dz


def _from_start(value: Float[Tensor, "M C V"], before: bool) -> Float[Tensor, "M C V"]:
    """Gradient of log_decay from values that decay from the block's start up to t (`before`: up to t - 1)."""
    if before:
        value = torch.cat((value[:, 1:], torch.zeros_like(value[:, :1])), dim=1)
    return value.flip(1).cumsum(1).flip(1)


class ColumnLocal(torch.autograd.Function):
    """One sub-block against given reads of the state: (seen, read, y, gain, log_decay, G, P) -> (o, writes at its
    end)."""

    @staticmethod
    def forward(ctx: Any, seen, read, y, gain, log_decay, G, P, read_before: bool, regression: bool):
        f = _factors(log_decay, read_before)
        R = _substitute(G, gain, f.carry, torch.addcmul(y, f.residual, seen, value=-1)) if regression else y
        U = gain * R
        O = _reads(P, _decayed(U, f.carry), read_before).addcmul_(f.read, read)
        ctx.save_for_backward(seen, read, R, gain, log_decay, G, P)
        ctx.flags = read_before, regression
        return as_new(O), U * f.rest

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        seen, read, R, gain, log_decay, G, P = ctx.saved_tensors
        read_before, regression = ctx.flags
        dO, dW = grads
        f = _factors(log_decay, read_before)
        coupling = (gain, G) if regression else (None, None)
        local = _local_backward(dO, dW, coupling[0], gain * R, P, coupling[1], f.carry, read_before)
        dE = gain * local.dU
        dread = f.read * dO
        dlog = local.dlog + _from_start(dread * read, read_before)
        dseen = None
        if regression:
            dseen = -f.residual * dE
            dlog += _from_start(dseen * seen, True)
        return dseen, dread, dE, R * local.dU, dlog, local.dG, local.dP, None, None


class ColumnScan(torch.autograd.Function):
    """(q, x, y, gain, log_decay, S) in chunk layout, C <= SUB -> (o, last S). See the module for the equations."""

    @staticmethod
    def forward(ctx: Any, q, x, y, gain, log_decay, S, read_before: bool, regression: bool) -> tuple[Tensor, Tensor]:
        o, R = torch.empty_like(y), torch.empty_like(y) if regression else y
        states = S.new_empty(*q.shape[:2], *S.shape[1:])
        for part in slabs(q):
            Q, X, Y, g, log, O, res, start = flat(part, q, x, y, gain, log_decay, o, R, states)
            f = _factors(log, read_before)
            T = _solution(torch.bmm(X, X.mT), g, f.carry) if regression else None
            S = _scan(X, Y, T, g, f, S, res, start)
            O.copy_(_reads(torch.bmm(Q, X.mT), _decayed(g * res, f.carry), read_before))
            O.addcmul_(torch.bmm(Q, start), f.read)
        ctx.save_for_backward(q, x, R, gain, log_decay, states)
        ctx.flags = read_before, regression
        return as_new(o), S

    @staticmethod
    @exact_backward
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, x, R, gain, log_decay, states = ctx.saved_tensors
        do, dS = grads[0].contiguous(), grads[1]
        results = [torch.empty_like(z) for z in (q, x, R, gain, log_decay)]
        for part in reversed(slabs(q)):
            inputs = flat(part, q, x, R, gain, log_decay, states, do)
            dS = _scan_backward(inputs, flat(part, *results), dS, *ctx.flags)
        return *results, dS, None, None


def _scan_backward(
    inputs: list[Tensor], results: list[Tensor], dS: Tensor, read_before: bool, regression: bool
) -> Tensor:
    """Some chunks in a row backwards: fills `results`, returns the gradient of their start state."""
    Q, X, R, g, log, S, dO = inputs
    dQ, dX, dY, dgain, dlog = results
    f = _factors(log, read_before)
    P = torch.bmm(Q, X.mT)
    G = torch.bmm(X, X.mT) if regression else None
    dread = dO * f.read
    dNext, dS = _scan_back(X, P, G, g, f, dO, torch.bmm(Q.mT, dread), dS, read_before)

    U = g * R
    local = _local_backward(dO, torch.bmm(X, dNext), g if regression else None, U, P, G, f.carry, read_before)
    torch.mul(g, local.dU, out=dY)
    torch.mul(R, local.dU, out=dgain)
    torch.bmm(local.dP, X, out=dQ).baddbmm_(dread, S.mT)
    torch.bmm(local.dP.mT, Q, out=dX).baddbmm_(U * f.rest, dNext.mT)
    whole = (S * dNext).sum(1, keepdim=True) * f.total
    torch.add(local.dlog + _from_start(dread * torch.bmm(Q, S), read_before), whole, out=dlog)
    if regression:
        dF = (f.residual * dY).neg_()
        dX.baddbmm_(local.dG + local.dG.mT, X).baddbmm_(dF, S.mT)
        dlog += _from_start(dF * torch.bmm(X, S), True)
    return dS


def _scan(
    X: Tensor, Y: Tensor, T: Tensor | None, g: Tensor, f: _Factors, S: Tensor, R: Tensor, states: Tensor
) -> Tensor:
    """The serial part: fills the residuals R (given as Y without T) and every start state, returns the last state."""
    N = len(S)
    write, XT = g * f.rest, X.mT
    for i in range(len(X) // N):
        at = slice(i * N, (i + 1) * N)
        states[at] = S
        if T is not None:
            rhs = torch.addcmul(Y[at], f.residual[at], torch.bmm(X[at], S), value=-1)
            torch.sum(T[at] * rhs[:, None], dim=2, out=R[at])
        S = torch.baddbmm(f.total[at] * S, XT[at], R[at] * write[at])
    return S


def _scan_back(
    X: Tensor,
    P: Tensor,
    G: Tensor | None,
    g: Tensor,
    f: _Factors,
    dO: Tensor,
    dS_read: Tensor,
    dS: Tensor,
    read_before: bool,
) -> tuple[Tensor, Tensor]:
    """The serial part backwards: the gradient of every chunk's end state, and of the first start state."""
    N, ends = len(dS), torch.empty_like(dS_read)
    T = None if G is None else _solution(G, g, f.carry)
    dR_read = None if G is None else g * _read_adjoint(P, dO, f.carry, read_before)
    write, minus = g * f.rest, -f.residual
    for i in reversed(range(len(X) // N)):
        at = slice(i * N, (i + 1) * N)
        ends[at] = dS
        through = torch.addcmul(dS_read[at], f.total[at], dS)
        if T is not None and dR_read is not None:
            dR = torch.addcmul(dR_read[at], write[at], torch.bmm(X[at], dS))
            dE = (T[at] * dR[:, :, None]).sum(1)
            through.baddbmm_(X[at].mT, minus[at] * dE)
        dS = through
    return ends, dS
