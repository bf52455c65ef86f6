"""Inner-product class on Hopper: what additive.py's `forward` and `backward_state` compute, faster.

For dense 16-bit calls with 64 or 128 key columns; notation and algebra as in additive.py. How chunks are walked, and
the traps, as in hopper_solve.py: the state lies transposed, [64, K], in the accumulators, S~ = S^T and so on,

    O~ = 2^F .* (S~ Q^T) + Y~ W^T      S~ = 2^G S~ + (Y~ .* kept) X      dS~ = 2^G dS~ + (dO~ .* 2^F) Q

and W, made of Q X^T, is all that passes through shared memory. A segment whose state alone is wanted reads no queries.

Traps: rows of queries and outputs are a chunk's own STRIDE steps from row 0 on, and what they hold past those is the
next chunk's; rows of keys and values begin with the WINDOW - 1 pairs before them.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: RUF005, SIM108

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import ACC, HALF, LEFT, LINE, rows
from fastweight.kernels.hopper_walk import (
    DECAY,
    KEPT,
    READ,
    READ_DECAY,
    STEP,
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
)


@gluon.jit
def _load_read(decay, line, first, high, r, WINDOW: gl.constexpr, BEFORE: gl.constexpr):
    """Cumulative log2 decay that each read sees, and the chunk's end."""
    end = gl.minimum(high, 65 - WINDOW)
    g_last = gl.load(decay + line + first + end - 1)
    if BEFORE:
        g_read = gl.load(decay + line + first - 1 + gl.minimum(r, end), mask=r > 0, other=0.0)
    else:
        g_read = gl.load(decay + line + first + gl.minimum(r, end - 1))
    return g_read, g_last


@gluon.jit
def _load_steps(
    weight, decay, sums, line, slot, first, high, r, WINDOW: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """What `_keep_steps` makes the numbers of a chunk from; of windows with the sums that `fold` made."""
    near = ()
    if WINDOW == 1:
        numbers = load_rates(weight, decay, line, first, high, r, not BEFORE)
    else:
        shelf = sums + slot.to(gl.int64) * (64 * (WINDOW + 1)) + r
        g_read, g_last = _load_read(decay, line, first, high, r, WINDOW, BEFORE)
        numbers = gl.load(shelf + (WINDOW - 1) * 64), gl.load(shelf + WINDOW * 64), g_read, g_last
        for b in gl.static_range(WINDOW - 1):
            near = near + (gl.load(shelf + b * 64),)
    return numbers, near


@gluon.jit
def _keep_steps(rates, lately, at, loaded, WINDOW: gl.constexpr, BEFORE: gl.constexpr):
    """Rates of one chunk, and in `lately` what pairs are worth while their window is open; what its end keeps of S."""
    numbers, near = loaded
    for b in gl.static_range(WINDOW - 1):
        lately.index(at * (WINDOW - 1) + b).store(near[b])
    return keep_rates(rates, at, numbers, True, BEFORE or WINDOW > 1)


@gluon.jit
def _weigh(p, rates, lately, at, WINDOW: gl.constexpr, BEFORE: gl.constexpr, layout: gl.constexpr):
    """Q X^T to what each read sees of each pair of a window: `spread` of additive.py."""
    # Rows unknown to be the same in every chunk: masks held since before the loop would spill.
    lag = rows(layout)[:, None] - gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :] + (WINDOW - 1)
    if BEFORE:
        lag -= 1
    power = rates[READ_DECAY].index(at).load(gl.SliceLayout(1, layout))[:, None] - row(rates, at, DECAY, layout)
    seen = gl.exp2(gl.where(lag >= WINDOW - 1, power, float("-inf"))) * row(rates, at, STEP, layout)
    for b in gl.static_range(WINDOW - 1):
        open_yet = lately.index(at * (WINDOW - 1) + b).load(gl.SliceLayout(0, layout))
        seen = gl.where(lag == b, open_yet[None, :], seen)
    return p * seen


@gluon.jit
def _read(S, qt, none):
    """Begins S~ Q^T; S in 16 bits as products take it."""
    low = gl.convert_layout(S.to(qt.dtype), LEFT)
    return low, warpgroup_mma(low, qt.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _write(S, x, y, rates, at):
    """Begins S~ + (Y~ .* kept) X; Y~ as it came."""
    low = y.permute((1, 0)).load(ACC)
    u = low.to(gl.float32) * row(rates, at, KEPT, ACC)
    return low, warpgroup_mma(gl.convert_layout(u.to(y.dtype), LEFT), x, S, is_async=True)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    k_desc, q_desc, v_desc, o, states_desc, weight, decay, sums, state0, state1,
    length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr,
    BEFORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head, 64 value columns: the final state, and where given o and chunk states.

    Without o, all segments but the last of each sequence. o is a descriptor, or with a window a pointer: of a chunk's
    64 rows not all are its own.
    """
    HALO: gl.constexpr = WINDOW - 1
    STRIDE: gl.constexpr = 65 - WINDOW
    READS: gl.constexpr = o is not None
    dtype: gl.constexpr = k_desc.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    block, h, seg = whose(gl.program_id(0), V // 64, H)
    if not READS:
        seg += seg // (segments - 1)
    n, start, count = span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    slot = (n * chunks + start) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (k_desc, v_desc)
    if READS:
        descs = (k_desc, v_desc, q_desc)
        scores = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    rings, bars = rings_of(descs, STAGES)
    rates = rates_of(BEFORE or WINDOW > 1)
    lately = rates
    if WINDOW > 1:
        lately = gl.allocate_shared_memory(gl.float32, [2 * HALO, 64], LINE)
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * STRIDE
        coords = (n, at - HALO - SHIFT, key_at), (n, at - HALO, value_at), (n, at, key_at)
        fetch(descs, rings, bars, early, coords, early < count)
    r = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = start * STRIDE
    soon = _load_steps(weight, decay, sums, line, slot, at, length - at, r, WINDOW, BEFORE)
    carry = _keep_steps(rates, lately, 0, soon, WINDOW, BEFORE)
    if count > 1:
        at += STRIDE
        soon = _load_steps(weight, decay, sums, line, slot + H, at, length - at, r, WINDOW, BEFORE)
    state_at = state_offsets(seg, h, block, H, K, V, wide)
    if state0 is None:
        S = gl.zeros([64, K], gl.float32, wide)
    else:
        S = gl.load(state0 + state_at).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, ACC)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = rings[0].index(s).reshape([64, K])
        y = rings[1].index(s).reshape([64, 64])
        at = (start + c) * STRIDE
        later = soon
        if c + 2 < count:
            then = at + 2 * STRIDE
            after = slot + (c + 2) * H
            later = _load_steps(weight, decay, sums, line, after, then, length - then, r, WINDOW, BEFORE)
        mbarrier.wait(bars[0].index(s), phase)
        if READS:
            qt = rings[2].index(s).reshape([64, K])
            mbarrier.wait(bars[2].index(s), phase)
            p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
            if WINDOW == 1:
                low_S, read = _read(S, qt, none)
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = _keep_steps(rates, lately, (c + 1) & 1, soon, WINDOW, BEFORE)
        ahead = at + (STAGES - 1) * STRIDE
        coords = (n, ahead - HALO - SHIFT, key_at), (n, ahead - HALO, value_at), (n, ahead, key_at)
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        mbarrier.wait(bars[1].index(s), phase)
        if READS:
            if WINDOW == 1:
                low_y, S = _write(S * carry, x, y, rates, c & 1)
                p = warpgroup_mma_wait(2, deps=[p])
                scores.store(weigh(p, rates, c & 1, BEFORE, ACC).to(dtype))
            else:  # the weights leave no registers for the rest
                p = warpgroup_mma_wait(0, deps=[p])
                scores.store(_weigh(p, rates, lately, c & 1, WINDOW, BEFORE, ACC).to(dtype))
                low_S, read = _read(S, qt, none)
                low_y, S = _write(S * carry, x, y, rates, c & 1)
            fence_async_shared()
            read = warpgroup_mma_wait(1, deps=[read])
            gl.thread_barrier()
            out = read * row(rates, c & 1, READ, ACC)
            out = warpgroup_mma(gl.convert_layout(low_y, LEFT), scores.permute((1, 0)), out, is_async=True)
            if states_desc is not None:
                spent = rings[2].index(s)._reinterpret(dtype, [K, 64], tall)
                spent.permute((1, 0)).store(gl.convert_layout(low_S, wide))
            out, S = warpgroup_mma_wait(0, deps=[out, S])
            y.permute((1, 0)).store(out.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            if WINDOW == 1:
                tma.async_copy_shared_to_global(o, [n, at, value_at], rings[1].index(s))
            else:
                i = gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
                col = gl.arange(0, 64, layout=gl.SliceLayout(0, HALF))
                first = (n.to(gl.int64) * length + at) * (H * V) + value_at
                own = i < gl.minimum(STRIDE, length - at)
                gl.store(o + first + (i[:, None] * (H * V) + col[None, :]), y.load(HALF), mask=own[:, None])
            if states_desc is not None:
                tma.async_copy_shared_to_global(states_desc, [(slot + c * H) * K, block * 64], spent)
        else:
            low_y, S = _write(S * carry, x, y, rates, c & 1)
            S = warpgroup_mma_wait(0, deps=[S])
        carry = next_carry
        soon = later
    tma.store_wait(0)
    if state1 is not None:
        gl.store(state1 + state_at, S)
    keep_barriers(bars)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def backward_state(
    q_desc, d_o_desc, d_states_desc, decay, d_state1, d_state0, length, chunks, tokens, segments, per_segment,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr,
    BEFORE: gl.constexpr, STAGES: gl.constexpr, SKIP: gl.constexpr = True,
):  # fmt: skip
    """One segment of one head in reverse, 64 value columns: dS_0, and if asked the state gradient at every chunk end.

    If not asked, with SKIP all segments but the first of each sequence.
    """
    STRIDE: gl.constexpr = 65 - WINDOW
    dtype: gl.constexpr = q_desc.dtype
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, 64], dtype)
    block, h, seg = whose(gl.program_id(0), V // 64, H)
    if d_states_desc is None and SKIP:
        seg += seg // (segments - 1) + 1
    n, start, count = span(seg, chunks, segments, per_segment)
    line = h.to(gl.int64) * tokens + n.to(gl.int64) * length
    last = start + count - 1
    slot = (n * chunks + last) * H + h
    key_at = h // (H // KH) * K
    value_at = h * V + block * 64

    descs = (q_desc, d_o_desc)
    rings, bars = rings_of(descs, STAGES)
    fades = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if d_states_desc is not None:
        leaving = gl.allocate_shared_memory(dtype, [K, 64], tall)
    for early in gl.static_range(STAGES - 1):
        at = (last - early) * STRIDE
        fetch(descs, rings, bars, early, ((n, at, key_at), (n, at, value_at)), early < count)
    r = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = last * STRIDE
    soon = _load_read(decay, line, at, length - at, r, WINDOW, BEFORE)
    carry = _keep_read(fades, 0, soon, r, WINDOW)
    if count > 1:
        soon = _load_read(decay, line, at - STRIDE, length - at + STRIDE, r, WINDOW, BEFORE)
    state_at = state_offsets(seg, h, block, H, K, V, wide)
    if d_state1 is None:
        dS = gl.zeros([64, K], gl.float32, wide)
    else:
        dS = gl.load(d_state1 + state_at).to(gl.float32)

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        qt = rings[0].index(s).reshape([64, K])
        do = rings[1].index(s).reshape([64, 64])
        at = (last - c) * STRIDE
        later = soon
        if c + 2 < count:
            then = at - 2 * STRIDE
            later = _load_read(decay, line, then, length - then, r, WINDOW, BEFORE)
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = _keep_read(fades, (c + 1) & 1, soon, r, WINDOW)
        ahead = at - (STAGES - 1) * STRIDE
        coords = (n, ahead, key_at), (n, ahead, value_at)
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        if d_states_desc is not None:
            leaving.permute((1, 0)).store(dS.to(dtype))
            fence_async_shared()
        mbarrier.wait(bars[1].index(s), phase)
        fade = fades.index(c & 1).load(gl.SliceLayout(0, ACC))[None, :]
        read = (do.permute((1, 0)).load(ACC).to(gl.float32) * fade).to(dtype)
        mbarrier.wait(bars[0].index(s), phase)
        dS = warpgroup_mma(gl.convert_layout(read, LEFT), qt, dS * carry, is_async=True)
        if d_states_desc is not None:
            gl.thread_barrier()
            tma.async_copy_shared_to_global(d_states_desc, [(slot - c * H) * K, block * 64], leaving)
        dS = warpgroup_mma_wait(0, deps=[dS])
        carry = next_carry
        soon = later
    tma.store_wait(0)
    if d_state0 is not None:
        gl.store(d_state0 + state_at, dS)
    keep_barriers(bars)


@gluon.jit
def _keep_read(fades, at, loaded, r, WINDOW: gl.constexpr):
    """How much of a state each read of a chunk sees, nothing in rows of the next chunk; what the chunk keeps of it."""
    g_read, g_last = loaded
    fades.index(at).store(gl.where(r < 65 - WINDOW, gl.exp2(g_read), 0.0))
    return gl.exp2(g_last)
