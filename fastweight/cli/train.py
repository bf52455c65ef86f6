"""Language models: train on prepared text."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fastweight.cli.shared import (
    Mixer,
    Overrides,
    console,
    named_mixer,
    run_directory,
    speaks,
    train_and_tell,
    train_app,
)


@train_app.command("lm", epilog="Example: fastweight train lm --recipe lm-tiny --data data/mine --mixer falcon-1")
def train_lm(
    recipe: Annotated[str, typer.Option(help="Recipe name (see `fastweight info`) or a YAML file.")] = "lm-tiny",
    data: Annotated[Path | None, typer.Option(help="Directory that `fastweight prepare` wrote.")] = None,
    mixer: Mixer = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; default runs/RECIPE/MIXER.")] = None,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after this step. The schedule stays the recipe's; started again, it goes on."),
    ] = None,
    report: Annotated[
        Literal["tensorboard", "wandb", "none"] | None,
        typer.Option(help="Where to report beside metrics.jsonl; default: the recipe's, else tensorboard."),
    ] = None,
    overrides: Overrides = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on although settings or data differ from the run's.")
    ] = False,
) -> None:
    """Train a language model on token shards; started again, it goes on from the last complete checkpoint.

    Several GPUs or machines: torchrun --nproc-per-node 8 -m fastweight train lm ...; --set engine.parallel=fsdp2 shards
    parameters and optimizer.
    """
    from fastweight.recipes import TextTask, load_recipe

    own = {"task.data": None if data is None else str(data), "engine.report": report}
    named = [f"{key}={value}" for key, value in own.items() if value is not None]
    run = load_recipe(recipe, [*named_mixer(mixer), *named, *(overrides or [])])
    if not isinstance(run.task, TextTask):
        raise ValueError(f"recipe: got {recipe!r}, a recipe of the {run.task.kind} task, expected one of kind text")
    checkpoint = train_and_tell(
        run, run_directory(run, mixer, out), console(), max_steps=max_steps, allow_changes=allow_changes
    )
    if speaks():
        print(checkpoint)
