"""falcon-2's kernels for Hopper as the assembler makes them: operands, registers and room."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from fastweight.kernels import dispatch, launch_hopper_gradient, launch_solve_columns, unproven
from tests.compiled import compiled, products_in_turn, spills
from tests.kernel_harness import case, kernel, make, outcome, surroundings
from tests.machine_code import disassemble, lost_descriptors, products

HALF_OF_A_MULTIPROCESSOR = 115_712  # bytes of shared memory with which two programs fit


@pytest.fixture(scope="module")
def launches():
    """What a forward and a backward pass start, by width and kernel."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_hopper_gradient, "available", lambda device: True)
        patch.setattr(dispatch, "_machine_reason", lambda device: None)
        patch.setenv(unproven.SWITCH, "1")

        def note(kernel, grid, *arguments, **options):
            name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
            found[options.get("D"), name] = kernel, arguments, options

        patch.setattr(launch_solve_columns, "start", note)
        for D in (64, 128):
            test = case("falcon-2", shape=(1, 128, 2, 2, D, D))
            inputs, around = make(test, torch.bfloat16, "cpu"), surroundings(test, "cpu")
            outcome(kernel, test, inputs, around, (torch.ones(1, 128, 2, D), torch.ones(1, 2, D, D)))
    return found


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="other releases come with other assemblers")
@pytest.mark.parametrize(
    ("D", "name", "most_spills"),
    [
        (128, "hopper_scaled_columns.forward", 90),
        (128, "hopper_scaled_columns_backward.backward_state", 90),
        (64, "hopper_scaled_columns.forward", 4),
        (64, "hopper_solve_columns_gradient.backward_token", 80),
    ],
)
def test_code_for_hopper(D, name, most_spills, launches):
    made = compiled(*launches[D, name])
    sass = disassemble(made.asm["cubin"])
    assert products(sass) > 0
    if "scaled" in name:  # the other one makes its addresses anew by way of the program's number
        assert lost_descriptors(sass) == []
    assert not products_in_turn(sass)
    assert spills(sass) <= most_spills
    assert made.metadata.shared <= HALF_OF_A_MULTIPROCESSOR
