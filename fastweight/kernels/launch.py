"""Host side of the kernels: allocates outputs, picks tile sizes from widths and dtype (never from T), launches.

Traps: tensors are made contiguous here, so views give the same result. Gradients of grouped queries and keys come out
of the kernels one per value head and are summed here. A launch on an empty grid is skipped. In 16 bits no tile is
narrower than 64: Triton 3.6 reads out of bounds on Hopper with 32-wide ones.
"""

import contextlib
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from einops import rearrange, reduce
from torch import Tensor

from fastweight.kernels import gates
from fastweight.kernels.geometry import Geometry, previous_unmasked
from fastweight.kernels.start import start

FEW_PROGRAMS = 132  # fewer programs than this leave a device idle: walk the sequences in pieces
LEAST_CHUNKS = 32  # shorter sequences stay whole


@dataclass(frozen=True)
class Plan:
    """What a call computes, as the numbers and flags that the kernels take."""

    eps: float
    floor: float
    shift: bool  # the key of the token before, else this token's own
    raw: bool  # beta is eta and lam is the natural log-decay
    scaled: bool
    direct: bool
    decayed: bool  # residual on the decayed state
    before: bool  # read before write
    window: int = 1
    rebuild: bool = False  # chunk states are not kept, but made again for the backward pass


Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Inputs(NamedTuple):
    """Tensors of a call as the kernels read them: contiguous, flags as bytes."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    lam: Tensor | None
    key0: Tensor | None
    has_key: Tensor | None
    unmasked: Tensor | None
    previous: Tensor | None

    @classmethod
    def of(cls, plan: Plan, q, k, v, beta, lam, key0, has_key, mask) -> "Inputs":
        flags: list[Any] = [None if flag is None else flag.contiguous().view(torch.uint8) for flag in (has_key, mask)]
        dense: list[Any] = [None if tensor is None else tensor.contiguous() for tensor in (q, k, v, beta, lam, key0)]
        # With a window a mask only says which tokens have a pair (continuation.py): keys pair across the others.
        previous = previous_unmasked(mask) if mask is not None and plan.shift and plan.window == 1 else None
        q, k, v, beta, lam, key0 = dense
        return cls(q, k, v, beta, lam, key0, flags[0], flags[1], previous)

    @property
    def widths(self) -> dict[str, int]:
        return {"H": self.v.shape[2], "KH": self.q.shape[2], "K": self.q.shape[3]}


class Tile(NamedTuple):
    """Launch shape of a kernel: key and value columns at a time, warps, stages, and a cap on registers."""

    BK: int
    BV: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def wide(width: int, least: int = 64) -> int:
    return max(least, 1 << (width - 1).bit_length())


def serial_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """Of the kernels that walk the chunks: all of K at once, so that a state column never leaves its program."""
    if dtype == torch.float32:
        return Tile(wide(K), 32, 4, 1)
    return Tile(wide(K), 64, 4, 2) if K <= 128 else Tile(wide(K), 64, 8, 1)


def token_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """Of the kernels with one program a chunk."""
    return Tile(32, 32, 4, 1) if dtype == torch.float32 else Tile(64, 64, 4, 1)


def device_of(tensor: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    here = not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(tensor.device)


def aligned(tensor: Tensor) -> Tensor:
    """The same numbers where TMA reads them: dense, from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def sum_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operand type of the sums over pairs in gate gradients: the range of float32 matters there, not its digits."""
    return tl.float32 if dtype == torch.float32 else tl.bfloat16


def gate_flags(plan: Plan) -> dict[str, Any]:
    return {"SHIFT": int(plan.shift), "RAW": plan.raw, "SCALED": plan.scaled, "DIRECT": plan.direct}


def tables(where: Geometry) -> tuple:
    return where.cu, where.chunk_seq, where.chunk_start, where.length, where.chunks, where.tokens


class Walk(NamedTuple):
    """How the chunks of a sequence are walked: in `segments` pieces of `length` chunks, side by side."""

    where: Geometry
    segments: int
    length: int

    @classmethod
    def of(cls, where: Geometry, programs: int) -> "Walk":
        """One piece a sequence where `programs` fill the device; else pieces, joined through their maps."""
        if where.cu is not None or not 0 < programs < FEW_PROGRAMS or where.chunks < LEAST_CHUNKS:
            return cls(where, 1, 2**30)
        length = -(-where.chunks // min(where.chunks // 4, 2 * FEW_PROGRAMS // programs))
        return cls(where, -(-where.chunks // length), length)

    @property
    def arguments(self) -> tuple:
        where = self.where
        return where.cu, where.chunk_start, where.length, where.chunks, where.tokens, self.segments, self.length

    def pieces(self, state: Tensor) -> Tensor:
        """[N segments, ...] as [N, segments, ...]."""
        return rearrange(state, "(n s) h k v -> n s h k v", s=self.segments)


def make_steps(plan: Plan, given: Inputs, where: Geometry, nonzero: bool) -> tuple[Tensor, Tensor]:
    H = given.v.shape[2]
    weight = torch.empty(H, where.tokens, dtype=torch.float32, device=given.v.device)
    decay = torch.empty_like(weight)
    if where.slots and H:
        start(
            gates.steps, (where.slots, H),
            given.k, given.beta, given.lam, *given[5:], weight, decay, *tables(where),
            float(plan.eps), float(plan.floor), BK=wide(given.k.shape[3]), WINDOW=plan.window,
            NONZERO=nonzero,
            **given.widths, **gate_flags(plan), num_warps=4,
        )  # fmt: skip
    return weight, decay


class Gradients:
    """Empty gradients of a call; queries and keys per value head, masked rows zero because no program writes them."""

    def __init__(self, given: Inputs, where: Geometry, want_state: bool, slots: int | None = None) -> None:
        """slots: chunks whose state gradients there is room for at a time; None is all of them, 0 asks for none."""
        B, T, H, V = given.v.shape
        K = given.q.shape[3]
        wide: dict[str, Any] = {"dtype": torch.float32, "device": given.v.device}
        make = torch.empty if given.unmasked is None else torch.zeros
        self.q = torch.empty(B, T, H, K, dtype=given.q.dtype, device=given.q.device)
        self.k = make(B, T, H, K, dtype=given.k.dtype, device=given.k.device)
        self.v = torch.empty_like(given.v)
        self.beta = None if given.beta is None else torch.empty_like(given.beta)
        self.lam = None if given.lam is None else torch.empty_like(given.lam)
        self.key0 = None if given.key0 is None else torch.zeros(where.sequences, H, K, **wide)
        self.states = given.v.new_empty(where.slots if slots is None else slots, H, K, V)
        self.state0 = torch.empty(where.sequences, H, K, V, **wide) if want_state else None
        self.nothing = torch.empty(0, **wide)
        self.shares_room = slots == 0  # of regression: state gradients lie where those of q and k will be
        self.given = given

    def rows(self, rows: slice, slots: int) -> "Gradients":
        """Those of some rows of a batch without carried keys; the room for their state gradients is everybody's."""
        part = copy(self)
        part.q, part.k, part.v = self.q[rows], self.k[rows], self.v[rows]
        part.beta = None if self.beta is None else self.beta[rows]
        part.lam = None if self.lam is None else self.lam[rows]
        part.states = self.states[:slots]
        return part

    def result(self) -> Saved:
        """As the operator returns them: grouped, and empty instead of None, each its own tensor."""
        groups = self.given.q.shape[2]
        d_q, d_k, d_key0 = self.q, self.k, self.key0
        if d_q.shape[2] != groups:
            d_q = reduce(d_q, "b t (h g) k -> b t h k", "sum", h=groups)
            d_k = reduce(d_k, "b t (h g) k -> b t h k", "sum", h=groups)
        if d_key0 is not None:
            assert self.given.key0 is not None
            d_key0 = reduce(d_key0, "n (h g) k -> n h k", "sum", h=groups).to(self.given.key0.dtype)
        optional = (self.beta, self.lam, self.state0, d_key0)
        beta, lam, state0, key0 = (self.nothing.new_empty(0) if tensor is None else tensor for tensor in optional)
        return d_q, d_k, self.v, beta, lam, state0, key0
