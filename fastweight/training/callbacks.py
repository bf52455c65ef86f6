"""What a training run tells: a progress bar, metrics.jsonl, validation scores; and the mark of a complete checkpoint.

metrics.jsonl holds one JSON object a line: {"step", "loss", "grad_norm", "learning_rate", "steps_per_second",
"tokens_per_second", "mfu", "peak_memory_gib"} every log_every steps and at every checkpoint (mean loss since the line
before, gradient norm before clipping, tokens of all processes, padding included, no mfu where it is not known; see
throughput.py) and {"step", "validation": {...}} at validations. Lines after the checkpoint from which a run goes on are
dropped, so that steps are unique, and because a line is written at every checkpoint, no mean begins before it: what is
written after going on is what would have been written anyway. Trap: the Trainer hides a loss that is not finite from
its averages by default; here it ends the run with an error instead.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from fastweight.files import write_text
from fastweight.recipes.rundir import mark_complete
from fastweight.training.throughput import Meter, in_words

LOGGED = ("loss", "grad_norm", "learning_rate", "steps_per_second", "tokens_per_second", "mfu", "peak_memory_gib")


class Stops(TrainerCallback):
    """Ends the run after step `last`, if that is before the recipe's end, and logs whenever there is a checkpoint."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.last:
            control.should_training_stop = control.should_save = True
        if control.should_save:
            control.should_log = True


class CompleteCheckpoints(TrainerCallback):
    """Writes the manifest once every process has written its part of a checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()
        if state.is_world_process_zero:
            mark_complete(Path(args.output_dir) / f"checkpoint-{state.global_step}")


class ProgressBar(TrainerCallback):
    """A bar with steps, rate, time left and the last loss, on process 0; in a file, a line every tenth of the way."""

    def __init__(self, title: str, console: Console, last: int) -> None:
        self.title, self.last = title, last
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
        ]
        self.progress = Progress(*columns, console=console, refresh_per_second=2)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step, self.started = state.global_step, time.monotonic()
        if state.is_world_process_zero:
            self.progress.start()
            self.task = self.progress.add_task(
                self.title, total=self.last, completed=state.global_step, rate="", last=""
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            rate = (state.global_step - self.first_step) / max(time.monotonic() - self.started, 1e-9)
            self.progress.update(self.task, completed=state.global_step, rate=f"{rate:.1f} steps/s")
            tenth = max(self.last // 10, 1)
            if not self.progress.console.is_terminal and state.global_step % tenth == 0:
                left = (self.last - state.global_step) / rate
                done = f"step {state.global_step} of {self.last}, {rate:.1f} steps/s, {left:.0f} s left"
                self.progress.console.print(f"{self.title}: {done}", highlight=False, soft_wrap=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs and "loss" in logs:
            self.progress.update(self.task, last=f"loss {logs['loss']:.3f}, {in_words(logs)}")

    def close(self) -> None:
        """Give the terminal back, also after an interruption."""
        self.progress.stop()


class Metrics(TrainerCallback):
    """Appends metrics to a file on process 0 and refuses a loss that is not finite."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            keep_until(self.path, state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise FloatingPointError(
                f"The loss is {logs['loss']} at step {state.global_step}; the last complete checkpoint is untouched. "
                "Lower optimizer.learning_rate or use training.precision=fp32."
            )
        self.write(state, {"step": state.global_step} | {key: logs[key] for key in LOGGED if key in logs})

    def write(self, state: Any, line: dict[str, Any]) -> None:
        """Append one line, on process 0 only."""
        if state.is_world_process_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class Clock(TrainerCallback):
    """Starts the meter with the training, and again after each checkpoint."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.restart(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.restart(state.global_step)


class Validation(TrainerCallback):
    """Scores the model on held-out data every `every` steps and at the end, into the metrics and to other trackers.

    Args:
        score: from the model to a dictionary of figures.
        every: optimizer steps; 0 means never.
        metrics, meter: where figures go, and whose clock stands still meanwhile.
        log: the Trainer's, which tells the other trackers.
    """

    def __init__(
        self,
        score: Callable[[Any], dict[str, float]],
        every: int,
        metrics: Metrics,
        meter: Meter,
        log: Callable[[dict[str, float]], None],
    ) -> None:
        self.score, self.every, self.metrics, self.meter, self.log = score, every, metrics, meter, log

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.every or (state.global_step % self.every and not control.should_training_stop):
            return
        with self.meter.paused():
            figures = self.score(model)
        self.metrics.write(state, {"step": state.global_step, "validation": figures})
        due = control.should_log
        self.log({f"eval_{name}": value for name, value in figures.items()})
        control.should_log = due  # logging has taken it down, but the loss of this step is still to come


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of a metrics file that come after `step`, and a last line that was cut short."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    write_text(path, "".join(line + "\n" for line in kept))
