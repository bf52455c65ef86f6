"""What the assembler makes of Hopper kernels, compiled without a device: products go on for as long as they may."""

import pytest

pytest.importorskip("triton")

from tests.compiled import made_of, waits
from tests.kernel_harness import INTERPRETED, case
from tests.test_machine import HOSTS, machine

__all__ = ["machine"]  # the fixture: calls on the CPU go to the Hopper kernels
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


STARTING = [host for host in HOSTS if hasattr(host, "start")]


@pytest.mark.parametrize(("rule", "width"), [("falcon-1a", 128), ("falcon-3a", 64)])
def test_products_are_waited_for_only_where_a_kernel_says_so(rule, width, monkeypatch):
    """ptxas waits for all of them where it cannot see that nobody is at what is read, and says nothing."""
    test = case(rule, shape=(1, 130, 1, 1, width, width))
    made = made_of(test, "hopper_additive_backward", STARTING, monkeypatch)
    assert sorted(made) == ["hopper_additive_backward.backward"]
    for name, compiled in made.items():
        said, found = waits(compiled)
        assert said, name
        assert found == said, name


def test_sees_where_the_assembler_waits(monkeypatch):
    """The walk forward, where it costs no time."""
    made = made_of(case("falcon-1a", shape=(1, 130, 1, 1, 128, 128)), "hopper_additive.forward", STARTING, monkeypatch)
    said, found = waits(made["hopper_additive.forward"])
    assert len(found) > len(said)
