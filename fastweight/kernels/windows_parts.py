"""Regression over a window: (X X^T, Q X^T, gates) -> maps of parts of a block, and of the block that they make up.

A block of tokens is walked as one; its parts, of PART tokens each, touch at most 16 pairs. Row (t, a) is pair t + a in
the window of token t. With F = X S_0 the predictions at a part's start and W = Y - F, all that a part does is linear in
[W; F], by maps that are the same for every value column and so are found by walking the recurrence once on the
identity's columns:

    r_t,a    residual of pair t + a on S_{t-1}       z   coefficients of the pairs in S_t = carry_t S_0 + X^T z_t
    r of a pair that stays:  carry r + (1 - carry) y - w sum_b G r_t,b        G = X X^T, w = eta / B
    r of a pair that enters: W + (1 - carry so far) F - sum_j G z_j
    O = A [W; F] + decay .* Q S_0    Z = D [W; F]    r = B [W; F]    and in reverse h_t,a = x dS_t of rows = H [dO; dZ]

`part_maps` makes A, D and B, `part_rows` makes H; `join` makes the A and D of the whole block, part after part: a part
finds F = carry X S_0 + sum over the parts before it of decay .* G z.

Traps: a pair that is none (before the sequence) has x = 0, which makes every map ignore it. A pair may be in two parts,
and then has two coefficients. One column belongs to one thread, so no sum crosses threads while a part is walked; the
matrices are read back from memory as single numbers.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# ruff: noqa: RUF005, SIM108

import triton
import triton.language as tl

from fastweight.kernels.tiles import chunk_span, decay_before, decay_rows, fade
from fastweight.kernels.windows_maps import CARRY, VECTOR

HELD = tl.constexpr(16)  # pairs of a part, at most
SIDES = tl.constexpr(32)  # columns of a part's maps


@triton.jit
def part_place(
    pid, h, base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Of program `pid`: sequence (-1: none), part's first token, ends, number, and where its numbers lie."""
    PARTS: tl.constexpr = TOKENS // PART
    n, first, low, high = chunk_span(pid // PARTS + base, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    start = pid % PARTS * PART
    number = (pid // PARTS).to(tl.int64) * H + h
    corner = number * (PAIRS * PAIRS) + start * (PAIRS + 1)
    line = h.to(tl.int64) * tokens + first + start
    shelf = h.to(tl.int64) * (tokens * (VECTOR + WINDOW)) + first + start
    return n, first + start, low - start, high - start, number * PARTS + pid % PARTS, corner, line, shelf


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def part_maps(
    gram, reads, weight, facts, read_part, write_part, rows, base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """A and D [16, 32] of one part of a block of one head, and where given B [ROWS, 32]."""
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
    for _ in tl.static_range(PART):
        z = z + (zero,)
    window = ()
    live = ()
    inner = ()  # G within the window, row by row up to the diagonal
    for a in tl.static_range(WINDOW):
        window = window + (tl.where(c == a, 1.0, 0.0),)
        live = live + (zero,)
        for b in tl.static_range(a + 1):
            inner = inner + (tl.load(matrix + a * PAIRS + b),)
    left = tl.full([], 1.0, tl.float32)
    for t in range(PART):
        w = tl.load(weight + line + t, mask=t < high, other=0.0)
        carry = tl.load(facts + shelf + CARRY * tokens + t, mask=t < high, other=1.0)
        if rows is not None:
            for a in tl.static_range(WINDOW):
                tl.store(rows + (number * ROWS + t * WINDOW + a) * SIDES + c, window[a].to(rows.dtype.element_ty))
        wrote = ()
        for a in tl.static_range(WINDOW):
            wrote = wrote + (carry * live[a] + w * window[a],)
        row = zero
        if BEFORE:
            for p in tl.static_range(PART):
                row += tl.load(seen + t * PAIRS + p) * z[p]
            for a in tl.static_range(WINDOW):
                row += tl.load(seen + t * PAIRS + t + a) * live[a]
        kept = ()
        for p in tl.static_range(PART):
            kept = kept + (z[p] * carry,)
        z = kept
        if not BEFORE:
            for p in tl.static_range(PART):
                row += tl.load(seen + t * PAIRS + p) * z[p]
            for a in tl.static_range(WINDOW):
                row += tl.load(seen + t * PAIRS + t + a) * wrote[a]
        tl.store(read_part + at + t * SIDES, row.to(read_part.dtype.element_ty))
        kept = ()
        for p in tl.static_range(PART):
            kept = kept + (tl.where(t == p, wrote[0], z[p]),)
        z = kept
        left *= carry
        new = tl.minimum(t + WINDOW, HELD - 1)  # after the last token no pair enters
        enter = tl.where(c == new, 1.0, 0.0) + tl.where(c == new + HELD, 1 - left, 0.0)
        for p in tl.static_range(PART):
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
            met = inner[a * (a + 1) // 2] * window[0]
            for b in tl.static_range(1, WINDOW):
                if b <= a:
                    met += inner[a * (a + 1) // 2 + b] * window[b]
                    shifted = shifted + (inner[a * (a + 1) // 2 + b],)
                else:
                    met += inner[b * (b + 1) // 2 + a] * window[b]
            stay = stay + (carry * window[a] + target - w * met,)
        inner = shifted + fresh + (tl.load(matrix + new * (PAIRS + 1)),)
        window = stay + (enter,)
        live = wrote[1:] + (zero,)
    for a in tl.static_range(WINDOW - 1):
        z = z + (live[a],)
    for p in tl.static_range(HELD):
        if p < PART + WINDOW - 1:
            tl.store(write_part + at + p * SIDES, z[p].to(write_part.dtype.element_ty))
        else:
            tl.store(write_part + at + p * SIDES, zero.to(write_part.dtype.element_ty))
        if p >= PART:
            tl.store(read_part + at + p * SIDES, zero.to(read_part.dtype.element_ty))


@triton.jit
def reads_of(seen, g, c, at, t, p, PART: tl.constexpr, PAIRS: tl.constexpr, BEFORE: tl.constexpr):
    """How pair p at time t is read by every later token: decay .* (Q X^T)[., p] over the columns of dO."""
    keep = (c > t if BEFORE else c >= t) & (c < PART)
    return tl.load(seen + c * PAIRS + p, mask=keep, other=0.0) * tl.exp2(tl.where(keep, g - at, float("-inf")))


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def part_rows(
    gram, reads, weight, decay, facts, rows, base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """H [ROWS, 32] of one part of a block of one head: what `part_maps` does, in reverse."""
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
    z = ()
    for _ in tl.static_range(PART):
        z = z + (zero,)  # of pairs WINDOW - 1 and on
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
    for back in range(PART):
        t = PART - 1 - back
        for a in tl.static_range(WINDOW):
            tl.store(rows + (number * ROWS + t * WINDOW + a) * SIDES + c, window[a].to(rows.dtype.element_ty))
        w = tl.load(weight + line + t, mask=t < high, other=0.0)
        carry = tl.load(facts + shelf + CARRY * tokens + t, mask=t < high, other=1.0)
        wrote = ()
        for a in tl.static_range(WINDOW):
            wrote = wrote + (carry * live[a] - w * window[a],)
        new = tl.maximum(t - 1, 0)  # before the first token there is no other
        at = tl.load(decay + line + tl.minimum(new + 1, high) - 1)
        enter = tl.where(c == new + HELD, tl.exp2(end - at), 0.0)
        enter += reads_of(seen, g, c, at, new, new, PART, PAIRS, BEFORE)
        kept = ()
        for p in tl.static_range(PART):
            kept = kept + (tl.where(t == p, wrote[WINDOW - 1], z[p] * carry),)
            enter += tl.load(matrix + new * PAIRS + p + WINDOW - 1) * kept[p]
        z = kept
        reader = new
        if BEFORE:
            reader = t
        stay = ()
        first_met = (tl.load(matrix + new * (PAIRS + 1)),)
        for a in tl.static_range(WINDOW - 1):
            met_new = tl.load(matrix + new * PAIRS + t + a)
            enter += met_new * wrote[a]
            pull = tl.where(c == reader, tl.load(seen + reader * PAIRS + t + a), 0.0)
            met = inner[a * (a + 1) // 2] * window[0]
            first_met = first_met + (met_new,)
            for b in tl.static_range(1, WINDOW):
                if b <= a:
                    met += inner[a * (a + 1) // 2 + b] * window[b]
                else:
                    met += inner[b * (b + 1) // 2 + a] * window[b]
            for b in tl.static_range(a + 1):
                first_met = first_met + (inner[a * (a + 1) // 2 + b],)
            stay = stay + (carry * window[a] + pull - w * met,)
        inner = first_met
        window = (enter,) + stay
        live = (zero,) + wrote[: WINDOW - 1]


@triton.jit
def load_part(pointer, number, SIDE: tl.constexpr, FLIP: tl.constexpr):
    """One half [16, 16] of a part's map: of W (0) or F (1); with FLIP its transpose."""
    i = tl.arange(0, HELD)
    base = pointer + number * (HELD * SIDES) + SIDE * HELD
    if FLIP:
        return tl.load(base + i[None, :] * SIDES + i[:, None])
    else:
        return tl.load(base + i[:, None] * SIDES + i[None, :])


@triton.jit
def slot_places(s, decay, line, first, high, PARTS: tl.constexpr, WINDOW: tl.constexpr, PART: tl.constexpr):
    """Slot s is pair s % 16 of part s // 16: its part, its pair in the block, if any, decays at the part's ends."""
    part = s // HELD
    held = (part < PARTS) & (s % HELD < PART + WINDOW - 1)
    begin = decay_before(decay, line, first, part * PART, high)
    end = decay_rows(decay, line, first, part * PART + PART - 1, high)
    return part, part * PART + s % HELD, held, begin, end


@triton.jit
def pair_slots(j, PARTS: tl.constexpr, WINDOW: tl.constexpr, PART: tl.constexpr):
    """The slots of each pair of a block: the later, whether there is one, the earlier, whether there is one."""
    late = tl.minimum(j // PART, PARTS - 1)
    in_late = j - late * PART < PART + WINDOW - 1
    in_early = (late > 0) & (j - (late - 1) * PART < PART + WINDOW - 1)
    early = tl.maximum(late - 1, 0)
    return late * HELD + j - late * PART, in_late, early * HELD + j - early * PART, in_early


@triton.jit
def _spread_part(pointer, number, s, part, SIDE: tl.constexpr):
    """`load_part` in the rows of its own slots, of all slots [SLOTS, 16]."""
    i = tl.arange(0, HELD)
    at = pointer + number * (HELD * SIDES) + SIDE * HELD + (s % HELD)[:, None] * SIDES + i[None, :]
    return tl.load(at, mask=(s // HELD == part)[:, None] & (i >= 0)[None, :], other=0.0)


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def join(
    gram, reads, decay, read_part, write_part, read_map, write_map,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    SLOTS: tl.constexpr, BC: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A and D [PAIRS, 2 PAIRS] of one block of one head, BC columns of them."""
    PARTS: tl.constexpr = TOKENS // PART
    h = tl.program_id(1)
    n, first, _low, high = chunk_span(tl.program_id(0) + base, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    number = tl.program_id(0).to(tl.int64) * H + h
    kept = (tl.program_id(0) + base).to(tl.int64) * H + h
    matrix = gram + number * (PAIRS * PAIRS)
    seen = reads + number * (PAIRS * PAIRS)
    line = h.to(tl.int64) * tokens
    u = tl.arange(0, HELD)
    s = tl.arange(0, SLOTS)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    part_of, pair_of, held, _begin, end = slot_places(s, decay, line, first, high, PARTS, WINDOW, PART)
    dtype = write_part.dtype.element_ty
    kind = write_map.dtype.element_ty
    z = tl.zeros([SLOTS, BC], tl.float32)
    for part in range(PARTS):
        row = u + part * PART
        before = held & (part_of < part)
        keep = (row < PAIRS)[:, None] & (before & (pair_of < PAIRS))[None, :]
        at = row[:, None] * PAIRS + pair_of[None, :]
        start = decay_before(decay, line, first, part * PART, high)
        meet = tl.load(matrix + at, mask=keep, other=0.0) * fade(before, start - end)[None, :]
        if BEFORE:
            g_read = decay_before(decay, line, first, row, high)
        else:
            g_read = decay_rows(decay, line, first, row, high)
        met = tl.load(seen + at, mask=keep, other=0.0) * fade(before[None, :], g_read[:, None] - end[None, :])
        low_z = z.to(dtype)
        f = tl.where(c[None, :] == (row + PAIRS)[:, None], tl.exp2(start), 0.0)
        f = tl.dot(meet.to(dtype), low_z, acc=f, input_precision=DOT)
        own = (c[None, :] == row[:, None]) | (c[None, :] == (row + PAIRS)[:, None])
        w = (tl.where(own, 1.0, 0.0) - f).to(dtype)
        f = f.to(dtype)
        place = number * PARTS + part
        out = tl.dot(met.to(dtype), low_z, input_precision=DOT)
        out = tl.dot(load_part(read_part, place, 0, False), w, acc=out, input_precision=DOT)
        out = tl.dot(load_part(read_part, place, 1, False), f, acc=out, input_precision=DOT)
        tl.store(read_map + (kept * PAIRS + row)[:, None] * (2 * PAIRS) + c[None, :], out.to(kind),
                 mask=(u < PART)[:, None] & (c < 2 * PAIRS)[None, :])  # fmt: skip
        z = tl.dot(_spread_part(write_part, place, s, part, 0), w, acc=z, input_precision=DOT)
        z = tl.dot(_spread_part(write_part, place, s, part, 1), f, acc=z, input_precision=DOT)
    j = tl.arange(0, PAIRS)
    whole = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
    late, in_late, early, in_early = pair_slots(j, PARTS, WINDOW, PART)
    is_late = (late[:, None] == s[None, :]) & in_late[:, None]
    is_early = (early[:, None] == s[None, :]) & in_early[:, None]
    fold = tl.where((is_late | is_early) & held[None, :], 1.0, 0.0).to(dtype)
    z = tl.dot(fold, (z * fade(held, whole - end)[:, None]).to(dtype), input_precision=DOT)
    at = kept * (PAIRS * 2 * PAIRS) + j[:, None] * (2 * PAIRS) + c[None, :]
    tl.store(write_map + at, z.to(kind))
    tl.store(read_map + at, tl.zeros_like(z).to(kind), mask=(j >= TOKENS)[:, None] & (c < 2 * PAIRS)[None, :])
