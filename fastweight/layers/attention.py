"""The fast-weight layer: hidden states [B, T, D] in, hidden states [B, T, D] and a layer state of fixed size out.

    q, k, v = silu(conv(x W_qkv));  q, k = phi(normalize(q)), phi(normalize(k))      per head
    o, memory = fast_weight_attention(q, k, v, beta(x), lam(x), rule)
    out = (RMSNorm(o) * silu(x W_gate)) W_out

Traps: nothing here knows the rules by name, all of their options live in `Rule`. Gates work in float32 (see `Gate`).
Projections, convolution, output and states are those of every memory layer (memory_mixer.py).
"""

import math
from typing import Any, Unpack

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from fastweight.layers.memory_mixer import LayerState, MemoryMixer, MemoryOptions
from fastweight.layers.parts import FEATURE_MAPS, QK_NORMS, Gate, feature_energy, largest_gain, rms_normalize
from fastweight.memory.attention import fast_weight_attention, step_in_place
from fastweight.memory.rules import Rule, rule_of
from fastweight.memory.state import State

__all__ = ["FastWeightAttention", "LayerState"]

SHORTEST_MEMORY, LONGEST_MEMORY = 16, 1024  # tokens: 1 / (1 - carry) of the first and of the last head at step 0


class FastWeightAttention(MemoryMixer):
    """Fast-weight attention as a layer, in the place of softmax self-attention.

    Gates. beta = max_gain sigmoid(.), in (0, 2) by default, for step "normalized"; eta = eta_max sigmoid(.) for step
    "direct", where eta_max = max_gain / (E + lambda_max) and E is the largest |phi(k)|^2 the features can have (K after
    rms, 1 after l2), so that eta (E + lambda) < 2: no regression rule can diverge, windows included, since mu <= E.
    One eta per head, or one per value column for the column rules. lam = lambda_scale sigmoid(.): lambda, or
    lambda-bar for ridge "scaled".

    At step 0. Gate weights are small, so the biases decide. The step gate is at its midpoint, where sigmoid learns
    fastest: beta = 1 (a regression rule then stores the pair exactly: the largest guaranteed descent), or
    eta = eta_max / 2. Head h of H forgets with carry gamma = 1 - 1/tau_h, tau_h spread geometrically from 16 to 1,024
    tokens, so that short and long memories are both there to be chosen; lam is solved from it (at most half of
    lambda_scale). Both are inside the stable region: beta < 2, alpha = eta lambda <= 1/16, the clamp never acts.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number H of value heads, each with its own memory.
        rule: a rule name or a `Rule`; pairing, timing, window, ridge and step are its fields.
        qk_norm: "rms" (|q|^2 = K) or "l2" (|q|^2 = 1), per head, without learned scale.
        feature_map: "identity", "elu+1" or "relu", after the norm; rotary positions ask for the first.
        lambda_scale: largest lam; None means 1 for ridge "scaled" and E for "absolute", which both let a head forget
            half of its memory in one step at beta = 1.
        max_gain: largest beta, or eta (E + lambda), at most 2; None means 2. At most 1, no step goes past its target.
        output_gate: whether silu(x W) multiplies the normalised read.
        value_norm: whether v is RMS-normalised per head.
        options: see `MemoryOptions`; as many key heads as value heads by default.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        rule: str | Rule = "falcon-1",
        qk_norm: str = "rms",
        feature_map: str = "identity",
        lambda_scale: float | None = None,
        max_gain: float | None = None,
        output_gate: bool = True,
        value_norm: bool = False,
        **options: Unpack[MemoryOptions],
    ):
        super().__init__(hidden_size, num_heads, **options)
        _check_features(qk_norm, feature_map, lambda_scale)
        if self.rotary and feature_map != "identity":
            raise ValueError(f"feature_map: got {feature_map!r}, expected 'identity' with rotary positions")
        self.rule = rule_of(rule)
        self.qk_norm, self.feature_map, self.value_norm = qk_norm, feature_map, value_norm
        energy = feature_energy(qk_norm, feature_map, self.key_dim)
        scaled = self.rule.ridge == "scaled"
        self.lambda_scale = lambda_scale if lambda_scale is not None else 1.0 if scaled else energy
        self.max_gain = largest_gain(max_gain, 2.0)
        direct = self.rule.step == "direct"
        self.step_scale = self.max_gain / (energy + self._lambda(energy, 1.0)) if direct else self.max_gain
        column = self.rule.gain == "column"
        self.step_gate = Gate(hidden_size, [0.0] * (num_heads * self.value_dim if column else num_heads))
        self.lam_gate = Gate(hidden_size, self._initial_lam_logits(energy))
        self.add_output(output_gate)

    def _lambda(self, energy: float, fraction: float) -> float:
        """lambda when the gate stands at that fraction and the features have that energy."""
        return fraction * self.lambda_scale * (energy if self.rule.ridge == "scaled" else 1.0)

    def _initial_lam_logits(self, energy: float) -> list[float]:
        """Logits that give head h the carry 1 - 1/tau_h at step 0, tau_h from 16 to 1,024 tokens."""
        logits = []
        for head in range(self.num_heads):
            place = head / (self.num_heads - 1) if self.num_heads > 1 else 0.5
            decay = 1 / (SHORTEST_MEMORY * (LONGEST_MEMORY / SHORTEST_MEMORY) ** place)
            # decay = eta lambda, with eta = beta / (E + lambda) when normalised, and beta half of its largest.
            step = self.step_scale / 2
            lam = decay / step if self.rule.step == "direct" else decay * energy / (step - decay)
            fraction = min(lam / self._lambda(energy, 1.0), 0.5)
            logits.append(math.log(fraction / (1 - fraction)))
        return logits

    def attend(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, around: dict[str, Any]
    ) -> tuple[Float[Tensor, "B T H V"], State | None]:
        return fast_weight_attention(*self._tokens(x, q, k, v), self.rule, **around)

    def step_in_place(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: State, mask: Tensor | None
    ) -> Float[Tensor, "B 1 H V"]:
        q, k, v, step, lam = (part[:, 0] for part in self._tokens(x, q, k, v))
        mask_t = None if mask is None else mask[:, 0]
        return step_in_place(q, k, v, step, lam, memory, self.rule, mask_t=mask_t)[:, None]

    def _tokens(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the op reads: featured q and k, v, the step and lam."""
        v = rms_normalize(v, self.norm_eps) if self.value_norm else v
        return self._featured(q), self._featured(k), v, *self._gates(x)

    def _featured(self, u: Float[Tensor, "B T Hk K"]) -> Float[Tensor, "B T Hk K"]:
        return FEATURE_MAPS[self.feature_map](QK_NORMS[self.qk_norm](u, self.norm_eps))

    def _gates(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Float[Tensor, "B T H"]]:
        """beta or eta [B, T, H] ([B, T, H, V] for a column gain), and lam [B, T, H]; float32 or better."""
        step = self.step_scale * torch.sigmoid(self.step_gate(x))
        if self.rule.gain == "column":
            step = rearrange(step, "b t (h v) -> b t h v", h=self.num_heads)
        return step, self.lambda_scale * torch.sigmoid(self.lam_gate(x))


def _check_features(qk_norm: str, feature_map: str, lambda_scale: float | None) -> None:
    """The complaints of this constructor; the base class, the rule and the op have checks of their own."""
    if qk_norm not in QK_NORMS:
        raise ValueError(f"qk_norm: got {qk_norm!r}, expected one of {', '.join(map(repr, QK_NORMS))}")
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map: got {feature_map!r}, expected one of {', '.join(map(repr, FEATURE_MAPS))}")
    if lambda_scale is not None and not 0 < lambda_scale < math.inf:
        raise ValueError(f"lambda_scale: got {lambda_scale}, expected a finite number above 0, or None")
