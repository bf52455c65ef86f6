"""The language model, one block for every mixer: embedding, N x (norm, mixer, norm, SwiGLU), norm, output matrix.

Token ids [B, T] in, logits [B, T, vocab] out, with the manners of transformers: generate, Trainer, Auto classes.

Traps: transformers 5.24 renamed `past_key_values` to `cache`, so both names come in and one of them goes out. Packed
documents come as `cu_seqlens` or `cu_seq_lens_q`, or as `position_ids` that start again at 0 (batch 1, nothing masked,
no filled cache). attention_mask and cu_seqlens together both hold: masked tokens are absent, and
documents do not see each other.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from fastweight.layers.convolution import ShortConvolution
from fastweight.layers.mixers import mixer_of
from fastweight.layers.parts import Gate, RMSNorm, SwiGLU, WideParameters
from fastweight.models.cache import CACHE_NAME, FastWeightCache
from fastweight.models.config import FastWeightConfig
from fastweight.models.generation import FastWeightGenerationMixin
from fastweight.models.inputs import document_bounds, labels_of_ranks, one_of, padding_mask, without_document_starts
from fastweight.models.loss import OutputMatrix, loss_of, wants_logits
from fastweight.parallel.group import Place, current, entered

logger = logging.get_logger(__name__)


class FastWeightBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)) unless intermediate_size is 0."""

    def __init__(self, config: FastWeightConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = mixer_of(config.mixers[layer_idx]).build(config, layer_idx)
        assert config.intermediate_size is not None, "the configuration fills it in"
        self.mlp = None
        if config.intermediate_size:
            self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B S"] | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        position_ids: Int[Tensor, "b T"] | None = None,
        cache: FastWeightCache | None = None,
        place: Place | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Hidden states after the block; the cache, if any, is read and brought up to date.

        place: the ranks that share the sequence, remembered for checkpoints that compute this again.
        """
        memory = None if cache is None else cache.layers[self.layer_idx]
        around: dict[str, Any] = {
            "mask": mask,
            "cu_seqlens": cu_seqlens,
            "state": None if memory is None else memory.load(),
            "output_state": memory is not None,
            "position_ids": position_ids,
            "overwrite_state": memory is not None and memory.may_be_overwritten,
        }
        if place is None:
            mixed, state = self.mixer(self.mixer_norm(hidden_states), **around)
        else:
            with entered(place):
                mixed, state = self.mixer(self.mixer_norm(hidden_states), **around)
        if memory is not None:
            memory.store(state, hidden_states.shape[1])
        hidden_states = hidden_states + mixed
        return hidden_states if self.mlp is None else hidden_states + self.mlp(self.mlp_norm(hidden_states))


class FastWeightPreTrainedModel(PreTrainedModel):
    """What the base model and the language model share: names and initialisation."""

    config_class = FastWeightConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FastWeightBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _is_stateful = True
    _can_compile_fullgraph = True
    _supports_sdpa = True  # what the transformer mixer runs on, and training scripts ask for by name

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights, unit norms, and the starting points that gates and convolutions ask for."""
        if isinstance(module, Gate):
            initialization.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, WideParameters):
            for name, value in module.starting_points().items():
                initialization.copy_(getattr(module, name), value)
        elif isinstance(module, ShortConvolution):
            initialization.copy_(module.weight, module.drawn_taps())
            if module.bias is not None:
                initialization.zeros_(module.bias)
        else:
            super()._init_weights(module)


class FastWeightModel(FastWeightPreTrainedModel):
    """Embedding, blocks and final norm: token ids or embeddings to hidden states."""

    def __init__(self, config: FastWeightConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FastWeightBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Int[Tensor, "b T"] | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        past_key_values: FastWeightCache | None = None,
        cache: FastWeightCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple:
        """Hidden states after the final norm; arguments as in `FastWeightForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids: got both or neither of input_ids and inputs_embeds, expected exactly one")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = padding_mask(attention_mask, hidden_states)
        cache = one_of("cache", cache, "past_key_values", past_key_values)
        cu_seqlens = document_bounds(cu_seqlens, kwargs.get("cu_seq_lens_q"), position_ids, attention_mask, cache)
        cache = self._cache(cache, use_cache, cu_seqlens)
        if cache is not None:
            cache.check_room(hidden_states.shape[1])
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        collected, place = [], current()
        for block in self.layers:
            collected += [hidden_states] if output_hidden_states else []
            hidden_states = block(
                hidden_states, mask=mask, cu_seqlens=cu_seqlens, position_ids=position_ids, cache=cache, place=place
            )
        hidden_states = self.norm(hidden_states)
        states = (*collected, hidden_states) if output_hidden_states else None
        named: dict[str, Any] = {CACHE_NAME: cache}
        output = BaseModelOutputWithPast(last_hidden_state=hidden_states, hidden_states=states, **named)
        return output if wants_dict(return_dict, self.config) else output.to_tuple()

    def _cache(
        self, cache: FastWeightCache | None, use_cache: bool | None, cu_seqlens: Tensor | None
    ) -> FastWeightCache | None:
        """The cache to read and fill: the caller's, a new one, or none (training and packed input, unless asked)."""
        if cache is not None and not isinstance(cache, FastWeightCache):
            raise ValueError(f"cache: got {type(cache).__name__}, expected a FastWeightCache (FastWeightCache(config))")
        if cache is not None:
            cache.check_layers(self.config)
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training and cu_seqlens is None)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled() and (use_cache or cache):
            if cache is not None:
                raise ValueError("cache: got one with gradient checkpointing, which would run every update twice")
            logger.warning_once("Gradient checkpointing runs without a cache; use_cache=True is ignored.")
            return None
        if cache is None and use_cache:
            return FastWeightCache(self.config)
        return cache


class FastWeightForCausalLM(FastWeightGenerationMixin, FastWeightPreTrainedModel):
    """The language model: `FastWeightModel` and an output matrix, tied to the embedding unless configured otherwise."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: FastWeightConfig):
        super().__init__(config)
        self.model = FastWeightModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = OutputMatrix(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Int[Tensor, "b T"] | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        past_key_values: FastWeightCache | None = None,
        cache: FastWeightCache | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        logits_to_keep: int | Int[Tensor, " n"] = 0,
        output_logits: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """Next-token logits, or the loss when labels are given; in evaluation both.

        Args:
            input_ids or inputs_embeds: the tokens; exactly one of the two.
            attention_mask: 1 or True for real tokens, cached tokens included ([B, seen + T]); masked tokens are absent:
                no write, no decay, in no convolution and no window, whatever their id.
            position_ids: rotary positions of the transformer; at batch 1, with nothing masked and no cache, a return to
                0 starts a new document (`models.inputs` says what compiled code makes of it).
            past_key_values or cache: a `FastWeightCache`, brought up to date in place (two names for one argument).
            labels: ids to predict, not shifted; -100 is ignored, and so is the first token of a packed document.
            use_cache: whether to return a cache; None means config.use_cache outside training and packed input.
            cu_seqlens: bounds of documents packed in one row (batch 1); `cu_seq_lens_q` is the same under the name that
                transformers' collators use.
            logits_to_keep: only the last so many logits (0: all), or those at these positions.
            output_logits: whether logits are wanted beside the loss. None means yes in evaluation and no in training,
                where the loss is found chunk by chunk (`models.loss`) and the output has no logits.
            kwargs: passed to the loss (`num_items_in_batch` and others).

        Raises:
            ValueError: for anything inconsistent, naming the argument.
        """
        cache = one_of("cache", cache, "past_key_values", past_key_values)
        if kwargs.get("seq_idx") is not None and cu_seqlens is position_ids is kwargs.get("cu_seq_lens_q") is None:
            raise ValueError("seq_idx: got it alone, expected packed documents by cu_seqlens or by position_ids")
        packed = kwargs.pop("cu_seq_lens_q", None)
        cu_seqlens = document_bounds(cu_seqlens, packed, position_ids, attention_mask, cache)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        logits = loss = None
        if wants_logits(labels, output_logits, self.training):
            kept = logits_to_keep
            kept = slice(-kept, None) if isinstance(kept, int) and kept else kept
            logits = self.lm_head(hidden_states if isinstance(kept, int) else hidden_states[:, kept])
        if labels is not None:
            labels = without_document_starts(labels, cu_seqlens)
            # Where only some logits are kept the loss makes its own, of all tokens.
            every = isinstance(logits_to_keep, int) and logits_to_keep == 0
            loss = loss_of(self, hidden_states, logits if every else None, labels, **labels_of_ranks(labels, kwargs))
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
        )
        return output if wants_dict(return_dict, self.config) else output.to_tuple()


def wants_dict(return_dict: bool | None, config: PreTrainedConfig) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)
