"""Before the chunks are walked, on Hopper: step sizes, log-decays and the inverse of every chunk in one kernel.

What gates.steps and solve.invert compute, from one read of the keys, for bfloat16 calls that launch_hopper takes. The
Gram matrix of a chunk comes out of the matrix units, energies are its diagonal. Blocks of 16 rows are inverted by
substitution in float32, one column a thread, and merged to 32 and 64 by products with tf32 operands.

Traps: only block formulas merge. A power series of the whole takes fewer products, but where keys repeat its terms
outgrow their sum by orders of magnitude. And the barrier keeps its memory to the end: where it was lent to a tile, a
context switch put the barrier's own state back over the numbers.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fastweight.kernels.gates import LOG2E, TINY, step_log_decay, step_sizes
from fastweight.kernels.hopper_parts import ACC, HALF, LINE, new_barrier


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
    """Of the inverse of a block, what lies below its halves' inverses on the diagonal of `tile`: -I_2 (N_21 I_1)."""
    upper = tile.slice(AT, SIZE, 0).slice(AT, SIZE, 1)
    below = tile.slice(AT + SIZE, SIZE, 0)
    right = gl.convert_layout(_product(below.slice(AT, SIZE, 1), upper, layout), gl.DotOperandLayout(1, layout, 1))
    left = below.slice(AT + SIZE, SIZE, 1).load(gl.DotOperandLayout(0, layout, 1))
    out = mma_v2(left, right, gl.zeros([SIZE, SIZE], gl.float32, layout), input_precision="tf32")
    return -out


@gluon.jit
def _vector():
    """Room for one number per token of two chunks."""
    return gl.allocate_shared_memory(gl.float32, [2, 64], LINE)


@gluon.jit
def _as(memory, shape: gl.constexpr):
    """The same float32 memory, row after row, in another shape."""
    order: gl.constexpr = [1, 0] if len(shape) == 2 else [2, 1, 0]
    return memory._reinterpret(gl.float32, shape, gl.SwizzledSharedLayout(1, 1, 1, order))


@gluon.jit
def _diagonal(tile):
    """The four 16-wide blocks on the diagonal of [64, 64], one under the other [64, 16]."""
    apart = gl.reshape(tile, [64, 4, 16])
    layout: gl.constexpr = apart.type.layout
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    return gl.sum(gl.where(row // 16 == block, apart, 0.0), axis=1)


@gluon.jit
def _energy(gram):
    """The diagonal of [64, 64]."""
    blocks = _diagonal(gram)
    layout: gl.constexpr = blocks.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))[:, None]
    col = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))[None, :]
    return gl.sum(gl.where(row % 16 == col, blocks, 0.0), axis=1)


@gluon.jit
def _substitute(columns, tile):
    """Inverts the 16-row blocks that `columns` holds, as [column, block, row], into the diagonal of `tile`.

    A thread has one column of one block, its 16 rows in registers: a row is picked out without moving anything.
    """
    layout: gl.constexpr = gl.BlockedLayout([16, 1, 1], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    q = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    solved = gl.where(r == q, 1.0, 0.0) + gl.zeros([16, 8, 16], gl.float32, layout)
    for j in gl.static_range(15):
        weight = _as(columns.index(j), [8, 16]).permute((1, 0)).load(gl.SliceLayout(2, layout))
        bits = gl.where(r == j, solved.to(gl.int32, bitcast=True), 0)
        pivot = gl.xor_sum(bits, axis=0).to(gl.float32, bitcast=True)
        solved -= weight[:, :, None] * pivot[None, :, :]
    _as(columns, [8, 16, 16]).store(gl.permute(solved, (1, 0, 2)))
    small: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    for b in gl.static_range(8):
        block = _as(columns._reinterpret(gl.float32, [8, 256], LINE).index(b), [16, 16]).load(small)
        tile.slice(b * 16, 16, 0).slice(b % 4 * 16, 16, 1).store(block)


@gluon.jit(do_not_specialize=["length", "chunks", "tokens"])
def prepare(
    k_desc, beta, lam, eta, decay, inverse,
    length, chunks, tokens, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, K: gl.constexpr, SHIFT: gl.constexpr, RAW: gl.constexpr,
    SCALED: gl.constexpr, DIRECT: gl.constexpr, DECAYED: gl.constexpr,
):  # fmt: skip
    """eta, chunk-cumulative log-decay, and (I + N)^-1 - I of two neighbouring chunks of one head."""
    dtype: gl.constexpr = k_desc.dtype
    down: gl.constexpr = gl.SliceLayout(1, ACC)
    along: gl.constexpr = gl.SliceLayout(0, ACC)
    pairs = (chunks + 1) // 2
    n = gl.program_id(0) // pairs
    c = (gl.program_id(0) - n * pairs) * 2
    h = gl.program_id(1)
    first = n.to(gl.int64) * length + c * 64

    keys = gl.allocate_shared_memory(dtype, k_desc.block_shape, k_desc.layout)
    bar = new_barrier()
    mbarrier.expect(bar, k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [n, c * 64 - SHIFT, h // (H // KH) * K], bar, keys)

    line: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(0, line))[None, :]
    token = gl.arange(0, 2, layout=gl.SliceLayout(1, line))[:, None] * 64 + i
    here = token < length - c * 64
    pair = here
    if SHIFT:
        pair = pair & (token + c * 64 > 0)
    at = (first + token) * H + h
    gain = _number(beta, at, pair, 1.0)
    ridge = _number(lam, at, pair, 0.0)
    mbarrier.wait(bar, 0)
    x = keys.reshape([128, K])
    none = gl.zeros([64, 64], gl.float32, ACC)
    head = x.slice(0, 64, 0)
    tail = x.slice(64, 64, 0)
    first_gram = warpgroup_mma(head, head.permute((1, 0)), none, use_acc=False, is_async=True)
    second_gram = warpgroup_mma(tail, tail.permute((1, 0)), none, use_acc=False, is_async=True)
    grams = warpgroup_mma_wait(0, deps=[first_gram, second_gram])
    rank = gl.arange(0, 64, layout=down)[:, None]
    file = gl.arange(0, 64, layout=along)[None, :]
    if RAW:
        a = gain
        log_decay = ridge * LOG2E
        writes = pair
    else:
        energies = _vector()
        for half in gl.static_range(2):
            energies.index(half).store(_energy(grams[half]))
        energy = _as(energies, [2, 64]).load(line)
        a, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair, eps, floor, SCALED, DIRECT)
        log_decay = gl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    a = gl.where(writes & (gl.abs(a) < TINY), TINY, a)
    g = gl.associative_scan(log_decay, 1, _add)
    start = h.to(gl.int64) * tokens + first
    gl.store(eta + start + token, a, mask=here)
    gl.store(decay + start + token, g, mask=here)
    g_res = g
    if not DECAYED:
        before = gl.maximum(i - 1, 0) + gl.zeros([2, 64], gl.int32, line)
        g_res = gl.where(i > 0, gl.gather(g, before, 1), 0.0)
    ends = _vector()
    starts = _vector()
    gains = _vector()
    _as(ends, [2, 64]).store(g_res)
    _as(starts, [2, 64]).store(g)
    _as(gains, [2, 64]).store(a)

    whole: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[64, 4]], [128, 64], [1, 0])
    tile = gl.allocate_shared_memory(gl.float32, [128, 64], whole)
    columns = gl.allocate_shared_memory(gl.float32, [16, 128], LINE)
    for half in gl.static_range(2):
        power = ends.index(half).load(down)[:, None] - starts.index(half).load(along)[None, :]
        felt = gl.exp2(gl.where(rank > file, power, float("-inf"))) * gains.index(half).load(along)[None, :]
        coupled = grams[half] * felt
        tile.slice(half * 64, 64, 0).store(coupled)
        blocks = gl.permute(gl.reshape(_diagonal(coupled), [4, 16, 16]), (2, 0, 1))
        _as(columns, [16, 8, 16]).slice(half * 4, 4, 1).store(blocks)
    _substitute(columns, tile)

    narrow: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    below0 = _merge(tile.slice(0, 64, 0), 0, 16, narrow)
    below1 = _merge(tile.slice(0, 64, 0), 32, 16, narrow)
    below2 = _merge(tile.slice(64, 64, 0), 0, 16, narrow)
    below3 = _merge(tile.slice(64, 64, 0), 32, 16, narrow)
    tile.slice(16, 16, 0).slice(0, 16, 1).store(below0)
    tile.slice(48, 16, 0).slice(32, 16, 1).store(below1)
    tile.slice(80, 16, 0).slice(0, 16, 1).store(below2)
    tile.slice(112, 16, 0).slice(32, 16, 1).store(below3)
    below0 = _merge(tile.slice(0, 64, 0), 0, 32, narrow)
    below1 = _merge(tile.slice(64, 64, 0), 0, 32, narrow)
    tile.slice(32, 32, 0).slice(0, 32, 1).store(below0)
    tile.slice(96, 32, 0).slice(0, 32, 1).store(below1)

    i2 = gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))[:, None]
    j2 = gl.arange(0, 64, layout=gl.SliceLayout(0, HALF))[None, :]
    for half in gl.static_range(2):
        if c + half < chunks:
            result = gl.where(i2 > j2, tile.slice(half * 64, 64, 0).load(HALF), 0.0)  # the diagonal is 1
            slot = (n * chunks + c + half).to(gl.int64) * H + h
            gl.store(inverse + slot * 4096 + i2 * 64 + j2, result.to(dtype))
    bar._keep_alive()
