"""Regression with a gain per value column on Hopper: what solve_columns.py's walks compute, faster, for dense calls.

In 16 bits, with 64 or 128 key columns and as many value columns. One program walks one sequence of one head, 16 tokens
at a time. The state lies transposed, a row a value column, in the accumulators of the matrix units, 64 key columns
each; the products that read it take it from there, and what they make is handed to threads that have a column each: the
16 steps of a block then pass without a word between threads, on numbers that stay in registers. Couplings of the tokens
and what of their steps all columns share come from shared memory, every thread reading the same ones.

Traps: a tile that a thread has in registers is read and written by rows whose numbers are known when this is compiled
(`_row`), or it would go to memory. A stage is fetched into only behind a thread barrier after the last use of what it
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
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.gates import load_head, step_sizes
from fastweight.kernels.hopper_parts import FLAT, LINE, SHARED, nil
from fastweight.kernels.solve_columns_gradient import forgets_much

COLUMN = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [1, 4], [0, 1]))  # a thread has all tokens of a column
ALONG = gl.constexpr(gl.SliceLayout(0, COLUMN.value))
DOWN = gl.constexpr(gl.SliceLayout(1, COLUMN.value))
FILL = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
STATE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
PAIR = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))
ONE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
STRIPS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0]))  # rows of 128 bytes miss each other's banks
STRIPS_ONE = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, order=[1, 0]))  # of 64 bytes
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=STATE.value, k_width=2))
LEFT_PAIR = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=PAIR.value, k_width=2))
LEFT_ONE = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ONE.value, k_width=2))


@gluon.jit
def _row(tile, r, t: gl.constexpr):
    """Row t of a float32 tile whose rows r a thread has all of."""
    bits = gl.where(r == t, tile.to(gl.int32, bitcast=True), 0)
    return gl.xor_sum(bits, axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def _rings(k_desc, v_desc, beta_desc, D: gl.constexpr, STAGES: gl.constexpr):
    """Room for the tiles of STAGES blocks: keys and under them queries, 64 columns each; values; gains. Barriers."""
    keys = gl.allocate_shared_memory(k_desc.dtype, [STAGES * (D // 64) * 2, 1, 16, 64], k_desc.layout)
    values = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 16, D], v_desc.layout)
    gains = gl.allocate_shared_memory(beta_desc.dtype, [STAGES, 1, 16, D], beta_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    return keys, values, gains, bars


@gluon.jit
def _fetch(
    descs,
    rings,
    n,
    turn,
    block,
    key_at,
    value_at,
    wanted,
    D: gl.constexpr,
    SHIFT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Starts the copies of the tiles of a block, which comes in its turn."""
    k_desc, q_desc, v_desc, beta_desc = descs
    keys, values, gains, bars = rings
    stage = turn % STAGES
    bar = bars.index(stage)
    nbytes: gl.constexpr = (
        2 * (D // 64) * k_desc.block_type.nbytes + v_desc.block_type.nbytes + beta_desc.block_type.nbytes
    )
    mbarrier.expect(bar, nbytes, pred=wanted)
    for part in gl.static_range(D // 64):
        tile = (stage * (D // 64) + part) * 2
        at = key_at + part * 64
        tma.async_copy_global_to_shared(k_desc, [n, block * 16 - SHIFT, at], bar, keys.index(tile), pred=wanted)
        tma.async_copy_global_to_shared(q_desc, [n, block * 16, at], bar, keys.index(tile + 1), pred=wanted)
    tma.async_copy_global_to_shared(v_desc, [n, block * 16, value_at], bar, values.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(beta_desc, [n, block * 16, value_at], bar, gains.index(stage), pred=wanted)


@gluon.jit
def _load_shared_rates(couplings, energies, lam, line, first, h, high, begins, eps, floor,
                       H: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr):  # fmt: skip
    """Of a block: its couplings [16, 32], and of each token the step at gain 1 and the ridge."""
    i = gl.arange(0, 16, gl.SliceLayout(1, FILL))
    j = gl.arange(0, 32, gl.SliceLayout(0, FILL))
    rows = gl.load(couplings + line * 32 + i[:, None] * 32 + j[None, :], mask=(i < high)[:, None], other=0.0)
    i = gl.arange(0, 16, FLAT)
    pair = i < high
    if SHIFT:
        pair = pair & (i + begins > 0)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = gl.load(energies + line + i, mask=pair, other=0.0)
    eta, ridge, _d, _a, _c, _o, _w = step_sizes(
        energy, gl.where(pair, 1.0, 0.0), ridge, pair, eps, floor, SCALED, DIRECT
    )
    return rows, eta, ridge


@gluon.jit
def _keep(s_couplings, s_rates, slot, loaded):
    """Puts what `_load_shared_rates` found where every thread finds it."""
    rows, eta, ridge = loaded
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    s_couplings._reinterpret(gl.float32, [2, 16, 32], flat).index(slot).store(rows)
    s_rates.index(2 * slot).store(eta)
    s_rates.index(2 * slot + 1).store(ridge)


@gluon.jit
def _rates(gains, s_rates, slot, floor, D: gl.constexpr):
    """eta and carry [16, D] of a block, a column a thread."""
    gain = gains.reshape([16, D]).load(COLUMN).to(gl.float32)
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


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def forward(
    k_desc, q_desc, v_desc, beta_desc, couplings, energies, lam, state0, o, residual, states, state1,
    length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One sequence of one head: o, the final state, and where given residuals and chunk states."""
    PARTS: gl.constexpr = D // 64
    dtype: gl.constexpr = k_desc.dtype
    n = gl.program_id(0) // H
    h = gl.program_id(0) % H
    kh = h // (H // KH)
    begin = n.to(gl.int64) * length
    slot = (n.to(gl.int64) * H + h) * (D * D)
    count = (length + 15) // 16
    descs = (k_desc, q_desc, v_desc, beta_desc)
    rings = _rings(k_desc, v_desc, beta_desc, D, STAGES)
    keys, values, gains, bars = rings
    pairs = keys._reinterpret(dtype, [STAGES * PARTS, 32, 64], SHARED)
    s_couplings = gl.allocate_shared_memory(gl.float32, [32, 32], LINE)
    s_rates = gl.allocate_shared_memory(gl.float32, [4, 16], LINE)
    s_seen = gl.allocate_shared_memory(gl.float32, [D, 32], STRIPS)
    s_written = gl.allocate_shared_memory(dtype, [16, D], SHARED)
    s_total = gl.allocate_shared_memory(gl.float32, [D], LINE)
    gl.thread_barrier()
    for early in gl.static_range(STAGES):
        _fetch(descs, rings, n, early, early, kh * D, h * D, early < count, D, SHIFT, STAGES)
    line = kh.to(gl.int64) * tokens + begin
    loaded = _load_shared_rates(
        couplings, energies, lam, line, begin, h, length, 0, eps, floor, H, SHIFT, SCALED, DIRECT
    )
    _keep(s_couplings, s_rates, 0, loaded)
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
        high = length - b * 16
        first = begin + b * 16
        at_rows = (first * H + h) * D + cv
        if states is not None:
            if b % 4 == 0:
                to = states + ((n * chunks + b // 4).to(gl.int64) * H + h) * (D * D)
                gl.store(to + _offsets(0, D), S0.to(dtype))
                if PARTS == 2:
                    gl.store(to + _offsets(1, D), S1.to(dtype))
        mbarrier.wait(bars.index(stage), (b // STAGES) & 1)
        low = gl.convert_layout(S0.to(dtype), LEFT_PAIR)
        tile = pairs.index(stage * PARTS)
        both = warpgroup_mma(low, tile.permute((1, 0)), gl.zeros([D, 32], gl.float32, PAIR), use_acc=False,
                             is_async=True)  # fmt: skip
        if PARTS == 2:
            low = gl.convert_layout(S1.to(dtype), LEFT_PAIR)
            tile = pairs.index(stage * PARTS + 1)
            both = warpgroup_mma(low, tile.permute((1, 0)), both, is_async=True)
        loaded = _load_shared_rates(
            couplings, energies, lam, line + b * 16 + 16, first + 16, h, high - 16, b * 16 + 16, eps, floor,
            H, SHIFT, SCALED, DIRECT,
        )  # fmt: skip
        both = warpgroup_mma_wait(0, deps=(both,))
        s_seen.store(both)
        _keep(s_couplings, s_rates, 1 - now, loaded)
        gl.thread_barrier()
        both = s_seen.permute((1, 0)).load(COLUMN)
        eta, carry = _rates(gains.index(stage), s_rates, now, floor, D)
        y = values.index(stage).reshape([16, D]).load(COLUMN).to(gl.float32)
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
        x = keys.index(stage * PARTS * 2).reshape([16, 64])
        S0 = warpgroup_mma(written, x, S0 * total, is_async=True)
        if PARTS == 2:
            x = keys.index(stage * PARTS * 2 + 2).reshape([16, 64])
            S1 = warpgroup_mma(written, x, S1 * total, is_async=True)
            S0, S1 = warpgroup_mma_wait(0, deps=(S0, S1))
        else:
            S0 = warpgroup_mma_wait(0, deps=(S0,))
        gl.thread_barrier()
        _fetch(descs, rings, n, b + STAGES, b + STAGES, kh * D, h * D, b + STAGES < count, D, SHIFT, STAGES)
    if state1 is not None:
        gl.store(state1 + slot + _offsets(0, D), S0)
        if PARTS == 2:
            gl.store(state1 + slot + _offsets(1, D), S1)
    bars._keep_alive()


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_state(
    k_desc, q_desc, d_o_desc, beta_desc, couplings, energies, lam, d_state1, d_u, d_states, d_state0, kept, wild,
    length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One sequence of one head in reverse: dU, the state gradient at every chunk end, where wanted dS_0, the products
    of chunks' carries [chunks, H, D], and whether they forget much."""
    PARTS: gl.constexpr = D // 64
    dtype: gl.constexpr = k_desc.dtype
    n = gl.program_id(0) // H
    h = gl.program_id(0) % H
    kh = h // (H // KH)
    begin = n.to(gl.int64) * length
    slot = (n.to(gl.int64) * H + h) * (D * D)
    count = (length + 15) // 16
    descs = (k_desc, q_desc, d_o_desc, beta_desc)
    rings = _rings(k_desc, d_o_desc, beta_desc, D, STAGES)
    keys, values, gains, bars = rings
    pairs = keys._reinterpret(dtype, [STAGES * PARTS, 32, 64], SHARED)
    s_couplings = gl.allocate_shared_memory(gl.float32, [64, 16], LINE)
    s_rates = gl.allocate_shared_memory(gl.float32, [4, 16], LINE)
    s_seen = gl.allocate_shared_memory(gl.float32, [D, 16], STRIPS_ONE)
    s_written = gl.allocate_shared_memory(dtype, [32, D], SHARED)
    s_total = gl.allocate_shared_memory(gl.float32, [D], LINE)
    gl.thread_barrier()
    for early in gl.static_range(STAGES):
        _fetch(descs, rings, n, early, count - 1 - early, kh * D, h * D, early < count, D, SHIFT, STAGES)
    line = kh.to(gl.int64) * tokens + begin
    at = (count - 1) * 16
    loaded = _load_shared_rates(
        couplings, energies, lam, line + at, begin + at, h, length - at, at, eps, floor, H, SHIFT, SCALED, DIRECT
    )
    _keep(s_couplings, s_rates, 0, loaded)
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
        high = length - b * 16
        first = begin + b * 16
        at_rows = (first * H + h) * D + cv
        if (b % 4 == 3) | (turn == 0):
            to = d_states + ((n * chunks + b // 4).to(gl.int64) * H + h) * (D * D)
            gl.store(to + _offsets(0, D), S0.to(dtype))
            if PARTS == 2:
                gl.store(to + _offsets(1, D), S1.to(dtype))
        mbarrier.wait(bars.index(stage), (turn // STAGES) & 1)
        low = gl.convert_layout(S0.to(dtype), LEFT_ONE)
        x = keys.index(stage * PARTS * 2).reshape([16, 64])
        ends = warpgroup_mma(low, x.permute((1, 0)), gl.zeros([D, 16], gl.float32, ONE), use_acc=False,
                             is_async=True)  # fmt: skip
        if PARTS == 2:
            low = gl.convert_layout(S1.to(dtype), LEFT_ONE)
            x = keys.index(stage * PARTS * 2 + 2).reshape([16, 64])
            ends = warpgroup_mma(low, x.permute((1, 0)), ends, is_async=True)
        at = b * 16 - 16
        loaded = _load_shared_rates(
            couplings, energies, lam, line + at, begin + at, h, gl.where(b > 0, 16, 0), at, eps, floor,
            H, SHIFT, SCALED, DIRECT,
        )  # fmt: skip
        ends = warpgroup_mma_wait(0, deps=(ends,))
        s_seen.store(ends)
        _keep(s_couplings, s_rates, 1 - now, loaded)
        gl.thread_barrier()
        felt = s_seen.permute((1, 0)).load(COLUMN)
        eta, carry = _rates(gains.index(stage), s_rates, now, floor, D)
        do = values.index(stage).reshape([16, D]).load(COLUMN).to(gl.float32)
        d_y = gl.zeros([16, D], gl.float32, COLUMN)
        for t in gl.static_range(15, -1, -1):
            misses = s_couplings.index((now * 16 + t) * 2).load(DOWN)[:, None]
            reads = s_couplings.index((now * 16 + t) * 2 + 1).load(DOWN)[:, None] * _row(do, r, t)[None, :]
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
            at_chunk = (n * chunks + b // 4).to(gl.int64) * H + h
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
        gl.thread_barrier()
        _fetch(
            descs, rings, n, turn + STAGES, b - STAGES, kh * D, h * D, turn + STAGES < count, D, SHIFT, STAGES
        )  # fmt: skip
    if d_state0 is not None:
        gl.store(d_state0 + slot + _offsets(0, D), S0)
        if PARTS == 2:
            gl.store(d_state0 + slot + _offsets(1, D), S1)
    bars._keep_alive()
