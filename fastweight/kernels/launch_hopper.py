"""Host side of hopper_prepare.py and hopper_solve.py: whether a call can take them, descriptors, launches.

Traps: Gluon changes from one Triton release to the next, so only releases on which the kernels were compared are taken.
FASTWEIGHT_HOPPER=0 leaves every call to the plain kernels, to tell the two apart where a result is doubted.
"""

import importlib.util
import os
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fastweight.kernels.geometry import Geometry
from fastweight.kernels.launch import FEW_PROGRAMS, LEAST_CHUNKS, Inputs, Plan, Walk, gate_flags, start, wide

RELEASES = ("3.6",)
SWITCH = "FASTWEIGHT_HOPPER"  # environment variable: "0" for the plain kernels everywhere
WIDTHS = (64, 128)
PREPARE_REGISTERS = 96  # five programs a multiprocessor
ADVANCE_REGISTERS = 168  # three
WALKING = 264  # programs of a walk that an H200 holds at once, two a multiprocessor
TURNS = 4  # that a backward pass is done in, at most
LARGE = 2**27  # elements of all state gradients; fewer are kept at once: at half of that turns cost 5 % of the time
STAGES = 2  # chunks in shared memory: at width 128 that leaves room for a second program, at 64 more was no faster


def fits(given: Inputs, where_cu: Tensor | None) -> bool:
    """Whether the fast kernels compute this call: dense, 16 bits, widths 64 or 128, no mask, no carried key."""
    K, V = given.q.shape[3], given.v.shape[3]
    dense = where_cu is None and given.previous is None and given.unmasked is None and given.key0 is None
    shaped = given.v.dtype != torch.float32 and K in WIDTHS and V % 64 == 0 and given.v.numel() > 0
    small = given.v.shape[0] * given.v.shape[1] * given.v.shape[2] < 2**29  # coordinates are 32-bit
    if not (dense and shaped and small):
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (given.q, given.k, given.v))
    return aligned and available(given.v.device)


def available(device: torch.device) -> bool:
    """Not switched off, on Hopper, and a Triton release whose Gluon the kernels are written for."""
    return os.environ.get(SWITCH, "1") != "0" and _can_run(device)


@cache
def _can_run(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return triton.__version__.startswith(RELEASES) and importlib.util.find_spec("triton.experimental.gluon") is not None


@cache
def _layout(rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def descriptor(tensor: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    """A TMA descriptor without its constructor, whose checks take longer than all else here and cannot fail."""
    return _described(tensor, _template(tuple(shape), tuple(strides), tuple(block)))


@lru_cache(1024)
def _template(shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """The class of descriptors, and all fields but the tensor; nobody writes to them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(len(block))
    fields = {"shape": list(shape), "strides": list(strides), "block_shape": list(block), "layout": layout}
    return TensorDescriptor, fields | {"padding": "zero"}


def _described(tensor: Tensor, template: tuple[Any, dict[str, Any]]) -> Any:
    made = object.__new__(template[0])
    made.__dict__.update(template[1], base=tensor)
    return made


def tiles(tensor: Tensor, width: int, rows: int = 64) -> Any:
    """Descriptor of `rows` tokens by `width` columns of [B, T, heads, columns]; past either end of T it reads zeros."""
    return _described(tensor, _tiles(tensor.shape, width, rows))


@lru_cache(1024)
def _tiles(size: torch.Size, width: int, rows: int) -> tuple[Any, dict[str, Any]]:
    B, T, heads, columns = size
    row = heads * columns
    return _template((B, T, row), (T * row, row, 1), (1, rows, width))


def blocks(tensor: Tensor, rows: int) -> Any:
    """Descriptor of `rows` by 64 of a tensor [..., columns]."""
    columns = tensor.shape[-1]
    return _described(tensor, _template((tensor.numel() // columns, columns), (columns, 1), (rows, 64)))


def walk_of(where: Geometry, given: Inputs) -> Walk:
    """One piece a sequence where programs fill the device, else as many as it holds at once; few are not worth it."""
    H, V = given.v.shape[2], given.v.shape[3]
    programs = where.sequences * H * (V // 64)
    if programs >= FEW_PROGRAMS or where.chunks < LEAST_CHUNKS:
        return Walk(where, 1, 2**30)
    pieces = min(WALKING // programs, where.chunks // 4)
    length = -(-where.chunks // pieces) if pieces > 2 else where.chunks
    return Walk(where, -(-where.chunks // length), length)


def rows_at_once(walk: Walk, given: Inputs) -> int:
    """Rows of the batch whose state gradients are kept at a time: a device full, or a few where TURNS are too many.

    The gradients of the next rows then lie where the last ones did, and a turn costs a launch, no idle programs.
    """
    B, T, H, V = given.v.shape
    checked = given.v.dtype == torch.bfloat16 and V in WIDTHS and given.q.shape[2] == H  # on a device
    # (T: rates of later rows begin at multiples of 16 bytes, as everything that kernels are compiled for.)
    if not checked or walk.segments > 1 or T % 4 or walk.where.slots * H * given.q.shape[3] * V < LARGE:
        return B
    full = max(1, WALKING // (H * (V // 64)))
    return min(B, full * -(-B // (full * TURNS)))


def shares_room(given: Inputs) -> bool:
    """Whether a chunk's state gradient fits where its gradients of q and k go, which costs no memory and no turns."""
    T, V = given.v.shape[1], given.v.shape[3]
    return given.v.dtype == torch.bfloat16 and given.q.shape[3] == V and T % 64 == 0


def _options(plan: Plan, given: Inputs, **flags: Any) -> dict[str, Any]:
    common = {"V": given.v.shape[3], "SHIFT": int(plan.shift), "DECAYED": plan.decayed}
    return {**common, **flags, **given.widths, "STAGES": STAGES, "num_warps": 4}


def _span(walk: Walk) -> tuple[int, ...]:
    return walk.arguments[2:]


def prepare(plan: Plan, given: Inputs, where: Geometry) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Steps and log-decays [H, tokens], and the inverses [slots, H, 64, 64]; bfloat16 only."""
    from fastweight.kernels import hopper_prepare

    H, device = given.v.shape[2], given.v.device
    rates = tuple(torch.empty(H, where.tokens, dtype=torch.float32, device=device) for _ in range(2))
    inverse = given.v.new_empty(where.slots, H, 64, 64)
    start(
        hopper_prepare.prepare, (where.sequences * -(-where.chunks // 2), H),
        tiles(given.k, given.q.shape[3], 128), given.beta, given.lam, *rates, inverse, where.length, where.chunks,
        where.tokens, float(plan.eps), float(plan.floor), DECAYED=plan.decayed, **given.widths, **gate_flags(plan),
        num_warps=4, maxnreg=PREPARE_REGISTERS,
    )  # fmt: skip
    return (rates[0], rates[1]), inverse


class Reach(NamedTuple):
    """log2 of what is left of a state, at most: by every chunk [chunks, H], and by every piece [pieces, H]."""

    chunks: Tensor
    pieces: Tensor


def reach(plan: Plan, given: Inputs, walk: Walk, rates: tuple[Tensor, Tensor]) -> Reach:
    """For calls that pass over what fades (reach.py); `advance` fills the pieces."""
    from fastweight.kernels.reach import bound

    where, H = walk.where, given.v.shape[2]
    assert (walk.segments - 1) * walk.length < where.chunks, "an empty piece says nothing of what it leaves"
    found = Reach(rates[0].new_empty(where.slots, H), rates[0].new_empty(where.sequences * walk.segments, H))
    start(
        bound, (where.slots, H),
        given.k, given.beta, *rates, found.chunks, where.length, where.chunks, where.tokens,
        BK=wide(given.k.shape[3]), SHIFT=int(plan.shift), GIVEN=plan.raw or plan.direct, DECAYED=plan.decayed,
        **given.widths, num_warps=2,
    )  # fmt: skip
    return found


def forward(
    plan: Plan, given: Inputs, walk: Walk, rates: tuple[Tensor, Tensor], inverse: Tensor, state0: Tensor | None,
    o: Tensor, state1: Tensor, residual: Tensor | None, states: Tensor | None,
) -> None:  # fmt: skip
    """Fills o and state1, and if given residual [tokens, H, V] and chunk states."""
    from fastweight.kernels import hopper_solve

    K, (B, T, H, V) = given.q.shape[3], given.v.shape
    start(
        hopper_solve.forward, (walk.where.sequences * walk.segments * H * (V // 64),),
        tiles(given.k, K), tiles(given.q, K), tiles(given.v, 64), blocks(inverse, 64), tiles(o, 64),
        None if residual is None else tiles(residual.view(B, T, H, V), 64),
        None if states is None else blocks(states, K),
        *rates, None if state0 is None else state0.contiguous(), state1, *_span(walk),
        **_options(plan, given, BEFORE=plan.before),
    )  # fmt: skip


def advance(
    plan: Plan, given: Inputs, walk: Walk, rates: tuple[Tensor, Tensor], inverse: Tensor, local: Tensor | None,
    maps: Tensor, left: Reach | None = None,
) -> None:  # fmt: skip
    """Fills maps, and local if given, but for the piece that nothing follows (without local, in reverse).

    left: of `reach`.
    """
    from fastweight.kernels import hopper_solve

    K, V = given.q.shape[3], given.v.shape[3]
    columns = K // 64 + (0 if local is None else V // 64)
    start(
        hopper_solve.advance, (walk.where.sequences * (walk.segments - 1) * given.v.shape[2] * columns,),
        tiles(given.k, K), tiles(given.v, 64), blocks(inverse, 64), *rates, *(left or (None, None)), local, maps,
        *_span(walk), **_options(plan, given, SKIP=int(local is None)), maxnreg=ADVANCE_REGISTERS,
    )  # fmt: skip


def backward_state(
    plan: Plan, given: Inputs, walk: Walk, rates: tuple[Tensor, Tensor], inverse: Tensor, d_o: Tensor,
    d_end: Tensor | None, d_start: Tensor | None, kept: tuple[Tensor, ...] | None, left: Reach | None = None,
) -> None:  # fmt: skip
    """Fills d_start if given, and `kept`, if given: dY, and state gradients or the gradients of q and k for their room.

    left: of `reach`, for a walk without those, which then leaves out the piece that nothing precedes.
    """
    from fastweight.kernels import hopper_solve

    K, H, V = given.q.shape[3], given.v.shape[2], given.v.shape[3]
    d_y = None if kept is None else tiles(kept[0], 64)
    d_states, low, high = None, None, None
    if kept is not None and len(kept) == 2:
        d_states = blocks(kept[1], K)
    elif kept is not None:
        low, high = tiles(kept[1], 64), tiles(kept[2], 64) if K == 128 else None
    pieces = walk.where.sequences * (walk.segments if left is None else walk.segments - 1)
    start(
        hopper_solve.backward_state, (pieces * H * (V // 64),),
        tiles(given.k, K), tiles(given.q, K), tiles(d_o, 64), blocks(inverse, 64), d_y, d_states, low, high,
        *rates, left and left.chunks, None if d_end is None else d_end.contiguous(), d_start, *_span(walk),
        **_options(plan, given, BEFORE=plan.before),
    )  # fmt: skip
