"""Regression over a window, what of a block of tokens does not depend on the state: (q, k, gates) -> steps and maps.

A block of T tokens touches J = T + R - 1 pairs; row (t, a) is pair t + a in the window of token t, R rows a token, 64
in all. With F = X S_0 the predictions at the block's start and W = Y - F, everything in it is linear in [W; F], by maps
that are the same for every value column and so are found by walking the recurrence once on the identity's columns:

    r_t,a    residual of pair t + a on S_{t-1}       z   coefficients of the pairs in S_t = carry_t S_0 + X^T z_t
    r of a pair that stays:  carry r + (1 - carry) y - w sum_b G r_t,b        G = X X^T, w = eta / B
    r of a pair that enters: W + (1 - carry so far) F - sum_j G z_j
    O = A [W; F] + decay .* Q S_0    Z = D [W; F]    r = B [W; F]    and in reverse h_t,a = x dS_t of rows = H [dO; dZ]

`measure` makes G, Q X^T, the top eigenvalue of each window's Gram matrix, steps and log-decays; `forward_maps` makes A
and D, or B; `backward_maps` makes H. All of it in float32.

Traps: a pair that is none (before the sequence) has x = 0, which makes every map ignore it. One column belongs to one
thread, so no sum crosses threads; the matrices are read back from memory as single numbers.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head, step_log_decay, step_sizes
from fastweight.kernels.tiles import chunk_span, decay_rows, has_pair, load_keys, load_tile, source_rows

SQUARINGS = tl.constexpr(19)
ENERGY = tl.constexpr(0)  # places in `facts`
COUNT = tl.constexpr(1)
CARRY = tl.constexpr(2)
VECTOR = tl.constexpr(3)


@triton.jit
def block_pairs(
    has_key, unmasked, first, low, high, n, PAIRS: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Token row of each pair of a block, the row of its key, and whether it is a pair [PAIRS]."""
    p = tl.arange(0, PAIRS)
    i = p - (WINDOW - 1)
    source, live = source_rows(None, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live & (p < TOKENS + WINDOW - 1), low, n)
    return i, source, pair


@triton.jit
def window_count(has_key, unmasked, first, t, low, high, n, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Pairs in the window of each token, at least 1; and whether the token has a pair of its own."""
    count = tl.zeros_like(t).to(tl.float32)
    for a in tl.static_range(WINDOW):
        i = t + a - (WINDOW - 1)
        source, live = source_rows(None, first, i, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
        count += tl.where(pair, 1.0, 0.0)
    return tl.maximum(count, 1.0), pair


@triton.jit
def _square(m, R: tl.constexpr):
    """M M over its trace (0 if that is 0) of symmetric matrices given by their lower triangles, row by row."""
    out = ()
    trace = tl.zeros_like(m[0])
    for i in tl.static_range(R):
        for j in tl.static_range(i + 1):
            total = m[i * (i + 1) // 2] * m[j * (j + 1) // 2]
            for k in tl.static_range(1, j + 1):
                total += m[i * (i + 1) // 2 + k] * m[j * (j + 1) // 2 + k]
            for k in tl.static_range(j + 1, i + 1):
                total += m[i * (i + 1) // 2 + k] * m[k * (k + 1) // 2 + j]
            for k in tl.static_range(i + 1, R):
                total += m[k * (k + 1) // 2 + i] * m[k * (k + 1) // 2 + j]
            out = out + (total,)
            if i == j:
                trace += total
    scale = 1 / tl.where(trace > 0, trace, 1.0)
    scaled = ()
    for p in tl.static_range(R * (R + 1) // 2):
        scaled = scaled + (out[p] * scale,)
    return scaled


@triton.jit
def top_eigenvector(m, R: tl.constexpr):
    """Largest eigenvalue of positive semidefinite matrices (see `_square`), and a tuple: a unit eigenvector of it.

    The Rayleigh quotient of the 2^19-th power, whose columns lie in the top eigenspace. Eigenvalues that it has not
    separated lie within R 2^-20 of each other, which is the error.
    A zero matrix has the vector 0, for which no gradient passes.
    """
    total = m[0]
    for i in tl.static_range(1, R):
        total += m[i * (i + 1) // 2 + i]
    scale = 1 / tl.where(total > 0, total, 1.0)
    power = ()
    for p in tl.static_range(R * (R + 1) // 2):
        power = power + (m[p] * scale,)
    m = power
    for _ in range(SQUARINGS):
        power = _square(power, R)
    value = tl.zeros_like(total)
    for i in tl.static_range(R):
        for j in tl.static_range(i + 1):
            value += (1 if i == j else 2) * m[i * (i + 1) // 2 + j] * power[i * (i + 1) // 2 + j]
    best = power[0]
    for i in tl.static_range(1, R):
        best = tl.maximum(best, power[i * (i + 1) // 2 + i])
    # The column with the largest diagonal is the longest; of equal ones the last.
    vector = ()
    for i in tl.static_range(R):
        entry = tl.zeros_like(best)
        for j in tl.static_range(R):
            chosen = power[j * (j + 1) // 2 + j] == best
            if j < i:
                entry = tl.where(chosen, power[i * (i + 1) // 2 + j], entry)
            else:
                entry = tl.where(chosen, power[j * (j + 1) // 2 + i], entry)
        vector = vector + (entry,)
    square = vector[0] * vector[0]
    for i in tl.static_range(1, R):
        square += vector[i] * vector[i]
    length = tl.where(square > 0, tl.sqrt(square), 1.0)
    unit = ()
    for i in tl.static_range(R):
        unit = unit + (vector[i] / length,)
    return value * total, unit


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def measure(
    q, k, beta, lam, key0, has_key, unmasked, gram, reads, weight, decay, facts,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    PAIRS: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """X X^T and Q X^T of one block of one head; weights, cumulative log-decays and facts of its tokens."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    t = tl.arange(0, PAIRS)
    own = (t < TOKENS) & (t < high)
    i, source, pair = block_pairs(has_key, unmasked, first, low, high, n, PAIRS, TOKENS, WINDOW, SHIFT)
    g = tl.zeros([PAIRS, PAIRS], tl.float32)
    p = tl.zeros([PAIRS, PAIRS], tl.float32)
    for start in range(0, K, BK):
        col = start + tl.arange(0, BK)
        x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, col, KH, K, SHIFT, BK)
        qt = load_tile(q, first, t, kh, col, own, KH, K, BK)
        g = tl.dot(x, tl.trans(x), acc=g, input_precision=DOT)
        p = tl.dot(qt, tl.trans(x), acc=p, input_precision=DOT)
    square = (block.to(tl.int64) * H + h) * (PAIRS * PAIRS)
    at = t[:, None] * PAIRS + t[None, :]
    tl.store(gram + square + at, g)
    tl.store(reads + square + at, p)
    tl.debug_barrier()
    entries = ()
    for a in tl.static_range(WINDOW):
        for b in tl.static_range(a + 1):
            entries = entries + (tl.load(gram + square + (t + a) * PAIRS + t + b, mask=own, other=0.0),)
    energy, vector = top_eigenvector(entries, WINDOW)
    count, writes = window_count(has_key, unmasked, first, t, low, high, n, WINDOW, SHIFT)
    energy /= count
    gain = load_head(beta, first, t, h, H, own & writes, 1.0)
    ridge = load_head(lam, first, t, h, H, own & writes, 0.0)
    eta, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, own & writes, eps, floor, SCALED, DIRECT)
    line = h.to(tl.int64) * tokens + first
    tl.store(weight + line + t, eta / count, mask=own)
    tl.store(decay + line + t, tl.cumsum(tl.where(writes, step_log_decay(alpha, carry, floor), 0.0), axis=0), mask=own)
    shelf = facts + h.to(tl.int64) * (tokens * (VECTOR + WINDOW)) + first + t
    tl.store(shelf + ENERGY * tokens, energy, mask=own)
    tl.store(shelf + COUNT * tokens, count, mask=own)
    tl.store(shelf + CARRY * tokens, tl.where(writes, carry, 1.0), mask=own)
    for a in tl.static_range(WINDOW):
        tl.store(shelf + (VECTOR + a) * tokens, vector[a], mask=own)


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def forward_maps(
    gram, reads, weight, facts, read_map, write_map, row_map, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """A and D [PAIRS, 2 PAIRS] of one block of one head, or where given only B [ROWS, 2 PAIRS]."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    n, first, _low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    number = block.to(tl.int64) * H + h
    matrix = gram + number * (PAIRS * PAIRS)
    seen = reads + number * (PAIRS * PAIRS)
    line = h.to(tl.int64) * tokens + first
    shelf = facts + h.to(tl.int64) * (tokens * (VECTOR + WINDOW)) + CARRY * tokens + first
    p = tl.arange(0, PAIRS)
    c = tl.arange(0, 2 * PAIRS)
    zero = tl.zeros([2 * PAIRS], tl.float32)
    # z of pairs that have left the window, and in `live` of those in it, whose residuals are `window`.
    z = tl.zeros([PAIRS, 2 * PAIRS], tl.float32)
    window = ()
    live = ()
    for a in tl.static_range(WINDOW):
        window = window + (tl.where(c == a, 1.0, 0.0),)
        live = live + (zero,)
    left = tl.full([], 1.0, tl.float32)
    for t in range(0, TOKENS):
        w = tl.load(weight + line + t, mask=t < high, other=0.0)
        carry = tl.load(shelf + t, mask=t < high, other=1.0)
        if row_map is not None:
            for a in tl.static_range(WINDOW):
                at = (number * ROWS + t * WINDOW + a) * (2 * PAIRS) + c
                tl.store(row_map + at, window[a].to(row_map.dtype.element_ty))
        if BEFORE and row_map is None:
            row = tl.sum(tl.load(seen + t * PAIRS + p)[:, None] * z, axis=0)
            for a in tl.static_range(WINDOW):
                row += tl.load(seen + t * PAIRS + t + a) * live[a]
            tl.store(read_map + (number * PAIRS + t) * (2 * PAIRS) + c, row.to(read_map.dtype.element_ty))
        z *= carry
        wrote = ()
        for a in tl.static_range(WINDOW):
            wrote = wrote + (carry * live[a] + w * window[a],)
        if not BEFORE and row_map is None:
            row = tl.sum(tl.load(seen + t * PAIRS + p)[:, None] * z, axis=0)
            for a in tl.static_range(WINDOW):
                row += tl.load(seen + t * PAIRS + t + a) * wrote[a]
            tl.store(read_map + (number * PAIRS + t) * (2 * PAIRS) + c, row.to(read_map.dtype.element_ty))
        z = tl.where((p == t)[:, None], wrote[0][None, :], z)
        left *= carry
        new = t + WINDOW
        some = new < PAIRS
        enter = tl.where(c == new, 1.0, 0.0) + tl.where(c == PAIRS + new, 1 - left, 0.0)
        enter -= tl.sum(tl.load(matrix + new * PAIRS + p, mask=(p < PAIRS) & some, other=0.0)[:, None] * z, axis=0)
        stay = ()
        for a in tl.static_range(1, WINDOW):
            enter -= tl.load(matrix + new * PAIRS + t + a, mask=some, other=0.0) * wrote[a]
            # y = W + F
            target = tl.where((c == t + a) | (c == PAIRS + t + a), 1 - carry, 0.0)
            met = tl.load(matrix + (t + a) * PAIRS + t) * window[0]
            for b in tl.static_range(1, WINDOW):
                met += tl.load(matrix + (t + a) * PAIRS + t + b) * window[b]
            stay = stay + (carry * window[a] + target - w * met,)
        window = stay + (enter,)
        live = wrote[1:] + (zero,)
    if row_map is None:
        for a in tl.static_range(WINDOW - 1):
            z = tl.where((p == TOKENS + a)[:, None], live[a][None, :], z)
        at = (number * PAIRS + p)[:, None] * (2 * PAIRS) + c[None, :]
        tl.store(write_map + at, z.to(write_map.dtype.element_ty))
        none = tl.zeros([PAIRS, 2 * PAIRS], read_map.dtype.element_ty)
        tl.store(read_map + at, none, mask=(p >= TOKENS)[:, None] & (c < 2 * PAIRS)[None, :])
    else:
        for i in range(TOKENS * WINDOW, ROWS):
            tl.store(row_map + (number * ROWS + i) * (2 * PAIRS) + c, zero.to(row_map.dtype.element_ty))


@triton.jit
def _reads_of(seen, g, c, at, t, p, some, TOKENS: tl.constexpr, PAIRS: tl.constexpr, BEFORE: tl.constexpr):
    """How pair p at time t is read by every later token: decay .* (Q X^T)[., p] over the columns of dO."""
    later = c > t if BEFORE else c >= t
    keep = later & (c < TOKENS) & some
    return tl.load(seen + c * PAIRS + p, mask=keep, other=0.0) * tl.exp2(tl.where(keep, g - at, float("-inf")))


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_maps(
    gram, reads, weight, decay, facts, row_map, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """H [ROWS, 2 PAIRS] of one block of one head: what `forward_maps` does, in reverse."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    n, first, _low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    number = block.to(tl.int64) * H + h
    matrix = gram + number * (PAIRS * PAIRS)
    seen = reads + number * (PAIRS * PAIRS)
    line = h.to(tl.int64) * tokens
    shelf = facts + line * (VECTOR + WINDOW) + CARRY * tokens + first
    p = tl.arange(0, PAIRS)
    c = tl.arange(0, 2 * PAIRS)
    zero = tl.zeros([2 * PAIRS], tl.float32)
    if BEFORE:
        g = tl.load(decay + line + first - 1 + tl.minimum(c, high), mask=c > 0, other=0.0)
    else:
        g = decay_rows(decay, line, first, c, high)
    g_last = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
    # Coefficients in dS_t of pairs that have left the window, and in `live` of those in it, whose rows are `window`.
    z = tl.zeros([PAIRS, 2 * PAIRS], tl.float32)
    window = ()
    live = ()
    for a in tl.static_range(WINDOW):
        read = _reads_of(seen, g, c, g_last, TOKENS - 1, TOKENS - 1 + a, True, TOKENS, PAIRS, BEFORE)
        window = window + (tl.where(c == PAIRS + TOKENS - 1 + a, 1.0, 0.0) + read,)
        live = live + (zero,)
    for back in range(0, TOKENS):
        t = TOKENS - 1 - back
        for a in tl.static_range(WINDOW):
            at = (number * ROWS + t * WINDOW + a) * (2 * PAIRS) + c
            tl.store(row_map + at, window[a].to(row_map.dtype.element_ty))
        w = tl.load(weight + line + first + t, mask=t < high, other=0.0)
        carry = tl.load(shelf + t, mask=t < high, other=1.0)
        wrote = ()
        for a in tl.static_range(WINDOW):
            wrote = wrote + (carry * live[a] - w * window[a],)
        z = tl.where((p == t + WINDOW - 1)[:, None], wrote[WINDOW - 1][None, :], z * carry)
        some = t > 0
        at = tl.load(decay + line + first + tl.minimum(t, high) - 1, mask=some, other=0.0)
        enter = tl.where(c == PAIRS + t - 1, tl.exp2(g_last - at), 0.0)
        enter += _reads_of(seen, g, c, at, t - 1, t - 1, some, TOKENS, PAIRS, BEFORE)
        enter += tl.sum(tl.load(matrix + (t - 1) * PAIRS + p, mask=(p < PAIRS) & some, other=0.0)[:, None] * z, axis=0)
        reader = t if BEFORE else t - 1
        stay = ()
        for a in tl.static_range(WINDOW - 1):
            enter += tl.load(matrix + (t - 1) * PAIRS + t + a, mask=some, other=0.0) * wrote[a]
            pull = tl.where(c == reader, tl.load(seen + reader * PAIRS + t + a, mask=some, other=0.0), 0.0)
            met = tl.load(matrix + (t + a) * PAIRS + t) * window[0]
            for b in tl.static_range(1, WINDOW):
                met += tl.load(matrix + (t + a) * PAIRS + t + b) * window[b]
            stay = stay + (carry * window[a] + pull - w * met,)
        window = (enter,) + stay
        live = (zero,) + wrote[: WINDOW - 1]
    for i in range(TOKENS * WINDOW, ROWS):
        tl.store(row_map + (number * ROWS + i) * (2 * PAIRS) + c, zero.to(row_map.dtype.element_ty))
