"""What a call of the kernels costs the host, on any machine: `python -m benchmarks.host` prints microseconds and calls.

Everything runs but the launches themselves, which are counted and replaced by nothing, on small tensors in main memory;
the Hopper kernels are taken as on their device. Microseconds are the least of many calls and belong to one processor;
the number of function calls, which a test bounds, does not. Real launches add about 10 us, tensor descriptors 3 us.
"""

import contextlib
import cProfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from benchmarks.gpu_cases import OPS, THEIRS, Shape, inputs, public
from fastweight.kernels import dispatch, launch_hopper, launch_hopper_gradient, start

SHAPE: Shape = (1, 128, 2, 64)
CALLS = 500


class Cost(NamedTuple):
    """Of one call: launches, function calls of Python and of its extensions, and the least microseconds."""

    launches: int
    calls: int
    microseconds: float


class _Nothing:
    """A compiled kernel whose launch only counts."""

    count = 0

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch

    def _launch(self, *_arguments: Any) -> None:
        _Nothing.count += 1


@contextlib.contextmanager
def no_launches() -> Iterator[None]:
    """Kernels do nothing, and a call is taken as if it were on Hopper; what comes out is not computed."""
    with contextlib.ExitStack() as stack:
        nothing = _Nothing()
        for target, name, value in (
            (JITFunction, "__getitem__", lambda self, grid: lambda *_, **__: nothing),
            (torch.cuda, "current_device", lambda: 0),
            (dispatch, "machine_reason", lambda device: None),
            (launch_hopper, "available", lambda device: True),
            (launch_hopper_gradient, "available", lambda device: True),
            (start, "_compiled", {}),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def cost(run: Callable[[], Any], calls: int = CALLS) -> Cost:
    run()
    before = _Nothing.count
    run()
    launches, best = _Nothing.count - before, float("inf")
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    profile = cProfile.Profile()
    profile.runcall(run)
    return Cost(launches, sum(entry.callcount for entry in profile.getstats()), 1e6 * best)


def both(name: str, calls: int = CALLS) -> tuple[Cost, Cost]:
    """Of an op of the GPU benchmark: its forward without gradients, and forward + backward through autograd."""
    given = inputs(OPS[name], SHAPE, device="cpu")
    pull = torch.ones_like(given["q"])  # as o

    def forward() -> None:
        with torch.no_grad():
            public(OPS[name], given, backend="triton")

    def train() -> None:
        for tensor in given.values():
            if tensor is not None:
                tensor.grad = None
        public(OPS[name], given, backend="triton").backward(pull)

    return cost(forward, calls), cost(train, calls)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':18s} {'forward':>28s} {'forward + backward':>28s}")
    with no_launches():
        for name in (name for name in OPS if name not in THEIRS):
            texts = [f"{c.launches} launches {c.calls:4d} calls {c.microseconds:4.0f} us" for c in both(name)]
            print(f"{name:18s} {texts[0]:>28s} {texts[1]:>28s}", flush=True)


if __name__ == "__main__":
    main()
