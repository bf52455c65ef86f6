"""Inner-product class on Hopper: the whole backward pass as one walk in reverse.

For the dense calls that hopper_additive.py takes, with as many value as key columns. Notation and algebra as in
additive.py, what a window adds in hopper_additive_windows.py. One program walks one segment of one head with the
gradient of the state [K, V] in its accumulators, so that no state gradient goes to memory and no token is read twice;
the chunk states come from the forward pass.

At width 128 there is one program a multiprocessor, and nobody else to work while it waits, so little is waited for.
Tiles come half a chunk or a whole one before they are needed. A chunk's products come in two turns: those with the
state and its gradient, and those with what is made of the first ones. During the second all that gates have to do with
is finished, because the gradient of a log-decay needs no product of its own. With f[i, j] what pair j has to do with
read i, and f[i] and f[j] its sums, the pairs that decay at t are

    sum_(i >= t, j < t) f[i, j] = sum_(i >= t) f[i] - sum_(j >= t) f[j]

where what cancels, in float32 within one chunk, is the same numbers.

Gradients of q and x leave from the places of q and x, that of y from where the scores were.

Traps: a TMA store that begins at a negative row is an illegal instruction (a load may), so the gradients of a
sequence's first shifted keys go by themselves. q and x of the chunk after next wait for the gradients that leave from
their places.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: RUF005, SIM102

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_additive_sums import (
    DECAY,
    OF_ENERGY,
    OF_READS,
    OF_ROWS,
    OF_STEPS,
    OF_WRITES,
    READ_DECAY,
    STEP,
    across,
    announce,
    bring,
    by_warps,
    decays_of,
    distance_in,
    down,
    head_offsets,
    keep_numbers,
    load_gates,
    numbers_of,
    of_gates,
    put_edges,
    put_gates,
    put_sums,
    state_overlap,
    sums_of,
    total_of,
    views,
)
from fastweight.kernels.hopper_additive_windows import (
    leave,
    leave_reads,
    left_behind,
    load_steps,
    load_window,
    of_steps,
    pairs_of,
    put_diagonals,
    window_from,
    window_up_to,
    with_near,
)
from fastweight.kernels.hopper_parts import nil
from fastweight.kernels.hopper_walk import fetch, keep_barriers, load_rates, rings_of, span, whose
from fastweight.kernels.tiles import fade


@gluon.jit
def _load(weight, decay, sums, line, slot, at, left, i,
          WINDOW: gl.constexpr, BEFORE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """What `keep_numbers` takes of a chunk of `left` tokens or more, and what windows add to it."""
    if WINDOW == 1:
        return load_rates(weight, decay, line, at, left, i, not BEFORE), ()
    else:
        return load_window(decay, sums, line, slot, at, left, i, WINDOW, BEFORE, WARPS)


@gluon.jit
def _ask(asked, coords, stage, more, wanted, LEFT: gl.constexpr):
    """Has the next state brought, once this one has been read, and queries and keys where gradients have left from.

    LEFT: by copies that one thread started.
    """
    states_desc, q_desc, k_desc, begins, begin_bars, features, feature_bars = asked
    announce((states_desc,), begin_bars, 0, more)
    announce((q_desc, k_desc), feature_bars, 1 - stage, wanted)
    if LEFT:
        tma.store_wait(0)
    gl.thread_barrier()
    bring((states_desc,), begins, begin_bars, 0, coords[0], more)
    bring((q_desc, k_desc), features, feature_bars, 1 - stage, coords[1], wanted)


@gluon.jit
def _leave(
    out_q, d_k, out_v, more_x, more_y, halo_k, halo_v, features, s_dy, last, c, count, length, begin, h, seg,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of a chunk with windows, while the first products of the next one go on."""
    at = (last - c) * (65 - WINDOW)
    high = gl.minimum(length - at, 65 - WINDOW)
    s_dq = features[0].index((c & 1) + nil()).reshape([64, K])
    s_dx = features[1].index((c & 1) + nil()).reshape([64, K])
    leave(out_v, more_y, s_dy.reshape([64, V]), at, 0, begin, h, high, c, count, halo_v, seg, H, V, WINDOW,
          num_warps)  # fmt: skip
    leave_reads(out_q, s_dq, at, begin, h, high, H, K, num_warps)
    leave(d_k, more_x, s_dx, at, SHIFT, begin, h, high, c, count, halo_k, seg, H, K, WINDOW, num_warps)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward(
    q_desc, k_desc, v_desc, d_o_desc, states_desc, d_q_desc, d_k_desc, d_v_desc, out_q, d_k, out_v, halo_k, halo_v,
    beta, lam, d_beta, d_lam, weight, decay, sums, d_state1, d_state0,
    length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr,
    RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr, LATER: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse: all gradients of its tokens, and if asked dS_0.

    out_q, out_v, halo_k, halo_v, sums: only with a window, when gradients go out by threads.
    """
    HALO: gl.constexpr = WINDOW - 1
    STRIDE: gl.constexpr = 65 - WINDOW
    LIVE: gl.constexpr = WINDOW == 1  # whether a scaled ridge sees the energy
    WIDE: gl.constexpr = num_warps // 4  # warp groups: side by side over a tile's columns, one above the other over K
    ENERGY: gl.constexpr = not RAW and (not DIRECT or SCALED)
    SHARES: gl.constexpr = not RAW and (not DIRECT or (SCALED and LIVE))
    dtype: gl.constexpr = q_desc.dtype
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, 64 // WIDE, 16])
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, K // WIDE, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WIDE, 1], [16, V, 16])
    tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WIDE, 1], [16, 64, 16])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    each: gl.constexpr = gl.BlockedLayout([2], [32], [num_warps], [0])  # every warp has all of a chunk's tokens
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    _block, h, seg = whose(gl.program_id(0), 1, H)
    n, start, count = span(seg, chunks, segments, per_segment)
    begin = n.to(gl.int64) * length
    line = h.to(gl.int64) * tokens + begin
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K

    features, feature_bars = rings_of((q_desc, k_desc), 2)
    values, value_bars = rings_of((d_o_desc, v_desc), 2)
    begins, begin_bars = rings_of((states_desc,), 1)
    room = gl.allocate_shared_memory(dtype, [1, K, V], gl.NVMMASharedLayout.get_default_for([K, V], dtype))
    scores = gl.allocate_shared_memory(dtype, [2, 64, 64], square)
    s_dy = scores._reinterpret(dtype, [128 // K] + d_v_desc.block_shape, d_v_desc.layout).index(0)
    numbers = numbers_of()
    added, per_warp, shares = sums_of(WIDE, num_warps)
    if WINDOW > 1:
        lately = gl.allocate_shared_memory(gl.float32, [2, 64, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        beside = gl.allocate_shared_memory(gl.float32, [WIDE, 64, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    at = last * STRIDE
    for early in gl.static_range(2):
        then = at - early * STRIDE
        coords = (n, then, key_at), (n, then - HALO - SHIFT, key_at)
        fetch((q_desc, k_desc), features, feature_bars, early, coords, early < count)
        coords = (n, then, h * V), (n, then - HALO, h * V)
        fetch((d_o_desc, v_desc), values, value_bars, early, coords, early < count)
    fetch((states_desc,), begins, begin_bars, 0, ((slot * K, 0),), count > 0)
    i = gl.arange(0, 64, layout=flat)
    token = gl.arange(0, 64, layout=each)
    soon, near = _load(weight, decay, sums, line, slot, at, length - at, i, WINDOW, BEFORE, num_warps)
    g_last = keep_numbers(numbers, 0, soon, BEFORE or WINDOW > 1)
    if WINDOW > 1:
        lately.index(0).store(near)
        more_y = left_behind(out_v, at, 0, begin, h, count * 0, H, V, WINDOW, num_warps)
        more_x = left_behind(d_k, at, SHIFT, begin, h, count * 0, H, K, WINDOW, num_warps)
    if d_state1 is None:
        dS = gl.zeros([K, V], gl.float32, state)
    else:
        dS = gl.load(d_state1 + head_offsets(seg, h, H, K, V, state)).to(gl.float32)
    room.index(0).store(dS.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    asked = states_desc, q_desc, k_desc, begins, begin_bars, features, feature_bars
    no_pairs = gl.zeros([64, 64], gl.float32, pairs)
    no_tile = gl.zeros([64, K], gl.float32, tile)

    for c in range(0, count):
        stage = c & 1
        q, x, y, do, S, s_dS, low_p, low_dp = views(features, values, begins, room, scores, stage, K, V)
        at = (last - c) * STRIDE
        high = gl.minimum(length - at, STRIDE)
        first = begin + at
        carry = gl.exp2(g_last)
        more = c + 1 < count
        ahead = at - STRIDE
        after = slot - (c + 1) * H
        # What threads load and store goes on from here, as far as may be before a fence, which waits for all of it.
        given = load_gates(beta, lam, at, token, high, first, h + nil(), H, SHIFT, RAW)
        if WINDOW > 1:
            its = load_steps(weight, decay, line + at, high, token)
        if more:
            left = length - ahead
            soon, near = _load(weight, decay, sums, line, after, ahead, left, i, WINDOW, BEFORE, num_warps)
        # What comes last is waited for as late as may be.
        phase = (c >> 1) & 1
        mbarrier.wait(feature_bars[0].index(stage), phase)
        mbarrier.wait(feature_bars[1].index(stage), phase)
        p = warpgroup_mma(q, x.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        mbarrier.wait(value_bars[0].index(stage), phase)
        mbarrier.wait(value_bars[1].index(stage), phase)
        dp = warpgroup_mma(do, y.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        mbarrier.wait(begin_bars[0].index(0), c & 1)
        d_q = warpgroup_mma(do, S.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        d_y = warpgroup_mma(x, s_dS, no_tile, use_acc=False, is_async=True)
        d_x = warpgroup_mma(y, s_dS.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        # Waits for nothing, but the assembler sees that nobody is at dS: else it waits for all products here.
        dS = warpgroup_mma_wait(5, deps=(dS,))
        if WINDOW > 1 and LATER:
            if c > 0:
                _leave(out_q, d_k, out_v, more_x, more_y, halo_k, halo_v, features, s_dy, last, c - 1, count, length,
                       begin, h, seg, H, K, V, WINDOW, SHIFT, num_warps)  # fmt: skip
        per_warp.store(state_overlap(S, dS, num_warps))
        p, dp, d_q = warpgroup_mma_wait(2, deps=(p, dp, d_q))
        wanted = (c > 0) & more
        coords = ((after * K, 0),), ((n, ahead, key_at), (n, ahead - HALO - SHIFT, key_at))
        if WINDOW == 1:
            _ask(asked, coords, stage, more, wanted, True)
        else:
            # Only now, as a fence comes with it, which waits for what threads have stored.
            gl.thread_barrier()
            put_diagonals(beside, p * dp, distance_in(pairs), WINDOW, BEFORE, WIDE)
        distance = distance_in(pairs)
        reads = distance > 0 if BEFORE else distance >= 0
        power = down(numbers, stage, READ_DECAY, pairs)[:, None] - across(numbers, stage, DECAY, pairs)[None, :]
        felt = fade(reads, power)
        seen = felt * across(numbers, stage, STEP, pairs)[None, :]
        if WINDOW > 1:
            seen = with_near(seen, distance, lately, stage, WINDOW, BEFORE)
        low_p.store((p * seen).to(dtype))
        low_dp.store((dp * seen).to(dtype))
        # felt[t, s]: how the loss depends on D[t, s].
        felt = p * dp * felt
        put_sums(added, OF_STEPS, by_warps(felt, 4))
        put_sums(added, OF_ROWS, by_warps(felt * across(numbers, stage, STEP, pairs)[None, :], WIDE))
        if WINDOW > 1:
            _ask(asked, coords, stage, more, wanted, False)
        if ENERGY:
            low_x = x.load(tile).to(gl.float32)
            put_sums(added, OF_ENERGY, by_warps(low_x * low_x, WIDE))
        d_q *= gl.exp2(down(numbers, stage, READ_DECAY, tile))[:, None]
        put_sums(added, OF_READS, by_warps(d_q * q.load(tile).to(gl.float32), WIDE))
        d_y = warpgroup_mma_wait(1, deps=(d_y,))
        put_sums(added, OF_WRITES, by_warps(d_y * y.load(tile).to(gl.float32), WIDE))
        d_x = warpgroup_mma_wait(0, deps=(d_x,))
        fence_async_shared()
        # Behind this barrier the scores and sums are there.
        gl.thread_barrier()
        q, x, y, do, S, s_dS, low_p, low_dp = views(features, values, begins, room, scores, stage, K, V)
        d_q = warpgroup_mma(low_dp, x, d_q, is_async=True)
        kept = gl.exp2(g_last - down(numbers, stage, DECAY, tile)) * down(numbers, stage, STEP, tile)
        d_y = warpgroup_mma(low_p.permute((1, 0)), do, d_y * kept[:, None], is_async=True)
        d_x = warpgroup_mma(low_dp.permute((1, 0)), q, d_x * kept[:, None], is_async=True)
        read = q.permute((1, 0)).load(tall).to(gl.float32)
        read *= gl.exp2(across(numbers, stage, READ_DECAY, tall))[None, :]
        read = gl.convert_layout(read.to(dtype), gl.DotOperandLayout(0, tall, 2))
        dS = warpgroup_mma(read, do, dS * carry, is_async=True)
        if WINDOW > 1:
            more_y = left_behind(out_v, at, 0, begin, h, c, H, V, WINDOW, num_warps)
            more_x = left_behind(d_k, at, SHIFT, begin, h, c, H, K, WINDOW, num_warps)
        every: gl.constexpr = gl.BlockedLayout([num_warps], [32], [num_warps], [0])
        d_w, d_log = decays_of(added, numbers, stage, g_last, BEFORE, WIDE, each)
        d_log += gl.sum(per_warp.load(every), axis=0) * carry
        energy = d_w
        if ENERGY:
            energy = total_of(added, OF_ENERGY, WIDE, each)
        if WINDOW > 1:
            d_w, inside = of_steps(beside, d_w, its, high, token, WINDOW, BEFORE, num_warps)
            d_log += inside
            part = 1 / pairs_of(token, at, WINDOW, SHIFT)
            d_w *= part
            if ENERGY:
                energy = window_from(energy, token, WINDOW) * part
        d_gain, d_ridge, share = of_gates(given, d_w, d_log, energy, eps, floor, RAW, SCALED, DIRECT, LIVE)
        if SHARES:
            if WINDOW > 1:
                share = window_up_to(share * part, token, WINDOW)
            shares.store(share)
        d_q, d_y, d_x = warpgroup_mma_wait(1, deps=(d_q, d_y, d_x))
        # Behind this barrier nobody needs scores, and queries and keys but each warp its own.
        gl.thread_barrier()
        s_dy.reshape([64, V]).store(d_y.to(dtype))
        s_dq, s_dx = features[0].index(stage + nil()), features[1].index(stage + nil())
        s_dq.reshape([64, K]).store(d_q.to(dtype))
        if SHARES:
            low_x = s_dx.reshape([64, K]).load(tile).to(gl.float32)
            d_x += 2 * shares.load(gl.SliceLayout(1, tile))[:, None] * low_x
        s_dx.reshape([64, K]).store(d_x.to(dtype))
        g_last = keep_numbers(numbers, 1 - stage, soon, BEFORE or WINDOW > 1)
        if WINDOW > 1:
            lately.index(1 - stage).store(near)
        dS = warpgroup_mma_wait(0, deps=(dS,))
        room.index(nil()).store(dS.to(dtype))
        fence_async_shared()
        announce((d_o_desc, v_desc), value_bars, stage, c + 2 < count)
        # Behind this barrier the products of all warps are done with the tiles, and all is there that leaves.
        gl.thread_barrier()
        coords = (n, ahead - STRIDE, h * V), (n, ahead - STRIDE - HALO, h * V)
        bring((d_o_desc, v_desc), values, value_bars, stage, coords, c + 2 < count)
        put_gates(d_beta, d_lam, d_gain, d_ridge, token, high, first, h + nil(), H)
        if WINDOW > 1:
            if not LATER:
                _leave(out_q, d_k, out_v, more_x, more_y, halo_k, halo_v, features, s_dy, last, c, count, length,
                       begin, h, seg, H, K, V, WINDOW, SHIFT, num_warps)  # fmt: skip
        else:
            tma.async_copy_shared_to_global(d_v_desc, [n, at, h * V], s_dy)
            tma.async_copy_shared_to_global(d_q_desc, [n, at, h * K], s_dq)
            if at >= SHIFT:
                tma.async_copy_shared_to_global(d_k_desc, [n, at - SHIFT, h * K], s_dx)
    if WINDOW > 1 and LATER:
        if count > 0:
            _leave(out_q, d_k, out_v, more_x, more_y, halo_k, halo_v, features, s_dy, last, count - 1, count, length,
                   begin, h, seg, H, K, V, WINDOW, SHIFT, num_warps)  # fmt: skip
    if SHIFT:
        first_keys = None
        if WINDOW == 1:
            first_keys = features[1].index((count - 1) & 1).reshape([64, K])
        put_edges(d_k, first_keys, n, h, start, count, chunks, length, H, K, num_warps)
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + head_offsets(seg, h, H, K, V, state), dS)
    keep_barriers(feature_bars)
    keep_barriers(value_bars)
    keep_barriers(begin_bars)
