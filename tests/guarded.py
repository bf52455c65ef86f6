"""Triton's interpreter with a guard at every address: (a launch) -> the same launch, or the fault that a device hides.

Each pointer carries the number of the argument that it came from in its upper bits, so an address is held against that
very tensor, not against whatever memory lies there. A lane that is not masked off must stay inside. With `shadow` a
launch also keeps who wrote and who read every byte, and faults where two programs touch the same place and one of them
writes, since programs run in any order. `programs` runs some programs of a grid alone, at full size: tensors that
nobody touches cost no memory.

Traps: must be imported where Triton is interpreted (tests/interpreter.py). Tensors of a launch must be on the CPU.
Pointers keep their number as long as an offset stays within 2^47 bytes. Atomics are refused: no kernel has any that
this needs to know.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

TAG = np.uint64(48)
ADDRESS = np.uint64((1 << 48) - 1)
NOBODY, SEVERAL = -1, -2


class Fault(Exception):
    """An address outside its tensor, or a place that two programs of a launch share."""


@dataclass
class Span:
    """A tensor of a launch: its bytes, and per element who wrote and who read it."""

    name: str
    start: int
    stop: int
    size: int
    writer: np.ndarray | None = None
    reader: np.ndarray | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, shadow: bool) -> "Span":
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        start, size = tensor.data_ptr(), tensor.element_size()
        span = cls(name, start, start + last * size, size)
        if shadow:
            span.writer, span.reader = (np.full(last, NOBODY) for _ in range(2))
        return span


@dataclass
class Guard:
    """What a launch may touch, and the program that is running."""

    kernel: str
    shadow: bool
    spans: list[Span] = field(default_factory=list)
    program: tuple[int, int, int] = (0, 0, 0)
    number: int = 0

    def tagged(self, name: str, argument: Any) -> Any:
        """An argument as the interpreter takes it, its pointer tagged."""
        base = argument.base if isinstance(argument, interpreter.TensorDescriptor) else argument
        given = interpreter._implicit_cvt(argument)
        if isinstance(base, torch.Tensor):
            self.spans.append(Span.of(name, base, self.shadow))
            handle = given.handle.base if base is not argument else given.handle
            handle.data = handle.data | np.uint64(len(self.spans) << 48)
        return given

    def fault(self, what: str) -> Fault:
        return Fault(f"{self.kernel}, program {self.program}: {what}")

    def check(self, pointers: np.ndarray, mask: np.ndarray, writes: bool) -> np.ndarray:
        """The addresses without their tags, after all kept ones were found to be inside."""
        pointers, mask = np.broadcast_arrays(np.asarray(pointers, np.uint64), np.asarray(mask, bool))
        kept = pointers[mask]
        tags = kept >> TAG
        for tag in np.unique(tags):
            self._check_span(int(tag), (kept[tags == tag] & ADDRESS).astype(np.int64), writes)
        return pointers & ADDRESS

    def _check_span(self, tag: int, at: np.ndarray, writes: bool) -> None:
        verb = "writes" if writes else "reads"
        if not 0 < tag <= len(self.spans):
            raise self.fault(f"{verb} through a pointer that is no argument's")
        span = self.spans[tag - 1]
        outside = (at < span.start) | (at + span.size > span.stop)
        if outside.any():
            offset = (int(at[outside][0]) - span.start) // span.size
            elements = (span.stop - span.start) // span.size
            raise self.fault(f"{verb} {span.name}[{offset}], which has {elements} elements ({outside.sum()} lanes)")
        if span.writer is not None:
            self._check_share(span, (at - span.start) // span.size, writes)

    def _check_share(self, span: Span, at: np.ndarray, writes: bool) -> None:
        assert span.writer is not None, "asked for with the shadow only"
        assert span.reader is not None, "made with the writers"
        for others, verb in ((span.writer, "wrote"), (span.reader, "reads")):
            if verb == "reads" and not writes:
                continue
            foreign = (others[at] != NOBODY) & (others[at] != self.number)
            if foreign.any():
                place = int(at[foreign][0])
                ours = "writes" if writes else "reads"
                raise self.fault(f"{ours} {span.name}[{place}], which program number {others[place]} {verb}")
        if writes:
            span.writer[at] = self.number
        else:
            fresh = (span.reader[at] == NOBODY) | (span.reader[at] == self.number)
            span.reader[at] = np.where(fresh, self.number, SEVERAL)


@dataclass
class Guards:
    """How launches are run inside `guarded`, and which kernels were."""

    shadow: bool
    programs: Callable[[str, tuple[int, int, int]], Iterable[tuple[int, int, int]]]
    ran: dict[str, int] = field(default_factory=dict)
    now: Guard | None = None

    def launch(self, executor: Any, *arguments: Any, **options: Any) -> None:
        """What GridExecutor.__call__ does for tensors of the CPU, guarded."""
        names = inspect.getfullargspec(executor.fn).args
        options = {name: value for name, value in options.items() if name in names}
        guard = self.now = Guard(executor.fn.__name__, self.shadow)
        scope = interpreter._patch_lang(executor.fn)
        try:
            given = inspect.getcallargs(executor.fn, *arguments, **options)
            given = {n: a if n in executor.constexprs else guard.tagged(n, a) for n, a in given.items()}
            asked: Any = executor.grid(given) if callable(executor.grid) else executor.grid
            grid: Any = (*asked, 1, 1)[:3]
            interpreter.interpreter_builder.set_grid_dim(*grid)
            for x, y, z in self.programs(guard.kernel, grid):
                guard.program, guard.number = (x, y, z), (x * grid[1] + y) * grid[2] + z
                interpreter.interpreter_builder.set_grid_idx(x, y, z)
                executor.fn(**given)
                self.ran[guard.kernel] = self.ran.get(guard.kernel, 0) + 1
        finally:
            scope.restore()
            self.now = None

    def guard(self) -> Guard:
        assert self.now is not None, "memory is touched inside a launch"
        return self.now


def every(_kernel: str, grid: tuple[int, int, int]) -> Iterable[tuple[int, int, int]]:
    """All programs, the last one first: an order that no kernel may rely on."""
    return reversed(list(np.ndindex(grid)))


@triton.jit
def copy_shifted(x, y, shift, stride):
    """64 numbers a program, `stride` apart, from `shift` places on: what the guard is tried on."""
    i = tl.arange(0, 64) + tl.program_id(0) * stride
    tl.store(y + i, tl.load(x + i + shift))


@contextlib.contextmanager
def guarded(shadow: bool = True, programs: Any = every):
    """Inside it every launch is guarded; yields what has run, by kernel."""
    builder: Any = type(interpreter.interpreter_builder)
    executor: Any = interpreter.GridExecutor
    guards = Guards(shadow, programs)
    before = executor.__call__, builder.create_masked_load, builder.create_masked_store

    def load(self, pointers, mask, other, *rest):
        at = guards.guard().check(pointers.data, mask.data, writes=False)
        return before[1](self, interpreter.TensorHandle(at, pointers.dtype), mask, other, *rest)

    def store(self, pointers, value, mask, *rest):
        at = guards.guard().check(pointers.data, mask.data, writes=True)
        return before[2](self, interpreter.TensorHandle(at, pointers.dtype), value, mask, *rest)

    executor.__call__ = lambda self, *a, **o: guards.launch(self, *a, **o)
    builder.create_masked_load, builder.create_masked_store = load, store
    try:
        yield guards.ran
    finally:
        executor.__call__, builder.create_masked_load, builder.create_masked_store = before


assert knobs.runtime.interpret, "guarded launches need TRITON_INTERPRET=1 before Triton is imported"
