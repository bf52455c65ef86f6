"""Losses that are not the model's own mean over tokens, in the form that transformers.Trainer takes."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fastweight.tasks.problems import IGNORE

Loss = Callable[..., Tensor]


def mean_over_problems(problems: int) -> Loss:
    """A loss that is the mean over a step's problems of the mean over each one's tokens.

    Args:
        problems: in a step, all its micro-batches and processes together; each has at least one token that counts.
    """

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        target = labels[:, 1:]
        logits = rearrange(outputs.logits[:, :-1].float(), "b t v -> b v t")
        each = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")  # [B, T - 1]
        return (each.sum(dim=-1) / (target != IGNORE).sum(dim=-1)).sum() / problems

    return loss
