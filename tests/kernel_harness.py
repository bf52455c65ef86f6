"""What tests of the Triton kernels share: a case -> its inputs, the kernels and the float64 recurrence on them.

Values, final states and every gradient are compared. A case runs on the CPU in Triton's interpreter (`interpreted`, in
a process that `run_interpreted` starts) or on a CUDA device (`gpu`).
"""

from dataclasses import dataclass, replace

import pytest
import torch

import fastweight as fw
from fastweight.kernels import dispatch
from fastweight.memory.attention import DELTA_RULE, LINEAR_ATTENTION
from tests.interpreter import INTERPRETED

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that run_interpreted starts")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Largest relative RMS error of anything that comes out; bfloat16 has 8 bits, and each value passes four products.
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}

WIDTHS = [(64, 64), (128, 128), (128, 64), (16, 24), (80, 48), (256, 256)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# What is compiled for each pair of dtype and widths takes seconds, so not every pair: all widths in bfloat16, in the
# others one of each class (powers of two or not, K != V, narrow, too wide for one tile).
NUMBERS = [(torch.bfloat16, widths) for widths in WIDTHS] + [
    (torch.float16, (128, 64)),
    (torch.float16, (80, 48)),
    (torch.float32, (64, 64)),
    (torch.float32, (16, 24)),
    (torch.float32, (256, 256)),
]


@dataclass(frozen=True)
class Case:
    """One call: a rule (or a baseline with its own log-decay), its options, shapes, and what surrounds the tokens."""

    rule: str
    options: tuple[tuple[str, object], ...] = ()
    shape: tuple[int, int, int, int, int, int] = (1, 70, 1, 1, 16, 16)  # B T Hk H K V
    state: bool = False
    key: bool = False
    mask: bool = False
    cuts: tuple[int, ...] | None = None
    ridge: float = 1.0
    beta: float = 1.5
    zero_beta: bool = False
    no_gates: bool = False

    @property
    def baseline(self) -> bool:
        return self.rule in ("delta", "linear")


def case(rule: str, options: dict | None = None, **changes) -> Case:
    return Case(rule, tuple((options or {}).items()), **changes)


def rule_of(test: Case):
    if test.baseline:
        return DELTA_RULE if test.rule == "delta" else LINEAR_ATTENTION
    return fw.RULES[test.rule].replace(**dict(test.options))


def make(test: Case, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor | None]:
    """Random inputs; keys small where the step is given, so that the regression is stable."""
    B, T, Hk, H, K, V = test.shape
    random = torch.Generator().manual_seed(7)
    rule = rule_of(test)
    small = K**-0.5 if rule.step == "direct" else 1.0
    N = B if test.cuts is None else len(test.cuts) - 1

    def draw(*shape, like=torch.randn):
        return like(*shape, generator=random)

    beta = draw(B, T, H, *((V,) if rule.gain == "column" else ()), like=torch.rand) * test.beta
    if test.zero_beta:
        beta[:, ::3] = 0
    gate = draw(B, T, H, like=torch.rand) * test.ridge
    inputs = {
        "q": (draw(B, T, Hk, K) * K**-0.5).to(dtype),
        "k": (draw(B, T, Hk, K) * small).to(dtype),
        "v": draw(B, T, H, V).to(dtype),
        "beta": None if test.no_gates or test.rule == "linear" else beta,
        "gate": None if test.no_gates else -gate if test.baseline else gate,
        "S": draw(N, H, K, V) if test.state else None,
        "key": draw(N, Hk, K).to(dtype).float() if test.key else None,
    }
    return {name: None if value is None else value.to(device) for name, value in inputs.items()}


def surroundings(test: Case, device: str):
    B, T = test.shape[:2]
    N = B if test.cuts is None else len(test.cuts) - 1
    has_key = torch.arange(N, device=device) % 2 == 0 if test.key else None
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(1)) > 0.3).to(device) if test.mask else None
    cu = None if test.cuts is None else torch.tensor(test.cuts, device=device, dtype=torch.int32)
    return has_key, mask, cu


def kernel(test: Case, leaves: dict, around, rule=None):
    has_key, mask, cu = around
    gates = (None, leaves["gate"]) if test.baseline else (leaves["gate"], None)
    return dispatch.scan(
        leaves["q"], leaves["k"], leaves["v"], leaves["beta"], gates[0], rule or rule_of(test), log_decay=gates[1],
        S=leaves["S"], key=leaves["key"], has_key=has_key, mask=mask, cu_seqlens=cu,
    )  # fmt: skip


def judge(test: Case, leaves: dict, around):
    """The library's recurrence, one token at a time, in float64."""
    has_key, mask, cu = around
    rule, state = rule_of(test), leaves["S"]
    H, V = test.shape[3], test.shape[5]
    if test.key:
        N = len(leaves["key"])
        S = leaves["S"] if test.state else leaves["v"].new_zeros(N, H, leaves["k"].shape[-1], V)
        state = fw.State.fresh(S, rule, num_key_heads=test.shape[2])._replace(key=leaves["key"], has_key=has_key)
    common = {"form": "recurrent", "backend": "torch", "initial_state": state, "output_final_state": True}
    common |= {"cu_seqlens": cu, "mask": mask}
    q, k, v, beta, gate = (leaves[name] for name in ("q", "k", "v", "beta", "gate"))
    if test.rule == "delta":
        o, last = fw.delta_rule(q, k, v, beta, gate, **common)
    elif test.rule == "linear":
        o, last = fw.linear_attention(q, k, v, gate, **common)
    else:
        o, last = fw.fast_weight_attention(q, k, v, beta, gate, rule, **common)
    return o, last.S


def outcome(run, test: Case, inputs: dict, around, pull) -> dict[str, torch.Tensor]:
    """Values and gradients of one implementation, by name."""
    leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in inputs.items()}
    o, S = run(test, leaves, around)
    torch.autograd.backward([o, S], [pull[0].to(o.dtype), pull[1].to(S.dtype)])
    found = {"o": o.detach(), "final S": S.detach()}
    for name, leaf in leaves.items():
        if leaf is not None:
            assert leaf.grad is not None, f"no gradient of {name}"
            found[f"gradient of {name}"] = leaf.grad
    return found


def check(test: Case, dtype: torch.dtype, device: str) -> None:
    inputs, around = make(test, dtype, device), surroundings(test, device)
    B, T, _Hk, H, K, V = test.shape
    N = B if test.cuts is None else len(test.cuts) - 1
    random = torch.Generator().manual_seed(3)
    pull = torch.randn(B, T, H, V, generator=random).to(device, dtype), torch.randn(N, H, K, V, generator=random)
    pull = pull[0], pull[1].to(device)
    ours = outcome(kernel, test, inputs, around, pull)
    wide = {name: None if value is None else value.double() for name, value in inputs.items()}
    theirs = outcome(judge, test, wide, around, pull)
    assert ours.keys() == theirs.keys()
    wrong = {}
    for name, expected in theirs.items():
        got = ours[name].double()
        assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        scale = expected.double().norm()
        error = (got - expected.double()).norm() / scale if scale > 0 else got.norm()
        if not error <= ALLOWED[dtype]:
            wrong[name] = float(error)
    assert not wrong, f"relative errors above {ALLOWED[dtype]} for {test}: {wrong}"


def at(test: Case, *shape: int) -> Case:
    return replace(test, shape=shape)
