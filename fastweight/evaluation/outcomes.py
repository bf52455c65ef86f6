"""A trained run into its outcome: the share of right answers by size, or, of text, what text_outcomes.py finds.

A size is what the task calls one: digits, pairs, group elements. Measures: "token", the share of right tokens, and
"exact", the share of problems without a wrong one, both teacher-forced; for addition, free generation too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastweight.evaluation.addition import find_checkpoint
from fastweight.evaluation.checkpoint import load_model
from fastweight.evaluation.course import course_of
from fastweight.evaluation.text_outcomes import TextOutcome, text_outcome_of
from fastweight.models.cost import state_bytes
from fastweight.recipes import AdditionTask, DrawnTask, TextTask
from fastweight.tasks.addition import held_out
from fastweight.tasks.scoring import all_hits, generated_hits, score


@dataclass(frozen=True)
class Scoring:
    """What is scored beyond what a task says.

    Fields:
        generate: free generation of sums.
        validation: instead of the test, other problems of the training sizes alone, by which settings may be chosen.
        texts: files that language models are scored on, by name; the file named "lambada" holds last words.
    """

    generate: bool = False
    validation: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def stream(self) -> str:
        """Which held-out problems."""
        return "validation" if self.validation else "test"


@dataclass(frozen=True)
class Outcome:
    """One trained model.

    Fields:
        arm, seed: which one of a study.
        mixer, num_parameters: of the model.
        trained: smallest and largest training size.
        sizes: of the test.
        count: problems of each size.
        shares: measure -> share right at each size.
        curve, cost: see `course_of`; state_bytes in the cost is what one training sequence carries in a bfloat16 model.
    """

    arm: str
    seed: int
    mixer: str
    num_parameters: int
    trained: tuple[int, int]
    sizes: list[int]
    count: int
    shares: dict[str, list[float]]
    curve: list[list[float]] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)

    def mean(self, measure: str, longer: bool) -> float | None:
        """Mean over the sizes beyond the training sizes (`longer`) or among them; None without any."""
        both = zip(self.sizes, self.shares[measure], strict=True)
        chosen = [share for size, share in both if (size > self.trained[1]) == longer]
        return sum(chosen) / len(chosen) if chosen else None

    def problems(self, longer: bool) -> int:
        """Of the test, beyond the training sizes or among them."""
        return self.count * sum((size > self.trained[1]) == longer for size in self.sizes)

    @property
    def learned(self) -> bool:
        """Whether 99 % of whole problems of the training sizes are right."""
        return "exact" in self.shares and (self.mean("exact", False) or 0.0) >= 0.99

    def in_words(self) -> str:
        """A line for people who wait."""
        means = ((self.mean("token", longer), where) for longer, where in ((False, "inside"), (True, "beyond")))
        return "tokens right: " + ", ".join(
            f"{100 * share:.1f}% {where}" for share, where in means if share is not None
        )


def outcome_from(raw: Mapping[str, Any]) -> Outcome | TextOutcome:
    """The outcome that was written as plain data."""
    if "scores" in raw:
        return TextOutcome(**raw)
    return Outcome(**{**raw, "trained": tuple(raw["trained"])})


def outcome_of(run_dir: Path, arm: str, seed: int, scoring: Scoring | None = None) -> Outcome | TextOutcome:
    """The outcome of the newest complete checkpoint of a run."""
    scoring = scoring or Scoring()
    checkpoint, run = find_checkpoint(run_dir, lambda text: None)
    task, mixer = run.task, str(run.model.get("mixer", ""))
    if isinstance(task, TextTask):
        return text_outcome_of(run_dir, run, arm, seed, scoring.texts)
    model = load_model(checkpoint)
    count = sum(p.numel() for p in model.parameters())
    if isinstance(task, AdditionTask):
        trained, longest = task.train_widths, 3 * task.train_widths[1] + 3
        sizes, shares = _addition(model, task, scoring)
    else:
        trained, longest = task.train_sizes, task.longest
        sizes, shares = _drawn(model, task, scoring)
    curve, cost = course_of(run_dir)
    cost["state_bytes"] = state_bytes(model.config, longest)
    return Outcome(arm, seed, mixer, count, trained, sizes, task.test_problems, shares, curve, cost)


def _addition(model: Any, task: AdditionTask, scoring: Scoring) -> tuple[list[int], dict[str, list[float]]]:
    last = (task.train_widths if scoring.validation else task.test_widths)[1]
    sizes = list(range(task.train_widths[0], last + 1))
    problems = [
        held_out(n, task.test_problems, task.test_seed, scoring.stream, least_first=task.least_first) for n in sizes
    ]
    scores = [score(model, batch, generate=False) for batch in problems]
    shares = {measure: [getattr(s, measure) for s in scores] for measure in ("token", "exact")}
    if scoring.generate:
        hits = generated_hits(model, problems)
        shares["generated"] = [float(h.all(dim=-1).double().mean()) for h in hits]
        shares["generated_token"] = [float(h.double().mean()) for h in hits]
    return sizes, shares


def _drawn(model: Any, task: DrawnTask, scoring: Scoring) -> tuple[list[int], dict[str, list[float]]]:
    shares: dict[str, list[float]] = {"token": [], "exact": []}
    sizes = [size for size in task.tested if not scoring.validation or size <= task.train_sizes[1]]
    for size in sizes:
        problems = task.held_out(size, task.test_problems, scoring.stream)
        hits = all_hits(model, problems.input_ids, problems.labels)
        shares["token"].append(float(hits.double().mean()))
        shares["exact"].append(float(hits.all(dim=-1).double().mean()))
    return sizes, shares
