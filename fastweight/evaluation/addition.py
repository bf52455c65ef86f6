"""Run directories into addition scores by width.

Every model is scored on the same problems (seed, width and count decide them). Width ranges and counts come from each
run's own recipe unless given. Trap: figures of different runs are comparable only when these agree; `evaluate` takes
the first run's for all.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastweight.evaluation.checkpoint import checkpoint_of, load_model
from fastweight.recipes import AdditionTask, Run
from fastweight.recipes.loader import build_run
from fastweight.recipes.rundir import RUN_RECORD
from fastweight.tasks.addition import decode, encode, held_out
from fastweight.tasks.scoring import Score, generate_answers, score


@dataclass(frozen=True)
class ModelScores:
    """One model's scores, by ascending width.

    Fields:
        name: for tables and legends.
        checkpoint: directory it was read from.
        mixer: of the model.
        num_parameters: of the whole model, tied ones once.
        train_widths: smallest and largest training width.
        scores: one for each width.
    """

    name: str
    checkpoint: str
    mixer: str
    num_parameters: int
    train_widths: tuple[int, int]
    scores: tuple[Score, ...]

    def mean(self, field: str, longer: bool) -> float | None:
        """Mean of a Score field over widths beyond the training range (`longer`) or within it; None without any."""
        chosen = [s for s in self.scores if (s.width > self.train_widths[1]) == longer]
        values = [getattr(s, field) for s in chosen]
        return None if not values or None in values else sum(values) / len(values)


def find_checkpoint(path: Path, say: Callable[[str], None] = print) -> tuple[Path, Run]:
    """The checkpoint to read and its recipe, from a run directory or from one of its checkpoints."""
    run_dir = path if (path / RUN_RECORD).is_file() else path.parent
    if not (run_dir / RUN_RECORD).is_file():
        raise ValueError(f"run_dir: got {path}, expected a directory written by `fastweight train` (no {RUN_RECORD})")
    run = build_run(json.loads((run_dir / RUN_RECORD).read_text(encoding="utf-8"))["run"])
    return path if path != run_dir else checkpoint_of(run_dir, say), run


def evaluate(
    paths: Sequence[Path],
    *,
    widths: tuple[int, int] | None = None,
    num_problems: int | None = None,
    generate: bool = True,
    say: Callable[[str], None] = print,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[ModelScores]:
    """Score runs (or single checkpoints) at every width from the smallest training to the largest test width.

    Args:
        paths: run directories or checkpoints.
        widths: smallest and largest width instead.
        num_problems: per width, instead of the recipe's.
        generate: also score free generation (slower).
        say: for messages.
        progress: called with (model, widths done, widths in all).
    """
    found = [find_checkpoint(path, say) for path in paths]
    tasks = [_addition(run, path) for path, (_, run) in zip(paths, found, strict=True)]
    task = tasks[0]
    low, high = widths or (task.train_widths[0], task.test_widths[1])
    if not 1 <= low <= high:
        raise ValueError(f"widths: got {low} to {high}, expected a range of digits from 1 up")
    count = task.test_problems if num_problems is None else num_problems
    results = []
    names = _names([run for _, run in found], paths)
    for name, (checkpoint, run), trained_on in zip(names, found, tasks, strict=True):
        model, scores = load_model(checkpoint), []
        for width in range(low, high + 1):
            progress(name, width - low, high - low + 1)
            problems = held_out(width, count, task.test_seed, least_first=trained_on.least_first)
            scores.append(score(model, problems, generate=generate))
        size = sum(p.numel() for p in model.parameters())
        mixer = str(run.model.get("mixer", ""))
        results.append(ModelScores(name, str(checkpoint), mixer, size, trained_on.train_widths, tuple(scores)))
    return results


def answer(model: Any, prompt: str, least_first: bool = False) -> tuple[str, str]:
    """The model's answer to a sum such as "12+34=", and the right one, both least significant digit first.

    Args:
        least_first: whether the model reads summands with their least significant digit first; the prompt has them as
            people write them.
    """
    match = re.fullmatch(r"(\d+)\+(\d+)=", prompt)
    if match is None or len(match[1]) != len(match[2]):
        raise ValueError(f"prompt: got {prompt!r}, expected two numbers of the same length, as 12+34= or 05+17=")
    num_digits = len(match[1]) + 1
    read = f"{match[1][::-1]}+{match[2][::-1]}=" if least_first else prompt
    given = decode(generate_answers(model, encode(read)[None], num_digits)[0])
    return given, str(int(match[1]) + int(match[2])).zfill(num_digits)[::-1]


def to_json(results: Sequence[ModelScores]) -> list[dict[str, Any]]:
    """Plain data, with the mean over longer widths beside the scores."""
    return [asdict(result) | {"mean_exact_longer": result.mean("exact", longer=True)} for result in results]


def _addition(run: Run, path: Path) -> AdditionTask:
    if not isinstance(run.task, AdditionTask):
        raise ValueError(f"run_dir: got {path}, trained on {run.task.kind}, expected a run of the addition task")
    return run.task


def _names(runs: Sequence[Run], paths: Sequence[Path]) -> list[str]:
    """Mixer names where they tell the runs apart, else the directories' names."""
    mixers = [str(run.model.get("mixer", "")) for run in runs]
    return mixers if all(mixers) and len(set(mixers)) == len(mixers) else [str(path) for path in paths]
