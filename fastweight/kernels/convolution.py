"""The short causal depthwise convolution with its bias and silu, in one launch each way.

    pre_t = sum_j weight[:, j] u_{t+j} + bias,   u = (cache, x) [W-1+T, D]        y_t = silu(pre_t), or pre_t

Forward, a program holds a tile of tokens and channels and reads each of the W shifted tiles of x; the cache stands
before the first. Backward, a program walks a stretch of tokens, four at a time, and keeps the last three inputs and the
last three gradients of pre in registers: x and dy are read once, pre is made again, dx is written three tokens behind.
A stretch begins and ends with three tokens of its neighbours. Gradients of weight and bias are sums of a program's own
tokens, in float32, and one more sum over programs, so they are the same in every run. W is at most 4: missing taps are
zeros. Everything is computed in float32 and rounded once.

Trap: offsets of rows are 64-bit, since a million tokens of 2,304 channels have more elements than 2^31.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweight.kernels.eager import nobody_listens
from fastweight.kernels.launch import device_of
from fastweight.kernels.start import start

WIDEST = 4
TOKENS, CHANNELS = 16, 128  # of a tile forward
STRETCHES, WARPS = 4, 4  # of a program backward


@triton.jit
def _rows(x, cache, row, at, T, D, W: tl.constexpr, d, inside):
    """Tokens `at` (from -(W-1) on) of sequences whose rows of x begin at `row`, in float32; zero beyond either end."""
    kept = (at >= 0) & (at < T)
    value = tl.load(x + (row + at)[:, None] * D + d[None, :], mask=kept[:, None] & inside, other=0.0).to(tl.float32)
    if W > 1:
        early = (at < 0) & (at >= 1 - W)
        place = (row // T * (W - 1) + at + W - 1)[:, None] * D + d[None, :]
        value += tl.load(cache + place, mask=early[:, None] & inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _values(
    x, cache, weight, bias, y, T, D, tiles,
    W: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = (tile // tiles).to(tl.int64) * T
    at = tile % tiles * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    known = d < D
    pre = tl.zeros((BT, BD), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(weight + d * W + j, mask=known, other=0.0).to(tl.float32)
        pre += tap[None, :] * _rows(x, cache, row, at + (j + 1 - W), T, D, W, d, known[None, :])
    if BIAS:
        pre += tl.load(bias + d, mask=known, other=0.0).to(tl.float32)[None, :]
    if SILU:
        pre = pre * tl.sigmoid(pre)
    target = y + (row + at)[:, None] * D + d[None, :]
    tl.store(target, pre.to(y.dtype.element_ty), mask=(at < T)[:, None] & known[None, :])


@triton.jit
def _tap(weight, d, known, j: tl.constexpr, W: tl.constexpr):
    """Tap j of four, of which the last W are there."""
    if j < 4 - W:
        return tl.zeros_like(d).to(tl.float32)[None, :]
    else:
        return tl.load(weight + d * W + (j - (4 - W)), mask=known, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _slope(dy, pre, SILU: tl.constexpr):
    """The gradient of pre from that of y."""
    if SILU:
        s = tl.sigmoid(pre)
        return dy * s * (1 + pre * (1 - s))
    else:
        return dy


@triton.jit
def _gradients(
    dy, x, cache, weight, bias, dx, d_cache, sums, T, D, groups,
    W: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, CACHE: tl.constexpr,
    L: tl.constexpr, G: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    n = (program // groups).to(tl.int64)
    row = n * T
    first = (program % groups * G + tl.arange(0, G)) * L
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    known = d < D
    inside = known[None, :]
    w0, w1 = _tap(weight, d, known, 0, W), _tap(weight, d, known, 1, W)
    w2, w3 = _tap(weight, d, known, 2, W), _tap(weight, d, known, 3, W)
    b = tl.zeros((1, BD), tl.float32)
    if BIAS:
        b = tl.load(bias + d, mask=known, other=0.0).to(tl.float32)[None, :]
    h0 = _rows(x, cache, row, first - 3, T, D, W, d, inside)  # inputs of the three tokens before
    h1 = _rows(x, cache, row, first - 2, T, D, W, d, inside)
    h2 = _rows(x, cache, row, first - 1, T, D, W, d, inside)
    p0, p1, p2 = tl.zeros_like(h0), tl.zeros_like(h0), tl.zeros_like(h0)  # gradients of their pre
    a0, a1, a2, a3, ab = p0, p0, p0, p0, p0
    for i in range(0, L + 4, 4):
        at = first + i
        x0, x1 = _later(x, row, at, T, D, d, inside), _later(x, row, at + 1, T, D, d, inside)
        x2, x3 = _later(x, row, at + 2, T, D, d, inside), _later(x, row, at + 3, T, D, d, inside)
        y0, y1 = _later(dy, row, at, T, D, d, inside), _later(dy, row, at + 1, T, D, d, inside)
        y2, y3 = _later(dy, row, at + 2, T, D, d, inside), _later(dy, row, at + 3, T, D, d, inside)
        g0 = _slope(y0, w0 * h0 + w1 * h1 + w2 * h2 + w3 * x0 + b, SILU)
        g1 = _slope(y1, w0 * h1 + w1 * h2 + w2 * x0 + w3 * x1 + b, SILU)
        g2 = _slope(y2, w0 * h2 + w1 * x0 + w2 * x1 + w3 * x2 + b, SILU)
        g3 = _slope(y3, w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + b, SILU)
        _put(dx, d_cache, row, n, at - 3, first, T, D, W, CACHE, L, d, inside, w3 * p0 + w2 * p1 + w1 * p2 + w0 * g0)
        _put(dx, d_cache, row, n, at - 2, first, T, D, W, CACHE, L, d, inside, w3 * p1 + w2 * p2 + w1 * g0 + w0 * g1)
        _put(dx, d_cache, row, n, at - 1, first, T, D, W, CACHE, L, d, inside, w3 * p2 + w2 * g0 + w1 * g1 + w0 * g2)
        _put(dx, d_cache, row, n, at, first, T, D, W, CACHE, L, d, inside, w3 * g0 + w2 * g1 + w1 * g2 + w0 * g3)
        own = tl.where(i < L, 1.0, 0.0)  # the last four tokens are the next stretch's
        a0 += own * (g0 * h0 + g1 * h1 + g2 * h2 + g3 * x0)
        a1 += own * (g0 * h1 + g1 * h2 + g2 * x0 + g3 * x1)
        a2 += own * (g0 * h2 + g1 * x0 + g2 * x1 + g3 * x2)
        a3 += own * (g0 * x0 + g1 * x1 + g2 * x2 + g3 * x3)
        if BIAS:
            ab += own * (g0 + g1 + g2 + g3)
        h0, h1, h2 = x1, x2, x3
        p0, p1, p2 = g1, g2, g3
    target = sums + program.to(tl.int64) * 5 * D + d
    tl.store(target, tl.sum(a0, axis=0), mask=known)
    tl.store(target + D, tl.sum(a1, axis=0), mask=known)
    tl.store(target + 2 * D, tl.sum(a2, axis=0), mask=known)
    tl.store(target + 3 * D, tl.sum(a3, axis=0), mask=known)
    if BIAS:
        tl.store(target + 4 * D, tl.sum(ab, axis=0), mask=known)


@triton.jit
def _later(x, row, at, T, D, d, inside):
    """Tokens `at` >= 0 in float32, zero past the end."""
    return tl.load(x + (row + at)[:, None] * D + d[None, :], mask=(at < T)[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def _put(dx, d_cache, row, n, at, first, T, D, W: tl.constexpr, CACHE: tl.constexpr, L: tl.constexpr, d, inside, value):
    """The gradient of token `at`, if it is of this stretch; before the first, that of the cache."""
    own = (at >= first) & (at < first + L) & (at < T)
    tl.store(dx + (row + at)[:, None] * D + d[None, :], value.to(dx.dtype.element_ty), mask=own[:, None] & inside)
    if CACHE:
        early = (at < 0) & (at >= 1 - W)
        place = (n * (W - 1) + at + W - 1)[:, None] * D + d[None, :]
        tl.store(d_cache + place, value.to(d_cache.dtype.element_ty), mask=early[:, None] & inside)


def _forward(cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """y [N, T, D] in x's dtype."""
    cache, x, weight = cache.contiguous(), x.contiguous(), weight.contiguous()
    (N, T, D), W = x.shape, weight.shape[1]
    y = torch.empty_like(x)
    tiles = triton.cdiv(T, TOKENS)
    with device_of(x):
        if y.numel():
            start(
                _values, (N * tiles, triton.cdiv(D, CHANNELS)), x, cache, weight, bias, y, T, D, tiles,
                W=W, SILU=silu, BIAS=bias is not None, BT=TOKENS, BD=CHANNELS, num_warps=WARPS,
            )  # fmt: skip
    return y


def _backward(
    dy: Tensor, cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, want_cache: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of cache (empty unless wanted), x, weight and bias (empty without one)."""
    dy, cache, x, weight = dy.contiguous(), cache.contiguous(), x.contiguous(), weight.contiguous()
    (N, T, D), W = x.shape, weight.shape[1]
    dx = torch.empty_like(x)
    # Tokens before the first that no stretch reaches, where T < W - 1, have no gradient.
    d_cache = torch.zeros_like(cache) if want_cache else cache.new_empty(0)
    stretch = next((length for length in (8, 32) if STRETCHES * length >= T), 64)
    groups = triton.cdiv(T, STRETCHES * stretch)
    sums = x.new_empty(N * groups, 5, D, dtype=torch.float32)
    with device_of(x):
        if dx.numel():
            start(
                _gradients, (N * groups, triton.cdiv(D, CHANNELS)), dy, x, cache, weight, bias, dx, d_cache, sums,
                T, D, groups, W=W, SILU=silu, BIAS=bias is not None, CACHE=want_cache and W > 1,
                L=stretch, G=STRETCHES, BD=CHANNELS, num_warps=WARPS,
            )  # fmt: skip
    d_weight = sums[:, 4 - W : 4].sum(0).t().contiguous().to(weight.dtype)
    d_bias = x.new_empty(0) if bias is None else sums[:, 4].sum(0).to(bias.dtype)
    return d_cache, dx, d_weight, d_bias


forward = torch.library.custom_op("fastweight::short_convolution", _forward, mutates_args=())
backward = torch.library.custom_op("fastweight::short_convolution_backward", _backward, mutates_args=())


@forward.register_fake
def _(cache, x, weight, bias, silu):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@backward.register_fake
def _(dy, cache, x, weight, bias, silu, want_cache):
    def dense(tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return (
        dense(cache) if want_cache else cache.new_empty(0),
        dense(x),
        dense(weight),
        x.new_empty(0) if bias is None else dense(bias),
    )


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.silu = inputs
    ctx.save_for_backward(*tensors)


def _of_inputs(ctx, dy):
    cache, x, weight, bias = ctx.saved_tensors
    want_cache = ctx.needs_input_grad[0]
    # Whoever would differentiate again meets an error in the operator, which the plain function would leave out.
    once = nobody_listens() and not torch.is_grad_enabled()
    made = (_backward if once else backward)(dy, cache, x, weight, bias, ctx.silu, want_cache)
    d_cache, dx, d_weight, d_bias = made
    return d_cache if want_cache else None, dx, d_weight, None if bias is None else d_bias, None


forward.register_autograd(_of_inputs, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """`forward` and its autograd rule without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        _keep(ctx, inputs, None)
        return _forward(*inputs)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _of_inputs(ctx, dy)


def short_convolution(cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """The convolution of x behind its cache, differentiable once.

    Args:
        cache: [N, W-1, D], the inputs before the first, in x's dtype.
        x: [N, T, D] in float32, bfloat16 or float16.
        weight: [D, W], the newest tap last; W at most 4.
        bias: [D] or None.
        silu: whether y = silu(pre), else pre.
    """
    given = (cache, x, weight, bias, silu)
    return _Eager.apply(*given) if nobody_listens() else forward(*given)
