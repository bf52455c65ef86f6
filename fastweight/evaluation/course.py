"""The metrics of a run into how its loss fell and what it cost.

Traps: rates of a run that shares its device with others are those of the crowd; lines are means since the line before.
"""

import json
from pathlib import Path
from statistics import median

from fastweight.recipes.rundir import METRICS

MOST_POINTS = 40


def course_of(run_dir: Path) -> tuple[list[list[float]], dict[str, float]]:
    """Pairs [step, loss], at most 40 and the last among them, and the cost.

    Cost: seconds of training, tokens_per_second (the median of the second half of the lines, when all is compiled) and
    peak_memory_gib. Both are empty where a run has no metrics.
    """
    file = run_dir / METRICS
    told = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    lines = [line for line in map(json.loads, told) if "loss" in line]
    if not lines:
        return [], {}
    every = -(-len(lines) // MOST_POINTS)
    curve = [[line["step"], round(line["loss"], 4)] for line in lines[::-1][::every][::-1]]
    steps = [line["step"] for line in lines]
    seconds = sum(
        (step - before) / line["steps_per_second"]
        for step, before, line in zip(steps, [0, *steps], lines, strict=False)
        if line.get("steps_per_second")
    )
    rates = [line["tokens_per_second"] for line in lines[len(lines) // 2 :] if "tokens_per_second" in line]
    memory = [line["peak_memory_gib"] for line in lines if "peak_memory_gib" in line]
    cost: dict[str, float] = {"seconds": round(seconds, 1)}
    if rates:
        cost["tokens_per_second"] = median(rates)
    if memory:
        cost["peak_memory_gib"] = max(memory)
    return curve, cost
