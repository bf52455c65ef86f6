"""Arms called "name, variant" into what the variant changes in each name, seed by seed.

    "next, after", "next, before", "same, after", "same, before"     a square: both ways, four rows, and two of means
    "falcon-1, gain < 1", "falcon-1, gain < 2", "mamba2", ...        every name with several variants, against the first
    "transformer", "transformer, 3e-3", ...                          against the name alone, where there is one

Trap: arms of one seed have seen the same data, not the same initial parameters where their shapes differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.page import markdown_table
from fastweight.study.figures import difference


class Scored(Protocol):
    """An outcome, or the mean of several of one seed."""

    @property
    def seed(self) -> int: ...

    def mean(self, measure: str, longer: bool) -> float | None: ...

    def problems(self, longer: bool) -> int: ...


@dataclass(frozen=True)
class Both:
    """Outcomes of one seed, one of each arm, taken together."""

    seed: int
    parts: tuple[Outcome, ...]

    def mean(self, measure: str, longer: bool) -> float | None:
        values = [part.mean(measure, longer) for part in self.parts]
        return None if None in values else mean(value for value in values if value is not None)

    def problems(self, longer: bool) -> int:
        return sum(part.problems(longer) for part in self.parts)


Groups = Mapping[str, Sequence[Outcome]]
Comparison = tuple[str, str, str]  # in words, arm, the arm that it is compared with


def comparisons(arms: Sequence[str]) -> list[Comparison]:
    """What can be compared within the names of arms; none where no name has two variants."""
    grid, found = _grid(arms), []
    for name, variants in grid.items():
        if name in arms:
            found += [(f"{name}: {variant}", f"{name}, {variant}", name) for variant in variants]
        else:
            first = variants[0]
            found += [(f"{name}: {v} against {first}", f"{name}, {v}", f"{name}, {first}") for v in variants[1:]]
    if _is_square(grid):
        first, second = grid
        found += [(f"{v}: {second} against {first}", f"{second}, {v}", f"{first}, {v}") for v in grid[first]]
    return found


def varied(arms: Sequence[str]) -> dict[str, str]:
    """Variants whose name alone is an arm too, each with that arm."""
    return {f"{name}, {v}": name for name, variants in _grid(arms).items() if name in arms for v in variants}


def _grid(arms: Sequence[str]) -> dict[str, list[str]]:
    """Variants by the names of arms that have any."""
    grid: dict[str, list[str]] = {}
    for arm in arms:
        name, comma, variant = arm.partition(", ")
        if comma:
            grid.setdefault(name, []).append(variant)
    return grid


def _is_square(grid: Mapping[str, Sequence[str]]) -> bool:
    return len(grid) == 2 and len(set(map(tuple, grid.values()))) == 1


def sides(arms: Sequence[str], groups: Groups) -> dict[str, list[Both]]:
    """Of a square, each name over its variants and each variant over both names, for the seeds that have them all."""
    grid = _grid(arms)
    if not _is_square(grid):
        return {}
    variants = next(iter(grid.values()))
    members = {name: [f"{name}, {v}" for v in variants] for name in grid}
    members |= {v: [f"{name}, {v}" for name in grid] for v in variants}
    return {side: _both([groups.get(arm, ()) for arm in parts]) for side, parts in members.items()}


def _both(groups: Sequence[Sequence[Outcome]]) -> list[Both]:
    by_seed = [{o.seed: o for o in group} for group in groups]
    return [
        Both(seed, tuple(known[seed] for known in by_seed)) for seed in by_seed[0] if all(seed in k for k in by_seed)
    ]


def paired(ours: Sequence[Scored], theirs: Sequence[Scored], measure: str, longer: bool) -> list[float]:
    """Differences of the means of two arms, seed by seed, for the seeds that both have."""
    known = {o.seed: o.mean(measure, longer) for o in theirs}
    pairs = [(o.mean(measure, longer), known.get(o.seed)) for o in ours]
    return [a - b for a, b in pairs if a is not None and b is not None]


def table(arms: Sequence[str], groups: Groups, measure: str, beyond: bool) -> str:
    """A row for each comparison of arms that both have outcomes; empty without any."""
    pairs: list[tuple[str, Sequence[Scored], Sequence[Scored]]] = [
        (words, groups[arm], groups[other])
        for words, arm, other in comparisons(arms)
        if arm in groups and other in groups
    ]
    halves = list(sides(arms, groups).items())  # two names, then variants
    if len(halves) == 4:
        pairs += [
            (f"{second} against {first}, over both", theirs, ours)
            for (first, ours), (second, theirs) in (halves[:2], halves[2:])
            if ours and theirs
        ]
    rows = []
    for words, ours, theirs in pairs:
        values = [paired(ours, theirs, measure, longer) for longer in (False, *[True] * beyond)]
        rows.append([words, str(len(values[0])), *(difference([100 * v for v in part], 1) for part in values)])
    head = ["variants", "seeds of both", "training sizes, points", *["longer, points"] * beyond]
    return markdown_table(head, rows) if rows else ""
