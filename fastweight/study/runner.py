"""Studies into outcomes: processes that share the devices, each training one member after the other.

    out/ARM/seed-N/           the run directory of the member (checkpoints, metrics.jsonl)
    out/ARM/seed-N/outcome.json

Small models do not fill a GPU, so several processes share one (`workers.py`), and one that has trained an arm goes on
with other seeds of it, whose graphs and kernels it has. A member with an outcome is done; one that was cut short goes
on from its last complete checkpoint; members of several studies with the same settings are trained once. Traps: every
process has one CPU thread, or they would fight for cores; a member that fails is told and left out, so the report says
how many seeds an arm has; training may leave TF32 switched on in its process, and scores are of float32.
"""

import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from fastweight.evaluation.outcomes import Outcome, Scoring, TextOutcome, outcome_from, outcome_of
from fastweight.evaluation.text_outcomes import VALIDATION, check_one_corpus, corpus_of
from fastweight.files import write_json
from fastweight.recipes import AdditionTask, Run, TextTask, to_dict
from fastweight.recipes.rundir import FREE_SETTINGS
from fastweight.study.plan import Study
from fastweight.study.workers import NO_GPU, run_pieces, visible_gpus

OUTCOME = "outcome.json"
TESTED = ("test_widths", "test_sizes", "test_problems", "test_seed")  # settings of tasks: the same test

Say = Callable[[str], None]
Member = tuple[str, int]  # arm and seed
Piece = tuple[Run, Path, str, int, Scoring]  # what `_member` is called with


def member_dir(out: Path, arm: str, seed: int) -> Path:
    """Where a member lives; labels may hold anything but a slash."""
    return out / arm.replace("/", "_").replace(" ", "_") / f"seed-{seed}"


class Job(NamedTuple):
    """A study, where its outcomes lie, and what is scored beyond what its task says."""

    study: Study
    out: Path
    scoring: Scoring = Scoring()

    @property
    def scored(self) -> Scoring:
        return replace(self.scoring, validation=self.study.scored == "validation")


def run_study(
    study: Study,
    out: Path,
    *,
    workers: int,
    budget: float | None = None,
    scoring: Scoring | None = None,
    say: Say = print,
) -> list[Outcome | TextOutcome]:
    """`run_studies` with one."""
    return run_studies([Job(study, out, scoring or Scoring())], workers=workers, budget=budget, say=say)[0]


def run_studies(
    jobs: Sequence[Job], *, workers: int, budget: float | None = None, say: Say = print
) -> list[list[Outcome | TextOutcome]]:
    """Train and score every member that has no outcome yet; returns each study's outcomes, in the order of its plan.

    Args:
        workers: processes side by side, over all GPUs, which take turns.
        budget: seconds after which work ends; members cut short go on from their last checkpoint another time.
    """
    if workers < 1:
        raise ValueError(f"workers: got {workers}, expected at least 1")
    places = _places(jobs)  # wrong settings fail before anything starts
    for job in jobs:
        _check(job.scored, job.study.run(*job.study.members()[0]))
        check_one_corpus(_texts(read_outcomes(job.study, job.out)), _corpus(job.study, job.scoring))
    _share(places)
    pieces = [same[0] for same in places.values() if not (same[0][1] / OUTCOME).is_file()]
    start = time.monotonic()
    if pieces and (budget is None or budget > 0):
        if any(isinstance(run.task, TextTask) and run.task.data is None for run, *_ in pieces):
            raise ValueError("data: got none for a study on text, expected a directory that `fastweight prepare` wrote")
        names = ", ".join(job.study.name for job in jobs)
        say(f"{names}: {len(pieces)} of {len(places)} to train, {workers} at a time")
        gpus = [NO_GPU] if all(on_cpu(job.study) for job in jobs) else visible_gpus()
        end = None if budget is None else start + budget
        try:
            ends = run_pieces(pieces, _member, workers, end, gpus, kind=_arm)
            _follow(ends, len(pieces), start, say, {} if len(jobs) == 1 else _names(jobs))
        except KeyboardInterrupt:
            say("Stopped; what is done is kept, and the same command goes on.")
        _share(places)
    return [read_outcomes(job.study, job.out) for job in jobs]


def _places(jobs: Sequence[Job]) -> dict[str, list[Piece]]:
    """All members as pieces of work, those that are the same together."""
    places: dict[str, list[Piece]] = {}
    for job in jobs:
        for arm, seed in job.study.members():
            run = job.study.run(arm, seed)
            piece = (run, member_dir(job.out, arm, seed), arm, seed, job.scored)
            places.setdefault(identity(to_dict(run), job.study.scored), []).append(piece)
    return places


def _share(places: Mapping[str, Sequence[Piece]]) -> None:
    """Give members the outcome of one that is the same."""
    for same in places.values():
        files = {place / OUTCOME: arm for _, place, arm, *_ in same}
        done = next((file for file in files if file.is_file()), None)
        if done is None:
            continue
        for file, arm in files.items():
            if not file.is_file():
                _write(file.parent, arm, json.loads(done.read_text(encoding="utf-8")))


def _write(place: Path, arm: str, raw: Mapping[str, Any]) -> None:
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / OUTCOME, {**raw, "arm": arm})


def identity(run: Mapping[str, Any], scored: str) -> str:
    """What a run and its score depend on, as text; without where data lies and what only watches.

    Args:
        run: as `to_dict` has it.
        scored: see `Study`.
    """

    def flat(value: Any, name: str) -> dict[str, Any]:
        if isinstance(value, Mapping):
            return {key: leaf for part, item in value.items() for key, leaf in flat(item, f"{name}.{part}").items()}
        return {name: value}

    told = flat(run, "run")
    kept = {name: told[name] for name in told if name not in FREE_SETTINGS or name.rpartition(".")[2] in TESTED}
    return json.dumps([scored, kept], sort_keys=True)


def on_cpu(study: Study) -> bool:
    """Whether a study leaves accelerators alone."""
    return study.run(*study.members()[0]).training.device == "cpu"


def _corpus(study: Study, scoring: Scoring) -> dict[str, str]:
    """What language models of a study are trained and scored on, as far as it says where that lies."""
    task = study.run(*study.members()[0]).task
    return corpus_of(task.data, scoring.texts) if isinstance(task, TextTask) else {}


def _texts(outcomes: Iterable[Outcome | TextOutcome]) -> list[TextOutcome]:
    return [outcome for outcome in outcomes if isinstance(outcome, TextOutcome)]


def _check(scoring: Scoring, run: Run) -> None:
    """ValueError for what the task has no use for, or has itself."""
    if scoring.generate and not isinstance(run.task, AdditionTask):
        raise ValueError(f"generate: got a study of the task {run.task.kind}, expected one of addition")
    if scoring.texts and not isinstance(run.task, TextTask):
        raise ValueError(f"texts: got a study of the task {run.task.kind}, expected one of language models")
    if VALIDATION in scoring.texts:
        raise ValueError(f"texts: got the name {VALIDATION}, expected another: it is that of the data's own split")


def _names(jobs: Sequence[Job]) -> dict[Path, str]:
    """Studies by the directories of their members."""
    return {member_dir(job.out, *member): f"{job.study.name}: " for job in jobs for member in job.study.members()}


def _follow(ends: Iterable[tuple[tuple, str]], total: int, start: float, say: Say, names: Mapping[Path, str]) -> None:
    """Tell what is done, at which rate, and how long the rest takes, until all is done or the time is over."""
    done = 0
    for (_, place, arm, seed, _), told in ends:
        done += 1
        passed = time.monotonic() - start
        left = passed / done * (total - done)
        say(
            f"{done}/{total} {names.get(place, '')}{arm} seed {seed}: {told}  ({passed:.0f} s, about {left:.0f} s left)"
        )
    if done < total:
        say(f"The time is over; {total - done} of {total} are left.")


def read_outcomes(study: Study, out: Path) -> list[Outcome | TextOutcome]:
    """The outcomes that are there."""
    files = [member_dir(out, *member) / OUTCOME for member in study.members()]
    return [outcome_from(json.loads(file.read_text(encoding="utf-8"))) for file in files if file.is_file()]


def add_known(
    study: Study, out: Path, files: Iterable[Path], say: Say = print, scoring: Scoring | None = None, must: bool = True
) -> list[dict[str, str]]:
    """Put outcomes of study.json files where those of this study are looked for; returns by what they were made.

    What was trained on another machine, in part, or for another study thus counts as done. An outcome is taken where
    its settings, as its file has them, are those of a member, test included, whatever the arm is called there; a member
    that `out` holds already is left as it is. Raises ValueError for language models of other text than the study's or
    each other's and, if it `must` be of use, for a file with nothing that this study trains. Trap: recipes are taken as
    they are now.
    """
    made = []
    for file in files:
        if not file.is_file():
            raise ValueError(f"--known: got {file}, expected a study.json")
        told = json.loads(file.read_text(encoding="utf-8"))
        found = _same_runs(study, told)
        if not found and must:
            raise ValueError(f"--known: {file} holds no outcome with the settings of a member of {study.name}")
        say(f"{file}: {len(found)} of {len(told['outcomes'])} outcomes are of {study.name}")
        theirs = _texts(map(outcome_from, found.values()))
        check_one_corpus([*_texts(read_outcomes(study, out)), *theirs], _corpus(study, scoring or Scoring()))
        for (arm, seed), raw in found.items():
            place = member_dir(out, arm, seed)
            if not (place / OUTCOME).is_file():
                _write(place, arm, raw)
        made += [part for part in told["made"] if found and part not in made]
    return made


def _same_runs(study: Study, told: dict[str, Any]) -> dict[Member, dict[str, Any]]:
    """Members of a study, each with the outcome of another study's run of the same settings."""
    theirs = Study(**told["study"])
    known = {identity(to_dict(theirs.run(raw["arm"], raw["seed"])), theirs.scored): raw for raw in told["outcomes"]}
    runs = {member: identity(to_dict(study.run(*member)), study.scored) for member in study.members()}
    return {member: known[run] for member, run in runs.items() if run in known}


def _arm(piece: tuple[Any, ...]) -> str:
    """What a process has compiled for."""
    return piece[2]


def _member(run: Run, run_dir: Path, arm: str, seed: int, scoring: Scoring) -> tuple[bool, str]:
    """Train and score one member in a worker; whether it went well, and a sentence."""
    import torch
    from rich.console import Console

    from fastweight.training import train

    torch.set_num_threads(run.training.threads or 1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each process would start one for every core
    _forget_graphs_of_others(arm)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()  # of the member before
    try:
        train(run, run_dir, console=Console(quiet=True))
        _exact_products()
        outcome = outcome_of(run_dir, arm, seed, scoring)
    except Exception as error:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        return False, f"failed: {type(error).__name__}: {error}"
    write_json(run_dir / OUTCOME, asdict(outcome))
    return True, outcome.in_words()


_compiled_for: list[str] = []  # the arm of the member before, in a worker


def _forget_graphs_of_others(arm: str) -> None:
    """Compiled graphs of other arms go: after eight for one function torch silently compiles no more."""
    import torch

    if _compiled_for not in ([], [arm]):
        torch.compiler.reset()
    _compiled_for[:] = [arm]


def _exact_products() -> None:
    """Float32 products are those of float32 again."""
    import torch

    backends: Any = torch.backends
    if hasattr(backends, "fp32_precision"):
        backends.fp32_precision = "ieee"  # mixing it with the older switch is an error in torch
    else:
        backends.cuda.matmul.allow_tf32 = False
