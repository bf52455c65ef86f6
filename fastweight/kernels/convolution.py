"""The short causal depthwise convolution with its bias and silu, in one launch each way.

    pre_t = sum_j weight[:, j] u_{t+j} + bias,   u = (cache, x) [W-1+T, D]        y_t = silu(pre_t), or pre_t

A program walks a stretch of tokens, four at a time, with the last three inputs in registers: x is read once. Backward
it keeps the last three gradients of pre too: pre is made again, dy is read once, and dx is written three tokens behind.
A stretch begins, and backward ends, with three tokens of its neighbours; the cache stands before the first. Gradients
of weight and bias are sums of a program's own tokens, in float32, and one more sum over programs, so they are the same
in every run. W is at most 4: missing taps are zeros. Everything is computed in float32 and rounded once.

y comes in up to three parts of channels (q, k and v), each a dense tensor as the memory's kernels read it, and so do
their gradients: nobody has to cut y apart or put dy together.

Traps: offsets of rows are 64-bit, since a million tokens of 2,304 channels have more elements than 2^31. A program's
channels are of one part, so parts that are no multiple of its channels are cut from a whole y.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportReturnType=false

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastweight.kernels.eager import nobody_listens
from fastweight.kernels.launch import device_of
from fastweight.kernels.start import start

PARTS = 3
CHANNELS, STRETCHES, WARPS = 128, 4, 4  # of a program
LONGEST = 32, 64  # tokens of a stretch, forward and backward


@triton.jit
def _early(x, cache, row, n, at, T, D, W: tl.constexpr, d, inside):
    """Tokens `at` before a stretch, in float32: of x, before the first of the cache, and zero before that."""
    kept = (at >= 0) & (at < T)
    value = tl.load(x + (row + at)[:, None] * D + d[None, :], mask=kept[:, None] & inside, other=0.0).to(tl.float32)
    if W > 1:
        early = (at < 0) & (at >= 1 - W)
        place = (n * (W - 1) + at + W - 1)[:, None] * D + d[None, :]
        value += tl.load(cache + place, mask=early[:, None] & inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _later(x, row, at, T, D, d, inside):
    """Tokens `at` >= 0 in float32, zero past the end."""
    return tl.load(x + (row + at)[:, None] * D + d[None, :], mask=(at < T)[:, None] & inside, other=0.0).to(tl.float32)


@triton.jit
def _part(y0, y1, y2, D0, D1, D2, BD: tl.constexpr):
    """Of the part that this program's channels are in: the tensor, its width, and where the channels begin in it."""
    begin = tl.program_id(1) * BD
    y, width = y0, D0
    if begin >= D0 + D1:
        y, width = y2, D2
        begin -= D0 + D1
    elif begin >= D0:
        y, width = y1, D1
        begin -= D0
    return y, width, begin


@triton.jit
def _stretches(T, D, groups, L: tl.constexpr, G: tl.constexpr, BD: tl.constexpr):
    """Of a program: its sequence, where that begins in x, first tokens of its stretches, channels, and which exist."""
    program = tl.program_id(0)
    n = (program // groups).to(tl.int64)
    first = (program % groups * G + tl.arange(0, G)) * L
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    return n, n * T, first, d, d < D


@triton.jit
def _tap(weight, d, known, j: tl.constexpr, W: tl.constexpr):
    """Tap j of four, of which the last W are there."""
    if j < 4 - W:
        return tl.zeros_like(d).to(tl.float32)[None, :]
    else:
        return tl.load(weight + d * W + (j - (4 - W)), mask=known, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _taps(weight, bias, d, known, W: tl.constexpr, BIAS: tl.constexpr):
    """Four taps, of which the last W are there, and the bias."""
    w0, w1 = _tap(weight, d, known, 0, W), _tap(weight, d, known, 1, W)
    w2, w3 = _tap(weight, d, known, 2, W), _tap(weight, d, known, 3, W)
    b = tl.zeros_like(w0)
    if BIAS:
        b = tl.load(bias + d, mask=known, other=0.0).to(tl.float32)[None, :]
    return w0, w1, w2, w3, b


@triton.jit
def _bent(pre, SILU: tl.constexpr):
    return pre * tl.sigmoid(pre) if SILU else pre


@triton.jit
def _values(
    x, cache, weight, bias, y0, y1, y2, T, D, D0, D1, D2, groups,
    W: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, L: tl.constexpr, G: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n, row, first, d, known = _stretches(T, D, groups, L, G, BD)
    inside = known[None, :]
    y, width, begin = _part(y0, y1, y2, D0, D1, D2, BD)
    column = begin + tl.arange(0, BD)
    w0, w1, w2, w3, b = _taps(weight, bias, d, known, W, BIAS)
    h0 = _early(x, cache, row, n, first - 3, T, D, W, d, inside)
    h1 = _early(x, cache, row, n, first - 2, T, D, W, d, inside)
    h2 = _early(x, cache, row, n, first - 1, T, D, W, d, inside)
    for i in range(0, L, 4):
        at = first + i
        x0, x1 = _later(x, row, at, T, D, d, inside), _later(x, row, at + 1, T, D, d, inside)
        x2, x3 = _later(x, row, at + 2, T, D, d, inside), _later(x, row, at + 3, T, D, d, inside)
        _out(y, row, at, T, width, column, inside, _bent(w0 * h0 + w1 * h1 + w2 * h2 + w3 * x0 + b, SILU))
        _out(y, row, at + 1, T, width, column, inside, _bent(w0 * h1 + w1 * h2 + w2 * x0 + w3 * x1 + b, SILU))
        _out(y, row, at + 2, T, width, column, inside, _bent(w0 * h2 + w1 * x0 + w2 * x1 + w3 * x2 + b, SILU))
        _out(y, row, at + 3, T, width, column, inside, _bent(w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + b, SILU))
        h0, h1, h2 = x1, x2, x3


@triton.jit
def _out(y, row, at, T, width, column, inside, value):
    target = y + (row + at)[:, None] * width + column[None, :]
    tl.store(target, value.to(y.dtype.element_ty), mask=(at < T)[:, None] & inside)


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
    dy0, dy1, dy2, x, cache, weight, bias, dx, d_cache, sums, T, D, D0, D1, D2, groups,
    W: tl.constexpr, SILU: tl.constexpr, BIAS: tl.constexpr, CACHE: tl.constexpr,
    L: tl.constexpr, G: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n, row, first, d, known = _stretches(T, D, groups, L, G, BD)
    inside = known[None, :]
    w0, w1, w2, w3, b = _taps(weight, bias, d, known, W, BIAS)
    dy, width, begin = _part(dy0, dy1, dy2, D0, D1, D2, BD)
    column = begin + tl.arange(0, BD)
    h0 = _early(x, cache, row, n, first - 3, T, D, W, d, inside)  # inputs of the three tokens before
    h1 = _early(x, cache, row, n, first - 2, T, D, W, d, inside)
    h2 = _early(x, cache, row, n, first - 1, T, D, W, d, inside)
    p0, p1, p2 = tl.zeros_like(h0), tl.zeros_like(h0), tl.zeros_like(h0)  # gradients of their pre
    a0, a1, a2, a3, ab = p0, p0, p0, p0, p0
    for i in range(0, L + 4, 4):
        at = first + i
        x0, x1 = _later(x, row, at, T, D, d, inside), _later(x, row, at + 1, T, D, d, inside)
        x2, x3 = _later(x, row, at + 2, T, D, d, inside), _later(x, row, at + 3, T, D, d, inside)
        t0, t1 = _later(dy, row, at, T, width, column, inside), _later(dy, row, at + 1, T, width, column, inside)
        t2, t3 = _later(dy, row, at + 2, T, width, column, inside), _later(dy, row, at + 3, T, width, column, inside)
        g0 = _slope(t0, w0 * h0 + w1 * h1 + w2 * h2 + w3 * x0 + b, SILU)
        g1 = _slope(t1, w0 * h1 + w1 * h2 + w2 * x0 + w3 * x1 + b, SILU)
        g2 = _slope(t2, w0 * h2 + w1 * x0 + w2 * x1 + w3 * x2 + b, SILU)
        g3 = _slope(t3, w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + b, SILU)
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
    target = sums + tl.program_id(0).to(tl.int64) * 5 * D + d
    tl.store(target, tl.sum(a0, axis=0), mask=known)
    tl.store(target + D, tl.sum(a1, axis=0), mask=known)
    tl.store(target + 2 * D, tl.sum(a2, axis=0), mask=known)
    tl.store(target + 3 * D, tl.sum(a3, axis=0), mask=known)
    if BIAS:
        tl.store(target + 4 * D, tl.sum(ab, axis=0), mask=known)


@triton.jit
def _put(dx, d_cache, row, n, at, first, T, D, W: tl.constexpr, CACHE: tl.constexpr, L: tl.constexpr, d, inside, value):
    """The gradient of token `at`, if it is of this stretch; before the first, that of the cache."""
    own = (at >= first) & (at < first + L) & (at < T)
    tl.store(dx + (row + at)[:, None] * D + d[None, :], value.to(dx.dtype.element_ty), mask=own[:, None] & inside)
    if CACHE:
        early = (at < 0) & (at >= 1 - W)
        place = (n * (W - 1) + at + W - 1)[:, None] * D + d[None, :]
        tl.store(d_cache + place, value.to(d_cache.dtype.element_ty), mask=early[:, None] & inside)


def _parts(sizes: list[int]) -> list[int] | None:
    """Widths of the three parts that kernels write if no program's channels are of two, else None: cut from a whole."""
    fits = len(sizes) <= PARTS and all(size % CHANNELS == 0 for size in sizes[:-1])
    return [*sizes, *[0] * (PARTS - len(sizes))] if fits else None


def _walk(x: Tensor, longest: int) -> tuple[int, int, tuple[int, int]]:
    """Tokens of a stretch, programs of a sequence, and the grid."""
    N, T, D = x.shape
    stretch = next((length for length in (8, 32) if STRETCHES * length >= T), longest)
    groups = triton.cdiv(T, STRETCHES * stretch)
    return stretch, groups, (N * groups, triton.cdiv(D, CHANNELS))


def _three(tensors: list[Tensor]) -> list[Tensor]:
    return [*tensors, *tensors[:1] * (PARTS - len(tensors))]


def _forward(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, sizes: list[int]
) -> list[Tensor]:
    """The parts of y [N, T, D] in x's dtype, each of its own."""
    cache, x, weight = cache.contiguous(), x.contiguous(), weight.contiguous()
    (N, T, D), W = x.shape, weight.shape[1]
    widths = _parts(sizes)
    made = [x.new_empty(N, T, size) for size in (sizes if widths else [D])]
    stretch, groups, grid = _walk(x, LONGEST[0])
    with device_of(x):
        if x.numel():
            start(
                _values, grid, x, cache, weight, bias, *_three(made), T, D, *(widths or [D, 0, 0]), groups,
                W=W, SILU=silu, BIAS=bias is not None, L=stretch, G=STRETCHES, BD=CHANNELS, num_warps=WARPS,
            )  # fmt: skip
    return made if widths else [part.contiguous() for part in made[0].split(sizes, dim=-1)]


def _backward(
    dys: list[Tensor], cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, want_cache: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of cache (empty unless wanted), x, weight and bias (empty without one)."""
    cache, x, weight = cache.contiguous(), x.contiguous(), weight.contiguous()
    D, W = weight.shape
    widths = _parts([dy.shape[-1] for dy in dys])
    dys = [dy.contiguous() for dy in dys] if widths else [torch.cat(dys, dim=-1)]
    dx = torch.empty_like(x)
    d_cache = torch.zeros_like(cache) if want_cache else cache.new_empty(0)  # zero where there are no tokens
    stretch, groups, grid = _walk(x, LONGEST[1])
    sums = x.new_empty(grid[0], 5, D, dtype=torch.float32)
    with device_of(x):
        if dx.numel():
            start(
                _gradients, grid, *_three(dys), x, cache, weight, bias, dx, d_cache, sums,
                x.shape[1], D, *(widths or [D, 0, 0]), groups, W=W, SILU=silu, BIAS=bias is not None,
                CACHE=want_cache and W > 1, L=stretch, G=STRETCHES, BD=CHANNELS, num_warps=WARPS,
            )  # fmt: skip
    d_weight = sums[:, 4 - W : 4].sum(0).t().contiguous().to(weight.dtype)
    d_bias = x.new_empty(0) if bias is None else sums[:, 4].sum(0).to(bias.dtype)
    return d_cache, dx, d_weight, d_bias


forward = torch.library.custom_op("fastweight::short_convolution", _forward, mutates_args=())
backward = torch.library.custom_op("fastweight::short_convolution_backward", _backward, mutates_args=())


@forward.register_fake
def _(cache, x, weight, bias, silu, sizes):
    return [x.new_empty(*x.shape[:2], size) for size in sizes]


@backward.register_fake
def _(dys, cache, x, weight, bias, silu, want_cache):
    def dense(tensor):
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    return (
        dense(cache) if want_cache else cache.new_empty(0),
        dense(x),
        dense(weight),
        x.new_empty(0) if bias is None else dense(bias),
    )


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.silu, ctx.sizes = inputs
    ctx.save_for_backward(*tensors)


def _of_inputs(ctx, dys):
    cache, x, weight, bias = ctx.saved_tensors
    want_cache = ctx.needs_input_grad[0]
    dys = [x.new_zeros(*x.shape[:2], size) if dy is None else dy for dy, size in zip(dys, ctx.sizes, strict=True)]
    # Whoever would differentiate again meets an error in the operator, which the plain function would leave out.
    once = nobody_listens() and not torch.is_grad_enabled()
    made = (_backward if once else backward)(dys, cache, x, weight, bias, ctx.silu, want_cache)
    d_cache, dx, d_weight, d_bias = made
    return d_cache if want_cache else None, dx, d_weight, None if bias is None else d_bias, None, None


forward.register_autograd(_of_inputs, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """`forward` and its autograd rule without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        _keep(ctx, inputs, None)
        ctx.set_materialize_grads(False)
        return tuple(_forward(*inputs))

    @staticmethod
    def backward(ctx, *dys):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _of_inputs(ctx, dys)


def short_convolution(
    cache: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """The convolution of x behind its cache, in parts of channels, differentiable once.

    Args:
        cache: [N, W-1, D], the inputs before the first, in x's dtype.
        x: [N, T, D] in float32, bfloat16 or float16.
        weight: [D, W], the newest tap last; W at most 4.
        bias: [D] or None.
        silu: whether y = silu(pre), else pre.
        sizes: widths of the parts, D altogether.
    """
    given = (cache, x, weight, bias, silu, list(sizes))
    return _Eager.apply(*given) if nobody_listens() else tuple(forward(*given))  # pyright: ignore[reportReturnType]
