"""One token of every rule in one kernel: (q, k, v, step or gates, state) -> (o, next state), for decoding.

    eta, gamma from the window's energy E (section 3 of the paper); E its mean, or the top eigenvalue of its Gram matrix
    S_t = gamma S + sum_r x_r (eta / B .* (y_r - [regression] S^T x_r))^T        o = S_t^T q, or S^T q

A program of `step` holds all K rows of BV columns of one head's state in registers, so the state is read and written
once and nothing else is worth counting. Gains and carries are per head or per column; both are one broadcast here. Only
the top eigenvalue of a regression's window comes from a kernel before it: found by one warp a head there, in every
program of `step` it would be a chain of barriers, which takes longer than the state.

Traps: the state may be its own successor (the same tensors in and out). S and the tail's targets are safe then, each
tile has one reader; keys, the tail's keys and flags are read by many programs, so the last one of a sequence to have
read them moves them, found by a ticket that it sets back to 0. A token without a pair may hold NaN everywhere but in q:
it is blanked when loaded.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportOptionalMemberAccess=false, reportAssignmentType=false

import triton
import triton.language as tl

from fastweight.kernels.gates import step_sizes

SQUARINGS = tl.constexpr(17)
ELEMENTS = tl.constexpr(2048)
STRIP = tl.constexpr(32)  # key columns of a window at a time


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
def tail_rows(tail_x, n, kh, col, count, KH: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, BR: tl.constexpr):
    """Some columns of the keys of a window's tail [BR, columns]: zeros where there is no pair, and for the newest."""
    r = tl.arange(0, BR)
    real = (r < WINDOW - 1) & (r >= WINDOW - 1 - count)
    at = ((n * (WINDOW - 1) + r[:, None]) * KH + kh) * K + col[None, :]
    return tl.load(tail_x + at, mask=real[:, None] & (col < K)[None, :], other=0.0)


@triton.jit
def load_if(pointer, inside, kept):
    """What lies `inside` a tensor, in float32, 0 where it is not kept; the load does not wait to know where."""
    return tl.where(kept, tl.load(pointer, mask=inside, other=0.0).to(tl.float32), 0.0)


@triton.jit
def window_squares(
    x, tail_x, n, kh, ck, count, KH: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Squares of the keys of the window that ends with x, summed by key column, with no wait between the loads."""
    squares = x * x
    for r in tl.static_range(WINDOW - 1):
        at = tail_x + ((n * (WINDOW - 1) + r) * KH + kh) * K + ck
        row = load_if(at, ck < K, r >= WINDOW - 1 - count)
        squares += row * row
    return squares


@triton.jit(do_not_specialize=["row_k"])
def window_energies(
    k, unmasked, key0, has_key0, tail_x, count0, energies, row_k,
    KH: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """E of the regression, of one key head's window in one sequence: the top eigenvalue of its Gram matrix over B."""
    pid = tl.program_id(0)
    n, kh = (pid // KH).to(tl.int64), pid % KH
    count = tl.load(count0 + n)
    wrote = count >= 0
    if unmasked is not None:
        wrote = tl.load(unmasked + n) != 0
    if SHIFT:
        wrote = wrote & (tl.load(has_key0 + n) != 0)
        newest = key0 + (n * KH + kh) * K
    else:
        newest = k + n * row_k + kh * K
    BR: tl.constexpr = triton.next_power_of_2(WINDOW)
    last = (tl.arange(0, BR) == WINDOW - 1)[:, None]
    gram = tl.zeros((BR, BR), tl.float32)
    for start in tl.static_range(0, K, STRIP):
        col = start + tl.arange(0, STRIP)
        x = tl.load(newest + col, mask=(col < K) & wrote, other=0.0).to(tl.float32)
        rows = tl.where(last, x[None, :], tail_rows(tail_x, n, kh, col, count, KH, K, WINDOW, BR))
        gram += tl.sum(rows[:, None, :] * rows[None, :, :], axis=2)
    pairs = tl.minimum(count + 1, WINDOW).to(tl.float32)
    tl.store(energies + pid, top_eigenvalue(gram, BR) / pairs)


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
    k, key0, tail_x0, key1, has_key1, tail_x1, count1, n, row_k, real, held, wrote, count,
    KH: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Last key, its flag, and the keys of the window's tail of one sequence after this token, by one thread each."""
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


@triton.jit(do_not_specialize=["row_q", "row_k", "row_v"])
def step(
    q, k, v, beta, lam, unmasked, energies, S0, key0, has_key0, tail_x0, tail_y0, count0,
    o, S1, key1, has_key1, tail_x1, tail_y1, count1, tickets, row_q, row_k, row_v, eps, floor,
    H: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WINDOW: tl.constexpr, SHIFT: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, DIRECT: tl.constexpr,
    COLUMN: tl.constexpr, REGRESSION: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """One token of BV value columns of one head of one sequence. energies: of `window_energies`, or None.

    No load waits for another one that says whether its token or pair is there.
    """
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
        x = load_if(key0 + (n * KH + kh) * K + ck, in_k, wrote)
    else:
        x = load_if(k + n * row_k + kh * K + ck, in_k, wrote)
    y = load_if(v + n * row_v + h * V + cv, in_v, wrote)
    count = tl.load(count0 + n)
    gain = tl.where(wrote, 1.0, 0.0)
    if beta is not None:
        if COLUMN:
            gain = load_if(beta + (n * H + h) * V + cv, in_v, wrote)
        else:
            gain = load_if(beta + n * H + h, held | True, wrote)
    ridge = 0.0
    if lam is not None:
        ridge = load_if(lam + n * H + h, held | True, wrote)
    squares = window_squares(x, tail_x0, n, kh, ck, count, KH, K, WINDOW if energies is None else 1)
    targets = ()
    for r in tl.static_range(WINDOW - 1):
        at = tail_y0 + ((n * (WINDOW - 1) + r) * H + h) * V + cv
        targets = targets + (load_if(at, in_v, r >= WINDOW - 1 - count),)  # noqa: RUF005 (Triton knows no star)
    query = tl.load(q + n * row_q + kh * K + ck, mask=in_k, other=0.0).to(tl.float32)
    if RAW:
        carry = tl.exp(ridge)
    else:
        if energies is not None:
            energy = tl.load(energies + n * KH + kh)
        else:
            energy = tl.sum(squares) / tl.minimum(count + 1, WINDOW).to(tl.float32)
        gain, _ridge, _below, _alpha, carry, _open, _writes = step_sizes(
            energy, gain, ridge, wrote, eps, floor, SCALED, DIRECT
        )
        gain = gain / tl.minimum(count + 1, WINDOW).to(tl.float32)
    last = (h == 0) & (block == 0)
    first = S
    if REGRESSION and RAW:
        S *= carry  # the delta rules' residual is taken on the decayed state
    errors = ()
    for r in tl.static_range(WINDOW - 1):
        y_r = targets[r]
        if REGRESSION:
            there = r >= WINDOW - 1 - count
            x_r = load_if(tail_x0 + ((n * (WINDOW - 1) + r) * KH + kh) * K + ck, in_k, there & wrote)
            y_r -= tl.sum(S * x_r[:, None], axis=0)
        errors = errors + (y_r,)  # noqa: RUF005
    targets = targets + (y,)  # noqa: RUF005
    if REGRESSION:
        y -= tl.sum(S * x[:, None], axis=0)
    if not (REGRESSION and RAW):
        S *= carry
    for r in tl.static_range(WINDOW - 1):
        # Read a second time (from the cache, and said to be another load), so that no key is held meanwhile.
        there = r >= WINDOW - 1 - count
        at = tail_x0 + ((n * (WINDOW - 1) + r) * KH + kh) * K + ck
        x_r = tl.load(at, mask=in_k & there & wrote, other=0.0, cache_modifier=".ca")
        S += x_r[:, None] * (gain * errors[r])[None, :]
    kept = S + x[:, None] * (gain * y)[None, :]
    out = tl.sum((first if BEFORE else kept) * query[:, None], axis=0)
    tl.store(S1 + state, kept, mask=in_state)
    tl.store(o + (n * H + h) * V + cv, out.to(o.dtype.element_ty), mask=in_v)
    if tickets is not None:
        # All warps of this program have read what is overwritten below.
        tl.debug_barrier()
    for r in tl.static_range(WINDOW - 1):
        following = tl.where(wrote, targets[r + 1], targets[r])
        here = r >= WINDOW - 1 - tl.minimum(count + wrote.to(tl.int64), WINDOW - 1)
        tl.store(tail_y1 + ((n * (WINDOW - 1) + r) * H + h) * V + cv, tl.where(here, following, 0.0), mask=in_v)
    if tickets is not None:
        # What the others read has arrived where it went into what they stored, so the count needs no fence, which would
        # wait for those stores.
        last = tl.atomic_add(tickets + n, 1, sem="relaxed") == blocks * H - 1
        if last:
            tl.store(tickets + n, 0)
    if last:
        move_boundary(
            k, key0, tail_x0, key1, has_key1, tail_x1, count1, n, row_k, real, held, wrote, count, KH, K, WINDOW, SHIFT,
        )  # fmt: skip
