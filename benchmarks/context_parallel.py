"""One long sequence on several GPUs against one: `python -m benchmarks.context_parallel`.

    results/long-context/context_parallel.json, .md     times, speed-up, bytes sent, peak memory per token, errors

Starts a process for each GPU (NCCL). First the comparison: rank by rank, outputs, final state and gradients of the very
tensors that are timed against those of one GPU, and of a short sequence against the float64 recurrence. Then forward +
backward, timed by events, median of several, one GPU with all tokens (the others wait) and all GPUs with a part each.

Traps: every rank draws the whole sequence from the same seed and keeps its part. What one GPU rounds differently from
several is only where states are cut, so errors are those of bfloat16.
"""

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import fastweight as fw
from fastweight.parallel import context_parallel

NAMES = ("q", "k", "v", "beta", "lam")
LARGEST = 1.2e-2  # relative RMS error in bfloat16, as in results/kernels
SEED = 0
IN_A_ROW = 8  # calls between two clocks: the host, which is not what is measured, works ahead


def draw(T: int, H: int, D: int, device: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Unit keys, gains in (0, 2), ridge for memories of about a hundred tokens; w weighs the loss."""
    rng = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device, dtype=dtype)

    def uniform(scale: float) -> Tensor:
        return scale * torch.rand(1, T, H, generator=rng, device=device)

    q, k, v, w = (normal(1, T, H, D) for _ in range(4))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    return {"q": q, "k": k, "v": v, "beta": uniform(1.8), "lam": uniform(0.02), "w": w}


def part(given: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """A rank's tokens, as tensors of their own."""
    T = given["q"].shape[1] // size
    return {name: t[:, rank * T : (rank + 1) * T].clone() for name, t in given.items()}


def step(given: dict[str, Tensor], rule: str, state: bool = False, **how: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Outputs, final state and gradients of one forward + backward."""
    inputs = {name: given[name].detach().requires_grad_() for name in NAMES}
    o, final = fw.fast_weight_attention(**inputs, rule=rule, output_final_state=state, **how)
    o.backward(given["w"].to(o.dtype))
    return o.detach(), final, {name: t.grad for name, t in inputs.items() if t.grad is not None}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative RMS error; NaN counts as infinite."""
    found, expected = found.float(), expected.float()
    value = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return value if value == value else float("inf")


def compared(mine: tuple, whole: tuple, rank: int, size: int) -> dict[str, float]:
    """Errors of this rank's part against the part of what one process got."""
    here = {"o": (mine[0], whole[0]), **{f"d{name}": (mine[2][name], whole[2][name]) for name in whole[2]}}
    T = mine[0].shape[1]
    errors = {name: error(a, b[:, rank * T : rank * T + T]) for name, (a, b) in here.items()}
    return errors | ({"S": error(mine[1].S, whole[1].S)} if mine[1] is not None else {})


def worst(errors: dict[str, float], device: Any) -> dict[str, float]:
    """Of all ranks."""
    values = torch.tensor(list(errors.values()), device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(errors, values.tolist(), strict=True))


def median_ms(call: Any, repeats: int) -> float:
    """Milliseconds of a call among IN_A_ROW of them, as the steps of a training follow each other; two to warm up."""
    times = []
    for turn in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(IN_A_ROW):
            call()
        end.record()
        torch.cuda.synchronize()
        if turn:
            times.append(begin.elapsed_time(end) / IN_A_ROW)
    return sorted(times)[len(times) // 2]


def gate(rule: str, width: int, rank: int, size: int, device: Any) -> dict[str, float]:
    """A short sequence on all ranks against the float64 recurrence on each."""
    given = draw(130 * size, 2, width, device)
    exact = step({name: t.double() for name, t in given.items()}, rule, True, form="recurrent", backend="torch")
    with context_parallel():
        mine = step(part(given, rank, size), rule, True)
    return worst(compared(mine, exact, rank, size), device)


def measure(rule: str, T: int, H: int, D: int, rank: int, size: int, repeats: int, device: Any) -> dict[str, Any]:
    """Everything about one rule."""
    found: dict[str, Any] = {
        "rule": rule,
        "T": T,
        "H": H,
        "D": D,
        "gpus": size,
        "gate": gate(rule, D, rank, size, device),
    }
    given = draw(T, H, D, device)
    mine = part(given, rank, size)
    whole = step(given, rule, True)
    with context_parallel():
        found["errors"] = worst(compared(step(mine, rule, True), whole, rank, size), device)
    del whole
    found["right"] = all(value < LARGEST for kind in ("gate", "errors") for value in found[kind].values())
    if not found["right"]:
        return found
    found["one_ms"] = median_ms(lambda: step(given, rule), repeats) if rank == 0 else 0.0
    begun = time.perf_counter()
    if rank == 0:
        step(given, rule)
    found["one_host_ms"] = 1e3 * (time.perf_counter() - begun)
    del given
    torch.cuda.empty_cache()
    dist.barrier()
    with context_parallel() as traffic:
        step(mine, rule)
        found["bytes_sent"], found["messages"] = traffic.bytes, traffic.messages
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step(mine, rule)
        found["peak_bytes_per_token"] = (torch.cuda.max_memory_allocated() - held) / (T // size)
        times = torch.tensor(median_ms(lambda: step(mine, rule), repeats), device=device)
        begun = time.perf_counter()
        step(mine, rule)
        found["all_host_ms"] = 1e3 * (time.perf_counter() - begun)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found["all_ms"] = float(times)
    found["speed_up"] = found["one_ms"] / found["all_ms"]
    return found


def worker(rank: int, size: int, port: int, chosen: Any) -> None:
    """One GPU: all rules, then rank 0 writes."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)})
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    results = []
    for rule in chosen.rules.split(","):
        for T in (int(t) for t in chosen.tokens.split(",")):
            begun = time.monotonic()
            found = measure(rule, T, chosen.heads, chosen.width, rank, size, chosen.repeats, device)
            found["seconds"] = round(time.monotonic() - begun, 1)
            results.append(found)
            if rank == 0:
                print(json.dumps(found), flush=True)
                write(results, chosen.out)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def write(results: list[dict[str, Any]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "results": results}
    (out / "context_parallel.json").write_text(json.dumps(about, indent=1) + "\n")
    (out / "context_parallel.md").write_text("\n".join(table(results)) + "\n")


def table(results: list[dict[str, Any]]) -> list[str]:
    """The report as Markdown."""
    lines = [
        "| rule | T x H x D | GPUs | one GPU, ms | all, ms | speed-up | KiB sent by each | peak bytes / local token | "
        "largest error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        shape, largest = f"{r['T']} x {r['H']} x {r['D']}", max([*r["errors"].values(), *r["gate"].values()])
        if not r["right"]:
            lines.append(f"| {r['rule']} | {shape} | {r['gpus']} | | | WRONG | | | {largest:.1e} |")
            continue
        lines.append(
            f"| {r['rule']} | {shape} | {r['gpus']} | {r['one_ms']:.2f} | {r['all_ms']:.2f} | {r['speed_up']:.2f}x | "
            f"{r['bytes_sent'] / 1024:,.0f} | {r['peak_bytes_per_token']:,.0f} | {largest:.1e} |"
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rules", default="falcon-1,falcon-1a")
    parser.add_argument("--tokens", default="262144", help="of the whole sequence; several with commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("results/long-context"))
    chosen = parser.parse_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (chosen.gpus, port, chosen), nprocs=chosen.gpus)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
