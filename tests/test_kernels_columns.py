"""The kernels with a gain per value column, judged as in test_kernels.py: interpreted, or on a CUDA device."""

import pytest
import torch
from column_checks import (
    check_compiles_whole,
    check_one_beta_for_all_columns,
    check_without_tokens,
    decays_or_vanishes,
    given_up,
)

from tests.interpreter import run_interpreted
from tests.kernel_harness import (
    DTYPES,
    INTERPRETED,
    NUMBERS,
    at,
    case,
    check,
    gpu,
    interpreted,
    kernel,
    make,
    outcome,
    surroundings,
)

COLUMNS = [
    case("falcon-2a", shape=(1, 70, 1, 2, 24, 20), state=True, key=True),
    case("falcon-2a", {"timing": "read-before-write"}, shape=(1, 90, 1, 1, 16, 16), cuts=(0, 1, 1, 70, 90), key=True),
    case("falcon-2a", {"ridge": "scaled"}, shape=(2, 66, 1, 1, 16, 16), state=True, key=True, mask=True),
    case("falcon-2a", {"step": "direct", "pairing": "same-step"}, shape=(1, 70, 1, 1, 16, 40), mask=True),
    case("falcon-2a", ridge=1e6, shape=(1, 70, 1, 1, 16, 16)),
    case("falcon-2a", {"step": "direct", "ridge": "scaled", "timing": "read-before-write"}, zero_beta=True, ridge=0.1),
]


@interpreted
@pytest.mark.parametrize("test", COLUMNS, ids=lambda test: str(COLUMNS.index(test)))
def test_interpreted_columns_equal_the_recurrence(test):
    check(test, torch.float32, "cpu")


LOWEST = case("falcon-2a", {"decay_floor": 1e-30, "ridge": "scaled"}, shape=(1, 70, 1, 1, 16, 16), state=True)


@interpreted
def test_interpreted_floor_far_below_the_range_of_a_product(monkeypatch):
    monkeypatch.setattr("tests.kernel_harness.make", decays_or_vanishes)
    check(LOWEST, torch.float32, "cpu")


def tame_beside_wild(test, dtype, device):
    """Inputs of chunks that forget little, and behind them of such ones in half of the columns only."""
    inputs = make(test, dtype, device)
    V = test.shape[5]
    inputs["beta"][:, :64] *= 0.01
    inputs["beta"][..., : V // 2] *= 0.01
    return inputs


TOO_WIDE = (torch.float32, (256, 256))  # a kernel of it crashes on a device
BESIDE = case("falcon-2a", shape=(1, 130, 1, 1, 16, 64), state=True, key=True, ridge=1e3)

PIECES = case("falcon-2a", {"timing": "read-before-write"}, shape=(1, 140, 1, 1, 16, 16), state=True, key=True)


@interpreted
def test_interpreted_columns_in_pieces(monkeypatch):
    from fastweight.kernels import launch

    monkeypatch.setattr(launch.Walk, "of", lambda where, programs: launch.Walk(where, 3, -(-where.chunks // 3)))
    check(PIECES, torch.float32, "cpu")


@interpreted
def test_one_beta_for_all_columns_is_the_scalar_rule():
    check_one_beta_for_all_columns("falcon-2a", "falcon-1a", T=40)


@interpreted
def test_interpreted_columns_without_tokens_return_the_state():
    check_without_tokens("falcon-2a")


@interpreted
def test_interpreted_columns_compile_whole():
    check_compiles_whole("falcon-2a")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_kernels_interpreted():
    """Runs the tests above under the interpreter."""
    said = run_interpreted(__file__, "not Device", timeout=300)
    assert said.count(".") >= len(COLUMNS) + 5, said[-500:]


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(("dtype", "widths"), [one for one in NUMBERS if one != TOO_WIDE], ids=str)
    def test_widths_and_dtypes(self, widths, dtype):
        check(case("falcon-2a", shape=(2, 200, 1, 2, *widths), state=True, key=True), dtype, "cuda")

    @pytest.mark.parametrize("T", [1, 63, 64, 65, 128])
    def test_lengths(self, T):
        check(case("falcon-2a", shape=(1, T, 2, 2, 64, 64)), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("width", [64, 128])
    @pytest.mark.parametrize("test", COLUMNS, ids=lambda test: str(COLUMNS.index(test)))
    def test_options(self, test, width):
        check(at(test, *test.shape[:4], width, width), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_floor_far_below_the_range_of_a_product(self, monkeypatch, dtype):
        monkeypatch.setattr("tests.kernel_harness.make", decays_or_vanishes)
        check(at(LOWEST, 1, 140, 1, 1, 64, 64), dtype, "cuda")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("width", [64, 128])
    def test_tame_beside_wild(self, monkeypatch, width, dtype):
        monkeypatch.setattr("tests.kernel_harness.make", tame_beside_wild)
        check(at(BESIDE, 1, 330, 1, 2, width, width), dtype, "cuda")

    @pytest.mark.parametrize("ridge", [0.1, 1.0])
    def test_gains_near_two(self, ridge):
        check(case("falcon-2a", shape=(1, 200, 1, 2, 128, 128), beta=1.99, ridge=ridge), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_columns_in_pieces(self, dtype):
        check(at(PIECES, 1, 2200, 1, 1, 128, 128), dtype, "cuda")


WALKS = [
    case("falcon-2a", shape=(2, 130, 1, 2, 128, 128), state=True, ridge=0.5),
    case("falcon-2a", shape=(3, 64, 2, 2, 64, 64), ridge=0.5),
    case("falcon-2a", {"pairing": "same-step", "ridge": "scaled"}, shape=(2, 65, 1, 2, 64, 64), zero_beta=True),
    case("falcon-2a", {"step": "direct"}, shape=(1, 200, 1, 2, 64, 64), ridge=0.1),
]


class TestOnHopper:
    """The walks of hopper_columns.py and hopper_columns_backward.py, and what follows them where decays are strong."""

    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def taken(self, monkeypatch):
        """How many programs and chunks each launch gave up."""
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs a Hopper device")
        return given_up(monkeypatch)

    @pytest.mark.parametrize("test", WALKS, ids=lambda test: str(WALKS.index(test)))
    def test_options(self, test, taken):
        check(test, torch.bfloat16, "cuda")
        assert taken == [0, 0]

    @pytest.mark.parametrize("width", [64, 128])
    def test_tame_beside_wild(self, monkeypatch, width, taken):
        monkeypatch.setattr("tests.kernel_harness.make", tame_beside_wild)
        check(case("falcon-2a", shape=(1, 330, 1, 2, width, width), state=True, ridge=1e3), torch.bfloat16, "cuda")
        assert all(taken)

    def test_sequences_in_pieces(self, taken):
        check(case("falcon-2a", shape=(1, 2200, 1, 2, 128, 128), state=True, ridge=0.5), torch.bfloat16, "cuda")
        assert taken == [0, 0]

    def test_same_result_twice(self):
        test = case("falcon-2a", shape=(2, 300, 1, 8, 128, 128), ridge=0.5)
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        pull = torch.randn(2, 300, 8, 128, device="cuda"), torch.randn(2, 8, 128, 128, device="cuda")
        first, second = (outcome(kernel, test, inputs, around, pull) for _ in range(2))
        for part, value in first.items():
            assert torch.equal(value, second[part]), part
