"""What Hopper kernels share: layouts and barriers; of token-parallel gradients also copies, products, masks, stores.

Gluon states what plain Triton leaves to its compiler: every tile that several products need lies in shared memory once,
brought there by asynchronous copies, products wait for nothing but their operands, and an accumulator gives each warp
whole rows, so that sums along a row stay inside it. Tiles are [64 rows, 64 or 128 columns] in 16 bits.

Two programs share a multiprocessor, which leaves each 255 registers a thread and 113 KiB. What spills goes to the
second level cache: on an H200 spilling took half of the time. Hence these devices against values that live longer than
they need: `nil`, `rows` and `apart` make addresses and masks anew where they are used, a loop of one turn keeps what
is computed in it from being put off until after it, and products with accumulators of their own follow one another.

Traps: a copy is seen by products only after `arrive` or its barrier's wait. A buffer is written again only behind a
thread barrier that follows the wait for all products that read it.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from fastweight.kernels.gates import gate_gradients, store_head
from fastweight.kernels.tiles import decay_rows

ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
BROAD = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
LEFT = gl.constexpr(gl.DotOperandLayout(operand_index=0, parent=ACC.value, k_width=2))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
HALF = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of a copy of 64 columns
WHOLE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of 128
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of one number a row
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))


@gluon.jit
def nil():
    """0, unknown to be so (grids have one dimension): what it is added to is computed here, not held since before."""
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.y;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def rows(L: gl.constexpr):
    """0 .. 63 along the rows of layout L, unknown to be so."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.arange(0, 64, gl.SliceLayout(1, L))], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def apart():
    """Row minus column of an accumulator [64, 64]."""
    return rows(ACC)[:, None] - gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :]


@gluon.jit
def copy_rows(shared, pointer, first, i, h, start, keep, H: gl.constexpr, W: gl.constexpr, L: gl.constexpr):
    """Begins to copy rows of one head of a [tokens, H, W] tensor, columns from `start` on; zeros where not kept."""
    col = start + gl.arange(0, shared.shape[1], gl.SliceLayout(0, L))
    at = pointer + (first * H + h) * W + (i[:, None] * (H * W) + col[None, :])
    async_copy.async_copy_global_to_shared(shared, at, mask=keep[:, None] & (col >= 0)[None, :])


@gluon.jit
def copy_features(
    s_in, q, k, previous, source, i, own, keep, first, kh,
    KH: gl.constexpr, K: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Begins to copy queries of the rows `own` and paired keys of the rows `keep`, 64 columns a buffer, q before x."""
    for part in gl.static_range(K // 64):
        copy_rows(s_in.index(part), q, first, i, kh, part * 64, own, KH, K, HALF)
        if previous is None:
            copy_rows(s_in.index(K // 64 + part), k, first - SHIFT, i, kh, part * 64, keep, KH, K, HALF)
        else:
            copy_rows(s_in.index(K // 64 + part), k, first, source.to(gl.int64), kh, part * 64, keep, KH, K, HALF)


@gluon.jit
def put_first_key(s_in, key0, slot, starts, K: gl.constexpr):
    """The carried key in the rows `starts` of x, for all products to see."""
    for part in gl.static_range(K // 64):
        col = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
        x = s_in.index(K // 64 + part).load(HALF)
        begin = gl.load(key0 + slot * K + col).to(x.dtype)
        x = gl.where(starts[:, None], begin[None, :], x)
        gl.thread_barrier()
        s_in.index(K // 64 + part).store(x)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def copy_states(s_states, states, d_states, row, landed):
    """Begins to copy 64 rows of a chunk's state and of its gradient; `landed` counts the bytes."""
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(landed, 2 * states.block_type.nbytes)
    tma.async_copy_global_to_shared(states, [row, 0], landed, s_states.index(0))
    tma.async_copy_global_to_shared(d_states, [row, 0], landed, s_states.index(1))


@gluon.jit
def new_barrier():
    """A barrier for copies by TMA. Its memory must not be lent to data: keep it alive to the kernel's end."""
    landed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(landed, count=1)
    fence_async_shared()
    return landed


@gluon.jit
def gates_of_columns(weight, decay, line, first, high, STRIDE: gl.constexpr):
    """Log-decays and weights of 64 rows, the last STRIDE the chunk's own, where each thread finds those of columns."""
    s_gate = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    j = gl.arange(0, 64, FLAT) - (64 - STRIDE)
    s_gate.index(0).store(decay_rows(decay, line, first, j, high))
    s_gate.index(1).store(gl.load(weight + line + first + j, mask=(j >= 0) & (j < high), other=0.0))
    return s_gate


@gluon.jit
def arrive():
    """Waits for all copies but those of the states, and shows them to the products of all warps."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def product(a, b):
    """Begins a b, fresh."""
    return warpgroup_mma(a, b, gl.zeros([64, 64], gl.float32, ACC), use_acc=False, is_async=True)


@gluon.jit
def score(s_in, at: gl.constexpr, HALVES: gl.constexpr):
    """Begins the products of the columns from buffer `at` on with those of x."""
    scores = product(s_in.index(nil() + at), s_in.index(nil() + HALVES).permute((1, 0)))
    if HALVES == 2:
        scores = warpgroup_mma(
            s_in.index(nil() + at + 1), s_in.index(nil() + HALVES + 1).permute((1, 0)), scores, is_async=True
        )
    return scores


@gluon.jit
def diagonal(square):
    """Of an accumulator [64, 64], by row."""
    return gl.sum(gl.where(apart() == 0, square, 0.0), axis=1)


@gluon.jit
def store_rows(pointer, tile, first, i, h, start, keep, H: gl.constexpr, W: gl.constexpr):
    """Writes an accumulator [64, 64] as rows of one head, columns from `start` on; i and keep lie along HALF."""
    col = start + gl.arange(0, 64, gl.SliceLayout(0, HALF))
    at = pointer + (first * H + h) * W + (i[:, None] * (H * W) + col[None, :])
    gl.store(at, gl.convert_layout(tile.to(pointer.dtype.element_ty), HALF), mask=keep[:, None])


@gluon.jit
def store_staged(stage, pointer, tile, first, i, h, start, keep, H: gl.constexpr, W: gl.constexpr):
    """The same through memory of the caller's, for when the rest is full; done with it after a further barrier."""
    view = stage._reinterpret(stage.dtype, [64, 64], SHARED)
    view.store(tile.to(stage.dtype))
    gl.thread_barrier()
    col = start + gl.arange(0, 64, gl.SliceLayout(0, HALF))
    at = pointer + (first * H + h) * W + (i[:, None] * (H * W) + col[None, :])
    gl.store(at, view.load(HALF), mask=keep[:, None])


@gluon.jit
def store_keys(
    d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, start,
    H: gl.constexpr, K: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Writes the gradient of paired rows to the tokens they came from; a sequence's last token is paired with none."""
    keep = pair & (source >= low)
    if previous is None:
        store_rows(d_k, d_x, first - SHIFT, i, h, start, keep, H, K)
        if SHIFT:
            store_rows(d_k, gl.zeros([64, 64], gl.float32, ACC), first, i, h, start, i == high - 1, H, K)
    else:
        store_rows(d_k, d_x, first, source.to(gl.int64), h, start, keep, H, K)
    if d_key0 is not None:
        store_rows(d_key0, d_x, n.to(gl.int64), i * 0, h, start, pair & (source < low), H, K)


@gluon.jit
def store_gates(
    beta, lam, d_beta, d_lam, first, i, h, pair, live, d_eta, d_log, energy, eps, floor,
    H: gl.constexpr, RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, LIVE: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of beta and lam that those of steps and log-decays amount to; returns that of the energy."""
    d_gain, d_ridge, share = gate_gradients(
        d_eta, d_log, energy, beta, lam, first, i, h, pair, eps, floor, H, RAW, SCALED, DIRECT, LIVE
    )
    store_head(d_beta, d_gain, first, i, h, H, live)
    store_head(d_lam, d_ridge, first, i, h, H, live)
    return share
