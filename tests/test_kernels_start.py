"""Launches are remembered by what Triton compiles for, and by nothing less."""

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks import host
from fastweight.kernels import start as module


class Compiled:
    def __init__(self, ran):
        self.ran = ran

    def __getitem__(self, grid):
        return lambda *arguments: self.ran.append((grid, arguments))


class Kernel(JITFunction):
    """Counts what would be compiled and what would run."""

    def __init__(self):
        self.arg_names = ["a", "b", "WIDTH"]
        self.looked, self.ran = [], []

    def __getitem__(self, grid):
        def look(*arguments, **options):
            self.looked.append((grid, arguments, options))
            return Compiled(self.ran)

        return look


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_compiled", {})
    return Kernel()


def test_a_second_call_skips_the_look(kernel):
    first, second = torch.zeros(8), torch.ones(8)
    module.start(kernel, (3, 2), first, 7, WIDTH=16, num_warps=4)
    module.start(kernel, (5,), second, 9, WIDTH=16, num_warps=4)
    assert len(kernel.looked) == 1
    grid, (tensor, number, width) = kernel.ran[0]
    assert grid == (5, 1, 1)
    assert tensor is second
    assert (number, width) == (9, 16)


TENSOR = torch.zeros(16)
OTHERS = {
    "type": TENSOR.double(),
    "alignment": TENSOR[1:],
    "nothing": None,
    "a number": 1.5,
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_kind_of_tensor_is_looked_at(kernel, what):
    for argument in (TENSOR, OTHERS[what], TENSOR):
        module.start(kernel, (1,), argument, 7, WIDTH=16)
    assert len(kernel.looked) == 2
    assert kernel.looked[1][1][0] is OTHERS[what]


@pytest.mark.parametrize("number", [1, 32, 2**31])
def test_numbers_that_triton_tells_apart_are_looked_at(kernel, number):
    for argument in (7, number, 9):
        module.start(kernel, (1,), TENSOR, argument, WIDTH=16)
    assert [arguments[1] for _, arguments, _ in kernel.looked] == [7, number]


def test_another_constant_or_device_is_looked_at(kernel, monkeypatch):
    module.start(kernel, (1,), TENSOR, 7, WIDTH=16)
    module.start(kernel, (1,), TENSOR, 7, WIDTH=32)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    module.start(kernel, (1,), TENSOR, 7, WIDTH=16)
    assert len(kernel.looked) == 3


def test_a_call_costs_the_host_little():
    """Launches replaced by nothing: what is left is counted in function calls, which no busy machine changes."""
    with host.no_launches():
        forward, train = host.both("falcon-1", calls=1)
    assert (forward.launches, train.launches) == (2, 4)
    assert forward.calls < 300
    assert train.calls < 700
