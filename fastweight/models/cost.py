"""What a configuration costs: parameters, FLOP per token, bytes that a sequence carries from token to token.

The model is built on the meta device, without memory, and asked: matrices are counted as they stand, and every mixer
knows what its memory costs. One multiply-add is two FLOP. Counted are the projections, gates, MLPs and the output
matrix, and the reads and writes of the memory (or the products with visible keys and values). Not counted is what a
matrix unit does not do: norms, step sizes, the short convolution (0.1 % of the total), softmax, the embedding lookup.
Trap: the count is that of the recurrence itself. The chunk form does some more, to do it in matrix products.
"""

from typing import Any, cast

import torch
from torch import nn

from fastweight.layers.parts import Gate
from fastweight.models.config import FastWeightConfig
from fastweight.models.model import FastWeightForCausalLM


def num_parameters(model: nn.Module, *, embeddings: bool = True) -> int:
    """Parameters of a model, tied ones once; without `embeddings`, token embedding and output matrix are left out."""
    counted = {id(parameter): parameter.numel() for parameter in model.parameters()}
    if not embeddings:
        for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
            counted.pop(id(matrix.weight), None)
    return sum(counted.values())


def flops_per_token(config: FastWeightConfig, sequence_length: int, training: bool = True) -> float:
    """FLOP per token of a model of that configuration.

    Training: forward and backward (twice the forward), the mean over the tokens of a sequence of that length, without
    recomputation. Otherwise: decoding the last token of such a sequence, all the others being cached.
    """
    model = meta_model(config)
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear | Gate))
    # A query sees every key up to its own, so over a sequence the mean number is (T + 1) / 2.
    visible = (sequence_length + 1) / 2 if training else float(sequence_length)
    forward = 2 * matrices + sum(mixer.core_flops(visible) for mixer in _mixers(model))
    return 3 * forward if training else forward


def state_bytes(config: FastWeightConfig, num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes that one sequence carries after `num_tokens` tokens, in a model of that dtype; memories do not grow."""
    return sum(mixer.state_bytes(num_tokens, dtype) for mixer in _mixers(meta_model(config)))


def meta_model(config: FastWeightConfig) -> FastWeightForCausalLM:
    """The model of a configuration without memory behind its parameters: shapes only."""
    with torch.device("meta"):
        return FastWeightForCausalLM(config)


def _mixers(model: FastWeightForCausalLM) -> list[Any]:
    return [cast(Any, block).mixer for block in model.model.layers]
