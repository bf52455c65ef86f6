"""Inner-product rules with a gain per value column, falcon-2a: (q, k, v, beta, lam) -> (o, final S), block by block.

Every column c has its own decay, so no matrix of weights between tokens serves them all. With l the log2 decay of each
token [64, V] and u = eta .* y, a token j < i reaches token i through the tokens between them. i and j first differ in
one binary digit: at that level, of half h, j lies in the left and i in the right half of one block of 2 h tokens, and

    2^(l_(j+1) + .. + l_i) = 2^(from j to the end of the left half) 2^(from the start of the right half to i)

Both exponents are sums of l, never positive, never divided: nothing overflows, whatever the decay. `paths` holds these
sums as 0/1 matrices A_h, so that E_h = 2^(A_h l) makes both factors for all tokens of a block at once, and

    O = 2^(A_read l) .* Q S_0 + sum_h right .* E_h .* [same block] (Q X^T) (left .* E_h .* u) + diag(Q X^T) u
    S_C = 2^(sum l) S_0 + X^T (2^(A_rest l) .* u)

`forward` walks blocks of 16 tokens, 4 levels, with everything transposed: [V, .] tiles stay operands in registers, the
small tables and keys are those in shared memory. It keeps states every 64 tokens. `backward_state` walks chunks of 64
in reverse for the state gradients alone; columns_gradient.py makes all else, with 6 levels.

Traps: 16-bit calls hold l in float16 as an operand, whose digits show less than those of bfloat16 products do; what
is carried from block to block, sum l, is float32. They take the device's own logarithm, which the interpreter lacks.
With reads before writes A_read and the right half of A_h stop one token earlier, and there is no diagonal. l stops at
LEAST: beyond it 2^l is 0 in float32, and 0 times infinity is not.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fastweight.kernels.gates import LOG2E, load_head, step_log_decay, step_sizes
from fastweight.kernels.tiles import (
    column_block,
    has_pair,
    load_keys,
    load_state,
    load_tile,
    own_columns,
    segment_span,
    source_rows,
    store_tile,
    whose,
)

LEAST = tl.constexpr(-160.0)


@triton.jit
def draw_paths(paths, SIZE: tl.constexpr, LEVELS: tl.constexpr, BEFORE: tl.constexpr, FLIP: tl.constexpr):
    """A_h of every level, A_read, A_rest: 0/1 matrices [LEVELS + 2, SIZE, SIZE], or with FLIP each transposed."""
    level = tl.program_id(0)
    i = tl.arange(0, SIZE)
    to, over = i[:, None], i[None, :]
    if FLIP:
        to, over = over, to
    upto = over < to if BEFORE else over <= to
    near = (to ^ over) < tl.where(level < LEVELS, 1 << level, SIZE)
    right = tl.where(level < LEVELS, ((to >> level) & 1) == 1, level == LEVELS)
    passed = near & ((right & upto) | ((right == 0) & (over > to)))
    at = paths + level * (SIZE * SIZE) + i[:, None] * SIZE + i[None, :]
    tl.store(at, passed.to(paths.dtype.element_ty))


@triton.jit
def path(paths, level):
    """One matrix [64, 64] of `paths`."""
    i = tl.arange(0, 64)
    return tl.load(paths + level * 4096 + i[:, None] * 64 + i[None, :])


@triton.jit
def faded(paths, level, log_decay, DOT: tl.constexpr):
    """E = 2^(A l) [64, BV]."""
    return tl.exp2(tl.dot(path(paths, level), log_decay, input_precision=DOT))


@triton.jit
def side_by_side(paths, start, COUNT: tl.constexpr):
    """COUNT flipped matrices of `paths` from `start` on, [16, COUNT 16]."""
    i = tl.arange(0, 16)
    column = tl.arange(0, COUNT * 16)
    return tl.load(paths + (start + column // 16)[None, :] * 256 + i[:, None] * 16 + (column % 16)[None, :])


@triton.jit
def halves(tile, COUNT: tl.constexpr, BV: tl.constexpr):
    """[BV, COUNT 16] as its left and its right half."""
    parts = tl.permute(tl.reshape(tile, [BV, 2, COUNT * 8]), (0, 2, 1))
    return tl.split(parts)


@triton.jit
def meets(i, j, level):
    """Pairs of tokens whose numbers first differ in this binary digit."""
    return ((i >> level) ^ (j >> level)) == 1


@triton.jit
def quick_log(alpha, carry):
    """log2 of the carry to 1e-5 of it: a series and the device's own logarithm."""
    series = -LOG2E * alpha * (1 + alpha * (1 / 2 + alpha * (1 / 3)))
    return tl.where(alpha < 1 / 64, series, libdevice.fast_log2f(carry))


@triton.jit
def column_steps(
    energy, gain, ridge, pair, eps, floor, SCALED: tl.constexpr, DIRECT: tl.constexpr, EXACT: tl.constexpr
):
    """eta and log2 decay of every token and column; what belongs to a token only has a 1 for the columns.

    EXACT: l to the last digits of float32; else `quick_log`.
    """
    eta, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
    log_decay = step_log_decay(alpha, carry, floor) if EXACT else quick_log(alpha, carry)
    return eta, tl.where(writes, tl.maximum(log_decay, LEAST), 0.0)


@triton.jit
def _reach(u, fade, scores, level, DOT: tl.constexpr, LOW: tl.constexpr):
    """What the right halves of a level read of its left halves [BV, 16]; scores[j, i] = x_j . q_i."""
    b = tl.arange(0, 16)
    pairs = meets(b[:, None], b[None, :], level) & (b[:, None] < b[None, :])
    scores = tl.where(pairs, scores, 0.0).to(LOW)
    return fade * tl.dot((fade * u).to(LOW), scores, input_precision=DOT)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, beta, lam, key0, has_key, unmasked, previous, paths, state0, o, energies, states, state1, spans, wild,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, SAVE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: o, the final state, and with SAVE chunk states and key energies.

    spans: where wanted, the log2 decay of the whole segment [segments of all sequences, H, V]. wild: where given, only
    the programs noted there (hopper_columns.py).
    """
    pid = tl.program_id(0)
    if wild is not None:  # noqa: SIM102
        if tl.load(wild + pid) == 0:
            return
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    b = tl.arange(0, 16)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    LOW: tl.constexpr = q.dtype.element_ty
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    levels, ends = side_by_side(paths, 0, 4), side_by_side(paths, 4, 2)
    S = tl.zeros([BV, BK], tl.float32)  # transposed: its rows, the columns of V, stay operands in registers
    span = tl.zeros([BV], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if state0 is not None:
        S += tl.trans(tl.load(state0 + slot + state_at, mask=in_state, other=0.0).to(tl.float32))
    for block in range(start * 4, tl.minimum(stop * 4, tl.cdiv(size, 16))):
        first = begin + block * 16
        low, high = -block * 16, size - block * 16
        source, live = source_rows(previous, first, b, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, b, source, live, low, n)
        x = load_keys(k, key0, previous, source, live, first, b, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, b, kh, ck, live, KH, K, BK)
        y = tl.trans(load_tile(v, first, b, h, cv, live, H, V, BV)).to(tl.float32)
        gain = tl.trans(load_tile(beta, first, b, h, cv, pair, H, V, BV)).to(tl.float32)
        ridge = load_head(lam, first, b, h, H, pair, 0.0)
        energy = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        if SAVE:
            tl.store(
                energies + h.to(tl.int64) * tokens + first + b, energy, mask=live & (column_block(pid, V, BV) == 0)
            )
        eta, log_decay = column_steps(
            energy[None, :], gain, ridge[None, :], pair[None, :], eps, floor, SCALED, DIRECT, EXACT
        )
        u = eta * y
        low_S = S.to(LOW)
        if SAVE and block % 4 == 0:
            at_chunk = (lead + block // 4).to(tl.int64) * H + h
            tl.store(states + at_chunk * (K * V) + state_at, tl.trans(low_S), mask=in_state)
        scores = tl.dot(x, tl.trans(qt), input_precision=DOT)
        passed = log_decay.to(paths.dtype.element_ty)
        from_start, to_end = halves(tl.exp2(tl.dot(passed, ends, input_precision=DOT)), 2, BV)
        out = tl.dot(low_S, tl.trans(qt), input_precision=DOT) * from_start
        if not BEFORE:
            out += tl.sum(tl.where(b[:, None] == b[None, :], scores, 0.0), axis=0)[None, :] * u
        fade01, fade23 = halves(tl.exp2(tl.dot(passed, levels, input_precision=DOT)), 4, BV)
        fade0, fade1 = halves(fade01, 2, BV)
        fade2, fade3 = halves(fade23, 2, BV)
        out += _reach(u, fade0, scores, 0, DOT, LOW)
        out += _reach(u, fade1, scores, 1, DOT, LOW)
        out += _reach(u, fade2, scores, 2, DOT, LOW)
        out += _reach(u, fade3, scores, 3, DOT, LOW)
        store_tile(o, tl.trans(out), first, b, h, cv, live, H, V, BV)
        total = tl.sum(log_decay, axis=1)
        span += total
        S = tl.dot((u * to_end).to(LOW), x, acc=S * tl.exp2(total)[:, None], input_precision=DOT)
    if state1 is not None:
        tl.store(state1 + slot + state_at, tl.trans(S), mask=in_state)
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
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    i = tl.arange(0, 64)
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    dS = load_state(d_state1, slot, state_at, in_state, BK, BV)
    span = tl.zeros([BV], tl.float32)
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
        _eta, log_decay = column_steps(
            energy[:, None], gain, ridge[:, None], pair[:, None], eps, floor, SCALED, DIRECT, EXACT
        )
        at_chunk = (lead + c).to(tl.int64) * H + h
        tl.store(d_states + at_chunk * (K * V) + state_at, dS.to(qt.dtype), mask=in_state)
        read = do.to(tl.float32) * faded(paths, 6, log_decay.to(paths.dtype.element_ty), DOT)
        total = tl.sum(log_decay, axis=0)
        span += total
        dS = tl.dot(tl.trans(qt), read.to(qt.dtype), acc=dS * tl.exp2(total)[None, :], input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, dS, mask=in_state)
    if spans is not None:
        tl.store(spans + (seg.to(tl.int64) * H + h) * V + cv, span, mask=cv < V)


@triton.jit(do_not_specialize=["segments"])
def join(
    local, spans, outside, found, segments,
    H: tl.constexpr, SIZE: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """States that segments start from (end at, in reverse), from what each adds to one that its decays leave of it.

    spans: log2 decays [segments of all sequences, H, V].
    """
    n = tl.program_id(0) // H
    h = tl.program_id(0) % H
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float64)
    if outside is not None:
        state += tl.load(outside + (n.to(tl.int64) * H + h) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float64)
    for turn in range(segments):
        s = segments - 1 - turn if REVERSE else turn
        here = (n * segments + s).to(tl.int64) * H + h
        tl.store(found + here * SIZE + at, state.to(tl.float32), mask=at < SIZE)
        left = tl.exp2(tl.load(spans + here * V + at % V, mask=at < SIZE, other=0.0))
        state = state * left + tl.load(local + here * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float64)
