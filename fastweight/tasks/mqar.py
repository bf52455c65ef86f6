"""Multi-query associative recall: pairs first, then questions (Arora et al., 2023, arXiv 2312.04927).

A problem of size n in sequences of T tokens is

    k_1 v_1 k_2 v_2 ... k_n v_n   then, at even places, each k_i once, in random order; every other token is filler

and the label of the token after a question is the value of its key. Distances follow a power law, as there: the place
of a question counts with weight (1 + place)^(exponent - 1), so most questions come soon after the pairs. Keys are
different tokens in one half of the vocabulary, values (which may repeat) in the other half. Choices of ours: filler is
drawn from a set of its own, so that no filler is a key, and the token after a question is filler too (the answer is
asked for, not shown). Trap: labels are therefore not the input ids, unlike those of a language model.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from fastweight.tasks.problems import IGNORE, Problems, permutations

NUM_FILLERS = 16
EXPONENT = 0.1


def vocab_size(num_keys: int, num_values: int) -> int:
    """Fillers, then keys, then values."""
    return NUM_FILLERS + num_keys + num_values


def draw(
    sizes: Int[Tensor, "B"], generator: torch.Generator, *, length: int, num_keys: int, num_values: int
) -> Problems:
    """One problem for each entry of `sizes` (number of pairs), all of `length` tokens.

    Raises ValueError when the questions of the largest problem do not fit behind its pairs, or keys run out.
    """
    most, rows = int(sizes.max()), len(sizes)
    if int(sizes.min()) < 1 or most > num_keys or 4 * most > length:
        raise ValueError(
            f"sizes: got {int(sizes.min())} to {most} pairs, expected 1 to {min(num_keys, length // 4)} "
            f"({num_keys} keys, {length} tokens)"
        )
    ids = torch.randint(NUM_FILLERS, (rows, length), generator=generator)
    keys = NUM_FILLERS + permutations(rows, num_keys, most, generator)  # [B, N]
    values = NUM_FILLERS + num_keys + torch.randint(num_values, (rows, most), generator=generator)
    live = torch.arange(most) < sizes[:, None]
    shown = torch.stack((keys, values), dim=-1).flatten(1)
    ids[:, : 2 * most] = torch.where(live.repeat_interleave(2, dim=1), shown, ids[:, : 2 * most])
    # Gumbel's trick: the largest of log weight + noise are a draw without replacement.
    slots = torch.arange((length - 2 * most) // 2)
    noise = -torch.log(-torch.log(torch.rand(rows, len(slots), generator=generator).clamp(1e-7, 1 - 1e-7)))
    chosen = ((EXPONENT - 1) * torch.log1p(slots) + noise).topk(most, dim=-1).indices  # [B, N], in random order
    at = 2 * most + 2 * chosen
    labels = torch.full_like(ids, IGNORE)
    ids.scatter_(1, at, torch.where(live, keys, ids.gather(1, at)))
    labels.scatter_(1, at + 1, torch.where(live, values, IGNORE))
    return Problems(ids, labels, sizes)
