"""A report -> one PNG: a bar per contestant against its target, and time per token against T."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.report import Report, Row, ScalingRow

COLOURS = {"pass": "#2a7f62", "miss": "#d98e04", "": "#8a94a6"}


def _bars(axes: Axes, title: str, group: list[Row]) -> None:
    """Horizontal bars of the ratio, with the target as a black tick."""
    bars = [(row, row.ratio) for row in group if row.ratio is not None]
    for place, (row, ratio) in enumerate(bars):
        axes.barh(place, ratio, color=COLOURS[row.verdict], height=0.7)
        bound = float(row.target.split()[1].rstrip("x")) if row.target else 0.0
        if row.target:
            axes.plot([bound, bound], [place - 0.42, place + 0.42], color="black", linewidth=2)
        axes.text(max(ratio, bound), place, f"  {ratio:.2f}x", va="center", fontsize=8)
    labels = [f"{row.contestant}, {row.mode}" for row, _ in bars]
    axes.set_yticks(range(len(bars)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    meaning = "speed-up (longer is faster)" if group[0].kind == "speed-up" else "relative time (shorter is faster)"
    axes.set_title(f"{title}\n{meaning}; black tick = target", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Axes, scaling: list[ScalingRow]) -> None:
    """Time per token and head against T, a line per rule."""
    for rule in dict.fromkeys(row.rule for row in scaling):
        points = [row for row in scaling if row.rule == rule]
        axes.plot([row.tokens for row in points], [row.time_us for row in points], marker="o", label=rule)
    tokens = sorted({row.tokens for row in scaling})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{length:,}" for length in tokens])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("T")
    axes.set_ylabel("us per token and head, fwd + bwd")
    axes.set_title("Time per token as T grows (flat is linear)", fontsize=9)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path, report: Report) -> None:
    """Write the picture; panels in the order of the races, then the scaling."""
    groups, where = report.races(), report.environment
    panels = len(groups) + bool(report.scaling)
    if not panels:
        return
    height = (panels + 1) // 2
    figure, grid = plt.subplots(height, 2, figsize=(13, 4.2 * height), squeeze=False)
    cells = list(grid.flat)
    for axes, (title, group) in zip(cells, groups.items(), strict=False):
        _bars(axes, title, group)
    if report.scaling:
        _lines(cells[len(groups)], report.scaling)
    for axes in cells[panels:]:
        axes.set_axis_off()
    caption = f"{where['cpu']}, {where['threads']} thread(s), torch {where['torch']}, commit {where['commit']}"
    figure.suptitle(caption, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
