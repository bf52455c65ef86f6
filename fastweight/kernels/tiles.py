"""Device functions that every kernel shares: where a chunk lies, the paired key rows, the step sizes and their gradient.

A chunk is BT consecutive rows of one sequence; chunks of all sequences are numbered through (`chunk`), so saved tensors
need no padding. Token tensors are flat [tokens, heads, width]; per-token numbers are [heads, tokens] so that a chunk of
one head is contiguous. Log-decays are base 2 and summed inside a chunk only.

Traps: offsets of a token are 64-bit, offsets inside a tile 32-bit. A row without a pair keeps eta = 0 and log-decay 0.
A row with a pair but eta = 0 gets TINY instead: the gradient of eta is (R . dB) / eta, and must survive beta = 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-20)


@triton.jit
def chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, STRIDE: tl.constexpr):
    """Sequence number, chunk number in it, first token, and the bounds of that sequence; sequence -1 if idle."""
    if cu is None:
        n = chunk // chunks
        c = chunk - n * chunks
        begin = n.to(tl.int64) * length
        end = begin + length
    else:
        n = tl.load(chunk_seq + chunk)
        c = chunk - tl.load(chunk_start + tl.maximum(n, 0))
        begin = tl.load(cu + tl.maximum(n, 0)).to(tl.int64)
        end = tl.load(cu + tl.maximum(n, 0) + 1).to(tl.int64)
    return n, c, begin + c * STRIDE, begin, end


@triton.jit
def segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, STRIDE: tl.constexpr):
    """Sequence of a segment, its first chunk numbered through, its chunk range, and the bounds of the sequence."""
    n = seg // segments
    s = seg - n * segments
    if cu is None:
        begin = n.to(tl.int64) * length
        end = begin + length
        first = n * chunks
    else:
        begin = tl.load(cu + n).to(tl.int64)
        end = tl.load(cu + n + 1).to(tl.int64)
        first = tl.load(chunk_start + n)
    count = tl.cdiv((end - begin).to(tl.int32), STRIDE)
    low = s * per_segment
    return n, first, low, tl.minimum(low + per_segment, count), begin, end


@triton.jit
def source_rows(previous, rows, begin, end, SHIFT: tl.constexpr):
    """Token whose key each row is paired with: itself, the one before, or the last unmasked one; below begin if none."""
    live = (rows >= begin) & (rows < end)
    if previous is not None:
        source = tl.load(previous + rows, mask=live, other=-1).to(tl.int64)
    else:
        source = rows - SHIFT
    return source, live


@triton.jit
def load_keys(k, key0, source, live, begin, n, kh, KH, K, BK: tl.constexpr, start=0):
    """Paired key rows [rows, BK]; the row that continues an earlier state reads that state's key."""
    col = start + tl.arange(0, BK)
    keep = (live & (source >= begin))[:, None] & (col < K)[None, :]
    x = tl.load(k + ((source * KH + kh) * K)[:, None] + col[None, :], mask=keep, other=0.0)
    if key0 is not None:
        first = tl.load(key0 + (n.to(tl.int64) * KH + kh) * K + col, mask=col < K, other=0.0).to(x.dtype)
        x = tl.where((live & (source < begin))[:, None], first[None, :], x)
    return x


@triton.jit
def has_pair(unmasked, has_key, source, rows, live, begin, n):
    """Rows that write: unmasked, with a key to pair with."""
    pair = live
    if unmasked is not None:
        pair = pair & (tl.load(unmasked + rows, mask=live, other=0) != 0)
    if has_key is not None:
        pair = pair & ((source >= begin) | (tl.load(has_key + n) != 0))
    else:
        pair = pair & (source >= begin)
    return pair


@triton.jit
def load_head(pointer, rows, h, H, pair, other):
    """One number per row from a [tokens, heads] tensor in float32; `other` everywhere when there is no tensor."""
    if pointer is None:
        return tl.where(pair, other, 0.0)
    else:
        return tl.load(pointer + rows * H + h, mask=pair, other=0.0).to(tl.float32)


@triton.jit
def log1p_negative(alpha):
    """log(1 - alpha): a series where 1 - alpha would lose the digits of a small alpha."""
    series = alpha * (1 / 5 + alpha * (1 / 6 + alpha * (1 / 7 + alpha * (1 / 8))))
    series = -alpha * (1 + alpha * (1 / 2 + alpha * (1 / 3 + alpha * (1 / 4 + series))))
    return tl.where(alpha < 0.1, series, tl.log(tl.maximum(1 - alpha, 1e-30)))


@triton.jit
def step_sizes(energy, beta, lam, pair, eps, floor, SCALED: tl.constexpr, DIRECT: tl.constexpr):
    """eta, ridge, denominator, carry and whether the clamp is open, all [rows] in float32 (section 3 of the paper).

    eta = beta / (E + ridge + eps) or beta itself; alpha = min(eta * ridge, 1 - floor); carry = 1 - alpha.
    """
    ridge = lam
    if SCALED:
        ridge = lam * energy
    denominator = energy + ridge + eps
    writes = pair
    if DIRECT:
        eta = beta
    else:
        writes = pair & (denominator > 0)
        eta = beta / tl.where(writes, denominator, 1.0)
    eta = tl.where(writes, eta, 0.0)
    alpha = eta * ridge
    limit = 1 - floor
    is_open = writes & (alpha < limit)
    carry = tl.where(alpha < limit, 1 - alpha, floor)
    return eta, ridge, denominator, alpha, carry, is_open, writes


@triton.jit
def step_log_decay(alpha, carry, floor):
    """log2 of the carry."""
    return tl.where(alpha < 1 - floor, log1p_negative(alpha), tl.log(carry)) * LOG2E


@triton.jit
def step_gradient(
    d_eta, d_log, energy, beta, lam, pair, eps, floor, SCALED: tl.constexpr, DIRECT: tl.constexpr, LIVE: tl.constexpr
):
    """Gradients of beta, lam and the energy from those of eta and the natural log-decay; LIVE: the ridge sees E."""
    eta, ridge, denominator, _alpha, carry, is_open, writes = step_sizes(
        energy, beta, lam, pair, eps, floor, SCALED, DIRECT
    )
    d_alpha = tl.where(is_open, -d_log / carry, 0.0)
    d_eta = d_eta + d_alpha * ridge
    d_ridge = d_alpha * eta
    if DIRECT:
        d_beta = tl.where(writes, d_eta, 0.0)
        d_energy = tl.zeros_like(d_beta)
    else:
        d_beta = tl.where(writes, d_eta / tl.where(writes, denominator, 1.0), 0.0)
        d_energy = -d_beta * eta
        d_ridge += d_energy
    d_ridge = tl.where(writes, d_ridge, 0.0)
    if SCALED:
        d_lam = d_ridge * energy
        if LIVE:
            d_energy += d_ridge * lam
    else:
        d_lam = d_ridge
    return d_beta, d_lam, d_energy


@triton.jit
def nonzero(eta, pair):
    """eta with TINY in the place of zeros that still have a gradient."""
    return tl.where(pair & (tl.abs(eta) < TINY), TINY, eta)


@triton.jit
def decay_rows(log_decay, base, first, begin, end, BT: tl.constexpr, EXCLUSIVE: tl.constexpr):
    """Cumulative log2 decay of BT rows from `first` of a chunk [BT]: up to and with each row, or before it."""
    row = tl.arange(0, BT)
    live = first + row < end
    if EXCLUSIVE:
        return tl.load(log_decay + base + first + row - 1, mask=live & (row > 0), other=0.0)
    else:
        return tl.load(log_decay + base + first + row, mask=live, other=0.0)


@triton.jit
def fade(keep, power):
    """2^power where `keep`, else 0; the mask is inside, and a row past the end (whose power may be positive) stays finite."""
    return tl.exp2(tl.where(keep, tl.minimum(power, 0.0), float("-inf")))
