"""Panels into pictures: colour says which step a rule takes, the dash which objective it follows.

scalar step (1, 1A) blue      column step (2, 2A) orange      window (3, 3A) green
regression: solid             inner product: dashed           step that ignores the keys: dotted
least squares: thick black    online ridge: black circles (it lies on falcon-1)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastweight.evaluation.picture import COLOURS
from fastweight.lab.cells import CELLS, QUESTIONS, Cell
from fastweight.lab.experiments import Panel

BLUE, ORANGE, GREEN = COLOURS[0], COLOURS[1], COLOURS[2]
STYLES: dict[str, dict[str, Any]] = {
    "falcon-1": {"color": BLUE},
    "falcon-2": {"color": ORANGE},
    "falcon-3": {"color": GREEN},
    "falcon-1a": {"color": BLUE, "linestyle": "--"},
    "falcon-2a": {"color": ORANGE, "linestyle": "--"},
    "falcon-3a": {"color": GREEN, "linestyle": "--"},
    "least squares": {"color": "black", "linewidth": 2.4, "zorder": 1},
    "online ridge": {"color": "black", "linestyle": "none", "marker": "o", "markersize": 4, "markerfacecolor": "none"},
    "falcon-1, direct": {"color": BLUE, "linestyle": ":", "linewidth": 2},
    "falcon-1a, direct": {"color": BLUE, "linestyle": (0, (1, 4)), "linewidth": 2},
}


def draw_panel(axes: Axes, panel: Panel) -> None:
    """Lines with bands of one standard error."""
    for name, (means, errors) in panel.lines.items():
        style = STYLES[name]
        axes.plot(panel.x, means, label=name, **style)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(panel.x, low, high, color=style["color"], alpha=0.12, linewidth=0)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log:
        axes.set_xscale("log", base=10 if panel.x[-1] / panel.x[0] > 1000 else 2)
        if panel.x[-1] / panel.x[0] <= 1000:
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.log_y:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(-0.05, 1.05)
    axes.grid(color="#E5E5E5", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_one(panel: Panel, path: Path) -> None:
    """One panel with its legend."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    draw_panel(figure.subplots(), panel)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=90)


def draw_family(panels: Mapping[str, Panel], path: Path) -> None:
    """All panels in one figure with one legend: the family at a glance."""
    columns, lines = 3, -(-len(panels) // 3)
    figure = Figure(figsize=(4.5 * columns, 3.6 * lines + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    for place, panel in enumerate(panels.values(), start=1):
        draw_panel(figure.add_subplot(lines, columns, place), panel)
    most = max(figure.axes, key=lambda axes: len(axes.get_lines()))
    figure.legend(*most.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=100)


def draw_cells(cells: Sequence[Cell], path: Path) -> None:
    """A small table for each rule: cells down, questions across, shares of right answers in percent."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    rules = list(dict.fromkeys(cell.rule for cell in cells))
    grid = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, rule in zip(grid.flat, rules, strict=True):
        shares = [[100 * cell.right[q] for q in QUESTIONS] for cell in cells if cell.rule == rule]
        axes.imshow(shares, vmin=0, vmax=100, cmap="Blues", aspect="auto")
        for row, line in enumerate(shares):
            for column, share in enumerate(line):
                axes.text(
                    column, row, f"{share:.0f}", ha="center", va="center", color="white" if share > 60 else "black"
                )
        axes.set_title(rule)
        axes.set_xticks(range(len(QUESTIONS)), QUESTIONS)
        axes.set_yticks(range(len(CELLS)), [f"{pairing}\n{timing}" for pairing, timing in CELLS], fontsize=8)
    figure.suptitle("% right: the next token, this token again, this token at its first coming")
    figure.savefig(path, dpi=100)
