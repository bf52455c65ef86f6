"""The Hopper kernels for the gradients of both scalar classes: which calls they take, what they compute (on Hopper)."""

import pytest
import torch

from fastweight.kernels import launch, launch_additive, launch_hopper, launch_hopper_gradient, launch_solve
from tests.kernel_harness import case, check, gpu, kernel, make, outcome, surroundings

PLAN = launch.Plan(1e-6, 1e-4, True, False, False, False, False, False)


def taken(K=64, V=64, dtype=torch.bfloat16, skew=0, states=None) -> bool:
    q, k = torch.zeros(2, 1, 5, 1, K, dtype=dtype)
    v = torch.zeros(5 * V + skew, dtype=dtype)[skew:].view(1, 5, 1, V)
    given = launch.Inputs.of(PLAN, q, k, v, None, None, None, None, None)
    return launch_hopper_gradient.fits(given, v, torch.zeros(1, 1, K, V) if states is None else states)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch_hopper_gradient, "available", lambda device: True)


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("V", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_half_precision(hopper, K, V, dtype):
    assert taken(K, V, dtype)


def test_leaves_the_rest_to_the_plain_kernels(hopper):
    assert not taken(dtype=torch.float32)
    assert not taken(K=80)
    assert not taken(V=192)
    assert not taken(skew=1)
    assert not taken(states=torch.empty(2**25, 1, 64, 64, device="meta"))


@pytest.mark.parametrize(("asked", "comes"), [(None, True), ("0", False), ("1", True)])
def test_taken_unless_switched_off(monkeypatch, asked, comes):
    monkeypatch.setattr(launch_hopper, "_can_run", lambda device: True)
    monkeypatch.delenv(launch_hopper.SWITCH, raising=False)
    if asked is not None:
        monkeypatch.setenv(launch_hopper.SWITCH, asked)
    assert taken() is comes


def test_nothing_is_taken_without_a_device():
    assert not taken()


ON_HOPPER = [
    case("falcon-1", shape=(2, 200, 1, 2, 128, 128), state=True),
    case("falcon-1", {"timing": "read-before-write"}, shape=(2, 130, 1, 2, 64, 64), state=True),
    case("falcon-1", {"ridge": "scaled"}, shape=(2, 130, 1, 2, 64, 128), state=True, key=True, mask=True),
    case("falcon-1", {"step": "direct", "pairing": "same-step"}, shape=(1, 192, 1, 2, 128, 64), ridge=0.5),
    case("falcon-1", shape=(1, 90, 2, 2, 128, 128), cuts=(0, 1, 1, 70, 90, 90), state=True, key=True),
    case("falcon-1", ridge=1e6, shape=(1, 232, 1, 2, 128, 128)),
    case("falcon-1", beta=2.0, ridge=0.1, zero_beta=True, shape=(1, 64, 1, 2, 128, 128)),
    case("delta", shape=(2, 200, 2, 2, 128, 128), state=True),
    case("delta", no_gates=True, shape=(1, 1, 1, 2, 64, 64)),
    case("falcon-1a", shape=(2, 200, 1, 2, 128, 128), state=True, key=True, mask=True),
    case("falcon-1a", {"timing": "read-before-write"}, shape=(1, 90, 1, 2, 64, 128), cuts=(0, 1, 1, 90)),
    case("falcon-1a", {"ridge": "scaled"}, shape=(1, 90, 1, 2, 64, 64)),
    case("falcon-1a", ridge=1e6, shape=(1, 232, 1, 2, 128, 64)),
    case("linear", shape=(1, 192, 1, 2, 128, 128), state=True),
    case("falcon-3a", shape=(2, 200, 1, 2, 128, 128), state=True),
    case("falcon-3a", {"window": 7, "ridge": "scaled", "pairing": "same-step"}, shape=(1, 180, 1, 2, 64, 64)),
    case("falcon-3a", {"timing": "read-before-write"}, shape=(1, 90, 1, 2, 64, 64), cuts=(0, 1, 1, 64, 90)),
    case("falcon-3a", ridge=1e6, beta=2.0, shape=(1, 232, 1, 2, 128, 128)),
]


class TestOnHopper:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def only_these(self, monkeypatch):
        """Fails where the plain kernels would run."""
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs a Hopper device")
        monkeypatch.delenv(launch_hopper.SWITCH, raising=False)
        monkeypatch.setattr(launch_solve, "_backward_token", None)
        monkeypatch.setattr(launch_additive, "_backward_token", None)

    @pytest.mark.parametrize("test", ON_HOPPER, ids=lambda test: f"{test.rule}-{ON_HOPPER.index(test)}")
    def test_bfloat16(self, test):
        check(test, torch.bfloat16, "cuda")

    @pytest.mark.parametrize("rule", ["falcon-1a", "falcon-3a"])
    def test_float16(self, rule):
        """Inner products only: a regression's gradient of a step is not divided by the step in float16."""
        check(case(rule, shape=(2, 200, 1, 2, 128, 128)), torch.float16, "cuda")

    @pytest.mark.parametrize("rule", ["falcon-1", "falcon-3a"])
    def test_same_result_twice(self, rule):
        test = case(rule, shape=(2, 300, 1, 8, 128, 128))
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        pull = torch.randn(2, 300, 8, 128, device="cuda"), torch.randn(2, 8, 128, 128, device="cuda")
        first, second = (outcome(kernel, test, inputs, around, pull) for _ in range(2))
        for name, value in first.items():
            assert torch.equal(value, second[name]), name
