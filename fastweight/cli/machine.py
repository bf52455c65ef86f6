"""What there is: the machine, how fast the memory is on it, and what a recipe costs before anything is trained."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastweight.cli.shared import Mixer, Overrides, app, named_mixer

if TYPE_CHECKING:
    from fastweight.recipes import Run


@app.command(
    epilog="Example: fastweight bench --quick",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Time the memory on this CPU, after comparing values and gradients; needs a checkout of the repository.

    Options are those of `python -m benchmarks.cpu`, which --help there lists.
    """
    import subprocess

    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "benchmarks" / "cpu.py").is_file():
        raise ValueError(
            f"bench: no benchmarks beside {checkout / 'fastweight'}, expected a checkout of the repository"
        )
    raise typer.Exit(subprocess.call([sys.executable, "-m", "benchmarks.cpu", *context.args], cwd=checkout))


@app.command(epilog="Example: fastweight info falcon-1.3 --set model.pairing=same-step")
def info(
    recipe: Annotated[str | None, typer.Argument(help="Recipe name or YAML file; without one, the machine.")] = None,
    mixer: Mixer = None,
    overrides: Overrides = None,
) -> None:
    """Without a recipe: what is installed, and the names of mixers and recipes. With one: its cost and all settings.

    Costs are parameters, the bytes that one sequence carries, and FLOP per token; they are counted, not measured.
    """
    if recipe is not None:
        _describe(recipe, [*named_mixer(mixer), *(overrides or [])])
    elif mixer or overrides:
        raise ValueError("info: got --mixer or --set without a recipe, expected a recipe to change")
    else:
        _machine()


def _describe(recipe: str, overrides: list[str]) -> None:
    import torch
    import yaml

    from fastweight.models.cost import flops_per_token, meta_model, num_parameters, state_bytes
    from fastweight.recipes import load_recipe, to_dict
    from fastweight.training.model import config_of, setting_names

    run = load_recipe(recipe, overrides)
    config, length = config_of(run), _longest_sequence(run)
    model = meta_model(config)
    dtype = torch.float32 if run.training.precision == "fp32" else torch.bfloat16
    held, more = (state_bytes(config, length + n, dtype) for n in (0, 1))
    growth = f", {more - held:,} more for each token" if more > held else ", however many tokens"
    print(f"recipe       {run.name}: {run.about}")
    layers = ", ".join(f"{config.mixers.count(name)} x {name}" for name in dict.fromkeys(config.mixers))
    print(f"mixers       {layers}")
    print(f"parameters   {num_parameters(model):,}, {num_parameters(model, embeddings=False):,} without embeddings")
    print(f"state        {held:,} bytes a sequence after {length:,} tokens{growth}")
    print(f"training     {flops_per_token(config, length):.4g} FLOP per token in sequences of {length:,}")
    print(f"decoding     {flops_per_token(config, length, training=False):.4g} FLOP per token after {length:,}\n")
    whole = to_dict(run) | {"model": {name: getattr(config, name) for name in setting_names()}}
    print(yaml.safe_dump(whole, sort_keys=False), end="")


def _longest_sequence(run: "Run") -> int:
    """Tokens of the longest training sequence; a sum of n digits takes 3 n + 3."""
    task = run.task
    if task.kind == "addition":
        return 3 * task.train_widths[1] + 3
    return task.sequence_length if task.kind == "text" else task.longest


def _machine() -> None:
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
