"""Where matrix products find their operands, in machine code: of some pieces, and of the kernels on a device."""

import pytest
import torch

from tests.kernel_harness import at, case, gpu, kernel, make, outcome, surroundings
from tests.machine_code import disassemble, lost_descriptors, products

BEGIN = """
        /*0000*/                   S2UR UR4, SR_CTAID.X ;
        /*0010*/                   S2UR UR6, SR_CgaCtaId ;
        /*0020*/                   UMOV UR5, 0x400 ;
        /*0030*/                   ULDC.64 UR8, c[0x0][0x210] ;
        /*0040*/                   ULEA UR36, UR6, UR5, 0x18 ;
        /*0050*/                   USHF.R.U32.HI UR17, URZ, 0x4, UR36 ;
        /*0060*/                   USGXT.U32 UR44, UR17, 0xe ;
        /*0070*/                   UMOV UR22, UR44 ;
        /*0080*/                   UMOV UR23, 0xc0000010 ;
        /*0090*/                   HGMMA.64x16x16.F32.BF16 R56, R100, gdesc[UR20].tnspB, RZ, !UPT ;
"""
END = """
        /*00d0*/                   UMOV UR22, UR16 ;
        /*00e0*/                   UMOV UR23, UR17 ;
        /*00f0*/                   HGMMA.64x16x16.F32.BF16 R56, R104, gdesc[UR20].tnspB, R56, gsb0 ;
"""
RIGHT = """
        /*00a0*/                   UIADD3 UR16, UP0, UR44, 0x20, URZ ;
        /*00b0*/                   UMOV UR4, URZ ;
        /*00c0*/                   UIADD3.X UR17, UR4, -0x3ffffff0, URZ, UP0, !UPT ;
"""
NUMBER = RIGHT.replace("UR44", "UR4").replace("UMOV UR4, URZ", "NOP")
ARGUMENT = RIGHT.replace("UR44", "UR8")


def test_descriptors_from_shared_memory_alone():
    assert products(BEGIN + RIGHT + END) == 2
    assert lost_descriptors(BEGIN + RIGHT + END) == []


@pytest.mark.parametrize(("piece", "origin"), [(NUMBER, "the program's number"), (ARGUMENT, "arguments")])
def test_descriptors_from_elsewhere_are_found(piece, origin):
    (found,) = lost_descriptors(BEGIN + piece + END)
    assert "R104, gdesc[UR20]" in found
    assert found.endswith(f"from {origin}")


def test_second_half_of_a_sum_counts():
    high = RIGHT.replace("UMOV UR4, URZ", "NOP")
    assert len(lost_descriptors(BEGIN + high + END)) == 1


def test_descriptors_of_a_loop_are_followed_once_around():
    late = "        /*0100*/                   UMOV UR44, UR8 ;\n        /*0110*/                   BRA `(.L_x_0) ;\n"
    before, after = BEGIN.split("        /*0070*/")
    body = ".L_x_0:\n        /*0070*/" + after + RIGHT + END + late
    assert lost_descriptors(before + body.replace(late, "")) == []
    assert len(lost_descriptors(before + body)) == 2


# Kernels in plain Triton: those in Gluon choose among buffers by numbers of their own.
RULES = {"falcon-2": {}} | {f"falcon-3, {R} pairs": {"window": R} for R in (2, 3, 4)}


class TestOnDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("D", [64, 128])
    @pytest.mark.parametrize("name", RULES)
    def test_kernels_find_their_operands(self, name, D, monkeypatch):
        from fastweight.kernels import start

        monkeypatch.setenv("FASTWEIGHT_HOPPER", "0")  # falcon-2's are in plain Triton without it
        monkeypatch.setattr(start, "_compiled", {})
        test = at(case(name.split(",")[0], RULES[name], state=True), 1, 70, 1, 1, D, D)
        inputs, around = make(test, torch.bfloat16, "cuda"), surroundings(test, "cuda")
        pull = torch.ones(1, 70, 1, D, device="cuda"), torch.ones(1, 1, D, D, device="cuda")
        outcome(kernel, test, inputs, around, pull)
        codes = {
            kernel.__name__: disassemble(compiled.asm["cubin"]) for compiled, _, kernel in start._compiled.values()
        }
        assert sum(map(products, codes.values())) or (name, D) == ("falcon-2", 64)  # which Triton gives other products
        assert {name: found for name, sass in codes.items() if (found := lost_descriptors(sass))} == {}
