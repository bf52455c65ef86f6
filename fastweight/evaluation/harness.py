"""A checkpoint through tasks of lm-evaluation-harness, into one score a task and the average that the paper reports.

PAPER names the eight tasks and which of their measures counts: accuracy, or accuracy by answers' lengths (acc_norm).
Local tasks are called as the harness's own with "local_" in front and count by the same measure. Trap: the average of
the paper is over all eight; over fewer it is called what it is.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fastweight.evaluation.checkpoint import LanguageModel

PAPER = {
    "piqa": "acc",
    "hellaswag": "acc_norm",
    "winogrande": "acc",
    "arc_easy": "acc",
    "arc_challenge": "acc_norm",
    "openbookqa": "acc_norm",
    "social_iqa": "acc",
    "sciq": "acc",
}
LOCAL = "local_"
OTHERS = ("acc", "word_perplexity", "perplexity", "exact_match")  # what counts elsewhere: the first that a task has


@dataclass(frozen=True)
class TaskScore:
    """One task's scores.

    Fields:
        task: name.
        num_fewshot: solved examples in front of each question.
        num_samples: scored.
        measure: name of the one that counts.
        value, error: of it; the error is None where the harness gives none.
        measures: all of them by name.
    """

    task: str
    num_fewshot: int
    num_samples: int
    measure: str
    value: float
    error: float | None
    measures: dict[str, float]


def evaluate(
    loaded: LanguageModel,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    include: Path | None = None,
    limit: int | None = None,
    length: int | None = None,
    batch_size: int = 8,
    say: Callable[[str], None] = print,
) -> list[TaskScore]:
    """Score a model on tasks.

    Args:
        loaded: the model and its tokenizer.
        tasks: names that the harness, or a file in `include`, knows.
        num_fewshot: solved examples in front of each question; None: as each task says.
        include: directory with task files of one's own.
        limit: score only the first so many samples of each task.
        length: longest context; None: the model's.
        batch_size: requests at a time.
        say: for messages.

    Raises ValueError for unknown tasks and when lm-eval is missing.
    """
    try:
        harness: Any = importlib.import_module("lm_eval")
    except ImportError:
        raise ValueError('the harness needs lm-eval, which is not installed: pip install "fastweight[eval]"') from None
    from fastweight.evaluation.harness_model import FastWeightLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = _manager(tasks, include)
    say(f"{loaded.name}: {', '.join(tasks)}")
    build: Any = FastWeightLM
    model = build(
        loaded.model,
        max_length=loaded.length if length is None else length,
        tokenizer=loaded.tokenizer.to_transformers(),
        batch_size=batch_size,
    )
    with _one_process():
        found = harness.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=100,
            log_samples=False,
        )
    assert found is not None, "only ranks above 0 get nothing"
    return [_score(task, found) for task in tasks]


@contextmanager
def _one_process() -> Iterator[None]:
    """Standard errors are drawn here: the harness would fork, and a fork of a process with threads can hang."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def average(scores: Sequence[TaskScore]) -> tuple[str, float] | None:
    """Name and value of the mean accuracy over those tasks that are among the paper's eight; None without any."""
    counted = [score for score in scores if score.task.removeprefix(LOCAL) in PAPER]
    if not counted:
        return None
    name = "average of " + (f"{len(counted)} of " if len(counted) < len(PAPER) else "") + "the paper's eight"
    return name, sum(score.value for score in counted) / len(counted)


def to_json(results: dict[str, list[TaskScore]], settings: dict[str, Any]) -> dict[str, Any]:
    """Plain data: the settings, and for each model the scores and their average."""
    models = {}
    for name, scores in results.items():
        mean = average(scores)
        models[name] = {"tasks": [asdict(score) for score in scores], "average": mean and dict([mean])}
    return {"settings": settings, "models": models}


def table(results: dict[str, list[TaskScore]]) -> Table:
    """A row for each task and the average, a column for each model; accuracies in percent with standard errors."""
    first = next(iter(results.values()))
    drawn = Table(title=f"lm-evaluation-harness, {first[0].num_fewshot}-shot", box=box.SIMPLE_HEAD)
    for title in ("task", "measure", "samples"):
        drawn.add_column(title, justify="right" if title == "samples" else "left")
    for name in results:
        drawn.add_column(name, justify="right", overflow="fold")
    for i, score in enumerate(first):
        cells = [_cell(scores[i]) for scores in results.values()]
        drawn.add_row(score.task, score.measure, f"{score.num_samples:,}", *cells, end_section=i == len(first) - 1)
    means = [average(scores) for scores in results.values()]
    if means[0] is not None:
        drawn.add_row(means[0][0], "", "", *(f"{100 * mean[1]:.2f}" for mean in means if mean is not None))
    return drawn


def _cell(score: TaskScore) -> str:
    if not score.measure.startswith("acc"):
        return f"{score.value:,.2f}" if score.value < 1e6 else f"{score.value:.3g}"
    return f"{100 * score.value:.2f}" + ("" if score.error is None else f" ± {100 * score.error:.2f}")


def _manager(tasks: Sequence[str], include: Path | None) -> Any:
    """The harness's index of tasks: of `include` alone where that suffices, for the harness's own take long to read."""
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise ValueError(f"include: got {include}, expected a directory with task files")
    path = None if include is None else str(include)
    manager = TaskManager(include_path=path, include_defaults=False) if path else None
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=path)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown or not tasks:
        raise ValueError(f"tasks: got {', '.join(unknown) or 'none'}, expected names that lm-eval or --include knows")
    return manager


def _score(task: str, found: Any) -> TaskScore:
    told = found["results"][task]
    measures = {key.removesuffix(",none"): value for key, value in told.items() if key.endswith(",none")}
    values = {key: float(value) for key, value in measures.items() if not key.endswith("_stderr")}
    named = PAPER.get(task.removeprefix(LOCAL), "")
    measure = next(name for name in (named, *OTHERS, *values) if name in values)
    error = measures.get(f"{measure}_stderr")
    return TaskScore(
        task=task,
        num_fewshot=int(found["n-shot"].get(task, 0)),
        num_samples=int(found["n-samples"][task]["effective"]),
        measure=measure,
        value=values[measure],
        error=float(error) if isinstance(error, int | float) else None,
        measures=values,
    )
