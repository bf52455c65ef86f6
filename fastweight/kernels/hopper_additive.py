"""Inner-product class on Hopper: what additive.py's `forward` and `backward_state` compute, faster.

For dense 16-bit calls with 64 or 128 key columns; notation and algebra as in additive.py. How chunks are walked, and
the traps, as in hopper_solve.py: the state lies transposed, [64, K], in the accumulators, S~ = S^T and so on,

    O~ = 2^F .* (S~ Q^T) + Y~ W^T      S~ = 2^G S~ + (Y~ .* kept) X      dS~ = 2^G dS~ + (dO~ .* 2^F) Q

and W, made of Q X^T, is all that passes through shared memory. A segment whose state alone is wanted reads no queries.
The walk makes the steps itself, what gates.py and `fold` do for other calls: each warp those of all tokens of a chunk,
from energies of keys that were summed up while products of the chunk before went on.

Traps: rows of queries and outputs are a chunk's own STRIDE steps from row 0 on, and what they hold past those is the
next chunk's; rows of keys and values begin with the WINDOW - 1 pairs before them. A fence for copies and products makes
every thread wait for all that it loads from memory or stores there, and Triton puts one before copies, too.
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

from fastweight.kernels.gates import LOG2E, load_head, step_log_decay, step_sizes
from fastweight.kernels.hopper_additive_sums import EACH, announce, bring, put_energies
from fastweight.kernels.hopper_additive_windows import pairs_of, window_from
from fastweight.kernels.hopper_parts import ACC, HALF, LEFT, LINE, nil, rows
from fastweight.kernels.hopper_walk import (
    DECAY,
    KEPT,
    READ,
    READ_DECAY,
    STEP,
    fetch,
    keep_barriers,
    keep_rates,
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
def _load_gates(beta, lam, first, at, high, h, H: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr):
    """Whether each step of a chunk has a pair, and its beta and lam."""
    i = gl.arange(0, 64, layout=EACH)
    pair = (i < gl.minimum(high, 65 - WINDOW)) & (at + i >= SHIFT)
    return pair, load_head(beta, first + at, i, h, H, pair, 1.0), load_head(lam, first + at, i, h, H, pair, 0.0)


@gluon.jit
def _keep_steps(
    rates, lately, c, energies, gates, at, eps, floor,
    WINDOW: gl.constexpr, SHIFT: gl.constexpr, RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
    BEFORE: gl.constexpr,
):  # fmt: skip
    """Rates of one chunk, and in `lately` what pairs are worth while their window is open.

    What its end keeps of S; weights and cumulative log-decays.
    """
    HALO: gl.constexpr = WINDOW - 1
    pair, gain, ridge = gates
    i = gl.arange(0, 64, layout=EACH)
    if RAW:
        w = gain
        log_decay = ridge * LOG2E
    else:
        energy = energies.load(EACH)
        if WINDOW > 1:
            part = 1 / pairs_of(i, at, WINDOW, SHIFT)
            energy = window_from(energy, i, WINDOW) * part
        w, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        if WINDOW > 1:
            w *= part
        log_decay = gl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    g = gl.associative_scan(log_decay, 0, _add)
    g_last = gl.sum(log_decay, axis=0)
    g_read = g
    if BEFORE:
        g_read = gl.where(i > 0, gl.gather(g, gl.maximum(i - 1, 0), 0), 0.0)
    # `fold`: rows are pairs from here on, WINDOW - 1 before the steps.
    worth, faded = w, g
    if WINDOW > 1:
        worth = gl.where(i >= HALO, gl.gather(w, gl.maximum(i - HALO, 0), 0), 0.0)
        faded = gl.gather(g, gl.maximum(i - HALO, 0), 0)
        for b in gl.static_range(HALO):
            lately.index((c & 1) * HALO + b).store(worth)
            step = i - (HALO - 1 - b)
            passed = gl.gather(g, gl.maximum(step, 0), 0)
            worth *= gl.exp2(passed - faded)
            worth += gl.where(step >= 0, gl.gather(w, gl.maximum(step, 0), 0), 0.0)
            faded = passed
    return keep_rates(rates, c & 1, (worth, faded, g_read, g_last), True, BEFORE or WINDOW > 1), w, g


@gluon.jit
def _put_steps(weight, decay, first, w, g, high, keeps, WINDOW: gl.constexpr):
    """Writes weights and log-decays of a chunk, if this program is the one that does."""
    i = gl.arange(0, 64, layout=EACH)
    own = (i < gl.minimum(high, 65 - WINDOW)) & keeps
    gl.store(weight + first + i, w, mask=own)
    gl.store(decay + first + i, g, mask=own)


@gluon.jit
def _add(a, b):
    return a + b


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


@gluon.jit
def _sum_up(energies, keys, bars, c, count, ENERGY: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):
    """Energies of a chunk's keys, once they have come; behind the next barrier they are there."""
    if ENERGY:
        if c < count:
            mbarrier.wait(bars[0].index(c % STAGES), (c // STAGES) & 1)
            put_energies(energies, keys[0].index(c % STAGES).reshape([64, K]))


@gluon.jit(do_not_specialize=["length", "chunks", "tokens", "segments", "per_segment"])
def forward(
    k_desc, q_desc, v_desc, o, states_desc, beta, lam, weight, decay, state0, state1,
    length, chunks, tokens, segments, per_segment, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr, SHIFT: gl.constexpr,
    RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One segment of one head, 64 value columns: weights, log-decays, final state, and where given o and chunk states.

    Without o, all segments but the last of each sequence. o is a descriptor, or with a window a pointer: of a chunk's
    64 rows not all are its own.
    """
    HALO: gl.constexpr = WINDOW - 1
    STRIDE: gl.constexpr = 65 - WINDOW
    READS: gl.constexpr = o is not None
    ENERGY: gl.constexpr = not RAW and (not DIRECT or SCALED)
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

    # Keys come a chunk before the rest, as their energies are needed a chunk before them.
    KEYS_AHEAD: gl.constexpr = STAGES + 1
    keys, key_bars = rings_of((k_desc,), KEYS_AHEAD)
    descs = (v_desc,)
    if READS:
        descs = (v_desc, q_desc)
        scores = gl.allocate_shared_memory(dtype, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], dtype))
    rings, bars = rings_of(descs, STAGES)
    rates = rates_of(BEFORE or WINDOW > 1)
    lately = rates
    if WINDOW > 1:
        lately = gl.allocate_shared_memory(gl.float32, [2 * HALO, 64], LINE)
    for early in gl.static_range(STAGES - 1):
        at = (start + early) * STRIDE
        fetch((k_desc,), keys, key_bars, early, ((n, at - HALO - SHIFT, key_at),), early < count)
        fetch(descs, rings, bars, early, ((n, at - HALO, value_at), (n, at, key_at)), early < count)
    at = (start + STAGES - 1) * STRIDE
    fetch((k_desc,), keys, key_bars, STAGES - 1, ((n, at - HALO - SHIFT, key_at),), count >= STAGES)
    begin = n.to(gl.int64) * length
    at = start * STRIDE
    soon = _load_gates(beta, lam, begin, at, length - at, h, H, WINDOW, SHIFT)
    energies = gl.allocate_shared_memory(gl.float32, [64], LINE)
    state_at = state_offsets(seg, h, block, H, K, V, wide)
    if state0 is None:
        S = gl.zeros([64, K], gl.float32, wide)
    else:
        S = gl.load(state0 + state_at).to(gl.float32)
    none = gl.zeros([64, 64], gl.float32, ACC)
    _sum_up(energies, keys, key_bars, 0, count, ENERGY, K, KEYS_AHEAD)
    gl.thread_barrier()

    for c in range(0, count):
        s = c % STAGES
        phase = (c // STAGES) & 1
        x = keys[0].index(c % KEYS_AHEAD).reshape([64, K])
        y = rings[0].index(s).reshape([64, 64])
        at = (start + c) * STRIDE
        mbarrier.wait(key_bars[0].index(c % KEYS_AHEAD), (c // KEYS_AHEAD) & 1)
        if READS:
            qt = rings[1].index(s).reshape([64, K])
            mbarrier.wait(bars[1].index(s), phase)
            p = warpgroup_mma(qt, x.permute((1, 0)), none, use_acc=False, is_async=True)
            low_S, read = _read(S, qt, none)
        carry, w, g = _keep_steps(
            rates, lately, c, energies, soon, at, eps, floor, WINDOW, SHIFT, RAW, SCALED, DIRECT, BEFORE
        )
        # Behind this barrier every warp is done with the chunk before, and the rates are there.
        tma.store_wait(0)
        gl.thread_barrier()
        ahead = at + (STAGES - 1) * STRIDE
        spare, key_spare = (c + STAGES - 1) % STAGES, (c + STAGES) % KEYS_AHEAD
        announce(descs, bars, spare, c + STAGES - 1 < count)
        announce((k_desc,), key_bars, key_spare, c + STAGES < count)
        coords = (n, ahead - HALO, value_at), (n, ahead, key_at)
        bring(descs, rings, bars, spare, coords, c + STAGES - 1 < count)
        coords = ((n, ahead + STRIDE - HALO - SHIFT, key_at),)
        bring((k_desc,), keys, key_bars, key_spare, coords, c + STAGES < count)
        # As far before a fence as may be: each waits for what threads load and store.
        _put_steps(weight, decay, line + at, w, g, length - at, block == 0, WINDOW)
        then = at + STRIDE
        soon = _load_gates(beta, lam, begin, then, length - then, h + nil(), H, WINDOW, SHIFT)
        mbarrier.wait(bars[0].index(s), phase)
        if READS:
            low_y, S = _write(S * carry, x, y, rates, c & 1)
            p = warpgroup_mma_wait(2, deps=[p])
            if WINDOW == 1:
                p = weigh(p, rates, c & 1, BEFORE, ACC)
            else:
                p = _weigh(p, rates, lately, c & 1, WINDOW, BEFORE, ACC)
            scores.store(p.to(dtype))
            fence_async_shared()
            read = warpgroup_mma_wait(1, deps=[read])
            gl.thread_barrier()
            out = read * row(rates, c & 1, READ, ACC)
            out = warpgroup_mma(gl.convert_layout(low_y, LEFT), scores.permute((1, 0)), out, is_async=True)
            if states_desc is not None:
                spent = rings[1].index(s)._reinterpret(dtype, [K, 64], tall)
                spent.permute((1, 0)).store(gl.convert_layout(low_S, wide))
            _sum_up(energies, keys, key_bars, c + 1, count, ENERGY, K, KEYS_AHEAD)
            out, S = warpgroup_mma_wait(0, deps=[out, S])
            y.permute((1, 0)).store(out.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            if WINDOW == 1:
                tma.async_copy_shared_to_global(o, [n, at, value_at], rings[0].index(s))
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
            _sum_up(energies, keys, key_bars, c + 1, count, ENERGY, K, KEYS_AHEAD)
            S = warpgroup_mma_wait(0, deps=[S])
            gl.thread_barrier()
    tma.store_wait(0)
    if state1 is not None:
        gl.store(state1 + state_at, S)
    keep_barriers(key_bars)
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
        # Behind this barrier every warp is done with the chunk before.
        tma.store_wait(0)
        gl.thread_barrier()
        next_carry = _keep_read(fades, (c + 1) & 1, soon, r, WINDOW)
        ahead = at - (STAGES - 1) * STRIDE
        coords = (n, ahead, key_at), (n, ahead, value_at)
        fetch(descs, rings, bars, (c + STAGES - 1) % STAGES, coords, c + STAGES - 1 < count)
        later = soon
        if c + 2 < count:
            then = at - 2 * STRIDE
            later = _load_read(decay, line, then, length - then, r, WINDOW, BEFORE)
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
