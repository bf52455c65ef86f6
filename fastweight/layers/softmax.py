"""Softmax attention with rotary positions: the mixer that every memory is compared with.

Hidden states [B, T, D] in and out; its state is a key-value cache that grows with every token. Trap: masks are of the
real keys, so with a cache the mask must cover the cached tokens too, and a row that may see nothing would be NaN:
such rows (padding before the first token) see themselves instead.
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fastweight.layers.convolution import document_of, position_in_document
from fastweight.layers.parts import rotate
from fastweight.memory.checks import check_cu_seqlens
from fastweight.parallel.group import current


class SoftmaxAttention(nn.Module):
    """Multi-head softmax attention (LLaMA-style: RoPE, no bias) through scaled_dot_product_attention.

    Args:
        hidden_size: width D of the hidden states.
        num_heads: number of heads.
        head_dim: width of one head, even; None means hidden_size // num_heads.
        rope_theta: base of the rotary frequencies.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, head_dim: int | None = None, rope_theta: float = 10_000.0):
        super().__init__()
        self.num_heads, self.rope_theta = num_heads, rope_theta
        self.head_dim = head_dim or hidden_size // num_heads
        if self.head_dim % 2 or self.head_dim == 0:
            raise ValueError(f"head_dim: got {self.head_dim}, expected an even width for rotary positions")
        self.qkv_proj = nn.Linear(hidden_size, 3 * num_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B S"] | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        state: Any = None,
        output_state: bool = False,
        position_ids: Int[Tensor, "b T"] | None = None,
        overwrite_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], Any]:
        """Mixes T tokens after the cached ones.

        Args:
            hidden_states: normalised hidden states.
            mask: True for real tokens, cached ones included: S = cached + T.
            cu_seqlens: bounds of N documents packed in one row (batch 1, no state).
            state: an object whose `update(k, v)` stores keys and values [B, H, T, d] and returns all of them, and
                whose `get_seq_length()` counts the stored ones (a cache layer of transformers), or one of fixed size
                that also knows which of them are real (`models.cache_layers.StaticKeyValueLayer`).
            output_state: whether to return `state` (updated in place).
            position_ids: of the new tokens; None counts the real tokens before each (inside its document).
            overwrite_state: not used; keys and values are always added in place.

        Raises:
            ValueError: for anything inconsistent, naming the argument.
        """
        B, T = hidden_states.shape[:2]
        if current() is not None:
            raise ValueError(
                "mixer: got 'transformer' inside context_parallel, expected a mixer with a memory: softmax attention "
                "would have to exchange all of its keys and values"
            )
        static: Any = state if getattr(state, "max_cache_len", None) is not None else None
        if static is not None and T == 1 and mask is None and not static.is_empty:
            return self._next(hidden_states, static, position_ids), state if output_state else None
        seen = 0 if state is None else int(state.get_seq_length())
        self._check(mask, cu_seqlens, state, B, T, seen)
        check_cu_seqlens(cu_seqlens, hidden_states)
        if static is not None and mask is None and static.padded:
            mask = F.pad(static.seen_mask(), (0, T), value=True)
        if position_ids is None:
            position_ids = default_positions(mask, cu_seqlens, T, seen, hidden_states.device)
        q, k, v = self._qkv(hidden_states, position_ids)
        if static is not None:
            k, v = (room[:, :, : seen + T] for room in static.update(k, v, mask))
        elif state is not None:
            k, v = state.update(k, v)
        visible = visibility(mask, cu_seqlens, T, seen, hidden_states.device)
        causal = False
        if visible is None and T > 1:  # a branch: traced with a symbol for T, the comparison itself would be a symbol
            causal = True
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)
        return self.o_proj(rearrange(o, "b h t d -> b t (h d)")), state if output_state else None

    def _next(self, x: Float[Tensor, "B 1 D"], state: Any, position_ids: Tensor | None) -> Float[Tensor, "B 1 D"]:
        """One real token after a static cache; nothing is asked of the device, and no size depends on the count."""
        q, k, v = self._qkv(x, state.next_positions() if position_ids is None else position_ids)
        visible = state.visible_to_next()
        k, v = state.update(k, v)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o_proj(rearrange(o, "b h t d -> b t (h d)"))

    def _qkv(self, x: Float[Tensor, "B T D"], position_ids: Int[Tensor, "b T"]) -> list[Float[Tensor, "B H T d"]]:
        """Queries and keys, turned to their positions, and values."""
        q, k, v = rearrange(self.qkv_proj(x), "b t (n h d) -> n b t h d", n=3, d=self.head_dim)
        q, k = rotate(q, position_ids, self.rope_theta), rotate(k, position_ids, self.rope_theta)
        return [rearrange(u, "b t h d -> b h t d") for u in (q, k, v)]

    def core_flops(self, context: float) -> float:
        """FLOP of one token's scores and weighted values over `context` visible keys."""
        return 4.0 * context * self.num_heads * self.head_dim

    def state_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of the keys and values of `num_tokens` tokens of one sequence."""
        return 2 * num_tokens * self.num_heads * self.head_dim * dtype.itemsize

    def _check(self, mask: Tensor | None, cu_seqlens: Tensor | None, state: Any, B: int, T: int, seen: int) -> None:
        if cu_seqlens is not None and state is not None:
            raise ValueError("cu_seqlens: got packed documents with a key-value state, expected one or the other")
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (B, seen + T)):
            raise ValueError(
                f"mask: got {mask.dtype} of shape {tuple(mask.shape)}, expected bool {(B, seen + T)}: "
                f"{seen} cached and {T} new tokens"
            )


def default_positions(
    mask: Bool[Tensor, "B S"] | None, cu_seqlens: Int[Tensor, " N+1"] | None, num_tokens: int, seen: int, device
) -> Int[Tensor, "b T"]:
    """Positions of the new tokens: masked tokens do not count, and a document starts at 0 or later."""
    if mask is not None:
        # Documents need no start at 0 here: only distances count, and documents do not see each other.
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, seen:]
    if cu_seqlens is not None:
        return position_in_document(cu_seqlens.to(device), num_tokens)[None]
    return torch.arange(seen, seen + num_tokens, device=device)[None]


def visibility(
    mask: Bool[Tensor, "B S"] | None, cu_seqlens: Int[Tensor, " N+1"] | None, num_tokens: int, seen: int, device
) -> Bool[Tensor, "b 1 T S"] | None:
    """Which keys each query may see; None where plain causality says it all."""
    if mask is None and cu_seqlens is None and (seen == 0 or num_tokens == 1):
        return None
    keys = torch.arange(seen + num_tokens, device=device)
    queries = keys[seen:, None]
    visible = keys <= queries  # [T, S]
    if cu_seqlens is not None:
        document = document_of(cu_seqlens.to(device), num_tokens)
        visible = visible & (document[:, None] == document)
    visible = visible[None, None]
    # A query with no real key sees itself, so that softmax has something to sum over.
    return visible if mask is None else (visible & mask[:, None, None, :]) | (keys == queries)
