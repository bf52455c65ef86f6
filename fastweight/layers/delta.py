"""DeltaNet and Gated DeltaNet as layers: the delta rule with keys of length 1, without or with a decay of its own.

    q, k = l2(q) / sqrt(K), l2(k);   beta = max_gain sigmoid(x W_beta + b_beta), in (0, 1) by default
    S_t = exp(log_decay_t) S_{t-1};   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t
    log_decay = -exp(A_log) softplus(x W_dt + b_dt)             Gated DeltaNet only

Choices where the papers (arXiv 2406.06484 and 2412.06464) leave room. Both: convolution and silu on q, k and v, values
as wide as keys, RMSNorm per head with one learned scale for all heads. DeltaNet has no output gate, Gated DeltaNet a
silu gate. Traps: the residual is taken on the decayed memory, unlike that of the falcon rules; the scale of q matters
only through the eps of the norm that follows.
"""

from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.layers.memory_mixer import MemoryMixer, MemoryOptions
from fastweight.layers.parts import DecayGate, Gate, l2_normalize, largest_gain
from fastweight.memory.attention import DELTA_RULE, delta_rule, step_in_place
from fastweight.memory.state import State


class DeltaAttention(MemoryMixer):
    """The delta rule in the place of self-attention.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number H of value heads.
        decay: whether the memory forgets (Gated DeltaNet) or only overwrites (DeltaNet).
        output_gate: whether silu(x W) multiplies the normalised read; None means: as `decay`.
        max_gain: largest beta, at most 2; None means 1. Above 1 a carry along a key can turn negative.
        options: see `MemoryOptions`; as many key heads as value heads by default.
    """

    rule = DELTA_RULE

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        decay: bool,
        output_gate: bool | None = None,
        max_gain: float | None = None,
        **options: Unpack[MemoryOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        self.max_gain = largest_gain(max_gain, 1.0)
        self.beta_gate = Gate(hidden_size, [0.0] * num_heads)
        self.decay_gate = DecayGate(hidden_size, num_heads) if decay else None
        self.add_output(decay if output_gate is None else output_gate)

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, around: dict[str, Any]
    ) -> tuple[Float[Tensor, "B T H V"], State | None]:
        q, k, beta, log_decay = self._given(x, q, k)
        return delta_rule(q, k, v, beta, log_decay, **around)

    def step_in_place(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: State, mask: Tensor | None
    ) -> Float[Tensor, "B 1 H V"]:
        q, k, beta, log_decay = self._given(x, q, k)
        log_decay = torch.zeros_like(beta) if log_decay is None else log_decay
        around = {"log_decay_t": log_decay[:, 0], "mask_t": None if mask is None else mask[:, 0]}
        return step_in_place(q[:, 0], k[:, 0], v[:, 0], beta[:, 0], None, memory, DELTA_RULE, **around)[:, None]

    def _given(self, x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the op reads beside v: q and k, beta, log_decay."""
        q = l2_normalize(q, self.norm_eps, length=self.key_dim**-0.5)
        beta = self.max_gain * self.beta_gate(x).sigmoid()
        return q, l2_normalize(k, self.norm_eps), beta, None if self.decay_gate is None else self.decay_gate(x)[1]
