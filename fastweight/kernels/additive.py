"""Scalar-gain inner-product rules in chunks: (q, k, v, weight) -> (o, final S), for falcon-1a, -3a, linear attention.

A chunk is STRIDE = 64 - (R - 1) steps, worked on as 64 rows: the R - 1 pairs before it, which its first steps write
again, and its own. With G the cumulative log2 decay of its steps, F = G or G one step before (the read), w = eta / B:

    D[t, s] = 2^(F_t - G_s) w_s  (s <= t)       Band[s, j] = 1 where 0 <= s - j < R        W = D Band
    O = 2^F .* Q S_0 + (Q X^T .* W) Y           S_C = 2^G_C S_0 + X^T (W_C .* Y)           W_C = the last row, F = G_C

gates.py makes w and G, `fold` the sums over R steps that W consists of. `forward` walks the chunks, `backward_state`
walks them in reverse for the state gradients alone (hopper_additive.py is faster for some calls), and where sequences
are walked in pieces `join` finds the states between them. In additive_gradient.py `backward_token` makes all else, one
program a chunk. A pair that two chunks write has its second share of the gradient kept apart and added there by
`backward_halo`, so that results do not depend on the order of programs.

Traps: with R = 1 W is D and nothing is shared. Row i of a chunk is its step i, rows below 0 are the pairs before it.
What a product needs transposed is made the other way round, as in solve.py.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

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
    store_tile,
    whose,
)


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def fold(
    weight, decay, sums, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """What a chunk's end state would keep of pair j had it ended b steps after j, for b < WINDOW; then G there.

    sums [chunks, H, WINDOW + 1, 64]: steps outside the chunk write nothing, and do not decay.
    """
    HALO: tl.constexpr = WINDOW - 1
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, first, _low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    row = tl.arange(0, 64)
    at = h.to(tl.int64) * tokens + first
    shelf = sums + (chunk.to(tl.int64) * H + h) * (64 * (WINDOW + 1)) + row
    end = tl.minimum(high, 64 - HALO)
    kept = tl.zeros([64], tl.float32)
    g = tl.load(decay + at + tl.zeros_like(row))
    for b in tl.static_range(WINDOW):
        step = row - HALO + b
        passed = tl.load(decay + at + tl.minimum(tl.maximum(step, 0), end - 1))
        kept = kept * tl.exp2(passed - g) + tl.load(weight + at + step, mask=(step >= 0) & (step < end), other=0.0)
        g = passed
        tl.store(shelf + b * 64, kept)
    tl.store(shelf + WINDOW * 64, g)


@triton.jit
def spread(weight, decay, sums, at, shelf, g_read, high, BEFORE: tl.constexpr, WINDOW: tl.constexpr):
    """W [64, 64]: how step t sees pair j. at, shelf: where a chunk starts in weight and decay, and in sums.

    From R - 1 steps after j on W only decays: one exponent, and the R - 1 diagonals below it as they are.
    """
    row = tl.arange(0, 64)
    i = row - (WINDOW - 1)
    lag = i[:, None] - i[None, :]
    if BEFORE:
        lag -= 1
    if WINDOW == 1:
        w = tl.load(weight + at + i, mask=i < high, other=0.0)
        g = decay_rows(decay, at, 0, i, high)
    else:
        w = tl.load(sums + shelf + (WINDOW - 1) * 64 + row)
        g = tl.load(sums + shelf + WINDOW * 64 + row)
    seen = fade(lag >= WINDOW - 1, g_read[:, None] - g[None, :]) * w[None, :]
    for b in tl.static_range(WINDOW - 1):
        seen = tl.where(lag == b, tl.load(sums + shelf + b * 64 + row)[None, :], seen)
    return seen


@triton.jit
def kept_of(weight, decay, sums, at, shelf, g_last, high, WINDOW: tl.constexpr):
    """Last row of W [64]: what the chunk's end state keeps of each pair."""
    row = tl.arange(0, 64)
    if WINDOW == 1:
        w = tl.load(weight + at + row, mask=row < high, other=0.0)
        g = decay_rows(decay, at, 0, row, high)
    else:
        w = tl.load(sums + shelf + (WINDOW - 1) * 64 + row)
        g = tl.load(sums + shelf + WINDOW * 64 + row)
    return tl.exp2(g_last - g) * w


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, key0, previous, weight, decay, sums, state0, o, states, state1,
    cu, chunk_start, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: the final state, and where given o and the chunk states."""
    STRIDE: tl.constexpr = 65 - WINDOW
    pid = tl.program_id(0)
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(
        seg, cu, chunk_start, length, chunks, segments, per_segment, STRIDE
    )
    kh = h // (H // KH)
    i = tl.arange(0, 64) - (WINDOW - 1)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    S = load_state(state0, slot, state_at, in_state, BK, BV)
    line = h.to(tl.int64) * tokens
    for c in range(start, stop):
        first = begin + c * STRIDE
        high = size - c * STRIDE
        source, live = source_rows(previous, first, i, -c * STRIDE, high, SHIFT)
        x = load_keys(k, key0, previous, source, live, first, i, -c * STRIDE, n, kh, ck, KH, K, SHIFT, BK)
        y = load_tile(v, first, i, h, cv, live, H, V, BV)
        g_read = decay_before(decay, line, first, i, high) if BEFORE else decay_rows(decay, line, first, i, high)
        if high > STRIDE - 1:
            g_last = tl.load(decay + line + first + STRIDE - 1)
        else:
            g_last = tl.load(decay + line + first + high - 1)
        low_S = S.to(x.dtype)
        at_chunk = (lead + c).to(tl.int64) * H + h
        shelf = at_chunk * (64 * (WINDOW + 1))
        if states is not None:
            tl.store(states + at_chunk * (K * V) + state_at, low_S, mask=in_state)
        if o is not None:
            own = live & (i >= 0)
            qt = load_tile(q, first, i, kh, ck, own, KH, K, BK)
            p = tl.dot(qt, tl.trans(x), input_precision=DOT)
            p *= spread(weight, decay, sums, line + first, shelf, g_read, high, BEFORE, WINDOW)
            out = tl.dot(qt, low_S, input_precision=DOT) * tl.exp2(g_read)[:, None]
            out = tl.dot(p.to(x.dtype), y, acc=out, input_precision=DOT)
            store_tile(o, out, first, i, h, cv, own, H, V, BV)
        kept = kept_of(weight, decay, sums, line + first, shelf, g_last, high, WINDOW)
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
    """One segment of one head in reverse, BV value columns: dS_0, and where given the gradient of each chunk's end."""
    STRIDE: tl.constexpr = 65 - WINDOW
    pid = tl.program_id(0)
    h, seg = whose(pid, H, V, BV)
    _n, lead, start, stop, begin, size = segment_span(
        seg, cu, chunk_start, length, chunks, segments, per_segment, STRIDE
    )
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    dS = load_state(d_state1, slot, state_at, in_state, BK, BV)
    line = h.to(tl.int64) * tokens
    for back in range(0, stop - start):
        c = stop - 1 - back
        first = begin + c * STRIDE
        high = size - c * STRIDE
        own = (i < STRIDE) & (i < high)
        qt = load_tile(q, first, i, kh, ck, own, KH, K, BK)
        do = load_tile(d_o, first, i, h, cv, own, H, V, BV)
        g_read = decay_before(decay, line, first, i, high) if BEFORE else decay_rows(decay, line, first, i, high)
        if high > STRIDE - 1:
            g_last = tl.load(decay + line + first + STRIDE - 1)
        else:
            g_last = tl.load(decay + line + first + high - 1)
        at_chunk = (lead + c).to(tl.int64) * H + h
        if d_states is not None:
            tl.store(d_states + at_chunk * (K * V) + state_at, dS.to(qt.dtype), mask=in_state)
        read = (do.to(tl.float32) * tl.exp2(g_read)[:, None]).to(qt.dtype)
        dS = tl.dot(tl.trans(qt), read, acc=dS * tl.exp2(g_last), input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS.to(d_state0.dtype.element_ty), mask=in_state)


@triton.jit
def piece_decays(decay, line, lane, s, length, chunks, per_segment, WINDOW: tl.constexpr):
    """128 float64 numbers whose sum is log2 of what a piece leaves; log-decays [H, tokens] are summed inside chunks."""
    total = tl.zeros([128], tl.float64)
    stop = tl.minimum((s + 1) * per_segment, chunks)
    for start in range(s * per_segment, stop, 128):
        c = start + lane
        end = tl.minimum((c + 1) * (65 - WINDOW), length) - 1
        total += tl.load(decay + line + end, mask=c < stop, other=0.0).to(tl.float64)
    return total


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def join(
    local, decay, outside, found, length, chunks, tokens, segments, per_segment,
    H: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """States that segments start from (end at, in reverse), from what each adds to one that its decays leave of it."""
    n = tl.program_id(0) // H
    h = tl.program_id(0) % H
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float64)
    if outside is not None:
        state += tl.load(outside + (n.to(tl.int64) * H + h) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float64)
    line = h.to(tl.int64) * tokens + n.to(tl.int64) * length
    lane = tl.arange(0, 128)
    for turn in range(segments):
        s = segments - 1 - turn if REVERSE else turn
        here = ((n * segments + s).to(tl.int64) * H + h) * SIZE + at
        tl.store(found + here, state.to(tl.float32), mask=at < SIZE)
        total = piece_decays(decay, line, lane, s, length, chunks, per_segment, WINDOW)
        added = tl.load(local + here, mask=at < SIZE, other=0.0).to(tl.float64)
        state = state * tl.exp2(tl.sum(total, axis=0)) + added
