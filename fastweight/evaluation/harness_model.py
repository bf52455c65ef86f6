"""Checkpoints as a model of lm-evaluation-harness, under the name "fastweight".

Importing this module registers the class, so `lm_eval.simple_evaluate(model="fastweight", ...)` knows it. Traps: the
harness reads the longest sequence off the configuration, which says nothing for a recurrent model, so it is set here;
it guesses the kind of model from a list of names, so it is told; "<|endoftext|>" in a task's text stays text.
"""

from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from fastweight.evaluation.checkpoint import LONGEST

Base: Any = HFLM  # its decorator hides its type


@register_model("fastweight")
class FastWeightLM(Base):
    """A causal language model of ours for the harness.

    Args:
        pretrained: checkpoint directory, or a model.
        max_length: tokens of context that a request may have; longer ones lose their beginning.
        kwargs: as for the harness's own "hf" model.
    """

    def __init__(self, pretrained: str | PreTrainedModel, max_length: int = LONGEST, **kwargs: Any) -> None:
        kwargs.pop("backend", None)
        super().__init__(pretrained=pretrained, backend="causal", max_length=int(max_length), **kwargs)
        self.tokenizer.split_special_tokens = True

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        """What the harness computes, after a readable refusal of answers that no context can hold."""
        longest = max((len(answer) for _text, _context, answer in requests), default=0)
        if longest > self.max_length:
            raise ValueError(
                f"max_length (--length): got {self.max_length} tokens, expected at least {longest}, the longest answer "
                "of these tasks"
            )
        return super()._loglikelihood_tokens(requests, *args, **kwargs)
