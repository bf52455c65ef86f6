"""RetNet's multi-scale retention (arXiv 2307.08621): linear attention with rotary positions and fixed decays.

    q, k = R_t q / sqrt(K), R_t k             rotary positions, as in the complex form of the paper
    S_t = gamma_h S_{t-1} + k_t v_t^T;   o_t = S_t^T q_t;   out = (RMSNorm(o) * silu(x W_gate)) W_out

Decays: "retnet" is gamma_h = 1 - 2^(-5-h); "lightning" is that of Lightning attention (arXiv 2401.04658),
log gamma_h = -2^(-8(h+1)/H) (1 - layer / (layers - 1) + 1e-5), long memories in the last layers.

Choices: values twice as wide as keys, as in the paper; the group norm is RMSNorm per head with one learned scale for
all heads; the paper's other normalisations (of the decay matrix, of its row sums) cancel in that norm and are left out.
The rotary positions are those that every memory here can have (positions.py); this one has them unless told otherwise.
"""

from typing import Any, Literal, Unpack, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from fastweight.layers.memory_mixer import MemoryMixer, MemoryOptions
from fastweight.memory.attention import LINEAR_ATTENTION, linear_attention, step_in_place
from fastweight.memory.state import State

RetentionDecay = Literal["retnet", "lightning"]


class Retention(MemoryMixer):
    """Retention in the place of self-attention.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number H of heads.
        decay: "retnet" or "lightning".
        depth: where this layer stands, 0 for the first and 1 for the last; "lightning" decays depend on it.
        output_gate: whether silu(x W) multiplies the normalised read.
        options: see `MemoryOptions`; all value heads together are by default twice as wide as x.
    """

    rule = LINEAR_ATTENTION
    expansion = 2
    rotary_by_default = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        decay: RetentionDecay = "retnet",
        depth: float = 0.0,
        output_gate: bool = True,
        **options: Unpack[MemoryOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if decay not in get_args(RetentionDecay):
            raise ValueError(f"decay: got {decay!r}, expected 'retnet' or 'lightning'")
        self.decay, self.depth = decay, depth
        self.add_output(output_gate)

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, around: dict[str, Any]
    ) -> tuple[Float[Tensor, "B T H V"], State | None]:
        log_decay = self.log_decay(x).expand(*v.shape[:3])
        return linear_attention(q * self.key_dim**-0.5, k, v, log_decay, **around)

    def step_in_place(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: State, mask: Tensor | None
    ) -> Float[Tensor, "B 1 H V"]:
        around = {
            "log_decay_t": self.log_decay(x).expand(len(x), -1),
            "mask_t": None if mask is None else mask[:, 0],
        }
        token = (q[:, 0] * self.key_dim**-0.5, k[:, 0], v[:, 0], None, None)
        return step_in_place(*token, memory, LINEAR_ATTENTION, **around)[:, None]

    def log_decay(self, like: Tensor) -> Float[Tensor, " H"]:
        """Log of each head's carry, in float32 or better; made where it is used, so no cast and no file holds it."""
        heads = torch.arange(self.num_heads, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
        if self.decay == "retnet":
            return torch.log1p(-torch.exp2(-5 - heads))
        return -torch.exp2(-8 * (heads + 1) / self.num_heads) * (1 - self.depth + 1e-5)
