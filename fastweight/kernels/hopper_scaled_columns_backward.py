"""Regression with a gain per value column on Hopper, the way back where columns forget little.

The mathematics is in hopper_scaled_columns.py. A thread has 128 numbers of the state at width 128, so what else lives
at the same time is counted: half of the state is made 16 bits wide at a time, decays are put aside meanwhile, and the
least carries are written where nobody reads them, because the compiler would else keep all carries to compare them
later.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import LINE, SHARED, arrive
from fastweight.kernels.hopper_scaled_parts import (
    SHORT,
    block_ends,
    copy_block,
    in_turn,
    keep_state,
    make_rings,
    make_shelves,
    prepare,
    rates_of,
    reciprocal,
    stage_after,
    store_columns,
    tokens_of,
)
from fastweight.kernels.hopper_solve_columns import (
    ALONG,
    COLUMN,
    DOWN,
    LEFT_ONE,
    ONE,
    STATE,
    STRIPS_ONE,
    _offsets,
    _row,
    _state,
)
from fastweight.kernels.solve_columns_gradient import LEAST_KEPT, forgets_much
from fastweight.kernels.tiles import segment_span

LIKE_ONE = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, energies, d_state1, d_states, d_state0, d_u, kept, wild,
    vain, cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One sequence of one head in reverse: dU, the state gradient at every chunk end, where wanted dS_0, the products
    of chunks' carries [chunks, H, D], whether they forget much, and whether that is too much."""
    PARTS: gl.constexpr = D // 64
    dtype: gl.constexpr = q.dtype.element_ty
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    h = gl.program_id(0) % H
    n, lead, _start, _stop, begin, size = segment_span(
        gl.program_id(0) // H, cu, chunk_start, length, chunks, segments, per_segment, 64
    )
    kh = h // (H // KH)
    slot = (n.to(gl.int64) * H + h) * (D * D)
    line = kh.to(gl.int64) * tokens + begin
    count = (size + 15) // 16
    rings = make_rings(dtype, beta.dtype.element_ty, D)
    keys, values, gains = rings
    shelves = make_shelves(dtype)
    passed = gl.full([D], 1.0, gl.float32, ALONG)
    s_kept = gl.allocate_shared_memory(gl.float32, [D], LINE, passed)
    s_least = gl.allocate_shared_memory(gl.float32, [D], LINE)
    s_felt = gl.allocate_shared_memory(gl.float32, [D, 16], STRIPS_ONE)
    s_reads = gl.allocate_shared_memory(dtype, [D, 16], SHORT)
    s_written = gl.allocate_shared_memory(dtype, [D, 16], SHORT)
    s_state = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    if PARTS == 2:
        s_fades = gl.allocate_shared_memory(gl.float32, [D, 16], STRIPS_ONE)
    stage = count * 0
    at = (count - 1) * 16
    copy_block(rings, stage, q, k, d_o, beta, previous, begin + at, -at, size - at, h, kh, H, KH, D, SHIFT)
    last_tokens = tokens_of(
        lam, energies, has_key, unmasked, previous, line + at, begin + at, -at, size - at, n, h, H, SHIFT, True
    )
    arrive()
    prepare(
        keys, stage, 0, shelves, last_tokens, energies, key0, previous, line + at, begin + at, -at, size - at, n, h,
        kh, eps, floor, H, KH, D, SHIFT, SCALED, DIRECT, BEFORE, True,
    )  # fmt: skip
    copy_block(
        rings, stage + 1, q, k, d_o, beta, previous, begin + at - 16, 16 - at, size - at + 16, h, kh, H, KH, D, SHIFT
    )  # fmt: skip
    begins, ends_at = block_ends(16 - at, size - at + 16)
    live, pair, ridge, energy = tokens_of(
        lam, energies, has_key, unmasked, previous, line + at - 16, begin + at - 16, begins, ends_at, n, h,
        H, SHIFT, True,
    )  # fmt: skip
    if d_state1 is None:
        S0 = gl.zeros([D, 64], gl.float32, STATE)
        S1 = S0
    else:
        S0 = _state(d_state1, slot, 0, D)
        S1 = _state(d_state1, slot, PARTS - 1, D)
    r = gl.arange(0, 16, DOWN)[:, None]
    cv = gl.arange(0, D, ALONG)
    least = passed
    lowest = passed
    gl.thread_barrier()
    for turn in range(0, count):
        b = count - 1 - turn
        now = turn & 1
        high = size - b * 16
        first = begin + b * 16
        if ((b & 3) == 3) | (turn == 0):
            scale = s_kept.load(ROW)[:, None]
            S0 *= scale
            S1 *= scale
            passed = gl.full([D], 1.0, gl.float32, ALONG)
            least = passed
            to = d_states + ((lead + (b >> 2)).to(gl.int64) * H + h) * (D * D)
            keep_state(s_state, to, S0, D)
            if PARTS == 2:
                keep_state(s_state, to + 64 * D, S1, D)
        eta, carry = rates_of(gains, shelves, stage, now, floor)
        fades = gl.zeros([16, D], gl.float32, COLUMN)
        for t in gl.static_range(15, -1, -1):
            fades = gl.where(r == t, passed[None, :], fades)
            passed *= _row(carry, r, t)
        eta *= -reciprocal(carry)
        least = gl.minimum(least, gl.min(carry, axis=0))
        s_least.store(least)
        s_kept.store(passed)
        if PARTS == 2:  # put aside while the state needs the registers
            s_fades.permute((1, 0)).store(fades)
        do = values.index(stage).load(COLUMN).to(gl.float32)
        do *= reciprocal(fades * carry if BEFORE else fades)
        s_reads.permute((1, 0)).store(do.to(dtype))
        gl.thread_barrier()
        low = gl.convert_layout(S0.to(dtype), LEFT_ONE)
        x = keys[0].index(2 * stage)
        ends = warpgroup_mma(low, x.permute((1, 0)), gl.zeros([D, 16], gl.float32, ONE), use_acc=False,
                             is_async=True)  # fmt: skip
        # Not by wgmma, which would ask for a fence and another barrier.
        own = mma_v2(
            s_reads.load(gl.DotOperandLayout(0, LIKE_ONE, 2)),
            shelves[1].index(now).slice(16, 16, 0).load(gl.DotOperandLayout(1, LIKE_ONE, 2)),
            gl.zeros([D, 16], gl.float32, LIKE_ONE),
        )
        if PARTS == 2:
            # Half of S in 16 bits at a time, for there are no registers for all of it.
            ends, S1 = warpgroup_mma_wait(0, deps=(ends, S1))
            low = gl.convert_layout(S1.to(dtype), LEFT_ONE)
            x = keys[1].index(2 * stage)
            ends = warpgroup_mma(low, x.permute((1, 0)), ends, is_async=True)
        ends = warpgroup_mma_wait(0, deps=(ends,))
        s_felt.store(ends + gl.convert_layout(own, ONE))
        gl.thread_barrier()
        felt = s_felt.permute((1, 0)).load(COLUMN)
        for t in gl.static_range(15, -1, -1):
            d_value = in_turn(_row(eta, r, t) * _row(felt, r, t))
            eta = gl.where(r == t, d_value[None, :], eta)
            pull = shelves[0].index(now * 32 + t).load(DOWN)[:, None]
            felt = gl.where(r < t, felt + pull * d_value[None, :], felt)
        if PARTS == 2:
            fades = s_fades.permute((1, 0)).load(COLUMN)
        if (b & 3) == 0:
            lowest = gl.minimum(lowest, passed)
            at_chunk = (lead + (b >> 2)).to(gl.int64) * H + h
            gl.store(kept + at_chunk * D + cv, passed)
            gl.store(wild + at_chunk, forgets_much(passed, least, dtype).to(gl.int8))
        s_written.permute((1, 0)).store(eta.to(dtype))
        arrive()
        S0 = warpgroup_mma(s_written, keys[0].index(2 * stage), S0, is_async=True)
        S0 = warpgroup_mma(s_reads, keys[0].index(2 * stage + 1), S0, is_async=True)
        if PARTS == 2:
            S1 = warpgroup_mma(s_written, keys[1].index(2 * stage), S1, is_async=True)
            S1 = warpgroup_mma(s_reads, keys[1].index(2 * stage + 1), S1, is_async=True)
        begins, ends_at = block_ends(16 - b * 16, high + 16)
        start, end = block_ends(32 - b * 16, high + 32)
        store_columns(d_u, fades * felt, first, high, h, H, D)
        stage = stage_after(stage)
        prepare(
            keys, stage, 1 - now, shelves, (live, pair, ridge, energy), energies, key0, previous, line + b * 16 - 16,
            first - 16, begins, ends_at, n, h, kh, eps, floor, H, KH, D, SHIFT, SCALED, DIRECT, BEFORE, True,
        )  # fmt: skip
        gl.thread_barrier()
        copy_block(rings, stage_after(stage), q, k, d_o, beta, previous, first - 32, start, end, h, kh, H, KH, D, SHIFT)
        live, pair, ridge, energy = tokens_of(
            lam, energies, has_key, unmasked, previous, line + b * 16 - 32, first - 32, start, end, n, h, H, SHIFT, True
        )
        if PARTS == 2:
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
        gl.thread_barrier()
    gl.store(vain + gl.program_id(0), (gl.min(lowest, axis=0) < LEAST_KEPT).to(gl.int8))
    if d_state0 is not None:
        scale = s_kept.load(ROW)[:, None]
        gl.store(d_state0 + slot + _offsets(0, D), S0 * scale)
        if PARTS == 2:
            gl.store(d_state0 + slot + _offsets(1, D), S1 * scale)
