"""Inner-product class on Hopper: the whole backward pass as one walk in reverse.

For the dense calls that hopper_additive.py takes, with as many value as key columns. Notation and algebra as in
additive.py, what a window adds in hopper_additive_windows.py. One program walks one segment of one head with the
gradient of the state [K, V] in its accumulators, so that no state gradient goes to memory and no token is read twice;
the chunk states come from the forward pass.

At width 128 there is one program a multiprocessor, and nobody else to work while it waits for a chunk's tiles. With
AHEAD, there and with a window, those of q, x and dO come a whole chunk before they are needed. The memory for that is
where gradients lie before they leave: those of q and y then take the place of the state gradient's 16 bits, once
products are done with it, and that of x the place of x. All that is known before the last products are done is then
made before, too.

Traps: a TMA store that begins at a negative row is an illegal instruction (a load may), so the gradients of a
sequence's first shifted keys go by themselves. States have one buffer, into which the next one comes when the chunk has
read its own; at width 64 only at its end, because the matrix of pairs lies there meanwhile: a second program needs the
memory. x of the chunk after next waits for the gradient that leaves from its place.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: RUF005

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
    OF_DECAYS,
    OF_ENERGY,
    OF_READS,
    OF_STATES,
    OF_STEPS,
    OF_WRITES,
    READ_DECAY,
    SHARE,
    STEP,
    across,
    announce,
    bring,
    by_warps,
    distance_in,
    down,
    head_offsets,
    keep_numbers,
    load_gates,
    numbers_of,
    put_edges,
    put_gates,
    put_sums,
    state_overlap,
    steps_and_energies,
    sums_of,
    total_of,
    views,
)
from fastweight.kernels.hopper_additive_windows import (
    leave,
    leave_reads,
    load_window,
    of_steps,
    pairs_of,
    put_diagonals,
    window_from,
    window_up_to,
    with_near,
)
from fastweight.kernels.hopper_parts import LINE, nil
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


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward(
    q_desc, k_desc, v_desc, d_o_desc, states_desc, d_q_desc, d_k_desc, d_v_desc, out_q, d_k, out_v, halo_k, halo_v,
    beta, lam, d_beta, d_lam, weight, decay, sums, d_state1, d_state0,
    length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr,
    RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr, AHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse: all gradients of its tokens, and if asked dS_0.

    AHEAD, which a window needs: as above. out_q, out_v, halo_k, halo_v, sums: only with a window, when gradients go out
    by threads.
    """
    HALO: gl.constexpr = WINDOW - 1
    STRIDE: gl.constexpr = 65 - WINDOW
    LIVE: gl.constexpr = WINDOW == 1  # whether a scaled ridge sees the energy
    WIDE: gl.constexpr = num_warps // 4  # warp groups: side by side over a tile's columns, one above the other over K
    # Whether there is memory for the pairs beside the states. At width 64 a second program is worth more.
    EARLY: gl.constexpr = K == 128
    ENERGY: gl.constexpr = not RAW and (not DIRECT or SCALED)
    SHARES: gl.constexpr = not RAW and (not DIRECT or (SCALED and LIVE))
    dtype: gl.constexpr = q_desc.dtype
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, 64 // WIDE, 16])
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, K // WIDE, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WIDE, 1], [16, V, 16])
    tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * WIDE, 1], [16, 64, 16])
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    # Of numbers of tokens at the end: with a window each warp has all of them, to find those of neighbours.
    each: gl.constexpr = flat if WINDOW == 1 else gl.BlockedLayout([2], [32], [num_warps], [0])
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    _block, h, seg = whose(gl.program_id(0), 1, H)
    n, start, count = span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K

    descs = (q_desc, d_o_desc)
    STAGES: gl.constexpr = 2 if AHEAD else 1
    tiles, bars = rings_of(descs, STAGES)
    key_tile, key_bar = rings_of((k_desc,), STAGES)
    value_tile, value_bar = rings_of((v_desc,), 1)
    state_ring, state_bars = rings_of((states_desc,), 1)
    if not AHEAD:
        s_dq = gl.allocate_shared_memory(dtype, d_q_desc.block_shape, d_q_desc.layout)
        s_dx = gl.allocate_shared_memory(dtype, d_k_desc.block_shape, d_k_desc.layout)
    if not AHEAD or K == 64:
        s_dy = gl.allocate_shared_memory(dtype, d_v_desc.block_shape, d_v_desc.layout)
    room = gl.allocate_shared_memory(dtype, [1, K, V], gl.NVMMASharedLayout.get_default_for([K, V], dtype))
    if AHEAD:
        leaving = room._reinterpret(dtype, [K // 64] + d_q_desc.block_shape, d_q_desc.layout)
        s_dq = leaving.index(0)
        if K == 128:
            s_dy = leaving.index(1)
    scores = gl.allocate_shared_memory(dtype, [2, 64, 64], square)
    before = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square)
    if EARLY:
        crossings = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], square)
    if AHEAD:
        numbers = numbers_of()
        added = sums_of(WIDE, num_warps)
        per_warp = added[5].index(0)
        shares = added[6].index(0)
    else:
        numbers = gl.allocate_shared_memory(gl.float32, [6, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if WINDOW > 1:
        lately = gl.allocate_shared_memory(gl.float32, [2, 64, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        beside = gl.allocate_shared_memory(gl.float32, [WIDE, 64, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    before.index(0).store(gl.where(distance_in(pairs) > 0, 1.0, 0.0).to(gl.bfloat16))
    at = last * STRIDE
    fetch(descs, tiles, bars, 0, ((n, at, key_at), (n, at, h * V)), count > 0)
    fetch((k_desc,), key_tile, key_bar, 0, ((n, at - HALO - SHIFT, key_at),), count > 0)
    fetch((v_desc,), value_tile, value_bar, 0, ((n, at - HALO, h * V),), count > 0)
    fetch((states_desc,), state_ring, state_bars, 0, ((slot * K, 0),), count > 0)
    if AHEAD:
        ahead = at - STRIDE
        fetch(descs, tiles, bars, 1, ((n, ahead, key_at), (n, ahead, h * V)), count > 1)
        fetch((k_desc,), key_tile, key_bar, 1, ((n, ahead - HALO - SHIFT, key_at),), count > 1)
    i = gl.arange(0, 64, layout=flat)
    token = i if WINDOW == 1 else gl.arange(0, 64, layout=each)
    soon, near = _load(weight, decay, sums, line, slot, at, length - at, i, WINDOW, BEFORE, num_warps)
    g_last = keep_numbers(numbers, 0, soon, BEFORE or WINDOW > 1, AHEAD)
    if WINDOW > 1:
        lately.index(0).store(near)
    if not AHEAD and count > 1:
        then = length - at + STRIDE
        soon, near = _load(weight, decay, sums, line, slot - H, at - STRIDE, then, i, WINDOW, BEFORE, num_warps)
    if d_state1 is None:
        dS = gl.zeros([K, V], gl.float32, state)
    else:
        dS = gl.load(d_state1 + head_offsets(seg, h, H, K, V, state)).to(gl.float32)
    no_pairs = gl.zeros([64, 64], gl.float32, pairs)
    no_tile = gl.zeros([64, K], gl.float32, tile)

    for c in range(0, count):
        stage = c & 1 if AHEAD else 0
        q, x, y, do, S, s_dS, low_p, low_dp = views(tiles, key_tile, value_tile, state_ring, room, scores, stage, K, V)
        at = (last - c) * STRIDE
        high = length - at
        if not AHEAD:
            later = soon
            if c + 2 < count:
                later, _near = _load(weight, decay, sums, line, slot, at - 128, high + 128, i, 1, BEFORE, num_warps)
        first = n.to(gl.int64) * length + at
        if not AHEAD:
            given = load_gates(beta, lam, at, i, high, first, h + nil(), H, SHIFT, RAW)
        carry = gl.exp2(g_last)
        if not AHEAD:
            tma.store_wait(0)
            next_last = keep_numbers(numbers, (c + 1) & 1, soon, BEFORE, AHEAD)
        if WINDOW > 1:
            high = gl.minimum(high, STRIDE)
        if not AHEAD:
            s_dS.store(dS.to(dtype))
        # What comes last is waited for as late as may be.
        phase = (c >> 1) & 1 if AHEAD else c & 1
        mbarrier.wait(bars[0].index(stage), phase)
        mbarrier.wait(key_bar[0].index(stage), phase)
        p = warpgroup_mma(q, x.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        mbarrier.wait(value_bar[0].index(0), c & 1)
        mbarrier.wait(bars[1].index(stage), phase)
        dp = warpgroup_mma(do, y.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        if AHEAD:
            # Waits for nothing, but the assembler sees that nobody is at dS: else it waits for all products here.
            dS = warpgroup_mma_wait(2, deps=(dS,))
            s_dS.store(dS.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(state_bars[0].index(0), c & 1)
        d_q = warpgroup_mma(do, S.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        d_y = warpgroup_mma(x, s_dS, no_tile, use_acc=False, is_async=True)
        if AHEAD and WINDOW == 1:  # with a window there are no registers for it yet
            dS = warpgroup_mma_wait(4, deps=(dS,))
            through = state_overlap(S, dS, num_warps)
        p, dp = warpgroup_mma_wait(2, deps=(p, dp))
        if WINDOW > 1:
            put_diagonals(beside, p * dp, distance_in(pairs), WINDOW, BEFORE, WIDE)
        distance = distance_in(pairs)
        reads = distance > 0 if BEFORE else distance >= 0
        power = down(numbers, c & 1, READ_DECAY, pairs, AHEAD)[:, None]
        power -= across(numbers, c & 1, DECAY, pairs, AHEAD)[None, :]
        felt = fade(reads, power)
        seen = felt * across(numbers, c & 1, STEP, pairs, AHEAD)[None, :]
        if WINDOW > 1:
            seen = with_near(seen, distance, lately, c & 1, WINDOW, BEFORE)
        low_p.store((p * seen).to(dtype))
        low_dp.store((dp * seen).to(dtype))
        felt = p * dp * felt
        d_w = by_warps(felt, 4)
        felt_low = (felt * across(numbers, c & 1, STEP, pairs, AHEAD)[None, :]).to(gl.bfloat16)
        if not AHEAD or WINDOW > 1:
            through = state_overlap(S, dS, num_warps)
        if AHEAD:
            put_sums(added, OF_STEPS, d_w, AHEAD)
            per_warp.store(through)
        fence_async_shared()
        d_q, d_y = warpgroup_mma_wait(0, deps=(d_q, d_y))
        # Behind this barrier the state has been read, and the scores are there.
        if AHEAD and EARLY:
            announce((states_desc,), state_bars, 0, c + 1 < count)
        gl.thread_barrier()
        q, x, y, do, S, s_dS, low_p, low_dp = views(tiles, key_tile, value_tile, state_ring, room, scores, stage, K, V)
        ahead_state = ((slot - (c + 1) * H) * K, 0)
        if EARLY:
            if AHEAD:
                bring((states_desc,), state_ring, state_bars, 0, (ahead_state,), c + 1 < count)
            else:
                fetch((states_desc,), state_ring, state_bars, 0, (ahead_state,), c + 1 < count)
            crossing = crossings.index(nil())
        else:
            crossing = S._reinterpret(gl.bfloat16, [64, 64], square)
        d_x = warpgroup_mma(y, s_dS.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        # felt[t, s]: how the loss depends on D[t, s]; times `before`, on all that decays at s and is read at t.
        crossing.store(felt_low)
        fence_async_shared()
        d_q *= gl.exp2(down(numbers, c & 1, READ_DECAY, tile, AHEAD))[:, None]
        row_read = by_warps(d_q * q.load(tile).to(gl.float32), WIDE)
        d_q = warpgroup_mma(low_dp, x, d_q, is_async=True)
        last_of = gl.exp2(g_last - down(numbers, c & 1, DECAY, tile, AHEAD))
        met = by_warps(d_y * y.load(tile).to(gl.float32), WIDE)
        if AHEAD:
            put_sums(added, OF_READS, row_read, AHEAD)
            put_sums(added, OF_WRITES, met, AHEAD)
        kept = last_of * down(numbers, c & 1, STEP, tile, AHEAD)
        d_y = warpgroup_mma(low_p.permute((1, 0)), do, d_y * kept[:, None], is_async=True)
        read = q.permute((1, 0)).load(tall).to(gl.float32)
        read *= gl.exp2(across(numbers, c & 1, READ_DECAY, tall, AHEAD))[None, :]
        read = gl.convert_layout(read.to(dtype), gl.DotOperandLayout(0, tall, 2))
        dS = warpgroup_mma(read, do, dS * carry, is_async=True)
        d_x, d_q, d_y = warpgroup_mma_wait(1, deps=(d_x, d_q, d_y))
        d_x = warpgroup_mma(low_dp.permute((1, 0)), q, d_x * kept[:, None], is_async=True)
        if AHEAD:
            if WINDOW == 1:
                tma.store_wait(0)
            wanted = (c > 0) & (c + 1 < count)
            announce((v_desc,), value_bar, 0, c + 1 < count)
            announce((k_desc,), key_bar, 1 - stage, wanted)
        else:
            s_dq.reshape([64, K]).store(d_q.to(dtype))
            s_dy.reshape([64, V]).store(d_y.to(dtype))
        gl.thread_barrier()
        ahead = at - STRIDE
        if AHEAD:
            bring((v_desc,), value_tile, value_bar, 0, ((n, ahead - HALO, h * V),), c + 1 < count)
            # The gradients of the chunk behind have left that place.
            bring((k_desc,), key_tile, key_bar, 1 - stage, ((n, ahead - HALO - SHIFT, key_at),), wanted)
            given = load_gates(beta, lam, at, token, high, first, h + nil(), H, SHIFT, RAW)
            if c + 1 < count:
                after = slot - (c + 1) * H
                left = length - ahead
                soon, near = _load(weight, decay, sums, line, after, ahead, left, i, WINDOW, BEFORE, num_warps)
        else:
            fetch((v_desc,), value_tile, value_bar, 0, ((n, ahead, h * V),), c + 1 < count)
        felt = warpgroup_mma(crossing, before.index(nil()).permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        if not AHEAD:
            added = low_p  # nobody needs those scores from here on
            put_sums(added, OF_STEPS, d_w, AHEAD)
            put_sums(added, OF_READS, row_read, AHEAD)
            put_sums(added, OF_WRITES, met, AHEAD)
            per_warp = added._reinterpret(gl.float32, [2048 // num_warps, num_warps], LINE)
            per_warp = per_warp.index(OF_STATES * 64 // num_warps)
            shares = added._reinterpret(gl.float32, [32, 64], LINE).index(SHARE)
            per_warp.store(through)
        if ENERGY:
            low_x = x.load(tile).to(gl.float32)
            put_sums(added, OF_ENERGY, by_warps(low_x * low_x, WIDE), AHEAD)
        if AHEAD:
            s_dq.reshape([64, K]).store(d_q.to(dtype))
            s_dy.reshape([64, V]).store(d_y.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            if WINDOW == 1:
                tma.async_copy_shared_to_global(d_q_desc, [n, at, h * K], s_dq)
                tma.async_copy_shared_to_global(d_v_desc, [n, at, h * V], s_dy)
        if WINDOW > 1:
            leave_reads(out_q, s_dq.reshape([64, K]), at, first - at, h, high, H, K, num_warps)
            leave(out_v, s_dy.reshape([64, V]), at, 0, first - at, h, high, c, count, halo_v, seg, H, V, WINDOW,
                  num_warps)  # fmt: skip
        every: gl.constexpr = gl.BlockedLayout([num_warps], [32], [num_warps], [0])
        if AHEAD:
            d_w, energy = steps_and_energies(added, numbers, c & 1, g_last, WIDE, ENERGY, each, AHEAD)
            inside = 0.0
            if WINDOW > 1:
                d_w, inside = of_steps(beside, d_w, weight, decay, line, at, high, token, WINDOW, BEFORE, num_warps)
                part = 1 / pairs_of(token, at, WINDOW, SHIFT)
                d_w *= part
                if ENERGY:
                    energy = window_from(energy, token, WINDOW) * part
        felt, d_x, dS = warpgroup_mma_wait(0, deps=(felt, d_x, dS))
        distance = distance_in(pairs)
        reads = distance > 0 if BEFORE else distance >= 0
        row_read = total_of(added, OF_READS, WIDE, gl.SliceLayout(1, pairs), AHEAD)
        written = total_of(added, OF_WRITES, WIDE, gl.SliceLayout(1, pairs), AHEAD)
        written *= down(numbers, c & 1, STEP, pairs, AHEAD)
        written *= gl.exp2(g_last - down(numbers, c & 1, DECAY, pairs, AHEAD))
        felt = gl.where(reads, felt + row_read[:, None], 0.0) + gl.where(distance < 0, written[:, None], 0.0)
        put_sums(added, OF_DECAYS, by_warps(felt, 4), AHEAD)
        through = gl.sum(per_warp.load(every), axis=0)
        d_log = total_of(added, OF_DECAYS, 4, each, AHEAD) + through * carry
        if AHEAD:
            d_log += inside
        else:
            d_w, energy = steps_and_energies(added, numbers, c & 1, g_last, WIDE, ENERGY, each, AHEAD)
        share = put_gates(
            given, d_beta, d_lam, token, high, first, h + nil(), d_w, d_log, energy, eps, floor, H, RAW, SCALED,
            DIRECT, LIVE,
        )  # fmt: skip
        if WINDOW > 1:
            share = window_up_to(share * part, token, WINDOW)
        if SHARES:
            shares.store(share)
            share = shares.load(gl.SliceLayout(1, tile))
            if not AHEAD or WINDOW > 1:  # which leaves no registers to hold it since the energies
                low_x = x.load(tile).to(gl.float32)
            d_x += 2 * share[:, None] * low_x
        if AHEAD:
            next_last = keep_numbers(numbers, (c + 1) & 1, soon, BEFORE or WINDOW > 1, AHEAD)
            s_dx = key_tile[0].index(stage + nil())
        if WINDOW > 1:
            lately.index((c + 1) & 1).store(near)
        s_dx.reshape([64, K]).store(d_x.to(dtype))
        fence_async_shared()
        if AHEAD:
            if WINDOW == 1:
                tma.store_wait(0)
            announce(descs, bars, stage, c + 2 < count)
        # Behind this barrier the products of all warps are done with the tiles, and the gradients are there.
        gl.thread_barrier()
        if AHEAD:
            ahead -= STRIDE
            bring(descs, tiles, bars, stage, ((n, ahead, key_at), (n, ahead, h * V)), c + 2 < count)
        else:
            fetch(descs, tiles, bars, 0, ((n, ahead, key_at), (n, ahead, h * V)), c + 1 < count)
            fetch((k_desc,), key_tile, key_bar, 0, ((n, ahead - SHIFT, key_at),), c + 1 < count)
        if not EARLY:
            fetch((states_desc,), state_ring, state_bars, 0, (ahead_state,), c + 1 < count)
        if WINDOW > 1:
            leave(d_k, s_dx.reshape([64, K]), at, SHIFT, first - at, h, high, c, count, halo_k, seg, H, K, WINDOW,
                  num_warps)  # fmt: skip
        else:
            if not AHEAD:
                tma.async_copy_shared_to_global(d_q_desc, [n, at, h * K], s_dq)
            if at >= SHIFT:
                tma.async_copy_shared_to_global(d_k_desc, [n, at - SHIFT, h * K], s_dx)
            if not AHEAD:
                tma.async_copy_shared_to_global(d_v_desc, [n, at, h * V], s_dy)
        g_last = next_last
        if not AHEAD:
            soon = later
    if SHIFT:
        first_keys = None
        if WINDOW == 1:
            first_keys = key_tile[0].index((count - 1) & 1) if AHEAD else s_dx
            first_keys = first_keys.reshape([64, K])
        put_edges(d_k, first_keys, n, h, start, count, chunks, length, H, K, num_warps)
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + head_offsets(seg, h, H, K, V, state), dS)
    keep_barriers(bars)
    keep_barriers(key_bar)
    keep_barriers(value_bar)
    keep_barriers(state_bars)
