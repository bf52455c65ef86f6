"""The kernels of regression over a window, judged as in test_kernels.py: interpreted, or on a CUDA device."""

import pytest
import torch
from test_kernels_windows import CASES as CONTINUED
from test_kernels_windows import check as check_continued

from tests.interpreter import run_interpreted
from tests.kernel_harness import (
    INTERPRETED,
    at,
    case,
    check,
    gpu,
    interpreted,
    judge,
    make,
    outcome,
    surroundings,
)
from tests.kernel_harness import kernel as run_kernel

BEFORE = {"timing": "read-before-write"}
W2 = {"window": 2}
SMALL = {
    "two parts": case("falcon-3", W2, shape=(1, 17, 1, 1, 16, 24), no_gates=True),
    "five parts, two blocks": case("falcon-3", shape=(1, 54, 1, 1, 16, 16)),
    "eight pairs": case("falcon-3", {"window": 8}, shape=(1, 10, 1, 1, 16, 16), state=True),
    "reads first, a carried key": case("falcon-3", W2 | BEFORE, shape=(1, 5, 1, 1, 16, 16), state=True, key=True),
    "packed, own keys": case(
        "falcon-3", {"window": 3, "pairing": "same-step", "ridge": "scaled"}, shape=(1, 9, 1, 1, 16, 16),
        cuts=(0, 1, 1, 9),
    ),
    "the clamp, four pairs": case("falcon-3", shape=(1, 8, 1, 1, 16, 16), ridge=1e6),
    "given steps, grouped": case(
        "falcon-3", {"window": 3, "step": "direct"}, shape=(1, 8, 1, 2, 16, 16), zero_beta=True
    ),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("name", SMALL)
def test_interpreted_kernels_equal_the_recurrence(name):
    check(SMALL[name], torch.float32, "cpu")


@interpreted
def test_interpreted_window_goes_on():
    check_continued("cpu", torch.float32, rule="falcon-3", options=W2, T=3, earlier=2, shape=(1, 1, 1))


@interpreted
def test_interpreted_operator_foresees_its_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fastweight.kernels.op import scan_forward

    flags = (1e-6, 1e-4, True, False, False, False, False, False, 2, True)
    for T, rebuild, save in ((33, False, True), (3, True, True)):
        found = scan_forward(*torch.randn(3, 1, T, 1, 4), *[None] * 7, *flags, rebuild, save)
        with FakeTensorMode():
            foreseen = scan_forward(*torch.randn(3, 1, T, 1, 4), *[None] * 7, *flags, rebuild, save)
        assert [t.shape for t in foreseen] == [t.shape for t in found]
        assert [t.dtype for t in foreseen] == [t.dtype for t in found]


@interpreted
def test_interpreted_chunk_states_made_again(monkeypatch):
    """And what the blocks are made from, a block at a time."""
    from fastweight.kernels import launch_windows, rebuilt_states

    monkeypatch.setattr(launch_windows, "TURN", 1)
    with rebuilt_states():
        check(case("falcon-3", W2, shape=(1, 63, 1, 1, 16, 16), state=True), torch.float32, "cpu")


def hard_keys(K: int) -> torch.Tensor:
    """[T, K]: one key again and again, zeros, equal eigenvalues, nearly equal ones, nearly one direction."""
    random = torch.Generator().manual_seed(0)
    basis = torch.eye(K)
    noise = torch.randn(3, K, generator=random)
    close = basis[:3] * torch.tensor([[1.0], [1.001], [1.00001]])
    rows = [noise[:1].expand(3, K), torch.zeros(3, K), basis[:3], close, noise[:1] + 1e-3 * noise, 1e-4 * noise]
    return torch.cat(rows)


@interpreted
def test_interpreted_top_eigenvalue_of_hard_windows():
    """Against LAPACK in float64, and u^T G u with the unit vector that its gradient uses."""
    from fastweight.kernels import launch, launch_windows, windows_maps
    from fastweight.kernels.geometry import Geometry

    R, keys = 3, hard_keys(16)
    T = len(keys)
    k = keys[None, :, None]
    plan = launch.Plan(1e-6, 1e-4, False, False, False, False, False, False, window=R)
    given = launch.Inputs.of(plan, k, k, k, None, None, None, None, None)
    block = launch_windows.Block.of(R)
    where = Geometry.of(1, T, None, block.tokens)
    turn = launch_windows.Turn(0, where.slots)
    measured = launch_windows.Measured.of(given, block, [turn])
    launch_windows.measure(plan, given, where, block, turn, measured, True)
    facts = measured.facts[0].double()
    stream = torch.cat((torch.zeros(R - 1, 16), keys)).double()
    windows = torch.stack([stream[t : t + R] for t in range(T)])
    gram = windows @ windows.mT
    largest = torch.linalg.eigvalsh(gram)[:, -1]
    found = facts[windows_maps.ENERGY.value] * facts[windows_maps.COUNT.value]
    assert ((found - largest).abs() <= 1e-5 * largest).all()
    u = facts[windows_maps.VECTOR.value :].mT
    reached = torch.einsum("tr,trs,ts->t", u, gram, u)
    assert ((reached - largest).abs() <= 1e-5 * largest).all()
    assert torch.equal((u != 0).any(-1), largest > 0)


@interpreted
def test_interpreted_repeated_and_zero_keys():
    """Values and gradients where Gram matrices have rank one or zero."""
    test = case("falcon-3", {"window": 3, "pairing": "same-step"}, shape=(1, 9, 1, 1, 16, 16))
    inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
    k = inputs["k"]
    assert k is not None
    k[:, 1:5] = k[:, :1].clone()
    k[:, 6:] = 0
    pull = torch.ones(1, 9, 1, 16), torch.ones(1, 1, 16, 16)
    ours = outcome(run_kernel, test, inputs, around, pull)
    wide = {name: None if t is None else t.double() for name, t in inputs.items()}
    for name, want in outcome(judge, test, wide, around, pull).items():
        error = (ours[name].double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error <= 1e-5, f"{name}: relative error {float(error):.3g}"


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_kernels_interpreted():
    said = run_interpreted(__file__, "interpreted", timeout=600)
    assert f"{len(SMALL) + 5} passed" in said, said[-500:]


WIDTHS = [(torch.bfloat16, 64, 64), (torch.bfloat16, 128, 128), (torch.bfloat16, 80, 48), (torch.float16, 64, 128)]
WIDTHS += [(torch.float32, 64, 64), (torch.float32, 256, 256), (torch.bfloat16, 256, 192)]
LARGE = {
    "usual": case("falcon-3"),
    "reads first": case("falcon-3", BEFORE, state=True),
    "own keys, scaled ridge": case("falcon-3", {"pairing": "same-step", "ridge": "scaled"}, state=True),
    "strong decay": case("falcon-3", ridge=1e3),
    "two pairs": case("falcon-3", W2, state=True),
    "six pairs": case("falcon-3", {"window": 6}, state=True),
    "eight pairs": case("falcon-3", {"window": 8}, state=True),
}


class TestOnDevice:
    pytestmark = gpu

    @pytest.fixture(params=["1", "0"], ids=["hopper", "plain"], autouse=True)
    def with_walks(self, request, monkeypatch):
        """Where the walks of hopper_windows.py run, and where they do not."""
        monkeypatch.setenv("FASTWEIGHT_HOPPER", request.param)

    @pytest.mark.parametrize(("dtype", "K", "V"), WIDTHS, ids=str)
    def test_every_dtype_and_width(self, dtype, K, V):
        check(at(LARGE["usual"], 2, 140, 2, 2, K, V), dtype, "cuda")

    @pytest.mark.parametrize("D", [64, 128])
    @pytest.mark.parametrize("name", LARGE)
    def test_every_option(self, name, D):
        check(at(LARGE[name], 2, 140, 1, 2, D, D), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("name", CONTINUED)
    def test_window_goes_on(self, name):
        check_continued("cuda", torch.bfloat16, rule="falcon-3", **CONTINUED[name], width=64)

    @pytest.mark.parametrize("window", [4, 8])
    def test_packed(self, window):
        test = at(case("falcon-3", {"window": window}, cuts=(0, 1, 1, 25, 150), state=True), 1, 150, 2, 2, 64, 64)
        check(test, torch.bfloat16, "cuda")

    @pytest.mark.parametrize("window", [4, 8])
    def test_in_pieces(self, window, monkeypatch):
        """The walk back a block of every sequence at a time."""
        from fastweight.kernels import launch_hopper_windows

        monkeypatch.setattr(launch_hopper_windows, "TURN", 1)
        test = case("falcon-3", {"window": window}, state=True)
        check(at(test, 2, 140, 1, 2, 128, 128), torch.bfloat16, "cuda")
