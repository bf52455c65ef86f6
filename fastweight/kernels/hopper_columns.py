"""Inner-product class with a gain per value column on Hopper, forward: (q, k, v, beta, lam) -> (o, final S).

For dense bfloat16 calls with 64 or 128 key and value columns that read after they write. With l the log2 decay of each
token and column, g its sums up to and with each token of a chunk, and u = eta .* y, a chunk is products of matrices
although every column has its own decay:

    O = 2^g .* (Q S_0 + [j <= i] (Q X^T) (2^-g .* u))           S_C = 2^(g_C) .* (S_0 + X^T (2^-g .* u))

as long as 2^-g is a number with room for what it multiplies: the chunk is tame. A walk that met another one notes that,
and the kernel of columns.py, which takes any decay, then follows and writes everything anew. Chunks are walked as in
hopper_additive.py, everything transposed: rows of tiles [64, .] are columns of V, so that what a column has of its own,
decays and their sums, lies along rows. g is a product of l with ones. Gains come straight into registers, a chunk
ahead: they may be of any dtype, and transposed every 8 of float32 are a sector.

What each token has for all columns is made in the walk, of the keys that are there anyway: `REC`, what eta is for a
gain of 1, and `RHO`, alpha for one. With a key's energy E these are 1 / (E + ridge + eps) and ridge times that.

Traps: as in columns.py and hopper_walk.py. A walk without o only adds up and takes any decay: it needs no 2^-g.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.columns import LEAST, quick_log
from fastweight.kernels.gates import load_head, step_sizes
from fastweight.kernels.hopper_parts import ACC, FLAT, LEFT, LINE, SHARED, apart, nil
from fastweight.kernels.hopper_walk import fetch, keep_barriers, rings_of, span, state_offsets, whose

TAME = gl.constexpr(-60.0)  # least log2 decay of a tame chunk
KEYS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [0, 1]))  # two threads a row
# Rows of the numbers of a chunk.
REC = gl.constexpr(0)
RHO = gl.constexpr(1)
RIDGE = gl.constexpr(2)
NUMBERS = gl.constexpr(4)


@gluon.jit
def ones_up_to(layout: gl.constexpr):
    """[1, 64, 64] in shared memory, 1 where the row is up to the column: what sums of l are products with."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    ones = gl.allocate_shared_memory(gl.float16, [1, 64, 64], SHARED)
    ones.index(0).store(gl.where(i[:, None] <= j[None, :], 1.0, 0.0).to(gl.float16))
    return ones


@gluon.jit
def along(numbers, which, layout: gl.constexpr):
    """One of a chunk's numbers, the same for all rows of a transposed tile."""
    return numbers.index(which).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def columns_at(pointer, first, h, c, i, H: gl.constexpr, V: gl.constexpr):
    """Addresses of a transposed tile of [tokens, H, V]. By eights of tokens, which no thread has a part in: what they
    add is a constant of the instruction then, and no register."""
    near = pointer + (first * H + h) * V + (c[:, None] + (i & 7)[None, :] * (H * V))
    return near + ((i & 56) * (H * V))[None, :]


@gluon.jit
def load_gains(beta, first, h, c, high, H: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Gains of 64 tokens, transposed, c the columns; zeros past the end."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = columns_at(beta, first, h, c, i, H, V)
    if high < 64:
        gain = gl.load(at, mask=(i < high)[None, :], other=0.0)
    else:
        gain = gl.load(at)
    return gain.to(gl.float32)


@gluon.jit
def store_gains(pointer, values, first, h, c, high, H: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Writes what `load_gains` reads."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    at = columns_at(pointer, first, h, c, i, H, V)
    if high < 64:
        gl.store(at, values.to(pointer.dtype.element_ty), mask=(i < high)[None, :])
    else:
        gl.store(at, values.to(pointer.dtype.element_ty))


@gluon.jit
def log_decays(gain, rho, floor):
    """l of every token and column."""
    alpha = gain * rho
    return quick_log(alpha, gl.maximum(1 - alpha, floor))


@gluon.jit
def _put_numbers(
    numbers, x, ridge, at, high, eps, floor,
    SHIFT: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """What each token has for all columns, from its key; returns its energy."""
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, KEYS))
    # By eights, so that a thread adds up several sums at a time.
    keys = gl.reshape(x.load(KEYS).to(gl.float32), [64, x.shape[1] // 8, 8])
    energy = gl.convert_layout(gl.sum(gl.sum(keys * keys, axis=2), axis=1), gl.SliceLayout(1, KEYS))
    pair = (i < high) & (at + i >= SHIFT)
    rec, _ridge, _d, rho, _carry, _open, _writes = step_sizes(energy, 1.0, ridge, pair, eps, floor, SCALED, DIRECT)
    numbers.index(REC).store(rec)
    numbers.index(RHO).store(rho)
    return energy


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    k_desc, q_desc, v_desc, o_desc, states_desc, beta, lam, energies, state0, state1, spans, wild,
    length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    SCALED: gl.constexpr, DIRECT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head, 64 value columns: the final state, and where given o, chunk states and key energies.

    Without o, all segments but the last of each sequence, and their log2 decays: spans [segments, H, V]. wild: a byte a
    program, whether some chunk was not tame, so that all of this is wrong.
    """
    READS: gl.constexpr = o_desc is not None
    dtype: gl.constexpr = k_desc.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    block, h, seg = whose(gl.program_id(0), V // 64, H)
    if not READS:
        seg += seg // (segments - 1)
    n, start, count = span(seg, chunks, segments, per_segment)
    begin = n.to(gl.int64) * length
    line = h.to(gl.int64) * tokens + begin
    slot = (n * chunks + start) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (k_desc, v_desc)
    if READS:
        descs = (k_desc, v_desc, q_desc)
        scores = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED)
        leaving = gl.allocate_shared_memory(dtype, [1, K, 64], tall)  # the state
    rings, bars = rings_of(descs, STAGES)
    numbers = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    ones = ones_up_to(ACC)
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * 64
        fetch(descs, rings, bars, early, ((n, at - SHIFT, key_at), (n, at, value_at), (n, at, key_at)), early < count)
    fence_async_shared()
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, KEYS))
    at = start * 64
    high = length - at
    ridge = load_head(lam, begin + at, i, h, H, i < high, 0.0)
    column = block * 64 + gl.arange(0, 64, layout=ROW)
    gain = load_gains(beta, begin + at, h, column, high, H, V, ACC)
    if state0 is None:
        S = gl.zeros([64, K], gl.float32, wide)
    else:
        S = gl.load(state0 + state_offsets(seg, h, block, H, K, V, wide)).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, ACC)
    lowest = gl.zeros([64], gl.float32, ROW)
    passed_on = gl.zeros([64], gl.float32, ROW)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = rings[0].index(s).reshape([64, K])
        y = rings[1].index(s).reshape([64, 64])
        at = (start + c) * 64
        high = length - at
        mbarrier.wait(bars[0].index(s), phase)
        if READS:
            qt = rings[2].index(s).reshape([64, K])
            mbarrier.wait(bars[2].index(s), phase)
            p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
        energy = _put_numbers(numbers, x, ridge, at, high, eps, floor, SHIFT, SCALED, DIRECT)
        # Behind this barrier every warp is done with the chunk before, and the numbers are there.
        tma.store_wait(0)
        gl.thread_barrier()
        ahead = at + (STAGES - 1) * 64
        coords = (n, ahead - SHIFT, key_at), (n, ahead, value_at), (n, ahead, key_at)
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        # Of addresses made anew, here and below: the loop would remember one for each.
        if energies is not None:
            gl.store(energies + (line + nil()) + at + i, energy, mask=(i < high) & (block == 0))
        ridge = load_head(lam, begin + at + 64, i, h + nil(), H, i < high - 64, 0.0)
        mbarrier.wait(bars[1].index(s), phase)  # keeps the assembler from loading later than that
        if READS:
            leaving.index(nil()).permute((1, 0)).store(S.to(dtype))
            p = warpgroup_mma_wait(0, deps=[p])
            scores.index(nil()).store(gl.where(apart() >= 0, p, 0.0).to(dtype))
        log_decay = log_decays(gain, along(numbers, RHO, ACC), floor)
        if not READS:
            log_decay = gl.maximum(log_decay, LEAST)
        passed = log_decay.to(gl.float16)
        g = warpgroup_mma(gl.convert_layout(passed, LEFT), ones.index(nil()), none, use_acc=False, is_async=True)
        total = gl.sum(log_decay, axis=1)
        inside = gl.sum(passed.to(gl.float32), axis=1)  # of the rounded l that g is made of, so that errors cancel
        lowest = gl.minimum(lowest, total)
        passed_on += total
        gain *= along(numbers, REC, ACC)
        if READS:
            fence_async_shared()
        g = warpgroup_mma_wait(0, deps=[g])
        u = gain * y.permute((1, 0)).load(ACC).to(gl.float32)
        # Without reads as the end sees it: then any decay will do.
        m = gl.convert_layout((u * gl.exp2(-g if READS else inside[:, None] - g)).to(dtype), LEFT)
        if READS:
            # Behind this barrier the state and the scores are there.
            gl.thread_barrier()
        if c + 1 < count:
            gain = load_gains(beta, begin + at + 64, h + nil(), column, high - 64, H, V, ACC)
        if READS:
            low_S = leaving.index(nil())
            read = warpgroup_mma(low_S.permute((1, 0)), qt.permute((1, 0)), none, use_acc=False, is_async=True)
            out = warpgroup_mma(m, scores.index(nil()).permute((1, 0)), read, is_async=True)
            if states_desc is not None:
                tma.async_copy_shared_to_global(states_desc, [(slot + c * H) * K, block * 64], low_S)
        past = gl.convert_layout(total - inside if READS else total, gl.SliceLayout(1, wide))
        S = warpgroup_mma(m, x, S * gl.exp2(past)[:, None], is_async=True)
        if READS:
            out, S = warpgroup_mma_wait(0, deps=[out, S])
            S *= gl.exp2(gl.convert_layout(inside, gl.SliceLayout(1, wide)))[:, None]
            y.permute((1, 0)).store((out * gl.exp2(g)).to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(o_desc, [n, at, value_at], rings[1].index(s))
        else:
            S = warpgroup_mma_wait(0, deps=[S])
    tma.store_wait(0)
    if wild is not None:
        gl.store(wild + gl.program_id(0), (gl.min(lowest, axis=0) < TAME).to(gl.int8))
    if state1 is not None:
        gl.store(state1 + state_offsets(seg, h, block + nil(), H, K, V, wide), S)
    if spans is not None:
        gl.store(spans + (seg.to(gl.int64) * H + h) * V + column, passed_on)
    # What copies out may still read is not lent to the search for the lowest: only one thread has waited for them.
    rings[1]._keep_alive()
    if READS:
        leaving._keep_alive()
    keep_barriers(bars)


@gluon.jit
def load_token(energies, lam, line, begin, at, i, high, h, H: gl.constexpr, SHIFT: gl.constexpr):
    """Energy and lam of each token of a chunk, and whether it has a pair."""
    pair = (i < high) & (at + i >= SHIFT)
    energy = gl.load(energies + line + at + i, mask=i < high, other=0.0)
    return energy, load_head(lam, begin + at, i, h, H, pair, 0.0), pair


@gluon.jit
def keep_token(numbers, at, loaded, eps, floor, SCALED: gl.constexpr, DIRECT: gl.constexpr):
    """Keeps a chunk's numbers from row `at` on."""
    energy, lam, pair = loaded
    rec, ridge, _d, rho, _carry, _open, _writes = step_sizes(energy, 1.0, lam, pair, eps, floor, SCALED, DIRECT)
    numbers.index(at + REC).store(rec)
    numbers.index(at + RHO).store(rho)
    numbers.index(at + RIDGE).store(ridge)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q_desc, d_o_desc, beta, lam, energies, d_state0, spans, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    SCALED: gl.constexpr, DIRECT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, 64 value columns: what it adds to the gradient of its first state, and its
    log2 decays; of all segments but the first of each sequence. Any decay will do."""
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    block, h, seg = whose(gl.program_id(0), V // 64, H)
    seg += seg // (segments - 1) + 1
    n, start, count = span(seg, chunks, segments, per_segment)
    begin = n.to(gl.int64) * length
    line = h.to(gl.int64) * tokens + begin
    last = start + count - 1
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (q_desc, d_o_desc)
    rings, bars = rings_of(descs, STAGES)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * NUMBERS, 64], LINE)
    ones = ones_up_to(ACC)
    for early in gl.static_range(STAGES - 1):
        at = (last - early) * 64
        fetch(descs, rings, bars, early, ((n, at, key_at), (n, at, value_at)), early < count)
    fence_async_shared()
    i = gl.arange(0, 64, layout=FLAT)
    at = last * 64
    now = load_token(energies, lam, line, begin, at, i, length - at, h, H, SHIFT)
    keep_token(numbers, 0, now, eps, floor, SCALED, DIRECT)
    column = block * 64 + gl.arange(0, 64, layout=ROW)
    gain = load_gains(beta, begin + at, h, column, length - at, H, V, ACC)
    dS = gl.zeros([64, K], gl.float32, wide)
    none = gl.zeros([64, 64], gl.float32, ACC)
    passed_on = gl.zeros([64], gl.float32, ROW)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        q = rings[0].index(s).reshape([64, K])
        do = rings[1].index(s).reshape([64, 64])
        at = (last - c) * 64
        if c + 1 < count:
            now = load_token(energies, lam, line, begin, at - 64, i, length - at + 64, h, H, SHIFT)
        # Behind this barrier every warp is done with the chunk before.
        gl.thread_barrier()
        keep_token(numbers, ((c + 1) & 1) * NUMBERS, now, eps, floor, SCALED, DIRECT)
        ahead = at - (STAGES - 1) * 64
        coords = (n, ahead, key_at), (n, ahead, value_at)
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        log_decay = log_decays(gain, along(numbers, (c & 1) * NUMBERS + RHO, ACC), floor)
        log_decay = gl.maximum(log_decay, LEAST)
        passed = log_decay.to(gl.float16)
        g = warpgroup_mma(gl.convert_layout(passed, LEFT), ones.index(nil()), none, use_acc=False, is_async=True)
        total = gl.sum(log_decay, axis=1)
        passed_on += total
        if c + 1 < count:
            gain = load_gains(beta, begin + at - 64, h, column, length - at + 64, H, V, ACC)
        g = warpgroup_mma_wait(0, deps=[g])
        mbarrier.wait(bars[1].index(s), phase)
        r = (do.permute((1, 0)).load(ACC).to(gl.float32) * gl.exp2(g)).to(q.dtype)
        mbarrier.wait(bars[0].index(s), phase)
        kept = gl.convert_layout(gl.exp2(total), gl.SliceLayout(1, wide))
        dS = warpgroup_mma(gl.convert_layout(r, LEFT), q, dS * kept[:, None], is_async=True)
        dS = warpgroup_mma_wait(0, deps=[dS])
    gl.store(d_state0 + state_offsets(seg, h, block + nil(), H, K, V, wide), dS)
    gl.store(spans + (seg.to(gl.int64) * H + h) * V + column, passed_on)
    keep_barriers(bars)
