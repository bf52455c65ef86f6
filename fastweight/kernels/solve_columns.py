"""Regression with a gain per value column, falcon-2: (q, k, v, beta, lam) -> (o, final S), in blocks of 16 tokens.

Every column c has a state of its own, S_c [K], but all of them see the same keys. What a block needs of its state is
what that would answer to the block's keys and queries: F_i = S_c . x_i and O_i = S_c . q_i, two tiles [BV, 16] made by
one product. A token's write changes these answers through the shared numbers G = X X^T and P = Q X^T alone:

    u_t = eta_t (y_t - F_t)      F_i <- carry_t F_i + G_ti u_t for i > t      O_i <- carry_t O_i + P_it u_t for i >= t

and S <- S prod(carry) + X^T Z at the block's end, where Z_t is u_t times the carries after t. No factor exceeds 1,
nothing is divided, nothing overflows, and no matrix of a column is ever made. With reads before writes O_i moves for
i > t only. `couple` (one program a block) makes G and P; `forward` walks a sequence; solve_columns_gradient.py is the
way back.

Traps: tiles [BV, 16] of programs with BV / 32 warps hold a column in a thread, and then `pick`, which takes a token out
by its bits, costs little and the 16 steps run without a word between threads. Triton lays tiles out so if nothing
tells it that columns are neighbours in memory: hence `one`, a 1 that it does not know, and loads after products. Any
other layout is right, but slow. Tokens past a sequence's end read the couplings of its last one, which are finite, and
their gain is 0. Steps are written out by eights: all sixteen would take Triton minutes to compile.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head, step_sizes
from fastweight.kernels.tiles import (
    chunk_span,
    has_pair,
    load_keys,
    load_tile,
    segment_span,
    source_rows,
    state_tile,
)


@triton.jit
def pick(tile, b, t):
    """Token t [BV] of a float32 tile [BV, 16]."""
    bits = tl.where((b == t)[None, :], tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=1).to(tl.float32, bitcast=True)


@triton.jit
def coupling(couplings, b, t, high, which: tl.constexpr):
    """Row t [1, 16] of a block's G (which = 0) or of its second matrix."""
    return tl.load(couplings + tl.minimum(t, high - 1) * 32 + which * 16 + b)[None, :]


@triton.jit
def load_columns(pointer, first, b, h, cv, keep, H: tl.constexpr, V: tl.constexpr):
    """A tile [BV, 16] of one head of a [tokens, H, V] tensor, in float32."""
    at = pointer + (first * H + h) * V + cv[:, None] + b[None, :] * (H * V)
    return tl.load(at, mask=keep[None, :] & (cv < V)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_columns(pointer, tile, first, b, h, cv, keep, H: tl.constexpr, V: tl.constexpr):
    """Writes what `load_columns` reads."""
    at = pointer + (first * H + h) * V + cv[:, None] + b[None, :] * (H * V)
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=keep[None, :] & (cv < V)[:, None])


@triton.jit
def keys_and_queries(
    k, q, key0, previous, first, low, high, n, kh, ck,
    KH: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The keys of a block and under them its queries [32, BK]."""
    i = tl.arange(0, 32)
    source, live = source_rows(previous, first, i, low, tl.minimum(high, 16), SHIFT)
    x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
    return x + load_tile(q, first - 16, i, kh, ck, (i >= 16) & (i < high + 16), KH, K, BK)


@triton.jit
def apart(both, BV: tl.constexpr):
    """Two tiles side by side [BV, 32] as two."""
    return tl.split(tl.permute(tl.reshape(both, [BV, 2, 16]), (0, 2, 1)))


@triton.jit
def beside(left, right, BV: tl.constexpr):
    """Two tiles as one [BV, 32]."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), [BV, 32])


@triton.jit
def meets(i, j, level):
    """Pairs of tokens whose numbers first differ in this binary digit."""
    return ((i >> level) ^ (j >> level)) == 1


@triton.jit
def later_by_one(tile, b, first):
    """What token t - 1 has, and `first` where there is none [BV, 16]."""
    moved = tl.full(tile.shape, first, tl.float32)
    for half in tl.range(0, 16, 8, num_stages=1):
        for s in tl.static_range(8):
            moved = tl.where((b == half + s + 1)[None, :], pick(tile, b, half + s)[:, None], moved)
    return moved


@triton.jit
def earlier_by_one(tile, b, last):
    """What token t + 1 has, and `last` where there is none [BV, 16]."""
    moved = tl.full(tile.shape, last, tl.float32)
    for half in tl.range(0, 16, 8, num_stages=1):
        for s in tl.static_range(8):
            moved = tl.where((b == half + s - 1)[None, :], pick(tile, b, half + s)[:, None], moved)
    return moved


@triton.jit
def carries_before(previous, b, BV: tl.constexpr, RUN: tl.constexpr):
    """Product of the carries before each token in its run of RUN; previous: the carry of the token before [BV, 16]."""
    factors = tl.reshape(tl.where((b % RUN == 0)[None, :], 1.0, previous), [BV, 16 // RUN, RUN])
    return tl.reshape(tl.cumprod(factors, axis=2), [BV, 16])


@triton.jit
def carries_after(following, b, BV: tl.constexpr, RUN: tl.constexpr):
    """Product of the carries after each token in its run of RUN; following: the carry of the next token [BV, 16]."""
    factors = tl.reshape(tl.where((b % RUN == RUN - 1)[None, :], 1.0, following), [BV, 16 // RUN, RUN])
    return tl.reshape(tl.cumprod(factors, axis=2, reverse=True), [BV, 16])


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def couple(
    q, k, key0, previous, couplings, energies, cu, chunk_seq, chunk_start, length, chunks, tokens,
    KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr, BACK: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """X X^T and X Q^T (with BACK, Q X^T) of one block of one key head, and |x|^2."""
    chunk = tl.program_id(0)
    kh = tl.program_id(1)
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 16)
    if n < 0:
        return
    b = tl.arange(0, 16)
    source, live = source_rows(previous, first, b, low, high, SHIFT)
    gram = tl.zeros([16, 16], tl.float32)
    other = tl.zeros([16, 16], tl.float32)
    energy = tl.zeros([16], tl.float32)
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, previous, source, live, first, b, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, b, kh, ck, live, KH, K, BK)
        energy += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        gram = tl.dot(x, tl.trans(x), acc=gram, input_precision=DOT)
        if BACK:
            other = tl.dot(qt, tl.trans(x), acc=other, input_precision=DOT)
        else:
            other = tl.dot(x, tl.trans(qt), acc=other, input_precision=DOT)
    line = kh.to(tl.int64) * tokens + first
    at = couplings + line * 32 + b[:, None] * 32 + b[None, :]
    tl.store(at, gram, mask=live[:, None])
    tl.store(at + 16, other, mask=live[:, None])
    if energies is not None:
        tl.store(energies + line + b, energy, mask=live)


@triton.jit
def column_rates(
    beta, lam, energies, line, first, b, h, cv, pair, live, eps, floor,
    H: tl.constexpr, V: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Gains, ridges, energies, and the realised eta and carry [BV, 16] of a block."""
    gain = load_columns(beta, first, b, h, cv, pair, H, V)
    ridge = load_head(lam, first, b, h, H, pair, 0.0)
    energy = tl.load(energies + line + b, mask=live, other=0.0)
    eta, _r, _d, _alpha, carry, _o, _w = step_sizes(
        energy[None, :], gain, ridge[None, :], pair[None, :], eps, floor, SCALED, DIRECT
    )
    return gain, ridge, energy, eta, carry


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment", "one"])
def forward(
    q, k, v, beta, lam, key0, has_key, unmasked, previous, couplings, energies, state0, o, residual, states, state1,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor, one,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One sequence of one head, BV value columns: o, the final state, and where given residuals and chunk states."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    b = tl.arange(0, 16)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    lone = (pid % blocks) * BV + tl.arange(0, BV) * one
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    LOW: tl.constexpr = q.dtype.element_ty
    S = tl.zeros([BV, BK], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if state0 is not None:
        S += tl.trans(tl.load(state0 + slot + state_at, mask=in_state, other=0.0).to(tl.float32))
    for block in tl.range(start * 4, tl.minimum(stop * 4, tl.cdiv(size, 16))):
        first = begin + block * 16
        low, high = -block * 16, size - block * 16
        line = kh.to(tl.int64) * tokens + first
        xq = keys_and_queries(k, q, key0, previous, first, low, high, n, kh, ck, KH, K, SHIFT, BK)
        low_S = S.to(LOW)
        if states is not None and block % 4 == 0:
            at_chunk = (lead + block // 4).to(tl.int64) * H + h
            tl.store(states + at_chunk * (K * V) + state_at, tl.trans(low_S), mask=in_state)
        seen, out = apart(tl.dot(low_S, tl.trans(xq), input_precision=DOT), BV)
        source, live = source_rows(previous, first, b, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, b, source, live, low, n)
        y = load_columns(v, first, b, h, lone, live, H, V)
        _g, _r, _e, eta, carry = column_rates(
            beta, lam, energies, line, first, b, h, lone, pair, live, eps, floor, H, V, SCALED, DIRECT
        )
        rows = couplings + line * 32
        for half in tl.range(0, 16, 8, num_stages=1):
            for s in tl.static_range(8):
                t = half + s
                g = pick(carry, b, t)[:, None]
                u = (pick(eta, b, t) * (pick(y, b, t) - pick(seen, b, t)))[:, None]
                seen = tl.where((b > t)[None, :], g * seen + coupling(rows, b, t, high, 0) * u, seen)
                moves = b > t if BEFORE else b >= t
                out = tl.where(moves[None, :], g * out + coupling(rows, b, t, high, 1) * u, out)
        store_columns(o, out, first, b, h, lone, live, H, V)
        left = y - seen
        if residual is not None:
            store_columns(residual, left, first, b, h, lone, live, H, V)
        after = carries_after(earlier_by_one(carry, b, 1.0), b, BV, 16)
        z = eta * left * after
        total = pick(carry, b, 0) * pick(after, b, 0)
        z = beside(z, tl.zeros_like(z), BV).to(LOW)
        S = tl.dot(z, xq, acc=S * total[:, None], input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, tl.trans(S), mask=in_state)
