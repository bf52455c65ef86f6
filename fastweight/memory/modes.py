"""The modes of torch that a call may be made in: autocast, tracing without values, the transforms of torch.func, and
devices without float64.

Each is asked about in one place, here. Traps: the meta device has no autocast, and asking it raises; a fake tensor says
that it lies on a CPU and still has no values; torch.func takes a hand-written backward for an error of its own.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor

WITHOUT_DOUBLE = ("mps",)


def doubled(tensor: Tensor) -> Tensor:
    """In float64, or in float32 on a device that has none: strong decay keeps fewer of its digits there."""
    return tensor.float() if tensor.device.type in WITHOUT_DOUBLE else tensor.double()


def autocasts(device: str) -> bool:
    """Whether autocast is on for a kind of device."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Nothing where autocast is off anyway: entering and leaving it costs 10 us of a call's 100."""
    if torch.compiler.is_compiling() or autocasts(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def has_values(tensor: Tensor) -> bool:
    """Whether its values may steer the work: under torch.compile that is a graph break; meta and fake tensors have
    none."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and tensor.device.type != "meta"


def may_look(tensor: Tensor) -> bool:
    """`has_values`, for what is only worth while where it costs no synchronisation."""
    return tensor.device.type == "cpu" and has_values(tensor)


def as_new(written: Tensor) -> Tensor:
    """A tensor that a forward of an autograd.Function has written in place and returns.

    torch.compile of torch 2.11 sends zeros back through such a one (pytorch issue 180642): it takes what the tensor was
    before for a second result, and that for the first. A copy, which compilers leave out, has no such twin.
    """
    return written.clone() if torch.compiler.is_compiling() else written


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp, ...) is at work around the call."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
