"""Regression over a window, the part of backward that is parallel over blocks: state gradients -> q, k and gates.

Notation as in windows_maps.py. Rows (t, a) are the pairs of a token's window: residuals r = B [W; F] and the gradients
of what they write, h = H [dO; dZ], are made again; every product below is over value columns.

    d eta_t / B = sum_a r . h    d(Q X^T)_t,s = decay w_s dO_t . r_s    d(X X^T)_t,s = -decay w_t w_s h_t . r_s, s < t
    zc = carry-weighted w r, per pair  df = -decay w h, per pair
    dQ = decay dO S_0^T + d(Q X^T) X   dX = df S_0^T + zc dS^T + (dG + dG^T) X + d(Q X^T)^T Q

The top eigenvalue mu = u^T G u of a window gives its share d mu u u^T to dG, between rows of one token.

Traps: r and F are made transposed, so that no product's operand is transposed from an accumulator (Triton 3.6
miscompiles that on Hopper); dG and d(Q X^T) go through memory for the same reason. The gradient of a log-decay is a sum
of terms that all carry it, not a difference of totals. Blocks share WINDOW - 1 pairs: what the later one gives them is
added by `add_shared`.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head, step_gradient
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
from fastweight.kernels.windows import SHARED, load_map, own_pairs
from fastweight.kernels.windows_maps import COUNT, ENERGY, VECTOR, block_pairs


@triton.jit
def _at_rows(pointer, tok, high):
    """A number of each row's token, from one number per token."""
    return tl.load(pointer + tl.minimum(tok, high - 1))


@triton.jit
def _from_columns(
    q, k, v, d_o, key0, states, d_states, forward_rows, backward_rows, zc, df, first, i, source, pair, low, n, kh, h,
    own, number, w, to_end, from_start,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, SHIFT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """h r^T [ROWS, ROWS], dO r^T [PAIRS, ROWS]; per row F . h and dZ . r; per token dO . Q S; S . dS. Keeps zc, df."""
    t = tl.arange(0, PAIRS)
    row = tl.arange(0, ROWS)
    place = row // WINDOW + row % WINDOW
    is_pair = place[:, None] == t[None, :]
    pair_is = t[:, None] == place[None, :]
    hr = tl.zeros([ROWS, ROWS], tl.float32)
    dor = tl.zeros([PAIRS, ROWS], tl.float32)
    missed = tl.zeros([ROWS], tl.float32)
    written = tl.zeros([ROWS], tl.float32)
    read = tl.zeros([PAIRS], tl.float32)
    through = 0.0
    to_pairs = tl.where(pair_is, (-w * from_start)[None, :], 0.0)
    for start in range(0, V, BV):
        cv = start + tl.arange(0, BV)
        f = tl.zeros([BV, PAIRS], tl.float32)
        dz = tl.zeros([PAIRS, BV], tl.float32)
        qs = tl.zeros([PAIRS, BV], tl.float32)
        for begin in range(0, K, BK):
            ck = begin + tl.arange(0, BK)
            x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
            qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
            at, keep = state_tile(ck, cv, K, V, BK, BV)
            S = tl.load(states + number * (K * V) + at, mask=keep, other=0.0)
            dS = tl.load(d_states + number * (K * V) + at, mask=keep, other=0.0)
            f = tl.dot(tl.trans(S), tl.trans(x), acc=f, input_precision=DOT)
            dz = tl.dot(x, dS, acc=dz, input_precision=DOT)
            qs = tl.dot(qt, S, acc=qs, input_precision=DOT)
            through += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), axis=1), axis=0)
        y = load_tile(v, first, i, h, cv, pair, H, V, BV)
        do = load_tile(d_o, first, t, h, cv, own, H, V, BV)
        read += tl.sum(qs * do.to(tl.float32), axis=1)
        b_w = load_map(forward_rows, number, ROWS, PAIRS, 0, True)
        b_f = load_map(forward_rows, number, ROWS, PAIRS, 1, True)
        h_o = load_map(backward_rows, number, ROWS, PAIRS, 0, False)
        h_z = load_map(backward_rows, number, ROWS, PAIRS, 1, False)
        wide_w = (tl.trans(y).to(tl.float32) - f).to(b_w.dtype)
        f = f.to(b_w.dtype)
        r = tl.dot(f, b_f, acc=tl.dot(wide_w, b_w, input_precision=DOT), input_precision=DOT).to(b_w.dtype)
        dz = dz.to(b_w.dtype)
        lead = tl.dot(h_o, do.to(b_w.dtype), input_precision=DOT)
        lead = tl.dot(h_z, dz, acc=lead, input_precision=DOT).to(b_w.dtype)
        hr = tl.dot(lead, r, acc=hr, input_precision=DOT)
        dor = tl.dot(do.to(b_w.dtype), r, acc=dor, input_precision=DOT)
        missed += tl.sum(tl.where(is_pair, tl.dot(lead, f, input_precision=DOT), 0.0), axis=1)
        written += tl.sum(tl.where(pair_is, tl.dot(dz, r, input_precision=DOT), 0.0), axis=0)
        out = tl.dot(r, tl.where(is_pair, (w * to_end)[:, None], 0.0).to(b_w.dtype), input_precision=DOT)
        base = number * (PAIRS * V)
        keep = (cv < V)[:, None] & (t < PAIRS)[None, :]
        tl.store(zc + base + t[None, :] * V + cv[:, None], out.to(zc.dtype.element_ty), mask=keep)
        out = tl.dot(to_pairs.to(b_w.dtype), lead, input_precision=DOT)
        keep = (t < PAIRS)[:, None] & (cv < V)[None, :]
        tl.store(df + base + t[:, None] * V + cv[None, :], out.to(df.dtype.element_ty), mask=keep)
    return hr, dor, missed, written, read, through


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def backward_token(
    q, k, v, d_o, beta, lam, key0, has_key, unmasked, gram, reads, weight, decay, facts, states, d_states,
    forward_rows, backward_rows, zc, df, scratch, d_q, d_k, d_beta, d_lam, d_key0, shared,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, SHIFT: tl.constexpr,
    SCALED: tl.constexpr, DIRECT: tl.constexpr, BEFORE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of one head: gradients of queries, keys, and of the step sizes down to beta and lam."""
    HALO: tl.constexpr = WINDOW - 1
    block = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(block, cu, chunk_seq, chunk_start, length, chunks, TOKENS)
    if n < 0:
        return
    kh = h // (H // KH)
    number = block.to(tl.int64) * H + h
    t = tl.arange(0, PAIRS)
    own = (t < TOKENS) & (t < high)
    i, source, pair = block_pairs(has_key, unmasked, first, low, high, n, PAIRS, TOKENS, WINDOW, SHIFT)
    row = tl.arange(0, ROWS)
    tok = row // WINDOW
    place = tok + row % WINDOW
    real = (tok < TOKENS) & (tok < high)
    line = h.to(tl.int64) * tokens
    here = line + first
    g = decay_rows(decay, line, first, tl.minimum(t, TOKENS - 1), high)
    g_row = _at_rows(decay + here, tl.minimum(tok, TOKENS - 1), high)
    g_last = tl.load(decay + here + tl.minimum(high, TOKENS) - 1)
    g_miss = decay_before(decay, line, first, tl.minimum(tok, TOKENS - 1), high)
    g_read = decay_before(decay, line, first, tl.minimum(t, TOKENS - 1), high) if BEFORE else g
    w = tl.where(real, _at_rows(weight + here, tl.minimum(tok, TOKENS - 1), high), 0.0)
    to_end = tl.exp2(g_last - g_row)
    from_start = tl.exp2(g_miss)
    hr, dor, missed, written, read, through = _from_columns(
        q, k, v, d_o, key0, states, d_states, forward_rows, backward_rows, zc, df, first, i, source, pair, low, n, kh,
        h, own, number, w, to_end, from_start, H, KH, K, V, BK, BV, WINDOW, PAIRS, ROWS, SHIFT, DOT,
    )  # fmt: skip
    # How each later token or row sees the write of an earlier row.
    sees = t[:, None] > tok[None, :] if BEFORE else t[:, None] >= tok[None, :]
    dor *= fade(sees & own[:, None] & real[None, :], g_read[:, None] - g_row[None, :]) * w[None, :]
    earlier = (tok[:, None] > tok[None, :]) & real[:, None]
    dgr = hr * -fade(earlier, g_miss[:, None] - g_row[None, :]) * w[:, None] * w[None, :]
    d_w = tl.sum(tl.where(row[:, None] == row[None, :], hr, 0.0), axis=0)
    square = number * (PAIRS * PAIRS)
    met_q = tl.load(reads + square + t[:, None] * PAIRS + place[None, :], mask=(place < PAIRS)[None, :], other=0.0)
    met_x = tl.load(
        gram + square + place[:, None] * PAIRS + place[None, :],
        mask=(place < PAIRS)[:, None] & (place < PAIRS)[None, :], other=0.0,
    )  # fmt: skip
    # A log-decay of token t is felt by every row of s < t at the rows of later tokens and at the reads from t on.
    since = t[:, None] < t[None, :] if BEFORE else t[:, None] <= t[None, :]
    behind = tok[None, :] < t[:, None]
    ahead = tok[None, :] > t[:, None]
    felt = tl.dot(tl.where(since, 1.0, 0.0), met_q * dor, input_precision=DOT)
    felt = tl.dot(tl.where(ahead, 1.0, 0.0), met_x * dgr, acc=felt, input_precision=DOT)
    felt = tl.where(behind, felt + (w * to_end * written)[None, :], 0.0)
    felt -= tl.where(ahead, (w * from_start * missed)[None, :], 0.0)
    d_log = tl.sum(felt, axis=1) + through * tl.exp2(g_last)
    d_log += tl.sum(tl.where(since, (tl.exp2(tl.where(own, g_read, 0.0)) * read)[None, :], 0.0), axis=1)
    d_w = tl.sum(tl.where((tok[None, :] == t[:, None]) & real[None, :], d_w[None, :], 0.0), axis=1)
    shelf = facts + h.to(tl.int64) * (tokens * (VECTOR + WINDOW)) + first
    energy = tl.load(shelf + ENERGY * tokens + t, mask=own, other=0.0)
    count = tl.load(shelf + COUNT * tokens + t, mask=own, other=1.0)
    writes = own & (tl.load(shelf + COUNT * tokens + t, mask=own, other=0.0) > 0)
    writes = writes & own_pair(has_key, unmasked, first, t, low, high, n, SHIFT)
    gain = load_head(beta, first, t, h, H, writes, 1.0)
    ridge = load_head(lam, first, t, h, H, writes, 0.0)
    d_gain, d_ridge, d_energy = step_gradient(
        d_w / count, d_log, energy, gain, ridge, writes, eps, floor, SCALED, DIRECT, False
    )
    if d_beta is not None:
        tl.store(d_beta + first * H + h + t * H, d_gain, mask=own)
    if d_lam is not None:
        tl.store(d_lam + first * H + h + t * H, d_ridge, mask=own)
    tl.store(scratch + here + t, d_energy / count, mask=own)
    tl.debug_barrier()
    if not DIRECT:
        d_mu = _at_rows(scratch + here, tl.minimum(tok, TOKENS - 1), high)
        entry = tl.load(shelf + (VECTOR + row % WINDOW) * tokens + tok, mask=real, other=0.0)
        same = (tok[:, None] == tok[None, :]) & real[:, None]
        dgr += tl.where(same, (d_mu * entry)[:, None] * entry[None, :], 0.0)
    # Rows of one pair added up; through memory, to be read both ways round.
    is_pair = place[:, None] == t[None, :]
    dtype = k.dtype.element_ty
    folded = tl.dot(dor, tl.where(is_pair, 1.0, 0.0), input_precision=DOT)
    tl.store(reads + square + t[:, None] * PAIRS + t[None, :], folded)
    half = tl.dot(tl.where(t[:, None] == place[None, :], 1.0, 0.0), dgr, input_precision=DOT)
    folded = tl.dot(half, tl.where(is_pair, 1.0, 0.0), input_precision=DOT)
    tl.store(gram + square + t[:, None] * PAIRS + t[None, :], folded)
    tl.debug_barrier()
    across = square + t[:, None] * PAIRS + t[None, :]
    down = square + t[None, :] * PAIRS + t[:, None]
    dp = tl.load(reads + across).to(dtype)
    dp_flip = tl.load(reads + down).to(dtype)
    dg = (tl.load(gram + across) + tl.load(gram + down)).to(dtype)
    decayed = tl.exp2(tl.where(own, g_read, 0.0))
    for start in range(0, K, BK):
        ck = start + tl.arange(0, BK)
        x = load_keys(k, key0, None, source, pair, first, i, low, n, kh, ck, KH, K, SHIFT, BK)
        qt = load_tile(q, first, t, kh, ck, own, KH, K, BK)
        d_read = tl.zeros([PAIRS, BK], tl.float32)
        d_x = tl.zeros([PAIRS, BK], tl.float32)
        for begin in range(0, V, BV):
            cv = begin + tl.arange(0, BV)
            at, keep = state_tile(ck, cv, K, V, BK, BV)
            S = tl.load(states + number * (K * V) + at, mask=keep, other=0.0)
            dS = tl.load(d_states + number * (K * V) + at, mask=keep, other=0.0)
            do = load_tile(d_o, first, t, h, cv, own, H, V, BV)
            at_pair = number * (PAIRS * V) + t[:, None] * V + cv[None, :]
            here_v = (t < PAIRS)[:, None] & (cv < V)[None, :]
            z = tl.load(zc + at_pair, mask=here_v, other=0.0)
            f = tl.load(df + at_pair, mask=here_v, other=0.0)
            d_read = tl.dot(do, tl.trans(S), acc=d_read, input_precision=DOT)
            d_x = tl.dot(f, tl.trans(S), acc=d_x, input_precision=DOT)
            d_x = tl.dot(z, tl.trans(dS), acc=d_x, input_precision=DOT)
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


@triton.jit
def own_pair(has_key, unmasked, first, t, low, high, n, SHIFT: tl.constexpr):
    """Tokens that have a pair of their own."""
    _i, _source, pair = block_pairs(has_key, unmasked, first, low, high, n, t.shape[0], t.shape[0], 1, SHIFT)
    return pair


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
