"""falcon-2a where chunks forget little, forward: (q, k, v, beta, lam) -> (o, final S), chunk by chunk.

With l the log2 decay of each token and column, g its sums up to and with each token of a chunk, and u = eta .* y, a
chunk is products of matrices although every column has its own decay:

    O = 2^g .* (Q S_0 + [j <= i] (Q X^T) (2^-g .* u))           S_C = 2^(g_C) .* (S_0 + X^T (2^-g .* u))

as long as 2^-g is a number with room for what it multiplies: the chunk is tame. A walk that met another one notes that,
and the kernel of columns.py, which takes any decay, then follows and writes everything anew.

Traps: as in columns.py. With reads before writes O has 2^g of one token earlier, and j < i.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.columns import column_steps
from fastweight.kernels.gates import load_head
from fastweight.kernels.tiles import (
    column_block,
    has_pair,
    load_keys,
    load_tile,
    own_columns,
    segment_span,
    source_rows,
    store_tile,
    whose,
)

TAME = tl.constexpr(-60.0)  # least log2 decay of a tame chunk
TAME_HALF = tl.constexpr(-4.0)  # the same in float16


@triton.jit
def as_operand(log_decay, LOW: tl.constexpr):
    """l as it enters products."""
    if tl.float32 == LOW:
        return log_decay
    else:
        return log_decay.to(tl.float16)


@triton.jit
def summed_across(passed, DOT: tl.constexpr):
    """Sums up to and with each token of [BV, 64]."""
    i = tl.arange(0, 64)
    ones = tl.where(i[:, None] <= i[None, :], 1.0, 0.0).to(passed.dtype)
    return tl.dot(passed, ones, input_precision=DOT)


@triton.jit
def is_wild(total, LOW: tl.constexpr):
    """Whether the inverse of some column's log2 decay of a chunk is out of range."""
    return tl.min(total) < (TAME_HALF if tl.float16 == LOW else TAME)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, beta, lam, key0, has_key, unmasked, previous, state0, o, energies, states, state1, spans, wild,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, SAVE: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One segment of one head, BV value columns: o, the final state, and with SAVE chunk states and key energies.

    spans: where wanted, the log2 decay of the whole segment [segments of all sequences, H, V]. wild: a byte a program,
    whether some chunk was not tame, so that all of this is wrong.
    """
    pid = tl.program_id(0)
    h, seg = whose(pid, H, V, BV)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    b = tl.arange(0, 64)
    ck = tl.arange(0, BK)
    cv, state_at, in_state = own_columns(pid, ck, K, V, BK, BV)
    LOW: tl.constexpr = q.dtype.element_ty
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    S = tl.zeros([BV, BK], tl.float32)  # transposed: its rows, the columns of V, stay operands in registers
    span = tl.zeros([BV], tl.float32)
    lowest = tl.zeros([BV], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if state0 is not None:
        S += tl.trans(tl.load(state0 + slot + state_at, mask=in_state, other=0.0).to(tl.float32))
    for c in range(start, stop):
        first = begin + c * 64
        low, high = -c * 64, size - c * 64
        source, live = source_rows(previous, first, b, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, b, source, live, low, n)
        x = load_keys(k, key0, previous, source, live, first, b, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, b, kh, ck, live, KH, K, BK)
        y = tl.trans(load_tile(v, first, b, h, cv, live, H, V, BV)).to(tl.float32)
        gain = tl.trans(load_tile(beta, first, b, h, cv, pair, H, V, BV)).to(tl.float32)
        ridge = load_head(lam, first, b, h, H, pair, 0.0)
        energy = tl.sum(x.to(tl.float32) * x.to(tl.float32), axis=1)
        low_S = S.to(LOW)
        if SAVE:
            tl.store(
                energies + h.to(tl.int64) * tokens + first + b, energy, mask=live & (column_block(pid, V, BV) == 0)
            )
            at_chunk = (lead + c).to(tl.int64) * H + h
            tl.store(states + at_chunk * (K * V) + state_at, tl.trans(low_S), mask=in_state)
        eta, log_decay = column_steps(
            energy[None, :], gain, ridge[None, :], pair[None, :], eps, floor, SCALED, DIRECT, EXACT
        )
        passed = as_operand(log_decay, LOW)
        g = summed_across(passed, DOT)
        passed = passed.to(tl.float32)
        g_read = g - passed if BEFORE else g
        m = (eta * y * tl.exp2(-tl.maximum(g, TAME - 2))).to(LOW)
        reads = b[:, None] < b[None, :] if BEFORE else b[:, None] <= b[None, :]
        scores = tl.where(reads, tl.dot(x, tl.trans(qt), input_precision=DOT), 0.0).to(LOW)
        out = tl.dot(low_S, tl.trans(qt), input_precision=DOT)
        out = tl.dot(m, scores, acc=out, input_precision=DOT) * tl.exp2(g_read)
        store_tile(o, tl.trans(out), first, b, h, cv, live, H, V, BV)
        total = tl.sum(log_decay, axis=1)
        inside = tl.sum(passed, axis=1)  # of the rounded l that g is made of, so that their errors cancel
        span += total
        lowest = tl.minimum(lowest, total)
        S *= tl.exp2(total - inside)[:, None]
        S = tl.dot(m, x, acc=S, input_precision=DOT) * tl.exp2(inside)[:, None]
    tl.store(wild + pid, is_wild(lowest, LOW).to(tl.int8))
    if state1 is not None:
        tl.store(state1 + slot + state_at, tl.trans(S), mask=in_state)
    if spans is not None:
        tl.store(spans + (seg.to(tl.int64) * H + h) * V + cv, span, mask=cv < V)
