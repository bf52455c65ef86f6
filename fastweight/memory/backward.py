"""The decorator that every hand-written backward wears.

Two traps it closes. Autocast may be on where loss.backward() is called, and would run the products in bfloat16. And a
second derivative would silently lose the share that went through here: once_differentiable does not help, since its
error node hangs on fresh leaves that torch.autograd.grad walks around. So with grad mode on, the results are tied to
everything they were computed from by a node whose own backward raises.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from fastweight.memory.modes import without_autocast


def exact_backward(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Runs a backward in the precision of its tensors, and lets nobody differentiate through it again."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), without_autocast(grads[0].device.type):
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return results
        return _Once.apply(len(results), *results, *ctx.saved_tensors, *grads)  # type: ignore[return-value]

    return run


class _Once(torch.autograd.Function):
    """Results of a backward, tied to its inputs."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "a hand-written backward cannot be differentiated again; form='recurrent' can, unless a window's top "
            "eigenvalue sets the step"
        )
