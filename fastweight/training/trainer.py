"""A `Run` and a directory into a trained model, through transformers.Trainer: the one place that knows its settings.

    run_dir/run.json         the resolved recipe and the number of processes
    run_dir/metrics.jsonl    see callbacks.py
    run_dir/checkpoint-N/    model, optimizer, schedule, random state, and complete.json when all of it is there

Started on a directory that holds the same run, `train` goes on from the newest complete checkpoint and ends with the
same parameters, bit for bit on one process, as a run that was never interrupted. Traps: the micro-batch, not the
problem, is the dataset's item, so per_device_train_batch_size is 1 and the collator only unwraps; several GPUs need
torchrun (one process uses one device, never DataParallel).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from fastweight.recipes import AdditionTask, Run, rundir, to_dict
from fastweight.tasks.addition import AdditionBatches, held_out
from fastweight.tasks.scoring import score
from fastweight.training.callbacks import METRICS, CompleteCheckpoints, Metrics, ProgressBar, Validation
from fastweight.training.model import build_model, decayed_parameters


class RunTrainer(Trainer):
    """Trainer whose weight decay follows the marks on the layers, and who knows that a tied matrix is stored once."""

    def get_decay_parameter_names(self, model: torch.nn.Module) -> list[str]:
        return decayed_parameters(model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # The second name of a tied matrix is not in the file, which the Trainer would report as missing.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)


def train(
    run: Run, run_dir: Path, *, allow_changes: bool = False, console: Console | None = None, model: Any = None
) -> Path:
    """Train to the end, or go on from where `run_dir` stands; returns the last checkpoint.

    Args:
        run: the recipe, resolved.
        run_dir: for checkpoints and metrics; made when missing.
        allow_changes: go on although settings differ from the run that `run_dir` holds.
        console: where messages and the progress bar go.
        model: instead of the one the recipe describes.

    Raises ValueError when `run_dir` holds a run with other settings.
    """
    console = console or Console(stderr=True)
    record = {"run": to_dict(run), "processes": int(os.environ.get("WORLD_SIZE", "1"))}
    accumulation = micro_batches_of(run, record["processes"]) // record["processes"]
    start = _starting_point(run_dir, record, allow_changes, console)
    if start is not None and rundir.steps_of(start) >= run.training.steps:
        console.print(f"{run_dir} is trained already ({start.name}).", highlight=False)
        return start
    if start is not None:
        console.print(f"Going on from {start}.", highlight=False, soft_wrap=True)
    model = build_model(run) if model is None else model
    if os.environ.get("RANK", "0") == "0":
        run_dir.mkdir(parents=True, exist_ok=True)
        rundir.set_aside_incomplete(run_dir)
        rundir.write_json(run_dir / rundir.RUN_RECORD, record)
    trainer = build_trainer(run, run_dir, accumulation, model)
    bar = ProgressBar(f"{run.name} {run.model.get('mixer', '')}".strip(), console)
    trainer.add_callback(bar)
    with _one_bar(), _cpu_threads(run.training.threads):
        try:
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
        finally:
            bar.close()
    return run_dir / f"checkpoint-{run.training.steps}"


def micro_batches_of(run: Run, num_processes: int) -> int:
    """Micro-batches of one optimizer step, over all processes; ValueError when the processes cannot share them."""
    settings = run.training
    micro_batches = settings.batch_size // (settings.micro_batch_size or settings.batch_size)
    if micro_batches % num_processes:
        raise ValueError(
            f"training.micro_batch_size: got {settings.micro_batch_size} ({micro_batches} micro-batches a step), "
            f"expected a multiple of {num_processes} micro-batches, one or more for each process"
        )
    return micro_batches


def build_trainer(run: Run, run_dir: Path, accumulation: int, model: Any) -> Trainer:
    """The Trainer of a run, ready to train; `accumulation` micro-batches a step on each process."""
    task, settings = _addition(run), run.training
    micro_batch = settings.micro_batch_size or settings.batch_size
    num_items = settings.steps * (settings.batch_size // micro_batch)
    metrics = Metrics(run_dir / METRICS)
    trainer = RunTrainer(
        model=model,
        args=training_arguments(run, run_dir, accumulation),
        train_dataset=AdditionBatches(task.train_widths, micro_batch, num_items, settings.seed, task.layout),
        data_collator=_only_item,
        callbacks=[metrics, Validation(_validator(run), settings.validate_every, metrics), CompleteCheckpoints()],
    )
    assert trainer.model_accepts_loss_kwargs, "the model must normalise its loss by num_items_in_batch"
    trainer.remove_callback(PrinterCallback)
    return trainer


def training_arguments(run: Run, run_dir: Path, accumulation: int) -> TrainingArguments:
    """The settings of transformers.Trainer that follow from a run."""
    settings = run.training
    args = TrainingArguments(
        output_dir=str(run_dir),
        max_steps=settings.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        bf16=settings.precision == "bf16",
        use_cpu=settings.device == "cpu",
        seed=settings.seed,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        include_num_input_tokens_seen="all",
        save_steps=settings.checkpoint_every,
        save_total_limit=settings.keep_checkpoints,
        dataloader_pin_memory=torch.cuda.is_available() and settings.device == "auto",
        disable_tqdm=True,
        report_to=[],
        **_optimizer_arguments(run),
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # one process, one device: the Trainer would wrap the model in DataParallel
    return args


def _optimizer_arguments(run: Run) -> dict[str, Any]:
    optimizer = run.optimizer
    return {
        "optim": "adamw_torch_fused",
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip,
        "lr_scheduler_type": "cosine",
        "warmup_steps": optimizer.warmup_steps,
    }


def _starting_point(run_dir: Path, record: dict[str, Any], allow_changes: bool, console: Console) -> Path | None:
    """Check that the run may go on in `run_dir` and find the checkpoint to start from; nothing is written."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    for change in rundir.check_same_run(run_dir, record, allow_changes):
        say(f"Going on with a changed setting: {change}")
    return rundir.newest_complete_checkpoint(run_dir, say)


@contextmanager
def _one_bar() -> Iterator[None]:
    """Silence the bars that transformers draws while it writes a checkpoint; ours would be torn by them."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@contextmanager
def _cpu_threads(number: int | None) -> Iterator[None]:
    """Let torch use `number` threads inside, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _only_item(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    (item,) = items
    return item


def _validator(run: Run) -> Any:
    """From a model to exact match by width and their mean, on held-out problems of the training widths."""
    task = _addition(run)
    low, high = task.train_widths
    batches = [
        held_out(width, task.validation_problems, task.test_seed, stream="validation") for width in range(low, high + 1)
    ]

    def validate(model: Any) -> dict[str, float]:
        scores = [score(model, batch, generate=False) for batch in batches]
        by_width = {f"exact_{s.width}": s.exact for s in scores}
        return {"exact": sum(s.exact for s in scores) / len(scores)} | by_width

    return validate


def _addition(run: Run) -> AdditionTask:
    if not isinstance(run.task, AdditionTask):
        raise ValueError(f"task.kind: got {run.task.kind!r}, expected 'addition'")
    return run.task
