"""The kernels of falcon-2, judged as in test_kernels.py: interpreted, or on a CUDA device.

Interpreted, a block of 16 tokens of one head and 32 columns takes a second, so the cases have few of them.
"""

import pytest
import torch
from column_checks import check_compiles_whole, check_one_beta_for_all_columns, check_without_tokens, decays_or_vanishes

from fastweight.kernels import launch_hopper, launch_solve_columns
from tests.interpreter import run_interpreted
from tests.kernel_harness import (
    ALLOWED,
    DTYPES,
    INTERPRETED,
    WIDTHS,
    at,
    case,
    check,
    gpu,
    interpreted,
    judge,
    kernel,
    make,
    outcome,
    surroundings,
)

DIRECT = {"step": "direct", "ridge": "scaled", "timing": "read-before-write"}
CASES = [
    case("falcon-2", shape=(1, 18, 1, 1, 24, 40), state=True, key=True),
    case("falcon-2", {"timing": "read-before-write"}, shape=(1, 21, 1, 1, 16, 16), cuts=(0, 1, 1, 19, 21), key=True),
    case("falcon-2", {"ridge": "scaled"}, shape=(1, 17, 1, 2, 16, 16), state=True, key=True, mask=True),
    case("falcon-2", DIRECT | {"pairing": "same-step"}, shape=(1, 66, 1, 1, 16, 16), zero_beta=True, ridge=0.1),
    case("falcon-2", ridge=1e6, shape=(1, 17, 1, 1, 16, 16)),
]


@interpreted
@pytest.mark.parametrize("test", CASES, ids=lambda test: str(CASES.index(test)))
def test_interpreted_kernels_equal_the_recurrence(test):
    check(test, torch.float32, "cpu")


LOWEST = case("falcon-2", {"decay_floor": 1e-30, "ridge": "scaled"}, shape=(1, 17, 1, 1, 16, 16), state=True)


@interpreted
def test_interpreted_floor_far_below_the_range_of_a_product(monkeypatch):
    monkeypatch.setattr("tests.kernel_harness.make", decays_or_vanishes)
    check(LOWEST, torch.float32, "cpu")


@interpreted
def test_one_beta_for_all_columns_is_the_scalar_rule():
    check_one_beta_for_all_columns("falcon-2", "falcon-1", T=10)


@interpreted
def test_interpreted_without_tokens_returns_the_state():
    check_without_tokens("falcon-2")


@interpreted
def test_interpreted_compiles_whole():
    check_compiles_whole("falcon-2")


@interpreted
@pytest.mark.parametrize("save", [True, False])
def test_operator_obeys_the_library_rules(save):
    """Schema, fake shapes and autograd registration; keys shared by two heads, and packed."""
    from fastweight.kernels.op import scan_forward

    q, k = (torch.randn(1, 4, 1, 4, requires_grad=save) for _ in range(2))
    v = torch.randn(1, 4, 2, 4, requires_grad=save)
    beta = torch.rand(1, 4, 2, 4, requires_grad=save)
    cu = torch.tensor([0, 1, 4], dtype=torch.int32)
    flags = (1e-6, 1e-4, True, False, False, False, False, False, 1, True, False, save)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(scan_forward, (q, k, v, beta, None, None, None, None, None, cu, *flags), test_utils=tests)


@interpreted
def test_rebuilt_states_are_for_a_gain_per_head():
    from fastweight.kernels import rebuilt_states

    test = case("falcon-2", shape=(1, 3, 1, 1, 4, 4))
    with rebuilt_states(), pytest.raises(ValueError, match="beta: got one per value column, expected one per head"):
        kernel(test, make(test, torch.float32, "cpu"), surroundings(test, "cpu"))


@interpreted
@pytest.mark.parametrize("cuts", [None, (0, 1, 1, 19)], ids=["dense", "packed"])
def test_exact_gradients_of_some_chunks(cuts, monkeypatch):
    """Of those that are noted, and nothing of the others."""
    test = case("falcon-2", shape=(2, 3, 1, 2, 16, 16) if cuts is None else (1, 19, 1, 2, 16, 16), cuts=cuts)
    inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
    noted = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 1]][: 2 if cuts is None else 3], dtype=torch.int8)
    backward_chunk = launch_solve_columns.backward_chunk

    def backward_some(where, given, common, saved, out, _wild, *rest):
        for gradient in (out.q, out.k, out.v, out.beta, out.lam):
            gradient.fill_(7)
        backward_chunk(where, given, common, saved, out, noted, *rest)

    pull = torch.randn(*test.shape[:2], 2, 16), torch.randn(2 if cuts is None else 3, 2, 16, 16)
    expected = outcome(kernel, test, inputs, around, pull)
    monkeypatch.setattr(launch_solve_columns, "backward_chunk", backward_some)
    got = outcome(kernel, test, inputs, around, pull)
    chunk = torch.arange(2).repeat_interleave(3) if cuts is None else torch.tensor([0, *[1] * 18])
    for name in ("gradient of v", "gradient of beta", "gradient of gate"):
        mine, theirs = (found[name].reshape(len(chunk), 2, -1) for found in (got, expected))
        some = noted[chunk].bool()
        assert torch.equal(mine[some], theirs[some]), name
        assert (mine[~some] == 7).all(), name


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_kernels_interpreted():
    """Runs the tests above under the interpreter."""
    said = run_interpreted(__file__, "not Device", timeout=600)
    assert said.count(".") >= len(CASES) + 9, said[-500:]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (128, 64), (80, 48)], ids=str)
class TestForwardOnDevice:
    pytestmark = gpu

    def test_values_without_gradients(self, widths, dtype):
        test = case("falcon-2", shape=(2, 200, 1, 2, *widths), state=True, key=True)
        inputs, around = make(test, dtype, "cuda"), surroundings(test, "cuda")
        wide = {name: None if value is None else value.double() for name, value in inputs.items()}
        with torch.no_grad():
            ours, theirs = kernel(test, inputs, around), judge(test, wide, around)
        for got, expected in zip(ours, theirs, strict=True):
            assert (got.double() - expected).norm() <= ALLOWED[dtype] * expected.norm()


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("widths", WIDTHS, ids=str)
    def test_widths_and_dtypes(self, widths, dtype):
        if dtype == torch.float16 and widths == (16, 24):
            pytest.skip("refused by `supported`")
        check(case("falcon-2", shape=(2, 200, 1, 2, *widths), state=True, key=True), dtype, "cuda")

    @pytest.mark.parametrize("T", [1, 15, 16, 17, 64, 65, 128])
    def test_lengths(self, T):
        check(case("falcon-2", shape=(1, T, 2, 2, 64, 64)), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("width", [64, 128])
    @pytest.mark.parametrize("test", CASES, ids=lambda test: str(CASES.index(test)))
    def test_options(self, test, width):
        check(at(test, *test.shape[:4], width, width), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("width", [64, 128])
    def test_all_that_may_surround(self, width):
        cuts = (0, 1, 1, 70, 150)
        check(case("falcon-2", shape=(1, 150, 2, 4, width, width), cuts=cuts, state=True, key=True, mask=True),
              torch.bfloat16, "cuda")  # fmt: skip

    @pytest.mark.parametrize("width", [64, 128])
    def test_exact_kernels_alone(self, width, monkeypatch):
        monkeypatch.setenv(launch_hopper.SWITCH, "0")
        check(case("falcon-2", shape=(2, 70, 1, 2, width, width), state=True, key=True), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("width", [64, 128])
    def test_state_after_state(self, width):
        check(case("falcon-2", shape=(2, 700, 3, 3, width, width), ridge=0.2, beta=1.0), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_some_chunks_forget_much(self, dtype):
        """Some tokens keep nearly nothing, of some columns."""
        test = case("falcon-2", {"ridge": "scaled"}, shape=(2, 300, 1, 4, 128, 128), ridge=0.05)
        inputs, around = make(test, dtype, "cuda"), surroundings(test, "cuda")
        beta, gate = inputs["beta"], inputs["gate"]
        assert beta is not None
        assert gate is not None
        gate[0, 100:130, 1] = 30.0
        beta[0, 100:130, 1] = torch.linspace(0.5, 0.999, 128, device="cuda")
        pull = torch.randn(2, 300, 4, 128, device="cuda").to(dtype), torch.randn(2, 4, 128, 128, device="cuda")
        wide = {name: None if value is None else value.double() for name, value in inputs.items()}
        ours, theirs = outcome(kernel, test, inputs, around, pull), outcome(judge, test, wide, around, pull)
        for name, expected in theirs.items():
            assert (ours[name].double() - expected).norm() <= ALLOWED[dtype] * expected.norm(), name

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_floor_far_below_the_range_of_a_product(self, monkeypatch, dtype):
        monkeypatch.setattr("tests.kernel_harness.make", decays_or_vanishes)
        check(at(LOWEST, 1, 140, 1, 1, 64, 64), dtype, "cuda")

    def test_more_chunks_than_programs_and_twice_the_same(self):
        test = case("falcon-2", shape=(4, 1000, 8, 8, 64, 64))
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        pull = torch.randn(4, 1000, 8, 64, device="cuda"), torch.randn(4, 8, 64, 64, device="cuda")
        first, second = (outcome(kernel, test, inputs, around, pull) for _ in range(2))
        few = {n: None if t is None else t[:1, :, :1].contiguous() for n, t in inputs.items()}
        alone = outcome(kernel, test, few, around, (pull[0][:1, :, :1], pull[1][:1, :1]))
        for name, value in first.items():
            assert torch.equal(value, second[name]), name
            if name != "final S":
                assert torch.equal(value[:1, :, :1], alone[name]), name
