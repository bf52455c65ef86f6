"""Studies into what holds here of the paper's claims, in sentences that are computed, whatever they say.

That one arm is ahead of another holds where the mean difference, seed by seed, is larger than the spread (standard
deviation over seeds) of both, and than what so few test problems scatter by themselves; it is refuted where the
opposite is that large; otherwise it is not decided. One seed decides nothing. Traps: the spread is that of few seeds;
our models are smaller than the paper's, and a page that says "holds" speaks of ours.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import log, sqrt
from statistics import mean, stdev
from typing import NamedTuple

from fastweight.evaluation import paper
from fastweight.evaluation.outcomes import Outcome
from fastweight.evaluation.text_outcomes import VALIDATION, TextOutcome
from fastweight.study.effects import Groups, Scored, comparisons, paired, sides
from fastweight.study.figures import difference
from fastweight.study.plan import Study

HOLDS, REFUTED, OPEN = "holds", "refuted", "not decided"
SUMS = {"exact": "whole sums ", "token": "their digits "}  # the paper does not say which of the two its accuracy is
AHEAD = ("falcon-3a.3", "falcon-1a.3", "falcon-1.3", "retnet", "mamba2")  # of the Transformer, as the paper has it


class Trained(NamedTuple):
    """A study with the outcomes of its arms, and the folder that it lies in."""

    folder: str
    study: Study
    groups: Groups


class Read(NamedTuple):
    """The same of language models."""

    folder: str
    study: Study
    groups: Mapping[str, Sequence[TextOutcome]]


def sentences(studies: Sequence[Trained], texts: Sequence[Read] = ()) -> list[str]:
    """A line for each claim that a study speaks of."""
    lines = []
    for one in studies:
        place = f"[{one.folder}](#{one.folder})"
        if is_addition(one):
            lines += [f"* {place}: {told}" for told in _table_3(one.groups)]
        told = _pairing(one) or _gains(one)
        lines += [f"* {place}: {told}"] if told else []
    lines += [f"* {told}" for told in _all_pairings(studies)]
    for text in texts:
        lines += [f"* [{text.folder}](#{text.folder}): {told}" for told in _losses(text.groups)]
    return lines


def _losses(groups: Mapping[str, Sequence[TextOutcome]]) -> list[str]:
    """Validation losses against the Transformer's, where the paper has the model."""
    losses = {arm: {o.seed: o.scores[VALIDATION]["loss"] for o in group} for arm, group in groups.items()}
    theirs, lines = losses.get("transformer", {}), []
    for arm, ours in losses.items():
        if arm == "transformer" or arm not in paper.PERPLEXITY or not theirs:
            continue
        ahead = [theirs[seed] - loss for seed, loss in ours.items() if seed in theirs]
        spreads = [stdev(values) if len(values) > 1 else None for values in (ours.values(), theirs.values())]
        papers = log(paper.PERPLEXITY[arm][2] / paper.PERPLEXITY["transformer"][2])
        way, claimed = ("below", ahead) if papers < 0 else ("above", [-value for value in ahead])
        lines.append(
            f"{arm} {way} the Transformer in validation loss, as in the paper ({papers:+.3f} nats): "
            f"**{_decided(claimed, spreads)}** ({difference([-value for value in ahead], 3)}, {_seeds(ahead)})."
        )
    return lines


def is_addition(one: Trained) -> bool:
    """Whether a study's arms stand beside those of the paper's Table 3."""
    tested = one.study.recipe.startswith("addition") and one.study.scored == "test"
    return tested and any(arm in paper.ADDITION for arm in one.groups)


def verdict(ours: Sequence[Scored], theirs: Sequence[Scored], measure: str, longer: bool) -> str:
    """Whether `ours` is ahead of `theirs`."""
    groups = ours, theirs
    spreads = [_spread(group, measure, longer) for group in groups]
    chance = 2 * sqrt(sum(_chance(group, measure, longer) for group in groups))
    return _decided(paired(ours, theirs, measure, longer), [*spreads, chance])


def _decided(values: Sequence[float], limits: Sequence[float | None]) -> str:
    """Of differences seed by seed, and what their mean has to exceed; None: not known, of too few seeds."""
    if len(values) < 2 or None in limits:
        return OPEN
    margin, limit = mean(values), max(limit or 0.0 for limit in limits)
    return HOLDS if margin > limit else REFUTED if margin < -limit else OPEN


def _spread(group: Sequence[Scored], measure: str, longer: bool) -> float | None:
    values = [value for o in group if (value := o.mean(measure, longer)) is not None]
    return stdev(values) if len(values) > 1 else None


def _chance(group: Sequence[Scored], measure: str, longer: bool) -> float:
    """Variance of an arm's mean share because its test has so many problems: a binomial's, with one more right and one
    more wrong than counted, so that nothing right is not certainty. Digits are counted by problems, as if all of one
    were right or wrong together."""
    problems = sum(o.problems(longer) for o in group)
    right = sum(o.problems(longer) * (o.mean(measure, longer) or 0.0) for o in group)
    share = (right + 1) / (problems + 2)
    return share * (1 - share) / max(problems, 1)


def _against(ours: Sequence[Scored], theirs: Sequence[Scored], measure: str, longer: bool) -> str:
    values = paired(ours, theirs, measure, longer)
    return f"{difference([100 * value for value in values], 1)} points, {_seeds(values)}"


def _told(ours: Sequence[Scored], theirs: Sequence[Scored], measures: Mapping[str, str], longer: bool) -> str:
    """The verdict by each of the measures, which come with a word that goes before it."""
    return ", ".join(
        f"{word}**{verdict(ours, theirs, measure, longer)}** ({_against(ours, theirs, measure, longer)})"
        for measure, word in measures.items()
    )


def _seeds(values: Sequence[float]) -> str:
    return f"{len(values)} seed{'s' * (len(values) != 1)}"


def _table_3(groups: Groups) -> list[str]:
    lines, means = [], {arm: _mean(group, "exact") for arm, group in groups.items()}
    theirs = groups.get("transformer", [])
    for name in AHEAD:
        ours = groups.get(name, [])
        if ours and theirs:
            papers = paper.ADDITION[name].longer - paper.ADDITION["transformer"].longer
            told = _told(ours, theirs, SUMS, True)
            lines.append(f"{name} above the Transformer on longer sums, as in the paper ({papers:+.1f}): {told}.")
    both = [name for name in paper.ADDITION if means.get(name) is not None]
    if len(both) > 2:
        lines.append(_order(groups, both))
    new = [
        f"{arm} {100 * value:.1f} ({100 * (_mean(groups[arm], 'token') or 0.0):.1f})"
        for arm, value in means.items()
        if arm not in paper.ADDITION and value is not None
    ]
    if new:
        lines.append(f"not in the paper's table, % of whole longer sums right (of their digits): {', '.join(new)}.")
    return lines + _free(groups)


def _order(groups: Groups, names: Sequence[str]) -> str:
    """How many pairs of models stand as in the paper's Table 3."""
    told = []
    for measure, word in SUMS.items():
        found = Counter()
        for one, other in combinations(names, 2):
            first, second = sorted((one, other), key=lambda name: -paper.ADDITION[name].longer)
            found[verdict(groups[first], groups[second], measure, True)] += 1
        told.append(f"{word}{found[HOLDS]} as there, {found[REFUTED]} the other way, {found[OPEN]} not decided")
    return f"the order of Table 3, pair by pair of {len(names)} models: {'; '.join(told)}."


def _free(groups: Groups) -> list[str]:
    """How far free generation is from teacher forcing."""
    both = {arm: [o for o in group if "generated" in o.shares] for arm, group in groups.items()}
    apart = {
        arm: (_mean(group, "generated") or 0.0) - (_mean(group, "exact") or 0.0) for arm, group in both.items() if group
    }
    if not apart:
        return []
    arm = max(apart, key=lambda arm: abs(apart[arm]))
    digits = {a: (_mean(g, "generated_token") or 0.0) - (_mean(g, "token") or 0.0) for a, g in both.items() if g}
    worst = min(digits, key=lambda arm: digits[arm])
    return [
        f"free generation of longer sums against teacher forcing: whole sums differ by at most {100 * apart[arm]:+.1f} "
        f"points ({arm}), digits by {100 * digits[worst]:+.1f} ({worst})."
    ]


def _pairing(one: Trained) -> str:
    """Next-latent against same-step pairs, all else locked."""
    groups = one.groups
    if not {"next, after", "same, after"} <= groups.keys():
        return ""
    measure, longer = _measure(one)
    measures = SUMS if measure == "exact" else {measure: ""}
    told = [
        f"read {timing} the write: {_told(groups[ours], groups[theirs], measures, longer)}"
        for timing in ("after", "before")
        if (ours := f"next, {timing}") in groups and (theirs := f"same, {timing}") in groups
    ]
    over = sides(list(one.study.arms), groups)
    if len(told) == 2 and over.get("next") and over.get("same"):
        told.append(f"over both: {_told(over['next'], over['same'], measures, longer)}")
    mixer = next(iter(groups.values()))[0].mixer
    return f"next-latent pairs ahead of same-step ones, {mixer}, {'; '.join(told)}."


def _all_pairings(studies: Sequence[Trained]) -> list[str]:
    """Pairing, and timing, over all rules that have a whole square on one recipe: every rule and seed counts once."""
    by_recipe: dict[str, list[tuple[Trained, Mapping[str, Sequence[Scored]]]]] = {}
    for one in studies:
        over = sides(list(one.study.arms), one.groups)
        if set(over) == {"next", "same", "after", "before"} and all(over.values()):
            by_recipe.setdefault(one.study.recipe, []).append((one, over))
    lines = []
    for squares in by_recipe.values():
        if len(squares) < 2:
            continue
        places = ", ".join(f"[{one.folder}](#{one.folder})" for one, _ in squares)
        measure, longer = _measure(squares[0][0])
        for kind, word in SUMS.items() if measure == "exact" else [(measure, "")]:
            told = []
            for ours, theirs, words in (
                ("next", "same", "next-latent against same-step"),
                ("after", "before", "after against before"),
            ):
                values = [v for _, over in squares for v in paired(over[ours], over[theirs], kind, longer)]
                told.append(f"{words} {difference([100 * v for v in values], 1)} points")
            lines.append(f"{places}, {word}over all rules and seeds ({len(values)}): {'; '.join(told)}.")
    return lines


def _gains(one: Trained) -> str:
    """Gains above 1 against gains below."""
    measure, longer = _measure(one)
    found: dict[str, list[str]] = {HOLDS: [], OPEN: [], REFUTED: []}
    for _, ours, theirs in comparisons(list(one.study.arms)):
        if "gain < 2" in ours and ours in one.groups and theirs in one.groups:
            pair = one.groups[ours], one.groups[theirs]
            found[verdict(*pair, measure, longer)].append(
                f"{ours.partition(',')[0]} ({_against(*pair, measure, longer)})"
            )
    told = "; ".join(f"{word} for {', '.join(names)}" for word, names in found.items() if names)
    return f"a gain up to 2 ahead of one up to 1: {told}." if told else ""


def _measure(one: Trained) -> tuple[str, bool]:
    """What a study is judged by: whole sums or single answers, on longer problems where there are any."""
    measure = one.study.judged_by
    return measure, any(o.mean(measure, True) is not None for group in one.groups.values() for o in group)


def _mean(group: Sequence[Outcome], measure: str) -> float | None:
    values = [value for o in group if (value := o.mean(measure, True)) is not None]
    return mean(values) if values else None
