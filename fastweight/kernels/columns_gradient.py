"""Inner-product class with a gain per value column, the part of backward that is parallel over chunks.

A level's tile m holds what its left halves wrote, E .* u, and the gradients that its right halves hand back, E .* dO.
With P the scores Q X^T, mirrored above the diagonal, and M the pairs that meet at the level,

    r = (M .* P) m        left rows of E .* r: dU        M .* (m m^T): dP, mirrored        dl = A_h^T (m .* r)

so that the gradient of each log-decay is a sum of terms that all carry it. The state's reads and writes are one more
level each. Notation and traps otherwise as in columns.py.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.columns import LEVELS, READ, REST, column_steps, faded, meets, path
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


@triton.jit
def _back(flipped, level, carried, DOT: tl.constexpr):
    """Gradient of l from E .* (gradient of E) at a level."""
    return tl.dot(path(flipped, level), carried.to(flipped.dtype.element_ty), input_precision=DOT)


@triton.jit(do_not_specialize=["length", "chunks"])
def backward_token(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, paths, flipped, states, d_states,
    d_q, d_k, d_v, d_beta, d_lam, d_key0,
    cu, chunk_seq, chunk_start, length, chunks, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One chunk of one head, all of K: gradients of queries, keys, values, beta and lam."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
    qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    later = i[:, None] - i[None, :]
    p = tl.dot(qt, tl.trans(x), input_precision=DOT)
    own = tl.sum(tl.where(later == 0, p, 0.0), axis=1)[:, None]
    p = tl.where(later > 0, p, tl.dot(x, tl.trans(qt), input_precision=DOT)).to(x.dtype)
    d_p = tl.zeros([64, 64], tl.float32)
    d_ridge = tl.zeros([64], tl.float32)
    d_energy = tl.zeros([64], tl.float32)
    d_read = tl.zeros([64, BK], tl.float32)
    d_x = tl.zeros([64, BK], tl.float32)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
        y = load_tile(v, first, i, h, cv, live, H, V, BV).to(tl.float32)
        do = load_tile(d_o, first, i, h, cv, live, H, V, BV).to(tl.float32)
        gain = load_tile(beta, first, i, h, cv, pair, H, V, BV).to(tl.float32)
        S = tl.load(states + at_state + state_at, mask=in_state, other=0.0)
        dS = tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)
        eta, log_decay = column_steps(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        u = eta * y
        passed = log_decay.to(paths.dtype.element_ty)
        through = tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=0) * tl.exp2(tl.sum(log_decay, axis=0))
        fade = faded(paths, READ, passed, DOT)
        read = do * fade
        d_log = _back(flipped, READ, read * tl.dot(qt, S, input_precision=DOT), DOT) + through[None, :]
        d_read = tl.dot(read.to(x.dtype), tl.trans(S), acc=d_read, input_precision=DOT)
        fade = faded(paths, REST, passed, DOT)
        d_u = fade * tl.dot(x, dS, input_precision=DOT)
        d_log += _back(flipped, REST, u * d_u, DOT)
        d_x = tl.dot((u * fade).to(x.dtype), tl.trans(dS), acc=d_x, input_precision=DOT)
        if not BEFORE:
            d_u += own * do
            d_p += tl.where(later == 0, tl.sum(do * u, axis=1)[:, None], 0.0)
        for level in tl.range(0, LEVELS, num_stages=1):
            right = (((i >> level) & 1) == 1)[:, None]
            fade = faded(paths, level, passed, DOT)
            m = (fade * tl.where(right, do, u)).to(x.dtype)
            r = tl.dot(tl.where(meets(level), p, 0.0), m, input_precision=DOT)
            d_p += tl.where(meets(level), tl.dot(m, tl.trans(m), input_precision=DOT), 0.0)
            d_log += _back(flipped, level, m.to(tl.float32) * r, DOT)
            d_u += tl.where(right, 0.0, fade) * r
        store_tile(d_v, eta * d_u, first, i, h, cv, live, H, V, BV)
        to_gain, to_ridge, to_energy = step_gradient(
            y * d_u, d_log, energy[:, None], gain, ridge[:, None], pair[:, None], eps, floor, SCALED, DIRECT, True
        )
        store_tile(d_beta, to_gain, first, i, h, cv, live, H, V, BV)
        d_ridge += tl.sum(to_ridge, axis=1)
        d_energy += tl.sum(to_energy, axis=1)
    if d_lam is not None:
        tl.store(d_lam + first * H + h + i * H, d_ridge, mask=live)
    d_read = tl.dot(tl.where(later >= 0, d_p, 0.0).to(x.dtype), x, acc=d_read, input_precision=DOT)
    store_tile(d_q, d_read, first, i, h, ck, live, H, K, BK)
    d_x = tl.dot(tl.where(later <= 0, d_p, 0.0).to(x.dtype), qt, acc=d_x, input_precision=DOT)
    d_x += 2 * d_energy[:, None] * x.to(tl.float32)
    store_key_gradient(d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, ck,
                       H, K, SHIFT, BK)  # fmt: skip
