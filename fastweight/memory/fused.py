"""The op through the Triton kernels: when they can serve a call, and the state around them.

A kernel takes the inputs as they are (no casts, no shifted copy of k) and returns o and S. What else the next state
holds, its last key and window tail, is copied from the last few tokens. Nothing of Triton is imported before a call.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from fastweight.memory.inputs import Around, Inputs
from fastweight.memory.rules import Rule
from fastweight.memory.state import State
from fastweight.memory.writes import pair

_log = logging.getLogger("fastweight")


def no_kernel(inputs: Inputs, rule: Rule, around: Around) -> str | None:
    """Why the kernels cannot serve this call, or None if they can."""
    from fastweight.kernels import dispatch

    q, k, v, beta, lam, log_decay = inputs
    if v.numel() == 0:
        return "there is nothing to compute"
    return dispatch.supported(
        q, k, v, beta, lam, rule,
        log_decay=log_decay, key=around.key, mask=around.mask, cu_seqlens=around.cu_seqlens,
    )  # fmt: skip


def attend(
    inputs: Inputs, rule: Rule, around: Around, state: State | None, output_final_state: bool
) -> tuple[Tensor, State | None]:
    """o in v's dtype, and the State after the last token of every sequence.

    The caller has asked `no_kernel`. state: what `around` carries in, as a State of the right dtype; None where that is
    nothing, for which the kernels have a leaner variant.
    """
    from fastweight.kernels import dispatch

    q, k, v, beta, lam, log_decay = inputs
    held = None if around.key is None else state
    o, S = dispatch.scan(
        q, k, v, beta, lam, rule,
        log_decay=log_decay,
        S=None if state is None else state.S,
        key=None if held is None else held.key,
        has_key=None if held is None else held.has_key,
        tail=None if held is None else (held.tail_x, held.tail_y, held.tail_count),
        mask=around.mask, cu_seqlens=around.cu_seqlens, checked=True,
    )  # fmt: skip
    if not output_final_state:
        return o, None
    state = State.fresh(S, rule, num_key_heads=k.shape[2]) if state is None else state
    return o, _boundary(k, v, rule, state, around.mask, around.cu_seqlens)._replace(S=S)


def no_step(inputs: Inputs, rule: Rule, state: State) -> str | None:
    """Why the decoding kernel cannot serve this one token, or None if it can."""
    from fastweight.kernels import dispatch

    if inputs.v.numel() == 0:
        return "there is nothing to compute"
    q, k, v, beta, lam, log_decay = inputs.map(lambda t: t[:, 0])
    return dispatch.step_supported(q, k, v, beta, lam, rule, log_decay=log_decay, parts=(state.S, *state[2:]))


def step(
    inputs: Inputs, rule: Rule, state: State, mask: Tensor | None, tickets: Tensor | None = None
) -> tuple[Tensor, State]:
    """One token: o [B, 1, H, V] in v's dtype, and the next State; with `tickets` (see dispatch.step) `state` itself."""
    from fastweight.kernels import dispatch

    q, k, v, beta, lam, log_decay = inputs.map(lambda t: t[:, 0])
    mask = None if mask is None else mask[:, 0]
    o, parts = dispatch.step(
        q, k, v, beta, lam, rule, (state.S, *state[2:]), log_decay=log_decay, mask=mask, tickets=tickets
    )  # fmt: skip
    return o[:, None], State(parts[0], state.z, *parts[1:])


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
