"""What the CPU benchmark times, as data: shapes, contestants, races and their targets.

Every contestant computes its memory from the same tensors (q, k, v, beta, lam) and is judged by the float64 recurrence
of its rule (least squares by its normal equations). Falcon-1 written for an op that takes the residual on the *decayed*
state needs gain eta / gamma and target gamma * v; that translation (`as_delta_rule`) is differentiable for the gate and
done before the clock starts, so `delta_rule` and the transformers fallback are timed without the step sizes that
`falcon-1` computes inside its call.

Trap: the transformers fallback multiplies q by K**-0.5. Ours scales nothing, so its q is scaled up beforehand.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Literal

import torch
from torch import Tensor

import fastweight as fw
from benchmarks.gate import Tensors

Run = Callable[[Tensors, bool], tuple[Tensor, Tensor | None]]
Mode = Literal["fwd", "fwd+bwd"]
MODES: tuple[Mode, ...] = ("fwd", "fwd+bwd")


@dataclass(frozen=True)
class Shape:
    """Batch, tokens, heads, and the width of keys and values alike."""

    B: int
    T: int
    H: int
    D: int

    def __str__(self) -> str:
        return f"({self.B}, {self.T}, {self.H}, {self.D})"


@dataclass(frozen=True)
class Target:
    """A bound on the time relative to the race's baseline: a speed-up of at least, or a cost of at most, `bound`."""

    kind: Literal["speed-up", "cost"]
    bound: float

    def __str__(self) -> str:
        return f">= {self.bound:g}x" if self.kind == "speed-up" else f"<= {self.bound:g}x"

    def met(self, ratio: float) -> bool:
        return ratio >= self.bound if self.kind == "speed-up" else ratio <= self.bound


@dataclass(frozen=True)
class Contestant:
    """One way to compute a memory: run(prepare(inputs), final_state) -> (o, S or None).

    rule: decides the inputs. judge: what it must equal in float64; None is the recurrence of the rule.
    """

    rule: str
    run: Run
    prepare: Callable[[Tensors], Tensors] = dict
    judge: Run | None = None


@dataclass(frozen=True)
class Race:
    """Contestants timed side by side at one shape; ratios are against `baseline`."""

    title: str
    shape: Shape
    baseline: str
    contestants: tuple[str, ...]
    kind: Literal["speed-up", "cost"]
    targets: dict[tuple[str, Mode], float]
    modes: tuple[Mode, ...] = MODES

    def target(self, contestant: str, mode: Mode) -> Target | None:
        bound = self.targets.get((contestant, mode))
        return None if bound is None else Target(self.kind, bound)


def make_inputs(shape: Shape, rule: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random q, unit keys, values, beta in (0, 1) and lam in (0, 0.2) (per column where the rule's gain is)."""
    generator = torch.Generator().manual_seed(seed)
    B, T, H, D = shape.B, shape.T, shape.H, shape.D

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    column = (D,) if fw.RULES[rule].gain == "column" else ()
    inputs = {
        "q": torch.nn.functional.normalize(normal(B, T, H, D), dim=-1),
        "k": torch.nn.functional.normalize(normal(B, T, H, D), dim=-1),
        "v": normal(B, T, H, D),
        "beta": normal(B, T, H, *column).sigmoid(),
        "lam": 0.2 * normal(B, T, H).sigmoid(),
    }
    return {name: value.to(dtype) for name, value in inputs.items()}


def as_delta_rule(inputs: Tensors) -> dict[str, Tensor]:
    """Falcon-1's tensors for a gated delta rule (residual on the decayed state): x, gamma v, eta / gamma, log gamma."""
    rule = fw.RULES["falcon-1"]
    x = torch.nn.functional.pad(inputs["k"][:, :-1], (0, 0, 0, 0, 1, 0))  # next-latent: the previous key, none at first
    eta = inputs["beta"] / (x.square().sum(-1) + inputs["lam"] + rule.eps)
    first = torch.zeros_like(eta)
    first[:, 0] = 1
    eta = eta * (1 - first)
    gamma = 1 - (eta * inputs["lam"]).clamp(max=1 - rule.decay_floor)
    return {
        "q": inputs["q"],
        "x": x,
        "v": gamma[..., None] * inputs["v"],
        "beta": eta / gamma,
        "log_decay": gamma.log(),
    }


def as_transformers(inputs: Tensors) -> dict[str, Tensor]:
    """The same with q scaled so that the fallback's own K**-0.5 cancels."""
    tensors = as_delta_rule(inputs)
    return tensors | {"q": tensors["q"] * tensors["q"].shape[-1] ** 0.5}


def run_rule(
    inputs: Tensors, final_state: bool, *, rule: str, form: str = "auto", chunk_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """The public op, called as a user would."""
    q, k, v, beta, lam = (inputs[name] for name in ("q", "k", "v", "beta", "lam"))
    o, state = fw.fast_weight_attention(
        q, k, v, beta, lam, rule, form=form, chunk_size=chunk_size, output_final_state=final_state
    )
    return o, None if state is None else state.S


def run_delta_rule(
    inputs: Tensors, final_state: bool, *, chunk_size: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Our gated delta rule."""
    o, state = fw.delta_rule(
        inputs["q"],
        inputs["x"],
        inputs["v"],
        inputs["beta"],
        inputs["log_decay"],
        chunk_size=chunk_size,
        output_final_state=final_state,
    )
    return o, None if state is None else state.S


def run_transformers(inputs: Tensors, final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The torch fallback of transformers, unwrapped so that an installed kernel package cannot take its place."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return unwrap(torch_chunk_gated_delta_rule)(
        inputs["q"],
        inputs["x"],
        inputs["v"],
        g=inputs["log_decay"],
        beta=inputs["beta"],
        output_final_state=final_state,
        use_qk_l2norm_in_kernel=False,
    )


def without_gates(inputs: Tensors) -> dict[str, Tensor]:
    """For a solver without steps."""
    return {name: inputs[name] for name in ("q", "k", "v")}


def run_online_ridge(inputs: Tensors, final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The reference solver that is falcon-1 without the floor under the carry."""
    q, k, v, beta, lam = (inputs[name] for name in ("q", "k", "v", "beta", "lam"))
    eps = fw.RULES["falcon-1"].eps
    o, state = fw.online_ridge(q, k, v, beta, lam, eps=eps, output_final_state=final_state)
    return o, None if state is None else state.S


def run_least_squares(inputs: Tensors, final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The exact solution of the cumulative ridge problem, lambda = 1, token by token."""
    o, state = fw.recursive_least_squares(inputs["q"], inputs["k"], inputs["v"], output_final_state=final_state)
    return o, None if state is None else state.S


def solve_least_squares(inputs: Tensors, final_state: bool) -> tuple[Tensor, Tensor | None]:
    """The same from its normal equations, one solve per token: the judge of the recursion."""
    x = torch.nn.functional.pad(inputs["k"][:, :-1], (0, 0, 0, 0, 1, 0))
    moments = torch.einsum("bthk,bthl->bthkl", x, x).cumsum(1) + torch.eye(x.shape[-1], dtype=x.dtype)
    S = torch.linalg.solve(moments, torch.einsum("bthk,bthv->bthkv", x, inputs["v"]).cumsum(1))
    return torch.einsum("bthkv,bthk->bthv", S, inputs["q"]), S[:, -1] if final_state else None


def contestants(chunk_size: int | None = None) -> dict[str, Contestant]:
    """Everything that can be raced, by name; `chunk_size` overrides the op's own choice (for tuning)."""
    rules = {name: Contestant(name, partial(run_rule, rule=name, chunk_size=chunk_size)) for name in fw.RULES}
    return rules | {
        "delta_rule": Contestant("falcon-1", partial(run_delta_rule, chunk_size=chunk_size), as_delta_rule),
        "transformers": Contestant("falcon-1", run_transformers, as_transformers),
        "falcon-1 recurrent": recurrence("falcon-1"),
        "online_ridge": Contestant("falcon-1", run_online_ridge),
        "recursive_least_squares": Contestant("falcon-1", run_least_squares, without_gates, solve_least_squares),
    }


def recurrence(rule: str) -> Contestant:
    """The judge: the same rule one token at a time."""
    return Contestant(rule, partial(run_rule, rule=rule, form="recurrent"))


PEER_RACE = ("transformers", "falcon-1", "delta_rule")
RACES = (
    Race(
        "Against the transformers torch fallback",
        Shape(1, 4096, 8, 64),
        "transformers",
        PEER_RACE,
        "speed-up",
        {(name, mode): bound for name in PEER_RACE[1:] for mode, bound in zip(MODES, (1.2, 3.0), strict=True)},
    ),
    Race(
        "Against the transformers torch fallback",
        Shape(8, 1024, 6, 64),
        "transformers",
        PEER_RACE,
        "speed-up",
        {(name, mode): bound for name in PEER_RACE[1:] for mode, bound in zip(MODES, (1.2, 1.6), strict=True)},
    ),
    Race(
        "The rules against falcon-1",
        Shape(4, 1024, 4, 64),
        "falcon-1",
        ("falcon-1", "falcon-2", "falcon-3", "falcon-1a", "falcon-2a", "falcon-3a"),
        "cost",
        {
            ("falcon-2", "fwd+bwd"): 5.0,
            ("falcon-3", "fwd+bwd"): 3.5,
            ("falcon-1a", "fwd+bwd"): 0.8,
            ("falcon-2a", "fwd+bwd"): 3.0,
            ("falcon-3a", "fwd+bwd"): 1.2,
        },
    ),
    Race(
        "The reference solvers, token by token",
        Shape(1, 256, 4, 64),
        "falcon-1 recurrent",
        ("falcon-1 recurrent", "online_ridge", "recursive_least_squares", "falcon-1"),
        "cost",
        {},
    ),
)

# Gradients through thousands of recurrent steps do not fit in memory: the gate takes them over several ragged chunks.
GATE_TOKENS = 333
TOLERANCE = 1e-4  # float32 against the float64 recurrence, relative
SCALING_SHAPE = Shape(1, 0, 4, 64)
SCALING_TOKENS = (1024, 2048, 4096, 8192)
MAX_TIME_EXPONENT = 1.15  # time ~ T**p over SCALING_TOKENS; a backward quadratic in the number of chunks bends upwards
MAX_MEMORY_EXPONENT = 1.05
