"""Regression over a window: the maps of windows_parts.py, token after token written out, for blocks of four parts.

`forth` makes A, D and B of a part, `back` its H, as `part_maps` and `part_rows` do, without what is zero: a pair that
has not left the window yet has no coefficient to fade or to multiply, which is half of them.

Traps: as there.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005

import triton
import triton.language as tl

from fastweight.kernels.tiles import decay_rows
from fastweight.kernels.windows_maps import CARRY
from fastweight.kernels.windows_parts import HELD, SIDES, part_place, reads_of


@triton.jit
def _meets(inner, window, a, WINDOW: tl.constexpr):
    """G of pair a with the whole window, times that; G row by row up to the diagonal."""
    met = inner[a * (a + 1) // 2] * window[0]
    for b in tl.static_range(1, WINDOW):
        if b <= a:
            met += inner[a * (a + 1) // 2 + b] * window[b]
        else:
            met += inner[b * (b + 1) // 2 + a] * window[b]
    return met


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def forth(
    gram, reads, weight, facts, read_part, write_part, rows, base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """A and D [16, 32] of one part of a block of one head, where given, and where given B [ROWS, 32]."""
    h = tl.program_id(1)
    n, _first, _low, high, number, corner, line, shelf = part_place(
        tl.program_id(0), h, base, cu, chunk_seq, chunk_start, length, chunks, tokens, H, WINDOW, TOKENS, PAIRS, PART
    )
    if n < 0:
        return
    matrix = gram + corner
    seen = reads + corner
    c = tl.arange(0, SIDES)
    zero = tl.zeros([SIDES], tl.float32)
    at = number * (HELD * SIDES) + c
    # Coefficients of pairs that have left the window, and in `live` of those in it, whose residuals are `window`.
    z = ()
    window = ()
    live = ()
    inner = ()  # G within the window, row by row up to the diagonal
    for a in tl.static_range(WINDOW):
        window = window + (tl.where(c == a, 1.0, 0.0),)
        live = live + (zero,)
        for b in tl.static_range(a + 1):
            inner = inner + (tl.load(matrix + a * PAIRS + b),)
    left = tl.full([], 1.0, tl.float32)
    for t in tl.static_range(PART):
        w = tl.load(weight + line + t, mask=t < high, other=0.0)
        carry = tl.load(facts + shelf + CARRY * tokens + t, mask=t < high, other=1.0)
        if rows is not None:
            for a in tl.static_range(WINDOW):
                tl.store(rows + (number * ROWS + t * WINDOW + a) * SIDES + c, window[a].to(rows.dtype.element_ty))
        wrote = ()
        kept = ()
        for a in tl.static_range(WINDOW):
            wrote = wrote + (carry * live[a] + w * window[a],)
        for p in tl.static_range(t):
            kept = kept + (z[p] * carry,)
        if read_part is not None:
            row = zero
            for p in tl.static_range(t):
                row += tl.load(seen + t * PAIRS + p) * (z[p] if BEFORE else kept[p])
            for a in tl.static_range(WINDOW):
                row += tl.load(seen + t * PAIRS + t + a) * (live[a] if BEFORE else wrote[a])
            tl.store(read_part + at + t * SIDES, row.to(read_part.dtype.element_ty))
        z = kept + (wrote[0],)
        live = wrote[1:] + (zero,)
        if t + 1 < PART:
            left *= carry
            new = t + WINDOW
            enter = tl.where(c == new, 1.0, 0.0) + tl.where(c == new + HELD, 1 - left, 0.0)
            for p in tl.static_range(t + 1):
                enter -= tl.load(matrix + new * PAIRS + p) * z[p]
            stay = ()
            shifted = ()
            fresh = ()
            for a in tl.static_range(1, WINDOW):
                met_new = tl.load(matrix + new * PAIRS + t + a)
                fresh = fresh + (met_new,)
                enter -= met_new * wrote[a]
                # y = W + F
                target = tl.where((c == t + a) | (c == t + a + HELD), 1 - carry, 0.0)
                for b in tl.static_range(1, a + 1):
                    shifted = shifted + (inner[a * (a + 1) // 2 + b],)
                stay = stay + (carry * window[a] + target - w * _meets(inner, window, a, WINDOW),)
            inner = shifted + fresh + (tl.load(matrix + new * (PAIRS + 1)),)
            window = stay + (enter,)
    if write_part is not None:
        for a in tl.static_range(WINDOW - 1):
            z = z + (live[a],)
        for p in tl.static_range(HELD):
            if p < PART + WINDOW - 1:
                tl.store(write_part + at + p * SIDES, z[p].to(write_part.dtype.element_ty))
            else:
                tl.store(write_part + at + p * SIDES, zero.to(write_part.dtype.element_ty))
            if p >= PART:
                tl.store(read_part + at + p * SIDES, zero.to(read_part.dtype.element_ty))


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def back(
    gram, reads, weight, decay, facts, rows, base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """H [ROWS, 32] of one part of a block of one head: what `forth` does, in reverse."""
    h = tl.program_id(1)
    n, _first, _low, high, number, corner, line, shelf = part_place(
        tl.program_id(0), h, base, cu, chunk_seq, chunk_start, length, chunks, tokens, H, WINDOW, TOKENS, PAIRS, PART
    )
    if n < 0:
        return
    if high <= 0:  # of an earlier block's sequence, or of none: nothing reads these rows
        return
    matrix = gram + corner
    seen = reads + corner
    c = tl.arange(0, SIDES)
    zero = tl.zeros([SIDES], tl.float32)
    # Only differences within the part matter; its first token's row before may lie in another block.
    g = decay_rows(decay, line, 0, c, high)
    if BEFORE:
        g = decay_rows(decay, line, 0, c - 1, high)
    # Coefficients in dS_t of pairs that have left the window, and in `live` of those in it, whose rows are `window`.
    z = ()  # the later pair first
    window = ()
    live = ()
    inner = ()  # G within the window, row by row up to the diagonal
    end = tl.load(decay + line + tl.minimum(high, PART) - 1)
    for a in tl.static_range(WINDOW):
        read = reads_of(seen, g, c, end, PART - 1, PART - 1 + a, PART, PAIRS, BEFORE)
        window = window + (tl.where(c == HELD + PART - 1 + a, 1.0, 0.0) + read,)
        live = live + (zero,)
        for b in tl.static_range(a + 1):
            inner = inner + (tl.load(matrix + (PART - 1 + a) * PAIRS + PART - 1 + b),)
    for step in tl.static_range(PART):
        t = PART - 1 - step
        for a in tl.static_range(WINDOW):
            tl.store(rows + (number * ROWS + t * WINDOW + a) * SIDES + c, window[a].to(rows.dtype.element_ty))
        if step + 1 < PART:
            w = tl.load(weight + line + t, mask=t < high, other=0.0)
            carry = tl.load(facts + shelf + CARRY * tokens + t, mask=t < high, other=1.0)
            wrote = ()
            for a in tl.static_range(WINDOW):
                wrote = wrote + (carry * live[a] - w * window[a],)
            new = t - 1
            at = tl.load(decay + line + tl.minimum(t, high) - 1)
            enter = tl.where(c == new + HELD, tl.exp2(end - at), 0.0)
            enter += reads_of(seen, g, c, at, new, new, PART, PAIRS, BEFORE)
            kept = ()
            for p in tl.static_range(step):
                kept = kept + (z[p] * carry,)
            z = kept + (wrote[WINDOW - 1],)
            for p in tl.static_range(step + 1):
                enter += tl.load(matrix + new * PAIRS + PART - 1 - p + WINDOW - 1) * z[p]
            reader = t if BEFORE else new
            stay = ()
            first_met = (tl.load(matrix + new * (PAIRS + 1)),)
            for a in tl.static_range(WINDOW - 1):
                met_new = tl.load(matrix + new * PAIRS + t + a)
                enter += met_new * wrote[a]
                pull = tl.where(c == reader, tl.load(seen + reader * PAIRS + t + a), 0.0)
                first_met = first_met + (met_new,)
                for b in tl.static_range(a + 1):
                    first_met = first_met + (inner[a * (a + 1) // 2 + b],)
                stay = stay + (carry * window[a] + pull - w * _meets(inner, window, a, WINDOW),)
            inner = first_met
            window = (enter,) + stay
            live = (zero,) + wrote[: WINDOW - 1]
