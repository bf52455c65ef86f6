"""A `Run` into the arguments of transformers.Trainer: how a run is spread, rounded, scheduled and reported.

Traps: FSDP on a CPU silently becomes DDP in accelerate, and a group of sharded parameters must have one dtype, which
"bf16-weights" beside float32 gates is not: both are refused here. One process uses one device, where the Trainer would
spread a single process over all GPUs by DataParallel. A batch that is copied to the device in the blocking way makes
the host wait until the device has finished the step before; nothing else waits for it but the lines of metrics.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils.import_utils import is_torch_bf16_gpu_available

from fastweight.recipes import AdditionTask, Run


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


def report_of(run: Run) -> str:
    """Where a run reports beside metrics.jsonl; ValueError when that needs a package that is not installed."""
    chosen = run.engine.report or ("none" if isinstance(run.task, AdditionTask) else "tensorboard")
    if chosen != "none" and importlib.util.find_spec(chosen) is None:
        raise ValueError(f"engine.report: got {chosen!r}, which is not installed: pip install {chosen}, or take none")
    return chosen


def training_arguments(run: Run, run_dir: Path, accumulation: int, items: int = 1) -> TrainingArguments:
    """The settings of transformers.Trainer that follow from a run.

    Args:
        accumulation: micro-batches of a step on each process.
        items: dataset items of a micro-batch.

    Raises ValueError for settings that exclude each other on this machine.
    """
    settings = run.training
    if settings.precision == "bf16" and settings.device == "auto" and not is_torch_bf16_gpu_available():
        raise ValueError(
            "training.precision: got 'bf16' on a machine without a GPU that has it; expected 'fp32', or "
            "training.device 'cpu' for bfloat16 on the CPU"
        )
    args = TrainingArguments(
        output_dir=str(run_dir),
        run_name=run.name,
        max_steps=settings.steps,
        per_device_train_batch_size=items,
        gradient_accumulation_steps=accumulation,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        bf16=settings.precision == "bf16",
        tf32=_half_on_gpu(run) or None,
        use_cpu=settings.device == "cpu",
        seed=settings.seed,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        save_steps=settings.checkpoint_every,
        save_total_limit=settings.keep_checkpoints,
        dataloader_num_workers=run.engine.workers,
        dataloader_pin_memory=torch.cuda.is_available() and settings.device == "auto",
        disable_tqdm=True,
        report_to=["wandb"] if report_of(run) == "wandb" else [],
        **_optimizer_arguments(run),
        **_sharding(run),
    )
    if args.n_gpu > 1:
        args._n_gpu = 1
    if args.fsdp_plugin_args is not None:
        args.fsdp_plugin_args["mixed_precision_policy"] = sharding_policy()
    return args


def sharding_policy() -> Any:
    """What FSDP2 gathers, reduces and hands out: everything as it is, so that it computes what DDP computes.

    accelerate's own policy under bf16 rounds gates, sums of gradients, the number of labels and the loss to bfloat16;
    the products are autocast's business either way.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy()


def _half_on_gpu(run: Run) -> bool:
    """Whether what stays float32 beside half precision (the gates' products) may use the GPU's TF32: its rounding,
    2^-11, is finer than that of the bfloat16 activations it multiplies, and plain float32 products are slow."""
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    return run.training.precision != "fp32" and run.training.device == "auto" and capable


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


def _sharding(run: Run) -> dict[str, Any]:
    """FSDP2, a block at a time, each block's parameters gathered when it is called."""
    if run.engine.parallel == "ddp":
        return {}
    if run.training.device == "cpu" or not torch.cuda.is_available():
        raise ValueError("engine.parallel: got 'fsdp2' on a CPU, where it would silently become DDP; expected 'ddp'")
    if run.training.precision == "bf16-weights":
        raise ValueError(
            "training.precision: got 'bf16-weights' with engine.parallel 'fsdp2', which shards parameters of one dtype "
            "only (gates are float32); expected 'bf16' or 'fp32'"
        )
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["FastWeightBlock"]}}
