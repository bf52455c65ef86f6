"""Regression with a gain per value column on Hopper: what solve_columns.py's walks compute, faster.

In 16 bits, with 64 or 128 key columns and as many value columns. One program walks one sequence of one head, 16 tokens
at a time. The state lies transposed, a row a value column, in the accumulators of the matrix units, 64 key columns
each; the products that read it take it from there, and what they make is handed to threads that have a column each: the
16 steps of a block then pass without a word between threads, on numbers that stay in registers. Couplings of the tokens
and what of their steps all columns share come from shared memory, every thread reading the same ones; they are made a
block ahead, and tiles are copied two blocks ahead.

Traps: a tile that a thread has in registers is read and written by rows whose numbers are known when this is compiled
(`_row`), or it would go to memory. A stage is copied into only behind a thread barrier after the last use of what it
held. Tokens past a sequence's end have gain 0, and tiles of them are zeros.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: SIM102

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.gates import load_head, step_sizes
from fastweight.kernels.hopper_parts import FLAT, HALF, LINE, SHARED, arrive, copy_rows, nil
from fastweight.kernels.tiles import has_pair, segment_span, source_rows

STAGES = gl.constexpr(3)
COPY_128 = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of 128 columns in 16 bits, and in 32
COPY_64_WIDE = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
COPY_128_WIDE = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))
ROWS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 1, order=[1, 0]))
ROWS_WIDE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, order=[1, 0]))
COLUMN = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [1, 4], [0, 1]))  # a thread has all tokens of a column
ALONG = gl.constexpr(gl.SliceLayout(0, COLUMN.value))
DOWN = gl.constexpr(gl.SliceLayout(1, COLUMN.value))
BESIDE = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8]))
UNDER = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 2], instr_shape=[16, 8]))
STATE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PAIR = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
ONE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
STRIPS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0]))  # rows of 128 bytes miss each other's banks
STRIPS_ONE = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, order=[1, 0]))  # of 64 bytes
LEFT_PAIR = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PAIR.value, k_width=2))
LEFT_ONE = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ONE.value, k_width=2))


@gluon.jit
def _row(tile, r, t: gl.constexpr):
    """Row t of a float32 tile whose rows r a thread has all of."""
    bits = gl.where(r == t, tile.to(gl.int32, bitcast=True), 0)
    return gl.xor_sum(bits, axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def _rings(dtype: gl.constexpr, gain_dtype: gl.constexpr, D: gl.constexpr):
    """Room for the tiles of STAGES blocks: keys and queries in turn, 64 columns each; values; gains."""
    wide: gl.constexpr = ROWS_WIDE if gain_dtype == gl.float32 else ROWS
    keys = gl.allocate_shared_memory(dtype, [STAGES * (D // 64) * 2, 16, 64], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, 16, D], ROWS)
    gains = gl.allocate_shared_memory(gain_dtype, [STAGES, 16, D], wide)
    return keys, values, gains


@gluon.jit
def _copy(
    rings, turn, q, k, values, beta, previous, first, low, high, h, kh,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Begins to copy the tiles of a block, which comes in its turn; zeros where there is no token."""
    keys, s_values, gains = rings
    narrow: gl.constexpr = HALF if D == 64 else COPY_128
    wide: gl.constexpr = COPY_64_WIDE if D == 64 else COPY_128_WIDE
    of_gain: gl.constexpr = wide if beta.dtype.element_ty == gl.float32 else narrow
    stage = turn % STAGES
    i = gl.arange(0, 16, gl.SliceLayout(1, HALF)) + nil()
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    keyed = live & (source >= low)
    for part in gl.static_range(D // 64):
        at = (stage * (D // 64) + part) * 2
        if previous is None:
            copy_rows(keys.index(at), k, first - SHIFT, i, kh, part * 64, keyed, KH, D, HALF)
        else:
            copy_rows(keys.index(at), k, first, source.to(gl.int64), kh, part * 64, keyed, KH, D, HALF)
        copy_rows(keys.index(at + 1), q, first, i, kh, part * 64, live, KH, D, HALF)
    i = gl.arange(0, 16, gl.SliceLayout(1, narrow)) + nil()
    copy_rows(s_values.index(stage), values, first, i, h, 0, (i >= low) & (i < high), H, D, narrow)
    i = gl.arange(0, 16, gl.SliceLayout(1, of_gain)) + nil()
    copy_rows(gains.index(stage), beta, first, i, h, 0, (i >= low) & (i < high), H, D, of_gain)


@gluon.jit
def _put_first_key(
    keys, stage, key0, previous, first, low, high, n, kh, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr
):
    """The carried key in the row that is paired with it, for all products to see."""
    i = gl.arange(0, 16, gl.SliceLayout(1, HALF))
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    for part in gl.static_range(D // 64):
        col = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
        tile = keys.index((stage * (D // 64) + part) * 2)
        x = tile.load(HALF)
        begin = gl.load(key0 + (n.to(gl.int64) * KH + kh) * D + col).to(x.dtype)
        tile.store(gl.where((live & (source < low))[:, None], begin[None, :], x))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _couple(keys, pairs, stage, D: gl.constexpr, BACK: gl.constexpr):
    """Of a block's keys with its keys and queries: X X^T and X Q^T [16, 32], with BACK X X^T and under it Q X^T."""
    layout: gl.constexpr = UNDER if BACK else BESIDE
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    found = gl.zeros([32, 16] if BACK else [16, 32], gl.float32, layout)
    for part in gl.static_range(D // 64):
        at = stage * (D // 64) + part
        x = keys.index(at * 2)
        both = pairs.index(at)
        if BACK:
            found = mma_v2(both.load(left), x.permute((1, 0)).load(right), found)
        else:
            found = mma_v2(x.load(left), both.permute((1, 0)).load(right), found)
    return found


@gluon.jit
def _energies(coupled):
    """|x|^2 of each token, from X X^T and X Q^T."""
    i = gl.arange(0, 16, gl.SliceLayout(1, BESIDE))[:, None]
    j = gl.arange(0, 32, gl.SliceLayout(0, BESIDE))[None, :]
    return gl.sum(gl.where(i == j, coupled, 0.0), axis=1)


@gluon.jit
def _tokens(
    energies, lam, has_key, unmasked, previous, line, first, low, high, n, h,
    H: gl.constexpr, SHIFT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Of a block's tokens: which exist, which write, their ridges, and with BACK their energies."""
    i = gl.arange(0, 16, FLAT if BACK else gl.SliceLayout(1, BESIDE))
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = ridge
    if BACK:
        energy = gl.load(energies + line + i, mask=live, other=0.0)
    return live, pair, ridge, energy


@gluon.jit
def _prepare(
    rings, pairs, turn, shelves, tokens, energies, key0, previous, line, first, low, high, n, h, kh, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Makes what all columns of a block share, and puts it where every thread finds it: couplings, and of each token
    the step at gain 1 and the ridge. Energies are written, unless BACK."""
    live, pair, ridge, energy = tokens
    s_couplings, s_rates = shelves
    stage = turn % STAGES
    slot = turn % 2
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if key0 is not None:
        _put_first_key(rings[0], stage, key0, previous, first, low, high, n, kh, KH, D, SHIFT)
    coupled = _couple(rings[0], pairs, stage, D, BACK)
    if BACK:
        s_couplings._reinterpret(gl.float32, [2, 32, 16], flat).index(slot).store(coupled)
    else:
        s_couplings._reinterpret(gl.float32, [2, 16, 32], flat).index(slot).store(coupled)
        energy = _energies(coupled)
        i = gl.arange(0, 16, gl.SliceLayout(1, BESIDE))
        gl.store(energies + line + i, energy, mask=live & (h % (H // KH) == 0))
    eta, ridge, _d, _a, _c, _o, _w = step_sizes(
        energy, gl.where(pair, 1.0, 0.0), ridge, pair, eps, floor, SCALED, DIRECT
    )
    s_rates.index(2 * slot).store(eta)
    s_rates.index(2 * slot + 1).store(ridge)


@gluon.jit
def _rates(gains, s_rates, slot, floor, D: gl.constexpr):
    """eta and carry [16, D] of a block, a column a thread."""
    gain = gains.load(COLUMN).to(gl.float32)
    eta = gain * s_rates.index(2 * slot).load(DOWN)[:, None]
    alpha = eta * s_rates.index(2 * slot + 1).load(DOWN)[:, None]
    return eta, gl.where(alpha < 1 - floor, 1 - alpha, floor)


@gluon.jit
def _state(pointer, slot, part: gl.constexpr, D: gl.constexpr):
    """64 key columns of a state, transposed."""
    return gl.load(pointer + slot + _offsets(part, D)).to(gl.float32)


@gluon.jit
def _offsets(part: gl.constexpr, D: gl.constexpr):
    """Of 64 key columns of a state, made anew where they are used, in 64 bits, which leaves one address to compute."""
    ck = (gl.arange(0, 64, gl.SliceLayout(0, STATE)) + nil()).to(gl.int64) + part * 64
    cv = (gl.arange(0, D, gl.SliceLayout(1, STATE)) + nil()).to(gl.int64)
    return ck[None, :] * D + cv[:, None]


@gluon.jit
def _keep_state(stage, pointer, S, D: gl.constexpr):
    """Writes 64 key columns of a state by way of the memory of `stage` [64, D], which the threads are done with."""
    layout: gl.constexpr = HALF if D == 64 else COPY_128
    stage.permute((1, 0)).store(S.to(stage.dtype))
    gl.thread_barrier()
    ck = gl.arange(0, 64, gl.SliceLayout(1, layout)) + nil()
    cv = gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(pointer + (ck[:, None] * D + cv[None, :]), stage.load(layout))
    gl.thread_barrier()


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    q, k, v, beta, lam, key0, has_key, unmasked, previous, energies, state0, o, residual, states, state1, vain,
    cu, chunk_start, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One sequence of one head: o, the final state, key energies, and where given residuals and chunk states; where
    `vain` is given, only of the programs that hopper_scaled_columns*.py noted there."""
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
    s_couplings = gl.allocate_shared_memory(gl.float32, [32, 32], LINE)
    s_rates = gl.allocate_shared_memory(gl.float32, [4, 16], LINE)
    shelves = s_couplings, s_rates
    s_seen = gl.allocate_shared_memory(gl.float32, [D, 32], STRIPS)
    stage_of_states = s_seen._reinterpret(dtype, [64, D], SHARED)
    s_written = gl.allocate_shared_memory(dtype, [16, D], SHARED)
    s_total = gl.allocate_shared_memory(gl.float32, [D], LINE)
    _copy(rings, 0, q, k, v, beta, previous, begin, 0, size, h, kh, H, KH, D, SHIFT)
    soon = _tokens(energies, lam, has_key, unmasked, previous, line, begin, 0, size, n, h, H, SHIFT, False)
    arrive()
    _prepare(
        rings, pairs, 0, shelves, soon, energies, key0, previous, line, begin, 0, size, n, h, kh, eps, floor,
        H, KH, D, SHIFT, SCALED, DIRECT, False,
    )  # fmt: skip
    _copy(rings, 1, q, k, v, beta, previous, begin + 16, -16, size - 16, h, kh, H, KH, D, SHIFT)
    if state0 is None:
        S0 = gl.zeros([D, 64], gl.float32, STATE)
        S1 = S0
    else:
        S0 = _state(state0, slot, 0, D)
        S1 = _state(state0, slot, PARTS - 1, D)
    r = gl.arange(0, 16, DOWN)[:, None]
    r2 = gl.arange(0, 32, DOWN)[:, None]
    cv = gl.arange(0, D, ALONG)
    for b in range(0, count):
        stage = b % STAGES
        now = b & 1
        high = size - b * 16
        first = begin + b * 16
        at_rows = (first * H + h) * D + cv
        if states is not None:
            if b % 4 == 0:
                to = states + ((lead + b // 4).to(gl.int64) * H + h) * (D * D)
                _keep_state(stage_of_states, to, S0, D)
                if PARTS == 2:
                    _keep_state(stage_of_states, to + 64 * D, S1, D)
        soon = _tokens(
            energies, lam, has_key, unmasked, previous, line + b * 16 + 16, first + 16, -b * 16 - 16, high - 16, n, h,
            H, SHIFT, False,
        )  # fmt: skip
        low = gl.convert_layout(S0.to(dtype), LEFT_PAIR)
        tile = pairs.index(stage * PARTS)
        both = warpgroup_mma(low, tile.permute((1, 0)), gl.zeros([D, 32], gl.float32, PAIR), use_acc=False,
                             is_async=True)  # fmt: skip
        if PARTS == 2:
            low = gl.convert_layout(S1.to(dtype), LEFT_PAIR)
            tile = pairs.index(stage * PARTS + 1)
            both = warpgroup_mma(low, tile.permute((1, 0)), both, is_async=True)
        both = warpgroup_mma_wait(0, deps=(both,))
        s_seen.store(both)
        # Behind this barrier the next block's tiles are there, what was kept for this one is seen, and nobody needs
        # what the block before read.
        arrive()
        _prepare(
            rings, pairs, b + 1, shelves, soon, energies, key0, previous, line + b * 16 + 16, first + 16, -b * 16 - 16,
            high - 16, n, h, kh, eps, floor, H, KH, D, SHIFT, SCALED, DIRECT, False,
        )  # fmt: skip
        _copy(
            rings, b + 2, q, k, v, beta, previous, first + 32, -b * 16 - 32, high - 32, h, kh, H, KH, D, SHIFT
        )  # fmt: skip
        both = s_seen.permute((1, 0)).load(COLUMN)
        eta, carry = _rates(gains.index(stage), s_rates, now, floor, D)
        y = values.index(stage).load(COLUMN).to(gl.float32)
        z = gl.zeros([16, D], gl.float32, COLUMN)
        for t in gl.static_range(16):
            here = (cv >= 0) & (t < high)
            left = _row(y, r, t) - _row(both, r2, t)
            u = _row(eta, r, t) * left
            if residual is not None:
                gl.store(residual + at_rows + t * (H * D), left.to(dtype), mask=here)
            felt = s_couplings.index(now * 16 + t).load(DOWN)[:, None]
            moves = ((r2 > t) & (r2 < 16)) | (r2 > 16 + t if BEFORE else r2 >= 16 + t)
            both = gl.where(moves, both * _row(carry, r, t)[None, :] + felt * u[None, :], both)
            gl.store(o + at_rows + t * (H * D), _row(both, r2, 16 + t).to(dtype), mask=here)
            z = gl.where(r == t, u[None, :], z)
        total = gl.full([D], 1.0, gl.float32, ALONG)
        for t in gl.static_range(15, -1, -1):
            z = gl.where(r == t, z * total[None, :], z)
            total *= _row(carry, r, t)
        s_written.store(z.to(dtype))
        s_total.store(total)
        fence_async_shared()
        gl.thread_barrier()
        written = s_written.permute((1, 0))
        total = s_total.load(gl.SliceLayout(1, STATE))[:, None]
        x = keys.index(stage * PARTS * 2)
        S0 = warpgroup_mma(written, x, S0 * total, is_async=True)
        if PARTS == 2:
            x = keys.index(stage * PARTS * 2 + 2)
            S1 = warpgroup_mma(written, x, S1 * total, is_async=True)
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
    if state1 is not None:
        gl.store(state1 + slot + _offsets(0, D), S0)
        if PARTS == 2:
            gl.store(state1 + slot + _offsets(1, D), S1)
