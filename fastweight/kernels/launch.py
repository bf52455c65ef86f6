"""Host side of the kernels: allocates outputs, picks tile sizes from widths and dtype (never from T), launches.

Traps: tensors are made contiguous here, so views give the same result. Gradients of grouped queries and keys come out
of the kernels one per value head and are summed here. A launch on an empty grid is skipped. In 16 bits no tile is
narrower than 64: Triton 3.6 reads out of bounds on Hopper with 32-wide ones.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from einops import rearrange, reduce
from torch import Tensor

from fastweight.kernels import additive, gates, solve
from fastweight.kernels.geometry import Geometry, previous_unmasked

INVERT_REGISTERS = 168  # a cap: more programs in flight are worth some spilling
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
        previous = previous_unmasked(mask) if mask is not None and plan.shift else None
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


def _wide(width: int, least: int = 64) -> int:
    return max(least, 1 << (width - 1).bit_length())


def serial_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """Of the kernels that walk the chunks: all of K at once, so that a state column never leaves its program."""
    if dtype == torch.float32:
        return Tile(_wide(K), 32, 4, 1)
    return Tile(_wide(K), 64, 4, 2) if K <= 128 else Tile(_wide(K), 64, 8, 1)


def token_tile(K: int, V: int, dtype: torch.dtype) -> Tile:
    """Of the kernels with one program a chunk."""
    return Tile(32, 32, 4, 1) if dtype == torch.float32 else Tile(64, 64, 4, 1)


def _launch(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **options: Any) -> None:
    kernel[grid](*arguments, **options)


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _sums(dtype: torch.dtype) -> tl.dtype:
    """Operand type of the sums over pairs in gate gradients: the range of float32 matters there, not its digits."""
    return tl.float32 if dtype == torch.float32 else tl.bfloat16


def _gates(plan: Plan) -> dict[str, Any]:
    return {"SHIFT": int(plan.shift), "RAW": plan.raw, "SCALED": plan.scaled, "DIRECT": plan.direct}


def _tables(where: Geometry) -> tuple:
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

    def decays(self, decay: Tensor, stride: int) -> Tensor:
        """What each segment leaves of a state where nothing is subtracted, [N, segments, H, 1, 1]."""
        where = self.where
        ends = torch.arange(1, where.chunks + 1, device=decay.device).mul(stride).clamp(max=where.length) - 1
        total = rearrange(decay, "h (n t) -> n h t", n=where.sequences)[:, :, ends].double()
        total = torch.nn.functional.pad(total, (0, self.segments * self.length - where.chunks))
        return torch.exp2(reduce(total, "n h (s c) -> n s h 1 1", "sum", s=self.segments))


def _chain(maps: Tensor, local: Tensor, outside: Tensor | None, reverse: bool) -> Tensor:
    """States [N segments, ...] that segments start from (end at, in reverse), from their maps and what each adds.

    In float64: it costs little, and no setting of the matrix product's precision can touch it.
    """
    order = list(range(local.shape[1]))
    if reverse:
        order.reverse()
    state = torch.zeros_like(local[:, 0]) if outside is None else outside
    found: dict[int, Tensor] = {}
    for s in order:
        found[s] = state.float()
        held = state.double()
        held = maps[:, s] * held if maps.shape[-1] == 1 else maps[:, s].double() @ held
        state = held + local[:, s]
    return torch.stack([found[s] for s in range(local.shape[1])], dim=1).flatten(0, 1)


def _steps(plan: Plan, given: Inputs, where: Geometry, nonzero: bool) -> tuple[Tensor, Tensor]:
    H = given.v.shape[2]
    weight = torch.empty(H, where.tokens, dtype=torch.float32, device=given.v.device)
    decay = torch.empty_like(weight)
    if where.slots and H:
        _launch(
            gates.steps, (where.slots, H),
            given.k, given.beta, given.lam, *given[5:], weight, decay, *_tables(where),
            float(plan.eps), float(plan.floor), BK=_wide(given.k.shape[3]), WINDOW=plan.window, NONZERO=nonzero,
            **given.widths, **_gates(plan), num_warps=4,
        )  # fmt: skip
    return weight, decay


def forward_solve(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, eta, log-decay, inverse, residual and chunk states of the regression class."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    inverse = v.new_empty(where.slots, H, 64, 64)
    residual = v.new_empty(where.tokens if save else 0, H, V)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    eta, decay = _steps(plan, given, where, nonzero=True)
    shift, dot = int(plan.shift), _precision(dtype)
    if where.slots and H:
        _launch(
            solve.invert, (where.slots, H),
            given.k, given.key0, given.previous, eta, decay, inverse, *_tables(where), BK=64, SHIFT=shift,
            DECAYED=plan.decayed, DOT=dot, MERGE="tf32" if dtype == torch.bfloat16 else "tf32x3", **given.widths,
            num_warps=1, num_stages=1, maxnreg=None if dtype == torch.float32 else INVERT_REGISTERS,
        )  # fmt: skip
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)
    if walk.segments > 1:
        maps, local = _advance(plan, given, walk, (eta, decay, inverse), with_values=True)
        state0 = _chain(maps, walk.pieces(local), state0, reverse=False)
        state1 = torch.empty_like(local)
    if grid:
        _launch(
            solve.forward, (grid * walk.segments,),
            given.q, given.k, given.v, given.key0, given.previous, eta, decay, inverse,
            None if state0 is None else state0.contiguous(), o, residual, states, state1, *walk.arguments,
            V=V, SHIFT=shift, DECAYED=plan.decayed, BEFORE=plan.before, SAVE=save, DOT=dot, **given.widths,
            **tile._asdict(),
        )  # fmt: skip
    if walk.segments > 1:
        state1 = walk.pieces(state1)[:, -1].contiguous()
    return o, state1, eta, decay, inverse, residual, states


def _advance(plan: Plan, given: Inputs, walk: Walk, saved: tuple, with_values: bool) -> tuple[Tensor, Tensor]:
    """Maps [N, segments, H, K, K] of all segments, and what they write from nothing (if with_values)."""
    H, K, V = given.v.shape[2], given.q.shape[3], given.v.shape[3]
    tile = serial_tile(K, V, given.v.dtype)
    count = walk.where.sequences * walk.segments
    maps = torch.empty(count, H, K, K, dtype=torch.float32, device=given.v.device)
    local = torch.empty(count if with_values else 0, H, K, V, dtype=torch.float32, device=given.v.device)
    blocks = triton.cdiv(K, tile.BV) + (triton.cdiv(V, tile.BV) if with_values else 0)
    _launch(
        solve.advance, (count * H * blocks,),
        given.k, given.v, given.key0, given.previous, *saved, local if with_values else None, maps, *walk.arguments,
        V=V, SHIFT=int(plan.shift), DECAYED=plan.decayed, DOT=_precision(given.v.dtype), **given.widths,
        **tile._asdict(),
    )  # fmt: skip
    return walk.pieces(maps), local


class _Gradients:
    """Empty gradients of a call; queries and keys per value head, masked rows zero because no program writes them."""

    def __init__(self, given: Inputs, where: Geometry, want_state: bool) -> None:
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
        self.states = given.v.new_empty(where.slots, H, K, V)
        self.state0 = torch.empty(where.sequences, H, K, V, **wide) if want_state else None
        self.nothing = torch.empty(0, **wide)
        self.given = given

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
        beta, lam, state0, key0 = (self.nothing.clone() if tensor is None else tensor for tensor in optional)
        return d_q, d_k, self.v, beta, lam, state0, key0


def backward_solve(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    eta, decay, inverse, residual, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens)
    d_o = d_o.contiguous()
    out = _Gradients(given, where, want_state)
    flags: dict[str, Any] = {"DECAYED": plan.decayed, "BEFORE": plan.before, "DOT": _precision(dtype), "V": V}
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)

    def reverse(d_end: Tensor | None, d_start: Tensor | None) -> None:
        _launch(
            solve.backward_state, (grid * walk.segments,),
            given.q, given.k, d_o, given.key0, given.previous, eta, decay, inverse,
            None if d_end is None else d_end.contiguous(), out.v, out.states, d_start, *walk.arguments,
            SHIFT=int(plan.shift), **flags, **given.widths, **tile._asdict(),
        )  # fmt: skip

    if walk.segments > 1:
        maps = _advance(plan, given, walk, (eta, decay, inverse), with_values=False)[0].mT
        _reverse_in_pieces(reverse, walk, maps, d_state1, out)
    elif grid:
        reverse(d_state1, out.state0)
    if where.slots and H:
        _launch(
            solve.backward_token, (where.slots, H),
            given.q, given.k, d_o, given.beta, given.lam, *given[5:], eta, decay, residual, states, out.v, out.states,
            torch.empty_like(decay), out.q, out.k, out.beta, out.lam, out.key0, *_tables(where),
            float(plan.eps), float(plan.floor), SUM=_sums(dtype), **flags, **given.widths, **_gates(plan),
            **token_tile(K, V, dtype)._asdict(),
        )  # fmt: skip
    return out.result()


def _reverse_in_pieces(reverse: Any, walk: Walk, maps: Tensor, d_state1: Tensor | None, out: _Gradients) -> None:
    """The reverse walk twice: from nothing, for what each segment adds, then from the true gradients at their ends."""
    local = out.nothing.new_empty(walk.where.sequences * walk.segments, *out.states.shape[1:])
    reverse(None, local)
    ends = _chain(maps, walk.pieces(local), d_state1, reverse=True)
    reverse(ends, local)
    if out.state0 is not None:
        out.state0 = walk.pieces(local)[:, 0].contiguous()


def forward_additive(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save):
    """o, final S, weights, log-decay and chunk states of the inner-product class."""
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    o = torch.empty_like(given.v)
    state1 = torch.empty(where.sequences, H, K, V, dtype=torch.float32, device=v.device)
    states = v.new_empty(where.slots if save else 0, H, K, V)
    weight, decay = _steps(plan, given, where, nonzero=False)
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)

    def run(state0: Tensor | None, state1: Tensor, save: bool) -> None:
        _launch(
            additive.forward, (grid * walk.segments,),
            given.q, given.k, given.v, given.key0, given.previous, weight, decay,
            None if state0 is None else state0.contiguous(), o, states, state1, *walk.arguments,
            V=V, WINDOW=plan.window, SHIFT=int(plan.shift), BEFORE=plan.before, SAVE=save, DOT=_precision(dtype),
            **given.widths, **tile._asdict(),
        )  # fmt: skip

    if walk.segments > 1:
        local = state1.new_empty(where.sequences * walk.segments, H, K, V)
        run(None, local, False)
        decays = walk.decays(decay, 65 - plan.window)
        run(_chain(decays, walk.pieces(local), state0, reverse=False), local, save)
        state1 = walk.pieces(local)[:, -1].contiguous()
    elif grid:
        run(state0, state1, save)
    return o, state1, weight, decay, states


def backward_additive(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state):
    """Gradients of q, k, v, beta, lam, the initial S and the initial key."""
    weight, decay, states = saved
    given = Inputs.of(plan, q, k, v, beta, lam, key0, has_key, mask)
    (B, T, H, V), K, dtype = v.shape, q.shape[3], v.dtype
    where = Geometry.of(B, T, cu_seqlens, 65 - plan.window)
    d_o = d_o.contiguous()
    out = _Gradients(given, where, want_state)
    shared = where.slots * 16 if plan.window > 1 else 0
    halo_k, halo_v = out.nothing.new_empty(shared, H, K), out.nothing.new_empty(shared, H, V)
    flags: dict[str, Any] = {"WINDOW": plan.window, "BEFORE": plan.before, "DOT": _precision(dtype), "V": V}
    tile = serial_tile(K, V, dtype)
    grid = where.sequences * H * triton.cdiv(V, tile.BV)
    walk = Walk.of(where, grid)

    def reverse(d_end: Tensor | None, d_start: Tensor | None) -> None:
        _launch(
            additive.backward_state, (grid * walk.segments,),
            given.q, d_o, decay, None if d_end is None else d_end.contiguous(), out.states, d_start,
            *walk.arguments, **flags, **given.widths, **tile._asdict(),
        )  # fmt: skip

    if walk.segments > 1:
        _reverse_in_pieces(reverse, walk, walk.decays(decay, 65 - plan.window), d_state1, out)
    elif grid:
        reverse(d_state1, out.state0)
    if where.slots and H:
        _launch(
            additive.backward_token, (where.slots, H),
            given.q, given.k, given.v, d_o, given.beta, given.lam, *given[5:], weight, decay, states, out.states,
            out.nothing.new_empty(2 * H, where.tokens), out.q, out.k, out.v, out.beta, out.lam, out.key0,
            halo_k, halo_v, *_tables(where), float(plan.eps), float(plan.floor), SUM=_sums(dtype),
            **flags, **given.widths, **_gates(plan), **token_tile(K, V, dtype)._asdict(),
        )  # fmt: skip
    if shared and H:
        _launch(
            additive.backward_halo, (where.slots, H),
            halo_k, halo_v, out.k, out.v, *_tables(where)[:5], H=H, K=K, V=V, BK=_wide(K), BV=_wide(V),
            WINDOW=plan.window, SHIFT=int(plan.shift), num_warps=4,
        )  # fmt: skip
    return out.result()
