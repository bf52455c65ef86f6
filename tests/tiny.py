"""Tiny models that the model tests share: every mixer, a hybrid, one with all settings; random tokens; gradients.

Models are in float64 where two ways of computing are compared, so that greedy choices cannot flip by rounding. Traps:
parameters are moved off their starting points (symmetric gates hide mistakes).
"""

import torch
from conftest import assert_close
from modules import SETTINGS

from fastweight.layers.mixers import MIXERS
from fastweight.models import FastWeightConfig, FastWeightForCausalLM
from fastweight.models.cache import CACHE_NAME

DTYPE = torch.float64
VOCAB = 16
HYBRID = ["falcon-3", "transformer"]
SETTLED = SETTINGS | {"mixer": "falcon-3"}
EVERY = [*MIXERS, "hybrid", "settled"]
MEMORIES = [name for name in MIXERS if MIXERS[name].memory == "state"]
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def config_of(mixer="falcon-1", **options) -> FastWeightConfig:
    named = {"hybrid": {"mixer": HYBRID}, "settled": SETTLED}
    return FastWeightConfig(**(SIZES | named.get(str(mixer), {"mixer": mixer}) | options))


def build(mixer="falcon-1", dtype=DTYPE, **options) -> FastWeightForCausalLM:
    """A tiny model in evaluation mode, matrices drawn with a seed, vectors moved off their starting points."""
    model = FastWeightForCausalLM(config_of(mixer, **options)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


def tokens(*shape, seed=0):
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def weights(logits):
    return torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(5))


def gradients(model, total):
    return torch.autograd.grad(total, list(model.parameters()))


def check_gradients(model, total, expected_total):
    """The gradients of two scalars with respect to every parameter are the same."""
    names = [name for name, _ in model.named_parameters()]
    for name, one, other in zip(names, gradients(model, total), gradients(model, expected_total), strict=True):
        assert_close(one, other, DTYPE, "gradient", name)


def cache_of(output):
    return output.get(CACHE_NAME)


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=options.pop("max_new_tokens", 8), do_sample=False, **options)


def checkpoint_activations(model, **options):
    """Gradient checkpointing under the name that this version of transformers gives it."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)(options)
