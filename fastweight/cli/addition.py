"""Addition: train and evaluate models of the addition task, and the demo."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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


@train_app.command("addition", epilog="Example: fastweight train addition --recipe addition-tiny --mixer falcon-3a")
def train_addition(
    recipe: Annotated[str, typer.Option(help="Recipe name (see `fastweight info`) or a YAML file.")] = "addition-tiny",
    mixer: Mixer = None,
    out: RunDirectory = None,
    overrides: Overrides = None,
    allow_changes: AllowChanges = False,
) -> None:
    """Train on variable-digit addition; started again, it goes on from the last complete checkpoint."""
    from fastweight.recipes import load_recipe

    run = load_recipe(recipe, [*named_mixer(mixer), *(overrides or [])])
    checkpoint = train_and_tell(run, run_directory(run, mixer, out), console(), allow_changes=allow_changes)
    if speaks():
        print(checkpoint)


@eval_app.command("addition", epilog="Example: fastweight eval addition runs/addition-tiny/* --out runs/report")
def eval_addition(
    runs: RunDirs,
    out: Annotated[Path, typer.Option(help="Directory for addition.json, addition.md and addition.png.")] = Path(
        "runs/report"
    ),
    widths: Annotated[str | None, typer.Option(help="Digits to test, as 1-48; default: the recipe's.")] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Problems per width; default: the recipe's.")] = None,
    generate: Annotated[bool, typer.Option(help="Also score free generation.")] = True,
) -> None:
    """Score trained models by width: a table, JSON, Markdown and a picture."""
    _evaluate_addition(runs, out, _width_range(widths), problems, generate)


@app.command(epilog="Example: fastweight demo --out runs/demo")
def demo(
    out: Annotated[Path, typer.Option(help="Directory for both runs and the report.")] = Path("runs/demo"),
    overrides: Overrides = None,
) -> None:
    """Train falcon-3a and a Transformer on short sums and compare them on longer ones (minutes on two CPU cores).

    Interrupted and started again, it goes on from the last complete checkpoint.
    """
    import torch

    from fastweight.recipes import load_recipe

    torch.set_num_threads(1)  # enough for models this small, and no slower where the cores are shared
    told, run_dirs = console(), []
    for mixer in ("falcon-3a", "transformer"):
        run = load_recipe("addition-tiny", [*named_mixer(mixer), "training.device=cpu", *(overrides or [])])
        run_dirs.append(out / mixer)
        train_and_tell(run, run_dirs[-1], told)
    _evaluate_addition(run_dirs, out, None, None, True)


def _evaluate_addition(
    runs: list[Path], out: Path, widths: tuple[int, int] | None, problems: int | None, generate: bool
) -> None:
    need("matplotlib", "the picture")
    from rich.progress import Progress

    from fastweight.evaluation import report
    from fastweight.evaluation.addition import evaluate
    from fastweight.evaluation.report import write_report

    told = console()
    with Progress(console=told, transient=True) as bar:
        task = bar.add_task("evaluating")
        results = evaluate(
            runs,
            widths=widths,
            num_problems=problems,
            generate=generate,
            say=bar.console.print,
            progress=lambda name, done, total: bar.update(task, description=name, completed=done, total=total),
        )
    files = write_report(results, out)
    stdout = Console()
    stdout.print(report.terminal_table(results))
    for file in files:
        print(f"{file.suffix[1:]:<4} {file}")
    print(report.verdict(results))


def _width_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition("-")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise ValueError(f"--widths: got {text!r}, expected a range of digits such as 1-48")
    return int(low), int(high or low)
