"""Times the GPU kernels beside their peers: `python -m benchmarks.gpu` prints tables and writes them with a picture.

Every case runs in a process of its own (benchmarks.gpu_worker). All of them import, compile and compare values and
gradients with the float64 recurrence side by side; then they measure one at a time, in two rounds, the second in
reverse order: the whole op, from (q, k, v, beta, gate) to o, without gradients and through autograd. Times are the
device's alone; what the host needs stands beside them. The floor is the larger of bytes over the copy rate and
operations over the matrix rate, both measured in the same run.

Traps: whoever still compiles or tunes on the same GPU is stopped while another measures, and goes on afterwards, until
the deadline; with a second GPU libraries that tune themselves do that there (benchmarks.gpu_child). A case that does
not answer within its time box is killed and listed as such. Results are on disk after every row.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_report
from benchmarks.gpu_cases import CASES, SHAPES
from benchmarks.gpu_child import CACHES, WORKER, Child
from benchmarks.gpu_worker import DECODE, milliseconds
from fastweight.evaluation.provenance import commit

BOX = 25.0  # seconds one measurement may take
ROUNDS = 2
RESERVE = 10.0  # seconds of the last round, which no library that still tunes gets
DRAIN = 0.15  # seconds for what a stopped process has queued on the device


class Report:
    """Everything that was found, written to disk after every row."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, time.monotonic()
        self.found: dict[str, Any] = {"machine": machine(), "rows": [], "decode": [], "first_call_s": {}}

    def take(self, said: dict[str, Any]) -> None:
        kind, label = said["kind"], said["label"]
        what = {key: value for key, value in said.items() if key not in ("kind", "label", "shape")}
        if kind == "first":
            self.found["first_call_s"][label] = what["seconds"]
        elif kind == "decode":
            self.found["decode"].append({"label": label} | what)
            self.tell(gpu_report.decode_line(said))
        elif kind in ("checked", "row") and label != DECODE:
            self.row(label, said["shape"], what)

    def row(self, label: str, shape: Iterable[int], what: dict[str, Any]) -> None:
        """Joins what is new about a case at a shape with what is known."""
        known = (row for row in self.found["rows"] if (row["op"], row["shape"]) == (label, list(shape)))
        row = next(known, None)
        if row is None:
            row = {"op": label, "shape": list(shape)}
            self.found["rows"].append(row)
        gpu_report.join(row, what)
        self.tell(gpu_report.line(row, self.found.get("ceilings")))

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "gpu.json").write_text(json.dumps(self.found, indent=1) + "\n")


def machine() -> dict[str, str]:
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": "python -m benchmarks.gpu " + " ".join(sys.argv[1:]),
    }


def ceilings() -> dict[str, float]:
    """Measured rates: device copy in bytes a second (read and written), bfloat16 products in operations a second."""
    a = torch.randn(2**29, device="cuda").bfloat16()
    b = torch.empty_like(a)
    copy = 2 * a.nbytes / (milliseconds(lambda: b.copy_(a)) * 1e-3)
    x, y = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    found = {"copy_bytes_per_s": copy, "bf16_flop_per_s": 2 * 8192**3 / (milliseconds(lambda: x @ y) * 1e-3)}
    del a, b, x, y
    torch.cuda.empty_cache()
    return found


def start(labels: Iterable[str], numbers: list[int], tuned: set[int], cache: str) -> list[Child]:
    """One child a case, and one for every number and width of heads of a case that tunes itself to them."""
    children = []
    for label in labels:
        mine = [n for n in numbers if label != DECODE and SHAPES[n] in CASES[label].shapes()]
        heads = dict.fromkeys(SHAPES[n][2:] for n in mine)
        tunes = label != DECODE and CASES[label].tunes
        if tunes and not CASES[label].quiet:
            mine = [n for n in mine if n in tuned]
        groups = [[n for n in mine if SHAPES[n][2:] == those] for those in heads] if tunes else [mine]
        children += [Child(label, group, cache) for group in groups if group or label == DECODE]
    return children


def measure(child: Child, number: int, children: list[Child], report: Report, end: float) -> None:
    """One measurement, while everybody who is not waiting for one is stopped."""
    loud = [other for other in children if not (other.warm or other.still_quiet(report))]
    busy = [other for other in loud if other is not child and other.alive and other.tuned]
    for other in busy:
        other.hold(True)
    time.sleep(DRAIN if busy else 0)
    if "ceilings" not in report.found:
        report.found["ceilings"] = ceilings()
    child.go()
    said = child.until("row", report, time.monotonic() + BOX)
    if said is not None and "failed" in said and "label" not in said and child.label != DECODE:
        report.row(child.label, SHAPES[number], said)
    for other in busy:
        other.hold(False)


def run_round(chosen: list[Child], children: list[Child], report: Report, end: float) -> None:
    """One measurement of each of the chosen at each of its shapes, shape by shape in the order that was asked for."""
    for number in dict.fromkeys(number for child in children for number in child.numbers or [0]):
        for child in chosen:
            if number in (child.numbers or [0]) and child.warm and child.alive and time.monotonic() < end:
                measure(child, number, children, report, end)


def as_they_come(children: list[Child], report: Report, end: float) -> Iterator[Child]:
    """Each child when it is warm; those that break or are late are reported instead."""
    pending = list(children)
    while pending:
        for child in list(pending):
            late = time.monotonic() > end
            if not child.tuned and not late:
                continue
            said = child.warmed(report, end if late else time.monotonic() + 0.05, kill=late)
            if said is None:
                continue
            pending.remove(child)
            report.tell(f"{child.label}: {said.get('failed', 'warm')}")
            if "failed" not in said:
                yield child
            for number in child.numbers if "failed" in said else ():
                report.row(child.label, SHAPES[number], said)


def run(children: list[Child], report: Report, end: float) -> None:
    """Ours and whatever is warm by then; then the others as they come, until RESERVE seconds before the deadline.

    The second round of the former is last, so that nobody waits for it who still compiles.
    """
    peers = [child for child in children if child.label == DECODE or CASES[child.label].peer]
    half = (report.began + end) / 2  # who is not ready by then is left out, so that the others are timed at all
    ready = list(as_they_come([child for child in children if child not in peers], report, half))
    ready += [child for child in peers if child.drain(report)]
    run_round(ready, children, report, end)
    for child in as_they_come([child for child in peers if child not in ready], report, end - RESERVE):
        for _ in range(ROUNDS):
            run_round([child], children, report, end)
    for _ in range(ROUNDS - 1):
        run_round(ready[::-1], children, report, end)


def first_calls_alone(labels: Iterable[str], report: Report) -> None:
    """Seconds of the first forward and backward in a fresh process with nothing compiled, while nothing else runs."""
    alone = report.found.setdefault("first_call_alone_s", {})
    for label in labels:
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | dict.fromkeys(CACHES, cache)
            ended = subprocess.run(
                [*WORKER, "first", label], capture_output=True, text=True, env=environment, check=False
            )
        said = [json.loads(line[1:]) for line in ended.stdout.splitlines() if line.startswith("@")]
        alone |= {one["label"]: one["seconds"] for one in said}
        report.tell(f"first call of {label}: {alone.get(label, float('nan')):.1f} s")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Times the GPU kernels beside their peers.")
    parser.add_argument("--out", type=Path, default=Path("results/kernels"), help="folder for JSON, tables and picture")
    parser.add_argument("--only", nargs="*", default=[*CASES, DECODE], help="labels of the cases to run")
    parser.add_argument("--shapes", nargs="*", type=int, default=range(len(SHAPES)), help="numbers of the shapes")
    parser.add_argument(
        "--tuned", nargs="*", type=int, default=range(len(SHAPES)), help="of these, where libraries that tune are timed"
    )
    parser.add_argument("--seconds", type=float, default=600, help="deadline; what is not done by then is left out")
    parser.add_argument(
        "--cache", type=Path, default=None, help="folder of compiled code to use and to keep; without, a fresh one"
    )
    parser.add_argument("--first", action="store_true", help="then the first call of each op of ours, one at a time")
    parser.add_argument(
        "--redraw", action="store_true", help="only make tables and picture again, from the JSON in --out"
    )
    chosen = parser.parse_args(arguments)
    unknown = [label for label in chosen.only if label not in (*CASES, DECODE)]
    if unknown:
        raise SystemExit(f"--only: got {unknown}, expected some of {[*CASES, DECODE]}")
    if chosen.redraw:
        gpu_report.write(chosen.out, json.loads((chosen.out / "gpu.json").read_text()))
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device")
    report = Report(chosen.out)
    with tempfile.TemporaryDirectory() as fresh:
        cache = fresh if chosen.cache is None else str(chosen.cache.absolute())
        children = start(chosen.only, list(chosen.shapes), set(chosen.tuned), cache)
        try:
            run(children, report, report.began + chosen.seconds)
        finally:
            for child in children:
                child.close()
        if chosen.first:
            first_calls_alone([name for name in chosen.only if name in CASES and not CASES[name].peer], report)
    gpu_report.write(chosen.out, report.found)


if __name__ == "__main__":
    main()
