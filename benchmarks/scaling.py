"""One op at growing T -> bytes kept for the backward, peak memory, and time per token; all should be flat per token.

Bytes kept are counted through the saved-tensor hooks of autograd, one count per storage. Peak memory is the growth of
the process's high-water mark, which also sees what the hooks cannot (temporaries, tensors kept elsewhere).

`Allocations` follows every tensor that an operator hands out, also of fake tensors, whose steps cost nothing: what a
device will need, before there is one.

Traps: the high-water mark is a Linux facility and reads 0 elsewhere; the allocator keeps freed pages, so they are
handed back first.
"""

import contextlib
import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps alive after `forward` for its backward."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()  # its result is dropped; the storages were alive together while it ran
    return sum(storages.values())


def _high_water_mark() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def peak_bytes(call: Callable[[], object]) -> int:
    """Growth of the process's peak resident memory during `call`; 0 where the system does not tell."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the mark falls back to what is resident now
    except OSError:
        return 0
    before = _high_water_mark()
    call()
    return max(_high_water_mark() - before, 0)


class Allocations(TorchDispatchMode):
    """Inside, `live` is the sum of the storages that operators have made and that are still there, `peak` its maximum;
    what operators allocate and free inside is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        name = storage._cdata
        if name in self._known:
            return
        self._known[name] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, name)

    def _forget(self, name: int) -> None:
        self.live -= self._known.pop(name)


def exponent(lengths: Sequence[int], totals: Sequence[float]) -> float:
    """Least-squares p of total ~ T**p."""
    xs = [math.log(length) for length in lengths]
    ys = [math.log(max(total, 1e-12)) for total in totals]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)
