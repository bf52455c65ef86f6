"""Windows in the one walk in reverse of hopper_additive_backward.py: what they add to a chunk without one.

With G, w, R and W as in additive.py, a chunk has 65 - R steps t and 64 pairs; pair r, of which the first R - 1 are of
the chunk before, is written by the steps r - R + 1 .. r. Let L_b[r] be what it is worth after b + 1 of these. Then

    W[t, r] = 2^(F_t - G_r) L_(R-1)[r]   (t >= r)          W[t, r] = L_b[r]   (t - r = b + 1 - R < 0)

so from t = r on it is a chunk without a window whose steps are L_(R-1), and only R - 1 diagonals beside that one are
new (all one further if reads come before writes). What the loss has to do with pair r at its last step, A[r], and with
those diagonals, as sums c_m[t] of the m next to t in its row, comes together at the end:

    T_m[t] = A[t] + c_(R-1-m)[t]                 dw_s = sum_m T_m[s + m] 2^(G_(s+m) - G_s)          (0 <= m < R)
    dl_u = sum_(m >= 1) sum_(t - m < u <= t) T_m[t] 2^(G_t - G_(t-m)) w_(t-m)

Gradients of the first R - 1 pairs go out as they are, in 16 bits; the chunk before, which comes next, adds its own.
Where that is another program's, they go to memory of their own, and `add_borders` follows.

Traps: rows of q and dO past the chunk's steps are the next chunk's, and see nothing because their F is -inf.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastweight.kernels.additive_gradient import add_shared
from fastweight.kernels.hopper_parts import nil

LONGEST = 5  # a row's diagonals are told apart by their column modulo 4
SHARED_ROWS = gl.constexpr(16)  # room for the pairs that two programs share, of each piece


@gluon.jit
def _columns_right(t, layout: gl.constexpr, BEFORE: gl.constexpr):
    """[64, 4], by row and by column modulo 4: how far right of the first new diagonal the column of a new one is."""
    LAG: gl.constexpr = 1 if BEFORE else 0
    return (gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :] - t[:, None] + (LAG - 1)) & 3


@gluon.jit
def load_near(shelf, WINDOW: gl.constexpr, BEFORE: gl.constexpr, num_warps: gl.constexpr):
    """The L below L_(R-1) as `with_near` finds them [64, 4], of reads that the chunk has: nobody else masks others."""
    LAG: gl.constexpr = 1 if BEFORE else 0
    beside: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [num_warps, 1], [1, 0])
    t = gl.arange(0, 64, layout=gl.SliceLayout(1, beside))
    right = _columns_right(t, beside, BEFORE)
    at = shelf + (WINDOW - 2 - right) * 64 + (t[:, None] + right + (1 - LAG))
    keep = (right < WINDOW - 1) & (t < 65 - WINDOW)[:, None] & (t >= LAG)[:, None]
    return gl.load(at, mask=keep, other=0.0)


@gluon.jit
def load_window(
    decay, sums, line, slot, first, high, i, WINDOW: gl.constexpr, BEFORE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """L_(R-1), G of it, F and the chunk's last G, and the other L as `with_near` finds them: what `fold` made.

    slot: of the chunk and head.
    """
    end = gl.minimum(high, 65 - WINDOW)
    shelf = sums + slot.to(gl.int64) * (64 * (WINDOW + 1))
    g_last = gl.load(decay + line + first + end - 1)
    if BEFORE:
        g_read = gl.load(decay + line + first - 1 + gl.minimum(i, end), mask=i > 0, other=0.0)
    else:
        g_read = gl.load(decay + line + first + gl.minimum(i, end - 1))
    g_read = gl.where(i < end, g_read, float("-inf"))
    near = load_near(shelf, WINDOW, BEFORE, num_warps)
    return (gl.load(shelf + (WINDOW - 1) * 64 + i), gl.load(shelf + WINDOW * 64 + i), g_read, g_last), near


@gluon.jit
def _near(distance, WINDOW: gl.constexpr, BEFORE: gl.constexpr):
    """Which pairs [64, 64] are on the new diagonals."""
    LAG: gl.constexpr = 1 if BEFORE else 0
    return (distance > LAG - WINDOW) & (distance < LAG)


@gluon.jit
def with_near(seen, distance, lately, at, WINDOW: gl.constexpr, BEFORE: gl.constexpr):
    """W, from what it is for t >= r."""
    apart = gl.reshape(seen, [64, 16, 4])
    near = gl.reshape(_near(distance, WINDOW, BEFORE), [64, 16, 4])
    worth = lately.index(at).load(gl.SliceLayout(1, apart.type.layout))[:, None, :]
    return gl.convert_layout(gl.reshape(gl.where(near, worth, apart), [64, 64]), seen.type.layout)


@gluon.jit
def put_diagonals(beside, felt, distance, WINDOW: gl.constexpr, BEFORE: gl.constexpr, WIDE: gl.constexpr):
    """Keeps the diagonals of [64, 64] that are new, by row and by column modulo 4; WIDE: warp groups side by side."""
    felt = gl.reshape(gl.where(_near(distance, WINDOW, BEFORE), felt, 0.0), [64, WIDE, 16 // WIDE, 4])
    beside.permute((1, 0, 2)).store(gl.sum(felt, axis=2))


@gluon.jit
def _ahead(values, row, by: gl.constexpr):
    """values[row + by], of rows that have one."""
    return gl.gather(values, gl.minimum(row + by, 63), 0)


@gluon.jit
def window_from(values, row, WINDOW: gl.constexpr):
    """Sum of 64 values over the WINDOW from each row on, of rows that have them."""
    total = values
    for by in gl.static_range(1, WINDOW):
        total += _ahead(values, row, by)
    return total


@gluon.jit
def window_up_to(values, row, WINDOW: gl.constexpr):
    """The same up to each row; what lies before the first is 0."""
    total = values
    for by in gl.static_range(1, WINDOW):
        total += gl.where(row >= by, gl.gather(values, gl.maximum(row - by, 0), 0), 0.0)
    return total


@gluon.jit
def pairs_of(row, at, WINDOW: gl.constexpr, SHIFT: gl.constexpr):
    """How many pairs each step of a chunk writes, at least 1."""
    return gl.minimum(gl.maximum(at + row + (1 - SHIFT), 1), WINDOW).to(gl.float32)


@gluon.jit
def of_steps(
    beside, met, weight, decay, line, at, high, row, WINDOW: gl.constexpr, BEFORE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Gradients of w, and what those of log-decays have inside windows, from A (`met`) and the diagonals."""
    LAG: gl.constexpr = 1 if BEFORE else 0
    each: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 32, 1], [1, num_warps, 1], [2, 1, 0])
    by_row: gl.constexpr = gl.SliceLayout(0, each)
    parts = gl.sum(beside.load(each), axis=0)
    right = _columns_right(gl.arange(0, 64, layout=gl.SliceLayout(1, by_row)), by_row, BEFORE)
    start = decay + line + at
    end = gl.minimum(high, 65 - WINDOW)
    g = gl.load(start + gl.minimum(row, end - 1))
    d_w = met
    apart = ()
    for m in gl.static_range(WINDOW):
        term = met
        if m < WINDOW - 1:
            near = gl.convert_layout(gl.sum(gl.where(right < WINDOW - 1 - m, parts, 0.0), axis=1), row.type.layout)
            if BEFORE:
                near = _ahead(near, row, 1)  # of the read that sees this step's write last
            term += gl.where(row < end - LAG, near, 0.0)
        if m == 0:
            d_w = term
        else:
            step = row - m
            term *= gl.exp2(g - gl.load(start + gl.minimum(gl.maximum(step, 0), end - 1)))
            d_w += _ahead(term, row, m)
            apart = apart + (  # noqa: RUF005
                term * gl.load(weight + line + at + step, mask=(step >= 0) & (step < end), other=0.0),
            )
    d_log = met * 0
    for i in gl.static_range(WINDOW - 1):
        faded = apart[i]
        for m in gl.static_range(i + 1, WINDOW - 1):
            faded += apart[m]
        d_log += faded if i == 0 else _ahead(faded, row, i)
    return d_w, d_log


@gluon.jit
def _rows_at(base, i, col, H: gl.constexpr, W: gl.constexpr):
    """Addresses of rows of one head. By sixteens, of which no thread has a part: they are constants of instructions."""
    near = base + ((nil() + (i & 15))[:, None] * (H * W) + col[None, :])
    return near + ((i & 48) * (H * W))[:, None]


@gluon.jit
def leave(
    pointer, stage, at, shift, first, h, high, c, count, halo, piece,
    H: gl.constexpr, W: gl.constexpr, WINDOW: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Writes the gradient [64, W] of a chunk's pairs to the tokens `shift` before them.

    at: of the chunk's first step in its sequence; first: of the sequence in all tokens; high: how many steps there are;
    c: how many chunks of this program came before it, of `count`.
    """
    HALO: gl.constexpr = WINDOW - 1
    line: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [num_warps, 1], [1, 0])
    few: gl.constexpr = gl.BlockedLayout([1, 4], [128 // W, W // 4], [num_warps, 1], [1, 0])
    tile = stage.load(line)
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, line))
    col = gl.arange(0, W, layout=gl.SliceLayout(0, line))
    begin = at - HALO - shift
    base = pointer + (first + begin) * (H * W) + h * W
    own = gl.where(c + 1 == count, gl.maximum(HALO, -begin), 0)
    own_end = gl.where(c > 0, 56, high + HALO)
    if (c + 1 == count) & (at > 0):
        there = halo + (piece.to(gl.int64) * (SHARED_ROWS * H) + h) * W
        gl.store(_rows_at(there, i, col, H, W), tile, mask=(i < HALO)[:, None])
    if c > 0:
        i8 = nil() + gl.arange(56, 64, layout=gl.SliceLayout(1, few))
        col8 = gl.arange(0, W, layout=gl.SliceLayout(0, few))
        at8 = base + (i8[:, None] * (H * W) + col8[None, :])
        more = gl.load(at8, mask=(i8 >= 64 - HALO)[:, None], other=0.0)
        gl.store(at8, stage.slice(56, 8, 0).load(few) + more, mask=(i8 >= own)[:, None])
    gl.store(_rows_at(base, i, col, H, W), tile, mask=((i >= own) & (i < own_end))[:, None])


@gluon.jit
def leave_reads(
    pointer, stage, at, first, h, high, H: gl.constexpr, W: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Writes the gradient [64, W] of a chunk's reads, of which it has `high`."""
    line: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [num_warps, 1], [1, 0])
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, line))
    col = gl.arange(0, W, layout=gl.SliceLayout(0, line))
    base = pointer + (first + at) * (H * W) + h * W
    gl.store(_rows_at(base, i, col, H, W), stage.load(line), mask=(i < high)[:, None])


@triton.jit(do_not_specialize=["length", "segments", "per_segment"])
def add_borders(
    halo_k, halo_v, d_k, d_v, length, segments, per_segment,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds what pieces, but for a sequence's first, contribute to the pairs before them."""
    n = tl.program_id(0) // (segments - 1)
    piece = n + tl.program_id(0) + 1
    at = (piece - n * segments) * per_segment * (65 - WINDOW)
    first = n.to(tl.int64) * length + at
    h = tl.program_id(1)
    add_shared(halo_k, halo_v, d_k, d_v, piece, first, -at, h, H, K, V, BK, BV, WINDOW, SHIFT)
