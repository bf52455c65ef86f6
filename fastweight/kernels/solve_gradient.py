"""Scalar-gain regression, the part of backward that is parallel over chunks: dY and state gradients -> the rest.

Notation and algebra as in solve.py. For every call; hopper_solve_gradient.py is faster for some. The gradient of a step
is (R . dY) / eta where eta can be kept from 0 (DIVIDES, bfloat16), else the sum of all that sees its write.

Traps: no loop is pipelined: with two stages gradients are wrong on Triton 3.6. What a product needs transposed is made
the other way round, never transposed from an accumulator. The gradient of a log-decay is a sum of terms that all carry
it, not a difference of totals, or strong decay drowns it.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import gate_gradients, store_head
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
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, eta, decay, residual, states, d_y, d_states, scratch,
    d_q, d_k, d_beta, d_lam, d_key0,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DECAYED: tl.constexpr,
    BEFORE: tl.constexpr, DOT: tl.constexpr, SUM: tl.constexpr, DIVIDES: tl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of queries, keys, and of the step sizes down to beta and lam."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    line = h.to(tl.int64) * tokens
    a = tl.load(eta + line + first + i, mask=live, other=0.0)
    g = decay_rows(decay, line, first, i, high)
    g_last = tl.load(decay + line + first + tl.minimum(63, high - 1))
    g_res = g
    g_read = g
    if not DECAYED:
        g_res = decay_before(decay, line, first, i, high)
    if BEFORE:
        g_read = decay_before(decay, line, first, i, high)
    # The same difference of rows three times over, each hiding a zero: shared, its masks would fill the registers.
    later = i[:, None] - i[None, :]
    later_felt = (i + tl.minimum(first, 0).to(tl.int32))[:, None] - i[None, :]
    later_row = (i + tl.minimum(high, 0))[:, None] - i[None, :]
    reads = later > 0 if BEFORE else later >= 0
    dp = tl.zeros([64, 64], tl.float32)
    dg = tl.zeros([64, 64], tl.float32)
    d_eta = tl.zeros([64], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        do = load_tile(d_o, first, i, h, cv, live, H, V, BV)
        r = load_tile(residual, first, i, h, cv, live, H, V, BV)
        dy = load_tile(d_y, first, i, h, cv, live, H, V, BV)
        dp = tl.dot(do, tl.trans(r), acc=dp, input_precision=DOT)
        dg = tl.dot(dy, tl.trans(r), acc=dg, input_precision=DOT)
        d_eta += tl.sum(r.to(tl.float32) * dy.to(tl.float32), axis=1)
    # How each later row i sees the write of an earlier row j.
    dp *= fade(reads, g_read[:, None] - g[None, :])
    dg *= -fade(later > 0, g_res[:, None] - g[None, :])
    if DIVIDES:
        d_eta = tl.where(a == 0, 0.0, d_eta / tl.where(a == 0, 1.0, a))
        dp *= a[None, :]
        dg *= a[None, :]
    p = tl.zeros([64, 64], tl.float32)
    gram = tl.zeros([64, 64], tl.float32)
    energy = tl.zeros([64], tl.float32)
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
        p = tl.dot(qt, tl.trans(x), acc=p, input_precision=DOT)
        gram = tl.dot(x, tl.trans(x), acc=gram, input_precision=DOT)
        energy += tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
    if not DIVIDES:
        d_eta = tl.sum(p * dp + gram * dg, axis=0)
        dp *= a[None, :]
        dg *= a[None, :]
    # A log-decay of row t is felt by every pair j < t <= i (or t < i where the row before is the last one felt).
    before = tl.where(later_felt < 0, 1.0, 0.0).to(SUM)
    reads = later_felt > 0 if BEFORE else later_felt >= 0
    miss_felt = later_felt >= 0 if DECAYED else later_felt > 0
    felt = tl.dot((p * dp).to(SUM), before, input_precision=DOT)
    felt = tl.where(reads, felt, 0.0)
    felt_miss = tl.dot((gram * dg).to(SUM), before, input_precision=DOT)
    d_log = tl.sum(felt + tl.where(miss_felt, felt_miss, 0.0), axis=0)
    dp_low = dp.to(residual.dtype.element_ty)
    dg_low = dg.to(residual.dtype.element_ty)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    at_state = (chunk.to(tl.int64) * H + h) * (K * V)
    through = tl.zeros([BK], tl.float32)
    row_read = tl.zeros([64], tl.float32)
    row_miss = tl.zeros([64], tl.float32)
    row_write = tl.zeros([64], tl.float32)
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
        d_read = tl.zeros([64, BK], tl.float32)
        d_miss = tl.zeros([64, BK], tl.float32)
        d_write = tl.zeros([64, BK], tl.float32)
        for begin_v in range(0, V, BV):
            cv = begin_v + tl.arange(0, BV)
            state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
            S = tl.load(states + at_state + state_at, mask=in_state, other=0.0)
            dS = tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)
            do = load_tile(d_o, first, i, h, cv, live, H, V, BV)
            r = load_tile(residual, first, i, h, cv, live, H, V, BV)
            dy = load_tile(d_y, first, i, h, cv, live, H, V, BV)
            through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1)
            d_read = tl.dot(do, tl.trans(S), acc=d_read, input_precision=DOT)
            d_miss = tl.dot(dy, tl.trans(S), acc=d_miss, input_precision=DOT)
            d_write = tl.dot(r, tl.trans(dS), acc=d_write, input_precision=DOT)
        wide_x = x.to(tl.float32)
        d_read *= tl.exp2(g_read)[:, None]
        row_read += tl.sum(d_read * qt.to(tl.float32), axis=1)
        d_read = tl.dot(dp_low, x, acc=d_read, input_precision=DOT)
        store_tile(d_q, d_read, first, i, h, ck, live, H, K, BK)
        d_miss *= -tl.exp2(g_res)[:, None]
        row_miss += tl.sum(d_miss * wide_x, axis=1)
        d_write *= tl.exp2(g_last - g)[:, None]
        if not DIVIDES:
            d_eta += tl.sum(d_write * wide_x, axis=1)
        d_write *= a[:, None]
        row_write += tl.sum(d_write * wide_x, axis=1)
        d_x = tl.dot(dg_low, x, acc=d_miss + d_write, input_precision=DOT)
        # dP^T Q + dG^T X, made the other way round so that no accumulator is a transposed operand.
        other = tl.dot(tl.trans(qt), dp_low, input_precision=DOT)
        d_x += tl.trans(tl.dot(tl.trans(x), dg_low, acc=other, input_precision=DOT))
        store_key_gradient(d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, ck, H, K, SHIFT, BK)
    reads = later_row > 0 if BEFORE else later_row >= 0
    miss_felt = later_row >= 0 if DECAYED else later_row > 0
    rest = tl.where(reads, row_read[:, None], 0.0) + tl.where(miss_felt, row_miss[:, None], 0.0)
    d_log += tl.sum(rest + tl.where(later_row < 0, row_write[:, None], 0.0), axis=0) + tl.sum(
        through, axis=0
    ) * tl.exp2(g_last)
    # Through memory, so that each thread goes on with one row instead of a copy of sixteen.
    tl.store(scratch + line + first + i, d_log, mask=live)
    tl.debug_barrier()
    d_log = tl.load(scratch + line + first + i, mask=live, other=0.0)
    d_gain, d_ridge, d_energy = gate_gradients(
        d_eta, d_log, energy, beta, lam, first, i, h, pair, eps, floor, H, RAW, SCALED, DIRECT, True
    )
    if not RAW and (SCALED or not DIRECT):
        # The energy's share of the key gradient needs all widths first, so it is added to what was stored.
        tl.debug_barrier()
        for start in range(0, K, BK):
            ck = start + tl.arange(0, BK)
            x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
            share = 2 * d_energy[:, None] * x.to(tl.float32)
            add_key_gradient(d_k, d_key0, share, previous, source, pair, first, i, low, n, h, ck, H, K, SHIFT, BK)
    store_head(d_beta, d_gain, first, i, h, H, live)
    store_head(d_lam, d_ridge, first, i, h, H, live)
