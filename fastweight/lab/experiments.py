"""Settings into panels: one question each, asked of every learner, with the spread over trials.

A panel is one strength on the x axis (age, ridge, gain, drift, ...) and one line for each learner. Recall is the cosine
of what the memory answers with what was stored; "before" recall is taken just before a pair is learned, from the second
half of a stream. Bands are standard errors over trials. Trap: the learners of a panel see the same streams, so
lines may be compared point by point, but points at two strengths are other draws in some panels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweight.lab.learners import LEARNERS, UNNORMALISED, Learner, cosine, identified, recall
from fastweight.lab.streams import (
    Shape,
    Stream,
    random_pairs,
    rebound,
    repeated,
    rescaled,
    teacher_pairs,
)


@dataclass(frozen=True)
class Settings:
    """Sizes and the common step of all learners.

    Fields:
        trials: independent streams of each kind.
        tokens: pairs in a stream.
        key_dim, value_dim: widths K and V.
        gain: beta, where a panel does not sweep it.
        ridge: lambda-bar, where a panel does not sweep it; the carry is 1 - gain * ridge / (1 + ridge).
        seed: of all streams.
    """

    trials: int = 16
    tokens: int = 256
    key_dim: int = 32
    value_dim: int = 32
    gain: float = 1.0
    ridge: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("trials", 2), ("tokens", 32), ("key_dim", 4), ("value_dim", 4)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: got {value}, expected at least {least}")
        if not 0 < self.gain < 2:
            raise ValueError(f"gain: got {self.gain}, expected a number between 0 and 2, where the rules are stable")
        if not self.ridge >= 0:
            raise ValueError(f"ridge: got {self.ridge}, expected at least 0")

    @property
    def shape(self) -> Shape:
        return Shape(self.trials, self.tokens, self.key_dim, self.value_dim)


QUICK = Settings(trials=3, tokens=48, key_dim=8, value_dim=8)


@dataclass(frozen=True)
class Panel:
    """What one question gave.

    Fields:
        title, x_label, y_label: for the picture.
        x: strengths.
        lines: learner -> (mean at each strength, its standard error).
        log: whether the x axis is logarithmic; `log_y` the same for y.
        note: what the panel shows, for people.
    """

    title: str
    x_label: str
    y_label: str
    x: list[float]
    lines: dict[str, tuple[list[float], list[float]]]
    log: bool = False
    log_y: bool = False
    note: str = ""


Score = Callable[[Learner, float], Tensor]  # (learner, strength) -> one figure a trial, [B]


def run_lab(
    settings: Settings, progress: Callable[[str, int, int], None] = lambda name, done, total: None
) -> dict[str, Panel]:
    """All panels by name; progress is called with (panel, panels done, panels in all)."""
    panels = {}
    for done, (name, ask) in enumerate(PANELS.items()):
        progress(name, done, len(PANELS))
        panels[name] = ask(settings)
    return panels


def _asked(score: Score, x: Sequence[float], learners: Mapping[str, Learner]) -> dict[str, Any]:
    """The x and lines of a panel."""
    lines = {}
    for name, learner in learners.items():
        figures = torch.stack([score(learner, value) for value in x])  # [X, B]
        error = figures.std(dim=1) / figures.shape[1] ** 0.5
        lines[name] = (figures.mean(dim=1).tolist(), error.tolist())
    return {"x": list(x), "lines": lines}


def _late(learner: Learner, stream: Stream, gain: float, ridge: float) -> Tensor:
    """Recall before each pair, over the second half of a stream."""
    half = stream.x.shape[1] // 2
    return cosine(learner(stream, gain, ridge).before, stream.y)[:, half:].mean(dim=1)


def age(settings: Settings) -> Panel:
    """Recall of the pair seen so many tokens ago."""
    stream = random_pairs(settings.shape, settings.seed)
    ages = [n for n in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256) if n < settings.tokens // 2]
    T, lines = settings.tokens, {}
    for name, learner in LEARNERS.items():
        by_token = recall(learner(stream, settings.gain, settings.ridge).S, stream)
        # A mean over ages n to 2n - 1: one token is noisy.
        ranges = [by_token[:, T - max(2 * n, n + 1) : T - n].mean(dim=1) for n in ages]
        figures = torch.stack(ranges)
        lines[name] = (figures.mean(1).tolist(), (figures.std(1) / settings.trials**0.5).tolist())
    x = [1.0 * max(n, 0.5) for n in ages]
    return Panel("Recall against age", "pairs since it was stored (0 drawn at ½)", "recall", x, lines, log=True)


def forgetting(settings: Settings) -> Panel:
    """Recall of old pairs (K to 2K pairs ago) against the ridge."""
    stream = random_pairs(settings.shape, settings.seed)
    old = slice(settings.tokens - 2 * settings.key_dim, settings.tokens - settings.key_dim)

    def score(learner: Learner, ridge: float) -> Tensor:
        return recall(learner(stream, settings.gain, ridge).S, stream)[:, old].mean(dim=1)

    x = [10 ** (e / 2) for e in range(-8, 1)]
    return Panel(
        "Forgetting against ridge", "ridge (lambda-bar)", "recall of pairs K to 2K ago", log=True,
        **_asked(score, x, LEARNERS),
    )  # fmt: skip


GAINS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 1.95)


def drift(settings: Settings) -> Panel:
    """Following a map that changes, against the gain."""
    stream = teacher_pairs(settings.shape, settings.seed, drift=1 / settings.key_dim)

    def score(learner: Learner, gain: float) -> Tensor:
        return _late(learner, stream, gain, settings.ridge)

    return Panel("Plasticity: a map that drifts", "gain (beta)", "recall before", **_asked(score, GAINS, LEARNERS))


def noise(settings: Settings) -> Panel:
    """Averaging over noisy targets of a fixed map, against the gain."""
    stream = teacher_pairs(settings.shape, settings.seed, noise=0.5)

    def score(learner: Learner, gain: float) -> Tensor:
        return _late(learner, stream, gain, settings.ridge)

    return Panel(
        "Noise: half of the targets' variance", "gain (beta)", "recall before", **_asked(score, GAINS, LEARNERS)
    )


def key_scale(settings: Settings) -> Panel:
    """Keys of very different lengths; two rules also with a step that does not look at the keys."""
    stream = teacher_pairs(settings.shape, settings.seed)

    def score(learner: Learner, spread: float) -> Tensor:
        return _late(learner, rescaled(stream, spread, settings.seed + 1), settings.gain, settings.ridge)

    x = [1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0]
    return Panel(
        "Scale: pairs rescaled at random", "largest factor (smallest: its inverse)", "recall before", log=True,
        **_asked(score, x, {**LEARNERS, **UNNORMALISED}),
    )  # fmt: skip


def interference(settings: Settings) -> Panel:
    """Half as many pairs as the key is wide, whose keys resemble each other."""
    shape = settings.shape._replace(tokens=settings.key_dim // 2)

    def score(learner: Learner, alike: float) -> Tensor:
        stream = random_pairs(shape, settings.seed, interference=alike)
        return recall(learner(stream, settings.gain, 0.0).S, stream).mean(dim=1)

    x = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    return Panel(
        "Interference: keys that resemble",
        "mean cosine of two keys",
        "recall of K/2 pairs",
        **_asked(score, x, LEARNERS),
    )


def repetition(settings: Settings) -> Panel:
    """The same pairs again: does recall improve?"""
    stream = random_pairs(settings.shape._replace(tokens=3 * settings.key_dim // 4), settings.seed)

    def score(learner: Learner, times: float) -> Tensor:
        return recall(learner(repeated(stream, int(times)), settings.gain, 0.0).S, stream).mean(dim=1)

    return Panel(
        "Repetition: the same pairs again", "passes", "recall of 3K/4 pairs", log=True,
        **_asked(score, [1, 2, 4, 8, 16], LEARNERS),
    )  # fmt: skip


def rebinding(settings: Settings) -> Panel:
    """The same keys with new targets: does the newest win?"""
    num_keys, turns = settings.key_dim // 4, [1, 2, 4, 8, 16]
    stream = random_pairs(settings.shape._replace(tokens=num_keys * turns[-1]), settings.seed)

    def score(learner: Learner, times: float) -> Tensor:
        tokens = num_keys * int(times)
        part = rebound(Stream(stream.x[:, :tokens], stream.y[:, :tokens]), num_keys)
        newest = Stream(part.x[:, -num_keys:], part.y[:, -num_keys:])
        return recall(learner(part, settings.gain, settings.ridge).S, newest).mean(dim=1)

    return Panel(
        "Rebinding: old keys, new targets", "targets a key has had", "recall of the newest", log=True,
        **_asked(score, turns, LEARNERS),
    )  # fmt: skip


FILLS = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ENOUGH = 0.9


def capacity(settings: Settings) -> Panel:
    """The most pairs, stored once each, of which 9 in 10 can be told apart, against the width of the keys."""

    def score(learner: Learner, width: float) -> Tensor:
        K = int(width)
        sizes = [max(round(fill * K), 1) for fill in FILLS]
        shape = Shape(min(settings.trials, 8), sizes[-1], K, settings.value_dim)
        stream = random_pairs(shape, settings.seed)
        shares = []
        for size in sizes:
            part = Stream(stream.x[:, :size], stream.y[:, :size])
            shares.append(identified(learner(part, settings.gain, 0.0).S, part).mean(dim=1))
        return _crossing(torch.tensor(sizes, dtype=torch.float64), torch.stack(shares))

    most = settings.key_dim * 2
    x = [float(K) for K in (4, 8, 16, 32, 64) if most >= K]
    return Panel(
        "Capacity against the width of keys", "key width K", "pairs told apart (9 in 10)", log=True, log_y=True,
        **_asked(score, x, LEARNERS),
    )  # fmt: skip


def _crossing(sizes: Tensor, shares: Tensor) -> Tensor:
    """Where the shares [S, B] first fall below ENOUGH, between two sizes by a straight line; [B]."""
    found = []
    for share in shares.T:
        below = (share < ENOUGH).nonzero()
        if len(below) == 0:
            found.append(sizes[-1])
            continue
        at = int(below[0])
        if at == 0:
            found.append(sizes[0] * share[0] / ENOUGH)
            continue
        slope = (share[at - 1] - ENOUGH) / (share[at - 1] - share[at])
        found.append(sizes[at - 1] + slope * (sizes[at] - sizes[at - 1]))
    return torch.stack(found)


PANELS: dict[str, Callable[[Settings], Panel]] = {
    "age": age,
    "forgetting": forgetting,
    "drift": drift,
    "noise": noise,
    "key-scale": key_scale,
    "interference": interference,
    "repetition": repetition,
    "rebinding": rebinding,
    "capacity": capacity,
}
