"""Machine code of the kernels of regression over a window on Hopper, compiled without a device: where products find
their operands, and that what threads hold fits."""

import pytest

from tests.interpreter import INTERPRETED
from tests.machine_code import disassemble, lost_descriptors, products

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no machine code")

WINDOW, PART = 4, 13
# Of other types than bfloat16: name -> type, or None where a call gives no tensor.
TYPES = dict.fromkeys(("decay", "gram", "reads", "weight", "facts", "met", "read", "through", "shared"), "*fp32")
TYPES |= dict.fromkeys(("state0", "state1", "d_state0", "d_state1"), "*fp32")
TYPES |= dict.fromkeys(("plane", "base", "length", "chunks", "tokens"), "i32") | {"eps": "fp32", "floor": "fp32"}
TYPES |= dict.fromkeys(("cu", "chunk_seq", "chunk_start"), None)
FLAGS = {"H": 4, "KH": 2, "WINDOW": WINDOW, "PART": PART, "PARTS": 4, "SHIFT": 1, "SCALED": False, "DIRECT": False}
KERNELS = {
    "hopper_windows.forward": (22, {}),
    "hopper_windows_backward.backward_state": (30, {}),
    "hopper_windows_between.between": (80, {}),
    "hopper_windows_inside.inside": (20, {"maxnreg": 128}),
    "hopper_windows_finish.finish": (40, {}),
}


def compiled(name: str, **constants):
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    module, function = name.split(".")
    kernel = getattr(importlib.import_module(f"fastweight.kernels.{module}"), function)
    known = FLAGS | constants
    signature, given, aligned = {}, {}, {}
    for at, argument in enumerate(kernel.arg_names):
        kind = TYPES.get(argument, "*bf16")
        if argument in known or kind is None:
            signature[argument], given[(at,)] = "constexpr", known.get(argument)
            continue
        signature[argument] = kind
        if kind.startswith("*") or argument == "plane":
            aligned[(at,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, given, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **KERNELS[name][1]})


@pytest.mark.slow
@pytest.mark.parametrize("BEFORE", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_products_find_their_operands_and_nothing_spills(name, BEFORE):
    found = compiled(name, D=128, BEFORE=BEFORE)
    sass = disassemble(found.asm["cubin"])
    assert lost_descriptors(sass) == []
    assert products(sass) >= KERNELS[name][0]
    assert sass.count("STL") <= 16, "spills"
    assert found.metadata.shared <= 115712, "no two programs on a multiprocessor"
