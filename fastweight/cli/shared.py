"""What every command shares: the typer applications they register on, options, the console, and checks of extras.

Trap: `fastweight --help` must answer soon, so torch and transformers are imported inside commands only.
"""

import importlib.util
import os
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
RunDirectory = Annotated[Path | None, typer.Option(help="Run directory; default runs/RECIPE/MIXER.")]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="Go on although settings differ from the run in the directory.")
]


def console() -> Console:
    """Messages and bars go to stderr, so that stdout holds results only; under torchrun, process 0 alone speaks."""
    return Console(stderr=True, quiet=not speaks())


def speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def need(package: str, what: str, extra: str = "train") -> None:
    """End with one line when a package of an extra is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f'{what} needs {package}, which is not installed: pip install "fastweight[{extra}]"')


def named_mixer(mixer: str | None) -> list[str]:
    """`--mixer` as the override that it stands for."""
    return [] if mixer is None else [f"model.mixer={mixer}"]


def run_directory(run: "Run", mixer: str | None, out: Path | None) -> Path:
    """Where a run goes unless `--out` says otherwise: runs/RECIPE/MIXER."""
    return out or Path("runs") / run.name / (mixer or str(run.model.get("mixer", "default")))


def train_and_tell(
    run: "Run", run_dir: Path, told: Console, *, max_steps: int | None = None, allow_changes: bool = False
) -> Path:
    """Train; an interruption ends the command with a line that says how to go on."""
    need("accelerate", "training")
    from fastweight.training import train

    try:
        return train(run, run_dir, max_steps=max_steps, allow_changes=allow_changes, console=told)
    except KeyboardInterrupt:
        told.print("Stopped. The same command goes on from the last complete checkpoint.")
        raise typer.Exit(130) from None
