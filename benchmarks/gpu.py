"""Times the GPU kernels beside their peers: `python -m benchmarks.gpu` prints a table and writes JSON.

Every op passes a gate first: values and all gradients against the float64 recurrence, in the same dtype and at the same
widths. An op that fails is listed as wrong and not timed. Times are medians of CUDA events after warm-up, for the whole
op from (q, k, v, beta, lam) to o; "train" is forward and backward through autograd. The floor is the larger of bytes
over the copy rate and operations over the matrix rate, both measured in the same run.

Traps: peers are optional (flash_qla, fla) and run at scale 1 with the same gates; FLA must be imported with
FLA_DISABLE_BACKEND_DISPATCH=1 or it hands its call to FlashQLA, and its first call at a shape tunes for minutes.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("FLA_DISABLE_BACKEND_DISPATCH", "1")

import torch
from torch import Tensor

import fastweight as fw
from fastweight.kernels import dispatch
from fastweight.memory.attention import DELTA_RULE, LINEAR_ATTENTION

SHAPES = [(64, 1024, 6, 128), (16, 4096, 16, 128), (1, 32768, 16, 128), (64, 1024, 12, 64)]  # B T H D
RULES: dict[str, Any] = {
    "falcon-1": fw.RULES["falcon-1"],
    "gated delta rule": DELTA_RULE,
    "falcon-1a": fw.RULES["falcon-1a"],
    "linear attention": LINEAR_ATTENTION,
    "falcon-3a": fw.RULES["falcon-3a"],
}
ALLOWED = 1.2e-2  # relative RMS error in bfloat16
REGRESSION = {"falcon-1", "gated delta rule"}


def inputs(name: str, shape: tuple[int, int, int, int], seed: int = 0) -> dict[str, Any]:
    """Random bfloat16 tokens with unit keys, float32 gates, all requiring gradients."""
    B, T, H, D = shape
    random = torch.Generator("cuda").manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device="cuda")

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1).bfloat16()

    given: dict[str, Any] = {"q": unit(draw(B, T, H, D)), "k": unit(draw(B, T, H, D))}
    given["v"] = draw(B, T, H, D).bfloat16()
    given["beta"] = None if name == "linear attention" else torch.sigmoid(draw(B, T, H))
    own = name in ("gated delta rule", "linear attention")
    given["gate"] = torch.nn.functional.logsigmoid(draw(B, T, H)) / 16 if own else 0.1 * torch.sigmoid(draw(B, T, H))
    return {key: None if value is None else value.requires_grad_() for key, value in given.items()}


def ours(name: str, given: dict) -> Tensor:
    own = name in ("gated delta rule", "linear attention")
    gates = {"lam": None if own else given["gate"], "log_decay": given["gate"] if own else None}
    q, k, v, beta = (given[key] for key in ("q", "k", "v", "beta"))
    return dispatch.scan(q, k, v, beta, gates["lam"], RULES[name], log_decay=gates["log_decay"])[0]


def recurrence(name: str, given: dict) -> Tensor:
    q, k, v, beta, gate = given.values()
    how: dict[str, Any] = {"form": "recurrent", "backend": "torch"}
    if name == "gated delta rule":
        return fw.delta_rule(q, k, v, beta, gate, **how)[0]
    if name == "linear attention":
        return fw.linear_attention(q, k, v, gate, **how)[0]
    return fw.fast_weight_attention(q, k, v, beta, gate, RULES[name], **how)[0]


def errors(name: str, run: Callable[[dict], Tensor], width: int) -> dict[str, float]:
    """Relative RMS error of o and every gradient of `run` against the float64 recurrence at (2, 140, 2, width)."""
    given = inputs(name, (2, 140, 2, width), seed=1)
    wide: dict[str, Any] = {n: None if t is None else t.detach().double().requires_grad_() for n, t in given.items()}
    o, exact = run(given), recurrence(name, wide)
    pull = torch.randn(o.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).to(o.dtype)
    o.backward(pull)
    exact.backward(pull.double())
    pairs = {"o": (o.detach(), exact.detach())} | {n: (t.grad, wide[n].grad) for n, t in given.items() if t is not None}
    return {n: float((a.double() - b.double()).norm() / b.double().norm()) for n, (a, b) in pairs.items()}


def median(run: Callable[[], Any], milliseconds: int = 100) -> float:
    from triton.testing import do_bench

    middle: Any = do_bench(run, warmup=25, rep=milliseconds, return_mode="median")
    return float(middle)


def timed(run: Callable[[dict], Tensor], given: dict) -> dict[str, float]:
    """Milliseconds of a forward without gradients and of forward + backward, and the peak bytes of the latter."""
    leaves = [t for t in given.values() if t is not None]
    pull = torch.randn_like(given["v"])

    def forward() -> None:
        with torch.no_grad():
            run(given)

    def train() -> None:
        for leaf in leaves:
            leaf.grad = None
        run(given).backward(pull)

    forward_ms, train_ms = median(forward), median(train)
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train()
    peak = torch.cuda.max_memory_allocated() - before
    return {"forward_ms": forward_ms, "train_ms": train_ms, "train_peak_mib": peak / 2**20}


def peers() -> dict[str, tuple[str, Callable[[dict], Tensor]]]:
    """Other libraries that are installed: label -> (the op of ours it matches, how to call it)."""
    found: dict[str, tuple[str, Callable[[dict], Tensor]]] = {}

    def attention(given: dict) -> Tensor:
        q, k, v = (given[key].transpose(1, 2) for key in ("q", "k", "v"))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    found["SDPA causal"] = ("gated delta rule", attention)
    try:
        flash_qla = importlib.import_module("flash_qla")

        def flash(given: dict) -> Tensor:
            return flash_qla.chunk_gated_delta_rule(*_delta(given), scale=1.0)[0]

        found["FlashQLA gated delta rule"] = ("gated delta rule", flash)
    except ImportError:
        pass
    try:
        fla_ops = importlib.import_module("fla.ops.gated_delta_rule")

        def fla(given: dict) -> Tensor:
            return fla_ops.chunk_gated_delta_rule(*_delta(given), scale=1.0)[0]

        found["FLA gated delta rule"] = ("gated delta rule", fla)
    except ImportError:
        pass
    return found


def _delta(given: dict) -> tuple[Tensor, ...]:
    return given["q"], given["k"], given["v"], given["gate"], given["beta"]


def ceilings() -> dict[str, float]:
    """Measured rates: device copy in bytes a second (read and written), bfloat16 products in operations a second."""
    a = torch.randn(2**30, device="cuda").bfloat16()
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / (median(lambda: b.copy_(a)) * 1e-3)
    x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return {"copy_bytes_per_s": copy, "bf16_flop_per_s": 2 * 8192**3 / (median(lambda: x @ y) * 1e-3)}


def floor(name: str, shape: tuple[int, int, int, int], rates: dict[str, float]) -> tuple[float, float]:
    """Milliseconds below which no forward and no forward + backward can go: inputs read and outputs written once."""
    B, T, H, D = shape
    rows = B * T * H
    forward_bytes, train_bytes = rows * (8 * D + 8), rows * (8 * D + 8 + 14 * D + 24)
    chunk = 64
    extra = 2 if name in REGRESSION else 0  # products of the solve
    forward_flop = rows * (2 * 2 * D * D + 2 * 2 * chunk * D) + extra * rows * 2 * (D * D + chunk * D) / 2
    bounds = []
    for size, work in ((forward_bytes, forward_flop), (train_bytes, 3.5 * forward_flop)):
        bounds.append(1e3 * max(size / rates["copy_bytes_per_s"], work / rates["bf16_flop_per_s"]))
    return bounds[0], bounds[1]


def machine() -> dict[str, str]:
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit or os.environ.get("COMMIT", "unknown"),
    }


def rows_of(shape: tuple[int, int, int, int], rates: dict[str, float], skip: set[str], known: dict) -> list:
    """One row an op and one a peer, at one shape; those that fail the gate carry their errors and no time.

    known: errors by (label, width), kept between shapes.
    """
    runs: list[tuple[str, str, Callable[[dict], Tensor]]] = []
    for name in RULES:
        runs.append((name, name, lambda given, name=name: ours(name, given)))
    for label, (name, call) in peers().items():
        if label.split()[0] not in skip and not (label.startswith("FlashQLA") and shape[3] != 128):
            runs.append((label, name, call))
    rows = []
    for label, name, call in runs:
        row: dict[str, Any] = {"op": label, "shape": list(shape)}
        try:
            if not label.startswith("SDPA"):
                if (label, shape[3]) not in known:
                    known[label, shape[3]] = errors(name, call, shape[3])
                row["errors"] = known[label, shape[3]]
            if not all(error <= ALLOWED for error in row.get("errors", {}).values()):
                row["wrong"] = True
            else:
                row |= timed(call, inputs(name, shape))
                row["floor_forward_ms"], row["floor_train_ms"] = floor(name, shape, rates)
        except Exception as problem:
            row["failed"] = f"{type(problem).__name__}: {str(problem)[:200]}"
        torch.cuda.empty_cache()
        rows.append(row)
        print(_line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    head = f"{row['op']:26s} {'x'.join(map(str, row['shape'])):16s}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    worst = max(row.get("errors", {"": 0.0}).items(), key=lambda item: item[1])
    if "wrong" in row:
        return f"{head} WRONG: error of {worst[0]} {worst[1]:.1e}"
    times = f"{row['forward_ms']:8.3f} {row['train_ms']:8.3f} ms  floor {row['floor_forward_ms']:.3f}"
    return f"{head} {times} {row['floor_train_ms']:.3f}  {row['train_peak_mib']:6.0f} MiB  {worst[0]} {worst[1]:.1e}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times the GPU kernels beside their peers.")
    parser.add_argument("--out", type=Path, default=Path("results/kernels/gpu.json"), help="where the JSON goes")
    parser.add_argument("--skip", nargs="*", default=[], help="peers to leave out: SDPA, FlashQLA, FLA")
    parser.add_argument("--shapes", nargs="*", type=int, default=range(len(SHAPES)), help="which of the shapes to time")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device")
    rates = ceilings()
    print({key: f"{value:.3g}" for key, value in rates.items()}, machine(), flush=True)
    print(f"{'op':26s} {'B x T x H x D':16s} forward    train ms  floors          peak      worst error", flush=True)
    report: dict[str, Any] = {"machine": machine(), "ceilings": rates, "rows": []}
    known: dict = {}
    for index in chosen.shapes:
        report["rows"] += rows_of(SHAPES[index], rates, set(chosen.skip), known)
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
