"""What launch_borders.py asks of the inner-product class with a gain per value column: its maps are decays of columns.

Trap: the walk in reverse writes state gradients of all chunks whether they are wanted or not, so it has room for them
twice in turn, never at once.
"""

import torch
from torch import Tensor

from fastweight.kernels import launch_columns
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, Walk


def advance(plan: Plan, given: Inputs, where: Geometry, walk_of) -> tuple[Walk, tuple[Tensor, ...], Tensor, Tensor]:
    """How chunks are walked, their paths, log2 decays [pieces, H, V] and states of all pieces and of an empty one."""
    walk = Walk.of(where, launch_columns.programs_of(launch_columns.walk_tile, given, where))
    walk = walk_of(where, walk.segments)
    whole = walk._replace(segments=walk.segments + 1)
    paths = launch_columns.draw_paths(plan, given.v, 16, flip=True)
    (B, _, H, V), K = given.v.shape, given.q.shape[3]
    local = torch.empty(B * whole.segments, H, K, V, dtype=torch.float32, device=given.v.device)
    spans = local.new_empty(B * whole.segments, H, V)
    made = paths, torch.empty_like(given.v), local.new_empty(H, 0), given.v.new_empty(0)
    launch_columns.walk_forward(plan, given, whole, made, None, local, False, spans)
    return walk, (paths,), spans, local


def walk(plan: Plan, given: Inputs, walk: Walk, rates, begins: Tensor, o: Tensor, ended: Tensor, save: bool):
    """Energies and chunk states, if they are to be saved."""
    (_, _, H, V), K, where = given.v.shape, given.q.shape[3], walk.where
    energies = ended.new_empty(H, where.tokens if save else 0)
    states = given.v.new_empty(where.slots if save else 0, H, K, V)
    launch_columns.walk_forward(plan, given, walk, (rates[0], o, energies, states), begins, ended, save)
    return energies, states


def reverse(plan: Plan, given: Inputs, walk: Walk, _rates, saved, d_o: Tensor, local: Tensor) -> None:
    """Fills local with what pieces add."""
    paths = launch_columns.draw_paths(plan, given.v, 64, flip=False)
    made = paths, saved[0], torch.empty_like(saved[1])
    launch_columns.walk_back(plan, given, walk, made, d_o, None, local)


def walk_back(plan: Plan, given: Inputs, walk: Walk, _rates, saved, d_o: Tensor, ends: Tensor) -> Gradients:
    out = Gradients(given, walk.where, False)
    launch_columns.from_ends(plan, given, walk, saved, d_o, ends, None, out)
    return out
