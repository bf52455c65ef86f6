"""Inner-product class with a gain per value column, the part of backward that is parallel over chunks.

A level's tile m holds what its left halves wrote, E .* u, and the gradients that its right halves hand back, E .* dO.
With P the scores Q X^T, mirrored above the diagonal, and M the pairs that meet at the level,

    r = (M .* P) m        left rows of E .* r: dU        M .* (m m^T): dP, mirrored        dl = A_h^T (m .* r)

so that the gradient of each log-decay is a sum of terms that all carry it. The state's reads and writes are one more
level each. `backward_columns` makes what stays within columns, `backward_keys` what all columns share: in one kernel
they would not fit into registers. Notation and traps otherwise as in columns.py.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.columns import column_steps, faded, meets, path
from fastweight.kernels.gates import load_head, step_gradient
from fastweight.kernels.tiles import (
    chunk_span,
    has_pair,
    load_keys,
    load_tile,
    source_rows,
    state_tile,
    store_key_gradient,
    store_tile,
)

READ = tl.constexpr(6)  # numbers of A_read and A_rest among the matrices
REST = tl.constexpr(7)
MOST = tl.constexpr(256)


@triton.jit
def _back(flipped, level, carried, acc, DOT: tl.constexpr):
    """acc and the gradient of l from E .* (gradient of E) at a level."""
    return tl.dot(path(flipped, level), carried.to(flipped.dtype.element_ty), acc=acc, input_precision=DOT)


@triton.jit
def _writes(
    v, beta, energy, ridge, pair, live, first, i, h, cv, eps, floor,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Values, gains, step sizes and log2 decays [64, BV] of some columns."""
    y = load_tile(v, first, i, h, cv, live, H, V, BV).to(tl.float32)
    gain = load_tile(beta, first, i, h, cv, pair, H, V, BV).to(tl.float32)
    eta, log_decay = column_steps(
        energy[:, None],
        gain,
        ridge[:, None],
        pair[:, None],
        eps,
        floor,
        SCALED,
        DIRECT,
        v.dtype.element_ty == tl.float32,
    )
    return y, gain, eta, log_decay


@triton.jit
def is_any(wild, start, end):
    """Whether one of these, MOST at most, is noted; looked at all at once, as few ever are."""
    at = start + tl.arange(0, MOST)
    return tl.max(tl.load(wild + at, mask=at < end, other=0), axis=0) != 0


@triton.jit
def _columns(
    given, chunk, h, block, n, first, low, high,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    (
        q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, flipped, energies, states, d_states,
        d_v, d_beta, shares, d_scores, tokens, slots, eps, floor,
    ) = given  # fmt: skip
    kh = h // (H // KH)
    LOW: tl.constexpr = q.dtype.element_ty
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv = block * BV + tl.arange(0, BV)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    line = h.to(tl.int64) * tokens + first
    energy = tl.load(energies + line + i, mask=live, other=0.0)
    y, gain, eta, log_decay = _writes(
        v, beta, energy, ridge, pair, live, first, i, h, cv, eps, floor, H, V, BV, SCALED, DIRECT
    )
    u = (eta * y).to(LOW)
    do = load_tile(d_o, first, i, h, cv, live, H, V, BV)
    passed = log_decay.to(paths.dtype.element_ty)
    x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
    qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    S = tl.load(states + at_state + state_at, mask=in_state, other=0.0)
    dS = tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)
    through = tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0) * tl.exp2(tl.sum(log_decay, axis=0))
    d_log = tl.zeros([64, BV], tl.float32) + through[None, :]
    seen = tl.dot(qt, S, input_precision=DOT) * faded(paths, READ, passed, DOT)
    d_log = _back(flipped, READ, seen * do.to(tl.float32), d_log, DOT)
    d_u = tl.dot(x, dS, input_precision=DOT) * faded(paths, REST, passed, DOT)
    d_log = _back(flipped, REST, d_u * u.to(tl.float32), d_log, DOT)
    later = i[:, None] - i[None, :]
    p = tl.dot(qt, tl.trans(x), input_precision=DOT)
    own = tl.sum(tl.where(later == 0, p, 0.0), axis=1)[:, None]
    p = tl.where(later > 0, p, tl.dot(x, tl.trans(qt), input_precision=DOT)).to(LOW)
    d_p = tl.zeros([64, 64], tl.float32)
    if not BEFORE:
        d_u += own * do.to(tl.float32)
        d_own = tl.sum(do.to(tl.float32) * u.to(tl.float32), axis=1)
        d_p += tl.where(later == 0, d_own[:, None], 0.0)
    for level in tl.range(0, 6, num_stages=1):
        right = (((i >> level) & 1) == 1)[:, None]
        meet = meets(i[:, None], i[None, :], level)
        fade = faded(paths, level, passed, DOT)
        m = (fade * tl.where(right, do, u).to(tl.float32)).to(LOW)
        r = tl.dot(tl.where(meet, p, 0.0), m, input_precision=DOT)
        d_u += tl.where(right, 0.0, fade) * r
        d_log = _back(flipped, level, m.to(tl.float32) * r, d_log, DOT)
        d_p += tl.where(meet, tl.dot(m, tl.trans(m), input_precision=DOT), 0.0)
    at_scores = ((block * slots + chunk).to(tl.int64) * H + h) * 4096
    tl.store(d_scores + at_scores + i[:, None] * 64 + i[None, :], d_p.to(LOW))
    # Made again rather than held through the levels.
    y, gain, eta, log_decay = _writes(
        v, beta, energy, ridge, pair, live, first, i, h, cv, eps, floor, H, V, BV, SCALED, DIRECT
    )
    store_tile(d_v, eta * d_u, first, i, h, cv, live, H, V, BV)
    to_gain, to_ridge, to_energy = step_gradient(
        y * d_u, d_log, energy[:, None], gain, ridge[:, None], pair[:, None], eps, floor, SCALED, DIRECT, True
    )
    store_tile(d_beta, to_gain, first, i, h, cv, live, H, V, BV)
    plane = tokens.to(tl.int64) * H
    shelf = shares + 2 * block * plane + line + i
    tl.store(shelf, tl.sum(to_ridge, axis=1), mask=live)
    tl.store(shelf + plane, tl.sum(to_energy, axis=1), mask=live)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "slots", "each"])
def backward_columns(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, flipped, energies, states, d_states,
    d_v, d_beta, shares, d_scores, wild,
    cu, chunk_seq, chunk_start, length, chunks, tokens, slots, each, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """BV columns of chunks: gradients of values and beta; shares in those of lam, energy and scores.

    shares [column blocks, lam or energy, H, tokens] in float32, d_scores [column blocks, chunks, H, 64, 64] mirrored.
    Each program looks at `each` pairs of a chunk and a head. wild [chunks, H]: where given, only those noted there.
    """
    block = tl.program_id(1)
    given = (
        q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, flipped, energies, states, d_states,
        d_v, d_beta, shares, d_scores, tokens, slots, eps, floor,
    )  # fmt: skip
    if wild is None:
        at = tl.program_id(0)
        n, first, low, high = chunk_span(at // H, cu, chunk_seq, chunk_start, length, chunks, 64)
        if n < 0:
            return
        _columns(
            given, at // H, at % H, block, n, first, low, high, H, KH, K, V, BK, BV, SHIFT, SCALED, DIRECT, BEFORE, DOT
        )
    else:
        start = tl.program_id(0) * each
        end = tl.minimum(start + each, slots * H)
        if is_any(wild, start, end):
            for step in range(end - start):
                at = start + step
                if tl.load(wild + at) != 0:
                    n, first, low, high = chunk_span(at // H, cu, chunk_seq, chunk_start, length, chunks, 64)
                    _columns(
                        given, at // H, at % H, block, n, first, low, high,
                        H, KH, K, V, BK, BV, SHIFT, SCALED, DIRECT, BEFORE, DOT,
                    )  # fmt: skip


@triton.jit
def _keys(
    given, chunk, h, n, first, low, high,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    (
        q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, energies, states, d_states, shares, d_scores,
        d_q, d_k, d_lam, d_key0, tokens, slots, eps, floor,
    ) = given  # fmt: skip
    kh = h // (H // KH)
    LOW: tl.constexpr = q.dtype.element_ty
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    line = h.to(tl.int64) * tokens + first
    energy = tl.load(energies + line + i, mask=live, other=0.0)
    d_p = tl.zeros([64, 64], tl.float32)
    d_ridge = tl.zeros([64], tl.float32)
    d_energy = tl.zeros([64], tl.float32)
    plane = tokens.to(tl.int64) * H
    for block in range((V + BV - 1) // BV):
        at_scores = ((block * slots + chunk).to(tl.int64) * H + h) * 4096
        d_p += tl.load(d_scores + at_scores + i[:, None] * 64 + i[None, :]).to(tl.float32)
        shelf = shares + 2 * block * plane + line + i
        d_ridge += tl.load(shelf, mask=live, other=0.0)
        d_energy += tl.load(shelf + plane, mask=live, other=0.0)
    if d_lam is not None:
        tl.store(d_lam + first * H + h + i * H, d_ridge, mask=live)
    later = i[:, None] - i[None, :]
    x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
    qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
    d_read = tl.dot(tl.where(later >= 0, d_p, 0.0).to(LOW), x, input_precision=DOT)
    d_x = tl.dot(tl.where(later <= 0, d_p, 0.0).to(LOW), qt, input_precision=DOT)
    d_x += 2 * d_energy[:, None] * x.to(tl.float32)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    for start in tl.range(0, V, BV, num_stages=1):
        cv = start + tl.arange(0, BV)
        state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
        y, _gain, eta, log_decay = _writes(
            v, beta, energy, ridge, pair, live, first, i, h, cv, eps, floor, H, V, BV, SCALED, DIRECT
        )
        passed = log_decay.to(paths.dtype.element_ty)
        read = load_tile(d_o, first, i, h, cv, live, H, V, BV).to(tl.float32) * faded(paths, READ, passed, DOT)
        S = tl.load(states + at_state + state_at, mask=in_state, other=0.0)
        d_read = tl.dot(read.to(LOW), tl.trans(S), acc=d_read, input_precision=DOT)
        written = eta * y * faded(paths, REST, passed, DOT)
        dS = tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)
        d_x = tl.dot(written.to(LOW), tl.trans(dS), acc=d_x, input_precision=DOT)
    store_tile(d_q, d_read, first, i, h, ck, live, H, K, BK)
    store_key_gradient(d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, ck,
                       H, K, SHIFT, BK)  # fmt: skip


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "slots", "each"])
def backward_keys(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, energies, states, d_states, shares, d_scores,
    wild, d_q, d_k, d_lam, d_key0,
    cu, chunk_seq, chunk_start, length, chunks, tokens, slots, each, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All of K of chunks: what all columns give queries, keys and lam. wild: as in backward_columns."""
    given = (
        q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, energies, states, d_states, shares, d_scores,
        d_q, d_k, d_lam, d_key0, tokens, slots, eps, floor,
    )  # fmt: skip
    if wild is None:
        at = tl.program_id(0)
        n, first, low, high = chunk_span(at // H, cu, chunk_seq, chunk_start, length, chunks, 64)
        if n < 0:
            return
        _keys(given, at // H, at % H, n, first, low, high, H, KH, K, V, BK, BV, SHIFT, SCALED, DIRECT, DOT)
    else:
        start = tl.program_id(0) * each
        end = tl.minimum(start + each, slots * H)
        if is_any(wild, start, end):
            for step in range(end - start):
                at = start + step
                if tl.load(wild + at) != 0:
                    n, first, low, high = chunk_span(at // H, cu, chunk_seq, chunk_start, length, chunks, 64)
                    _keys(given, at // H, at % H, n, first, low, high, H, KH, K, V, BK, BV, SHIFT, SCALED, DIRECT, DOT)
