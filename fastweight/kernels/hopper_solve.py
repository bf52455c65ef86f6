"""Regression class on Hopper: what solve.py's `forward`, `advance` and `backward_state` compute, faster.

For dense 16-bit calls with 64 or 128 key columns. One program walks one segment of one head for 64 value columns. The
state lies transposed, [64, K], in the accumulators of the matrix units, and every product that reads it takes it from
there: written S~ = S^T and so on,

    W~ = Y~ - 2^E .* (S~ X^T)      R~ = W~ + W~ (inverse)^T      O~ = 2^F .* (S~ Q^T) + R~ P^T      S~ = 2^G S~ + U~ X

so only P passes through shared memory. Tiles of tokens come and go by TMA, one chunk ahead (STAGES of them), and its
zeros outside a sequence are what the shifted keys and the last chunk need. Two programs share a multiprocessor: while
one waits for the other's products it does its own elementwise work.

Traps: a buffer is written again only behind a barrier that every warp reaches after its products that read it are done,
and TMA stores out of it are waited for. What is sent out transposed goes through a tile that the chunk has finished
with. Registers are full: at width 128 another live tile spills.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_walk import (
    FELT,
    KEPT,
    READ,
    fetch,
    keep_barriers,
    keep_rates,
    load_rates,
    rates_of,
    rings_of,
    row,
    span,
    state_offsets,
    weigh,
    whose,
    within_reach,
)
from fastweight.kernels.reach import FADED


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    k_desc, q_desc, v_desc, inverse_desc, o_desc, residual_desc, states_desc, eta, decay, state0, state1,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    DECAYED: gl.constexpr, BEFORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head, 64 value columns: o, the final state, and where given residuals and chunk states."""
    dtype: gl.constexpr = k_desc.dtype
    WHOLE: gl.constexpr = DECAYED and not BEFORE
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows, 2)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    block, h, seg = whose(gl.program_id(0), V // 64, H)
    n, start, count = span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    slot = (n * chunks + start) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (k_desc, q_desc, v_desc, inverse_desc)
    rings, bars = rings_of(descs, STAGES)
    scores = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    rates = rates_of(BEFORE)
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * 64
        coords = (n, at - SHIFT, key_at), (n, at, key_at), (n, at, value_at), ((slot + early * H) * 64, 0)
        fetch(descs, rings, bars, early, coords, early < count)
    i = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    soon = load_rates(eta, decay, line, start * 64, length - start * 64, i, WHOLE)
    carry = keep_rates(rates, 0, soon, DECAYED, BEFORE)
    if count > 1:
        soon = load_rates(eta, decay, line, start * 64 + 64, length - start * 64 - 64, i, WHOLE)
    state_at = state_offsets(seg, h, block, H, K, V, wide)
    if state0 is None:
        S = gl.zeros([64, K], gl.float32, wide)
    else:
        S = gl.load(state0 + state_at).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, rows)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = rings[0].index(s).reshape([64, K])
        qt = rings[1].index(s).reshape([64, K])
        y = rings[2].index(s).reshape([64, 64])
        inv = rings[3].index(s)
        at = (start + c) * 64
        later = soon
        if c + 2 < count:
            later = load_rates(eta, decay, line, at + 128, length - at - 128, i, WHOLE)
        low_S = gl.convert_layout(S.to(dtype), left)
        mbarrier.wait(bars[0].index(s), phase)
        seen = warpgroup_mma(low_S, x.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(bars[1].index(s), phase)
        p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
        read = warpgroup_mma(low_S, qt.permute((1, 0)), none, use_acc=False, is_async=True)
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = keep_rates(rates, (c + 1) & 1, soon, DECAYED, BEFORE)
        ahead = at + (STAGES - 1) * 64
        coords = (
            (n, ahead - SHIFT, key_at), (n, ahead, key_at), (n, ahead, value_at),
            ((slot + (c + STAGES - 1) * H) * 64, 0),
        )  # fmt: skip
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[2].index(s), phase)
        w = y.permute((1, 0)).load(rows).to(gl.float32)
        seen = warpgroup_mma_wait(2, deps=[seen])
        w -= seen * row(rates, c & 1, FELT, rows)
        mbarrier.wait(bars[3].index(s), phase)
        r = warpgroup_mma(gl.convert_layout(w.to(dtype), left), inv.permute((1, 0)), w, is_async=True)
        p = warpgroup_mma_wait(2, deps=[p])
        scores.store(weigh(p, rates, c & 1, BEFORE, rows).to(dtype))
        fence_async_shared()
        r, read = warpgroup_mma_wait(0, deps=[r, read])
        gl.thread_barrier()
        out = read * row(rates, c & 1, READ, rows)
        out = warpgroup_mma(gl.convert_layout(r.to(dtype), left), scores.permute((1, 0)), out, is_async=True)
        u = r * row(rates, c & 1, KEPT, rows)
        S = warpgroup_mma(gl.convert_layout(u.to(dtype), left), x, S * carry, is_async=True)
        spent = rings[1].index(s)._reinterpret(dtype, [K, 64], tall)
        if states_desc is not None:
            spent.permute((1, 0)).store(gl.convert_layout(low_S, wide))
        if residual_desc is not None:
            inv.permute((1, 0)).store(r.to(dtype))
        out = warpgroup_mma_wait(1, deps=[out])
        y.permute((1, 0)).store(out.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(o_desc, [n, at, value_at], rings[2].index(s))
        if states_desc is not None:
            tma.async_copy_shared_to_global(states_desc, [(slot + c * H) * K, block * 64], spent)
        if residual_desc is not None:
            flat = inv._reinterpret(dtype, [1, 64, 64], v_desc.layout)
            tma.async_copy_shared_to_global(residual_desc, [n, at, value_at], flat)
        S = warpgroup_mma_wait(0, deps=[S])
        carry = next_carry
        soon = later
    tma.store_wait(0)
    if state1 is not None:
        gl.store(state1 + state_at, S)
    keep_barriers(bars)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def advance(
    k_desc, v_desc, inverse_desc, eta, decay, leaves, totals, local, maps,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    DECAYED: gl.constexpr, STAGES: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """What a segment does to any state, S -> maps S + local: 64 columns from zero, or of the identity.

    All segments but one of each sequence: the first if SKIP, which nothing precedes, else the last. With `leaves`
    chunks are passed over of which nothing is left at the segment's end, and `totals` says what each segment leaves.
    """
    dtype: gl.constexpr = k_desc.dtype
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows, 2)
    value_blocks: gl.constexpr = 0 if local is None else V // 64
    blocks: gl.constexpr = value_blocks + K // 64
    block, h, seg = whose(gl.program_id(0), blocks, H)
    seg += seg // (segments - 1) + SKIP
    n, start, count = span(seg, chunks, segments, per_segment)
    if leaves is not None:
        needed, total = within_reach(leaves, n * chunks, h, start, count, H, True)
        if block >= value_blocks:
            needed = gl.where(total > FADED, count, 0)
            gl.store(totals + seg.to(gl.int64) * H + h, total)
        start += gl.where(needed > 0, count - needed, 0)
        count = needed
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    slot = (n * chunks + start) * H + h
    key_at = h // (H // KH) * K
    is_map = block >= value_blocks
    value_at = h * V + gl.where(is_map, 0, block) * 64

    descs = (k_desc, v_desc, inverse_desc)
    rings, bars = rings_of(descs, STAGES)
    rates = rates_of(False)
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * 64
        coords = (n, at - SHIFT, key_at), (n, at, value_at), ((slot + early * H) * 64, 0)
        fetch(descs, rings, bars, early, coords, early < count)
    i = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    soon = load_rates(eta, decay, line, start * 64, length - start * 64, i, DECAYED)
    carry = keep_rates(rates, 0, soon, DECAYED, False)
    if count > 1:
        soon = load_rates(eta, decay, line, start * 64 + 64, length - start * 64 - 64, i, DECAYED)
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, wide))[None, :]
    cv = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))[:, None] + (block - value_blocks) * 64
    S = gl.where((ck == cv) & is_map, 1.0, 0.0)
    if leaves is not None:
        S = gl.where(count > 0, S, 0.0)
    none = gl.zeros([64, 64], gl.float32, rows)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = rings[0].index(s).reshape([64, K])
        y = rings[1].index(s).reshape([64, 64])
        at = (start + c) * 64
        later = soon
        if c + 2 < count:
            later = load_rates(eta, decay, line, at + 128, length - at - 128, i, DECAYED)
        mbarrier.wait(bars[0].index(s), phase)
        low_S = gl.convert_layout(S.to(dtype), left)
        seen = warpgroup_mma(low_S, x.permute((1, 0)), none, use_acc=False, is_async=True)
        # Behind this barrier every warp is done with the chunk before.
        gl.thread_barrier()
        next_carry = keep_rates(rates, (c + 1) & 1, soon, DECAYED, False)
        ahead = at + (STAGES - 1) * 64
        coords = (n, ahead - SHIFT, key_at), (n, ahead, value_at), ((slot + (c + STAGES - 1) * H) * 64, 0)
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[1].index(s), phase)
        w = gl.where(is_map, 0.0, y.permute((1, 0)).load(rows).to(gl.float32))
        seen = warpgroup_mma_wait(0, deps=[seen])
        w -= seen * row(rates, c & 1, FELT, rows)
        mbarrier.wait(bars[2].index(s), phase)
        r = warpgroup_mma(gl.convert_layout(w.to(dtype), left), rings[2].index(s).permute((1, 0)), w, is_async=True)
        r = warpgroup_mma_wait(0, deps=[r])
        u = r * row(rates, c & 1, KEPT, rows)
        S = warpgroup_mma(gl.convert_layout(u.to(dtype), left), x, S * carry, is_async=True)
        S = warpgroup_mma_wait(0, deps=[S])
        carry = next_carry
        soon = later
    if local is not None:
        if is_map == 0:
            gl.store(local + state_offsets(seg, h, block, H, K, V, wide), S)
    if is_map:
        gl.store(maps + state_offsets(seg, h, block - value_blocks, H, K, K, wide), S)
    keep_barriers(bars)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    k_desc, q_desc, d_o_desc, inverse_desc, d_y_desc, d_states_desc, low_desc, high_desc, eta, decay, leaves, d_state1,
    d_state0,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    DECAYED: gl.constexpr, BEFORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, 64 value columns: dS_0, and if asked dY and the chunks' state gradients.

    With `leaves` all segments but the first of each sequence, and chunks are passed over of which nothing is felt at
    the segment's start. State gradients go to d_states, or lie where the chunk's gradients of q (the first 64 key
    columns) and k (the others) will be.
    """
    dtype: gl.constexpr = k_desc.dtype
    WHOLE: gl.constexpr = DECAYED and not BEFORE
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows, 2)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    block, h, seg = whose(gl.program_id(0), V // 64, H)
    if leaves is not None:
        seg += seg // (segments - 1) + 1
    n, start, count = span(seg, chunks, segments, per_segment)
    if leaves is not None:
        count, _total = within_reach(leaves, n * chunks, h, start, count, H, False)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (k_desc, q_desc, d_o_desc, inverse_desc)
    rings, bars = rings_of(descs, STAGES)
    scores = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    rates = rates_of(BEFORE)
    for early in gl.static_range(STAGES - 1):
        at = (last - early) * 64
        coords = (n, at - SHIFT, key_at), (n, at, key_at), (n, at, value_at), ((slot - early * H) * 64, 0)
        fetch(descs, rings, bars, early, coords, early < count)
    i = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    soon = load_rates(eta, decay, line, last * 64, length - last * 64, i, WHOLE)
    carry = keep_rates(rates, 0, soon, DECAYED, BEFORE)
    if count > 1:
        soon = load_rates(eta, decay, line, last * 64 - 64, length - last * 64 + 64, i, WHOLE)
    state_at = state_offsets(seg, h, block, H, K, V, wide)
    if d_state1 is None:
        dS = gl.zeros([64, K], gl.float32, wide)
    else:
        dS = gl.load(d_state1 + state_at).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, rows)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = rings[0].index(s).reshape([64, K])
        qt = rings[1].index(s).reshape([64, K])
        do = rings[2].index(s).reshape([64, 64])
        inv = rings[3].index(s)
        at = (last - c) * 64
        later = soon
        if c + 2 < count:
            later = load_rates(eta, decay, line, at - 128, length - at + 128, i, WHOLE)
        low_dS = gl.convert_layout(dS.to(dtype), left)
        mbarrier.wait(bars[0].index(s), phase)
        du = warpgroup_mma(low_dS, x.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(bars[1].index(s), phase)
        p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = keep_rates(rates, (c + 1) & 1, soon, DECAYED, BEFORE)
        ahead = at - (STAGES - 1) * 64
        coords = (
            (n, ahead - SHIFT, key_at), (n, ahead, key_at), (n, ahead, value_at),
            ((slot - (c + STAGES - 1) * H) * 64, 0),
        )  # fmt: skip
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[2].index(s), phase)
        low_do = do.permute((1, 0)).load(rows)
        read = low_do.to(gl.float32) * row(rates, c & 1, READ, rows)
        read = gl.convert_layout(read.to(dtype), left)
        du, p = warpgroup_mma_wait(0, deps=[du, p])
        scores.store(weigh(p, rates, c & 1, BEFORE, rows).to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        du *= row(rates, c & 1, KEPT, rows)
        du = warpgroup_mma(gl.convert_layout(low_do, left), scores, du, is_async=True)
        dS = warpgroup_mma(read, qt, dS * carry, is_async=True)
        mbarrier.wait(bars[3].index(s), phase)
        du = warpgroup_mma_wait(1, deps=[du])
        dy = warpgroup_mma(gl.convert_layout(du.to(dtype), left), inv, du, is_async=True)
        dy, dS = warpgroup_mma_wait(0, deps=[dy, dS])
        missed = dy * -row(rates, c & 1, FELT, rows)
        dS = warpgroup_mma(gl.convert_layout(missed.to(dtype), left), x, dS, is_async=True)
        if d_y_desc is not None:
            do.permute((1, 0)).store(dy.to(dtype))
            # Behind this one every warp is done with the queries: the state gradient goes out through their tile.
            gl.thread_barrier()
            spent = rings[1].index(s)._reinterpret(dtype, [K, 64], tall)
            spent.permute((1, 0)).store(gl.convert_layout(low_dS, wide))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(d_y_desc, [n, at, value_at], rings[2].index(s))
            if low_desc is None:
                tma.async_copy_shared_to_global(d_states_desc, [(slot - c * H) * K, block * 64], spent)
            else:
                halves = rings[1].index(s)._reinterpret(dtype, [K // 64, 1, 64, 64], low_desc.layout)
                tma.async_copy_shared_to_global(low_desc, [n, at, h * K + block * 64], halves.index(0))
                if high_desc is not None:
                    tma.async_copy_shared_to_global(high_desc, [n, at, h * K + block * 64], halves.index(1))
        dS = warpgroup_mma_wait(0, deps=[dS])
        carry = next_carry
        soon = later
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + state_at, dS)
    keep_barriers(bars)
