"""Sequences with a scored tail into the negative log-likelihood of every token in it, in batches.

Rows are padded on the right, which a causal model never sees, so neither the padding nor the size of a batch changes a
figure beyond rounding. Trap: logits of a batch are large (batch x length x vocabulary x 4 bytes); they are turned into
losses row by row, so that no second copy of them is made.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

BUFFERED = 32  # batches that are sorted by length together, to pad less


class Piece(NamedTuple):
    """Token ids of one row, the last `num_scored` of which are scored."""

    ids: list[int]
    num_scored: int


class Scored(NamedTuple):
    """A piece with, for each scored token, its negative log-likelihood in nats and whether it was the likeliest."""

    piece: Piece
    losses: np.ndarray
    likeliest: np.ndarray


def score(
    model: Any,
    pieces: Iterable[Piece],
    *,
    batch_size: int = 8,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Iterator[Scored]:
    """Score pieces, in an order of its own; `progress` is told the tokens that each batch has scored.

    The first token of a piece has nothing before it and cannot be scored: at most len(ids) - 1 are.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
    source = iter(pieces)
    while buffer := list(islice(source, BUFFERED * batch_size)):
        buffer.sort(key=lambda piece: len(piece.ids), reverse=True)
        for i in range(0, len(buffer), batch_size):
            rows = buffer[i : i + batch_size]
            yield from _score_batch(model, rows)
            progress(sum(row.num_scored for row in rows))


@torch.inference_mode()
def _score_batch(model: Any, rows: list[Piece]) -> list[Scored]:
    longest = max(len(row.ids) for row in rows) - 1
    inputs = torch.tensor([row.ids[:-1] + [0] * (longest - len(row.ids) + 1) for row in rows], device=model.device)
    logits, scored = model(input_ids=inputs, use_cache=False).logits, []
    for row, row_logits in zip(rows, logits, strict=True):
        end = len(row.ids) - 1
        targets = torch.tensor(row.ids[len(row.ids) - row.num_scored :], device=logits.device)
        tail = row_logits[end - row.num_scored : end].float()
        losses = F.cross_entropy(tail, targets, reduction="none")
        scored.append(Scored(row, losses.double().cpu().numpy(), (tail.argmax(-1) == targets).cpu().numpy()))
    return scored
