"""A model's state in a file: what it has read so far, as safetensors, to go on from later or elsewhere.

One file holds every layer of a `FastWeightCache` (`layers.0.conv`, `layers.0.memory.S`, ..., `layers.1.keys`) and, as
metadata, the settings that give these tensors their meaning. Traps: a state belongs to the weights that wrote it, which
no setting can tell; a key-value layer does not know which of its tokens were padding, so keep the attention_mask too.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweight.layers.memory_mixer import LayerState
from fastweight.models.cache import FastWeightCache
from fastweight.models.cache_layers import KeyValueLayer
from fastweight.models.config import FastWeightConfig

FORMAT = "fastweight-state"
# Settings without which a state would be read as something else, also where its shapes fit.
MEANING = (
    *("mixers", "hidden_size", "num_attention_heads", "num_key_heads", "key_dim", "value_dim", "conv_width"),
    *("window", "pairing", "ridge", "step", "read", "qk_norm", "feature_map", "value_norm", "rope_theta"),
    *("retention_decay", "rotary"),
)


def save_state(cache: FastWeightCache, config: FastWeightConfig, path: str | Path) -> None:
    """Writes all that `cache` carries, cut from the autograd graph; ValueError for a cache that has seen nothing."""
    if cache.is_empty:
        raise ValueError("cache: got one that has seen no token, expected something to save")
    tensors: dict[str, Tensor] = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, KeyValueLayer):
            keys, values = (part.detach().contiguous() for part in layer.held())
            tensors |= {f"layers.{i}.keys": keys, f"layers.{i}.values": values}
        else:
            tensors |= layer.load().tensors(f"layers.{i}.")
    metadata = {"format": FORMAT, "settings": json.dumps(_meaning(config)), "num_seen": str(cache.get_seq_length())}
    save_file(tensors, path, metadata=metadata)


def load_state(
    path: str | Path,
    config: FastWeightConfig,
    *,
    device: torch.device | str = "cpu",
    static: bool = False,
    max_cache_len: int | None = None,
) -> FastWeightCache:
    """The cache that `save_state` wrote, for a model of the same settings.

    Args:
        path: the file.
        config: of the model that will go on; a setting that differs from the file's raises ValueError.
        device: where the tensors go.
        static, max_cache_len: see `FastWeightCache`.
    """
    with safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"path: got {path} without the mark {FORMAT!r}, expected a file written by save_state")
        _check_meaning(json.loads(metadata["settings"]), config)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    cache = FastWeightCache(config, static=static, max_cache_len=max_cache_len)
    with torch.no_grad():
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, KeyValueLayer):
                layer.update(tensors[f"layers.{i}.keys"], tensors[f"layers.{i}.values"])
            else:
                layer.store(LayerState.from_tensors(tensors, f"layers.{i}."), int(metadata["num_seen"]))
    return cache


def _meaning(config: FastWeightConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MEANING}


def _check_meaning(saved: dict[str, Any], config: FastWeightConfig) -> None:
    ours = _meaning(config)
    different = [
        f"{name} {saved.get(name)!r}, not {value!r}" for name, value in ours.items() if saved.get(name) != value
    ]
    if different:
        raise ValueError(f"config: got a state written with {'; '.join(different)}; expected the same settings")
