"""Outcomes by arm into one picture: few arms as lines over size, many as dots, one for every seed; a row a measure.

Where every arm is called "name, number", each name is a line over the size of the state that the numbers give it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure

from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.picture import COLOURS, line_style

Groups = Mapping[str, Sequence[Outcome]]
MOST_LINES = 8  # more cannot be told apart
MOST_PANELS = 5


def draw(groups: Groups, measures: Mapping[str, str], path: Path) -> None:
    """Write the picture of the measures, given with their titles; over states, of the first of them."""
    if _over_states(groups):
        _draw_states(groups, *next(iter(measures.items())), path)
        return
    many = len(groups) > MOST_LINES
    size = (11, (1.3 + 0.27 * len(groups)) * len(measures) + 0.3) if many else (9.5, 1 + 4.4 * len(measures))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(measures), 1, squeeze=False)[:, 0]
    for part, (measure, title) in zip(parts, measures.items(), strict=True):
        told = "every seed, and their mean" if many else "mean and range of seeds"
        part.suptitle(f"{title[0].upper()}{title[1:]}: {told}")
        (_dots if many else _lines)(part, groups, measure)
    figure.savefig(path, dpi=120)


def _dots(figure: SubFigure, groups: Groups, measure: str) -> None:
    first, chosen = _first(groups), _chosen(groups)
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for panel, at in zip(panels, chosen, strict=True):
        for row, group in enumerate(groups.values()):
            shares = [100 * o.shares[measure][at] for o in group]
            panel.plot(shares, [row] * len(shares), "o", color=COLOURS[0], alpha=0.55, markersize=5)
            panel.plot([sum(shares) / len(shares)], [row], "|", color="black", markersize=14, markeredgewidth=1.6)
        panel.set(xlim=(-4, 104), xlabel="%", title=_title(first, at))
        panel.grid(color="#E5E5E5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(groups)), list(groups))
    panels[0].invert_yaxis()


def _lines(figure: SubFigure, groups: Groups, measure: str) -> None:
    panel = figure.subplots()
    first = _first(groups)
    low, high = max(first.trained[0], first.sizes[0]), first.trained[1]
    panel.axvspan(low, high, color="#EEEEEE", zorder=0, label="training sizes")
    for i, (arm, group) in enumerate(groups.items()):
        shares = [[100 * o.shares[measure][at] for o in group] for at in range(len(first.sizes))]
        style, means = line_style(i), [sum(values) / len(values) for values in shares]
        panel.plot(first.sizes, means, **style, markersize=5, label=arm)
        low_high = list(map(min, shares)), list(map(max, shares))
        panel.fill_between(first.sizes, *low_high, color=style["color"], alpha=0.12)
    if first.sizes[-1] >= 4 * first.sizes[0] and len(first.sizes) <= 10:
        panel.set_xscale("log", base=2)
        panel.set_xticks(first.sizes, list(map(str, first.sizes)))
    panel.set(xlabel="size", ylabel="%", ylim=(-3, 103))
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)


def _over_states(groups: Groups) -> bool:
    numbered = all(arm.rpartition(", ")[2].isdigit() and arm.rpartition(", ")[0] for arm in groups)
    return numbered and all("state_bytes" in o.cost for group in groups.values() for o in group)


def _draw_states(groups: Groups, measure: str, title: str, path: Path) -> None:
    chosen, first = _chosen(groups), _first(groups)
    figure = Figure(figsize=(2.6 + 2.4 * len(chosen), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title[0].upper()}{title[1:]}, against the size of the state: mean and range of seeds")
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for panel, at in zip(panels, chosen, strict=True):
        for i, (name, arms) in enumerate(groupby(groups, key=lambda arm: arm.rpartition(", ")[0])):
            shares = {arm: [100 * o.shares[measure][at] for o in groups[arm]] for arm in arms}
            states = [groups[arm][0].cost["state_bytes"] / 1000 for arm in shares]
            style, values = line_style(i), list(shares.values())
            panel.plot(states, [sum(v) / len(v) for v in values], **style, markersize=4, label=name)
            panel.fill_between(states, list(map(min, values)), list(map(max, values)), color=style["color"], alpha=0.1)
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set(xlabel="KB of state", ylim=(-3, 103), title=_title(first, at))
        panel.grid(color="#E5E5E5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("%")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _first(groups: Groups) -> Outcome:
    return next(iter(groups.values()))[0]


def _chosen(groups: Groups) -> list[int]:
    """Which sizes have a panel: the last, and others as far apart as there is room."""
    count = len(_first(groups).sizes)
    step = math.ceil(count / MOST_PANELS)
    return list(range(count - 1, -1, -step))[::-1]


def _title(first: Outcome, at: int) -> str:
    return f"size {first.sizes[at]}{' (longer)' if first.sizes[at] > first.trained[1] else ''}"
