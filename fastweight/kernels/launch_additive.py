"""Host side of the inner-product class with one gain per head: allocates, and launches additive.py and its gradient."""

from typing import Any

import torch
import triton
from torch import Tensor

from fastweight.kernels import additive, additive_gradient, launch_hopper_gradient
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import (
    Gradients,
    Inputs,
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
    wide,
)


def fold(plan: Any, where: Geometry, weight: Tensor, decay: Tensor) -> Tensor:
    """Sums over the steps of a window that the kernels look up; nothing at window 1."""
    H = weight.shape[0]
    sums = weight.new_empty(where.slots if plan.window > 1 else 0, H, plan.window + 1, 64)
    if sums.numel():
        start(
            additive.fold, (where.slots, H), weight, decay, sums, *tables(where), H=H, WINDOW=plan.window, num_warps=2
        )
    return sums


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, weights, log-decay and chunk states of the inner-product class."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    weight, decay = make_steps(plan, given, where, nonzero=False)
    sums = fold(plan, where, weight, decay)
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)

    def run(state0: Tensor | None, state1: Tensor, save: bool) -> None:
        start(
            additive.forward, (grid * walk.segments,),
            given.q, given.k, given.v, given.key0, given.previous, weight, decay, sums,
            None if state0 is None else state0.contiguous(), o, states, state1, *walk.arguments,
            V=V, WINDOW=plan.window, SHIFT=int(plan.shift), BEFORE=plan.before, SAVE=save, DOT=precision(dtype),
            **given.widths, **tile._asdict(),
        )  # fmt: skip

    if walk.segments > 1:
        local = state1.new_empty(where.sequences * walk.segments, H, K, V)
        run(None, local, False)
        decays = walk.decays(decay, 65 - plan.window)
        run(chain(decays, walk.pieces(local), state0, reverse=False), local, save)
        state1 = walk.pieces(local)[:, -1].contiguous()
    elif grid:
        run(state0, state1, save)
    return o, state1, weight, decay, states


def _backward_token(plan, given, where, d_o, saved, out, halo) -> None:
    weight, decay, states = saved
    sums = fold(plan, where, weight, decay)
    H, K, V, dtype = given.v.shape[2], given.q.shape[3], given.v.shape[3], given.v.dtype
    start(
        additive_gradient.backward_token, (where.slots, H),
        given.q, given.k, given.v, d_o, given.beta, given.lam, *given[5:], weight, decay, sums, states, out.states,
        out.nothing.new_empty(2 * H, where.tokens), out.q, out.k, out.v, out.beta, out.lam, out.key0,
        *halo, *tables(where), float(plan.eps), float(plan.floor), SUM=sum_dtype(dtype), WINDOW=plan.window,
        BEFORE=plan.before, DOT=precision(dtype), V=V, **given.widths, **gate_flags(plan),
        **token_tile(K, V, dtype)._asdict(),
    )  # fmt: skip


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    _weight, decay, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    d_o = d_o.contiguous()
    out = Gradients(given, where, want_state)
    shared = where.slots * 16 if plan.window > 1 else 0
    halo_k, halo_v = out.nothing.new_empty(shared, H, K), out.nothing.new_empty(shared, H, V)
    flags: dict[str, Any] = {"WINDOW": plan.window, "BEFORE": plan.before, "DOT": precision(dtype), "V": V}
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)

    def reverse(d_end: Tensor | None, d_start: Tensor | None) -> None:
        start(
            additive.backward_state, (grid * walk.segments,),
            given.q, d_o, decay, None if d_end is None else d_end.contiguous(), out.states, d_start,
            *walk.arguments, **flags, **given.widths, **tile._asdict(),
        )  # fmt: skip

    if walk.segments > 1:
        reverse_in_pieces(reverse, walk, walk.decays(decay, 65 - plan.window), d_state1, out)
    elif grid:
        reverse(d_state1, out.state0)
    if where.slots and H:
        fast = launch_hopper_gradient.fits(given, d_o, states)
        rest = launch_hopper_gradient.additive if fast else _backward_token
        rest(plan, given, where, d_o, saved, out, (halo_k, halo_v))
    if shared and H:
        start(
            additive_gradient.backward_halo, (where.slots, H),
            halo_k, halo_v, out.k, out.v, *tables(where)[:5], H=H, K=K, V=V, BK=wide(K), BV=wide(V),
            WINDOW=plan.window, SHIFT=int(plan.shift), num_warps=4,
        )  # fmt: skip
    return out.result()
