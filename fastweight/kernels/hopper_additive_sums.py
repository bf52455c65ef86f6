"""Of the one walk in reverse on Hopper: tiles, numbers of a chunk's tokens, sums over rows, gradients of gates, edges.

Each warp sums up its own part of a tile and puts it into memory that nobody else needs; once all warps have met, who
needs a sum adds up what they put. Names of rows and the algebra are those of hopper_additive_backward.py.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fastweight.kernels.gates import load_head, step_gradient
from fastweight.kernels.hopper_parts import LINE, nil

# Rows of what warps have summed up each for itself; those of the first two kinds are one a warp's rows.
OF_STEPS = gl.constexpr(0)
OF_DECAYS = gl.constexpr(4)
OF_READS = gl.constexpr(8)
OF_WRITES = gl.constexpr(10)
OF_ENERGY = gl.constexpr(12)
OF_STATES = gl.constexpr(14)
SHARE = gl.constexpr(15)
# Rows of the numbers of a chunk; cumulative decays are log2.
STEP = gl.constexpr(0)
DECAY = gl.constexpr(1)
READ_DECAY = gl.constexpr(2)  # as the read sees the state


@gluon.jit
def numbers_of():
    """Room for the numbers of two chunks, each kind in memory of its own: no barriers come between them."""
    a = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    b = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    c = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    return a, b, c


@gluon.jit
def row_of(numbers, at, WHICH: gl.constexpr, APART: gl.constexpr):
    """One kind of a chunk's numbers; APART: of those that `numbers_of` made, else of six rows that are one memory."""
    if APART:
        return numbers[WHICH].index(at)
    else:
        return numbers.index(at * 3 + WHICH)


@gluon.jit
def keep_numbers(numbers, at, loaded, BEFORE: gl.constexpr, APART: gl.constexpr):
    """Keeps the numbers of a chunk; returns the decay to its end."""
    a, g, before, g_last = loaded
    row_of(numbers, at, STEP, APART).store(a)
    row_of(numbers, at, DECAY, APART).store(g)
    row_of(numbers, at, READ_DECAY, APART).store(before if BEFORE else g)
    return g_last


@gluon.jit
def down(numbers, at, WHICH: gl.constexpr, layout: gl.constexpr, APART: gl.constexpr):
    return row_of(numbers, at, WHICH, APART).load(gl.SliceLayout(1, layout))


@gluon.jit
def across(numbers, at, WHICH: gl.constexpr, layout: gl.constexpr, APART: gl.constexpr):
    return row_of(numbers, at, WHICH, APART).load(gl.SliceLayout(0, layout))


@gluon.jit
def by_warps(tile, WARPS: gl.constexpr):
    """Sums of [64, 64] over the rows of each warp, [4, 64]; or of [64, K] over its columns, [WARPS, 64]."""
    if WARPS == 4:
        return gl.sum(gl.reshape(tile, [4, 16, 64]), axis=1)
    else:
        return gl.sum(gl.reshape(tile, [64, WARPS, tile.shape[1] // WARPS]), axis=2)


@gluon.jit
def sums_of(WIDE: gl.constexpr, WARPS: gl.constexpr):
    """Room for sums, each kind in memory of its own; the last two are of OF_STATES and SHARE."""
    whole: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    steps = gl.allocate_shared_memory(gl.float32, [4, 64], whole)
    decays = gl.allocate_shared_memory(gl.float32, [4, 64], whole)
    reads = gl.allocate_shared_memory(gl.float32, [WIDE, 64], whole)
    writes = gl.allocate_shared_memory(gl.float32, [WIDE, 64], whole)
    energies = gl.allocate_shared_memory(gl.float32, [WIDE, 64], whole)
    states = gl.allocate_shared_memory(gl.float32, [1, WARPS], LINE)
    share = gl.allocate_shared_memory(gl.float32, [1, 64], LINE)
    return steps, decays, reads, writes, energies, states, share


@gluon.jit
def _place(room, WHICH: gl.constexpr):
    return room[WHICH // 4 if WHICH < OF_READS else WHICH // 2 - 2]


@gluon.jit
def put_sums(room, WHICH: gl.constexpr, sums, APART: gl.constexpr):
    """Keeps what `by_warps` made. APART: in what `sums_of` made, else in any one memory."""
    WARPS: gl.constexpr = sums.shape[1]
    if APART:
        place = _place(room, WHICH)
        if WARPS != 64:
            place = place.permute((1, 0))
        place.store(sums)
    elif WARPS == 64:
        view = room._reinterpret(gl.float32, [8, 4, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        view.index(WHICH // 4).store(sums)
    else:
        view = room._reinterpret(gl.float32, [32 // WARPS, WARPS, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        view.index(WHICH // WARPS).permute((1, 0)).store(sums)


@gluon.jit
def total_of(room, WHICH: gl.constexpr, COUNT: gl.constexpr, layout: gl.constexpr, APART: gl.constexpr):
    """What they add up to, once all warps have met."""
    AT: gl.constexpr = 0 if APART else WHICH
    if APART:
        lines = _place(room, WHICH)._reinterpret(gl.float32, [COUNT, 64], LINE)
    else:
        lines = room._reinterpret(gl.float32, [32, 64], LINE)
    total = lines.index(AT).load(layout)
    for warp in gl.static_range(1, COUNT):
        total += lines.index(AT + warp).load(layout)
    return total


@gluon.jit
def steps_and_energies(
    room, numbers, at, g_last, WIDE: gl.constexpr, ENERGY: gl.constexpr, layout: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Gradients of steps, and energies if asked for, once all warps have met."""
    met = total_of(room, OF_WRITES, WIDE, layout, APART)
    met *= gl.exp2(g_last - row_of(numbers, at, DECAY, APART).load(layout))
    d_w = total_of(room, OF_STEPS, 4, layout, APART) + met
    energy = d_w
    if ENERGY:
        energy = total_of(room, OF_ENERGY, WIDE, layout, APART)
    return d_w, energy


@gluon.jit
def distance_in(layout: gl.constexpr):
    """Row minus column of a tile [64, 64]; rows unknown to be the same in every chunk, as in hopper_parts.py."""
    i = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.arange(0, 64, gl.SliceLayout(1, layout))], dtype=gl.int32, is_pure=False, pack=1
    )
    return i[:, None] - gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def views(tiles, key_tile, value_tile, state_ring, room, scores, stage, K: gl.constexpr, V: gl.constexpr):
    """Tiles of q, x, y, dO, S, dS, P and dP, as found from here on: what was found before need not be remembered."""
    q = tiles[0].index(nil() + stage).reshape([64, K])
    x = key_tile[0].index(nil() + stage).reshape([64, K])
    y = value_tile[0].index(nil()).reshape([64, V])
    do = tiles[1].index(nil() + stage).reshape([64, V])
    return q, x, y, do, state_ring[0].index(nil()), room.index(nil()), scores.index(nil()), scores.index(nil() + 1)


@gluon.jit
def state_overlap(S, dS, WARPS: gl.constexpr):
    """Sum of S .* dS [WARPS], each warp's own part."""
    rows = gl.sum(S.load(dS.type.layout).to(gl.float32) * dS, axis=1)
    return gl.sum(gl.reshape(rows, [WARPS, dS.shape[0] // WARPS]), axis=1)


@gluon.jit
def head_offsets(seg, h, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """Offsets of a head's state in states [segments, H, K, V], made anew where they are used."""
    ck = nil() + gl.arange(0, K, layout=gl.SliceLayout(1, layout))
    cv = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    return (seg.to(gl.int64) * H + h) * (K * V) + (ck[:, None] * V + cv[None, :])


@gluon.jit
def load_gates(beta, lam, at, i, high, first, h, H: gl.constexpr, SHIFT: gl.constexpr, RAW: gl.constexpr):
    """What `put_gates` needs of a chunk, long before it does: behind all products nobody is left to wait with."""
    pair = (i < high) & (at + i >= SHIFT)
    gain = pair
    ridge = pair
    if not RAW:
        gain = load_head(beta, first, i, h, H, pair, 1.0)
        ridge = load_head(lam, first, i, h, H, pair, 0.0)
    return pair, gain, ridge


@gluon.jit
def put_gates(
    given, d_beta, d_lam, i, high, first, h, d_w, d_log, energy, eps, floor,
    H: gl.constexpr, RAW: gl.constexpr, SCALED: gl.constexpr, DIRECT: gl.constexpr, LIVE: gl.constexpr,
):  # fmt: skip
    """Writes the gradients of beta and lam; returns that of the energy."""
    pair, gain, ridge = given
    if RAW:
        d_gain = gl.where(pair, d_w, 0.0)
        d_ridge = gl.where(pair, d_log, 0.0)
        share = gl.where(pair, 0.0, 0.0)  # not used
    else:
        d_gain, d_ridge, share = step_gradient(d_w, d_log, energy, gain, ridge, pair, eps, floor, SCALED, DIRECT, LIVE)
    if d_beta is not None:
        gl.store(d_beta + first * H + h + i * H, d_gain, mask=i < high)
    if d_lam is not None:
        gl.store(d_lam + first * H + h + i * H, d_ridge, mask=i < high)
    return share


@gluon.jit
def announce(descs, bars, stage, wanted):
    """First half of `fetch`: before the barrier that the copies wait for, so that the compiler adds none between."""
    for t in gl.static_range(len(descs)):
        mbarrier.expect(bars[t].index(stage), descs[t].block_type.nbytes, pred=wanted)


@gluon.jit
def bring(descs, rings, bars, stage, coords, wanted):
    """The second half."""
    for t in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[t], coords[t], bars[t].index(stage), rings[t].index(stage), pred=wanted)


@gluon.jit
def put_edges(d_k, x, n, h, start, count, chunks, length, H: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Of shifted keys: gradients of a sequence's first tokens (if x), and of its last, which is paired with none."""
    line: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, line))[:, None]
    first = d_k + n.to(gl.int64) * length * (H * K) + h * K
    if x is not None:  # noqa: SIM102 (Triton's own conditions stand alone)
        if start == 0:
            at = (i - 1) * (H * K) + gl.arange(0, K, layout=gl.SliceLayout(0, line))[None, :]
            gl.store(first + at, x.load(line), mask=(i > 0) & (i <= length))
    if start + count == chunks:
        col = gl.arange(0, K, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
        last = (length - 1).to(gl.int64) * (H * K)
        gl.store(first + last + col, gl.zeros_like(col).to(d_k.dtype.element_ty))
