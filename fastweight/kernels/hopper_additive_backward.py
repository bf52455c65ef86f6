"""Inner-product class on Hopper, without windows: the whole backward pass as one walk in reverse.

For the dense calls that hopper_additive.py takes, with as many value as key columns. Notation and algebra as in
additive.py. One program walks one segment of one head with the gradient of the state [K, V] in its accumulators, so
that no state gradient goes to memory and no token is read twice; the chunk states come from the forward pass.

Traps: a TMA store that begins at a negative row is an illegal instruction (a load may), so the gradients of a
sequence's first shifted keys go by themselves. Of a chunk's four tiles those of q, x and y take their gradients out,
once all products are done with them. States have one buffer, into which the next one comes when the chunk has read its
own; at width 64 only at its end, because the matrix of pairs lies there meanwhile: a second program needs the memory.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.gates import load_head, step_gradient
from fastweight.kernels.hopper_parts import LINE, nil
from fastweight.kernels.hopper_walk import fetch, keep_barriers, load_rates, rings_of, span, whose
from fastweight.kernels.tiles import fade

# Rows of what warps have summed up each for itself; those of the first two kinds are one a warp's rows.
OF_STEPS = gl.constexpr(0)
OF_DECAYS = gl.constexpr(4)
OF_READS = gl.constexpr(8)
OF_WRITES = gl.constexpr(10)
OF_ENERGY = gl.constexpr(12)
OF_STATES = gl.constexpr(14)
SHARE = gl.constexpr(15)
# Rows of the numbers of a chunk; cumulative decays are log2.
STEP = gl.constexpr(0)
DECAY = gl.constexpr(1)
READ_DECAY = gl.constexpr(2)  # as the read sees the state


@gluon.jit
def _keep(numbers, at, loaded, BEFORE: gl.constexpr):
    """Keeps the numbers of a chunk; returns the decay to its end."""
    a, g, before, g_last = loaded
    numbers.index(at * 3 + STEP).store(a)
    numbers.index(at * 3 + DECAY).store(g)
    numbers.index(at * 3 + READ_DECAY).store(before if BEFORE else g)
    return g_last


@gluon.jit
def _down(numbers, at, WHICH: gl.constexpr, layout: gl.constexpr):
    return numbers.index(at * 3 + WHICH).load(gl.SliceLayout(1, layout))


@gluon.jit
def _across(numbers, at, WHICH: gl.constexpr, layout: gl.constexpr):
    return numbers.index(at * 3 + WHICH).load(gl.SliceLayout(0, layout))


@gluon.jit
def _by_warps(tile, WARPS: gl.constexpr):
    """Sums of [64, 64] over the rows of each warp, [4, 64]; or of [64, K] over its columns, [WARPS, 64]."""
    if WARPS == 4:
        return gl.sum(gl.reshape(tile, [4, 16, 64]), axis=1)
    else:
        return gl.sum(gl.reshape(tile, [64, WARPS, tile.shape[1] // WARPS]), axis=2)


@gluon.jit
def _put(room, WHICH: gl.constexpr, sums):
    """Keeps what `_by_warps` made."""
    if sums.shape[1] == 64:
        view = room._reinterpret(gl.float32, [8, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        view.index(WHICH // 4).store(sums)
    else:
        WARPS: gl.constexpr = sums.shape[1]
        view = room._reinterpret(gl.float32, [32 // WARPS, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        view.index(WHICH // WARPS).permute((1, 0)).store(sums)


@gluon.jit
def _total(room, WHICH: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr):
    """What they add up to, once all warps have met."""
    lines = room._reinterpret(gl.float32, [32, 64], LINE)
    total = lines.index(WHICH).load(layout)
    for warp in gl.static_range(1, COUNT):
        total += lines.index(WHICH + warp).load(layout)
    return total


@gluon.jit
def _apart(layout: gl.constexpr):
    """Row minus column of a tile [64, 64]; rows unknown to be the same in every chunk, as in hopper_parts.py."""
    i = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.arange(0, 64, gl.SliceLayout(1, layout))], dtype=gl.int32, is_pure=False, pack=1
    )
    return i[:, None] - gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _state_offsets(seg, h, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Offsets of a head's state in states [segments, H, K, V], made anew where they are used."""
    ck = nil() + gl.arange(0, K, layout=gl.SliceLayout(1, layout))
    cv = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    return (seg.to(gl.int64) * H + h) * (K * V) + (ck[:, None] * V + cv[None, :])


@gluon.jit
def _load_gates(beta, lam, at, i, high, first, h, H: gl.constexpr, SHIFT: gl.constexpr, RAW: gl.constexpr):
    """What `_gates` needs of a chunk, long before it does: behind all products nobody is left to wait with."""
    pair = (i < high) & (at + i >= SHIFT)
    gain = pair
    ridge = pair
    if not RAW:
        gain = load_head(beta, first, i, h, H, pair, 1.0)
        ridge = load_head(lam, first, i, h, H, pair, 0.0)
    return pair, gain, ridge


@gluon.jit
def _views(tiles, key_tile, value_tile, state_ring, room, scores, K: gl.constexpr, V: gl.constexpr):
    """Tiles of q, x, y, dO, S, dS, P and dP, as found from here on: what was found before need not be remembered."""
    q = tiles[0].index(nil()).reshape([64, K])
    x = key_tile[0].index(nil()).reshape([64, K])
    y = value_tile[0].index(nil()).reshape([64, V])
    do = tiles[1].index(nil()).reshape([64, V])
    return q, x, y, do, state_ring[0].index(nil()), room.index(nil()), scores.index(nil()), scores.index(nil() + 1)


@gluon.jit
def _gates(
    given, d_beta, d_lam, i, high, first, h, d_w, d_log, energy, eps, floor,
    H: gl.constexpr, RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of beta and lam; returns that of the energy."""
    pair, gain, ridge = given
    if RAW:
        d_gain = gl.where(pair, d_w, 0.0)
        d_ridge = gl.where(pair, d_log, 0.0)
        share = gl.where(pair, 0.0, 0.0)  # not used
    else:
        d_gain, d_ridge, share = step_gradient(d_w, d_log, energy, gain, ridge, pair, eps, floor, SCALED, DIRECT, True)
    if d_beta is not None:
        gl.store(d_beta + first * H + h + i * H, d_gain, mask=i < high)
    if d_lam is not None:
        gl.store(d_lam + first * H + h + i * H, d_ridge, mask=i < high)
    return share


@gluon.jit
def _edges(d_k, x, n, h, start, count, chunks, length, H: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Of shifted keys: the gradients of a sequence's first tokens, and of its last, which is paired with none."""
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, line))[:, None]
    first = d_k + n.to(gl.int64) * length * (H * K) + h * K
    if start == 0:
        at = (i - 1) * (H * K) + gl.arange(0, K, layout=gl.SliceLayout(0, line))[None, :]
        gl.store(first + at, x.load(line), mask=(i > 0) & (i <= length))
    if start + count == chunks:
        col = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        last = (length - 1).to(gl.int64) * (H * K)
        gl.store(first + last + col, gl.zeros_like(col).to(d_k.dtype.element_ty))


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward(
    q_desc, k_desc, v_desc, d_o_desc, states_desc, d_q_desc, d_k_desc, d_v_desc, d_k, beta, lam, d_beta, d_lam,
    weight, decay, d_state1, d_state0, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr, RAW: gl.constexpr,
    SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse: all gradients of its tokens, and if asked dS_0."""
    WIDE: gl.constexpr = num_warps // 4  # warp groups: side by side over a tile's columns, one above the other over K
    # Whether there is memory for the pairs beside the states. At width 64 a second program is worth more.
    EARLY: gl.constexpr = K == 128
    ENERGY: gl.constexpr = not RAW and (not DIRECT or SCALED)
    dtype: gl.constexpr = q_desc.dtype
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, 64 // WIDE, 16])
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, K // WIDE, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WIDE, 1], [16, V, 16])
    tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WIDE, 1], [16, 64, 16])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    _block, h, seg = whose(gl.program_id(0), 1, H)
    n, start, count = span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K

    descs = (q_desc, d_o_desc)
    tiles, bars = rings_of(descs, 1)
    key_tile, key_bar = rings_of((k_desc,), 1)
    value_tile, value_bar = rings_of((v_desc,), 1)
    state_ring, state_bars = rings_of((states_desc,), 1)
    s_dq = gl.allocate_shared_memory(dtype, d_q_desc.block_shape, d_q_desc.layout)
    s_dx = gl.allocate_shared_memory(dtype, d_k_desc.block_shape, d_k_desc.layout)
    s_dy = gl.allocate_shared_memory(dtype, d_v_desc.block_shape, d_v_desc.layout)
    room = gl.allocate_shared_memory(dtype, [1, K, V], gl.NVMMASharedLayout.get_default_for([K, V], dtype))
    scores = gl.allocate_shared_memory(dtype, [2, 64, 64], square)
    before = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square)
    if EARLY:
        crossings = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square)
    numbers = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    before.index(0).store(gl.where(_apart(pairs) > 0, 1.0, 0.0).to(gl.bfloat16))
    at = last * 64
    fetch(descs, tiles, bars, 0, ((n, at, key_at), (n, at, h * V)), count > 0)
    fetch((k_desc,), key_tile, key_bar, 0, ((n, at - SHIFT, key_at),), count > 0)
    fetch((v_desc,), value_tile, value_bar, 0, ((n, at, h * V),), count > 0)
    fetch((states_desc,), state_ring, state_bars, 0, ((slot * K, 0),), count > 0)
    i = gl.arange(0, 64, layout=flat)
    soon = load_rates(weight, decay, line, at, length - at, i, not BEFORE)
    g_last = _keep(numbers, 0, soon, BEFORE)
    if count > 1:
        soon = load_rates(weight, decay, line, at - 64, length - at + 64, i, not BEFORE)
    if d_state1 is None:
        dS = gl.zeros([K, V], gl.float32, state)
    else:
        dS = gl.load(d_state1 + _state_offsets(seg, h, H, K, V, state)).to(gl.float32)
    no_pairs = gl.zeros([64, 64], gl.float32, pairs)
    no_tile = gl.zeros([64, K], gl.float32, tile)

    for c in range(0, count):
        q, x, y, do, S, s_dS, low_p, low_dp = _views(tiles, key_tile, value_tile, state_ring, room, scores, K, V)
        at = (last - c) * 64
        high = length - at
        later = soon
        if c + 2 < count:
            later = load_rates(weight, decay, line, at - 128, high + 128, i, not BEFORE)
        first = n.to(gl.int64) * length + at
        given = _load_gates(beta, lam, at, i, high, first, h + nil(), H, SHIFT, RAW)
        carry = gl.exp2(g_last)
        tma.store_wait(0)
        next_last = _keep(numbers, (c + 1) & 1, soon, BEFORE)
        s_dS.store(dS.to(dtype))
        # What comes last is waited for as late as may be.
        mbarrier.wait(bars[0].index(0), c & 1)
        mbarrier.wait(key_bar[0].index(0), c & 1)
        p = warpgroup_mma(q, x.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        mbarrier.wait(value_bar[0].index(0), c & 1)
        mbarrier.wait(bars[1].index(0), c & 1)
        dp = warpgroup_mma(do, y.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(state_bars[0].index(0), c & 1)
        d_q = warpgroup_mma(do, S.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        d_y = warpgroup_mma(x, s_dS, no_tile, use_acc=False, is_async=True)
        p, dp = warpgroup_mma_wait(2, deps=(p, dp))
        distance = _apart(pairs)
        reads = distance > 0 if BEFORE else distance >= 0
        power = _down(numbers, c & 1, READ_DECAY, pairs)[:, None] - _across(numbers, c & 1, DECAY, pairs)[None, :]
        felt = fade(reads, power)
        seen = felt * _across(numbers, c & 1, STEP, pairs)[None, :]
        low_p.store((p * seen).to(dtype))
        low_dp.store((dp * seen).to(dtype))
        felt = p * dp * felt
        d_w = _by_warps(felt, 4)
        felt_low = (felt * _across(numbers, c & 1, STEP, pairs)[None, :]).to(gl.bfloat16)
        through = gl.sum(S.load(state).to(gl.float32) * dS, axis=1)
        through = gl.sum(gl.reshape(through, [num_warps, K // num_warps]), axis=1)
        fence_async_shared()
        d_q, d_y = warpgroup_mma_wait(0, deps=(d_q, d_y))
        # Behind this barrier the state has been read, and the scores are there.
        gl.thread_barrier()
        q, x, y, do, S, s_dS, low_p, low_dp = _views(tiles, key_tile, value_tile, state_ring, room, scores, K, V)
        ahead_state = ((slot - (c + 1) * H) * K, 0)
        if EARLY:
            fetch((states_desc,), state_ring, state_bars, 0, (ahead_state,), c + 1 < count)
            crossing = crossings.index(nil())
        else:
            crossing = S._reinterpret(gl.bfloat16, [64, 64], square)
        d_x = warpgroup_mma(y, s_dS.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        # felt[t, s]: how the loss depends on D[t, s]; times `before`, on all that decays at s and is read at t.
        crossing.store(felt_low)
        fence_async_shared()
        d_q *= gl.exp2(_down(numbers, c & 1, READ_DECAY, tile))[:, None]
        row_read = _by_warps(d_q * q.load(tile).to(gl.float32), WIDE)
        d_q = warpgroup_mma(low_dp, x, d_q, is_async=True)
        last_of = gl.exp2(g_last - _down(numbers, c & 1, DECAY, tile))
        met = _by_warps(d_y * y.load(tile).to(gl.float32), WIDE)
        kept = last_of * _down(numbers, c & 1, STEP, tile)
        d_y = warpgroup_mma(low_p.permute((1, 0)), do, d_y * kept[:, None], is_async=True)
        read = q.permute((1, 0)).load(tall).to(gl.float32) * gl.exp2(_across(numbers, c & 1, READ_DECAY, tall))[None, :]
        read = gl.convert_layout(read.to(dtype), gl.DotOperandLayout(0, tall, 2))
        dS = warpgroup_mma(read, do, dS * carry, is_async=True)
        d_x, d_q, d_y = warpgroup_mma_wait(1, deps=(d_x, d_q, d_y))
        d_x = warpgroup_mma(low_dp.permute((1, 0)), q, d_x * kept[:, None], is_async=True)
        s_dq.reshape([64, K]).store(d_q.to(dtype))
        s_dy.reshape([64, V]).store(d_y.to(dtype))
        gl.thread_barrier()
        ahead = at - 64
        fetch((v_desc,), value_tile, value_bar, 0, ((n, ahead, h * V),), c + 1 < count)
        felt = warpgroup_mma(crossing, before.index(nil()).permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        sums = low_p  # nobody needs those scores from here on
        _put(sums, OF_STEPS, d_w)
        _put(sums, OF_READS, row_read)
        _put(sums, OF_WRITES, met)
        per_warp = sums._reinterpret(gl.float32, [2048 // num_warps, num_warps], LINE)
        per_warp.index(OF_STATES * 64 // num_warps).store(through)
        if ENERGY:
            low_x = x.load(tile).to(gl.float32)
            _put(sums, OF_ENERGY, _by_warps(low_x * low_x, WIDE))
        felt, d_x, dS = warpgroup_mma_wait(0, deps=(felt, d_x, dS))
        distance = _apart(pairs)
        reads = distance > 0 if BEFORE else distance >= 0
        row_read = _total(sums, OF_READS, WIDE, gl.SliceLayout(1, pairs))
        written = _total(sums, OF_WRITES, WIDE, gl.SliceLayout(1, pairs)) * _down(numbers, c & 1, STEP, pairs)
        written *= gl.exp2(g_last - _down(numbers, c & 1, DECAY, pairs))
        felt = gl.where(reads, felt + row_read[:, None], 0.0) + gl.where(distance < 0, written[:, None], 0.0)
        _put(sums, OF_DECAYS, _by_warps(felt, 4))
        every: gl.constexpr = gl.BlockedLayout([num_warps], [32], [num_warps], [0])
        through = gl.sum(per_warp.index(OF_STATES * 64 // num_warps).load(every), axis=0)
        d_log = _total(sums, OF_DECAYS, 4, flat) + through * carry
        met = _total(sums, OF_WRITES, WIDE, flat) * gl.exp2(g_last - numbers.index((c & 1) * 3 + DECAY).load(flat))
        d_w = _total(sums, OF_STEPS, 4, flat) + met
        energy = d_w
        if ENERGY:
            energy = _total(sums, OF_ENERGY, WIDE, flat)
        share = _gates(
            given, d_beta, d_lam, i, high, first, h + nil(), d_w, d_log, energy, eps, floor, H, RAW, SCALED, DIRECT
        )
        if ENERGY:
            lines = sums._reinterpret(gl.float32, [32, 64], LINE)
            lines.index(SHARE).store(share)
            share = lines.index(SHARE).load(gl.SliceLayout(1, tile))
            d_x += 2 * share[:, None] * x.load(tile).to(gl.float32)
        s_dx.reshape([64, K]).store(d_x.to(dtype))
        fence_async_shared()
        # Behind this barrier the products of all warps are done with the tiles, and the gradients are there.
        gl.thread_barrier()
        fetch(descs, tiles, bars, 0, ((n, ahead, key_at), (n, ahead, h * V)), c + 1 < count)
        fetch((k_desc,), key_tile, key_bar, 0, ((n, ahead - SHIFT, key_at),), c + 1 < count)
        if not EARLY:
            fetch((states_desc,), state_ring, state_bars, 0, (ahead_state,), c + 1 < count)
        tma.async_copy_shared_to_global(d_q_desc, [n, at, h * K], s_dq)
        if at >= SHIFT:
            tma.async_copy_shared_to_global(d_k_desc, [n, at - SHIFT, h * K], s_dx)
        tma.async_copy_shared_to_global(d_v_desc, [n, at, h * V], s_dy)
        g_last = next_last
        soon = later
    if SHIFT:
        _edges(d_k, s_dx.reshape([64, K]), n, h, start, count, chunks, length, H, K, num_warps)
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + _state_offsets(seg, h, H, K, V, state), dS)
    keep_barriers(bars)
    keep_barriers(key_bar)
    keep_barriers(value_bar)
    keep_barriers(state_bars)
