"""Which kernels a forward + backward on the GPU consists of: `python -m benchmarks.gpu_kernels falcon-3 1`.

Labels and numbers of shapes are those of benchmarks.gpu_cases, as many pairs of them as wanted. Device milliseconds of
one step by kernel, largest first, from PyTorch's profiler; compare them within a run, not with the benchmark's times.
"""

import sys
from collections.abc import Iterable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_cases import OPS, SHAPES, inputs, public
from benchmarks.gpu_worker import train

STEPS = 3
MOST = 12  # lines
LEAST = 1e-3  # milliseconds of a kernel that is shown


def table(times: Iterable[tuple[str, float, int]]) -> list[str]:
    """(kernel, microseconds of all steps, calls of all steps) -> lines, the sum first."""
    rows = sorted(((time / STEPS / 1e3, calls / STEPS, name) for name, time, calls in times), reverse=True)
    lines = [f"{time:8.3f} ms  x{calls:.0f}  {name}" for time, calls, name in rows[:MOST] if time >= LEAST]
    return [f"{sum(time for time, *_ in rows):8.3f} ms", *lines]


def kernels(label: str, number: int) -> list[str]:
    """Lines for an op at one of SHAPES, after two steps to warm up."""
    op = OPS[label]
    given = inputs(op, SHAPES[number])
    pull = torch.randn_like(given["q"])

    def steps(count: int) -> None:
        for _ in range(count):
            train(lambda tensors: public(op, tensors, backend="triton"), given, pull)
        torch.cuda.synchronize()

    steps(2)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps(STEPS)
    return table((event.key, event.self_device_time_total, event.count) for event in found.key_averages())


def main(words: list[str]) -> None:
    known = "pairs of a label and the number of a shape"
    if not words or len(words) % 2:
        raise SystemExit(f"arguments: got {words}, expected {known}")
    for label, number in zip(words[::2], words[1::2], strict=True):
        if label not in OPS or number not in map(str, range(len(SHAPES))):
            raise SystemExit(
                f"arguments: got {label!r} {number!r}, expected one of {[*OPS]} and 0 to {len(SHAPES) - 1}"
            )
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu_kernels needs a CUDA device")
    for label, number in zip(words[::2], words[1::2], strict=True):
        print(
            f"{label}, {' x '.join(map(str, SHAPES[int(number)]))}",
            *kernels(label, int(number)),
            sep="\n  ",
            flush=True,
        )
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
