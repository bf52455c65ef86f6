"""What one block carries from token to token, in the form that transformers expects of a cache layer; see cache.py.

A memory keeps a fixed-size `LayerState`, softmax attention keeps keys and values in transformers' own `DynamicLayer`.
Traps: transformers knows recurrent states as dictionaries of tensors, so a `LayerState` is spread over
`conv_states[0]` and `recurrent_states[0..6]`; without gradients they are overwritten in place (addresses stay), with
gradients they are replaced, so that backward finds what forward saved. Nothing can be cropped: a memory cannot take
its last tokens back. A static key-value layer reads its whole room at every token, filled or not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from fastweight.layers.memory_mixer import LayerState
from fastweight.memory.state import State


class MemoryLayer(LinearAttentionLayer):
    """Cache layer of one memory: a `LayerState` as tensors that can be reset, moved, repeated and reordered."""

    def __init__(self) -> None:
        super().__init__(number_of_states=len(State._fields))
        self.num_seen: int | Tensor = 0

    @property
    def is_empty(self) -> bool:
        return not self.has_previous_state[0]

    @property
    def may_be_overwritten(self) -> bool:
        """Whether a layer may write its next state into the tensors of this one."""
        return not self.is_empty and _writable(self.recurrent_states[0])

    def load(self) -> LayerState | None:
        """The state, or None before the first token."""
        if self.is_empty:
            return None
        conv, *memory = self.tensors()
        return LayerState(conv, State(*memory))

    def store(self, state: LayerState, num_tokens: int) -> None:
        """Takes over the state after `num_tokens` more tokens; free for parts that were brought up to date in place."""
        self.conv_states[0] = _overwrite(self.conv_states[0], state.conv)
        self.is_conv_states_initialized[0] = True
        for i, part in enumerate(state.memory):
            self.recurrent_states[i] = _overwrite(self.recurrent_states[i], part)
            self.is_recurrent_states_initialized[i] = self.has_previous_state[i] = True
        self.dtype, self.device = state.conv.dtype, state.conv.device
        self._count(num_tokens)

    def _count(self, num_tokens: int) -> None:
        self.num_seen += num_tokens

    def tensors(self) -> list[Tensor]:
        """The convolution's inputs, then the fields of `State`; empty before the first token."""
        return [part for part in (self.conv_states[0], *self.recurrent_states.values()) if part is not None]

    def detach(self) -> None:
        self._change(Tensor.detach)

    def reset(self) -> None:
        super().reset()
        self.num_seen = 0

    def get_seq_length(self) -> int:
        return int(self.num_seen)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        # In place where that is possible: a captured graph goes on reading the same addresses.
        self._change(lambda part: _overwrite(part, part.index_select(0, beam_idx.to(part.device))))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda part: part.index_select(0, indices.to(part.device)))

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"crop: got {tokens_to_remove} for a fast-weight memory, which cannot take tokens back; keep a copy of the "
            "cache (copy.deepcopy) from before they were read"
        )

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        for parts in (self.conv_states, self.recurrent_states):
            parts.update({i: change(part) for i, part in parts.items() if part is not None})


class StaticMemoryLayer(MemoryLayer):
    """A `MemoryLayer` for compiled or captured decoding: the count of tokens is a tensor too, and addresses are marked.

    A compiled graph would be specialised to a count that is a Python number, and a captured one would never raise it.
    """

    def store(self, state: LayerState, num_tokens: int) -> None:
        fresh = self.is_empty
        super().store(state, num_tokens)
        if fresh and not torch.compiler.is_compiling():
            assert isinstance(self.num_seen, Tensor), "the first store makes the count a tensor"
            for part in (*self.tensors(), self.num_seen):
                torch._dynamo.mark_static_address(part)

    def _count(self, num_tokens: int) -> None:
        if not isinstance(self.num_seen, Tensor):
            self.num_seen = torch.full((), self.num_seen, dtype=torch.int64, device=self.device)
        self.num_seen.add_(num_tokens)

    def reset(self) -> None:
        count = self.num_seen
        super().reset()
        self.num_seen = count.zero_() if isinstance(count, Tensor) else count


class KeyValueLayer(DynamicLayer):
    """Cache layer of softmax attention, which is its own state: `update` adds keys and values."""

    @property
    def is_empty(self) -> bool:
        return self.get_seq_length() == 0

    @property
    def may_be_overwritten(self) -> bool:
        return False  # it grows

    def load(self) -> "KeyValueLayer":
        return self

    def store(self, state: "KeyValueLayer", num_tokens: int) -> None:
        assert state is self, "a key-value state is updated in place"

    def tensors(self) -> list[Tensor]:
        return [part for part in (self.keys, self.values) if part is not None]

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens seen so far."""
        keys, values = self.tensors()
        return keys, values

    def reset(self) -> None:
        # transformers would keep the length, and go on after as many keys of zeros.
        self.keys = self.values = None
        self.is_initialized = False

    def detach(self) -> None:
        self.keys, self.values = (None if part is None else part.detach() for part in (self.keys, self.values))


class StaticKeyValueLayer(KeyValueLayer):
    """Keys and values of softmax attention in a room of fixed size, for compiled or captured decoding.

    What a single token needs to know lies on the device: how many tokens are there (`count`), which of them are real
    (`real` [B, L]) and how many in each row (`num_real` [B]). So a padded prompt stays padded without a mask.

    Args:
        max_cache_len: tokens that it has room for; rounded up to a multiple of 64.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, max_cache_len: int) -> None:
        super().__init__()
        self.max_cache_len = -(-max_cache_len // 64) * 64
        self.has_tokens = self.padded = False

    @property
    def is_empty(self) -> bool:
        return not self.has_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        (B, H), L = key_states.shape[:2], self.max_cache_len
        self.keys = key_states.new_zeros(B, H, L, key_states.shape[-1])
        self.values = value_states.new_zeros(B, H, L, value_states.shape[-1])
        self.real = torch.zeros(B, L, dtype=torch.bool, device=self.device)
        self.num_real = torch.zeros(B, dtype=torch.long, device=self.device)
        self.count = torch.zeros((), dtype=torch.long, device=self.device)
        self.is_initialized = True
        if not torch.compiler.is_compiling():
            for part in self.tensors():
                torch._dynamo.mark_static_address(part)

    def get_seq_length(self) -> int:
        return int(self.count) if self.has_tokens else 0

    def seen_mask(self) -> Tensor | None:
        """Which of the cached tokens are real [B, seen]; None when all are."""
        return self.real[:, : self.get_seq_length()] if self.padded else None

    def next_positions(self) -> Tensor:
        """Position [B, 1] of a single real token that comes next: real tokens before it."""
        return self.num_real[:, None]

    def visible_to_next(self) -> Tensor:
        """Which places [B, 1, 1, L] the next token will see: the real ones, and its own."""
        own = torch.arange(self.max_cache_len, device=self.device) == self.count
        return (self.real | own)[:, None, None]

    def update(self, key_states: Tensor, value_states: Tensor, mask: Tensor | None = None, **kwargs: Any):
        """Adds T keys and values [B, H, T, d]. A mask [B, seen + T] says which tokens are real; None: all new ones.

        Returns the whole room, [B, H, L, d] twice. That they fit is the caller's care: `FastWeightCache.check_room`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None, "just made"
        assert self.values is not None, "just made"
        T = key_states.shape[2]
        places = self.count + torch.arange(T, device=self.device)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        if mask is None:
            self.real.index_fill_(1, places, True)
            self.num_real.add_(T)
        else:
            self.padded = True
            self.real[:, : mask.shape[1]] = mask
            self.num_real.copy_(mask.sum(1))
        self.count.add_(T)
        self.has_tokens = True
        return self.keys, self.values

    def held(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None, "there is nothing yet"
        assert self.values is not None, "there is nothing yet"
        seen = self.get_seq_length()
        return self.keys[:, :, :seen], self.values[:, :, :seen]

    def tensors(self) -> list[Tensor]:
        if self.keys is None or self.values is None:
            return []
        return [self.keys, self.values, self.real, self.num_real, self.count]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def reset(self) -> None:
        self.has_tokens = self.padded = False
        for part in self.tensors()[2:]:
            part.zero_()

    def detach(self) -> None:
        self._change(lambda part: part.detach())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda part: part.copy_(part.index_select(0, beam_idx.to(part.device))))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda part: part.index_select(0, indices.to(part.device)))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("crop: got a static key-value cache, expected a dynamic one")

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None and self.values is not None:
            self.keys, self.values, self.real, self.num_real = map(change, self.tensors()[:4])


def _overwrite(old: Tensor | None, new: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return new
    fits = old is not None and (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return old.copy_(new) if old is not None and fits and _writable(old) else new.clone()


def _writable(part: Tensor | None) -> bool:
    """Not where backward may need it, and not a tensor of inference mode outside of it."""
    if part is None or torch.is_grad_enabled():
        return False
    return torch.compiler.is_compiling() or not part.is_inference() or torch.is_inference_mode_enabled()
