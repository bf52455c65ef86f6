"""State tracking: sequences of group elements, and after each one the product of all so far (the word problem).

    g_1 g_2 ... g_n END      label of token t + 1: g_1 g_2 ... g_t   (the label of the first token is IGNORE)

"parity" is the group of two elements, "s3" and "s5" are all permutations of 3 and 5 things. A memory whose carry has
only eigenvalues in (0, 1] cannot keep parity at any length; a step beyond 1 (beta > 1 on unit keys) makes them negative
(Grazzi et al., 2024, arXiv 2411.12537). S5 is not solvable, so no fixed depth of solvable steps tracks it. Elements are
numbered in lexicographic order of their permutations; a b means: first a, then b. END is the last id. Sizes are
lengths; shorter problems of a batch are padded with END, unlabelled.
"""

from itertools import permutations
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fastweight.tasks.problems import IGNORE, Problems

Group = Literal["parity", "s3", "s5"]
THINGS: dict[Group, int] = {"parity": 2, "s3": 3, "s5": 5}


def elements(group: Group) -> list[tuple[int, ...]]:
    """The permutations of a group by id; p[i] is where thing i goes."""
    return list(permutations(range(THINGS[group])))


def products(group: Group) -> Int[Tensor, "G G"]:
    """Id of "first a, then b" at [a, b]."""
    known = elements(group)
    ids = {element: i for i, element in enumerate(known)}
    return torch.tensor([[ids[tuple(b[i] for i in a)] for b in known] for a in known])


def draw(sizes: Int[Tensor, "B"], generator: torch.Generator, *, group: Group, longest: int = 0) -> Problems:
    """One problem for each entry of `sizes` (number of elements, at least 1).

    Rows are padded as if there were one of `longest` elements too, which changes none that are drawn.
    """
    if int(sizes.min()) < 1:
        raise ValueError(f"sizes: got {int(sizes.min())}, expected at least 1 element")
    table, most = products(group), int(sizes.max())
    end = len(table)
    drawn = torch.randint(end, (len(sizes), most), generator=generator)
    state, states = torch.zeros(len(sizes), dtype=torch.long), []
    for t in range(most):
        state = table[state, drawn[:, t]]
        states.append(state)
    inside = torch.arange(most) < sizes[:, None]
    ids = torch.where(inside, drawn, end)
    labels = torch.where(inside, torch.stack(states, dim=1), IGNORE)
    missing = max(longest - most, 0)
    ids, labels = F.pad(ids, (0, missing), value=end), F.pad(labels, (0, missing), value=IGNORE)
    edge = torch.full((len(sizes), 1), end)
    return Problems(torch.cat((ids, edge), dim=1), torch.cat((torch.full_like(edge, IGNORE), labels), dim=1), sizes)
