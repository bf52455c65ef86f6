"""Inner-product class on Hopper, the part of backward that is parallel over chunks: additive_gradient.py, faster.

For 16-bit calls with 64 or 128 key and value columns, whatever surrounds the tokens. Notation, algebra and the shared
pairs of windows as in additive.py; how it is made fast, and its traps, as in hopper_parts.py: each tile is read once,
64 key columns of the states at a time, and the scores lie in shared memory for the three products that they enter.

Traps: with 64 of 128 key columns done their key gradient waits in 16 bits for the energy's share.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import (
    ACC,
    BROAD,
    HALF,
    LEFT,
    SHARED,
    WHOLE,
    apart,
    arrive,
    copy_features,
    copy_rows,
    copy_states,
    diagonal,
    gates_of_columns,
    new_barrier,
    nil,
    product,
    put_first_key,
    rows,
    score,
    store_gates,
    store_keys,
    store_rows,
    store_staged,
)
from fastweight.kernels.tiles import chunk_span, decay_before, decay_rows, fade, has_pair, source_rows


@gluon.jit
def _through_states(
    s_states, s_out, s_in, s_scores, d_y, fade_read, kept, d_q, first, h, part: gl.constexpr, high,
    states, d_states, state_row, landed, H: gl.constexpr, K: gl.constexpr, HALO: gl.constexpr,
):  # fmt: skip
    """For 64 key columns: stores the gradient of q; that of x; d_y with X dS added; row sums of the reads and of
    S .* dS. Begins to copy the next columns of the states."""
    X: gl.constexpr = K // 64 + part
    both = product(s_states.index(nil()), s_states.index(nil() + 1).permute((1, 0)))
    d_y = warpgroup_mma(s_in.index(nil() + X), s_states.index(nil() + 1), d_y, is_async=True)
    both, d_y = warpgroup_mma_wait(0, deps=(both, d_y))
    through = diagonal(both)
    read = product(s_out.index(nil()), s_states.index(nil()).permute((1, 0)))
    read = warpgroup_mma_wait(0, deps=(read,))
    read *= fade_read[:, None]
    row_read = gl.sum(read * s_in.index(nil() + part).load(ACC).to(gl.float32), axis=1)
    read = warpgroup_mma(s_scores.index(nil() + 1), s_in.index(nil() + X), read, is_async=True)
    read = warpgroup_mma_wait(0, deps=(read,))
    gl.thread_barrier()
    i = rows(HALF) - HALO
    store_staged(s_states.index(nil()), d_q, read, first, i, h, part * 64, (i >= 0) & (i < high), H, K)
    d_x = product(s_out.index(nil() + 1), s_states.index(nil() + 1).permute((1, 0)))
    d_x = warpgroup_mma_wait(0, deps=(d_x,))
    if part + 1 < K // 64:
        copy_states(s_states, states, d_states, state_row + 64 * (part + 1), landed)
    d_x *= kept[:, None]
    d_x = warpgroup_mma(s_scores.index(nil() + 1).permute((1, 0)), s_in.index(nil() + part), d_x, is_async=True)
    d_x = warpgroup_mma_wait(0, deps=(d_x,))
    return d_x, d_y, row_read, through


@gluon.jit
def _near(values, WINDOW: gl.constexpr, FORTH: gl.constexpr):
    """window_sum of gates.py."""
    if WINDOW == 1:
        return values
    else:
        distance = apart()
        if FORTH:
            distance = -distance
        across = gl.convert_layout(values, gl.SliceLayout(0, ACC))
        return gl.sum(gl.where((distance >= 0) & (distance < WINDOW), across[None, :], 0.0), axis=1)


@gluon.jit
def _step(weight, decay, at, step, high, STRIDE: gl.constexpr):
    """Weights and log-decays of steps of a chunk; no weight outside it."""
    w = gl.load(weight + at + step, mask=(step >= 0) & (step < high) & (step < STRIDE), other=0.0)
    return w, gl.load(decay + at + gl.minimum(gl.maximum(step, 0), high - 1))


@gluon.jit
def _kept(weight, decay, at, g_last, j, high, WINDOW: gl.constexpr):
    """What the chunk's end state keeps of each pair j, through the steps that write it."""
    w, g = _step(weight, decay, at, j, high, 65 - WINDOW)
    kept = gl.exp2(g_last - g) * w
    for b in gl.static_range(1, WINDOW):
        w, g = _step(weight, decay, at, j + b, high, 65 - WINDOW)
        kept += gl.exp2(g_last - g) * w
    return kept


@gluon.jit
def _seen(weight, decay, at, g_read, high, BEFORE: gl.constexpr, WINDOW: gl.constexpr):
    """How each step sees pair j: as the last step that it sees of those that write j has left it, faded from there."""
    lag = apart() - 1 if BEFORE else apart()
    j = gl.arange(0, 64, gl.SliceLayout(0, ACC)) - (WINDOW - 1)
    left, g = _step(weight, decay, at, j, high, 65 - WINDOW)
    seen = gl.where(lag == 0, left[None, :], 0.0)
    for b in gl.static_range(1, WINDOW):
        w, passed = _step(weight, decay, at, j + b, high, 65 - WINDOW)
        left = left * gl.exp2(passed - g) + w
        g = passed
        if b < WINDOW - 1:
            seen = gl.where(lag == b, left[None, :], seen)
    faded = fade(lag >= WINDOW - 1, g_read[:, None] - g[None, :]) * left[None, :]
    return gl.where(lag >= WINDOW - 1, faded, seen)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, weight, decay, states, d_states,
    d_q, d_k, d_v, d_beta, d_lam, d_key0, halo_k, halo_v,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr, WINDOW: gl.constexpr,
    SHIFT: gl.constexpr, RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of queries, keys, values, and of the step sizes down to beta and lam."""
    HALO: gl.constexpr = WINDOW - 1
    TILE: gl.constexpr = WHOLE if V == 128 else HALF
    WIDE: gl.constexpr = ACC if V == 64 else BROAD
    HALVES: gl.constexpr = K // 64
    h = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    kh = h // (H // KH)
    dtype: gl.constexpr = q.dtype.element_ty
    s_states = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)  # 64 rows of a state, and of its gradient
    s_out = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)  # gradients of the reads, values
    s_in = gl.allocate_shared_memory(dtype, [2 * HALVES, 64, 64], SHARED)  # columns of q, then of x
    s_scores = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    landed = new_barrier()
    line = h.to(gl.int64) * tokens
    s_gate = gates_of_columns(weight, decay, line, first, high, 64 - HALO)
    i = gl.arange(0, 64, gl.SliceLayout(1, TILE)) - HALO
    live = (i >= low) & (i < high)
    copy_rows(s_out.index(0), d_o, first, i, h, 0, live & (i >= 0), H, V, TILE)
    copy_rows(s_out.index(1), v, first, i, h, 0, live, H, V, TILE)
    i = gl.arange(0, 64, gl.SliceLayout(1, HALF)) - HALO
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    copy_features(s_in, q, k, previous, source, i, live & (i >= 0), live & (source >= low), first, kh, KH, K, SHIFT)
    state_row = (chunk * H + h) * K
    copy_states(s_states, states, d_states, state_row, landed)
    starts = live & (source < low)
    i = rows(ACC) - HALO
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    own = live & (i >= 0)
    g = decay_rows(decay, line, first, i, high)
    g_read = decay_before(decay, line, first, i, high) if BEFORE else g
    g_last = gl.load(decay + line + first + gl.minimum(63 - HALO, high - 1))
    w = gl.load(weight + line + first + i, mask=own, other=0.0)
    fade_read = gl.exp2(g_read)
    last = gl.exp2(g_last - g)
    kept = _kept(weight, decay, line + first, g_last, i, high, WINDOW)

    arrive()
    if key0 is not None:
        put_first_key(s_in, key0, n.to(gl.int64) * KH + kh, starts, K)
    # felt[t, s]: how the loss depends on D[t, s], through every pair that step s writes.
    once = gl.minimum(tokens, 1)
    felt_low = gl.zeros([64, 64], gl.bfloat16, LEFT)
    d_w = gl.sum(gl.reshape(gl.zeros([64, 64], gl.float32, ACC), [4, 16, 64]), axis=1)
    for _ in range(once):
        p = score(s_in, 0, HALVES)
        dp = product(s_out.index(nil()), s_out.index(nil() + 1).permute((1, 0)))
        p, dp = warpgroup_mma_wait(0, deps=(p, dp))
        felt = p * dp
        if WINDOW > 1:
            distance = apart()
            band = gl.where((distance <= 0) & (distance > -WINDOW), 1.0, 0.0)
            s_scores.index(0).store(band.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            felt = product(gl.convert_layout(felt.to(dtype), LEFT), s_scores.index(0))
            felt = warpgroup_mma_wait(0, deps=(felt,))
            gl.thread_barrier()
        distance = apart()
        reads = distance > 0 if BEFORE else distance >= 0
        if WINDOW > 1:
            reads = reads & (i >= 0)[:, None]
        alive = fade(reads, g_read[:, None] - s_gate.index(0).load(gl.SliceLayout(0, ACC))[None, :])
        felt *= alive
        if WINDOW == 1:
            seen = alive * s_gate.index(1).load(gl.SliceLayout(0, ACC))[None, :]
        else:
            seen = _seen(weight, decay, line + first, g_read, high, BEFORE, WINDOW)
        s_scores.index(0).store((p * seen).to(dtype))
        s_scores.index(1).store((dp * seen).to(dtype))
        d_w = gl.sum(gl.reshape(felt, [4, 16, 64]), axis=1)  # a warp's rows each; all four need memory, which is full
        felt *= s_gate.index(1).load(gl.SliceLayout(0, ACC))[None, :]
        felt_low = gl.convert_layout(felt.to(gl.bfloat16), LEFT)
    energy = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC))
    for part in gl.static_range(HALVES):
        x = s_in.index(HALVES + part).load(ACC).to(gl.float32)
        energy += gl.sum(x * x, axis=1)
    fence_async_shared()
    gl.thread_barrier()

    row_read = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC))
    through = row_read
    d_y = gl.zeros([64, V], gl.float32, WIDE)
    d_x = gl.zeros([64, 64], gl.float32, ACC)
    other_d_x = 0
    for part in gl.static_range(HALVES):
        if part == 1:
            other_d_x = d_x.to(dtype)
        for _ in range(once):
            mbarrier.wait(landed, part)
            d_x, d_y, more_read, more = _through_states(
                s_states, s_out, s_in, s_scores, d_y, fade_read, kept, d_q, first, h, part, high,
                states, d_states, state_row, landed, H, K, HALO,
            )  # fmt: skip
            row_read += more_read
            through += more
    met = gl.zeros([64], gl.float32, gl.SliceLayout(1, WIDE))
    for _ in range(once):
        met = gl.sum(d_y * s_out.index(nil() + 1).load(WIDE).to(gl.float32), axis=1)
    d_y *= gl.convert_layout(kept, gl.SliceLayout(1, WIDE))[:, None]
    d_y = warpgroup_mma(s_scores.index(nil()).permute((1, 0)), s_out.index(nil()), d_y, is_async=True)
    d_y = warpgroup_mma_wait(0, deps=(d_y,))
    # From here on all tiles but those of q and x are done with, and what follows lies in their memory.
    s_states._keep_alive()
    s_out._keep_alive()
    s_scores._keep_alive()
    gl.thread_barrier()
    i_v = rows(TILE) - HALO
    col = gl.arange(0, V, gl.SliceLayout(0, TILE))
    at = d_v + (first * H + h) * V + (i_v[:, None] * (H * V) + col[None, :])
    gl.store(at, gl.convert_layout(d_y.to(dtype), TILE), mask=((i_v >= 0) & (i_v < high))[:, None])
    if WINDOW > 1:
        i_v = rows(WIDE) - HALO
        col = gl.arange(0, V, gl.SliceLayout(0, WIDE))
        at = halo_v + (chunk.to(gl.int64) * 16 * H + h) * V + ((i_v + HALO)[:, None] * (H * V) + col[None, :])
        gl.store(at, d_y, mask=((i_v >= low) & (i_v < 0))[:, None])
    s_before = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    s_before.store(gl.where(apart() < 0, 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    felt = product(felt_low, s_before)
    felt = warpgroup_mma_wait(0, deps=(felt,))
    s_before._keep_alive()
    met = _near(gl.convert_layout(met, gl.SliceLayout(1, ACC)), WINDOW, False) * last
    distance = apart()
    reads = distance > 0 if BEFORE else distance >= 0
    felt = gl.where(reads, felt + row_read[:, None], 0.0) + gl.where(distance < 0, (met * w)[:, None], 0.0)
    felt += (through * gl.exp2(g_last))[:, None]
    d_log = gl.convert_layout(gl.sum(felt, axis=0), gl.SliceLayout(1, ACC))
    d_w = gl.convert_layout(gl.sum(d_w, axis=0), gl.SliceLayout(1, ACC)) + met
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    if not RAW and WINDOW > 1:
        count = gl.maximum(_near(gl.where(pair, 1.0, 0.0), WINDOW, False), 1.0)
        energy = _near(gl.where(pair, energy, 0.0), WINDOW, False) / count
        d_w = d_w / count
    share = store_gates(beta, lam, d_beta, d_lam, first, i, h, pair & own, own, d_w, d_log, energy, eps, floor,
                        H, RAW, SCALED, DIRECT, WINDOW == 1)  # fmt: skip
    if not RAW and WINDOW > 1:
        share = _near(share / count, WINDOW, True)
    i = rows(HALF) - HALO
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n) & (i >= 0)
    for turn in gl.static_range(HALVES):
        if not RAW and (not DIRECT or (SCALED and WINDOW == 1)):
            d_x += 2 * share[:, None] * s_in.index(2 * HALVES - 1 - turn).load(ACC).to(gl.float32)
        store_keys(d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, (HALVES - 1 - turn) * 64,
                   H, K, SHIFT)  # fmt: skip
        if WINDOW > 1:
            store_rows(halo_k, d_x, chunk.to(gl.int64) * 16, i + HALO, h, (HALVES - 1 - turn) * 64,
                       live & (i < 0), H, K)  # fmt: skip
        if HALVES == 2:
            d_x = other_d_x.to(gl.float32)
    landed._keep_alive()
