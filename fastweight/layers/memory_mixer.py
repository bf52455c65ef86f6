"""What all memories share as layers: projections, short convolution, heads, norm and gate on the way out, the state.

    q, k, v = silu(conv(x W_qkv))                          per head; the silu is optional; no convolution, no silu
    q, k = R^t q, R^t k                                    rotary positions, if wanted (positions.py)
    o, memory = attend(x, q, k, v)                         the subclass: its gates and its op
    o = o + scale_h v                                      a way past the memory, if wanted
    out = (RMSNorm(o) * silu(x W_gate)) W_out              the gate is optional

Traps: a masked token is absent for the convolution as for the memory; its own output is finite and means nothing. A
subclass registers its gates between `__init__` and `add_output`: initial weights are drawn in the order of modules.
"""

from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from fastweight.layers.convolution import ConvActivation, ConvStart, ShortConvolution, check_convolution
from fastweight.layers.parts import HeadSkip, RMSNorm, rotate
from fastweight.layers.positions import real_positions, turned_back
from fastweight.memory.checks import check_cu_seqlens
from fastweight.memory.rules import Rule
from fastweight.memory.state import State


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


torch.serialization.add_safe_globals([LayerState])  # as State


class MemoryOptions(TypedDict, total=False):
    """Keywords that every memory layer takes.

    key_dim, value_dim: widths K, V of one head; None means hidden_size // num_heads, for V times `expansion`.
    num_key_heads: number Hk of key heads, each read and written by H / Hk value heads; None means the layer's default.
    conv_width: taps of the short convolution on q, k, v; 0 leaves it and its activation out.
    conv_activation: what it ends in, "silu" or "none". A silu leaves q, k and v with little below 0.
    conv_start: its taps at step 0, "random" or "copy" (see `ShortConvolution`).
    rotary: whether q and k carry rotary positions (K is even then); None means the layer's default.
    rope_theta: base of the rotary frequencies.
    value_skip: whether v goes past the memory too, o_t + scale_h v_t, scale_h from 1; None means the layer's default.
    norm_eps: of the norms.
    form, backend, chunk_size: passed to the op; backend "torch" leaves the kernel of the convolution alone too.
    """

    key_dim: int | None
    value_dim: int | None
    num_key_heads: int | None
    conv_width: int
    conv_activation: ConvActivation
    conv_start: ConvStart
    rotary: bool | None
    rope_theta: float
    value_skip: bool | None
    norm_eps: float
    form: str
    backend: str
    chunk_size: int | None


class MemoryMixer(nn.Module):
    """Base of the layers that keep a memory; a subclass says what it writes (`attend`) and under which `rule`."""

    rule: Rule  # what the state holds and what a token costs; the baselines have one of their own class
    expansion = 1  # width of all value heads over hidden_size, unless value_dim is given
    default_key_heads: int | None = None  # None: as many as value heads
    conv_bias = False
    rotary_by_default = False
    skip_by_default = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        key_dim: int | None = None,
        value_dim: int | None = None,
        num_key_heads: int | None = None,
        conv_width: int = 4,
        conv_activation: ConvActivation = "silu",
        conv_start: ConvStart = "random",
        rotary: bool | None = None,
        rope_theta: float = 10_000.0,
        value_skip: bool | None = None,
        norm_eps: float = 1e-6,
        form: str = "auto",
        backend: str = "auto",
        chunk_size: int | None = None,
    ):
        super().__init__()
        if num_key_heads is None:
            num_key_heads = num_heads if self.default_key_heads is None else self.default_key_heads
        _check_sizes(hidden_size, num_heads, num_key_heads, conv_width)
        self.hidden_size, self.num_heads, self.num_key_heads = hidden_size, num_heads, num_key_heads
        self.key_dim = key_dim or hidden_size // num_heads
        self.value_dim = value_dim or self.expansion * hidden_size // num_heads
        self.rotary, self.rope_theta = self.rotary_by_default if rotary is None else rotary, rope_theta
        if self.rotary and self.key_dim % 2:
            raise ValueError(f"key_dim: got {self.key_dim}, expected an even width for rotary positions")
        self.norm_eps, self.form, self.backend, self.chunk_size = norm_eps, form, backend, chunk_size
        key_width = num_key_heads * self.key_dim
        self.split_sizes = (key_width, key_width, num_heads * self.value_dim)
        self.qkv_proj = nn.Linear(hidden_size, sum(self.split_sizes), bias=False)
        check_convolution(conv_start, conv_activation)
        self.conv_activation, self.conv = conv_activation, None
        if conv_width:
            self.conv = ShortConvolution(
                sum(self.split_sizes), conv_width, self.conv_bias, conv_start, conv_activation, backend
            )
        self.value_skip = self.skip_by_default if value_skip is None else value_skip

    def add_output(self, output_gate: bool) -> None:
        """Registers what stands behind the memory: way past it, norm, gate (silu(x W), if wanted) and projection."""
        self.skip = HeadSkip(self.num_heads) if self.value_skip else None
        value_width = self.num_heads * self.value_dim
        self.o_norm = RMSNorm(self.value_dim, self.norm_eps)
        self.g_proj = nn.Linear(self.hidden_size, value_width, bias=False) if output_gate else None
        self.o_proj = nn.Linear(value_width, self.hidden_size, bias=False)

    def attend(
        self,
        x: Float[Tensor, "B T D"],
        q: Float[Tensor, "B T Hk K"],
        k: Float[Tensor, "B T Hk K"],
        v: Float[Tensor, "B T H V"],
        around: dict[str, Any],
    ) -> tuple[Float[Tensor, "B T H V"], State | None]:
        """The memory: gates from the hidden states x, then the op with its keywords `around`."""
        raise NotImplementedError

    def step_in_place(
        self,
        x: Float[Tensor, "B 1 D"],
        q: Float[Tensor, "B 1 Hk K"],
        k: Float[Tensor, "B 1 Hk K"],
        v: Float[Tensor, "B 1 H V"],
        memory: State,
        mask: Bool[Tensor, "B 1"] | None,
    ) -> Float[Tensor, "B 1 H V"]:
        """`attend` for one token, the next state in `memory`'s own tensors."""
        raise NotImplementedError

    def gated(self, o: Float[Tensor, "B T H V"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H*V"]:
        """What the memory read, normalised per head and gated."""
        o = rearrange(self.o_norm(o), "b t h v -> b t (h v)")
        return o if self.g_proj is None else o * F.silu(self.g_proj(x))

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        mask: Bool[Tensor, "B S"] | None = None,
        cu_seqlens: Int[Tensor, " N+1"] | None = None,
        state: LayerState | None = None,
        output_state: bool = False,
        position_ids: Int[Tensor, "B T"] | None = None,
        overwrite_state: bool = False,
    ) -> tuple[Float[Tensor, "B T D"], LayerState | None]:
        """Mixes T tokens after `state`.

        Args:
            hidden_states: normalised hidden states.
            mask: True for real tokens; the last T columns count, earlier ones belong to what `state` has seen.
            cu_seqlens: bounds of N documents packed in one row (batch 1), N rows in states; a mask holds too.
            state: of the tokens before; None means a fresh start.
            output_state: whether to return the state after the last token (else None).
            position_ids: not used; a memory with rotary positions counts its own tokens.
            overwrite_state: whether a single token may leave its state in the tensors of `state.memory` (never with
                gradients); the state returned then holds the same tensors.

        Raises:
            ValueError: for anything inconsistent, naming the argument.
        """
        _check_hidden(hidden_states, self.hidden_size)
        mask = last_columns(mask, hidden_states)
        check_cu_seqlens(cu_seqlens, hidden_states)
        _check_state(state, len(hidden_states) if cu_seqlens is None else len(cu_seqlens) - 1)
        q, k, v, conv = self._qkv(hidden_states, mask, cu_seqlens, None if state is None else state.conv)
        steps = self.backend == "auto" and self.form in ("auto", "recurrent")  # what was named is used as it is
        if steps and overwrite_state and state is not None and cu_seqlens is None and v.shape[1] == 1:
            if self.rotary:
                self._turn_in_place(state.memory, hidden_states, mask)
            o = self.step_in_place(hidden_states, q, k, v, state.memory, mask)
            return self._output(o, v, hidden_states), LayerState(conv, state.memory)
        around = {
            "form": self.form,
            "backend": self.backend,
            "chunk_size": self.chunk_size,
            "initial_state": None if state is None else state.memory,
            "output_final_state": output_state,
            "cu_seqlens": cu_seqlens,
            "mask": mask,
        }
        count = None
        if self.rotary:
            positions, count = real_positions(hidden_states, mask, cu_seqlens)
            q, k = (rotate(u, positions, self.rope_theta) for u in (q, k))
        o, memory = self.attend(hidden_states, q, k, v, around)
        if memory is not None and count is not None:
            memory = turned_back(memory, count, self.rope_theta)
        return self._output(o, v, hidden_states), None if memory is None else LayerState(conv, memory)

    def _turn_in_place(self, memory: State, x: Tensor, mask: Tensor | None) -> None:
        """Turns the state back before the token instead of after it: the token then stands at position 0."""
        count = torch.ones(len(x), dtype=torch.long, device=x.device) if mask is None else mask[:, 0].long()
        for part, turned in zip(memory, turned_back(memory, count, self.rope_theta), strict=True):
            if turned is not part:
                part.copy_(turned)

    def _output(self, o: Tensor, v: Tensor, x: Tensor) -> Float[Tensor, "B T D"]:
        return self.o_proj(self.gated(o if self.skip is None else self.skip(o, v), x))

    def _qkv(self, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, cache: Tensor | None):
        """q, k [B, T, Hk, K] and v [B, T, H, V] after the convolution, and its new cache."""
        qkv = self.qkv_proj(x)
        conv = qkv.new_zeros(len(x) if cu_seqlens is None else len(cu_seqlens) - 1, 0, qkv.shape[-1])
        if self.conv is None:
            q, k, v = qkv.split(self.split_sizes, dim=-1)
        else:
            (q, k, v), conv = self.conv.in_parts(self.split_sizes, qkv, mask, cu_seqlens, cache)
        q, k = (rearrange(u, "b t (h d) -> b t h d", d=self.key_dim) for u in (q, k))
        return q, k, rearrange(v, "b t (h d) -> b t h d", d=self.value_dim), conv

    def core_flops(self, context: float) -> float:
        """FLOP of one token's residuals, writes and read; `context`, the number of tokens seen, does not matter."""
        products = 1 + self.rule.window * (2 if self.rule.objective == "regression" else 1)
        return 2.0 * products * self.num_heads * self.key_dim * self.value_dim

    def state_bytes(self, num_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one sequence's LayerState in a model of that dtype, the same after any number of tokens."""
        widths = (1, self.num_heads, self.key_dim, self.value_dim)
        kept = torch.promote_types(dtype, torch.float32)
        memory = State.zeros(self.rule, *widths, num_key_heads=self.num_key_heads, dtype=kept, device="meta")
        conv = 0 if self.conv is None else (self.conv.width - 1) * sum(self.split_sizes)
        return memory.nbytes + conv * dtype.itemsize


def _check_sizes(hidden_size: int, num_heads: int, num_key_heads: int, conv_width: int) -> None:
    if not 1 <= num_heads <= hidden_size:
        raise ValueError(f"num_heads: got {num_heads}, expected 1 to hidden_size {hidden_size}")
    if num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(f"num_key_heads: got {num_key_heads}, expected a divisor of num_heads {num_heads}")
    if conv_width < 0:
        raise ValueError(f"conv_width: got {conv_width}, expected a number of taps, or 0 for no convolution")


def _check_state(state: LayerState | None, rows: int) -> None:
    """The number of sequences; the op and the convolution check the rest of the shapes."""
    if state is not None and (not isinstance(state, LayerState) or len(state.conv) != rows):
        got = f"{len(state.conv)} sequences" if isinstance(state, LayerState) else type(state).__name__
        raise ValueError(f"state: got {got}, expected a LayerState of {rows} sequences")


def _check_hidden(hidden_states: Tensor, width: int) -> None:
    """ValueError unless [B, T, width]: an unbatched sequence would be read as something else."""
    if hidden_states.ndim != 3 or hidden_states.shape[2] != width:
        got = f"shape {tuple(hidden_states.shape)}"
        raise ValueError(f"hidden_states: got {got}, expected [batch, tokens, {width}]")


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
