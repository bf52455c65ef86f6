"""One token of every rule in one kernel: (q, k, v, step or gates, state) -> (o, next state), for decoding.

    eta, gamma from the window's energy E (section 3 of the paper); E its mean, or the top eigenvalue of its Gram matrix
    S_t = gamma S + sum_r x_r (eta / B .* (y_r - [regression] S^T x_r))^T        o = S_t^T q, or S^T q

A program holds all K rows of BV columns of one head's state in registers, so the state is read and written once and
nothing else is worth counting. Gains and carries are per head or per column; both are one broadcast here.

Traps: the state may be its own successor (the same tensors in and out). S is safe then, each tile has one reader; keys,
tails and flags are read by many programs, so the last one of a sequence to have read them moves them, found by a ticket
that it sets back to 0. A token without a pair may hold NaN everywhere but in q: it is blanked when loaded.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import triton
import triton.language as tl

from fastweight.kernels.gates import step_sizes

SQUARINGS = tl.constexpr(17)
ELEMENTS = tl.constexpr(2048)


@triton.jit
def top_eigenvalue(gram, BR: tl.constexpr):
    """Largest eigenvalue of a positive semidefinite [BR, BR] matrix: Rayleigh quotient of its 2^17-th power.

    Eigenvalues that it has not separated lie within BR 2^-19 of each other: the error, whatever the gap.
    """
    i = tl.arange(0, BR)
    diagonal = i[:, None] == i[None, :]
    total = tl.sum(tl.where(diagonal, gram, 0.0))
    total = tl.where(total > 0, total, 1.0)
    gram = gram / total
    power = gram
    for _ in range(SQUARINGS):
        power = tl.sum(power[:, :, None] * power[None, :, :], axis=1)
        power = power / tl.maximum(tl.sum(tl.where(diagonal, power, 0.0)), 1e-30)
    return total * tl.sum(power * gram)


@triton.jit
def window_statistic(
    x, tail_x, n, kh, ck, count, KH: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, WINDOW: tl.constexpr,
    REGRESSION: tl.constexpr,
):  # fmt: skip
    """E of the window that ends with x: mean energy, or for a regression the top eigenvalue of the Gram over B."""
    if WINDOW == 1:
        return tl.sum(x * x)
    else:
        BR: tl.constexpr = triton.next_power_of_2(WINDOW)
        r = tl.arange(0, BR)
        real = (r < WINDOW - 1) & (r >= WINDOW - 1 - count)
        at = ((n * (WINDOW - 1) + r[:, None]) * KH + kh) * K + ck[None, :]
        rows = tl.load(tail_x + at, mask=real[:, None] & (ck < K)[None, :], other=0.0)
        rows = tl.where((r == WINDOW - 1)[:, None], x[None, :], rows)
        pairs = tl.minimum(count + 1, WINDOW).to(tl.float32)
        if REGRESSION:
            gram = tl.sum(rows[:, None, :] * rows[None, :, :], axis=2)
            return top_eigenvalue(gram, BR) / pairs
        else:
            return tl.sum(rows * rows) / pairs


@triton.jit
def shift_tail(old, new, newest, n, at, keep, wrote, count, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Moves some elements of the last PLACES pairs up by one and appends `newest`; places without a pair become 0."""
    for r in tl.static_range(PLACES):
        place = (n * PLACES + r) * SIZE + at
        here = tl.load(old + place, mask=keep, other=0.0)
        after = newest
        if r < PLACES - 1:
            after = tl.load(old + place + SIZE, mask=keep, other=0.0)
        value = tl.where(wrote, after, here)
        tl.store(new + place, tl.where(r >= PLACES - count, value, 0.0), mask=keep)


@triton.jit
def move_boundary(
    k, v, key0, tail_x0, tail_y0, key1, has_key1, tail_x1, tail_y1, count1, n, row_k, row_v, real, held, wrote, count,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Last key, its flag, and the window's tail of one sequence after this token; each element by one thread."""
    tl.store(has_key1 + n, (held | real).to(tl.uint8))
    count = tl.minimum(count + wrote.to(tl.int64), WINDOW - 1)
    tl.store(count1 + n, count)
    for start in range(0, KH * K, ELEMENTS):
        at = start + tl.arange(0, ELEMENTS)
        keep = at < KH * K
        before = tl.load(key0 + n * (KH * K) + at, mask=keep & held, other=0.0)
        token = tl.load(k + n * row_k + at, mask=keep & real, other=0.0).to(tl.float32)
        if WINDOW > 1:
            newest = token
            if SHIFT:
                newest = before
            shift_tail(tail_x0, tail_x1, newest, n, at, keep, wrote, count, KH * K, WINDOW - 1)
        tl.store(key1 + n * (KH * K) + at, tl.where(real, token, before), mask=keep)
    if WINDOW > 1:
        for start in range(0, H * V, ELEMENTS):
            at = start + tl.arange(0, ELEMENTS)
            keep = at < H * V
            token = tl.load(v + n * row_v + at, mask=keep & real, other=0.0).to(tl.float32)
            shift_tail(tail_y0, tail_y1, token, n, at, keep, wrote, count, H * V, WINDOW - 1)


@triton.jit(do_not_specialize=["row_q", "row_k", "row_v"])
def step(
    q, k, v, beta, lam, unmasked, S0, key0, has_key0, tail_x0, tail_y0, count0,
    o, S1, key1, has_key1, tail_x1, tail_y1, count1, tickets, row_q, row_k, row_v, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    COLUMN: tl.constexpr, REGRESSION: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One token of BV value columns of one head of one sequence."""
    blocks: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    block = pid % blocks
    h = (pid // blocks) % H
    n = (pid // (blocks * H)).to(tl.int64)
    kh = h // (H // KH)
    ck = tl.arange(0, BK)
    cv = block * BV + tl.arange(0, BV)
    in_k = ck < K
    in_v = cv < V
    state = (n * H + h) * (K * V) + ck[:, None] * V + cv[None, :]
    in_state = in_k[:, None] & in_v[None, :]
    S = tl.load(S0 + state, mask=in_state, other=0.0)
    held = tl.load(has_key0 + n) != 0
    real = held | True
    if unmasked is not None:
        real = tl.load(unmasked + n) != 0
    wrote = real
    if SHIFT:
        wrote = real & held
        x = tl.load(key0 + (n * KH + kh) * K + ck, mask=in_k & wrote, other=0.0)
    else:
        x = tl.load(k + n * row_k + kh * K + ck, mask=in_k & wrote, other=0.0).to(tl.float32)
    y = tl.load(v + n * row_v + h * V + cv, mask=in_v & wrote, other=0.0).to(tl.float32)
    count = tl.load(count0 + n)
    gain = tl.where(wrote, 1.0, 0.0)
    if beta is not None:
        if COLUMN:
            gain = tl.load(beta + (n * H + h) * V + cv, mask=in_v & wrote, other=0.0).to(tl.float32)
        else:
            gain = tl.load(beta + n * H + h, mask=wrote, other=0.0).to(tl.float32)
    ridge = 0.0
    if lam is not None:
        ridge = tl.load(lam + n * H + h, mask=wrote, other=0.0).to(tl.float32)
    if RAW:
        carry = tl.exp(ridge)
    else:
        energy = window_statistic(x, tail_x0, n, kh, ck, count, KH, K, BK, WINDOW, REGRESSION)
        gain, _ridge, _below, _alpha, carry, _open, _writes = step_sizes(
            energy, gain, ridge, wrote, eps, floor, SCALED, DIRECT
        )
        gain = gain / tl.minimum(count + 1, WINDOW).to(tl.float32)
    last = (h == 0) & (block == 0)
    query = tl.load(q + n * row_q + kh * K + ck, mask=in_k, other=0.0).to(tl.float32)
    first = S
    kept = S * carry
    if REGRESSION and RAW:
        S = kept  # the delta rules' residual is taken on the decayed state
    for r in tl.static_range(WINDOW - 1):
        live = wrote & (r >= WINDOW - 1 - count)
        place = n * (WINDOW - 1) + r
        x_r = tl.load(tail_x0 + (place * KH + kh) * K + ck, mask=in_k & live, other=0.0)
        y_r = tl.load(tail_y0 + (place * H + h) * V + cv, mask=in_v & live, other=0.0)
        if REGRESSION:
            y_r -= tl.sum(S * x_r[:, None], axis=0)
        kept += x_r[:, None] * (gain * y_r)[None, :]
    if REGRESSION:
        y -= tl.sum(S * x[:, None], axis=0)
    kept += x[:, None] * (gain * y)[None, :]
    out = tl.sum((first if BEFORE else kept) * query[:, None], axis=0)
    tl.store(S1 + state, kept, mask=in_state)
    tl.store(o + (n * H + h) * V + cv, out.to(o.dtype.element_ty), mask=in_v)
    if tickets is not None:
        # What the others read has arrived where it went into what they stored, so the count needs no fence, which would
        # wait for those stores; the barrier is for the other warps of this program.
        tl.debug_barrier()
        last = tl.atomic_add(tickets + n, 1, sem="relaxed") == blocks * H - 1
        if last:
            tl.store(tickets + n, 0)
    if last:
        move_boundary(
            k, v, key0, tail_x0, tail_y0, key1, has_key1, tail_x1, tail_y1, count1, n, row_k, row_v,
            real, held, wrote, count, H, KH, K, V, WINDOW, SHIFT,
        )  # fmt: skip
