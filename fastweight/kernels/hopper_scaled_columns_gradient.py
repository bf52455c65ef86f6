"""Regression with a gain per value column on Hopper: the gradients that are parallel over chunks, by matrix products.

For 16-bit calls with 64 or 128 key columns and as many value columns. With l the log2 decay of each token and column, g
its sums up to and with each token of a chunk, h = g - l those before it, u = eta .* residual the writes, dU their
gradients and dY = eta .* dU those of the values, every column's own decay goes into operands

    m = 2^-g .* u      r = 2^g .* dO      w = -2^h .* dY      n = 2^(g_C) .* m

and what is left is shared by all columns. With P = [j <= i] Q X^T and G = [j < i] X X^T,

    dP = [j <= i] r m^T     dQ = r S_0^T + dP X
    dG = [j < i] w m^T      dX = w S_0^T + n dS^T + dP^T Q + (dG + dG^T) X
    dl_t = 2^(g_C) .* sum_k S_0 .* dS + sum_(j < t) n .* (X dS) + sum_(i > t) w .* (X S_0 + G m)
           + sum_(i >= t) (r .* (Q S_0 + P m) - m .* (P^T r + G^T w))

What pairs on one side of t add to the last two sums cancels to the digits of float32, because all terms multiply the
same rounded r, w and m. That is enough where no carry is small, because dl is divided by it. For chunks that forget
much (solve_columns_gradient.py says which) `backward_chunk` follows.

A program has all its tiles in shared memory at once, which at width 128 leaves no room for a second one; with 8 warps a
thread has room for four accumulators. Products of the states go on while threads scale the operands of others, and what
steps and decays have of their token is made once a token. How copies, products and barriers go together, and their
traps, as in hopper_parts.py.

Traps: dU waits in the memory of d_v, where `backward_state` left it. l is rounded to 16 bits, and its sums are sums of
that. Sums over tokens are products with matrices of ones, and the one whose terms cancel takes them in three pieces of
8 bits; the sum over the tokens from t on is made of the ones before t, transposed, and of the token itself, which `own`
has. With reads before writes r has 2^h, P has j < i, and reads count for i > t.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: SIM102

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.gates import load_head, step_sizes
from fastweight.kernels.hopper_parts import LINE, SHARED, arrive, copy_rows, new_barrier, nil, rows
from fastweight.kernels.hopper_scaled_parts import reciprocal
from fastweight.kernels.tiles import chunk_span, has_pair, source_rows

LEAST = gl.constexpr(-62.0)  # below all g of chunks that are done here
# Accumulators of [64, 64] and [64, 128], and copies; 16 warps were slower than these 8.
SQUARE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16]))
WIDE_128 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 64, 16]))
TILE_128 = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
HALF = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))


@gluon.jit
def _ones(KIND: gl.constexpr, dtype: gl.constexpr, L: gl.constexpr):
    """[64, 64]: 1 where the column is up to the row (KIND 0), before it (1), or from it on (2)."""
    i = rows(L)[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    if KIND == 0:
        is_one = j <= i
    elif KIND == 1:
        is_one = j < i
    else:
        is_one = j >= i
    return gl.where(is_one, 1.0, 0.0).to(dtype)


@gluon.jit
def _first_piece(numbers):
    """The first 8 bits of float32 numbers, cut off, which is a bfloat16 as it stands."""
    return (numbers.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _later(L: gl.constexpr):
    """Row minus column of [64, 64]."""
    return rows(L)[:, None] - gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def _fresh(a, b, L: gl.constexpr):
    """Begins a b."""
    out: gl.constexpr = [64, b.shape[1]]
    return warpgroup_mma(a, b, gl.zeros(out, gl.float32, L), use_acc=False, is_async=True)


@gluon.jit
def _shown():
    """What threads wrote to shared memory, to the products of all warps."""
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _power(x):
    """2^x where that is a normal number."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _logarithm(x):
    """log2 of normal numbers."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _step_gradient(
    d_eta, d_log, energy, gain, lam, step, ridge, floor, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """What gates.step_gradient gives, summed over columns but for the gains; step: eta at gain 1, by which a token that
    writes nothing is known."""
    eta = gain * step[:, None]
    alpha = eta * ridge[:, None]
    slope = d_log * reciprocal(gl.maximum(1 - alpha, floor))
    d_alpha = gl.where(alpha < 1 - floor, -slope, 0.0)
    d_gain = (d_eta + d_alpha * ridge[:, None]) * step[:, None]
    d_ridge = gl.sum(d_alpha * eta, axis=1)
    d_energy = gl.zeros_like(d_ridge)
    if not DIRECT:
        d_energy = -gl.sum(d_gain * eta, axis=1)
        d_ridge += d_energy
    if SCALED:
        return d_gain, d_ridge * energy, d_energy + d_ridge * lam
    else:
        return d_gain, d_ridge, d_energy


@gluon.jit
def _store_rows(pointer, tile, first, i, h, keep, H: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """Writes [64, D] as rows of one head; i and keep lie along L."""
    at = i[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, L))[None, :]
    gl.store(pointer + (first * H + h) * D + at, tile.to(pointer.dtype.element_ty), mask=keep[:, None])


@gluon.jit
def _of_states(s_q, s_x, s_state, s_d_state, L: gl.constexpr):
    """Begins what the state answers to queries and keys, and its gradient to keys."""
    reads = _fresh(s_q, s_state.index(nil()), L)
    misses = _fresh(s_x, s_state.index(nil()), L)
    return reads, misses, _fresh(s_x, s_d_state.index(nil()), L)


@gluon.jit
def _of_keys(s_r, s_w, s_end, s_q, s_x, s_scores, s_state, s_d_state, L: gl.constexpr):
    """Begins the gradients of q and x."""
    of_q = _fresh(s_r, s_state.index(nil()).permute((1, 0)), L)
    of_q = warpgroup_mma(s_scores.index(nil()), s_x, of_q, is_async=True)
    of_x = _fresh(s_w, s_state.index(nil()).permute((1, 0)), L)
    of_x = warpgroup_mma(s_end, s_d_state.index(nil()).permute((1, 0)), of_x, is_async=True)
    of_x = warpgroup_mma(s_scores.index(nil()).permute((1, 0)), s_q, of_x, is_async=True)
    of_x = warpgroup_mma(s_scores.index(nil() + 1).permute((1, 0)), s_x, of_x, is_async=True)
    of_x = warpgroup_mma(s_scores.index(nil() + 1), s_x, of_x, is_async=True)
    return of_q, of_x


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, energies, residual, states, d_states,
    kept, wild, d_q, d_k, d_v, d_beta, d_lam, d_key0,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr,
    SHIFT: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: all gradients but those of states; kept, wild: as `backward_state` left them."""
    WIDE: gl.constexpr = SQUARE if D == 64 else WIDE_128
    TILE: gl.constexpr = HALF if D == 64 else TILE_128
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    FEW: gl.constexpr = 2048 // D  # rows among which each thread has every one that is so many further
    EARLY: gl.constexpr = D == 128  # products go on beside what threads do, for which width 64 lacks the registers
    along: gl.constexpr = gl.SliceLayout(0, WIDE)
    h = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    at_chunk = chunk.to(gl.int64) * H + h
    is_wild = gl.load(wild + at_chunk) != 0
    kh = h // (H // KH)
    dtype: gl.constexpr = q.dtype.element_ty
    landed = new_barrier()
    s_r = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_w = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_m = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_left = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_u = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_stage = gl.allocate_shared_memory(gl.bfloat16, [64, D], SHARED)
    s_q = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_x = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_scores = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    s_few = gl.allocate_shared_memory(gl.bfloat16, [2, FEW, D], SHARED)
    s_state = gl.allocate_shared_memory(dtype, [1, D, D], SHARED)
    s_d_state = gl.allocate_shared_memory(dtype, [1, D, D], SHARED)
    s_ones = gl.allocate_shared_memory(gl.bfloat16, [64, 64], SHARED, _ones(1, gl.bfloat16, HALF))
    s_kept = gl.allocate_shared_memory(gl.float32, [D], LINE, gl.load(kept + at_chunk * D + gl.arange(0, D, along)))

    i = rows(TILE)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    keyed = live & (source >= low)
    copy_rows(s_q, q, first, i, kh, 0, live, KH, D, TILE)
    if previous is None:
        copy_rows(s_x, k, first - SHIFT, i, kh, 0, keyed, KH, D, TILE)
    else:
        copy_rows(s_x, k, first, source.to(gl.int64), kh, 0, keyed, KH, D, TILE)
    copy_rows(s_r, d_o, first, i, h, 0, live, H, D, TILE)
    copy_rows(s_u, d_v, first, i, h, 0, live, H, D, TILE)
    copy_rows(s_left, residual, first, i, h, 0, live, H, D, TILE)
    starts = live & (source < low)
    gl.thread_barrier()
    mbarrier.expect(landed, states.block_type.nbytes + d_states.block_type.nbytes)
    row = (chunk * H + h) * D
    tma.async_copy_global_to_shared(states, [row, 0], landed, s_state.index(0))
    tma.async_copy_global_to_shared(d_states, [row, 0], landed, s_d_state.index(0))

    i = rows(WIDE)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = gl.load(energies + kh.to(gl.int64) * tokens + first + i, mask=live, other=0.0)
    at = i[:, None] * (H * D) + gl.arange(0, D, along)[None, :]
    base = (first * H + h) * D
    gain = gl.load(beta + base + at, mask=pair[:, None], other=0.0).to(gl.float32)
    step, shrinks, _d, _a, _c, _o, _w = step_sizes(
        energy, gl.where(pair, 1.0, 0.0), ridge, pair, eps, floor, SCALED, DIRECT
    )
    eta = gain * step[:, None]
    passed = _logarithm(gl.maximum(1 - gain * (step * shrinks)[:, None], floor)).to(gl.float16)
    s_passed = s_m._reinterpret(gl.float16, [64, D], SHARED)
    s_passed.store(passed)
    arrive()
    if is_wild:
        mbarrier.wait(landed, 0)
        return
    if key0 is not None:
        begin = gl.load(key0 + (n.to(gl.int64) * KH + kh) * D + gl.arange(0, D, gl.SliceLayout(0, TILE))).to(dtype)
        s_x.store(gl.where(starts[:, None], begin[None, :], s_x.load(TILE)))
        _shown()
    once = gl.minimum(tokens, 1)
    g = _fresh(_ones(0, gl.float16, LEFT), s_passed, WIDE)
    p = _fresh(s_q, s_x.permute((1, 0)), SQUARE)
    gram = _fresh(s_x, s_x.permute((1, 0)), SQUARE)
    g, p, gram = warpgroup_mma_wait(0, deps=(g, p, gram))
    gl.thread_barrier()
    mbarrier.wait(landed, 0)
    if EARLY:
        reads, misses, behind = _of_states(s_q, s_x, s_state, s_d_state, WIDE)
    later = _later(SQUARE)
    s_scores.index(0).store(gl.where(later > 0 if BEFORE else later >= 0, p, 0.0).to(dtype))
    s_scores.index(1).store(gl.where(later > 0, gram, 0.0).to(dtype))
    before = _power(g - passed.to(gl.float32))
    reading = before if BEFORE else _power(g)
    s_r.store((s_r.load(WIDE).to(gl.float32) * reading).to(dtype))
    d_y = eta * s_u.load(WIDE).to(gl.float32)
    s_w.store((-before * d_y).to(dtype))
    gl.store(d_v + base + at, d_y.to(d_v.dtype.element_ty), mask=live[:, None])
    back = _power(-gl.maximum(g, LEAST))
    s_m.store((eta * s_left.load(WIDE).to(gl.float32) * back).to(dtype))
    both = s_state.index(0).load(TILE).to(gl.float32) * s_d_state.index(0).load(TILE).to(gl.float32)
    few = gl.sum(gl.reshape(both, [D // FEW, FEW, D]), axis=0)
    few *= s_kept.load(gl.SliceLayout(0, few.type.layout))[None, :]
    if dtype == gl.float16:
        s_few.index(1).store((few - _first_piece(few)).to(gl.bfloat16))
        few = _first_piece(few)
    s_few.index(0).store(few.to(gl.bfloat16))
    _shown()

    if not EARLY:
        reads, misses, behind = _of_states(s_q, s_x, s_state, s_d_state, WIDE)
    reads = warpgroup_mma(s_scores.index(nil()), s_m, reads, is_async=True)
    misses = warpgroup_mma(s_scores.index(nil() + 1), s_m, misses, is_async=True)
    inner = _fresh(s_scores.index(nil()).permute((1, 0)), s_r, WIDE)
    inner = warpgroup_mma(s_scores.index(nil() + 1).permute((1, 0)), s_w, inner, is_async=True)
    reads, misses, inner, behind = warpgroup_mma_wait(0, deps=(reads, misses, inner, behind))
    gl.thread_barrier()
    m = s_m.load(WIDE).to(gl.float32)
    own = misses * s_w.load(WIDE).to(gl.float32)
    terms = reads * s_r.load(WIDE).to(gl.float32)
    if BEFORE:
        own += terms
        terms = own - inner * m
    else:
        terms += own - inner * m
    own -= terms
    # What crosses a token to behind the chunk: nothing of it cancels, and 8 bits are enough for bfloat16.
    s_other = s_scores._reinterpret(gl.bfloat16, [64, D], SHARED)
    behind *= m * s_kept.load(along)[None, :]
    rest = behind
    if dtype == gl.float16:
        behind = _first_piece(behind)
    s_other.store(behind.to(gl.bfloat16))
    piece = _first_piece(terms)
    s_stage.store(piece.to(gl.bfloat16))
    terms -= piece
    _shown()
    d_log = _fresh(s_ones, s_other, WIDE)
    d_log = warpgroup_mma(s_ones.permute((1, 0)), s_stage, d_log, is_async=True)
    d_log = warpgroup_mma(gl.full([64, FEW], 1.0, gl.bfloat16, LEFT), s_few.index(0), d_log, is_async=True)
    if dtype == gl.float16:
        d_log = warpgroup_mma(gl.full([64, FEW], 1.0, gl.bfloat16, LEFT), s_few.index(1), d_log, is_async=True)
    d_log = warpgroup_mma_wait(0, deps=(d_log,))
    gl.thread_barrier()
    piece = _first_piece(terms)
    s_other.store(piece.to(gl.bfloat16))
    s_stage.store((terms - piece).to(gl.bfloat16))
    _shown()
    d_log = warpgroup_mma(s_ones.permute((1, 0)), s_other, d_log, is_async=True)
    d_log = warpgroup_mma(s_ones.permute((1, 0)), s_stage, d_log, is_async=True)
    d_p = _fresh(s_r, s_m.permute((1, 0)), SQUARE)
    d_gram = _fresh(s_w, s_m.permute((1, 0)), SQUARE)
    d_log, d_p, d_gram = warpgroup_mma_wait(0, deps=(d_log, d_p, d_gram))
    if dtype == gl.float16:
        gl.thread_barrier()
        s_other.store((rest - behind).to(gl.bfloat16))
        _shown()
        d_log = warpgroup_mma(s_ones, s_other, d_log, is_async=True)
        d_log = warpgroup_mma_wait(0, deps=(d_log,))
    d_log -= own
    gl.thread_barrier()
    later = _later(SQUARE)
    s_scores.index(0).store(gl.where(later > 0 if BEFORE else later >= 0, d_p, 0.0).to(dtype))
    s_scores.index(1).store(gl.where(later > 0, d_gram, 0.0).to(dtype))
    s_end = s_stage._reinterpret(dtype, [64, D], SHARED)
    s_end.store((s_m.load(WIDE).to(gl.float32) * s_kept.load(along)[None, :]).to(dtype))
    _shown()
    if EARLY:
        of_q, of_x = _of_keys(s_r, s_w, s_end, s_q, s_x, s_scores, s_state, s_d_state, WIDE)

    share = gl.zeros([64], gl.float32, gl.SliceLayout(1, WIDE))
    for _ in range(once):
        i = rows(WIDE)
        source, live = source_rows(previous, first, i, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
        at = i[:, None] * (H * D) + gl.arange(0, D, along)[None, :]
        gain = gl.load(beta + base + at, mask=pair[:, None], other=0.0).to(gl.float32)
        d_eta = s_left.load(WIDE).to(gl.float32) * s_u.load(WIDE).to(gl.float32)
        to_gain, to_ridge, to_energy = _step_gradient(
            d_eta, d_log, energy, gain, ridge, step, shrinks, floor, SCALED, DIRECT
        )
        gl.store(d_beta + base + at, to_gain.to(d_beta.dtype.element_ty), mask=live[:, None])
        if d_lam is not None:
            gl.store(d_lam + first * H + h + i * H, to_ridge, mask=live)
        share += to_energy

    if not EARLY:
        of_q, of_x = _of_keys(s_r, s_w, s_end, s_q, s_x, s_scores, s_state, s_d_state, WIDE)
    of_q, of_x = warpgroup_mma_wait(0, deps=(of_q, of_x))
    gl.thread_barrier()
    s_r.store(of_q.to(dtype))
    if not DIRECT or SCALED:
        of_x += 2 * share[:, None] * s_x.load(WIDE).to(gl.float32)
    s_w.store(of_x.to(dtype))
    gl.thread_barrier()
    # Until here the products read these, and nothing may be lent their memory.
    s_stage._keep_alive()
    s_scores._keep_alive()
    s_state._keep_alive()
    s_d_state._keep_alive()
    i = rows(TILE)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    keep = pair & (source >= low)
    _store_rows(d_q, s_r.load(TILE), first, i, h, live, H, D, TILE)
    tile = s_w.load(TILE)
    if previous is None:
        _store_rows(d_k, tile, first - SHIFT, i, h, keep, H, D, TILE)
        if SHIFT:  # a sequence's last token is paired with none
            if high <= 64:
                _store_rows(d_k, gl.zeros_like(tile), first, i, h, i == high - 1, H, D, TILE)
    else:
        _store_rows(d_k, tile, first, source.to(gl.int64), h, keep, H, D, TILE)
    if d_key0 is not None:
        _store_rows(d_key0, tile, n.to(gl.int64), i * 0, h, pair & (source < low), H, D, TILE)
    landed._keep_alive()
