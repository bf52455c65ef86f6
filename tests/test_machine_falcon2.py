"""falcon-2's kernels for Hopper on the machine of tests/machine: against the recurrence, and what they leave undone."""

import pytest
import torch

from tests.kernel_harness import case, check, kernel, make, outcome, surroundings
from tests.machine import start

pytest.importorskip("triton")

from fastweight.kernels import dispatch, launch_hopper_gradient, launch_solve_columns, unproven

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


@pytest.fixture(autouse=True)
def left(monkeypatch):
    """Calls on the CPU go to the Hopper kernels, and those to the machine; which chunks they leave to the exact one."""
    noted = []

    def note(where, _given, _common, _saved, _out, wild, *_rest):
        noted.append(wild[: where.slots] if where.chunk_seq is None else wild[where.chunk_seq >= 0])

    monkeypatch.setattr(launch_solve_columns, "start", start)
    monkeypatch.setattr(launch_solve_columns, "backward_chunk", note)
    monkeypatch.setattr(launch_hopper_gradient, "available", lambda device: True)
    monkeypatch.setattr(dispatch, "_machine_reason", lambda device: None)
    monkeypatch.setenv(unproven.SWITCH, "1")
    return noted


@pytest.mark.parametrize("test", CASES, ids=lambda test: str(CASES.index(test)))
def test_equals_the_recurrence(test, left):
    check(test, torch.bfloat16, "cpu")
    assert not left[0].any()


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
