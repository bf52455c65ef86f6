"""Scores by width into tables (terminal, Markdown) and one sentence that says what the numbers show.

The sentence is computed, not written beforehand: it says when a model has not learned its training widths, when no
model goes beyond them, when a difference is within sampling noise, and which one is ahead otherwise. Its noise is that
of the drawn test problems alone; a difference between training seeds is not in it, and the sentence says so.
"""

from collections.abc import Sequence
from math import sqrt
from pathlib import Path

from rich import box
from rich.table import Table

from fastweight.evaluation.addition import ModelScores, to_json
from fastweight.files import write_json

LEARNED = 0.9  # mean exact match on the training widths from which extrapolation figures mean something
NOTHING = 0.02  # mean exact match on longer widths below which nothing is solved to speak of
FIELDS = {
    "exact": "whole answer, teacher-forced",
    "token": "digits, teacher-forced",
    "generated": "whole answer, free generation",
    "generated_token": "digits, free generation",
}


def percent(value: float | None) -> str:
    """A fraction as a percentage with one decimal; a dash for None."""
    return "-" if value is None else f"{100 * value:.1f}"


def rows(results: Sequence[ModelScores], field: str) -> list[list[str]]:
    """Table rows for one Score field: a row for each width, then the means within and beyond the training widths."""
    by_width = [
        [str(score.width)] + [percent(getattr(result.scores[i], field)) for result in results]
        for i, score in enumerate(results[0].scores)
    ]
    means = [
        [label] + [percent(result.mean(field, longer)) for result in results]
        for label, longer in (("mean, trained", False), ("mean, longer", True))
    ]
    return by_width + means


def terminal_table(results: Sequence[ModelScores]) -> Table:
    """A rich table: exact match by width, and for up to three models digit accuracy, forced and free, beside it."""
    short = {"exact": "answers", "token": "digits", "generated_token": "free"}
    fields = list(short) if len(results) <= 3 else ["exact"]
    count, trained = results[0].scores[0].count, results[0].train_widths
    table = Table(title=f"Addition: % right of {count} problems a width", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("width", no_wrap=True)
    for result in results:
        for field in fields:
            head = f"{result.name if field == 'exact' else ''}\n{short[field] if len(fields) > 1 else ''}"
            table.add_column(head, justify="right", no_wrap=True)
    columns = [rows([result], field) for result in results for field in fields]
    for i, (label, _) in enumerate(columns[0]):
        width = results[0].scores[i].width if i < len(results[0].scores) else None
        inside = width is not None and trained[0] <= width <= trained[1]
        ends = width is not None and width in (trained[1], results[0].scores[-1].width)
        table.add_row(label + (" trained" if inside else ""), *(rows[i][1] for rows in columns), end_section=ends)
    return table


def markdown(results: Sequence[ModelScores], picture: str | None = None) -> str:
    """A Markdown report: the sentence, the picture, and one table for each measure."""
    parts = ["# Variable-digit addition", verdict(results)]
    if picture:
        parts.append(f"![Accuracy against width]({picture})")
    for field, title in FIELDS.items():
        if getattr(results[0].scores[0], field) is None:
            continue
        head = ["digits"] + [result.name for result in results]
        lines = [head, ["---:"] * len(head), *rows(results, field)]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append(f"## {title[0].upper()}{title[1:]} (% right)\n\n{table}")
    sizes = "; ".join(f"{result.name}: {result.num_parameters:,} parameters, {result.checkpoint}" for result in results)
    return "\n\n".join([*parts, sizes]) + "\n"


def write_report(results: Sequence[ModelScores], out: Path) -> list[Path]:
    """Write addition.json, addition.md and addition.png into a directory; returns their paths."""
    from fastweight.evaluation.picture import draw

    out.mkdir(parents=True, exist_ok=True)
    data, text, picture = (out / f"addition.{suffix}" for suffix in ("json", "md", "png"))
    write_json(data, {"verdict": verdict(results), "models": to_json(results)})
    text.write_text(markdown(results, picture.name), encoding="utf-8")
    draw(results, picture)
    return [data, text, picture]


def noise(result: ModelScores) -> float:
    """Standard error of the mean exact match over longer widths, from the finite number of test problems."""
    chosen = [s for s in result.scores if s.width > result.train_widths[1]]
    return sqrt(sum(s.exact * (1 - s.exact) / s.count for s in chosen)) / max(len(chosen), 1)


def verdict(results: Sequence[ModelScores]) -> str:
    """One sentence (two with a caveat) that says what the exact-match figures show, whoever is ahead."""
    unlearned = [r for r in results if (r.mean("exact", longer=False) or 0.0) < LEARNED]
    if unlearned:
        named = ", ".join(f"{r.name} ({percent(r.mean('exact', longer=False))}%)" for r in unlearned)
        return f"No fair comparison: the training widths themselves are not learned by {named}."
    means = {r.name: r.mean("exact", longer=True) for r in results}
    if None in means.values():
        return "All models have learned the training widths; no longer width was tested."
    order = sorted(results, key=lambda r: means[r.name] or 0.0, reverse=True)
    first = min(s.width for s in order[0].scores if s.width > order[0].train_widths[1])
    listed = ", ".join(f"{r.name} {percent(means[r.name])}%" for r in order)
    where = f"On sums of {first} to {order[0].scores[-1].width} digits after training on up to {first - 1}"
    seeds = "One training seed each: another seed can change this."
    if (means[order[0].name] or 0.0) < NOTHING:
        digits = ", ".join(f"{r.name} {percent(r.mean('token', longer=True))}%" for r in order)
        nothing = f"no model solves more than {percent(NOTHING)}% of the sums ({listed})"
        return f"{where}, {nothing}; of the single digits they get right {digits} (guessing: 10%). {seeds}"
    if len(order) == 1:
        return f"{where}, {order[0].name} solves {percent(means[order[0].name])}% of the problems. {seeds}"
    return f"{where}, {_comparison(order, means)} ({listed}). {seeds}"


def _comparison(order: Sequence[ModelScores], means: dict[str, float | None]) -> str:
    best, second = order[0], order[1]
    lead = (means[best.name] or 0.0) - (means[second.name] or 0.0)
    if lead <= 2 * sqrt(noise(best) ** 2 + noise(second) ** 2):
        return f"{best.name} and {second.name} do not differ by more than sampling noise"
    return f"{best.name} solves the most, {100 * lead:.1f} points ahead of {second.name}"
