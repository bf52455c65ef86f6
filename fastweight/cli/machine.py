"""The machine: what is installed, and how fast the memory is on it."""

import sys
from pathlib import Path

import typer

from fastweight.cli.shared import app


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
