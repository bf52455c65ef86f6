"""What the op is given, as two records: the tokens, and what surrounds them; and the precision that follows from it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastweight.memory.state import State


def working_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What the memory computes in: float64 if anything comes in float64, else float32."""
    double = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if double else torch.float32


class Inputs(NamedTuple):
    """What the op reads at every token, in its own layouts (the letters are in memory/writes.py)."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    lam: Tensor | None
    log_decay: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same change to every tensor that is there."""
        return Inputs(*(None if t is None else change(t) for t in self))  # type: ignore[arg-type]


class Around(NamedTuple):
    """What surrounds the tokens: what is carried in, which of them are real, where sequences end."""

    initial_state: State | Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def key(self) -> Tensor | None:
        """The carried key; a bare S starts a fresh segment."""
        return self.initial_state.key if isinstance(self.initial_state, State) else None
