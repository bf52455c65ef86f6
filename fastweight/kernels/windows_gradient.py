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
multiplies by keys, queries and states.

Traps: no product's operand is transposed from an accumulator (Triton 3.6 miscompiles that on Hopper). The gradient of a
log-decay is a sum of terms that all carry it, not a difference of totals: `through` is what passes by a whole part.
Blocks share WINDOW - 1 pairs: what the later one gives them is added by `add_shared`.
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
    store_key_gradient,
    store_tile,
)
from fastweight.kernels.windows import SHARED, own_pairs
from fastweight.kernels.windows_maps import COUNT, ENERGY, VECTOR, block_pairs
from fastweight.kernels.windows_parts import HELD, SIDES, load_part, pair_slots, part_place, slot_places


@triton.jit
def _part_pairs(
    has_key, unmasked, first, start, low, high, n, PART: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr
):
    """As `block_pairs`, of the part that begins at row `start`."""
    p = tl.arange(0, HELD)
    i = start + p - (WINDOW - 1)
    source, live = source_rows(None, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live & (p < PART + WINDOW - 1), low, n)
    return i, source, pair


@triton.jit
def _forth(
    k, v, key0, has_key, unmasked, matrix, decay, read_part, write_part, S, missed, wrote, begun,
    cv, ck, first, low, high, n, kh, h, number, line,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
    SHIFT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """w, z and carry X S_0 of the slots of a block, BV columns of them, into memory."""
    PARTS: tl.constexpr = TOKENS // PART
    u = tl.arange(0, HELD)
    s = tl.arange(0, SLOTS)
    part_of, pair_of, held, _begin, end = slot_places(decay, line, first, high, SLOTS, PARTS, WINDOW, PART)
    dtype = write_part.dtype.element_ty
    shelf = number * (PARTS * HELD * V)
    in_v = (cv < V)[None, :]
    for part in range(PARTS):
        i, source, pair = _part_pairs(has_key, unmasked, first, part * PART, low, high, n, PART, WINDOW, SHIFT)
        x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        y = load_tile(v, first, i, h, cv, pair, H, V, BV)
        row = u + part * PART
        before = held & (part_of < part)
        start = decay_before(decay, line, first, part * PART, high)
        z = tl.load(wrote + shelf + s[:, None] * V + cv[None, :], mask=before[:, None] & in_v, other=0.0)
        meet = tl.load(matrix + row[:, None] * PAIRS + pair_of[None, :], mask=(row < PAIRS)[:, None] & before[None, :],
                       other=0.0)  # fmt: skip
        meet *= fade(before, start - end)[None, :]
        f = tl.dot(x, S, input_precision=DOT) * tl.exp2(start)
        at = shelf + (u + part * HELD)[:, None] * V + cv[None, :]
        tl.store(begun + at, f.to(dtype), mask=in_v & (u >= 0)[:, None])
        f = tl.dot(meet.to(dtype), z, acc=f, input_precision=DOT)
        w = (y.to(tl.float32) - f).to(dtype)
        tl.store(missed + at, w, mask=in_v & (u >= 0)[:, None])
        place = number * PARTS + part
        z = tl.dot(load_part(write_part, place, 0, False), w, input_precision=DOT)
        z = tl.dot(load_part(write_part, place, 1, False), f.to(dtype), acc=z, input_precision=DOT)
        tl.store(wrote + at, z.to(dtype), mask=in_v & (u >= 0)[:, None])
        tl.debug_barrier()


@triton.jit
def _add_tile(pointer, at, tile, keep, more):
    """Stores a tile, on top of what is there if `more`."""
    tile += tl.load(pointer + at, mask=keep & more, other=0.0).to(tl.float32)
    tl.store(pointer + at, tile.to(pointer.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def sweep(
    q, k, v, d_o, key0, has_key, unmasked, gram, reads, decay, states, d_states, read_part, write_part,
    missed, wrote, begun, df, met, d_gram, d_reads, read, through,
    base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
    SHIFT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of one head: z, df of slots; M of parts; dG, d(Q X^T) between parts; dO . reads; what passes parts."""
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
    uu = tl.arange(0, SIDES)
    s = tl.arange(0, SLOTS)
    own = (t < TOKENS) & (t < high)
    ck = tl.arange(0, BK)
    dtype = write_part.dtype.element_ty
    g_read = decay_before(decay, line, first, t, high) if BEFORE else decay_rows(decay, line, first, t, high)
    whole = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
    part_of, pair_of, held, begin, _end = slot_places(decay, line, first, high, SLOTS, PARTS, WINDOW, PART)
    # Of each part: what passes by it, from before it to after it.
    passes = tl.zeros([HELD], tl.float32)
    pulls = tl.zeros([PAIRS], tl.float32)
    for c in range(0, V, BV):
        cv = c + tl.arange(0, BV)
        in_v = (cv < V)[None, :]
        at, keep = state_tile(ck, cv, K, V, BK, BV)
        S = tl.load(states + kept * (K * V) + at, mask=keep, other=0.0)
        _forth(
            k, v, key0, has_key, unmasked, matrix, decay, read_part, write_part, S, missed, wrote, begun, cv, ck,
            first, low, high, n, kh, h, number, line, H, KH, K, V, BK, BV, WINDOW, TOKENS, PAIRS, PART, SLOTS, SHIFT,
            DOT,
        )  # fmt: skip
        do = load_tile(d_o, first, t, h, cv, own, H, V, BV)
        qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
        dS = tl.load(d_states + kept * (K * V) + at, mask=keep, other=0.0)
        pulled = tl.sum(tl.dot(qt, S, input_precision=DOT) * do.to(tl.float32), axis=1)
        pulled *= tl.exp2(tl.where(own, g_read, 0.0))
        pulls += pulled
        passes += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0) * tl.exp2(whole)
        passes += tl.sum(tl.where((t // PART)[None, :] > u[:, None], pulled[None, :], 0.0), axis=1)
        do = do.to(dtype)
        shelf = number * (PARTS * HELD * V)
        for back in range(PARTS):
            part = PARTS - 1 - back
            row = u + part * PART
            in_row = (row < PAIRS)[:, None]
            i, source, pair = _part_pairs(has_key, unmasked, first, part * PART, low, high, n, PART, WINDOW, SHIFT)
            x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
            end = decay_rows(decay, line, first, part * PART + PART - 1, high)
            after = held & (part_of > part)
            dfs = tl.load(df + shelf + s[:, None] * V + cv[None, :], mask=after[:, None] & in_v, other=0.0)
            meet_fade = fade(after, begin - end)
            meet = tl.load(matrix + row[:, None] * PAIRS + pair_of[None, :], mask=in_row & after[None, :], other=0.0)
            meet *= meet_fade[None, :]
            later = own & (t >= part * PART + PART)
            seen_fade = fade(later, g_read - end)
            sees = tl.load(seen + t[None, :] * PAIRS + row[:, None], mask=in_row & later[None, :], other=0.0)
            sees *= seen_fade[None, :]
            lead = tl.dot(x, dS, input_precision=DOT) * tl.exp2(whole - end)
            at_slot = shelf + (u + part * HELD)[:, None] * V + cv[None, :]
            z = tl.load(wrote + at_slot, mask=in_v & (u >= 0)[:, None], other=0.0)
            # What the part wrote, and the state brought to its end.
            outside = tl.sum(tl.sum(lead * z.to(tl.float32), axis=1), axis=0)
            passes += tl.where(u > part, outside, 0.0)
            dz = tl.dot(sees.to(dtype), do, acc=lead, input_precision=DOT)
            dz = tl.dot(meet.to(dtype), dfs, acc=dz, input_precision=DOT).to(dtype)
            mine = load_tile(d_o, first, row, h, cv, (u < PART) & (row < high), H, V, BV).to(dtype)
            place = number * PARTS + part
            dw = tl.dot(load_part(read_part, place, 0, True), mine, input_precision=DOT)
            dw = tl.dot(load_part(write_part, place, 0, True), dz, acc=dw, input_precision=DOT)
            f = tl.dot(load_part(read_part, place, 1, True), mine, input_precision=DOT)
            f = tl.dot(load_part(write_part, place, 1, True), dz, acc=f, input_precision=DOT) - dw
            tl.store(df + at_slot, f.to(dtype), mask=in_v & (u >= 0)[:, None])
            begun_f = tl.load(begun + at_slot, mask=in_v & (u >= 0)[:, None], other=0.0).to(tl.float32)
            passes += tl.where(u < part, tl.sum(tl.sum(f * begun_f, axis=1), axis=0), 0.0)
            # [w; f] as one operand
            ii, _source, twice = _both_pairs(has_key, unmasked, first, part * PART, low, high, n, PART, WINDOW, SHIFT)
            y = load_tile(v, first, ii, h, cv, twice, H, V, BV).to(tl.float32)
            w = tl.load(missed + shelf + (uu % HELD + part * HELD)[:, None] * V + cv[None, :],
                        mask=in_v & (uu >= 0)[:, None], other=0.0).to(tl.float32)  # fmt: skip
            both = tl.where((uu < HELD)[:, None], w, y - w).to(dtype)
            at_met = place * (SIDES * SIDES) + u[:, None] * SIDES + uu[None, :]
            in_met = (u >= 0)[:, None] & (uu >= 0)[None, :]
            _add_tile(met, at_met, tl.dot(mine, tl.trans(both), input_precision=DOT), in_met, c > 0)
            _add_tile(met, at_met + HELD * SIDES, tl.dot(dz, tl.trans(both), input_precision=DOT), in_met, c > 0)
            dg = tl.dot(z, tl.trans(dfs), input_precision=DOT)
            dp = tl.dot(z, tl.trans(do), input_precision=DOT)
            by_slot = tl.sum(meet * dg, axis=0)
            by_token = tl.sum(sees * dp, axis=0)
            pulls += by_token
            over = tl.sum(tl.where(part_of[None, :] > u[:, None], by_slot[None, :], 0.0), axis=1)
            over += tl.sum(tl.where((t // PART)[None, :] > u[:, None], by_token[None, :], 0.0), axis=1)
            passes += tl.where(u > part, over, 0.0)
            at_row = place * HELD + u[:, None]
            _add_tile(
                d_gram,
                at_row * SLOTS + s[None, :],
                dg * meet_fade[None, :],
                (u >= 0)[:, None] & (s >= 0)[None, :],
                c > 0,
            )
            _add_tile(
                d_reads,
                at_row * PAIRS + t[None, :],
                dp * seen_fade[None, :],
                (u >= 0)[:, None] & (t >= 0)[None, :],
                c > 0,
            )
            tl.debug_barrier()
    tl.store(read + line + first + t, pulls, mask=own)
    tl.store(through + number * HELD + u, passes)


@triton.jit
def _both_pairs(
    has_key, unmasked, first, start, low, high, n, PART: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr
):
    """As `_part_pairs`, twice."""
    p = tl.arange(0, SIDES) % HELD
    i = start + p - (WINDOW - 1)
    source, live = source_rows(None, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live & (p < PART + WINDOW - 1), low, n)
    return i, source, pair


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
    at_met = met + number * (SIDES * SIDES)
    pulled = tl.load(at_met + u[:, None] * SIDES + uu[None, :])
    led = tl.load(at_met + (u + HELD)[:, None] * SIDES + uu[None, :])
    in_row = real[None, :] & (uu >= 0)[:, None]
    b = tl.load(rows + (number * ROWS + row)[None, :] * SIDES + uu[:, None], mask=in_row, other=0.0).to(tl.float32)
    in_row = real[:, None] & (u >= 0)[None, :]
    at_rows = rows_back + (number * ROWS + row)[:, None] * SIDES + u[None, :]
    h_o = tl.load(at_rows, mask=in_row, other=0.0).to(tl.float32)
    h_z = tl.load(at_rows + HELD, mask=in_row, other=0.0).to(tl.float32)
    dor = tl.dot(pulled, b, input_precision=DOT)
    dzr = tl.dot(led, b, input_precision=DOT)
    hr = tl.dot(h_z, dzr, acc=tl.dot(h_o, dor, input_precision=DOT), input_precision=DOT)
    hf = tl.dot(h_o, tl.load(at_met + u[:, None] * SIDES + (u + HELD)[None, :]), input_precision=DOT)
    hf = tl.dot(h_z, tl.load(at_met + (u + HELD)[:, None] * SIDES + (u + HELD)[None, :]), acc=hf, input_precision=DOT)
    is_pair = place[:, None] == u[None, :]
    pair_is = u[:, None] == place[None, :]
    missed = tl.sum(tl.where(is_pair, hf, 0.0), axis=1)
    written = tl.sum(tl.where(pair_is, dzr, 0.0), axis=0)
    # How each later token or row sees the write of an earlier row.
    sees = u[:, None] > tok[None, :] if BEFORE else u[:, None] >= tok[None, :]
    dor *= fade(sees & own[:, None] & real[None, :], g_read[:, None] - g_row[None, :]) * w[None, :]
    d_w = tl.sum(tl.where(row[:, None] == row[None, :], hr, 0.0), axis=0)
    earlier = (tok[:, None] > tok[None, :]) & real[:, None]
    dgr = hr * -fade(earlier, g_miss[:, None] - g_row[None, :]) * w[:, None] * w[None, :]
    met_q = tl.load(reads + corner + u[:, None] * PAIRS + place[None, :], mask=own[:, None] & real[None, :], other=0.0)
    met_x = tl.load(gram + corner + place[:, None] * PAIRS + place[None, :], mask=real[:, None] & real[None, :],
                    other=0.0)  # fmt: skip
    # A log-decay of token t is felt by every row of s < t at the rows of later tokens and at the reads from t on.
    since = u[:, None] < u[None, :] if BEFORE else u[:, None] <= u[None, :]
    behind = tok[None, :] < u[:, None]
    ahead = tok[None, :] > u[:, None]
    felt = tl.dot(tl.where(since, 1.0, 0.0), met_q * dor, input_precision=DOT)
    felt = tl.dot(tl.where(ahead, 1.0, 0.0), met_x * dgr, acc=felt, input_precision=DOT)
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
    if not DIRECT:
        d_mu = tl.sum(tl.where(tok[:, None] == u[None, :], (d_energy / count)[None, :], 0.0), axis=1)
        entry = tl.load(facts + shelf + (VECTOR + row % WINDOW) * tokens + tok, mask=real, other=0.0)
        same = (tok[:, None] == tok[None, :]) & real[:, None]
        dgr += tl.where(same, (d_mu * entry)[:, None] * entry[None, :], 0.0)
    # Rows of one pair added up.
    fold = tl.where(is_pair, 1.0, 0.0)
    slot = number * HELD
    folded = tl.dot(dor, fold, input_precision=DOT)
    keep = (u < PART)[:, None] & (u >= 0)[None, :]
    tl.store(
        d_reads + (slot + u)[None, :] * PAIRS + (u + part * PART)[:, None],
        folded.to(d_reads.dtype.element_ty),
        mask=keep,
    )
    half = tl.dot(tl.where(pair_is, 1.0, 0.0), dgr, input_precision=DOT)
    folded = tl.dot(half, fold, input_precision=DOT)
    tl.store(d_gram + (slot + u)[:, None] * SLOTS + (u + part * HELD)[None, :], folded.to(d_gram.dtype.element_ty))


@triton.jit
def _slots_of(j, s, PARTS: tl.constexpr, WINDOW: tl.constexpr, PART: tl.constexpr):
    """[pairs, slots], 1 where the slot is the pair's."""
    late, in_late, early, in_early = pair_slots(j, PARTS, WINDOW, PART)
    is_late = (late[:, None] == s[None, :]) & in_late[:, None]
    return tl.where(is_late | ((early[:, None] == s[None, :]) & in_early[:, None]), 1.0, 0.0)


@triton.jit
def _pairs_of(j, s, PARTS: tl.constexpr, WINDOW: tl.constexpr, PART: tl.constexpr):
    """The transpose of `_slots_of`."""
    late, in_late, early, in_early = pair_slots(j, PARTS, WINDOW, PART)
    is_late = (late[None, :] == s[:, None]) & in_late[None, :]
    return tl.where(is_late | ((early[None, :] == s[:, None]) & in_early[None, :]), 1.0, 0.0)


@triton.jit
def _slot_rows(
    pointer, shelf, slot, keep, scale, cv, V: tl.constexpr
):  # fmt: skip
    """Rows of slots, each times a number, in float32."""
    tile = tl.load(pointer + shelf + slot[:, None] * V + cv[None, :], mask=keep[:, None] & (cv < V)[None, :], other=0.0)
    return tile.to(tl.float32) * scale[:, None]


@triton.jit(do_not_specialize=["base", "length", "chunks", "tokens"])
def finish(
    q, k, d_o, key0, has_key, unmasked, decay, states, d_states, wrote, df, d_gram, d_reads,
    d_q, d_k, d_key0, shared, base, cu, chunk_seq, chunk_start, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr,
    SHIFT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of one head: gradients of queries and keys."""
    HALO: tl.constexpr = WINDOW - 1
    PARTS: tl.constexpr = TOKENS // PART
    block = tl.program_id(0) + base
    h = tl.program_id(1)
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    number = tl.program_id(0).to(tl.int64) * H + h
    kept = block.to(tl.int64) * H + h
    t = tl.arange(0, PAIRS)
    s = tl.arange(0, SLOTS)
    own = (t < TOKENS) & (t < high)
    i, source, pair = block_pairs(has_key, unmasked, first, low, high, n, PAIRS, TOKENS, WINDOW, SHIFT)
    line = h.to(tl.int64) * tokens
    g_read = decay_before(decay, line, first, t, high) if BEFORE else decay_rows(decay, line, first, t, high)
    whole = tl.load(decay + line + first + tl.minimum(high, TOKENS) - 1)
    dtype = k.dtype.element_ty
    pairs_of = _pairs_of(t, s, PARTS, WINDOW, PART).to(dtype)
    slots_of = _slots_of(t, s, PARTS, WINDOW, PART).to(dtype)
    square = number * (PARTS * HELD)
    in_slot = s < PARTS * HELD
    at = square * SLOTS
    twice = in_slot[:, None] & in_slot[None, :]
    dg = tl.load(d_gram + at + s[:, None] * SLOTS + s[None, :], mask=twice, other=0.0).to(tl.float32)
    dg += tl.load(d_gram + at + s[None, :] * SLOTS + s[:, None], mask=twice, other=0.0).to(tl.float32)
    dg = tl.dot(slots_of, dg.to(dtype), input_precision=DOT)
    dg = tl.dot(dg.to(dtype), pairs_of, input_precision=DOT).to(dtype)
    at = square * PAIRS
    flip = tl.load(d_reads + at + s[:, None] * PAIRS + t[None, :], mask=in_slot[:, None] & (t >= 0)[None, :], other=0.0)
    dp_flip = tl.dot(slots_of, flip.to(dtype), input_precision=DOT).to(dtype)
    flip = tl.load(d_reads + at + s[None, :] * PAIRS + t[:, None], mask=in_slot[None, :] & (t >= 0)[:, None], other=0.0)
    dp = tl.dot(flip.to(dtype), pairs_of, input_precision=DOT).to(dtype)
    decayed = tl.exp2(tl.where(own, g_read, 0.0))
    late, in_late, early, in_early = pair_slots(t, PARTS, WINDOW, PART)
    late_end = fade(in_late, whole - decay_rows(decay, line, first, late // HELD * PART + PART - 1, high))
    early_end = fade(in_early, whole - decay_rows(decay, line, first, early // HELD * PART + PART - 1, high))
    late_begin = fade(in_late, decay_before(decay, line, first, late // HELD * PART, high))
    early_begin = fade(in_early, decay_before(decay, line, first, early // HELD * PART, high))
    shelf = square * V
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
        d_read = tl.zeros([PAIRS, BK], tl.float32)
        d_x = tl.zeros([PAIRS, BK], tl.float32)
        for c in range(0, V, BV):
            cv = c + tl.arange(0, BV)
            at_state, keep = state_tile(ck, cv, K, V, BK, BV)
            S = tl.load(states + kept * (K * V) + at_state, mask=keep, other=0.0)
            dS = tl.load(d_states + kept * (K * V) + at_state, mask=keep, other=0.0)
            do = load_tile(d_o, first, t, h, cv, own, H, V, BV)
            z = _slot_rows(wrote, shelf, late, in_late, late_end, cv, V)
            z += _slot_rows(wrote, shelf, early, in_early, early_end, cv, V)
            f = _slot_rows(df, shelf, late, in_late, late_begin, cv, V)
            f += _slot_rows(df, shelf, early, in_early, early_begin, cv, V)
            d_read = tl.dot(do, tl.trans(S), acc=d_read, input_precision=DOT)
            d_x = tl.dot(f.to(dtype), tl.trans(S), acc=d_x, input_precision=DOT)
            d_x = tl.dot(z.to(dtype), tl.trans(dS), acc=d_x, input_precision=DOT)
        d_read = tl.dot(dp, x, acc=d_read * decayed[:, None], input_precision=DOT)
        store_tile(d_q, d_read, first, t, h, ck, own, H, K, BK)
        d_x = tl.dot(dg, x, acc=d_x, input_precision=DOT)
        d_x = tl.dot(dp_flip, qt, acc=d_x, input_precision=DOT)
        mine = pair & own_pairs(i, high, TOKENS)
        # The zero of a sequence's last token is its own block's to write, though earlier ones have a row for it.
        store_key_gradient(d_k, d_key0, d_x, None, source, mine, first, i, low,
                           tl.where(high > TOKENS, PAIRS + 1, high), n, h, ck, H, K, SHIFT, BK)  # fmt: skip
        d_x = tl.where(pair[:, None], d_x, 0.0)
        store_tile(shared, d_x, block.to(tl.int64) * SHARED, t, h, ck, t < HALO, H, K, BK)


@triton.jit(do_not_specialize=["length", "chunks"])
def add_shared(
    shared, d_k, cu, chunk_seq, chunk_start, length, chunks,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr, TOKENS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds what a block contributes to the keys of pairs before its first token."""
    block = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, _high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    b = tl.arange(0, SHARED)
    i = b - (WINDOW - 1)
    ck = tl.arange(0, BK)
    keep = (i < 0) & (i - SHIFT >= low)
    total = load_tile(shared, block.to(tl.int64) * SHARED, b, h, ck, keep, H, K, BK)
    total += load_tile(d_k, first - SHIFT, i, h, ck, keep, H, K, BK).to(tl.float32)
    store_tile(d_k, total, first - SHIFT, i, h, ck, keep, H, K, BK)
