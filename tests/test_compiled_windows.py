"""The kernels of regression over a window for Hopper as the assembler makes them: operands, registers and room."""

import re

import pytest

pytest.importorskip("triton")

from fastweight.kernels import dispatch, launch_hopper_windows, launch_windows
from tests.compiled import HALF_OF_A_MULTIPROCESSOR, made_of
from tests.kernel_harness import INTERPRETED, case
from tests.machine_code import disassemble, lost_descriptors, products

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no machine code")

D = 128
LEAST_PRODUCTS = {
    "hopper_windows.forward": 22,
    "hopper_windows_backward.backward_state": 30,
    "hopper_windows_tokens.gradients": 40,
    "hopper_windows_inside.inside": 12,
}


@pytest.mark.slow
@pytest.mark.parametrize("timing", ["read-after-write", "read-before-write"])
def test_products_find_their_operands_and_nothing_spills(timing, monkeypatch):
    monkeypatch.setattr(launch_hopper_windows, "available", lambda device: True)
    monkeypatch.setattr(dispatch, "machine_reason", lambda device: None)
    test = case("falcon-3", {"timing": timing}, shape=(1, 130, 2, 4, D, D), state=True)
    wanted = "|".join(map(re.escape, LEAST_PRODUCTS))
    compiled = made_of(test, wanted, [launch_windows, launch_hopper_windows], monkeypatch)
    assert compiled.keys() == LEAST_PRODUCTS.keys()
    for name, made in compiled.items():
        sass = disassemble(made.asm["cubin"])
        assert lost_descriptors(sass) == [], name
        assert products(sass) >= LEAST_PRODUCTS[name], name
        assert sass.count("STL") <= 24, f"{name} spills"
        assert made.metadata.shared <= HALF_OF_A_MULTIPROCESSOR, f"{name}: no two programs on a multiprocessor"
