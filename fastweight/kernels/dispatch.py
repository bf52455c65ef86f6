"""The one door to the kernels: `supported` says why a call cannot run here, `scan` runs it; the same for one token.

Both take what the op has after its checks: q, k, v and gates in the caller's dtypes, a rule (any object with the
fields of memory.rules.Rule), and the parts of the initial state. Triton is imported when a kernel is called, not
before.

Traps: a given log_decay (natural log, <= 0, not checked) makes beta the step itself and takes the residual on the
decayed state, as the delta rules do. Only S comes back: the next state's keys and window tails are copies of inputs.
"""

import importlib.util
import os
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.kernels import states_are_rebuilt
from fastweight.kernels.continuation import Tail, continued

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256
LONGEST_WINDOW = 8
NARROWEST_HALF = 48
WIDEST_COLUMNS = 128  # in float32
MOST_TAPS = 4  # of the short convolution


def supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    rule: Any,
    *,
    log_decay: Tensor | None = None,
    S: Tensor | None = None,
    key: Tensor | None = None,
    has_key: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> str | None:
    """Why `scan` cannot run this call, or None if it can; nothing is read from the device."""
    return (
        _rule_reason(rule, log_decay, mask)
        or _tensor_reason(q, k, v, rule)
        or _gate_reason(k, v, rule, {"beta": beta, "lam": lam, "log_decay": log_decay, "S": S, "key": key})
        or machine_reason(v.device)
    )


def step_supported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    rule: Any,
    *,
    log_decay: Tensor | None = None,
    parts: tuple[Tensor, ...] = (),
) -> str | None:
    """Why `step` cannot run this call, or None if it can; nothing is read from the device. parts: as in `step`."""
    if rule.read != "plain":
        return "no kernel for the normalised read"
    if rule.window > 1 and log_decay is not None:
        return "no kernel for a window with given log-decays"
    if rule.window > LONGEST_WINDOW:
        return f"no kernel for windows above {LONGEST_WINDOW}"
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, beta, lam, log_decay, *parts)
    ):
        return "the decoding kernel has no gradients"
    floats = [part for part in parts if part.is_floating_point()]
    if any(part.dtype != torch.float32 for part in floats):
        return f"kernels keep states in float32, got {', '.join(str(part.dtype) for part in floats)}"
    given = {"beta": beta, "lam": lam, "log_decay": log_decay}
    return _width_reason(q, k, v) or _dtype_reason(v, given) or machine_reason(v.device)


def _rule_reason(rule: Any, log_decay: Tensor | None, mask: Tensor | None) -> str | None:
    if rule.read != "plain":
        return "no kernel for the normalised read"
    if rule.window == 1:
        return None
    if rule.window > LONGEST_WINDOW:
        return f"no kernel for windows above {LONGEST_WINDOW}"
    if mask is not None:
        # A window counts places, and a masked token reads but takes none: what it reads, no compacted order shows.
        return "no kernel for a window with a mask: pack the real tokens with cu_seqlens"
    if log_decay is not None:
        return "no kernel for a window with given log-decays"
    return None


def _tensor_reason(q: Tensor, k: Tensor, v: Tensor, rule: Any) -> str | None:
    narrow = min(k.shape[-1], v.shape[-1]) < NARROWEST_HALF
    if narrow and v.dtype == torch.float16 and rule.objective == "regression":
        # Gate gradients are summed over pairs from bfloat16 operands, which shows where the rest is this exact.
        return f"gate gradients of narrow float16 regressions miss float16 accuracy (widths below {NARROWEST_HALF})"
    if v.shape[2] > 65535:
        return "kernels take at most 65535 heads"
    return _width_reason(q, k, v)


def _width_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if v.dtype not in DTYPES or q.dtype != v.dtype or k.dtype != v.dtype:
        return f"kernels take q, k and v in one of bfloat16, float16 and float32, got {q.dtype}, {k.dtype}, {v.dtype}"
    if not (0 < k.shape[-1] <= WIDEST and 0 < v.shape[-1] <= WIDEST):
        return f"kernels take widths from 1 to {WIDEST}, got keys of {k.shape[-1]} and values of {v.shape[-1]}"
    return None


def _gate_reason(k: Tensor, v: Tensor, rule: Any, given: dict[str, Tensor | None]) -> str | None:
    # A beta per head makes all columns equal, whatever the rule: that is the scalar kernels' case.
    beta = given["beta"]
    if beta is not None and beta.ndim == 4:
        if given["log_decay"] is not None:
            return "no kernel for a gain per value column with given log-decays"
        if (
            rule.objective != "regression"
            and v.dtype == torch.float32
            and max(k.shape[-1], v.shape[-1]) > WIDEST_COLUMNS
        ):
            # Triton 3.6 makes a kernel of it that reads memory which is not there.
            return f"a gain per value column of inner-product writes takes float32 up to widths of {WIDEST_COLUMNS}"
    return _dtype_reason(v, given)


def _dtype_reason(v: Tensor, given: dict[str, Tensor | None]) -> str | None:
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"kernels take gates and states of at most float32, got {name} in {tensor.dtype}"
        if tensor is not None and tensor.device != v.device:
            return f"kernels take everything on one device, got {name} on {tensor.device} and v on {v.device}"
    return None


@torch.compiler.assume_constant_result
def machine_reason(device: torch.device) -> str | None:
    """Why no kernel runs on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return None if os.environ.get("TRITON_INTERPRET") == "1" else f"kernels run on CUDA devices, got {device}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "kernels need a CUDA device of capability 8.0 or later"
    return None


def scan(
    q: Float[Tensor, "B T Hk K"],
    k: Float[Tensor, "B T Hk K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | None,
    lam: Float[Tensor, "B T H"] | None,
    rule: Any,
    *,
    log_decay: Float[Tensor, "B T H"] | None = None,
    S: Float[Tensor, "N H K V"] | None = None,
    key: Float[Tensor, "N Hk K"] | None = None,
    has_key: Bool[Tensor, " N"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    cu_seqlens: Int[Tensor, " N+1"] | None = None,
    tail: tuple[Tensor, Tensor, Tensor] | None = None,
    checked: bool = False,
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"]]:
    """o in v's dtype and the final S in float32 (SPEC sections 2 to 6), differentiable in every floating input.

    Args:
        q, k, v, beta, lam, mask, cu_seqlens: as in fast_weight_attention; beta None is ones, lam None is no decay.
        log_decay: natural log of the carry; then beta is the step itself and lam must be None.
        S, key, has_key: parts of the initial State; None is zero, and no key.
        tail: its tail_x, tail_y and tail_count, for a window that goes on (then with key and has_key).
        checked: whether `supported` was asked about this very call and had no objection.

    Raises:
        ValueError: with the reason, if the call is not supported.
    """
    around = {"log_decay": log_decay, "S": S, "key": key, "mask": mask, "cu_seqlens": cu_seqlens}
    reason = None if checked else supported(q, k, v, beta, lam, rule, **around)
    if reason is not None:
        raise ValueError(f"backend: got 'triton', expected a call that the kernels support: {reason}")
    from fastweight.kernels import op

    shift = rule.pairing == "next-latent"
    carried = key is not None and has_key is not None and shift
    gates = log_decay if log_decay is not None else lam
    S = None if S is None else S.float()
    stream = None
    if tail is not None and rule.window > 1 and v.shape[1] > 0:
        if key is None or has_key is None:
            raise ValueError("tail: got one without key and has_key, expected all parts of a State")
        stream = continued((q, k, v, beta, gates), Tail(key, has_key, *tail), shift, cu_seqlens)
        (q, k, v, beta, gates), cu_seqlens, carried = stream.inputs, stream.cu_seqlens, False
    floats = (q, k, v, beta, gates, S, key)
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in floats)
    regression = rule.objective == "regression"
    if states_are_rebuilt() and not regression:
        raise ValueError(f"rule: got the {rule.objective} objective, expected regression inside rebuilt_states()")
    if states_are_rebuilt() and beta is not None and beta.ndim == 4:
        raise ValueError("beta: got one per value column, expected one per head inside rebuilt_states()")
    if mask is not None:
        k, v, beta, gates = (_hide(tensor, ~mask) for tensor in (k, v, beta, gates))
    o, S = op.scan(
        q, k, v, beta, gates, S, key if carried else None, has_key if carried else None,
        mask if stream is None else stream.has_pair, cu_seqlens,
        float(rule.eps), float(rule.decay_floor), shift, log_decay is not None, rule.ridge == "scaled",
        rule.step == "direct", regression and log_decay is not None, rule.timing == "read-before-write",
        rule.window, regression, states_are_rebuilt(), save,
    )  # fmt: skip
    return (o if stream is None else o[:, stream.tokens]), S


def step(
    q: Float[Tensor, "B Hk K"],
    k: Float[Tensor, "B Hk K"],
    v: Float[Tensor, "B H V"],
    beta: Float[Tensor, "B H"] | Float[Tensor, "B H V"] | None,
    lam: Float[Tensor, "B H"] | None,
    rule: Any,
    parts: tuple[Tensor, ...],
    *,
    log_decay: Float[Tensor, "B H"] | None = None,
    mask: Bool[Tensor, " B"] | None = None,
    tickets: Int[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B H V"], tuple[Tensor, ...]]:
    """One token of every rule, without gradients: o in v's dtype and the parts of the next state (SPEC section 6).

    Args:
        parts: S, key, has_key, tail_x, tail_y, tail_count of a State, float32.
        tickets: None leaves `parts` alone; int32 zeros [B], which come back as zeros, let them be overwritten with the
            next state (they must be contiguous), for calls that must find it at the same addresses.
        the rest: as in `scan`, without the token axis; gains per value column are taken too.

    Raises:
        ValueError: with the reason, if the call is not supported, or if `parts` cannot be overwritten.
    """
    reason = step_supported(q, k, v, beta, lam, rule, log_decay=log_decay, parts=parts)
    if reason is not None:
        raise ValueError(f"backend: got 'triton', expected a call that the kernels support: {reason}")
    from fastweight.kernels import launch_decode

    raw = log_decay is not None
    given = (q, k, v, beta, log_decay if raw else lam, mask, *parts)
    flags = (
        float(rule.eps), float(rule.decay_floor), rule.pairing == "next-latent", raw, rule.ridge == "scaled",
        rule.step == "direct", rule.objective == "regression", rule.timing == "read-before-write",
    )  # fmt: skip
    if tickets is None:
        o, *new = launch_decode.move(*given, *flags)
        return o, tuple(new)
    if not all(part.is_contiguous() for part in parts):
        raise ValueError("parts: got a part that is not contiguous, expected contiguous ones to overwrite")
    return launch_decode.move_in_place(*given, tickets, *flags), parts


def _hide(tensor: Any, hidden: Tensor) -> Any:
    """0 at masked tokens: they may hold anything, and 0 * NaN must not reach the memory."""
    if tensor is None:
        return None
    return tensor.masked_fill(hidden.reshape(*hidden.shape, *(1,) * (tensor.ndim - 2)), 0)
