"""Scalar-gain regression in chunks: (q, k, v, step) -> (o, final S) and all gradients, for falcon-1 and the delta rules.

Within a chunk of BT tokens with state S_0 at its start, G the cumulative log2 decay (inclusive), E = G or G one row
before (residual on the decayed or on the undecayed state), D_ij = 2^(E_i - G_j) for j < i:

    N = strict_lower(D .* X X^T) diag(eta)        R = (I + N)^-1 (Y - 2^E .* X S_0)      residuals r_t
    O = 2^F .* Q S_0 + (Q X^T .* 2^(F_i - G_j)) (eta .* R)                               F = G, or one row before
    S_C = 2^G_C S_0 + X^T (2^(G_C - G) .* eta .* R)

Four kernels. `prepare` (one program a chunk) makes eta, G and (I + N)^-1; `forward` walks the chunks and keeps R and the
chunk states; `backward_state` walks them in reverse and makes dY and the state gradients; `backward_token` (one program
a chunk) makes the rest, step sizes included.

Traps: the inverse is stored without its unit diagonal, so that R starts from Y in float32. Matrices that a product needs
transposed are computed twice, never transposed from an accumulator (Triton 3.6 miscompiles that at width 64 on Hopper).
The gradient of a log-decay is a sum of terms that all carry it, not a difference of totals, or strong decay drowns it.
"""

import triton
import triton.language as tl

from fastweight.kernels.tiles import (
    chunk_span,
    decay_rows,
    fade,
    has_pair,
    load_head,
    load_keys,
    nonzero,
    segment_span,
    source_rows,
    step_gradient,
    step_log_decay,
    step_sizes,
)


@triton.jit
def _block_rows(k, key0, unmasked, previous, has_key, first, begin, end, n, SHIFT: tl.constexpr):
    rows = first + tl.arange(0, 16)
    source, live = source_rows(previous, rows, begin, end, SHIFT)
    pair = has_pair(unmasked, has_key, source, rows, live, begin, n)
    return rows, source, live, pair


@triton.jit
def _block_steps(
    beta, lam, rows, energy, pair, h, H, eps, floor, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr
):
    gain = load_head(beta, rows, h, H, pair, 1.0)
    ridge = load_head(lam, rows, h, H, pair, 0.0)
    if RAW:
        eta = nonzero(gain, pair)
        log_decay = ridge * 1.4426950408889634
    else:
        eta, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        eta = nonzero(eta, writes)
        log_decay = tl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    return eta, log_decay


@triton.jit
def _couple(gram, row_decay, col_decay, eta, DECAYED: tl.constexpr, DIAGONAL: tl.constexpr, FLIP: tl.constexpr):
    """A 16x16 block of N, or with FLIP of its transpose: 2^(row - col) .* gram * eta_col, strictly lower if DIAGONAL."""
    i = tl.arange(0, 16)
    if FLIP:
        power = row_decay[None, :] - col_decay[:, None]
        later = i[None, :] - i[:, None]
        gain = eta[:, None]
    else:
        power = row_decay[:, None] - col_decay[None, :]
        later = i[:, None] - i[None, :]
        gain = eta[None, :]
    if DIAGONAL:
        if not DECAYED:
            power = tl.where(later == 1, 0.0, power)
        return fade(later > 0, power) * gram * gain
    else:
        return tl.exp2(tl.minimum(power, 0.0)) * gram * gain


@triton.jit
def _outer_step(inverse, flipped, j):
    """One column of forward substitution on a unit lower triangular 16x16 block."""
    i = tl.arange(0, 16)
    column = tl.sum(tl.where(i[:, None] == j, flipped, 0.0), axis=0)
    row = tl.sum(tl.where(i[:, None] == j, inverse, 0.0), axis=0)
    return inverse - column[:, None] * row[None, :]


@triton.jit
def _store_block(inverse, block, base, I: tl.constexpr, J: tl.constexpr):
    i = tl.arange(0, 16)
    tl.store(inverse + base + (I * 16 + i)[:, None] * 64 + (J * 16 + i)[None, :], block.to(inverse.dtype.element_ty))


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def prepare(
    k, beta, lam, key0, has_key, unmasked, previous, eta, decay, inverse,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DECAYED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Step sizes, chunk-cumulative log-decays and (I + N)^-1 - I of one chunk of 64 tokens of one head."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, _c, first, begin, end = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    rows0, src0, live0, pair0 = _block_rows(k, key0, unmasked, previous, has_key, first, begin, end, n, SHIFT)
    rows1, src1, live1, pair1 = _block_rows(k, key0, unmasked, previous, has_key, first + 16, begin, end, n, SHIFT)
    rows2, src2, live2, pair2 = _block_rows(k, key0, unmasked, previous, has_key, first + 32, begin, end, n, SHIFT)
    rows3, src3, live3, pair3 = _block_rows(k, key0, unmasked, previous, has_key, first + 48, begin, end, n, SHIFT)
    zero = tl.zeros([16, 16], tl.float32)
    g00, g10, g11, g20, g21, g22, g30, g31, g32, g33 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    none = tl.zeros([16], tl.float32)
    e0, e1, e2, e3 = none, none, none, none
    for start in range(0, K, BK):
        x0 = load_keys(k, key0, src0, live0, begin, n, kh, KH, K, BK, start)
        x1 = load_keys(k, key0, src1, live1, begin, n, kh, KH, K, BK, start)
        x2 = load_keys(k, key0, src2, live2, begin, n, kh, KH, K, BK, start)
        x3 = load_keys(k, key0, src3, live3, begin, n, kh, KH, K, BK, start)
        e0 += tl.sum(x0.to(tl.float32) * x0.to(tl.float32), axis=1)
        e1 += tl.sum(x1.to(tl.float32) * x1.to(tl.float32), axis=1)
        e2 += tl.sum(x2.to(tl.float32) * x2.to(tl.float32), axis=1)
        e3 += tl.sum(x3.to(tl.float32) * x3.to(tl.float32), axis=1)
        g00 = tl.dot(x0, tl.trans(x0), acc=g00, input_precision=DOT)
        g10 = tl.dot(x1, tl.trans(x0), acc=g10, input_precision=DOT)
        g11 = tl.dot(x1, tl.trans(x1), acc=g11, input_precision=DOT)
        g20 = tl.dot(x2, tl.trans(x0), acc=g20, input_precision=DOT)
        g21 = tl.dot(x2, tl.trans(x1), acc=g21, input_precision=DOT)
        g22 = tl.dot(x2, tl.trans(x2), acc=g22, input_precision=DOT)
        g30 = tl.dot(x3, tl.trans(x0), acc=g30, input_precision=DOT)
        g31 = tl.dot(x3, tl.trans(x1), acc=g31, input_precision=DOT)
        g32 = tl.dot(x3, tl.trans(x2), acc=g32, input_precision=DOT)
        g33 = tl.dot(x3, tl.trans(x3), acc=g33, input_precision=DOT)
    a0, l0 = _block_steps(beta, lam, rows0, e0, pair0, h, H, eps, floor, RAW, SCALED, DIRECT)
    a1, l1 = _block_steps(beta, lam, rows1, e1, pair1, h, H, eps, floor, RAW, SCALED, DIRECT)
    a2, l2 = _block_steps(beta, lam, rows2, e2, pair2, h, H, eps, floor, RAW, SCALED, DIRECT)
    a3, l3 = _block_steps(beta, lam, rows3, e3, pair3, h, H, eps, floor, RAW, SCALED, DIRECT)
    c0 = tl.cumsum(l0, axis=0)
    c1 = tl.cumsum(l1, axis=0) + tl.sum(l0, axis=0)
    c2 = tl.cumsum(l2, axis=0) + (tl.sum(l0, axis=0) + tl.sum(l1, axis=0))
    c3 = tl.cumsum(l3, axis=0) + (tl.sum(l0, axis=0) + tl.sum(l1, axis=0) + tl.sum(l2, axis=0))
    line = h.to(tl.int64) * tokens
    tl.store(eta + line + rows0, a0, mask=live0)
    tl.store(eta + line + rows1, a1, mask=live1)
    tl.store(eta + line + rows2, a2, mask=live2)
    tl.store(eta + line + rows3, a3, mask=live3)
    tl.store(decay + line + rows0, c0, mask=live0)
    tl.store(decay + line + rows1, c1, mask=live1)
    tl.store(decay + line + rows2, c2, mask=live2)
    tl.store(decay + line + rows3, c3, mask=live3)
    r0, r1, r2, r3 = c0, c1, c2, c3
    if not DECAYED:
        r0, r1, r2, r3 = c0 - l0, c1 - l1, c2 - l2, c3 - l3
    t0 = _couple(g00, r0, c0, a0, DECAYED, True, True)
    t1 = _couple(g11, r1, c1, a1, DECAYED, True, True)
    t2 = _couple(g22, r2, c2, a2, DECAYED, True, True)
    t3 = _couple(g33, r3, c3, a3, DECAYED, True, True)
    i = tl.arange(0, 16)
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    i0, i1, i2, i3 = unit, unit, unit, unit
    for j in range(15):
        i0 = _outer_step(i0, t0, j)
        i1 = _outer_step(i1, t1, j)
        i2 = _outer_step(i2, t2, j)
        i3 = _outer_step(i3, t3, j)
    n10 = _couple(g10, r1, c0, a0, DECAYED, False, False)
    n21 = _couple(g21, r2, c1, a1, DECAYED, False, False)
    n32 = _couple(g32, r3, c2, a2, DECAYED, False, False)
    n20 = _couple(g20, r2, c0, a0, DECAYED, False, False)
    n31 = _couple(g31, r3, c1, a1, DECAYED, False, False)
    n30 = _couple(g30, r3, c0, a0, DECAYED, False, False)
    i10 = -tl.dot(i1, tl.dot(n10, i0, input_precision="tf32x3"), input_precision="tf32x3")
    i21 = -tl.dot(i2, tl.dot(n21, i1, input_precision="tf32x3"), input_precision="tf32x3")
    i32 = -tl.dot(i3, tl.dot(n32, i2, input_precision="tf32x3"), input_precision="tf32x3")
    m20 = tl.dot(n21, i10, acc=tl.dot(n20, i0, input_precision="tf32x3"), input_precision="tf32x3")
    i20 = -tl.dot(i2, m20, input_precision="tf32x3")
    m31 = tl.dot(n32, i21, acc=tl.dot(n31, i1, input_precision="tf32x3"), input_precision="tf32x3")
    i31 = -tl.dot(i3, m31, input_precision="tf32x3")
    m30 = tl.dot(n31, i10, acc=tl.dot(n30, i0, input_precision="tf32x3"), input_precision="tf32x3")
    m30 = tl.dot(n32, i20, acc=m30, input_precision="tf32x3")
    i30 = -tl.dot(i3, m30, input_precision="tf32x3")
    base = (chunk.to(tl.int64) * H + h) * 4096
    _store_block(inverse, i0 - unit, base, 0, 0)
    _store_block(inverse, i1 - unit, base, 1, 1)
    _store_block(inverse, i2 - unit, base, 2, 2)
    _store_block(inverse, i3 - unit, base, 3, 3)
    _store_block(inverse, i10, base, 1, 0)
    _store_block(inverse, i21, base, 2, 1)
    _store_block(inverse, i32, base, 3, 2)
    _store_block(inverse, i20, base, 2, 0)
    _store_block(inverse, i31, base, 3, 1)
    _store_block(inverse, i30, base, 3, 0)
    _store_block(inverse, zero, base, 0, 1)
    _store_block(inverse, zero, base, 0, 2)
    _store_block(inverse, zero, base, 0, 3)
    _store_block(inverse, zero, base, 1, 2)
    _store_block(inverse, zero, base, 1, 3)
    _store_block(inverse, zero, base, 2, 3)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, key0, previous, eta, decay, inverse, state0, o, residual, states, state1,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, DECAYED: tl.constexpr, BEFORE: tl.constexpr, SAVE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: o, the final state, and with SAVE residuals and chunk states."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, low, high, begin, end = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    in_state = (ck < K)[:, None] & (cv < V)[None, :]
    state_at = ck[:, None] * V + cv[None, :]
    S = tl.zeros([BK, BV], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if state0 is not None:
        S += tl.load(state0 + slot + state_at, mask=in_state, other=0.0).to(tl.float32)
    line = h.to(tl.int64) * tokens
    causal = i[:, None] >= i[None, :]
    if BEFORE:
        causal = i[:, None] > i[None, :]
    for c in range(low, high):
        first = begin + c * 64
        rows = first + i
        source, live = source_rows(previous, rows, begin, end, SHIFT)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        in_v = live[:, None] & (cv < V)[None, :]
        x = load_keys(k, key0, source, live, begin, n, kh, KH, K, BK)
        qt = tl.load(
            q + ((rows * KH + kh) * K)[:, None] + ck[None, :], mask=live[:, None] & (ck < K)[None, :], other=0.0
        )
        y = tl.load(v + at_v, mask=in_v, other=0.0)
        at_chunk = (lead + c).to(tl.int64) * H + h
        inv = tl.load(inverse + at_chunk * 4096 + i[:, None] * 64 + i[None, :])
        a = tl.load(eta + line + rows, mask=live, other=0.0)
        g = tl.load(decay + line + rows, mask=live, other=0.0)
        # Inside a branch so that it is not staged in shared memory, which is full to the byte at width 128.
        if first + 63 < end:
            g_last = tl.load(decay + line + first + 63)
        else:
            g_last = tl.load(decay + line + end - 1)
        g_res = g
        g_read = g
        if not DECAYED:
            g_res = decay_rows(decay, line, first, begin, end, 64, True)
        if BEFORE:
            g_read = decay_rows(decay, line, first, begin, end, 64, True)
        low_S = S.to(x.dtype)
        if SAVE:
            tl.store(states + at_chunk * (K * V) + state_at, low_S, mask=in_state)
        w = y.to(tl.float32) - tl.exp2(g_res)[:, None] * tl.dot(x, low_S, input_precision=DOT)
        r = tl.dot(inv, w.to(x.dtype), acc=w, input_precision=DOT)
        if SAVE:
            tl.store(residual + at_v, r.to(x.dtype), mask=in_v)
        u = r * a[:, None]
        p = tl.dot(qt, tl.trans(x), input_precision=DOT)
        p *= fade(causal, g_read[:, None] - g[None, :])
        out = tl.dot(qt, low_S, input_precision=DOT) * tl.exp2(g_read)[:, None]
        out = tl.dot(p.to(x.dtype), u.to(x.dtype), acc=out, input_precision=DOT)
        tl.store(o + at_v, out.to(o.dtype.element_ty), mask=in_v)
        u *= tl.exp2(g_last - g)[:, None]
        S = tl.dot(tl.trans(x), u.to(x.dtype), acc=S * tl.exp2(g_last), input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, S.to(state1.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q, k, d_o, key0, previous, eta, decay, inverse, d_state1, d_y, d_states, d_state0,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, DECAYED: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, BV value columns: dY, the state gradient at every chunk end, and dS_0."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, low, high, begin, end = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    in_state = (ck < K)[:, None] & (cv < V)[None, :]
    state_at = ck[:, None] * V + cv[None, :]
    dS = tl.zeros([BK, BV], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if d_state1 is not None:
        dS += tl.load(d_state1 + slot + state_at, mask=in_state, other=0.0).to(tl.float32)
    line = h.to(tl.int64) * tokens
    causal = i[:, None] <= i[None, :]
    if BEFORE:
        causal = i[:, None] < i[None, :]
    for back in range(0, high - low):
        c = high - 1 - back
        first = begin + c * 64
        rows = first + i
        source, live = source_rows(previous, rows, begin, end, SHIFT)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        in_v = live[:, None] & (cv < V)[None, :]
        x = load_keys(k, key0, source, live, begin, n, kh, KH, K, BK)
        qt = tl.load(
            q + ((rows * KH + kh) * K)[:, None] + ck[None, :], mask=live[:, None] & (ck < K)[None, :], other=0.0
        )
        do = tl.load(d_o + at_v, mask=in_v, other=0.0)
        at_chunk = (lead + c).to(tl.int64) * H + h
        inv = tl.load(inverse + at_chunk * 4096 + i[:, None] * 64 + i[None, :])
        g = tl.load(decay + line + rows, mask=live, other=0.0)
        # Inside a branch so that it is not staged in shared memory, which is full to the byte at width 128.
        if first + 63 < end:
            g_last = tl.load(decay + line + first + 63)
            a = tl.load(eta + line + rows)
        else:
            g_last = tl.load(decay + line + end - 1)
            a = tl.load(eta + line + rows, mask=live, other=0.0)
        g_res = g
        g_read = g
        if not DECAYED:
            g_res = decay_rows(decay, line, first, begin, end, 64, True)
        if BEFORE:
            g_read = decay_rows(decay, line, first, begin, end, 64, True)
        low_dS = dS.to(x.dtype)
        tl.store(d_states + at_chunk * (K * V) + state_at, low_dS, mask=in_state)
        p = tl.dot(x, tl.trans(qt), input_precision=DOT)
        p *= fade(causal, g_read[None, :] - g[:, None])
        du = tl.dot(x, low_dS, input_precision=DOT) * tl.exp2(g_last - g)[:, None]
        du = tl.dot(p.to(x.dtype), do, acc=du, input_precision=DOT) * a[:, None]
        dy = tl.dot(tl.trans(inv), du.to(x.dtype), acc=du, input_precision=DOT)
        tl.store(d_y + at_v, dy.to(x.dtype), mask=in_v)
        read = (do.to(tl.float32) * tl.exp2(g_read)[:, None]).to(x.dtype)
        missed = (dy * -tl.exp2(g_res)[:, None]).to(x.dtype)
        dS = tl.dot(tl.trans(qt), read, acc=dS * tl.exp2(g_last), input_precision=DOT)
        dS = tl.dot(tl.trans(x), missed, acc=dS, input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS.to(d_state0.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, eta, decay, residual, states, d_y, d_states,
    d_q, d_k, d_beta, d_lam, d_key0,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DECAYED: tl.constexpr,
    BEFORE: tl.constexpr, DOT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of queries, keys, and of the step sizes down to beta and lam."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, c, first, begin, end = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    rows = first + i
    source, live = source_rows(previous, rows, begin, end, SHIFT)
    line = h.to(tl.int64) * tokens
    a = tl.load(eta + line + rows, mask=live, other=0.0)
    g = tl.load(decay + line + rows, mask=live, other=0.0)
    g_last = tl.load(decay + line + tl.minimum(first + 63, end - 1))
    g_res = g
    g_read = g
    if not DECAYED:
        g_res = decay_rows(decay, line, first, begin, end, 64, True)
    if BEFORE:
        g_read = decay_rows(decay, line, first, begin, end, 64, True)
    x = load_keys(k, key0, source, live, begin, n, kh, KH, K, BK)
    in_k = live[:, None] & (ck < K)[None, :]
    qt = tl.load(q + ((rows * KH + kh) * K)[:, None] + ck[None, :], mask=in_k, other=0.0)
    later = i[:, None] - i[None, :]
    if BEFORE:
        reads = later > 0
    else:
        reads = later >= 0
    reads_t = later < 0 if BEFORE else later <= 0
    miss_felt = later >= 0 if DECAYED else later > 0
    dp = tl.zeros([64, 64], tl.float32)
    dg = tl.zeros([64, 64], tl.float32)
    dp_t = tl.zeros([64, 64], tl.float32)
    dg_t = tl.zeros([64, 64], tl.float32)
    d_eta = tl.zeros([64], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        in_v = live[:, None] & (cv < V)[None, :]
        do = tl.load(d_o + at_v, mask=in_v, other=0.0)
        r = tl.load(residual + at_v, mask=in_v, other=0.0)
        dy = tl.load(d_y + at_v, mask=in_v, other=0.0)
        dp = tl.dot(do, tl.trans(r), acc=dp, input_precision=DOT)
        dg = tl.dot(dy, tl.trans(r), acc=dg, input_precision=DOT)
        dp_t = tl.dot(r, tl.trans(do), acc=dp_t, input_precision=DOT)
        dg_t = tl.dot(r, tl.trans(dy), acc=dg_t, input_precision=DOT)
        d_eta += tl.sum(r.to(tl.float32) * dy.to(tl.float32), axis=1)
    d_eta = tl.where(a == 0, 0.0, d_eta / tl.where(a == 0, 1.0, a))
    # How each later row i sees the write of an earlier row j, both ways round.
    dp *= fade(reads, g_read[:, None] - g[None, :]) * a[None, :]
    dg *= -fade(later > 0, g_res[:, None] - g[None, :]) * a[None, :]
    dp_t *= fade(reads_t, g_read[None, :] - g[:, None]) * a[:, None]
    dg_t *= -fade(later < 0, g_res[None, :] - g[:, None]) * a[:, None]
    # A log-decay of row t is felt by every pair j < t <= i (or t < i where the row before is the last one felt).
    before = tl.where(later < 0, 1.0, 0.0)
    felt = tl.dot(dp * tl.dot(qt, tl.trans(x), input_precision=DOT), before, input_precision=SUM)
    d_log = tl.sum(tl.where(reads, felt, 0.0), axis=0)
    felt = tl.dot(dg * tl.dot(x, tl.trans(x), input_precision=DOT), before, input_precision=SUM)
    d_log += tl.sum(tl.where(miss_felt, felt, 0.0), axis=0)
    dp_low = dp.to(x.dtype)
    dp_t_low = dp_t.to(x.dtype)
    dg_low = (dg + dg_t).to(x.dtype)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    d_read = tl.zeros([64, BK], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        do = tl.load(d_o + at_v, mask=live[:, None] & (cv < V)[None, :], other=0.0)
        in_state = (ck < K)[:, None] & (cv < V)[None, :]
        S = tl.load(states + at_state + ck[:, None] * V + cv[None, :], mask=in_state, other=0.0)
        d_read = tl.dot(do, tl.trans(S), acc=d_read, input_precision=DOT)
    d_read *= tl.exp2(g_read)[:, None]
    row_read = tl.sum(d_read * qt.to(tl.float32), axis=1)
    d_log += tl.sum(tl.where(reads, row_read[:, None], 0.0), axis=0)
    d_read = tl.dot(dp_low, x, acc=d_read, input_precision=DOT)
    tl.store(d_q + ((rows * H + h) * K)[:, None] + ck[None, :], d_read.to(d_q.dtype.element_ty), mask=in_k)
    d_x = tl.dot(dp_t_low, qt, input_precision=DOT)
    d_x = tl.dot(dg_low, x, acc=d_x, input_precision=DOT)
    through = 0.0
    row_miss = tl.zeros([64], tl.float32)
    row_write = tl.zeros([64], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        in_v = live[:, None] & (cv < V)[None, :]
        r = tl.load(residual + at_v, mask=in_v, other=0.0)
        dy = tl.load(d_y + at_v, mask=in_v, other=0.0)
        in_state = (ck < K)[:, None] & (cv < V)[None, :]
        S = tl.load(states + at_state + ck[:, None] * V + cv[None, :], mask=in_state, other=0.0)
        dS = tl.load(d_states + at_state + ck[:, None] * V + cv[None, :], mask=in_state, other=0.0)
        through += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0)
        part = tl.dot(dy, tl.trans(S), input_precision=DOT) * -tl.exp2(g_res)[:, None]
        row_miss += tl.sum(part * x.to(tl.float32), axis=1)
        d_x += part
        part = tl.dot(r, tl.trans(dS), input_precision=DOT) * (tl.exp2(g_last - g) * a)[:, None]
        row_write += tl.sum(part * x.to(tl.float32), axis=1)
        d_x += part
    rest = tl.where(miss_felt, row_miss[:, None], 0.0) + tl.where(later < 0, row_write[:, None], 0.0)
    d_log += tl.sum(rest, axis=0) + through * tl.exp2(g_last)
    pair = has_pair(unmasked, has_key, source, rows, live, begin, n)
    if RAW:
        d_gain = d_eta
        d_ridge = tl.where(pair, d_log, 0.0)
    else:
        energy = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        gain = load_head(beta, rows, h, H, pair, 1.0)
        ridge = load_head(lam, rows, h, H, pair, 0.0)
        d_gain, d_ridge, d_energy = step_gradient(
            d_eta, d_log, energy, gain, ridge, pair, eps, floor, SCALED, DIRECT, True
        )
        d_x += 2 * d_energy[:, None] * x.to(tl.float32)
    if d_beta is not None:
        tl.store(d_beta + rows * H + h, d_gain, mask=live)
    if d_lam is not None:
        tl.store(d_lam + rows * H + h, d_ridge, mask=live)
    tl.store(
        d_k + ((source * H + h) * K)[:, None] + ck[None, :],
        d_x.to(d_k.dtype.element_ty),
        mask=(pair & (source >= begin))[:, None] & (ck < K)[None, :],
    )
    if SHIFT:
        is_last = (rows == end - 1)[:, None] & (ck < K)[None, :]
        if previous is None:
            none = tl.zeros([64, BK], d_k.dtype.element_ty)
            tl.store(d_k + ((rows * H + h) * K)[:, None] + ck[None, :], none, mask=is_last)
    if d_key0 is not None:
        at_key0 = (n.to(tl.int64) * H + h) * K
        carried = (pair & (source < begin))[:, None] & (ck < K)[None, :]
        tl.store(d_key0 + at_key0 + tl.zeros([64, 1], tl.int64) + ck[None, :], d_x, mask=carried)
