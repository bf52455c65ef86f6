"""Host side of hopper_windows.py: which calls it takes, what is kept for their backward pass, launches.

Kept are the maps of parts (2 KB each in bfloat16, for 8 to 15 tokens), what their keys and queries have in common (as
much, in float32) and, by slot, W (windows_parts.py); no maps of blocks are ever made. The walk back
goes on in pieces of the sequences, each followed by what finds gradients of tokens from it, so that what is made on the
way takes the room of a piece.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import Gradients, Inputs, Plan, tables
from fastweight.kernels.launch_hopper import available
from fastweight.kernels.launch_windows import (
    HELD,
    ROWS,
    SIDES,
    Block,
    Turn,
    add_shared,
    empty_facts,
    shared_room,
    turns_of,
)
from fastweight.kernels.start import start

DTYPES = (torch.bfloat16,)  # float16 has no range for maps, and float32 no matrix units
UNIT = HELD * SIDES  # numbers of one map of a part
PARTS = 4  # of a block, which so has 64 slots
ALL = 2**30  # blocks, more than there are
TURN = 4000  # blocks of heads of width 128 at a time, about: each takes 116 KB while its gradients are found


def fits(k: Tensor, v: Tensor, key0: Tensor | None, mask: Tensor | None, rebuild: bool) -> bool:
    """Whether it computes this call: bfloat16, K = V = 64 or 128, no carried key, no mask."""
    if v.dtype not in DTYPES or k.shape[3] != v.shape[3] or v.shape[3] not in (64, 128):
        return False
    around = key0 is not None or mask is not None or rebuild
    return not around and available(v.device) and 0 < v.numel() < 2**30


class Kept(NamedTuple):
    """Maps of writes and of reads [2, blocks, H, parts, HELD, SIDES]; W [blocks, H, slots, V], where saved;
    X X^T and Q X^T of parts [2, blocks, H, parts, HELD, HELD], in float32."""

    maps: Tensor
    missed: Tensor | None
    met: Tensor

    @classmethod
    def of(cls, flat: Tensor, v: Tensor, blocks: int, block: Block) -> "Kept":
        """The parts of what `empty` made."""
        H, V = v.shape[2:]
        maps, missed, met = flat.split(_sizes(v, blocks, block, flat.numel()))
        return cls(
            maps.view(2, blocks, H, block.parts, HELD, SIDES),
            missed.view(blocks, H, block.parts * HELD, V) if len(missed) else None,
            met.view(torch.float32).view(2, blocks, H, block.parts, HELD, HELD),
        )


def _sizes(v: Tensor, blocks: int, block: Block, whole: int | None = None) -> tuple[int, int, int]:
    """Numbers of v's dtype that `Kept` takes, one part after another; whole: the sum, if known."""
    parts = 2 * blocks * v.shape[2] * block.parts
    maps, missed, met = parts * UNIT, parts // 2 * HELD * v.shape[3], parts * HELD * HELD * 4 // v.element_size()
    return maps, missed if whole is None else whole - maps - met, met


def empty(v: Tensor, blocks: int, block: Block, save: bool) -> Tensor:
    """Room for `Kept`; W only if it is to be saved."""
    maps, missed, met = _sizes(v, blocks, block)
    return v.new_empty(maps + met + (missed if save else 0))


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
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Fills o, state1, the blocks' first states, and `flat`, which `empty` made: weights, log-decays, facts."""
    from fastweight.kernels import hopper_windows, hopper_windows_maps

    (B, T, H, _V) = given.v.shape
    weight = torch.empty(H, B * T, dtype=torch.float32, device=given.v.device)
    decay, facts = torch.empty_like(weight), empty_facts(given.v, block.window)
    kept = Kept.of(flat, given.v, where.slots, block)
    if where.slots and H:
        _measure(plan, given, where, block, kept.met, weight, decay, facts)
        start(
            hopper_windows_maps.forth, (where.slots * PARTS, H),
            *kept.met, weight, facts, kept.maps[1], kept.maps[0], None, 0, ALL, *tables(where),
            **_of_parts(plan, given, block),
        )  # fmt: skip
    _walk(
        hopper_windows.forward, plan, given, where, block, given.v, decay, *_plane(kept),
        None if state0 is None else state0.contiguous(), o, kept.missed, states, state1,
    )  # fmt: skip
    return weight, decay, facts


def _measure(plan, given, where, block, met: Tensor, weight: Tensor, decay: Tensor, facts: Tensor) -> None:
    """X X^T and Q X^T of parts; weights, log-decays and facts of tokens."""
    from fastweight.kernels import hopper_windows_measure

    H, D = given.v.shape[2:]
    grid, place = (where.slots * H,), tables(where)
    flags = {"H": H, "WINDOW": block.window, "PART": block.part, "SHIFT": int(plan.shift)}
    start(
        hopper_windows_measure.meet, grid, given.q, given.k, *met, *place,
        KH=given.q.shape[2], D=D, num_warps=4, maxnreg=128, **flags,
    )  # fmt: skip
    start(
        hopper_windows_measure.take_facts, grid,
        met[0], given.beta, given.lam, weight, decay, facts, *place, float(plan.eps), float(plan.floor),
        SCALED=plan.scaled, DIRECT=plan.direct, num_warps=1, **flags,
    )  # fmt: skip


def _of_parts(plan: Plan, given: Inputs, block: Block) -> dict[str, Any]:
    """Constants of hopper_windows_maps.py."""
    return {
        "H": given.v.shape[2], "WINDOW": block.window, "TOKENS": block.tokens, "PAIRS": HELD, "PART": block.part,
        "ROWS": ROWS, "BEFORE": plan.before, "num_warps": 1, "maxnreg": 64 if block.window <= 4 else None,
    }  # fmt: skip


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
    pieces = pieces_of(where, H, D)
    lead, df, wrote = given.v.new_empty(3, most_at_once(where, H, D), H, block.parts * HELD, D)
    shared = shared_room(where, given, D)
    d_state, handed, carry = None if d_state1 is None else d_state1.contiguous(), None, None
    if len(pieces) > 1:
        # Zeros rather than none: the walk is compiled for fewer cases, and without a state registers did not suffice.
        handed = given.v.new_zeros(where.sequences, H, HELD, D)
        carry = torch.zeros(where.sequences, H, D, D, dtype=torch.float32, device=d_o.device)
        d_state = carry if d_state is None else d_state
    room = Scratch.of(given.v, max((turn.blocks for piece in pieces for turn in piece.turns), default=0), block)
    own = torch.empty_like(known[0]), torch.empty_like(known[0])
    for piece in pieces:
        is_last = piece is pieces[-1]
        _walk(
            hopper_windows_backward.backward_state, plan, given, where, block, d_o, known[1], *_plane(kept),
            d_state, handed, out.v, lead, df, out.states, out.state0 if is_last else carry,
            None if is_last else handed, piece.first, piece.per,
        )  # fmt: skip
        d_state = carry
        for turn in piece.turns:
            these = slice(turn.first, turn.first + turn.blocks)
            made = lead[these], df[these], wrote[these], out.states[these]
            place = piece.first + turn.first, piece.per, *tables(where)
            grid = (turn.blocks, 1) if piece.per == ALL else (piece.per, where.sequences)
            _tokens(plan, given, block, grid, place, known, kept, made, d_o, states, room, own, shared, out)
    if where.slots and H:
        add_shared(plan, given, where, block, shared, out)


class Piece(NamedTuple):
    """Blocks `first` to before first + per of every sequence, so many in all; and these in turns.

    Either is there one piece, or one turn a piece.
    """

    first: int
    per: int
    blocks: int
    turns: list[Turn]


def pieces_of(where: Geometry, heads: int, width: int) -> list[Piece]:
    """From a batch's last tokens to its first ones; packed sequences, which have different lengths, are one piece."""
    at_once = TURN * 128 // width
    if where.cu is not None or not where.slots or not heads or where.sequences > 65535:
        return [Piece(0, ALL, where.slots, turns_of(where, heads, at_once))]
    number = max(1, min(where.chunks, round(where.slots * heads / at_once)))
    per = -(-where.chunks // number)
    counts = {first: min(per, where.chunks - first) for first in range(0, where.chunks, per)}
    blocks = {first: where.sequences * count for first, count in counts.items()}
    return [Piece(first, counts[first], blocks[first], [Turn(0, blocks[first])]) for first in reversed(counts)]


def most_at_once(where: Geometry, heads: int, width: int) -> int:
    """Blocks of the largest piece."""
    return max(piece.blocks for piece in pieces_of(where, heads, width))


class Scratch(NamedTuple):
    """What is made on the way for parts of some blocks of every head: B and H, and of themselves dG and d(Q X^T)."""

    rows: Tensor
    d_gram: Tensor
    d_reads: Tensor

    @classmethod
    def of(cls, v: Tensor, blocks: int, block: Block) -> "Scratch":
        parts = blocks, v.shape[2], block.parts
        square = (*parts, HELD, HELD)
        return cls(v.new_empty(2, *parts, ROWS, SIDES), v.new_empty(square), v.new_empty(square))


def _tokens(
    plan: Plan, given: Inputs, block: Block, blocks: tuple[int, int], place: tuple, known: tuple[Tensor, ...],
    kept: Kept, made: tuple[Tensor, ...], d_o: Tensor, states: Tensor, room: Scratch, own: tuple[Tensor, Tensor],
    shared: Tensor, out: Gradients,
) -> None:  # fmt: skip
    """Fills the gradients of queries, keys and gates of some blocks, and the shares of other blocks' keys.

    blocks: so many of so many sequences; made: their dZ, dF, room for Z, gradients of states; own: room for what
    log-decays and weights get within their part.
    """
    from fastweight.kernels import hopper_windows_inside, hopper_windows_maps, hopper_windows_tokens

    H, D = given.v.shape[2:]
    weight, decay, facts = known
    lead, df, wrote, d_states = made
    met = kept.met
    number, sequences = blocks
    grid, named = (number * PARTS, H, sequences), _of_parts(plan, given, block)
    start(hopper_windows_maps.forth, grid, *met, weight, facts, None, None, room.rows[0], *place, **named)
    start(hopper_windows_maps.back, grid, *met, weight, decay, facts, room.rows[1], *place, **named)
    flags = {
        "H": H, "D": D, "WINDOW": block.window, "PART": block.part, "SHIFT": int(plan.shift), "BEFORE": plan.before,
        "num_warps": 4,
    }  # fmt: skip
    start(
        hopper_windows_inside.inside, (number * H * PARTS, 1, sequences),
        given.v, d_o, kept.missed, lead, kept.maps[0], *met, weight, decay, *room.rows, wrote, room.d_gram,
        room.d_reads, *own, *place,
        maxnreg=128, **flags,
    )  # fmt: skip
    start(
        hopper_windows_tokens.gradients, (number * H, 1, sequences),
        given.q, given.k, d_o, given.beta, given.lam, decay, facts, states, d_states, wrote, df, room.d_gram,
        room.d_reads, *own, out.q, out.k, shared, out.beta, out.lam, *place, float(plan.eps), float(plan.floor),
        KH=given.q.shape[2], SCALED=plan.scaled, DIRECT=plan.direct, maxnreg=168 if D == 64 else None, **flags,
    )  # fmt: skip
