"""The edge of a rank: its first tokens, which write pairs of the rank before, one by one and in float32.

Device functions of borders.py. Pairs are counted from the oldest that the edge needs: WINDOW - 1 of the rank before
(`tail` points to these in its message: keys, targets, how many there are, whether there is a last key), then those of
the edge's own tokens (`head`: keys, targets, gates). With shifted keys the first own pair has the last key there.

    S_t = carry_t S_{t-1} + sum_r x_r ( weight_t .* ( y_r - [MATRIX] S_{t-1}^T x_r ) )^T      (SPEC section 3)
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import step_sizes
from fastweight.kernels.tiles import state_tile


@triton.jit
def load_columns(place, ck, cv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    at, inside = state_tile(ck, cv, K, V, BK, BV)
    return tl.load(place + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_columns(place, S, ck, cv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    at, inside = state_tile(ck, cv, K, V, BK, BV)
    tl.store(place + at, S, mask=inside)


@triton.jit
def pair_key(tail, head, PAIR: tl.constexpr, ck, K: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """Write feature of a pair [BK]; pairs are counted from the oldest that the edge needs. tail: of the rank before."""
    at: tl.constexpr = PAIR + 1 - SHIFT
    if at < WINDOW:
        return tl.load(tail + at * K + ck, mask=ck < K, other=0.0)
    else:
        return tl.load(head + (at - WINDOW) * K + ck, mask=ck < K, other=0.0)


@triton.jit
def pair_target(tail, head, PAIR: tl.constexpr, cv, K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr,
                SHIFT: tl.constexpr):  # fmt: skip
    """Its target [BV]."""
    OWN_KEYS: tl.constexpr = WINDOW - 1
    if PAIR < WINDOW - 1:
        return tl.load(tail + WINDOW * K + PAIR * V + cv, mask=cv < V, other=0.0)
    else:
        return tl.load(head + OWN_KEYS * K + (PAIR - WINDOW + 1) * V + cv, mask=cv < V, other=0.0)


@triton.jit
def pair_lives(tail, PAIR: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """1 where there is such a pair, else 0: a sequence that begins has none before, and no key for its first target."""
    COUNT: tl.constexpr = WINDOW * K + (WINDOW - 1) * V
    if PAIR < WINDOW - 1:
        return tl.where(tl.load(tail + COUNT) >= WINDOW - 1 - PAIR, 1.0, 0.0)
    elif PAIR == WINDOW - 1 and SHIFT == 1:
        return tl.load(tail + COUNT + 1)
    else:
        return tl.load(tail + COUNT) * 0.0 + 1.0


@triton.jit
def edge_energy(tail, head, TOKEN: tl.constexpr, ck, K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr,
                SHIFT: tl.constexpr):  # fmt: skip
    """Mean energy of an edge token's pairs, and their number (at least 1)."""
    total = 0.0
    count = 0.0
    for b in tl.static_range(WINDOW):
        lives = pair_lives(tail, TOKEN + b, K, V, WINDOW, SHIFT)
        x = pair_key(tail, head, TOKEN + b, ck, K, WINDOW, SHIFT)
        total += lives * tl.sum(x * x, axis=0)
        count += lives
    count = tl.maximum(count, 1.0)
    return total / count, count


@triton.jit
def edge_gates(tail, head, TOKEN: tl.constexpr, cv, K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr,
               SHIFT: tl.constexpr, COLUMN: tl.constexpr):  # fmt: skip
    """beta and lam [BV] of an edge token, and whether it has a pair of its own."""
    EDGE: tl.constexpr = WINDOW - 1 + SHIFT
    GAIN: tl.constexpr = (WINDOW - 1) * K + EDGE * V
    if COLUMN:
        gain = tl.load(head + GAIN + TOKEN * V + cv, mask=cv < V, other=0.0)
        ridge = tl.load(head + GAIN + EDGE * V + TOKEN + cv * 0)
    else:
        gain = tl.load(head + GAIN + TOKEN + cv * 0)
        ridge = tl.load(head + GAIN + EDGE + TOKEN + cv * 0)
    pair = (pair_lives(tail, TOKEN + WINDOW - 1, K, V, WINDOW, SHIFT) + cv * 0.0) > 0
    return gain, ridge, pair


@triton.jit
def edge_sizes(tail, head, TOKEN: tl.constexpr, ck, cv, eps, floor, K: tl.constexpr, V: tl.constexpr,
               WINDOW: tl.constexpr, SHIFT: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr,
               DIRECT: tl.constexpr):  # fmt: skip
    """Of an edge token: energy, pairs, gates, whether it writes, and the step and carry [BV] that follow."""
    energy, count = edge_energy(tail, head, TOKEN, ck, K, V, WINDOW, SHIFT)
    energy += cv * 0.0
    gain, ridge, writes = edge_gates(tail, head, TOKEN, cv, K, V, WINDOW, SHIFT, COLUMN)
    eta, _r, _d, _a, carry, _o, _w = step_sizes(energy, gain, ridge, writes, eps, floor, SCALED, DIRECT)
    return energy, count, gain, ridge, writes, eta, carry


@triton.jit
def edge_step(tail, head, TOKEN: tl.constexpr, ck, cv, eps, floor, K: tl.constexpr, V: tl.constexpr,
              WINDOW: tl.constexpr, SHIFT: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr,
              DIRECT: tl.constexpr):  # fmt: skip
    """Weight of every pair and carry of an edge token [BV] (SPEC section 3)."""
    _e, count, _g, _r, _w, eta, carry = edge_sizes(
        tail, head, TOKEN, ck, cv, eps, floor, K, V, WINDOW, SHIFT, COLUMN, SCALED, DIRECT
    )
    return eta / count, carry


@triton.jit
def edge_write(S, tail, head, TOKEN: tl.constexpr, weight, carry, ck, cv, K: tl.constexpr, V: tl.constexpr,
               WINDOW: tl.constexpr, SHIFT: tl.constexpr, MATRIX: tl.constexpr):  # fmt: skip
    """The state [BK, BV] behind an edge token, from the one before it."""
    new = S * carry[None, :]
    for b in tl.static_range(WINDOW):
        lives = pair_lives(tail, TOKEN + b, K, V, WINDOW, SHIFT)
        x = pair_key(tail, head, TOKEN + b, ck, K, WINDOW, SHIFT)
        r = pair_target(tail, head, TOKEN + b, cv, K, V, WINDOW, SHIFT)
        if MATRIX:
            r -= tl.sum(x[:, None] * S, axis=0)
        new += x[:, None] * (lives * weight * r)[None, :]
    return new


@triton.jit
def edge_forth(S, tail, head, q, early, first, n, h, ck, cv, eps, floor, H: tl.constexpr, KH: tl.constexpr,
               K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, MATRIX: tl.constexpr,
               COLUMN: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr):  # fmt: skip
    """The state behind the edge; where `early` is given also the reads of all its tokens but the last."""
    EDGE: tl.constexpr = WINDOW - 1 + SHIFT
    for t in tl.static_range(EDGE):
        weight, carry = edge_step(tail, head, t, ck, cv, eps, floor, K, V, WINDOW, SHIFT, COLUMN, SCALED, DIRECT)
        S = edge_write(S, tail, head, t, weight, carry, ck, cv, K, V, WINDOW, SHIFT, MATRIX)
        if early is not None:  # noqa: SIM102
            if t < EDGE - 1:
                qt = tl.load(q + ((first + t) * KH + h // (H // KH)) * K + ck, mask=ck < K, other=0.0).to(tl.float32)
                read = tl.sum(qt[:, None] * S, axis=0)
                at = ((n * (EDGE - 1) + t).to(tl.int64) * H + h) * V + cv
                tl.store(early + at, read.to(early.dtype.element_ty), mask=cv < V)
    return S


@triton.jit
def early_reads(G, reads, SIGN: tl.constexpr, TOKEN: tl.constexpr, ck, cv, K: tl.constexpr, V: tl.constexpr,
                READS: tl.constexpr):  # fmt: skip
    """G plus or minus q d_o^T of an edge token that is not the last. reads: its part of a message in reverse."""
    qt = tl.load(reads + TOKEN * K + ck, mask=ck < K, other=0.0)
    d_out = tl.load(reads + READS * K + TOKEN * V + cv, mask=cv < V, other=0.0)
    return G + SIGN * qt[:, None] * d_out[None, :]


@triton.jit
def without_reads(G, reads, ck, cv, K: tl.constexpr, V: tl.constexpr, READS: tl.constexpr):
    """The gradient behind the edge, from that which the walk found there."""
    for t in tl.static_range(READS):
        G = early_reads(G, reads, -1, t, ck, cv, K, V, READS)
    return G


@triton.jit
def edge_back(G, tail, head, reads, ck, cv, eps, floor, K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr,
              SHIFT: tl.constexpr, MATRIX: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr,
              DIRECT: tl.constexpr):  # fmt: skip
    """The state gradient before the edge, from the one behind it."""
    EDGE: tl.constexpr = WINDOW - 1 + SHIFT
    for t in tl.static_range(EDGE - 1, -1, -1):
        if t < EDGE - 1:
            G = early_reads(G, reads, 1, t, ck, cv, K, V, EDGE - 1)
        weight, carry = edge_step(tail, head, t, ck, cv, eps, floor, K, V, WINDOW, SHIFT, COLUMN, SCALED, DIRECT)
        new = G * carry[None, :]
        if MATRIX:
            x = pair_key(tail, head, t, ck, K, WINDOW, SHIFT)
            new -= x[:, None] * (weight * tl.sum(x[:, None] * G, axis=0))[None, :]
        G = new
    return G
