"""Regression over a window on Hopper: what `sweep` of windows_gradient.py computes where w, z, dz and df are given.

For what the walks of hopper_windows.py keep, in bfloat16, in blocks of four parts. A program takes one block of one
head. Everything is by slot, row 16 b + u: pair u of part b, and token u of part b where rows are tokens. What two slots
or a token and a slot give each other fades with the decays between their parts, and those are few: tables [64, 4], a
row's with the four parts, are all that is made of them.

Traps: how copies, products and barriers go together, and why addresses are made anew, as in hopper_parts.py. At width
128 two programs fill a multiprocessor's shared memory: the gradient of the state follows the state in its place, and w,
y and dz follow what is done with.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import ACC, BROAD, HALF, SHARED, WHOLE, arrive, copy_rows, product, rows
from fastweight.kernels.hopper_windows_finish import FOLDS, copy_lines
from fastweight.kernels.tiles import chunk_span, fade


@gluon.jit
def _from_state(left, s_a, s_b, D: gl.constexpr):
    """Begins the product of rows with a state, of 64 key columns after 64: [64, D]."""
    layout: gl.constexpr = ACC if D == 64 else BROAD
    made = warpgroup_mma(left.index(0), s_a, gl.zeros([64, D], gl.float32, layout), use_acc=False, is_async=True)
    if D == 128:
        made = warpgroup_mma(left.index(1), s_b, made, is_async=True)
    return made


@gluon.jit
def _pairwise(left, right, D: gl.constexpr):
    """Begins the products of rows of keys or queries with those of keys: [64, 64]."""
    made = product(left.index(0), right.index(0).permute((1, 0)))
    if D == 128:
        made = warpgroup_mma(left.index(1), right.index(1).permute((1, 0)), made, is_async=True)
    return made


@gluon.jit
def _row_sums(tile, shared, D: gl.constexpr):
    """Of each row, the sum of its products with that in shared memory."""
    layout: gl.constexpr = ACC if D == 64 else BROAD
    return gl.convert_layout(gl.sum(tile * shared.load(layout).to(gl.float32), axis=1), gl.SliceLayout(1, ACC))


@gluon.jit
def _in_place(stage, pointer, D: gl.constexpr):
    """Puts 64 rows of D numbers in the place of those in shared memory; the sum of their products."""
    layout: gl.constexpr = HALF if D == 64 else WHOLE
    at = rows(layout)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    new = gl.load(pointer + at)
    both = gl.sum(stage.load(layout).to(gl.float32) * new.to(gl.float32), axis=1)
    stage.store(new)
    return gl.sum(both, axis=0)


@gluon.jit
def _beside(table, j, AFTER: gl.constexpr):
    """Of each of four columns, the sum of those before it, or with AFTER behind it."""
    total = gl.zeros_like(table)
    for m in gl.static_range(4):
        column = gl.sum(gl.where(j[None, :] == m, table, 0.0), axis=1)[:, None]
        total += gl.where(j[None, :] < m if AFTER else j[None, :] > m, column, 0.0)
    return total


@gluon.jit
def _own(tile):
    """Of [64, 64], each row's 16 columns of its own part."""
    apart = gl.reshape(tile, [64, 4, 16])
    layout: gl.constexpr = apart.type.layout
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    part = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    return gl.sum(gl.where(row // 16 == part, apart, 0.0), axis=1)


@gluon.jit
def _keep_products(met, with_w, with_y, number, KIND: gl.constexpr):
    """Writes 16 rows of every part's M: products with w, and with f = y - w."""
    by_w = _own(with_w)
    by_f = _own(with_y) - by_w
    layout: gl.constexpr = by_w.type.layout
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    c = gl.arange(0, 16, gl.SliceLayout(0, layout))
    at = met + number * (FOLDS * 1024) + ((r // 16 * 1024 + KIND * 512 + r % 16 * 32)[:, None] + c[None, :])
    gl.store(at, by_w)
    gl.store(at + 16, by_f)


@gluon.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def between(
    q, k, v, d_o, decay, states, d_states, missed, wrote, lead, df, met, d_gram, d_reads, read, through,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr,
    SHIFT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """One block of one head: M of parts; dG, d(Q X^T) between parts; dO . reads; what passes parts."""
    TOKENS: gl.constexpr = FOLDS * PART
    HALVES: gl.constexpr = D // 64
    WIDE: gl.constexpr = HALF if D == 64 else WHOLE
    h = gl.program_id(0) % H
    here = gl.program_id(0) // H
    block = here + base
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    number = here.to(gl.int64) * H + h
    kept = (block.to(gl.int64) * H + h) * (D * D)
    shelf = number * (64 * D)
    dtype: gl.constexpr = q.dtype.element_ty
    s_x = gl.allocate_shared_memory(dtype, [HALVES, 64, 64], SHARED)
    s_q = gl.allocate_shared_memory(dtype, [HALVES, 64, 64], SHARED)
    s_do = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_z = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_f = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_a = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_b = s_a
    if D == 128:
        s_b = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_y = s_q._reinterpret(dtype, [64, D], SHARED)

    r = rows(HALF)
    t = r // 16 * PART + r % 16
    i = t - (WINDOW - 1)
    for half in gl.static_range(HALVES):
        copy_rows(s_x.index(half), k, first - SHIFT, i, kh, half * 64, (i >= low + SHIFT) & (i < high), KH, D, HALF)
        copy_rows(s_q.index(half), q, first, t, kh, half * 64, (r % 16 < PART) & (t < high), KH, D, HALF)
    r = rows(WIDE)
    t = r // 16 * PART + r % 16
    copy_lines(s_a, states + kept, r, r >= 0, D, WIDE)
    if D == 128:
        copy_lines(s_b, states + kept + 64 * D, r, r >= 0, D, WIDE)
    copy_rows(s_do, d_o, first, t, h, 0, (r % 16 < PART) & (t < high), H, D, WIDE)
    copy_lines(s_f, df + shelf, r, r >= 0, D, WIDE)
    copy_lines(s_z, wrote + shelf, r, r >= 0, D, WIDE)
    line = decay + h.to(gl.int64) * tokens + first
    r = rows(ACC)
    part = r // 16
    own = (r % 16 < PART) & (part * PART + r % 16 < high)
    last = part * PART + gl.minimum(r % 16, PART - 1) - (1 if BEFORE else 0)
    g_read = gl.load(line + gl.minimum(last, high - 1), mask=last >= 0, other=0.0)
    g_begin = gl.load(line + gl.minimum(part * PART, high) - 1, mask=part > 0, other=0.0)
    g_end = gl.load(line + gl.minimum(part * PART + PART, high) - 1)
    g_whole = gl.load(line + gl.minimum(TOKENS, high) - 1)
    arrive()

    found = _from_state(s_x, s_a, s_b, D)
    found = warpgroup_mma_wait(0, deps=(found,))
    taken = _row_sums(found, s_f, D) * gl.exp2(g_begin)
    found = _from_state(s_q, s_a, s_b, D)
    found = warpgroup_mma_wait(0, deps=(found,))
    straight = _row_sums(found, s_do, D) * gl.exp2(gl.where(own, g_read, 0.0))
    gl.thread_barrier()
    whole = _in_place(s_a, d_states + kept, D)
    if D == 128:
        whole += _in_place(s_b, d_states + kept + 64 * D, D)
    fence_async_shared()
    gl.thread_barrier()

    # To the reads of later parts' tokens.
    scores = product(s_do, s_z.permute((1, 0)))
    meets = _pairwise(s_q, s_x, D)
    scores, meets = warpgroup_mma_wait(0, deps=(scores, meets))
    apart = gl.reshape(scores, [64, 4, 16])
    three: gl.constexpr = apart.type.layout
    j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, three)))
    j_begin = gl.load(line + gl.minimum(j * PART, high) - 1, mask=j > 0, other=0.0)
    j_end = gl.load(line + gl.minimum(j * PART + PART, high) - 1)
    row_part = gl.convert_layout(part, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None]
    row_own = gl.convert_layout(own, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None]
    power = gl.convert_layout(g_read, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None] - j_end[None, :]
    apart *= fade((row_part > j[None, :]) & row_own, power)[:, :, None]
    flow = gl.sum(apart * gl.reshape(meets, [64, 4, 16]), axis=2)
    pulls = straight + gl.convert_layout(gl.sum(flow, axis=1), gl.SliceLayout(1, ACC))
    c = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    r = rows(ACC)
    t = r // 16 * PART + r % 16
    scores = gl.convert_layout(gl.reshape(apart, [64, 64]), ACC)
    at = d_reads + number * (64 * 64) + (t[:, None] * 64 + c[None, :])
    gl.store(at, scores.to(dtype), mask=(r % 16 < PART)[:, None] & (c >= 0)[None, :])
    gl.store(read + h.to(gl.int64) * tokens + first + t, pulls, mask=own)
    # What passes each part: from earlier parts to reads of later ones.
    passes = gl.where(row_part > j[None, :], _beside(flow, j, False), 0.0)

    # To the predictions of later parts.
    scores = product(s_z, s_f.permute((1, 0)))
    meets = _pairwise(s_x, s_x, D)
    scores, meets = warpgroup_mma_wait(0, deps=(scores, meets))
    gl.thread_barrier()
    # These are done with: w and y take their places.
    r = rows(WIDE)
    t = r // 16 * PART + r % 16
    i = t - (WINDOW - 1)
    copy_lines(s_f, missed + shelf, r, r >= 0, D, WIDE)
    copy_rows(s_y, v, first, i, h, 0, (i >= low + SHIFT) & (i < high), H, D, WIDE)
    apart = gl.reshape(scores, [64, 4, 16])
    power = j_begin[None, :] - gl.convert_layout(g_end, gl.SliceLayout(1, gl.SliceLayout(2, three)))[:, None]
    apart *= fade(row_part < j[None, :], power)[:, :, None]
    flow = gl.sum(apart * gl.reshape(meets, [64, 4, 16]), axis=2)
    passes += gl.where(row_part < j[None, :], _beside(flow, j, True), 0.0)
    scores = gl.convert_layout(gl.reshape(apart, [64, 64]), ACC)
    r = rows(ACC)
    gl.store(d_gram + number * (64 * 64) + (r[:, None] * 64 + c[None, :]), scores.to(dtype))

    found = _from_state(s_x, s_a, s_b, D)
    found = warpgroup_mma_wait(0, deps=(found,))
    written = _row_sums(found, s_z, D) * gl.exp2(g_whole - g_end)
    gl.thread_barrier()
    r = rows(WIDE)
    copy_lines(s_a, lead + shelf, r, r >= 0, D, WIDE)
    to_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, three))
    passes += gl.where(row_part < j[None, :], gl.convert_layout(written, to_row)[:, None], 0.0)
    passes += gl.where(row_part > j[None, :], gl.convert_layout(taken + straight, to_row)[:, None], 0.0)
    total = gl.sum(passes, axis=0) + whole * gl.exp2(g_whole)
    gl.store(through + number * 16 + j, total)
    arrive()

    with_w = product(s_do, s_f.permute((1, 0)))
    with_y = product(s_do, s_y.permute((1, 0)))
    with_w, with_y = warpgroup_mma_wait(0, deps=(with_w, with_y))
    _keep_products(met, with_w, with_y, number, 0)
    with_w = product(s_a, s_f.permute((1, 0)))
    with_y = product(s_a, s_y.permute((1, 0)))
    with_w, with_y = warpgroup_mma_wait(0, deps=(with_w, with_y))
    _keep_products(met, with_w, with_y, number, 1)
    # Until here the products read these, and nothing may be lent their memory.
    s_x._keep_alive()
    s_q._keep_alive()
    s_do._keep_alive()
    s_z._keep_alive()
    s_f._keep_alive()
    s_a._keep_alive()
    s_b._keep_alive()
