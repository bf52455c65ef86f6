"""Seeded inputs for the memory's tests, and the two runs that every one of them compares.

`draw(...)` makes one problem (q, k, v, beta, lam, S0 and the weights of a scalar loss); `run(...)` calls a function on
leaf copies of it and returns outputs, final state and the gradient of that loss for every input; `attend(...)` is the
public operator as such a function. Values and gradients are always compared together, by `check`.
"""

from typing import NamedTuple

import torch
from conftest import assert_close
from longhand import longhand
from torch import Tensor

import fastweight as fw

NAMES = ("q", "k", "v", "beta", "lam", "S0")


class Problem(NamedTuple):
    """Leaf inputs; any of beta, lam and S0 may be None. w_o and w_S weigh the loss on outputs and final state."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    lam: Tensor | None
    S0: Tensor | None
    w_o: Tensor
    w_S: Tensor


class Result(NamedTuple):
    o: Tensor
    S: Tensor | None
    gradients: dict[str, Tensor]


def draw(rule, B=2, T=11, H=2, Hk=None, K=4, V=3, *, seed=0, dtype=torch.float64, lam_scale=0.5, drop=()) -> Problem:
    """A random problem with beta in (0.1, 1.9), lam in (0, lam_scale); direct steps are kept inside 2 / |x|^2."""
    generator = torch.Generator().manual_seed(seed)
    Hk = Hk or H

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator, dtype=torch.float64)

    columns = (V,) if rule.gain == "column" else ()
    q, k, v = normal(B, T, Hk, K), normal(B, T, Hk, K), normal(B, T, H, V)
    beta = uniform(0.1, 1.9, B, T, H, *columns)
    if rule.step == "direct":
        beta = 0.1 * beta
    lam = uniform(0.0, lam_scale, B, T, H)
    values = {"q": q, "k": k, "v": v, "beta": beta, "lam": lam}
    values = {name: None if name in drop else value.to(dtype) for name, value in values.items()}
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    S0 = None if "S0" in drop else normal(B, H, K, V).to(state_dtype)
    # The weights are what arrives as gradients of o and S: numbers of those dtypes, so that they are not rounded again.
    w_o, w_S = normal(B, T, H, V).to(dtype).double(), normal(B, H, K, V).to(state_dtype).double()
    return Problem(**values, S0=S0, w_o=w_o, w_S=w_S)


def leaves(problem: Problem) -> dict[str, Tensor | None]:
    """Fresh leaf copies that require grad."""
    values = ((name, getattr(problem, name)) for name in NAMES)
    return {name: None if u is None else u.detach().clone().requires_grad_() for name, u in values}


def loss_of(o, S, problem: Problem, use=("o", "S")) -> Tensor:
    """The weighted sum of outputs and final state, in float64."""
    loss = torch.zeros((), dtype=torch.float64)
    if "o" in use:
        loss = loss + (o.double() * problem.w_o).sum()
    if "S" in use:
        loss = loss + (S.double() * problem.w_S).sum()
    return loss


def run(function, problem: Problem, use=("o", "S")) -> Result:
    """function(q, k, v, beta, lam, S0) -> (o, S), with the gradients of the loss; an unused input counts as zero."""
    inputs = leaves(problem)
    o, S = function(**inputs)
    wanted = {name: u for name, u in inputs.items() if u is not None}
    loss = loss_of(o, S, problem, use)
    found = [None] * len(wanted)
    if loss.requires_grad:  # not so when there are no tokens and no state
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(u) if g is None else g for (name, u), g in zip(wanted.items(), found, strict=True)
    }
    return Result(o.detach(), None if S is None else S.detach(), gradients)


def attend(rule, form="auto", chunk_size=None, **keywords):
    """The operator as a function for `run`, its promises about dtypes checked on the way."""

    def function(q, k, v, beta, lam, S0):
        o, state = fw.fast_weight_attention(
            q, k, v, beta, lam, rule, form=form, chunk_size=chunk_size, backend="torch",
            initial_state=S0, output_final_state=True, **keywords,
        )  # fmt: skip
        assert o.dtype == v.dtype, f"o is {o.dtype}, expected the dtype of v, {v.dtype}"
        kept = torch.float64 if v.dtype == torch.float64 else torch.float32
        assert state.S.dtype == kept, f"S is {state.S.dtype}, expected {kept}"
        return o, state.S

    return function


def expect(problem: Problem, rule, mask=None, use=("o", "S")) -> Result:
    """The longhand's answer, on float64 copies of the very same (already rounded) numbers."""
    doubled = Problem(*(None if u is None else u.double() for u in problem))

    def function(q, k, v, beta, lam, S0):
        result = longhand(q, k, v, beta, lam, rule, S0, mask)
        return result.o, result.S

    return run(function, doubled, use)


def check(actual: Result, expected: Result, dtype: torch.dtype, label: str = "") -> None:
    """Outputs, final state and every gradient, each against the table."""
    assert_close(actual.o, expected.o, dtype, "forward", f"{label} o")
    if expected.S is not None and actual.S is not None:
        assert_close(actual.S, expected.S, dtype, "state", f"{label} S")
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        kind = "state" if name == "S0" else "gradient"
        assert_close(actual.gradients[name], gradient, dtype, kind, f"{label} d{name}")
