"""Inner-product class with a gain per value column on Hopper: all gradients of chunks that forget little, at once.

For bfloat16 calls with 64 or 128 key and value columns that read after they write. Of a tame chunk (columns_tame.py),
with r = 2^g .* dO, m = 2^-g .* u, P the scores [j <= i] Q X^T and E = 2^(g_C) .* dS:

    dQ = r S_0^T + dP X       dX = m E^T + dP^T Q       dP = [j <= i] r m^T       dU = 2^-g .* (P^T r + X E)
    dl_t = sum_k S_0 .* E + sum_(j < t) m .* (X E) + sum_(i >= t) (r .* (P m + Q S_0) - m .* (P^T r))

What pairs on one side of t add to the last sum cancels to the digits of float32, because both of its terms multiply the
same rounded r and m. That is enough where no carry is small (LEAST_CARRY), because dl is divided by it. Sums over
tokens are products with matrices of ones, and the one whose terms cancel takes them in three pieces of 8 bits. Other
chunks are noted, and columns_gradient.py follows for them. How it is made fast, and its traps, as in hopper_parts.py.

Traps: 2^-g waits in the memory of d_v, in 16 bits, until it turns the gradient of m into that of u.
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

from fastweight.kernels.columns import column_steps
from fastweight.kernels.columns_tame import TAME, is_wild
from fastweight.kernels.gates import load_head, step_gradient, step_sizes
from fastweight.kernels.hopper_parts import (
    ACC,
    BROAD,
    FLAT,
    HALF,
    LINE,
    SHARED,
    WHOLE,
    apart,
    arrive,
    copy_features,
    copy_rows,
    copy_states,
    new_barrier,
    nil,
    product,
    put_first_key,
    rows,
    score,
    store_keys,
    store_staged,
)
from fastweight.kernels.tiles import chunk_span, has_pair, source_rows

LEAST_CARRY = gl.constexpr(-8.0)  # log2: what cancels to 1e-7 of what is added may be multiplied by 2^8
BROAD_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=BROAD.value, k_width=2))
STRIPS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, order=[1, 0]))  # an accumulator's rows miss each other's banks
ACC_LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ACC.value, k_width=2))


@gluon.jit
def _ones(KIND: gl.constexpr, dtype: gl.constexpr, WIDTH: gl.constexpr, L: gl.constexpr):
    """[64, WIDTH]: 1 where the column is up to the row (KIND 0), before it (1), from it on (2) or anywhere (3)."""
    i = rows(L)[:, None]
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, L))[None, :]
    if KIND == 0:
        is_one = j <= i
    elif KIND == 1:
        is_one = j < i
    elif KIND == 2:
        is_one = j >= i
    else:
        is_one = (j >= 0) & (i >= 0)
    return gl.where(is_one, 1.0, 0.0).to(dtype)


@gluon.jit
def _through_states(
    s_states, s_out, s_in, s_scores, s_end, reading, d_m, through, d_q, first, h, part: gl.constexpr, high,
    states, d_states, state_row, landed, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """For 64 key columns: stores the gradient of q, and that of x in the place of q; sums up Q S and X E, and rows of
    S .* E. Begins to copy the next columns of the states."""
    X: gl.constexpr = K // 64 + part
    end = s_end.load(gl.SliceLayout(0, TILE))
    later = (s_states.index(1).load(TILE).to(gl.float32) * end[None, :]).to(s_states.dtype)
    s_states.index(1).store(later)
    both = later.to(gl.float32) * s_states.index(0).load(TILE).to(gl.float32)
    through += gl.sum(gl.reshape(both, [4, 16, V]), axis=0)
    fence_async_shared()
    gl.thread_barrier()
    reading = warpgroup_mma(s_in.index(nil() + part), s_states.index(nil()), reading, is_async=True)
    d_m = warpgroup_mma(s_in.index(nil() + X), s_states.index(nil() + 1), d_m, is_async=True)
    read = product(s_out.index(nil()), s_states.index(nil()).permute((1, 0)))
    read = warpgroup_mma(s_scores.index(nil() + 1), s_in.index(nil() + X), read, is_async=True)
    reading, d_m, read = warpgroup_mma_wait(0, deps=(reading, d_m, read))
    gl.thread_barrier()
    i = rows(HALF)
    store_staged(s_states.index(nil()), d_q, read, first, i, h, part * 64, i < high, H, K)
    d_x = product(s_out.index(nil() + 1), s_states.index(nil() + 1).permute((1, 0)))
    d_x = warpgroup_mma(s_scores.index(nil() + 1).permute((1, 0)), s_in.index(nil() + part), d_x, is_async=True)
    d_x = warpgroup_mma_wait(0, deps=(d_x,))
    gl.thread_barrier()
    s_in.index(nil() + part).store(d_x.to(s_in.dtype))
    if part + 1 < K // 64:
        copy_states(s_states, states, d_states, state_row + 64 * (part + 1), landed)
    return reading, d_m, through


@gluon.jit
def _suffix_sums(s_hi, s_mid, s_low, terms, sums, LEFT: gl.constexpr):
    """sums + what terms [64, V] add up to from each row on, to the digits of float32."""
    hi = terms.to(gl.bfloat16)
    rest = terms - hi.to(gl.float32)
    mid = rest.to(gl.bfloat16)
    s_hi.store(hi)
    s_mid.store(mid)
    s_low.store((rest - mid.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    ones = _ones(2, gl.bfloat16, 64, LEFT)
    sums = warpgroup_mma(ones, s_hi, sums, is_async=True)
    sums = warpgroup_mma(ones, s_mid, sums, is_async=True)
    sums = warpgroup_mma(ones, s_low, sums, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def _of_steps(
    s_m, s_log, s_share, v, beta, lam, d_v, d_beta, d_lam, energies, has_key, unmasked, previous,
    first, row, low, high, n, h, line, eps, floor,
    H: gl.constexpr, V: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Of 16 rows: stores the gradients of values, beta and lam, keeps that of the energy; d_v still holds 2^-g."""
    ROW: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [128 // V, V // 4], [4, 1], [1, 0]))
    i = row + gl.arange(0, 16, gl.SliceLayout(1, ROW))
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = gl.load(energies + line + i, mask=live, other=0.0)
    at = (first * H + h) * V + (i[:, None] * (H * V) + gl.arange(0, V, gl.SliceLayout(0, ROW))[None, :])
    keep = live[:, None]
    gain = gl.load(beta + at, mask=pair[:, None], other=0.0).to(gl.float32)
    d_u = s_m.load(ROW) * gl.load(d_v + at, mask=keep, other=0.0).to(gl.float32)
    y = gl.load(v + at, mask=keep, other=0.0).to(gl.float32)
    eta, _r, _d, _a, _c, _o, _w = step_sizes(
        energy[:, None], gain, ridge[:, None], pair[:, None], eps, floor, SCALED, DIRECT
    )
    gl.store(d_v + at, (eta * d_u).to(d_v.dtype.element_ty), mask=keep)
    to_gain, to_ridge, to_energy = step_gradient(
        y * d_u,
        s_log.load(ROW),
        energy[:, None],
        gain,
        ridge[:, None],
        pair[:, None],
        eps,
        floor,
        SCALED,
        DIRECT,
        True,
        EXACT=False,
    )
    gl.store(d_beta + at, to_gain.to(d_beta.dtype.element_ty), mask=keep)
    if d_lam is not None:
        gl.store(d_lam + first * H + h + i * H, gl.sum(to_ridge, axis=1), mask=live)
    s_share.store(gl.sum(to_energy, axis=1))


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, previous, energies, states, d_states,
    d_q, d_k, d_v, d_beta, d_lam, d_key0, wild,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    SHIFT: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: all gradients but those of states; wild [chunks, H]: those that were not made."""
    TILE: gl.constexpr = WHOLE if V == 128 else HALF
    WIDE: gl.constexpr = ACC if V == 64 else BROAD
    LEFT: gl.constexpr = ACC_LEFT if V == 64 else BROAD_LEFT
    HALVES: gl.constexpr = K // 64
    h = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    kh = h // (H // KH)
    dtype: gl.constexpr = q.dtype.element_ty
    landed = new_barrier()
    s_out = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)  # gradients of outputs and values, then r and m
    # Columns of q (later, of the gradient of x), then of x.
    s_in = gl.allocate_shared_memory(dtype, [2 * HALVES, 64, 64], SHARED)
    s_end = gl.allocate_shared_memory(gl.float32, [V], LINE)
    s_decay = gl.allocate_shared_memory(gl.float16, [64, V], SHARED)
    i = rows(TILE)
    live = (i >= low) & (i < high)
    copy_rows(s_out.index(0), d_o, first, i, h, 0, live, H, V, TILE)
    copy_rows(s_out.index(1), v, first, i, h, 0, live, H, V, TILE)
    i = rows(HALF)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    copy_features(s_in, q, k, previous, source, i, live, live & (source >= low), first, kh, KH, K, SHIFT)
    starts = live & (source < low)
    line = h.to(gl.int64) * tokens + first

    i = rows(WIDE)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = gl.load(energies + line + i, mask=live, other=0.0)
    at = i[:, None] * (H * V) + gl.arange(0, V, gl.SliceLayout(0, WIDE))[None, :]
    base = (first * H + h) * V
    gain = gl.load(beta + base + at, mask=pair[:, None], other=0.0).to(gl.float32)
    eta, log_decay = column_steps(
        energy[:, None], gain, ridge[:, None], pair[:, None], eps, floor, SCALED, DIRECT, False
    )
    passed = log_decay.to(gl.float16)
    s_decay.store(passed)
    inside = gl.sum(passed.to(gl.float32), axis=0)
    is_small = gl.min(gl.min(log_decay, axis=1), axis=0) < LEAST_CARRY
    is_lost = is_small | is_wild(inside, dtype)
    gl.store(wild + chunk.to(gl.int64) * H + h, is_lost.to(gl.int8))
    s_end.store(gl.convert_layout(gl.exp2(inside), FLAT))
    arrive()
    if is_lost:
        return
    g = warpgroup_mma(_ones(0, gl.float16, 64, LEFT), s_decay, gl.zeros([64, V], gl.float32, WIDE), use_acc=False,
                      is_async=True)  # fmt: skip
    g = warpgroup_mma_wait(0, deps=(g,))
    s_decay._keep_alive()
    s_out.index(0).store((s_out.index(0).load(WIDE).to(gl.float32) * gl.exp2(g)).to(dtype))
    back = gl.exp2(-gl.maximum(g, TAME - 2))
    gl.store(d_v + base + at, back.to(dtype), mask=live[:, None])
    s_out.index(1).store((eta * s_out.index(1).load(WIDE).to(gl.float32) * back).to(dtype))
    if key0 is not None:
        put_first_key(s_in, key0, n.to(gl.int64) * KH + kh, starts, K)

    s_states = gl.allocate_shared_memory(dtype, [2, 64, V], SHARED)  # 64 rows of a state, and of its gradient
    s_scores = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    state_row = (chunk * H + h) * K
    copy_states(s_states, states, d_states, state_row, landed)
    once = gl.minimum(tokens, 1)
    for _ in range(once):
        p = score(s_in, 0, HALVES)
        d_p = product(s_out.index(nil()), s_out.index(nil() + 1).permute((1, 0)))
        p, d_p = warpgroup_mma_wait(0, deps=(p, d_p))
        s_scores.index(0).store(gl.where(apart() >= 0, p, 0.0).to(dtype))
        s_scores.index(1).store(gl.where(apart() >= 0, d_p, 0.0).to(dtype))
    reading = gl.zeros([64, V], gl.float32, WIDE)
    d_m = gl.zeros([64, V], gl.float32, WIDE)
    through = gl.sum(gl.reshape(gl.zeros([64, V], gl.float32, TILE), [4, 16, V]), axis=0)
    for part in gl.static_range(HALVES):
        for _ in range(once):
            mbarrier.wait(landed, part)
            reading, d_m, through = _through_states(
                s_states, s_out, s_in, s_scores, s_end, reading, d_m, through, d_q, first, h, part, high,
                states, d_states, state_row, landed, H, K, V, TILE,
            )  # fmt: skip
    gl.thread_barrier()
    # What crosses a token from before the chunk, or to behind it: nothing of it cancels, and 8 bits are enough.
    s_one = s_states.index(1)._reinterpret(gl.bfloat16, [64, V], SHARED)
    s_one.store((s_out.index(1).load(WIDE).to(gl.float32) * d_m).to(gl.bfloat16))
    s_few = s_states.index(0)._reinterpret(gl.bfloat16, [16, V], SHARED)
    s_few.store(through.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    reading = warpgroup_mma(s_scores.index(nil()), s_out.index(nil() + 1), reading, is_async=True)
    reading = warpgroup_mma_wait(0, deps=(reading,))
    reading *= s_out.index(nil()).load(WIDE).to(gl.float32)
    for _ in range(once):
        d_inner = warpgroup_mma(s_scores.index(nil()).permute((1, 0)), s_out.index(nil()),
                                gl.zeros([64, V], gl.float32, WIDE), use_acc=False, is_async=True)  # fmt: skip
        d_inner = warpgroup_mma_wait(0, deps=(d_inner,))
        reading -= s_out.index(nil() + 1).load(WIDE).to(gl.float32) * d_inner
        d_m += d_inner
    gl.thread_barrier()
    d_log = _suffix_sums(
        s_scores._reinterpret(gl.bfloat16, [64, V], SHARED),
        s_out.index(0)._reinterpret(gl.bfloat16, [64, V], SHARED),
        s_out.index(1)._reinterpret(gl.bfloat16, [64, V], SHARED),
        reading, gl.zeros([64, V], gl.float32, WIDE), LEFT,
    )  # fmt: skip
    d_log = warpgroup_mma(_ones(1, gl.bfloat16, 64, LEFT), s_one, d_log, is_async=True)
    d_log = warpgroup_mma(_ones(3, gl.bfloat16, 16, LEFT), s_few, d_log, is_async=True)
    d_log = warpgroup_mma_wait(0, deps=(d_log,))
    # From here on all tiles but those of q and x are done with, and what follows lies in their memory.
    s_states._keep_alive()
    s_out._keep_alive()
    s_scores._keep_alive()
    gl.thread_barrier()
    s_m = gl.allocate_shared_memory(gl.float32, [4, 16, V], STRIPS)
    s_log = gl.allocate_shared_memory(gl.float32, [4, 16, V], STRIPS)
    s_share = gl.allocate_shared_memory(gl.float32, [4, 16], LINE)
    s_m._reinterpret(gl.float32, [64, V], STRIPS).store(d_m)
    s_log._reinterpret(gl.float32, [64, V], STRIPS).store(d_log)
    gl.thread_barrier()
    for strip in range(4):
        _of_steps(
            s_m.index(strip), s_log.index(strip), s_share.index(strip), v, beta, lam, d_v, d_beta, d_lam, energies,
            has_key, unmasked, previous, first, strip * 16, low, high, n, h, line, eps, floor,
            H, V, SHIFT, SCALED, DIRECT,
        )  # fmt: skip
    gl.thread_barrier()
    share = s_share._reinterpret(gl.float32, [64], LINE).load(gl.SliceLayout(1, ACC))
    i = rows(HALF)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    for part in gl.static_range(HALVES):
        d_x = s_in.index(part).load(ACC).to(gl.float32)
        if not DIRECT or SCALED:
            d_x += 2 * share[:, None] * s_in.index(HALVES + part).load(ACC).to(gl.float32)
        store_keys(d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, part * 64, H, K, SHIFT)
    landed._keep_alive()
