"""The short convolution with its silu on a GPU, beside FLA's kernel and what torch.compile makes of plain PyTorch.

    PYTHONPATH=WHERE_FLA_IS python -m benchmarks.convolution --out results/kernels/convolution.json

Values and gradients come first, against float64; who misses its tolerance gets no time. Then the device's time as the
other GPU benchmarks take it (gpu_worker), medians over rounds in which everyone has a turn. FLA is left out where it
cannot be imported. All make q, k and v from one x, as the memory reads them: dense. FLA's kernel makes them in one
piece, so cutting it up is timed with it; it is tuned among at most FLA_CONFIGURATIONS, since all of them take minutes.
"""

import argparse
import contextlib
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
from benchmarks.gpu_worker import milliseconds
from benchmarks.peers import few_configurations

SHAPES = ((32, 1024, 2304), (1, 32768, 2304))  # batch, tokens, channels of q, k and v together
CHECKED = (2, 300, 2304)
WIDTH, ROUNDS = 4, 3
FLA_CONFIGURATIONS = 6
TOLERANCE = 2**-6  # the gate pulls in float64 at the judge and in bfloat16 here, which alone is 2^-7 of a gradient
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
    """By name, ours first."""
    found: dict[str, Convolution] = {"fastweight": ours, "torch.compile": torch.compile(plain, dynamic=False)}
    with contextlib.suppress(ImportError):
        few_configurations(FLA_CONFIGURATIONS)  # before FLA is imported
        from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]

        def fla(x: Tensor, weight: Tensor) -> Parts:
            y = causal_conv1d(x=x, weight=weight, activation="silu")[0]
            return [part.contiguous() for part in y.chunk(3, dim=-1)]

        found["FLA"] = fla
    return found


def named(convolution: Convolution) -> Callable[..., dict[str, Tensor]]:
    return lambda given: dict(zip("qkv", convolution(given["x"], given["weight"]), strict=True))


def measured(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median milliseconds of each, in rounds, there and back."""
    found = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in calls if turn % 2 else reversed(calls):
            found[name].append(milliseconds(calls[name]))
    return {name: median(spans) for name, spans in found.items()}


def errors(known: dict[str, Convolution]) -> dict[str, float]:
    """Largest relative error of each over values and gradients; of who misses the tolerance nothing more is asked."""
    x, weight = given(CHECKED)
    expected = values_and_gradients(named(plain), {"x": x.double(), "weight": weight.double()})
    found = {}
    for name, convolution in known.items():
        made = values_and_gradients(named(convolution), {"x": x.cuda(), "weight": weight.cuda()})
        verdict = compare(name, made, expected, TOLERANCE)
        print(verdict, flush=True)
        if verdict.green:
            found[name] = verdict.errors[verdict.worst]
    return found


def given(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """x in bfloat16 and taps in float32."""
    B, T, D = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, D, generator=generator).bfloat16()
    return x, torch.randn(D, WIDTH, generator=generator).mul_(WIDTH**-0.5)


def times(shape: tuple[int, int, int], known: dict[str, Convolution]) -> dict[str, dict[str, float]]:
    """Milliseconds forward and with the backward pass, by name."""
    B, T, D = shape
    x, weight = (tensor.cuda().requires_grad_() for tensor in given(shape))
    pulls = [torch.randn(B, T, D // 3, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def train(convolution: Convolution) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(list(convolution(x, weight)), [x, weight], pulls)

    def read(convolution: Convolution) -> Callable[[], Any]:
        def run() -> Parts:
            with torch.no_grad():
                return convolution(x, weight)

        return run

    return {
        kind: measured({name: wrapped(one) for name, one in known.items()})
        for kind, wrapped in (("forward_ms", read), ("train_ms", train))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=Path("results/kernels/convolution.json"))
    chosen = parser.parse_args()
    from fastweight.evaluation.provenance import commit

    everyone = contenders()
    error = errors(everyone)
    known, rows = {name: everyone[name] for name in error}, []
    for shape in SHAPES:
        taken = times(shape, known)
        rows += [
            {"shape": shape, "name": name, "error": error[name], **{kind: taken[kind][name] for kind in taken}}
            for name in known
        ]
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
        print(f"{row['shape']!s:20s} {row['name']:14s} {row['forward_ms']:.3f} / {row['train_ms']:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
