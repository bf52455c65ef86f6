"""Step sizes: (k, beta, lam) -> eta / B and chunk-cumulative log-decays in float32, and their gradients' way back.

    ridge = lam or lam * E      eta = beta / (E + ridge + eps), or beta      alpha = min(eta * ridge, 1 - floor)

E is the mean feature energy of the window's B pairs (section 3 of the paper; at window 1 simply |x|^2). In raw mode
beta is eta and lam is the natural log-decay: the delta rules and linear attention.

Traps: a row without a pair has eta = 0 and no decay. Where the gradient of eta is found as (R . dY) / eta, a zero eta
of a row that does write is TINY instead, which needs the exponents of bfloat16.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fastweight.kernels.tiles import chunk_span, has_pair, load_keys, source_rows

LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-20)


@triton.jit
def load_head(pointer, first, i, h, H, keep, other):
    """One number per row from a [tokens, heads] tensor in float32; `other` everywhere when there is no tensor."""
    if pointer is None:
        return tl.where(keep, other, 0.0)
    else:
        return tl.load(pointer + first * H + h + i * H, mask=keep, other=0.0).to(tl.float32)


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
        # One reciprocal a token: beta may have columns.
        eta = beta * (1 / tl.where(writes, denominator, 1.0))
    eta = tl.where(writes, eta, 0.0)
    alpha = eta * ridge
    limit = 1 - floor
    is_open = writes & (alpha < limit)
    carry = tl.where(alpha < limit, 1 - alpha, floor)
    return eta, ridge, denominator, alpha, carry, is_open, writes


@triton.jit
def step_log_decay(alpha, carry, floor):
    """log2 of the carry; what 1 - alpha lost of a small alpha to rounding is added back."""
    return tl.log2(carry) + ((1 - carry) - tl.minimum(alpha, 1 - floor)) * LOG2E


@triton.jit
def step_gradient(
    d_eta, d_log, energy, beta, lam, pair, eps, floor, SCALED: tl.constexpr, DIRECT: tl.constexpr, LIVE: tl.constexpr,
    EXACT: tl.constexpr = True,
):  # fmt: skip
    """Gradients of beta, lam and the energy from those of eta and the natural log-decay; LIVE: the ridge sees E.

    EXACT: else the device's own division, which the interpreter lacks; the exact one is dear where beta has columns.
    """
    eta, ridge, denominator, _alpha, carry, is_open, writes = step_sizes(
        energy, beta, lam, pair, eps, floor, SCALED, DIRECT
    )
    slope = d_log / carry if EXACT else libdevice.fast_dividef(d_log, carry)
    d_alpha = tl.where(is_open, -slope, 0.0)
    d_eta = d_eta + d_alpha * ridge
    d_ridge = d_alpha * eta
    if DIRECT:
        d_beta = tl.where(writes, d_eta, 0.0)
        d_energy = tl.where(writes, 0.0, 0.0)  # zeros in the layout of d_beta, which Gluon asks for
    else:
        d_beta = tl.where(writes, d_eta * (1 / tl.where(writes, denominator, 1.0)), 0.0)
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
def gate_gradients(
    d_eta, d_log, energy, beta, lam, first, i, h, pair, eps, floor,
    H: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, LIVE: tl.constexpr, pairs=None,
):  # fmt: skip
    """Gradients of beta, lam and the energy (not in raw mode) from those of eta and the natural log-decay.

    pairs: number of pairs in the window, if d_eta is the gradient of eta / pairs.
    """
    if RAW:
        return tl.where(pair, d_eta, 0.0), tl.where(pair, d_log, 0.0), d_eta
    else:
        gain = load_head(beta, first, i, h, H, pair, 1.0)
        ridge = load_head(lam, first, i, h, H, pair, 0.0)
        if pairs is not None:
            d_eta = d_eta / pairs
        return step_gradient(d_eta, d_log, energy, gain, ridge, pair, eps, floor, SCALED, DIRECT, LIVE)


@triton.jit
def store_head(pointer, values, first, i, h, H, keep):
    """Writes what `load_head` reads, where there is a tensor."""
    if pointer is not None:
        tl.store(pointer + first * H + h + i * H, values, mask=keep)


@triton.jit
def window_sum(values, WINDOW: tl.constexpr, FORTH: tl.constexpr):
    """Sum of 64 values over the WINDOW rows up to each row, or with FORTH from each row on."""
    if WINDOW == 1:
        return values
    else:
        i = tl.arange(0, 64)
        total = values
        for b in tl.static_range(1, WINDOW):
            row = i + b if FORTH else i - b
            beside = tl.gather(values, tl.minimum(tl.maximum(row, 0), 63), axis=0)
            total += tl.where((row >= 0) & (row < 64), beside, 0.0)
        return total


@triton.jit
def window_energy(energy, pair, WINDOW: tl.constexpr):
    """Mean feature energy of the pairs in each row's window, and their number (at least 1)."""
    if WINDOW == 1:
        return energy, tl.full([64], 1.0, tl.float32)
    else:
        count = tl.maximum(window_sum(tl.where(pair, 1.0, 0.0), WINDOW, False), 1.0)
        return window_sum(tl.where(pair, energy, 0.0), WINDOW, False) / count, count


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def steps(
    k, beta, lam, key0, has_key, unmasked, previous, weight, decay,
    cu, chunk_seq, chunk_start, length, chunks, tokens, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr, NONZERO: tl.constexpr,
):  # fmt: skip
    """Weights eta / B and chunk-cumulative log-decays of one chunk of one head."""
    HALO: tl.constexpr = WINDOW - 1
    chunk = tl.program_id(0)
    h = tl.program_id(1)
    n, first, low, high = chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, 64 - HALO)
    if n < 0:
        return
    kh = h // (H // KH)
    i = tl.arange(0, 64) - HALO
    source, live = source_rows(previous, first, i, low, high, SHIFT)
    pair = has_pair(unmasked, has_key, first, i, source, live, low, n)
    own = live & (i >= 0)
    gain = load_head(beta, first, i, h, H, pair & own, 1.0)
    ridge = load_head(lam, first, i, h, H, pair & own, 0.0)
    if RAW:
        w = gain
        log_decay = ridge * LOG2E
        writes = pair & own
    else:
        col = tl.arange(0, BK)
        x = load_keys(k, key0, previous, source, live, first, i, low, n, kh, col, KH, K, SHIFT, BK).to(tl.float32)
        # Gathered, so that each thread goes on with one row instead of copies of sixteen.
        energy = tl.gather(tl.sum(x * x, axis=1), tl.arange(0, 64), axis=0)
        energy, count = window_energy(energy, pair, WINDOW)
        eta, _r, _d, alpha, carry, _o, writes = step_sizes(energy, gain, ridge, pair & own, eps, floor, SCALED, DIRECT)
        w = eta / count
        log_decay = tl.where(writes, step_log_decay(alpha, carry, floor), 0.0)
    if NONZERO:
        w = tl.where(writes & (tl.abs(w) < TINY), TINY, w)
    line = h.to(tl.int64) * tokens + first
    tl.store(weight + line + i, w, mask=own)
    tl.store(decay + line + i, tl.cumsum(log_decay, axis=0), mask=own)
