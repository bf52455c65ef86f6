"""The op over the ranks of a group: every rank's outputs and the final states, from the op of one process.

What a rank does to any state that it is given is affine, S -> M S + b (SPEC section 6). So nobody waits for a state:

    b  the memory after the rank's tokens from nothing
    M  the memory after the same keys and gates with targets of 0, from the identity (a decay, for the inner product)
    S  before rank r: (M_{r-1}, b_{r-1}) o ... o (M_0, b_0), after one exchange of all M and b

and then the op runs with that state. This costs the op two or three times (a rank that begins a document has b from its
outputs and no M, the last rank of a document needs neither); `borders` has the kernels do it for the price of once.
For regression with a gain per column M differs from column to column: there each rank waits for the one
before, and heads go in groups, so that ranks work on different groups at a time.

Trap: what is exchanged must be so on every rank, in the same order, also where a rank has no use for it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweight.memory import borders
from fastweight.memory.inputs import Around, Inputs, working_dtype
from fastweight.memory.maps import ChunkMap
from fastweight.memory.modes import without_autocast
from fastweight.memory.rules import Rule
from fastweight.memory.state import State
from fastweight.memory.writes import pair
from fastweight.parallel.group import Place, gather, receive, send, tie
from fastweight.parallel.layout import Layout, joined, last_real

GROUPS = 4  # of heads, at most, that follow each other through the ranks where states must be waited for
Run = Callable[[Inputs, Any, Around, bool], tuple[Tensor, State | None]]


class _Here(NamedTuple):
    """A call on this rank: what goes in, how, the op of one process, and what requires gradients."""

    inputs: Inputs
    call: Any
    around: Around
    place: Place
    layout: Layout
    op: Run
    anchor: Tensor | None

    def run(self, inputs: Inputs, call: Any, around: Around) -> tuple[Tensor, State]:
        """The op of one process, with its final state."""
        o, state = self.op(inputs, call, around, True)
        assert state is not None, "the state was asked for"
        return o, state

    @property
    def rule(self) -> Rule:
        return self.call.rule

    def part(self, tokens: slice) -> tuple[Inputs, Tensor | None]:
        mask = self.around.mask
        if tokens == slice(0, self.inputs.v.shape[1]):
            return self.inputs, mask
        return self.inputs.map(lambda t: t[:, tokens]), None if mask is None else mask[:, tokens]


def attend(inputs: Inputs, call: Any, around: Around, output_final_state: bool, place: Place, run: Run):
    """o [B, T, H, V] of this rank's tokens, and the State [N, ...] of whole sequences or None.

    run: the op of one process on an unpacked or packed part, with its final state.
    """
    if borders.fits(inputs, call, around):
        return borders.attend(inputs, call.rule, around.initial_state, output_final_state, place)
    v, cu = inputs.v, around.cu_seqlens
    rows = len(v) if cu is None else len(cu) - 1
    state = _whole_state(inputs, call.rule, around.initial_state, rows)
    here = _Here(
        inputs, call, around._replace(initial_state=state), place, Layout.of(place, rows, v.shape[1], cu), run,
        _anchor(*inputs, *state),
    )  # fmt: skip
    with without_autocast(v.device.type):
        o, states, received = _computed(here)
        if not output_final_state:
            return tie((o,), received)[0], None
        final, gathered = _final(here, states)
        o, *parts = tie((o, *final), (*received, *gathered))
    return o, State(*parts)


def _computed(here: _Here) -> tuple[Tensor, dict[int, State], tuple[Tensor, ...]]:
    """Outputs, the states of rows that end or stand here, and what was received."""
    boundary, tails = _boundary(here)
    alone = here.rule.gain == "column" and here.rule.objective == "regression"
    o, states, received = (_in_turns if alone else _through_maps)(here, boundary)
    return o, states, received + tails


def _whole_state(inputs: Inputs, rule: Rule, given: State | Tensor | None, rows: int) -> State:
    dtype, k, v = working_dtype(*inputs), inputs.k, inputs.v
    if isinstance(given, State):
        return given.to(dtype)
    S = v.new_zeros(rows, v.shape[2], k.shape[3], v.shape[3], dtype=dtype) if given is None else given.to(dtype)
    return State.fresh(S, rule, num_key_heads=k.shape[2])


def _anchor(*tensors: Tensor | None) -> Tensor | None:
    return next((t for t in tensors if t is not None and t.requires_grad), None)


def _boundary(here: _Here) -> tuple[State, tuple[Tensor, ...]]:
    """Last key and window of what continues here (all rows of it), its S still that of the beginning."""
    inputs, rule, layout = here.inputs, here.rule, here.layout
    sent = [inputs.k, inputs.v] if rule.window > 1 else [inputs.k]
    tails, real = last_real(sent, here.around.mask, layout.opened if layout.goes_on else sent[0].shape[1], rule.window)
    *gathered, reals = gather(here.place, here.anchor, *tails, real)
    start = State(*map(layout.row, here.around.initial_state)) if layout.continues is not None else None  # type: ignore[arg-type]
    if start is None:
        return here.around.initial_state, tuple(gathered)  # type: ignore[return-value]
    before = [joined(t, layout, here.place.rank).to(start.S.dtype) for t in gathered]
    mask = joined(reals, layout, here.place.rank)
    k = before[0]
    v = before[1] if len(before) > 1 else k.new_zeros(*k.shape[:2], *inputs.v.shape[2:])
    return pair(k, v, rule, start, mask)[1], tuple(gathered)


def _through_maps(here: _Here, boundary: State) -> tuple[Tensor, dict[int, State], tuple[Tensor, ...]]:
    """Outputs, the states of rows that end or stand here, and what was received, by maps."""
    layout, place = here.layout, here.place
    o_rest, states = _rest(here)
    M, b = _empty_map(here, boundary)
    if layout.goes_on:
        if layout.passes:
            M, b = _map(here, boundary)
        else:
            b = _carried(_open_state(here, states))
    maps = gather(place, here.anchor, M, b)
    if layout.continues is None:
        return o_rest, states, maps
    carried = torch.zeros_like(b, dtype=torch.float64)  # the first map is of a rank that knows its state: M is 0
    for rank in range(layout.first_rank, place.rank):
        carried = ChunkMap(maps[0][rank].double(), maps[1][rank].double(), _is_matrix(here.rule))(carried)
    o, state = _head(here, _with(boundary, carried.to(boundary.S.dtype)))
    states |= _rows_of(here, state)
    return torch.cat((o, o_rest), dim=1) if o_rest.shape[1] else o, states, maps


def _rest(here: _Here) -> tuple[Tensor, dict[int, State]]:
    """Documents that begin here."""
    layout, v = here.layout, here.inputs.v
    if not layout.documents:
        return v[:, layout.head :], {}
    inputs, mask = here.part(slice(layout.head, v.shape[1]))
    whole = here.around.initial_state
    assert isinstance(whole, State), "made by the caller"
    if not layout.packed:
        o, state = here.run(inputs, here.call, Around(whole, mask, None))
        return o, {0: state}
    rows = torch.tensor(layout.documents, device=v.device)
    o, state = here.run(inputs, here.call, Around(whole.index_select(rows), mask, layout.cu(v.device)))
    return o, {d: State(*(t[i : i + 1] for t in state)) for i, d in enumerate(layout.documents)}


def _head(here: _Here, state: State) -> tuple[Tensor, State]:
    inputs, mask = here.part(slice(0, here.layout.head))
    return here.run(inputs, here.call, Around(state, mask, None))


def _rows_of(here: _Here, state: State) -> dict[int, State]:
    """By row; a dense batch stays together under row 0."""
    return {here.layout.continues if here.layout.packed else 0: state}  # type: ignore[dict-item]


def _open_state(here: _Here, states: dict[int, State]) -> State:
    """Of what goes on behind this rank's last token."""
    layout = here.layout
    if not layout.packed:
        return states[0]
    return states[layout.continues if layout.passes else layout.documents[-1]]  # type: ignore[index]


def _is_matrix(rule: Rule) -> bool:
    return rule.objective == "regression"


def _carried(state: State) -> Tensor:
    """All that the map acts on: S, and the normaliser as one more column."""
    return torch.cat((state.S, state.z[..., None]), dim=-1) if state.z.shape[-1] else state.S


def _with(state: State, carried: Tensor) -> State:
    if not state.z.shape[-1]:
        return state._replace(S=carried)
    return state._replace(S=carried[..., :-1].contiguous(), z=carried[..., -1].contiguous())


def _empty_map(here: _Here, boundary: State) -> tuple[Tensor, Tensor]:
    """The map of a rank that leaves nothing, in the shapes that all ranks send."""
    carried = _carried(boundary)[:1] if here.layout.packed else _carried(boundary)
    b = torch.zeros_like(carried)
    n, H, K, V = b.shape
    if _is_matrix(here.rule):
        return b.new_zeros(n, H, K, K), b
    return b.new_zeros(n, H, 1, V if here.rule.gain == "column" else 1), b


def _map(here: _Here, boundary: State) -> tuple[Tensor, Tensor]:
    """M and b of all of this rank's tokens."""
    rule, (inputs, mask) = here.rule, here.part(slice(0, here.layout.head))
    _, from_nothing = here.run(
        inputs, here.call, Around(_with(boundary, torch.zeros_like(_carried(boundary))), mask, None)
    )
    n, H, K, V = boundary.S.shape
    width = K if _is_matrix(rule) else V if rule.gain == "column" else 1
    start = torch.eye(K, dtype=boundary.S.dtype, device=boundary.S.device) if _is_matrix(rule) else None
    S = boundary.S.new_ones(n, H, K, width) if start is None else start.expand(n, H, K, K).contiguous()
    no_target = inputs.v.new_zeros(*inputs.v.shape[:3], width)
    from_one = boundary._replace(S=S, tail_y=boundary.tail_y.new_zeros(*boundary.tail_y.shape[:3], width))
    plain = here.call._replace(rule=rule.replace(read="plain"))
    _, moved = here.run(
        inputs._replace(v=no_target), plain, Around(from_one._replace(z=from_one.z[..., :0]), mask, None)
    )
    return moved.S if _is_matrix(rule) else moved.S[:, :, :1], _carried(from_nothing)


def _in_turns(here: _Here, boundary: State) -> tuple[Tensor, dict[int, State], tuple[Tensor, ...]]:
    """The same as `_through_maps` where each rank waits for the state of the one before, a group of heads at a time."""
    layout, place = here.layout, here.place
    Hk = here.inputs.k.shape[2]
    number = min(GROUPS, Hk)
    outputs, found = [], []
    for g in range(number):
        at = slice(g * Hk // number, (g + 1) * Hk // number)
        part = here._replace(
            inputs=_heads(here.inputs, at), around=here.around._replace(initial_state=_heads_of(here, at))
        )
        edge = State(*(_cut(t, at, Hk, name) for name, t in boundary._asdict().items()))
        o, states = _rest(part)
        if layout.continues is not None:
            S = receive(place, edge.S, here.anchor)
            o_head, state = _head(part, edge._replace(S=S))
            states |= _rows_of(part, state)
            o = torch.cat((o_head, o), dim=1)
        if layout.goes_on:
            o = send(place, _open_state(part, states).S, o)
        outputs.append(o)
        found.append(states)
    merged = {row: _merge([states[row] for states in found]) for row in found[0]}
    return torch.cat(outputs, dim=2), merged, ()


_HEAD_AXIS = {"S": 1, "z": 1, "key": 1, "tail_x": 2, "tail_y": 2}


def _cut(t: Tensor, at: slice, Hk: int, name: str) -> Tensor:
    if name not in _HEAD_AXIS:
        return t
    axis = _HEAD_AXIS[name]
    groups = t.shape[axis] // Hk
    return t.narrow(axis, at.start * groups, (at.stop - at.start) * groups)


def _heads(inputs: Inputs, at: slice) -> Inputs:
    Hk = inputs.k.shape[2]

    def cut(t: Tensor) -> Tensor:
        groups = t.shape[2] // Hk
        return t[:, :, at.start * groups : at.stop * groups]

    return inputs.map(cut)


def _heads_of(here: _Here, at: slice) -> State:
    state = here.around.initial_state
    assert isinstance(state, State), "made by the caller"
    Hk = here.inputs.k.shape[2]
    return State(*(_cut(t, at, Hk, name) for name, t in state._asdict().items()))


def _merge(states: list[State]) -> State:
    """Groups of heads together again."""
    named = {name: [getattr(state, name) for state in states] for name in State._fields}
    return State(*(torch.cat(t, _HEAD_AXIS[name]) if name in _HEAD_AXIS else t[0] for name, t in named.items()))


def _final(here: _Here, states: dict[int, State]) -> tuple[State, tuple[Tensor, ...]]:
    """The State of whole sequences, each from the rank that has its last token."""
    whole, layout = here.around.initial_state, here.layout
    assert isinstance(whole, State), "made by the caller"
    if not layout.packed:
        gathered = gather(here.place, here.anchor, *states[0])
        return State(*(t[-1] for t in gathered)), gathered
    mine = [d for d in range(len(layout.owner)) if layout.owner[d] == here.place.rank]
    parts = []
    for name in State._fields:
        full = torch.zeros_like(getattr(whole, name))
        if mine:
            rows = torch.tensor(mine, device=full.device)
            full = full.index_copy(0, rows, torch.cat([getattr(states[d], name) for d in mine]))
        parts.append(full)
    gathered = gather(here.place, here.anchor, *parts)
    owner, rows = (
        torch.tensor(layout.owner, device=whole.S.device),
        torch.arange(len(layout.owner), device=whole.S.device),
    )
    return State(*(t[owner, rows] for t in gathered)), gathered
