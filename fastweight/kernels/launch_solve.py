"""Host side of the regression class with one gain per head: allocates, and launches solve.py and solve_gradient.py.

What walks the chunks has two engines with the same doors: the plain kernels of solve.py, for every call, and those of
hopper_solve.py, for the calls that launch_hopper.fits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweight.kernels import launch_hopper, launch_hopper_gradient, solve, solve_gradient
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

INVERT_REGISTERS = 168  # a cap: more programs in flight are worth some spilling


class Engine(NamedTuple):
    """What a call goes through before and while its chunks are walked; see launch_hopper for the arguments."""

    prepare: Callable[..., tuple[tuple[Tensor, Tensor], Tensor]]
    reach: Callable[..., launch_hopper.Reach | None]
    forward: Callable[..., None]
    advance: Callable[..., None]
    backward_state: Callable[..., None]


def _divides(given: Inputs) -> bool:
    """Whether gradients of steps are found as (R . dY) / eta: bfloat16 has the range for it at a step of 0."""
    return given.v.dtype == torch.bfloat16


def _flags(plan: Plan, given: Inputs) -> dict[str, Any]:
    K, V, dtype = given.q.shape[3], given.v.shape[3], given.v.dtype
    common = {"V": V, "SHIFT": int(plan.shift), "DECAYED": plan.decayed, "DOT": precision(dtype)}
    return {**common, **given.widths, **serial_tile(K, V, dtype)._asdict()}


def _programs(walk: Walk, given: Inputs, columns: int) -> tuple[int]:
    return (walk.where.sequences * walk.segments * given.v.shape[2] * columns,)


def _columns(width: int, given: Inputs) -> int:
    """Programs that `width` columns take."""
    return -(-width // serial_tile(given.q.shape[3], given.v.shape[3], given.v.dtype).BV)


def _prepare(plan: Plan, given: Inputs, where: Geometry) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rates = make_steps(plan, given, where, nonzero=_divides(given))
    H, dtype = given.v.shape[2], given.v.dtype
    inverse = given.v.new_empty(where.slots, H, 64, 64)
    if where.slots and H:
        start(
            solve.invert, (where.slots, H),
            given.k, given.key0, given.previous, *rates, inverse, *tables(where), BK=64, SHIFT=int(plan.shift),
            DECAYED=plan.decayed, DOT=precision(dtype), MERGE="tf32" if dtype == torch.bfloat16 else "tf32x3",
            **given.widths, num_warps=1, num_stages=1, maxnreg=None if dtype == torch.float32 else INVERT_REGISTERS,
        )  # fmt: skip
    return rates, inverse


def _forward(plan, given, walk, rates, inverse, state0, o, state1, residual, states) -> None:
    start(
        solve.forward, _programs(walk, given, _columns(given.v.shape[3], given)),
        given.q, given.k, given.v, given.key0, given.previous, *rates, inverse,
        None if state0 is None else state0.contiguous(), o, residual, states, state1, *walk.arguments,
        BEFORE=plan.before, **_flags(plan, given),
    )  # fmt: skip


def _advance(plan, given, walk, rates, inverse, local, maps, left=None) -> None:
    columns = _columns(given.q.shape[3], given) + (0 if local is None else _columns(given.v.shape[3], given))
    start(
        solve.advance, _programs(walk, given, columns),
        given.k, given.v, given.key0, given.previous, *rates, inverse, local, maps, *walk.arguments,
        **_flags(plan, given),
    )  # fmt: skip


def _backward_state(plan, given, walk, rates, inverse, d_o, d_end, d_start, kept, left=None) -> None:
    d_y, d_states = kept or (None, None)
    start(
        solve.backward_state, _programs(walk, given, _columns(given.v.shape[3], given)),
        given.q, given.k, d_o, given.key0, given.previous, *rates, inverse,
        None if d_end is None else d_end.contiguous(), d_y, d_states, d_start, *walk.arguments,
        BEFORE=plan.before, **_flags(plan, given),
    )  # fmt: skip


def _backward_token(plan, given, where, d_o, saved, out) -> None:
    eta, decay, residual, states = saved
    H, K, V, dtype = given.v.shape[2], given.q.shape[3], given.v.shape[3], given.v.dtype
    start(
        solve_gradient.backward_token, (where.slots, H),
        given.q, given.k, d_o, given.beta, given.lam, *given[5:], eta, decay, residual, states, out.v, out.states,
        decay.new_empty(H, where.tokens), out.q, out.k, out.beta, out.lam, out.key0, *tables(where),
        float(plan.eps), float(plan.floor), SUM=sum_dtype(dtype), DIVIDES=_divides(given),
        DECAYED=plan.decayed, BEFORE=plan.before, DOT=precision(dtype), V=V, **given.widths, **gate_flags(plan),
        **token_tile(K, V, dtype)._asdict(),
    )  # fmt: skip


PLAIN = Engine(_prepare, lambda *_: None, _forward, _advance, _backward_state)
HOPPER = Engine(
    launch_hopper.prepare,
    launch_hopper.reach,
    launch_hopper.forward,
    launch_hopper.advance,
    launch_hopper.backward_state,
)


def _engine(given: Inputs, where: Geometry) -> tuple[Engine, Walk]:
    """Which kernels walk the chunks, and in how many pieces."""
    H, V, dtype = given.v.shape[2], given.v.shape[3], given.v.dtype
    if not launch_hopper.fits(given, where.cu):
        return PLAIN, Walk.of(where, where.sequences * H * _columns(V, given))
    engine = HOPPER._replace(prepare=_prepare) if dtype == torch.float16 else HOPPER
    return engine, launch_hopper.walk_of(where, given)


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, eta, log-decay, inverse, residual and chunk states of the regression class."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, cu_seqlens)
    o = torch.empty_like(given.v)
    residual = v.new_empty(where.tokens if save else 0, H, V)
    states = _states(plan, where, given, state0) if save else v.new_empty(0, H, K, V)
    engine, walk = _engine(given, where)
    rates, inverse = engine.prepare(plan, given, where)
    if walk.segments > 1:
        left = engine.reach(plan, given, walk, rates)
        maps, local = _pieces(engine, plan, given, walk, rates, inverse, True, left)
        state0 = compose(walk, maps, local, state0, False, left)
    state1 = torch.empty(where.sequences * walk.segments, H, K, V, dtype=torch.float32, device=v.device)
    if state1.numel():
        kept = residual if save else None, states if save and not plan.rebuild else None
        engine.forward(plan, given, walk, rates, inverse, state0, o, state1, *kept)
    if walk.segments > 1:
        state1 = walk.pieces(state1)[:, -1].contiguous()
    return o, state1, *rates, inverse, residual, states


def _states(plan: Plan, where: Geometry, given: Inputs, state0: Tensor | None) -> Tensor:
    """Room for the chunk states, or if they are to be rebuilt, those that the sequences begin with."""
    H, K, V = given.v.shape[2], given.q.shape[3], given.v.shape[3]
    if not plan.rebuild:
        return given.v.new_empty(where.slots, H, K, V)
    begins = given.v.new_zeros(where.sequences, H, K, V)
    return begins if state0 is None else begins.copy_(state0)


def _rebuild(plan: Plan, given: Inputs, where: Geometry, rates: tuple[Tensor, Tensor], residual, begins) -> Tensor:
    """The chunk states [slots, H, K, V] that `forward` did not keep."""
    states = given.v.new_empty(where.slots, *begins.shape[1:])
    walk = Walk(where, 1, 2**30)
    if states.numel():
        flags = _flags(plan, given)
        del flags["DECAYED"]
        start(
            solve.rebuild, _programs(walk, given, _columns(given.v.shape[3], given)),
            given.k, given.key0, given.previous, *rates, residual, begins, states, *walk.arguments, **flags,
        )  # fmt: skip
    return states


def _pieces(engine, plan, given, walk, rates, inverse, with_values, left=None) -> tuple[Tensor, Any]:
    """Maps [pieces, H, K, K] of all pieces, and what they write from nothing (if with_values); left: engine.reach."""
    H, K, V = given.v.shape[2], given.q.shape[3], given.v.shape[3]
    count = walk.where.sequences * walk.segments
    maps = torch.empty(count, H, K, K, dtype=torch.float32, device=given.v.device)
    local = torch.empty(count, H, K, V, dtype=torch.float32, device=given.v.device) if with_values else None
    engine.advance(plan, given, walk, rates, inverse, local, maps, left)
    return maps, local


def compose(
    walk: Walk, maps: Tensor, local: Tensor, outside: Tensor | None, reverse: bool,
    left: launch_hopper.Reach | None = None,
) -> Tensor:  # fmt: skip
    """States [pieces, H, K, V] that pieces start from (end at, in reverse), from their maps and what each adds."""
    H, K, V = local.shape[1:]
    found = torch.empty_like(local)
    start(
        solve.compose, (walk.where.sequences * H, triton.cdiv(V, 16)),
        maps, local, None if outside is None else outside.contiguous(), found, left and left.pieces, walk.segments,
        H=H, K=K, V=V, BK=wide(K, 16), BV=16, REVERSE=reverse, num_warps=4, num_stages=1,
    )  # fmt: skip
    return found


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    eta, decay, inverse, residual, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, cu_seqlens)
    d_o = aligned(d_o)
    engine, walk = _engine(given, where)
    fast = engine.backward_state is launch_hopper.backward_state
    shared = fast and not plan.rebuild and launch_hopper.shares_room(given)
    shared = shared and launch_hopper_gradient.fits(given, d_o, states)
    rows = len(q) if shared else _rows_at_once(engine, walk, given, want_state or d_state1 is not None)
    out = Gradients(given, where, want_state, 0 if shared else None if rows == len(q) else rows * where.chunks)
    if rows < len(q):
        _in_turns(engine, plan, given, where, rows, d_o, d_state1, (eta, decay, inverse, residual, states), out)
        return out.result()
    if plan.rebuild:
        states = _rebuild(plan, given, where, (eta, decay), residual, states)
    run: tuple[Any, ...] = (plan, given, walk, (eta, decay), inverse)
    if walk.segments > 1:
        d_state1 = _ends(engine, run, d_o, d_state1)
    pieces = out.state0
    if want_state and walk.segments > 1:
        pieces = torch.empty(where.sequences * walk.segments, H, K, V, dtype=torch.float32, device=v.device)
    if where.sequences and H:
        kept = (out.v, out.q, out.k) if shared else (out.v, out.states)
        engine.backward_state(*run, d_o, d_state1, pieces, kept)
    if pieces is not None and walk.segments > 1:
        out.state0 = walk.pieces(pieces)[:, 0].contiguous()
    if where.slots and H:
        _rest(plan, given, where, d_o, (eta, decay, residual, states), out)
    return out.result()


def _rest(plan: Plan, given: Inputs, where: Geometry, d_o: Tensor, saved: tuple[Tensor, ...], out: Gradients) -> None:
    """Gradients that are found chunk by chunk, from steps, log-decays, residuals, states and what is in `out`."""
    fast = _divides(given) and launch_hopper_gradient.fits(given, d_o, saved[-1])
    (launch_hopper_gradient.solve if fast else _backward_token)(plan, given, where, d_o, saved, out)


def _in_turns(engine, plan, given, where, count, d_o, d_state1, saved, out) -> None:
    """The backward pass of a dense batch, `count` rows at a time, all in one room for state gradients."""
    eta, decay, inverse, residual, states = saved
    for first in range(0, where.sequences, count):
        rows = slice(first, min(first + count, where.sequences))
        chunks = slice(rows.start * where.chunks, rows.stop * where.chunks)
        tokens = slice(rows.start * where.length, rows.stop * where.length)
        # Rates stay rows of all tokens: the kernels step over them by where.tokens.
        rates = eta[:, tokens.start :], decay[:, tokens.start :]
        place = replace(where, sequences=rows.stop - rows.start, slots=chunks.stop - chunks.start)
        mine = given._replace(**{name: _rows(getattr(given, name), rows) for name in ("q", "k", "v", "beta", "lam")})
        part = out.rows(rows, place.slots)
        ends = _rows(d_state1, rows), _rows(out.state0, rows)
        walk = Walk(place, 1, 2**30)
        engine.backward_state(plan, mine, walk, rates, inverse[chunks], d_o[rows], *ends, (part.v, part.states))
        written = residual[tokens]
        kept = _rebuild(plan, mine, place, rates, written, states[rows]) if plan.rebuild else states[chunks]
        _rest(plan, mine, place, d_o[rows], (*rates, written, kept), part)
        del kept  # the next turn's are made in the same memory


def _rows_at_once(engine: Engine, walk: Walk, given: Inputs, states: bool) -> int:
    """Rows of the batch that the backward pass takes at a time: all with states at its ends, until run on a device."""
    fast = engine.backward_state is launch_hopper.backward_state
    return launch_hopper.rows_at_once(walk, given) if fast and not states else len(given.v)


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _ends(engine: Engine, run: tuple[Any, ...], d_o: Tensor, d_state1: Tensor | None) -> Tensor:
    """State gradients at the end of every piece: a first walk in reverse finds what each piece adds, from nothing."""
    plan, given, walk, rates, inverse = run
    left = engine.reach(plan, given, walk, rates)
    maps, _ = _pieces(engine, plan, given, walk, rates, inverse, False, left)
    local = maps.new_empty(*maps.shape[:3], given.v.shape[3])
    engine.backward_state(*run, d_o, None, local, None, left)
    return compose(walk, maps, local, d_state1, True, left)
