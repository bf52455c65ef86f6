"""Inner-product rules with a gain per value column, falcon-2a: (q, k, v, beta, lam) -> (o, final S), in chunks of 64.

Every column c has its own decay, so no matrix of weights between tokens serves them all. With l the log2 decay of each
token [64, V] and u = eta .* y, a token j < i reaches token i through the tokens between them. i and j first differ in
one binary digit: at that level, of half h, j lies in the left and i in the right half of one block of 2 h tokens, and

    2^(l_(j+1) + .. + l_i) = 2^(from j to the end of the left half) 2^(from the start of the right half to i)

Both exponents are sums of l, never positive, never divided: nothing overflows, whatever the decay. `paths` holds these
sums as 0/1 matrices A_h [64, 64], so that E_h = 2^(A_h l) makes both factors for all tokens at once, and

    O = 2^(A_read l) .* Q S_0 + sum_h right .* E_h .* [same block] (Q X^T) (left .* E_h .* u) + diag(Q X^T) u
    S_C = 2^(sum l) S_0 + X^T (2^(A_rest l) .* u)

`forward` walks the chunks, `backward_state` in reverse for the state gradients alone; columns_gradient.py makes all
else.

Traps: 16-bit calls hold l in float16 as an operand, whose digits show less than those of bfloat16 products do; what
is carried from chunk to chunk, sum l, is float32. With reads before writes A_read and the right half of A_h stop one
token earlier, and there is no diagonal. l stops at LEAST: beyond it 2^l is 0 in float32, and 0 times infinity is not.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head, step_log_decay, step_sizes
from fastweight.kernels.tiles import (
    has_pair,
    load_keys,
    load_tile,
    segment_span,
    source_rows,
    state_tile,
    store_tile,
)

LEVELS = tl.constexpr(6)  # halves of 1, 2, 4, .. 32 tokens
READ = tl.constexpr(6)  # from the start of the chunk to each token
REST = tl.constexpr(7)  # from each token to the end of the chunk
LEAST = tl.constexpr(-160.0)


@triton.jit
def draw_paths(paths, BEFORE: tl.constexpr, FLIP: tl.constexpr):
    """The 0/1 matrices [8, 64, 64] of the module's equations, or with FLIP each transposed."""
    level = tl.program_id(0)
    i = tl.arange(0, 64)
    to, over = i[:, None], i[None, :]
    if FLIP:
        to, over = over, to
    upto = over < to if BEFORE else over <= to
    near = (to ^ over) < tl.where(level < 6, 1 << level, 64)
    right = tl.where(level < 6, ((to >> level) & 1) == 1, level == 6)
    passed = near & ((right & upto) | ((right == 0) & (over > to)))
    at = paths + level * 4096 + i[:, None] * 64 + i[None, :]
    tl.store(at, passed.to(paths.dtype.element_ty))


@triton.jit
def path(paths, level):
    """One matrix of `paths`."""
    i = tl.arange(0, 64)
    return tl.load(paths + level * 4096 + i[:, None] * 64 + i[None, :])


@triton.jit
def faded(paths, level, log_decay, DOT: tl.constexpr):
    """E = 2^(A l) [64, BV]."""
    return tl.exp2(tl.dot(path(paths, level), log_decay, input_precision=DOT))


@triton.jit
def meets(level):
    """Pairs of tokens [64, 64] whose numbers first differ in this binary digit."""
    i = tl.arange(0, 64)
    return ((i[:, None] ^ i[None, :]) >> level) == 1


@triton.jit
def column_steps(energy, gain, ridge, pair, eps, floor, SCALED: tl.constexpr, DIRECT: tl.constexpr):
    """eta and log2 decay [64, BV] from energies and lam [64] and beta [64, BV]."""
    eta, _r, _d, alpha, carry, _o, writes = step_sizes(
        energy[:, None], gain, ridge[:, None], pair[:, None], eps, floor, SCALED, DIRECT
    )
    return eta, tl.where(writes, tl.maximum(step_log_decay(alpha, carry, floor), LEAST), 0.0)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, beta, lam, key0, has_key, unmasked, previous, paths, state0, o, energies, states, state1, spans,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, SAVE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: o, the final state, and with SAVE chunk states and key energies.

    spans: where wanted, the log2 decay of the whole segment [segments of all sequences, H, V].
    """
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    S = tl.zeros([BK, BV], tl.float32)
    span = tl.zeros([BV], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if state0 is not None:
        S += tl.load(state0 + slot + state_at, mask=in_state, other=0.0).to(tl.float32)
    for c in range(start, stop):
        first = begin + c * 64
        low, high = -c * 64, size - c * 64
        source, live = source_rows(previous, first, i, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
        x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
        y = load_tile(v, first, i, h, cv, live, H, V, BV)
        gain = load_tile(beta, first, i, h, cv, pair, H, V, BV).to(tl.float32)
        ridge = load_head(lam, first, i, h, H, pair, 0.0)
        energy = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        if SAVE:
            tl.store(energies + h.to(tl.int64) * tokens + first + i, energy, mask=live & (pid % blocks == 0))
        eta, log_decay = column_steps(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        u = eta * y.to(tl.float32)
        passed = log_decay.to(paths.dtype.element_ty)
        low_S = S.to(x.dtype)
        if SAVE:
            at_chunk = (lead + c).to(tl.int64) * H + h
            tl.store(states + at_chunk * (K * V) + state_at, low_S, mask=in_state)
        p = tl.dot(qt, tl.trans(x), input_precision=DOT)
        out = tl.dot(qt, low_S, input_precision=DOT) * faded(paths, READ, passed, DOT)
        if not BEFORE:
            out += tl.sum(tl.where(i[:, None] == i[None, :], p, 0.0), axis=1)[:, None] * u
        p = p.to(x.dtype)
        for level in tl.range(0, LEVELS, num_stages=1):
            right = (((i >> level) & 1) == 1)[:, None]
            fade = faded(paths, level, passed, DOT)
            written = tl.where(right, 0.0, fade * u).to(x.dtype)
            reached = tl.dot(tl.where(meets(level), p, 0.0), written, input_precision=DOT)
            out += tl.where(right, fade, 0.0) * reached
        store_tile(o, out, first, i, h, cv, live, H, V, BV)
        u = (u * faded(paths, REST, passed, DOT)).to(x.dtype)
        total = tl.sum(log_decay, axis=0)
        span += total
        S = tl.dot(tl.trans(x), u, acc=S * tl.exp2(total)[None, :], input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, S, mask=in_state)
    if spans is not None:
        tl.store(spans + (seg.to(tl.int64) * H + h) * V + cv, span, mask=cv < V)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q, d_o, beta, lam, has_key, unmasked, previous, paths, energies, d_state1, d_states, d_state0, spans,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, BV value columns: the state gradient at every chunk end, and dS_0."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    dS = tl.zeros([BK, BV], tl.float32)
    span = tl.zeros([BV], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if d_state1 is not None:
        dS += tl.load(d_state1 + slot + state_at, mask=in_state, other=0.0).to(tl.float32)
    for back in range(0, stop - start):
        c = stop - 1 - back
        first = begin + c * 64
        low, high = -c * 64, size - c * 64
        source, live = source_rows(previous, first, i, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
        qt = load_tile(q, first, i, kh, ck, live, KH, K, BK)
        do = load_tile(d_o, first, i, h, cv, live, H, V, BV)
        gain = load_tile(beta, first, i, h, cv, pair, H, V, BV).to(tl.float32)
        ridge = load_head(lam, first, i, h, H, pair, 0.0)
        energy = tl.load(energies + h.to(tl.int64) * tokens + first + i, mask=live, other=0.0)
        _eta, log_decay = column_steps(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        at_chunk = (lead + c).to(tl.int64) * H + h
        tl.store(d_states + at_chunk * (K * V) + state_at, dS.to(qt.dtype), mask=in_state)
        read = do.to(tl.float32) * faded(paths, READ, log_decay.to(paths.dtype.element_ty), DOT)
        total = tl.sum(log_decay, axis=0)
        span += total
        dS = tl.dot(tl.trans(qt), read.to(qt.dtype), acc=dS * tl.exp2(total)[None, :], input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS, mask=in_state)
    if spans is not None:
        tl.store(spans + (seg.to(tl.int64) * H + h) * V + cv, span, mask=cv < V)
