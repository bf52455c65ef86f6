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
from fastweight.kernels.launch import Gradients, Inputs, Plan, Walk, aligned, device_of

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

    exchange: from M [B, H, K, K] and b [B, H, K, V] of all tokens here to the state [B, H, K, V] that they begin with.
    """
    given = Inputs.of(plan, q, k, v, beta, gate, None, None, None)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, None)
    with device_of(v):
        engine, walk = launch_solve._engine(given, where)
        pieces = max(walk.segments - 1, 1)
        walk = Walk(where, pieces, -(-where.chunks // pieces))
        rates, inverse = engine.prepare(plan, given, where)
        whole = walk._replace(segments=pieces + 1)
        maps, local = launch_solve._pieces(engine, plan, given, whole, rates, inverse, True)
        state0 = exchange(*_total(whole, maps, local)).float()
        begins = whole.pieces(launch_solve.compose(whole, maps, local, state0, reverse=False))
        o = torch.empty_like(given.v)
        residual = v.new_empty(where.tokens if save else 0, H, V)
        states = v.new_empty(where.slots if save else 0, H, K, V)
        state1 = torch.empty(B * pieces, H, K, V, dtype=torch.float32, device=v.device)
        kept = (residual, states) if save else (None, None)
        engine.forward(plan, given, walk, rates, inverse, begins[:, :-1].flatten(0, 1), o, state1, *kept)
    ended = walk.pieces(state1)[:, -1].contiguous()
    return o, ended, Kept(given, walk, rates, inverse, residual, states, whole.pieces(maps)[:, :-1])


def _total(whole: Walk, maps: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """M and b of all pieces together: what becomes of the identity, and of nothing."""
    H, K = maps.shape[1:3]
    eye = torch.eye(K, device=maps.device).expand(whole.where.sequences, H, K, K)
    M = launch_solve.compose(whole, maps, torch.zeros_like(maps), eye, reverse=False)
    b = launch_solve.compose(whole, maps, local, None, reverse=False)
    return whole.pieces(M)[:, -1], whole.pieces(b)[:, -1]


def backward(
    plan: Plan, kept: Kept, d_o: Tensor, d_state1: Tensor | None, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, beta and gate (empty where there is none) and of the state that the tokens begin with.

    exchange: from that last gradient, as far as tokens here go, to the gradient of the state after them as far as the
    tokens behind go.
    """
    given, walk, rates, inverse, residual, states, maps = kept
    (B, _, H, V), K = given.v.shape, given.q.shape[3]
    where = walk.where
    d_o = aligned(d_o)
    with device_of(given.v):
        engine, _ = launch_solve._engine(given, where)
        run: tuple[Any, ...] = (plan, given, walk, rates, inverse)
        local = maps.new_empty(B * walk.segments, H, K, V)
        engine.backward_state(*run, d_o, None, local, None)
        whole = walk._replace(segments=walk.segments + 1)
        moves = _behind_nothing(maps)
        adds = _behind_nothing(walk.pieces(local))
        found = launch_solve.compose(whole, moves, adds, d_state1, reverse=True)
        d_end = exchange(whole.pieces(found)[:, 0]).float()
        d_end = d_end if d_state1 is None else d_end + d_state1
        found = whole.pieces(launch_solve.compose(whole, moves, adds, d_end, reverse=True))
        out = Gradients(given, where, False)
        engine.backward_state(*run, d_o, found[:, 1:].flatten(0, 1), None, (out.v, out.states))
        launch_solve._rest(plan, given, where, d_o, (*rates, residual, states), out)
    return *out.result()[:5], found[:, 0]


def _behind_nothing(pieces: Tensor) -> Tensor:
    """[B, pieces, ...] with an empty piece in front, flat."""
    return torch.cat((torch.zeros_like(pieces[:, :1]), pieces), dim=1).flatten(0, 1)
