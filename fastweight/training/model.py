"""A recipe's `model` settings into a FastWeightForCausalLM with seeded parameters.

Trap: FastWeightConfig, like every Hugging Face configuration, takes unknown keywords without a word; a misspelt setting
would train another model than the recipe says. Here unknown names are errors.
"""

import difflib
from typing import Any

import torch

from fastweight.models import FastWeightConfig, FastWeightForCausalLM
from fastweight.recipes import AdditionTask, DrawnTask, Run
from fastweight.tasks.addition import VOCAB_SIZE


def setting_names() -> list[str]:
    """What a recipe may set of a model: the fields that FastWeightConfig declares itself."""
    return [name for name in vars(FastWeightConfig)["__annotations__"] if not name.startswith("_")]


def config_of(run: Run, vocab_size: int | None = None, end_of_text: int | None = None) -> FastWeightConfig:
    """The model configuration of a run.

    Args:
        vocab_size: of the data's tokenizer; the recipe may name a larger one (padding), not a smaller one.
        end_of_text: id that ends documents, and generation.

    Raises ValueError for a setting that FastWeightConfig does not have, and for a vocabulary that is too small.
    """
    if isinstance(run.task, AdditionTask):
        vocab_size = VOCAB_SIZE
    elif isinstance(run.task, DrawnTask):
        vocab_size = run.task.vocab_size
    given = {"vocab_size": vocab_size} if vocab_size is not None else {}
    if end_of_text is not None:
        given |= {"eos_token_id": end_of_text, "bos_token_id": end_of_text, "pad_token_id": end_of_text}
    settings: dict[str, Any] = given | run.model
    known = setting_names()
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean model.{near[0]}?)" if near else ""
            raise ValueError(f"model.{name}: unknown setting{hint}; expected one of {', '.join(known)}")
    config = FastWeightConfig(**settings)
    if vocab_size is not None and config.vocab_size < vocab_size:
        raise ValueError(
            f"model.vocab_size: got {config.vocab_size}, expected at least the {vocab_size} of the data's tokenizer"
        )
    return config


def build_model(run: Run, config: FastWeightConfig | None = None) -> Any:
    """A new model whose parameters depend on the recipe and its seed alone; the global generator is left as it was.

    Seeded in float32 whatever the precision, then rounded for "bf16-weights" (gates are not). With engine.compile its
    blocks are compiled when they are first called.
    """
    with torch.random.fork_rng():
        torch.manual_seed(run.training.seed)
        model: Any = FastWeightForCausalLM(config_of(run) if config is None else config)
    if run.training.precision == "bf16-weights":
        model = model.to(torch.bfloat16)
    if run.engine.gradient_checkpointing:
        # transformers 5.24 renamed the method and warns of the old name.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if run.engine.compile:
        for block in model.model.layers:
            block.compile()
    return model
