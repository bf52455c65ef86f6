"""Kernels compiled for Hopper where there is none: (a call) -> what Triton made of every kernel that it starts.

`start` takes what kernels.start takes, compiles and runs nothing, so what a call gives is not to be looked at. It shows
what the machine of tests/machine leaves to the compiler: instructions, registers, what the assembler adds.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from tests.kernel_harness import Case, kernel, make, outcome, surroundings
from tests.machine_code import disassemble

HOPPER = GPUTarget("cuda", 90, 32)
HALF_OF_A_MULTIPROCESSOR = 115_712  # bytes of shared memory with which two programs fit


class Compiler:
    """What was made, by module and name of the kernel, of those that match."""

    def __init__(self, wanted: str = "") -> None:
        self.wanted, self.made = wanted, {}

    def start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        if not re.search(self.wanted, name) or name in self.made:
            return
        backend: Any = make_backend(HOPPER)
        known: Any = options | {"debug": False, "instrumentation_mode": ""}
        bound, kinds, rest = create_function_from_signature(kernel.signature, kernel.params, backend)(
            *arguments, **known
        )
        chosen, signature, constants, attributes = kernel._pack_args(backend, known, bound, kinds, rest)
        source: Any = GluonASTSource if kernel.is_gluon() else ASTSource
        source = source(kernel, signature, constants, attributes)
        self.made[name] = compile(source, target=HOPPER, options=chosen.__dict__)


def made_of(
    test: Case, wanted: str, hosts: Iterable[Any], monkeypatch: Any, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Of the kernels that a call and its backward pass start through these modules, those that match."""
    compiler = Compiler(wanted)
    for host in hosts:
        monkeypatch.setattr(host, "start", compiler.start)
    inputs, around = make(test, dtype, "cpu"), surroundings(test, "cpu")
    B, T, _, H, K, V = test.shape
    N = B if test.cuts is None else len(test.cuts) - 1
    outcome(kernel, test, inputs, around, (torch.ones(B, T, H, V), torch.ones(N, H, K, V)))
    return compiler.made


def waits(compiled: Any) -> tuple[list[str], list[str]]:
    """How many products may go on at each wait for some: as the kernel says, and as the assembler made it."""
    said = re.findall(r"wgmma\.wait_group\S* (\d+)", compiled.asm["ptx"])
    made = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", disassemble(compiled.asm["cubin"]))
    return said, made
