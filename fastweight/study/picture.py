"""Outcomes by arm into one picture: mean over seeds against size, with the range of the seeds as a band."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.picture import COLOURS, MARKERS


def draw(groups: Mapping[str, Sequence[Outcome]], measure: str, title: str, path: Path) -> None:
    """Write the picture; training sizes are shaded."""
    figure = Figure(figsize=(9.5, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    first = next(iter(groups.values()))[0]
    panel.axvspan(*first.trained, color="#EEEEEE", zorder=0, label="training sizes")
    for i, (arm, group) in enumerate(groups.items()):
        shares = [[100 * o.shares[measure][at] for o in group] for at in range(len(first.sizes))]
        colour = COLOURS[i % len(COLOURS)]
        panel.plot(
            first.sizes,
            [sum(values) / len(values) for values in shares],
            color=colour,
            marker=MARKERS[i % len(MARKERS)],
            linestyle=("-", "--", "-.", ":")[i // len(COLOURS) % 4],
            markersize=5,
            label=arm,
        )
        panel.fill_between(first.sizes, list(map(min, shares)), list(map(max, shares)), color=colour, alpha=0.12)
    if first.sizes[-1] >= 4 * first.sizes[0] and len(first.sizes) <= 10:
        panel.set_xscale("log", base=2)
        panel.set_xticks(first.sizes, list(map(str, first.sizes)))
    panel.set(
        xlabel="size", ylabel="%", title=f"{title[0].upper()}{title[1:]}, mean and range of seeds", ylim=(-3, 103)
    )
    panel.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
