"""The Triton kernels against the float64 recurrence: values, final states and every gradient.

The same cases run on the CPU through Triton's interpreter (small, float32, in a process of its own because the
interpreter must be chosen before Triton is imported) and on a CUDA device (all dtypes and widths, marked gpu).
"""

import contextlib
import os
from dataclasses import dataclass, replace

import pytest
import torch

import fastweight as fw
from fastweight.kernels import dispatch
from fastweight.memory.attention import DELTA_RULE, LINEAR_ATTENTION
from tests.interpreter import run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that test_kernels_interpreted starts")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Largest relative RMS error of anything that comes out; bfloat16 has 8 bits, and each value passes four products.
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


if INTERPRETED:
    import triton.language as tl
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_and_index(tensor, scope):
        """Triton 3.6 holds a scalar as an array of one element, which NumPy 2.4 no longer turns into an index."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_and_index

    _patch_all = interpreter._patch_lang

    def _patch_where_needed(fn):
        """Triton 3.6 patches its whole language at each call of a device function: once will do."""
        langs = [lang for lang in fn.__globals__.values() if lang is tl or lang is tl.core]
        if langs and all(lang.arange.__name__ == "<lambda>" for lang in langs):
            return interpreter._LangPatchScope()
        return _patch_all(fn)

    interpreter._patch_lang = _patch_where_needed


@dataclass(frozen=True)
class Case:
    """One call: a rule (or a baseline with its own log-decay), its options, shapes, and what surrounds the tokens."""

    rule: str
    options: tuple[tuple[str, object], ...] = ()
    shape: tuple[int, int, int, int, int, int] = (1, 70, 1, 1, 16, 16)  # B T Hk H K V
    state: bool = False
    key: bool = False
    mask: bool = False
    cuts: tuple[int, ...] | None = None
    ridge: float = 1.0
    beta: float = 1.5
    zero_beta: bool = False
    no_gates: bool = False

    @property
    def baseline(self) -> bool:
        return self.rule in ("delta", "linear")


def case(rule: str, options: dict | None = None, **changes) -> Case:
    return Case(rule, tuple((options or {}).items()), **changes)


def rule_of(test: Case):
    if test.baseline:
        return DELTA_RULE if test.rule == "delta" else LINEAR_ATTENTION
    return fw.RULES[test.rule].replace(**dict(test.options))


def make(test: Case, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor | None]:
    """Random inputs; keys small where the step is given, so that the regression is stable."""
    B, T, Hk, H, K, V = test.shape
    random = torch.Generator().manual_seed(7)
    rule = rule_of(test)
    small = K**-0.5 if rule.step == "direct" else 1.0
    N = B if test.cuts is None else len(test.cuts) - 1

    def draw(*shape, like=torch.randn):
        return like(*shape, generator=random)

    beta = draw(B, T, H, *((V,) if rule.gain == "column" else ()), like=torch.rand) * test.beta
    if test.zero_beta:
        beta[:, ::3] = 0
    gate = draw(B, T, H, like=torch.rand) * test.ridge
    inputs = {
        "q": (draw(B, T, Hk, K) * K**-0.5).to(dtype),
        "k": (draw(B, T, Hk, K) * small).to(dtype),
        "v": draw(B, T, H, V).to(dtype),
        "beta": None if test.no_gates or test.rule == "linear" else beta,
        "gate": None if test.no_gates else -gate if test.baseline else gate,
        "S": draw(N, H, K, V) if test.state else None,
        "key": draw(N, Hk, K).to(dtype).float() if test.key else None,
    }
    return {name: None if value is None else value.to(device) for name, value in inputs.items()}


def surroundings(test: Case, device: str):
    B, T = test.shape[:2]
    N = B if test.cuts is None else len(test.cuts) - 1
    has_key = torch.arange(N, device=device) % 2 == 0 if test.key else None
    mask = (torch.rand(B, T, generator=torch.Generator().manual_seed(1)) > 0.3).to(device) if test.mask else None
    cu = None if test.cuts is None else torch.tensor(test.cuts, device=device, dtype=torch.int32)
    return has_key, mask, cu


def kernel(test: Case, leaves: dict, around, rule=None):
    has_key, mask, cu = around
    gates = (None, leaves["gate"]) if test.baseline else (leaves["gate"], None)
    return dispatch.scan(
        leaves["q"], leaves["k"], leaves["v"], leaves["beta"], gates[0], rule or rule_of(test), log_decay=gates[1],
        S=leaves["S"], key=leaves["key"], has_key=has_key, mask=mask, cu_seqlens=cu,
    )  # fmt: skip


def judge(test: Case, leaves: dict, around):
    """The library's recurrence, one token at a time, in float64."""
    has_key, mask, cu = around
    rule, state = rule_of(test), leaves["S"]
    H, V = test.shape[3], test.shape[5]
    if test.key:
        N = len(leaves["key"])
        S = leaves["S"] if test.state else leaves["v"].new_zeros(N, H, leaves["k"].shape[-1], V)
        state = fw.State.fresh(S, rule, num_key_heads=test.shape[2])._replace(key=leaves["key"], has_key=has_key)
    common = {"form": "recurrent", "backend": "torch", "initial_state": state, "output_final_state": True}
    common |= {"cu_seqlens": cu, "mask": mask}
    q, k, v, beta, gate = (leaves[name] for name in ("q", "k", "v", "beta", "gate"))
    if test.rule == "delta":
        o, last = fw.delta_rule(q, k, v, beta, gate, **common)
    elif test.rule == "linear":
        o, last = fw.linear_attention(q, k, v, gate, **common)
    else:
        o, last = fw.fast_weight_attention(q, k, v, beta, gate, rule, **common)
    return o, last.S


def outcome(run, test: Case, inputs: dict, around, pull) -> dict[str, torch.Tensor]:
    """Values and gradients of one implementation, by name."""
    leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in inputs.items()}
    o, S = run(test, leaves, around)
    torch.autograd.backward([o, S], [pull[0].to(o.dtype), pull[1].to(S.dtype)])
    found = {"o": o.detach(), "final S": S.detach()}
    for name, leaf in leaves.items():
        if leaf is not None:
            assert leaf.grad is not None, f"no gradient of {name}"
            found[f"gradient of {name}"] = leaf.grad
    return found


def check(test: Case, dtype: torch.dtype, device: str) -> None:
    inputs, around = make(test, dtype, device), surroundings(test, device)
    B, T, _Hk, H, K, V = test.shape
    N = B if test.cuts is None else len(test.cuts) - 1
    random = torch.Generator().manual_seed(3)
    pull = torch.randn(B, T, H, V, generator=random).to(device, dtype), torch.randn(N, H, K, V, generator=random)
    pull = pull[0], pull[1].to(device)
    ours = outcome(kernel, test, inputs, around, pull)
    wide = {name: None if value is None else value.double() for name, value in inputs.items()}
    theirs = outcome(judge, test, wide, around, pull)
    assert ours.keys() == theirs.keys()
    wrong = {}
    for name, expected in theirs.items():
        got = ours[name].double()
        assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        scale = expected.double().norm()
        error = (got - expected.double()).norm() / scale if scale > 0 else got.norm()
        if not error <= ALLOWED[dtype]:
            wrong[name] = float(error)
    assert not wrong, f"relative errors above {ALLOWED[dtype]} for {test}: {wrong}"


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
def test_backward_returns_one_gradient_per_input_and_no_second_one(monkeypatch):
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
    q = torch.randn(1, 3, 1, 4, requires_grad=True)
    o, _ = dispatch.scan(q, q, q, None, None, fw.RULES["falcon-1"])
    (d_q,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        d_q.sum().backward()


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
    wide = torch.zeros(1, 2, 1, 200)
    assert "mask" in dispatch.supported(wide, wide, wide, None, None, fw.RULES["falcon-1"], mask=mask)
    wide = torch.zeros(1, 2, 1, 300)
    assert "300" in dispatch.supported(wide, wide, q, None, None, fw.RULES["falcon-1"])
    half = q.half()
    assert "float16" in dispatch.supported(half, half, half, None, None, fw.RULES["falcon-1"])
    with pytest.raises(ValueError, match="backend"):
        dispatch.scan(q, q, q, None, None, fw.RULES["falcon-3"])


def at(test: Case, *shape: int) -> Case:
    return replace(test, shape=shape)


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
WIDTHS = [(64, 64), (128, 128), (128, 64), (16, 24), (80, 48), (256, 256)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# What is compiled for each pair of dtype and widths takes seconds, so not every pair: all widths in bfloat16, in the
# others one of each class (powers of two or not, K != V, narrow, too wide for one tile).
NUMBERS = [(torch.bfloat16, widths) for widths in WIDTHS] + [
    (torch.float16, (128, 64)),
    (torch.float16, (80, 48)),
    (torch.float32, (64, 64)),
    (torch.float32, (16, 24)),
    (torch.float32, (256, 256)),
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
