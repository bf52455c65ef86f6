"""falcon-2's kernels for Hopper as the assembler makes them: operands, registers and room."""

import re

import pytest

pytest.importorskip("triton")

import triton

from fastweight.kernels import dispatch, launch_hopper_gradient, launch_solve_columns
from tests.compiled import HALF_OF_A_MULTIPROCESSOR, made_of, waits
from tests.kernel_harness import case
from tests.machine_code import disassemble, lost_descriptors, products

MOST_SPILLS = {
    (128, "hopper_scaled_columns.forward"): 4,
    (128, "hopper_scaled_columns_backward.backward_state"): 16,
    (128, "hopper_scaled_columns_gradient.backward_token"): 24,
    (64, "hopper_scaled_columns.forward"): 4,
    (64, "hopper_scaled_columns_gradient.backward_token"): 40,
}


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="other releases come with other assemblers")
@pytest.mark.parametrize("D", [64, 128])
def test_code_for_hopper(D, monkeypatch):
    wanted = {name: most for (width, name), most in MOST_SPILLS.items() if width == D}
    monkeypatch.setattr(launch_hopper_gradient, "available", lambda device: True)
    monkeypatch.setattr(dispatch, "machine_reason", lambda device: None)
    test = case("falcon-2", shape=(1, 128, 2, 2, D, D))
    compiled = made_of(test, "|".join(map(re.escape, wanted)), [launch_solve_columns], monkeypatch)
    assert compiled.keys() == wanted.keys()
    for name, made in compiled.items():
        sass = disassemble(made.asm["cubin"])
        said, done = waits(made)
        assert products(sass) > 1, name
        assert said == done, f"{name}: products wait where they should go on"
        assert len(re.findall(r"\b(?:STL|LDL)\b", sass)) <= wanted[name], name
        if "token" not in name:  # which makes addresses anew by way of the program's number
            assert lost_descriptors(sass) == [], name
        assert made.metadata.shared <= HALF_OF_A_MULTIPROCESSOR, name
