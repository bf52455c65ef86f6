"""Regression with a gain per value column, the way back: gradients of (o, final S) -> those of all inputs.

With dS_t the gradient of a column's state after token t, B_j = dS_t . x_j is to the way back what F is to the way
there, and moves through the same shared numbers, t running down:

    B_j <- B_j + P_tj dO_t for j <= t     dU_t = B_t     dY_t = eta_t dU_t     B_j <- carry_t B_j - G_tj dY_t for j < t

`backward_state` walks sequences in reverse and keeps what every chunk of 64 tokens ends with. `backward_chunk` then has
all chunks side by side: it makes the states of its four blocks again from the residuals, goes through B once more, and
makes the rest. dL_t, of the natural log of a carry, is a sum of terms that all carry it, never a difference of totals:
one for every pair of a write before t and a read or miss behind it, of what comes from the block's start, and of what
goes on to its end. What all columns give to G and P is needed as numbers between tokens, although each column fades in
its own way: i and j first differ in one binary digit, and at that level 2 h the two halves of a block each bring
factors of their own, from j to the end of its half and from the start of the other to i, none above 1.

Traps: as in solve_columns.py; steps are written out by fours. A program of `backward_chunk` takes chunk after chunk, so
that there are few places to put states aside. Gradients of keys and queries come one per block of columns.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import step_gradient
from fastweight.kernels.solve_columns import (
    apart,
    beside,
    carries_after,
    carries_before,
    column_rates,
    coupling,
    earlier_by_one,
    keys_and_queries,
    later_by_one,
    load_columns,
    meets,
    pick,
    store_columns,
)
from fastweight.kernels.tiles import (
    chunk_span,
    has_pair,
    load_keys,
    segment_span,
    source_rows,
    state_tile,
    store_key_gradient,
    store_tile,
)

# Chunks that hopper_scaled_columns_gradient.py leaves to `backward_chunk`: some column keeps less than this of its
# state, or some token less than that.
LEAST_KEPT = tl.constexpr(2.0**-60)
LEAST_KEPT_HALF = tl.constexpr(2.0**-4)  # in float16
LEAST_CARRY = tl.constexpr(2.0**-8)


@triton.jit
def forgets_much(kept, least, LOW: tl.constexpr):
    """1 if a chunk is one of those, or 0; kept: the products of its carries, least: the smallest ones [columns]."""
    much = (kept < (LEAST_KEPT_HALF if tl.float16 == LOW else LEAST_KEPT)) | (least < LEAST_CARRY)
    return tl.max(much.to(tl.int32), axis=0)


@triton.jit
def write_gradients(ends, do, eta, carry, rows, b, high, BEFORE: tl.constexpr):
    """dU [BV, 16] of a block's writes, from B at its end and the gradients of its reads; rows: G and Q X^T."""
    B = ends
    for quarter in tl.range(0, 16, 4, num_stages=1):
        for s in tl.static_range(4):
            t = 15 - quarter - s
            reads = coupling(rows, b, t, high, 1) * pick(do, b, t)[:, None]
            if not BEFORE:
                B = tl.where((b <= t)[None, :], B + reads, B)
            d_y = (pick(eta, b, t) * pick(B, b, t))[:, None]
            moved = pick(carry, b, t)[:, None] * B - coupling(rows, b, t, high, 0) * d_y
            if BEFORE:
                moved += reads
            B = tl.where((b < t)[None, :], moved, B)
    return B


@triton.jit
def pairs_felt(u, do, d_y, carry, rows, b, high, BEFORE: tl.constexpr):
    """Gradient of each log-carry from the pairs of one block, at the token before, and what the end sees of writes."""
    z = u
    felt = tl.zeros_like(u)
    for quarter in tl.range(0, 16, 4, num_stages=1):
        for s in tl.static_range(4):
            i = quarter + s
            earlier = (b < i)[None, :]
            miss = coupling(rows, b, i, high, 0) * pick(d_y, b, i)[:, None] * -z
            faded = tl.where(earlier, z * pick(carry, b, i)[:, None], z)
            seen = faded
            if BEFORE:
                seen = z
            read = tl.where(earlier, coupling(rows, b, i, high, 1) * pick(do, b, i)[:, None] * seen, 0.0)
            between = tl.cumsum(tl.where(earlier, miss + read, 0.0), axis=1)
            felt += tl.where((b < i - 1)[None, :], between, 0.0)
            if not BEFORE:
                felt += tl.where((b == i - 1)[None, :], tl.sum(read, axis=1)[:, None], 0.0)
            z = faded
    return felt, z


@triton.jit
def pair_gradients(
    u, do, d_y, carry, previous, b, LOW: tl.constexpr, BEFORE: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr
):
    """Gradients of G, and under them of P [32, 16], summed over columns."""
    i = tl.arange(0, 32)
    later = i % 16
    found = tl.zeros([32, 16], tl.float32)
    following = earlier_by_one(carry, b, 1.0)
    if not BEFORE:
        both = beside(tl.zeros_like(do), do, BV).to(LOW)
        own = tl.dot(tl.trans(both), u.to(LOW), input_precision=DOT)
        found = tl.where(later[:, None] == b[None, :], own, 0.0)
    for level in tl.static_range(4):
        before = carries_before(previous, b, BV, 1 << level)
        reads = do * before
        if not BEFORE:
            reads *= carry
        after = carries_after(following, b, BV, 1 << level)
        both = beside(d_y * -before, reads, BV).to(LOW)
        meet = meets(later[:, None], b[None, :], level) & (later[:, None] > b[None, :])
        found += tl.where(meet, tl.dot(tl.trans(both), (u * after).to(LOW), input_precision=DOT), 0.0)
    return found


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment", "one"])
def backward_state(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, couplings, energies, d_state1, d_states, d_state0,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor, one,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One sequence of one head in reverse, BV value columns: the state gradient at every chunk end, and dS_0."""
    pid = tl.program_id(0)
    blocks: tl.constexpr = (V + BV - 1) // BV
    h = (pid // blocks) % H
    seg = pid // (blocks * H)
    n, lead, start, stop, begin, size = segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, 64)
    kh = h // (H // KH)
    b = tl.arange(0, 16)
    ck = tl.arange(0, BK)
    cv = (pid % blocks) * BV + tl.arange(0, BV)
    lone = (pid % blocks) * BV + tl.arange(0, BV) * one
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    LOW: tl.constexpr = q.dtype.element_ty
    dS = tl.zeros([BV, BK], tl.float32)
    slot = (seg.to(tl.int64) * H + h) * (K * V)
    if d_state1 is not None:
        dS += tl.trans(tl.load(d_state1 + slot + state_at, mask=in_state, other=0.0).to(tl.float32))
    last = tl.minimum(stop * 4, tl.cdiv(size, 16)) - 1
    for back in tl.range(0, last + 1 - start * 4):
        block = last - back
        first = begin + block * 16
        low, high = -block * 16, size - block * 16
        line = kh.to(tl.int64) * tokens + first
        xq = keys_and_queries(k, q, key0, previous, first, low, high, n, kh, ck, KH, K, SHIFT, BK)
        low_dS = dS.to(LOW)
        if (block % 4 == 3) | (block == last):
            at_chunk = (lead + block // 4).to(tl.int64) * H + h
            tl.store(d_states + at_chunk * (K * V) + state_at, tl.trans(low_dS), mask=in_state)
        ends, _unused = apart(tl.dot(low_dS, tl.trans(xq), input_precision=DOT), BV)
        source, live = source_rows(previous, first, b, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, b, source, live, low, n)
        do = load_columns(d_o, first, b, h, lone, live, H, V)
        _g, _r, _e, eta, carry = column_rates(
            beta, lam, energies, line, first, b, h, lone, pair, live, eps, floor, H, V, SCALED, DIRECT
        )
        d_y = eta * write_gradients(ends, do, eta, carry, couplings + line * 32, b, high, BEFORE)
        before = carries_before(later_by_one(carry, b, 1.0), b, BV, 16)
        reads = do * before
        if not BEFORE:
            reads *= carry
        total = pick(before, b, 15) * pick(carry, b, 15)
        back_to_start = beside(d_y * -before, reads, BV).to(LOW)
        dS = tl.dot(back_to_start, xq, acc=dS * total[:, None], input_precision=DOT)
    if d_state0 is not None:
        tl.store(d_state0 + slot + state_at, tl.trans(dS), mask=in_state)


@triton.jit
def _states_of_blocks(
    states, aside, coupled, k, q, beta, lam, key0, has_key, unmasked, previous, energies, residual, at_state, line, n,
    first, low, high, h, kh, cv, lone, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Puts the states that the blocks of a chunk start from aside [4, BV, BK], and their X X^T and Q X^T."""
    b = tl.arange(0, 16)
    i = tl.arange(0, 32)
    ck = tl.arange(0, BK)
    state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
    LOW: tl.constexpr = q.dtype.element_ty
    at = tl.arange(0, BV)[:, None] * BK + ck[None, :]
    S = tl.trans(tl.load(states + at_state + state_at, mask=in_state, other=0.0)).to(tl.float32)
    for part in tl.range(0, tl.minimum(4, tl.cdiv(high, 16)), num_stages=1):
        tl.store(aside + part * (BV * BK) + at, S.to(LOW))
        row = part * 16
        xq = keys_and_queries(k, q, key0, previous, first + row, low - row, high - row, n, kh, ck, KH, K, SHIFT, BK)
        source, live = source_rows(previous, first + row, b, low - row, high - row, SHIFT)
        x = load_keys(k, key0, previous, source, live, first + row, b, low - row, n, kh, ck, KH, K, SHIFT, BK)
        both = tl.dot(xq, tl.trans(x), input_precision=DOT)
        tl.store(coupled + row * 32 + (i % 16 * 32 + i // 16 * 16)[:, None] + b[None, :], both)
        pair = has_pair(unmasked, has_key, first + row, b, source, live, low - row, n)
        left = load_columns(residual, first + row, b, h, lone, live, H, V)
        _g, _r, _e, eta, carry = column_rates(
            beta, lam, energies, line + row, first + row, b, h, lone, pair, live, eps, floor, H, V, SCALED, DIRECT
        )
        after = carries_after(earlier_by_one(carry, b, 1.0), b, BV, 16)
        z = eta * left * after
        total = pick(carry, b, 0) * pick(after, b, 0)
        z = beside(z, tl.zeros_like(z), BV).to(LOW)
        S = tl.dot(z, xq, acc=S * total[:, None], input_precision=DOT)


@triton.jit(do_not_specialize=["length", "chunks", "tokens", "slots", "sequences", "one"])
def backward_chunk(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, energies, residual, states, d_states, asides,
    couplings, d_q, d_k, d_v, d_beta, d_lam, d_key0, wild,
    cu, chunk_seq, chunk_start, length, chunks, tokens, slots, sequences, eps, floor, one,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Chunks of one head, BV value columns: all gradients but dS_0; d_q, d_k, d_lam and d_key0 one per column block.

    wild [chunks, H]: where given, only the chunks noted there.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    b = tl.arange(0, 16)
    i = tl.arange(0, 32)
    ck = tl.arange(0, BK)
    LOW: tl.constexpr = q.dtype.element_ty
    at = tl.arange(0, BV)[:, None] * BK + ck[None, :]
    aside = asides + tl.program_id(0).to(tl.int64) * (4 * BV * BK)
    coupled = couplings + tl.program_id(0).to(tl.int64) * 2048
    for task in tl.range(tl.program_id(0), slots * H * blocks, tl.num_programs(0), num_stages=1):
        block = task % blocks
        h = (task // blocks) % H
        chunk = task // (blocks * H)
        n, start, low0, high0 = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
        idle = n < 0
        if wild is not None:
            idle |= tl.load(wild + task // blocks, mask=n >= 0, other=0) == 0
        if not idle:
            parts = tl.minimum(4, tl.cdiv(high0, 16))
            kh = h // (H // KH)
            cv = block * BV + tl.arange(0, BV)
            lone = block * BV + tl.arange(0, BV) * one
            line0 = kh.to(tl.int64) * tokens + start
            shelf = block.to(tl.int64) * tokens * H
            at_state = (chunk.to(tl.int64) * H + h) * (K * V)
            state_at, in_state = state_tile(ck, cv, K, V, BK, BV)
            tl.debug_barrier()  # the chunk before is done with what was put aside
            _states_of_blocks(
                states, aside, coupled, k, q, beta, lam, key0, has_key, unmasked, previous, energies, residual,
                at_state, line0, n, start, low0, high0, h, kh, cv, lone, eps, floor,
                H, KH, K, V, BK, BV, SHIFT, SCALED, DIRECT, DOT,
            )  # fmt: skip
            tl.debug_barrier()
            dS = tl.trans(tl.load(d_states + at_state + state_at, mask=in_state, other=0.0)).to(tl.float32)
            for turn in tl.range(0, parts, num_stages=1):
                row = (parts - 1 - turn) * 16
                first, low, high, line = start + row, low0 - row, high0 - row, line0 + row
                rows = coupled + row * 32
                xq = keys_and_queries(k, q, key0, previous, first, low, high, n, kh, ck, KH, K, SHIFT, BK)
                S = tl.load(aside + row // 16 * (BV * BK) + at)
                low_dS = dS.to(LOW)
                through = tl.sum(S.to(tl.float32) * dS, axis=1)
                seen, out = apart(tl.dot(S, tl.trans(xq), input_precision=DOT), BV)
                ends, _unused = apart(tl.dot(low_dS, tl.trans(xq), input_precision=DOT), BV)
                source, live = source_rows(previous, first, b, low, high, SHIFT)
                pair = has_pair(unmasked, has_key, first, b, source, live, low, n)
                do = load_columns(d_o, first, b, h, lone, live, H, V)
                left = load_columns(residual, first, b, h, lone, live, H, V)
                gain, ridge, energy, eta, carry = column_rates(
                    beta, lam, energies, line, first, b, h, lone, pair, live, eps, floor, H, V, SCALED, DIRECT
                )
                d_u = write_gradients(ends, do, eta, carry, rows, b, high, BEFORE)
                d_y = eta * d_u
                store_columns(d_v, d_y, first, b, h, lone, live, H, V)
                u = eta * left
                felt, z = pairs_felt(u, do, d_y, carry, rows, b, high, BEFORE)
                previous_carry = later_by_one(carry, b, 1.0)
                before = carries_before(previous_carry, b, BV, 16)
                total = pick(before, b, 15) * pick(carry, b, 15)
                misses = d_y * -before
                reads = do * before
                if BEFORE:
                    from_start = earlier_by_one(misses * seen + reads * out, b, 0.0)
                else:
                    reads *= carry
                    from_start = earlier_by_one(misses * seen, b, 0.0) + reads * out
                felt += tl.cumsum(z * ends, axis=1)
                d_log = tl.cumsum(from_start, axis=1, reverse=True) + later_by_one(felt, b, 0.0)
                d_log += (through * total)[:, None]
                d_gain, d_ridge, d_energy = step_gradient(
                    left * d_u, d_log, energy[None, :], gain, ridge[None, :], pair[None, :], eps, floor, SCALED, DIRECT,
                    True,
                )  # fmt: skip
                store_columns(d_beta, d_gain, first, b, h, lone, live, H, V)
                if d_lam is not None:
                    to_lam = d_lam + shelf + first * H + h
                    tl.store(to_lam + b * H, tl.sum(d_ridge, axis=0), mask=live)
                share = tl.gather(tl.sum(d_energy, axis=0), i % 16, axis=0)
                back_to_start = beside(misses, reads, BV).to(LOW)
                d_xq = tl.dot(tl.trans(back_to_start), S, input_precision=DOT)
                written = beside(z, tl.zeros_like(z), BV).to(LOW)
                d_xq = tl.dot(tl.trans(written), low_dS, acc=d_xq, input_precision=DOT)
                between = pair_gradients(u, do, d_y, carry, previous_carry, b, LOW, BEFORE, BV, DOT)
                between = beside(between, tl.zeros_like(between), 32)
                between = (between + tl.trans(between)).to(LOW)
                d_xq = tl.dot(between, xq, acc=d_xq, input_precision=DOT)
                d_xq += tl.where(i < 16, 2 * share, 0.0)[:, None] * xq.to(tl.float32)
                store_tile(d_q + shelf * K, d_xq, first - 16, i, h, ck, (i >= 16) & (i < high + 16), H, K, BK)
                key_of, lives = source_rows(previous, first, i, low, tl.minimum(high, 16), SHIFT)
                owns = has_pair(unmasked, has_key, first, i, key_of, lives, low, n)
                d_key = None if d_key0 is None else d_key0 + block.to(tl.int64) * sequences * H * K
                store_key_gradient(d_k + shelf * K, d_key, d_xq, previous, key_of, owns, first, i, low,
                                   tl.where(high > 16, 64, high), n, h, ck, H, K, SHIFT, BK)  # fmt: skip
                dS = tl.dot(back_to_start, xq, acc=dS * total[:, None], input_precision=DOT)
