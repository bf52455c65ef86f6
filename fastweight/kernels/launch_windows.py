"""Host side of regression over a window: allocates, and launches windows_maps.py, windows.py and its gradient.

Calls that launch_hopper_windows.py knows take its kernels instead, with the same facts of tokens; what follows is of
the others.

Saved for the backward pass besides the inputs: steps and facts of tokens, a block's maps (64 KB of float32, half of it
in bfloat16) and its first state. What is larger is made again, for some blocks at a time.

Traps: float16 has no range for maps, which hold steps: they are float32 there. Tiles of 16 pairs are for mma: as an
operand of wgmma, the assembler of Triton 3.6 (ptxas 12.8) takes their address in shared memory from a register that has
the number of the program, or an argument: wrong gradients in small calls, illegal addresses in large ones.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweight.kernels import windows, windows_finish, windows_gradient, windows_maps, windows_parts
from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import (
    Gradients,
    Inputs,
    Plan,
    Tile,
    precision,
    serial_tile,
    tables,
    token_tile,
    wide,
)
from fastweight.kernels.start import start

ROWS = 64  # (token, pair of its window) of a part, at most
PAIRS = 64  # of a block, and the tile that holds them
HELD = windows_parts.HELD.value
SIDES = windows_parts.SIDES.value
TURN = 3000  # blocks of heads at a time, about: each takes some 300 KB while its gradients are found


@dataclass(frozen=True)
class Block:
    """How many tokens a block of a window has: so many parts of so many."""

    window: int
    part: int
    parts: int
    on_hopper: bool = False  # whether launch_hopper_windows.py computes it

    @classmethod
    def of(cls, window: int, parts: int = PAIRS, on_hopper: bool = False) -> "Block":
        """Of as many parts as pairs allow, or `parts` of them."""
        part = min(HELD + 1 - window, ROWS // window)
        return cls(window, part, min(parts, (PAIRS + 1 - window) // part), on_hopper)

    @property
    def tokens(self) -> int:
        return self.part * self.parts

    @property
    def slots(self) -> int:
        return wide(self.parts * HELD)

    @property
    def flags(self) -> dict[str, int]:
        return {"WINDOW": self.window, "TOKENS": self.tokens, "PAIRS": PAIRS}


def block_of(k: Tensor, v: Tensor, key0: Tensor | None, mask: Tensor | None, rebuild: bool, window: int) -> Block:
    """The blocks of a call, and so whose kernels compute it."""
    from fastweight.kernels import launch_hopper_windows

    if launch_hopper_windows.fits(k, v, key0, mask, rebuild):
        return Block.of(window, launch_hopper_windows.PARTS, on_hopper=True)
    return Block.of(window)


class Turn(NamedTuple):
    """Some consecutive blocks, of which there is room for what they are made from at a time."""

    first: int
    blocks: int


def turns_of(where: Geometry, heads: int, turn: int | None = None) -> list[Turn]:
    """All blocks; in equal turns, of about `turn` blocks of heads (TURN if not said), where there are many."""
    if not where.slots or not heads:
        return []
    number = max(1, min(where.slots, round(where.slots * heads / (turn or TURN))))
    count = -(-where.slots // number)
    return [Turn(first, min(count, where.slots - first)) for first in range(0, where.slots, count)]


def empty_facts(v: Tensor, window: int) -> Tensor:
    """Room for facts of tokens."""
    return v.new_empty(v.shape[2], windows_maps.VECTOR.value + window, v.shape[0] * v.shape[1], dtype=torch.float32)


class Measured(NamedTuple):
    """What `measure` finds: weight, log-decay and facts of tokens; Gram matrix and Q X^T of the blocks of a turn."""

    weight: Tensor
    decay: Tensor
    facts: Tensor
    gram: Tensor
    reads: Tensor

    @classmethod
    def of(cls, given: Inputs, block: Block, turns: list[Turn], known: tuple[Tensor, ...] | None = None) -> "Measured":
        """Room for it; known: weight, log-decay and facts, if they have been measured."""
        (B, T, H, _V), wide = given.v.shape, {"dtype": torch.float32, "device": given.v.device}
        if known is None:
            known = *(torch.empty(H, B * T, **wide) for _ in range(2)), empty_facts(given.v, block.window)
        count = max((turn.blocks for turn in turns), default=0)
        return cls(*known, *(torch.empty(count, H, PAIRS, PAIRS, **wide) for _ in range(2)))


def measure(plan: Plan, given: Inputs, where: Geometry, block: Block, turn: Turn, found: Measured, facts: bool) -> None:
    """Measures the blocks of a turn; the facts of their tokens, weights and log-decays if asked to."""
    tokens = found[:3] if facts else (None, None, None)
    start(
        windows_maps.measure, (turn.blocks, given.v.shape[2]),
        given.q, given.k, given.beta, given.lam, given.key0, given.has_key, given.unmasked, found.gram, found.reads,
        *tokens, turn.first, *tables(where), float(plan.eps), float(plan.floor),
        BK=min(64, wide(given.q.shape[3], 16)), SHIFT=int(plan.shift), SCALED=plan.scaled, DIRECT=plan.direct,
        DOT=precision(given.v.dtype), **block.flags, **given.widths,
        num_warps=4 if given.v.dtype == torch.float32 else 2,
    )  # fmt: skip


def _low(dtype: torch.dtype) -> torch.dtype:
    """Of maps, and of what is multiplied by them."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _exact(dtype: torch.dtype) -> str:
    """Precision of products with maps, which are float32 where the tokens are float16."""
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


def empty_maps(v: Tensor, block: Block, save: bool, blocks: int) -> Tensor:
    """Room for the maps of reads and of writes of blocks of every head, or for what launch_hopper_windows.py keeps."""
    from fastweight.kernels import launch_hopper_windows

    if block.on_hopper:
        return launch_hopper_windows.empty(v, blocks, block, save)
    return v.new_empty(2, blocks, v.shape[2], PAIRS, 2 * PAIRS, dtype=_low(v.dtype))


def _room_for_parts(given: Inputs, block: Block, turns: list[Turn], dtype: torch.dtype, *shape: int) -> Tensor:
    """Two of something for every part of a turn and every head."""
    count = max((turn.blocks for turn in turns), default=0)
    return given.v.new_empty(2, count * block.parts, given.v.shape[2], *shape, dtype=dtype)


def _parts(plan, given, where, block, turn: Turn, found: Measured, maps: Tensor, rows: Tensor | None) -> None:
    """Maps of reads and of writes of parts; and where given those of their rows."""
    start(
        windows_parts.part_maps, (turn.blocks * block.parts, given.v.shape[2]),
        found.gram, found.reads, found.weight, found.facts, maps[0], maps[1], rows, turn.first, *tables(where),
        H=given.v.shape[2], PART=block.part, ROWS=ROWS, BEFORE=plan.before, **block.flags, num_warps=1,
    )  # fmt: skip


def _join(plan: Plan, given: Inputs, where: Geometry, block: Block, maps: Tensor) -> Measured:
    """Measures tokens, and makes the maps of reads and of writes of blocks."""
    H = given.v.shape[2]
    turns = turns_of(where, H)
    found = Measured.of(given, block, turns)
    parts = _room_for_parts(given, block, turns, torch.float32, HELD, SIDES)
    columns = 4096 // block.slots  # of a map at a time, so that what is held of them fits into two warps
    for turn in turns:
        measure(plan, given, where, block, turn, found, True)
        _parts(plan, given, where, block, turn, found, parts, None)
        start(
            windows_parts.join, (turn.blocks, H, 2 * PAIRS // columns),
            found.gram, found.reads, found.decay, parts[0], parts[1], maps[0], maps[1], turn.first, *tables(where),
            H=H, PART=block.part, SLOTS=block.slots, BC=columns, BEFORE=plan.before, DOT=_exact(given.v.dtype),
            **block.flags, num_warps=2, num_stages=1,
        )  # fmt: skip
    return found


def _walk(plan: Plan, given: Inputs, block: Block) -> dict[str, Any]:
    K, V, dtype = given.q.shape[3], given.v.shape[3], given.v.dtype
    common = {"V": V, "SHIFT": int(plan.shift), "BEFORE": plan.before, "DOT": _exact(dtype)}
    return {**common, **block.flags, **given.widths, **serial_tile(K, V, dtype)._replace(num_stages=1)._asdict()}


def _programs(given: Inputs, where: Geometry) -> int:
    K, V, dtype = given.q.shape[3], given.v.shape[3], given.v.dtype
    return where.sequences * given.v.shape[2] * -(-V // serial_tile(K, V, dtype).BV)


def _run(plan: Plan, given: Inputs, where: Geometry, block: Block, decay, maps, state0, o, states, state1) -> None:
    grid = _programs(given, where)
    if grid:
        start(
            windows.forward, (grid,),
            given.q, given.k, given.v, given.key0, given.has_key, given.unmasked, decay, maps[0], maps[1],
            None if state0 is None else state0.contiguous(), o, states, state1,
            where.cu, where.chunk_start, where.length, where.chunks, where.tokens, **_walk(plan, given, block),
        )  # fmt: skip


def forward(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, weight, log-decay, facts, maps, and the states that blocks (or if rebuilt, sequences) begin with."""
    from fastweight.kernels import launch_hopper_windows

    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    block = block_of(k, v, key0, mask, plan.rebuild, plan.window)
    where = Geometry.of(B, T, cu_seqlens, block.tokens)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    states = v.new_empty(where.slots if save and not plan.rebuild else 0, H, K, V)
    kept = states if len(states) else None
    maps = empty_maps(v, block, save, where.slots)
    if block.on_hopper:
        given, _ = launch_hopper_windows.aligned(given, given.v)
        found = launch_hopper_windows.forward(plan, given, where, block, maps, state0, o, kept, state1)
        return o, state1, *found, maps, states
    found = _join(plan, given, where, block, maps)
    _run(plan, given, where, block, found.decay, maps, state0, o, kept, state1)
    if save and plan.rebuild:
        states = v.new_zeros(where.sequences, H, K, V)
        states = states if state0 is None else states.copy_(state0)
    return o, state1, found.weight, found.decay, found.facts, maps, states


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    from fastweight.kernels import launch_hopper_windows

    *known, maps, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    block = block_of(k, v, key0, mask, plan.rebuild, plan.window)
    where = Geometry.of(B, T, cu_seqlens, block.tokens)
    d_o = d_o.contiguous()
    decay = known[1]
    at_once = launch_hopper_windows.most_at_once(where, H, V) if block.on_hopper else None
    out = Gradients(given, where, want_state, at_once)
    if block.on_hopper:
        given, d_o = launch_hopper_windows.aligned(given, d_o)
        launch_hopper_windows.backward(plan, given, where, block, tuple(known), maps, states, d_o, d_state1, out)
        return out.result()
    if plan.rebuild:
        begins, states = states, v.new_empty(where.slots, H, K, V)
        _run(plan, given, where, block, decay, maps, begins, None, states, None)
    grid = _programs(given, where)
    if grid:
        start(
            windows.backward_state, (grid,),
            given.q, given.k, d_o, given.key0, given.has_key, given.unmasked, decay, maps[0], maps[1],
            None if d_state1 is None else d_state1.contiguous(), out.v, shared_room(where, given, V), out.states,
            out.state0, where.cu, where.chunk_start, where.length, where.chunks, where.tokens,
            **_walk(plan, given, block),
        )  # fmt: skip
    _rest(plan, given, where, block, tuple(known), d_o, states, out)
    return out.result()


def shared_room(where: Geometry, given: Inputs, width: int) -> Tensor:
    """Room for what blocks give to the pairs before their first token."""
    shape = (where.slots * windows.SHARED.value, given.v.shape[2], width)
    return torch.empty(*shape, dtype=torch.float32, device=given.v.device)


def _rest(plan, given, where, block, known: tuple[Tensor, ...], d_o, states, out) -> None:
    """Gradients that are found block by block, from states and their gradients: of queries, keys and gates."""
    (_B, _T, H, V), K, dtype = given.v.shape, given.q.shape[3], given.v.dtype
    turns = turns_of(where, H)
    found = Measured.of(given, block, turns, known)
    count, exact, low = len(found.gram), _exact(dtype), _low(dtype)

    def room(*shape: int, dtype: torch.dtype = low) -> Tensor:
        return torch.empty(count, H, *shape, dtype=dtype, device=given.v.device)

    rows, rows_back = _room_for_parts(given, block, turns, low, ROWS, SIDES)
    maps = _room_for_parts(given, block, turns, low, HELD, SIDES)
    missed, wrote, begun, outer, lead, df = (room(block.parts * HELD, V) for _ in range(6))
    met = room(block.parts, SIDES, SIDES, dtype=torch.float32)
    d_gram, d_reads = room(block.slots, block.slots), room(PAIRS, block.slots)
    through = room(HELD, dtype=torch.float32)
    read = torch.empty_like(found.decay)
    shared = shared_room(where, given, K)
    common = {"H": H, "PART": block.part, "BEFORE": plan.before, **block.flags}
    widths = {"V": V, "SLOTS": block.slots, "SHIFT": int(plan.shift), "DOT": exact, **common, **given.widths}
    for turn in turns:
        place = turn.first, *tables(where)
        measure(plan, given, where, block, turn, found, False)
        _parts(plan, given, where, block, turn, found, maps, rows)
        start(
            windows_parts.part_rows, (turn.blocks * block.parts, H),
            found.gram, found.reads, found.weight, found.decay, found.facts, rows_back, *place,
            ROWS=ROWS, **common, num_warps=1,
        )  # fmt: skip
        start(
            windows_gradient.sweep, (turn.blocks, H),
            given.q, given.k, given.v, d_o, given.key0, given.has_key, given.unmasked, found.gram, found.reads,
            found.decay, states, out.states, maps[0], maps[1], missed, wrote, begun, outer, lead, df, met, d_gram,
            d_reads, read, through, *place, **widths, **_sweep_tile(K, V, dtype)._asdict(),
        )  # fmt: skip
        start(
            windows_gradient.inside, (turn.blocks * block.parts, H),
            given.beta, given.lam, given.has_key, given.unmasked, found.gram, found.reads, found.weight, found.decay,
            found.facts, rows, rows_back, met, read, through, d_gram, d_reads, out.beta, out.lam, *place,
            float(plan.eps), float(plan.floor), ROWS=ROWS, SLOTS=block.slots, SHIFT=int(plan.shift),
            SCALED=plan.scaled, DIRECT=plan.direct, DOT=exact, **common, num_warps=2,
        )  # fmt: skip
        start(
            windows_finish.finish, (turn.blocks, H),
            given.q, given.k, d_o, given.key0, given.has_key, given.unmasked, found.decay, states, out.states,
            wrote, df, d_gram, d_reads, out.q, out.k, out.key0, shared, *place, **widths,
            **token_tile(K, V, dtype)._asdict(),
        )  # fmt: skip
    if turns:
        add_shared(plan, given, where, block, shared, out)


def add_shared(plan: Plan, given: Inputs, where: Geometry, block: Block, shared: Tensor, out: Gradients) -> None:
    """To the gradients of keys, what blocks gave to the pairs before their first token."""
    H, K = given.v.shape[2], given.q.shape[3]
    start(
        windows_finish.add_shared, (where.slots, H),
        shared, out.k, *tables(where)[:5], H=H, K=K, BK=wide(K), WINDOW=block.window, TOKENS=block.tokens,
        SHIFT=int(plan.shift), num_warps=4,
    )  # fmt: skip


def _sweep_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.bfloat16:
        return Tile(wide(K), min(128, wide(V)), 4, 1)
    return Tile(wide(K), 64 if dtype == torch.float16 else 32, 4, 1)
