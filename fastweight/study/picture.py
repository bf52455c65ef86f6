"""Outcomes by arm into one picture: few arms as lines over size, many as dots, one for every seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.picture import COLOURS, line_style

Groups = Mapping[str, Sequence[Outcome]]
MOST_LINES = 8  # more cannot be told apart
MOST_PANELS = 5


def draw(groups: Groups, measure: str, title: str, path: Path) -> None:
    """Write the picture of one measure."""
    many = len(groups) > MOST_LINES
    figure = Figure(figsize=(11, 1.6 + 0.27 * len(groups)) if many else (9.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{title[0].upper()}{title[1:]}: {'every seed, and their mean' if many else 'mean and range of seeds'}"
    )
    (_dots if many else _lines)(figure, groups, measure)
    figure.savefig(path, dpi=120)


def _dots(figure: Figure, groups: Groups, measure: str) -> None:
    first = next(iter(groups.values()))[0]
    step = -(-len(first.sizes) // MOST_PANELS)
    chosen = list(range(len(first.sizes) - 1, -1, -step))[::-1]
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False)[0]
    for panel, at in zip(panels, chosen, strict=True):
        for row, group in enumerate(groups.values()):
            shares = [100 * o.shares[measure][at] for o in group]
            panel.plot(shares, [row] * len(shares), "o", color=COLOURS[0], alpha=0.55, markersize=5)
            panel.plot([sum(shares) / len(shares)], [row], "|", color="black", markersize=14, markeredgewidth=1.6)
        longer = first.sizes[at] > first.trained[1]
        panel.set(xlim=(-4, 104), xlabel="%", title=f"size {first.sizes[at]}{' (longer)' if longer else ''}")
        panel.grid(color="#E5E5E5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(groups)), list(groups))
    panels[0].invert_yaxis()


def _lines(figure: Figure, groups: Groups, measure: str) -> None:
    panel = figure.subplots()
    first = next(iter(groups.values()))[0]
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
