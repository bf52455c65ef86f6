"""Every mixer by name: what stands between the norms and the MLP of a block, all with one signature.

    out, state = mixer(hidden_states, mask, cu_seqlens, state, output_state, position_ids)

A new mixer is a module with that forward and one entry in `MIXERS`. `memory` says what it keeps between calls:
"state" (a LayerState, returned and never modified) or "kv" (a key-value cache layer, updated in place).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import nn

from fastweight.layers.attention import FastWeightAttention
from fastweight.layers.softmax import SoftmaxAttention
from fastweight.memory.rules import RULES


class Mixer(NamedTuple):
    """build: config -> module. memory: what the module keeps between calls."""

    build: Callable[[Any], nn.Module]
    memory: Literal["state", "kv"] = "state"


def _fast_weight(config: Any, name: str) -> nn.Module:
    return FastWeightAttention(
        config.hidden_size,
        config.num_attention_heads,
        rule=config.rule(name),
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        num_key_heads=config.num_key_heads,
        qk_norm=config.qk_norm,
        feature_map=config.feature_map,
        conv_width=config.conv_width,
        lambda_scale=config.lambda_scale,
        output_gate=config.output_gate,
        value_norm=config.value_norm,
        norm_eps=config.rms_norm_eps,
        form=config.form,
        backend=config.backend,
        chunk_size=config.chunk_size,
    )


def _softmax(config: Any) -> nn.Module:
    return SoftmaxAttention(
        config.hidden_size, config.num_attention_heads, head_dim=config.value_dim, rope_theta=config.rope_theta
    )


MIXERS: dict[str, Mixer] = {name: Mixer(partial(_fast_weight, name=name)) for name in RULES}
MIXERS["transformer"] = Mixer(_softmax, memory="kv")


def mixer_of(name: str) -> Mixer:
    """The registry entry of a mixer; an unknown name raises ValueError with the known ones."""
    if not isinstance(name, str) or name not in MIXERS:
        raise ValueError(f"mixer: got {name!r}, expected one of {', '.join(MIXERS)}")
    return MIXERS[name]
