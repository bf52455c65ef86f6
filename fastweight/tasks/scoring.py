"""Scores of a causal LM on problems of one size: exact match and token accuracy; for addition, generated answers too.

Three figures for a width: `exact`, the share of problems whose whole answer is right when every digit is predicted
from the true digits before it (teacher-forced, the paper's measure); `token`, the share of answer digits right under
the same conditions; `generated`, the share of problems whose whole answer is right when the model reads its own digits
(greedy, through the cache), with `generated_token` beside it.

Trap: `exact` and `generated` are the same number by logic when the cache is right: until the first wrong digit both
read the same prefix. Where they differ by more than ties, the cache is wrong. What free generation really changes is
the token accuracy, because one wrong carry can spoil the digits after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.tasks.addition import IGNORE, PAD, AdditionBatch


@dataclass(frozen=True)
class Score:
    """Fractions in [0, 1] over `count` problems of one width."""

    width: int
    count: int
    exact: float
    token: float
    generated: float | None = None
    generated_token: float | None = None


def token_hits(logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]) -> Bool[Tensor, "B S"]:
    """Which answer digits the logits put first, [B, S] with S = answer length, the same in every row.

    Position t predicts label t + 1; positions whose label is IGNORE do not count. ValueError when rows have different
    numbers of counted labels (score one width at a time).
    """
    labels = labels[:, 1:]
    counted = labels != IGNORE
    lengths = counted.sum(dim=-1)
    if lengths.numel() == 0 or bool((lengths != lengths[0]).any()) or int(lengths[0]) == 0:
        raise ValueError(
            f"labels: got {lengths.tolist()} counted labels a row, expected one number above 0 for all rows"
        )
    hits = logits[:, :-1].argmax(dim=-1) == labels
    return hits[counted].reshape(labels.shape[0], -1)


def split(batch: AdditionBatch) -> tuple[Int[Tensor, "B P"], Int[Tensor, "B S"]]:
    """Prompt and answer of a batch of one width; ValueError when widths differ."""
    width = int(batch.widths[0])
    if bool((batch.widths != width).any()):
        raise ValueError(f"batch.widths: got {batch.widths.tolist()}, expected one width (prompts of one length)")
    return batch.input_ids[:, : 2 * width + 2], batch.input_ids[:, 2 * width + 2 :]


@torch.inference_mode()
def teacher_forced(model: Any, input_ids: Int[Tensor, "B T"], labels: Int[Tensor, "B T"]) -> Bool[Tensor, "B S"]:
    """Right or wrong for each labelled token, every one predicted after the true tokens before it."""
    device = next(model.parameters()).device
    logits = model(input_ids=input_ids.to(device), use_cache=False).logits
    return token_hits(logits, labels.to(device)).cpu()


@torch.inference_mode()
def generate_answers(model: Any, prompts: Int[Tensor, "B P"], num_digits: int) -> Int[Tensor, "B S"]:
    """Greedy continuation of prompts of one length by `num_digits` tokens, through the model's cache."""
    return torch.stack(_generated(model, [(prompt, num_digits) for prompt in prompts]))


@torch.inference_mode()
def generated_hits(model: Any, batches: Sequence[AdditionBatch], chunk: int = 2048) -> list[Bool[Tensor, "B S"]]:
    """Right or wrong for each digit of freely generated answers, one tensor for each batch (of one width each).

    Widths are generated together, prompts padded on the left and all rows as long as the longest answer asks, which
    takes a few calls instead of one for each width. The model keeps its mode.
    """
    was_training = model.training
    model.eval()
    pairs = [split(batch) for batch in batches]
    rows = [
        (prompt, len(answer)) for prompts, answers in pairs for prompt, answer in zip(prompts, answers, strict=True)
    ]
    free = [row for start in range(0, len(rows), chunk) for row in _generated(model, rows[start : start + chunk])]
    model.train(was_training)
    own = iter(free)
    return [torch.stack([next(own) for _ in answers]) == answers for _, answers in pairs]


def _generated(model: Any, rows: list[tuple[Tensor, int]]) -> list[Tensor]:
    """Greedy answers to prompts of any lengths, each of the length that it asks for."""
    longest = max(len(prompt) for prompt, _ in rows)
    padded = torch.stack([F.pad(prompt, (longest - len(prompt), 0), value=PAD) for prompt, _ in rows])
    device = next(model.parameters()).device
    output = model.generate(
        input_ids=padded.to(device),
        attention_mask=(padded != PAD).long().to(device),
        max_new_tokens=max(length for _, length in rows),
        do_sample=False,
        use_cache=True,
        pad_token_id=PAD,
    )
    return [ids[:length] for ids, (_, length) in zip(output[:, longest:].cpu(), rows, strict=True)]


def all_hits(
    model: Any, input_ids: Int[Tensor, "B T"], labels: Int[Tensor, "B T"], chunk: int = 256
) -> Bool[Tensor, "B S"]:
    """Right or wrong for each labelled token of problems of one size; the model keeps its mode (train or eval)."""
    was_training = model.training
    model.eval()
    parts = zip(input_ids.split(chunk), labels.split(chunk), strict=True)
    hits = torch.cat([teacher_forced(model, *part) for part in parts])
    model.train(was_training)
    return hits


def score(model: Any, batch: AdditionBatch, generate: bool = True, chunk: int = 256) -> Score:
    """All figures of one width; the model is left in the mode (train or eval) in which it came."""
    _, answers = split(batch)
    forced = all_hits(model, batch.input_ids, batch.labels, chunk)
    own = generated_hits(model, [batch], chunk)[0] if generate else None
    return Score(
        width=int(batch.widths[0]),
        count=len(answers),
        exact=forced.all(dim=-1).double().mean().item(),
        token=forced.double().mean().item(),
        generated=None if own is None else own.all(dim=-1).double().mean().item(),
        generated_token=None if own is None else own.double().mean().item(),
    )
