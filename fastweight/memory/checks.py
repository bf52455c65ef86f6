"""Every complaint about arguments of the op: ValueErrors that name the argument, what was got, what is expected."""

from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastweight.memory.rules import Rule
from fastweight.memory.state import State
from fastweight.parallel.group import current

FORMS = ("auto", "recurrent", "masked", "chunk")
BACKENDS = ("auto", "torch", "triton")
_KEPT = {"has_key": torch.bool, "tail_count": torch.int64}
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fail(name: str, got: Any, expected: str) -> NoReturn:
    raise ValueError(f"{name}: got {got}, expected {expected}")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        fail(name, repr(value), "one of " + ", ".join(map(repr, allowed)))


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k [B, T, Hk, K]; v [B, T, H, V]; H a multiple of Hk; one floating dtype family, one device."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, Tensor) or value.ndim != 4:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            fail(name, got, "a tensor of 4 axes [batch, tokens, heads, width]")
        if value.dtype not in _FLOATS:
            fail(name, value.dtype, "float64, float32, bfloat16 or float16")
        if value.device != v.device:
            fail(name, f"device {value.device}", f"the device of v, {v.device}")
    layout = "(the layout is [batch, tokens, heads, width], also for one head)"
    if k.shape[:2] != v.shape[:2]:
        fail("k", f"shape {tuple(k.shape)}", f"batch and tokens {tuple(v.shape[:2])} as in v {layout}")
    if q.shape != k.shape:
        fail("q", f"shape {tuple(q.shape)}", f"the shape of k, {tuple(k.shape)} {layout}")
    if k.shape[2] == 0 or v.shape[2] % k.shape[2]:
        fail("v", f"{v.shape[2]} heads", f"a multiple of the {k.shape[2]} heads of q and k")
    if k.shape[3] == 0 or v.shape[3] == 0:
        fail("k" if k.shape[3] == 0 else "v", "width 0", "a width of at least 1")


def check_gate(name: str, value: Tensor | None, v: Tensor, *, column: bool = False) -> None:
    """[B, T, H], or [B, T, H, V] where the rule has a gain per column."""
    if value is None:
        return
    fits = isinstance(value, Tensor) and (value.shape == v.shape[:3] or (column and value.shape == v.shape))
    if not fits:
        shapes = [tuple(v.shape[:3])] + ([tuple(v.shape)] if column else [])
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        fail(name, got, "[batch, tokens, heads] " + " or ".join(map(str, shapes)))
    if value.dtype not in _FLOATS:
        fail(name, value.dtype, "float64, float32, bfloat16 or float16")
    if value.device != v.device:
        fail(name, f"device {value.device}", f"the device of v, {v.device}")


def check_mask(mask: Tensor | None, v: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != v.shape[:2]:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        fail("mask", got, f"a bool tensor [batch, tokens] {tuple(v.shape[:2])}, True for real tokens")
    if mask.device != v.device:
        fail("mask", f"device {mask.device}", f"the device of v, {v.device}")


def check_cu_seqlens(cu_seqlens: Tensor | None, v: Tensor) -> None:
    """int32 or int64 [N+1], from 0 to T (the tokens of all ranks) without decreasing; the batch is then 1."""
    if cu_seqlens is None:
        return
    place = current()
    B, T = v.shape[0], v.shape[1] * (1 if place is None else place.size)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else cu_seqlens
        fail("cu_seqlens", got, "an int32 or int64 tensor [N+1] of sequence bounds")
    if B != 1:
        fail("cu_seqlens", f"a batch of {B}", "batch 1: packed sequences lie one after another in one row")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != T or any(a > b for a, b in pairwise(bounds)):
        fail(
            "cu_seqlens",
            bounds if len(bounds) < 9 else f"{bounds[:4]} ... {bounds[-4:]}",
            f"bounds rising from 0 to {T}",
        )


def check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        fail("chunk_size", repr(chunk_size), "None or a whole number of tokens, at least 1")


def check_state(state: "State | Tensor | None", k: Tensor, v: Tensor, rule: Rule, N: int) -> None:
    """A State whose parts fit the rule and the inputs, or a bare S [N, H, K, V]."""
    if state is None:
        return
    H, Hk, K, V, R = v.shape[2], k.shape[2], k.shape[3], v.shape[3], rule.window
    if not isinstance(state, Tensor | State):
        fail("initial_state", type(state).__name__, "a State, a tensor S [N, heads, K, V], or None")
    Z = K if rule.read == "normalized" else 0
    wanted = {
        "S": (N, H, K, V),
        "z": (N, H, Z),
        "key": (N, Hk, K),
        "has_key": (N,),
        "tail_x": (N, R - 1, Hk, K),
        "tail_y": (N, R - 1, H, V),
        "tail_count": (N,),
    }
    parts = {"S": state} if isinstance(state, Tensor) else state._asdict()
    for name, part in parts.items():
        label = "initial_state" if isinstance(state, Tensor) else f"initial_state.{name}"
        if tuple(part.shape) != wanted[name]:
            fail(label, f"shape {tuple(part.shape)}", f"{wanted[name]} for {N} sequences under rule {rule.name!r}")
        if part.device != v.device:
            fail(label, f"device {part.device}", f"the device of v, {v.device}")
        if name in ("S", "z", "key", "tail_x", "tail_y") and part.dtype not in _FLOATS:
            fail(label, part.dtype, "a floating dtype")
        if name in _KEPT and part.dtype != _KEPT[name]:
            fail(label, part.dtype, f"{_KEPT[name]}: State.to casts a state and leaves what counts alone")
