"""What transformers' `generate` asks of a model that carries fast weights: its cache, and how it decodes on a GPU.

Traps: transformers 5.24 renamed `past_key_values` to `cache`, so both names come in. A class counts as one that can
generate when the name of a base class says GenerationMixin; ours must come first, before the `get_compiled_call` of
PreTrainedModel.
"""

from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from fastweight.models.cache import CACHE_NAME, FastWeightCache
from fastweight.models.decoding import GraphedForward
from fastweight.models.inputs import one_of

# GenerationMixin types its `self` as a whole model, which a mixin is not.
_Base: Any = GenerationMixin


class FastWeightGenerationMixin(_Base):
    """`generate` with a `FastWeightCache`."""

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`; the cache to go on from comes under either of its names.

        With a filled cache, `inputs` are the whole sequence, or the new tokens with an attention_mask [B, seen + T] for
        all of them; anything else raises ValueError.
        """
        cache = one_of("cache", kwargs.pop("cache", None), "past_key_values", kwargs.pop("past_key_values", None))
        if cache is not None:
            kwargs[CACHE_NAME] = cache
            ids = inputs if inputs is not None else kwargs.get("input_ids")
            seen = cache.get_seq_length()
            if ids is not None and ids.shape[1] <= seen and kwargs.get("attention_mask") is None:
                raise ValueError(
                    f"inputs: got {ids.shape[1]} tokens for a cache that has seen {seen}, expected the whole sequence, "
                    f"or new tokens with an attention_mask for all {seen + ids.shape[1]}"
                )
        return super().generate(inputs, *args, **kwargs)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """How `generate` decodes with a static cache on a GPU: torch.compile when configured, else a CUDA graph."""
        if compile_config is None:
            return GraphedForward(self)
        return super().get_compiled_call(compile_config)

    def create_masks_for_generate(self, *, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """What a static cache is called with: the mask of the prompt. The cache remembers it, and a token that was
        generated is real, so what follows needs none."""
        follows = inputs_embeds.shape[1] == 1 and not kwargs.get("is_first_iteration")
        return {"linear_attention": None if follows else attention_mask}

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args
    ):
        """A cache of ours, static when `cache_implementation="static"` asks for it; there are no others."""
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic", "static"):
            raise ValueError(f"cache_implementation: got {wanted!r}, expected 'dynamic' or 'static'")
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
            generation_config.cache_implementation = None
            model_kwargs[CACHE_NAME] = FastWeightCache(self.config, wanted == "static", max_cache_length)
        given = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args)
        return super()._prepare_cache_for_generation(*given)
