"""Outcomes into study.json, a table with spreads, a comparison seed by seed, and a picture.

Spread is the standard deviation over seeds (n - 1). A difference is that of two arms with the same seed (the same
data), its mean given with the standard error over seeds. Trap: with few seeds neither says much; the tables say n.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from fastweight.evaluation.outcomes import Outcome, TextOutcome
from fastweight.evaluation.page import findings, markdown_table
from fastweight.files import write_json, write_text
from fastweight.study import effects, figures
from fastweight.study.effects import paired
from fastweight.study.plan import Study

STUDY = "study.json"
Kind = TypeVar("Kind", Outcome, TextOutcome)
Outcomes = Sequence[Outcome | TextOutcome]

KNOWING = "... of runs that know the training sizes"
MEASURES = {
    "token": "tokens right",
    "exact": "whole problems right",
    "generated": "whole problems right, free generation",
    "generated_token": "tokens right, free generation",
}


def by_arm(study: Study, outcomes: Sequence[Kind]) -> dict[str, list[Kind]]:
    """The outcomes of each arm that has any."""
    groups = {arm: [o for o in outcomes if o.arm == arm] for arm in study.arms}
    return {arm: group for arm, group in groups.items() if group}


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation in percent; the mean alone for one value, a dash without any."""
    return figures.spread([100 * value for value in values], 1)


def difference(values: Sequence[float]) -> str:
    """Mean difference and its standard error in points; a dash without any."""
    return figures.difference([100 * value for value in values], 1)


def summary_table(study: Study, groups: Mapping[str, Sequence[Outcome]], measure: str) -> str:
    """A row for each arm: seeds, parameters, mean inside and beyond the training sizes, difference from `against`; and
    the mean beyond them of the runs that have learned what they were trained on, where some have and some have not."""
    beyond = _beyond(groups, measure)
    learned = {o.learned for group in groups.values() for o in group} == {True, False} and beyond
    states = {arm: group[0].cost["state_bytes"] for arm, group in groups.items() if "state_bytes" in group[0].cost}
    head = ["arm", "seeds", "parameters", *["state KB"] * bool(states), "training sizes %"]
    head += ["longer %"] * beyond + [KNOWING] * learned
    head += [f"against {study.against}, by seed"]
    rows = []
    for arm, group in groups.items():
        row = [arm, str(len(group)), f"{group[0].num_parameters:,}"]
        row += [f"{states[arm] / 1000:,.1f}" if arm in states else "-"] * bool(states)
        row.append(_mean_of(group, measure, False))
        row += [_mean_of(group, measure, True)] * beyond
        knowing = [o for o in group if o.learned]
        row += [f"{_mean_of(knowing, measure, True)} ({len(knowing)})" if knowing else "-"] * learned
        others = groups.get(study.against, [])
        row.append("" if arm == study.against else difference(paired(group, others, measure, beyond)))
        rows.append(row)
    return markdown_table(head, rows)


def size_table(groups: Mapping[str, Sequence[Outcome]], measure: str) -> str:
    """A row for each arm, a column for each size: mean and spread."""
    sizes = next(iter(groups.values()))[0].sizes
    if len(sizes) > 10:
        sizes = [size for size in sizes if size % 8 == 0 or size in (sizes[0], sizes[-1], 33)]
    rows = [
        [arm, *(spread([o.shares[measure][o.sizes.index(size)] for o in group]) for size in sizes)]
        for arm, group in groups.items()
    ]
    return markdown_table(["arm", *map(str, sizes)], rows)


def _beyond(groups: Mapping[str, Sequence[Outcome]], measure: str) -> bool:
    return any(o.mean(measure, True) is not None for group in groups.values() for o in group)


def _mean_of(group: Sequence[Outcome], measure: str, longer: bool) -> str:
    values = [value for o in group if (value := o.mean(measure, longer)) is not None]
    return spread(values)


def page(study: Study, outcomes: Outcomes, made: Sequence[Mapping[str, str]], picture: str, found: str = "") -> str:
    """The Markdown page of a study; `found` is what a person says of it."""
    from fastweight.study import text_report

    texts, drawn = kinds(outcomes)
    missing = len(study.members()) - len(outcomes)
    told = text_report.told(texts) if texts else _told(study, drawn)
    parts = [f"# {study.name}", study.about, f"Recipe `{study.recipe}`, {told}", _settings(study)]
    if missing:
        parts.append(f"**Not complete: {missing} of {len(study.members())} runs have no outcome.**")
    parts += [found, f"![{'Losses' if texts else 'Right against size'}]({picture})"]
    parts += text_report.tables(study, by_arm(study, texts)) if texts else _tables(study, drawn)
    parts += ["; ".join(f"{key}: {value}" for key, value in part.items()) for part in made]
    return "\n\n".join(part for part in parts if part) + "\n"


def _told(study: Study, outcomes: Sequence[Outcome]) -> str:
    low, high = outcomes[0].trained
    problems = "test problems" if study.scored == "test" else "validation problems, not of the test,"
    return f"trained on sizes {low} to {high}; {outcomes[0].count} {problems} of each size."


def _tables(study: Study, outcomes: Sequence[Outcome]) -> list[str]:
    """Tables of each measure over the outcomes that have it; outcomes of another study may have fewer."""
    parts = []
    for measure in sorted(MEASURES, key=lambda measure: measure != study.judged_by):
        groups = by_arm(study, [o for o in outcomes if measure in o.shares])
        if not groups:
            continue
        parts += [
            f"## {MEASURES[measure].capitalize()}",
            summary_table(study, groups, measure),
            effects.table(list(study.arms), groups, measure, _beyond(groups, measure)),
            size_table(groups, measure),
        ]
    signs = "± beside a percentage is the standard deviation over seeds, beside a difference its standard error."
    if any(KNOWING in part for part in parts):
        signs += " A run knows its training sizes with 99 % of their whole problems right; in brackets, how many do."
    return [*parts, signs]


def _settings(study: Study) -> str:
    settings = study.told()["settings"]
    return f"Settings of all arms: `{', '.join(settings)}`." if settings else ""


def write_study(study: Study, outcomes: Outcomes, out: Path, made: Sequence[Mapping[str, str]]) -> list[Path]:
    """Write study.json, README.md and study.png; returns their paths. ValueError when there is no outcome yet.

    Args:
        made: by what and where, of every part that the outcomes come from.
    """
    if not outcomes:
        raise ValueError(f"study: {out} holds no outcome of {study.name}, expected at least one trained arm")
    out.mkdir(parents=True, exist_ok=True)
    data, text, drawn = out / STUDY, out / "README.md", out / "study.png"
    write_json(data, {"made": list(made), "study": study.told(), "outcomes": [asdict(o) for o in outcomes]})
    write_text(text, page(study, outcomes, made, drawn.name, findings(out)))
    _draw(study, outcomes, drawn)
    return [data, text, drawn]


def _draw(study: Study, outcomes: Outcomes, path: Path) -> None:
    from fastweight.study import picture, text_report

    texts, drawn = kinds(outcomes)
    if texts:
        text_report.draw(by_arm(study, texts), study.against, path)
    else:
        shown = ("exact", "token") if study.judged_by == "exact" else ("token",)
        picture.draw(by_arm(study, drawn), {measure: MEASURES[measure] for measure in shown}, path)


def kinds(outcomes: Outcomes) -> tuple[list[TextOutcome], list[Outcome]]:
    """Outcomes of language models, and others; a study has one kind."""
    texts = [o for o in outcomes if isinstance(o, TextOutcome)]
    return texts, [o for o in outcomes if isinstance(o, Outcome)]
