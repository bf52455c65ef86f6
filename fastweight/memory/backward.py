"""The decorator that every hand-written backward wears.

Two traps it closes: autocast may be on where loss.backward() is called, and would run the products in bfloat16; and a
second derivative would silently treat what the backward saved as constants.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def exact_backward(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., Any]:
    """Runs a backward in the precision of its tensors, and refuses to be differentiated again."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grads[0].device.type, enabled=False):
            return backward(ctx, *grads)

    return once_differentiable(run)
