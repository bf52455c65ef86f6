"""The one door to the kernels: `supported` says why a call cannot run here, `scan` runs it.

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

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256
LONGEST_WINDOW = 8
NARROWEST_HALF = 48
WIDEST_SURROUNDED = 128


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
    continues: bool = False,
) -> str | None:
    """Why `scan` cannot run this call, or None if it can; nothing is read from the device.

    continues: whether the initial state may hold pairs of an earlier window (it is not fresh).
    """
    return (
        _rule_reason(rule, log_decay, mask, continues)
        or _tensor_reason(q, k, v, rule)
        or _surroundings_reason(k, v, (key, mask, cu_seqlens))
        or _gate_reason(v, {"beta": beta, "lam": lam, "log_decay": log_decay, "S": S, "key": key})
        or _machine_reason(v.device)
    )


def _rule_reason(rule: Any, log_decay: Tensor | None, mask: Tensor | None, continues: bool) -> str | None:
    if rule.gain != "scalar":
        return "no kernel for a gain per value column yet"
    if rule.read != "plain":
        return "no kernel for the normalised read"
    if rule.window == 1:
        return None
    if rule.objective != "inner-product":
        return "no kernel for regression over a window yet"
    if rule.window > LONGEST_WINDOW:
        return f"no kernel for windows above {LONGEST_WINDOW}"
    if mask is not None or continues or log_decay is not None:
        return "no kernel for a window with a mask, with pairs of an earlier call, or with given log-decays"
    return None


def _tensor_reason(q: Tensor, k: Tensor, v: Tensor, rule: Any) -> str | None:
    if v.dtype not in DTYPES or q.dtype != v.dtype or k.dtype != v.dtype:
        return f"kernels take q, k and v in one of bfloat16, float16 and float32, got {q.dtype}, {k.dtype}, {v.dtype}"
    if not (0 < k.shape[-1] <= WIDEST and 0 < v.shape[-1] <= WIDEST):
        return f"kernels take widths from 1 to {WIDEST}, got keys of {k.shape[-1]} and values of {v.shape[-1]}"
    narrow = min(k.shape[-1], v.shape[-1]) < NARROWEST_HALF
    if narrow and v.dtype == torch.float16 and rule.objective == "regression":
        # Gate gradients are summed over pairs from bfloat16 operands, which shows where the rest is this exact.
        return f"gate gradients of narrow float16 regressions miss float16 accuracy (widths below {NARROWEST_HALF})"
    if v.shape[2] > 65535:
        return "kernels take at most 65535 heads"
    return None


def _surroundings_reason(k: Tensor, v: Tensor, around: tuple[Tensor | None, ...]) -> str | None:
    wide = max(k.shape[-1], v.shape[-1]) > WIDEST_SURROUNDED
    if wide and any(tensor is not None for tensor in around):
        return (
            f"widths above {WIDEST_SURROUNDED} with a carried key, a mask or cu_seqlens are not checked on a device yet"
        )
    return None


def unchecked(k: Tensor, v: Tensor, around: tuple[Tensor | None, ...]) -> str | None:
    """What keeps an automatic choice from the kernels: a kind of call that no device has compared with the recurrence.

    around: carried key, mask, cu_seqlens. With any of them, bfloat16 up to width 64 was compared and nothing else.
    """
    narrow = v.dtype == torch.bfloat16 and max(k.shape[-1], v.shape[-1]) <= 64
    if narrow or all(tensor is None for tensor in around):
        return None
    return "with a carried key, a mask or cu_seqlens, only bfloat16 up to width 64 was checked on a device"


def _gate_reason(v: Tensor, given: dict[str, Tensor | None]) -> str | None:
    for name, tensor in given.items():
        if tensor is not None and tensor.dtype not in DTYPES:
            return f"kernels take gates and states of at most float32, got {name} in {tensor.dtype}"
        if tensor is not None and tensor.device != v.device:
            return f"kernels take everything on one device, got {name} on {tensor.device} and v on {v.device}"
    if given["beta"] is not None and given["beta"].ndim != 3:
        return "no kernel for a gain per value column yet"
    return None


@torch.compiler.assume_constant_result
def _machine_reason(device: torch.device) -> str | None:
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
) -> tuple[Float[Tensor, "B T H V"], Float[Tensor, "N H K V"]]:
    """o in v's dtype and the final S in float32 (SPEC sections 2 to 6), differentiable in every floating input.

    Args:
        q, k, v, beta, lam, mask, cu_seqlens: as in fast_weight_attention; beta None is ones, lam None is no decay.
        log_decay: natural log of the carry; then beta is the step itself and lam must be None.
        S, key, has_key: parts of the initial State; None is zero, and no key.

    Raises:
        ValueError: with the reason, if the call is not supported.
    """
    reason = supported(
        q, k, v, beta, lam, rule, log_decay=log_decay, S=S, mask=mask, cu_seqlens=cu_seqlens
    )  # fmt: skip
    if reason is not None:
        raise ValueError(f"backend: got 'triton', expected a call that the kernels support: {reason}")
    from fastweight.kernels.op import scan_forward

    shift = rule.pairing == "next-latent"
    carried = key is not None and has_key is not None and shift
    gates = log_decay if log_decay is not None else lam
    S = None if S is None else S.float()
    floats = (q, k, v, beta, gates, S, key)
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in floats)
    regression = rule.objective == "regression"
    if mask is not None:
        k, v, beta, gates = (_hide(tensor, ~mask) for tensor in (k, v, beta, gates))
    o, state, *_ = scan_forward(
        q, k, v, beta, gates, S, key if carried else None, has_key if carried else None, mask, cu_seqlens,
        float(rule.eps), float(rule.decay_floor), shift, log_decay is not None, rule.ridge == "scaled",
        rule.step == "direct", regression and log_decay is not None, rule.timing == "read-before-write",
        rule.window, regression, save,
    )  # fmt: skip
    return o, state


def _hide(tensor: Any, hidden: Tensor) -> Any:
    """0 at masked tokens: they may hold anything, and 0 * NaN must not reach the memory."""
    if tensor is None:
        return None
    return tensor.masked_fill(hidden.reshape(*hidden.shape, *(1,) * (tensor.ndim - 2)), 0)
