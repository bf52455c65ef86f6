"""Rotary positions in a memory: where each token stands, and a state that does not know how far it has come.

    q_t, k_t -> R^t q_t, R^t k_t         turns by t theta^(-2i/K) in coordinates (i, i + K/2): q_t . k_s knows t - s

Trap: positions are absolute, and a memory must not depend on how far it has come. So a state is kept in the frame of
its last token: keys written n tokens ago stand in it turned by -n, the next token is at 1, and on the way out the state
turns back by the number of real tokens. Nothing is counted between calls. It holds for keys that are written as they
are: behind a nonlinear feature map a written key cannot be turned any more.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from fastweight.layers.convolution import document_of
from fastweight.layers.parts import rotate
from fastweight.memory.state import State
from fastweight.parallel.group import current
from fastweight.parallel.layout import whole


def turned_back(memory: State, count: Int[Tensor, " N"], theta: float) -> State:
    """The state seen from its last token: all keys in it turned back by the `count` tokens that passed."""
    back = -count[:, None]
    S = rearrange(rotate(rearrange(memory.S, "n h k v -> n v h k"), back, theta), "n v h k -> n h k v")
    turned = memory._replace(S=S, key=rotate(memory.key[:, None], back, theta)[:, 0])
    if memory.z.shape[2]:
        turned = turned._replace(z=rotate(memory.z[:, None], back, theta)[:, 0])
    if memory.tail_x.shape[1]:
        turned = turned._replace(tail_x=rotate(memory.tail_x, back, theta))
    return turned


def real_positions(
    x: Float[Tensor, "B T D"], mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Int[Tensor, "b T"], Int[Tensor, " N"]]:
    """Position of each token among the real ones of its sequence, from 1, and how many there are in each sequence."""
    (B, T), place = x.shape[:2], current()
    if mask is None and cu_seqlens is None and place is None:
        return torch.arange(1, T + 1, device=x.device)[None], torch.full((B,), T, device=x.device)
    seen = torch.ones(B, T, dtype=torch.long, device=x.device) if mask is None else mask.long()
    if place is not None:
        everywhere, count = _positions(whole(place, seen), cu_seqlens)
        return everywhere[:, place.rank * T : (place.rank + 1) * T], count
    return _positions(seen, cu_seqlens)


def _positions(seen: Int[Tensor, "B T"], cu_seqlens: Tensor | None) -> tuple[Int[Tensor, "B T"], Int[Tensor, " N"]]:
    """The same from 1 for every real token and 0 for the others."""
    T = seen.shape[1]
    seen = F.pad(seen.cumsum(1), (1, 0))  # [B, T+1]
    if cu_seqlens is None:
        return seen[:, 1:], seen[:, -1]
    bounds = cu_seqlens.to(seen.device).long()
    at_bounds = seen[0, bounds]
    start = at_bounds[document_of(bounds, T)]
    return seen[:, 1:] - start, at_bounds.diff()
