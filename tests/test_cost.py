"""Costs against what torch itself counts and holds: FlopCounterMode over matrix products, caches of real models.

The judge of the memory's FLOP is the recurrence of one token written as matrix products here; that of attention is
torch's own count for one query over cached keys. Traps: FlopCounterMode sees matrix products only, and the recurrent
form of the memory has none, so a model's single token counts its matrices alone; it knows attention on a CPU only
through the plain (MATH) kernel.
"""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fastweight.layers.memory_mixer import MemoryMixer
from fastweight.layers.mixers import MIXERS
from fastweight.models import FastWeightCache, FastWeightConfig, FastWeightForCausalLM
from fastweight.models.cost import flops_per_token, num_parameters, state_bytes

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
HYBRID = ["falcon-2", "transformer"]
EVERY = [*MIXERS, "hybrid"]


def config_of(mixer, **options) -> FastWeightConfig:
    return FastWeightConfig(mixer=HYBRID if mixer == "hybrid" else mixer, **(SIZES | options))


def count(function) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def memory_flops(mixer) -> int:
    """One token of every head: read, and for every pair of the window a residual (regression only) and a write."""
    S, x = torch.ones(mixer.key_dim, mixer.value_dim), torch.ones(mixer.key_dim, 1)

    def token():
        for _ in range(mixer.num_heads):
            for _ in range(mixer.rule.window):
                residual = torch.mm(S.T, x) if mixer.rule.objective == "regression" else x.new_ones(len(S.T), 1)
                torch.mm(x, residual.T)
            torch.mm(S.T, x)

    return count(token)


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("widths", [{}, {"key_dim": 4, "value_dim": 6}])
def test_decoding_flops_are_those_that_torch_counts(mixer, widths):
    config, seen = config_of(mixer, **widths), 7
    model, cache = FastWeightForCausalLM(config).eval(), FastWeightCache(config)
    with torch.no_grad():
        model(torch.zeros(1, seen - 1, dtype=torch.long), cache=cache)
    counted = count(lambda: model(torch.zeros(1, 1, dtype=torch.long), cache=cache))
    counted += sum(memory_flops(b.mixer) for b in model.model.layers if isinstance(b.mixer, MemoryMixer))
    assert flops_per_token(config, seen, training=False) == counted


@pytest.mark.parametrize("mixer", EVERY)
def test_training_is_three_times_the_mean_forward(mixer):
    config = config_of(mixer)
    each = [flops_per_token(config, seen, training=False) for seen in range(1, 10)]
    assert flops_per_token(config, 9) == pytest.approx(3 * sum(each) / 9)


def test_training_flops_are_those_that_torch_counts_forward_and_backward():
    """No memory, so no form to depend on; torch computes the whole square of scores, the invisible half included."""
    config, T = config_of("transformer"), 8
    model, ids = FastWeightForCausalLM(config), torch.zeros(1, T, dtype=torch.long)
    counted = count(lambda: model(ids).logits.sum().backward())
    invisible = 3 * sum(b.mixer.core_flops(T) - b.mixer.core_flops((T + 1) / 2) for b in model.model.layers)
    assert (flops_per_token(config, T) + invisible) * T == counted


@pytest.mark.parametrize("mixer", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"num_key_heads": 1, "key_dim": 4, "value_dim": 6, "conv_width": 3}])
def test_state_bytes_are_those_of_a_cache(mixer, dtype, options):
    config = config_of(mixer, **options)
    model = FastWeightForCausalLM(config).to(dtype).eval()
    cache = FastWeightCache(config)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    assert state_bytes(config, 5, dtype) == cache.nbytes


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_with_and_without_embeddings(tied):
    config = config_of("falcon-1", tie_word_embeddings=tied)
    model = FastWeightForCausalLM(config)
    assert num_parameters(model) == sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    assert num_parameters(model) - num_parameters(model, embeddings=False) == 40 * 16 * (1 if tied else 2)
