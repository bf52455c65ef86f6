"""Before the chunks are walked, on Hopper: step sizes, log-decays and the inverse of every chunk in one kernel.

What gates.steps and solve.invert compute, from one read of the keys, for bfloat16 calls that launch_hopper takes. The
Gram matrix of a chunk comes out of the matrix units, energies are its diagonal. Blocks of 16 rows are inverted by
substitution in float32, one column a thread, and merged to 32 and 64 by products with tf32 operands.

Trap: only block formulas merge. A power series of the whole takes fewer products, but where keys repeat its terms
outgrow their sum by orders of magnitude.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
)

from fastweight.kernels import gates

LOG2E = gl.constexpr(1.4426950408889634)
TINY = gl.constexpr(1e-20)
step_sizes = gluon.jit(gates.step_sizes.fn)
step_log_decay = gluon.jit(gates.step_log_decay.fn)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _number(pointer, at, keep, other):
    """One number per token in float32; `other` where there is no tensor."""
    if pointer is None:
        return gl.where(keep, other, 0.0)
    else:
        return gl.load(pointer + at, mask=keep, other=0.0).to(gl.float32)


@gluon.jit
def _product(left, right, layout: gl.constexpr):
    """left right, both in shared memory."""
    M: gl.constexpr = left.shape[0]
    N: gl.constexpr = right.shape[1]
    a = left.load(gl.DotOperandLayout(0, layout, 1))
    b = right.load(gl.DotOperandLayout(1, layout, 1))
    return mma_v2(a, b, gl.zeros([M, N], gl.float32, layout), input_precision="tf32")


@gluon.jit
def _merge(tile, AT: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """The inverse of a block from those of its halves, in place: below the diagonal, -I_2 (N_21 I_1)."""
    upper = tile.slice(AT, SIZE, 0).slice(AT, SIZE, 1)
    below = tile.slice(AT + SIZE, SIZE, 0)
    right = gl.convert_layout(_product(below.slice(AT, SIZE, 1), upper, layout), gl.DotOperandLayout(1, layout, 1))
    left = below.slice(AT + SIZE, SIZE, 1).load(gl.DotOperandLayout(0, layout, 1))
    out = mma_v2(left, right, gl.zeros([SIZE, SIZE], gl.float32, layout), input_precision="tf32")
    return -out


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def prepare(
    k_desc, beta, lam, eta, decay, inverse,
    length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, SHIFT: gl.constexpr, RAW: gl.constexpr,
    SCALED: gl.constexpr, DIRECT: gl.constexpr, DECAYED: gl.constexpr,
):  # fmt: skip
    """eta, chunk-cumulative log-decay, and (I + N)^-1 - I of one chunk of one head."""
    dtype: gl.constexpr = k_desc.dtype
    rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    down: gl.constexpr = gl.SliceLayout(1, rows)
    along: gl.constexpr = gl.SliceLayout(0, rows)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    chunk = gl.program_id(0)
    h = gl.program_id(1)
    n = chunk // chunks
    c = chunk - n * chunks
    first = n.to(gl.int64) * length + c * 64
    high = length - c * 64

    keys = gl.allocate_shared_memory(dtype, k_desc.block_shape, k_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    mbarrier.expect(bar, k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [n, c * 64 - SHIFT, h // (H // KH) * K], bar, keys)

    i = gl.arange(0, 64, layout=line)
    pair = i < high
    if SHIFT:
        pair = pair & (i + c * 64 > 0)
    at = (first + i) * H + h
    gain = _number(beta, at, pair, 1.0)
    ridge = _number(lam, at, pair, 0.0)
    mbarrier.wait(bar, 0)
    x = keys.reshape([64, K])
    gram = warpgroup_mma(x, x.permute((1, 0)), gl.zeros([64, 64], gl.float32, rows), use_acc=False)
    rank = gl.arange(0, 64, layout=down)[:, None]
    file = gl.arange(0, 64, layout=along)[None, :]
    if RAW:
        a = gain
        log_decay = ridge * LOG2E
        writes = pair
    else:
        energy = gl.convert_layout(gl.sum(gl.where(rank == file, gram, 0.0), axis=1), line)
        a, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        log_decay = gl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    a = gl.where(writes & (gl.abs(a) < TINY), TINY, a)
    g = gl.associative_scan(log_decay, 0, _add)
    start = h.to(gl.int64) * tokens + first
    gl.store(eta + start + i, a, mask=i < high)
    gl.store(decay + start + i, g, mask=i < high)
    g_res = g
    if not DECAYED:
        g_res = gl.where(i > 0, gl.gather(g, gl.maximum(i - 1, 0), 0), 0.0)
    power = gl.convert_layout(g_res, down)[:, None] - gl.convert_layout(g, along)[None, :]
    felt = gl.exp2(gl.where(rank > file, power, float("-inf"))) * gl.convert_layout(a, along)[None, :]
    coupled = gram * felt

    # The four blocks on the diagonal, stacked: 16 rows each, of 16 columns.
    whole: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[64, 4]], [64, 64], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [64, 64], whole)
    tile.store(coupled)
    blocks = gl.reshape(gl.where(rank // 16 == file // 16, coupled, 0.0), [64, 4, 16])
    blocks = gl.reshape(gl.sum(blocks, axis=1), [4, 16, 16])
    columns = gl.allocate_shared_memory(gl.float32, [16, 64], one)
    columns._reinterpret(gl.float32, [16, 4, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).store(
        gl.permute(blocks, (2, 0, 1))
    )
    column: gl.constexpr = gl.BlockedLayout([16, 1, 1], [1, 2, 16], [1, 2, 2], [2, 1, 0])
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, column)))[:, None, None]
    q = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, column)))[None, None, :]
    solved = gl.where(r == q, 1.0, 0.0) + gl.zeros([16, 4, 16], gl.float32, column)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    for j in gl.static_range(15):
        weight = (
            columns.index(j)._reinterpret(gl.float32, [4, 16], flat).permute((1, 0)).load(gl.SliceLayout(2, column))
        )
        bits = gl.where(r == j, solved.to(gl.int32, bitcast=True), 0)
        pivot = gl.xor_sum(bits, axis=0).to(gl.float32, bitcast=True)
        solved -= weight[:, :, None] * pivot[None, :, :]
    inverted = columns._reinterpret(gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    inverted.store(gl.permute(solved, (1, 0, 2)))
    small: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    halves = columns._reinterpret(gl.float32, [4, 256], one)
    for b in gl.static_range(4):
        block = halves.index(b)._reinterpret(gl.float32, [16, 16], flat).load(small)
        tile.slice(b * 16, 16, 0).slice(b * 16, 16, 1).store(block)
    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    low = _merge(tile, 0, 16, narrow)
    high_block = _merge(tile, 32, 16, narrow)
    tile.slice(16, 16, 0).slice(0, 16, 1).store(low)
    tile.slice(48, 16, 0).slice(32, 16, 1).store(high_block)
    last = _merge(tile, 0, 32, narrow)
    tile.slice(32, 32, 0).slice(0, 32, 1).store(last)
    out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    i2 = gl.arange(0, 64, layout=gl.SliceLayout(1, out))[:, None]
    j2 = gl.arange(0, 64, layout=gl.SliceLayout(0, out))[None, :]
    result = tile.load(out) - gl.where(i2 == j2, 1.0, 0.0)
    base = inverse + (chunk.to(gl.int64) * H + h) * 4096
    gl.store(base + i2 * 64 + j2, result.to(dtype))
