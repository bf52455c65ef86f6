"""falcon-3's walks for Hopper on the machine of tests/machine, all else of it interpreted: against the recurrence.

In float32, where nothing hides behind rounding, and as a device has them in bfloat16.
"""

import pytest
import torch

from tests.interpreter import run_interpreted
from tests.kernel_harness import INTERPRETED, case, check, interpreted
from tests.machine import LANGUAGE, device_function, start
from tests.machine.units import AsyncCopy
from tests.machine.words import WORDS

pytest.importorskip("triton")

from fastweight.kernels import launch_hopper_windows

BEGIN = ["meet", "take_facts", "forth", "forward"]
TURN = ["forth", "back", "inside", "gradients"]  # the kernels of some blocks' backward pass
BEFORE = {"timing": "read-before-write"}
CASES = {
    "two blocks, a state": case("falcon-3", shape=(1, 58, 1, 1, 64, 64), state=True),
    "packed, eight pairs": case(
        "falcon-3", {"window": 8} | BEFORE, shape=(1, 20, 1, 1, 128, 128), cuts=(0, 0, 1, 20, 20)
    ),
    "eight pairs, two blocks": case("falcon-3", {"window": 8}, shape=(1, 35, 1, 1, 64, 64)),
    "two pairs, own keys": case(
        "falcon-3", {"window": 2, "pairing": "same-step", "ridge": "scaled"}, shape=(2, 33, 1, 1, 64, 64)
    ),
    "given steps, grouped": case(
        "falcon-3", {"window": 3, "step": "direct"}, shape=(1, 20, 1, 2, 64, 64), zero_beta=True
    ),
    "strong decay, five pairs": case("falcon-3", {"window": 5}, shape=(1, 14, 1, 1, 64, 64), ridge=1e2, state=True),
}  # fmt: skip


@pytest.fixture
def walks(monkeypatch):
    """Calls on the CPU go to the Hopper kernels, and those to the machine; which ones ran."""
    from triton.language import float32
    from triton.runtime import interpreter

    ran = []
    dot = interpreter.InterpreterBuilder.create_dot

    def note(kernel, *given, **named):
        ran.append(kernel.fn.__name__)
        start(kernel, *given, **named)

    def wide(part):
        """Triton 3.6 multiplies the bits of bfloat16 as if they were integers."""
        if str(part.dtype.scalar) != "bf16":
            return part
        return interpreter.TensorHandle((part.data.astype("uint32") << 16).view("float32"), float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, wide(a), wide(b), *rest)
    )

    def nothing(make):
        return lambda *shape, **how: (
            made.fill_(torch.nan) if (made := make(*shape, **how)).is_floating_point() else made
        )

    # What nobody wrote is nobody's to read.
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, nothing(getattr(owner, name)))
    monkeypatch.setattr(launch_hopper_windows, "start", note)
    monkeypatch.setattr(launch_hopper_windows, "DTYPES", (torch.float32, torch.bfloat16))
    monkeypatch.setattr(launch_hopper_windows, "available", lambda device: True)
    return ran


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_interpreted_walks_equal_the_recurrence(name, walks):
    check(CASES[name], torch.float32, "cpu")
    assert walks == [*BEGIN, "backward_state", *TURN]


@interpreted
def test_interpreted_walks_in_pieces(walks, monkeypatch):
    """What is made block by block, a block of every sequence at a time, and the walk back with it; in bfloat16."""
    monkeypatch.setattr(launch_hopper_windows, "TURN", 0.5)  # at width 64 that is a block
    check(case("falcon-3", {"window": 8}, shape=(2, 67, 1, 2, 64, 64), state=True), torch.float32, "cpu")
    check(CASES["two blocks, a state"], torch.bfloat16, "cpu")
    assert walks == [*BEGIN, *["backward_state", *TURN] * 3, *BEGIN, *["backward_state", *TURN] * 2]


@interpreted
def test_interpreted_packed_walks_in_turns(walks, monkeypatch):
    """The same of packed sequences, which are walked whole."""
    monkeypatch.setattr(launch_hopper_windows, "TURN", 1)
    test = CASES["packed, eight pairs"]
    check(test, torch.float32, "cpu")
    assert walks == [*BEGIN, "backward_state", *TURN * (len(test.cuts) - 1)]


@interpreted
@pytest.mark.parametrize("save", [False, True])
def test_interpreted_operator_foresees_its_shapes(save, walks):
    """Of what is kept, which without a backward pass is not W and Z; what comes out does not depend on that."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fastweight.kernels.op import scan_forward

    flags = (1e-6, 1e-4, True, False, False, False, False, False, 4, True, False)
    inputs = torch.randn(3, 1, 5, 1, 64) * 0.1
    found = scan_forward(*inputs, *[None] * 7, *flags, save)
    with FakeTensorMode():
        foreseen = scan_forward(*torch.randn(3, 1, 5, 1, 64), *[None] * 7, *flags, save)
    assert [t.shape for t in foreseen] == [t.shape for t in found]
    assert [t.dtype for t in foreseen] == [t.dtype for t in found]
    assert torch.equal(found[0], scan_forward(*inputs, *[None] * 7, *flags, not save)[0])
    assert walks == BEGIN * 2


@interpreted
@pytest.mark.parametrize("missing", ["fence_async_shared", "thread_barrier", "wait_group"])
def test_interpreted_walks_need_their_barriers(missing, walks, monkeypatch):
    device_function.cache_clear()
    if missing == "wait_group":
        monkeypatch.setattr(AsyncCopy, missing, lambda _: None)
    elif missing == "thread_barrier":
        monkeypatch.setattr(LANGUAGE, missing, lambda: None)
    else:
        monkeypatch.setitem(WORDS, missing, lambda: None)
    with pytest.raises(AssertionError):
        check(CASES["given steps, grouped"], torch.float32, "cpu")
    device_function.cache_clear()


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
def test_walks_interpreted():
    said = run_interpreted(__file__, "interpreted", timeout=300)
    assert f"{len(CASES) + 7} passed" in said, said[-500:]
