"""What the tests of layers share: seeded modules and inputs in float64, gradients of one scalar, comparisons, loops."""

from itertools import pairwise

import torch
from conftest import assert_close
from torch import nn

from fastweight.layers.memory_mixer import LayerState, MemoryMixer

DTYPE = torch.float64
# Settings that every memory takes, none as it is unless told otherwise.
SETTINGS = {"rotary": True, "value_skip": True, "conv_start": "copy", "conv_activation": "none"}


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64, matrices drawn anew, vectors moved off their starting points (no gate is symmetric)."""
    generator = torch.Generator().manual_seed(seed)
    module = module.to(DTYPE)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = 0.4 * torch.randn(parameter.shape, dtype=DTYPE, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return module


def grads(outputs, sources):
    """Gradients of one scalar made of all outputs with fixed weights."""
    total = sum((o * random(*o.shape, seed=9 + i).to(o.dtype)).sum() for i, o in enumerate(outputs))
    return torch.autograd.grad(total, sources, allow_unused=True, materialize_grads=True)


def check_all(actual, expected, what, kind="forward", dtype=DTYPE):
    assert len(actual) == len(expected)
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert_close(one, other, dtype, kind, f"{what} {i}")


def parts(state: LayerState) -> list[torch.Tensor]:
    return [state.conv, *state.memory]


def convolution_longhand(x, weight, mask, bounds, cache):
    """y [B, T, D] (only real tokens are filled) and the last W-1 inputs of every document, in plain loops."""
    gap = weight.shape[1] - 1
    rows = [(b, 0, x.shape[1]) for b in range(len(x))] if bounds is None else [(0, *p) for p in pairwise(bounds)]
    y, caches = torch.zeros_like(x), []
    for n, (b, start, end) in enumerate(rows):
        seen = [torch.zeros_like(x[0, 0]) if cache is None else cache[n, i] for i in range(gap)]
        for t in range(start, end):
            if mask is None or mask[b, t]:
                seen.append(x[b, t])
                y[b, t] = sum(weight[:, gap - j] * seen[-1 - j] for j in range(gap + 1))
        caches.append(torch.stack(seen[len(seen) - gap :]) if gap else x.new_zeros(0, x.shape[-1]))
    return y, torch.stack(caches)


def qkv_longhand(layer: MemoryMixer, x, mask):
    """q, k [B, T, Hk, K] and v [B, T, H, V] of a memory layer before norms, from its parameters alone."""
    (B, T, _), K, V, H, Hk = x.shape, layer.key_dim, layer.value_dim, layer.num_heads, layer.num_key_heads
    qkv = x @ layer.qkv_proj.weight.T
    if layer.conv is not None:
        qkv, _ = convolution_longhand(qkv, layer.conv.weight, mask, None, None)
        qkv = qkv if layer.conv.bias is None else qkv + layer.conv.bias
        qkv = qkv if layer.conv_activation == "none" else qkv * torch.sigmoid(qkv)
    q, k = qkv[..., : Hk * K].reshape(B, T, Hk, K), qkv[..., Hk * K : 2 * Hk * K].reshape(B, T, Hk, K)
    return q, k, qkv[..., 2 * Hk * K :].reshape(B, T, H, V)


def output_longhand(layer: MemoryMixer, o, x):
    """What stands behind the memory: RMSNorm per head, silu gate where there is one, projection."""
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.o_norm.weight
    o = o.flatten(2)
    if layer.g_proj is not None:
        gate = x @ layer.g_proj.weight.T
        o = o * gate * torch.sigmoid(gate)
    return o @ layer.o_proj.weight.T


def turned_longhand(u, mask, theta):
    """Token t times e^(i w n), n the number of real tokens up to it, of coordinates (j, j + K/2) as complex numbers."""
    half = u.shape[-1] // 2
    angle = torch.stack([row.cumsum(0) for row in mask])[..., None] * theta ** -(torch.arange(half, dtype=DTYPE) / half)
    turned = torch.complex(u[..., :half], u[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, :, None]
    return torch.cat([turned.real, turned.imag], dim=-1)
