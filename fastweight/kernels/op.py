"""The scan as two registered operators, forward and backward, with shapes for tracing and an autograd rule.

Operators see tensors and plain numbers only, so torch.compile keeps a call whole and CUDA graphs can capture it. One
pair serves all classes: `regression` and the axes of beta say which, and what a class does not keep is empty. `scan`
calls the operator, or in eager mode the same functions without the dispatcher, which costs more than a small scan.

Saved for the backward pass, per token and value head, besides the inputs: 8 bytes of step and log-decay, V elements of
residual and 64 of inverse (regression only), and K V / 64 of chunk states (K V / (65 - R) with a window of R). With
`rebuild` (regression only) of the chunk states only each sequence's first: the rest is made again from the residuals.
Regression over a window works in blocks of 48 to 60 tokens; it keeps their maps, 2^14 elements, and 3 + R facts of
tokens, but no residual and no inverse.

Traps: an operator may not return None or one of its inputs, so what is not wanted comes back empty, and states are new.
"""

from typing import Any

import torch
from torch import Tensor

from fastweight.kernels import (
    launch,
    launch_additive,
    launch_columns,
    launch_solve,
    launch_solve_columns,
    launch_windows,
)
from fastweight.kernels.eager import nobody_listens

TENSORS = 10  # that an operator takes before its numbers and flags


def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None, state0: Tensor | None,
    key0: Tensor | None, has_key: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
    eps: float, floor: float, shift: bool, raw: bool, scaled: bool, direct: bool, decayed: bool, before: bool,
    window: int, regression: bool, rebuild: bool, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o, final S, and what the backward pass keeps: steps (energies, with a gain per column), log-decays, chunk states,
    inverse, residual."""
    plan = launch.Plan(eps, floor, shift, raw, scaled, direct, decayed, before, window, rebuild)
    given = (q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, save)
    with launch.device_of(v):
        if regression and window > 1:
            o, state1, step, decay, facts, maps, states = launch_windows.forward(plan, *given)
            return o, state1, step, decay, states, maps, facts
        if regression and _by_column(beta):
            o, state1, step, residual, states = launch_solve_columns.forward(plan, *given)
            return o, state1, step, step.new_empty(0), states, v.new_empty(0), residual
        if regression:
            o, state1, step, decay, inverse, residual, states = launch_solve.forward(plan, *given)
            return o, state1, step, decay, states, inverse, residual
        if _by_column(beta):
            o, state1, step, states = launch_columns.forward(plan, *given)
            decay = step.new_empty(0)
        else:
            o, state1, step, decay, states = launch_additive.forward(plan, *given)
    return o, state1, step, decay, states, v.new_empty(0), v.new_empty(0)


scan_forward = torch.library.custom_op("fastweight::scan_forward", _forward, mutates_args=())


def _by_column(beta: Tensor | None) -> bool:
    return beta is not None and beta.ndim == 4


@scan_forward.register_fake
def _(q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, *flags):
    B, T, H, V = v.shape
    K = k.shape[-1]
    window, regression, rebuild, save = flags[-4:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slid = regression and window > 1
    block = launch_windows.block_of(k, v, key0, mask, rebuild, window) if slid else None
    stride = 65 - window if block is None else block.tokens
    slots = B * ((T + stride - 1) // stride) if cu_seqlens is None else T // stride + N
    wide = torch.float32
    column = _by_column(beta)
    return (
        torch.empty_like(v, memory_format=torch.contiguous_format),
        v.new_empty(N, H, K, V, dtype=wide),
        v.new_empty(k.shape[2] if column and regression else H, 0 if column and not save else B * T, dtype=wide),
        v.new_empty(0, dtype=wide) if column else v.new_empty(H, B * T, dtype=wide),
        v.new_empty((N if rebuild else slots) if save else 0, H, K, V),
        launch_windows.empty_maps(v, block, save, slots)
        if block is not None
        else v.new_empty(*((slots, H, 64, 64) if regression and not column else (0,))),
        launch_windows.empty_facts(v, window)
        if slid
        else v.new_empty(*((B * T if save else 0, H, V) if regression else (0,))),
    )


def _backward(
    d_o: Tensor, d_state1: Tensor | None, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, lam: Tensor | None,
    key0: Tensor | None, has_key: Tensor | None, mask: Tensor | None, cu_seqlens: Tensor | None,
    step: Tensor, decay: Tensor, states: Tensor, inverse: Tensor, residual: Tensor,
    eps: float, floor: float, shift: bool, raw: bool, scaled: bool, direct: bool, decayed: bool, before: bool,
    window: int, regression: bool, rebuild: bool, want_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, beta, lam, the initial S and the initial key; empty where there is none."""
    plan = launch.Plan(eps, floor, shift, raw, scaled, direct, decayed, before, window, rebuild)
    given = (d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens)
    with launch.device_of(v):
        if regression and window > 1:
            return launch_windows.backward(plan, *given, (step, decay, residual, inverse, states), want_state)
        if regression and _by_column(beta):
            return launch_solve_columns.backward(plan, *given, (step, residual, states), want_state)
        if regression:
            return launch_solve.backward(plan, *given, (step, decay, inverse, residual, states), want_state)
        if _by_column(beta):
            return launch_columns.backward(plan, *given, (step, states), want_state)
        return launch_additive.backward(plan, *given, (step, decay, states), want_state)


scan_backward = torch.library.custom_op("fastweight::scan_backward", _backward, mutates_args=())


@scan_backward.register_fake
def _(d_o, d_state1, q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, *rest):
    B, _T, H, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def like(tensor):
        if tensor is None:
            return v.new_empty(0, dtype=torch.float32)
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    state = v.new_empty(N, H, k.shape[-1], V, dtype=torch.float32) if rest[-1] else like(None)
    return like(q), like(k), like(v), like(beta), like(lam), state, like(key0)


def _keep(ctx, inputs, output) -> None:
    q, k, v, beta, lam, state0, key0, has_key, mask, cu_seqlens, *flags = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, beta, lam, key0, has_key, mask, cu_seqlens, *output[2:])
    ctx.flags = flags[:-1]
    ctx.has_state = state0 is not None


def _gradients(ctx, d_o, d_state1, *_unused):
    return *_of_tensors(ctx, d_o, d_state1), *[None] * len(ctx.flags), None


def _of_tensors(ctx, d_o, d_state1):
    """Gradients of the tensors that the operator takes."""
    q, k, v, beta, lam, key0, *rest = ctx.saved_tensors
    if d_o is None:
        d_o = torch.zeros_like(v)
    # Whoever would differentiate again meets an error in the operator, which the plain function would leave out.
    once = nobody_listens() and not torch.is_grad_enabled()
    backward: Any = _backward if once else scan_backward
    d_q, d_k, d_v, d_beta, d_lam, d_state0, d_key0 = backward(
        d_o, d_state1, q, k, v, beta, lam, key0, *rest, *ctx.flags, ctx.has_state
    )
    return (
        d_q,
        d_k,
        d_v,
        None if beta is None else d_beta,
        None if lam is None else d_lam,
        d_state0 if ctx.has_state else None,
        None if key0 is None else d_key0,
        None,
        None,
        None,
    )


scan_forward.register_autograd(_gradients, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """What `scan_forward` and its autograd rule do, without the dispatcher: (tensors, flags) -> o and the final S.

    `forward` takes ctx: with a setup_context of its own, PyTorch reads the signature at every call, for 0.1 ms. Flags
    come as one argument and nothing but results is returned, because each argument and each result costs time too.
    """

    @staticmethod
    def forward(ctx, *given):  # pyright: ignore[reportIncompatibleMethodOverride]
        *tensors, flags = given
        inputs = (*tensors, *flags)
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx, d_o, d_state1):  # pyright: ignore[reportIncompatibleMethodOverride]
        return *_of_tensors(ctx, d_o, d_state1), None


def scan(*given) -> tuple[Tensor, Tensor]:
    """o and the final S, differentiable once; takes what `scan_forward` takes."""
    if not nobody_listens():
        return scan_forward(*given)[:2]
    if given[-1]:
        return _Eager.apply(*given[:TENSORS], given[TENSORS:])  # pyright: ignore[reportReturnType]
    return _forward(*given)[:2]
