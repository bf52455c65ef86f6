"""Training on sequences that several processes share: who gets which tokens, and the group that exchanges the rest.

Of W processes, each `engine.context_parallel` = N in a row share their sequences; process p holds part p % N of those
of group p // N. To the Trainer they are W processes like any others (DDP, FSDP2): each has a part of the loss, and the
parts add up. It hands micro-batch i to process i % W, so every micro-batch is there N times in a row, and the
collator cuts out the part of its process. The label of a part's last token is known before it is cut.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset

from fastweight.parallel import context_parallel
from fastweight.recipes import Run, TextTask

IGNORED = -100  # label that the loss leaves out
TOKENS = ("input_ids", "labels", "position_ids", "shift_labels")


def groups_of(run: Run, processes: int) -> int:
    """Groups of processes that have sequences of their own; ValueError for settings that exclude each other."""
    ranks = run.engine.context_parallel
    if ranks == 1:
        return processes
    name = "engine.context_parallel"
    if processes % ranks:
        raise ValueError(f"{name}: got {ranks} with {processes} processes, expected a divisor of their number")
    if not isinstance(run.task, TextTask):
        raise ValueError(f"{name}: got {ranks} for the {run.task.kind} task, expected 1: its sequences are short")
    if run.task.sequence_length % ranks:
        raise ValueError(f"{name}: got {ranks}, expected a divisor of task.sequence_length {run.task.sequence_length}")
    if run.engine.compile:
        raise ValueError(f"{name}: got {ranks} with engine.compile, expected one of them: exchanges are not compiled")
    if "transformer" in str(run.model.get("mixer", "")) or "transformer" in run.model.get("mixers", ()):
        raise ValueError(f"{name}: got {ranks} with mixer 'transformer', expected a mixer with a memory")
    return processes // ranks


def place_of(run: Run) -> tuple[int, int, int]:
    """This process's part of its sequences, its group, and the number of groups."""
    ranks, world = run.engine.context_parallel, int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    return rank % ranks, rank // ranks, world // ranks


class Repeated(Dataset[Any]):
    """The items of a dataset, each micro-batch of `items` `times` in a row."""

    def __init__(self, data: Any, items: int, times: int) -> None:
        self.data, self.items, self.times = data, items, times

    def __len__(self) -> int:
        return len(self.data) * self.times

    def __getitem__(self, index: int) -> Any:
        batch, item = divmod(index, self.items)
        return self.data[batch // self.times * self.items + item]


def part_of(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """A rank's tokens of a batch of whole sequences, with the labels of the tokens that follow them."""
    if ranks == 1:
        return batch
    batch = batch | {"shift_labels": F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]}
    T = batch["labels"].shape[1] // ranks
    return {name: t[:, rank * T : (rank + 1) * T].contiguous() if name in TOKENS else t for name, t in batch.items()}


def shared(material: Any, run: Run) -> Any:
    """The material of a run as this process sees it."""
    ranks, (rank, _, _) = run.engine.context_parallel, place_of(run)
    if ranks == 1:
        return material
    collate: Callable[..., Any] = material.collate
    return replace(
        material,
        train=Repeated(material.train, material.items, ranks),
        collate=lambda items: part_of(collate(items), rank, ranks),
    )


@contextmanager
def ranks_of(run: Run) -> Iterator[None]:
    """Inside, this process's group shares its sequences; torch.distributed has been initialised."""
    ranks = run.engine.context_parallel
    if ranks == 1:
        yield
        return
    world = torch.distributed.get_world_size()
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, (world // ranks, ranks), mesh_dim_names=("data", "context"))
    with context_parallel(mesh["context"]):
        yield
