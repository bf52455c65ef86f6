"""Models: token ids in, logits out. Importing this package registers model_type "fastweight" with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fastweight.models.cache import FastWeightCache
from fastweight.models.config import FastWeightConfig
from fastweight.models.model import FastWeightForCausalLM, FastWeightModel
from fastweight.models.states import load_state, save_state

AutoConfig.register("fastweight", FastWeightConfig, exist_ok=True)
AutoModel.register(FastWeightConfig, FastWeightModel, exist_ok=True)
AutoModelForCausalLM.register(FastWeightConfig, FastWeightForCausalLM, exist_ok=True)

__all__ = [
    "FastWeightCache",
    "FastWeightConfig",
    "FastWeightForCausalLM",
    "FastWeightModel",
    "load_state",
    "save_state",
]
