"""Device functions that every kernel shares: where a chunk lies, and its tiles of tokens, paired keys and decays.

A chunk is some consecutive rows of one sequence; chunks of all sequences are numbered through (`chunk`), so saved
tensors need no padding. Token tensors are flat [tokens, heads, width]; per-token numbers are [heads, tokens], so that a
chunk of one head is contiguous. Inside a kernel a row is its distance from the chunk's first token: `low` and `high`
are the sequence's ends in that measure, `source` is the row whose key a row is paired with.

Traps: only the base of a tile is a 64-bit offset. Log-decays are base 2, summed inside a chunk only; rows past the end
repeat the last sum, so that no exponent of a kept pair is ever positive.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false
# ruff: noqa: SIM108

import triton
import triton.language as tl


@triton.jit
def chunk_span(chunk, cu, chunk_seq, chunk_start, length, chunks, STRIDE: tl.constexpr):
    """Sequence (-1 if the number is idle), first token, and the rows where the sequence begins and ends."""
    if cu is None:
        n = chunk // chunks
        c = chunk - n * chunks
        begin = n.to(tl.int64) * length
        first = begin + c * STRIDE
        high = length - c * STRIDE
    else:
        n = tl.load(chunk_seq + chunk)
        c = chunk - tl.load(chunk_start + tl.maximum(n, 0))
        begin = tl.load(cu + tl.maximum(n, 0)).to(tl.int64)
        first = begin + c * STRIDE
        high = (tl.load(cu + tl.maximum(n, 0) + 1).to(tl.int64) - first).to(tl.int32)
    return n, first, -c * STRIDE, high


@triton.jit
def segment_span(seg, cu, chunk_start, length, chunks, segments, per_segment, STRIDE: tl.constexpr):
    """Sequence of a segment, number of its first chunk, chunk range, and the sequence's first token and length."""
    n = seg // segments
    s = seg - n * segments
    if cu is None:
        begin = n.to(tl.int64) * length
        size = length
        lead = n * chunks
    else:
        begin = tl.load(cu + n).to(tl.int64)
        size = (tl.load(cu + n + 1).to(tl.int64) - begin).to(tl.int32)
        lead = tl.load(chunk_start + n)
    start = s * per_segment
    return n, lead, start, tl.minimum(start + per_segment, tl.cdiv(size, STRIDE)), begin, size


@triton.jit
def whose(pid, H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Head and segment of a program that walks BV value columns; `own_columns` says which."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    return (pid // blocks) % H, pid // (blocks * H)


@triton.jit
def column_block(pid, V: tl.constexpr, BV: tl.constexpr):
    """Which BV value columns a program walks."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    return pid % blocks


@triton.jit
def source_rows(previous, first, i, low, high, SHIFT: tl.constexpr):
    """Row whose key each row is paired with (itself, the one before, the last unmasked), and the rows that exist."""
    live = (i >= low) & (i < high)
    if previous is None:
        source = i - SHIFT
    else:
        source = (tl.load(previous + first + i, mask=live, other=-1) - first).to(tl.int32)
    return source, live


@triton.jit
def has_pair(unmasked, has_key, first, i, source, live, low, n):
    """Rows that write: unmasked, with a key to pair with."""
    pair = live
    if unmasked is not None:
        pair = pair & (tl.load(unmasked + first + i, mask=live, other=0) != 0)
    if has_key is None:
        pair = pair & (source >= low)
    else:
        pair = pair & ((source >= low) | (tl.load(has_key + n) != 0))
    return pair


@triton.jit
def tile_mask(keep, col, W: tl.constexpr, BW: tl.constexpr):
    """Mask of kept rows and, where the width is no multiple of the tile's, of real columns."""
    if W % BW == 0:
        return keep[:, None]
    else:
        return keep[:, None] & (col < W)[None, :]


@triton.jit
def load_tile(pointer, first, i, h, col, keep, H: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """Rows of one head of a [tokens, H, W] tensor."""
    base = pointer + (first * H + h) * W
    return tl.load(base + (i[:, None] * (H * W) + col[None, :]), mask=tile_mask(keep, col, W, BW), other=0.0)


@triton.jit
def store_tile(pointer, tile, first, i, h, col, keep, H: tl.constexpr, W: tl.constexpr, BW: tl.constexpr):
    """Writes what `load_tile` reads."""
    base = pointer + (first * H + h) * W
    at = base + (i[:, None] * (H * W) + col[None, :])
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=tile_mask(keep, col, W, BW))


@triton.jit
def state_tile(ck, cv, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Offsets and mask of a tile of a [K, V] state."""
    at = ck[:, None] * V + cv[None, :]
    if K % BK == 0:
        keep = tile_mask(ck >= 0, cv, V, BV)
    else:
        keep = tile_mask(ck < K, cv, V, BV)
    return at, keep


@triton.jit
def own_columns(pid, ck, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Value columns of a program that walks; offsets and mask of its tile of a state."""
    cv = column_block(pid, V, BV) * BV + tl.arange(0, BV)
    at, keep = state_tile(ck, cv, K, V, BK, BV)
    return cv, at, keep


@triton.jit
def load_state(pointer, slot, at, keep, BK: tl.constexpr, BV: tl.constexpr):
    """A tile of the state that a walk begins with, in float32; zeros if there is none."""
    S = tl.zeros([BK, BV], tl.float32)
    if pointer is not None:
        S += tl.load(pointer + slot + at, mask=keep, other=0.0).to(tl.float32)
    return S


@triton.jit
def load_keys(
    k, key0, previous, source, live, first, i, low, n, kh, col,
    KH: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Paired key rows [rows, BK]; the row that continues an earlier state reads that state's key.

    Where both are of one type, float32, one load reads both: products take a tile as it was loaded from registers, but
    hold one put together in shared memory, once for each arrangement, and wide ones do not fit.
    """
    keep = live & (source >= low)
    starts = (live & (source < low))[:, None]
    if key0 is not None and key0.dtype == k.dtype:
        row = source.to(tl.int64)
        if previous is None:
            row = i - SHIFT + tl.zeros_like(row)
        at = k + (first * KH + kh) * K + (row[:, None] * (KH * K) + col[None, :])
        begin = key0 + (n.to(tl.int64) * KH + kh) * K + (tl.zeros_like(row)[:, None] + col[None, :])
        return tl.load(tl.where(starts, begin, at), mask=tile_mask(live, col, K, BK), other=0.0)
    else:
        if previous is None:
            x = load_tile(k, first - SHIFT, i, kh, col, keep, KH, K, BK)
        else:
            x = load_tile(k, first, source.to(tl.int64), kh, col, keep, KH, K, BK)
        if key0 is not None:
            start = tl.load(key0 + (n.to(tl.int64) * KH + kh) * K + col, mask=col < K, other=0.0).to(x.dtype)
            x = tl.where(starts, start[None, :], x)
        return x


@triton.jit
def store_key_gradient(
    d_k, d_key0, d_x, previous, source, pair, first, i, low, high, n, h, col,
    H: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of paired rows to the tokens they came from; a sequence's last token is paired with none."""
    keep = pair & (source >= low)
    if previous is None:
        store_tile(d_k, d_x, first - SHIFT, i, h, col, keep, H, K, BK)
        if SHIFT:
            store_tile(d_k, tl.zeros_like(d_x), first, i, h, col, i == high - 1, H, K, BK)
    else:
        store_tile(d_k, d_x, first, source.to(tl.int64), h, col, keep, H, K, BK)
    if d_key0 is not None:
        at = (n.to(tl.int64) * H + h) * K + col[None, :] + tl.zeros_like(i)[:, None]
        tl.store(d_key0 + at, d_x, mask=tile_mask(pair & (source < low), col, K, BK))


@triton.jit
def add_key_gradient(
    d_k, d_key0, share, previous, source, pair, first, i, low, n, h, col,
    H: tl.constexpr, K: tl.constexpr, SHIFT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adds to what `store_key_gradient` wrote."""
    keep = pair & (source >= low)
    row = source.to(tl.int64)
    if previous is None:
        row = i - SHIFT
    d_x = load_tile(d_k, first, row, h, col, keep, H, K, BK).to(tl.float32) + share
    store_tile(d_k, d_x, first, row, h, col, keep, H, K, BK)
    if d_key0 is not None:
        at = d_key0 + ((n.to(tl.int64) * H + h) * K + col[None, :] + tl.zeros_like(i)[:, None])
        keep = tile_mask(pair & (source < low), col, K, BK)
        tl.store(at, tl.load(at, mask=keep, other=0.0) + share, mask=keep)


@triton.jit
def decay_rows(decay, line, first, i, high):
    """Cumulative log2 decay up to and with each row [rows]."""
    return tl.load(decay + line + first + tl.minimum(tl.maximum(i, 0), high - 1))


@triton.jit
def decay_before(decay, line, first, i, high):
    """The same up to the row before; 0 on the chunk's first row."""
    return tl.load(decay + line + first - 1 + tl.minimum(i, high), mask=i > 0, other=0.0)


@triton.jit
def fade(keep, power):
    """2^power where `keep`, else 0; the mask is inside the exponent, where the power may be positive."""
    return tl.exp2(tl.where(keep, power, float("-inf")))
