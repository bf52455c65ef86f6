"""What the GPU benchmark times, as data: shapes, ops, peers, regimes, targets, and the floor of each op.

An op is some mathematics (inputs, judge, floor); a case is somebody's code for it, ours or a library's. Everyone gets
the same bfloat16 tokens and float32 gates and is judged by the float64 recurrence of the op.

Traps: peers are imported in the process that runs them, at scale 1. FLA must be imported with FLA_FLASH_QLA=0, or it
hands its call to FlashQLA; it may hand its gated backward to TileLang, without which it refuses that on Hopper with
Triton before 3.7.1. It tunes for minutes at every new head count.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastweight as fw
from fastweight.memory.attention import DELTA_RULE, LINEAR_ATTENTION
from fastweight.memory.rules import Rule

Given = dict[str, Any]
Shape = tuple[int, int, int, int]  # B T H D
SHAPES: tuple[Shape, ...] = ((64, 1024, 6, 128), (16, 4096, 16, 128), (1, 32768, 16, 128), (64, 1024, 12, 64))
ALLOWED = 1.2e-2  # relative RMS error in bfloat16
CHUNK = 64
LONGEST_RECURRENCE = 500  # tokens


@dataclass(frozen=True)
class Op:
    """A rule, whether its gate is a log-decay given from outside, and how many pairs a token writes one after another.

    With more than one, token t decays once, writes pairs t * writes to (t + 1) * writes - 1, and then reads.
    """

    rule: Rule
    own_gates: bool = False
    writes: int = 1

    @property
    def column(self) -> bool:
        return self.rule.gain == "column"

    @property
    def regression(self) -> bool:
        return self.rule.objective == "regression"


OPS = {
    "falcon-1": Op(fw.RULES["falcon-1"]),
    "gated delta rule": Op(DELTA_RULE, own_gates=True),
    "falcon-1a": Op(fw.RULES["falcon-1a"]),
    "linear attention": Op(LINEAR_ATTENTION, own_gates=True),
    "falcon-3a": Op(fw.RULES["falcon-3a"]),
    "falcon-2a": Op(fw.RULES["falcon-2a"]),
    "falcon-2": Op(fw.RULES["falcon-2"]),
    "falcon-3": Op(fw.RULES["falcon-3"]),
    "falcon-3, R = 8": Op(fw.RULES["falcon-3"].replace(window=8)),
    "gated delta product": Op(DELTA_RULE, own_gates=True, writes=4),
}
THEIRS = ("gated delta product",)  # ops that only peers are timed at

# How tokens and gates are drawn; every op of ours must pass in all of them.
REGIMES: dict[str, dict[str, float]] = {
    "usual": {},
    "strong decay": {"gate": 80.0},
    "gain near 2": {"least_beta": 1.9},
    "keys of length 4": {"length": 4.0},
    "few keys": {"kinds": 8.0},
}


def inputs(op: Op, shape: Shape, regime: str = "usual", seed: int = 0, device: str = "cuda") -> Given:
    """q, k, v in bfloat16 with unit keys, beta and gate (lambda, or a log-decay) in float32, all with gradients."""
    B, T, H, D = shape
    pairs = T * op.writes
    how, random = REGIMES[regime], torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, device=device)

    def unit(x: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    length = how.get("length", 1.0)
    least = how.get("least_beta", 0.0)
    beta = least + (2.0 - least if least else 1.0) * torch.sigmoid(draw(B, pairs, H, *((D,) if op.column else ())))
    if op.rule.step == "direct":
        beta = beta / length**2  # a given step must stay below 2 / |k|^2
    scale = how.get("gate", 1.0)
    gate = torch.nn.functional.logsigmoid(draw(B, T, H)) / 16 if op.own_gates else 0.1 * torch.sigmoid(draw(B, T, H))
    keys = unit(draw(B, pairs, H, D))
    if "kinds" in how:  # the same few again and again, as text has them
        keys = keys[:, torch.randint(int(how["kinds"]), (pairs,), generator=random, device=device) % pairs]
    given = {
        "q": unit(draw(B, T, H, D)).bfloat16(),
        "k": (length * keys).bfloat16(),
        "v": draw(B, pairs, H, D).bfloat16(),
        "beta": None if op.rule is LINEAR_ATTENTION else beta,
        "gate": scale * gate,
    }
    return {name: None if value is None else value.requires_grad_() for name, value in given.items()}


def _among(tensor: Tensor, writes: int, place: int) -> Tensor:
    """[B, T, ...] at one of every `writes` places of [B, T * writes, ...], zeros at the others."""
    parts = [torch.zeros_like(tensor)] * writes
    parts[place] = tensor
    return torch.stack(parts, 2).flatten(1, 2)


def public(op: Op, given: Given, **how: Any) -> Tensor:
    """The op through the library's public functions."""
    q, k, v, beta, gate = given.values()
    if op.writes > 1:
        q, gate = _among(q, op.writes, -1), _among(gate, op.writes, 0)
    if op.rule is DELTA_RULE:
        return fw.delta_rule(q, k, v, beta, gate, **how)[0][:, op.writes - 1 :: op.writes]
    if op.rule is LINEAR_ATTENTION:
        return fw.linear_attention(q, k, v, gate, **how)[0]
    return fw.fast_weight_attention(q, k, v, beta, gate, op.rule, **how)[0]


def judge(op: Op, given: Given) -> Tensor:
    """The recurrence, one token at a time, in the dtype of what is given; if that is long, the torch chunk form."""
    form = "recurrent" if given["v"].shape[1] <= LONGEST_RECURRENCE else "chunk"
    return public(op, given, form=form, backend="torch")


@dataclass(frozen=True)
class Case:
    """Somebody's code for an op.

    make: imports what it needs and returns the call (q, k, v, beta, gate) -> o. judged: whether it computes the op
    itself (softmax attention stands beside it for scale only). tunes: chooses among configurations, or compiles for
    minutes, at every new number of heads; quiet: and does not use the device until it has done so. small: timed at the
    first and the last of SHAPES alone, because it takes long.
    """

    label: str
    op: str
    make: Callable[[], Callable[[Given], Tensor]]
    peer: bool = True
    judged: bool = True
    trains: bool = True
    tunes: bool = False
    quiet: bool = False
    small: bool = False
    widths: tuple[int, ...] = (64, 128)

    def shapes(self) -> list[Shape]:
        """Those of SHAPES that this case is timed at."""
        shapes = (SHAPES[0], SHAPES[-1]) if self.small else SHAPES
        return [shape for shape in shapes if shape[3] in self.widths]


def _ours(name: str) -> Callable[[], Callable[[Given], Tensor]]:
    return lambda: lambda given: public(OPS[name], given, backend="triton")


def _torch_form(name: str) -> Callable[[], Callable[[Given], Tensor]]:
    return lambda: lambda given: public(OPS[name], given, form="chunk", backend="torch")


def _softmax() -> Callable[[Given], Tensor]:
    def call(given: Given) -> Tensor:
        q, k, v = (given[key].transpose(1, 2) for key in ("q", "k", "v"))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return call


def _delta_of(module: str) -> Callable[[], Callable[[Given], Tensor]]:
    def make() -> Callable[[Given], Tensor]:
        os.environ["FLA_FLASH_QLA"] = "0"
        rule = importlib.import_module(module).chunk_gated_delta_rule

        def call(given: Given) -> Tensor:
            q, k, v, beta, gate = given.values()
            return rule(q, k, v, g=gate, beta=beta, scale=1.0)[0]

        return call

    return make


def _delta_product() -> Callable[[Given], Tensor]:
    os.environ["FLA_FLASH_QLA"] = "0"
    product = importlib.import_module("fla.ops.gated_delta_product").chunk_gated_delta_product

    def call(given: Given) -> Tensor:
        q, k, v, beta, gate = given.values()
        return product(q, k, v, gate, beta, num_householder=k.shape[1] // q.shape[1], scale=1.0)[0]

    return call


def _simple_gla() -> Callable[[Given], Tensor]:
    os.environ["FLA_FLASH_QLA"] = "0"
    attention = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

    def call(given: Given) -> Tensor:
        return attention(given["q"], given["k"], given["v"], g=given["gate"], scale=1.0)[0]

    return call


CASES = {
    case.label: case
    for case in (
        *(Case(name, name, _ours(name), peer=False) for name in OPS if name not in THEIRS),
        Case("falcon-2, torch form", "falcon-2", _torch_form("falcon-2"), small=True),
        Case("falcon-3, torch form", "falcon-3", _torch_form("falcon-3"), small=True),
        Case("SDPA, causal", "gated delta rule", _softmax, judged=False),
        Case(
            "FlashQLA gated delta rule",
            "gated delta rule",
            _delta_of("flash_qla"),
            widths=(128,),
            tunes=True,
            quiet=True,
        ),
        # FLA refuses the gated backward of simple_gla on Hopper with this Triton.
        Case("FLA simple GLA", "linear attention", _simple_gla, trains=False, tunes=True),
        Case("FLA gated delta rule", "gated delta rule", _delta_of("fla.ops.gated_delta_rule"), tunes=True),
        Case("FLA gated delta product", "gated delta product", _delta_product, tunes=True),
    )
}


def slice_of(shape: Shape) -> Shape:
    """A shape that float64 can judge and that takes the same way through the code (long ones go in pieces)."""
    _B, _T, H, D = shape
    return (1, 2500, 2, D) if shape[0] == 1 else (2, 140, H, D)


def cost(op: Op, shape: Shape) -> tuple[tuple[float, float], tuple[float, float]]:
    """(bytes, operations) of a forward and of forward + backward: inputs read, outputs written once, chunks of 64."""
    B, T, H, D = shape
    rows = B * T * H
    gates, gate_grads = (4 * D + 4, 8 * D + 8) if op.column else (4 * (1 + op.writes), 12 * (1 + op.writes))
    forward = rows * (2 * (1 + op.writes) * 2 * D + gates)
    train = forward + rows * ((3 + 4 * op.writes) * 2 * D + gate_grads)
    # State read and written, scores and their use: causal halves are counted in full, as the hardware computes them.
    work = rows * 2 * (1 + op.writes) * (D * D + CHUNK * D)
    if op.regression:
        work += rows * op.writes * 2 * (D * D + CHUNK * D)
    return (forward, work), (train, 3.5 * work)


def floors(op: Op, shape: Shape, rates: dict[str, float]) -> tuple[float, float]:
    """Milliseconds below which no forward and no forward + backward can go, at the rates measured in the run."""
    bound = [max(b / rates["copy_bytes_per_s"], w / rates["bf16_flop_per_s"]) for b, w in cost(op, shape)]
    return 1e3 * bound[0], 1e3 * bound[1]


@dataclass(frozen=True)
class Target:
    """`label` must take at most `most` times what `against` takes, in `mode`; shapes: None is all that both have."""

    label: str
    mode: str  # "forward" or "train"
    most: float
    against: str
    width: int = 128


TARGETS = (
    Target("falcon-1", "train", 1 / 1.1, "FlashQLA gated delta rule"),
    Target("gated delta rule", "train", 1 / 1.1, "FlashQLA gated delta rule"),
    Target("falcon-1", "forward", 1.0, "FlashQLA gated delta rule"),
    Target("falcon-1", "train", 1 / 2.5, "FLA gated delta rule"),
    Target("gated delta rule", "train", 1 / 2.5, "FLA gated delta rule"),
    Target("falcon-1a", "train", 0.65, "falcon-1"),
    Target("linear attention", "train", 0.65, "falcon-1"),
    Target("falcon-1a", "forward", 1 / 1.8, "FLA simple GLA"),
    Target("falcon-3a", "train", 1.15, "falcon-1a"),
    Target("falcon-2a", "train", 1.3, "falcon-1a"),
    Target("falcon-1", "train", 1 / 1.5, "FLA gated delta rule", width=64),
    *(
        Target(label, "train", most, against, width)
        for width in (128, 64)
        for label, most in (("falcon-2", 1.6), ("falcon-3", 2.2), ("falcon-3, R = 8", 3.5))
        for most, against in ((most, "falcon-1"), (1.0, "FLA gated delta product"))
    ),
    *(
        Target(label, "train", 0.1, f"{label}, torch form", width)
        for width in (128, 64)
        for label in ("falcon-2", "falcon-3")
    ),
)
