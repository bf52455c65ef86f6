"""The memory between two calls: all that exact continuation needs, as tensors only.

S alone is not enough to go on exactly. Next-latent pairing needs the last key (and whether there was one), the window
rules need their last R-1 pairs, and the normalised read needs its normaliser. All of it is differentiable. The batch
axis comes first in every field, so that a state can be gathered, reordered and repeated along it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fastweight.memory.rules import Rule, rule_of


class State(NamedTuple):
    """Memory of N sequences after some tokens. Widths as in memory/writes.py; unused parts have a zero-length axis.

    S: fast weights. z: normaliser of the normalised read (width 0 when the rule reads plainly).
    key, has_key: key of the last unmasked token, and whether there was one (without, next-latent pairing writes
    nothing). tail_x, tail_y, tail_count: the last R-1 pairs, newest last, and how many of them are real.
    """

    S: Float[Tensor, "N H K V"]
    z: Float[Tensor, "N H Z"]
    key: Float[Tensor, "N Hk K"]
    has_key: Bool[Tensor, " N"]
    tail_x: Float[Tensor, "N R-1 Hk K"]
    tail_y: Float[Tensor, "N R-1 H V"]
    tail_count: Int[Tensor, " N"]

    @classmethod
    def zeros(
        cls,
        rule: "str | Rule",
        batch_size: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        *,
        num_key_heads: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "State":
        """An empty memory with a fresh boundary: S = 0 [N, H, K, V], no last key, no pairs in the window."""
        S = torch.zeros(batch_size, num_heads, key_width, value_width, dtype=dtype, device=device)
        return cls.fresh(S, rule, num_key_heads=num_key_heads)

    @classmethod
    def fresh(cls, S: Float[Tensor, "N H K V"], rule: "str | Rule", *, num_key_heads: int | None = None) -> "State":
        """S carried into a new segment: the boundary is fresh, so the first token writes nothing (section 2)."""
        rule = rule_of(rule)
        N, H, K, V = S.shape
        Hk = num_key_heads or H
        return cls(
            S=S,
            z=S.new_zeros(N, H, K if rule.read == "normalized" else 0),
            key=S.new_zeros(N, Hk, K),
            has_key=torch.zeros(N, dtype=torch.bool, device=S.device),
            tail_x=S.new_zeros(N, rule.window - 1, Hk, K),
            tail_y=S.new_zeros(N, rule.window - 1, H, V),
            tail_count=torch.zeros(N, dtype=torch.int64, device=S.device),
        )

    def detach(self) -> "State":
        """The same values, cut from the autograd graph (truncated backpropagation through time)."""
        return State(*(field.detach() for field in self))

    def clone(self) -> "State":
        return State(*(field.clone() for field in self))

    def to(self, *args, **kwargs) -> "State":
        """Move or cast: floating fields follow the dtype, flags and counts only the device."""
        moved = (field.to(*args, **kwargs) if field.is_floating_point() else field for field in self)
        state = State(*moved)
        device = state.S.device
        return state._replace(has_key=state.has_key.to(device), tail_count=state.tail_count.to(device))

    def index_select(self, index: Int[Tensor, " M"]) -> "State":
        """Rows `index` of the batch axis: gathers, repeats and reorders (beam search, dropping finished sequences)."""
        return State(*(field.index_select(0, index.to(field.device)) for field in self))

    @classmethod
    def cat(cls, states: "list[State]") -> "State":
        """Several states joined along the batch axis."""
        if not states:
            raise ValueError("states: got an empty list, expected at least one State")
        return cls(*(torch.cat(parts) for parts in zip(*states, strict=True)))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Named contiguous tensors for safetensors; `from_tensors` is the inverse."""
        return {prefix + name: value.detach().contiguous() for name, value in self._asdict().items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str = "") -> "State":
        """The state that `tensors` wrote; a missing part raises ValueError."""
        missing = [name for name in cls._fields if prefix + name not in tensors]
        if missing:
            raise ValueError(
                f"tensors: got no {', '.join(prefix + name for name in missing)}, expected every State field"
            )
        return cls(*(tensors[prefix + name] for name in cls._fields))

    @property
    def nbytes(self) -> int:
        """Bytes held, all sequences together."""
        return sum(field.numel() * field.element_size() for field in self)


torch.serialization.add_safe_globals([State])  # nothing but tensors: torch.load takes it with weights_only
