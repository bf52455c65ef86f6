"""Studies: several models and seeds of one recipe, side by side, into one report; and training one drawn task."""

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fastweight.cli.shared import (
    AllowChanges,
    Mixer,
    Overrides,
    RunDirectory,
    RunDirs,
    app,
    console,
    eval_app,
    named_mixer,
    need,
    run_directory,
    speaks,
    train_and_tell,
    train_app,
)
from fastweight.processes import num_cores


@train_app.command("task", epilog="Example: fastweight train task --recipe mqar-tiny --mixer falcon-1")
def train_task(
    recipe: Annotated[str, typer.Option(help="Recipe name, as mqar-tiny, parity-tiny or s3-tiny, or a YAML file.")],
    mixer: Mixer = None,
    out: RunDirectory = None,
    overrides: Overrides = None,
    allow_changes: AllowChanges = False,
) -> None:
    """Train on associative recall or state tracking; started again, it goes on from the last complete checkpoint."""
    from fastweight.recipes import TextTask, load_recipe

    run = load_recipe(recipe, [*named_mixer(mixer), *(overrides or [])])
    if isinstance(run.task, TextTask):
        raise ValueError(f"recipe: got {recipe!r}, a recipe of the text task, expected one that draws its problems")
    checkpoint = train_and_tell(run, run_directory(run, mixer, out), console(), allow_changes=allow_changes)
    if speaks():
        print(checkpoint)


@eval_app.command("task", epilog="Example: fastweight eval task runs/mqar-tiny/* --out runs/report")
def eval_task(
    runs: RunDirs,
    out: Annotated[Path, typer.Option(help="Directory for study.json, README.md and study.png.")] = Path("runs/report"),
) -> None:
    """Score trained models of a drawn task by size: a table, JSON, Markdown and a picture."""
    need("matplotlib", "the picture")
    from fastweight.evaluation.addition import find_checkpoint
    from fastweight.evaluation.outcomes import Outcome, outcome_of
    from fastweight.evaluation.provenance import made_by
    from fastweight.recipes import TextTask
    from fastweight.study.plan import Study
    from fastweight.study.report import write_study

    for path in runs:  # before anything is scored, which takes minutes
        if isinstance(find_checkpoint(path, lambda text: None)[1].task, TextTask):
            raise ValueError(f"runs: got {path}, a run on text, expected tasks that draw their problems (see eval ppl)")
    scored = [outcome_of(path, str(path), 0) for path in runs]
    outcomes = [outcome for outcome in scored if isinstance(outcome, Outcome)]
    if len({tuple(o.sizes) for o in outcomes}) > 1:
        raise ValueError("runs: got runs with different test sizes, expected runs of one task")
    arms: dict[str, list[str]] = {outcome.arm: [] for outcome in outcomes}
    study = Study("evaluation", "Trained runs, one seed each.", "that of each run", arms, outcomes[0].arm, seeds=1)
    _tell(write_study(study, outcomes, out, [made_by(_command())]))


@app.command(epilog="Example: fastweight study mqar parity --seeds 3 --workers 8 --out runs/study")
def study(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of studies (addition, mqar, parity, pairing-falcon-1, ...) or YAML files."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory; default runs/study/NAME. Of several studies: that of NAME/.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of each arm; default: the study's.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes side by side; default: a core each.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run this arm. Repeatable; default: all.")] = None,
    budget: Annotated[float | None, typer.Option(help="End after so many seconds; started again, it goes on.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Addition: also score free generation.")] = False,
    recipe: Annotated[str | None, typer.Option(help="The same arms on this recipe, instead of the study's.")] = None,
    data: Annotated[Path | None, typer.Option(help="Text: directory that `fastweight prepare` wrote.")] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option("--text", help="Text: score NAME=FILE too; lambada=FILE: last words. Repeatable."),
    ] = None,
    known: Annotated[
        list[Path] | None, typer.Option(help="A study.json whose outcomes count as done. Repeatable.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Directory of the report, default: that of --out. Of several studies: of NAME/.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train several models and seeds side by side on all devices, then compare them seed by seed.

    Several studies share the processes, in the order in which they are named, and what they have in common is trained
    once. Stopped, or at the end of --budget, it reports what is done; started again, it skips that and goes on with
    what was cut short. To put together what several machines trained: --known FILE --known FILE --budget 0 --report
    results/NAME.
    """
    need("matplotlib", "the picture")
    need("accelerate", "training")
    from fastweight.evaluation.outcomes import Scoring
    from fastweight.evaluation.provenance import made_by
    from fastweight.study.plan import load_study
    from fastweight.study.report import write_study
    from fastweight.study.runner import Job, add_known, on_cpu, run_studies

    plans = [load_study(name, [*_data(data), *(overrides or [])], seeds, only or [], recipe) for name in names]
    named, told = [_named(text) for text in texts or []], console()

    def say(text: str) -> None:
        told.print(text, highlight=False, soft_wrap=True)

    if len(dict(named)) < len(named):
        raise ValueError(f"--text: got {', '.join(texts or [])}, expected a name of its own for each")
    if len({plan.name for plan in plans}) < len(plans):
        raise ValueError(f"names: got {', '.join(names)}, expected each study once")
    places = [_place(out, plan.name, len(plans)) or Path("runs/study") / plan.name for plan in plans]
    jobs = [Job(*one, Scoring(generate, texts=dict(named))) for one in zip(plans, places, strict=True)]
    made = [add_known(job.study, job.out, known or [], say, job.scoring, must=len(jobs) == 1) for job in jobs]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as an interruption: what is done is reported
    done = run_studies(jobs, workers=workers or num_cores(), budget=budget, say=say)
    for job, known_by, outcomes in zip(jobs, made, done, strict=True):
        here = [] if known_by and budget == 0 else [made_by(_command(), on_cpu(job.study))]
        if not outcomes:
            say(f"{job.study.name}: nothing is done yet")
        else:
            where = _place(report, job.study.name, len(jobs)) or job.out
            _tell(write_study(job.study, outcomes, where, [*known_by, *here]))
    if any(len(outcomes) < len(job.study.members()) for job, outcomes in zip(jobs, done, strict=True)):
        raise typer.Exit(1)


def _place(directory: Path | None, name: str, count: int) -> Path | None:
    """The directory of one of so many studies."""
    return directory if directory is None or count == 1 else directory / name


def _data(data: Path | None) -> list[str]:
    return [] if data is None else [f"task.data={data}"]


def _named(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not equals or not Path(file).is_file():
        raise ValueError(f"--text: got {text!r}, expected NAME=FILE of a file that is there")
    return name, file


def _command() -> str:
    return shlex.join(["fastweight", *sys.argv[1:]])


def _tell(files: list[Path]) -> None:
    for file in files:
        print(f"{file.suffix[1:]:<4} {file}")
