"""Gradients of the two edges at a rank's ends: queries, pairs and gates of its own first tokens, and its last pairs.

Notation as in edges.py. The same arithmetic serves both sides: of this rank's edge the gradients of what lies on this
rank are kept, and of the next one's too. They are added to what the walks found of these tokens.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005

import triton
import triton.language as tl

from fastweight.kernels.edges import (
    early_reads,
    edge_sizes,
    edge_step,
    edge_write,
    load_columns,
    pair_key,
    pair_lives,
    pair_target,
    store_columns,
)
from fastweight.kernels.gates import step_gradient


@triton.jit
def _add_rows(pointer, token, keep, first, h, col, rows, H: tl.constexpr, W: tl.constexpr):
    at = pointer + (first + token[:, None]) * (H * W) + h * W + col[None, :]
    mask = keep[:, None] & (col < W)[None, :]
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (old + rows).to(pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["units", "rank", "length", "segments"])
def settle(
    messages, returned, begun, d_begun, ended, d_next, d_q, d_k, d_v, d_beta, d_lam, d_tail, d_state0, units, rank,
    length, segments, eps, floor,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BP: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, MATRIX: tl.constexpr, COLUMN: tl.constexpr, SCALED: tl.constexpr,
    DIRECT: tl.constexpr, UNIT: tl.constexpr, TAIL: tl.constexpr, HEAD: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Gradients of this rank's edge (side 0), and of its last pairs as those of the next rank's edge (side 1).

    begun, ended: states before the two edges; d_begun, d_next: gradients behind them. d_q (but for the last edge
    token), d_beta and d_lam are overwritten there, d_k and d_v added to; d_tail, d_state0: of what lies before all.
    """
    nh = tl.program_id(0)
    side = tl.program_id(1)
    n = nh // H
    h = nh % H
    EDGE: tl.constexpr = WINDOW - 1 + SHIFT
    READS: tl.constexpr = EDGE - 1
    tail = messages + ((rank + side) * units + nh).to(tl.int64) * UNIT + TAIL
    head = messages + ((rank + side + 1) * units + nh).to(tl.int64) * UNIT + HEAD
    reads = returned + ((rank + side) * units + nh).to(tl.int64) * BACK + K * V
    before = begun + nh.to(tl.int64) * (K * V)
    behind = d_begun + nh.to(tl.int64) * (K * V)
    if side == 1:
        before = ended + ((n * segments + segments - 1).to(tl.int64) * H + h) * (K * V)
        behind = d_next + nh.to(tl.int64) * (K * V)
    first = n.to(tl.int64) * length
    ck = tl.arange(0, BK)
    pair = tl.arange(0, BP)
    d_x = tl.zeros([BP, BK], tl.float32)
    d_read = tl.zeros([BP, BK], tl.float32)
    d_gain = tl.zeros([BP], tl.float32)
    d_ridge = tl.zeros([BP], tl.float32)
    d_energy = tl.zeros([BP], tl.float32)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        d_y = tl.zeros([BP, BV], tl.float32)
        states = (load_columns(before, ck, cv, K, V, BK, BV),)  # before each token
        for t in tl.static_range(EDGE - 1):
            weight, carry = edge_step(tail, head, t, ck, cv, eps, floor, K, V, WINDOW, SHIFT, COLUMN, SCALED, DIRECT)
            states = states + (
                edge_write(states[t], tail, head, t, weight, carry, ck, cv, K, V, WINDOW, SHIFT, MATRIX),
            )
        G = load_columns(behind, ck, cv, K, V, BK, BV)
        for t in tl.static_range(EDGE - 1, -1, -1):
            S = states[t]
            if t < EDGE - 1:
                d_out = tl.load(reads + READS * K + t * V + cv, mask=cv < V, other=0.0)
                d_read += tl.where((pair == t)[:, None], tl.sum(states[t + 1] * d_out[None, :], axis=1)[None, :], 0.0)
                G = early_reads(G, reads, 1, t, ck, cv, K, V, READS)
            energy, count, gain, ridge, writes, eta, carry = edge_sizes(
                tail, head, t, ck, cv, eps, floor, K, V, WINDOW, SHIFT, COLUMN, SCALED, DIRECT
            )
            weight = eta / count
            new = G * carry[None, :]
            d_weight = tl.zeros([BV], tl.float32)
            for b in tl.static_range(WINDOW):
                lives = pair_lives(tail, t + b, K, V, WINDOW, SHIFT)
                x = pair_key(tail, head, t + b, ck, K, WINDOW, SHIFT)
                r = pair_target(tail, head, t + b, cv, K, V, WINDOW, SHIFT)
                if MATRIX:
                    r -= tl.sum(x[:, None] * S, axis=0)
                felt = lives * tl.sum(x[:, None] * G, axis=0)
                d_weight += felt * r
                to_x = G * (lives * weight * r)[None, :]
                if MATRIX:
                    to_x -= S * (weight * felt)[None, :]
                    new -= x[:, None] * (weight * felt)[None, :]
                d_y += tl.where((pair == t + b)[:, None], (weight * felt)[None, :], 0.0)
                d_x += tl.where((pair == t + b)[:, None], tl.sum(to_x, axis=1)[None, :], 0.0)
            d_log = carry * tl.sum(S * G, axis=0)
            to_gain, to_ridge, to_energy = step_gradient(
                d_weight / count, d_log, energy, gain, ridge, writes, eps, floor, SCALED, DIRECT, WINDOW == 1
            )
            G = new
            if COLUMN:  # noqa: SIM102
                if d_beta is not None:
                    at = ((first + t) * H + h) * V + cv
                    tl.store(d_beta + at, to_gain.to(d_beta.dtype.element_ty), mask=(cv < V) & (side == 0))
            real = cv < V
            d_gain += tl.where(pair == t, tl.sum(tl.where(real, to_gain, 0.0), axis=0), 0.0)
            d_ridge += tl.where(pair == t, tl.sum(tl.where(real, to_ridge, 0.0), axis=0), 0.0)
            d_energy += tl.where(pair == t, tl.sum(tl.where(real, to_energy, 0.0), axis=0) / count, 0.0)
        token = tl.where(side == 0, pair - (WINDOW - 1), length - (WINDOW - 1) + pair)
        keep = tl.where(side == 0, (pair >= WINDOW - 1) & (pair < WINDOW - 1 + EDGE), pair < WINDOW - 1)
        _add_rows(d_v, token, keep, first, h, cv, d_y, H, V)
        if d_tail is not None:
            to = d_tail + nh.to(tl.int64) * (HEAD - TAIL) + WINDOW * K + pair[:, None] * V + cv[None, :]
            tl.store(to, d_y, mask=((pair < WINDOW - 1) & (side == 0))[:, None] & (cv < V)[None, :])
        if d_state0 is not None:  # noqa: SIM102
            if side == 0:
                store_columns(d_state0 + nh.to(tl.int64) * (K * V), G, ck, cv, K, V, BK, BV)
    for t in tl.static_range(EDGE):
        share = tl.sum(tl.where(pair == t, d_energy, 0.0), axis=0)
        for b in tl.static_range(WINDOW):
            lives = pair_lives(tail, t + b, K, V, WINDOW, SHIFT)
            x = pair_key(tail, head, t + b, ck, K, WINDOW, SHIFT)
            d_x += tl.where((pair == t + b)[:, None], (2 * share * lives * x)[None, :], 0.0)
    at = pair + 1 - SHIFT
    token = tl.where(side == 0, at - WINDOW, length - WINDOW + at)
    keep = tl.where(side == 0, (at >= WINDOW) & (pair < WINDOW - 1 + EDGE), at < WINDOW)
    _add_rows(d_k, token, keep, first, h, ck, d_x, H, K)
    if d_tail is not None:
        to = d_tail + nh.to(tl.int64) * (HEAD - TAIL) + at[:, None] * K + ck[None, :]
        tl.store(to, d_x, mask=((at < WINDOW) & (side == 0))[:, None] & (ck < K)[None, :])
    edge = pair < EDGE
    to = d_q + (first + pair[:, None]) * (H * K) + h * K + ck[None, :]
    mask = ((pair < EDGE - 1) & (side == 0))[:, None] & (ck < K)[None, :]
    tl.store(to, d_read.to(d_q.dtype.element_ty), mask=mask)
    if not COLUMN:  # noqa: SIM102
        if d_beta is not None:
            to = d_beta + (first + pair) * H + h
            tl.store(to, d_gain.to(d_beta.dtype.element_ty), mask=edge & (side == 0))
    if d_lam is not None:
        to = d_lam + (first + pair) * H + h
        tl.store(to, d_ridge.to(d_lam.dtype.element_ty), mask=edge & (side == 0))
