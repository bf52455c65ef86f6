"""A trained run into its outcome: the share of right answers by size, for every task that draws its problems.

A size is what the task calls one: digits, pairs, group elements. Measures: "token", the share of right tokens, and
"exact", the share of problems without a wrong one, both teacher-forced; for addition, free generation too.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweight.evaluation.addition import find_checkpoint
from fastweight.evaluation.checkpoint import load_model
from fastweight.recipes import AdditionTask, DrawnTask, Run
from fastweight.tasks.addition import held_out
from fastweight.tasks.scoring import all_hits, score


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
    """

    arm: str
    seed: int
    mixer: str
    num_parameters: int
    trained: tuple[int, int]
    sizes: list[int]
    count: int
    shares: dict[str, list[float]]

    def mean(self, measure: str, longer: bool) -> float | None:
        """Mean over the sizes beyond the training sizes (`longer`) or among them; None without any."""
        both = zip(self.sizes, self.shares[measure], strict=True)
        chosen = [share for size, share in both if (size > self.trained[1]) == longer]
        return sum(chosen) / len(chosen) if chosen else None


def outcome_of(run_dir: Path, arm: str, seed: int, generate: bool = False) -> Outcome:
    """The outcome of the newest complete checkpoint of a run; ValueError for a run on text."""
    checkpoint, run = find_checkpoint(run_dir, lambda text: None)
    model, task = load_model(checkpoint), run.task
    if isinstance(task, AdditionTask):
        trained, sizes, shares = task.train_widths, *_addition(model, task, generate)
    elif isinstance(task, DrawnTask):
        trained, sizes, shares = task.train_sizes, *_drawn(model, task)
    else:
        raise ValueError(
            f"run_dir: got {run_dir}, trained on {task.kind}, expected a run of a task that draws problems"
        )
    count = sum(p.numel() for p in model.parameters())
    return Outcome(arm, seed, _mixer(run), count, trained, sizes, task.test_problems, shares)


def _mixer(run: Run) -> str:
    return str(run.model.get("mixer", ""))


def _addition(model: Any, task: AdditionTask, generate: bool) -> tuple[list[int], dict[str, list[float]]]:
    sizes = list(range(task.train_widths[0], task.test_widths[1] + 1))
    scores = [score(model, held_out(n, task.test_problems, task.test_seed), generate=generate) for n in sizes]
    measures = ("token", "exact", *(("generated", "generated_token") if generate else ()))
    return sizes, {measure: [getattr(s, measure) for s in scores] for measure in measures}


def _drawn(model: Any, task: DrawnTask) -> tuple[list[int], dict[str, list[float]]]:
    shares: dict[str, list[float]] = {"token": [], "exact": []}
    for size in task.tested:
        problems = task.held_out(size, task.test_problems)
        hits = all_hits(model, problems.input_ids, problems.labels)
        shares["token"].append(float(hits.double().mean()))
        shares["exact"].append(float(hits.all(dim=-1).double().mean()))
    return task.tested, shares
