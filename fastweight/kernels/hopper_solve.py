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
# ruff: noqa: RUF005, SIM102, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _rings(descs, STAGES: gl.constexpr):
    """Shared memory for STAGES tiles of each descriptor, and their barriers."""
    a = gl.allocate_shared_memory(descs[0].dtype, [STAGES] + descs[0].block_shape, descs[0].layout)
    b = gl.allocate_shared_memory(descs[1].dtype, [STAGES] + descs[1].block_shape, descs[1].layout)
    c = gl.allocate_shared_memory(descs[2].dtype, [STAGES] + descs[2].block_shape, descs[2].layout)
    d = gl.allocate_shared_memory(descs[3].dtype, [STAGES] + descs[3].block_shape, descs[3].layout)
    return a, b, c, d


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bar.index(stage), count=1)
    return bar


@gluon.jit
def _fetch(descs, rings, bars, stage, coords, wanted):
    """Starts the copy of one chunk's tiles. Barriers apart, so that only one thread barrier comes between."""
    for t in gl.static_range(len(descs)):
        mbarrier.expect(bars[t].index(stage), descs[t].block_type.nbytes, pred=wanted)
    for t in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[t], coords[t], bars[t].index(stage), rings[t].index(stage), pred=wanted)


@gluon.jit
def _load_rates(eta, decay, line, first, high, i, WHOLE: gl.constexpr):
    """Step, cumulative log2 decay, the same one row before (if not WHOLE), and at the chunk's end."""
    a = gl.load(eta + line + first + i, mask=i < high, other=0.0)
    g = gl.load(decay + line + first + gl.minimum(i, high - 1))
    g_last = gl.load(decay + line + first + gl.minimum(63, high - 1))
    before = g
    if not WHOLE:
        before = gl.load(decay + line + first - 1 + gl.minimum(i, high), mask=i > 0, other=0.0)
    return a, g, before, g_last


@gluon.jit
def _rates(BEFORE: gl.constexpr):
    """Room for two chunks of: decay as the residual sees it, step felt at the chunk's end, as the read sees it, step,
    log-decay, and as the read sees it."""
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    r0 = gl.allocate_shared_memory(gl.float32, [2, 64], one)
    r1 = gl.allocate_shared_memory(gl.float32, [2, 64], one)
    r2 = gl.allocate_shared_memory(gl.float32, [2, 64], one)
    r3 = gl.allocate_shared_memory(gl.float32, [2, 64], one)
    r4 = gl.allocate_shared_memory(gl.float32, [2, 64], one)
    r5 = r4
    if BEFORE:
        r5 = gl.allocate_shared_memory(gl.float32, [2, 64], one)
    return r0, r1, r2, r3, r4, r5


@gluon.jit
def _keep_rates(rates, slot, loaded, DECAYED: gl.constexpr, BEFORE: gl.constexpr):
    a, g, before, g_last = loaded
    g_res = g if DECAYED else before
    g_read = before if BEFORE else g
    rates[0].index(slot).store(gl.exp2(g_res))
    rates[1].index(slot).store(a * gl.exp2(g_last - g))
    rates[2].index(slot).store(gl.exp2(g_read))
    rates[3].index(slot).store(a)
    rates[4].index(slot).store(g)
    if BEFORE:
        rates[5].index(slot).store(g_read)
    return gl.exp2(g_last)


@gluon.jit
def _row(rates, slot, WHICH: gl.constexpr, layout: gl.constexpr):
    return rates[WHICH].index(slot).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _weigh(p, rates, slot, BEFORE: gl.constexpr, layout: gl.constexpr):
    """Q X^T to what each read sees of each step."""
    down: gl.constexpr = gl.SliceLayout(1, layout)
    i = gl.arange(0, 64, layout=down)[:, None]
    j = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    seen = i > j if BEFORE else i >= j
    power = rates[5].index(slot).load(down)[:, None] - _row(rates, slot, 4, layout)
    return p * (gl.exp2(gl.where(seen, power, float("-inf"))) * _row(rates, slot, 3, layout))


@gluon.jit
def _whose(pid, blocks, H: gl.constexpr):
    """Column block, head and segment of a program."""
    return pid % blocks, (pid // blocks) % H, pid // (blocks * H)


@gluon.jit
def _span(seg, chunks, segments, per_segment):
    """Sequence and first chunk of a segment, and how many chunks it has."""
    n = seg // segments
    start = (seg - n * segments) * per_segment
    return n, start, gl.minimum(start + per_segment, chunks) - start


@gluon.jit
def _state_at(seg, h, block, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Offsets of a program's columns, transposed, in states [segments, H, K, V]."""
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    cv = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) + block * 64
    return (seg.to(gl.int64) * H + h) * (K * V) + (ck[None, :] * V + cv[:, None])


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    k_desc, q_desc, v_desc, inverse_desc, o_desc, residual_desc, states_desc, eta, decay, state0, state1,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    DECAYED: gl.constexpr, BEFORE: gl.constexpr, SAVE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head, 64 value columns: o, the final state, and with SAVE residuals and chunk states."""
    dtype: gl.constexpr = k_desc.dtype
    WHOLE: gl.constexpr = DECAYED and not BEFORE
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows, 2)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    block, h, seg = _whose(gl.program_id(0), V // 64, H)
    n, start, count = _span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    slot = (n * chunks + start) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (k_desc, q_desc, v_desc, inverse_desc)
    rings = _rings(descs, STAGES)
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    scores = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    rates = _rates(BEFORE)
    fence_async_shared()
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * 64
        coords = (n, at - SHIFT, key_at), (n, at, key_at), (n, at, value_at), ((slot + early * H) * 64, 0)
        _fetch(descs, rings, bars, early, coords, early < count)
    i = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    soon = _load_rates(eta, decay, line, start * 64, length - start * 64, i, WHOLE)
    carry = _keep_rates(rates, 0, soon, DECAYED, BEFORE)
    if count > 1:
        soon = _load_rates(eta, decay, line, start * 64 + 64, length - start * 64 - 64, i, WHOLE)
    state_at = _state_at(seg, h, block, H, K, V, wide)
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
            later = _load_rates(eta, decay, line, at + 128, length - at - 128, i, WHOLE)
        low_S = gl.convert_layout(S.to(dtype), left)
        mbarrier.wait(bars[0].index(s), phase)
        seen = warpgroup_mma(low_S, x.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(bars[1].index(s), phase)
        p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
        read = warpgroup_mma(low_S, qt.permute((1, 0)), none, use_acc=False, is_async=True)
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = _keep_rates(rates, (c + 1) & 1, soon, DECAYED, BEFORE)
        ahead = at + (STAGES - 1) * 64
        coords = (
            (n, ahead - SHIFT, key_at), (n, ahead, key_at), (n, ahead, value_at),
            ((slot + (c + STAGES - 1) * H) * 64, 0),
        )  # fmt: skip
        _fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[2].index(s), phase)
        w = y.permute((1, 0)).load(rows).to(gl.float32)
        seen = warpgroup_mma_wait(2, deps=[seen])
        w -= seen * _row(rates, c & 1, 0, rows)
        mbarrier.wait(bars[3].index(s), phase)
        r = warpgroup_mma(gl.convert_layout(w.to(dtype), left), inv.permute((1, 0)), w, is_async=True)
        p = warpgroup_mma_wait(2, deps=[p])
        scores.store(_weigh(p, rates, c & 1, BEFORE, rows).to(dtype))
        fence_async_shared()
        r, read = warpgroup_mma_wait(0, deps=[r, read])
        gl.thread_barrier()
        out = read * _row(rates, c & 1, 2, rows)
        out = warpgroup_mma(gl.convert_layout(r.to(dtype), left), scores.permute((1, 0)), out, is_async=True)
        u = r * _row(rates, c & 1, 1, rows)
        S = warpgroup_mma(gl.convert_layout(u.to(dtype), left), x, S * carry, is_async=True)
        spent = rings[1].index(s)._reinterpret(dtype, [K, 64], tall)
        if SAVE:
            spent.permute((1, 0)).store(gl.convert_layout(low_S, wide))
            inv.permute((1, 0)).store(r.to(dtype))
        out = warpgroup_mma_wait(1, deps=[out])
        y.permute((1, 0)).store(out.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(o_desc, [n, at, value_at], rings[2].index(s))
        if SAVE:
            tma.async_copy_shared_to_global(states_desc, [(slot + c * H) * K, block * 64], spent)
            flat = inv._reinterpret(dtype, [1, 64, 64], v_desc.layout)
            tma.async_copy_shared_to_global(residual_desc, [n, at, value_at], flat)
        S = warpgroup_mma_wait(0, deps=[S])
        carry = next_carry
        soon = later
    tma.store_wait(0)
    if state1 is not None:
        gl.store(state1 + state_at, S)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def advance(
    k_desc, v_desc, inverse_desc, eta, decay, local, maps,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    DECAYED: gl.constexpr, STAGES: gl.constexpr, SKIP: gl.constexpr,
):  # fmt: skip
    """What a segment does to any state, S -> maps S + local: 64 columns from zero, or of the identity.

    All segments but one of each sequence: the first if SKIP, which nothing precedes, else the last.
    """
    dtype: gl.constexpr = k_desc.dtype
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows, 2)
    value_blocks: gl.constexpr = 0 if local is None else V // 64
    blocks: gl.constexpr = value_blocks + K // 64
    block, h, seg = _whose(gl.program_id(0), blocks, H)
    seg += seg // (segments - 1) + SKIP
    n, start, count = _span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    slot = (n * chunks + start) * H + h
    key_at = h // (H // KH) * K
    is_map = block >= value_blocks
    value_at = h * V + gl.where(is_map, 0, block) * 64

    descs = (k_desc, v_desc, inverse_desc)
    keys = gl.allocate_shared_memory(dtype, [STAGES] + k_desc.block_shape, k_desc.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES] + v_desc.block_shape, v_desc.layout)
    inverses = gl.allocate_shared_memory(dtype, [STAGES] + inverse_desc.block_shape, inverse_desc.layout)
    rings = (keys, values, inverses)
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    rates = _rates(False)
    fence_async_shared()
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * 64
        coords = (n, at - SHIFT, key_at), (n, at, value_at), ((slot + early * H) * 64, 0)
        _fetch(descs, rings, bars, early, coords, early < count)
    i = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    soon = _load_rates(eta, decay, line, start * 64, length - start * 64, i, DECAYED)
    carry = _keep_rates(rates, 0, soon, DECAYED, False)
    if count > 1:
        soon = _load_rates(eta, decay, line, start * 64 + 64, length - start * 64 - 64, i, DECAYED)
    ck = gl.arange(0, K, layout=gl.SliceLayout(0, wide))[None, :]
    cv = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))[:, None] + (block - value_blocks) * 64
    S = gl.where((ck == cv) & is_map, 1.0, 0.0)
    none = gl.zeros([64, 64], gl.float32, rows)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = rings[0].index(s).reshape([64, K])
        y = rings[1].index(s).reshape([64, 64])
        at = (start + c) * 64
        later = soon
        if c + 2 < count:
            later = _load_rates(eta, decay, line, at + 128, length - at - 128, i, DECAYED)
        mbarrier.wait(bars[0].index(s), phase)
        low_S = gl.convert_layout(S.to(dtype), left)
        seen = warpgroup_mma(low_S, x.permute((1, 0)), none, use_acc=False, is_async=True)
        # Behind this barrier every warp is done with the chunk before.
        gl.thread_barrier()
        next_carry = _keep_rates(rates, (c + 1) & 1, soon, DECAYED, False)
        ahead = at + (STAGES - 1) * 64
        coords = (n, ahead - SHIFT, key_at), (n, ahead, value_at), ((slot + (c + STAGES - 1) * H) * 64, 0)
        _fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[1].index(s), phase)
        w = gl.where(is_map, 0.0, y.permute((1, 0)).load(rows).to(gl.float32))
        seen = warpgroup_mma_wait(0, deps=[seen])
        w -= seen * _row(rates, c & 1, 0, rows)
        mbarrier.wait(bars[2].index(s), phase)
        r = warpgroup_mma(gl.convert_layout(w.to(dtype), left), rings[2].index(s).permute((1, 0)), w, is_async=True)
        r = warpgroup_mma_wait(0, deps=[r])
        u = r * _row(rates, c & 1, 1, rows)
        S = warpgroup_mma(gl.convert_layout(u.to(dtype), left), x, S * carry, is_async=True)
        S = warpgroup_mma_wait(0, deps=[S])
        carry = next_carry
        soon = later
    if local is not None:
        if is_map == 0:
            gl.store(local + _state_at(seg, h, block, H, K, V, wide), S)
    if is_map:
        gl.store(maps + _state_at(seg, h, block - value_blocks, H, K, K, wide), S)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    k_desc, q_desc, d_o_desc, inverse_desc, d_y_desc, d_states_desc, eta, decay, d_state1, d_state0,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr,
    DECAYED: gl.constexpr, BEFORE: gl.constexpr, SAVE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head in reverse, 64 value columns: dS_0, and with SAVE dY and the chunks' state gradients."""
    dtype: gl.constexpr = k_desc.dtype
    WHOLE: gl.constexpr = DECAYED and not BEFORE
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, rows, 2)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    block, h, seg = _whose(gl.program_id(0), V // 64, H)
    n, start, count = _span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (k_desc, q_desc, d_o_desc, inverse_desc)
    rings = _rings(descs, STAGES)
    bars = (_barriers(STAGES), _barriers(STAGES), _barriers(STAGES), _barriers(STAGES))
    scores = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    rates = _rates(BEFORE)
    fence_async_shared()
    for early in gl.static_range(STAGES - 1):
        at = (last - early) * 64
        coords = (n, at - SHIFT, key_at), (n, at, key_at), (n, at, value_at), ((slot - early * H) * 64, 0)
        _fetch(descs, rings, bars, early, coords, early < count)
    i = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    soon = _load_rates(eta, decay, line, last * 64, length - last * 64, i, WHOLE)
    carry = _keep_rates(rates, 0, soon, DECAYED, BEFORE)
    if count > 1:
        soon = _load_rates(eta, decay, line, last * 64 - 64, length - last * 64 + 64, i, WHOLE)
    state_at = _state_at(seg, h, block, H, K, V, wide)
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
            later = _load_rates(eta, decay, line, at - 128, length - at + 128, i, WHOLE)
        low_dS = gl.convert_layout(dS.to(dtype), left)
        mbarrier.wait(bars[0].index(s), phase)
        du = warpgroup_mma(low_dS, x.permute((1, 0)), none, use_acc=False, is_async=True)
        mbarrier.wait(bars[1].index(s), phase)
        p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = _keep_rates(rates, (c + 1) & 1, soon, DECAYED, BEFORE)
        ahead = at - (STAGES - 1) * 64
        coords = (
            (n, ahead - SHIFT, key_at), (n, ahead, key_at), (n, ahead, value_at),
            ((slot - (c + STAGES - 1) * H) * 64, 0),
        )  # fmt: skip
        _fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[2].index(s), phase)
        low_do = do.permute((1, 0)).load(rows)
        read = low_do.to(gl.float32) * _row(rates, c & 1, 2, rows)
        read = gl.convert_layout(read.to(dtype), left)
        du, p = warpgroup_mma_wait(0, deps=[du, p])
        scores.store(_weigh(p, rates, c & 1, BEFORE, rows).to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        du *= _row(rates, c & 1, 1, rows)
        du = warpgroup_mma(gl.convert_layout(low_do, left), scores, du, is_async=True)
        dS = warpgroup_mma(read, qt, dS * carry, is_async=True)
        mbarrier.wait(bars[3].index(s), phase)
        du = warpgroup_mma_wait(1, deps=[du])
        dy = warpgroup_mma(gl.convert_layout(du.to(dtype), left), inv, du, is_async=True)
        dy, dS = warpgroup_mma_wait(0, deps=[dy, dS])
        missed = dy * -_row(rates, c & 1, 0, rows)
        dS = warpgroup_mma(gl.convert_layout(missed.to(dtype), left), x, dS, is_async=True)
        if SAVE:
            do.permute((1, 0)).store(dy.to(dtype))
            # Behind this one every warp is done with the queries: the state gradient goes out through their tile.
            gl.thread_barrier()
            spent = rings[1].index(s)._reinterpret(dtype, [K, 64], tall)
            spent.permute((1, 0)).store(gl.convert_layout(low_dS, wide))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(d_y_desc, [n, at, value_at], rings[2].index(s))
            tma.async_copy_shared_to_global(d_states_desc, [(slot - c * H) * K, block * 64], spent)
        dS = warpgroup_mma_wait(0, deps=[dS])
        carry = next_carry
        soon = later
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + state_at, dS)
