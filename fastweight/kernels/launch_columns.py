"""Host side of the inner-product class with a gain per value column: allocates, launches columns.py and its gradient.

Calls that launch_hopper_columns knows first take its walks. They note where decays are too strong for them; there, and
for all other calls, the kernels that take any decay do the work.

Saved for the backward pass, per token and value head: 4 bytes of key energy, and K V / 64 elements of chunk states.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from fastweight.kernels import (
    columns,
    columns_gradient,
    launch_hopper_additive,
    launch_hopper_columns,
)
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import (
    Gradients,
    Inputs,
    Plan,
    Tile,
    Walk,
    aligned,
    precision,
    serial_tile,
    start,
    tables,
    wide,
)

LOOKING = 264  # programs that look for what has to be made anew


def draw_paths(plan: Any, v: Tensor, size: int, flip: bool) -> Tensor:
    """0/1 matrices that sum log-decays between `size` tokens (columns.py), drawn on the device; flip: transposed."""
    levels = size.bit_length() - 1
    # Log-decays need digits; their gradients, which the transposed of 64 tokens sum, need range.
    narrow = torch.bfloat16 if flip and size == 64 else torch.float16
    dtype = torch.float32 if v.dtype == torch.float32 else narrow
    paths = torch.empty(levels + 2, size, size, dtype=dtype, device=v.device)
    start(columns.draw_paths, (levels + 2,), paths, SIZE=size, LEVELS=levels, BEFORE=plan.before, FLIP=flip)
    return paths


def settings(plan: Any, given: Inputs) -> dict[str, Any]:
    """What the kernels take by name."""
    flags = {"SHIFT": int(plan.shift), "SCALED": plan.scaled, "DIRECT": plan.direct, "DOT": precision(given.v.dtype)}
    return {**flags, **given.widths, "V": given.v.shape[3]}


def walk_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """Of the forward walk, whose state is transposed: 32 rows of it would be too few for a warp group's products."""
    if dtype == torch.float32 and K > 128:
        return Tile(wide(K), 64, 8, 1)
    return serial_tile(K, V, dtype)


def token_tile(K: int, dtype: torch.dtype, num_warps: int) -> Tile:
    """Of the kernels with one program a chunk: all of K at once, so that every gradient is written once."""
    return Tile(wide(K), 32 if dtype == torch.float32 else 64, num_warps, 1)


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, key energies and chunk states."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    where = Geometry.of(B, T, cu_seqlens)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    energies = state1.new_empty(H, where.tokens if save else 0)
    walk, quick = walk_of(plan, given, where, walk_tile)
    paths = draw_paths(plan, v, 16, flip=True)
    made = paths, o, energies, states
    if walk.segments > 1:
        local = state1.new_empty(where.sequences * walk.segments, H, K, V)
        spans = state1.new_empty(where.sequences * walk.segments, H, V)
        if quick:
            launch_hopper_columns.add_up(plan, given, walk, local, spans)
        else:
            walk_forward(plan, given, walk, made, None, local, False, spans)
        walk_forward(plan, given, walk, made, _join(walk, local, spans, state0, reverse=False), local, save)
        state1 = walk.pieces(local)[:, -1].contiguous()
    elif state1.numel():
        walk_forward(plan, given, walk, made, state0, state1, save)
    return o, state1, energies, states


def walk_of(plan: Plan, given: Inputs, where: Geometry, tile_of: Any) -> tuple[Walk, bool]:
    """In how many pieces sequences are walked, and whether on Hopper."""
    if launch_hopper_columns.fits(plan, given, where.cu):
        return launch_hopper_additive.walk_of(where, given), True
    return Walk.of(where, programs_of(tile_of, given, where)), False


def _join(walk: Walk, local: Tensor, spans: Tensor, outside: Tensor | None, reverse: bool) -> Tensor:
    """States that pieces start from (end at, in reverse), from what each adds and its log2 decays."""
    H, K, V = local.shape[1:]
    found = torch.empty_like(local)
    start(
        columns.join, (walk.where.sequences * H, triton.cdiv(K * V, 1024)),
        local, spans, None if outside is None else outside.contiguous(), found, walk.segments,
        H=H, SIZE=K * V, V=V, REVERSE=reverse, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return found


def programs_of(tile_of: Any, given: Inputs, where: Geometry) -> int:
    """Programs that walk one piece of every sequence."""
    K, (_, _, H, V) = given.q.shape[3], given.v.shape
    return where.sequences * H * -(-V // tile_of(K, V, given.v.dtype).BV)


def walk_forward(
    plan: Plan, given: Inputs, walk: Walk, made: tuple[Tensor, ...], state0: Tensor | None, state1: Tensor, save: bool,
    spans: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills state1 and what was made: o, with `save` energies and states; spans, if given: log2 decays of pieces."""
    paths, o, energies, states = made
    tile = walk_tile(given.q.shape[3], given.v.shape[3], given.v.dtype)
    programs = (programs_of(walk_tile, given, walk.where) * walk.segments,)
    numbers = *walk.arguments, float(plan.eps), float(plan.floor)
    flags = {"BEFORE": plan.before, "SAVE": save, **settings(plan, given), **tile._asdict()}
    start0 = None if state0 is None else state0.contiguous()
    filled = start0, o, energies, states, state1, spans
    wild = None
    if spans is None and launch_hopper_columns.fits(plan, given, walk.where.cu):
        wild = launch_hopper_columns.forward(plan, given, walk, start0, o, energies, states, state1)
    start(columns.forward, programs, *given, paths, *filled, wild, *numbers, **flags)


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    energies, _states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    B, T, H, V = v.shape
    where = Geometry.of(B, T, cu_seqlens)
    d_o = aligned(d_o)
    out = Gradients(given, where, want_state)
    walk, quick = walk_of(plan, given, where, serial_tile)
    ends, begins = d_state1, out.state0
    if walk.segments > 1:
        begins = out.nothing.new_empty(where.sequences * walk.segments, *out.states.shape[1:])
        spans = out.nothing.new_empty(where.sequences * walk.segments, H, V)
        if quick:
            launch_hopper_columns.reverse(plan, given, walk, energies, d_o, begins, spans)
        else:
            made = draw_paths(plan, v, 64, flip=False), energies, out.states
            walk_back(plan, given, walk, made, d_o, None, begins, spans)
        ends = _join(walk, begins, spans, d_state1, reverse=True)
    from_ends(plan, given, walk, saved, d_o, ends, begins, out)
    if want_state and begins is not None and walk.segments > 1:
        out.state0 = walk.pieces(begins)[:, 0].contiguous()
    return out.result()


def from_ends(
    plan: Plan, given: Inputs, walk: Walk, saved: tuple[Tensor, Tensor], d_o: Tensor, d_end: Tensor | None,
    d_start: Tensor | None, out: Gradients,
) -> None:  # fmt: skip
    """Fills d_start, if given, and all other gradients, from those of the states that pieces end with."""
    paths, wild = draw_paths(plan, given.v, 64, flip=False), None
    if launch_hopper_columns.fits(plan, given, walk.where.cu):
        end = None if d_end is None else d_end.contiguous()
        wild = launch_hopper_columns.backward(plan, given, walk, saved, d_o, end, d_start, out)
    elif programs_of(serial_tile, given, walk.where):
        walk_back(plan, given, walk, (paths, saved[0], out.states), d_o, d_end, d_start)
    rest(plan, given, walk.where, d_o, saved, paths, out, wild)


def walk_back(
    plan: Plan, given: Inputs, walk: Walk, made: tuple[Tensor, Tensor, Tensor], d_o: Tensor, d_end: Tensor | None,
    d_start: Tensor | None, spans: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills the chunks' state gradients, the last of what was made, and d_start and spans if given."""
    paths, energies, d_states = made
    tile = serial_tile(given.q.shape[3], given.v.shape[3], given.v.dtype)
    start(
        columns.backward_state, (programs_of(serial_tile, given, walk.where) * walk.segments,),
        given.q, d_o, given.beta, given.lam, *given[6:], paths, energies,
        None if d_end is None else d_end.contiguous(), d_states, d_start, spans,
        *walk.arguments, float(plan.eps), float(plan.floor), **settings(plan, given), **tile._asdict(),
    )  # fmt: skip


def rest(
    plan: Plan, given: Inputs, where: Geometry, d_o: Tensor, saved: tuple[Tensor, Tensor], paths: Tensor,
    out: Gradients, wild: Tensor | None,
) -> None:  # fmt: skip
    """All gradients but that of the initial state, from the chunks' states and state gradients; wild: only of these."""
    energies, states = saved
    H, K, V, v = given.v.shape[2], given.q.shape[3], given.v.shape[3], given.v
    steps = float(plan.eps), float(plan.floor)
    if where.slots and H:
        tile = token_tile(K, v.dtype, 4)
        blocks = -(-V // tile.BV)
        shares = energies.new_empty(blocks, 2, H, where.tokens)
        d_scores = given.v.new_empty(blocks, where.slots, H, 64, 64)
        common = (given.q, given.k, given.v, d_o, given.beta, given.lam, *given[5:], paths)
        pairs = where.slots * H
        each = 1 if wild is None else min(triton.cdiv(pairs, LOOKING), columns_gradient.MOST.value)
        steps = where.slots, each, *steps
        start(
            columns_gradient.backward_columns, (triton.cdiv(pairs, each), blocks),
            *common, draw_paths(plan, v, 64, flip=True), energies, states, out.states,
            out.v, out.beta, shares, d_scores, wild, *tables(where), *steps,
            BEFORE=plan.before, **settings(plan, given), **tile._asdict(),
        )  # fmt: skip
        start(
            columns_gradient.backward_keys, (triton.cdiv(pairs, each),),
            *common, energies, states, out.states, shares, d_scores, wild, out.q, out.k, out.lam, out.key0,
            *tables(where), *steps, **settings(plan, given), **token_tile(K, v.dtype, 8)._asdict(),
        )  # fmt: skip
