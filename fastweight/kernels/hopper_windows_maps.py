"""Regression over a window on Hopper: the maps of windows_parts.py, token after token written out.

`forth` makes A, D and B of a part, `back` its H, as `part_maps` and `part_rows` do, without what is zero: a pair that
has not left the window yet has no coefficient to fade or to multiply, which is half of them.

In Gluon because plain Triton takes half a minute to arrange so many loads and stores, which have one arrangement here.

Programs (part, head, sequence) take `per` blocks of every sequence, from block `base` of each on, and what is made is
numbered by these; what pairs have in common by all blocks. Where there is one "sequence", these are all blocks.

Traps: as there.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fastweight.kernels.tiles import decay_rows
from fastweight.kernels.windows_maps import CARRY
from fastweight.kernels.windows_parts import HELD, SIDES, part_place, reads_of

COLUMNS = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # a thread each
FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))  # every thread has them


@gluon.jit
def _numbers(pointer, FIRST: gl.constexpr, STOP: gl.constexpr):
    """Numbers FIRST to before STOP, a tuple; they are loaded four at a time."""
    found = ()
    for at in gl.static_range(FIRST // 4 * 4, STOP, 4):
        four = gl.load(pointer + (at + gl.arange(0, 4, FOUR)))
        even, odd = gl.split(gl.reshape(four, [2, 2]))
        first, third = gl.split(gl.reshape(even, [1, 2]))
        second, fourth = gl.split(gl.reshape(odd, [1, 2]))
        found = found + (gl.sum(first, axis=0), gl.sum(second, axis=0), gl.sum(third, axis=0), gl.sum(fourth, axis=0))
    return found[FIRST % 4 : STOP - FIRST // 4 * 4]


@gluon.jit
def _meets(inner, window, a, WINDOW: gl.constexpr):
    """G of pair a with the whole window, times that; G row by row up to the diagonal."""
    met = inner[a * (a + 1) // 2] * window[0]
    for b in gl.static_range(1, WINDOW):
        if b <= a:
            met += inner[a * (a + 1) // 2 + b] * window[b]
        else:
            met += inner[b * (b + 1) // 2 + a] * window[b]
    return met


@gluon.jit(do_not_specialize=["base", "per", "length", "chunks", "tokens"])
def forth(
    gram, reads, weight, facts, read_part, write_part, rows,
    base, per, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: gl.constexpr, WINDOW: gl.constexpr, TOKENS: gl.constexpr, PAIRS: gl.constexpr, PART: gl.constexpr,
    ROWS: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """A and D [16, 32] of one part of a block of one head, where given, and where given B [ROWS, 32]."""
    h = gl.program_id(1)
    base += gl.program_id(2) * (chunks - per)
    pid = gl.program_id(0) + gl.program_id(2) * (per * (TOKENS // PART))
    n, _first, _low, high, number, _corner, line, shelf = part_place(
        pid, h, base, cu, chunk_seq, chunk_start, length, chunks, tokens, H, WINDOW, TOKENS, PAIRS, PART
    )
    if n < 0:
        return
    corner = (number + base.to(gl.int64) * (H * TOKENS // PART)) * (PAIRS * PAIRS)
    matrix = gram + corner
    seen = reads + corner
    c = gl.arange(0, 32, COLUMNS)
    pair = c % HELD
    zero = gl.zeros([32], gl.float32, COLUMNS)
    at = number * (HELD * SIDES) + c
    # Coefficients of pairs that have left the window, and in `live` of those in it, whose residuals are `window`.
    z = ()
    window = ()
    live = ()
    inner = ()  # G within the window, row by row up to the diagonal
    for a in gl.static_range(WINDOW):
        window = window + (gl.where(c == a, 1.0, 0.0),)
        live = live + (zero,)
        inner = inner + _numbers(matrix + a * PAIRS, 0, a + 1)
    left = 1.0
    for t in gl.static_range(PART):
        w = gl.load(weight + line + t, mask=t < high, other=0.0)
        carry = gl.load(facts + shelf + CARRY * tokens + t, mask=t < high, other=1.0)
        if rows is not None:
            for a in gl.static_range(WINDOW):
                gl.store(rows + (number * ROWS + t * WINDOW + a) * SIDES + c, window[a].to(rows.dtype.element_ty))
        wrote = ()
        kept = ()
        for a in gl.static_range(WINDOW):
            wrote = wrote + (carry * live[a] + w * window[a],)
        for p in gl.static_range(t):
            kept = kept + (z[p] * carry,)
        if read_part is not None:
            row = zero
            sees = _numbers(seen + t * PAIRS, 0, t + WINDOW)
            for p in gl.static_range(t):
                row += sees[p] * (z[p] if BEFORE else kept[p])
            for a in gl.static_range(WINDOW):
                row += sees[t + a] * (live[a] if BEFORE else wrote[a])
            gl.store(read_part + at + t * SIDES, row.to(read_part.dtype.element_ty))
        z = kept + (wrote[0],)
        live = wrote[1:] + (zero,)
        if t + 1 < PART:
            left *= carry
            new = t + WINDOW
            meets = _numbers(matrix + new * PAIRS, 0, t + WINDOW + 1)
            enter = gl.where(pair == new, gl.where(c < HELD, 1.0, 1 - left), 0.0)
            for p in gl.static_range(t + 1):
                enter -= meets[p] * z[p]
            stay = ()
            shifted = ()
            for a in gl.static_range(1, WINDOW):
                enter -= meets[t + a] * wrote[a]
                # y = W + F
                target = gl.where(pair == t + a, 1 - carry, 0.0)
                for b in gl.static_range(1, a + 1):
                    shifted = shifted + (inner[a * (a + 1) // 2 + b],)
                stay = stay + (carry * window[a] + target - w * _meets(inner, window, a, WINDOW),)
            inner = shifted + meets[t + 1 : t + WINDOW + 1]
            window = stay + (enter,)
    if write_part is not None:
        for a in gl.static_range(WINDOW - 1):
            z = z + (live[a],)
        for p in gl.static_range(HELD):
            if p < PART + WINDOW - 1:
                gl.store(write_part + at + p * SIDES, z[p].to(write_part.dtype.element_ty))
            else:
                gl.store(write_part + at + p * SIDES, zero.to(write_part.dtype.element_ty))
            if p >= PART:
                gl.store(read_part + at + p * SIDES, zero.to(read_part.dtype.element_ty))


@gluon.jit(do_not_specialize=["base", "per", "length", "chunks", "tokens"])
def back(
    gram, reads, weight, decay, facts, rows, base, per, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: gl.constexpr, WINDOW: gl.constexpr, TOKENS: gl.constexpr, PAIRS: gl.constexpr, PART: gl.constexpr,
    ROWS: gl.constexpr, BEFORE: gl.constexpr,
):  # fmt: skip
    """H [ROWS, 32] of one part of a block of one head: what `forth` does, in reverse."""
    h = gl.program_id(1)
    base += gl.program_id(2) * (chunks - per)
    pid = gl.program_id(0) + gl.program_id(2) * (per * (TOKENS // PART))
    n, _first, _low, high, number, _corner, line, shelf = part_place(
        pid, h, base, cu, chunk_seq, chunk_start, length, chunks, tokens, H, WINDOW, TOKENS, PAIRS, PART
    )
    if n < 0:
        return
    if high <= 0:  # of an earlier block's sequence, or of none: nothing reads these rows
        return
    corner = (number + base.to(gl.int64) * (H * TOKENS // PART)) * (PAIRS * PAIRS)
    matrix = gram + corner
    seen = reads + corner
    c = gl.arange(0, 32, COLUMNS)
    zero = gl.zeros([32], gl.float32, COLUMNS)
    # Only differences within the part matter; its first token's row before may lie in another block.
    g = decay_rows(decay, line, 0, c, high)
    if BEFORE:
        g = decay_rows(decay, line, 0, c - 1, high)
    # Coefficients in dS_t of pairs that have left the window, and in `live` of those in it, whose rows are `window`.
    z = ()  # the later pair first
    window = ()
    live = ()
    inner = ()  # G within the window, row by row up to the diagonal
    end = gl.load(decay + line + gl.minimum(high, PART) - 1)
    for a in gl.static_range(WINDOW):
        read = reads_of(seen, g, c, end, PART - 1, PART - 1 + a, PART, PAIRS, BEFORE)
        window = window + (gl.where(c == HELD + PART - 1 + a, 1.0, 0.0) + read,)
        live = live + (zero,)
        inner = inner + _numbers(matrix + (PART - 1 + a) * PAIRS, PART - 1, PART + a)
    for step in gl.static_range(PART):
        t = PART - 1 - step
        for a in gl.static_range(WINDOW):
            gl.store(rows + (number * ROWS + t * WINDOW + a) * SIDES + c, window[a].to(rows.dtype.element_ty))
        if step + 1 < PART:
            w = gl.load(weight + line + t, mask=t < high, other=0.0)
            carry = gl.load(facts + shelf + CARRY * tokens + t, mask=t < high, other=1.0)
            wrote = ()
            for a in gl.static_range(WINDOW):
                wrote = wrote + (carry * live[a] - w * window[a],)
            new = t - 1
            at = gl.load(decay + line + gl.minimum(t, high) - 1)
            enter = gl.where(c == new + HELD, gl.exp2(end - at), 0.0)
            enter += reads_of(seen, g, c, at, new, new, PART, PAIRS, BEFORE)
            kept = ()
            for p in gl.static_range(step):
                kept = kept + (z[p] * carry,)
            z = kept + (wrote[WINDOW - 1],)
            meets = _numbers(matrix + new * PAIRS, PART - 2 - step, PART + WINDOW - 1)
            for p in gl.static_range(step + 1):
                enter += meets[WINDOW + step - p] * z[p]
            reader = t if BEFORE else new
            sees = _numbers(seen + reader * PAIRS, PART - 2 - step, PART + WINDOW - 2 - step)
            stay = ()
            first_met = (meets[0],)
            for a in gl.static_range(WINDOW - 1):
                enter += meets[1 + a] * wrote[a]
                pull = gl.where(c == reader, sees[1 + a], 0.0)
                first_met = first_met + (meets[1 + a],)
                for b in gl.static_range(a + 1):
                    first_met = first_met + (inner[a * (a + 1) // 2 + b],)
                stay = stay + (carry * window[a] + pull - w * _meets(inner, window, a, WINDOW),)
            inner = first_met
            window = (enter,) + stay
            live = (zero,) + wrote[: WINDOW - 1]
