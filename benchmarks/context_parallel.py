"""One long sequence on several GPUs against one: `python -m benchmarks.context_parallel`.

    results/long-context/context_parallel.json, .md     times, speed-up, bytes sent, peak memory per token, errors

Starts a process for each GPU (NCCL). First the comparison: rank by rank, outputs, final state and gradients of the very
tensors that are timed against those of one GPU, and of a short sequence against the float64 recurrence. Then forward +
backward, one GPU with all tokens (the others wait) and all GPUs with a part each: steps in a row, as in training, and
single ones, the host's start included. `--phases` says where the time of a step goes. `--device cpu` rehearses it all.

Traps: every rank draws the whole sequence from the same seed and keeps its part. What one GPU rounds differently from
several is only where states are cut, so errors are those of bfloat16. A first run compiles for a minute and more: run
once with --warm (few tokens, no times) and then again.
"""

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import fastweight as fw
from fastweight.evaluation.provenance import made_by
from fastweight.parallel import context_parallel

NAMES = ("q", "k", "v", "beta", "lam")
LARGEST = 1.2e-2  # relative RMS error in bfloat16, as in results/kernels
SEED = 0
IN_A_ROW = 8  # calls between two clocks: the host works ahead, as it does in training
LONGEST = 16  # lines of a profile
WARM = 16384  # tokens that compile what any number of them needs
BEGUN = time.monotonic()


def say(*words: Any) -> None:
    """With the seconds since the process began: a run that hangs shows where."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s]", *words, flush=True)


def draw(rule: str, T: int, H: int, D: int, device: Any) -> dict[str, Tensor]:
    """Unit keys, gains in (0, 2), ridge for memories of about a hundred tokens; w weighs the loss."""
    rng = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device, dtype=torch.bfloat16)

    def uniform(scale: float, *columns: int) -> Tensor:
        return scale * torch.rand(1, T, H, *columns, generator=rng, device=device)

    q, k, v, w = (normal(1, T, H, D) for _ in range(4))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    beta = uniform(1.8, *(D,) if fw.RULES[rule].gain == "column" else ())
    return {"q": q, "k": k, "v": v, "beta": beta, "lam": uniform(0.02), "w": w}


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
    found, expected = found.detach().float(), expected.detach().float()
    value = ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()
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


def median_ms(call: Callable[[], Any], repeats: int, device: torch.device, number: int = IN_A_ROW) -> float:
    """Milliseconds of one of `number` calls in a row, median of several such rows after one to warm up."""
    times = []
    for turn in range(repeats + 1):
        wait(device)
        begun = time.perf_counter()
        for _ in range(number):
            call()
        wait(device)
        if turn:
            times.append(1e3 * (time.perf_counter() - begun) / number)
    return sorted(times)[len(times) // 2]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def both_ms(call: Callable[[], Any], repeats: int, device: torch.device) -> dict[str, float]:
    """In a row; alone; and how long the host is busy with one."""
    found = {"ms": median_ms(call, repeats, device), "single_ms": median_ms(call, repeats, device, 1)}
    begun = time.perf_counter()
    call()
    found["host_ms"] = 1e3 * (time.perf_counter() - begun)
    wait(device)
    return found


def phases(call: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by kernel, from a profile of three in a row; "between" is when none ran."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    wait(device)
    with profile(activities=[kind]) as profiled:
        begun = time.perf_counter()
        for _ in range(3):
            call()
        wait(device)
        whole = 1e3 * (time.perf_counter() - begun) / 3
    rows = [(row.key, row) for row in profiled.key_averages()]
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    spent = {name[:60]: getattr(row, attribute) / 3e3 for name, row in rows}
    spent = {name: value for name, value in sorted(spent.items(), key=lambda pair: -pair[1]) if value > 0.004}
    return {"whole": whole, "between": whole - sum(spent.values()), **spent}


def gate(rule: str, width: int, rank: int, size: int, device: torch.device) -> dict[str, float]:
    """A short sequence on all ranks against the float64 recurrence on each."""
    given = draw(rule, 130 * size, 8, width, device)
    exact = step({name: t.double() for name, t in given.items()}, rule, True, form="recurrent", backend="torch")
    with context_parallel():
        mine = step(part(given, rank, size), rule, True)
    return worst(compared(mine, exact, rank, size), device)


def measure(case: dict[str, Any], rank: int, size: int, chosen: Any, device: torch.device) -> dict[str, Any]:
    """Everything about one rule and length: right first, then times if `chosen` wants them."""
    rule, T, H, D = case["rule"], case["T"], case["H"], case["D"]
    tell = say if rank == 0 else lambda *_: None
    found: dict[str, Any] = case | {"gpus": size, "gate": gate(rule, D, rank, size, device)}
    tell(rule, T, "agrees with the recurrence within", max(found["gate"].values()))
    given = draw(rule, T, H, D, device)
    mine = part(given, rank, size)
    whole = step(given, rule, True)
    with context_parallel():
        found["errors"] = worst(compared(step(mine, rule, True), whole, rank, size), device)
    tell("and with one process within", max(found["errors"].values()))
    del whole
    found["right"] = all(value < LARGEST for kind in ("gate", "errors") for value in found[kind].values())
    if chosen.warm:  # what is timed asks for no final state, which is compiled apart
        step(given, rule)
        with context_parallel():
            step(mine, rule)
    if not found["right"] or chosen.warm:
        return found
    if rank == 0:
        found["one"] = both_ms(lambda: step(given, rule), chosen.repeats, device)
    tell("one process is timed")
    del given
    dist.barrier()
    with context_parallel() as traffic:
        step(mine, rule)
        found["bytes_sent"], found["messages"] = traffic.bytes, traffic.messages
        found["peak_bytes_per_token"] = peak_bytes(lambda: step(mine, rule), device) / (T // size)
        found["all"] = worst(both_ms(lambda: step(mine, rule), chosen.repeats, device), device)
        if chosen.phases:
            found["phases"] = phases(lambda: step(mine, rule), device)
    if rank == 0:
        found["speed_up"] = found["one"]["ms"] / found["all"]["ms"]
    return found


def peak_bytes(call: Callable[[], Any], device: torch.device) -> float:
    """More than before the call; nan on a CPU."""
    if device.type != "cuda":
        call()
        return float("nan")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - held


def worker(rank: int, size: int, port: int, chosen: Any) -> None:
    """One GPU: all rules, then rank 0 writes."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)})
    device = torch.device(chosen.device, rank) if chosen.device == "cuda" else torch.device("cpu")
    with process_group(rank, size, device):
        if rank == 0:
            say("the group stands")
        results = []
        for rule in chosen.rules.split(","):
            for T in [WARM] if chosen.warm else [int(t) for t in chosen.tokens.split(",")]:
                case = {"rule": rule, "T": T, "H": chosen.heads, "D": chosen.width}
                found = measure(case, rank, size, chosen, device)
                results.append(found)
                if rank == 0:
                    say(json.dumps(found))
                    write(results, chosen.out, device)
                if device.type == "cuda":
                    torch.cuda.empty_cache()


@contextmanager
def process_group(rank: int, size: int, device: torch.device) -> Iterator[None]:
    """All processes, after a first message, which sets up what the next ones need."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        dist.all_reduce(torch.ones(1, device=device))
        wait(device)
        yield
    finally:
        dist.destroy_process_group()


def write(results: list[dict[str, Any]], out: Path, device: torch.device) -> None:
    out.mkdir(parents=True, exist_ok=True)
    about = made_by("python -m benchmarks.context_parallel " + " ".join(sys.argv[1:]), on_cpu=device.type == "cpu") | {
        "results": results
    }
    (out / "context_parallel.json").write_text(json.dumps(about, indent=1) + "\n")
    (out / "context_parallel.md").write_text("\n".join(table(results)) + "\n")


def table(results: list[dict[str, Any]]) -> list[str]:
    """The report as Markdown; times are of steps in a row, and in brackets of single ones."""
    lines = [
        "| rule | T x H x D | GPUs | one GPU, ms | all, ms | host, ms | speed-up | KiB sent by each | messages | "
        "peak bytes / local token | largest error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        shape, largest = f"{r['T']} x {r['H']} x {r['D']}", max([*r["errors"].values(), *r["gate"].values()])
        if "speed_up" not in r:
            state = "not timed" if r["right"] else "WRONG"
            lines.append(f"| {r['rule']} | {shape} | {r['gpus']} | | | | {state} | | | | {largest:.1e} |")
            continue
        one, every = r["one"], r["all"]
        lines.append(
            f"| {r['rule']} | {shape} | {r['gpus']} | {one['ms']:.2f} ({one['single_ms']:.2f}) | "
            f"{every['ms']:.2f} ({every['single_ms']:.2f}) | {one['host_ms']:.2f}, {every['host_ms']:.2f} | "
            f"{r['speed_up']:.2f}x | {r['bytes_sent'] / 1024:,.0f} | {r['messages']} | "
            f"{r['peak_bytes_per_token']:,.0f} | {largest:.1e} |"
        )
    for r in results:
        if "phases" in r:
            lines += ["", f"{r['rule']}, {r['T']} tokens, ms of a step on the first GPU:", ""]
            lines += [f"    {value:8.3f}  {name}" for name, value in list(r["phases"].items())[:LONGEST]]
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--rules", default="falcon-1,falcon-1a")
    parser.add_argument("--tokens", default="262144", help="of the whole sequence; several with commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--phases", action="store_true", help="where the time of a step goes")
    parser.add_argument("--warm", action="store_true", help="compile and compare, measure nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/long-context"))
    chosen = parser.parse_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (chosen.gpus, port, chosen), nprocs=chosen.gpus)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
