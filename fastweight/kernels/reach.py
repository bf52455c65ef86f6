"""How much a chunk leaves of a state: (k, beta, steps, log-decays) -> log2 of a bound, one number a chunk and head.

A step of regression multiplies a state by gamma - eta x x^T (with a residual on the decayed state by gamma times
1 - eta x x^T), whose norm is the larger of its two eigenvalues. With a normalised step eta |x|^2 + alpha is at most
beta, so the keys need not be read:

    |gamma - eta x x^T| <= max(gamma, beta - 1)

What a piece of a sequence hands on needs only those of its chunks from which more than nothing is left at its end
(`FADED`), and where nothing is left of what comes into a piece, its map is zero.

Trap: decays alone bound nothing. Where beta is near 2, and keys repeat, a state along them lives on whatever gamma is.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false

import triton
import triton.language as tl

from fastweight.kernels.gates import load_head
from fastweight.kernels.tiles import decay_before, decay_rows, load_tile

FADED = tl.constexpr(-64.0)  # log2 of nothing: 40 bits below the last digit of a float32 that it would be added to


@triton.jit(do_not_specialize=["length", "chunks", "tokens"])
def bound(
    k, beta, eta, decay, left, length, chunks, tokens,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    SHIFT: tl.constexpr, GIVEN: tl.constexpr, DECAYED: tl.constexpr,
):  # fmt: skip
    """left [chunks, H] of a dense batch. GIVEN: eta does not come from beta, so that keys have to be read."""
    slot = tl.program_id(0)
    h = tl.program_id(1)
    n = slot // chunks
    c = slot - n * chunks
    first = n.to(tl.int64) * length + c * 64
    high = length - c * 64
    i = tl.arange(0, 64)
    line = h.to(tl.int64) * tokens
    log_carry = decay_rows(decay, line, first, i, high) - decay_before(decay, line, first, i, high)
    carry = tl.exp2(log_carry)
    if GIVEN:
        col = tl.arange(0, BK)
        live = (i < high) & (c * 64 + i >= SHIFT)
        x = load_tile(k, first - SHIFT, i, h // (H // KH), col, live, KH, K, BK).to(tl.float32)
        felt = tl.load(eta + line + first + i, mask=i < high, other=0.0) * tl.sum(x * x, axis=1)
        along = carry * tl.abs(1 - felt) if DECAYED else tl.abs(carry - felt)
    else:
        gain = load_head(beta, first, i, h, H, i < high, 1.0)
        along = tl.maximum(gain - 1, carry - gain)
    norm = tl.log2(tl.maximum(carry, along))
    tl.store(left + slot.to(tl.int64) * H + h, tl.sum(tl.where(i < high, norm, 0.0), axis=0))
