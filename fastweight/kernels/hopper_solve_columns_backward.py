"""Regression with a gain per value column on Hopper, the way back: the gradients of states, block by block in reverse.

The mathematics is in solve_columns_gradient.py, how a program goes about it and its traps in hopper_solve_columns.py.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: SIM102

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import LINE, SHARED, arrive
from fastweight.kernels.hopper_solve_columns import (
    ALONG,
    COLUMN,
    DOWN,
    LEFT_ONE,
    ONE,
    STAGES,
    STATE,
    STRIPS_ONE,
    _copy,
    _keep_state,
    _offsets,
    _prepare,
    _rates,
    _rings,
    _row,
    _state,
    _tokens,
)
from fastweight.kernels.solve_columns_gradient import forgets_much
from fastweight.kernels.tiles import segment_span


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, energies, d_state1, d_states, d_state0, d_u, kept, wild,
    vain, cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One sequence of one head in reverse: dU, the state gradient at every chunk end, where wanted dS_0, the products
    of chunks' carries [chunks, H, D], and whether they forget much; vain: as in `forward`."""
    if vain is not None:
        if gl.load(vain + gl.program_id(0)) == 0:
            return
    PARTS: gl.constexpr = D // 64
    dtype: gl.constexpr = q.dtype.element_ty
    h = gl.program_id(0) % H
    n, lead, _start, _stop, begin, size = segment_span(
        gl.program_id(0) // H, cu, chunk_start, length, chunks, segments, per_segment, 64
    )
    kh = h // (H // KH)
    slot = (n.to(gl.int64) * H + h) * (D * D)
    line = kh.to(gl.int64) * tokens + begin
    count = (size + 15) // 16
    rings = _rings(dtype, beta.dtype.element_ty, D)
    keys, values, gains = rings
    pairs = keys._reinterpret(dtype, [STAGES * PARTS, 32, 64], SHARED)
    s_couplings = gl.allocate_shared_memory(gl.float32, [64, 16], LINE)
    s_rates = gl.allocate_shared_memory(gl.float32, [4, 16], LINE)
    shelves = s_couplings, s_rates
    s_seen = gl.allocate_shared_memory(gl.float32, [2, D, 16], STRIPS_ONE)
    stage_of_states = s_seen._reinterpret(dtype, [64, D], SHARED)
    s_seen = s_seen.index(0)
    s_written = gl.allocate_shared_memory(dtype, [32, D], SHARED)
    s_total = gl.allocate_shared_memory(gl.float32, [D], LINE)
    at = (count - 1) * 16
    _copy(rings, 0, q, k, d_o, beta, previous, begin + at, -at, size - at, h, kh, H, KH, D, SHIFT)
    soon = _tokens(
        energies, lam, has_key, unmasked, previous, line + at, begin + at, -at, size - at, n, h, H, SHIFT, True
    )
    arrive()
    _prepare(
        rings, pairs, 0, shelves, soon, energies, key0, previous, line + at, begin + at, -at, size - at, n, h, kh,
        eps, floor, H, KH, D, SHIFT, SCALED, DIRECT, True,
    )  # fmt: skip
    _copy(rings, 1, q, k, d_o, beta, previous, begin + at - 16, 16 - at, size - at + 16, h, kh, H, KH, D, SHIFT)
    if d_state1 is None:
        S0 = gl.zeros([D, 64], gl.float32, STATE)
        S1 = S0
    else:
        S0 = _state(d_state1, slot, 0, D)
        S1 = _state(d_state1, slot, PARTS - 1, D)
    r = gl.arange(0, 16, DOWN)[:, None]
    cv = gl.arange(0, D, ALONG)
    passed = gl.full([D], 1.0, gl.float32, ALONG)
    least = passed
    for turn in range(0, count):
        b = count - 1 - turn
        stage = turn % STAGES
        now = turn & 1
        high = size - b * 16
        first = begin + b * 16
        at_rows = (first * H + h) * D + cv
        if (b % 4 == 3) | (turn == 0):
            to = d_states + ((lead + b // 4).to(gl.int64) * H + h) * (D * D)
            _keep_state(stage_of_states, to, S0, D)
            if PARTS == 2:
                _keep_state(stage_of_states, to + 64 * D, S1, D)
        soon = _tokens(
            energies, lam, has_key, unmasked, previous, line + b * 16 - 16, first - 16, 16 - b * 16, high + 16, n, h,
            H, SHIFT, True,
        )  # fmt: skip
        low = gl.convert_layout(S0.to(dtype), LEFT_ONE)
        x = keys.index(stage * PARTS * 2)
        ends = warpgroup_mma(low, x.permute((1, 0)), gl.zeros([D, 16], gl.float32, ONE), use_acc=False,
                             is_async=True)  # fmt: skip
        if PARTS == 2:
            low = gl.convert_layout(S1.to(dtype), LEFT_ONE)
            x = keys.index(stage * PARTS * 2 + 2)
            ends = warpgroup_mma(low, x.permute((1, 0)), ends, is_async=True)
        ends = warpgroup_mma_wait(0, deps=(ends,))
        s_seen.store(ends)
        # Behind this barrier the next block's tiles are there, what was kept for this one is seen, and nobody needs
        # what the block before read.
        arrive()
        _prepare(
            rings, pairs, turn + 1, shelves, soon, energies, key0, previous, line + b * 16 - 16, first - 16,
            16 - b * 16, high + 16, n, h, kh, eps, floor, H, KH, D, SHIFT, SCALED, DIRECT, True,
        )  # fmt: skip
        _copy(
            rings, turn + 2, q, k, d_o, beta, previous, first - 32, 32 - b * 16, high + 32, h, kh, H, KH, D, SHIFT
        )  # fmt: skip
        felt = s_seen.permute((1, 0)).load(COLUMN)
        eta, carry = _rates(gains.index(stage), s_rates, now, floor, D)
        do = values.index(stage).load(COLUMN).to(gl.float32)
        d_y = gl.zeros([16, D], gl.float32, COLUMN)
        for t in gl.static_range(15, -1, -1):
            misses = s_couplings.index(now * 32 + t).load(DOWN)[:, None]
            reads = s_couplings.index(now * 32 + 16 + t).load(DOWN)[:, None] * _row(do, r, t)[None, :]
            if not BEFORE:
                felt = gl.where(r <= t, felt + reads, felt)
            d_write = _row(felt, r, t)
            gl.store(d_u + at_rows + t * (H * D), d_write.to(dtype), mask=(cv >= 0) & (t < high))
            d_value = _row(eta, r, t) * d_write
            moved = felt * _row(carry, r, t)[None, :] - misses * d_value[None, :]
            if BEFORE:
                moved += reads
            felt = gl.where(r < t, moved, felt)
            d_y = gl.where(r == t, d_value[None, :], d_y)
        total = gl.full([D], 1.0, gl.float32, ALONG)
        for t in gl.static_range(16):
            here = total
            total *= _row(carry, r, t)
            d_y = gl.where(r == t, d_y * -here[None, :], d_y)
            do = gl.where(r == t, do * (here if BEFORE else total)[None, :], do)
        passed *= total
        least = gl.minimum(least, gl.min(carry, axis=0))
        if b % 4 == 0:
            at_chunk = (lead + b // 4).to(gl.int64) * H + h
            gl.store(kept + at_chunk * D + cv, passed)
            gl.store(wild + at_chunk, forgets_much(passed, least, dtype).to(gl.int8))
            passed = gl.full([D], 1.0, gl.float32, ALONG)
            least = passed
        s_written.slice(0, 16, 0).store(d_y.to(dtype))
        s_written.slice(16, 16, 0).store(do.to(dtype))
        s_total.store(total)
        fence_async_shared()
        gl.thread_barrier()
        written = s_written.permute((1, 0))
        total = s_total.load(gl.SliceLayout(1, STATE))[:, None]
        S0 = warpgroup_mma(written, pairs.index(stage * PARTS), S0 * total, is_async=True)
        if PARTS == 2:
            S1 = warpgroup_mma(written, pairs.index(stage * PARTS + 1), S1 * total, is_async=True)
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
    if d_state0 is not None:
        gl.store(d_state0 + slot + _offsets(0, D), S0)
        if PARTS == 2:
            gl.store(d_state0 + slot + _offsets(1, D), S1)
