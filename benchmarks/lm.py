"""Language models on one GPU: training and decoding speed of every recipe beside its peers.

    python -m benchmarks.lm                          all cases, results/lm/h200.json, .md and .png
    python -m benchmarks.lm --cases "train falcon-1.3 32 1024"
    python -m benchmarks.lm --lane 1 --out b.json    the second half, for a second GPU; --lane 0 is the first
    python -m benchmarks.lm --report-only --merge a.json b.json     Markdown and picture from JSON
    python -m benchmarks.lm --rehearse --out x.json    every case on a CPU, tiny: whether it runs, not how fast

Every case is a process (`lm_worker`). Several import and compile at the same time, since that is most of what they do;
while one of them measures, all the others of the lane are stopped (SIGSTOP), so that nobody else uses the device. A
case that takes too long is killed and listed as failed; results are written as they come. Cases joined by " + " share
a process, and what it compiles. FLA's model is left out where FLA cannot be imported, its training where it would
refuse. Ended (SIGTERM), it ends its workers and writes the report of what there is.

Traps: a step of 32 x 1,024 tokens keeps the host busy for most of the time that the GPU takes, so whoever else keeps
the cores busy slows it down; the case that measures gets priority where that is allowed. Seconds to the first step are
an upper bound, since other cases compile and measure meanwhile; run one case alone for a user's. Kernel and compiler
caches are new for each run unless --keep-caches.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.lm_report import write_report

WANTED = ("falcon-1.3", "fla", "llama", "transformer")  # what the targets compare; the rest after them
MIXERS = (
    "gated-deltanet", "falcon-1a.3", "falcon-3a.3", "falcon-2a.3", "retnet", "mamba2", "deltanet", "falcon-2.3",
    "falcon-3.3",
)  # fmt: skip
OTHERS = (*MIXERS, "falcon-1a.1", "falcon-1a.2")
LONG = (*WANTED, "gated-deltanet")
HOST = "train falcon-1.3 1 64"  # so little work that the time of a step is that of the host
PLACES, SHORT = "1,64 1024,32768", "1,64 1024"
AT_ONCE = 6
STARTING, FLA_STARTING, TRAINED, DECODED = 60, 130, 6, 12  # estimated seconds: to be ready, and to measure
JOINED = " + "
WORKER = (sys.executable, "-m", "benchmarks.lm_worker")


def lanes() -> tuple[list[str], list[str]]:
    """The cases of two GPUs, in the order of their worth: what a full time box cuts off stands last. The first lane has
    sequences of 1,024; FLA's model has one process for all its training, because its kernels tune for minutes, and so
    stands in the second. Whatever the targets do not name decodes after short prompts only."""
    trained = [f"train {name} 32 1024" for name in (*WANTED, *OTHERS) if name != "fla"]
    trained.insert(len(WANTED), HOST)
    fla = JOINED.join(["train fla 32 1024", "train fla 2 16384"])
    ours = [name for name in LONG if name != "fla"]
    long = [f"train {name} 2 16384" for name in ours]
    decoding = [f"decode {name} {PLACES}" for name in (*ours, "fla")]
    return trained, [fla, *long, *decoding, *(f"decode {name} {SHORT}" for name in MIXERS if name not in ours)]


def runnable(cases: list[str]) -> list[str]:
    """The cases that need no package that is missing."""
    if importlib.util.find_spec("fla") is None:
        print("FLA cannot be imported: its model is left out", flush=True)
        return [case for case in cases if " fla " not in case]
    if importlib.util.find_spec("tilelang") is None and _version("triton") < (3, 7, 1):
        print("FLA does not train on Hopper with this Triton, unless TileLang is there: left out", flush=True)
        return [case for case in cases if "train fla " not in case]
    return cases


def _version(package: str) -> tuple[int, ...]:
    from importlib.metadata import version

    return tuple(int(part) for part in version(package).split("+")[0].split("."))


def estimate(case: str) -> tuple[int, int]:
    """Seconds until a case is ready to be measured, while others start beside it, and seconds that it measures."""
    parts = case.split(JOINED)
    measured = sum(TRAINED if part.startswith("train") else DECODED * len(places_of(part)) // 4 for part in parts)
    return FLA_STARTING if " fla " in parts[0] else STARTING, measured


def places_of(case: str) -> list[tuple[str, str]]:
    """Batch and length of each row that a case makes."""
    batches, lengths = (text.split(",") for text in case.split()[2:])
    return [(batch, length) for length in lengths for batch in batches]


def announce(cases: list[str], limit: float) -> None:
    """Prints when each case is expected to be done: the first to be ready is measured, while the others stand still."""
    waiting, under_way, now = list(cases), [], 0
    while waiting or under_way:
        while waiting and len(under_way) < AT_ONCE:
            starting, measured = estimate(waiting[0])
            under_way.append((now + starting, measured, waiting.pop(0)))
        ready, measured, case = under_way.pop(under_way.index(min(under_way, key=lambda one: one[0])))
        now = max(now, ready) + measured
        under_way = [(other + measured, *rest) for other, *rest in under_way]
        print(f"about {now:4d} s  {case}{'' if now <= limit else '   beyond the limit'}", flush=True)


@dataclass
class Worker:
    """A case under way."""

    case: str
    process: subprocess.Popen[bytes]
    began: float
    start: dict[str, Any] = field(default_factory=dict)  # what it said when it was ready
    rows: list[dict[str, Any]] = field(default_factory=list)  # results that nobody has heard of yet
    measured: set[str] = field(default_factory=set)  # the joined cases that have a result
    tail: list[str] = field(default_factory=list)
    unfinished: bytes = b""  # a line of which the end has not come yet
    ready: bool = False
    measuring: bool = False


def start(case: str, profile: str | None, caches: str) -> Worker:
    words = [*WORKER, *case.split(JOINED)] + (["--profile"] if profile and case.startswith(profile) else [])
    environment = os.environ | {
        "TRITON_CACHE_DIR": os.environ.get("LM_TRITON_CACHE", f"{caches}/triton"),
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
    }
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, bufsize=0,
        start_new_session=True,
    )  # fmt: skip
    return Worker(case, process, time.monotonic())


def run(cases: list[str], limit: float, box: float, profile: str | None, caches: str, done: Any) -> None:
    """All cases within `limit` seconds, each within `box`; `done(row)` hears of each as it ends."""
    waiting, active = list(cases), []
    try:
        _run(waiting, active, time.monotonic() + limit, box, profile, caches, done)
    finally:
        for worker in active:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.process.pid, signal.SIGKILL)
            worker.process.wait()


def _run(
    waiting: list[str], active: list[Worker], end: float, box: float, profile: str | None, caches: str, done: Any
) -> None:
    selector = selectors.DefaultSelector()
    while waiting or active:
        while waiting and len(active) < AT_ONCE and time.monotonic() < end - 25:
            worker = start(waiting.pop(0), profile, caches)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            active.append(worker)
        if waiting and not active:
            break
        for key, _ in selector.select(timeout=0.5):
            _hear(key.data)
            _tell(key.data, done)
        for worker in list(active):
            if _ended(worker, time.monotonic() - worker.began > box or time.monotonic() > end):
                selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
                active.remove(worker)
                for pipe in (worker.process.stdin, worker.process.stdout):
                    pipe.close()  # type: ignore[union-attr]
                _tell(worker, done)
                for row in failures_of(worker):
                    done(row)
        _let_one_measure(active)


def _hear(worker: Worker) -> bool:
    """Take what the process has printed; False at the end of its output."""
    assert worker.process.stdout is not None, "a pipe was asked for"
    heard = os.read(worker.process.stdout.fileno(), 2**16)
    *lines, worker.unfinished = (worker.unfinished + heard).split(b"\n")
    for line in lines:
        text = line.decode(errors="replace").rstrip()
        if text.startswith("@"):
            found = json.loads(text[1:])
            kind = found.pop("kind")
            if kind == "ready":
                worker.ready, worker.start = True, found
            elif kind == "done":
                worker.ready = worker.measuring = False
            else:
                worker.rows.append(worker.start | found)
        elif text:
            worker.tail = [*worker.tail[-60:], text]
    return bool(heard)


def _tell(worker: Worker, done: Any) -> None:
    """Hands out the results that have come."""
    while worker.rows:
        row = worker.rows.pop(0)
        worker.measured.add(row.pop("case"))
        done(row)
        print(json.dumps(row), flush=True)


def _let_one_measure(active: list[Worker]) -> None:
    if any(worker.measuring for worker in active):
        return
    _continue(active)
    ready = next((worker for worker in active if worker.ready), None)
    if ready is None:
        return
    for other in active:
        if other is not ready:
            os.killpg(other.process.pid, signal.SIGSTOP)
    with contextlib.suppress(OSError):  # not allowed, or the process is gone
        os.setpriority(os.PRIO_PGRP, ready.process.pid, -15)
    ready.measuring = True
    assert ready.process.stdin is not None, "a pipe was asked for"
    ready.process.stdin.write(b"go\n")


def _continue(active: list[Worker]) -> None:
    for worker in active:
        os.killpg(worker.process.pid, signal.SIGCONT)


def _ended(worker: Worker, too_long: bool) -> bool:
    """Whether the process is gone; one that took too long is sent away."""
    if worker.process.poll() is None and too_long:
        os.killpg(worker.process.pid, signal.SIGKILL)
        worker.tail.append("took too long")
        worker.process.wait()
    if worker.process.poll() is None:
        return False
    while _hear(worker):
        pass
    return True


def failures_of(worker: Worker) -> list[dict[str, Any]]:
    """A row for each case of a process that ended without a result of it."""
    cases, failed = worker.case.split(JOINED), bool(worker.process.returncode)
    missing = [case for case in cases if case not in worker.measured or (failed and case == cases[-1])]
    reason = " | ".join(worker.tail[-4:])[-400:] or f"exit code {worker.process.returncode}"
    keys = ("what", "name", "batch", "length")
    rows = [dict(zip(keys, case.split(), strict=True)) | {"failed": reason} for case in missing]
    if rows or any("launches" in line for line in worker.tail):
        print("\n".join([*(json.dumps(row) for row in rows), *worker.tail[-45:]]), flush=True)
    return rows


def machine() -> dict[str, str]:
    from importlib.metadata import version

    import torch

    from fastweight.evaluation.provenance import commit

    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": torch.cuda.get_device_name() if on_gpu else "a CPU: no speeds",
        "torch": torch.__version__,
        "triton": version("triton") if on_gpu else "none",
        "transformers": version("transformers"),
        "commit": commit(),
        "command": "python -m benchmarks.lm",
    }


class Collected:
    """Rows so far, written to the JSON file at each new one; a case measured again replaces the old row."""

    def __init__(self, path: Path, add: bool) -> None:
        self.path, self.rows = path, []
        before = json.loads(path.read_text()) if add and path.is_file() else {"rows": []}
        self.report: dict[str, Any] = {"machine": machine(), "rows": before["rows"]}

    def __call__(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.report["rows"] = [*(known for known in self.report["rows"] if place(known) != place(row)), row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")


def merge(part: Path, whole: Path) -> None:
    """The rows of one file into another, in the place of rows of the same cases.

    The machine is that of the newer; rows of another commit keep its name.
    """
    given = json.loads(part.read_text())
    known = [place(row) for row in given["rows"]]
    old: dict[str, Any] = json.loads(whole.read_text()) if whole.is_file() else {"rows": []}
    rows = [{"commit": old["machine"]["commit"]} | row for row in old["rows"] if place(row) not in known]
    rows += given["rows"]
    whole.parent.mkdir(parents=True, exist_ok=True)
    whole.write_text(json.dumps({"machine": given["machine"], "rows": rows}, indent=1) + "\n")


def place(row: dict[str, Any]) -> list[Any]:
    """What was measured: one row of the results for each."""
    return [str(row[key]) for key in ("what", "name", "batch", "length")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--out", type=Path, default=Path("results/lm/h200.json"), help="JSON; the report lies beside it"
    )
    parser.add_argument("--cases", nargs="*", help='as "train falcon-1.3 32 1024"; default: all')
    parser.add_argument("--limit", type=float, default=1800, help="seconds for everything")
    parser.add_argument("--box", type=float, default=300, help="seconds for one case, others' compiling included")
    parser.add_argument("--profile", help="print the kernels of one step of training cases that begin like this")
    parser.add_argument("--keep-caches", type=Path, help="directory of kernel and compiler caches")
    parser.add_argument("--add", action="store_true", help="keep the rows that the JSON holds")
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--lane", type=int, choices=(0, 1), help="half of the cases, for one of two GPUs; default: both"
    )
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="JSON files whose rows go into --out")
    chosen = parser.parse_args(arguments)
    for path in chosen.merge:
        merge(path, chosen.out)
    if not chosen.report_only:
        halves = lanes()
        cases = [*halves[0], *halves[1]] if chosen.lane is None else halves[chosen.lane]
        cases = chosen.cases or runnable(cases)
        if chosen.rehearse:
            os.environ["LM_REHEARSE"] = "1"
        announce(cases, chosen.limit)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt
        with tempfile.TemporaryDirectory() as fresh:
            done = Collected(chosen.out, chosen.add)
            caches = str(chosen.keep_caches or fresh)
            with contextlib.suppress(KeyboardInterrupt):
                run(cases, chosen.limit, chosen.box, chosen.profile, caches, done)
    for file in write_report(chosen.out):
        print(file)


if __name__ == "__main__":
    main()
