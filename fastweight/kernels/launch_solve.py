"""Host side of the regression class with one gain per head: allocates, and launches solve.py and solve_gradient.py."""

from typing import Any

import torch
import triton
from torch import Tensor

from fastweight.kernels import solve, solve_gradient
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import (
    Gradients,
    Inputs,
    Plan,
    Walk,
    chain,
    gate_flags,
    make_steps,
    precision,
    reverse_in_pieces,
    serial_tile,
    start,
    sum_dtype,
    tables,
    token_tile,
)

INVERT_REGISTERS = 168  # a cap: more programs in flight are worth some spilling


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, eta, log-decay, inverse, residual and chunk states of the regression class."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    inverse = v.new_empty(where.slots, H, 64, 64)
    residual = v.new_empty(where.tokens if save else 0, H, V)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    eta, decay = make_steps(plan, given, where, nonzero=True)
    shift, dot = int(plan.shift), precision(dtype)
    if where.slots and H:
        start(
            solve.invert, (where.slots, H),
            given.k, given.key0, given.previous, eta, decay, inverse, *tables(where), BK=64, SHIFT=shift,
            DECAYED=plan.decayed, DOT=dot, MERGE="tf32" if dtype == torch.bfloat16 else "tf32x3", **given.widths,
            num_warps=1, num_stages=1, maxnreg=None if dtype == torch.float32 else INVERT_REGISTERS,
        )  # fmt: skip
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)
    if walk.segments > 1:
        maps, local = _advance(plan, given, walk, (eta, decay, inverse), with_values=True)
        state0 = chain(maps, walk.pieces(local), state0, reverse=False)
        state1 = torch.empty_like(local)
    if grid:
        start(
            solve.forward, (grid * walk.segments,),
            given.q, given.k, given.v, given.key0, given.previous, eta, decay, inverse,
            None if state0 is None else state0.contiguous(), o, residual, states, state1, *walk.arguments,
            V=V, SHIFT=shift, DECAYED=plan.decayed, BEFORE=plan.before, SAVE=save, DOT=dot, **given.widths,
            **tile._asdict(),
        )  # fmt: skip
    if walk.segments > 1:
        state1 = walk.pieces(state1)[:, -1].contiguous()
    return o, state1, eta, decay, inverse, residual, states


def _advance(plan: Plan, given: Inputs, walk: Walk, saved: tuple, with_values: bool) -> tuple[Tensor, Tensor]:
    """Maps [N, segments, H, K, K] of all segments, and what they write from nothing (if with_values)."""
    H, K, V = given.v.shape[2], given.q.shape[3], given.v.shape[3]
    tile = serial_tile(K, V, given.v.dtype)
    count = walk.where.sequences * walk.segments
    maps = torch.empty(count, H, K, K, dtype=torch.float32, device=given.v.device)
    local = torch.empty(count if with_values else 0, H, K, V, dtype=torch.float32, device=given.v.device)
    blocks = triton.cdiv(K, tile.BV) + (triton.cdiv(V, tile.BV) if with_values else 0)
    start(
        solve.advance, (count * H * blocks,),
        given.k, given.v, given.key0, given.previous, *saved, local if with_values else None, maps, *walk.arguments,
        V=V, SHIFT=int(plan.shift), DECAYED=plan.decayed, DOT=precision(given.v.dtype), **given.widths,
        **tile._asdict(),
    )  # fmt: skip
    return walk.pieces(maps), local


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    eta, decay, inverse, residual, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens)
    d_o = d_o.contiguous()
    out = Gradients(given, where, want_state)
    flags: dict[str, Any] = {"DECAYED": plan.decayed, "BEFORE": plan.before, "DOT": precision(dtype), "V": V}
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)

    def reverse(d_end: Tensor | None, d_start: Tensor | None) -> None:
        start(
            solve.backward_state, (grid * walk.segments,),
            given.q, given.k, d_o, given.key0, given.previous, eta, decay, inverse,
            None if d_end is None else d_end.contiguous(), out.v, out.states, d_start, *walk.arguments,
            SHIFT=int(plan.shift), **flags, **given.widths, **tile._asdict(),
        )  # fmt: skip

    if walk.segments > 1:
        maps = _advance(plan, given, walk, (eta, decay, inverse), with_values=False)[0].mT
        reverse_in_pieces(reverse, walk, maps, d_state1, out)
    elif grid:
        reverse(d_state1, out.state0)
    if where.slots and H:
        start(
            solve_gradient.backward_token, (where.slots, H),
            given.q, given.k, d_o, given.beta, given.lam, *given[5:], eta, decay, residual, states, out.v, out.states,
            torch.empty_like(decay), out.q, out.k, out.beta, out.lam, out.key0, *tables(where),
            float(plan.eps), float(plan.floor), SUM=sum_dtype(dtype), **flags, **given.widths, **gate_flags(plan),
            **token_tile(K, V, dtype)._asdict(),
        )  # fmt: skip
    return out.result()
