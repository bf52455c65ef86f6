"""Chunks in groups that stay in cache.

All chunks could be prepared in one batched call, but on a CPU the temporaries of a long sequence then stream through
main memory many times over, and every allocation of that size costs page faults. A slab is a run of whole chunks with
about SLAB numbers of q: enough for batched products, small enough for the cache. On a GPU one slab holds everything.
"""

import torch
from torch import Tensor

SLAB = 2**18


def slabs(q: Tensor) -> list[slice]:
    """Runs of chunks of q [n, N, ...] that are worked on together."""
    n = len(q)
    size = max(1, SLAB // q[0].numel()) if q.device.type == "cpu" else n
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def flat(part: slice, *tensors: Tensor) -> list[Tensor]:
    """The chunks of one slab, chunks and sequences merged: [n, N, ...] -> views [M, ...]."""
    return [torch.flatten(z[part], 0, 1) for z in tensors]
