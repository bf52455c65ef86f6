"""A kernel and what it is launched with -> its code for Hopper, made on any machine, and what shows in it.

Nothing is run: tensors say what they are, and may lie anywhere.
"""

import re
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import mangle_type

TARGET = GPUTarget("cuda", 90, 32)


def compiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What Triton compiles for kernel[grid](*arguments, **options) where memory is aligned to 16 bytes."""
    known = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = known[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(at,)] = "constexpr", value
        else:
            signature[parameter.name] = mangle_type(value)
            if isinstance(value, torch.Tensor):
                attributes[(at,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    rest = {name: value for name, value in options.items() if name not in kernel.arg_names and value is not None}
    return triton.compile(source(kernel, signature, constants, attributes), target=TARGET, options=rest)


def spills(sass: str) -> int:
    """How many instructions move registers to and from memory."""
    return len(re.findall(r"\b(?:STL|LDL)\b", sass))


def products_in_turn(sass: str) -> bool:
    """Whether the assembler makes each product of the matrix units wait for the one before, which it does where it
    finds other instructions in the way."""
    begins, products = (len(re.findall(name, sass)) for name in (r"WARPGROUP\.ARRIVE", r"\bHGMMA\b"))
    return begins >= products > 1
