"""What generation carries from token to token, in the form that transformers expects: one cache layer per block.

A memory keeps a fixed-size `LayerState`, softmax attention keeps keys and values in transformers' own `DynamicLayer`.
Traps: transformers knows recurrent states as dictionaries of tensors, so a `LayerState` is spread over
`conv_states[0]` and `recurrent_states[0..6]`; without gradients they are overwritten in place (addresses stay), with
gradients they are replaced, so that backward finds what forward saved. Nothing can be cropped: a memory cannot take
its last tokens back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from fastweight.layers.memory_mixer import LayerState
from fastweight.layers.mixers import mixer_of
from fastweight.memory.state import State

# The name under which this version of transformers hands out caches.
CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


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

    def reset(self) -> None:
        # transformers would keep the length, and go on after as many keys of zeros.
        self.keys = self.values = None
        self.is_initialized = False

    def detach(self) -> None:
        self.keys, self.values = (None if part is None else part.detach() for part in (self.keys, self.values))


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


class FastWeightCache(Cache):
    """The cache of a whole model: a `MemoryLayer` or a `KeyValueLayer` for every block of the configuration.

    Args:
        config: the model's configuration.
        static: keep every tensor at one address from the first token on, the count of tokens included, so that a
            one-token forward can be compiled or captured in a CUDA graph; ValueError for a model with key-value layers,
            whose cache grows.
    """

    layers: list[Any]

    def __init__(self, config: Any, static: bool = False):
        if static and "full_attention" in config.layer_types:
            raise ValueError(
                "static: got True for a model with transformer layers, whose key-value cache grows; expected False"
            )
        kinds = {"state": StaticMemoryLayer if static else MemoryLayer, "kv": KeyValueLayer}
        super().__init__(layers=[kinds[mixer_of(name).memory]() for name in config.mixers])
        self.static = static

    def detach(self) -> "FastWeightCache":
        """The same cache, cut from the autograd graph (truncated backpropagation through time)."""
        for layer in self.layers:
            layer.detach()
        return self

    def tensors(self) -> list[Tensor]:
        """Every tensor of every layer; empty before the first token."""
        return [part for layer in self.layers for part in layer.tensors()]

    @property
    def nbytes(self) -> int:
        """Bytes held, all sequences together."""
        return sum(part.numel() * part.element_size() for part in self.tensors())

    @property
    def is_empty(self) -> bool:
        """Whether no token was seen yet; known without asking the device."""
        return all(layer.is_empty for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.layers[layer_idx].get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        # All or nothing: a hybrid must not lose keys and values in some layers before a memory refuses.
        if any(isinstance(layer, MemoryLayer) for layer in self.layers):
            MemoryLayer().crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def is_croppable(self) -> bool:
        return not any(isinstance(layer, MemoryLayer) for layer in self.layers)

    @property
    def is_compileable(self) -> bool:
        # transformers compiles whatever says True here, on every generate on a GPU: only when it was asked for.
        return self.static

    @property
    def is_linear(self) -> list[bool]:
        # False makes transformers drop already seen tokens when the full sequence comes with a filled cache.
        return [False] * len(self.layers)
