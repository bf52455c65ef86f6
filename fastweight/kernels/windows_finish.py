"""Regression over a window: what `sweep` and `inside` left by pair and token -> gradients of q, keys, values and gates.

The last of the three backward kernels (windows_gradient.py), and what adds up shares of tokens that two blocks hold.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.tiles import (
    chunk_span,
    decay_before,
    decay_rows,
    fade,
    load_keys,
    load_tile,
    state_tile,
    store_key_gradient,
    store_tile,
)
from fastweight.kernels.windows import SHARED, own_pairs
from fastweight.kernels.windows_maps import block_pairs
from fastweight.kernels.windows_parts import HELD, pair_slots


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
    at = number * (SLOTS * SLOTS)
    dg = tl.load(d_gram + at + s[:, None] * SLOTS + s[None, :]).to(tl.float32)
    dg += tl.load(d_gram + at + s[None, :] * SLOTS + s[:, None]).to(tl.float32)
    dg = tl.dot(slots_of, dg.to(dtype), input_precision=DOT)
    dg = tl.dot(dg.to(dtype), pairs_of, input_precision=DOT).to(dtype)
    at = number * (PAIRS * SLOTS)
    dp = tl.load(d_reads + at + t[:, None] * SLOTS + s[None, :]).to(dtype)
    dp = tl.dot(dp, pairs_of, input_precision=DOT).to(dtype)
    dp_flip = tl.load(d_reads + at + t[None, :] * SLOTS + s[:, None]).to(dtype)
    dp_flip = tl.dot(slots_of, dp_flip, input_precision=DOT).to(dtype)
    decayed = tl.exp2(tl.where(own, g_read, 0.0))
    late, in_late, early, in_early = pair_slots(t, PARTS, WINDOW, PART)
    late_end = fade(in_late, whole - decay_rows(decay, line, first, late // HELD * PART + PART - 1, high))
    early_end = fade(in_early, whole - decay_rows(decay, line, first, early // HELD * PART + PART - 1, high))
    late_begin = fade(in_late, decay_before(decay, line, first, late // HELD * PART, high))
    early_begin = fade(in_early, decay_before(decay, line, first, early // HELD * PART, high))
    shelf = number * (PARTS * HELD * V)
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
