"""Regression with a gain per value column on Hopper: the walks of columns that forget little.

What hopper_solve_columns.py's walks compute, by half as many instructions: in bfloat16, and where no column keeps less
than 2^-60 of its state in a chunk of 64 tokens. Every column is divided by what it has forgotten since its chunk began:
with E_t the product of a column's carries up to token t, S = E S^ and F_t = E_(t-1) F^_t,

    z_t = eta_t / E_t (y_t - F_t)     S^ <- S^ + x_t z_t     F^_i <- F^_i + G_ti z_t for i > t
    o_t = E_t (S^ q_t + sum_(j <= t) P_tj z_j)

Nothing fades any more, so states are scaled once a chunk, what a step does to the steps behind it is one sum each, and
what reads see of their own block is a product of the matrix units. The way back is the same from the other end: with
N_t the product of the carries after t, up to the chunk's end, r_t = dO_t / N_t and w_t = eta_t dU_t / N_(t-1),

    dU_t = N_t B^_t     B^_t = dS^ x_t + sum_(i >= t) P_it r_i - sum_(i > t) G_it w_i     dS^ <- dS^ + q_t r_t - x_t w_t

A program in which some column forgets more says so: then all that it has written is wrong, and the walks of
hopper_solve_columns.py, from which the layouts are, do it again.

Trap: with reads before writes E_(t-1) and N_(t-1) take the places of E_t and N_t in o and r, and reads count for i > t.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import HALF, LINE, SHARED, arrive
from fastweight.kernels.hopper_scaled_parts import (
    SHORT,
    copy_block,
    halves,
    in_turn,
    keep_state,
    keys_and_queries,
    landed,
    make_rings,
    make_shelves,
    prepare,
    rates_of,
    reciprocal,
    rows_of,
    stage_after,
    store_columns,
    tokens_of,
)
from fastweight.kernels.hopper_solve_columns import (
    ALONG,
    COLUMN,
    COPY_128,
    DOWN,
    LEFT_PAIR,
    ONE,
    PAIR,
    STATE,
    STRIPS_ONE,
    _offsets,
    _row,
    _state,
)
from fastweight.kernels.solve_columns_gradient import LEAST_KEPT
from fastweight.kernels.tiles import segment_span


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, beta, lam, key0, has_key, unmasked, previous, energies, state0, o, residual, states, state1, vain,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One sequence of one head: o, the final state, key energies, and where given residuals and chunk states; vain: a
    byte a program, whether a column forgot too much."""
    PARTS: gl.constexpr = D // 64
    dtype: gl.constexpr = q.dtype.element_ty
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    OUT: gl.constexpr = HALF if D == 64 else COPY_128
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
    kept = gl.full([D], 1.0, gl.float32, ALONG)
    s_kept = gl.allocate_shared_memory(gl.float32, [D], LINE, kept)
    strips = gl.allocate_shared_memory(gl.float32, [2, D, 16], STRIPS_ONE)
    s_read, s_fades = strips.index(0), strips.index(1)
    s_state = strips._reinterpret(dtype, [64, D], SHARED)
    s_felt = gl.allocate_shared_memory(gl.float32, [D, 16], STRIPS_ONE)
    s_written = gl.allocate_shared_memory(dtype, [D, 16], SHORT)
    s_out = gl.allocate_shared_memory(dtype, [16, D], SHARED)
    stage = count * 0
    copy_block(rings, stage, q, k, v, beta, previous, begin, 0, size, h, kh, H, KH, D, SHIFT)
    now_tokens = tokens_of(lam, energies, has_key, unmasked, previous, line, begin, 0, size, n, h, H, SHIFT, False)
    arrive()
    prepare(
        keys, stage, 0, shelves, now_tokens, energies, key0, previous, line, begin, 0, size, n, h, kh, eps, floor,
        H, KH, D, SHIFT, SCALED, DIRECT, BEFORE, False,
    )  # fmt: skip
    copy_block(rings, stage + 1, q, k, v, beta, previous, begin + 16, -16, size - 16, h, kh, H, KH, D, SHIFT)
    live, pair, ridge, energy = tokens_of(
        lam, energies, has_key, unmasked, previous, line + 16, begin + 16, -16, size - 16, n, h, H, SHIFT, False
    )
    if state0 is None:
        S0 = gl.zeros([D, 64], gl.float32, STATE)
        S1 = S0
    else:
        S0 = _state(state0, slot, 0, D)
        S1 = _state(state0, slot, PARTS - 1, D)
    r = gl.arange(0, 16, DOWN)[:, None]
    least = kept
    gl.thread_barrier()
    for b in range(0, count):
        now = b & 1
        high = size - b * 16
        first = begin + b * 16
        if b % 4 == 0:
            scale = s_kept.load(ROW)[:, None]
            S0 *= scale
            S1 *= scale
            least = gl.minimum(least, kept)
            kept = gl.full([D], 1.0, gl.float32, ALONG)
            if states is not None:
                to = states + ((lead + b // 4).to(gl.int64) * H + h) * (D * D)
                keep_state(s_state, to, S0, D)
                if PARTS == 2:
                    keep_state(s_state, to + 64 * D, S1, D)
        low = gl.convert_layout(S0.to(dtype), LEFT_PAIR)
        tile = keys_and_queries(keys[0], stage)
        both = warpgroup_mma(low, tile.permute((1, 0)), gl.zeros([D, 32], gl.float32, PAIR), use_acc=False,
                             is_async=True)  # fmt: skip
        if PARTS == 2:
            # Half of S in 16 bits at a time, for there are no registers for all of it.
            both, S1 = warpgroup_mma_wait(0, deps=(both, S1))
            low = gl.convert_layout(S1.to(dtype), LEFT_PAIR)
            tile = keys_and_queries(keys[1], stage)
            both = warpgroup_mma(low, tile.permute((1, 0)), both, is_async=True)
        both = warpgroup_mma_wait(0, deps=(both,))
        felt, read = halves(both, D)
        s_felt.store(felt)
        s_read.store(read)  # put aside while steps need the registers
        eta, carry = rates_of(gains, shelves, stage, now, floor)
        y = values.index(stage).load(COLUMN).to(gl.float32)
        fades = gl.zeros([16, D], gl.float32, COLUMN)
        before = kept
        for t in gl.static_range(16):
            kept *= _row(carry, r, t)
            fades = gl.where(r == t, kept[None, :], fades)
        rate = eta * reciprocal(fades)
        s_kept.store(kept)
        landed()
        copy_block(
            rings, stage_after(stage_after(stage)), q, k, v, beta, previous, first + 32, -b * 16 - 32, high - 32, h, kh,
            H, KH, D, SHIFT,
        )  # fmt: skip
        felt = s_felt.permute((1, 0)).load(COLUMN)
        z = gl.zeros([16, D], gl.float32, COLUMN)
        seen = fades
        for t in gl.static_range(16):
            left = _row(y, r, t) - before * _row(felt, r, t)
            y = gl.where(r == t, left[None, :], y)
            write = in_turn(_row(rate, r, t) * left)
            z = gl.where(r == t, write[None, :], z)
            if BEFORE:
                seen = gl.where(r == t, before[None, :], seen)
            before = _row(fades, r, t)
            pull = shelves[0].index(now * 32 + t).load(DOWN)[:, None]
            felt = gl.where(r > t, felt + pull * write[None, :], felt)
        s_fades.permute((1, 0)).store(seen)
        s_written.permute((1, 0)).store(z.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        tile = shelves[1].index(now).slice(16, 16, 0)
        own = warpgroup_mma(s_written, tile.permute((1, 0)), gl.zeros([D, 16], gl.float32, ONE), use_acc=False,
                            is_async=True)  # fmt: skip
        S0 = warpgroup_mma(s_written, keys[0].index(2 * stage), S0, is_async=True)
        if PARTS == 2:
            S1 = warpgroup_mma(s_written, keys[1].index(2 * stage), S1, is_async=True)
        if residual is not None:
            store_columns(residual, y, first, high, h, H, D)
        stage = stage_after(stage)
        prepare(
            keys, stage, 1 - now, shelves, (live, pair, ridge, energy), energies, key0, previous, line + b * 16 + 16,
            first + 16, -b * 16 - 16, high - 16, n, h, kh, eps, floor, H, KH, D, SHIFT, SCALED, DIRECT, BEFORE, False,
        )  # fmt: skip
        live, pair, ridge, energy = tokens_of(
            lam, energies, has_key, unmasked, previous, line + b * 16 + 32, first + 32, -b * 16 - 32, high - 32, n, h,
            H, SHIFT, False,
        )  # fmt: skip
        own = warpgroup_mma_wait(PARTS, deps=(own,))
        s_out.permute((1, 0)).store(((s_read.load(ONE) + own) * s_fades.load(ONE)).to(dtype))
        gl.thread_barrier()
        i = gl.arange(0, 16, gl.SliceLayout(1, OUT))[:, None]
        gl.store(rows_of(o, first, h, H, D, 0, D, OUT), s_out.load(OUT), mask=(i < high) & (i >= 0))
        if PARTS == 2:
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
    least = gl.minimum(least, kept)
    gl.store(vain + gl.program_id(0), (gl.min(least, axis=0) < LEAST_KEPT).to(gl.int8))
    if state1 is not None:
        scale = s_kept.load(ROW)[:, None]
        gl.store(state1 + slot + _offsets(0, D), S0 * scale)
        if PARTS == 2:
            gl.store(state1 + slot + _offsets(1, D), S1 * scale)
