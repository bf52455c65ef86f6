"""What the walks of hopper_scaled_columns*.py share: a block's tiles, and what all columns of it have in common.

Traps: a block's tiles are copied one block ahead of where its couplings are made, and those one block ahead of their
use, behind barriers that are there for other reasons too; buffers of their own keep the compiler from adding more. A
stage is a number that goes round, since the compiler makes of a remainder by 3 one register for each address.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mma_v2,
)

from fastweight.kernels.gates import load_head, step_sizes
from fastweight.kernels.hopper_parts import HALF, LINE, SHARED
from fastweight.kernels.hopper_solve_columns import (
    ALONG,
    COLUMN,
    COPY_64_WIDE,
    COPY_128,
    COPY_128_WIDE,
    DOWN,
    ONE,
    ROWS,
    STAGES,
    UNDER,
    _row,
)
from fastweight.kernels.tiles import has_pair, source_rows

EDGE = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
TOKEN = gl.constexpr(gl.SliceLayout(1, EDGE.value))  # 8 threads have a token
SHORT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2))  # rows of 32 bytes
# Of gains in 32 bits: a load takes four tokens of a column at once.
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))


@gluon.jit
def reciprocal(x):
    """1 / x of normal numbers, to the last bits of float32."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def in_turn(x):
    """x, made here: the compiler puts nothing that needs it first, and no loads of all that come later."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def halves(both, D: gl.constexpr):
    """A tile [D, 32] as two [D, 16]."""
    left, right = gl.split(gl.permute(gl.reshape(both, [D, 2, 16]), (0, 2, 1)))
    return gl.convert_layout(left, ONE), gl.convert_layout(right, ONE)


@gluon.jit
def make_rings(dtype: gl.constexpr, gain_dtype: gl.constexpr, D: gl.constexpr):
    """Room for the tiles of STAGES blocks: of each 64 columns keys and queries in turn; values; gains."""
    of_gain: gl.constexpr = WORDS if gain_dtype == gl.float32 else SHARED
    keys = ()
    for _part in gl.static_range(D // 64):
        keys = keys + (gl.allocate_shared_memory(dtype, [STAGES * 2, 16, 64], SHARED),)
    values = gl.allocate_shared_memory(dtype, [STAGES, 16, D], ROWS)
    gains = gl.allocate_shared_memory(gain_dtype, [STAGES, 16, D], of_gain)
    return keys, values, gains


@gluon.jit
def keys_and_queries(keys, stage):
    """The keys of a block and under them its queries [32, 64]."""
    return keys._reinterpret(keys.dtype, [STAGES, 32, 64], SHARED).index(stage)


@gluon.jit
def make_shelves(dtype: gl.constexpr):
    """Room for what all columns of a block share, of two blocks: G, P in 16 bits, steps and decays at gain 1."""
    gram = gl.allocate_shared_memory(gl.float32, [64, 16], LINE)
    reads = gl.allocate_shared_memory(dtype, [2, 32, 16], SHORT)
    steps = gl.allocate_shared_memory(gl.float32, [2, 16], LINE)
    decays = gl.allocate_shared_memory(gl.float32, [2, 16], LINE)
    return gram, reads, steps, decays


@gluon.jit
def stage_after(stage):
    """The stage of the next block."""
    return gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit
def rows_of(pointer, first, h, H: gl.constexpr, D: gl.constexpr, start: gl.constexpr, W: gl.constexpr, L: gl.constexpr):
    """Addresses of 16 rows of one head, columns from `start` on: in 64 bits, of which all but one a thread are
    constants of the instruction."""
    i = gl.arange(0, 16, gl.SliceLayout(1, L)).to(gl.int64)[:, None]
    col = gl.arange(0, W, gl.SliceLayout(0, L)).to(gl.int64)[None, :]
    return pointer + (first * H + h) * D + (i * (H * D) + (col + start))


@gluon.jit
def copy_columns(shared, pointer, first, low, high, h, H: gl.constexpr, D: gl.constexpr, L: gl.constexpr):
    """Begins to copy 16 rows of one head; zeros where there is no token."""
    i = gl.arange(0, 16, gl.SliceLayout(1, L))[:, None]
    col = gl.arange(0, D, gl.SliceLayout(0, L))[None, :]
    at = rows_of(pointer, first, h, H, D, 0, D, L)
    async_copy.async_copy_global_to_shared(shared, at, mask=(i >= low) & (i < high) & (col >= 0))


@gluon.jit
def landed():
    """Waits for the copies; products of the matrix units see them behind the next fence and barrier."""
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()


@gluon.jit
def store_columns(pointer, tile, first, high, h, H: gl.constexpr, D: gl.constexpr):
    """Writes 16 rows of one head, a column a thread."""
    r = gl.arange(0, 16, DOWN)[:, None]
    col = gl.arange(0, D, ALONG)
    at = pointer + (first * H + h) * D + col
    for t in gl.static_range(16):
        gl.store(at + t * (H * D), _row(tile, r, t).to(pointer.dtype.element_ty), mask=(col >= 0) & (t < high))


@gluon.jit
def block_ends(low, high):
    """The rows where a sequence begins and ends, for a block that may lie before it; the compiler sees that no row that
    counts lies before the first."""
    return gl.minimum(low, 0), gl.where(low > 0, 0, high)


@gluon.jit
def copy_block(
    rings, stage, q, k, values, beta, previous, first, low, high, h, kh,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr,
):  # fmt: skip
    """Begins to copy the tiles of a block; zeros where there is no token."""
    keys, s_values, gains = rings
    narrow: gl.constexpr = HALF if D == 64 else COPY_128
    wide: gl.constexpr = COPY_64_WIDE if D == 64 else COPY_128_WIDE
    of_gain: gl.constexpr = wide if beta.dtype.element_ty == gl.float32 else narrow
    i = gl.arange(0, 16, gl.SliceLayout(1, HALF))
    col = gl.arange(0, 64, gl.SliceLayout(0, HALF))[None, :]
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    here = live[:, None] & (col >= 0)
    keyed = here & (source >= low)[:, None]
    for part in gl.static_range(D // 64):
        if previous is None:
            x = rows_of(k, first - SHIFT, kh, KH, D, part * 64, 64, HALF)
        else:
            x = k + (first * KH + kh) * D + (source.to(gl.int64)[:, None] * (KH * D) + (part * 64 + col))
        async_copy.async_copy_global_to_shared(keys[part].index(2 * stage), x, mask=keyed)
    copy_columns(s_values.index(stage), values, first, low, high, h, H, D, narrow)
    copy_columns(gains.index(stage), beta, first, low, high, h, H, D, of_gain)
    for part in gl.static_range(D // 64):
        queries = rows_of(q, first, kh, KH, D, part * 64, 64, HALF)
        async_copy.async_copy_global_to_shared(keys[part].index(2 * stage + 1), queries, mask=here)


@gluon.jit
def put_first_key(keys, stage, key0, keeps, n, kh, KH: gl.constexpr, D: gl.constexpr):
    """The carried key in the row that is paired with it, for all products to see."""
    for part in gl.static_range(D // 64):
        col = part * 64 + gl.arange(0, 64, gl.SliceLayout(0, HALF))
        tile = keys[part].index(2 * stage)
        begin = gl.load(key0 + (n.to(gl.int64) * KH + kh) * D + col).to(tile.dtype)
        tile.store(gl.where(keeps[:, None], begin[None, :], tile.load(HALF)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def couple(keys, stage, D: gl.constexpr):
    """Of a block's keys with its keys and queries: X X^T and under it Q X^T."""
    found = gl.zeros([32, 16], gl.float32, UNDER)
    for part in gl.static_range(D // 64):
        both = keys_and_queries(keys[part], stage).load(gl.DotOperandLayout(0, UNDER, 2))
        x = keys[part].index(2 * stage).permute((1, 0)).load(gl.DotOperandLayout(1, UNDER, 2))
        found = mma_v2(both, x, found)
    return found


@gluon.jit
def keep_state(stage, pointer, S, D: gl.constexpr):
    """Writes 64 key columns of a state by way of the memory of `stage` [64, D], which the threads are done with."""
    layout: gl.constexpr = HALF if D == 64 else COPY_128
    stage.permute((1, 0)).store(S.to(stage.dtype))
    gl.thread_barrier()
    ck = gl.arange(0, 64, gl.SliceLayout(1, layout)).to(gl.int64)
    cv = gl.arange(0, D, gl.SliceLayout(0, layout)).to(gl.int64)
    gl.store(pointer + (ck[:, None] * D + cv[None, :]), stage.load(layout))
    gl.thread_barrier()


@gluon.jit
def tokens_of(
    lam, energies, has_key, unmasked, previous, line, first, low, high, n, h,
    H: gl.constexpr, SHIFT: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Of a block's tokens: which exist, which write, their ridges, and with BACK their energies."""
    i = gl.arange(0, 16, TOKEN)
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    ridge = load_head(lam, first, i, h, H, pair, 0.0)
    energy = ridge
    if BACK:
        energy = gl.load(energies + line + i, mask=live, other=0.0)
    return live, pair, ridge, energy


@gluon.jit
def prepare(
    keys, stage, slot, shelves, tokens, energies, key0, previous, line, first, low, high, n, h, kh, eps, floor,
    H: gl.constexpr, KH: gl.constexpr, D: gl.constexpr, SHIFT: gl.constexpr, SCALED: gl.constexpr,
    DIRECT: gl.constexpr, BEFORE: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Puts what all columns of a block share where every thread finds it. Energies are written, unless BACK."""
    live, pair, ridge, energy = tokens
    gram, reads, steps, decays = shelves
    if key0 is not None:
        source, there = source_rows(previous, first, gl.arange(0, 16, gl.SliceLayout(1, HALF)), low, high, SHIFT)
        put_first_key(keys, stage, key0, there & (source < low), n, kh, KH, D)
    coupled = couple(keys, stage, D)
    gram = gram._reinterpret(gl.float32, [2, 32, 16], PLAIN).index(slot)
    gram.store(coupled)
    i = gl.arange(0, 32, gl.SliceLayout(1, UNDER))[:, None] - 16
    j = gl.arange(0, 16, gl.SliceLayout(0, UNDER))[None, :]
    reads.index(slot).store(gl.where(j < i if BEFORE else j <= i, coupled, 0.0).to(reads.dtype))
    if not BACK:
        t = gl.arange(0, 16, TOKEN)
        col = gl.arange(0, 16, gl.SliceLayout(0, EDGE))[None, :]
        energy = gl.sum(gl.where(t[:, None] == col, gram.slice(0, 16, 0).load(EDGE), 0.0), axis=1)
        gl.store(energies + line + t, energy, mask=live & (h % (H // KH) == 0))
    eta, ridge, _d, _a, _c, _o, _w = step_sizes(
        energy, gl.where(pair, 1.0, 0.0), ridge, pair, eps, floor, SCALED, DIRECT
    )
    steps.index(slot).store(eta)
    decays.index(slot).store(eta * ridge)


@gluon.jit
def rates_of(gains, shelves, stage, slot, floor):
    """eta and carry [16, D] of a block, a column a thread."""
    gain = gains.index(stage).load(COLUMN).to(gl.float32)
    carry = gl.maximum(1 - gain * shelves[3].index(slot).load(DOWN)[:, None], floor)
    return gain * shelves[2].index(slot).load(DOWN)[:, None], carry
