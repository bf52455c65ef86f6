"""Regression over a window, the part of backward that is parallel over blocks: state gradients -> q, k and gates.

Notation as in windows_parts.py; the maps of parts are made again. Slot (b, p) is pair p of part b, carry the decays
between what is multiplied:

    f_b = carry X_b S_0 + sum_{c<b} carry G_bc z_c             w_b = y_b - f_b      z_b = D [w_b; f_b]
    dz_b = carry X_b dS + sum_{c>b} (carry G_bc df_c + carry (Q_c X_b^T)^T dO_c)
    [dw_b; df_b + dw_b] = [A; D]^T [dO_b; dz_b]
    d(X X^T)_bc = carry z_b . df_c    d(Q X^T)_tb = carry dO_t . z_b, both of parts c > b and their tokens t
    dQ = carry dO S_0^T + d(Q X^T) X    dX = carry df S_0^T + carry z dS^T + (dG + dG^T) X + d(Q X^T)^T Q

`sweep` does this, forth and back over the parts of a block; products over value columns end there. Inside a part, of
rows (t, a) of its windows, the residuals r = B [w; f] and h = H [dO; dz] are not made, only their products: with
M = [dO_b; dz_b] [w_b; f_b]^T, `inside` finds

    dO r^T, dz r^T = M B^T    h r^T = H M B^T    d eta_t / B = sum_a r . h
    d(Q X^T)_t,s = decay w_s dO_t . r_s    d(X X^T)_t,s = -decay w_t w_s h_t . r_s, s < t

and the top eigenvalue mu = u^T G u of a window gives its share d mu u u^T to dG, between rows of one token. `finish`
(windows_finish.py) multiplies by keys, queries and states.

Traps: no product's operand is transposed from an accumulator (Triton 3.6 miscompiles that on Hopper). The gradient of a
log-decay is a sum of terms that all carry it, not a difference of totals: `through` is what passes by a whole part.
Blocks share WINDOW - 1 pairs: what the later one gives them is added by `add_shared` there.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head, step_gradient, store_head
from fastweight.kernels.tiles import (
    chunk_span,
    decay_before,
    decay_rows,
    fade,
    has_pair,
    load_keys,
    load_tile,
    source_rows,
    state_tile,
)
from fastweight.kernels.windows_maps import COUNT, ENERGY, VECTOR
from fastweight.kernels.windows_parts import HELD, SIDES, load_part, part_place, slot_places


@triton.jit
def _slot_pairs(has_key, unmasked, first, pair_of, held, low, high, n, WINDOW: tl.constexpr, SHIFT: tl.constexpr):
    """As `block_pairs`, of slots."""
    i = pair_of - (WINDOW - 1)
    source, live = source_rows(None, first, i, low, high, SHIFT)
    return i, source, has_pair(unmasked, has_key, first, i, source, live & held, low, n)


@triton.jit
def _add_tile(pointer, at, tile, keep, more):
    """Stores a tile, on top of what is there if `more`."""
    tile += tl.load(pointer + at, mask=keep & more, other=0.0).to(tl.float32)
    tl.store(pointer + at, tile.to(pointer.dtype.element_ty), mask=keep)


@triton.jit
def _slot_tile(pointer, shelf, s, cv, rows, V: tl.constexpr):
    """Rows of slots, BV columns of them."""
    return tl.load(
        pointer + shelf + s[:, None] * V + cv[None, :], mask=(s < rows)[:, None] & (cv < V)[None, :], other=0.0
    )


@triton.jit
def _keep_slots(pointer, shelf, tile, s, cv, rows, V: tl.constexpr):
    """Writes what `_slot_tile` reads."""
    keep = (s < rows)[:, None] & (cv < V)[None, :]
    tl.store(pointer + shelf + s[:, None] * V + cv[None, :], tile.to(pointer.dtype.element_ty), mask=keep)


@triton.jit
def _meet(matrix, from_pair, to_pair, keep, power, PAIRS: tl.constexpr):
    """Entries of G or Q X^T between pairs (or tokens) of two parts, with the decay between them."""
    keep = keep & (from_pair < PAIRS)[:, None] & (to_pair < PAIRS)[None, :]
    return tl.load(matrix + from_pair[:, None] * PAIRS + to_pair[None, :], mask=keep, other=0.0) * fade(keep, power)


@triton.jit
def _forth(
    v, has_key, unmasked, matrix, decay, write_part, missed, part, shelf, cv, first, low, high, n, h, number, line,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """What a part, if it is one, needs besides the parts before it: y, w so far, faded G with those, D."""
    u = tl.arange(0, HELD)
    s = tl.arange(0, SLOTS)
    part_of, pair_of, held, _begin, end = slot_places(s, decay, line, first, high, PARTS, WINDOW, PART)
    row = u + part * PART
    held_here = (u < PART + WINDOW - 1) & (part < PARTS)
    i, _source, pair = _slot_pairs(has_key, unmasked, first, row, held_here, low, high, n, WINDOW, SHIFT)
    y = load_tile(v, first, i, h, cv, pair, H, V, BV)
    w = _slot_tile(missed, shelf, u + part * HELD, cv, PARTS * HELD, V)
    before = held & (part_of < part) & (part < PARTS)
    start = decay_before(decay, line, first, part * PART, high)
    meet = _meet(matrix, row, pair_of, before[None, :], (start - end)[None, :], PAIRS)
    place = number * PARTS + tl.minimum(part, PARTS - 1)
    return y, w, meet, load_part(write_part, place, 0, False), load_part(write_part, place, 1, False)


@triton.jit
def _back(
    d_o, matrix, decay, read_part, write_part, lead, part, shelf, cv, first, high, h, number, line,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr, PARTS: tl.constexpr,
    PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """What a part, if it is one, needs besides the parts after it: dO, dz so far, faded G with those, A and D of df."""
    u = tl.arange(0, HELD)
    s = tl.arange(0, SLOTS)
    part_of, pair_of, held, begin, _end = slot_places(s, decay, line, first, high, PARTS, WINDOW, PART)
    row = u + part * PART
    do = load_tile(d_o, first, row, h, cv, (u < PART) & (row < high) & (part >= 0), H, V, BV)
    keep = ((u >= 0) & (part >= 0))[:, None] & (cv < V)[None, :]
    dz = tl.load(lead + shelf + (u + part * HELD)[:, None] * V + cv[None, :], mask=keep, other=0.0)
    after = held & (part_of > part) & (part >= 0)
    stop = decay_rows(decay, line, first, part * PART + PART - 1, high)
    meet = _meet(matrix, row, pair_of, after[None, :], (begin - stop)[None, :], PAIRS)
    place = number * PARTS + tl.maximum(part, 0)
    # Of df = A_f^T dO + D_f^T dz - dw
    by_o = load_part(read_part, place, 1, True).to(tl.float32) - load_part(read_part, place, 0, True)
    by_z = load_part(write_part, place, 1, True).to(tl.float32) - load_part(write_part, place, 0, True)
    return do, dz, meet, by_o, by_z


@triton.jit
def _walk_parts(
    v, d_o, has_key, unmasked, matrix, decay, read_part, write_part, missed, wrote, lead, df,
    shelf, cv, first, low, high, n, h, number, line,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From what the state gives each slot, `missed` and `lead`: w and z forth, dz (into `lead`) and df back.

    What a part needs is asked for while the one before it is being worked on.
    """
    PARTS: tl.constexpr = TOKENS // PART
    u = tl.arange(0, HELD)
    s = tl.arange(0, SLOTS)
    dtype = write_part.dtype.element_ty
    y, w, meet, by_w, by_f = _forth(
        v, has_key, unmasked, matrix, decay, write_part, missed, 0, shelf, cv, first, low, high, n, h, number, line,
        H, V, BV, WINDOW, PARTS, PAIRS, PART, SLOTS, SHIFT,
    )  # fmt: skip
    for part in range(PARTS):
        z = _slot_tile(wrote, shelf, s, cv, part * HELD, V)
        next_y, next_w, next_meet, next_by_w, next_by_f = _forth(
            v, has_key, unmasked, matrix, decay, write_part, missed, part + 1, shelf, cv, first, low, high, n, h,
            number, line, H, V, BV, WINDOW, PARTS, PAIRS, PART, SLOTS, SHIFT,
        )  # fmt: skip
        w = w.to(tl.float32) - tl.dot(meet.to(dtype), z, input_precision=DOT)
        f = (y.to(tl.float32) - w).to(dtype)
        w = w.to(dtype)
        slot = u + part * HELD
        _keep_slots(missed, shelf, w, slot, cv, SLOTS, V)
        z = tl.dot(by_f, f, acc=tl.dot(by_w, w, input_precision=DOT), input_precision=DOT)
        _keep_slots(wrote, shelf, z, slot, cv, SLOTS, V)
        y, w, meet, by_w, by_f = next_y, next_w, next_meet, next_by_w, next_by_f
        tl.debug_barrier()
    do, dz, meet, by_o, by_z = _back(
        d_o, matrix, decay, read_part, write_part, lead, PARTS - 1, shelf, cv, first, high, h, number, line,
        H, V, BV, WINDOW, PARTS, PAIRS, PART, SLOTS,
    )  # fmt: skip
    for back in range(PARTS):
        part = PARTS - 1 - back
        after = (s // HELD > part) & (s < PARTS * HELD)
        later = tl.load(df + shelf + s[:, None] * V + cv[None, :], mask=after[:, None] & (cv < V)[None, :], other=0.0)
        next_do, next_dz, next_meet, next_by_o, next_by_z = _back(
            d_o, matrix, decay, read_part, write_part, lead, part - 1, shelf, cv, first, high, h, number, line,
            H, V, BV, WINDOW, PARTS, PAIRS, PART, SLOTS,
        )  # fmt: skip
        low_dz = tl.dot(meet.to(dtype), later, acc=dz.to(tl.float32), input_precision=DOT).to(dtype)
        slot = u + part * HELD
        _keep_slots(lead, shelf, low_dz, slot, cv, SLOTS, V)
        f = tl.dot(by_o.to(dtype), do.to(dtype), input_precision=DOT)
        f = tl.dot(by_z.to(dtype), low_dz, acc=f, input_precision=DOT)
        _keep_slots(df, shelf, f, slot, cv, SLOTS, V)
        do, dz, meet, by_o, by_z = next_do, next_dz, next_meet, next_by_o, next_by_z
        tl.debug_barrier()


@triton.jit
def _between(
    v, d_o, has_key, unmasked, matrix, seen, decay, g_read, missed, wrote, begun, outer, lead, df, met, d_gram, d_reads,
    do, s, shelf, cv, first, low, high, n, h, number, line, more,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr,
    PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Of 64 slots: M, dG and d(Q X^T) to later parts; what they give to each read; what passes by each part."""
    PARTS: tl.constexpr = TOKENS // PART
    u = tl.arange(0, HELD)
    t = tl.arange(0, PAIRS)
    ss = tl.arange(0, SLOTS)
    part_of, pair_of, held, _begin, end = slot_places(s, decay, line, first, high, PARTS, WINDOW, PART)
    to_part, to_pair, to_held, begin, _end = slot_places(ss, decay, line, first, high, PARTS, WINDOW, PART)
    dtype = wrote.dtype.element_ty
    room: tl.constexpr = PARTS * HELD
    z = _slot_tile(wrote, shelf, s, cv, room, V)
    f = _slot_tile(df, shelf, s, cv, room, V)
    written = tl.sum(z.to(tl.float32) * _slot_tile(outer, shelf, s, cv, room, V).to(tl.float32), axis=1)
    passes = tl.sum(tl.where(part_of[None, :] < u[:, None], written[None, :], 0.0), axis=1)
    taken = tl.sum(f.to(tl.float32) * _slot_tile(begun, shelf, s, cv, room, V).to(tl.float32), axis=1)
    passes += tl.sum(tl.where(part_of[None, :] > u[:, None], taken[None, :], 0.0), axis=1)
    # To the reads of later tokens.
    later = (t // PART)[:, None] > part_of[None, :]
    keep = later & ((t < TOKENS) & (t < high))[:, None] & held[None, :]
    power = g_read[:, None] - end[None, :]
    dp = tl.dot(do, tl.trans(z), input_precision=DOT)
    at = number * (PAIRS * SLOTS) + t[:, None] * SLOTS + s[None, :]
    _add_tile(d_reads, at, dp * fade(keep, power), (t >= 0)[:, None] & (s >= 0)[None, :], more)
    flow = dp * _meet(seen, t, pair_of, keep, power, PAIRS)
    pulls = tl.sum(flow, axis=1)
    past = tl.dot(tl.where((t // PART)[None, :] > u[:, None], 1.0, 0.0), flow, input_precision=DOT)
    passes += tl.sum(tl.where(part_of[None, :] < u[:, None], past, 0.0), axis=1)
    # To the predictions of later parts.
    keep = (to_part[None, :] > part_of[:, None]) & to_held[None, :] & held[:, None]
    power = begin[None, :] - end[:, None]
    dg = tl.dot(z, tl.trans(_slot_tile(df, shelf, ss, cv, room, V)), input_precision=DOT)
    at = number * (SLOTS * SLOTS) + s[:, None] * SLOTS + ss[None, :]
    _add_tile(d_gram, at, dg * fade(keep, power), (s >= 0)[:, None] & (ss >= 0)[None, :], more)
    flow = dg * _meet(matrix, pair_of, to_pair, keep, power, PAIRS)
    past = tl.dot(tl.where(part_of[None, :] < u[:, None], 1.0, 0.0), flow, input_precision=DOT)
    passes += tl.sum(tl.where(to_part[None, :] > u[:, None], past, 0.0), axis=1)
    # Within each part.
    i, _source, pair = _slot_pairs(has_key, unmasked, first, pair_of, held, low, high, n, WINDOW, SHIFT)
    y = load_tile(v, first, i, h, cv, pair, H, V, BV).to(tl.float32)
    w = _slot_tile(missed, shelf, s, cv, room, V)
    f = (y - w.to(tl.float32)).to(dtype)
    row = part_of * PART + s % HELD
    mine = load_tile(d_o, first, row, h, cv, (s < room) & (s % HELD < PART) & (row < high), H, V, BV).to(dtype)
    dz = _slot_tile(lead, shelf, s, cv, room, V)
    at = (number * PARTS + part_of)[:, None] * (SIDES * SIDES) + (s % HELD)[:, None] * SIDES + (s % HELD)[None, :]
    keep = (part_of[:, None] == part_of[None, :]) & (s < room)[:, None]
    _add_tile(met, at, tl.dot(mine, tl.trans(w), input_precision=DOT), keep, more)
    _add_tile(met, at + HELD, tl.dot(mine, tl.trans(f), input_precision=DOT), keep, more)
    _add_tile(met, at + HELD * SIDES, tl.dot(dz, tl.trans(w), input_precision=DOT), keep, more)
    _add_tile(met, at + HELD * SIDES + HELD, tl.dot(dz, tl.trans(f), input_precision=DOT), keep, more)
    return pulls, passes


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def sweep(
    q, k, v, d_o, key0, has_key, unmasked, gram, reads, decay, states, d_states, read_part, write_part,
    missed, wrote, begun, outer, lead, df, met, d_gram, d_reads, read, through,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
    SHIFT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of one head: z, df of slots; M of parts; dG, d(Q X^T) between parts; dO . reads; what passes parts.

    begun, outer: what the state before the block, and the gradient of that after it, give each slot.
    """
    PARTS: tl.constexpr = TOKENS // PART
    block = tl.program_id(0) + base
    h = tl.program_id(1)
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    number = tl.program_id(0).to(tl.int64) * H + h
    kept = block.to(tl.int64) * H + h
    matrix = gram + number * (PAIRS * PAIRS)
    seen = reads + number * (PAIRS * PAIRS)
    line = h.to(tl.int64) * tokens
    t = tl.arange(0, PAIRS)
    u = tl.arange(0, HELD)
    own = (t < TOKENS) & (t < high)
    ck = tl.arange(0, BK)
    dtype = write_part.dtype.element_ty
    room: tl.constexpr = PARTS * HELD
    g_read = decay_before(decay, line, first, t, high) if BEFORE else decay_rows(decay, line, first, t, high)
    whole = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
    passes = tl.zeros([HELD], tl.float32)
    pulls = tl.zeros([PAIRS], tl.float32)
    shelf = number * (room * V)
    for c in range(0, V, BV):
        cv = c + tl.arange(0, BV)
        at, keep = state_tile(ck, cv, K, V, BK, BV)
        S = tl.load(states + kept * (K * V) + at, mask=keep, other=0.0)
        dS = tl.load(d_states + kept * (K * V) + at, mask=keep, other=0.0)
        do = load_tile(d_o, first, t, h, cv, own, H, V, BV)
        qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
        passes += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0) * tl.exp2(whole)
        pulled = tl.sum(tl.dot(qt, S, input_precision=DOT) * do.to(tl.float32), axis=1)
        pulled *= tl.exp2(tl.where(own, g_read, 0.0))
        pulls += pulled
        passes += tl.sum(tl.where((t // PART)[None, :] > u[:, None], pulled[None, :], 0.0), axis=1)
        do = do.to(dtype)
        for half in range(SLOTS // 64):
            s = tl.arange(0, 64) + half * 64
            part_of, pair_of, held, begin, end = slot_places(s, decay, line, first, high, PARTS, WINDOW, PART)
            i, source, pair = _slot_pairs(has_key, unmasked, first, pair_of, held, low, high, n, WINDOW, SHIFT)
            x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
            y = load_tile(v, first, i, h, cv, pair, H, V, BV).to(tl.float32)
            f = tl.dot(x, S, input_precision=DOT) * tl.exp2(begin)[:, None]
            _keep_slots(begun, shelf, f, s, cv, room, V)
            _keep_slots(missed, shelf, y - f, s, cv, room, V)
            dz = tl.dot(x, dS, input_precision=DOT) * tl.exp2(whole - end)[:, None]
            _keep_slots(outer, shelf, dz, s, cv, room, V)
            later = own[:, None] & held[None, :] & ((t // PART)[:, None] > part_of[None, :])
            sees = _meet(seen, t, pair_of, later, g_read[:, None] - end[None, :], PAIRS).to(dtype)
            dz = tl.dot(tl.trans(sees), do, acc=dz, input_precision=DOT)
            _keep_slots(lead, shelf, dz, s, cv, room, V)
        tl.debug_barrier()
        _walk_parts(
            v, d_o, has_key, unmasked, matrix, decay, read_part, write_part, missed, wrote, lead, df, shelf, cv, first,
            low, high, n, h, number, line, H, V, BV, WINDOW, TOKENS, PAIRS, PART, SLOTS, SHIFT, DOT,
        )  # fmt: skip
        for half in range(SLOTS // 64):
            to_reads, past = _between(
                v, d_o, has_key, unmasked, matrix, seen, decay, g_read, missed, wrote, begun, outer, lead, df, met,
                d_gram, d_reads, do, tl.arange(0, 64) + half * 64, shelf, cv, first, low, high, n, h, number, line,
                c > 0, H, V, BV, WINDOW, TOKENS, PAIRS, PART, SLOTS, SHIFT, DOT,
            )  # fmt: skip
            pulls += to_reads
            passes += past
        tl.debug_barrier()
    tl.store(read + line + first + t, pulls, mask=own)
    tl.store(through + number * HELD + u, passes)


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def inside(
    beta, lam, has_key, unmasked, gram, reads, weight, decay, facts, rows, rows_back, met, read, through,
    d_gram, d_reads, d_beta, d_lam, base, cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One part of a block of one head: its own share of dG and d(Q X^T), and the gradients of beta and lam."""
    PARTS: tl.constexpr = TOKENS // PART
    h = tl.program_id(1)
    n, first, low, high, number, corner, line, shelf = part_place(
        tl.program_id(0), h, base, cu, chunk_seq, chunk_start, length, chunks, tokens, H, WINDOW, TOKENS, PAIRS, PART
    )
    if n < 0:
        return
    if high <= 0:
        return
    part = tl.program_id(0) % PARTS
    u = tl.arange(0, HELD)
    uu = tl.arange(0, SIDES)
    own = (u < PART) & (u < high)
    row = tl.arange(0, ROWS)
    tok = row // WINDOW
    place = tok + row % WINDOW
    real = (tok < PART) & (tok < high)
    last = tl.minimum(tok, tl.minimum(high, PART) - 1)
    g_row = tl.load(decay + line + last)
    g_end = tl.load(decay + line + tl.minimum(high, PART) - 1)
    g_begin = tl.load(decay + line - 1, mask=part > 0, other=0.0)
    g_miss = tl.load(decay + line + last - 1, mask=(part > 0) | (last > 0), other=0.0)
    own_last = tl.minimum(u, tl.minimum(high, PART) - 1)
    if BEFORE:
        g_read = tl.load(decay + line + own_last - 1, mask=(part > 0) | (own_last > 0), other=0.0)
    else:
        g_read = tl.load(decay + line + own_last)
    w = tl.where(real, tl.load(weight + line + last), 0.0)
    to_end = tl.exp2(g_end - g_row)
    from_start = tl.exp2(g_miss - g_begin)
    dtype = rows.dtype.element_ty
    product = met + number * (SIDES * SIDES)
    at_rows = (number * ROWS + row)[:, None] * SIDES + uu[None, :]
    in_rows = real[:, None] & (uu >= 0)[None, :]
    b = tl.load(rows + at_rows, mask=in_rows, other=0.0).to(tl.float32)
    lead = tl.load(rows_back + at_rows, mask=in_rows, other=0.0).to(tl.float32)
    lead = tl.dot(lead, tl.load(product + uu[:, None] * SIDES + uu[None, :]), input_precision=DOT)
    is_pair = place[:, None] == u[None, :]
    pair_is = u[:, None] == place[None, :]
    dor = tl.dot(tl.load(product + u[:, None] * SIDES + uu[None, :]), tl.trans(b), input_precision=DOT)
    dzr = tl.dot(tl.load(product + (u + HELD)[:, None] * SIDES + uu[None, :]), tl.trans(b), input_precision=DOT)
    written = tl.sum(tl.where(pair_is, dzr, 0.0), axis=0)
    missed = tl.sum(tl.where((place + HELD)[:, None] == uu[None, :], lead, 0.0), axis=1)
    d_w = tl.sum(lead * b, axis=1)
    hr = tl.dot((lead * -w[:, None]).to(dtype), tl.trans((b * w[:, None]).to(dtype)), input_precision=DOT)
    fold = tl.where(is_pair, 1.0, 0.0).to(dtype)
    fold_flip = tl.where(pair_is, 1.0, 0.0).to(dtype)
    # How each later token or row sees the write of an earlier row.
    sees = u[:, None] > tok[None, :] if BEFORE else u[:, None] >= tok[None, :]
    dor *= fade(sees & own[:, None] & real[None, :], g_read[:, None] - g_row[None, :]) * w[None, :]
    # Rows that are none have no products.
    dgr = tl.where(tok[:, None] > tok[None, :], hr * tl.exp2(g_miss[:, None] - g_row[None, :]), 0.0)
    met_q = tl.load(reads + corner + u[:, None] * PAIRS + place[None, :], mask=own[:, None] & real[None, :], other=0.0)
    met_x = tl.load(gram + corner + u[:, None] * PAIRS + u[None, :]).to(dtype)
    met_x = tl.dot(fold, met_x, input_precision=DOT).to(dtype)
    met_x = tl.dot(met_x, fold_flip, input_precision=DOT)
    # A log-decay of token t is felt by every row of s < t at the rows of later tokens and at the reads from t on.
    since = u[:, None] < u[None, :] if BEFORE else u[:, None] <= u[None, :]
    behind = tok[None, :] < u[:, None]
    ahead = tok[None, :] > u[:, None]
    felt = tl.dot(tl.where(since, 1.0, 0.0), met_q * dor, input_precision=DOT)
    felt = tl.dot(tl.where(ahead, 1.0, 0.0).to(dtype), (met_x * dgr).to(dtype), acc=felt, input_precision=DOT)
    felt = tl.where(behind, felt + (w * to_end * written)[None, :], 0.0)
    felt -= tl.where(ahead, (w * from_start * missed)[None, :], 0.0)
    d_log = tl.sum(felt, axis=1) + tl.load(through + number // PARTS * HELD + part)
    from_reads = tl.load(read + line + u, mask=own, other=0.0)
    d_log += tl.sum(tl.where(since, from_reads[None, :], 0.0), axis=1)
    d_w = tl.sum(tl.where((tok[None, :] == u[:, None]) & real[None, :], d_w[None, :], 0.0), axis=1)
    fact = facts + shelf + u
    energy = tl.load(fact + ENERGY * tokens, mask=own, other=0.0)
    count = tl.load(fact + COUNT * tokens, mask=own, other=1.0)
    source, live = source_rows(None, first, u, low, high, SHIFT)
    writes = has_pair(unmasked, has_key, first, u, source, live & own, low, n)
    gain = load_head(beta, first, u, h, H, writes, 1.0)
    ridge = load_head(lam, first, u, h, H, writes, 0.0)
    d_gain, d_ridge, d_energy = step_gradient(
        d_w / count, d_log, energy, gain, ridge, writes, eps, floor, SCALED, DIRECT, False
    )
    store_head(d_beta, d_gain, first, u, h, H, own)
    store_head(d_lam, d_ridge, first, u, h, H, own)
    # Rows of one pair added up.
    folded = tl.dot(dor.to(dtype), fold, input_precision=DOT)
    block = number // PARTS
    at = block * (PAIRS * SLOTS) + (u + part * PART)[:, None] * SLOTS + (u + part * HELD)[None, :]
    tl.store(d_reads + at, folded.to(d_reads.dtype.element_ty), mask=(u < PART)[:, None] & (u >= 0)[None, :])
    half = tl.dot(fold_flip, dgr.to(dtype), input_precision=DOT)
    folded = tl.dot(half.to(dtype), fold, input_precision=DOT)
    if not DIRECT:
        d_mu = d_energy / count
        ahead_by = u[:, None] - u[None, :]
        entry = facts + shelf + VECTOR * tokens
        keep = (ahead_by >= 0) & (ahead_by < WINDOW) & own[None, :]
        by_pair = tl.load(entry + ahead_by * tokens + u[None, :], mask=keep, other=0.0) * d_mu[None, :]
        keep = (ahead_by <= 0) & (ahead_by > -WINDOW) & own[:, None]
        by_token = tl.load(entry - ahead_by * tokens + u[:, None], mask=keep, other=0.0)
        folded = tl.dot(by_pair, by_token, acc=folded, input_precision=DOT)
    at = block * (SLOTS * SLOTS) + (u + part * HELD)[:, None] * SLOTS + (u + part * HELD)[None, :]
    tl.store(d_gram + at, folded.to(d_gram.dtype.element_ty))
