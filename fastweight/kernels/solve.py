"""Scalar-gain regression in chunks: (q, k, v, step) -> (o, final S) and state gradients, for falcon-1 and delta rules.

Within a chunk of 64 tokens with state S_0 at its start, G the cumulative log2 decay (inclusive), E = G or G one row
before (residual on the decayed or on the undecayed state), D_ij = 2^(E_i - G_j) for j < i:

    N = strict_lower(D .* X X^T) diag(eta)        R = (I + N)^-1 (Y - 2^E .* X S_0)      residuals r_t
    O = 2^F .* Q S_0 + (Q X^T .* 2^(F_i - G_j)) (eta .* R)                               F = G, or one row before
    S_C = 2^G_C S_0 + X^T (2^(G_C - G) .* eta .* R)

Kernels, after gates.py made eta and G: `invert` (one program a chunk) makes (I + N)^-1; `forward` walks the chunks and
keeps R and the chunk states; `rebuild` makes those again from R; `backward_state` walks the chunks in reverse and makes
dY and the state gradients; `backward_token` in solve_gradient.py (one program a chunk) makes the rest, step sizes
included. `advance` is for few long sequences: what a piece of one does to any state, so that pieces can be walked side
by side once `compose` has found the states between them.

Traps: the inverse is stored without its unit diagonal, so that R starts from Y in float32. What a product needs
transposed is made the other way round, never transposed from an accumulator (Triton 3.6 miscompiles that at width 64 on
Hopper).
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false
# ruff: noqa: SIM108

import triton
import triton.language as tl

from fastweight.kernels.reach import FADED
from fastweight.kernels.tiles import (
    chunk_span,
    decay_before,
    decay_rows,
    fade,
    load_keys,
    load_state,
    load_tile,
    own_columns,
    segment_span,
    source_rows,
    state_tile,
    store_tile,
    whose,
)


@triton.jit
def _couple(gram, row_decay, col_decay, eta, DIAGONAL: tl.constexpr, FLIP: tl.constexpr):
    """A 16x16 block 2^(row - col) .* gram * eta_col of N, or with FLIP its transpose; strictly lower if DIAGONAL."""
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
        return fade(later > 0, power) * gram * gain
    else:
        return tl.exp2(power) * gram * gain


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
def invert(
    k, key0, previous, eta, decay, inverse, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr,
    DECAYED: tl.constexpr, DOT: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """(I + N)^-1 - I of one chunk of 64 tokens of one head: 16-row blocks by substitution, then merged."""
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    b = tl.arange(0, 16)
    src0, live0 = source_rows(previous, first, b, low, high, SHIFT)
    src1, live1 = source_rows(previous, first, b + 16, low, high, SHIFT)
    src2, live2 = source_rows(previous, first, b + 32, low, high, SHIFT)
    src3, live3 = source_rows(previous, first, b + 48, low, high, SHIFT)
    zero = tl.zeros([16, 16], tl.float32)
    g00, g10, g11, g20, g21, g22, g30, g31, g32, g33 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    for start in range(0, K, BK):
        col = start + tl.arange(0, BK)
        x0 = load_keys(k, key0, previous, src0, live0, first, b, low, n, kh, col, KH, K, SHIFT, BK)
        x1 = load_keys(k, key0, previous, src1, live1, first, b + 16, low, n, kh, col, KH, K, SHIFT, BK)
        x2 = load_keys(k, key0, previous, src2, live2, first, b + 32, low, n, kh, col, KH, K, SHIFT, BK)
        x3 = load_keys(k, key0, previous, src3, live3, first, b + 48, low, n, kh, col, KH, K, SHIFT, BK)
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
    line = h.to(tl.int64) * tokens
    at = eta + line + first + b
    a0 = tl.load(at, mask=live0, other=0.0)
    a1 = tl.load(at + 16, mask=live1, other=0.0)
    a2 = tl.load(at + 32, mask=live2, other=0.0)
    a3 = tl.load(at + 48, mask=live3, other=0.0)
    c0 = decay_rows(decay, line, first, b, high)
    c1 = decay_rows(decay, line, first, b + 16, high)
    c2 = decay_rows(decay, line, first, b + 32, high)
    c3 = decay_rows(decay, line, first, b + 48, high)
    r0, r1, r2, r3 = c0, c1, c2, c3
    if not DECAYED:
        r0 = decay_before(decay, line, first, b, high)
        r1 = decay_before(decay, line, first, b + 16, high)
        r2 = decay_before(decay, line, first, b + 32, high)
        r3 = decay_before(decay, line, first, b + 48, high)
    t0 = _couple(g00, r0, c0, a0, True, True)
    t1 = _couple(g11, r1, c1, a1, True, True)
    t2 = _couple(g22, r2, c2, a2, True, True)
    t3 = _couple(g33, r3, c3, a3, True, True)
    i = tl.arange(0, 16)
    unit = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    i0, i1, i2, i3 = unit, unit, unit, unit
    for j in range(15):
        i0 = _outer_step(i0, t0, j)
        i1 = _outer_step(i1, t1, j)
        i2 = _outer_step(i2, t2, j)
        i3 = _outer_step(i3, t3, j)
    n10 = _couple(g10, r1, c0, a0, False, False)
    n21 = _couple(g21, r2, c1, a1, False, False)
    n32 = _couple(g32, r3, c2, a2, False, False)
    n20 = _couple(g20, r2, c0, a0, False, False)
    n31 = _couple(g31, r3, c1, a1, False, False)
    n30 = _couple(g30, r3, c0, a0, False, False)
    i10 = -tl.dot(i1, tl.dot(n10, i0, input_precision=MERGE), input_precision=MERGE)
    i21 = -tl.dot(i2, tl.dot(n21, i1, input_precision=MERGE), input_precision=MERGE)
    i32 = -tl.dot(i3, tl.dot(n32, i2, input_precision=MERGE), input_precision=MERGE)
    m20 = tl.dot(n21, i10, acc=tl.dot(n20, i0, input_precision=MERGE), input_precision=MERGE)
    i20 = -tl.dot(i2, m20, input_precision=MERGE)
    m31 = tl.dot(n32, i21, acc=tl.dot(n31, i1, input_precision=MERGE), input_precision=MERGE)
    i31 = -tl.dot(i3, m31, input_precision=MERGE)
    m30 = tl.dot(n31, i10, acc=tl.dot(n30, i0, input_precision=MERGE), input_precision=MERGE)
    m30 = tl.dot(n32, i20, acc=m30, input_precision=MERGE)
    i30 = -tl.dot(i3, m30, input_precision=MERGE)
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
def advance(
    k, v, key0, previous, eta, decay, inverse, local, maps,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, DECAYED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What a segment does to any state, S -> maps S + local: its columns from zero, and those of the identity."""
    pid = tl.program_id(0)
    value_blocks: tl.constexpr = 0 if local is None else (V + BV - 1) // BV  # pyright: ignore[reportAssignmentType]
    blocks: tl.constexpr = value_blocks + (K + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    block = pid % blocks
    is_map = block >= value_blocks
    cv = (block - tl.where(is_map, value_blocks, 0)) * BV + tl.arange(0, BV)
    S = tl.where((ck[:, None] == cv[None, :]) & is_map, 1.0, 0.0)
    line = h.to(tl.int64) * tokens
    for c in range(start, stop):
        first = begin + c * 64
        high = size - c * 64
        source, live = source_rows(previous, first, i, -c * 64, high, SHIFT)
        x = load_keys(k, key0, previous, source, live, first, i, -c * 64, n, kh, ck, KH, K, SHIFT, BK)
        y = load_tile(v, first, i, h, cv, live & (is_map == 0), H, V, BV)
        at_chunk = (lead + c).to(tl.int64) * H + h
        inv = tl.load(inverse + at_chunk * 4096 + i[:, None] * 64 + i[None, :])
        a = tl.load(eta + line + first + i, mask=live, other=0.0)
        g = decay_rows(decay, line, first, i, high)
        g_last = tl.load(decay + line + first + tl.minimum(high - 1, 63))
        g_res = g if DECAYED else decay_before(decay, line, first, i, high)
        w = y.to(tl.float32) - tl.exp2(g_res)[:, None] * tl.dot(x, S.to(x.dtype), input_precision=DOT)
        u = tl.dot(inv, w.to(x.dtype), acc=w, input_precision=DOT)
        u *= (tl.exp2(g_last - g) * a)[:, None]
        S = tl.dot(tl.trans(x), u.to(x.dtype), acc=S * tl.exp2(g_last), input_precision=DOT)
    slot = seg.to(tl.int64) * H + h
    if local is not None:
        at, keep = state_tile(ck, cv, K, V, BK, BV)
        tl.store(local + slot * (K * V) + at, S, mask=keep & (is_map == 0))
    at, keep = state_tile(ck, cv, K, K, BK, BV)
    tl.store(maps + slot * (K * K) + at, S, mask=keep & is_map)


@triton.jit(do_not_specialize=["segments"])
def compose(
    maps, local, outside, found, totals, segments,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """The states that segments start from, S -> maps S + local; in reverse, the gradients at their ends.

    totals: log2 of what each segment leaves of a state, where maps of which nothing is left need not be read.
    """
    n = tl.program_id(0) // H
    h = tl.program_id(0) % H
    ck = tl.arange(0, BK)
    cj = tl.arange(0, 32)
    cv = tl.program_id(1) * BV + tl.arange(0, BV)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    S = tl.zeros([BK, BV], tl.float32)
    if outside is not None:
        S += tl.load(outside + (n.to(tl.int64) * H + h) * (K * V) + state_at, mask=in_state, other=0.0).to(tl.float32)
    for turn in range(0, segments):
        s = segments - 1 - turn if REVERSE else turn
        slot = (n * segments + s).to(tl.int64) * H + h
        tl.store(found + slot * (K * V) + state_at, S, mask=in_state)
        if turn + 1 < segments:
            S = tl.load(local + slot * (K * V) + state_at, mask=in_state, other=0.0)
            # The state comes back a few rows at a time: what is stored is the operand.
            tl.debug_barrier()
            stop = K
            if totals is not None:
                stop = tl.where(tl.load(totals + slot) > FADED, K, 0)
            for start in range(0, stop, 32):
                row = start + cj
                part_at, in_part = state_tile(row, cv, K, V, 32, BV)
                part = tl.load(found + slot * (K * V) + part_at, mask=in_part, other=0.0)
                if REVERSE:
                    at = row[None, :] * K + ck[:, None]
                else:
                    at = ck[:, None] * K + row[None, :]
                m = tl.load(maps + slot * (K * K) + at, mask=(ck < K)[:, None] & (row < K)[None, :], other=0.0)
                S = tl.dot(m, part, acc=S, input_precision="tf32x3")


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, key0, previous, eta, decay, inverse, state0, o, residual, states, state1,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, DECAYED: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: o, the final state, and where given residuals and chunk states."""
    pid = tl.program_id(0)
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    S = load_state(state0, slot, state_at, in_state, BK, BV)
    line = h.to(tl.int64) * tokens
    causal = i[:, None] >= i[None, :]
    if BEFORE:
        causal = i[:, None] > i[None, :]
    for c in range(start, stop):
        first = begin + c * 64
        high = size - c * 64
        source, live = source_rows(previous, first, i, -c * 64, high, SHIFT)
        x = load_keys(k, key0, previous, source, live, first, i, -c * 64, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
        y = load_tile(v, first, i, h, cv, live, H, V, BV)
        at_chunk = (lead + c).to(tl.int64) * H + h
        inv = tl.load(inverse + at_chunk * 4096 + i[:, None] * 64 + i[None, :])
        a = tl.load(eta + line + first + i, mask=live, other=0.0)
        g = decay_rows(decay, line, first, i, high)
        # Inside a branch so that it is not staged in shared memory, which is full to the byte at width 128.
        if high > 63:
            g_last = tl.load(decay + line + first + 63)
        else:
            g_last = tl.load(decay + line + first + high - 1)
        g_res = g
        g_read = g
        if not DECAYED:
            g_res = decay_before(decay, line, first, i, high)
        if BEFORE:
            g_read = decay_before(decay, line, first, i, high)
        low_S = S.to(x.dtype)
        if states is not None:
            tl.store(states + at_chunk * (K * V) + state_at, low_S, mask=in_state)
        w = y.to(tl.float32) - tl.exp2(g_res)[:, None] * tl.dot(x, low_S, input_precision=DOT)
        r = tl.dot(inv, w.to(x.dtype), acc=w, input_precision=DOT)
        if residual is not None:
            store_tile(residual, r, first, i, h, cv, live, H, V, BV)
        u = r * a[:, None]
        p = tl.dot(qt, tl.trans(x), input_precision=DOT)
        p *= fade(causal, g_read[:, None] - g[None, :])
        out = tl.dot(qt, low_S, input_precision=DOT) * tl.exp2(g_read)[:, None]
        out = tl.dot(p.to(x.dtype), u.to(x.dtype), acc=out, input_precision=DOT)
        store_tile(o, out, first, i, h, cv, live, H, V, BV)
        u *= tl.exp2(g_last - g)[:, None]
        S = tl.dot(tl.trans(x), u.to(x.dtype), acc=S * tl.exp2(g_last), input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, S.to(state1.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def rebuild(
    k, key0, previous, eta, decay, residual, begins, states,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The chunk states of one sequence of one head again, BV value columns, from the first one and the residuals."""
    pid = tl.program_id(0)
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    S = tl.load(begins + (n.to(tl.int64) * H + h) * (K * V) + state_at, mask=in_state, other=0.0).to(tl.float32)
    line = h.to(tl.int64) * tokens
    for c in range(start, stop):
        first = begin + c * 64
        high = size - c * 64
        source, live = source_rows(previous, first, i, -c * 64, high, SHIFT)
        x = load_keys(k, key0, previous, source, live, first, i, -c * 64, n, kh, ck, KH, K, SHIFT, BK)
        r = load_tile(residual, first, i, h, cv, live, H, V, BV)
        at_chunk = (lead + c).to(tl.int64) * H + h
        tl.store(states + at_chunk * (K * V) + state_at, S.to(x.dtype), mask=in_state)
        a = tl.load(eta + line + first + i, mask=live, other=0.0)
        g = decay_rows(decay, line, first, i, high)
        g_last = tl.load(decay + line + first + tl.minimum(high - 1, 63))
        u = r.to(tl.float32) * (tl.exp2(g_last - g) * a)[:, None]
        S = tl.dot(tl.trans(x), u.to(x.dtype), acc=S * tl.exp2(g_last), input_precision=DOT)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q, k, d_o, key0, previous, eta, decay, inverse, d_state1, d_y, d_states, d_state0,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, DECAYED: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, BV value columns: dS_0, and if asked dY and the chunks' state gradients."""
    pid = tl.program_id(0)
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    dS = load_state(d_state1, slot, state_at, in_state, BK, BV)
    line = h.to(tl.int64) * tokens
    causal = i[:, None] <= i[None, :]
    if BEFORE:
        causal = i[:, None] < i[None, :]
    for back in range(0, stop - start):
        c = stop - 1 - back
        first = begin + c * 64
        high = size - c * 64
        source, live = source_rows(previous, first, i, -c * 64, high, SHIFT)
        x = load_keys(k, key0, previous, source, live, first, i, -c * 64, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
        do = load_tile(d_o, first, i, h, cv, live, H, V, BV)
        at_chunk = (lead + c).to(tl.int64) * H + h
        inv = tl.load(inverse + at_chunk * 4096 + i[:, None] * 64 + i[None, :])
        g = decay_rows(decay, line, first, i, high)
        # Inside a branch so that it is not staged in shared memory, which is full to the byte at width 128.
        if high > 63:
            g_last = tl.load(decay + line + first + 63)
            a = tl.load(eta + line + first + i)
        else:
            g_last = tl.load(decay + line + first + high - 1)
            a = tl.load(eta + line + first + i, mask=live, other=0.0)
        g_res = g
        g_read = g
        if not DECAYED:
            g_res = decay_before(decay, line, first, i, high)
        if BEFORE:
            g_read = decay_before(decay, line, first, i, high)
        low_dS = dS.to(x.dtype)
        if d_states is not None:
            tl.store(d_states + at_chunk * (K * V) + state_at, low_dS, mask=in_state)
        p = tl.dot(x, tl.trans(qt), input_precision=DOT)
        p *= fade(causal, g_read[None, :] - g[:, None])
        du = tl.dot(x, low_dS, input_precision=DOT) * tl.exp2(g_last - g)[:, None]
        du = tl.dot(p.to(x.dtype), do, acc=du, input_precision=DOT) * a[:, None]
        dy = tl.dot(tl.trans(inv), du.to(x.dtype), acc=du, input_precision=DOT)
        if d_y is not None:
            store_tile(d_y, dy, first, i, h, cv, live, H, V, BV)
        read = (do.to(tl.float32) * tl.exp2(g_read)[:, None]).to(x.dtype)
        missed = (dy * -tl.exp2(g_res)[:, None]).to(x.dtype)
        dS = tl.dot(tl.trans(qt), read, acc=dS * tl.exp2(g_last), input_precision=DOT)
        dS = tl.dot(tl.trans(x), missed, acc=dS, input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS.to(d_state0.dtype.element_ty), mask=in_state)
