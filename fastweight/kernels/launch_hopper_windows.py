"""Host side of hopper_windows.py: which calls it takes, what is kept for their backward pass, launches.

Kept are the maps of parts (2 KB each in bfloat16, for 9 to 15 tokens) and, by slot, W and Z (windows_parts.py); no maps
of blocks are ever made.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, tables
from fastweight.kernels.launch_hopper import available
from fastweight.kernels.launch_windows import (
    HELD,
    PAIRS,
    ROWS,
    SIDES,
    Block,
    Measured,
    Turn,
    add_shared,
    measure,
    shared_room,
    turns_of,
)
from fastweight.kernels.start import start

DTYPES = (torch.bfloat16,)  # float16 has no range for maps, and float32 no matrix units
UNIT = HELD * SIDES  # numbers of one map of a part
PARTS = 4  # of a block, which so has 64 slots


def fits(k: Tensor, v: Tensor, key0: Tensor | None, mask: Tensor | None, rebuild: bool) -> bool:
    """Whether it computes this call: bfloat16, K = V = 64 or 128, no carried key, no mask."""
    if v.dtype not in DTYPES or k.shape[3] != v.shape[3] or v.shape[3] not in (64, 128):
        return False
    around = key0 is not None or mask is not None or rebuild
    return not around and available(v.device) and 0 < v.numel() < 2**30


class Kept(NamedTuple):
    """Maps of writes and of reads [2, blocks, H, parts, HELD, SIDES]; W and Z [2, blocks, H, slots, V]."""

    maps: Tensor
    slots: Tensor | None

    @classmethod
    def of(cls, flat: Tensor, v: Tensor, blocks: int, block: Block) -> "Kept":
        """The parts of what `empty` made."""
        H, V = v.shape[2:]
        parts = 2 * blocks * H * block.parts
        slots = flat[parts * UNIT :]
        return cls(
            flat[: parts * UNIT].view(2, blocks, H, block.parts, HELD, SIDES),
            slots.view(2, blocks, H, block.parts * HELD, V) if len(slots) else None,
        )


def empty(v: Tensor, blocks: int, block: Block, save: bool) -> Tensor:
    """Room for `Kept`; W and Z only if they are to be saved."""
    parts = 2 * blocks * v.shape[2] * block.parts
    return v.new_empty(parts * (UNIT + (HELD * v.shape[3] if save else 0)))


def _walk(kernel: Any, plan: Plan, given: Inputs, where: Geometry, block: Block, *arguments: Any) -> None:
    H, D = given.v.shape[2:]
    start(
        kernel, (where.sequences * H,),
        given.q, given.k, *arguments, where.cu, where.chunk_start, where.length, where.chunks, where.tokens,
        H=H, KH=given.q.shape[2], D=D, WINDOW=block.window, PART=block.part, PARTS=block.parts, SHIFT=int(plan.shift),
        BEFORE=plan.before, num_warps=4, maxnreg=128 if D == 64 else None,
    )  # fmt: skip


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def aligned(given: Inputs, values: Tensor) -> tuple[Inputs, Tensor]:
    """The same numbers where copies of 16 bytes read them."""
    return given._replace(q=_aligned(given.q), k=_aligned(given.k), v=_aligned(given.v)), _aligned(values)


def forward(
    plan: Plan, given: Inputs, where: Geometry, block: Block, flat: Tensor, state0: Tensor | None, o: Tensor,
    states: Tensor | None, state1: Tensor,
) -> Measured:  # fmt: skip
    """Fills o, state1, the blocks' first states, and `flat`, which `empty` made."""
    from fastweight.kernels import hopper_windows

    turns = turns_of(where, given.v.shape[2])
    found = Measured.of(given, block, turns)
    kept = Kept.of(flat, given.v, where.slots, block)
    for turn in turns:
        measure(plan, given, where, block, turn, found, True, True)
        writes, reads = kept.maps[:, turn.first :]
        _maps(plan, given, where, block, turn, found, reads, writes, None)
    slots = (None, None) if kept.slots is None else (kept.slots[0], kept.slots[1])
    _walk(
        hopper_windows.forward, plan, given, where, block, given.v, found.decay, *_plane(kept),
        None if state0 is None else state0.contiguous(), o, *slots, states, state1,
    )  # fmt: skip
    return found


def _maps(
    plan: Plan, given: Inputs, where: Geometry, block: Block, turn: Turn, found: Measured, reads: Tensor | None,
    writes: Tensor | None, rows: Tensor | None,
) -> None:  # fmt: skip
    """Maps of a turn's parts: of reads and writes, or where given of rows, forth and back."""
    from fastweight.kernels import hopper_windows_maps

    H, place = given.v.shape[2], (turn.first, *tables(where))
    named = {"H": H, "PART": block.part, "ROWS": ROWS, "BEFORE": plan.before, **block.flags, "num_warps": 1}
    measures = found.gram, found.reads, found.weight
    start(
        hopper_windows_maps.forth, (turn.blocks * PARTS, H),
        *measures, found.facts, reads, writes, None if rows is None else rows[0], *place, **named,
    )  # fmt: skip
    if rows is not None:
        start(
            hopper_windows_maps.back, (turn.blocks * PARTS, H),
            *measures, found.decay, found.facts, rows[1], *place, **named,
        )  # fmt: skip


def _plane(kept: Kept) -> tuple[Tensor, int]:
    """The maps of writes, and how many maps further on those of reads are."""
    return kept.maps, kept.maps[0].numel() // UNIT


def backward(
    plan: Plan, given: Inputs, where: Geometry, block: Block, known: tuple[Tensor, ...], flat: Tensor, states: Tensor,
    d_o: Tensor, d_state1: Tensor | None, out: Gradients,
) -> None:  # fmt: skip
    """Fills all gradients; known: weights, log-decays and facts of tokens."""
    from fastweight.kernels import hopper_windows_backward

    (_B, _T, H, D) = given.v.shape
    kept = Kept.of(flat, given.v, where.slots, block)
    assert kept.slots is not None, "a backward pass of what was not saved"
    pulled = torch.empty_like(kept.slots)
    _walk(
        hopper_windows_backward.backward_state, plan, given, where, block, d_o, known[1], *_plane(kept),
        None if d_state1 is None else d_state1.contiguous(), out.v, pulled[0], pulled[1], out.states, out.state0,
    )  # fmt: skip
    turns = turns_of(where, H)
    found = Measured.of(given, block, turns, known)
    room = Scratch.of(given.v, len(found.gram), block)
    read = torch.empty_like(found.decay)
    shared = shared_room(where, given, D)
    for turn in turns:
        measure(plan, given, where, block, turn, found, False, True)
        _maps(plan, given, where, block, turn, found, None, None, room.rows)
        chosen = slice(turn.first, turn.first + turn.blocks)
        slots = [tensor[chosen] for tensor in (*kept.slots, *pulled)]
        _tokens(plan, given, where, block, turn, found, d_o, states, slots, room, read, shared, out)
    if turns:
        add_shared(plan, given, where, block, shared, out)


class Scratch(NamedTuple):
    """What is made on the way for some blocks of every head: B and H of parts, M, dG, d(Q X^T), what passes."""

    rows: Tensor
    met: Tensor
    d_gram: Tensor
    d_reads: Tensor
    through: Tensor

    @classmethod
    def of(cls, v: Tensor, blocks: int, block: Block) -> "Scratch":
        H, wide = v.shape[2], torch.float32
        parts = blocks * block.parts
        square = blocks, H, PAIRS, PAIRS
        return cls(
            v.new_empty(2, parts, H, ROWS, SIDES),
            v.new_empty(parts, H, SIDES, SIDES, dtype=wide), v.new_empty(square), v.new_empty(square),
            v.new_empty(blocks, H, HELD, dtype=wide),
        )  # fmt: skip


def _tokens(
    plan: Plan, given: Inputs, where: Geometry, block: Block, turn: Turn, found: Measured, d_o: Tensor, states: Tensor,
    slots: list[Tensor], room: Scratch, read: Tensor, shared: Tensor, out: Gradients,
) -> None:  # fmt: skip
    """Fills the gradients of queries, keys and gates of a turn's blocks, and the shares of other blocks' keys.

    slots: W, Z, dZ and dF; read: room for dO . reads.
    """
    from fastweight.kernels import hopper_windows_between, hopper_windows_finish, hopper_windows_inside

    H, D = given.v.shape[2:]
    _missed, wrote, _lead, df = slots
    both = room.d_gram, room.d_reads
    place = turn.first, *tables(where)
    flags = {"H": H, "WINDOW": block.window, "PART": block.part, "SHIFT": int(plan.shift), "BEFORE": plan.before}
    widths = {"KH": given.q.shape[2], "D": D, **flags}
    start(
        hopper_windows_between.between, (turn.blocks * H,),
        given.q, given.k, given.v, d_o, found.decay, states, out.states, *slots, room.met, *both, read, room.through,
        *place, num_warps=4, **widths,
    )  # fmt: skip
    start(
        hopper_windows_inside.inside, (turn.blocks * H * PARTS,),
        given.beta, given.lam, found.gram, found.reads, found.weight, found.decay, found.facts, *room.rows, room.met,
        read, room.through, *both, out.beta, out.lam, *place, float(plan.eps), float(plan.floor),
        SCALED=plan.scaled, DIRECT=plan.direct, num_warps=4, maxnreg=128, **flags,
    )  # fmt: skip
    start(
        hopper_windows_finish.finish, (turn.blocks * H * (D // 64),),
        given.q, given.k, d_o, found.decay, states, out.states, wrote, df, *both, out.q, out.k, shared, *place,
        num_warps=4, **widths,
    )  # fmt: skip
