"""Lab: what each memory remembers, without training; pictures and a page."""

from pathlib import Path
from typing import Annotated

import typer

from fastweight.cli.shared import app, console, need


@app.command(epilog="Example: fastweight lab --out runs/lab --quick")
def lab(
    out: Annotated[Path, typer.Option(help="Directory for lab.html, README.md, lab.json and pictures.")] = Path(
        "runs/lab"
    ),
    trials: Annotated[int | None, typer.Option(help="Independent streams; default 16.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Pairs in a stream; default 256.")] = None,
    key_dim: Annotated[int | None, typer.Option(help="Width of keys; default 32.")] = None,
    value_dim: Annotated[int | None, typer.Option(help="Width of values; default 32.")] = None,
    gain: Annotated[float | None, typer.Option(help="beta where it is not swept, in (0, 2); default 1.")] = None,
    ridge: Annotated[float | None, typer.Option(help="lambda-bar where it is not swept; default 0.01.")] = None,
    seed: Annotated[int, typer.Option(help="Of the streams.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes: seconds, and noisy.")] = False,
) -> None:
    """Stream key-value pairs through every rule, least squares and online ridge, and draw what they remember.

    Drift, noise, repetition, interference, rescaled keys, old keys with new values: about a minute on one CPU core.
    """
    need("matplotlib", "the picture")
    import sys
    from dataclasses import replace

    import torch
    from rich.progress import Progress

    from fastweight.evaluation.provenance import made_by
    from fastweight.lab import Settings, run_lab, write_lab
    from fastweight.lab.cells import run_cells
    from fastweight.lab.experiments import QUICK

    sizes = {"trials": trials, "tokens": tokens, "key_dim": key_dim, "value_dim": value_dim}
    given = {name: value for name, value in (sizes | {"gain": gain, "ridge": ridge}).items() if value is not None}
    settings = replace(QUICK if quick else Settings(), seed=seed, **given)
    torch.set_num_threads(1)  # the products are small: more threads wait for one another
    with Progress(console=console(), transient=True) as bar:
        task = bar.add_task("lab")
        panels = run_lab(
            settings, lambda name, done, total: bar.update(task, description=name, completed=done, total=total)
        )
    command = " ".join(["fastweight", *sys.argv[1:]])
    for file in write_lab(panels, run_cells(settings), settings, out, made_by(command)):
        print(f"{file.suffix[1:]:<4} {file}")
