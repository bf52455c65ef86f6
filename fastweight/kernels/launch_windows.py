"""Host side of regression over a window: allocates, and launches windows_maps.py, windows.py and its gradient.

Saved for the backward pass besides the inputs: a block's maps (16 KB of float32, half of it in bfloat16) and its first
state. Steps and facts of tokens are measured again.

Traps: float16 has no range for maps, which hold steps: they are float32 there. With tiles of 16 pairs the assembler of
Triton 3.6 (ptxas 12.8) takes the address of a product's operand in shared memory from a register that holds the number
of the program, or an argument: wrong gradients of beta and lambda in small calls, illegal addresses in large ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweight.kernels import windows, windows_gradient, windows_maps, windows_parts
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


@dataclass(frozen=True)
class Block:
    """How many tokens a block of a window has: so many parts of so many."""

    window: int
    part: int
    parts: int

    @classmethod
    def of(cls, window: int) -> "Block":
        part = min(HELD + 1 - window, ROWS // window)
        return cls(window, part, (PAIRS + 1 - window) // part)

    @property
    def tokens(self) -> int:
        return self.part * self.parts

    @property
    def slots(self) -> int:
        return wide(self.parts * HELD)

    @property
    def flags(self) -> dict[str, int]:
        return {"WINDOW": self.window, "TOKENS": self.tokens, "PAIRS": PAIRS}


@dataclass(frozen=True)
class Measured:
    """What `measure` finds: Gram matrix and Q X^T of blocks, weight, log-decay and facts of tokens."""

    gram: Tensor
    reads: Tensor
    weight: Tensor
    decay: Tensor
    facts: Tensor

    @classmethod
    def of(cls, plan: Plan, given: Inputs, where: Geometry, block: Block) -> "Measured":
        H, P = given.v.shape[2], PAIRS

        def room(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.float32, device=given.v.device)

        found = cls(
            room(where.slots, H, P, P), room(where.slots, H, P, P), room(H, where.tokens), room(H, where.tokens),
            room(H, windows_maps.VECTOR.value + block.window, where.tokens),
        )  # fmt: skip
        if where.slots and H:
            start(
                windows_maps.measure, (where.slots, H),
                given.q, given.k, given.beta, given.lam, given.key0, given.has_key, given.unmasked,
                found.gram, found.reads, found.weight, found.decay, found.facts, *tables(where),
                float(plan.eps), float(plan.floor), BK=min(64, wide(given.q.shape[3], 16)), SHIFT=int(plan.shift),
                SCALED=plan.scaled, DIRECT=plan.direct, DOT=precision(given.v.dtype), **block.flags, **given.widths,
                num_warps=2,
            )  # fmt: skip
        return found


def _low(dtype: torch.dtype) -> torch.dtype:
    """Of maps, and of what is multiplied by them."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def _exact(dtype: torch.dtype) -> str:
    """Precision of products with maps, which are float32 where the tokens are float16."""
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


def empty_maps(v: Tensor, blocks: int, window: int) -> Tensor:
    """Room for the maps of reads and of writes of some blocks of every head of v."""
    return v.new_empty(2, blocks, v.shape[2], PAIRS, 2 * PAIRS, dtype=_low(v.dtype))


def _parts(plan: Plan, given: Inputs, where: Geometry, block: Block, found: Measured, rows: Tensor | None) -> Tensor:
    """Maps of reads and of writes of parts; and where given those of their rows."""
    H = given.v.shape[2]
    maps = given.v.new_empty(2, where.slots, H, block.parts, HELD, SIDES, dtype=_low(given.v.dtype))
    if where.slots and H:
        start(
            windows_parts.part_maps, (where.slots * block.parts, H),
            found.gram, found.reads, found.weight, found.facts, maps[0], maps[1], rows, *tables(where),
            H=H, PART=block.part, ROWS=ROWS, BEFORE=plan.before, **block.flags, num_warps=1,
        )  # fmt: skip
    return maps


def _join(plan: Plan, given: Inputs, where: Geometry, block: Block, found: Measured) -> Tensor:
    """Maps of reads and of writes of blocks."""
    H = given.v.shape[2]
    maps = empty_maps(given.v, where.slots, block.window)
    parts = _parts(plan, given, where, block, found, None)
    if where.slots and H:
        slots = maps.new_empty(where.slots, H, block.parts * HELD, 2 * PAIRS)
        start(
            windows_parts.join, (where.slots, H, 2),
            found.gram, found.reads, found.decay, *parts, slots, *maps, *tables(where),
            H=H, PART=block.part, SLOTS=block.slots, BC=PAIRS, BEFORE=plan.before, DOT=_exact(given.v.dtype),
            **block.flags, num_warps=4, num_stages=1,
        )  # fmt: skip
    return maps


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
    """o, final S, weight, log-decay, maps, and the states that blocks (or if rebuilt, sequences) begin with."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    block = Block.of(plan.window)
    where = Geometry.of(B, T, cu_seqlens, block.tokens)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    found = Measured.of(plan, given, where, block)
    maps = _join(plan, given, where, block, found)
    states = v.new_empty(where.slots if save and not plan.rebuild else 0, H, K, V)
    _run(plan, given, where, block, found.decay, maps, state0, o, states if len(states) else None, state1)
    if save and plan.rebuild:
        states = v.new_zeros(where.sequences, H, K, V)
        states = states if state0 is None else states.copy_(state0)
    return o, state1, found.weight, found.decay, maps, states


def backward(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    maps, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K = v.shape, q.shape[3]
    block = Block.of(plan.window)
    where = Geometry.of(B, T, cu_seqlens, block.tokens)
    d_o = d_o.contiguous()
    found = Measured.of(plan, given, where, block)
    if plan.rebuild:
        begins, states = states, v.new_empty(where.slots, H, K, V)
        _run(plan, given, where, block, found.decay, maps, begins, None, states, None)
    out = Gradients(given, where, want_state)
    grid = _programs(given, where)
    if grid:
        start(
            windows.backward_state, (grid,),
            given.q, given.k, d_o, given.key0, given.has_key, given.unmasked, found.decay, maps[0], maps[1],
            None if d_state1 is None else d_state1.contiguous(), out.v, _shared(where, given, V), out.states,
            out.state0, where.cu, where.chunk_start, where.length, where.chunks, where.tokens,
            **_walk(plan, given, block),
        )  # fmt: skip
    if where.slots and H:
        _rest(plan, given, where, block, found, d_o, states, out)
    return out.result()


def _shared(where: Geometry, given: Inputs, width: int) -> Tensor:
    """Room for what blocks give to the pairs before their first token."""
    shape = (where.slots * windows.SHARED.value, given.v.shape[2], width)
    return torch.empty(*shape, dtype=torch.float32, device=given.v.device)


def _rest(plan, given, where, block, found: Measured, d_o, states, out) -> None:
    """Gradients that are found block by block, from states and their gradients: of queries, keys and gates."""
    (_B, _T, H, V), K, dtype = given.v.shape, given.q.shape[3], given.v.dtype
    low, exact, count = _low(dtype), _exact(dtype), where.slots * block.parts

    def room(*shape: int, dtype: torch.dtype = low) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=given.v.device)

    common = {"H": H, "PART": block.part, "BEFORE": plan.before, **block.flags}
    rows, rows_back = room(2, count, H, ROWS, SIDES)
    maps = _parts(plan, given, where, block, found, rows)
    start(
        windows_parts.part_rows, (count, H),
        found.gram, found.reads, found.weight, found.decay, found.facts, rows_back, *tables(where),
        ROWS=ROWS, **common, num_warps=1,
    )  # fmt: skip
    missed, wrote, begun, df = (room(where.slots, H, block.parts * HELD, V) for _ in range(4))
    met = room(count, H, SIDES, SIDES, dtype=torch.float32)
    d_gram = room(where.slots, H, block.parts * HELD, block.slots)
    d_reads = room(where.slots, H, block.parts * HELD, PAIRS)
    read = torch.empty_like(found.decay)
    through = room(where.slots, H, HELD, dtype=torch.float32)
    widths = {"V": V, "SLOTS": block.slots, "SHIFT": int(plan.shift), **common, **given.widths}
    start(
        windows_gradient.sweep, (where.slots, H),
        given.q, given.k, given.v, d_o, given.key0, given.has_key, given.unmasked, found.gram, found.reads, found.decay,
        states, out.states, *maps, missed, wrote, begun, df, met, d_gram, d_reads, read, through, *tables(where),
        DOT=exact, **widths, **_sweep_tile(K, V, dtype)._asdict(),
    )  # fmt: skip
    start(
        windows_gradient.inside, (count, H),
        given.beta, given.lam, given.has_key, given.unmasked, found.gram, found.reads, found.weight, found.decay,
        found.facts, rows, rows_back, met, read, through, d_gram, d_reads, out.beta, out.lam, *tables(where),
        float(plan.eps), float(plan.floor), ROWS=ROWS, SLOTS=block.slots, SHIFT=int(plan.shift), SCALED=plan.scaled,
        DIRECT=plan.direct, DOT=exact, **common, num_warps=2,
    )  # fmt: skip
    shared = _shared(where, given, K)
    start(
        windows_gradient.finish, (where.slots, H),
        given.q, given.k, d_o, given.key0, given.has_key, given.unmasked, found.decay, states, out.states,
        wrote, df, d_gram, d_reads, out.q, out.k, out.key0, shared, *tables(where), DOT=exact, **widths,
        **token_tile(K, V, dtype)._asdict(),
    )  # fmt: skip
    start(
        windows_gradient.add_shared, (where.slots, H),
        shared, out.k, *tables(where)[:5], H=H, K=K, BK=wide(K), WINDOW=block.window, TOKENS=block.tokens,
        SHIFT=int(plan.shift), num_warps=4,
    )  # fmt: skip


def _sweep_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.bfloat16:
        return Tile(wide(K), min(128, wide(V)), 4, 1)
    return Tile(wide(K), 64 if dtype == torch.float16 else 32, 4, 1)
