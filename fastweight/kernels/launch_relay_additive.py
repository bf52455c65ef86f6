"""The inner-product class with one gain per head over several devices: as launch_relay.py, with decays for maps.

Trap: on Hopper the walk in reverse leaves out the first piece unless it keeps the gradients of chunks, so it does here,
in the room that the second walk fills again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastweight.kernels import launch_additive
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, Walk, device_of, make_steps
from fastweight.kernels.launch_relay import Exchange, one_piece_fewer


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass."""

    given: Inputs
    walk: Walk
    weight: Tensor
    decay: Tensor
    states: Tensor


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
    """As launch_relay.forward; the map that `exchange` gets is a decay [B, H, 1, 1]."""
    given = Inputs.of(plan, q, k, v, beta, gate, None, None, None)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, None, 65 - plan.window)
    with device_of(v):
        engine, walk = launch_additive._engine(given, where)
        walk = one_piece_fewer(walk)
        whole = walk._replace(segments=walk.segments + 1)
        weight, decay = make_steps(plan, given, where, nonzero=False)
        steps = weight, decay, launch_additive.fold(plan, where, weight, decay)
        local = torch.zeros(B * whole.segments, H, K, V, dtype=torch.float32, device=v.device)
        engine.forward(plan, given, whole, steps, None, None, local, None)

        def ends(adds: Tensor, outside: Tensor | None) -> Tensor:
            return whole.pieces(launch_additive._join(plan, whole, decay, adds, outside, reverse=False))

        one = local.new_ones(B, H, 1, 1)
        left = ends(torch.zeros_like(local[..., :1, :1]), one)[:, -1]
        state0 = exchange(left.double(), ends(local, None)[:, -1].double()).float()
        begins = ends(local, state0)[:, :-1].flatten(0, 1)
        o = torch.empty_like(given.v)
        states = v.new_empty(where.slots if save else 0, H, K, V)
        state1 = torch.empty(B * walk.segments, H, K, V, dtype=torch.float32, device=v.device)
        engine.forward(plan, given, walk, steps, begins, o, state1, states if save else None)
    return o, walk.pieces(state1)[:, -1].contiguous(), Kept(given, walk, weight, decay, states)


def backward(
    plan: Plan, kept: Kept, d_o: Tensor, d_state1: Tensor | None, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As launch_relay.backward."""
    given, walk, weight, decay, states = kept
    (B, _, H, V), K = given.v.shape, given.q.shape[3]
    where = walk.where
    d_o = d_o.contiguous()
    d_o = d_o.clone() if d_o.data_ptr() % 16 else d_o  # what TMA reads is aligned
    with device_of(given.v):
        engine, _ = launch_additive._engine(given, where)
        out = Gradients(given, where, False)
        local = torch.empty(B * walk.segments, H, K, V, dtype=torch.float32, device=given.v.device)
        engine.backward_state(plan, given, walk, decay, d_o, None, local, out.states)

        carry = _first_decay(walk, decay, H, plan.window)

        def ends(outside: Tensor | None) -> tuple[Tensor, Tensor]:
            """Gradients at the ends of the pieces, and where the first of them begins."""
            found = launch_additive._join(plan, walk, decay, local, outside, reverse=True)
            return found, carry * walk.pieces(found)[:, 0].double() + walk.pieces(local)[:, 0]

        d_end = exchange(ends(d_state1)[1]).float()
        d_end = d_end if d_state1 is None else d_end + d_state1
        found, d_begun = ends(d_end)
        engine.backward_state(plan, given, walk, decay, d_o, found, None, out.states)
        launch_additive._rest(plan, given, where, d_o, (weight, decay, states), out)
    return *out.result()[:5], d_begun


def _first_decay(walk: Walk, decay: Tensor, H: int, window: int) -> Tensor:
    """What the first piece of each sequence leaves of a state, [B, H, 1, 1] in float64."""
    where = walk.where
    chunks = min(walk.length, where.chunks)
    ends = torch.arange(1, chunks + 1, device=decay.device).mul(65 - window).clamp(max=where.length) - 1
    total = decay.view(H, where.sequences, where.length)[:, :, ends].double().sum(-1)
    return torch.exp2(total).T[..., None, None]
