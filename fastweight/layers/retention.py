"""RetNet's multi-scale retention (arXiv 2307.08621): linear attention with rotary positions and fixed decays.

    q, k = R_t q / sqrt(K), R_t k             rotary positions, as in the complex form of the paper
    S_t = gamma_h S_{t-1} + k_t v_t^T;   o_t = S_t^T q_t;   out = (RMSNorm(o) * silu(x W_gate)) W_out

Decays: "retnet" is gamma_h = 1 - 2^(-5-h); "lightning" is that of Lightning attention (arXiv 2401.04658),
log gamma_h = -2^(-8(h+1)/H) (1 - layer / (layers - 1) + 1e-5), long memories in the last layers.

Choices: values twice as wide as keys, as in the paper; the group norm is RMSNorm per head with one learned scale for
all heads; the paper's other normalisations (of the decay matrix, of its row sums) cancel in that norm and are left out.
Trap: rotary positions are absolute, and a memory must not depend on how far it has come. So the state is kept in the
frame of its last token: keys written n tokens ago stand in it turned by -n, the next token is at 1, and on the way out
the state turns back by the number of real tokens. Nothing is counted between calls.
"""

from typing import Any, Literal, Unpack, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from fastweight.layers.convolution import document_of
from fastweight.layers.memory_mixer import MemoryMixer, MemoryOptions
from fastweight.layers.parts import rotate
from fastweight.memory.attention import LINEAR_ATTENTION, linear_attention, step_in_place
from fastweight.memory.state import State
from fastweight.parallel.group import current
from fastweight.parallel.layout import whole

RetentionDecay = Literal["retnet", "lightning"]


class Retention(MemoryMixer):
    """Retention in the place of self-attention.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number H of heads.
        decay: "retnet" or "lightning".
        depth: where this layer stands, 0 for the first and 1 for the last; "lightning" decays depend on it.
        rope_theta: base of the rotary frequencies.
        output_gate: whether silu(x W) multiplies the normalised read.
        options: see `MemoryOptions`; key_dim is even, all value heads together are by default twice as wide as x.
    """

    rule = LINEAR_ATTENTION
    expansion = 2

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        decay: RetentionDecay = "retnet",
        depth: float = 0.0,
        rope_theta: float = 10_000.0,
        output_gate: bool = True,
        **options: Unpack[MemoryOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        if self.key_dim % 2:
            raise ValueError(f"key_dim: got {self.key_dim}, expected an even width for rotary positions")
        if decay not in get_args(RetentionDecay):
            raise ValueError(f"decay: got {decay!r}, expected 'retnet' or 'lightning'")
        self.decay, self.depth, self.rope_theta = decay, depth, rope_theta
        self.add_output(output_gate)

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, around: dict[str, Any]
    ) -> tuple[Float[Tensor, "B T H V"], State | None]:
        positions, count = real_positions(x, around["mask"], around["cu_seqlens"])
        q = rotate(q * self.key_dim**-0.5, positions, self.rope_theta)
        k = rotate(k, positions, self.rope_theta)
        log_decay = self.log_decay(x).expand(*v.shape[:3])
        o, memory = linear_attention(q, k, v, log_decay, **around)
        return o, None if memory is None else self._last_frame(memory, count)

    def step_in_place(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: State, mask: Tensor | None
    ) -> Float[Tensor, "B 1 H V"]:
        # Turned back before the token instead of after it, which then stands at position 0.
        count = torch.ones(len(x), dtype=torch.long, device=x.device) if mask is None else mask[:, 0].long()
        for part, turned in zip(memory, self._last_frame(memory, count), strict=True):
            if turned is not part:
                part.copy_(turned)
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

    def _last_frame(self, memory: State, count: Int[Tensor, " N"]) -> State:
        """The state seen from its last token: everything turned back by the tokens that passed."""
        back = -count[:, None]
        S = rearrange(rotate(rearrange(memory.S, "n h k v -> n v h k"), back, self.rope_theta), "n v h k -> n h k v")
        return memory._replace(S=S, key=rotate(memory.key[:, None], back, self.rope_theta)[:, 0])


def real_positions(
    x: Float[Tensor, "B T D"], mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Int[Tensor, "b T"], Int[Tensor, " N"]]:
    """Position of each token among the real ones of its sequence, from 1, and how many there are in each sequence."""
    (B, T), place = x.shape[:2], current()
    if mask is None and cu_seqlens is None and place is None:
        return torch.arange(1, T + 1, device=x.device)[None], torch.full((B,), T, device=x.device)
    seen = torch.ones(B, T, dtype=torch.long, device=x.device) if mask is None else mask.long()
    if place is not None:
        everywhere, count = _positions(whole(place, seen), cu_seqlens)
        return everywhere[:, place.rank * T : (place.rank + 1) * T], count
    return _positions(seen, cu_seqlens)


def _positions(seen: Int[Tensor, "B T"], cu_seqlens: Tensor | None) -> tuple[Int[Tensor, "B T"], Int[Tensor, " N"]]:
    """The same from 1 for every real token and 0 for the others."""
    T = seen.shape[1]
    seen = F.pad(seen.cumsum(1), (1, 0))  # [B, T+1]
    if cu_seqlens is None:
        return seen[:, 1:], seen[:, -1]
    bounds = cu_seqlens.to(seen.device).long()
    at_bounds = seen[0, bounds]
    start = at_bounds[document_of(bounds, T)]
    return seen[:, 1:] - start, at_bounds.diff()
