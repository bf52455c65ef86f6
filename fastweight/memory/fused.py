"""The op through the Triton kernels: when they can serve a call, and the state around them.

A kernel takes the inputs as they are (no casts, no shifted copy of k) and returns o and S. What else the next state
holds, its last key and window tail, is copied from the last few tokens. Nothing of Triton is imported before a call.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from fastweight.memory.rules import Rule
from fastweight.memory.state import State
from fastweight.memory.writes import pair

_log = logging.getLogger("fastweight")


def no_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    log_decay: Tensor | None,
    rule: Rule,
    initial_state: "State | Tensor | None",
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> str | None:
    """Why the kernels cannot serve this call, or None if they can."""
    from fastweight.kernels import dispatch

    if v.numel() == 0:
        return "there is nothing to compute"
    if any(t is not None and t.dtype == torch.float64 for t in (beta, lam, log_decay)):
        return "float64 gates are computed by torch"
    continues = isinstance(initial_state, State) and rule.window > 1
    return dispatch.supported(
        q, k, v, beta, lam, rule, log_decay=log_decay, mask=mask, cu_seqlens=cu_seqlens, continues=continues
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    log_decay: Tensor | None,
    rule: Rule,
    state: State,
    output_final_state: bool,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, State | None]:
    """o in v's dtype, and the State after the last token of every sequence."""
    from fastweight.kernels import dispatch

    o, S = dispatch.scan(
        q, k, v, beta, lam, rule,
        log_decay=log_decay, S=state.S, key=state.key, has_key=state.has_key, mask=mask, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    if not output_final_state:
        return o, None
    return o, _boundary(k, v, rule, state, mask, cu_seqlens)._replace(S=S)


def _boundary(k: Tensor, v: Tensor, rule: Rule, state: State, mask: Tensor | None, cu_seqlens: Tensor | None) -> State:
    """Last key and window tail. Without a mask the last R tokens tell all: R - 1 pairs, whose keys lie one before."""
    R, T = rule.window, v.shape[1]
    if cu_seqlens is not None:
        ends, lengths = cu_seqlens[1:].long(), cu_seqlens.diff().long()
        reach = R if mask is None else int(lengths.max())
        offset = torch.arange(-reach, 0, device=v.device)
        place = (ends[:, None] + offset).clamp(min=0)
        inside = offset >= -lengths[:, None]
        k, v, mask = k[0][place], v[0][place], inside if mask is None else inside & mask[0][place]
    elif mask is None and T > R:
        k, v = k[:, -R:], v[:, -R:]
    return pair(k.to(state.key.dtype), v.to(state.S.dtype), rule, state, mask)[1]


@cache
def tell(backend: str, device: str, reason: str) -> None:
    """Says once a process what "auto" chose, and why."""
    _log.info("backend 'auto' chose %s on %s%s", backend, device, f": {reason}" if reason else "")
