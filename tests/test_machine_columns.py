"""falcon-2a on the machine of tests/machine: its walks on Hopper, and what follows them where decays are strong."""

import pytest
import torch

from fastweight.kernels import launch, launch_hopper_additive
from tests.column_checks import given_up
from tests.kernel_harness import Case, case, check, make
from tests.machine import Hazard
from tests.test_machine import KEEPS_APART, KERNELS, machine, taken  # noqa: F401

pytest.importorskip("triton")

CASES = [
    case("falcon-2a", shape=(1, 130, 1, 2, 64, 64), state=True, ridge=0.5),
    case("falcon-2a", {"pairing": "same-step"}, shape=(2, 64, 2, 2, 64, 64), ridge=0.5),
    case("falcon-2a", {"ridge": "scaled"}, shape=(1, 65, 1, 1, 64, 64), zero_beta=True, ridge=0.1),
    case("falcon-2a", {"step": "direct"}, shape=(1, 70, 1, 1, 64, 64), ridge=0.1),
    case("falcon-2a", {"step": "direct", "ridge": "scaled"}, shape=(1, 70, 1, 1, 64, 64), ridge=0.1),
    case("falcon-2a", shape=(1, 100, 1, 1, 128, 128), state=True, ridge=1.0),
]


def name(test: Case) -> str:
    return str(CASES.index(test))


@pytest.fixture
def lost(monkeypatch):
    """Grows by how many programs and chunks each launch gave up."""
    return given_up(monkeypatch)


@pytest.mark.parametrize("test", CASES, ids=name)
def test_equals_the_recurrence(test, lost):
    check(test, torch.bfloat16, "cpu")
    assert lost == [0, 0]


STRONG = case("falcon-2a", shape=(1, 200, 1, 1, 64, 64), state=True, ridge=1e3)


def tame_beside_wild(test: Case, dtype: torch.dtype, device: str):
    """Inputs of chunks that forget little but for the second, which does in half of the columns."""
    inputs = make(test, dtype, device)
    gate, beta = inputs["gate"], inputs["beta"]
    assert gate is not None
    assert beta is not None
    gate[:, :64] *= 1e-3
    gate[:, 128:] *= 1e-3
    beta[..., : test.shape[5] // 2] *= 1e-3
    return inputs


def test_what_walks_give_up_is_made_anew(monkeypatch, lost):
    monkeypatch.setattr("tests.kernel_harness.make", tame_beside_wild)
    check(STRONG, torch.bfloat16, "cpu")
    assert lost == [1, 1]


def three(where, _):
    return launch.Walk(where, 3, -(-where.chunks // 3))


@pytest.mark.parametrize("length", [260, 321])
def test_sequences_in_pieces(length, monkeypatch, lost):
    monkeypatch.setattr(launch_hopper_additive, "walk_of", three)
    check(case("falcon-2a", shape=(1, length, 1, 1, 64, 64), state=True, ridge=0.5), torch.bfloat16, "cpu")
    assert lost == [0, 0]


def test_strong_decays_in_pieces(monkeypatch, lost):
    monkeypatch.setattr(launch_hopper_additive, "walk_of", three)
    monkeypatch.setattr("tests.kernel_harness.make", tame_beside_wild)
    check(STRONG, torch.bfloat16, "cpu")
    assert lost == [1, 1]


BOTH = (KERNELS / "hopper_columns.py", KERNELS / "hopper_columns_backward.py")
LEFT_OUT = [
    (path, at)
    for path in BOTH
    for at, line in enumerate(path.read_text().splitlines())
    if line.strip().startswith(KEEPS_APART)
]


@pytest.mark.parametrize(("path", "line"), LEFT_OUT, ids=lambda value: getattr(value, "stem", str(value)))
def test_sees_what_is_left_out(path, line, monkeypatch, tmp_path):
    """As in test_machine.py."""
    lines = path.read_text().splitlines()
    lines[line] = lines[line].replace(lines[line].strip(), "pass")
    taken(path, "\n".join(lines), tmp_path, monkeypatch)
    monkeypatch.setattr(launch_hopper_additive, "walk_of", lambda where, _: launch.Walk(where, 2, 3))
    with pytest.raises(Hazard):
        check(case("falcon-2a", shape=(1, 330, 1, 1, 64, 64), ridge=0.5), torch.bfloat16, "cpu")
