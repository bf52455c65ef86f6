"""Fast-weight attention for PyTorch: exact, swappable online-learning memories.

`import fastweight` needs torch only: the layer and the Hugging Face model are loaded when they are first asked for, and
the Auto classes learn `model_type = "fastweight"` as soon as transformers is there.
"""

from typing import TYPE_CHECKING, Any

from fastweight.auto import register_with_transformers
from fastweight.memory.attention import delta_rule, fast_weight_attention, linear_attention, step
from fastweight.memory.maps import ChunkMap, chunk_maps
from fastweight.memory.online import online_ridge, recursive_least_squares
from fastweight.memory.rules import RULES, Rule
from fastweight.memory.state import State

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "ChunkMap",
    "FastWeightAttention",
    "FastWeightConfig",
    "FastWeightForCausalLM",
    "Rule",
    "State",
    "chunk_maps",
    "delta_rule",
    "fast_weight_attention",
    "linear_attention",
    "online_ridge",
    "recursive_least_squares",
    "step",
]

if TYPE_CHECKING:
    from fastweight.layers.attention import FastWeightAttention
    from fastweight.models import FastWeightConfig, FastWeightForCausalLM

_LAZY = {
    "FastWeightAttention": "fastweight.layers.attention",
    "FastWeightConfig": "fastweight.models",
    "FastWeightForCausalLM": "fastweight.models",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'fastweight' has no attribute {name!r}")


register_with_transformers()
