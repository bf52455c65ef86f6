"""Host side of borders.py: the passes of one device with an exchange in their middle, and nothing done twice.

A device that walks its tokens in pieces joins the maps of these pieces before it walks them. Here the maps of ranks are
joined there too, so that spreading a sequence costs one exchange each way and a few small launches, no second walk:

    forward    step sizes, maps of pieces, `leave` -> exchange -> `arrive`, the walk
    backward   what pieces add in reverse, `return_` -> exchange -> `recede`, the walk in reverse, `settle`

`Class` is what differs between regression, inner product and the latter by column: four calls of the launches that one
device makes.

Traps: the engines leave out what the last piece (in reverse the first) hands on, because nothing follows it; here the
next rank does, so that there is an empty piece behind the last one. With a window the walk gets gains of 0 for the
edge, whose writes borders.py makes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweight.kernels import (
    borders,
    edges_gradient,
    launch_additive,
    launch_borders_columns,
    launch_hopper_additive,
    launch_solve,
)
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, Walk, aligned, make_steps, start, wide

Exchange = Callable[[Tensor, Tensor], None]  # a message of this rank into those of all, [ranks, ...]
TAKEN = 16  # columns of a state that a program takes


class Message(NamedTuple):
    """Where things lie in the numbers of one sequence and head that a rank sends forward; borders.py writes them.

    b [K, V], the map, keys [R, K] and targets [R - 1, V] of the last pairs, 2 flags; keys [R - 1, K], targets [E, V]
    and gates of the first E tokens.
    """

    K: int
    V: int
    window: int
    shift: int
    matrix: bool
    column: bool

    @property
    def edge(self) -> int:
        """Tokens that need pairs of the rank before."""
        return self.window - 1 + self.shift

    @property
    def map(self) -> int:
        return self.K * self.K if self.matrix else self.V if self.column else 1

    @property
    def tail(self) -> int:
        return self.K * self.V + self.map

    @property
    def head(self) -> int:
        return self.tail + self.window * self.K + (self.window - 1) * self.V + 2

    @property
    def size(self) -> int:
        gates = self.edge * ((self.V if self.column else 1) + 1)
        return -(-(self.head + (self.window - 1) * self.K + self.edge * self.V + gates) // 4) * 4

    @property
    def reads(self) -> int:
        """Edge tokens whose reads the walk gets wrong."""
        return max(self.edge - 1, 0)

    @property
    def back(self) -> int:
        """Numbers sent in reverse, without those of a final state: a gradient [K, V], queries, gradients of reads."""
        return self.K * self.V + self.reads * (self.K + self.V)

    def flags(self, *names: str) -> dict[str, Any]:
        every = {
            "K": self.K, "V": self.V, "BK": wide(self.K, 16), "BV": TAKEN, "WINDOW": self.window,
            "SHIFT": self.shift, "MATRIX": self.matrix, "COLUMN": self.column, "MAP": self.map, "UNIT": self.size,
            "TAIL": self.tail, "HEAD": self.head,
        }  # fmt: skip
        return {name: every[name] for name in ("K", "V", "BK", "BV", "MATRIX", "COLUMN", *names)}


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass; tensors only."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    lam: Tensor | None
    rates: tuple[Tensor, ...]
    saved: tuple[Tensor, ...]
    maps: Tensor
    messages: Tensor
    begun: Tensor
    ended: Tensor

    def flat(self) -> tuple[Tensor | None, ...]:
        return (*self[:5], *self[7:], *self.rates, *self.saved)

    @classmethod
    def of(cls, tensors: Any, rates: int) -> "Kept":
        """From `flat`, with so many rates."""
        q, k, v, beta, lam, maps, messages, begun, ended, *rest = tensors
        return cls(q, k, v, beta, lam, tuple(rest[:rates]), tuple(rest[rates:]), maps, messages, begun, ended)


class Class(NamedTuple):
    """The launches of one device: of all pieces but the empty one their maps and what they add; the walk; in reverse
    what pieces add; and the walk in reverse with all that follows."""

    advance: Callable[..., tuple[Walk, tuple[Tensor, ...], Tensor, Tensor]]
    walk: Callable[..., tuple[Any, ...]]
    reverse: Callable[..., None]
    walk_back: Callable[..., Gradients]


def _walk_of(where: Geometry, pieces: int) -> Walk:
    length = -(-where.chunks // max(pieces, 1))
    return Walk(where, -(-where.chunks // length), length)


def _whole(walk: Walk) -> Walk:
    return walk._replace(segments=walk.segments + 1)


def _advance_solve(plan: Plan, given: Inputs, where: Geometry):
    engine, walk = launch_solve._engine(given, where)
    # While maps are made no piece is left out, so one fewer fills the device.
    walk = _walk_of(where, walk.segments - 1)
    rates, inverse = engine.prepare(plan, given, where)
    maps, local = launch_solve._pieces(engine, plan, given, _whole(walk), rates, inverse, True)
    return walk, (*rates, inverse), maps, local


def _walk_solve(plan: Plan, given: Inputs, walk: Walk, rates, begins: Tensor, o: Tensor, ended: Tensor, save: bool):
    engine, _ = launch_solve._engine(given, walk.where)
    (_, _, H, V), K = given.v.shape, given.q.shape[3]
    kept = None, None
    if save:
        kept = given.v.new_empty(walk.where.tokens, H, V), given.v.new_empty(walk.where.slots, H, K, V)
    engine.forward(plan, given, walk, rates[:2], rates[2], begins, o, ended, *kept)
    return kept


def _reverse_solve(plan: Plan, given: Inputs, walk: Walk, rates, _saved, d_o: Tensor, local: Tensor) -> None:
    engine, _ = launch_solve._engine(given, walk.where)
    engine.backward_state(plan, given, walk, rates[:2], rates[2], d_o, None, local, None)


def _walk_back_solve(plan: Plan, given: Inputs, walk: Walk, rates, saved, d_o: Tensor, ends: Tensor):
    engine, _ = launch_solve._engine(given, walk.where)
    out = Gradients(given, walk.where, False)
    engine.backward_state(plan, given, walk, rates[:2], rates[2], d_o, ends, None, (out.v, out.states))
    launch_solve._rest(plan, given, walk.where, d_o, (*rates[:2], *saved), out)
    return out


def _advance_additive(plan: Plan, given: Inputs, where: Geometry):
    engine, walk = launch_additive._engine(given, where)
    walk = _walk_of(where, walk.segments)
    whole = _whole(walk)
    weight, decay = make_steps(plan, given, where, nonzero=False)
    rates = weight, decay, launch_additive.fold(plan, where, weight, decay)
    (B, _, H, V), K = given.v.shape, given.q.shape[3]
    maps = torch.empty(B * whole.segments, H, dtype=torch.float32, device=given.v.device)  # `leave` fills it
    local = maps.new_empty(B * whole.segments, H, K, V)
    engine.forward(plan, given, whole, rates, None, None, local, None)
    return walk, rates, maps, local


def _walk_additive(plan: Plan, given: Inputs, walk: Walk, rates, begins: Tensor, o: Tensor, ended: Tensor, save: bool):
    engine, _ = launch_additive._engine(given, walk.where)
    (_, _, H, V), K = given.v.shape, given.q.shape[3]
    states = given.v.new_empty(walk.where.slots, H, K, V) if save else None
    engine.forward(plan, given, walk, rates, begins, o, ended, states)
    return () if states is None else (states,)


def _reverse_additive(plan: Plan, given: Inputs, walk: Walk, rates, _saved, d_o: Tensor, local: Tensor) -> None:
    engine, _ = launch_additive._engine(given, walk.where)
    if engine is launch_additive.HOPPER:
        launch_hopper_additive.backward_state(plan, given, walk, rates[1], d_o, None, local, None, skip=False)
    else:
        engine.backward_state(plan, given, walk, rates[1], d_o, None, local, None)


def _walk_back_additive(plan: Plan, given: Inputs, walk: Walk, rates, saved, d_o: Tensor, ends: Tensor):
    engine, _ = launch_additive._engine(given, walk.where)
    at_once = engine is launch_additive.HOPPER and launch_hopper_additive.takes_backward(plan, given)
    out = Gradients(given, walk.where, False, 0 if at_once else None)
    if at_once:
        launch_hopper_additive.backward(plan, given, walk, rates, saved[0], d_o, ends, None, out)
    else:
        engine.backward_state(plan, given, walk, rates[1], d_o, ends, None, out.states)
        launch_additive._rest(plan, given, walk.where, d_o, (*rates[:2], *saved), out)
    return out


SOLVE = Class(_advance_solve, _walk_solve, _reverse_solve, _walk_back_solve)
ADDITIVE = Class(_advance_additive, _walk_additive, _reverse_additive, _walk_back_additive)
COLUMNS = Class(
    lambda plan, given, where: launch_borders_columns.advance(plan, given, where, _walk_of),
    launch_borders_columns.walk,
    launch_borders_columns.reverse,
    launch_borders_columns.walk_back,
)


class Call(NamedTuple):
    """One call: what it computes, its class, its messages, and where this rank stands among how many."""

    plan: Plan
    kind: Class
    message: Message
    rank: int
    ranks: int

    @property
    def step_flags(self) -> dict[str, bool]:
        return {"SCALED": self.plan.scaled, "DIRECT": self.plan.direct}

    @property
    def steps(self) -> tuple[float, float]:
        return float(self.plan.eps), float(self.plan.floor)

    def hides_edge(self, given: Inputs) -> Inputs:
        """What the walks are given, which do not see the edge write."""
        if self.message.window == 1:
            return given
        shape = given.v.shape[:3]
        gain = given.v.new_ones(shape, dtype=torch.float32) if given.beta is None else given.beta.clone()
        gain[:, : self.message.edge] = 0
        return given._replace(beta=gain)


def forward(
    call: Call, given: Inputs, state0: Tensor | None, tail: Tensor | None, exchange: Exchange, save: bool, final: bool
) -> tuple[Tensor, Tensor | None, Walk, Kept]:
    """o, the state [B, H, K, V] behind all ranks if `final`, how chunks were walked, and what to keep.

    Args:
        given: with lam the log-decay where the plan is raw.
        state0, tail: what lies before all ranks: S, and keys, targets and flags as in a message, [B, H, numbers].
        exchange: puts this rank's message [B, H, numbers] into those of all ranks.
    """
    plan, kind, message, _rank, ranks = call
    (B, T, H, V), K = given.v.shape, given.q.shape[3]
    walked = call.hides_edge(given)
    walk, rates, maps, local = kind.advance(plan, walked, Geometry.of(B, T, None, 65 - plan.window))
    messages = local.new_empty(ranks + 1, B, H, message.size)
    mine = local.new_empty(B, H, message.size)
    if tail is not None:
        messages[0, :, :, message.tail : message.head] = tail
    decay = None if message.matrix or message.column else rates[1]
    _leave(call, given, walk, maps, local, decay, mine, messages[0] if tail is None else None)
    exchange(mine, messages[1:])
    begun = local.new_empty(B, H, K, V)
    begins, last = local.new_empty(B * walk.segments, H, K, V), torch.empty_like(begun) if final else None
    early = given.v.new_empty(B, message.reads, H, V) if message.reads else None
    _arrive(call, given, walk, (maps, local), messages, state0, (begun, begins, early, last))
    o, ended = torch.empty_like(given.v), torch.empty_like(begins)
    saved = kind.walk(plan, walked, walk, rates, begins, o, ended, save)
    if early is not None:
        o[:, : message.reads] = early
    return (
        o,
        last,
        walk,
        Kept(given.q, given.k, given.v, walked.beta, given.lam, rates, saved, maps, messages, begun, ended),
    )


def _leave(call: Call, given: Inputs, walk: Walk, maps: Tensor, local: Tensor, decay, mine, before) -> None:
    message, (B, _T, H, V), where = call.message, given.v.shape, walk.where
    blocks = -(-V // TAKEN) + (-(-message.K // TAKEN) if message.matrix else 0)
    start(
        borders.leave, (B * H, blocks),
        maps, local, decay, given.k, given.v, given.beta, given.lam, mine, before, where.length, where.chunks,
        where.tokens, walk.segments, walk.length, H=H, KH=given.q.shape[2], BW=wide(V, 16),
        **message.flags("WINDOW", "SHIFT", "MAP", "UNIT", "TAIL"), num_warps=4,
    )  # fmt: skip


def _arrive(
    call: Call, given: Inputs, walk: Walk, pieces: tuple[Tensor, Tensor], messages: Tensor, state0, out
) -> None:
    message, (B, T, H, V) = call.message, given.v.shape
    begun, begins, early, last = out
    maps, local = pieces
    start(
        borders.arrive, (B * H, -(-V // TAKEN)),
        messages, state0, maps, local, given.q, begun, begins, early, last, B * H, call.rank,
        call.rank + 1 if last is None else call.ranks, T, walk.segments, *call.steps, H=H, KH=given.q.shape[2],
        **call.step_flags, **message.flags("WINDOW", "SHIFT", "MAP", "UNIT", "TAIL", "HEAD"), num_warps=4,
    )  # fmt: skip


def backward(
    call: Call, walk: Walk, kept: Kept, d_o: Tensor, d_last: tuple[Tensor, ...] | None, exchange: Exchange,
    want: tuple[bool, bool],
) -> tuple[Gradients, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of this rank's tokens, and of state0 and tail where wanted, which rank 0 alone finds.

    d_last: shares [B, H, ...] of the gradients of the state behind all ranks, and of the last keys and targets there.
    """
    plan, kind, message, _rank, ranks = call
    given = Inputs(*kept[:5], None, None, None, None)
    B, _T, H, _V = given.v.shape
    d_o = aligned(d_o)
    local = torch.empty_like(kept.ended)
    kind.reverse(plan, given, walk, kept.rates, kept.saved, d_o, local)
    share = [t.flatten(2) for t in d_last or ()]
    back = -(-(message.back + sum(t.shape[2] for t in share)) // 4) * 4
    mine, returned = local.new_empty(B, H, back), local.new_empty(ranks, B, H, back)
    if share:
        mine[:, :, message.back : message.back + sum(t.shape[2] for t in share)] = torch.cat(share, dim=2)
    _return(call, given, walk, kept.maps, local, d_o, mine)
    exchange(mine, returned)
    d_begun, d_next, ends = torch.empty_like(kept.begun), torch.empty_like(kept.begun), torch.empty_like(local)
    _recede(call, walk, kept, local, returned, (d_next, ends, d_begun), bool(share))
    out = kind.walk_back(plan, given, walk, kept.rates, kept.saved, d_o, ends)
    return out, *_settle(call, walk, kept, returned, (d_begun, d_next), out, want, bool(share))


def _return(call: Call, given: Inputs, walk: Walk, maps: Tensor, local: Tensor, d_o: Tensor, mine: Tensor) -> None:
    message, (B, T, H, V) = call.message, given.v.shape
    start(
        borders.return_, (B * H, -(-V // TAKEN)),
        maps, local, given.q, d_o, mine, T, walk.segments, H=H, KH=given.q.shape[2],
        READS=message.reads, **message.flags("MAP") | {"UNIT": mine.shape[2]}, num_warps=4,
    )  # fmt: skip


def _recede(call: Call, walk: Walk, kept: Kept, local: Tensor, returned: Tensor, out, final: bool) -> None:
    message, (B, _T, H, V) = call.message, kept.v.shape
    d_next, ends, d_begun = out
    start(
        borders.recede, (B * H, -(-V // TAKEN)),
        kept.messages, returned, kept.maps, local, d_next, ends, d_begun, B * H, call.rank, call.ranks, walk.segments,
        *call.steps, H=H, BACK=returned.shape[3], FINAL=message.back if final else 0, **call.step_flags,
        **message.flags("WINDOW", "SHIFT", "MAP", "UNIT", "TAIL", "HEAD"), num_warps=4,
    )  # fmt: skip


def _settle(call: Call, walk: Walk, kept: Kept, returned: Tensor, found, out: Gradients, want, final: bool):
    """Gradients of both edges, and of what lies before all ranks."""
    message, (B, T, H, V), K = call.message, kept.v.shape, kept.q.shape[3]
    d_begun, d_next = found
    first, last = call.rank == 0, call.rank == call.ranks - 1
    d_state0 = torch.empty_like(d_begun) if want[0] and first else None
    d_tail = d_begun.new_zeros(B, H, message.head - message.tail) if want[1] and first else None
    if message.edge:
        start(
            edges_gradient.settle, (B * H, 1 if last else 2),
            kept.messages, returned, kept.begun, d_begun, kept.ended, d_next, out.q, out.k, out.v, out.beta, out.lam,
            d_tail, d_state0, B * H, call.rank, T, walk.segments, *call.steps, H=H, BACK=returned.shape[3],
            BP=wide(message.edge + message.window - 1, 1), **call.step_flags,
            **message.flags("WINDOW", "SHIFT", "UNIT", "TAIL", "HEAD"), num_warps=8 if message.reads else 4,
        )  # fmt: skip
    elif d_state0 is not None:
        d_state0 = d_begun
    if final and last:
        ends = returned[..., message.back + K * V :].sum(0)
        keys, targets = message.window * K, (message.window - 1) * V
        out.k[:, T - message.window :] += ends[..., :keys].unflatten(2, (-1, K)).transpose(1, 2)
        if targets:
            out.v[:, T + 1 - message.window :] += ends[..., keys : keys + targets].unflatten(2, (-1, V)).transpose(1, 2)
    return d_state0, d_tail
