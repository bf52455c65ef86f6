"""A `Run` and a directory into a trained model, through transformers.Trainer.

    run_dir/run.json         the resolved recipe, the number of processes, the fingerprint of the data
    run_dir/metrics.jsonl    see callbacks.py
    run_dir/tensorboard/     the same for TensorBoard, when the run reports there
    run_dir/checkpoint-N/    model, tokenizer, optimizer, schedule, random state, and complete.json when all is there

Started on a directory that holds the same run, `train` goes on from the newest complete checkpoint and ends with the
same parameters, bit for bit on one process, as a run that was never interrupted. Traps: items of a dataset are in the
order in which they are seen, so the sampler is sequential; several GPUs need torchrun (see docs/training.md);
stopping early leaves the schedule as the recipe has it, so that the run can go on.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from fastweight.models.cost import flops_per_token
from fastweight.recipes import Optimizer, Run, rundir, to_dict
from fastweight.training.arguments import micro_batches_of, report_of, training_arguments
from fastweight.training.callbacks import Clock, CompleteCheckpoints, Metrics, ProgressBar, Stops, Validation
from fastweight.training.context import groups_of, ranks_of, shared
from fastweight.training.graphs import RecordedStep, check_recordable
from fastweight.training.groups import parameter_groups
from fastweight.training.material import Material, material_of
from fastweight.training.model import build_model, config_of
from fastweight.training.throughput import Meter, peak_flops


class RunTrainer(Trainer):
    """Trainer with the groups of groups.py, rates in its logs, and knowledge that a tied matrix is stored once.

    With `graphs` forward and backward of a step are a CUDA graph.
    """

    def __init__(self, *args: Any, settings: Optimizer, meter: Meter, graphs: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.settings, self.meter = settings, meter
        model: Any = self.model
        self.recorded = RecordedStep(model.parameters()) if graphs else None
        handler: Any = self.accelerator.ddp_handler
        handler.gradient_as_bucket_view = True  # gradients live in what is sent, not beside it

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            model = self.model if model is None else model
            kind, arguments = self.get_optimizer_cls_and_kwargs(self.args, model)
            self.optimizer = kind(parameter_groups(model, self.settings), **arguments)
        return self.optimizer

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> AbstractContextManager:
        """Around every loss; accelerate puts autocast around a model's forward itself, unless it shards the model."""
        if self.accelerator.is_fsdp2:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> torch.Tensor:
        self.meter.tokens += inputs["input_ids"].numel()
        step = super().training_step
        if self.recorded is None:
            return step(model, inputs, num_items_in_batch, **kwargs)
        inputs = self._prepare_inputs(inputs)
        return self.recorded(
            inputs, num_items_in_batch, lambda inputs, count: step(model, dict(inputs), count, **kwargs)
        )

    def floating_point_ops(self, inputs: Any) -> int:
        return 6 * inputs["input_ids"].numel() * self._num_weights

    @cached_property
    def _num_weights(self) -> int:  # transformers goes through all modules for it, at every micro-batch
        model: Any = self.model
        return model.num_parameters(exclude_embeddings=True)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            tokens = self.meter.tokens
            if self.meter.num_processes > 1:
                count: Any = self.accelerator.reduce(torch.tensor(tokens, device=self.args.device))
                tokens = int(count)
            logs |= self.meter.read(self.state.global_step, tokens)
        super().log(logs, *args, **kwargs)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        # The second name of a tied matrix is not in the file, which the Trainer would report as missing.
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(load_result)


def train(
    run: Run,
    run_dir: Path,
    *,
    max_steps: int | None = None,
    allow_changes: bool = False,
    console: Console | None = None,
    model: Any = None,
) -> Path:
    """Train to the end, or go on from where `run_dir` stands; returns the last checkpoint.

    Args:
        run: the recipe, resolved.
        run_dir: for checkpoints and metrics; made when missing.
        max_steps: stop after this step with a checkpoint, the schedule being that of the whole run; a later call
            without it goes on. None, or more than the recipe has, means to the end.
        allow_changes: go on although settings differ from the run that `run_dir` holds.
        console: where messages and the progress bar go.
        model: instead of the one the recipe describes.

    Raises ValueError when `run_dir` holds a run with other settings or other data, and for settings that exclude
    each other.
    """
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps: got {max_steps}, expected at least 1")
    console, processes = console or Console(stderr=True), int(os.environ.get("WORLD_SIZE", "1"))
    last = min(run.training.steps, max_steps or run.training.steps)
    groups = groups_of(run, processes)
    check_recordable(run, processes)
    accumulation, material = micro_batches_of(run, groups) // groups, shared(material_of(run), run)
    record = {"run": to_dict(run), "processes": processes, "data": material.source}
    start = _starting_point(run_dir, record, allow_changes, console)
    if start is not None and rundir.steps_of(start) >= last:
        console.print(f"{run_dir} is trained already ({start.name}).", highlight=False)
        return start
    _announce(console, run, start, last)
    if model is None:
        model = build_model(run, config_of(run, material.vocab_size, material.end_of_text))
    trainer = build_trainer(run, run_dir, accumulation, model, material, last)
    if os.environ.get("RANK", "0") == "0":
        run_dir.mkdir(parents=True, exist_ok=True)
        rundir.set_aside_incomplete(run_dir)
        rundir.write_json(run_dir / rundir.RUN_RECORD, record)
    for tracker in _tensorboard(run, run_dir, start):
        trainer.add_callback(tracker)
    bar = ProgressBar(f"{run.name} {run.model.get('mixer', '')}".strip(), console, last)
    trainer.add_callback(bar)
    with _one_bar(), _cpu_threads(run.training.threads), ranks_of(run):
        try:
            trainer.train(resume_from_checkpoint=None if start is None else str(start))
        finally:
            bar.close()
    return run_dir / f"checkpoint-{last}"


def build_trainer(
    run: Run, run_dir: Path, accumulation: int, model: Any, material: Material | None = None, last: int | None = None
) -> Trainer:
    """The Trainer of a run, ready to train: `accumulation` micro-batches a step on each process, until step `last`."""
    material = material_of(run) if material is None else material
    args = training_arguments(run, run_dir, accumulation, material.items)
    metrics, meter = Metrics(run_dir / rundir.METRICS), _meter(run, model, material)
    trainer = RunTrainer(
        model=model,
        args=args,
        train_dataset=material.train,
        data_collator=material.collate,
        compute_loss_func=material.loss,
        processing_class=material.tokenizer,
        callbacks=[Stops(last or run.training.steps), metrics, CompleteCheckpoints(), Clock(meter)],
        settings=run.optimizer,
        meter=meter,
        graphs=run.engine.graphs,
    )
    trainer.add_callback(Validation(material.validate, run.training.validate_every, metrics, meter, trainer.log))
    assert trainer.model_accepts_loss_kwargs, "the model must normalise its loss by num_items_in_batch"
    trainer.remove_callback(PrinterCallback)
    return trainer


def _meter(run: Run, model: Any, material: Material) -> Meter:
    length, on_gpu = material.sequence_length, torch.cuda.is_available() and run.training.device == "auto"
    half = run.training.precision != "fp32"
    return Meter(
        flops_per_token(model.config, length) if length is not None and on_gpu else None,
        peak_flops(torch.cuda.get_device_name()) if on_gpu and half else None,
        int(os.environ.get("WORLD_SIZE", "1")),
    )


def _tensorboard(run: Run, run_dir: Path, start: Path | None) -> list[TrainerCallback]:
    """TensorBoard on process 0, when the run reports there; what came after the checkpoint is dropped there too."""
    if report_of(run) != "tensorboard" or os.environ.get("RANK", "0") != "0":
        return []
    from torch.utils.tensorboard import SummaryWriter

    first = None if start is None else rundir.steps_of(start) + 1
    return [TensorBoardCallback(SummaryWriter(str(run_dir / "tensorboard"), purge_step=first))]


def _announce(console: Console, run: Run, start: Path | None, last: int) -> None:
    if start is not None:
        console.print(f"Going on from {start}.", highlight=False, soft_wrap=True)
    if last < run.training.steps:
        console.print(
            f"Stopping after step {last} of {run.training.steps}; the learning rate follows the schedule of the whole "
            "run, and the same command without --max-steps goes on.",
            highlight=False,
            soft_wrap=True,
        )


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
