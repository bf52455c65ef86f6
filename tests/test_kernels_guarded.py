"""Every address of the Triton kernels: inside its tensor, and no place that two programs of a launch share.

Awkward small shapes through whole calls with gradients, and the first and last programs of calls so large that 32 bits
do not count their elements, in memory that is never touched elsewhere.
"""

import numpy as np
import pytest
import torch

import fastweight as fw
from fastweight.kernels import dispatch
from tests.interpreter import INTERPRETED, run_interpreted
from tests.kernel_harness import case, interpreted, kernel, make, outcome, surroundings


@pytest.fixture(name="guarded")
def guarded_launches():
    from tests import guarded

    return guarded


CUTS = {"cuts": (0, 1, 1, 4, 20, 20), "key": True}
BEFORE = {"timing": "read-before-write"}
CASES = [
    case("falcon-1", shape=(1, 20, 1, 2, 24, 17), **CUTS),
    case("falcon-1a", {"pairing": "same-step"}, shape=(1, 66, 1, 1, 24, 17), mask=True),
    case("falcon-2", shape=(1, 5, 1, 1, 24, 17), cuts=(0, 0, 1, 5), key=True),
    case("falcon-2a", shape=(1, 20, 1, 1, 16, 17), **CUTS),
    case("falcon-3a", {"window": 8} | BEFORE, shape=(1, 20, 1, 1, 24, 17), cuts=(0, 1, 1, 20)),
    case("falcon-3", shape=(1, 19, 1, 1, 16, 17)),  # the last block has fewer tokens than a window
    case("falcon-3", {"window": 8} | BEFORE, shape=(1, 10, 1, 1, 16, 16), cuts=(0, 1, 1, 10, 10)),
]


@interpreted
@pytest.mark.parametrize("test", CASES, ids=lambda test: f"{test.rule}-{CASES.index(test)}")
def test_addresses_at_awkward_shapes(guarded, test):
    inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
    B, T, _Hk, H, K, V = test.shape
    pull = torch.ones(B, T, H, V), torch.ones(B if test.cuts is None else len(test.cuts) - 1, H, K, V)
    with guarded.guarded() as ran:
        found = outcome(kernel, test, inputs, around, pull)
    assert ran["forward"]
    assert all(torch.isfinite(value).all() for value in found.values())


def first_and_last(_kernel, grid):
    return sorted({(0, 0, 0), tuple(n - 1 for n in grid)})


# Sequences and tokens of each, for 16 heads of 128: states of 2^31 elements in all.
LARGE = {"falcon-1": (4096, 128, {}), "falcon-3": (4096, 16, {"window": 8})}


@interpreted
@pytest.mark.parametrize("name", LARGE)
def test_last_programs_of_large_calls(guarded, name, monkeypatch):
    """At bfloat16's tiles and strides. Memory that nobody writes is zero here, and takes no room."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    B, T, options = LARGE[name]
    rule = fw.RULES[name].replace(**options)
    q, k, v = (torch.empty(B, T, 16, 128, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    beta = torch.empty(B, T, 16, *((128,) if rule.gain == "column" else ())).requires_grad_()
    with guarded.guarded(shadow=False, programs=first_and_last) as ran, np.errstate(all="ignore"):
        o, S = dispatch.scan(q, k, v, beta, None, rule)
        torch.autograd.grad([o, S], (q, k, v, beta), [torch.empty_like(o), torch.empty_like(S)])
    assert all(number >= 2 for number in ran.values())


@interpreted
@pytest.mark.parametrize(("shift", "what"), [(1, r"reads x\[64\], which has 64"), (-1, r"reads x\[-1\]")])
def test_guard_sees_one_element_outside(guarded, shift, what):
    """Also where the memory there belongs to another tensor of the launch."""
    both = torch.zeros(128)
    tensor = both[:64] if shift > 0 else both[64:]
    with guarded.guarded(), pytest.raises(Exception, match=what):
        guarded.copy_shifted[(1,)](tensor, both[64:] if shift > 0 else both[:64], shift, 0)


@interpreted
def test_guard_sees_programs_that_share(guarded):
    x, y = torch.zeros(64), torch.zeros(64)
    with guarded.guarded(), pytest.raises(Exception, match=r"writes y\[0\], which program number 1 wrote"):
        guarded.copy_shifted[(2,)](x, y, 0, 0)
    with guarded.guarded() as ran:
        guarded.copy_shifted[(2,)](torch.zeros(128), torch.zeros(128), 0, 64)
    assert ran == {"copy_shifted": 2}


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_kernels_guarded():
    said = run_interpreted(__file__, "addresses or programs or sees", timeout=900)
    assert f"{len(CASES) + len(LARGE) + 3} passed" in said, said[-500:]
