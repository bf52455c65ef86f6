"""The Hopper kernels of the regression class: which calls they take (anywhere), what they compute (on Hopper)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastweight.kernels import launch, launch_hopper, launch_solve
from fastweight.kernels.geometry import Geometry
from tests.kernel_harness import case, check, gpu

PLAN = launch.Plan(1e-6, 1e-4, True, False, False, False, False, False)


def given(K=64, V=64, dtype=torch.bfloat16, **around) -> launch.Inputs:
    q, k = torch.zeros(2, 2, 5, 1, K, dtype=dtype)
    v = torch.zeros(2, 5, 1, V, dtype=dtype)
    beta = torch.ones(2, 5, 1)
    key = torch.zeros(2, 1, K) if "has_key" in around else None
    return launch.Inputs.of(PLAN, q, k, v, beta, beta, key, around.get("has_key"), around.get("mask"))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(launch_hopper, "available", lambda device: True)


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("V", [64, 128, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_takes_dense_half_precision(hopper, K, V, dtype):
    assert launch_hopper.fits(given(K, V, dtype), None)


REFUSED = {
    "float32": given(dtype=torch.float32),
    "odd keys": given(K=80),
    "wide keys": given(K=256),
    "odd values": given(V=96),
    "a mask": given(mask=torch.ones(2, 5, dtype=torch.bool)),
    "a carried key": given(has_key=torch.ones(2, dtype=torch.bool)),
    "no tokens": given()._replace(v=torch.zeros(2, 0, 1, 64, dtype=torch.bfloat16)),
    "no alignment": given()._replace(q=torch.zeros(641, dtype=torch.bfloat16)[1:].view(2, 5, 1, 64)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_leaves_the_rest_to_the_plain_kernels(hopper, why):
    assert not launch_hopper.fits(REFUSED[why], None)
    assert not launch_hopper.fits(given(), torch.tensor([0, 10]))


def test_the_prepared_inverse_is_bfloat16_only(hopper):
    """In float16 the merges need three products each, which the plain kernel has."""
    where = Geometry.of(2, 5, None)
    assert launch_solve._engine(given(dtype=torch.bfloat16), where)[0].prepare is launch_hopper.prepare
    assert launch_solve._engine(given(dtype=torch.float16), where)[0].prepare is not launch_hopper.prepare


@pytest.mark.parametrize("heads", [1, 2, 16, 60, 66, 200])
@pytest.mark.parametrize("chunks", [1, 31, 32, 35, 512])
def test_pieces_cover_a_sequence_and_fit_the_device(heads, chunks):
    where = Geometry.of(1, 64 * chunks - 3, None)
    tokens = given(128, 128)
    tokens = tokens._replace(v=torch.empty(1, 1, heads, 128, dtype=torch.bfloat16, device="meta"))
    walk = launch_hopper.walk_of(where, tokens)
    assert walk.segments == 1 or (walk.segments - 1) * walk.length < chunks <= walk.segments * walk.length
    assert walk.segments == 1 or heads * 2 * walk.segments <= launch_hopper.WALKING


@pytest.mark.parametrize(
    ("shape", "rows"), [((16, 4096, 16, 128), 8), ((64, 1024, 6, 128), 64), ((64, 4096, 16, 128), 16)]
)
def test_rows_of_a_large_batch_go_in_turns(shape, rows):
    """Whole device fulls of them where their state gradients would be large, and all where anything is not checked."""
    B, T = shape[:2]
    q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    call = given()._replace(q=q, k=q, v=q)
    walk = launch.Walk(Geometry.of(B, T, None), 1, 2**30)
    assert launch_hopper.rows_at_once(walk, call) == rows
    half = q.to(torch.float16)
    for other in (call._replace(q=q[:, :, :1]), call._replace(v=half), call._replace(v=q[:, :-1])):
        assert launch_hopper.rows_at_once(walk, other) == B


def test_nothing_is_taken_without_a_device():
    assert not launch_hopper.fits(given(), None)


BARRIERS = {"new_barrier", "rings_of", "MBarrierLayout"}  # calls that allocate barriers in shared memory
GLUON = sorted(Path(launch_hopper.__file__).parent.glob("hopper_*.py"))


def called(node: ast.AST) -> set[str]:
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


@pytest.mark.parametrize("path", GLUON, ids=lambda path: path.stem)
def test_barriers_outlive_all_data(path):
    """Memory of a barrier that is lent to data is overwritten with the barrier's state when processes take turns."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    for kernel in functions:
        if called(kernel) & BARRIERS and kernel.name not in BARRIERS:
            assert called(kernel.body[-1]) <= {"_keep_alive", "keep_barriers"}, kernel.name
    assert len(GLUON) >= 6


ON_HOPPER = [
    case("falcon-1", shape=(2, 130, 2, 2, 128, 128)),
    case("falcon-1", shape=(2, 64, 2, 2, 64, 64), state=True),
    case("delta", shape=(2, 100, 1, 2, 128, 128), state=True, ridge=0.5),
    case("falcon-1", {"timing": "read-before-write"}, shape=(2, 130, 2, 4, 128, 64), state=True),
    case("falcon-1", {"step": "direct", "pairing": "same-step"}, shape=(2, 64, 1, 2, 64, 128), ridge=0.5),
    case("falcon-1", {"ridge": "scaled"}, shape=(2, 65, 1, 2, 64, 192), zero_beta=True),
    case("falcon-1", ridge=1e6, shape=(1, 100, 1, 1, 128, 128)),
    case("falcon-1", beta=2.0, ridge=1e-3, shape=(1, 200, 1, 1, 128, 128)),
    case("delta", shape=(3, 1, 2, 2, 128, 128), state=True, ridge=0.5),
    case("delta", {}, shape=(1, 63, 2, 2, 64, 64), no_gates=True),
]


def name(test) -> str:
    return f"{test.rule}-{'x'.join(map(str, test.shape))}"


class TestOnHopper:
    pytestmark = gpu

    @pytest.fixture(autouse=True)
    def taken(self, monkeypatch):
        """Fails where the plain kernels would run."""
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs a Hopper device")
        monkeypatch.delenv(launch_hopper.SWITCH, raising=False)
        monkeypatch.setattr(launch_solve, "PLAIN", None)

    @pytest.mark.parametrize("test", ON_HOPPER, ids=name)
    def test_bfloat16(self, test):
        check(test, torch.bfloat16, "cuda")

    @pytest.mark.parametrize("test", [ON_HOPPER[0], ON_HOPPER[5]], ids=name)
    def test_float16(self, test):
        check(test, torch.float16, "cuda")

    @pytest.mark.parametrize("shape", [(1, 330, 1, 1, 128, 128), (2, 260, 1, 2, 64, 64)], ids=str)
    @pytest.mark.parametrize("rule", ["falcon-1", "delta"])
    def test_sequences_in_pieces(self, rule, shape, monkeypatch):
        monkeypatch.setattr(launch_hopper, "walk_of", lambda where, _: launch.Walk(where, 3, -(-where.chunks // 3)))
        check(case(rule, shape=shape, state=True, ridge=0.3), torch.bfloat16, "cuda")

    def test_processes_that_take_turns(self):
        """Several processes on one device: the driver stops kernels in their middle and goes on with them later."""
        started = [
            subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for _ in range(4)
        ]
        said = [process.communicate(timeout=240)[0] for process in started]
        assert [process.returncode for process in started] == [0] * 4, "\n".join(said)

    def test_inverse_where_keys_repeat(self):
        """Every row is coupled to every earlier one; only bfloat16 rounds what comes out."""
        random = torch.Generator("cuda").manual_seed(0)
        key = torch.nn.functional.normalize(torch.randn(128, device="cuda", generator=random), dim=0).bfloat16()
        k = key.expand(1, 192, 1, 128).contiguous()
        beta = torch.ones(1, 192, 1, device="cuda")
        tokens = launch.Inputs.of(PLAN, k, k, k, beta, None, None, None, None)
        (step, _decay), inverse = launch_hopper.prepare(PLAN, tokens, Geometry.of(1, 192, None))
        for chunk in range(3):
            gains = step[0, chunk * 64 : chunk * 64 + 64].double()
            coupling = torch.tril((key.double() @ key.double()) * gains.expand(64, 64), -1)
            expected = torch.linalg.inv(torch.eye(64, device="cuda", dtype=torch.float64) + coupling).tril(-1)
            assert (inverse[chunk, 0].double() - expected).norm() <= 4e-3 * expected.norm()


def repeat(seconds: float = 8.0) -> None:
    """Forward and backward again and again without waiting, for some seconds; raises if a result ever changes."""
    import time

    from fastweight import fast_weight_attention

    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(32, 1024, 6, 128, device="cuda", generator=random).bfloat16() for _ in range(3))
    beta, lam = (torch.rand(32, 1024, 6, device="cuda", generator=random) for _ in range(2))
    inputs = [tensor.requires_grad_() for tensor in (q, k / k.float().norm(dim=-1, keepdim=True).to(k), v, beta, lam)]

    def outcome() -> list[torch.Tensor]:
        o = fast_weight_attention(*inputs, rule="falcon-1", backend="triton")[0]
        return [o, *torch.autograd.grad(o, inputs, v)]

    first, end, changed = outcome(), time.monotonic() + seconds, torch.zeros((), device="cuda", dtype=torch.bool)
    while time.monotonic() < end:
        for _ in range(20):
            for one, other in zip(first, outcome(), strict=True):
                changed |= (one != other).any()
        assert not changed.item(), "a result changed from one call to the next"


if __name__ == "__main__":
    repeat()
