"""Outcomes into study.json, a table with spreads, a comparison seed by seed, and a picture.

Spread is the standard deviation over seeds (n - 1). A difference is that of two arms with the same seed (the same
data), its mean given with the standard error over seeds. Trap: with few seeds neither says much; the tables say n.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev

from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.page import findings, markdown_table
from fastweight.files import write_json, write_text
from fastweight.study.plan import Study

MEASURES = {
    "token": "tokens right",
    "exact": "whole problems right",
    "generated": "whole problems right, free generation",
    "generated_token": "tokens right, free generation",
}


def by_arm(study: Study, outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each arm that has any."""
    groups = {arm: [o for o in outcomes if o.arm == arm] for arm in study.arms}
    return {arm: group for arm, group in groups.items() if group}


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation in percent; the mean alone for one value."""
    told = f"{100 * mean(values):.1f}"
    return told if len(values) < 2 else f"{told} ± {100 * stdev(values):.1f}"


def paired(ours: Sequence[Outcome], theirs: Sequence[Outcome], measure: str, longer: bool) -> list[float]:
    """Differences of the means of two arms, seed by seed, for the seeds that both have."""
    known = {o.seed: o.mean(measure, longer) for o in theirs}
    pairs = [(o.mean(measure, longer), known.get(o.seed)) for o in ours]
    return [a - b for a, b in pairs if a is not None and b is not None]


def difference(values: Sequence[float]) -> str:
    """Mean difference and its standard error in points; a dash without any."""
    if not values:
        return "-"
    told = f"{100 * mean(values):+.1f}"
    return told if len(values) < 2 else f"{told} ± {100 * stdev(values) / math.sqrt(len(values)):.1f}"


def summary_table(study: Study, groups: Mapping[str, Sequence[Outcome]], measure: str) -> str:
    """A row for each arm: seeds, parameters, mean inside and beyond the training sizes, difference from `against`."""
    beyond = any(o.mean(measure, True) is not None for group in groups.values() for o in group)
    head = ["arm", "seeds", "parameters", "training sizes %"]
    head += ["longer %"] * beyond + [f"against {study.against}, by seed"]
    rows = []
    for arm, group in groups.items():
        row = [arm, str(len(group)), f"{group[0].num_parameters:,}", _mean_of(group, measure, False)]
        row += [_mean_of(group, measure, True)] * beyond
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


def _mean_of(group: Sequence[Outcome], measure: str, longer: bool) -> str:
    values = [value for o in group if (value := o.mean(measure, longer)) is not None]
    return spread(values) if values else "-"


def page(study: Study, outcomes: Sequence[Outcome], made: Mapping[str, str], picture: str, found: str = "") -> str:
    """The Markdown page of a study; `found` is what a person says of it."""
    groups = by_arm(study, outcomes)
    missing = len(study.members()) - len(outcomes)
    low, high = outcomes[0].trained
    told = f"Recipe `{study.recipe}`, trained on sizes {low} to {high}; {outcomes[0].count} test problems of each size."
    parts = [f"# {study.name}", study.about, told, _settings(study)]
    if missing:
        parts.append(f"**Not complete: {missing} of {len(study.members())} runs have no outcome.**")
    parts += [found, f"![Right against size]({picture})"]
    for measure in (m for m in MEASURES if m in outcomes[0].shares):
        parts += [
            f"## {MEASURES[measure].capitalize()}",
            summary_table(study, groups, measure),
            size_table(groups, measure),
        ]
    parts.append("± beside a percentage is the standard deviation over seeds, beside a difference its standard error.")
    parts.append("; ".join(f"{key}: {value}" for key, value in made.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _settings(study: Study) -> str:
    return f"Settings of all arms: `{', '.join(study.settings)}`." if study.settings else ""


def write_study(study: Study, outcomes: Sequence[Outcome], out: Path, made: Mapping[str, str]) -> list[Path]:
    """Write study.json, README.md and study.png; returns their paths. ValueError when there is no outcome yet."""
    from fastweight.study.picture import draw

    if not outcomes:
        raise ValueError(f"study: {out} holds no outcome of {study.name}, expected at least one trained arm")
    out.mkdir(parents=True, exist_ok=True)
    data, text, drawn = out / "study.json", out / "README.md", out / "study.png"
    measure = "exact" if "generated" in outcomes[0].shares else "token"
    draw(by_arm(study, outcomes), measure, MEASURES[measure], drawn)
    write_json(data, {"made": dict(made), "study": asdict(study), "outcomes": [asdict(o) for o in outcomes]})
    write_text(text, page(study, outcomes, made, drawn.name, findings(out)))
    return [data, text, drawn]
