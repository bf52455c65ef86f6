"""What a step of one rank costs the host, on any machine: `python -m benchmarks.parallel_host`.

As benchmarks/host.py, nothing is launched, and nothing is sent either: the rank is the second of two in a group that
only pretends. Counted are launches, calls of torch's operators (allocations and views among them), messages and bytes.

Trap: the operators of one process are counted around its two registered ones, not in them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_cases import OPS, Shape, inputs, public
from benchmarks.host import cost, no_launches
from fastweight.parallel import context_parallel

SHAPE: Shape = (1, 4096, 2, 64)
NAMES = ("falcon-1", "gated delta rule", "falcon-1a", "linear attention", "falcon-3a", "falcon-2a")
CALLS = 50


class Step(NamedTuple):
    """Of one forward + backward."""

    launches: int
    operators: int
    messages: int
    bytes: int
    microseconds: float


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def pretended() -> Iterator[None]:
    """The second of two processes; what it would receive is whatever memory holds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def step(name: str, shared: bool, calls: int = CALLS) -> Step:
    """An op of the GPU benchmark, by one process or as a rank of two; inside `no_launches` and `pretended`."""
    given = inputs(OPS[name], SHAPE, device="cpu")
    pull = torch.ones_like(given["v"])

    def train() -> None:
        for tensor in given.values():
            if tensor is not None:
                tensor.grad = None
        public(OPS[name], given, backend="triton").backward(pull)

    with context_parallel() if shared else contextlib.nullcontext() as traffic:
        found = cost(train, calls)
        before: Any = (traffic.messages, traffic.bytes) if traffic else (0, 0)
        with _Count() as count:
            train()
        sent = (traffic.messages - before[0], traffic.bytes - before[1]) if traffic else (0, 0)
    return Step(found.launches, count.number, *sent, found.microseconds)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':16s} {'one process':>36s} {'a rank of two':>62s}")
    with no_launches(), pretended():
        for name in NAMES:
            alone, shared = step(name, False), step(name, True)
            texts = [
                f"{s.launches:2d} launches {s.operators:3d} operators {s.microseconds:6.0f} us" for s in (alone, shared)
            ]
            print(f"{name:16s} {texts[0]} | {texts[1]} {shared.messages} messages {shared.bytes:,} bytes", flush=True)


if __name__ == "__main__":
    main()
