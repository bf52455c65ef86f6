"""The fast-weight layer: hidden states [B, T, D] in, hidden states [B, T, D] and a layer state of fixed size out.

    q, k, v = silu(conv(x W_qkv));  q, k = phi(normalize(q)), phi(normalize(k))      per head
    o, memory = fast_weight_attention(q, k, v, beta(x), lam(x), rule)
    out = (RMSNorm(o) * silu(x W_gate)) W_out

Traps: nothing here knows the rules by name, all of their options live in `Rule`. A masked token is absent for the
convolution as for the memory; its own output is finite and means nothing. Gates work in float32 (see `Gate`).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fastweight.layers.convolution import ShortConvolution
from fastweight.layers.parts import FEATURE_MAPS, QK_NORMS, Gate, RMSNorm, feature_energy, rms_normalize
from fastweight.memory.attention import fast_weight_attention
from fastweight.memory.checks import check_cu_seqlens
from fastweight.memory.rules import Rule, rule_of
from fastweight.memory.state import State

SHORTEST_MEMORY, LONGEST_MEMORY = 16, 1024  # tokens: 1 / (1 - carry) of the first and of the last head at step 0


class LayerState(NamedTuple):
    """All that a layer must remember of N sequences: the last W-1 inputs of the convolution, and the fast weights."""

    conv: Float[Tensor, "N W-1 C"]
    memory: State

    def detach(self) -> "LayerState":
        """The same values, cut from the autograd graph."""
        return LayerState(self.conv.detach(), self.memory.detach())

    def index_select(self, index: Int[Tensor, " M"]) -> "LayerState":
        """Rows `index` of the batch axis."""
        return LayerState(self.conv.index_select(0, index.to(self.conv.device)), self.memory.index_select(index))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Named contiguous tensors for safetensors; `from_tensors` is the inverse."""
        return {prefix + "conv": self.conv.detach().contiguous(), **self.memory.tensors(prefix + "memory.")}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], prefix: str = "") -> "LayerState":
        """The state that `tensors` wrote; a missing part raises ValueError."""
        if prefix + "conv" not in tensors:
            raise ValueError(f"tensors: got no {prefix}conv, expected every part of a layer state")
        return cls(tensors[prefix + "conv"], State.from_tensors(tensors, prefix + "memory."))


class FastWeightAttention(nn.Module):
    """Fast-weight attention as a layer, in the place of softmax self-attention.

    Gates. beta = 2 sigmoid(.) in (0, 2) for step "normalized"; eta = eta_max sigmoid(.) for step "direct", where
    eta_max = 2 / (E + lambda_max) and E is the largest |phi(k)|^2 the features can have (K after rms, 1 after l2), so
    that eta (E + lambda) < 2: no regression rule can diverge, windows included, since mu <= E. One eta per head, or one
    per value column for the column rules. lam = lambda_scale sigmoid(.): lambda, or lambda-bar for ridge "scaled".

    At step 0. Gate weights are small, so the biases decide. The step gate is at its midpoint, where sigmoid learns
    fastest: beta = 1 (a regression rule then stores the pair exactly: the largest guaranteed descent), or
    eta = eta_max / 2. Head h of H forgets with carry gamma = 1 - 1/tau_h, tau_h spread geometrically from 16 to 1,024
    tokens, so that short and long memories are both there to be chosen; lam is solved from it (at most half of
    lambda_scale). Both are inside the stable region: beta < 2, alpha = eta lambda <= 1/16, the clamp never acts.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number H of value heads, each with its own memory.
        rule: a rule name or a `Rule`; pairing, timing, window, ridge and step are its fields.
        key_dim, value_dim: widths K and V of one head; None means hidden_size // num_heads.
        num_key_heads: number Hk of key heads, each read and written by H / Hk value heads; None means H.
        qk_norm: "rms" (|q|^2 = K) or "l2" (|q|^2 = 1), per head, without learned scale.
        feature_map: "identity", "elu+1" or "relu", after the norm.
        conv_width: taps of the short convolution on q, k, v, which ends in a silu; 0 leaves both out.
        lambda_scale: largest lam; None means 1 for ridge "scaled" and E for "absolute", which both let a head forget
            half of its memory in one step at beta = 1.
        output_gate: whether silu(x W) multiplies the normalised read.
        value_norm: whether v is RMS-normalised per head.
        norm_eps: of the norms.
        form, backend, chunk_size: passed to `fast_weight_attention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        rule: str | Rule = "falcon-1",
        key_dim: int | None = None,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        qk_norm: str = "rms",
        feature_map: str = "identity",
        conv_width: int = 4,
        lambda_scale: float | None = None,
        output_gate: bool = True,
        value_norm: bool = False,
        norm_eps: float = 1e-6,
        form: str = "auto",
        backend: str = "auto",
        chunk_size: int | None = None,
    ):
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        _check_options(hidden_size, num_heads, num_key_heads, qk_norm, feature_map, conv_width, lambda_scale)
        self.rule = rule_of(rule)
        self.num_heads, self.num_key_heads = num_heads, num_key_heads
        self.key_dim, self.value_dim = key_dim or hidden_size // num_heads, value_dim or hidden_size // num_heads
        self.qk_norm, self.feature_map, self.value_norm, self.norm_eps = qk_norm, feature_map, value_norm, norm_eps
        self.form, self.backend, self.chunk_size = form, backend, chunk_size

        energy = feature_energy(qk_norm, feature_map, self.key_dim)
        scaled = self.rule.ridge == "scaled"
        self.lambda_scale = lambda_scale if lambda_scale is not None else 1.0 if scaled else energy
        self.step_scale = 2.0 if self.rule.step == "normalized" else 2 / (energy + self._lambda(energy, 1.0))

        key_width, value_width = num_key_heads * self.key_dim, num_heads * self.value_dim
        self.split_sizes = (key_width, key_width, value_width)
        self.qkv_proj = nn.Linear(hidden_size, sum(self.split_sizes), bias=False)
        self.conv = ShortConvolution(sum(self.split_sizes), conv_width) if conv_width else None
        self.step_gate = Gate(hidden_size, [0.0] * (value_width if self.rule.gain == "column" else num_heads))
        self.lam_gate = Gate(hidden_size, self._initial_lam_logits(energy))
        self.o_norm = RMSNorm(self.value_dim, norm_eps)
        self.g_proj = nn.Linear(hidden_size, value_width, bias=False) if output_gate else None
        self.o_proj = nn.Linear(value_width, hidden_size, bias=False)

    def _lambda(self, energy: float, fraction: float) -> float:
        """lambda when the gate stands at that fraction and the features have that energy."""
        return fraction * self.lambda_scale * (energy if self.rule.ridge == "scaled" else 1.0)

    def _initial_lam_logits(self, energy: float) -> list[float]:
        """Logits that give head h the carry 1 - 1/tau_h at step 0, tau_h from 16 to 1,024 tokens."""
        logits = []
        for head in range(self.num_heads):
            place = head / (self.num_heads - 1) if self.num_heads > 1 else 0.5
            decay = 1 / (SHORTEST_MEMORY * (LONGEST_MEMORY / SHORTEST_MEMORY) ** place)
            # decay = eta lambda, with eta = 1 / (E + lambda) when normalised and beta = 1.
            direct = self.rule.step == "direct"
            lam = decay / (self.step_scale / 2) if direct else decay * energy / (1 - decay)
            fraction = min(lam / self._lambda(energy, 1.0), 0.5)
            logits.append(math.log(fraction / (1 - fraction)))
        return logits

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B S"] | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        state: LayerState | None = None,
        output_state: bool = False,
        position_ids: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        """Mixes T tokens after `state`.

        Args:
            hidden_states: normalised hidden states.
            mask: True for real tokens; the last T columns count, earlier ones belong to what `state` has seen.
            cu_seqlens: bounds of N documents packed in one row (batch 1), N rows in states; a mask holds too.
            state: of the tokens before; None means a fresh start.
            output_state: whether to return the state after the last token (else None).
            position_ids: not used; the memory has no positions.

        Raises:
            ValueError: for anything inconsistent, naming the argument.
        """
        mask = last_columns(mask, hidden_states)
        check_cu_seqlens(cu_seqlens, hidden_states)
        _check_state(state, len(hidden_states) if cu_seqlens is None else len(cu_seqlens) - 1)
        q, k, v, conv = self._qkv(hidden_states, mask, cu_seqlens, None if state is None else state.conv)
        step, lam = self._gates(hidden_states)
        o, memory = fast_weight_attention(
            q,
            k,
            v,
            step,
            lam,
            self.rule,
            form=self.form,
            backend=self.backend,
            chunk_size=self.chunk_size,
            initial_state=None if state is None else state.memory,
            output_final_state=output_state,
            cu_seqlens=cu_seqlens,
            mask=mask,
        )
        o = rearrange(self.o_norm(o), "b t h v -> b t (h v)")
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(hidden_states))
        return self.o_proj(o), None if memory is None else LayerState(conv, memory)

    def core_flops(self, context: float) -> float:
        """FLOP of one token's residuals, writes and read; `context`, the number of tokens seen, does not matter."""
        products = 1 + self.rule.window * (2 if self.rule.objective == "regression" else 1)
        return 2.0 * products * self.num_heads * self.key_dim * self.value_dim

    def state_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's LayerState in a model of that dtype, the same after any number of tokens."""
        memory = State.zeros(
            self.rule, 1, self.num_heads, self.key_dim, self.value_dim, num_key_heads=self.num_key_heads, device="meta"
        )
        conv = 0 if self.conv is None else (self.conv.width - 1) * sum(self.split_sizes)
        return memory.nbytes + conv * dtype.itemsize

    def _qkv(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: Tensor | None):
        """Featured q, k [B, T, Hk, K], v [B, T, H, V], and the convolution's new cache."""
        qkv = self.qkv_proj(x)
        conv = qkv.new_zeros(len(x) if cu_seqlens is None else len(cu_seqlens) - 1, 0, qkv.shape[-1])
        if self.conv is not None:
            qkv, conv = self.conv(qkv, mask, cu_seqlens, cache)
            qkv = F.silu(qkv)
        q, k, v = qkv.split(self.split_sizes, dim=-1)
        q, k = (self._featured(rearrange(u, "b t (h d) -> b t h d", d=self.key_dim)) for u in (q, k))
        v = rearrange(v, "b t (h d) -> b t h d", d=self.value_dim)
        return q, k, rms_normalize(v, self.norm_eps) if self.value_norm else v, conv

    def _featured(self, u: Float[Tensor, "B T Hk K"]) -> Float[Tensor, "B T Hk K"]:
        return FEATURE_MAPS[self.feature_map](QK_NORMS[self.qk_norm](u, self.norm_eps))

    def _gates(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, Float[Tensor, "B T H"]]:
        """beta or eta [B, T, H] ([B, T, H, V] for a column gain), and lam [B, T, H]; float32 or better."""
        step = self.step_scale * torch.sigmoid(self.step_gate(x))
        if self.rule.gain == "column":
            step = rearrange(step, "b t (h v) -> b t h v", h=self.num_heads)
        return step, self.lambda_scale * torch.sigmoid(self.lam_gate(x))


def _check_options(hidden_size, num_heads, num_key_heads, qk_norm, feature_map, conv_width, lambda_scale) -> None:
    """The complaints of the layer's constructor; the rule, form, backend and chunk_size have checks of their own."""
    if not 1 <= num_heads <= hidden_size:
        raise ValueError(f"num_heads: got {num_heads}, expected 1 to hidden_size {hidden_size}")
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(f"num_key_heads: got {num_key_heads}, expected a divisor of num_heads {num_heads}")
    if qk_norm not in QK_NORMS:
        raise ValueError(f"qk_norm: got {qk_norm!r}, expected one of {', '.join(map(repr, QK_NORMS))}")
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map: got {feature_map!r}, expected one of {', '.join(map(repr, FEATURE_MAPS))}")
    if conv_width < 0:
        raise ValueError(f"conv_width: got {conv_width}, expected a number of taps, or 0 for no convolution")
    if lambda_scale is not None and not 0 < lambda_scale < math.inf:
        raise ValueError(f"lambda_scale: got {lambda_scale}, expected a finite number above 0, or None")


def _check_state(state: LayerState | None, rows: int) -> None:
    """The number of sequences; the op and the convolution check the rest of the shapes."""
    if state is not None and (not isinstance(state, LayerState) or len(state.conv) != rows):
        got = f"{len(state.conv)} sequences" if isinstance(state, LayerState) else type(state).__name__
        raise ValueError(f"state: got {got}, expected a LayerState of {rows} sequences")


def last_columns(mask: Bool[Tensor, "B S"] | None, hidden_states: Float[Tensor, "B T D"]) -> Bool[Tensor, "B T"] | None:
    """The part of a mask that speaks of the T tokens at hand; ValueError when it does not cover them."""
    if mask is None:
        return None
    B, T = hidden_states.shape[:2]
    if mask.dtype != torch.bool or mask.ndim != 2 or mask.shape[0] != B or mask.shape[1] < T:
        raise ValueError(
            f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected bool [{B}, {T}] (True for real tokens), "
            "with more columns in front only for tokens seen before"
        )
    return mask[:, mask.shape[1] - T :]
