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
from fastweight.study.figures import difference, spread
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
    seed, or the losses themselves where that one has no outcome."""
    figure = Figure(figsize=(11, 1.8 + 0.3 * max(len(groups), 8)), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_losses(left, groups)
    if against in groups and len(groups) > 1:
        draw_by_context(right, _apart(groups, against), f"nats a token above {against}", list(groups))
        right.axhline(0, color="black", linewidth=0.8)
    else:
        curves = {
            arm: [(at, _at(group, i)) for i, (at, _) in enumerate(group[0].positions)] for arm, group in groups.items()
        }
        draw_by_context(right, curves, "nats a token")
    for panel in (left, right):
        panel.grid(color="#E5E5E5", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*right.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


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
