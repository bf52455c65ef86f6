"""The Hopper kernels on the machine of tests/machine: against the recurrence, and what it says of kernels that race.

Bit for bit a device computes something else, so errors are those that test_kernels.py allows.
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from tests.kernel_harness import Case, case, check, kernel, make, outcome, surroundings
from tests.machine import Hazard, start
from tests.machine.units import Tma

pytest.importorskip("triton")

from fastweight.kernels import (
    dispatch,
    launch,
    launch_additive,
    launch_hopper,
    launch_hopper_gradient,
    launch_solve,
)
from fastweight.kernels.reach import bound

KERNELS = Path(launch_hopper.__file__).parent
# All that start kernels, imported before any is given another `start`, which one that comes later would keep.
HOSTS = [importlib.import_module(f"fastweight.kernels.{path.stem}") for path in sorted(KERNELS.glob("launch*.py"))]
CASES = [
    case("falcon-1a", shape=(1, 130, 1, 2, 64, 64), state=True),
    case("falcon-1a", {"timing": "read-before-write", "ridge": "scaled"}, shape=(1, 70, 1, 1, 64, 64), zero_beta=True),
    case("linear", shape=(2, 100, 1, 1, 128, 128), state=True, ridge=0.3),
    case("falcon-3a", shape=(1, 123, 1, 1, 64, 64), state=True),
    case("falcon-1", shape=(1, 130, 1, 2, 64, 64), state=True),
    case("falcon-1", {"timing": "read-before-write", "ridge": "scaled"}, shape=(1, 70, 1, 1, 64, 64), zero_beta=True),
    case("delta", shape=(2, 100, 1, 1, 128, 128), state=True, ridge=0.3),
]
LONG = case("falcon-1a", shape=(1, 260, 1, 1, 64, 64), state=True)
AHEAD = case("falcon-1a", shape=(1, 260, 1, 1, 128, 128), state=True)  # tiles come a chunk ahead
UNSHIFTED = [case("falcon-1a", {"pairing": "same-step"}, shape=(1, 70, 1, 1, D, D)) for D in (64, 128)]


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Calls on the CPU go to the Hopper kernels, and those to the machine."""
    for host in HOSTS:
        if hasattr(host, "start"):
            monkeypatch.setattr(host, "start", start)
    monkeypatch.setattr(launch_hopper, "available", lambda device: True)
    monkeypatch.setattr(launch_hopper_gradient, "available", lambda device: True)
    monkeypatch.setattr(dispatch, "machine_reason", lambda device: None)
    monkeypatch.setattr(launch_additive, "PLAIN", None)
    monkeypatch.setattr(launch_solve, "PLAIN", None)


def taken(path: Path, source: str, folder: Path, monkeypatch) -> None:
    """The module of that file is made of this source from now on."""
    (folder / path.name).write_text(source)
    spec = importlib.util.spec_from_file_location(f"fastweight.kernels.{path.stem}", folder / path.name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(sys.modules["fastweight.kernels"], path.stem, module, raising=False)


def name(test: Case) -> str:
    return f"{test.rule}-{CASES.index(test)}"


@pytest.mark.parametrize("test", CASES, ids=name)
def test_equals_the_recurrence(test):
    check(test, torch.bfloat16, "cpu")


MORE = [
    case(
        "falcon-1a", {"timing": "read-before-write", "ridge": "scaled"}, shape=(1, 140, 1, 1, 128, 128), zero_beta=True,
    ),
    case("falcon-1a", {"step": "direct", "pairing": "same-step"}, shape=(1, 128, 1, 1, 128, 128), ridge=0.5),
]  # fmt: skip


@pytest.mark.parametrize("test", [*CASES[:4], *MORE], ids=lambda test: f"{test.rule}-{test.shape[1]}-{test.shape[-1]}")
def test_one_walk_back_equals_the_recurrence(test):
    check(test, torch.bfloat16, "cpu")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("length", [260, 321, 384])
def test_one_walk_back_in_pieces(length, pairing, width, monkeypatch):
    """Whole chunks at the end, one token more, and the borders between pieces."""

    def three(where, _):
        return launch.Walk(where, 3, -(-where.chunks // 3))

    monkeypatch.setattr(launch_additive, "HOPPER", launch_additive.HOPPER._replace(walk_of=three))
    test = case("falcon-1a", {"pairing": pairing}, shape=(1, length, 1, 1, width, width), state=True)
    check(test, torch.bfloat16, "cpu")


@pytest.mark.parametrize("rule", ["falcon-1a", "falcon-1"])
def test_sequences_in_pieces(rule, monkeypatch):
    def three(where, _):
        return launch.Walk(where, 3, -(-where.chunks // 3))

    monkeypatch.setattr(launch_additive, "HOPPER", launch_additive.HOPPER._replace(walk_of=three))
    monkeypatch.setattr(launch_hopper, "walk_of", three)
    check(case(rule, shape=(1, 300, 1, 1, 64, 64), state=True), torch.bfloat16, "cpu")


def copies_of(monkeypatch) -> list[int]:
    """Grows by one for every tile that is copied in."""
    copied: list[int] = []
    real = Tma.async_copy_global_to_shared

    def counted(desc, coords, barrier, shared, pred=True):
        copied.extend([1] * bool(pred))
        real(desc, coords, barrier, shared, pred)

    monkeypatch.setattr(Tma, "async_copy_global_to_shared", staticmethod(counted))
    return copied


FADING = [
    (case("falcon-1", shape=(1, 250, 1, 1, 64, 64), ridge=600.0), True),
    (case("falcon-1", {"step": "direct"}, shape=(1, 250, 1, 1, 64, 64), state=True, ridge=4.0, beta=0.8), True),
    (case("delta", shape=(1, 250, 1, 1, 64, 64), state=True, ridge=3.0), True),
    (case("falcon-1", {"timing": "read-before-write"}, shape=(1, 250, 1, 1, 64, 64), no_gates=True), False),
]


def all_along(patch) -> None:
    """Walks pass over nothing."""
    patch.setattr(launch_solve, "HOPPER", launch_solve.HOPPER._replace(reach=lambda *_: None))


@pytest.mark.parametrize(("test", "fades"), FADING, ids=lambda value: getattr(value, "rule", ""))
def test_what_fades_is_passed_over_and_nothing_changes(test, fades, monkeypatch):
    """Bit for bit, from fewer tiles where decays are strong, and from all of them where nothing fades."""
    monkeypatch.setattr(launch_hopper, "walk_of", lambda where, _: launch.Walk(where, 2, 2))
    copied = copies_of(monkeypatch)
    inputs, around = make(test, torch.bfloat16, "cpu"), surroundings(test, "cpu")
    random = torch.Generator().manual_seed(3)
    pull = torch.randn(1, 250, 1, 64, generator=random).bfloat16(), torch.randn(1, 1, 64, 64, generator=random)
    with monkeypatch.context() as patch:
        all_along(patch)
        expected = outcome(kernel, test, inputs, around, pull)
    whole = len(copied)
    for part, value in outcome(kernel, test, inputs, around, pull).items():
        assert torch.equal(value, expected[part]), part
    read = len(copied) - whole
    # Without fading only the first piece's walk from nothing in reverse, which nobody asks for, is left out.
    assert read < whole - 2 * 4 if fades else read == whole - 2 * 4


def test_what_lives_on_along_its_keys_is_not_passed_over(monkeypatch):
    """Gains near 2 and one key: gamma is 0.005, but along the key 0.99 is left a token, with turning signs."""
    test = case("falcon-1", shape=(1, 140, 1, 1, 64, 64), state=True)
    monkeypatch.setattr(launch_hopper, "walk_of", lambda where, _: launch.Walk(where, 3, 1))
    inputs, around = make(test, torch.bfloat16, "cpu"), surroundings(test, "cpu")
    key = torch.randn(64, generator=torch.Generator().manual_seed(5)).bfloat16()
    inputs["k"] = key.expand(1, 140, 1, 64).clone()
    inputs["beta"] = torch.full((1, 140, 1), 1.99)
    inputs["gate"] = torch.full((1, 140, 1), float(key.float().square().sum()))
    pull = torch.ones(1, 140, 1, 64).bfloat16(), torch.ones(1, 1, 64, 64)
    with monkeypatch.context() as patch:
        all_along(patch)
        expected = outcome(kernel, test, inputs, around, pull)
    for part, value in outcome(kernel, test, inputs, around, pull).items():
        assert torch.equal(value, expected[part]), part


@pytest.mark.parametrize(("rule", "width"), [("falcon-1", 128), ("delta", 128), ("falcon-1", 64)])
def test_state_gradients_lie_where_other_gradients_will(rule, width, monkeypatch):
    """Bit for bit what comes out with a room of their own, and no such room."""
    test = case(rule, shape=(1, 128, 1, 2, width, width), state=rule == "delta", ridge=0.3)
    inputs, around = make(test, torch.bfloat16, "cpu"), surroundings(test, "cpu")
    pull = torch.ones(1, 128, 2, width).bfloat16(), torch.ones(1, 2, width, width)
    with monkeypatch.context() as patch:
        patch.setattr(launch_hopper, "shares_room", lambda given: False)
        expected = outcome(kernel, test, inputs, around, pull)
    made: list[int] = []
    real = launch.Gradients.__init__

    def noted(self, *arguments):
        real(self, *arguments)
        made.append(self.states.numel())

    monkeypatch.setattr(launch.Gradients, "__init__", noted)
    for part, value in outcome(kernel, test, inputs, around, pull).items():
        assert torch.equal(value, expected[part]), part
    assert made == [0]


SHARING = KERNELS / "hopper_solve_gradient.py"
UNSHARED = [
    ("keep & (i >= SHIFT), H, K)", "keep, H, K)"),  # the last row of the chunk before
    ("keep & (i == 0), H, K)", "keep, H, K)"),  # rows of other chunks' halo
    ("i, h, start, i == high - 1, H, K)", "i, h, start, i == high, H, K)"),  # the first row of the next sequence
]


@pytest.mark.parametrize(("right", "wrong"), UNSHARED)
def test_sees_chunks_in_the_place_of_others(right, wrong, monkeypatch, tmp_path):
    source = SHARING.read_text()
    assert source.count(right) == 1
    taken(SHARING, source.replace(right, wrong), tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(case("falcon-1", shape=(2, 128, 1, 1, 128, 128)), torch.bfloat16, "cpu")


KERNEL = KERNELS / "hopper_additive_backward.py"
KEEPS_APART = ("gl.thread_barrier()", "fence_async_shared()", "tma.store_wait(0)", "mbarrier.wait(")
SOURCE = KERNEL.read_text()
LEFT_OUT = [at for at, line in enumerate(SOURCE.splitlines()) if line.strip().startswith(KEEPS_APART)]
CHANGED = [
    ("if at >= SHIFT:", "if at >= 0:"),  # a copy out begins at row -1
    ("warpgroup_mma_wait(1, deps=(d_x, d_q, d_y))", "warpgroup_mma_wait(2, deps=(d_x, d_q, d_y))"),
    ("[n, at, h * V], s_dy", "[n, at - SHIFT, h * V], s_dy"),
    ("ahead_state = ((slot - (c + 1) * H) * K, 0)", "ahead_state = ((slot - c * H) * K, 0)"),  # its own again
    ("(n, ahead, h * V)), c + 1 < count)", "(n, ahead, h * V)), c + 1 <= count)"),  # nobody waits for the last tiles
    ("(n, ahead, h * V)), c + 2 < count)", "(n, ahead, h * V)), c + 2 <= count)"),
    ("wanted = (c > 0) & (c + 1 < count)", "wanted = c + 1 < count"),  # announced twice
]
EDGES = "mask=(i > 0) & (i <= length)", "mask=i <= length"  # the row before the first


def ways(line: int) -> set[str]:
    """Whether the one walk comes to that line where tiles come when they are needed, a chunk ahead, or both."""
    found = {"needed", "ahead"}
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.If) and "AHEAD" in (test := ast.unparse(node.test)):
            default = test.startswith("not")
            one, other = ("needed", "ahead") if default else ("ahead", "needed")
            for way, body in ((one, node.body), (other, node.orelse)):
                if body and body[0].lineno <= line + 1 <= (body[-1].end_lineno or 0):
                    found &= {way}
    return found


def check_all(tests: list[Case]) -> None:
    for test in tests:
        check(test, torch.bfloat16, "cpu")


def fails(test: Case) -> bool:
    try:
        check(test, torch.bfloat16, "cpu")
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("line", LEFT_OUT)
def test_sees_what_is_left_out(line, monkeypatch, tmp_path):
    """A kernel that lacks one of its barriers, fences or waits is one that races, and the machine says so."""
    lines = SOURCE.splitlines()
    lines[line] = lines[line].replace(lines[line].strip(), "pass")
    taken(KERNEL, "\n".join(lines), tmp_path, monkeypatch)
    for way in sorted(ways(line)):
        with pytest.raises(Hazard):
            check_all([LONG, UNSHIFTED[0]] if way == "needed" else [AHEAD, UNSHIFTED[1]])


@pytest.mark.parametrize(("right", "wrong"), CHANGED)
def test_sees_what_is_wrong(right, wrong, monkeypatch, tmp_path):
    assert SOURCE.count(right) > 0
    taken(KERNEL, SOURCE.replace(right, wrong), tmp_path, monkeypatch)
    assert fails(LONG) or fails(AHEAD)


def test_sees_gradients_before_the_first_token(monkeypatch, tmp_path):
    path = KERNELS / "hopper_additive_sums.py"
    taken(path, path.read_text().replace(*EDGES), tmp_path, monkeypatch)
    taken(KERNEL, SOURCE, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(LONG, torch.bfloat16, "cpu")


@pytest.mark.parametrize("gain", [1.0, 1.9])
@pytest.mark.parametrize("given", [False, True])
def test_bound_of_what_a_chunk_leaves(given, gain):
    """Never below the norms of the steps, multiplied; where gains are at most 1 or steps are given, just that."""
    random = torch.Generator().manual_seed(0)
    k = torch.randn(1, 100, 1, 64, generator=random).bfloat16()
    beta, lam = torch.rand(1, 100, 1, generator=random) * gain, torch.rand(1, 100, 1, generator=random) * 100
    energy = torch.cat((torch.zeros(1), k[0, :-1, 0].float().square().sum(-1)))
    eta = beta[0, :, 0] / (energy + lam[0, :, 0])
    carry = 1 - (eta * lam[0, :, 0]).clamp(max=1 - 1e-4)
    decay = torch.cat([part.log2().cumsum(0) for part in carry.split(64)])
    left = torch.empty(2, 1)
    shape = {"H": 1, "KH": 1, "K": 64, "BK": 64, "SHIFT": 1, "GIVEN": given, "DECAYED": False}
    start(bound, (2, 1), k, beta, eta[None], decay[None], left, 100, 2, 100, **shape)
    norms = torch.maximum(carry, (carry - eta * energy).abs()).log2()
    expected = torch.stack([part.sum() for part in norms.split(64)])
    assert (left[:, 0] >= expected - 1e-2).all()
    if given or gain == 1.0:
        assert torch.allclose(left[:, 0], expected, atol=1e-2)
