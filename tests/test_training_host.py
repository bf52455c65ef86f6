"""What a training step asks of the host: nothing of it waits for the device between two lines of metrics."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

from benchmarks.host import no_launches
from fastweight.training import callbacks, train, trainer
from tests.lm_runs import run_of, write_data

# Operators whose result the host needs before it goes on: numbers out of tensors, and shapes that depend on values.
WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "equal")


class Reads(TorchDispatchMode):
    """Counts, by the step under way, what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.found = 0, Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING:
            self.found[self.step] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "data")


def test_only_lines_of_metrics_wait_for_the_device(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels' own path (their launches left out), accumulation, clipping and a schedule."""
    reads = Reads()

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            reads.step = state.global_step + 1

    build = trainer.build_trainer

    def watched(*given: Any) -> Any:
        built = build(*given)
        built.add_callback(Steps())
        return built

    monkeypatch.setattr(trainer, "build_trainer", watched)
    monkeypatch.setattr(callbacks.math, "isfinite", lambda loss: True)  # kernels that do not run leave anything
    model = {"mixer": "falcon-1", "hidden_size": 32, "backend": "triton"}
    settings = {"steps": 6, "log_every": 3, "validate_every": 0, "checkpoint_every": 100}
    with no_launches(), reads:
        train(run_of(data, model=model, training=settings), tmp_path / "run", console=Console(quiet=True))
    assert set(reads.found) == {0, 3, 6}  # 0 is the seed of the sampler, before the first step
    assert reads.found[3] == 2  # loss and gradient norm


def test_the_count_of_operations_is_that_of_transformers(data: Path, tmp_path: Path) -> None:
    run = run_of(data)
    model = trainer.build_model(run, trainer.config_of(run, 24))
    built = trainer.build_trainer(run, tmp_path / "run", 1, model)
    inputs = {"input_ids": torch.zeros(3, 5, dtype=torch.long)}
    assert built.floating_point_ops(inputs) == Trainer.floating_point_ops(built, inputs) > 0


def test_what_accelerate_shards_computes_in_half_precision_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts autocast around the forward of any model but those."""
    run = run_of(data, training={"precision": "bf16"})
    model = trainer.build_model(run, trainer.config_of(run, 24))
    built = trainer.build_trainer(run, tmp_path / "run", 1, model)
    with built.compute_loss_context_manager():
        assert not torch.is_autocast_enabled("cpu")
    monkeypatch.setattr(type(built.accelerator), "is_fsdp2", True)
    with built.compute_loss_context_manager():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
