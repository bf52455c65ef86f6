"""Scores by width into a PNG: whole answers right and digits right against width, training widths shaded.

Trap: matplotlib's pyplot keeps global state and may look for a screen; the figure is drawn on an Agg canvas instead.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fastweight.evaluation.addition import ModelScores

# Okabe and Ito's colours: told apart by colour-blind readers too. Markers and dashes repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = "osD^vPX*"
PANELS = {"exact": "Whole answer right", "token": "Digits right (teacher-forced)"}


def draw(results: Sequence[ModelScores], path: Path) -> None:
    """Write the picture; one line for each model in each of the two panels."""
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), sharex=True)
    for panel, (field, title) in zip(panels, PANELS.items(), strict=True):
        low, high = results[0].train_widths
        panel.axvspan(low - 0.5, high + 0.5, color="#EEEEEE", zorder=0, label="training widths")
        for i, result in enumerate(results):
            panel.plot(
                [s.width for s in result.scores],
                [100 * getattr(s, field) for s in result.scores],
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                linestyle=("-", "--", "-.", ":")[i % 4],
                markersize=5,
                label=result.name,
            )
        panel.set(title=title, xlabel="digits in each number", ylim=(-3, 103))
        panel.set_ylabel(f"% of {results[0].scores[0].count} problems a width" if field == "exact" else "% of digits")
        _tidy(panel, results[0])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    figure.savefig(path, dpi=150)


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of a line among others; dashes and markers change once the colours are used up."""
    turn = index // len(COLOURS)
    marker, dashes = MARKERS[(index + 3 * turn) % len(MARKERS)], ("-", "--", "-.", ":")[turn % 4]
    return {"color": COLOURS[index % len(COLOURS)], "marker": marker, "linestyle": dashes}


def draw_by_context(
    panel: Axes, curves: Mapping[str, Sequence[tuple[float, float]]], ylabel: str, order: Sequence[str] = ()
) -> None:
    """A line for each label: points of (tokens in context, loss); `order` has the labels in that of their colours."""
    order = order or list(curves)
    for label, points in curves.items():
        panel.plot(*zip(*points, strict=True), **line_style(order.index(label)), markersize=4, label=label)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set(xlabel="tokens in context", ylabel=ylabel, title="What more context is worth")


def _tidy(panel: Axes, result: ModelScores) -> None:
    panel.set_xlim(result.scores[0].width - 0.5, result.scores[-1].width + 0.5)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
