"""Every mixer by name: what stands between the norms and the MLP of a block, all with one signature.

    out, state = mixer(hidden_states, mask, cu_seqlens, state, output_state, position_ids, overwrite_state)

A new mixer is a module with that forward, with `core_flops` and `state_bytes` (see `MemoryMixer`), and one entry in
`MIXERS`. `memory` says what it keeps between calls: "state" (a LayerState, returned, and modified only where
`overwrite_state` allows it) or "kv" (a key-value cache layer, updated in place).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import nn

from fastweight.layers.attention import FastWeightAttention
from fastweight.layers.delta import DeltaAttention
from fastweight.layers.memory_mixer import MemoryOptions
from fastweight.layers.retention import Retention
from fastweight.layers.softmax import SoftmaxAttention
from fastweight.layers.ssd import StateSpaceMixer
from fastweight.memory.rules import RULES


class Mixer(NamedTuple):
    """build: (config, index of the layer) -> module. memory: what the module keeps between calls."""

    build: Callable[[Any, int], nn.Module]
    memory: Literal["state", "kv"] = "state"


def _options(config: Any) -> MemoryOptions:
    """The settings that all memories share."""
    return {
        "key_dim": config.key_dim,
        "value_dim": config.value_dim,
        "num_key_heads": config.num_key_heads,
        "conv_width": config.conv_width,
        "conv_activation": config.conv_activation,
        "conv_start": config.conv_start,
        "rotary": config.rotary,
        "rope_theta": config.rope_theta,
        "value_skip": config.value_skip,
        "norm_eps": config.rms_norm_eps,
        "form": config.form,
        "backend": config.backend,
        "chunk_size": config.chunk_size,
    }


def _fast_weight(config: Any, layer: int, name: str) -> nn.Module:
    return FastWeightAttention(
        config.hidden_size,
        config.num_attention_heads,
        rule=config.rule(name),
        qk_norm=config.qk_norm,
        feature_map=config.feature_map,
        lambda_scale=config.lambda_scale,
        max_gain=config.max_gain,
        output_gate=config.output_gate,
        value_norm=config.value_norm,
        **_options(config),
    )


def _delta(config: Any, layer: int, decay: bool) -> nn.Module:
    return DeltaAttention(
        config.hidden_size, config.num_attention_heads, decay=decay, max_gain=config.max_gain, **_options(config)
    )


def _retention(config: Any, layer: int) -> nn.Module:
    return Retention(
        config.hidden_size,
        config.num_attention_heads,
        decay=config.retention_decay,
        depth=layer / max(config.num_hidden_layers - 1, 1),
        **_options(config),
    )


def _state_space(config: Any, layer: int) -> nn.Module:
    return StateSpaceMixer(config.hidden_size, config.num_attention_heads, **_options(config))


def _softmax(config: Any, layer: int) -> nn.Module:
    return SoftmaxAttention(
        config.hidden_size, config.num_attention_heads, head_dim=config.value_dim, rope_theta=config.rope_theta
    )


MIXERS: dict[str, Mixer] = {name: Mixer(partial(_fast_weight, name=name)) for name in RULES}
MIXERS |= {
    "transformer": Mixer(_softmax, memory="kv"),
    "retnet": Mixer(_retention),
    "mamba2": Mixer(_state_space),
    "deltanet": Mixer(partial(_delta, decay=False)),
    "gated-deltanet": Mixer(partial(_delta, decay=True)),
}


def mixer_of(name: str) -> Mixer:
    """The registry entry of a mixer; an unknown name raises ValueError with the known ones."""
    if not isinstance(name, str) or name not in MIXERS:
        raise ValueError(f"mixer: got {name!r}, expected one of {', '.join(MIXERS)}")
    return MIXERS[name]
