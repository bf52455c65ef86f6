"""The short convolution over the ranks of a group: the last W-1 real inputs before a rank are what it starts from.

Trap: a document may be shorter than W-1, so what lies before it reaches through ranks and into the carried cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fastweight.parallel.group import Place, gather, tie
from fastweight.parallel.layout import Layout, joined, last_real

Parts = tuple[Tensor, ...]
Here = Callable[[Tensor, Tensor | None, Tensor | None, Tensor], tuple[Parts, Tensor]]


def convolve(
    place: Place, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: Tensor, here: Here
) -> tuple[Parts, Tensor]:
    """y [B, T, D] of this rank's x, in parts of channels, and on all ranks the cache [N, W-1, D] of whole sequences.

    here: the convolution of one process, (x, mask, cu_seqlens, cache) -> (parts of y, new cache).
    """
    T, gap = x.shape[1], cache.shape[1]
    layout = Layout.of(place, len(cache), T, cu_seqlens)
    anchor = next((t for t in (x, cache) if t.requires_grad), None)
    goes_on = layout.goes_on or not layout.packed  # the last rank's, too, is what a dense batch leaves
    (left,), real = last_real([x], mask, layout.opened if goes_on else T, gap)
    left, real = gather(place, anchor, left, real)
    rows = [cache[layout.documents]] if layout.documents else []
    if layout.continues is not None:
        rows.insert(0, _before(layout.row(cache), joined(left, layout, place.rank), joined(real, layout, place.rank)))
    begins = torch.cat(rows) if rows else cache[:0]
    if cu_seqlens is None:
        y, _ = here(x, mask, None, begins)
        *y, new = tie((*y, _before(cache, *(t.movedim(0, 1).flatten(1, 2) for t in (left, real)))), (left,))
        return tuple(y), new
    bounds = [layout.head + bound for bound in layout.bounds]
    bounds = bounds if layout.continues is None else [0, *bounds]
    y, last = here(x, mask, torch.tensor(bounds, device=x.device), begins)
    mine = torch.tensor(([] if layout.continues is None else [layout.continues]) + layout.documents, dtype=torch.long)
    (ends,) = gather(place, anchor, torch.zeros_like(cache).index_copy(0, mine.to(x.device), last.to(cache.dtype)))
    owner = torch.tensor(layout.owner, device=x.device)
    *y, new = tie((*y, ends[owner, torch.arange(len(cache), device=x.device)]), (left, ends))
    return tuple(y), new


def _before(cache: Tensor, left: Tensor, real: Tensor) -> Tensor:
    """The last real inputs [B, W-1, D] of the cache and what ranks have left [B, n, D]."""
    gap = cache.shape[1]
    inputs = torch.cat((cache, left), dim=1)
    order = torch.cat((real.new_ones(cache.shape[:2]), real), dim=1).to(torch.uint8).argsort(dim=1, stable=True)
    index = order[:, order.shape[1] - gap :, None].expand(-1, -1, inputs.shape[-1])
    return inputs.gather(1, index)
