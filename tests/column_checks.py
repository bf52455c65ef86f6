"""What holds of the kernels with a gain per value column of either class: falcon-2 and falcon-2a."""

import torch

import fastweight as fw
from fastweight.kernels import dispatch
from tests.kernel_harness import case, kernel, make, outcome, rule_of, surroundings


def given_up(monkeypatch) -> list[int]:
    """Grows by how many programs and chunks each launch of falcon-2a's walks on Hopper leaves to the exact kernels."""
    from fastweight.kernels import launch_hopper_columns

    noted: list[int] = []
    for way in ("forward", "backward"):
        real = getattr(launch_hopper_columns, way)

        def counted(*arguments, real=real):
            wild = real(*arguments)
            noted.append(int(wild.sum()))
            return wild

        monkeypatch.setattr(launch_hopper_columns, way, counted)
    return noted


def decays_or_vanishes(test, dtype, device):
    """Inputs whose carries are 0.6 or, in other columns of the same token, the floor: no carry is near its clamp."""
    inputs = make(test, dtype, device)
    inputs["gate"] = torch.full_like(inputs["gate"], 4.0)
    inputs["beta"] = torch.where(inputs["beta"] < 0.75, 0.5, 1.5)
    return inputs


def check_one_beta_for_all_columns(rule: str, scalar: str, T: int) -> None:
    """The same numbers, bit for bit: a beta per head goes to the kernels of the scalar rule."""
    test = case(rule, shape=(1, T, 1, 1, 16, 16))
    inputs = make(test, torch.float32, "cpu")
    inputs["beta"] = inputs["beta"][..., 0].contiguous()
    around, pull = (None, None, None), (torch.ones(1, T, 1, 16), torch.ones(1, 1, 16, 16))
    expected = outcome(kernel, case(scalar, shape=test.shape), inputs, around, pull)
    for name, value in outcome(kernel, test, inputs, around, pull).items():
        assert torch.equal(value, expected[name]), name


def check_without_tokens(rule: str) -> None:
    """The state comes back."""
    q, v, S = torch.zeros(2, 0, 1, 16), torch.zeros(2, 0, 1, 8), torch.randn(2, 1, 16, 8)
    o, last = dispatch.scan(q, q, v, v, None, fw.RULES[rule], S=S)
    assert o.shape == v.shape
    assert torch.equal(last, S)


def check_compiles_whole(name: str) -> None:
    """One graph: the shapes that tracing is told are those that come out."""
    test = case(name, shape=(1, 5, 1, 1, 16, 16))
    inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
    pull, rule = (torch.ones(1, 5, 1, 16), torch.ones(1, 1, 16, 16)), rule_of(test)
    compiled = torch.compile(lambda leaves: kernel(test, leaves, around, rule), fullgraph=True, backend="aot_eager")
    expected = outcome(kernel, test, inputs, around, pull)
    for part, value in outcome(lambda _test, leaves, _around: compiled(leaves), test, inputs, around, pull).items():
        assert torch.equal(value, expected[part]), part
