"""Outcomes of language models into a table with spreads, a comparison seed by seed, and a picture.

Differences are of validation losses in nats a token, arms of one seed having seen the same tokens in the same order.
Trap: rates are of runs that shared a device; they rank nothing unless all arms ran in equal company.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fastweight.evaluation.page import markdown_table
from fastweight.evaluation.picture import COLOURS, draw_by_context
from fastweight.evaluation.text_outcomes import LAST_WORDS, VALIDATION, TextOutcome
from fastweight.study.effects import varied
from fastweight.study.figures import difference, spread
from fastweight.study.picture import MOST_LINES
from fastweight.study.plan import Study

Groups = Mapping[str, Sequence[TextOutcome]]


def told(outcomes: Sequence[TextOutcome]) -> str:
    """What all arms saw."""
    seen, sizes = sorted({o.tokens for o in outcomes}), {o.corpus_tokens for o in outcomes} - {0}
    corpus = f", from a corpus of {max(sizes):,}" if sizes else ""
    return f"{' to '.join(f'{tokens:,}' for tokens in seen)} tokens of training each{corpus}."


def tables(study: Study, groups: Groups) -> list[str]:
    """The summary, the losses by position, and what the signs mean."""
    return [
        "## Losses",
        summary(study, groups),
        "## Loss by tokens in context (validation)",
        positions(groups),
        f"± is the standard deviation over seeds; beside the difference from {study.against}, its standard error. "
        "Losses are nats a token; perplexities of other texts count words, of last words whole last words.",
    ]


def summary(study: Study, groups: Groups) -> str:
    """A row for each arm; texts that outcomes of another study lack are told of by those that have them."""
    names = sorted({name for group in groups.values() for o in group for name in o.scores} - {VALIDATION})
    head = ["arm", "seeds", "parameters", "validation loss", f"against {study.against}, by seed", "perplexity"]
    for name in names:
        head += [f"{name} accuracy %", f"{name} perplexity"] if name == LAST_WORDS else [f"{name} word perplexity"]
    head += ["tokens/s", "peak GiB"]
    rows = []
    for arm, group in groups.items():
        row = [arm, str(len(group)), f"{group[0].num_parameters:,}", spread(_of(group, VALIDATION, "loss"), 3)]
        row += ["" if arm == study.against else _difference(group, groups.get(study.against, []))]
        row += [spread(_of(group, VALIDATION, "perplexity"), 1)]
        for name in names:
            if name == LAST_WORDS:
                row += [spread([100 * value for value in _of(group, name, "accuracy")], 1)]
            row += [spread(_of(group, name, "perplexity" if name == LAST_WORDS else "word_perplexity"), 1)]
        rows.append([*row, _cost(group, "tokens_per_second", ",.0f"), _cost(group, "peak_memory_gib", ".1f")])
    return markdown_table(head, rows)


def positions(groups: Groups) -> str:
    """A row for each arm, a column for each range of tokens in context, every other one of them."""
    first = next(iter(groups.values()))[0]
    chosen = range(len(first.positions) - 1, -1, -2)[::-1]
    rows = [[arm, *(f"{_at(group, i):.3f}" for i in chosen)] for arm, group in groups.items()]
    return markdown_table(["arm", *(f"{first.positions[i][0]:.0f}" for i in chosen)], rows)


def draw(groups: Groups, against: str, path: Path) -> None:
    """Write the picture: losses of every seed; and by tokens in context how far each arm is from `against`, seed by
    seed, or the losses themselves where that one has no outcome. Of many arms, variants have a panel of their own."""
    shown = _panels(list(groups), against)
    figure = Figure(figsize=(11.5, max(1.8 + 0.3 * max(len(groups), 8), 4.2 * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(shown), 2, width_ratios=(2, 3))
    left, right = figure.add_subplot(grid[:, 0]), []
    _draw_losses(left, groups)
    differences = against in groups and len(groups) > 1
    curves = _apart(groups, against) if differences else _losses(groups)
    ylabel = f"nats a token above {against}" if differences else "nats a token"
    for row, arms in enumerate(shown):
        panel = figure.add_subplot(grid[row, 1], sharey=right[0] if right else None)
        draw_by_context(panel, {arm: curves[arm] for arm in arms if arm in curves}, ylabel, list(groups))
        if differences:
            panel.axhline(0, color="black", linewidth=0.8)
        panel.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        if row:
            panel.set_title("With something changed")
        right.append(panel)
    for panel in (left, *right):
        panel.grid(color="#E5E5E5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _panels(arms: Sequence[str], against: str) -> list[list[str]]:
    """The arms of each panel: all in one, or, of more than MOST_LINES, variants ("ARM, WHAT") beside what they vary,
    if that leaves both panels emptier."""
    variants = varied(arms)
    changed = {*variants, *variants.values()} - {against}
    split = [[arm for arm in arms if arm not in variants], [arm for arm in arms if arm in changed]]
    few = len(arms) <= MOST_LINES
    return [list(arms)] if few or max(map(len, split)) > 0.75 * len(arms) else split


def _losses(groups: Groups) -> dict[str, list[tuple[float, float]]]:
    """By arm: tokens in context and the loss, mean over seeds."""
    return {arm: [(at, _at(group, i)) for i, (at, _) in enumerate(group[0].positions)] for arm, group in groups.items()}


def _apart(groups: Groups, against: str) -> dict[str, list[tuple[float, float]]]:
    """By arm: tokens in context and the mean difference over the seeds that both have, where there are any."""
    theirs, curves = {o.seed: o for o in groups[against]}, {}
    for arm, group in groups.items():
        pairs = [(o.positions, theirs[o.seed].positions) for o in group if o.seed in theirs]
        if arm != against and pairs:
            curves[arm] = [
                (at, mean(ours[i][1] - other[i][1] for ours, other in pairs))
                for i, (at, _) in enumerate(group[0].positions)
            ]
    return curves


def _draw_losses(panel: Axes, groups: Groups) -> None:
    for row, group in enumerate(groups.values()):
        losses = _of(group, VALIDATION, "loss")
        panel.plot(losses, [row] * len(losses), "o", color=COLOURS[row % len(COLOURS)], alpha=0.7, markersize=5)
        panel.plot([mean(losses)], [row], "|", color="black", markersize=14, markeredgewidth=1.6)
    panel.set_yticks(range(len(groups)), list(groups))
    panel.invert_yaxis()
    panel.locator_params(axis="x", nbins=5)
    panel.ticklabel_format(axis="x", useOffset=False)
    panel.set(xlabel="nats a token", title="Validation loss: every seed, and their mean")


def _of(group: Iterable[TextOutcome], text: str, figure: str) -> list[float]:
    return [o.scores[text][figure] for o in group if text in o.scores]


def _at(group: Sequence[TextOutcome], position: int) -> float:
    return mean(o.positions[position][1] for o in group)


def _difference(ours: Sequence[TextOutcome], theirs: Sequence[TextOutcome]) -> str:
    known = {o.seed: o.scores[VALIDATION]["loss"] for o in theirs}
    values = [o.scores[VALIDATION]["loss"] - known[o.seed] for o in ours if o.seed in known]
    return difference(values, 3)


def _cost(group: Sequence[TextOutcome], figure: str, form: str) -> str:
    values = [o.cost[figure] for o in group if figure in o.cost]
    return format(mean(values), form) if values else "-"
