"""Mamba-2's state-space layer (SSD, arXiv 2405.21060): a memory with one step width for its decay and its writes.

    z, x, B, C = hidden W_z, silu(conv(hidden W_xBC) + bias)
    dt = softplus(hidden W_dt + b_dt),   log_decay = -exp(A_log) dt                    per head, float32
    S_t = exp(log_decay_t) S_{t-1} + B_t (dt_t x_t)^T;   y_t = S_t^T C_t + D x_t
    out = RMSNorm(y * silu(z)) W_out                                                   the gate comes before the norm

In this house's letters C is q, B is k and x is v, so `qkv_proj` holds the rows of C, B, x and `g_proj` those of z. The
groups of B and C are key heads (1 by default) and the state size is their width; all heads of x together are twice as
wide as the hidden states by default. The norm runs over all heads of a group together, with one scale for each channel.
Choices: dt comes from a gate in float32 instead of rows of the input projection, and has no upper limit.
"""

from typing import Any, Unpack

import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fastweight.layers.memory_mixer import MemoryMixer, MemoryOptions
from fastweight.layers.parts import DecayGate, RMSNorm, rms_normalize
from fastweight.memory.attention import LINEAR_ATTENTION, linear_attention, step_in_place
from fastweight.memory.state import State


class StateSpaceMixer(MemoryMixer):
    """Mamba-2's mixer in the place of self-attention.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number H of value heads.
        output_gate: whether silu(z) multiplies y.
        options: see `MemoryOptions`; key_dim is the state size, num_key_heads the number of groups.
    """

    rule = LINEAR_ATTENTION
    expansion = 2
    default_key_heads = 1
    conv_bias = True
    skip_by_default = True

    def __init__(self, hidden_size: int, num_heads: int, *, output_gate: bool = True, **options: Unpack[MemoryOptions]):
        super().__init__(hidden_size, num_heads, **options)
        self.decay_gate = DecayGate(hidden_size, num_heads)
        self.add_output(output_gate)
        self.o_norm = RMSNorm(num_heads * self.value_dim, self.norm_eps)

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, around: dict[str, Any]
    ) -> tuple[Float[Tensor, "B T H V"], State | None]:
        written, log_decay = self._given(x, v)
        return linear_attention(q, k, written, log_decay, **around)

    def step_in_place(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: State, mask: Tensor | None
    ) -> Float[Tensor, "B 1 H V"]:
        written, log_decay = self._given(x, v)
        around = {"log_decay_t": log_decay[:, 0], "mask_t": None if mask is None else mask[:, 0]}
        token = (q[:, 0], k[:, 0], written[:, 0], None, None)
        return step_in_place(*token, memory, LINEAR_ATTENTION, **around)[:, None]

    def _given(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What is written, dt v, and log_decay."""
        dt, log_decay = self.decay_gate(x)
        return (dt[..., None] * v).to(v.dtype), log_decay

    def gated(self, o: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H*V"]:
        o = rearrange(o, "b t h v -> b t (h v)")
        o = o if self.g_proj is None else o * F.silu(self.g_proj(x))
        groups = rearrange(o, "b t (g c) -> b t g c", g=self.num_key_heads)
        return rearrange(rms_normalize(groups, self.norm_eps), "b t g c -> b t (g c)") * self.o_norm.weight.to(o.dtype)
