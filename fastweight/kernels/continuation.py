"""A window continued from an earlier call -> one that starts here: the carried pairs become tokens before the first.

Each sequence gets the state's R - 1 pairs in front (and, where targets are paired with the key before, one token more
for the oldest key) with a step of 0, which writes and decays nothing, so that the kernels meet pairs of tokens only.

Traps: `has_pair` is no mask: the key of a token without a pair still goes with the next target. What a state does not
really hold must be 0 and get no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tail(NamedTuple):
    """What a State of N sequences carries besides S, in the shapes of memory/state.py."""

    key: Tensor
    has_key: Tensor
    x: Tensor
    y: Tensor
    number: Tensor


class Stream(NamedTuple):
    """A longer call: q, k, v, beta, lam; which tokens have a pair; bounds if packed; where the T tokens now lie."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
    has_pair: Tensor
    cu_seqlens: Tensor | None
    tokens: Tensor


def continued(given: tuple, tail: Tail, shift: bool, cu_seqlens: Tensor | None) -> Stream:
    """The tokens of a call [B, T, ...] with those of its state before them. shift: targets go with the key before."""
    q, k, v, beta, lam = given
    if beta is None:
        beta = v.new_ones(v.shape[:3], dtype=torch.float32)
    k0, v0, pairs, first = _tokens_before(tail, shift)
    N, P = pairs.shape
    place = _Place.of(v, P, cu_seqlens)

    def idle(t: Tensor) -> Tensor:
        return place.join(t.new_zeros(N, P, *t.shape[2:]), t)

    starts = torch.where(place.is_first, first[place.sequence], True)
    inputs = idle(q), place.join(k0, k), place.join(v0, v), idle(beta), None if lam is None else idle(lam)
    return Stream(inputs, place.join(pairs, starts), place.cu_seqlens, place.tokens)


def _tokens_before(tail: Tail, shift: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and pairs of the P tokens before each sequence [N, P, ...]; whether its first token has a pair."""
    real = torch.arange(tail.x.shape[1], 0, -1, device=tail.x.device) <= tail.number[:, None]  # newest last
    x, y = (t.masked_fill(~real[..., None, None], 0) for t in (tail.x, tail.y))
    if not shift:
        return x, y, real, torch.ones_like(tail.has_key)
    key = tail.key.masked_fill(~tail.has_key[:, None, None], 0)
    keys = torch.cat((x, key[:, None]), dim=1)
    values = torch.cat((torch.zeros_like(y[:, :1]), y), dim=1)
    return keys, values, torch.cat((torch.zeros_like(real[:, :1]), real), dim=1), tail.has_key


class _Place(NamedTuple):
    """Where everything lies once P tokens more stand before each of N sequences.

    sequence, is_first: of each old token, broadcastable to [B, T]. source: of each place of a packed stream, counting
    the N P new tokens first.
    """

    tokens: Tensor
    sequence: Tensor
    is_first: Tensor
    cu_seqlens: Tensor | None = None
    source: Tensor | None = None

    @classmethod
    def of(cls, v: Tensor, P: int, cu_seqlens: Tensor | None) -> "_Place":
        B, T = v.shape[:2]
        every = torch.arange(T, device=v.device)
        if cu_seqlens is None:
            return cls(every + P, torch.arange(B, device=v.device)[:, None], (every == 0).expand(B, T))
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), every.to(cu_seqlens.dtype), right=True)
        tokens = every + P * (sequence + 1)
        longer = cu_seqlens + P * torch.arange(len(cu_seqlens), device=every.device, dtype=cu_seqlens.dtype)
        order = torch.cat(((longer[:-1, None] + torch.arange(P, device=every.device)).flatten(), tokens))
        source = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=every.device))
        return cls(tokens, sequence[None], (every == cu_seqlens[sequence])[None], longer, source)

    def join(self, before: Tensor, tokens: Tensor) -> Tensor:
        """[N, P, ...] and [B, T, ...] as one stream, in the dtype of the tokens."""
        before = before.to(tokens.dtype)
        if self.source is None:
            return torch.cat((before, tokens), dim=1)
        return torch.cat((before.flatten(0, 1), tokens[0]))[self.source][None]
