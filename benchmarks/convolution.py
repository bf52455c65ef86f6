"""The short convolution with its silu on a GPU, beside FLA's kernel and what torch.compile makes of plain PyTorch.

    PYTHONPATH=WHERE_FLA_IS python -m benchmarks.convolution --out results/kernels/convolution.json

Values and gradients come first, against float64; who misses its tolerance gets no time. Then medians of the device's
time over rounds in which everyone is timed once, the cache flushed before each call. All make q, k and v from one x,
as the memory reads them: dense. FLA's kernel makes them in one piece, so cutting it up is timed with it.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gate import compare, values_and_gradients

SHAPES = ((32, 1024, 2304), (1, 32768, 2304), (256, 28, 768))  # batch, tokens, channels of q, k and v together
WIDTH, TOLERANCE, ROUNDS = 4, 2**-7, 25
Parts = Sequence[Tensor]
Convolution = Callable[[Tensor, Tensor], Parts]


def plain(x: Tensor, weight: Tensor) -> Parts:
    """The definition, in whatever dtype x has."""
    window, T = F.pad(x, (0, 0, WIDTH - 1, 0)), x.shape[1]
    pre = sum((window[:, j : j + T] * weight[:, j].to(x.dtype) for j in range(WIDTH)), torch.zeros_like(x))
    return [part.contiguous() for part in F.silu(pre).chunk(3, dim=-1)]


def ours(x: Tensor, weight: Tensor) -> Parts:
    from fastweight.kernels.convolution import short_convolution

    third = x.shape[-1] // 3
    return short_convolution(x.new_zeros(len(x), WIDTH - 1, x.shape[-1]), x, weight, None, True, [third] * 3)


def contenders() -> dict[str, Convolution]:
    """By name, ours first; FLA's where it can be imported."""
    found: dict[str, Convolution] = {"fastweight": ours, "torch.compile": torch.compile(plain)}
    if importlib.util.find_spec("fla") is not None:
        from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]

        def fla(x: Tensor, weight: Tensor) -> Parts:
            y = causal_conv1d(x=x, weight=weight, activation="silu")[0]
            return [part.contiguous() for part in y.chunk(3, dim=-1)]

        found["FLA"] = fla
    return found


def named(convolution: Convolution) -> Callable[..., dict[str, Tensor]]:
    return lambda given: dict(zip("qkv", convolution(given["x"], given["weight"]), strict=True))


def measured(calls: dict[str, Callable[[], Any]], before: Callable[[], Any]) -> dict[str, float]:
    """Median milliseconds of each, in rounds; `before` each call, outside of its time."""
    spans = {name: [] for name in calls}
    for turn in range(ROUNDS + 3):
        order = list(calls) if turn % 2 else list(reversed(calls))
        for name in order:
            before()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            calls[name]()
            stop.record()
            if turn >= 3:
                spans[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: median(start.elapsed_time(stop) for start, stop in pairs) for name, pairs in spans.items()}


def of_shape(shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """A row for each contender: its verdict, and its times if that is green."""
    B, T, D = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, generator=generator).bfloat16()
    weight = torch.randn(D, WIDTH, generator=generator).mul_(WIDTH**-0.5)
    some = {"x": x[:2, :300], "weight": weight}
    expected = values_and_gradients(named(plain), {name: value.double() for name, value in some.items()})
    on_device = {name: value.cuda() for name, value in some.items()}
    known, rows = contenders(), []
    for name, convolution in known.items():
        verdict = compare(name, values_and_gradients(named(convolution), on_device), expected, TOLERANCE)
        print(f"{shape} {verdict}", flush=True)
        rows.append({"shape": shape, "name": name, "error": verdict.errors[verdict.worst], "green": verdict.green})
    green = [row["name"] for row in rows if row["green"]]
    x, weight = x.cuda().requires_grad_(), weight.cuda().requires_grad_()
    pulls = [torch.randn(B, T, D // 3, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    flushed = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def train(convolution: Convolution) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(list(convolution(x, weight)), [x, weight], pulls)

    def read(convolution: Convolution) -> Callable[[], Any]:
        def run() -> Parts:
            with torch.no_grad():
                return convolution(x, weight)

        return run

    for kind, wrapped in (("forward_ms", read), ("train_ms", train)):
        times = measured({name: wrapped(known[name]) for name in green}, flushed.zero_)
        for row in rows:
            row[kind] = times.get(row["name"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("results/kernels/convolution.json"))
    chosen = parser.parse_args()
    from fastweight.evaluation.provenance import commit

    rows = [row for shape in SHAPES for row in of_shape(shape)]
    made = {
        "command": "python -m benchmarks.convolution",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")
    for row in rows:
        times = [f"{row[kind]:.3f}" if row[kind] is not None else "-" for kind in ("forward_ms", "train_ms")]
        print(f"{row['shape']!s:20s} {row['name']:14s} {' / '.join(times)} ms", flush=True)


if __name__ == "__main__":
    main()
