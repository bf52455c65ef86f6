"""Short causal depthwise convolution that knows about masks, packed documents and decoding.

Turns x [B, T, D] into y [B, T, D], y_t = f(sum_j weight[:, W-1-j] x_{t-j} + bias) with f a silu or nothing, and hands
back the last W-1 inputs, the whole of what decoding needs. On a GPU one kernel does it each way
(kernels/convolution.py). A masked token is absent: it is in nobody's receptive field and does not enter the cache. A
packed document never sees its neighbour. Zeros stand for "nothing yet", so a zero cache is a fresh start.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fastweight.layers.parts import at_least_float32
from fastweight.memory.modes import as_new, transformed
from fastweight.parallel.group import current


def document_of(cu_seqlens: Int[Tensor, " N+1"], num_tokens: int) -> Int[Tensor, " T"]:
    """Index of the document that each of the packed tokens belongs to; empty documents own none."""
    # How many documents end at or before a token. Not by searchsorted: torch 2.11 does not compile it for a part of a
    # tensor that was computed (here: converted) in the same graph.
    ends = cu_seqlens[1:].long()
    ended = torch.zeros(num_tokens + 1, dtype=torch.long, device=ends.device).index_add(0, ends, torch.ones_like(ends))
    return ended.cumsum(0)[:num_tokens]


def position_in_document(cu_seqlens: Int[Tensor, " N+1"], num_tokens: int) -> Int[Tensor, " T"]:
    """Position of each packed token counted from the start of its document."""
    starts = cu_seqlens.long().index_select(0, document_of(cu_seqlens, num_tokens))
    return torch.arange(num_tokens, device=cu_seqlens.device) - starts


class _Taps(torch.autograd.Function):
    """y_t = sum_j weight[:, j] window_{t+j} with window = (cache, x), as W scaled additions: twice as fast as a grouped
    conv1d on a CPU, and elementwise work that a compiler fuses into one kernel each way. Kept for the backward pass are
    x and the cache, which exist anyway, not the window. Its backward may be differentiated again: it is written in
    operations of autograd, in place only where nobody will."""

    @staticmethod
    def forward(ctx, cache, x, weight):  # [N, W-1, D], [N, T, D], [D, W] -> [N, T, D]
        ctx.save_for_backward(cache, x, weight)
        window, T = torch.cat([cache, x], dim=1), x.shape[1]
        y = window[:, :T] * weight[:, 0]
        for j in range(1, weight.shape[1]):
            y = y.addcmul_(window[:, j : j + T], weight[:, j])
        return as_new(y)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        cache, x, weight = ctx.saved_tensors
        window, T = torch.cat([cache, x], dim=1), x.shape[1]
        wide, taps = at_least_float32(dy), range(weight.shape[1])
        d_weight = torch.stack([(wide * window[:, j : j + T]).sum((0, 1)) for j in taps], dim=1)
        d_cache = _spread(F.pad(dy, (0, 0, cache.shape[1], 0)), weight, cache.shape[1]) if cache.shape[1] else None
        return d_cache, _spread(dy, weight, T), d_weight.to(weight.dtype)


def _taps(cache: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`_Taps` for the transforms of torch.func."""
    window, T = torch.cat([cache, x], dim=1), x.shape[1]
    return sum((window[:, j : j + T] * weight[:, j] for j in range(1, weight.shape[1])), window[:, :T] * weight[:, 0])


def _spread(dy: Float[Tensor, "N L D"], weight: Float[Tensor, "D W"], rows: int) -> Float[Tensor, "N rows D"]:
    """sum_j weight[:, j] dy_{t + W-1-j} for the first `rows` t; dy is zero past its end."""
    gap = weight.shape[1] - 1
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # one expression: one kernel, or differentiable again
        padded = F.pad(dy, (0, 0, 0, gap))
        return sum(
            (padded[:, gap - j : gap - j + rows] * weight[:, j] for j in range(gap)), dy[:, :rows] * weight[:, gap]
        )
    total = dy[:, :rows] * weight[:, gap]
    for j in range(gap):
        later = dy[:, gap - j : gap - j + rows]
        total[:, : later.shape[1]].addcmul_(later, weight[:, j])
    return total


ConvStart = Literal["random", "copy"]
ConvActivation = Literal["silu", "none"]


def check_convolution(start: str, activation: str) -> None:
    """ValueError for a name that is none."""
    if start not in get_args(ConvStart):
        raise ValueError(f"conv_start: got {start!r}, expected 'random' or 'copy'")
    if activation not in get_args(ConvActivation):
        raise ValueError(f"conv_activation: got {activation!r}, expected 'silu' or 'none'")


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the GPU kernel takes it; torch.func has no use for a hand-written backward."""
    from fastweight.kernels.dispatch import DTYPES, MOST_TAPS, machine_reason

    here = x.is_cuda and weight.is_cuda and x.dtype in DTYPES and weight.dtype in DTYPES
    return here and weight.shape[1] <= MOST_TAPS and not transformed() and machine_reason(x.device) is None


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of width W over D channels; weight [D, W], the newest tap last, and maybe a bias.

    Args:
        channels, width: D and W.
        bias: whether there is one.
        start: taps at step 0: "random" ones are uniform within W^-1/2; "copy" is a tenth of that, and 1 more for the
            newest tap, so that each token passes nearly as it is.
        activation: "silu" or "none".
        backend: "torch" leaves GPU kernels alone; anything else uses them where they can be used.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        bias: bool = False,
        start: ConvStart = "random",
        activation: ConvActivation = "none",
        backend: str = "auto",
    ):
        super().__init__()
        check_convolution(start, activation)
        self.width, self.start, self.activation, self.backend = width, start, activation, backend
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def drawn_taps(self) -> Float[Tensor, "D W"]:
        """Fresh taps, as at step 0."""
        # A third of the input's variance comes out, whatever the width; the usual 0.02 would silence q, k and v.
        most = self.width**-0.5 * (0.1 if self.start == "copy" else 1.0)
        taps = torch.empty_like(self.weight).uniform_(-most, most)
        if self.start == "copy":
            taps[:, -1] += 1
        return taps

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.drawn_taps())
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        cache: Float[Tensor, "N W-1 D"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N W-1 D"]]:
        """Outputs and the new cache. N is the number of documents with `cu_seqlens` (batch 1), else the batch size."""
        (y,), last = self.in_parts((x.shape[-1],), x, mask, cu_seqlens, cache)
        return y, last

    def in_parts(
        self,
        sizes: Sequence[int],
        x: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        cache: Float[Tensor, "N W-1 D"] | None = None,
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "N W-1 D"]]:
        """`forward` with the outputs in parts of so many channels, which a kernel makes dense at no cost."""
        if cache is None:
            rows = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
            cache = x.new_zeros(rows, self.width - 1, x.shape[-1])
        if cache.shape[1:] != (self.width - 1, x.shape[-1]):
            expected = f"[N, {self.width - 1}, {x.shape[-1]}]"
            raise ValueError(f"cache: got shape {tuple(cache.shape)}, expected {expected} (the last inputs)")
        cache = cache.to(x.dtype)
        place = current()
        if place is not None:
            from fastweight.parallel.convolve import convolve

            return convolve(place, x, mask, cu_seqlens, cache, partial(self._here, sizes))
        return self._here(sizes, x, mask, cu_seqlens, cache)

    def _here(
        self, sizes: Sequence[int], x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: Tensor
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "N W-1 D"]]:
        """`in_parts` on one process."""
        if mask is not None:
            x = x.masked_fill(mask.logical_not()[..., None], 0)
        if cu_seqlens is not None:
            return self._packed(sizes, x, mask, cu_seqlens, cache)
        if mask is not None:
            return self._masked(sizes, x, mask, cache)
        last = torch.cat([cache, x[:, max(x.shape[1] - self.width + 1, 0) :]], dim=1)  # [B, at least W-1, D]
        return self._convolve(sizes, cache, x), last[:, last.shape[1] - self.width + 1 :]

    def _convolve(
        self, sizes: Sequence[int], cache: Float[Tensor, "N W-1 D"], x: Float[Tensor, "N T D"]
    ) -> tuple[Tensor, ...]:
        if x.shape[1] == 0:
            return x.split(list(sizes), dim=-1)
        if self.backend != "torch" and _has_kernel(x, self.weight):
            from fastweight.kernels.convolution import short_convolution

            return short_convolution(cache, x, self.weight, self.bias, self.activation == "silu", sizes)
        taps = _taps if transformed() else _Taps.apply
        y: Tensor = taps(cache, x, self.weight.to(x.dtype))  # type: ignore[assignment]
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return (F.silu(y) if self.activation == "silu" else y).split(list(sizes), dim=-1)

    def _masked(
        self, sizes: Sequence[int], x: Float[Tensor, "B T D"], mask: Bool[Tensor, "B T"], cache: Tensor
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "B W-1 D"]]:
        """Close the gaps (real tokens move to the front, in order), convolve, and put the tokens back."""
        order = torch.argsort(mask.logical_not(), dim=1, stable=True)  # [B, T]
        ordered, back = _rows(x, order), torch.argsort(order, dim=1)
        y = tuple(_rows(part, back) for part in self._convolve(sizes, cache, ordered))
        last = mask.sum(1, keepdim=True) + torch.arange(self.width - 1, device=x.device)
        return y, _rows(torch.cat([cache, ordered], dim=1), last)

    def _packed(
        self,
        sizes: Sequence[int],
        x: Float[Tensor, "1 T D"],
        mask: Bool[Tensor, "1 T"] | None,
        cu_seqlens: Int[Tensor, " N+1"],
        cache: Float[Tensor, "N W-1 D"],
    ) -> tuple[tuple[Tensor, ...], Float[Tensor, "N W-1 D"]]:
        """Open a gap of W-1 rows before each document, fill it with the document's cache, and convolve all at once."""
        tokens, bounds = torch.arange(x.shape[1], device=x.device), cu_seqlens.to(x.device).long()
        document = document_of(bounds, len(tokens))
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask[0]
        # Real tokens first inside each document; place: where a token goes among tokens and gaps.
        rank = torch.argsort(torch.argsort(2 * document + real.logical_not(), stable=True))
        gap, offsets = self.width - 1, torch.arange(self.width - 1, device=x.device)
        place = rank + (document + 1) * gap
        before = (bounds[:-1] + torch.arange(len(cache), device=x.device) * gap)[:, None] + offsets  # [N, W-1]
        count = torch.zeros(len(cache), dtype=torch.long, device=x.device).index_add(0, document, real.long())
        window = x[0].new_zeros(len(tokens) + before.numel(), x.shape[-1])
        window = window.index_copy(0, place, x[0]).index_copy(0, before.flatten(), cache.flatten(0, 1))
        y = self._convolve(sizes, window[None, :gap], window[None, gap:])
        return tuple(part[:, place - gap] for part in y), window[before + count[:, None]]


def _rows(x: Float[Tensor, "B L D"], index: Int[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
