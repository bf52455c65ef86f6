"""Regression over a window on Hopper: (tokens, states, W, Z and their gradients) -> gradients of queries, keys, gates.

For what the walks of hopper_windows.py keep, in bfloat16, in blocks of four parts. A program takes one block of one
head, whose parts hopper_windows_inside.py has looked at. Everything is by slot, row 16 b + u: pair u of part b, and
token u of part b where rows are tokens. With S and dS of the block, carries between,

    dQ = carry dO S^T + d(Q X^T) X    dX = carry dF S^T + carry Z dS^T + (dG + dG^T) X + d(Q X^T)^T Q
    d(Q X^T)_tb = carry dO_t . z_b    dG_bc = carry z_b . df_c, both of parts c > b and their tokens t

besides what a part gives itself; a pair that two parts hold has two rows of dX, which a product with ones adds up. How
much a log-decay carries is in these: what passes a part is the sum of all that begins before it and is felt behind it.

What two slots or a token and a slot give each other fades with the decays between their parts, and those are few:
tables [64, 4], a row's with the four parts, are all that is made of them.

Traps: how copies, products and barriers go together, and why addresses are made anew, as in hopper_parts.py. At width
128 two programs fill a multiprocessor's shared memory: the state follows its gradient in its place, what is made
between parts and what is staged that of tiles that are done with. Products wait for each other where registers do not
suffice: dO S^T is made twice rather than held.
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

from fastweight.kernels.gates import load_head, step_gradient, store_head
from fastweight.kernels.hopper_parts import (
    ACC,
    BROAD,
    FLAT,
    HALF,
    LEFT,
    SHARED,
    WHOLE,
    arrive,
    copy_rows,
    nil,
    product,
    rows,
)
from fastweight.kernels.hopper_windows import COPY_64, COPY_128, ONE
from fastweight.kernels.hopper_windows_inside import FOLDS, copy_lines
from fastweight.kernels.tiles import chunk_span, fade
from fastweight.kernels.windows import SHARED as HALO_ROWS
from fastweight.kernels.windows_maps import COUNT, ENERGY, VECTOR

MOST = gl.constexpr(60.0)  # a power of two that a sum is held at, so that another may join it


@gluon.jit
def _fresh(left, right, D: gl.constexpr):
    """Begins left right, [64, D]."""
    layout: gl.constexpr = ACC if D == 64 else BROAD
    return warpgroup_mma(left, right, gl.zeros([64, D], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def _row_sums(tile, shared, D: gl.constexpr):
    """Of each row, the sum of its products with that in shared memory."""
    layout: gl.constexpr = ACC if D == 64 else BROAD
    return gl.convert_layout(gl.sum(tile * shared.load(layout).to(gl.float32), axis=1), gl.SliceLayout(1, ACC))


@gluon.jit
def _lines(pointer, D: gl.constexpr):
    """64 rows of D numbers."""
    layout: gl.constexpr = HALF if D == 64 else WHOLE
    return gl.load(pointer + (rows(layout)[:, None] * D + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]))


@gluon.jit
def _in_place(stage, new, D: gl.constexpr):
    """Puts 64 rows of D numbers in the place of those in shared memory; the sum of their products."""
    both = stage.load(HALF if D == 64 else WHOLE).to(gl.float32) * new.to(gl.float32)
    stage.store(new)
    return gl.sum(gl.reshape(both, [64 * D]), axis=0)


@gluon.jit
def _beside(table, j, AFTER: gl.constexpr):
    """Of each of four columns, the sum of those before it, or with AFTER behind it."""
    total = gl.zeros_like(table)
    for m in gl.static_range(4):
        column = gl.sum(gl.where(j[None, :] == m, table, 0.0), axis=1)[:, None]
        total += gl.where(j[None, :] < m if AFTER else j[None, :] > m, column, 0.0)
    return total


@gluon.jit
def _apart(own, row_part, j, rest):
    """Of each row what it has in its own part's 16 columns, and the rest, zero there, elsewhere: [64, 64]."""
    own = gl.where((row_part == j[None, :])[:, :, None], own.to(gl.float32)[:, None, :], rest)
    return gl.convert_layout(gl.reshape(own, [64, 64]), ACC)


@gluon.jit
def _read_decay(line, r, high, PART: gl.constexpr, BEFORE: gl.constexpr):
    """log2 decay in the block up to the reads of tokens' slots."""
    last = r // 16 * PART + gl.minimum(r % 16, PART - 1) - (1 if BEFORE else 0)
    return gl.load(line + gl.minimum(last, high - 1), mask=last >= 0, other=0.0)


@gluon.jit
def _stage(stage, tile, D: gl.constexpr):
    """A tile in 16 bits, to be read by rows; its memory is done with, and so it is after a further barrier."""
    view = stage._reinterpret(stage.dtype, [64, D], SHARED)
    view.store(tile.to(stage.dtype))
    gl.thread_barrier()
    return view


@gluon.jit
def _store_rows(pointer, view, first, i, h, keep, H: gl.constexpr, D: gl.constexpr):
    """Writes what is staged as rows i of one head."""
    layout: gl.constexpr = HALF if D == 64 else WHOLE
    at = pointer + (first * H + h) * D + (i[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, layout))[None, :])
    gl.store(at, view.load(layout), mask=keep[:, None])


@gluon.jit(do_not_specialize=["base", "per", "length", "chunks", "tokens"])
def gradients(
    q, k, d_o, beta, lam, decay, facts, states, d_states, wrote, df, own_gram, own_reads, own_log, own_weight,
    d_q, d_k, shared, d_beta, d_lam, base, per, cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, WINDOW: gl.constexpr, PART: gl.constexpr,
    SHIFT: gl.constexpr, BEFORE: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """One block of one head: gradients of queries, keys, beta and lam; its first pairs' share aside."""
    TOKENS: gl.constexpr = FOLDS * PART
    HALO: gl.constexpr = WINDOW - 1
    WIDE: gl.constexpr = HALF if D == 64 else WHOLE
    PART_ROWS: gl.constexpr = COPY_64 if D == 64 else COPY_128
    ROW: gl.constexpr = gl.SliceLayout(1, ACC if D == 64 else BROAD)
    h = gl.program_id(0) % H
    here = gl.program_id(0) // H + gl.program_id(2) * per
    block = here + base + gl.program_id(2) * (chunks - per)
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    number = here.to(gl.int64) * H + h
    kept = block.to(gl.int64) * H + h
    dtype: gl.constexpr = q.dtype.element_ty
    s_x = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_q = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_do = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_z = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_f = gl.allocate_shared_memory(dtype, [64, D], SHARED)
    s_states = gl.allocate_shared_memory(dtype, [D, D], SHARED)
    # What parts give each other, in the place of dF at width 128.
    if D == 128:
        s_made = s_f._reinterpret(dtype, [2, 64, 64], SHARED)
    else:
        s_made = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    s_gram = s_made.index(0)
    s_reads = s_made.index(1)

    r = gl.arange(0, D, gl.SliceLayout(1, WIDE)) + nil()
    copy_lines(s_states, d_states + number * (D * D), r, r >= 0, D, WIDE)
    r = rows(WIDE)
    copy_lines(s_f, df + number * (64 * D), r, r >= 0, D, WIDE)
    u = gl.arange(0, 16, gl.SliceLayout(1, PART_ROWS)) + nil()
    for part in gl.static_range(FOLDS):
        at = first + part * PART
        i = u - HALO + part * PART
        own = (u < PART) & (u + part * PART < high)
        keep = (i >= low + SHIFT) & (i < high)
        there = (u >= 0) & (part * PART < high)  # or nothing was written
        z_at = wrote + (number * FOLDS + part) * (16 * D)
        copy_lines(s_z.slice(part * 16, 16), z_at, u, there, D, PART_ROWS)
        copy_rows(s_x.slice(part * 16, 16), k, at - SHIFT, u - HALO, kh, 0, keep, KH, D, PART_ROWS)
        copy_rows(s_q.slice(part * 16, 16), q, at, u, kh, 0, own, KH, D, PART_ROWS)
        copy_rows(s_do.slice(part * 16, 16), d_o, at, u, h, 0, own, H, D, PART_ROWS)
    line = decay + h.to(gl.int64) * tokens + first
    r = rows(ACC)
    part = r // 16
    g_read = _read_decay(line, r, high, PART, BEFORE)
    g_begin = gl.load(line + gl.minimum(part * PART, high) - 1, mask=part > 0, other=0.0)
    g_end = gl.load(line + gl.minimum(part * PART + PART, high) - 1)
    g_whole = gl.load(line + gl.minimum(TOKENS, high) - 1)
    # The state is on its way from here on.
    state0 = _lines(states + kept * (D * D), D)
    state1 = state0
    if D == 128:
        state1 = _lines(states + kept * (D * D) + 64 * D, D)
    gl.thread_barrier()  # or the assembler would ask for it once the copies are there
    arrive()

    d_x = _fresh(s_z, s_states.permute((1, 0)), D)
    d_x = warpgroup_mma_wait(0, deps=(d_x,))
    written = _row_sums(d_x, s_x, D) * gl.exp2(g_whole - g_end)
    # What fades from the block's beginning joins what fades to its end before both have faded.
    ahead = gl.minimum(-g_begin, MOST)
    d_x *= gl.convert_layout(gl.exp2(g_whole - g_end + ahead), ROW)[:, None]
    gl.thread_barrier()
    whole = _in_place(s_states.slice(0, 64), state0, D)
    if D == 128:
        whole += _in_place(s_states.slice(64, 64), state1, D)
    fence_async_shared()
    gl.thread_barrier()
    # Rows of [16, 16] a part: pairs or tokens by pairs. Parts of no tokens have none.
    three: gl.constexpr = gl.reshape(gl.zeros([64, 64], gl.float32, ACC), [64, 4, 16]).type.layout
    to_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, three))
    to_place: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, three))
    r = gl.convert_layout(rows(ACC), to_place)
    u = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, three)))
    at = number * 1024 + (r[:, None] * 16 + u[None, :])
    there = (r // 16 * PART < high)[:, None] & (u >= 0)[None, :]
    own_gram = gl.load(own_gram + at, mask=there, other=0.0)
    own_reads = gl.load(own_reads + at, mask=there, other=0.0)
    d_x = warpgroup_mma(s_f, s_states.permute((1, 0)), d_x, is_async=True)
    d_read = _fresh(s_do, s_states.permute((1, 0)), D)
    d_x, d_read = warpgroup_mma_wait(0, deps=(d_x, d_read))
    d_x *= gl.convert_layout(gl.exp2(-ahead), ROW)[:, None]
    taken = _row_sums(d_x, s_x, D) - written
    straight = _row_sums(d_read, s_q, D) * gl.exp2(g_read)

    # To the predictions of later parts.
    scores = product(s_z, s_f.permute((1, 0)))
    meets = product(s_x, s_x.permute((1, 0)))
    scores, meets = warpgroup_mma_wait(0, deps=(scores, meets))
    gl.thread_barrier()
    apart = gl.reshape(scores, [64, 4, 16])
    j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, three)))
    j_begin = gl.load(line + gl.minimum(j * PART, high) - 1, mask=j > 0, other=0.0)
    j_end = gl.load(line + gl.minimum(j * PART + PART, high) - 1)
    r = gl.convert_layout(rows(ACC) + nil(), to_row)[:, None]
    row_part = r // 16
    own = (r % 16 < PART) & (row_part * PART + r % 16 < high)
    power = j_begin[None, :] - gl.convert_layout(g_end, to_row)[:, None]
    apart *= fade(row_part < j[None, :], power)[:, :, None]
    s_gram.store(_apart(own_gram, row_part, j, apart).to(dtype))
    # What passes each part: from earlier parts to those behind it.
    flow = gl.sum(apart * gl.reshape(meets, [64, 4, 16]), axis=2)
    passes = _beside(flow, j, True) + gl.convert_layout(written, to_row)[:, None]
    passes = gl.where(row_part < j[None, :], passes, 0.0)

    # What gates will need.
    r = gl.arange(0, 64, FLAT) + nil()
    t = r // 16 * PART + r % 16
    live = (r % 16 < PART) & (t < high)
    at = h.to(gl.int64) * tokens + first + t
    d_log = gl.load(own_log + at, mask=live, other=0.0)
    d_w = gl.load(own_weight + at, mask=live, other=0.0)
    fact = facts + h.to(gl.int64) * (tokens * (VECTOR + WINDOW)) + first
    energy = gl.load(fact + (ENERGY * tokens + t), mask=live, other=0.0)
    count = gl.load(fact + (COUNT * tokens + t), mask=live, other=1.0)
    writes = live & (t - SHIFT >= low)
    gain = load_head(beta, first, t, h, H, writes, 1.0)
    ridge = load_head(lam, first, t, h, H, writes, 0.0)
    if not DIRECT:
        r = gl.convert_layout(rows(ACC), to_place)[:, None]
        t = r // 16 * PART + r % 16
        ahead = u[None, :] - r % 16
        keep = (ahead >= 0) & (ahead < WINDOW) & (r % 16 < PART) & (t < high)
        vectors = gl.load(fact + ((VECTOR + ahead) * tokens + t), mask=keep, other=0.0)

    # To the reads of later parts' tokens.
    scores = product(s_do, s_z.permute((1, 0)))
    meets = product(s_q, s_x.permute((1, 0)))
    scores, meets = warpgroup_mma_wait(0, deps=(scores, meets))
    gl.thread_barrier()
    apart = gl.reshape(scores, [64, 4, 16])
    power = gl.convert_layout(g_read, to_row)[:, None] - j_end[None, :]
    apart *= fade((row_part > j[None, :]) & own, power)[:, :, None]
    s_reads.store(_apart(own_reads, row_part, j, apart).to(dtype))
    flow = gl.sum(apart * gl.reshape(meets, [64, 4, 16]), axis=2)
    pulls = gl.convert_layout(straight, to_row) + gl.sum(flow, axis=1)
    before = _beside(flow, j, False) + gl.convert_layout(taken + straight, to_row)[:, None]
    passes += gl.where(row_part > j[None, :], before, 0.0)
    # By token, at its part's slots: and what later reads of the same part pull.
    now = gl.arange(0, 16, gl.SliceLayout(0, ONE))[None, :]
    r = rows(ONE)[:, None] % 16
    pulls = gl.where(r > now if BEFORE else r >= now, gl.convert_layout(pulls, gl.SliceLayout(1, ONE))[:, None], 0.0)
    by_token = gl.sum(gl.reshape(pulls, [4, 16, 16]), axis=1)
    total = gl.sum(passes, axis=0) + whole * gl.exp2(g_whole)
    by_token += gl.convert_layout(total, gl.SliceLayout(1, by_token.type.layout))[:, None]
    d_log += gl.convert_layout(gl.reshape(by_token, [64]), FLAT)
    d_gain, d_ridge, d_energy = step_gradient(
        d_w / count, d_log, energy, gain, ridge, writes, eps, floor, SCALED, DIRECT, False
    )
    if not DIRECT:
        # d mu u u^T of each window, on top: by tokens, in the place of Z and at width 64 of dF.
        s_share = s_f
        if D == 128:
            s_share = s_z._reinterpret(dtype, [2, 64, 64], SHARED).index(1)
        s_vectors = s_z._reinterpret(dtype, [D // 64, 64, 64], SHARED).index(0)
        s_vectors.store(_apart(vectors, row_part, j, 0.0).to(dtype))
        vectors *= gl.convert_layout(d_energy / count, to_place)[:, None]
        s_share.store(_apart(vectors, row_part, j, 0.0).to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        scores = product(s_vectors.permute((1, 0)), s_share)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        s_gram.store((s_gram.load(ACC).to(gl.float32) + scores).to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    d_read = _fresh(s_do, s_states.permute((1, 0)), D)
    d_x = warpgroup_mma(s_gram, s_x, d_x, is_async=True)
    d_x = warpgroup_mma(s_gram.permute((1, 0)), s_x, d_x, is_async=True)
    d_x = warpgroup_mma(s_reads.permute((1, 0)), s_q, d_x, is_async=True)
    g_read = _read_decay(line, rows(ACC) + nil(), high, PART, BEFORE)
    d_read, d_x = warpgroup_mma_wait(0, deps=(d_read, d_x))
    d_read *= gl.convert_layout(gl.exp2(g_read), ROW)[:, None]
    d_read = warpgroup_mma(s_reads, s_x, d_read, is_async=True)
    d_read = warpgroup_mma_wait(0, deps=(d_read,))
    gl.thread_barrier()
    # Rows of pairs that the part before holds too.
    r = gl.arange(0, 64, gl.SliceLayout(1, LEFT))[:, None] + nil()
    c = gl.arange(0, 64, gl.SliceLayout(0, LEFT))[None, :]
    early = gl.where((c == r + (PART - 16)) & (r % 16 < HALO), 1.0, 0.0).to(dtype)
    s_x.store(d_x.to(dtype))
    fence_async_shared()
    gl.thread_barrier()
    d_x = warpgroup_mma(early, s_x, d_x, is_async=True)
    r = rows(WIDE) + nil()
    t = r // 16 * PART + r % 16
    _store_rows(d_q, _stage(s_do, d_read, D), first, t, h, (r % 16 < PART) & (t < high), H, D)
    d_x = warpgroup_mma_wait(0, deps=(d_x,))
    i = t - HALO
    mine = (i >= 0) & (i < TOKENS) & (i < high) & ((r % 16 < PART) | (r >= 48))
    view = _stage(s_q, d_x, D)
    _store_rows(d_k, view, first - SHIFT, i, h, mine & (i >= low + SHIFT), H, D)
    if SHIFT:  # a sequence's last token is paired with none
        col = gl.arange(0, D, gl.SliceLayout(0, WIDE))
        at = d_k + (first * H + h) * D + (i[:, None] * (H * D) + col[None, :])
        last = mine & (i == high - 1) & (high <= TOKENS)
        gl.store(at, gl.zeros([64, D], dtype, WIDE), mask=last[:, None])
    # Of the first part's first pairs, for the block before.
    r = gl.arange(0, 16, gl.SliceLayout(1, PART_ROWS)) + nil()
    at = shared + (block.to(gl.int64) * HALO_ROWS * H + h) * D
    at += r[:, None] * (H * D) + gl.arange(0, D, gl.SliceLayout(0, PART_ROWS))[None, :]
    pair = (r - HALO >= low + SHIFT) & (r - HALO < high)
    gl.store(
        at, gl.where(pair[:, None], view.slice(0, 16).load(PART_ROWS).to(gl.float32), 0.0), mask=(r < HALO)[:, None]
    )
    r = gl.arange(0, 64, FLAT) + nil()
    t = r // 16 * PART + r % 16
    live = (r % 16 < PART) & (t < high)
    store_head(d_beta, d_gain, first, t, h, H, live)
    store_head(d_lam, d_ridge, first, t, h, H, live)
    # Until here the products read these, and nothing may be lent their memory.
    s_x._keep_alive()
    s_q._keep_alive()
    s_do._keep_alive()
    s_z._keep_alive()
    s_f._keep_alive()
    s_states._keep_alive()
