"""Scalar-gain inner-product rules in chunks: falcon-1a, falcon-3a and linear attention, with all gradients.

A chunk is STRIDE = 64 - (R - 1) steps, worked on as 64 rows: the R - 1 pairs before it, which its first steps write
again, and its own. With G the cumulative log2 decay of its steps, F = G or G one step before (the read), and w = eta / B:

    D[t, s] = 2^(F_t - G_s) w_s  (s <= t)       Band[s, j] = 1 where 0 <= s - j < R        W = D Band
    O = 2^F .* Q S_0 + (Q X^T .* W) Y           S_C = 2^G_C S_0 + X^T (W_C .* Y)           W_C = the last row, F = G_C

`prepare` makes w and G (one program a chunk), `forward` walks the chunks, `backward_state` walks them in reverse for the
state gradients alone, `backward_token` (one program a chunk) makes all else. A pair that two chunks write has its second
share of the gradient kept apart and added by `backward_halo`, so that results do not depend on the order of programs.

Traps: with R = 1 W is D and nothing is shared. Transposed matrices are computed anew, as in solve.py.
"""

import triton
import triton.language as tl

from fastweight.kernels.tiles import (
    chunk_span,
    fade,
    has_pair,
    load_head,
    load_keys,
    segment_span,
    source_rows,
    step_gradient,
    step_log_decay,
    step_sizes,
)


@triton.jit
def _step_rows(weight, decay, line, rows, own, HALO: tl.constexpr):
    """w, G and G one step before of 64 rows; zero on the rows that are no steps of this chunk."""
    i = tl.arange(0, 64)
    w = tl.load(weight + line + rows, mask=own, other=0.0)
    g = tl.load(decay + line + rows, mask=own, other=0.0)
    g_before = tl.load(decay + line + rows - 1, mask=own & (i > HALO), other=0.0)
    return w, g, g_before


@triton.jit
def _window_sum(values, WINDOW: tl.constexpr, FORTH: tl.constexpr):
    """Sum of `values` over the WINDOW rows up to each row, or with FORTH from each row on."""
    if WINDOW == 1:
        return values
    else:
        i = tl.arange(0, 64)
        apart = i[:, None] - i[None, :]
        if FORTH:
            apart = i[None, :] - i[:, None]
        return tl.sum(tl.where((apart >= 0) & (apart < WINDOW), values[None, :], 0.0), axis=1)


@triton.jit
def _spread(steps, WINDOW: tl.constexpr, SUM: tl.constexpr, FLIP: tl.constexpr):
    """D Band, or with FLIP Band^T D^T."""
    if WINDOW == 1:
        return steps
    else:
        i = tl.arange(0, 64)
        if FLIP:
            apart = i[None, :] - i[:, None]
            band = tl.where((apart >= 0) & (apart < WINDOW), 1.0, 0.0)
            return tl.dot(band, steps, input_precision=SUM)
        else:
            apart = i[:, None] - i[None, :]
            band = tl.where((apart >= 0) & (apart < WINDOW), 1.0, 0.0)
            return tl.dot(steps, band, input_precision=SUM)


@triton.jit
def _window_energy(x, pair, WINDOW: tl.constexpr):
    """Mean feature energy of the pairs in each row's window, and their number (at least 1)."""
    energy = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    if WINDOW == 1:
        return energy, tl.full([64], 1.0, tl.float32)
    else:
        count = tl.maximum(_window_sum(tl.where(pair, 1.0, 0.0), WINDOW, False), 1.0)
        return _window_sum(tl.where(pair, energy, 0.0), WINDOW, False) / count, count


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def prepare(
    k, beta, lam, key0, has_key, unmasked, previous, weight, decay,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Weights eta / B and chunk-cumulative log-decays of one chunk of one head."""
    HALO: tl.constexpr = WINDOW - 1
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, _c, first, begin, end = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    rows = first - HALO + i
    source, live = source_rows(previous, rows, begin, end, SHIFT)
    pair = has_pair(unmasked, has_key, source, rows, live, begin, n)
    own = live & (i >= HALO)
    gain = load_head(beta, rows, h, H, pair & own, 1.0)
    ridge = load_head(lam, rows, h, H, pair & own, 0.0)
    if RAW:
        w = gain
        log_decay = ridge * 1.4426950408889634
    else:
        x = load_keys(k, key0, source, live, begin, n, kh, KH, K, BK)
        energy, count = _window_energy(x, pair, WINDOW)
        eta, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair & own, eps, floor, SCALED, DIRECT)
        w = eta / count
        log_decay = tl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    line = h.to(tl.int64) * tokens
    tl.store(weight + line + rows, w, mask=own)
    tl.store(decay + line + rows, tl.cumsum(log_decay, axis=0), mask=own)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, key0, previous, weight, decay, state0, o, states, state1,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr, SAVE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: o, the final state, and with SAVE the chunk states."""
    HALO: tl.constexpr = WINDOW - 1
    STRIDE: tl.constexpr = 64 - HALO
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, low, high, begin, end = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, STRIDE)
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
    reads = i[:, None] >= i[None, :]
    if BEFORE:
        reads = i[:, None] > i[None, :]
    for c in range(low, high):
        first = begin + c * STRIDE
        rows = first - HALO + i
        source, live = source_rows(previous, rows, begin, end, SHIFT)
        own = live & (i >= HALO)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        x = load_keys(k, key0, source, live, begin, n, kh, KH, K, BK)
        qt = tl.load(
            q + ((rows * KH + kh) * K)[:, None] + ck[None, :], mask=own[:, None] & (ck < K)[None, :], other=0.0
        )
        y = tl.load(v + at_v, mask=live[:, None] & (cv < V)[None, :], other=0.0)
        w, g, g_read = _step_rows(weight, decay, line, rows, own, HALO)
        if not BEFORE:
            g_read = g
        if first + STRIDE <= end:
            g_last = tl.load(decay + line + first + STRIDE - 1)
        else:
            g_last = tl.load(decay + line + end - 1)
        low_S = S.to(x.dtype)
        if SAVE:
            at_chunk = (lead + c).to(tl.int64) * H + h
            tl.store(states + at_chunk * (K * V) + state_at, low_S, mask=in_state)
        p = tl.dot(qt, tl.trans(x), input_precision=DOT)
        seen = fade(reads, g_read[:, None] - g[None, :]) * w[None, :]
        p *= _spread(seen, WINDOW, DOT, False)
        out = tl.dot(qt, low_S, input_precision=DOT) * tl.exp2(g_read)[:, None]
        out = tl.dot(p.to(x.dtype), y, acc=out, input_precision=DOT)
        tl.store(o + at_v, out.to(o.dtype.element_ty), mask=own[:, None] & (cv < V)[None, :])
        kept = _window_sum(tl.exp2(g_last - g) * w, WINDOW, True)
        u = (y.to(tl.float32) * kept[:, None]).to(x.dtype)
        S = tl.dot(tl.trans(x), u, acc=S * tl.exp2(g_last), input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, S.to(state1.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q, d_o, decay, d_state1, d_states, d_state0,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, BV value columns: the state gradient at every chunk end, and dS_0."""
    HALO: tl.constexpr = WINDOW - 1
    STRIDE: tl.constexpr = 64 - HALO
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    _n, lead, low, high, begin, end = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, STRIDE)
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
    for back in range(0, high - low):
        c = high - 1 - back
        first = begin + c * STRIDE
        rows = first + i
        own = (i < STRIDE) & (rows < end)
        qt = tl.load(
            q + ((rows * KH + kh) * K)[:, None] + ck[None, :], mask=own[:, None] & (ck < K)[None, :], other=0.0
        )
        do = tl.load(
            d_o + ((rows * H + h) * V)[:, None] + cv[None, :], mask=own[:, None] & (cv < V)[None, :], other=0.0
        )
        if BEFORE:
            g_read = tl.load(decay + line + rows - 1, mask=own & (i > 0), other=0.0)
        else:
            g_read = tl.load(decay + line + rows, mask=own, other=0.0)
        if first + STRIDE <= end:
            g_last = tl.load(decay + line + first + STRIDE - 1)
        else:
            g_last = tl.load(decay + line + end - 1)
        at_chunk = (lead + c).to(tl.int64) * H + h
        tl.store(d_states + at_chunk * (K * V) + state_at, dS.to(qt.dtype), mask=in_state)
        read = (do.to(tl.float32) * tl.exp2(g_read)[:, None]).to(qt.dtype)
        dS = tl.dot(tl.trans(qt), read, acc=dS * tl.exp2(g_last), input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS.to(d_state0.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, weight, decay, states, d_states,
    d_q, d_k, d_v, d_beta, d_lam, d_key0, halo_k, halo_v,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of queries, keys, values, and of the step sizes down to beta and lam."""
    HALO: tl.constexpr = WINDOW - 1
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, c, first, begin, end = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    rows = first - HALO + i
    source, live = source_rows(previous, rows, begin, end, SHIFT)
    own = live & (i >= HALO)
    line = h.to(tl.int64) * tokens
    w, g, g_read = _step_rows(weight, decay, line, rows, own, HALO)
    if not BEFORE:
        g_read = g
    g_last = tl.load(decay + line + tl.minimum(first + 63 - HALO, end - 1))
    x = load_keys(k, key0, source, live, begin, n, kh, KH, K, BK)
    in_k = own[:, None] & (ck < K)[None, :]
    qt = tl.load(q + ((rows * KH + kh) * K)[:, None] + ck[None, :], mask=in_k, other=0.0)
    later = i[:, None] - i[None, :]
    reads = later > 0 if BEFORE else later >= 0
    reads_t = later < 0 if BEFORE else later <= 0
    last = tl.exp2(g_last - g)
    kept = _window_sum(last * w, WINDOW, True)
    seen_t = fade(reads_t, g_read[None, :] - g[:, None]) * w[:, None]
    seen_t = _spread(seen_t, WINDOW, DOT, True)
    p_t = (tl.dot(x, tl.trans(qt), input_precision=DOT) * seen_t).to(x.dtype)
    dp = tl.zeros([64, 64], tl.float32)
    dp_t = tl.zeros([64, 64], tl.float32)
    d_read = tl.zeros([64, BK], tl.float32)
    d_x = tl.zeros([64, BK], tl.float32)
    through = 0.0
    met = tl.zeros([64], tl.float32)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        at_v = ((rows * H + h) * V)[:, None] + cv[None, :]
        in_v = live[:, None] & (cv < V)[None, :]
        do = tl.load(d_o + at_v, mask=own[:, None] & (cv < V)[None, :], other=0.0)
        y = tl.load(v + at_v, mask=in_v, other=0.0)
        in_state = (ck < K)[:, None] & (cv < V)[None, :]
        S = tl.load(states + at_state + ck[:, None] * V + cv[None, :], mask=in_state, other=0.0)
        dS = tl.load(d_states + at_state + ck[:, None] * V + cv[None, :], mask=in_state, other=0.0)
        through += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0)
        dp = tl.dot(do, tl.trans(y), acc=dp, input_precision=DOT)
        dp_t = tl.dot(y, tl.trans(do), acc=dp_t, input_precision=DOT)
        d_read = tl.dot(do, tl.trans(S), acc=d_read, input_precision=DOT)
        d_x = tl.dot(y, tl.trans(dS), acc=d_x, input_precision=DOT)
        carried = tl.dot(x, dS, input_precision=DOT)
        met += tl.sum(carried * y.to(tl.float32), axis=1)
        dy = tl.dot(p_t, do, acc=carried * kept[:, None], input_precision=DOT)
        tl.store(d_v + at_v, dy.to(d_v.dtype.element_ty), mask=own[:, None] & (cv < V)[None, :])
        if WINDOW > 1:
            at_halo = (chunk.to(tl.int64) * H + h) * (16 * V) + i[:, None] * V + cv[None, :]
            tl.store(halo_v + at_halo, dy, mask=(live & (i < HALO))[:, None] & (cv < V)[None, :])
    alive = fade(reads, g_read[:, None] - g[None, :])
    seen = _spread(alive * w[None, :], WINDOW, DOT, False)
    # felt[t, s]: how the loss depends on D[t, s], through every pair that step s writes.
    felt = tl.dot(qt, tl.trans(x), input_precision=DOT) * dp
    if WINDOW > 1:
        felt = tl.dot(felt, tl.where((later <= 0) & (later > -WINDOW), 1.0, 0.0), input_precision=DOT)
    felt *= alive
    met = _window_sum(met, WINDOW, False) * last
    d_w = tl.sum(felt, axis=0)
    before = tl.where(later < 0, 1.0, 0.0)
    d_log = tl.sum(tl.where(reads, tl.dot(felt * w[None, :], before, input_precision=DOT), 0.0), axis=0)
    d_read *= tl.exp2(g_read)[:, None]
    row_read = tl.sum(d_read * qt.to(tl.float32), axis=1)
    d_read = tl.dot((dp * seen).to(x.dtype), x, acc=d_read, input_precision=DOT)
    tl.store(d_q + ((rows * H + h) * K)[:, None] + ck[None, :], d_read.to(d_q.dtype.element_ty), mask=in_k)
    rest = tl.where(reads, row_read[:, None], 0.0) + tl.where(later < 0, (met * w)[:, None], 0.0)
    d_log += tl.sum(rest, axis=0) + through * tl.exp2(g_last)
    # `met` and the sums above run along rows or columns of a tile; a masked sum brings both to rows.
    d_w = tl.sum(tl.where(later == 0, d_w[None, :], 0.0), axis=1) + met
    d_log = tl.sum(tl.where(later == 0, d_log[None, :], 0.0), axis=1)
    d_x = tl.dot((dp_t * seen_t).to(x.dtype), qt, acc=d_x * kept[:, None], input_precision=DOT)
    pair = has_pair(unmasked, has_key, source, rows, live, begin, n)
    if RAW:
        d_gain = tl.where(pair, d_w, 0.0)
        d_ridge = tl.where(pair, d_log, 0.0)
    else:
        energy, count = _window_energy(x, pair, WINDOW)
        gain = load_head(beta, rows, h, H, pair & own, 1.0)
        ridge = load_head(lam, rows, h, H, pair & own, 0.0)
        d_gain, d_ridge, d_energy = step_gradient(
            d_w / count, d_log, energy, gain, ridge, pair & own, eps, floor, SCALED, DIRECT, WINDOW == 1
        )
        d_energy = _window_sum(d_energy / count, WINDOW, True)
        d_x += 2 * d_energy[:, None] * x.to(tl.float32)
    if d_beta is not None:
        tl.store(d_beta + rows * H + h, d_gain, mask=own)
    if d_lam is not None:
        tl.store(d_lam + rows * H + h, d_ridge, mask=own)
    tl.store(
        d_k + ((source * H + h) * K)[:, None] + ck[None, :],
        d_x.to(d_k.dtype.element_ty),
        mask=(own & pair & (source >= begin))[:, None] & (ck < K)[None, :],
    )
    if WINDOW > 1:
        at_halo = (chunk.to(tl.int64) * H + h) * (16 * K) + i[:, None] * K + ck[None, :]
        tl.store(halo_k + at_halo, d_x, mask=(live & (i < HALO))[:, None] & (ck < K)[None, :])
    if SHIFT and previous is None:
        is_last = (rows == end - 1)[:, None] & (ck < K)[None, :]
        none = tl.zeros([64, BK], d_k.dtype.element_ty)
        tl.store(d_k + ((rows * H + h) * K)[:, None] + ck[None, :], none, mask=is_last)
    if d_key0 is not None:
        at_key0 = (n.to(tl.int64) * H + h) * K
        carried_key = (own & pair & (source < begin))[:, None] & (ck < K)[None, :]
        tl.store(d_key0 + at_key0 + tl.zeros([64, 1], tl.int64) + ck[None, :], d_x, mask=carried_key)


@triton.jit(do_not_specialize=["length", "chunks"])
def backward_halo(
    halo_k, halo_v, d_k, d_v, cu, chunk_seq, chunk_start, length, chunks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds what a chunk contributes to the pairs before its first step."""
    HALO: tl.constexpr = WINDOW - 1
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, _c, first, begin, _end = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    i = tl.arange(0, 16)
    rows = first - HALO + i
    ck = tl.arange(0, BK)
    cv = tl.arange(0, BV)
    slot = chunk.to(tl.int64) * H + h
    keep = ((i < HALO) & (rows - SHIFT >= begin))[:, None] & (ck < K)[None, :]
    at = d_k + (((rows - SHIFT) * H + h) * K)[:, None] + ck[None, :]
    share = tl.load(halo_k + slot * (16 * K) + i[:, None] * K + ck[None, :], mask=keep, other=0.0)
    total = tl.load(at, mask=keep, other=0.0).to(tl.float32) + share
    tl.store(at, total.to(d_k.dtype.element_ty), mask=keep)
    keep = ((i < HALO) & (rows >= begin))[:, None] & (cv < V)[None, :]
    at = d_v + ((rows * H + h) * V)[:, None] + cv[None, :]
    share = tl.load(halo_v + slot * (16 * V) + i[:, None] * V + cv[None, :], mask=keep, other=0.0)
    total = tl.load(at, mask=keep, other=0.0).to(tl.float32) + share
    tl.store(at, total.to(d_v.dtype.element_ty), mask=keep)
