"""Host side of the gradients that are parallel over chunks on Hopper: whether a call can take them, their launches."""

from typing import Any

import torch
from torch import Tensor

from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, gate_flags, start, tables
from fastweight.kernels.launch_hopper import WIDTHS, available, descriptor, tiles


def fits(given: Inputs, d_o: Tensor, states: Tensor) -> bool:
    """Whether the fast kernels compute this call: 16 bits, widths 64 or 128, whatever surrounds the tokens."""
    K, V = given.q.shape[3], given.v.shape[3]
    if given.v.dtype == torch.float32 or K not in WIDTHS or V not in WIDTHS:
        return False
    if states.numel() // V >= 2**31:  # rows that a 32-bit coordinate reaches
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (given.q, given.k, given.v, d_o))
    return aligned and available(given.v.device)


def state_rows(states: Tensor) -> Any:
    """Descriptor of 64 key rows of chunk states [chunks, H, K, V]."""
    V = states.shape[-1]
    return descriptor(states, [states.numel() // V, V], [V, 1], [64, V])


def _options(plan: Plan, given: Inputs) -> dict[str, Any]:
    common = {"V": given.v.shape[3], "BEFORE": plan.before, "num_warps": 4}
    return {**given.widths, **common, **gate_flags(plan)}


def solve(plan: Plan, given: Inputs, where: Geometry, d_o: Tensor, saved: tuple[Tensor, ...], out: Gradients) -> None:
    """Fills gradients of queries, keys and gates; saved: eta, log-decay, residual, states; dY and dS are in `out`."""
    from fastweight.kernels import hopper_solve_gradient

    eta, decay, residual, states = saved
    K, shared = given.q.shape[3], out.shares_room
    rooms = (tiles(out.q, K), tiles(out.k, K) if K == 128 else None) if shared else (None, None)
    halo = out.k.new_empty(where.slots, *out.k.shape[2:]) if shared else None
    start(
        hopper_solve_gradient.backward_token, (where.slots * given.v.shape[2],),
        given.q, given.k, d_o, given.beta, given.lam, *given[5:], eta, decay, residual, state_rows(states), out.v,
        None if shared else state_rows(out.states), *rooms, out.q, out.k, out.beta, out.lam, out.key0, halo,
        *tables(where), float(plan.eps), float(plan.floor), DECAYED=plan.decayed, **_options(plan, given),
    )  # fmt: skip
    if halo is not None and plan.shift:
        chunks = where.sequences, where.chunks
        out.k.view(*chunks, 64, *out.k.shape[2:])[:, :-1, 63] = halo.view(*chunks, *halo.shape[1:])[:, 1:]


def additive(
    plan: Plan, given: Inputs, where: Geometry, d_o: Tensor, saved: tuple[Tensor, ...], out: Gradients,
    halo: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Fills all gradients; saved: weight, log-decay, states; dS is in `out`; halo: of shared k and v."""
    from fastweight.kernels import hopper_additive_gradient

    weight, decay, states = saved
    start(
        hopper_additive_gradient.backward_token, (where.slots * given.v.shape[2],),
        given.q, given.k, given.v, d_o, given.beta, given.lam, *given[5:], weight, decay, state_rows(states),
        state_rows(out.states), out.q, out.k, out.v, out.beta, out.lam, out.key0, *halo, *tables(where),
        float(plan.eps), float(plan.floor), WINDOW=plan.window, **_options(plan, given),
    )  # fmt: skip
