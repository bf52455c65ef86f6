"""Host side of the inner-product class with one gain per head: allocates, and launches additive.py and its gradient.

What walks the chunks has two engines with the same doors, as in launch_solve.py: the plain kernels of additive.py, for
every call, and those of hopper_additive.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweight.kernels import (
    additive,
    additive_gradient,
    launch_hopper,
    launch_hopper_additive,
    launch_hopper_gradient,
)
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import (
    Gradients,
    Inputs,
    Plan,
    Walk,
    aligned,
    gate_flags,
    make_steps,
    precision,
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


class Engine(NamedTuple):
    """What walks the chunks of a call: in how many pieces, and its launches; see launch_hopper_additive."""

    walk_of: Callable[..., Walk]
    forward: Callable[..., None]
    backward_state: Callable[..., None]


def _programs(where: Geometry, given: Inputs) -> int:
    """Programs that walk one piece of every sequence."""
    tile = serial_tile(given.q.shape[3], given.v.shape[3], given.v.dtype)
    return where.sequences * given.v.shape[2] * -(-given.v.shape[3] // tile.BV)


def _options(plan: Plan, given: Inputs) -> dict[str, Any]:
    K, V, dtype = given.q.shape[3], given.v.shape[3], given.v.dtype
    common = {"V": V, "WINDOW": plan.window, "BEFORE": plan.before, "DOT": precision(dtype)}
    return {**common, **given.widths, **serial_tile(K, V, dtype)._asdict()}


def _forward(plan, given, walk, steps, state0, o, state1, states) -> None:
    start(
        additive.forward, (_programs(walk.where, given) * walk.segments,),
        given.q, given.k, given.v, given.key0, given.previous, *steps,
        None if state0 is None else state0.contiguous(), o, states, state1, *walk.arguments,
        SHIFT=int(plan.shift), **_options(plan, given),
    )  # fmt: skip


def _backward_state(plan, given, walk, decay, d_o, d_end, d_start, d_states) -> None:
    start(
        additive.backward_state, (_programs(walk.where, given) * walk.segments,),
        given.q, d_o, decay, None if d_end is None else d_end.contiguous(), d_states, d_start,
        *walk.arguments, **_options(plan, given),
    )  # fmt: skip


PLAIN = Engine(lambda where, given: Walk.of(where, _programs(where, given)), _forward, _backward_state)
HOPPER = Engine(launch_hopper_additive.walk_of, launch_hopper_additive.forward, launch_hopper_additive.backward_state)


def _engine(given: Inputs, where: Geometry) -> tuple[Engine, Walk]:
    """Which kernels walk the chunks, and in how many pieces."""
    engine = HOPPER if launch_hopper.fits(given, where.cu) else PLAIN
    return engine, engine.walk_of(where, given)


def _join(plan: Plan, walk: Walk, decay: Tensor, local: Tensor, outside: Tensor | None, reverse: bool) -> Tensor:
    """States [pieces, H, K, V] that pieces start from (end at, in reverse), from what each adds."""
    H, size = local.shape[1], local.shape[2] * local.shape[3]
    found = torch.empty_like(local)
    where = walk.where
    start(
        additive.join, (where.sequences * H, triton.cdiv(size, 1024)),
        local, decay, None if outside is None else outside.contiguous(), found, where.length, where.chunks,
        where.tokens, walk.segments, walk.length, H=H, SIZE=size, WINDOW=plan.window, REVERSE=reverse, BLOCK=1024,
        num_warps=4,
    )  # fmt: skip
    return found


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, weights, log-decay and chunk states of the inner-product class."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    o = torch.empty_like(given.v)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    weight, decay = make_steps(plan, given, where, nonzero=False)
    steps = weight, decay, fold(plan, where, weight, decay)
    engine, walk = _engine(given, where)
    state1 = torch.empty(where.sequences * walk.segments, H, K, V, dtype=torch.float32, device=v.device)
    if walk.segments > 1:
        engine.forward(plan, given, walk, steps, None, None, state1, None)
        state0 = _join(plan, walk, decay, state1, state0, reverse=False)
    if state1.numel():
        engine.forward(plan, given, walk, steps, state0, o, state1, states if save else None)
    if walk.segments > 1:
        state1 = walk.pieces(state1)[:, -1].contiguous()
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
    weight, decay, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    d_o = aligned(d_o)
    engine, walk = _engine(given, where)
    at_once = engine is HOPPER and launch_hopper_additive.takes_backward(plan, given)
    out = Gradients(given, where, want_state, 0 if at_once else None)
    pieces = out.state0
    if walk.segments > 1:
        pieces = torch.empty(where.sequences * walk.segments, H, K, V, dtype=torch.float32, device=v.device)
        engine.backward_state(plan, given, walk, decay, d_o, None, pieces, None)
        d_state1 = _join(plan, walk, decay, pieces, d_state1, reverse=True)
    if at_once:
        steps = weight, decay, fold(plan, where, weight, decay) if plan.window > 1 else None
        launch_hopper_additive.backward(plan, given, walk, steps, states, d_o, d_state1, pieces, out)
    elif where.sequences and H:
        engine.backward_state(plan, given, walk, decay, d_o, d_state1, pieces, out.states)
        _rest(plan, given, where, d_o, saved, out)
    if want_state and pieces is not None and walk.segments > 1:
        out.state0 = walk.pieces(pieces)[:, 0].contiguous()
    return out.result()


def _rest(plan, given, where, d_o, saved, out) -> None:
    """All gradients but that of the initial state, from the chunks' states and state gradients."""
    H, K, V = given.v.shape[2], given.q.shape[3], given.v.shape[3]
    shared = where.slots * 16 if plan.window > 1 else 0
    halo = out.nothing.new_empty(shared, H, K), out.nothing.new_empty(shared, H, V)
    if where.slots and H:
        fast = launch_hopper_gradient.fits(given, d_o, saved[-1])
        rest = launch_hopper_gradient.additive if fast else _backward_token
        rest(plan, given, where, d_o, saved, out, halo)
    if shared and H:
        start(
            additive_gradient.backward_halo, (where.slots, H),
            *halo, out.k, out.v, *tables(where)[:5], H=H, K=K, V=V, BK=wide(K), BV=wide(V),
            WINDOW=plan.window, SHIFT=int(plan.shift), num_warps=4,
        )  # fmt: skip
