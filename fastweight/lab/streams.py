"""A seed into streams of key-value pairs with the troubles of a real sequence: drift, noise, interference, repetition.

A stream is B independent trials of T pairs, x [B, T, K] and y [B, T, V], in float64. Keys have length 1 unless they
are rescaled on purpose; target columns have variance 1. Trap: the order of draws is part of a stream, so two streams
of one seed are paired (same keys, same targets) only where they are made by the same call with other strengths.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize


class Stream(NamedTuple):
    """Keys and targets of B trials, in the order in which they are learned."""

    x: Float[Tensor, "B T K"]
    y: Float[Tensor, "B T V"]


class Shape(NamedTuple):
    """trials B, tokens T, widths K of the keys and V of the targets."""

    trials: int
    tokens: int
    key_dim: int
    value_dim: int


def random_pairs(shape: Shape, seed: int, interference: float = 0.0) -> Stream:
    """Unrelated pairs; any two keys have the expected cosine `interference` (0: independent, 1: all the same)."""
    generator = torch.Generator().manual_seed(seed)
    own = _normal(generator, shape.trials, shape.tokens, shape.key_dim)
    common = _normal(generator, shape.trials, 1, shape.key_dim)
    x = normalize((1 - interference) ** 0.5 * own + interference**0.5 * common, dim=-1)
    return Stream(x, _normal(generator, shape.trials, shape.tokens, shape.value_dim))


def teacher_pairs(shape: Shape, seed: int, drift: float = 0.0, noise: float = 0.0) -> Stream:
    """Targets of a linear map of the keys: y_t = sqrt(1 - noise) W_t^T x_t + sqrt(noise) e_t.

    Args:
        drift: share of W's variance that each token renews (0: a fixed map; 1: another map at each token).
        noise: share of the targets' variance that no map explains.
    """
    generator = torch.Generator().manual_seed(seed)
    B, T, K, V = shape
    W = _normal(generator, B, K, V)
    x = normalize(_normal(generator, B, T, K), dim=-1)
    told = []
    for t in range(T):
        # A key has length 1 and W's entries variance 1, so each column of W^T x has variance 1.
        told.append(torch.einsum("bkv,bk->bv", W, x[:, t]))
        W = (1 - drift) ** 0.5 * W + drift**0.5 * _normal(generator, B, K, V)
    e = _normal(generator, B, T, V)
    return Stream(x, (1 - noise) ** 0.5 * torch.stack(told, dim=1) + noise**0.5 * e)


def repeated(stream: Stream, times: int) -> Stream:
    """The same pairs again and again, in the same order."""
    return Stream(stream.x.repeat(1, times, 1), stream.y.repeat(1, times, 1))


def rebound(stream: Stream, num_keys: int) -> Stream:
    """The first `num_keys` keys over and over, each time with the next targets of the stream."""
    T = stream.x.shape[1]
    return Stream(stream.x[:, torch.arange(T) % num_keys], stream.y)


def rescaled(stream: Stream, spread: float, seed: int) -> Stream:
    """Every pair, key and target, multiplied by a factor of its own, log-uniform in [1 / spread, spread].

    The linear map from keys to targets stays the same, and so does the noise beside each target.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(stream.x.shape[:2], generator=generator, dtype=stream.x.dtype)  # [B, T]
    factor = (spread ** (2 * draw - 1))[..., None]
    return Stream(stream.x * factor, stream.y * factor)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
