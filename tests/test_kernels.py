"""The Triton kernels against the float64 recurrence: values, final states and every gradient.

The same cases run on the CPU through Triton's interpreter (small, float32, in a process of its own because the
interpreter must be chosen before Triton is imported) and on a CUDA device (all dtypes and widths, marked gpu).
"""

import contextlib

import pytest
import torch

import fastweight as fw
from fastweight.kernels import dispatch
from tests.interpreter import INTERPRETED, run_interpreted
from tests.kernel_harness import (
    NUMBERS,
    at,
    case,
    check,
    gpu,
    interpreted,
    kernel,
    make,
    outcome,
    rule_of,
    surroundings,
)

SMALL = [
    case("falcon-1"),
    case("falcon-1", {"timing": "read-before-write"}, shape=(2, 70, 1, 1, 16, 16), state=True, key=True),
    case("falcon-1", {"ridge": "scaled"}, shape=(2, 70, 1, 2, 24, 16), state=True, key=True, mask=True),
    case("falcon-1", {"step": "direct", "pairing": "same-step"}, ridge=0.5),
    case("falcon-1", ridge=1e6, shape=(1, 100, 1, 1, 16, 16)),
    case("falcon-1", zero_beta=True),
    case("falcon-1", shape=(1, 90, 1, 1, 16, 16), cuts=(0, 1, 1, 70, 90, 90), state=True, key=True),
    case("falcon-1", {"pairing": "same-step"}, shape=(1, 90, 1, 1, 16, 16), cuts=(0, 30, 90), mask=True),
    case("falcon-1", shape=(1, 90, 1, 1, 16, 16), cuts=(0, 30, 90), mask=True, key=True),
    case("falcon-1", no_gates=True),
    case("delta", shape=(1, 70, 1, 2, 16, 40), state=True),
    case("falcon-1a", shape=(2, 70, 1, 2, 16, 24), state=True, key=True, mask=True),
    case("falcon-1a", {"timing": "read-before-write"}, shape=(1, 90, 1, 1, 16, 16), cuts=(0, 1, 1, 70, 90)),
    case("linear", shape=(1, 130, 1, 1, 80, 16), state=True),
    case("falcon-3a", shape=(1, 130, 1, 2, 16, 16), state=True),
    case("falcon-3a", {"window": 7, "ridge": "scaled", "pairing": "same-step"}, shape=(1, 64, 1, 1, 16, 16)),
    case("falcon-3a", {"timing": "read-before-write"}, shape=(1, 90, 1, 1, 16, 16), cuts=(0, 1, 1, 64, 90)),
    case("falcon-3a", ridge=1e6, shape=(1, 70, 1, 1, 16, 16)),
]


@interpreted
@pytest.mark.parametrize("test", SMALL, ids=lambda test: f"{test.rule}-{SMALL.index(test)}")
def test_interpreted_kernels_equal_the_recurrence(test):
    check(test, torch.float32, "cpu")


SPLIT = [
    case("falcon-1", {"timing": "read-before-write"}, shape=(1, 140, 1, 1, 16, 16), state=True, key=True, mask=True),
    case("delta", shape=(1, 140, 1, 2, 16, 24), state=True),
    case("falcon-1a", shape=(2, 140, 1, 1, 16, 16), ridge=30.0),
    case("falcon-3a", shape=(1, 140, 1, 1, 16, 16), state=True),
]


@interpreted
@pytest.mark.parametrize("test", SPLIT, ids=lambda test: test.rule)
def test_sequences_in_pieces(test, monkeypatch):
    from fastweight.kernels import launch

    monkeypatch.setattr(launch.Walk, "of", lambda where, programs: launch.Walk(where, 3, -(-where.chunks // 3)))
    check(test, torch.float32, "cpu")


@interpreted
@pytest.mark.parametrize("rebuild", [False, True])
def test_backward_a_few_rows_at_a_time(rebuild, monkeypatch):
    """Later rows find what earlier ones left in their room, and the last turn is short."""
    from fastweight.kernels import launch_solve, rebuilt_states

    test = case("falcon-1", shape=(3, 70, 1, 2, 16, 16), state=True)
    monkeypatch.setattr(launch_solve, "_rows_at_once", lambda *_: 2)
    with rebuilt_states() if rebuild else contextlib.nullcontext():
        check(test, torch.float32, "cpu")


REBUILT = [
    case("falcon-1", {"timing": "read-before-write"}, shape=(2, 140, 1, 1, 16, 16), state=True, key=True, mask=True),
    case("delta", shape=(1, 140, 1, 2, 16, 24)),
    case("falcon-1", shape=(1, 150, 1, 1, 16, 16), cuts=(0, 1, 1, 130, 150, 150), state=True),
]


@interpreted
@pytest.mark.parametrize("test", REBUILT, ids=lambda test: test.rule)
def test_chunk_states_made_again(test):
    from fastweight.kernels import rebuilt_states

    with rebuilt_states():
        check(test, torch.float32, "cpu")


@interpreted
def test_rebuilt_states_are_not_kept():
    from fastweight.kernels import launch, launch_solve

    q, k, v = torch.randn(3, 1, 200, 1, 16)
    kept = []
    for rebuild in (False, True):
        plan = launch.Plan(1e-6, 1e-4, True, False, False, False, False, False, rebuild=rebuild)
        *_, states = launch_solve.forward(plan, q, k, v, *[None] * 7, True)
        kept.append(len(states))
    assert kept == [4, 1]


@interpreted
def test_rebuilt_states_are_for_regression():
    from fastweight.kernels import rebuilt_states

    test = case("falcon-1a")
    with rebuilt_states(), pytest.raises(ValueError, match="rule: got the inner-product objective, expected regress"):
        kernel(test, make(test, torch.float32, "cpu"), surroundings(test, "cpu"))


@interpreted
def test_operators_obey_the_library_rules():
    """Schema, fake shapes and autograd registration, with and without what is optional; one gradient per input."""
    from fastweight.kernels.op import scan_forward

    for regression, window, with_state in ((True, 1, True), (False, 4, False)):
        q, k, v = (torch.randn(1, 5, 1, 4, requires_grad=True) for _ in range(3))
        beta = torch.rand(1, 5, 1, requires_grad=True)
        S = torch.randn(1, 1, 4, 4, requires_grad=True) if with_state else None
        flags = (1e-6, 1e-4, True, False, False, False, False, False, window, regression, regression, True)
        torch.library.opcheck(scan_forward, (q, k, v, beta, None, S, None, None, None, None, *flags))


@interpreted
def test_backward_returns_one_gradient_per_input(monkeypatch):
    """Of every input that has one and None for the others, whichever are given; through the dispatcher and without."""
    from fastweight.kernels import op

    for rule, given in (("falcon-1", "qkvbgSK"), ("falcon-1a", "qkvb"), ("falcon-3a", "qkvg")):
        test = case(rule, shape=(2, 3, 1, 1, 4, 4), state="S" in given, key="K" in given)
        inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
        named = dict(zip(inputs, "qkvbgSK", strict=True))
        leaves = {n: None if t is None or named[n] not in given else t for n, t in inputs.items()}
        pull = torch.ones(2, 3, 1, 4), torch.ones(2, 1, 4, 4)
        direct = outcome(kernel, test, leaves, around, pull)
        with monkeypatch.context() as patch:
            patch.setattr(op, "nobody_listens", lambda: False)
            dispatched = outcome(kernel, test, leaves, around, pull)
        assert len(direct) == 2 + len(given)
        for name, value in direct.items():
            assert torch.equal(value, dispatched[name]), name


@interpreted
@pytest.mark.parametrize("name", ["falcon-1", "falcon-1a", "falcon-2", "falcon-3", "falcon-3a"])
def test_nobody_differentiates_twice_without_a_word(name):
    """The derivative of a gradient, or of a sum in which it is one share, is an error: never the other shares alone."""
    q = torch.randn(1, 3, 1, 16, requires_grad=True)
    v = torch.randn(1, 3, 1, 16, requires_grad=True)
    beta = torch.rand(1, 3, 1, 16) if fw.RULES[name].gain == "column" else None
    o, _ = dispatch.scan(q, q, v, beta, None, fw.RULES[name])
    (d_q,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    for loss in (d_q.sum(), d_q.sum() + q.square().sum() + v.sum()):
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(loss, [q, v], retain_graph=True)


@interpreted
def test_masked_tokens_may_hold_anything():
    for name in ("falcon-1", "falcon-1a"):
        test = case(name, {"pairing": "same-step"}, shape=(1, 20, 1, 1, 16, 16), mask=True)
        inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
        pull = torch.ones(1, 20, 1, 16), torch.ones(1, 1, 16, 16)
        expected = outcome(kernel, test, inputs, around, pull)
        for field in ("k", "v", "beta", "gate"):
            inputs[field][~around[1]] = float("nan")
        for part, value in outcome(kernel, test, inputs, around, pull).items():
            assert torch.equal(value, expected[part]), part


@interpreted
def test_no_tokens_return_the_state():
    q, v = torch.zeros(2, 0, 1, 16), torch.zeros(2, 0, 1, 8)
    S = torch.randn(2, 1, 16, 8)
    for name in ("falcon-1", "falcon-1a"):
        o, last = dispatch.scan(q, q, v, None, None, fw.RULES[name], S=S)
        assert o.shape == v.shape
        assert torch.equal(last, S)


@interpreted
def test_compiles_whole_and_not_again_for_every_length():
    """One graph, no break, values and gradients the same; a second length compiles once more, the others not at all.

    (Lengths of at most one chunk would be a graph of their own: torch.compile tells a size of 1 from the others.)
    """
    from torch._dynamo.testing import CompileCounterWithBackend

    any_length, rule, nothing = case("falcon-1"), fw.RULES["falcon-1"], (None, None, None)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda leaves: kernel(any_length, leaves, nothing, rule), fullgraph=True, backend=counter)
    for T in (65, 70, 129):
        test = case("falcon-1", shape=(1, T, 1, 1, 16, 16))
        inputs, around = make(test, torch.float32, "cpu"), surroundings(test, "cpu")
        pull = torch.ones(1, T, 1, 16), torch.ones(1, 1, 16, 16)
        expected = outcome(kernel, test, inputs, around, pull)
        got = outcome(lambda _test, leaves, _around: compiled(leaves), test, inputs, around, pull)
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
    assert counter.frame_count <= 2


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_kernels_interpreted():
    """Runs the tests above under the interpreter."""
    said = run_interpreted(__file__, "not gpu", timeout=900)
    assert said.count(".") >= len(SMALL) + len(SPLIT) + 4, said[-500:]


def test_reasons_name_what_is_missing(monkeypatch):
    q = torch.zeros(1, 2, 1, 16)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "CUDA" in dispatch.supported(q, q, q, None, None, fw.RULES["falcon-1"])
    assert "log-decays" in dispatch.supported(q, q, q, q, None, fw.RULES["falcon-2"], log_decay=q[..., 0])
    assert "above 8" in dispatch.supported(q, q, q, None, None, fw.RULES["falcon-3"].replace(window=9))
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert "mask" in dispatch.supported(q, q, q, None, None, fw.RULES["falcon-3a"], mask=mask)
    double = q.double()
    assert "float64" in dispatch.supported(double, double, double, None, None, fw.RULES["falcon-1"])
    assert "beta" in dispatch.supported(q, q, q, double[..., 0], None, fw.RULES["falcon-1"])
    wide = torch.zeros(1, 2, 1, 300)
    assert "300" in dispatch.supported(wide, wide, q, None, None, fw.RULES["falcon-1"])
    wide = torch.zeros(1, 2, 1, 136)
    assert "widths of 128" in dispatch.supported(wide, wide, wide, wide, None, fw.RULES["falcon-2a"])
    assert "widths" not in str(dispatch.supported(wide, wide, wide, wide, None, fw.RULES["falcon-2"]))
    half = q.half()
    assert "float16" in dispatch.supported(half, half, half, None, None, fw.RULES["falcon-1"])
    with pytest.raises(ValueError, match="backend"):
        dispatch.scan(q, q, q, None, None, fw.RULES["falcon-3"])


LARGE = [case("falcon-1"), case("delta", state=True), case("falcon-1a"), case("linear", state=True), case("falcon-3a")]
SURROUNDED = [
    case("falcon-1", shape=(2, 150, 1, 2, 64, 64), state=True, key=True, mask=True),
    case("falcon-1", shape=(1, 150, 1, 2, 64, 64), state=True, key=True, cuts=(0, 1, 1, 70, 150)),
    case("delta", shape=(1, 150, 1, 2, 64, 64), state=True, mask=True, cuts=(0, 70, 150)),
    case("falcon-1a", shape=(2, 150, 1, 2, 64, 64), state=True, key=True, mask=True),
    case("falcon-1a", shape=(1, 150, 1, 2, 64, 64), state=True, key=True, cuts=(0, 1, 1, 70, 150)),
    case("linear", shape=(1, 150, 1, 2, 64, 64), state=True, mask=True, cuts=(0, 70, 150)),
    case("falcon-3a", shape=(1, 150, 1, 2, 64, 64), state=True, cuts=(0, 1, 1, 70, 150)),
]
# The delta rule and linear attention take other flags of the kernels of falcon-1 and falcon-1a, so fewer of these.
SPARSE = {"delta": (NUMBERS[1], NUMBERS[4], NUMBERS[8]), "linear": (NUMBERS[1], NUMBERS[4], NUMBERS[8])}
LARGE_NUMBERS = [(test, *pair) for test in LARGE for pair in SPARSE.get(test.rule, NUMBERS)]
# Of the surroundings every combination in bfloat16, and in the other dtypes one width.
AROUND = [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 128), (torch.float32, 64)]


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize(
        ("test", "dtype", "widths"), LARGE_NUMBERS, ids=lambda part: getattr(part, "rule", str(part))
    )
    def test_widths_and_dtypes(self, test, widths, dtype):
        check(at(test, 2, 150, 1, 2, *widths), dtype, "cuda")

    @pytest.mark.parametrize("T", [1, 63, 64, 65, 128])
    @pytest.mark.parametrize("test", LARGE[::2], ids=lambda test: test.rule)
    def test_lengths(self, test, T):
        check(at(test, 1, T, 2, 2, 64, 64), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("test", SMALL, ids=lambda test: f"{test.rule}-{SMALL.index(test)}")
    def test_options(self, test):
        check(at(test, *test.shape[:4], 64, 64), torch.bfloat16, "cuda")

    @pytest.mark.parametrize(("dtype", "width"), AROUND, ids=str)
    @pytest.mark.parametrize("test", SURROUNDED, ids=lambda test: f"{test.rule}-{SURROUNDED.index(test)}")
    def test_surroundings(self, test, width, dtype):
        check(at(test, *test.shape[:4], width, width), dtype, "cuda")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("test", SURROUNDED, ids=lambda test: f"{test.rule}-{SURROUNDED.index(test)}")
    def test_wide_surroundings(self, test, dtype):
        check(at(test, *test.shape[:4], 256, 256), dtype, "cuda")

    @pytest.mark.parametrize("rule", ["falcon-1", "falcon-1a", "falcon-3a"])
    def test_thousands_of_sequences(self, rule):
        lengths = torch.randint(0, 41, (5000,), generator=torch.Generator().manual_seed(5))
        cuts = (0, *lengths.cumsum(0).tolist())
        key = rule != "falcon-3a"
        check(case(rule, shape=(1, cuts[-1], 1, 1, 32, 32), cuts=cuts, key=key), torch.float32, "cuda")

    def test_more_elements_than_32_bits_count(self):
        for rule in ("falcon-1", "falcon-1a"):  # one after the other: each takes half of the device's memory
            self._rows_far_behind(rule)
            torch.cuda.empty_cache()

    def _rows_far_behind(self, rule):
        """Rows far behind element 2^31 equal the same rows alone, bit for bit, gradients too."""
        B, T, H, D = 1030, 256, 64, 128
        assert B * T * H * D > 2**31
        random = torch.Generator("cuda").manual_seed(0)
        q, k, v, pull = (
            torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16, generator=random) for _ in range(4)
        )
        beta, lam = (torch.rand(B, T, H, device="cuda", generator=random) for _ in range(2))
        every, last = [], []
        for tensor in (q, k, v, beta, lam):
            every.append(tensor.requires_grad_())
            last.append(tensor[-2:].detach().clone().requires_grad_())
        o, S = dispatch.scan(*every, fw.RULES[rule])
        o2, S2 = dispatch.scan(*last, fw.RULES[rule])
        assert torch.equal(o[-2:], o2)
        assert torch.equal(S[-2:], S2)
        torch.autograd.backward([o, S], [pull, S.detach()])
        torch.autograd.backward([o2, S2], [pull[-2:], S2.detach()])
        for name, whole, part in zip(("q", "k", "v", "beta", "lam"), every, last, strict=True):
            assert whole.grad is not None
            assert torch.equal(whole.grad[-2:], part.grad), name

    @pytest.mark.parametrize("rule", ["falcon-1", "falcon-1a", "falcon-3a"])
    def test_strong_decay_and_large_gain(self, rule):
        check(case(rule, shape=(1, 232, 1, 2, 128, 128), ridge=1e6), torch.bfloat16, "cuda")
        check(case(rule, shape=(1, 232, 1, 2, 128, 128), beta=2.0, ridge=0.1), torch.bfloat16, "cuda")

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("test", LARGE[::2], ids=lambda test: test.rule)
    def test_sequences_in_pieces(self, test, dtype):
        check(at(test, 1, 2100, 1, 1, 128, 128), dtype, "cuda")

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
    @pytest.mark.parametrize("test", LARGE, ids=lambda test: test.rule)
    def test_on_a_device_that_is_not_the_current_one(self, test):
        assert torch.cuda.current_device() == 0
        check(at(test, 1, 100, 1, 2, 128, 128), torch.bfloat16, "cuda:1")

    def test_same_result_twice(self):
        test = case("falcon-1", shape=(2, 300, 2, 2, 128, 128))
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        pull = torch.randn(2, 300, 2, 128, device="cuda"), torch.randn(2, 2, 128, 128, device="cuda")
        first, second = (outcome(kernel, test, inputs, around, pull) for _ in range(2))
        for name, value in first.items():
            assert torch.equal(value, second[name]), name

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
    def test_compiles_whole_and_captures(self):
        test = case("falcon-1", shape=(1, 128, 1, 1, 64, 64))
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        expected = kernel(test, inputs, around)
        rule = rule_of(test)
        compiled = torch.compile(lambda leaves: kernel(test, leaves, around, rule), fullgraph=True)
        for got, value in zip(compiled(inputs), expected, strict=True):
            assert torch.equal(got, value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = kernel(test, inputs, around)
        graph.replay()
        for got, value in zip(captured, expected, strict=True):
            assert torch.equal(got, value)
