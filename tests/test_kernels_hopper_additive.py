"""The Hopper walks of the inner-product class: which calls take them (anywhere), what they compute (on Hopper)."""

import pytest
import torch
from test_kernels_hopper import REFUSED, given

from fastweight.kernels import launch, launch_additive, launch_hopper, launch_hopper_additive
from fastweight.kernels.geometry import Geometry
from tests.kernel_harness import case, check, gpu, kernel, make, outcome, surroundings


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch_hopper, "available", lambda device: True)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_dense_half_precision(hopper, window, dtype):
    where = Geometry.of(2, 5, None, 65 - window)
    assert launch_additive._engine(given(128, 192, dtype), where)[0] is launch_additive.HOPPER


@pytest.mark.parametrize("why", REFUSED)
def test_leaves_the_rest_to_the_plain_kernels(hopper, why):
    assert launch_additive._engine(REFUSED[why], Geometry.of(2, 5, None))[0] is launch_additive.PLAIN
    packed = Geometry.of(1, 10, torch.tensor([0, 10]))
    assert launch_additive._engine(given(), packed)[0] is launch_additive.PLAIN


@pytest.mark.parametrize("heads", [1, 2, 16, 60, 66, 200])
@pytest.mark.parametrize("chunks", [1, 31, 32, 35, 512])
def test_pieces_cover_a_sequence_and_fit_the_device(heads, chunks):
    where = Geometry.of(1, 61 * chunks - 3, None, 61)
    tokens = given(128, 128)
    tokens = tokens._replace(v=torch.empty(1, 1, heads, 128, dtype=torch.bfloat16, device="meta"))
    walk = launch_hopper_additive.walk_of(where, tokens)
    assert walk.segments == 1 or (walk.segments - 1) * walk.length < chunks <= walk.segments * walk.length
    assert walk.segments == 1 or heads * 2 * walk.segments <= launch_hopper.WALKING
    assert walk.segments > 1 or heads * 2 >= launch.FEW_PROGRAMS or chunks < launch.LEAST_CHUNKS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("window", "K", "V", "expected"),
    [(1, 64, 64, True), (1, 128, 128, True), (4, 128, 128, False), (5, 64, 64, True), (6, 64, 64, False),
     (1, 128, 64, False)],
)  # fmt: skip
def test_one_walk_back(dtype, window, K, V, expected):
    """Square states, and short windows where they are 64 wide."""
    plan = launch.Plan(1e-6, 1e-4, True, False, False, False, False, False, window)
    assert launch_hopper_additive.takes_backward(plan, given(K, V, dtype=dtype)) == expected


ON_HOPPER = [
    case("falcon-1a", shape=(2, 130, 2, 2, 128, 128)),
    case("falcon-1a", shape=(2, 64, 2, 2, 64, 64), state=True),
    case("linear", shape=(2, 100, 1, 2, 128, 128), state=True, ridge=0.5),
    case("falcon-1a", {"timing": "read-before-write"}, shape=(2, 130, 2, 4, 128, 64), state=True),
    case("falcon-1a", {"step": "direct", "pairing": "same-step"}, shape=(2, 64, 1, 2, 64, 128), ridge=0.5),
    case("falcon-1a", {"ridge": "scaled"}, shape=(2, 65, 1, 2, 64, 192), zero_beta=True),
    case("falcon-1a", ridge=1e6, shape=(1, 200, 1, 1, 128, 128)),
    case("linear", {}, shape=(2, 63, 2, 2, 64, 64), no_gates=True),
    case("linear", shape=(3, 1, 2, 2, 128, 128), state=True, ridge=0.5),
    case("falcon-3a", shape=(2, 200, 1, 2, 128, 128), state=True),
    case("falcon-3a", shape=(2, 61, 2, 2, 64, 64)),
    case("falcon-3a", {"window": 1}, shape=(1, 130, 1, 2, 64, 128)),
    case("falcon-3a", {"window": 7, "ridge": "scaled", "pairing": "same-step"}, shape=(1, 180, 1, 2, 128, 64)),
    case("falcon-3a", {"timing": "read-before-write"}, shape=(2, 123, 1, 2, 128, 128)),
    case("falcon-3a", {"window": 7, "timing": "read-before-write"}, shape=(2, 3, 1, 2, 64, 64)),
    case("falcon-3a", ridge=1e6, beta=2.0, shape=(1, 232, 1, 2, 128, 128)),
    case("falcon-1a", {"timing": "read-before-write"}, shape=(2, 130, 2, 4, 128, 128), state=True),
    case("falcon-1a", {"step": "direct", "pairing": "same-step"}, shape=(2, 128, 1, 2, 64, 64), ridge=0.5),
    case("falcon-1a", {"ridge": "scaled"}, shape=(2, 128, 1, 2, 128, 128), zero_beta=True),
]


def name(test) -> str:
    return f"{test.rule}-{ON_HOPPER.index(test) if test in ON_HOPPER else test.shape}"


class TestOnHopper:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def taken(self, monkeypatch):
        """Fails where the plain kernels would run."""
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs a Hopper device")
        monkeypatch.delenv(launch_hopper.SWITCH, raising=False)
        monkeypatch.setattr(launch_additive, "PLAIN", None)

    @pytest.mark.parametrize("test", ON_HOPPER, ids=name)
    def test_bfloat16(self, test):
        check(test, torch.bfloat16, "cuda")

    @pytest.mark.parametrize("test", [ON_HOPPER[0], ON_HOPPER[5], ON_HOPPER[9]], ids=name)
    def test_float16(self, test):
        check(test, torch.float16, "cuda")

    @pytest.mark.parametrize("shape", [(1, 330, 1, 1, 128, 128), (2, 260, 1, 2, 64, 64)], ids=str)
    @pytest.mark.parametrize(("rule", "ridge"), [("falcon-1a", 1.0), ("linear", 0.3), ("falcon-3a", 0.3)])
    def test_sequences_in_pieces(self, rule, ridge, shape, monkeypatch):
        """Of falcon-1a a ridge of 0.3 has a gradient whose terms cancel: 1.3e-2 off in bfloat16, plain or not."""

        def three(where, _):
            return launch.Walk(where, 3, -(-where.chunks // 3))

        monkeypatch.setattr(launch_additive, "HOPPER", launch_additive.HOPPER._replace(walk_of=three))
        check(case(rule, shape=shape, state=True, ridge=ridge), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("rule", ["falcon-1a", "falcon-3a"])
    def test_same_result_twice(self, rule):
        test = case(rule, shape=(2, 300, 1, 8, 128, 128))
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        pull = torch.randn(2, 300, 8, 128, device="cuda"), torch.randn(2, 8, 128, 128, device="cuda")
        first, second = (outcome(kernel, test, inputs, around, pull) for _ in range(2))
        for part, value in first.items():
            assert torch.equal(value, second[part]), part
