"""Regression over a window in blocks of tokens: (q, k, v, maps) -> (o, final S), and the walk of its backward pass.

The maps of windows_maps.py say what a block does, so all that is serial is, with F = X S_0 and W = Y - F,

    [O; Z] = [A; D] [W; F]    O += decay .* Q S_0    S = carry S_0 + X^T Z

and in reverse, with dZ = X dS,

    dW = A_w^T dO + D_w^T dZ    dF = A_f^T dO + D_f^T dZ - dW    dS_0 = carry dS + Q^T (decay .* dO) + X^T dF

Traps: blocks share WINDOW - 1 pairs, whose dY the later block leaves for the earlier one, in float32. Maps are read
transposed from memory, never transposed in registers (Triton 3.6 miscompiles that on Hopper).
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fastweight.kernels.tiles import (
    decay_before,
    decay_rows,
    load_keys,
    load_tile,
    segment_span,
    state_tile,
    store_tile,
)
from fastweight.kernels.windows_maps import block_pairs

SHARED = tl.constexpr(8)  # rows that a block may leave for the one before it


@triton.jit
def load_map(pointer, number, ROWS: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, FLIP: tl.constexpr):
    """One half [ROWS, PAIRS] of a map [ROWS, 2 PAIRS]: of W (0) or F (1); with FLIP its transpose."""
    i = tl.arange(0, ROWS)
    c = tl.arange(0, PAIRS)
    base = pointer + number * (ROWS * 2 * PAIRS) + HALF * PAIRS
    if FLIP:
        return tl.load(base + i[None, :] * (2 * PAIRS) + c[:, None])
    else:
        return tl.load(base + i[:, None] * (2 * PAIRS) + c[None, :])


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def forward(
    q, k, v, key0, has_key, unmasked, decay, read_map, write_map, state0, o, states, state1,
    cu, chunk_start, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One sequence of one head, BV value columns: o, the final state, and where given the blocks' first states."""
    pid = tl.program_id(0)
    columns: tl.constexpr = (V + BV - 1) // BV
    h = (pid // columns) % H
    seq = pid // (columns * H)
    n, lead, start, stop, begin, size = segment_span(seq, cu, chunk_start, length, chunks, 1, 2**30, TOKENS)
    kh = h // (H // KH)
    t = tl.arange(0, PAIRS)
    ck = tl.arange(0, BK)
    cv = (pid % columns) * BV + tl.arange(0, BV)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    S = tl.zeros([BK, BV], tl.float32)
    slot = (seq.to(tl.int64) * H + h) * (K * V)
    if state0 is not None:
        S += tl.load(state0 + slot + state_at, mask=in_state, other=0.0).to(tl.float32)
    line = h.to(tl.int64) * tokens
    for block in range(start, stop):
        first = begin + block * TOKENS
        high = size - block * TOKENS
        i, source, pair = block_pairs(
            has_key, unmasked, first, -block * TOKENS, high, n, PAIRS, TOKENS, WINDOW, SHIFT
        )  # fmt: skip
        own = (t < TOKENS) & (t < high)
        x = load_keys(k, key0, None, source, pair, first, i, -block * TOKENS, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
        y = load_tile(v, first, i, h, cv, pair, H, V, BV)
        number = (lead + block).to(tl.int64) * H + h
        low_S = S.to(x.dtype)
        if states is not None:
            tl.store(states + number * (K * V) + state_at, low_S, mask=in_state)
        d_w = load_map(write_map, number, PAIRS, PAIRS, 0, False)
        d_f = load_map(write_map, number, PAIRS, PAIRS, 1, False)
        f = tl.dot(x, low_S, input_precision=DOT)
        w = (y.to(tl.float32) - f).to(d_w.dtype)
        f = f.to(d_w.dtype)
        z = tl.dot(d_f, f, acc=tl.dot(d_w, w, input_precision=DOT), input_precision=DOT)
        if o is not None:
            if BEFORE:
                g_read = decay_before(decay, line, first, t, high)
            else:
                g_read = decay_rows(decay, line, first, t, high)
            a_w = load_map(read_map, number, PAIRS, PAIRS, 0, False)
            a_f = load_map(read_map, number, PAIRS, PAIRS, 1, False)
            out = tl.dot(qt, low_S, input_precision=DOT) * tl.exp2(tl.where(own, g_read, 0.0))[:, None]
            out = tl.dot(a_f, f, acc=tl.dot(a_w, w, acc=out, input_precision=DOT), input_precision=DOT)
            store_tile(o, out, first, t, h, cv, own, H, V, BV)
        g_last = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
        S = tl.dot(tl.trans(x), z.to(x.dtype), acc=S * tl.exp2(g_last), input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, S.to(state1.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_state(
    q, k, d_o, key0, has_key, unmasked, decay, read_map, write_map, d_state1, d_v, shared, d_states, d_state0,
    cu, chunk_start, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One sequence of one head in reverse, BV value columns: dV, dS_0 if asked, and the blocks' state gradients."""
    HALO: tl.constexpr = WINDOW - 1
    pid = tl.program_id(0)
    columns: tl.constexpr = (V + BV - 1) // BV
    h = (pid // columns) % H
    seq = pid // (columns * H)
    n, lead, start, stop, begin, size = segment_span(seq, cu, chunk_start, length, chunks, 1, 2**30, TOKENS)
    kh = h // (H // KH)
    t = tl.arange(0, PAIRS)
    ck = tl.arange(0, BK)
    cv = (pid % columns) * BV + tl.arange(0, BV)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    dS = tl.zeros([BK, BV], tl.float32)
    slot = (seq.to(tl.int64) * H + h) * (K * V)
    if d_state1 is not None:
        dS += tl.load(d_state1 + slot + state_at, mask=in_state, other=0.0).to(tl.float32)
    line = h.to(tl.int64) * tokens
    for back in range(0, stop - start):
        block = stop - 1 - back
        first = begin + block * TOKENS
        high = size - block * TOKENS
        i, source, pair = block_pairs(
            has_key, unmasked, first, -block * TOKENS, high, n, PAIRS, TOKENS, WINDOW, SHIFT
        )  # fmt: skip
        own = (t < TOKENS) & (t < high)
        x = load_keys(k, key0, None, source, pair, first, i, -block * TOKENS, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
        do = load_tile(d_o, first, t, h, cv, own, H, V, BV)
        number = (lead + block).to(tl.int64) * H + h
        low_dS = dS.to(x.dtype)
        tl.store(d_states + number * (K * V) + state_at, low_dS, mask=in_state)
        a_w = load_map(read_map, number, PAIRS, PAIRS, 0, True)
        a_f = load_map(read_map, number, PAIRS, PAIRS, 1, True)
        d_w = load_map(write_map, number, PAIRS, PAIRS, 0, True)
        d_f = load_map(write_map, number, PAIRS, PAIRS, 1, True)
        dz = tl.dot(x, low_dS, input_precision=DOT).to(d_w.dtype)
        pulled = do.to(d_w.dtype)
        dw = tl.dot(d_w, dz, acc=tl.dot(a_w, pulled, input_precision=DOT), input_precision=DOT)
        df = tl.dot(d_f, dz, acc=tl.dot(a_f, pulled, input_precision=DOT), input_precision=DOT) - dw
        later = (i >= TOKENS - HALO) & (i < TOKENS) & (high > TOKENS)
        left = load_tile(shared, (number // H + 1) * SHARED, i - (TOKENS - HALO), h, cv, later, H, V, BV)
        store_tile(d_v, dw + left, first, i, h, cv, own_pairs(i, high, TOKENS), H, V, BV)
        store_tile(shared, dw, number // H * SHARED, t, h, cv, t < HALO, H, V, BV)
        tl.debug_barrier()
        if BEFORE:
            g_read = decay_before(decay, line, first, t, high)
        else:
            g_read = decay_rows(decay, line, first, t, high)
        read = (do.to(tl.float32) * tl.exp2(tl.where(own, g_read, 0.0))[:, None]).to(x.dtype)
        g_last = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
        dS = tl.dot(tl.trans(qt), read, acc=dS * tl.exp2(g_last), input_precision=DOT)
        dS = tl.dot(tl.trans(x), df.to(x.dtype), acc=dS, input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS.to(d_state0.dtype.element_ty), mask=in_state)


@triton.jit
def own_pairs(i, high, TOKENS: tl.constexpr):
    """Pairs of a block's own tokens, by their token's row."""
    return (i >= 0) & (i < TOKENS) & (i < high)
