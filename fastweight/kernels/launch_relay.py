"""Regression with one gain per head over several devices: launch_solve.py's passes, with an exchange in their middle.

A device walks its tokens in pieces, whose maps are joined before the pieces are walked. All of its pieces together are
one map more: `exchange` hands that to the other devices and brings the state that this device begins with (in reverse,
the gradient at its end), before the maps are joined with it. So spreading a sequence costs no second walk, where one
device would walk in pieces anyway.

Trap: the engines leave out the map of the last piece, which nothing follows; here the exchange does, so there is an
empty piece behind the last one (in reverse, before the first), and one real piece fewer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweight.kernels import launch_solve
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, Walk, device_of

Exchange = Callable[..., Tensor]


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    given: Inputs
    walk: Walk
    rates: tuple[Tensor, Tensor]
    inverse: Tensor
    residual: Tensor
    states: Tensor
    maps: Tensor


def forward(
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    gate: Tensor | None,
    exchange: Exchange,
    save: bool,
) -> tuple[Tensor, Tensor, Kept]:
    """o, the state after the last token here, and what to keep. gate: lam, or the log-decay where plan.raw.

    exchange: from M [B, H, K, K] and b [B, H, K, V] of all tokens here, float64, to the state [B, H, K, V] that they
    begin with.
    """
    given = Inputs.of(plan, q, k, v, beta, gate, None, None, None)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, None)
    with device_of(v):
        engine, walk = launch_solve._engine(given, where)
        walk = one_piece_fewer(walk)
        whole = walk._replace(segments=walk.segments + 1)
        rates, inverse = engine.prepare(plan, given, where)
        maps, local = launch_solve._pieces(engine, plan, given, whole, rates, inverse, True)
        M, b = _prefixes(whole, maps, local, None, reverse=False)
        begins = M[:, :-1] @ exchange(M[:, -1], b[:, -1])[:, None] + b[:, :-1]
        o = torch.empty_like(given.v)
        residual = v.new_empty(where.tokens if save else 0, H, V)
        states = v.new_empty(where.slots if save else 0, H, K, V)
        state1 = torch.empty(B * walk.segments, H, K, V, dtype=torch.float32, device=v.device)
        kept = (residual, states) if save else (None, None)
        engine.forward(plan, given, walk, rates, inverse, begins.flatten(0, 1).float(), o, state1, *kept)
    ended = state1[walk.segments - 1 :: walk.segments].contiguous()
    return (
        o,
        ended,
        Kept(given, walk, rates, inverse, residual, states, maps.unflatten(0, (-1, whole.segments))[:, :-1]),
    )


def _prefixes(whole: Walk, maps: Tensor, local: Tensor, outside: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """M [B, pieces, H, K, K] and b [B, pieces, H, K, V], float64: what has become of any state where a piece begins
    (in reverse, of a gradient where it ends); b begins with `outside`."""
    H, K, V = local.shape[1:]
    start = local.new_zeros(whole.where.sequences, H, K, K + V)
    start.diagonal(dim1=-2, dim2=-1).fill_(1)
    if outside is not None:
        start[..., K:] = outside
    found = launch_solve.compose(whole, maps, torch.nn.functional.pad(local, (K, 0)), start, reverse=reverse)
    found = found.double().unflatten(0, (-1, whole.segments))
    return found[..., :K], found[..., K:]


def one_piece_fewer(walk: Walk) -> Walk:
    """No piece is left out while maps are made, so one fewer fills the device."""
    chunks = walk.where.chunks
    length = -(-chunks // max(walk.segments - 1, 1))
    return Walk(walk.where, -(-chunks // length), length)


def backward(
    plan: Plan, kept: Kept, d_o: Tensor, d_state1: Tensor | None, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta and gate (empty where there is none), and of the state that the tokens begin with.

    exchange: from that last gradient [B, H, K, V], float64, as far as tokens here go, to the gradient of the state
    after them as far as the tokens behind go.
    """
    given, walk, rates, inverse, residual, states, maps = kept
    (B, _, H, V), K = given.v.shape, given.q.shape[3]
    where = walk.where
    d_o = d_o.contiguous()
    d_o = d_o.clone() if d_o.data_ptr() % 16 else d_o  # what TMA reads is aligned
    with device_of(given.v):
        engine, _ = launch_solve._engine(given, where)
        run: tuple[Any, ...] = (plan, given, walk, rates, inverse)
        local = maps.new_empty(B * walk.segments, H, K, V)
        engine.backward_state(*run, d_o, None, local, None)
        whole = walk._replace(segments=walk.segments + 1)
        M, b = _prefixes(
            whole,
            _behind_nothing(maps),
            _behind_nothing(local.unflatten(0, (-1, walk.segments))),
            d_state1,
            reverse=True,
        )
        # The empty piece comes first: where it ends the tokens begin.
        ends = M @ exchange(b[:, 0])[:, None] + b
        out = Gradients(given, where, False)
        engine.backward_state(*run, d_o, ends[:, 1:].flatten(0, 1).float(), None, (out.v, out.states))
        launch_solve._rest(plan, given, where, d_o, (*rates, residual, states), out)
    return *out.result()[:5], ends[:, 0]


def _behind_nothing(pieces: Tensor) -> Tensor:
    """[B, pieces, ...] with an empty piece in front, flat."""
    return torch.cat((torch.zeros_like(pieces[:, :1]), pieces), dim=1).flatten(0, 1)
