"""The scan as two registered operators, forward and backward, with shapes for tracing and the autograd rule between them.

Operators see tensors and plain numbers only, so torch.compile keeps a call whole and CUDA graphs can capture it.
Traps: an operator may not return None or one of its inputs, so what is not wanted comes back empty, and states are new.
"""

import torch
from torch import Tensor

from fastweight.kernels.launch import Plan, backward_solve, forward_solve

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("fastweight::solve_forward", mutates_args=())
def solve_forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, state0: Tensor | None,
    key0: Tensor | None, has_key: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
    eps: float, floor: float, shift: bool, raw: bool, scaled: bool, direct: bool, decayed: bool, before: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, final S, and what the backward pass keeps: eta, log-decay, inverse, residual, chunk states."""
    plan = Plan(eps, floor, shift, raw, scaled, direct, decayed, before)
    return forward_solve(plan, q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save)


@solve_forward.register_fake
def _(q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, *flags):
    B, T, H, V = v.shape
    K = k.shape[-1]
    save = flags[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = B * ((T + 63) // 64) if cu_seqlens is None else T // 64 + N
    wide = torch.float32
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        v.new_empty(N, H, K, V, dtype=wide),
        v.new_empty(H, B * T, dtype=wide),
        v.new_empty(H, B * T, dtype=wide),
        v.new_empty(slots, H, 64, 64),
        v.new_empty(B * T if save else 0, H, V),
        v.new_empty(slots if save else 0, H, K, V),
    )


@torch.library.custom_op("fastweight::solve_backward", mutates_args=())
def solve_backward(
    d_o: Tensor, d_state1: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None,
    key0: Tensor | None, has_key: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
    eta: Tensor, decay: Tensor, inverse: Tensor, residual: Tensor, states: Tensor,
    eps: float, floor: float, shift: bool, raw: bool, scaled: bool, direct: bool, decayed: bool, before: bool,
    want_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, beta, lam, the initial S and the initial key; empty where there is none."""
    plan = Plan(eps, floor, shift, raw, scaled, direct, decayed, before)
    saved = (eta, decay, inverse, residual, states)
    return backward_solve(plan, d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, saved, want_state)


@solve_backward.register_fake
def _(d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, eta, decay, inverse, residual, states, *flags):
    B, T, H, V = v.shape
    K = k.shape[-1]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    nothing = v.new_empty(0, dtype=torch.float32)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
        torch.empty_like(v, memory_format=torch.contiguous_format),
        nothing if beta is None else torch.empty_like(beta, memory_format=torch.contiguous_format),
        nothing.clone() if lam is None else torch.empty_like(lam, memory_format=torch.contiguous_format),
        v.new_empty(N, H, K, V, dtype=torch.float32) if flags[-1] else nothing.clone(),
        nothing.clone() if key0 is None else torch.empty_like(key0, memory_format=torch.contiguous_format),
    )


def _keep(ctx, inputs, output) -> None:
    q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, *flags = inputs
    _o, _state1, eta, decay, inverse, residual, states = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, eta, decay, inverse, residual, states
    )
    ctx.flags = flags[:-1]
    ctx.has_state = state0 is not None


def _gradients(ctx, d_o, d_state1, *_unused):
    q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, eta, decay, inverse, residual, states = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(v)
    d_q, d_k, d_v, d_beta, d_lam, d_state0, d_key0 = solve_backward(
        d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, eta, decay, inverse, residual, states,
        *ctx.flags, ctx.has_state,
    )  # fmt: skip
    return (
        d_q, d_k, d_v,
        None if beta is None else d_beta,
        None if lam is None else d_lam,
        d_state0 if ctx.has_state else None,
        None if key0 is None else d_key0,
        *([None] * 12),
    )  # fmt: skip


solve_forward.register_autograd(_gradients, setup_context=_keep)
