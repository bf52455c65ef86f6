"""Regression over a window on Hopper: what windows_finish.py computes, in tiles of 64 slots that lie in shared memory.

For what the walks of hopper_windows.py keep, in bfloat16, in blocks of four parts. A program makes 64
columns of the gradients of queries and of keys of one block of one head. Everything is by slot, row 16 b + u: pair u of
part b, and token u of part b where rows are tokens; with z and df of slots, S and dS of the block, carries between,

    dQ = carry dO S^T + d(Q X^T) X    dX = carry df S^T + carry z dS^T + (dG + dG^T) X + d(Q X^T)^T Q

and a pair that two parts hold has two rows of dX, which a product with ones adds up.

Traps: how copies, products and barriers go together, and why addresses are made anew, as in hopper_parts.py. At width
128 two programs fill a multiprocessor's shared memory: what is staged takes the place of tiles that are done with.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.hopper_parts import ACC, HALF, LEFT, SHARED, WHOLE, arrive, copy_rows, nil, product, rows
from fastweight.kernels.tiles import chunk_span
from fastweight.kernels.windows import SHARED as HALO_ROWS

FOLDS = gl.constexpr(4)  # parts of a block


@gluon.jit
def copy_lines(shared, pointer, row, keep, W: gl.constexpr, L: gl.constexpr):
    """Begins to copy rows of W numbers, or zeros."""
    at = row[:, None] * W + gl.arange(0, shared.shape[1], gl.SliceLayout(0, L))[None, :]
    async_copy.async_copy_global_to_shared(shared, pointer + at, mask=keep[:, None] & (at >= 0))


@gluon.jit
def _stage(stage, tile):
    """A tile in 16 bits, to be read by rows; its memory is done with, and so it is after a further barrier."""
    view = stage._reinterpret(stage.dtype, [64, 64], SHARED)
    view.store(tile.to(stage.dtype))
    fence_async_shared()
    gl.thread_barrier()
    return view


@gluon.jit
def _store_rows(pointer, view, first, i, h, start, keep, H: gl.constexpr, W: gl.constexpr):
    """Writes what is staged as rows i of one head, columns from `start` on."""
    col = start + gl.arange(0, 64, gl.SliceLayout(0, HALF))
    at = pointer + (first * H + h) * W + (i[:, None] * (H * W) + col[None, :])
    gl.store(at, view.load(HALF), mask=keep[:, None])


@gluon.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def finish(
    q, k, d_o, decay, states, d_states, wrote, df, d_gram, d_reads, d_q, d_k, shared,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr,
    SHIFT: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """64 columns of the gradients of queries and keys of one block of one head; its first pairs' share aside."""
    TOKENS: gl.constexpr = FOLDS * PART
    HALO: gl.constexpr = WINDOW - 1
    HALVES: gl.constexpr = D // 64
    WIDE: gl.constexpr = HALF if D == 64 else WHOLE
    start = gl.program_id(0) % HALVES * 64
    h = gl.program_id(0) // HALVES % H
    here = gl.program_id(0) // HALVES // H
    block = here + base
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    number = here.to(gl.int64) * H + h
    kept = block.to(gl.int64) * H + h
    dtype: gl.constexpr = q.dtype.element_ty
    s_do = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_f = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_z = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_state = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_d_state = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_q = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    s_x = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    s_gram = gl.allocate_shared_memory(dtype, [64, 64], SHARED)
    s_reads = gl.allocate_shared_memory(dtype, [64, 64], SHARED)

    r = rows(WIDE)
    t = r // 16 * PART + r % 16
    copy_rows(s_do, d_o, first, t, h, 0, (r % 16 < PART) & (t < high), H, D, WIDE)
    copy_lines(s_state, states + kept * (D * D) + start * D, r, r >= 0, D, WIDE)
    copy_lines(s_f, df + number * (64 * D), r, r >= 0, D, WIDE)
    copy_lines(s_d_state, d_states + kept * (D * D) + start * D, r, r >= 0, D, WIDE)
    copy_lines(s_z, wrote + number * (64 * D), r, r >= 0, D, WIDE)
    r = rows(HALF)
    t = r // 16 * PART + r % 16
    own = (r % 16 < PART) & (t < high)
    copy_rows(s_q, q, first, t, kh, start, own, KH, D, HALF)
    i = t - HALO
    copy_rows(s_x, k, first - SHIFT, i, kh, start, (i >= low + SHIFT) & (i < high), KH, D, HALF)
    copy_lines(s_gram, d_gram + number * (64 * 64), r, r >= 0, 64, HALF)
    copy_lines(s_reads, d_reads + number * (64 * 64), t, own, 64, HALF)
    r = rows(ACC)
    line = decay + h.to(gl.int64) * tokens + first
    part = r // 16 * PART
    read = part + gl.minimum(r % 16, PART - 1) - (1 if BEFORE else 0)
    g_read = gl.load(line + gl.minimum(read, high - 1), mask=read >= 0, other=0.0)
    g_begin = gl.load(line + gl.minimum(part, high) - 1, mask=part > 0, other=0.0)
    g_end = gl.load(line + gl.minimum(part + PART, high) - 1)
    g_whole = gl.load(line + gl.minimum(TOKENS, high) - 1)
    arrive()

    d_read = product(s_do, s_state.permute((1, 0)))
    d_x = product(s_f, s_state.permute((1, 0)))
    behind = product(s_z, s_d_state.permute((1, 0)))
    d_read, d_x, behind = warpgroup_mma_wait(0, deps=(d_read, d_x, behind))
    d_read *= gl.exp2(g_read)[:, None]
    d_x = d_x * gl.exp2(g_begin)[:, None] + behind * gl.exp2(g_whole - g_end)[:, None]
    d_read = warpgroup_mma(s_reads, s_x, d_read, is_async=True)
    d_x = warpgroup_mma(s_gram, s_x, d_x, is_async=True)
    d_x = warpgroup_mma(s_gram.permute((1, 0)), s_x, d_x, is_async=True)
    d_x = warpgroup_mma(s_reads.permute((1, 0)), s_q, d_x, is_async=True)
    d_read, d_x = warpgroup_mma_wait(0, deps=(d_read, d_x))
    gl.thread_barrier()
    # Rows of pairs that the part before holds too.
    r = gl.arange(0, 64, gl.SliceLayout(1, LEFT))[:, None] + nil()
    c = gl.arange(0, 64, gl.SliceLayout(0, LEFT))[None, :]
    early = gl.where((c == r + (PART - 16)) & (r % 16 < HALO), 1.0, 0.0).to(dtype)
    view = _stage(s_f, d_x)
    d_x = warpgroup_mma(early, view, d_x, is_async=True)
    r = rows(HALF)
    t = r // 16 * PART + r % 16
    _store_rows(d_q, _stage(s_do, d_read), first, t, h, start, (r % 16 < PART) & (t < high), H, D)
    d_x = warpgroup_mma_wait(0, deps=(d_x,))
    i = t - HALO
    mine = (i >= 0) & (i < TOKENS) & (i < high) & ((r % 16 < PART) | (r >= 48))
    _store_rows(d_k, _stage(s_z, d_x), first - SHIFT, i, h, start, mine & (i >= low + SHIFT), H, D)
    if SHIFT:  # a sequence's last token is paired with none
        col = start + gl.arange(0, 64, gl.SliceLayout(0, HALF))
        at = d_k + (first * H + h) * D + (i[:, None] * (H * D) + col[None, :])
        last = mine & (i == high - 1) & (high <= TOKENS)
        gl.store(at, gl.zeros([64, 64], dtype, HALF), mask=last[:, None])
    r = rows(ACC)
    col = start + gl.arange(0, 64, gl.SliceLayout(0, ACC))
    at = shared + (kept // H * HALO_ROWS * H + h) * D + (r[:, None] * (H * D) + col[None, :])
    i = r - HALO
    d_x = gl.where(((i >= low + SHIFT) & (i < high))[:, None], d_x, 0.0)
    gl.store(at, d_x, mask=(r < HALO)[:, None] & (col >= 0)[None, :])
    # Until here the products read these, and nothing may be lent their memory.
    s_state._keep_alive()
    s_d_state._keep_alive()
    s_q._keep_alive()
    s_x._keep_alive()
    s_gram._keep_alive()
    s_reads._keep_alive()
