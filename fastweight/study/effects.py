"""Arms called "name, variant" into what the variant changes in each name, seed by seed.

    "next, after", "next, before", "same, after", "same, before"     a square: both ways, four rows
    "falcon-1, gain < 1", "falcon-1, gain < 2", "mamba2", ...        every name with several variants, against the first
    "transformer", "transformer, 3e-3", ...                          against the name alone, where there is one

Trap: arms of one seed have seen the same data, not the same initial parameters where their shapes differ.
"""

from collections.abc import Mapping, Sequence

from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.page import markdown_table
from fastweight.study.figures import difference

Groups = Mapping[str, Sequence[Outcome]]
Comparison = tuple[str, str, str]  # in words, arm, the arm that it is compared with


def comparisons(arms: Sequence[str]) -> list[Comparison]:
    """What can be compared within the names of arms; none where no name has two variants."""
    grid: dict[str, list[str]] = {}
    for arm in arms:
        name, comma, variant = arm.partition(", ")
        if comma:
            grid.setdefault(name, []).append(variant)
    found = []
    for name, variants in grid.items():
        if name in arms:
            found += [(f"{name}: {variant}", f"{name}, {variant}", name) for variant in variants]
        else:
            first = variants[0]
            found += [(f"{name}: {v} against {first}", f"{name}, {v}", f"{name}, {first}") for v in variants[1:]]
    if len(grid) == 2 and len(set(map(tuple, grid.values()))) == 1:
        first, second = grid
        found += [(f"{v}: {second} against {first}", f"{second}, {v}", f"{first}, {v}") for v in grid[first]]
    return found


def paired(ours: Sequence[Outcome], theirs: Sequence[Outcome], measure: str, longer: bool) -> list[float]:
    """Differences of the means of two arms, seed by seed, for the seeds that both have."""
    known = {o.seed: o.mean(measure, longer) for o in theirs}
    pairs = [(o.mean(measure, longer), known.get(o.seed)) for o in ours]
    return [a - b for a, b in pairs if a is not None and b is not None]


def table(arms: Sequence[str], groups: Groups, measure: str, beyond: bool) -> str:
    """A row for each comparison of arms that both have outcomes; empty without any."""
    rows = []
    for words, arm, other in comparisons(arms):
        if arm not in groups or other not in groups:
            continue
        values = [paired(groups[arm], groups[other], measure, longer) for longer in (False, *[True] * beyond)]
        rows.append([words, str(len(values[0])), *(difference([100 * v for v in part], 1) for part in values)])
    head = ["variants", "seeds of both", "training sizes, points", *["longer, points"] * beyond]
    return markdown_table(head, rows) if rows else ""
