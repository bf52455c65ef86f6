"""`python -m benchmarks.cpu`: the memory on a CPU against a public peer and against itself, gate first.

Stages: gate (values and gradients against the float64 recurrence; the peer also against ours at the timed shape), races
(interleaved rounds), growth (time and memory per token as T grows), report. Exit code 1 when a gate is red; a missed
target only shows as a miss, because a clock on a shared machine must not fail a build.
"""

import os
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks import cases, report, stages, timing

WIDTH = 110  # of the tables where the output is a file


def pick(race: cases.Race, wanted: re.Pattern[str]) -> list[str]:
    """Contestants whose name matches, and the baseline beside them; nobody if none matches."""
    names = [name for name in race.contestants if wanted.search(name)]
    return [name for name in race.contestants if name in names or name == race.baseline] if names else []


def main(
    quick: Annotated[bool, typer.Option("--quick", help="3 rounds, no growth: a look while tuning.")] = False,
    repeats: Annotated[int, typer.Option(help="Interleaved rounds per race and mode.", min=1)] = 15,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; else results/cpu after a whole run, nothing otherwise.")
    ] = None,
    only: Annotated[str, typer.Option(help="Regular expression: contestants to run beside the baseline.")] = "",
    shape: Annotated[str, typer.Option(help="Regular expression: shapes to run, such as '4096'.")] = "",
    chunk_size: Annotated[int | None, typer.Option(help="Chunk length instead of the op's own choice.", min=1)] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 2,
    clock: Annotated[
        str, typer.Option(help="wall, or cpu (with --threads 1: fair ratios on a busy machine).")
    ] = "wall",
    growth: Annotated[bool, typer.Option("--growth/--no-growth", help="Time and memory per token as T grows.")] = True,
) -> None:
    """Time the memory on the CPU, after checking its values and gradients.

    Example: python -m benchmarks.cpu --quick --only 'falcon-[13]$' --shape 4096
    """
    console = Console()
    console.width = max(console.width, WIDTH)
    torch.set_num_threads(threads)
    if clock not in timing.CLOCKS:
        raise typer.BadParameter(f"clock: got {clock!r}, expected one of {', '.join(timing.CLOCKS)}")
    growth = growth and not quick
    plan = timing.Plan(min(repeats, 3) if quick else repeats, clock)
    partial = bool(quick or only or shape or chunk_size or not growth)
    out = out or (None if partial else Path("results/cpu"))
    where = {"clock": clock} | report.environment(shlex.join(["python", "-m", "benchmarks.cpu", *sys.argv[1:]]))
    console.print(
        f"{where['cpu']}, {threads} threads, torch {where['torch']}, load {where['load']}",
        highlight=False,
        soft_wrap=True,
    )
    known, wanted = cases.contestants(chunk_size), re.compile(only)
    result = report.Report(where)
    for race in cases.RACES:
        names = pick(race, wanted)
        if names and re.search(shape, str(race.shape)):
            verdicts, rows = stages.run_race(console, race, known, names, plan)
            result.gates += verdicts
            result.rows += rows
    if growth:
        rules = [name for name, contestant in known.items() if wanted.search(name) and name == contestant.rule]
        result.scaling, result.growths = stages.run_scaling(
            console, rules, known, replace(plan, repeats=min(repeats, 3))
        )
    where["load at the end"] = round(os.getloadavg()[0], 2)
    result.show(console)
    if out is not None:
        result.save(out)
        console.print(f"Written: {out}/benchmark.json, benchmark.md, benchmark.png", highlight=False, soft_wrap=True)
    if not all(verdict.green for verdict in result.gates):
        raise typer.Exit(1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
