"""falcon-2's kernels for Hopper on the machine of tests/machine: against the recurrence, and what they leave undone."""

import pytest
import torch

from tests.kernel_harness import ALLOWED, case, check, judge, kernel, make, outcome, surroundings
from tests.machine import start

pytest.importorskip("triton")

from fastweight.kernels import dispatch, launch_hopper_gradient, launch_solve_columns

BEFORE = {"timing": "read-before-write"}
CASES = [
    case("falcon-2", shape=(1, 70, 1, 2, 64, 64), state=True),
    case("falcon-2", shape=(2, 66, 1, 1, 128, 128)),
    case("falcon-2", BEFORE, shape=(1, 50, 1, 1, 128, 128), cuts=(0, 20, 20, 50), state=True, key=True),
    case("falcon-2", shape=(1, 150, 2, 4, 64, 64), cuts=(0, 1, 1, 70, 150), state=True, key=True, mask=True),
    case("falcon-2", {"ridge": "scaled", "step": "direct", "pairing": "same-step"}, shape=(1, 66, 1, 1, 64, 64),
         zero_beta=True, ridge=0.1),
    case("falcon-2", BEFORE | {"ridge": "scaled"}, shape=(1, 33, 1, 1, 64, 64), ridge=0.3),
]  # fmt: skip


@pytest.fixture(params=["exact", "scaled"], autouse=True)
def vain(monkeypatch, request):
    """Calls on the CPU go to the Hopper kernels, and those to the machine; which programs of scaled columns did not.
    "exact": as if all of them had been in vain."""
    noted = []

    def noting(kernel, grid, *arguments, **options):
        scaled = "scaled" in kernel.fn.__module__ and "vain" in kernel.arg_names
        if scaled and request.param == "exact":
            arguments[kernel.arg_names.index("vain")].fill_(1)
            return
        start(kernel, grid, *arguments, **options)
        if scaled:
            noted.append(arguments[kernel.arg_names.index("vain")].tolist())

    monkeypatch.setattr(launch_solve_columns, "start", noting)
    monkeypatch.setattr(launch_hopper_gradient, "available", lambda device: True)
    monkeypatch.setattr(dispatch, "machine_reason", lambda device: None)
    return noted


@pytest.fixture(autouse=True)
def left(monkeypatch):
    """Which chunks are left to the exact kernel."""
    noted = []

    def note(where, _given, _common, _saved, _out, wild, *_rest):
        noted.append(wild[: where.slots] if where.chunk_seq is None else wild[where.chunk_seq >= 0])

    monkeypatch.setattr(launch_solve_columns, "backward_chunk", note)
    return noted


@pytest.mark.parametrize("test", CASES, ids=lambda test: str(CASES.index(test)))
def test_equals_the_recurrence(test, left, vain, request):
    check(test, torch.bfloat16, "cpu")
    assert not left[0].any()
    assert len(vain) == (2 if "scaled" in request.node.callspec.id else 0)
    assert not any(map(any, vain))


@pytest.mark.parametrize("vain", ["scaled"], indirect=True)
def test_float16(left):
    check(case("falcon-2", shape=(1, 66, 1, 1, 64, 64), ridge=0.1), torch.float16, "cpu")
    assert not left[0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_leaves_chunks_that_forget_much(dtype, left):
    """One token keeps nearly nothing of one column in one chunk of one head; in float16, many keep three quarters."""
    test = case("falcon-2", {"ridge": "scaled", "step": "direct"}, shape=(1, 130, 1, 2, 64, 64), ridge=0.0)
    inputs, around = make(test, dtype, "cpu"), surroundings(test, "cpu")
    k, beta, gate = inputs["k"], inputs["beta"], inputs["gate"]
    assert k is not None
    assert beta is not None
    assert gate is not None
    square = k.double().square().sum(-1)[0, :, 0]
    gate[0, 70, 1] = 0.999 / (beta[0, 70, 1].max() * square[69])
    gate[0, 90:120, 0] = 0.25 / (beta[0, 90:120, 0].amax(-1) * square[89:119])
    outcome(kernel, test, inputs, around, (torch.ones(1, 130, 2, 64).to(dtype), torch.ones(1, 2, 64, 64)))
    assert left[0].tolist() == [[0, 0], [int(dtype == torch.float16), 1], [0, 0]]


@pytest.mark.parametrize("vain", ["scaled"], indirect=True)
def test_walks_again_where_a_column_forgets_too_much(vain, left):
    """Nine tokens of a chunk keep hardly anything of one column in the second head, which ends at less than 2^-60."""
    test = case("falcon-2", {"ridge": "scaled", "step": "direct"}, shape=(1, 90, 1, 2, 64, 64), ridge=0.0, state=True)
    inputs, around = make(test, torch.bfloat16, "cpu"), surroundings(test, "cpu")
    k, beta, gate = inputs["k"], inputs["beta"], inputs["gate"]
    assert k is not None
    assert beta is not None
    assert gate is not None
    square = k.double().square().sum(-1)[0, :, 0]
    gate[0, 20:29, 1] = 0.999 / (beta[0, 20:29, 1].amax(-1) * square[19:28])
    beta[0, 20:29, 1, 5] = beta[0, 20:29, 1].amax(-1)
    pull = torch.randn(1, 90, 2, 64, generator=torch.Generator().manual_seed(1)), torch.ones(1, 2, 64, 64)
    ours = outcome(kernel, test, inputs, around, pull)
    theirs = outcome(judge, test, {n: None if t is None else t.double() for n, t in inputs.items()}, around, pull)
    assert vain == [[0, 1], [0, 1]]
    assert left[0].tolist() == [[0, 1], [0, 0]]
    for name in ("o", "final S", "gradient of S"):  # the others wait for the exact kernel
        error = (ours[name].double() - theirs[name]).norm() / theirs[name].norm()
        assert error < ALLOWED[torch.bfloat16], name
