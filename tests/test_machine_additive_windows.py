"""Windows in one walk in reverse, on the machine of tests/machine."""

import pytest
import torch

from fastweight.kernels import launch, launch_additive
from tests.kernel_harness import Case, case, check
from tests.test_machine import KERNELS, machine, taken

__all__ = ["machine"]  # the fixture: calls on the CPU go to the Hopper kernels, and those to the machine

WINDOWS = [
    case("falcon-3a", shape=(1, 122, 1, 1, 64, 64), state=True),  # whole chunks
    case("falcon-3a", {"timing": "read-before-write"}, shape=(1, 170, 1, 1, 64, 64), state=True),
    case(
        "falcon-3a", {"window": 3, "pairing": "same-step", "ridge": "scaled"}, shape=(1, 140, 1, 1, 64, 64),
        zero_beta=True,
    ),
    case(
        "falcon-3a", {"window": 5, "timing": "read-before-write", "ridge": "scaled", "step": "direct"},
        shape=(1, 150, 1, 1, 64, 64), ridge=0.5,
    ),
    case("falcon-3a", {"window": 2}, shape=(2, 190, 1, 2, 128, 128), state=True),
    case("falcon-3a", shape=(2, 3, 1, 1, 64, 64)),
    case("falcon-3a", ridge=1e6, beta=2.0, shape=(1, 130, 1, 1, 64, 64)),
]  # fmt: skip
LONG = case("falcon-3a", shape=(1, 260, 1, 1, 64, 64), state=True)


def name(test: Case) -> str:
    return str(WINDOWS.index(test))


@pytest.mark.parametrize("test", WINDOWS, ids=name)
def test_equals_the_recurrence(test):
    check(test, torch.bfloat16, "cpu")


def test_half_precision():
    check(WINDOWS[0], torch.float16, "cpu")


def test_longer_windows_take_two_kernels(monkeypatch):
    def forbidden(*_):
        raise AssertionError("in one walk")

    monkeypatch.setattr(launch_additive.launch_hopper_additive, "backward", forbidden)
    check(case("falcon-3a", {"window": 6}, shape=(1, 70, 1, 1, 64, 64)), torch.bfloat16, "cpu")
    with pytest.raises(AssertionError, match="in one walk"):
        check(case("falcon-3a", {"window": 5}, shape=(1, 70, 1, 1, 64, 64)), torch.bfloat16, "cpu")


def in_three(monkeypatch) -> None:
    def three(where, _):
        return launch.Walk(where, 3, -(-where.chunks // 3))

    monkeypatch.setattr(launch_additive, "HOPPER", launch_additive.HOPPER._replace(walk_of=three))


@pytest.mark.parametrize("pairing", ["next-latent", "same-step"])
@pytest.mark.parametrize("length", [260, 305, 366])
def test_in_pieces(length, pairing, monkeypatch):
    """One token more than whole chunks, whole ones, and the borders between pieces."""
    in_three(monkeypatch)
    check(case("falcon-3a", {"pairing": pairing}, shape=(2, length, 1, 1, 64, 64), state=True), torch.bfloat16, "cpu")


WINDOW, SUMS = "hopper_additive_windows.py", "hopper_additive_backward.py"
WRONG = [
    (WINDOW, "mask=((i >= own) & (i < own_end))[:, None]", "mask=(i < own_end)[:, None]"),  # pairs of nobody
    (WINDOW, "own_end = gl.where(c > 0, 56, high + HALO)", "own_end = high + HALO"),  # over what is added up
    (WINDOW, "mask=(i8 >= 64 - HALO)[:, None], other=0.0", "mask=(i8 < 0)[:, None], other=0.0"),  # what is there
    (WINDOW, "term += gl.where(row < end - LAG, near, 0.0)", "term += near"),  # of the next chunk's reads
    (WINDOW, "if i == 0 else _ahead(faded, row, i)", "if i == 0 else faded"),
    (WINDOW, "g_read = gl.where(i < end, g_read, float(\"-inf\"))", "pass"),
    (WINDOW, "(t < 65 - WINDOW)[:, None]", "(t < 64)[:, None]"),
    (SUMS, "share = window_up_to(share * part, token, WINDOW)", "share = share * part"),
    (SUMS, "energy = window_from(energy, token, WINDOW) * part", "energy = energy * part"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "right", "wrong"), WRONG)
def test_sees_what_is_wrong(where, right, wrong, monkeypatch, tmp_path):
    for file in (WINDOW, SUMS):
        source = (KERNELS / file).read_text()
        assert source.count(right) == (file == where)
        taken(KERNELS / file, source.replace(right, wrong), tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(LONG, torch.float16, "cpu")


@pytest.mark.parametrize(("right", "wrong"), [("place.to(tl.int64) * 16, b", "place.to(tl.int64) * 0, b")])
def test_sees_borders_of_others(right, wrong, monkeypatch, tmp_path):
    in_three(monkeypatch)
    file = KERNELS / "additive_gradient.py"
    taken(file, file.read_text().replace(right, wrong), tmp_path, monkeypatch)
    for file in (WINDOW, SUMS):
        taken(KERNELS / file, (KERNELS / file).read_text(), tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        check(case("falcon-3a", shape=(1, 260, 1, 2, 64, 64), state=True), torch.bfloat16, "cpu")
