"""The small parts that layers and models share: norms, feature maps, gates, SwiGLU, rotary positions.

Traps: every norm here is safe at zero (a zero key gives a zero feature and a finite gradient), works in float32 or
better and answers in the dtype it was given. Gates keep their parameters in float32 whatever happens to the model.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fastweight.memory.modes import without_autocast

SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1  # dt of the first and of the last head at step 0
GOLDEN = (5**0.5 - 1) / 2


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or in float64 if it already is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_normalize(x: Float[Tensor, "... d"], eps: float = 1e-6) -> Float[Tensor, "... d"]:
    """x / sqrt(mean x^2 + eps) over the last axis (section 4.1), no learned scale: squared length d, or 0 for x = 0."""
    return F.rms_norm(x, x.shape[-1:], eps=eps).to(x.dtype)


def l2_normalize(x: Float[Tensor, "... d"], eps: float = 1e-6, length: float = 1.0) -> Float[Tensor, "... d"]:
    """length * x / sqrt(|x|^2 + eps) over the last axis, or 0 for x = 0."""
    wide = at_least_float32(x)
    return (wide * (length * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps))).to(x.dtype)


QK_NORMS: dict[str, Callable[..., Tensor]] = {"rms": rms_normalize, "l2": l2_normalize}

FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: F.elu(x) + 1,
    "relu": F.relu,
}


def feature_energy(qk_norm: str, feature_map: str, width: int) -> float:
    """Largest |phi(k)|^2 of a normalised key of that width: `width` after rms, 1 after l2 (more for elu+1)."""
    energy = float(width) if qk_norm == "rms" else 1.0
    # (u + 1)^2 summed over the coordinates is at most (|u| + sqrt(width))^2.
    return (energy**0.5 + width**0.5) ** 2 if feature_map == "elu+1" else energy


def largest_gain(asked: float | None, usual: float) -> float:
    """The largest dimensionless gain of a layer, `usual` for None; ValueError outside (1/8, 2]."""
    if asked is not None and not 0.125 < asked <= 2:
        raise ValueError(f"max_gain: got {asked}, expected more than 1/8 and at most 2")
    return usual if asked is None else float(asked)


class RMSNorm(nn.Module):
    """RMSNorm over the last axis with a learned scale, which carries no weight decay."""

    no_weight_decay = True

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... d"]) -> Float[Tensor, "... d"]:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps).to(x.dtype)


class WideParameters(nn.Module):
    """Keeps its parameters in float32 under a half-precision model (`.bfloat16()`, `.half()`, `.to(dtype)`).

    A bias of several units moves by steps that bfloat16 rounds away. The parameters carry no weight decay, which would
    pull every gate to its midpoint. `starting_points` are their values at step 0 by name, where those are not drawn.
    """

    no_weight_decay = True

    def starting_points(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, value in self.starting_points().items():
                getattr(self, name).copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WideParameters":
        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            narrowed = moved.is_floating_point() and torch.finfo(moved.dtype).bits < 32
            return tensor.to(moved.device) if narrowed else moved

        return super()._apply(keep_wide, recurse)


def wide_parameter(*shape: int) -> nn.Parameter:
    """An unfilled parameter in float32, also inside a half-precision default dtype, as loaders set it."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))


class Gate(WideParameters):
    """Logits of one gate, in float32: x W^T + b, with the bias starting at `initial_logits`."""

    def __init__(self, hidden_size: int, initial_logits: list[float]):
        super().__init__()
        self.initial_logits = tuple(initial_logits)
        self.weight = wide_parameter(len(initial_logits), hidden_size)
        self.bias = wide_parameter(len(initial_logits))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        super().reset_parameters()

    def starting_points(self) -> dict[str, Tensor]:
        return {"bias": self.initial_bias()}

    def initial_bias(self) -> Float[Tensor, " n"]:
        return torch.tensor(self.initial_logits, dtype=self.bias.dtype)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T n"]:
        # Sharded training may hand the parameters over in half precision; the arithmetic stays float32 all the same.
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        with without_autocast(x.device.type):
            return F.linear(x.to(weight.dtype), weight, bias)


class DecayGate(WideParameters):
    """Step width and decay of a discretised linear system, per head and token, in float32 (Mamba-2, Gated DeltaNet).

        dt = softplus(x W^T + b) > 0,   log_decay = -exp(A_log) dt <= 0   (natural log)

    At step 0, dt is spread over the heads from 0.001 to 0.1 in equal ratios and A = exp(A_log) over 1 to 16: the ranges
    that the published models draw from. Ours are not drawn, so that every rank and every seed starts with the same
    range of memories; A goes through its range in steps of the golden ratio, so that it does not go along with dt.
    """

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        places = [h / (num_heads - 1) if num_heads > 1 else 0.5 for h in range(num_heads)]
        steps = [SHORTEST_STEP * (LONGEST_STEP / SHORTEST_STEP) ** place for place in places]
        self.dt = Gate(hidden_size, [step + math.log(-math.expm1(-step)) for step in steps])  # softplus backwards
        self.A_log = wide_parameter(num_heads)
        self.reset_parameters()

    def starting_points(self) -> dict[str, Tensor]:
        rates = [1 + 15 * ((h + 1) * GOLDEN % 1) for h in range(len(self.A_log))]
        return {"A_log": torch.tensor(rates, dtype=self.A_log.dtype).log()}

    def forward(self, x: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H"]]:
        """dt and log_decay."""
        dt = F.softplus(self.dt(x))
        return dt, -at_least_float32(self.A_log).exp() * dt


class HeadSkip(WideParameters):
    """y + scale_h x for every head h: the way past a memory (D of a state-space model), starting at 1."""

    def __init__(self, num_heads: int):
        super().__init__()
        self.weight = wide_parameter(num_heads)
        self.reset_parameters()

    def starting_points(self) -> dict[str, Tensor]:
        return {"weight": torch.ones_like(self.weight)}

    def forward(self, y: Float[Tensor, "B T H V"], x: Float[Tensor, "B T H V"]) -> Float[Tensor, "B T H V"]:
        return y + (self.weight[:, None] * x).to(y.dtype)


def no_weight_decay(model: nn.Module) -> Iterator[str]:
    """Names of the parameters that must not decay: those of modules marked `no_weight_decay` (norms, gates)."""
    for prefix, module in model.named_modules():
        if getattr(module, "no_weight_decay", False):
            for name, _ in module.named_parameters(recurse=False):
                yield f"{prefix}.{name}" if prefix else name


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) without biases; gate and up are one projection."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def rotate(x: Float[Tensor, "B T H d"], positions: Int[Tensor, "b T"], theta: float) -> Float[Tensor, "B T H d"]:
    """Rotary embedding (RoPE) of even width d: coordinates (i, i + d/2) turn by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    wide = at_least_float32(x)
    exponents = torch.arange(half, device=x.device, dtype=wide.dtype) / half
    angles = positions[..., None, None] * theta**-exponents  # [b, T, 1, d/2]
    cos, sin = angles.cos(), angles.sin()
    first, second = wide[..., :half], wide[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
