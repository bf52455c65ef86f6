"""A recipe's `model` settings into a FastWeightForCausalLM with seeded parameters.

Trap: FastWeightConfig, like every Hugging Face configuration, takes unknown keywords without a word; a misspelt setting
would train another model than the recipe says. Here unknown names are errors.
"""

import difflib
from typing import Any

import torch

from fastweight.layers.parts import no_weight_decay
from fastweight.models import FastWeightConfig, FastWeightForCausalLM
from fastweight.recipes import AdditionTask, Run
from fastweight.tasks.addition import VOCAB_SIZE


def config_of(run: Run) -> FastWeightConfig:
    """The model configuration of a run; ValueError for a setting that FastWeightConfig does not have."""
    settings: dict[str, Any] = ({"vocab_size": VOCAB_SIZE} if isinstance(run.task, AdditionTask) else {}) | run.model
    known = [name for name in vars(FastWeightConfig)["__annotations__"] if not name.startswith("_")]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean model.{near[0]}?)" if near else ""
            raise ValueError(f"model.{name}: unknown setting{hint}; expected one of {', '.join(known)}")
    return FastWeightConfig(**settings)


def build_model(run: Run) -> Any:
    """A new model whose parameters depend on the recipe and its seed alone; the global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(run.training.seed)
        return FastWeightForCausalLM(config_of(run))


def decayed_parameters(model: torch.nn.Module) -> list[str]:
    """Names of the parameters with weight decay: matrices, without those that the layers exempt (gates, norms)."""
    exempt = set(no_weight_decay(model))
    return [name for name, value in model.named_parameters() if value.ndim >= 2 and name not in exempt]
