"""Regression class on Hopper, the part of backward that is parallel over chunks: solve_gradient.py, faster.

For bfloat16 with 64 or 128 key and value columns, whatever surrounds the tokens. The same algebra, with these
differences: each tile is read once, 64 key columns of the states at a time; the gradient of a row's step and its energy
are diagonals, (dY R^T) / eta and X X^T; what the loss feels of scores and misses is summed before its one product with
the mask of earlier columns; the energy's share joins the key gradient before it is stored.

Traps: those of hopper_parts.py. With 64 of 128 key columns done their key gradient waits in 16 bits for its last terms.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import (
    ACC,
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
def _reads(s_out, s_r, s_in, s_gate, g_read, HALVES: gl.constexpr, BEFORE: gl.constexpr):
    """How the loss depends on what row i reads of an earlier row j, in 16 bits; times that; its rows' sums, j < i."""
    dp = product(s_out.index(nil()), s_r.index(nil()).permute((1, 0)))
    felt = score(s_in, 0, HALVES)
    dp, felt = warpgroup_mma_wait(0, deps=(dp, felt))
    later = apart()
    g_j = s_gate.index(0).load(gl.SliceLayout(0, ACC))
    dp *= fade(later > 0 if BEFORE else later >= 0, g_read[:, None] - g_j[None, :])
    dp *= s_gate.index(1).load(gl.SliceLayout(0, ACC))[None, :]
    felt *= dp
    low = gl.convert_layout(dp.to(s_in.dtype), LEFT)
    extra = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC))
    if not BEFORE:
        extra = gl.sum(gl.where(later > 0, felt, 0.0), axis=1)
    return low, felt, extra


@gluon.jit
def _misses(s_out, s_r, s_in, s_gate, g_res, HALVES: gl.constexpr):
    """The same of what row i misses because of an earlier row j; and the diagonals of dY R^T and X X^T."""
    dg = product(s_out.index(nil() + 1), s_r.index(nil()).permute((1, 0)))
    gram = score(s_in, HALVES, HALVES)
    dg, gram = warpgroup_mma_wait(0, deps=(dg, gram))
    written = diagonal(dg)
    energy = diagonal(gram)
    g_j = s_gate.index(0).load(gl.SliceLayout(0, ACC))
    dg *= fade(apart() > 0, g_res[:, None] - g_j[None, :])
    dg *= -s_gate.index(1).load(gl.SliceLayout(0, ACC))[None, :]
    gram *= dg
    return gl.convert_layout(dg.to(s_in.dtype), LEFT), gram, written, energy


@gluon.jit
def _copy_states(s_states, states, d_states, room, place, row, landed):
    """Begins to copy 64 rows of a chunk's state and of its gradient, from d_states or from their place in `room`."""
    if d_states is not None:
        copy_states(s_states, states, d_states, row, landed)
    else:
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.expect(landed, 2 * states.block_type.nbytes)
        tma.async_copy_global_to_shared(states, [row, 0], landed, s_states.index(0))
        to = s_states.index(1)._reinterpret(s_states.dtype, room.block_shape, room.layout)
        tma.async_copy_global_to_shared(room, place, landed, to)


@gluon.jit
def _through_states(
    s_states, s_out, s_r, s_in, dp, dg, fade_read, fade_miss, kept, d_q, first, h, part: gl.constexpr, high,
    states, d_states, low_desc, high_desc, place, state_row, landed, H: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """For 64 key columns: stores the gradient of q; that of x but for what later rows owe it; row sums of the shares
    through the states, of reads, misses, writes, and of S .* dS. Begins to copy the next columns of the states."""
    X: gl.constexpr = K // 64 + part
    both = product(s_states.index(nil()), s_states.index(nil() + 1).permute((1, 0)))
    both = warpgroup_mma_wait(0, deps=(both,))
    through = diagonal(both)
    miss = product(s_out.index(nil() + 1), s_states.index(nil()).permute((1, 0)))
    miss = warpgroup_mma_wait(0, deps=(miss,))
    miss *= -fade_miss[:, None]
    row_miss = gl.sum(miss * s_in.index(nil() + X).load(ACC).to(gl.float32), axis=1)
    miss = warpgroup_mma(dg, s_in.index(nil() + X), miss, is_async=True)
    miss = warpgroup_mma_wait(0, deps=(miss,))
    read = product(s_out.index(nil()), s_states.index(nil()).permute((1, 0)))
    read = warpgroup_mma_wait(0, deps=(read,))
    read *= fade_read[:, None]
    row_read = gl.sum(read * s_in.index(nil() + part).load(ACC).to(gl.float32), axis=1)
    read = warpgroup_mma(dp, s_in.index(nil() + X), read, is_async=True)
    read = warpgroup_mma_wait(0, deps=(read,))
    gl.thread_barrier()
    i = rows(HALF)
    store_staged(s_states.index(nil()), d_q, read, first, i, h, part * 64, i < high, H, K)
    write = product(s_r.index(nil()), s_states.index(nil() + 1).permute((1, 0)))
    write = warpgroup_mma_wait(0, deps=(write,))
    if part + 1 < K // 64:
        _copy_states(s_states, states, d_states, high_desc, place, state_row + 64 * (part + 1), landed)
    write *= kept[:, None]
    row_write = gl.sum(write * s_in.index(nil() + X).load(ACC).to(gl.float32), axis=1)
    miss += write
    return miss, row_read, row_miss, row_write, through


@gluon.jit
def _keep_rows_apart(
    d_k, halo, d_x, keep, first, chunk, i, high, h, start, H: gl.constexpr, K: gl.constexpr, SHIFT: gl.constexpr
):
    """store_keys of hopper_parts.py, but that the key of the token before the chunk has its gradient in halo."""
    store_rows(d_k, d_x, first - SHIFT, i, h, start, keep & (i >= SHIFT), H, K)
    if SHIFT:
        store_rows(halo, d_x, chunk.to(gl.int64), i, h, start, keep & (i == 0), H, K)
        store_rows(d_k, gl.zeros([64, 64], gl.float32, ACC), first, i, h, start, i == high - 1, H, K)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, eta, decay, residual, states, d_y, d_states,
    low_desc, high_desc, d_q, d_k, d_beta, d_lam, d_key0, halo,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    SHIFT: gl.constexpr, RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, DECAYED: gl.constexpr,
    BEFORE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: gradients of queries, keys, and of the step sizes down to beta and lam.

    Without d_states a chunk's state gradient lies where its gradients of q and k go (hopper_solve.backward_state), in
    rows that no other chunk may write: its gradient of the key of the token before it goes to halo [chunks, H, K].
    """
    TILE: gl.constexpr = WHOLE if V == 128 else HALF
    HALVES: gl.constexpr = K // 64
    h = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    dtype: gl.constexpr = q.dtype.element_ty
    s_states = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)  # 64 rows of a state, and of its gradient
    s_out = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)  # gradients of the reads, of the residuals
    s_r = gl.allocate_shared_memory(dtype, [1, 64, V], SHARED)
    s_in = gl.allocate_shared_memory(dtype, [2 * HALVES, 64, 64], SHARED)  # columns of q, then of x
    landed = new_barrier()
    line = h.to(gl.int64) * tokens
    s_gate = gates_of_columns(eta, decay, line, first, high, 64)
    i = gl.arange(0, 64, gl.SliceLayout(1, TILE))
    copy_rows(s_out.index(0), d_o, first, i, h, 0, i < high, H, V, TILE)
    copy_rows(s_out.index(1), d_y, first, i, h, 0, i < high, H, V, TILE)
    copy_rows(s_r.index(0), residual, first, i, h, 0, i < high, H, V, TILE)
    i = gl.arange(0, 64, gl.SliceLayout(1, HALF))
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    copy_features(s_in, q, k, previous, source, i, live, live & (source >= low), first, kh, KH, K, SHIFT)
    state_row = (chunk * H + h) * K
    place = (n, -low, h * K)
    _copy_states(s_states, states, d_states, low_desc, place, state_row, landed)
    starts = live & (source < low)
    i = gl.arange(0, 64, gl.SliceLayout(1, ACC))
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    a = gl.load(eta + line + first + i, mask=live, other=0.0)
    g = decay_rows(decay, line, first, i, high)
    g_last = gl.load(decay + line + first + gl.minimum(63, high - 1))
    g_res = g
    g_read = g
    if not DECAYED:
        g_res = decay_before(decay, line, first, i, high)
    if BEFORE:
        g_read = decay_before(decay, line, first, i, high)
    fade_read = gl.exp2(g_read)
    fade_miss = gl.exp2(g_res)
    kept = gl.exp2(g_last - g) * a

    arrive()
    if key0 is not None:
        put_first_key(s_in, key0, n.to(gl.int64) * KH + kh, starts, K)
    # How each later row i sees the write of an earlier row j, and how the loss depends on it: reads, then misses.
    once = gl.minimum(tokens, 1)
    felt = gl.zeros([64, 64], gl.float32, ACC)
    extra = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC))
    d_eta = extra
    energy = extra
    dp_low = gl.zeros([64, 64], dtype, LEFT)
    dg_low = dp_low
    for _ in range(once):
        dp_low, felt, extra = _reads(s_out, s_r, s_in, s_gate, g_read, HALVES, BEFORE)
    for _ in range(once):
        dg_low, gram, d_eta, energy = _misses(s_out, s_r, s_in, s_gate, g_res, HALVES)
        felt += gram
        if DECAYED:
            extra += gl.sum(gram, axis=1)
    felt = gl.convert_layout(felt.to(gl.bfloat16), LEFT)
    d_eta = gl.where(a == 0, 0.0, d_eta / gl.where(a == 0, 1.0, a))

    row_read = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC))
    row_miss = row_read
    row_write = row_read
    through = row_read
    d_x = gl.zeros([64, 64], gl.float32, ACC)
    other_d_x = 0
    for part in gl.static_range(HALVES):
        if part == 1:
            other_d_x = d_x.to(dtype)
        for _ in range(once):
            mbarrier.wait(landed, part)
            d_x, more_read, more_miss, more_write, more = _through_states(
                s_states, s_out, s_r, s_in, dp_low, dg_low, fade_read, fade_miss, kept, d_q, first, h, part, high,
                states, d_states, low_desc, high_desc, place, state_row, landed, H, K,
            )  # fmt: skip
            row_read += more_read
            row_miss += more_miss
            row_write += more_write
            through += more
    # From here on the tiles of V columns are done with, and what follows lies in their memory.
    s_out._keep_alive()
    s_r._keep_alive()
    s_states._keep_alive()
    gl.thread_barrier()
    s_scores = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    s_before = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED)
    s_scores.index(0).store(gl.convert_layout(dp_low, ACC))
    s_scores.index(1).store(gl.convert_layout(dg_low, ACC))
    s_before.store(gl.where(apart() < 0, 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    felt = product(felt, s_before)
    felt = warpgroup_mma_wait(0, deps=(felt,))
    s_before._keep_alive()
    if not BEFORE:
        extra += row_read
    if DECAYED:
        extra += row_miss
    # A log-decay of row t is felt by every pair j < t < i, and in part by those with i = t.
    later = apart()
    felt = (
        gl.where(
            later > 0,
            felt + (row_read + row_miss)[:, None],
            gl.where(later == 0, extra[:, None], row_write[:, None]),
        )
        + (through * gl.exp2(g_last))[:, None]
    )
    d_log = gl.convert_layout(gl.sum(felt, axis=0), gl.SliceLayout(1, ACC))
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    share = store_gates(beta, lam, d_beta, d_lam, first, i, h, pair, live, d_eta, d_log, energy, eps, floor,
                        H, RAW, SCALED, DIRECT, True)  # fmt: skip
    i = rows(HALF)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    for turn in gl.static_range(HALVES):
        # What later rows owe to earlier ones: dG^T X + dP^T Q.
        x = s_in.index(2 * HALVES - 1 - turn)
        d_x = warpgroup_mma(s_scores.index(1).permute((1, 0)), x, d_x, is_async=True)
        d_x = warpgroup_mma(s_scores.index(0).permute((1, 0)), s_in.index(HALVES - 1 - turn), d_x, is_async=True)
        d_x = warpgroup_mma_wait(0, deps=(d_x,))
        if not RAW and (SCALED or not DIRECT):
            d_x += 2 * share[:, None] * x.load(ACC).to(gl.float32)
        if halo is None:
            store_keys(d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, (HALVES - 1 - turn) * 64,
                       H, K, SHIFT)  # fmt: skip
        else:
            _keep_rows_apart(d_k, halo, d_x, pair & (source >= low), first, chunk, i, high, h, (HALVES - 1 - turn) * 64,
                             H, K, SHIFT)  # fmt: skip
        if HALVES == 2:
            d_x = other_d_x.to(gl.float32)
    s_scores._keep_alive()
    landed._keep_alive()
