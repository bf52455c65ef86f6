"""Two ways to compute the same thing -> a verdict on every value and every gradient.

Runs a candidate and a judge on the same inputs and compares each output and the gradient of each input. The judge may
be slower, longer and in a wider dtype. Nothing here knows about CPU, GPU or any rule, so every benchmark can use it.

Traps: an input that does not reach the output has gradient zero, not None; NaN anywhere is a red gate; errors are
relative to the largest entry of the judge's tensor, so a small wrong entry in a large tensor can hide below the
tolerance (the tests look at those; this gate guards the clock).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Op = Callable[[Tensors], Tensors]

FLOOR = 1e-8  # an all-zero judge tensor compares absolutely, in units of this


@dataclass(frozen=True)
class Verdict:
    """Relative error of each output and gradient of one comparison."""

    title: str
    errors: dict[str, float]
    tolerance: float

    @property
    def worst(self) -> str:
        """Name of the tensor with the largest error."""
        return max(self.errors, key=self.errors.__getitem__)

    @property
    def green(self) -> bool:
        return self.errors[self.worst] <= self.tolerance

    def __str__(self) -> str:
        sign = "<=" if self.green else ">"
        return f"{self.title}: {self.worst} {self.errors[self.worst]:.1e} {sign} {self.tolerance:.0e}"


def relative_error(got: Tensor, expected: Tensor) -> float:
    """max |got - expected| / max |expected|, in float64; infinite when anything is not finite or a shape differs."""
    if got.shape != expected.shape or not bool(torch.isfinite(got).all() and torch.isfinite(expected).all()):
        return float("inf")
    if got.numel() == 0:
        return 0.0
    expected = expected.double()
    scale = max(expected.abs().max().item(), FLOOR)
    return (got.to(expected.device).double() - expected).abs().max().item() / scale


def values_and_gradients(op: Op, inputs: Tensors, *, seed: int = 0) -> dict[str, Tensor]:
    """Outputs of `op` and, under the names "d NAME", gradients of a fixed random projection of all of them."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
    outputs = op(leaves)
    generator = torch.Generator().manual_seed(seed)
    total: Tensor | None = None
    for output in outputs.values():
        probe = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        part = (output * probe).sum()
        total = part if total is None else total + part
    assert total is not None, "an op must return at least one output"
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    results = {name: output.detach() for name, output in outputs.items()}
    results.update({f"d {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)})
    return results


def compare(title: str, got: Tensors, expected: Tensors, tolerance: float) -> Verdict:
    """Verdict over the names in `expected`; a name that `got` lacks is an infinite error."""
    errors = {
        name: relative_error(got[name], value) if name in got else float("inf") for name, value in expected.items()
    }
    return Verdict(title, errors, tolerance)


def check(
    title: str,
    candidate: Op,
    judge: Op,
    inputs: Tensors,
    tolerance: float,
    *,
    judge_dtype: torch.dtype | None = None,
    gradients: bool = True,
) -> Verdict:
    """Run both on the same numbers (the judge's copies cast to `judge_dtype`) and compare."""
    judged = {name: value.to(judge_dtype) if judge_dtype else value for name, value in inputs.items()}
    if gradients:
        return compare(title, values_and_gradients(candidate, inputs), values_and_gradients(judge, judged), tolerance)
    with torch.no_grad():
        return compare(title, candidate(inputs), judge(judged), tolerance)
