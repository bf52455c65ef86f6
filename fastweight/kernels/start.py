"""Launches a Triton kernel and remembers what was compiled, so that a repeated call skips Triton's look at arguments.

That look takes longer than some kernels run. A kernel that was compiled for arguments of the same kinds is taken again;
what Triton compiles for is a subset of what `_kinds` tells apart.

Trap: descriptors of one shape of block and one dtype are taken to have one layout in shared memory.
"""

from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_compiled: dict[tuple, tuple[Any, tuple, Any]] = {}  # the kernel is kept too, so that no other one gets its id


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton may compile differently for, argument by argument; in one loop because calls add up."""
    found: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or (kind is not int and isinstance(argument, Tensor)):
            found += (argument.dtype, argument.data_ptr() % 16)
        elif argument is None or kind is float:
            found += (kind,)
        elif kind is int or kind is bool:
            found += ((argument == 1, argument % 16 == 0, argument.bit_length() > 31),)
        else:
            found += ((argument.base.dtype, *argument.block_shape),)
    return found


def start(kernel: Any, grid: tuple[Any, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options); options are constants of the kernel and of its launch, always by name."""
    if not isinstance(kernel, JITFunction):  # the interpreter's
        kernel[grid](*arguments, **options)
        return
    key = (id(kernel), torch.cuda.current_device(), *options.items(), *_kinds(arguments))
    known = _compiled.get(key)
    if known is None:
        compiled: Any = kernel[grid](*arguments, **options)
        names = kernel.arg_names[len(arguments) :]
        _compiled[key] = compiled, tuple(options[name] for name in names), kernel
        return
    compiled, constants, _ = known
    compiled[(*grid, 1, 1)[:3]](*arguments, *constants)
