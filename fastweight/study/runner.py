"""A study into outcomes: processes that share one device, each training one member after the other.

    out/ARM/seed-N/           the run directory of the member (checkpoints, metrics.jsonl)
    out/ARM/seed-N/outcome.json

Small models do not fill a GPU, so several processes share it; each keeps its imports and compiled kernels from one
member to the next. A member with an outcome is done; one that was cut short goes on from its last complete checkpoint.
Traps: every process has one CPU thread, or they would fight for cores; a member that fails is told and left out, so the
report says how many seeds an arm has.
"""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from fastweight.evaluation.outcomes import Outcome, outcome_of
from fastweight.files import write_json
from fastweight.processes import end_with_parent
from fastweight.recipes import Run
from fastweight.study.plan import Study

Say = Callable[[str], None]
Member = tuple[str, int]  # arm and seed


def member_dir(out: Path, arm: str, seed: int) -> Path:
    """Where a member lives; labels may hold anything but a slash."""
    return out / arm.replace("/", "_").replace(" ", "_") / f"seed-{seed}"


def run_study(
    study: Study, out: Path, *, workers: int, budget: float | None = None, generate: bool = False, say: Say = print
) -> list[Outcome]:
    """Train and score every member that has no outcome yet; returns all outcomes, in the order of the plan.

    Args:
        workers: processes side by side.
        budget: seconds after which work ends; members cut short go on from their last checkpoint another time.
        generate: also score free generation (addition only).
    """
    if workers < 1:
        raise ValueError(f"workers: got {workers}, expected at least 1")
    runs = {member: study.run(*member) for member in study.members()}  # wrong settings fail before anything starts
    to_do = [member for member in runs if not (member_dir(out, *member) / "outcome.json").is_file()]
    start, total = time.monotonic(), len(to_do)
    end = None if budget is None else start + budget
    if to_do:
        say(f"{study.name}: {total} of {len(runs)} to train, {workers} at a time")
    if budget is not None and budget <= 0:
        return read_outcomes(study, out)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    pending = {pool.submit(_member, runs[m], member_dir(out, *m), *m, generate): m for m in to_do}
    try:
        _follow(pending, start, end, say)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children() if pending else ():
            process.terminate()
    return read_outcomes(study, out)


def _follow(pending: dict[Future[str], Member], start: float, end: float | None, say: Say) -> None:
    """Tell what is done, at which rate, and how long the rest takes, until all is done or the time is over."""
    total, done = len(pending), 0
    while pending:
        finished = wait(pending, None if end is None else max(end - time.monotonic(), 0), FIRST_COMPLETED).done
        if not finished:
            say(f"The time is over; {len(pending)} of {total} are left.")
            return
        for future in finished:
            arm, seed = pending.pop(future)
            done += 1
            passed = time.monotonic() - start
            left = passed / done * (total - done)
            say(f"{done}/{total} {arm} seed {seed}: {future.result()}  ({passed:.0f} s, about {left:.0f} s left)")


def read_outcomes(study: Study, out: Path) -> list[Outcome]:
    """The outcomes that are there."""
    files = [member_dir(out, *member) / "outcome.json" for member in study.members()]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    return [Outcome(**raw | {"trained": tuple(raw["trained"])}) for raw in found]


def _member(run: Run, run_dir: Path, arm: str, seed: int, generate: bool) -> str:
    """Train and score one member in a worker; returns a sentence, also when it fails."""
    import torch
    from rich.console import Console

    from fastweight.training import train

    torch.set_num_threads(run.training.threads or 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        train(run, run_dir, console=Console(quiet=True))
        outcome = outcome_of(run_dir, arm, seed, generate)
    except Exception as error:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return f"failed: {type(error).__name__}: {error}"
    write_json(run_dir / "outcome.json", asdict(outcome))
    longer, inside = (outcome.mean("token", longer=longer) for longer in (True, False))
    return "tokens right: " + ", ".join(
        f"{100 * share:.1f}% {where}" for share, where in ((inside, "inside"), (longer, "beyond")) if share is not None
    )
