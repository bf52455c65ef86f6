"""Runs Hopper kernels on a CPU: their own Python, over a language of PyTorch tensors, program after program.

`start` takes what kernels.start takes, for kernels in Gluon and for plain Triton ones that use few words. It shows what
kernels compute in whole tiles, which numbers they touch, and where what a device does at the same time would race
(memory.py). It does not show what a compiler makes of them: layouts, registers, the code of a warp.
"""

import inspect
import itertools
import types
from functools import cache
from typing import Any

import torch

from tests.machine.memory import Hazard
from tests.machine.units import LAUNCH, AsyncCopy, Descriptor, Mbarrier, Pointer, Program, Tma
from tests.machine.words import WORDS, tile

__all__ = ["Hazard", "start"]

LANGUAGE = types.SimpleNamespace(**WORDS)
MODULES = {"mbarrier": Mbarrier, "tma": Tma, "async_copy": AsyncCopy}


def _translated(value: Any) -> Any:
    """What a name in a kernel means here."""
    kind, name = type(value).__name__, getattr(value, "__name__", getattr(value, "name", ""))
    if hasattr(value, "fn") and kind.endswith(("JITFunction", "InterpretedFunction")):
        return device_function(value.fn)
    if kind == "dtype":
        return WORDS[name.replace("bf", "bfloat").replace("fp", "float")]
    if kind == "constexpr":
        return _constant(value.value)
    if isinstance(value, types.ModuleType):
        return MODULES.get(name.rpartition(".")[2], LANGUAGE)
    return WORDS[name] if callable(value) and name in WORDS else value


def _constant(value: Any) -> Any:
    """Layouts of shared memory by how they arrange, other layouts not at all."""
    kind = type(value).__name__
    if kind == "NVMMASharedLayout":
        return "tiled"
    if kind in ("SwizzledSharedLayout", "PaddedSharedLayout"):
        return "rows"
    return None if kind.endswith("Layout") else value


@cache
def device_function(function: Any) -> Any:
    """The same code over this language."""
    names = {name for name in function.__code__.co_names if name in function.__globals__}
    scope: dict[str, Any] = {"__builtins__": __builtins__}
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    scope |= {name: _translated(function.__globals__[name]) for name in names}
    return made


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value.detach())
    if type(value) is int:
        return tile(torch.tensor(value, dtype=torch.int32))
    return Descriptor(value) if hasattr(value, "block_shape") else value


def start(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options), one program after the other."""
    run = device_function(kernel.fn)
    known = inspect.signature(run).parameters
    given = [_argument(argument) for argument in arguments]
    named = {name: _translated(value) for name, value in options.items() if name in known}
    LAUNCH.grid, LAUNCH.writers, LAUNCH.readers = grid, {}, {}
    for number, ids in enumerate(itertools.product(*(range(size) for size in grid))):
        LAUNCH.program = Program(ids, number + 1)
        run(*given, **named)
        assert not LAUNCH.program.products, "ends with products not waited for"
        LAUNCH.program.memory.end()
