"""Inner-product class, the part of backward that is parallel over chunks: state gradients -> all gradients.

Notation, algebra and traps as in additive.py, and no loop is pipelined, as in solve_gradient.py. For every call;
hopper_additive_gradient.py is faster for some.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.additive import kept_of, spread
from fastweight.kernels.gates import gate_gradients, store_head, window_energy, window_sum
from fastweight.kernels.tiles import (
    add_key_gradient,
    chunk_span,
    decay_before,
    decay_rows,
    fade,
    has_pair,
    load_keys,
    load_tile,
    source_rows,
    state_tile,
    store_key_gradient,
    store_tile,
)


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, weight, decay, sums, states, d_states, scratch,
    d_q, d_k, d_v, d_beta, d_lam, d_key0, halo_k, halo_v,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    BEFORE: tl.constexpr, DOT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of queries, keys, values, and of the step sizes down to beta and lam."""
    HALO: tl.constexpr = WINDOW - 1
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64) - HALO
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    own = live & (i >= 0)
    line = h.to(tl.int64) * tokens
    shelf = (chunk.to(tl.int64) * H + h) * (64 * (WINDOW + 1))
    g = decay_rows(decay, line, first, i, high)
    g_read = decay_before(decay, line, first, i, high) if BEFORE else g
    g_last = tl.load(decay + line + first + tl.minimum(63 - HALO, high - 1))
    w = tl.load(weight + line + first + i, mask=own, other=0.0)
    p = tl.zeros([64, 64], tl.float32)
    energy = tl.zeros([64], tl.float32)
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, own, KH, K, BK)
        p = tl.dot(qt, tl.trans(x), acc=p, input_precision=DOT)
        energy += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    dp = tl.zeros([64, 64], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        do = load_tile(d_o, first, i, h, cv, own, H, V, BV)
        y = load_tile(v, first, i, h, cv, live, H, V, BV)
        dp = tl.dot(do, tl.trans(y), acc=dp, input_precision=DOT)
    # felt[t, s]: how the loss depends on D[t, s], through every pair that step s writes.
    later = i[:, None] - i[None, :]
    reads = later > 0 if BEFORE else later >= 0
    felt = p * dp
    if WINDOW > 1:
        band = tl.where((later <= 0) & (later > -WINDOW), 1.0, 0.0).to(SUM)
        felt = tl.dot(felt.to(SUM), band, input_precision=DOT)
        seen = spread(weight, decay, sums, line + first, shelf, g_read, high, BEFORE, WINDOW)
        felt *= fade(reads & (i >= 0)[:, None], g_read[:, None] - g[None, :])
    else:
        alive = fade(reads, g_read[:, None] - g[None, :])
        seen = alive * w[None, :]
        felt *= alive
    p_low = (p * seen).to(v.dtype.element_ty)
    dp_low = (dp * seen).to(v.dtype.element_ty)
    d_w = tl.sum(felt, axis=0)
    later = (i + tl.minimum(first, 0).to(tl.int32))[:, None] - i[None, :]
    reads = later > 0 if BEFORE else later >= 0
    before = tl.where(later < 0, 1.0, 0.0).to(SUM)
    felt = tl.dot((felt * w[None, :]).to(SUM), before, input_precision=DOT)
    d_log = tl.sum(tl.where(reads, felt, 0.0), axis=0)
    last = tl.exp2(g_last - g)
    kept = kept_of(weight, decay, sums, line + first, shelf, g_last, high, WINDOW)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    met = tl.zeros([64], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        do = load_tile(d_o, first, i, h, cv, own, H, V, BV)
        y = load_tile(v, first, i, h, cv, live, H, V, BV)
        dy = tl.zeros([64, BV], tl.float32)
        for begin_k in range(0, K, BK):
            ck = begin_k + tl.arange(0, BK)
            x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
            state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
            dS = tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)
            dy = tl.dot(x, dS, acc=dy, input_precision=DOT)
        met += tl.sum(dy * y.to(tl.float32), axis=1)
        dy = dy * kept[:, None] + tl.trans(tl.dot(tl.trans(do), p_low, input_precision=DOT))
        store_tile(d_v, dy, first, i, h, cv, own, H, V, BV)
        if WINDOW > 1:
            store_tile(halo_v, dy, chunk.to(tl.int64) * 16, i + HALO, h, cv, live & (i < 0), H, V, BV)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    through = tl.zeros([BK], tl.float32)
    row_read = tl.zeros([64], tl.float32)
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, own, KH, K, BK)
        d_read = tl.zeros([64, BK], tl.float32)
        d_x = tl.zeros([64, BK], tl.float32)
        for begin_v in range(0, V, BV):
            cv = begin_v + tl.arange(0, BV)
            state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
            S = tl.load(states + at_state + state_at, mask=in_state, other=0.0)
            dS = tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)
            do = load_tile(d_o, first, i, h, cv, own, H, V, BV)
            y = load_tile(v, first, i, h, cv, live, H, V, BV)
            through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
            d_read = tl.dot(do, tl.trans(S), acc=d_read, input_precision=DOT)
            d_x = tl.dot(y, tl.trans(dS), acc=d_x, input_precision=DOT)
        d_read *= tl.exp2(g_read)[:, None]
        row_read += tl.sum(d_read * qt.to(tl.float32), axis=1)
        d_read = tl.dot(dp_low, x, acc=d_read, input_precision=DOT)
        store_tile(d_q, d_read, first, i, h, ck, own, H, K, BK)
        d_x = d_x * kept[:, None] + tl.trans(tl.dot(tl.trans(qt), dp_low, input_precision=DOT))
        store_key_gradient(d_k, d_key0, d_x, previous, source, pair & own, first, i, low, high, n, h, ck,
                           H, K, SHIFT, BK)  # fmt: skip
        if WINDOW > 1:
            store_tile(halo_k, d_x, chunk.to(tl.int64) * 16, i + HALO, h, ck, live & (i < 0), H, K, BK)
    met = window_sum(met, WINDOW, False) * last
    later = (i + tl.minimum(high, 0))[:, None] - i[None, :]
    reads = later > 0 if BEFORE else later >= 0
    rest = tl.where(reads, row_read[:, None], 0.0) + tl.where(later < 0, (met * w)[:, None], 0.0)
    d_log += tl.sum(rest, axis=0) + tl.sum(through, axis=0) * tl.exp2(g_last)
    # Through memory, so that each thread goes on with one row instead of a copy of sixteen.
    shelf = scratch + 2 * line + first
    tl.store(shelf + i, d_log, mask=own)
    tl.store(shelf + tokens + i, d_w, mask=own)
    tl.debug_barrier()
    d_log = tl.load(shelf + i, mask=own, other=0.0)
    d_w = tl.load(shelf + tokens + i, mask=own, other=0.0) + met
    writes = pair
    count = None
    if not RAW:
        energy, count = window_energy(energy, pair, WINDOW)
        writes = pair & own
    d_gain, d_ridge, d_energy = gate_gradients(
        d_w, d_log, energy, beta, lam, first, i, h, writes, eps, floor, H, RAW, SCALED, DIRECT, WINDOW == 1, count
    )
    if not RAW and (not DIRECT or (SCALED and WINDOW == 1)):
        # The energy's share of the key gradient needs all widths first, so it is added to what was stored.
        d_energy = window_sum(d_energy / count, WINDOW, True)
        for start in range(0, K, BK):
            ck = start + tl.arange(0, BK)
            x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
            share = 2 * d_energy[:, None] * x.to(tl.float32)
            add_key_gradient(d_k, d_key0, share, previous, source, pair & own, first, i, low, n, h, ck,
                             H, K, SHIFT, BK)  # fmt: skip
            if WINDOW > 1:
                before_first = live & (i < 0)
                share += load_tile(halo_k, chunk.to(tl.int64) * 16, i + HALO, h, ck, before_first, H, K, BK)
                store_tile(halo_k, share, chunk.to(tl.int64) * 16, i + HALO, h, ck, before_first, H, K, BK)
    store_head(d_beta, d_gain, first, i, h, H, own)
    store_head(d_lam, d_ridge, first, i, h, H, own)


@triton.jit
def add_shared(
    halo_k, halo_v, d_k, d_v, place, first, low, h,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds what lies at a place of 16 rows to the pairs before token `first`, of a sequence from `low` on."""
    HALO: tl.constexpr = WINDOW - 1
    b = tl.arange(0, 16)
    i = b - HALO
    ck = tl.arange(0, BK)
    cv = tl.arange(0, BV)
    keep = (i < 0) & (i - SHIFT >= low)
    total = load_tile(halo_k, place.to(tl.int64) * 16, b, h, ck, keep, H, K, BK).to(tl.float32)
    total += load_tile(d_k, first - SHIFT, i, h, ck, keep, H, K, BK).to(tl.float32)
    store_tile(d_k, total, first - SHIFT, i, h, ck, keep, H, K, BK)
    keep = (i < 0) & (i >= low)
    total = load_tile(halo_v, place.to(tl.int64) * 16, b, h, cv, keep, H, V, BV).to(tl.float32)
    total += load_tile(d_v, first, i, h, cv, keep, H, V, BV).to(tl.float32)
    store_tile(d_v, total, first, i, h, cv, keep, H, V, BV)


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
    n, first, low, _high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    add_shared(halo_k, halo_v, d_k, d_v, chunk, first, low, h, H, K, V, BK, BV, WINDOW, SHIFT)
