"""Regression over a window, what is measured before anything is walked: (q, k, gates) -> X X^T, Q X^T, steps, decays.

A block of T tokens touches J = T + R - 1 pairs; the window of token t is pairs t .. t + R - 1 of them. `measure` makes
G = X X^T, Q X^T, the top eigenvalue of each window's Gram matrix, steps and log-decays, all of it in float32.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head, step_log_decay, step_sizes
from fastweight.kernels.tiles import chunk_span, has_pair, load_keys, load_tile, source_rows

SQUARINGS = tl.constexpr(19)
SINGLE = tl.constexpr(2e-4)  # what squares of eigenvalues may miss of a trace of 1; after one more squaring, 1e-8
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
    """M M over its trace (0 if that is 0), and the trace, of symmetric matrices: their lower triangles, row by row."""
    out = ()
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
                if i:
                    trace += total
                else:
                    trace = total
    scale = 1 / tl.where(trace > 0, trace, 1.0)
    scaled = ()
    for p in tl.static_range(R * (R + 1) // 2):
        scaled = scaled + (out[p] * scale,)
    return scaled, trace


@triton.jit
def top_eigenvector(m, R: tl.constexpr):
    """Largest eigenvalue of positive semidefinite matrices (see `_square`), and a tuple: a unit eigenvector of it.

    The Rayleigh quotient of the 2^19-th power, whose columns lie in the top eigenspace, or of the power from which on
    no matrix has more than one eigenvalue left. Eigenvalues that it has not separated lie within R 2^-20 of each other,
    which is the error.
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
    done = 0
    left = 1.0
    while (done < SQUARINGS) & (left > SINGLE):
        power, trace = _square(power, R)
        left = tl.max(tl.where(trace > 0, 1 - trace, 0.0), axis=0)  # of the power before this one
        done += 1
    value = m[0] * power[0]
    for i in tl.static_range(1, R):
        for j in tl.static_range(i + 1):
            value += (1 if i == j else 2) * m[i * (i + 1) // 2 + j] * power[i * (i + 1) // 2 + j]
    best = power[0]
    for i in tl.static_range(1, R):
        best = tl.maximum(best, power[i * (i + 1) // 2 + i])
    # The column with the largest diagonal is the longest; of equal ones the last.
    vector = ()
    for i in tl.static_range(R):
        entry = power[i * (i + 1) // 2]
        for j in tl.static_range(1, R):
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


@triton.jit
def store_facts(facts, h, tokens, first, t, own, energy, count, carry, vector, WINDOW: tl.constexpr):
    """What a token's window amounts to, at its places: energy, pairs, what is carried, and the top eigenvector."""
    shelf = facts + h.to(tl.int64) * (tokens * (VECTOR + WINDOW)) + first + t
    tl.store(shelf + ENERGY * tokens, energy, mask=own)
    tl.store(shelf + COUNT * tokens, count, mask=own)
    tl.store(shelf + CARRY * tokens, carry, mask=own)
    for a in tl.static_range(WINDOW):
        tl.store(shelf + (VECTOR + a) * tokens, vector[a], mask=own)


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def measure(
    q, k, beta, lam, key0, has_key, unmasked, gram, reads, weight, decay, facts,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    PAIRS: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """X X^T and Q X^T of one block of one head; where asked weights, cumulative log-decays and facts of its tokens.

    base: the first block that is asked for; what is kept of blocks, not of tokens, begins with it.
    """
    h = tl.program_id(1)
    n, first, low, high = chunk_span(tl.program_id(0) + base, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
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
    square = (tl.program_id(0).to(tl.int64) * H + h) * (PAIRS * PAIRS)
    at = t[:, None] * PAIRS + t[None, :]
    tl.store(gram + square + at, g)
    tl.store(reads + square + at, p)
    if facts is not None:
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
        eta, _r, _d, alpha, carry, _o, writes = step_sizes(
            energy, gain, ridge, own & writes, eps, floor, SCALED, DIRECT
        )
        line = h.to(tl.int64) * tokens + first
        tl.store(weight + line + t, eta / count, mask=own)
        tl.store(
            decay + line + t, tl.cumsum(tl.where(writes, step_log_decay(alpha, carry, floor), 0.0), axis=0), mask=own
        )
        store_facts(facts, h, tokens, first, t, own, energy, count, tl.where(writes, carry, 1.0), vector, WINDOW)
