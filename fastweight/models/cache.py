"""What generation carries from token to token: the layers of all blocks (cache_layers.py) -> one transformers cache.

Trap: transformers asks a cache about its kind, and chooses from the answers what it crops, compiles and drops; they are
given here as they must come out for memories, softmax attention and both together.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from fastweight.layers.mixers import mixer_of
from fastweight.models.cache_layers import KeyValueLayer, MemoryLayer, StaticKeyValueLayer, StaticMemoryLayer

# The name under which this version of transformers hands out caches.
CACHE_NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def _capturing() -> bool:
    """Whether launches are being recorded, so that nothing may be asked of the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class FastWeightCache(Cache):
    """The cache of a whole model: a `MemoryLayer` or a `KeyValueLayer` for every block of the configuration.

    Args:
        config: the model's configuration.
        static: keep every tensor at one address from the first token on, the count of tokens included, so that a
            one-token forward can be compiled or captured in a CUDA graph.
        max_cache_len: tokens that a static cache has room for, prompt included; needed for key-value layers, and of no
            consequence for memories, which never grow. ValueError when it is missing.
    """

    layers: list[Any]

    def __init__(self, config: Any, static: bool = False, max_cache_len: int | None = None):
        if static and "full_attention" in config.layer_types and (max_cache_len is None or max_cache_len < 1):
            raise ValueError(
                f"max_cache_len: got {max_cache_len} for a static cache of a model with transformer layers, expected "
                "the number of tokens to have room for"
            )
        kinds = {"state": StaticMemoryLayer if static else MemoryLayer, "kv": KeyValueLayer}
        if static and max_cache_len is not None:
            kinds["kv"] = partial(StaticKeyValueLayer, max_cache_len)
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

    def check_layers(self, config: Any) -> None:
        """ValueError where another kind of model than the one of `config` filled it."""
        ours = [mixer_of(name).memory == "kv" for name in config.mixers]
        if [isinstance(layer, KeyValueLayer) for layer in self.layers] != ours:
            got = f"one of {len(self.layers)} layers of other kinds"
            raise ValueError(f"cache: got {got}, expected one made for mixers {config.mixers}")

    @property
    def is_empty(self) -> bool:
        """Whether no token was seen yet; known without asking the device."""
        return all(layer.is_empty for layer in self.layers)

    @property
    def room(self) -> float:
        """Tokens that still fit, which asks the device; infinite for what does not fill up."""
        filling = [layer for layer in self.layers if isinstance(layer, StaticKeyValueLayer)]
        return min((layer.max_cache_len - layer.get_seq_length() for layer in filling), default=math.inf)

    def check_room(self, num_tokens: int) -> None:
        """ValueError before any layer has changed, where so many more tokens do not fit; unseen where compiled code or
        a recording may not ask."""
        filling = self.static and any(isinstance(layer, StaticKeyValueLayer) for layer in self.layers)
        if filling and not (torch.compiler.is_compiling() or _capturing()) and num_tokens > self.room:
            raise ValueError(f"cache: got {num_tokens} more tokens, expected at most {self.room} (see max_cache_len)")

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
        return not (self.static or any(isinstance(layer, MemoryLayer) for layer in self.layers))

    @property
    def is_compileable(self) -> bool:
        # transformers compiles whatever says True here, on every generate on a GPU: only when it was asked for.
        return self.static

    @property
    def is_linear(self) -> list[bool]:
        # False makes transformers drop already seen tokens when the full sequence comes with a filled cache.
        return [False] * len(self.layers)
