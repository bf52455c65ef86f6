"""A task into what training asks of it: batches in a fixed order, a validation, and what they were made from.

Item i of `train` is a pure function of the recipe and i, so a run that goes on at item i sees what it would have seen,
whatever the number of processes. Traps: an item of a drawn task is a whole micro-batch, an item of text one sequence;
the first token of a row predicts nothing and is predicted by nothing, so it is no label, whoever counts labels.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from fastweight.data import Windows, load_tokenizer, open_shards
from fastweight.recipes import AdditionTask, DrawnTask, Run, TextTask
from fastweight.tasks.addition import IGNORE, VOCAB_SIZE, AdditionBatches, held_out
from fastweight.tasks.problems import DrawnBatches
from fastweight.tasks.scoring import all_hits, score
from fastweight.training.context import part_of, place_of
from fastweight.training.losses import Loss, mean_over_problems

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Material:
    """What a run is trained on.

    Fields:
        train: items in the order in which they are seen; all of them, over all steps.
        collate: from the items of a micro-batch to the model's arguments.
        items: of a micro-batch.
        validate: from a model to figures on held-out data, the same on every process.
        vocab_size: ids are below this.
        end_of_text: id that ends a document, if there are any.
        tokenizer: to be saved beside the weights.
        sequence_length: tokens of a sequence, for the FLOP count; None where it varies.
        source: what the data is, for the record of the run; a run goes on only with the same.
        loss: of outputs, labels and the number of labels, instead of the model's own mean over tokens.
    """

    train: Dataset[Batch]
    collate: Callable[[list[Batch]], Batch]
    items: int
    validate: Callable[[Any], dict[str, float]]
    vocab_size: int
    end_of_text: int | None = None
    tokenizer: Any = None
    sequence_length: int | None = None
    source: dict[str, Any] = field(default_factory=dict)
    loss: Loss | None = None


def material_of(run: Run) -> Material:
    """The material of a run; ValueError when its data is missing or too small."""
    task = run.task
    if isinstance(task, DrawnTask):
        return drawn(run, task)
    return addition(run, task) if isinstance(task, AdditionTask) else text(run, task)


def _micro_batches(run: Run) -> tuple[int, int]:
    """Problems in a micro-batch, and how many micro-batches a run sees."""
    settings = run.training
    micro_batch = settings.micro_batch_size or settings.batch_size
    return micro_batch, settings.steps * (settings.batch_size // micro_batch)


def drawn(run: Run, task: DrawnTask) -> Material:
    """Random problems of the training sizes, and the share of right tokens by size on held-out ones."""
    return Material(
        train=DrawnBatches(task.padded_draw, task.train_sizes, *_micro_batches(run), run.training.seed),
        collate=_only_item,
        items=1,
        validate=_right_tokens(task),
        vocab_size=task.vocab_size,
    )


def addition(run: Run, task: AdditionTask) -> Material:
    """Random sums, and exact match by width on held-out ones."""
    return Material(
        train=AdditionBatches(
            task.train_widths, *_micro_batches(run), run.training.seed, task.layout, task.least_first
        ),
        collate=_only_item,
        items=1,
        validate=_exact_match(task),
        vocab_size=VOCAB_SIZE,
        loss=mean_over_problems(run.training.batch_size) if task.mean_over == "problems" else None,
    )


def text(run: Run, task: TextTask) -> Material:
    """Windows of prepared token shards, and the mean loss on the first windows of the validation split."""
    if task.data is None:
        raise ValueError("task.data: got nothing, expected a directory that `fastweight prepare` wrote (--data DIR)")
    settings, shards = run.training, open_shards(task.data, "train")
    windows = Windows(shards, task.sequence_length, seed=settings.seed, packing=task.packing)
    micro_batch = settings.micro_batch_size or settings.batch_size
    tokenizer = load_tokenizer(Path(task.data) / "tokenizer")
    return Material(
        train=InOrder(windows, settings.steps * settings.batch_size),
        collate=_collate_of(task),
        items=micro_batch,
        validate=_no_figures if settings.validate_every == 0 else _mean_loss(run, task, micro_batch),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=tokenizer.to_transformers(),
        sequence_length=task.sequence_length,
        source={"tokens": shards.num_tokens, "fingerprint": shards.fingerprint},
    )


class InOrder(Dataset[Batch]):
    """The first `num_items` items of windows, which begin anew, in another order, where the split ends."""

    def __init__(self, windows: Windows, num_items: int) -> None:
        epochs = -(-num_items // windows.per_epoch)
        self.windows, self.num_items = copy(windows), num_items
        self.windows.epochs = max(epochs, 1)

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.num_items:
            raise IndexError(f"index: got {index}, expected 0 to {self.num_items - 1}")
        return self.windows[index]


def stack(items: Sequence[Batch]) -> Batch:
    """Sequences as rows."""
    labels = torch.stack([item["labels"] for item in items])
    labels[:, 0] = IGNORE
    return {"input_ids": torch.stack([item["input_ids"] for item in items]), "labels": labels}


def pack(items: Sequence[Batch]) -> Batch:
    """Sequences end to end in one row, with the bounds of their documents, which do not see each other."""
    rows = {name: torch.cat([item[name] for item in items])[None] for name in ("input_ids", "labels", "position_ids")}
    starts = (rows["position_ids"][0] == 0).nonzero()[:, 0]
    rows["labels"][:, starts] = IGNORE
    bounds = F.pad(starts, (0, 1), value=rows["input_ids"].shape[1]).to(torch.int32)
    return rows | {"cu_seq_lens_q": bounds}


def _collate_of(task: TextTask) -> Callable[[Sequence[Batch]], Batch]:
    return stack if task.packing == "contiguous" else pack


def _only_item(items: list[Batch]) -> Batch:
    (item,) = items
    return item


def _no_figures(model: Any) -> dict[str, float]:
    return {}


def _right_tokens(task: DrawnTask) -> Callable[[Any], dict[str, float]]:
    """From a model to the share of right tokens at the ends of the training sizes and between, and their mean."""
    low, high = task.train_sizes
    sizes = sorted({low, (low + high) // 2, high})
    batches = [task.held_out(size, task.validation_problems, stream="validation") for size in sizes]

    def validate(model: Any) -> dict[str, float]:
        shares = [float(all_hits(model, batch.input_ids, batch.labels).double().mean()) for batch in batches]
        by_size = {f"token_{size}": share for size, share in zip(sizes, shares, strict=True)}
        return {"token": sum(shares) / len(shares)} | by_size

    return validate


def _exact_match(task: AdditionTask) -> Callable[[Any], dict[str, float]]:
    """From a model to exact match by width and their mean, on held-out problems of the training widths."""
    low, high = task.train_widths
    batches = [
        held_out(width, task.validation_problems, task.test_seed, stream="validation", least_first=task.least_first)
        for width in range(low, high + 1)
    ]

    def validate(model: Any) -> dict[str, float]:
        scores = [score(model, batch, generate=False) for batch in batches]
        by_width = {f"exact_{s.width}": s.exact for s in scores}
        return {"exact": sum(s.exact for s in scores) / len(scores)} | by_width

    return validate


def _mean_loss(run: Run, task: TextTask, micro_batch: int) -> Callable[[Any], dict[str, float]]:
    """From a model to its mean loss on the first validation sequences; processes share them."""
    assert task.data is not None, "checked by the caller"
    shards = open_shards(task.data, "validation")
    windows = Windows(shards, task.sequence_length, packing=task.packing, shuffle=False)
    collate = _collate_of(task)
    count = min(task.validation_sequences, len(windows))

    def validate(model: Any) -> dict[str, float]:
        part, rank, world = place_of(run)
        device, was_training = next(model.parameters()).device, model.training
        batches = list(torch.arange(count).split(micro_batch))
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        model.eval()
        with torch.no_grad():
            # Every process makes as many calls, because sharded parameters are gathered in each of them.
            for turn in range(-(-len(batches) // world)):
                at = turn * world + rank
                batch = collate([windows[int(i)] for i in batches[min(at, len(batches) - 1)]])
                if at >= len(batches):
                    batch["labels"].fill_(IGNORE)
                batch = part_of(batch, part, run.engine.context_parallel)
                batch = {name: value.to(device) for name, value in batch.items()}
                total = model(**batch, num_items_in_batch=1, use_cache=False, output_logits=False).loss
                sums += torch.stack([total.double(), (batch["labels"] != IGNORE).sum().double()])
        model.train(was_training)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        return {"loss": float(sums[0] / sums[1]), "tokens": float(sums[1])}

    return validate
