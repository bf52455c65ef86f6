"""The command line: typed arguments into calls of training, evaluation and generation.

Trap: `fastweight --help` must answer at once, so torch and transformers are imported inside commands only. A ValueError
is the user's mistake and ends as one readable line with exit code 2; anything else keeps its traceback.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from fastweight.recipes import Run

app = typer.Typer(
    help="Fast-weight attention: train, evaluate, generate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
train_app = typer.Typer(help="Train a model on a task.", no_args_is_help=True)
eval_app = typer.Typer(help="Evaluate trained models on a task.", no_args_is_help=True)
app.add_typer(train_app, name="train")
app.add_typer(eval_app, name="eval")

RunDirs = Annotated[list[Path], typer.Argument(help="Run directories, or single checkpoints in them.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="Change one setting, as model.hidden_size=64. Repeatable.")
]
Mixer = Annotated[str | None, typer.Option(help="Mixer of every layer, as falcon-3a, falcon-3a.3 or transformer.")]


def _console() -> Console:
    """Messages and bars go to stderr, so that stdout holds results only; under torchrun, process 0 alone speaks."""
    return Console(stderr=True, quiet=not _speaks())


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


@train_app.command("addition", epilog="Example: fastweight train addition --recipe addition-tiny --mixer falcon-3a")
def train_addition(
    recipe: Annotated[str, typer.Option(help="Recipe name (see `fastweight info`) or a YAML file.")] = "addition-tiny",
    mixer: Mixer = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/RECIPE/MIXER.")] = None,
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on although settings differ from the run in the directory.")
    ] = False,
) -> None:
    """Train on variable-digit addition; started again, it goes on from the last complete checkpoint."""
    from fastweight.recipes import load_recipe

    run = load_recipe(recipe, [*([f"model.mixer={mixer}"] if mixer else []), *(overrides or [])])
    run_dir = out or Path("runs") / run.name / (mixer or str(run.model.get("mixer", "default")))
    checkpoint = _train(run, run_dir, allow_changes, _console())
    if _speaks():
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


@app.command(epilog='Example: fastweight generate runs/addition-tiny/falcon-3a "12+34="')
def generate(
    run: Annotated[Path, typer.Argument(help="Run directory or checkpoint of an addition model.")],
    prompts: Annotated[list[str], typer.Argument(help='Sums such as "12+34=": two numbers of the same length.')],
) -> None:
    """Let an addition model answer sums (digits come out least significant first), and check the answers."""
    from fastweight.evaluation.addition import answer, find_checkpoint, load_model

    checkpoint, _ = find_checkpoint(run, _console().print)
    model = load_model(checkpoint)
    for prompt in prompts:
        given, right = answer(model, prompt)
        print(f"{prompt}{given}  ({'right' if given == right else f'wrong, {right} is right'})")


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
    console, run_dirs = _console(), []
    for mixer in ("falcon-3a", "transformer"):
        run = load_recipe("addition-tiny", [f"model.mixer={mixer}", "training.device=cpu", *(overrides or [])])
        run_dirs.append(out / mixer)
        _train(run, run_dirs[-1], False, console)
    _evaluate_addition(run_dirs, out, None, None, True)


@app.command(
    epilog="Example: fastweight bench --quick",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Time the memory on this CPU, after comparing values and gradients; needs a checkout of the repository.

    Options are those of `python -m benchmarks.cpu`, which --help there lists.
    """
    import subprocess

    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "cpu.py").is_file():
        raise ValueError(
            f"bench: no benchmarks beside {checkout / 'fastweight'}, expected a checkout of the repository"
        )
    raise typer.Exit(subprocess.call([sys.executable, "-m", "benchmarks.cpu", *context.args], cwd=checkout))


@app.command(epilog="Example: fastweight info")
def info() -> None:
    """What is installed, what this machine has, and the names of mixers and recipes."""
    import importlib.metadata as metadata
    import platform

    import torch

    from fastweight.layers.mixers import MIXERS
    from fastweight.recipes import recipe_names

    def version(package: str) -> str:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return "not installed"

    print(f"python       {platform.python_version()} on {platform.machine()}, {torch.get_num_threads()} threads")
    for package in ("fastweight", "torch", "transformers", "accelerate", "triton", "matplotlib"):
        print(f"{package:<12} {version(package)}")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"devices      {', '.join(devices) or 'cpu only'}")
    print(f"mixers       {', '.join(MIXERS)}")
    print(f"recipes      {', '.join(recipe_names())}")


def _need(package: str, what: str) -> None:
    """End with one line when a package of the `train` extra is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f'{what} needs {package}, which is not installed: pip install "fastweight[train]"')


def _train(run: "Run", run_dir: Path, allow_changes: bool, console: Console) -> Path:
    _need("accelerate", "training")
    from fastweight.training import train

    try:
        return train(run, run_dir, allow_changes=allow_changes, console=console)
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from the last complete checkpoint.")
        raise typer.Exit(130) from None


def _evaluate_addition(
    runs: list[Path], out: Path, widths: tuple[int, int] | None, problems: int | None, generate: bool
) -> None:
    _need("matplotlib", "the picture")
    from rich.progress import Progress

    from fastweight.evaluation import report
    from fastweight.evaluation.addition import evaluate
    from fastweight.evaluation.report import write_report

    console = _console()
    with Progress(console=console, transient=True) as bar:
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


def main() -> None:
    """Entry point of `fastweight`."""
    try:
        app()
    except ValueError as error:
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
