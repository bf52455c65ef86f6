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

Two programs share a multiprocessor, so that one computes while the other waits for memory. At width 128 that leaves
room for all tiles of tokens, but of a state and its gradient only for 64 value columns, and none for scores. Hence
columns come 64 at a time, the states twice: once for dl, and once for dQ and dX, to which all columns add. Scores and
their gradients are left operands, from the registers where they were made; what would need them transposed makes the
transposed product. Sums over tokens take their pieces from where the states were.

Traps: dU waits in the memory of d_v, where `backward_state` left it. l is rounded to 16 bits, and its sums are sums of
that. Sums over tokens are products with matrices of ones, and the one whose terms cancel takes them in three pieces of
8 bits; it is made of the tokens behind t, and t itself is in `own`. With reads before writes r has 2^h, P has j < i,
and reads count for i > t. Two programs leave 28 KiB of the first level cache, so that spills come from the second one:
places and numbers of columns are made where they are used (`nil`), and few products are under way at a time.
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
from fastweight.kernels.hopper_parts import (
    ACC,
    BROAD,
    FLAT,
    HALF,
    LEFT,
    LINE,
    SHARED,
    WHOLE,
    arrive,
    copy_rows,
    new_barrier,
    nil,
    rows,
)
from fastweight.kernels.hopper_scaled_parts import reciprocal
from fastweight.kernels.tiles import chunk_span, has_pair, source_rows

LEAST = gl.constexpr(-62.0)  # below all g of chunks that are done here


@gluon.jit
def _columns(L: gl.constexpr):
    """0 .. 63 along the columns of layout L, unknown to be so: else a register for each lived through the loop."""
    return gl.arange(0, 64, gl.SliceLayout(0, L)) + nil()


@gluon.jit
def _ones(KIND: gl.constexpr, dtype: gl.constexpr, L: gl.constexpr):
    """[64, 64]: 1 where the column is up to the row (KIND 0), before it (1), or behind it (2)."""
    i = rows(L)[:, None]
    j = _columns(L)[None, :]
    if KIND == 0:
        is_one = j <= i
    elif KIND == 1:
        is_one = j < i
    else:
        is_one = j > i
    return gl.where(is_one, 1.0, 0.0).to(dtype)


@gluon.jit
def _first_piece(numbers):
    """The first 8 bits of float32 numbers, cut off, which is a bfloat16 as it stands."""
    return (numbers.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _later(L: gl.constexpr):
    """Row minus column of [64, 64]."""
    return rows(L)[:, None] - _columns(L)[None, :]


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
    carry = 1 - gain * (step * ridge)[:, None]
    d_carry = gl.where(carry > floor, d_log * reciprocal(gl.maximum(carry, floor)), 0.0)
    d_gain = (d_eta - d_carry * ridge[:, None]) * step[:, None]
    d_ridge = -step * gl.sum(d_carry * gain, axis=1)
    d_energy = gl.zeros_like(d_ridge)
    if not DIRECT:
        d_energy = -step * gl.sum(d_gain * gain, axis=1)
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
def _copy_states(s_states, states, d_states, row, start, landed):
    """Begins to copy 64 value columns, from `start` on, of a chunk's state and of its gradient."""
    mbarrier.expect(landed, 2 * states.block_type.nbytes)
    tma.async_copy_global_to_shared(states, [row, start], landed, s_states.index(0))
    tma.async_copy_global_to_shared(d_states, [row, start], landed, s_states.index(1))


@gluon.jit
def _over_columns(s_a, s_b, PARTS: gl.constexpr):
    """Begins a b^T, of all value columns."""
    found = _fresh(s_a.index(nil()), s_b.index(nil()).permute((1, 0)), ACC)
    if PARTS == 2:
        found = warpgroup_mma(s_a.index(nil() + 1), s_b.index(nil() + 1).permute((1, 0)), found, is_async=True)
    return found


@gluon.jit
def _low(tile, dtype: gl.constexpr):
    """An accumulator [64, 64] as the left operand of a product, in 16 bits."""
    return gl.convert_layout(tile.to(dtype), LEFT)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, d_o, beta, lam, key0, has_key, unmasked, previous, energies, residual, states, d_states,
    kept, wild, d_q, d_k, d_v, d_beta, d_lam, d_key0,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr,
    SHIFT: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One chunk of one head: all gradients but those of states; kept, wild: as `backward_state` left them."""
    PARTS: gl.constexpr = D // 64
    WIDE: gl.constexpr = ACC if D == 64 else BROAD
    LEFT_WIDE: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2)
    TILE: gl.constexpr = HALF if D == 64 else WHOLE
    along: gl.constexpr = gl.SliceLayout(0, ACC)
    h = gl.program_id(0) % H
    chunk = gl.program_id(0) // H
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64)
    if n < 0:
        return
    at_chunk = chunk.to(gl.int64) * H + h
    kh = h // (H // KH)
    dtype: gl.constexpr = q.dtype.element_ty
    landed = new_barrier()
    s_q = gl.allocate_shared_memory(dtype, [1, 64, D], SHARED)
    s_x = gl.allocate_shared_memory(dtype, [1, 64, D], SHARED)
    s_r = gl.allocate_shared_memory(dtype, [PARTS, 64, 64], SHARED)
    s_w = gl.allocate_shared_memory(dtype, [PARTS, 64, 64], SHARED)
    s_m = gl.allocate_shared_memory(dtype, [PARTS, 64, 64], SHARED)
    s_states = gl.allocate_shared_memory(dtype, [2, D, 64], SHARED)
    s_kept = gl.allocate_shared_memory(gl.float32, [PARTS, 64], LINE)
    s_through = gl.allocate_shared_memory(gl.float32, [64], LINE)
    if PARTS == 2:
        s_terms = s_states._reinterpret(gl.bfloat16, [4, 64, 64], SHARED)
    else:
        s_terms = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], SHARED)

    j = rows(TILE)
    origin, there = source_rows(previous, first, j, low, high, SHIFT)
    keyed = there & (origin >= low)
    starts = there & (origin < low)
    copy_rows(s_q.index(0), q, first, j, kh, 0, there, KH, D, TILE)
    if previous is None:
        copy_rows(s_x.index(0), k, first - SHIFT, j, kh, 0, keyed, KH, D, TILE)
    else:
        copy_rows(s_x.index(0), k, first, origin.to(gl.int64), kh, 0, keyed, KH, D, TILE)
    j = rows(HALF)
    there = (j >= low) & (j < high)
    for part in gl.static_range(PARTS):
        copy_rows(s_m.index(part), residual, first, j, h, part * 64, there, H, D, HALF)
        copy_rows(s_r.index(part), d_o, first, j, h, part * 64, there, H, D, HALF)
        copy_rows(s_w.index(part), d_v, first, j, h, part * 64, there, H, D, HALF)
    gl.thread_barrier()
    row = (chunk * H + h) * D
    _copy_states(s_states, states, d_states, row, 0, landed)
    i = rows(ACC)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    base = (first * H + h) * D
    at = base + i[:, None] * (H * D) + gl.arange(0, 64, along)[None, :]
    gain = gl.load(beta + at, mask=pair[:, None], other=0.0).to(gl.float32)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = gl.load(energies + kh.to(gl.int64) * tokens + first + i, mask=live, other=0.0)
    carried = gl.load(kept + at_chunk * D + gl.arange(0, D, FLAT))
    is_wild = gl.load(wild + at_chunk) != 0
    step, shrinks, _d, _a, _c, _o, _w = step_sizes(
        energy, gl.where(pair, 1.0, 0.0), ridge, pair, eps, floor, SCALED, DIRECT
    )
    arrive()
    if is_wild:
        mbarrier.wait(landed, 0)
        return
    if key0 is not None:
        begin = gl.load(key0 + (n.to(gl.int64) * KH + kh) * D + gl.arange(0, D, gl.SliceLayout(0, TILE))).to(dtype)
        s_x.index(0).store(gl.where(starts[:, None], begin[None, :], s_x.index(0).load(TILE)))
        _shown()
    parts = PARTS * gl.minimum(tokens, 1)  # unknown to the compiler, which would write out all of them
    for part in range(parts):
        eta = gain * step[:, None]
        passed = _logarithm(gl.maximum(1 - gain * (step * shrinks)[:, None], floor)).to(gl.float16)
        if PARTS == 2:
            at = base + 64 + (rows(ACC)[:, None] * (H * D) + gl.arange(0, 64, along)[None, :])
            gain = gl.load(beta + at, mask=pair[:, None] & (part == 0), other=0.0).to(gl.float32)
        left = s_m.index(part).load(ACC)
        d_read = s_r.index(part).load(ACC)
        d_write = s_w.index(part).load(ACC)
        s_passed = s_m.index(part)._reinterpret(gl.float16, [64, 64], SHARED)
        s_passed.store(passed)
        _shown()
        g = _fresh(_ones(0, gl.float16, LEFT), s_passed, ACC)
        g = warpgroup_mma_wait(0, deps=(g,))
        gl.thread_barrier()
        before = _power(g - passed.to(gl.float32))
        reading = before if BEFORE else _power(g)
        s_r.index(part).store((d_read.to(gl.float32) * reading).to(dtype))
        s_w.index(part).store((-before * (eta * d_write.to(gl.float32))).to(dtype))
        back = _power(-gl.maximum(g, LEAST))
        s_m.index(part).store((eta * left.to(gl.float32) * back).to(dtype))
    s_kept._reinterpret(gl.float32, [D], LINE).store(carried)
    _shown()
    share = gl.zeros([64], gl.float32, gl.SliceLayout(1, ACC))
    of_lam = share
    for part in range(parts):
        # Scores and their transposes are left operands, made anew for every part of the columns.
        mbarrier.wait(landed, part)
        later = _later(ACC)
        gram = _fresh(s_x.index(nil()), s_x.index(nil()).permute((1, 0)), ACC)
        score = _fresh(s_x.index(nil()), s_q.index(nil()).permute((1, 0)), ACC)
        both = _fresh(s_states.index(nil()).permute((1, 0)), s_states.index(nil() + 1), ACC)
        gram, score, both = warpgroup_mma_wait(0, deps=(gram, score, both))
        s_through.store(gl.sum(gl.where(later == 0, both, 0.0), axis=1))
        score = gl.where(later < 0 if BEFORE else later <= 0, score, 0.0)
        inner = _fresh(_low(score, dtype), s_r.index(part), ACC)
        inner = warpgroup_mma(_low(gl.where(later < 0, gram, 0.0), dtype), s_w.index(part), inner, is_async=True)
        misses = _fresh(_low(gl.where(later > 0, gram, 0.0), dtype), s_m.index(part), ACC)
        score = _fresh(s_q.index(nil()), s_x.index(nil()).permute((1, 0)), ACC)
        misses = warpgroup_mma(s_x.index(nil()), s_states.index(nil()), misses, is_async=True)
        inner, misses, score = warpgroup_mma_wait(0, deps=(inner, misses, score))
        score = gl.where(later > 0 if BEFORE else later >= 0, score, 0.0)
        reads = _fresh(_low(score, dtype), s_m.index(part), ACC)
        reads = warpgroup_mma(s_q.index(nil()), s_states.index(nil()), reads, is_async=True)
        behind = _fresh(s_x.index(nil()), s_states.index(nil() + 1), ACC)
        own = misses * s_w.index(part).load(ACC).to(gl.float32)
        inner *= s_m.index(part).load(ACC).to(gl.float32)
        reads = warpgroup_mma_wait(1, deps=(reads,))
        terms = reads * s_r.index(part).load(ACC).to(gl.float32)
        if BEFORE:
            own += terms
            terms = own - inner
        else:
            terms += own - inner
        d_log = terms - own  # what of t itself does not cross it
        behind = warpgroup_mma_wait(0, deps=(behind,))
        fade = s_kept.index(part).load(along)
        d_log += (s_through.load(along) * fade)[None, :]
        # What crosses a token to behind the chunk: nothing of it cancels, and 8 bits are enough for bfloat16.
        behind *= s_m.index(part).load(ACC).to(gl.float32) * fade[None, :]
        rest = behind
        if dtype == gl.float16:
            behind = _first_piece(behind)
        gl.thread_barrier()
        s_terms.index(0).store(behind.to(gl.bfloat16))
        piece = _first_piece(terms)
        s_terms.index(1).store(piece.to(gl.bfloat16))
        terms -= piece
        piece = _first_piece(terms)
        s_terms.index(2).store(piece.to(gl.bfloat16))
        s_terms.index(3).store((terms - piece).to(gl.bfloat16))
        # Needed behind the sums, and on their way meanwhile.
        i = rows(ACC)
        source, live = source_rows(previous, first, i, low, high, SHIFT)
        pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
        at = base + part * 64 + (i[:, None] * (H * D) + gl.arange(0, 64, along)[None, :])
        gain = gl.load(beta + at, mask=pair[:, None], other=0.0).to(gl.float32)
        d_write = gl.load(d_v + at, mask=live[:, None], other=0.0).to(gl.float32)
        d_eta = gl.load(residual + at, mask=live[:, None], other=0.0).to(gl.float32) * d_write
        _shown()
        earlier = _ones(1, gl.bfloat16, LEFT)
        d_log = warpgroup_mma(earlier, s_terms.index(nil()), d_log, is_async=True)
        if dtype == gl.float16:
            d_log = warpgroup_mma_wait(0, deps=(d_log,))
            gl.thread_barrier()
            s_terms.index(0).store((rest - behind).to(gl.bfloat16))
            _shown()
            d_log = warpgroup_mma(earlier, s_terms.index(nil()), d_log, is_async=True)
        behind_it = _ones(2, gl.bfloat16, LEFT)
        for piece_at in gl.static_range(1, 4):
            d_log = warpgroup_mma(behind_it, s_terms.index(nil() + piece_at), d_log, is_async=True)
        gl.store(d_v + at, (gain * step[:, None] * d_write).to(d_v.dtype.element_ty), mask=live[:, None])
        d_log = warpgroup_mma_wait(0, deps=(d_log,))
        if PARTS == 2:
            _shown()
            _copy_states(s_states, states, d_states, row, (1 - part) * 64, landed)
        to_gain, to_lam, to_energy = _step_gradient(
            d_eta, d_log, energy, gain, ridge, step, shrinks, floor, SCALED, DIRECT
        )
        gl.store(d_beta + at, to_gain.to(d_beta.dtype.element_ty), mask=live[:, None])
        of_lam += to_lam
        share += to_energy
    if d_lam is not None:
        gl.store(d_lam + first * H + h + i * H, of_lam, mask=live)

    # The same of their gradients.
    later = _later(ACC)
    straight = _over_columns(s_w, s_m, PARTS)
    turned = _over_columns(s_m, s_w, PARTS)
    straight, turned = warpgroup_mma_wait(0, deps=(straight, turned))
    scores = _low(gl.where(later > 0, straight, gl.where(later < 0, turned, 0.0)), dtype)
    of_x = _fresh(gl.convert_layout(scores, LEFT_WIDE), s_x.index(nil()), WIDE)
    turned = _over_columns(s_m, s_r, PARTS)
    of_x, turned = warpgroup_mma_wait(0, deps=(of_x, turned))
    scores = _low(gl.where(later < 0 if BEFORE else later <= 0, turned, 0.0), dtype)
    of_x = warpgroup_mma(gl.convert_layout(scores, LEFT_WIDE), s_q.index(nil()), of_x, is_async=True)
    straight = _over_columns(s_r, s_m, PARTS)
    of_x, straight = warpgroup_mma_wait(0, deps=(of_x, straight))
    scores = _low(gl.where(later > 0 if BEFORE else later >= 0, straight, 0.0), dtype)
    of_q = _fresh(gl.convert_layout(scores, LEFT_WIDE), s_x.index(nil()), WIDE)
    of_q, of_x = warpgroup_mma_wait(0, deps=(of_q, of_x))
    for part in gl.static_range(PARTS):
        fade = s_kept.index(part).load(along)
        end = _low(s_m.index(part).load(ACC).to(gl.float32) * fade[None, :], dtype)
        if PARTS == 2:
            mbarrier.wait(landed, part)
        state = s_states.index(nil()).permute((1, 0))
        of_q = warpgroup_mma(s_r.index(part), state, of_q, is_async=True)
        of_x = warpgroup_mma(s_w.index(part), state, of_x, is_async=True)
        of_x = warpgroup_mma(
            gl.convert_layout(end, LEFT_WIDE), s_states.index(nil() + 1).permute((1, 0)), of_x, is_async=True
        )
        of_q, of_x = warpgroup_mma_wait(0, deps=(of_q, of_x))
        if part + 1 < PARTS:
            _shown()
            _copy_states(s_states, states, d_states, row, 64, landed)
    gl.thread_barrier()
    s_of_q = s_r._reinterpret(dtype, [64, D], SHARED)
    s_of_x = s_w._reinterpret(dtype, [64, D], SHARED)
    s_of_q.store(of_q.to(dtype))
    if not DIRECT or SCALED:
        more = gl.convert_layout(share, gl.SliceLayout(1, WIDE))
        of_x += 2 * more[:, None] * s_x.index(0).load(WIDE).to(gl.float32)
    s_of_x.store(of_x.to(dtype))
    gl.thread_barrier()
    # Until here the products read these, and nothing may be lent their memory.
    s_m._keep_alive()
    s_states._keep_alive()
    s_terms._keep_alive()
    i = rows(TILE)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    keep = pair & (source >= low)
    _store_rows(d_q, s_of_q.load(TILE), first, i, h, live, H, D, TILE)
    tile = s_of_x.load(TILE)
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
