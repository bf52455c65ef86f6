"""Host side of hopper_columns.py and hopper_columns_backward.py: which calls they take, pieces, launches."""

from typing import Any

import torch
from torch import Tensor

from fastweight.kernels.launch import Gradients, Inputs, Plan, Walk, start
from fastweight.kernels.launch_hopper import STAGES, blocks, descriptor, tiles
from fastweight.kernels.launch_hopper import fits as is_dense

REVERSE_STAGES = 3  # chunks in shared memory; the walk in reverse for states alone holds less of each


def fits(plan: Plan, given: Inputs, cu: Tensor | None) -> bool:
    """Whether they compute this call: dense, bfloat16, K = V = 64 or 128, reads after writes."""
    if plan.before or given.v.dtype != torch.bfloat16 or given.q.shape[3] != given.v.shape[3]:
        return False
    return given.v.shape[3] <= 128 and is_dense(given, cu)


def _programs(given: Inputs, pieces: int) -> int:
    return pieces * given.v.shape[2] * (given.v.shape[3] // 64)


def _options(plan: Plan, given: Inputs) -> dict[str, Any]:
    flags = {"SHIFT": int(plan.shift), "SCALED": plan.scaled, "DIRECT": plan.direct}
    return {**given.widths, "V": given.v.shape[3], **flags}


def _numbers(plan: Plan, walk: Walk) -> tuple:
    return *walk.arguments[2:], float(plan.eps), float(plan.floor)


def add_up(plan: Plan, given: Inputs, walk: Walk, local: Tensor, spans: Tensor) -> None:
    """Fills what pieces add to a state [pieces, H, K, V] and their log2 decays [pieces, H, V]; not of the last ones."""
    from fastweight.kernels import hopper_columns

    K = given.q.shape[3]
    start(
        hopper_columns.forward, (_programs(given, walk.where.sequences * (walk.segments - 1)),),
        tiles(given.k, K), tiles(given.q, K), tiles(given.v, 64), None, None, given.beta, given.lam, None, None, local,
        spans, None, *_numbers(plan, walk), STAGES=STAGES, num_warps=4, **_options(plan, given),
    )  # fmt: skip


def forward(
    plan: Plan, given: Inputs, walk: Walk, state0: Tensor | None, o: Tensor, energies: Tensor, states: Tensor,
    state1: Tensor,
) -> Tensor:  # fmt: skip
    """Fills o, state1, and if they have room energies and chunk states; returns which programs did so in vain."""
    from fastweight.kernels import hopper_columns

    K, saves = given.q.shape[3], energies.numel() > 0
    programs = _programs(given, walk.where.sequences * walk.segments)
    wild = torch.empty(programs, dtype=torch.int8, device=given.v.device)
    start(
        hopper_columns.forward, (programs,),
        tiles(given.k, K), tiles(given.q, K), tiles(given.v, 64), tiles(o, 64), blocks(states, K) if saves else None,
        given.beta, given.lam, energies if saves else None, state0, state1, None, wild, *_numbers(plan, walk),
        STAGES=STAGES, num_warps=4, **_options(plan, given),
    )  # fmt: skip
    return wild


def reverse(plan: Plan, given: Inputs, walk: Walk, energies: Tensor, d_o: Tensor, local: Tensor, spans: Tensor) -> None:
    """Fills what pieces add to the gradient of a state [pieces, H, K, V], and log2 decays; not of the first ones."""
    from fastweight.kernels import hopper_columns

    K = given.q.shape[3]
    start(
        hopper_columns.backward_state, (_programs(given, walk.where.sequences * (walk.segments - 1)),),
        tiles(given.q, K), tiles(d_o, 64), given.beta, given.lam, energies, local, spans, *_numbers(plan, walk),
        STAGES=REVERSE_STAGES, num_warps=4, **_options(plan, given),
    )  # fmt: skip


def backward(
    plan: Plan, given: Inputs, walk: Walk, saved: tuple[Tensor, Tensor], d_o: Tensor, d_end: Tensor | None,
    d_start: Tensor | None, out: Gradients,
) -> Tensor:  # fmt: skip
    """Fills all gradients of tokens, and d_start if given; returns the chunks where it did so in vain.

    saved: energies, chunk states. Of such chunks out.states has the gradients of their end states.
    """
    from fastweight.kernels import hopper_columns_backward

    energies, states = saved
    H, K = given.v.shape[2], given.q.shape[3]
    rows = descriptor(states, [states.numel() // K, K], [K, 1], [K, K])
    wild = torch.empty(walk.where.slots, H, dtype=torch.int8, device=given.v.device)
    start(
        hopper_columns_backward.backward, (walk.where.sequences * walk.segments * H,),
        *(tiles(tensor, K) for tensor in (given.q, given.k, given.v, d_o)), rows,
        *(tiles(tensor, K) for tensor in (out.q, out.k, out.v)), out.k, given.beta, given.lam, out.beta, out.lam,
        energies, d_end, d_start, out.states, wild, *_numbers(plan, walk), num_warps=K // 16, **_options(plan, given),
    )  # fmt: skip
    return wild
