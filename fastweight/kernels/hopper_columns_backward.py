"""Inner-product class with a gain per value column on Hopper: the whole backward pass as one walk in reverse.

For the calls that hopper_columns.py takes. Of a tame chunk, with r = 2^g .* dO, w = 2^-g .* Y, m = eta .* w, P the
scores [j <= i] Q X^T and E = 2^(g_C) .* dS:

    dQ = r S_0^T + dP X       dX = m E^T + dP^T Q       dP = [j <= i] r m^T       dm = P^T r + X E
    dl_t = sum_k S_0 .* E + sum_j m .* (X E) + sum_(i >= t) (r .* (P m + Q S_0) - m .* dm)      dS_0 = E + Q^T r

The gradients of eta and of values are w .* dm and eta .* 2^-g .* dm. What pairs on one side of t add to the last sum
cancels to the digits of float32, because both of its terms multiply the same rounded r and m. That is enough where no
carry is small (LEAST_CARRY), because dl is divided by it. Its sum over tokens is a product with ones, in three pieces
of 8 bits. A chunk that is not tame, or has a small carry, is noted, and the gradient of its end state goes to memory,
which needs no 2^-g: columns_gradient.py follows for it.

One program walks one segment of one head, all columns, with the gradient of the state, transposed, in its accumulators.
Tiles that have columns are transposed too, so that rows of them are columns (hopper_columns.py); r and m take the
places of dO and Y in shared memory, and gradients of q, x and y those of q, x and m, once all products are done.

Traps: as in hopper_additive_backward.py. Ones are float16 for the sums of l; the same bits are 2^-7 in bfloat16. What
comes out of a chunk that is noted may be NaN.
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
from triton.language.extra import libdevice

from fastweight.kernels.hopper_additive_sums import distance_in, put_edges
from fastweight.kernels.hopper_columns import (
    NUMBERS,
    REC,
    RHO,
    RIDGE,
    TAME,
    along,
    keep_token,
    load_gains,
    load_token,
    log_decays,
    ones_up_to,
    store_gains,
)
from fastweight.kernels.hopper_parts import LINE, SHARED, nil
from fastweight.kernels.hopper_walk import fetch, keep_barriers, rings_of, span, whose

STRIPS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0]))  # an accumulator's rows miss each other's banks
LEAST_CARRY = gl.constexpr(-8.0)  # log2: what cancels to 1e-7 of what is added may be multiplied by 2^8
SHARE = gl.constexpr(3)  # row of a chunk's numbers, behind those of hopper_columns.py: the gradient of the energy


@gluon.jit
def _state_offsets(seg, h, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Offsets of a head's state, transposed, in states [segments, H, K, V], made anew where they are used."""
    ck = nil() + gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    cv = gl.arange(0, V, layout=gl.SliceLayout(1, layout))
    return (seg.to(gl.int64) * H + h) * (K * V) + (ck[None, :] * V + cv[:, None])


@gluon.jit
def _views(tiles, key_tile, room, scores, K: gl.constexpr, V: gl.constexpr):
    """Tiles of q, x, y, dO, S, E, P and dP, as found from here on: what was found before need not be remembered."""
    q = tiles[0].index(nil()).reshape([64, K])
    x = key_tile[0].index(nil()).reshape([64, K])
    y = tiles[1].index(nil()).reshape([64, V])
    do = tiles[2].index(nil()).reshape([64, V])
    return q, x, y, do, tiles[3].index(nil()), room.index(nil()), scores.index(nil()), scores.index(nil() + 1)


@gluon.jit
def packed(low):
    """The same, two in a register until here: known apart, each would be rounded by itself and have one to itself."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [low], dtype=low.dtype, is_pure=False, pack=2)


@gluon.jit
def _cut(terms):
    """The first 8 bits of each."""
    return (terms.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _suffix_sums(terms, ones, none, also, layout: gl.constexpr):
    """What terms [V, 64] add up to from each column on, times 2^-7, to the digits of float32. Waits for `also`, too."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    from_on = ones.index(nil())._reinterpret(gl.bfloat16, [64, 64], SHARED).permute((1, 0))
    piece = _cut(terms)
    sums = warpgroup_mma(gl.convert_layout(piece.to(gl.bfloat16), LEFT), from_on, none, use_acc=False, is_async=True)
    terms -= piece
    piece = _cut(terms)
    sums = warpgroup_mma(gl.convert_layout(piece.to(gl.bfloat16), LEFT), from_on, sums, is_async=True)
    terms -= piece
    sums = warpgroup_mma(gl.convert_layout(terms.to(gl.bfloat16), LEFT), from_on, sums, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums, also))


@gluon.jit
def _put_sums(spare, which: gl.constexpr, tile, WARPS: gl.constexpr):
    """Sums of [V, 64] over the rows of each warp, into memory that is not needed."""
    parts = spare._reinterpret(gl.float32, [32 // WARPS, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    parts.index(which).store(gl.sum(gl.reshape(tile, [WARPS, tile.shape[0] // WARPS, 64]), axis=1))


@gluon.jit
def _added_up(spare, which: gl.constexpr, WARPS: gl.constexpr, layout: gl.constexpr):
    """What `_put_sums` of all warps add up to."""
    lines = spare._reinterpret(gl.float32, [32, 64], LINE)
    total = lines.index(which * WARPS).load(layout)
    for warp in gl.static_range(1, WARPS):
        total += lines.index(which * WARPS + warp).load(layout)
    return total


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward(
    q_desc, k_desc, v_desc, d_o_desc, states_desc, d_q_desc, d_k_desc, d_v_desc, d_k, beta, lam, d_beta, d_lam,
    energies, d_state1, d_state0, d_states, wild, length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    SCALED: gl.constexpr, DIRECT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse: all gradients of its tokens, and if asked dS_0.

    wild [chunks, H]: chunks whose gradients these are not; of those d_states has what they end with.
    """
    WIDE: gl.constexpr = num_warps // 4  # warp groups: one above the other over V, side by side over other columns
    ENERGY: gl.constexpr = not DIRECT or SCALED
    dtype: gl.constexpr = q_desc.dtype
    pairs: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, 64 // WIDE, 16])
    tile: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDE], [16, K // WIDE, 16])
    state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, K, 16])
    tall: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, tall, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, tall)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    _block, h, seg = whose(gl.program_id(0), 1, H)
    n, start, count = span(seg, chunks, segments, per_segment)
    begin = n.to(gl.int64) * length
    line = h.to(gl.int64) * tokens + begin
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K

    descs = (q_desc, v_desc, d_o_desc, states_desc)
    tiles, bars = rings_of(descs, 1)
    key_tile, key_bar = rings_of((k_desc,), 1)
    # Gradients of q, x and y, and before them gains and 2^-g; w. Registers have no place for these meanwhile.
    leaving = gl.allocate_shared_memory(dtype, [2] + d_q_desc.block_shape, d_q_desc.layout)
    s_dy = gl.allocate_shared_memory(dtype, d_v_desc.block_shape, d_v_desc.layout)
    weighed = gl.allocate_shared_memory(dtype, [V, 64], SHARED)
    room = gl.allocate_shared_memory(dtype, [1, V, K], gl.NVMMASharedLayout.get_default_for([V, K], dtype))
    scores = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * NUMBERS, 64], LINE)
    lost = gl.allocate_shared_memory(gl.int32, [num_warps], LINE)
    ones = ones_up_to(pairs)
    at = last * 64
    fetch(descs, tiles, bars, 0, ((n, at, key_at), (n, at, h * V), (n, at, h * V), (slot * K, 0)), count > 0)
    fetch((k_desc,), key_tile, key_bar, 0, ((n, at - SHIFT, key_at),), count > 0)
    fence_async_shared()
    i = gl.arange(0, 64, layout=flat)
    now = load_token(energies, lam, line, begin, at, i, length - at, h, H, SHIFT)
    keep_token(numbers, 0, now, eps, floor, SCALED, DIRECT)
    column = gl.arange(0, V, layout=ROW)
    gain = load_gains(beta, begin + at, h, column, length - at, H, V, tall)
    if d_state1 is None:
        dS = gl.zeros([V, K], gl.float32, state)
    else:
        dS = gl.load(d_state1 + _state_offsets(seg, h, H, K, V, state)).to(gl.float32)
    no_pairs = gl.zeros([64, 64], gl.float32, pairs)
    no_tile = gl.zeros([64, K], gl.float32, tile)
    none = gl.zeros([V, 64], gl.float32, tall)
    gl.thread_barrier()

    for c in range(0, count):
        q, x, y, do, S, s_E, low_p, low_dp = _views(tiles, key_tile, room, scores, K, V)
        its = (c & 1) * NUMBERS
        at = (last - c) * 64
        high = length - at
        log_decay = log_decays(gain, along(numbers, its + RHO, tall), floor)
        passed = log_decay.to(gl.float16)
        total = gl.sum(log_decay, axis=1)
        inside = gl.sum(passed.to(gl.float32), axis=1)
        is_lost = (gl.min(log_decay, axis=1) < LEAST_CARRY) | (total < TAME)
        lost.store(gl.max(gl.reshape(is_lost.to(gl.int32), [num_warps, V // num_warps]), axis=1))
        # What comes last, x, is waited for as late as may be.
        mbarrier.wait(bars[0].index(0), c & 1)
        mbarrier.wait(key_bar[0].index(0), c & 1)
        p = warpgroup_mma(q, x.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        g = warpgroup_mma(gl.convert_layout(passed, LEFT), ones.index(nil()), none, use_acc=False, is_async=True)
        tma.store_wait(0)
        gl.thread_barrier()
        leaving._reinterpret(gl.float32, [V, 64], STRIPS).store(gain)
        is_lost = gl.max(lost.load(gl.BlockedLayout([num_warps], [32], [num_warps], [0])), axis=0)
        here = slot - c * H + nil()
        gl.store(wild + here, is_lost.to(gl.int8))
        if is_lost != 0:
            gl.store(d_states + _state_offsets(here, 0, 1, K, V, state), dS.to(dtype))
        leaves = gl.convert_layout(gl.exp2(inside), gl.SliceLayout(1, state))
        s_E.store((dS * leaves[:, None]).to(dtype))
        mbarrier.wait(bars[3].index(0), c & 1)
        through = gl.sum(S.permute((1, 0)).load(state).to(gl.float32) * dS, axis=1) * leaves
        dS *= gl.convert_layout(gl.exp2(total), gl.SliceLayout(1, state))[:, None]
        p, g = warpgroup_mma_wait(0, deps=(p, g))
        distance = distance_in(pairs)
        low_p.store(gl.where(distance >= 0, p, 0.0).to(dtype))
        mbarrier.wait(bars[2].index(0), c & 1)
        do.permute((1, 0)).store((do.permute((1, 0)).load(tall).to(gl.float32) * gl.exp2(g)).to(dtype))
        mbarrier.wait(bars[1].index(0), c & 1)
        down = gl.exp2(-g)
        w = (y.permute((1, 0)).load(tall).to(gl.float32) * down).to(dtype)
        weighed.store(w)
        s_dy._reinterpret(dtype, [V, 64], SHARED).store(down.to(dtype))
        y.permute((1, 0)).store((gain * along(numbers, its + REC, tall) * w.to(gl.float32)).to(dtype))
        fence_async_shared()
        # Behind this barrier r, m, E and the scores are there.
        gl.thread_barrier()
        q, x, y, do, S, s_E, low_p, low_dp = _views(tiles, key_tile, room, scores, K, V)
        d_p = warpgroup_mma(do, y.permute((1, 0)), no_pairs, use_acc=False, is_async=True)
        d_m = warpgroup_mma(s_E, x.permute((1, 0)), none, use_acc=False, is_async=True)
        reading = warpgroup_mma(S.permute((1, 0)), q.permute((1, 0)), none, use_acc=False, is_async=True)
        reading = warpgroup_mma(y.permute((1, 0)), low_p.permute((1, 0)), reading, is_async=True)
        d_p = warpgroup_mma_wait(3, deps=(d_p,))
        distance = distance_in(pairs)
        low_dp.store(gl.where(distance >= 0, d_p, 0.0).to(dtype))
        d_m = warpgroup_mma_wait(2, deps=(d_m,))
        base = gl.convert_layout(through, ROW) + gl.sum(y.permute((1, 0)).load(tall).to(gl.float32) * d_m, axis=1)
        d_m = warpgroup_mma(do.permute((1, 0)), low_p, d_m, is_async=True)
        dS = warpgroup_mma(do.permute((1, 0)), q, dS, is_async=True)
        fence_async_shared()
        reading, d_m = warpgroup_mma_wait(1, deps=(reading, d_m))
        q, x, y, do, S, s_E, low_p, low_dp = _views(tiles, key_tile, room, scores, K, V)
        terms = do.permute((1, 0)).load(tall).to(gl.float32) * reading
        terms -= y.permute((1, 0)).load(tall).to(gl.float32) * d_m
        d_log, dS = _suffix_sums(terms, ones, none, dS, tall)
        d_log = d_log * 128 + base[:, None]
        # Behind this barrier the gradients of the scores are there, and nobody needs the scores.
        gl.thread_barrier()
        gain = leaving._reinterpret(gl.float32, [V, 64], STRIPS).load(tall)
        down = s_dy._reinterpret(dtype, [V, 64], SHARED).load(tall).to(gl.float32)
        alpha = gain * along(numbers, its + RHO, tall)
        d_alpha = gl.where(alpha < 1 - floor, libdevice.fast_dividef(d_log, alpha - 1), 0.0)
        rec = along(numbers, its + REC, tall)
        d_y = packed((gain * rec * down * d_m).to(dtype))
        d_gain = (weighed.load(tall).to(gl.float32) * d_m + d_alpha * along(numbers, its + RIDGE, tall)) * rec
        store_gains(d_beta, d_gain, begin + at, h + nil(), column, high, H, V, tall)
        # Like all that is loaded, of addresses made anew: the loop would remember one for each.
        hh = h + nil()
        line = hh.to(gl.int64) * tokens + begin
        now = load_token(energies, lam, line, begin, at, i, high, hh, H, SHIFT)
        soon = now
        if c + 1 < count:
            soon = load_token(energies, lam, line, begin, at - 64, i, high + 64, hh, H, SHIFT)
        _put_sums(low_p, 0, d_alpha * gain, num_warps)
        q, x, y, do, S, s_E, low_p, low_dp = _views(tiles, key_tile, room, scores, K, V)
        d_q = warpgroup_mma(do, S.permute((1, 0)), no_tile, use_acc=False, is_async=True)
        d_q = warpgroup_mma(low_dp, x, d_q, is_async=True)
        d_x = warpgroup_mma(y, s_E, no_tile, use_acc=False, is_async=True)
        d_x = warpgroup_mma(low_dp.permute((1, 0)), q, d_x, is_async=True)
        _put_sums(low_p, 1, d_gain * gain, num_warps)
        forgot = _added_up(low_p, 0, num_warps, flat)
        gained = _added_up(low_p, 1, num_warps, flat)
        if c + 1 < count:
            gain = load_gains(beta, begin + at - 64, h + nil(), column, high + 64, H, V, tall)
        energy, ridge, _pair = now
        rec = numbers.index(its + REC).load(flat)
        d_ridge = rec * forgot
        share = rec * 0
        if not DIRECT:
            share = -rec * gained
            d_ridge += share
        if SCALED:
            share += d_ridge * ridge
            d_ridge *= energy
        if d_lam is not None:
            gl.store(d_lam + (begin + at) * H + (h + nil()) + i * H, d_ridge, mask=i < high)
        if ENERGY:
            numbers.index(its + SHARE).store(share)
        keep_token(numbers, ((c + 1) & 1) * NUMBERS, soon, eps, floor, SCALED, DIRECT)
        d_q, d_x = warpgroup_mma_wait(0, deps=(d_q, d_x))
        # Behind this barrier the products of all warps are done with the tiles.
        gl.thread_barrier()
        ahead = at - 64
        coords = (n, ahead, key_at), (n, ahead, h * V), (n, ahead, h * V), ((slot - (c + 1) * H) * K, 0)
        fetch(descs, tiles, bars, 0, coords, c + 1 < count)
        if ENERGY:
            share = numbers.index(its + SHARE).load(gl.SliceLayout(1, tile))
            d_x += 2 * share[:, None] * x.load(tile).to(gl.float32)
        leaving.index(0).reshape([64, K]).store(d_q.to(dtype))
        leaving.index(1).reshape([64, K]).store(d_x.to(dtype))
        s_dy.reshape([64, V]).permute((1, 0)).store(packed(d_y))
        fence_async_shared()
        # Behind this barrier every warp is done with x, and the gradients are there.
        gl.thread_barrier()
        fetch((k_desc,), key_tile, key_bar, 0, ((n, ahead - SHIFT, key_at),), c + 1 < count)
        tma.async_copy_shared_to_global(d_q_desc, [n, at, h * K], leaving.index(0))
        if at >= SHIFT:
            tma.async_copy_shared_to_global(d_k_desc, [n, at - SHIFT, h * K], leaving.index(1))
        tma.async_copy_shared_to_global(d_v_desc, [n, at, h * V], s_dy)
    if SHIFT:
        put_edges(d_k, leaving.index(1).reshape([64, K]), n, h, start, count, chunks, length, H, K, num_warps)
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + _state_offsets(seg, h, H, K, V, state), dS)
    keep_barriers(bars)
    keep_barriers(key_bar)
