"""One token forward as a CUDA graph: recorded once, replayed for every token, so that the host is out of the way.

A memory has a fixed size, and so has a static key-value cache, so the same launches on the same addresses serve every
token; at batch 1 the host needs far longer to issue them than the device to run them.
`generate(..., cache_implementation="static")` decodes through this on a GPU (with `compile_config`, through
torch.compile instead).

Traps: the first token at given addresses runs as usual, which also warms up what compiles on first use; the second is
recorded. Logits lie at one address too: each token overwrites the last one's. What does not fit one recording (several
tokens, a masked token, hidden states) goes to the model as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from fastweight.models.cache import CACHE_NAME, FastWeightCache

RECORDED_ON = ("cuda",)
READ = ("input_ids", "position_ids")  # by a recording, from places of its own
# What may come with a single token and is read, or changes nothing (one row of logits, a mask of None).
HARMLESS = {"input_ids", CACHE_NAME, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"}


class GraphedForward:
    """model(input_ids [B, 1], cache) through a recording, for a static `FastWeightCache` that has seen its prompt."""

    def __init__(self, model: Any):
        self.model = model
        self.places: tuple | None = None
        self.given: dict[str, Tensor] = {}  # where a recording reads the token, and its position where one is given
        self.room: float | None = None  # tokens that still fit; None when that must be asked
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None

    def __call__(self, **inputs: Any) -> CausalLMOutputWithPast:
        """Logits [B, 1, vocab] of the next token, valid until the next call; the cache is brought up to date."""
        cache, ids = inputs.get(CACHE_NAME), inputs.get("input_ids")
        if cache is None or ids is None or not self._fits(inputs, cache, ids):
            self.room = None
            return self.model(**inputs)
        given = {name: inputs[name] for name in READ if inputs.get(name) is not None}
        if self.places != _places(cache, given):
            output = self.model(**inputs)
            self.places, self.replay, self.room = _places(cache, given), None, None
            return output
        room = self.room = cache.room if self.room is None else self.room
        if room < 1:  # a recording would write past the end
            return self.model(**inputs)
        if self.replay is None:
            self._record(cache, given)
        assert self.replay is not None, "recorded above"
        for name, value in given.items():
            self.given[name].copy_(value)
        self.replay()
        self.room = room - 1
        named: dict[str, Any] = {CACHE_NAME: cache}
        return CausalLMOutputWithPast(logits=self.logits, **named)  # type: ignore[arg-type]

    def _fits(self, inputs: dict[str, Any], cache: FastWeightCache, ids: Tensor) -> bool:
        mask = inputs.get("attention_mask")
        mask = mask.get("linear_attention") if isinstance(mask, dict) else mask
        extra = any(value not in (None, False) for name, value in inputs.items() if name not in HARMLESS)
        ready = isinstance(cache, FastWeightCache) and cache.static and not cache.is_empty
        alone = ids.shape[1] == 1 and mask is None and inputs.get("use_cache") is not False
        return ready and alone and not extra and ids.device.type in RECORDED_ON and not torch.is_grad_enabled()

    def _record(self, cache: FastWeightCache, given: dict[str, Tensor]) -> None:
        self.given = {name: value.clone() for name, value in given.items()}
        named: dict[str, Any] = {**self.given, CACHE_NAME: cache}
        self.logits, self.replay = record(lambda: self.model(use_cache=True, **named).logits)
        assert self.places == _places(cache, given), "the recorded forward moved the cache to other addresses"


def record(run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """The launches of `run` as a CUDA graph (nothing is computed yet): where its result will lie, and how to replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return result, graph.replay


def _places(cache: FastWeightCache, given: dict[str, Tensor]) -> tuple:
    """What a recording depends on: the addresses of the cache, and the shapes of what it reads."""
    shapes = tuple((name, tuple(value.shape)) for name, value in given.items())
    return shapes, tuple(part.data_ptr() for part in cache.tensors())
