"""Machine code of Hopper kernels -> matrix products whose operand in shared memory is not where shared memory is.

A wgmma finds its operands by descriptors in uniform registers, made from shared memory's address and constants. ptxas
12.8, which Triton 3.6 brings along, can lose the register: the descriptor is then made from whatever lies in another
one, such as the program's number, and the product reads other data, or none of the program's memory. No test of small
calls need see it, and the source is right, so this follows every register through the code: descriptors must not depend
on the program's number or on arguments.

Traps: only what jumps back is followed, so code is read line by line, three times, and what loops bring back is added
at their labels. A kernel that chooses among buffers by a number that comes from the program's is found wrongly.
"""

import re
import subprocess
import tempfile
from pathlib import Path

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Za-z0-9_.]+)\s*(.*?)\s*;")
PARAMETERS = 0x210  # where a kernel's arguments begin in constant memory
NO_RESULT = ("ST", "BAR", "BRA", "EXIT", "LDGSTS", "RED", "NOP", "WARP", "FENCE", "MEMBAR", "DEPBAR", "SYNCS", "UTMA")
SEVERAL_RESULTS = ("IADD3", "ISETP", "FSETP", "LEA", "LOP3", "SHFL", "PLOP3", "IMAD")

Instruction = tuple[int, bool, str, list[str]]


def disassemble(cubin: bytes) -> str:
    """SASS, by the nvdisasm that Triton has."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lost_descriptors(sass: str) -> list[str]:
    """The wgmma instructions whose descriptors come from a program's number or from arguments, and what from."""
    code = _instructions(sass)
    origins: dict[str, frozenset[str]] = {}
    brought: dict[str, dict[str, frozenset[str]]] = {}
    found: list[str] = []
    for _ in range(3):
        found = []
        passed = set()
        for line, guarded, name, operands in code:
            if name == "label":
                passed.add(operands[0])
                _add(brought.get(operands[0], {}), origins)
            elif name == "BRA" and (target := operands[-1].strip("`()")) in passed:
                _add(origins, brought.setdefault(target, {}))
            elif name.startswith("HGMMA"):
                wrong = _foreign(operands, origins)
                if wrong:
                    found.append(f"line {line}: {name} {', '.join(operands)} from {', '.join(sorted(wrong))}")
            elif operands and not name.startswith(NO_RESULT):
                _follow(guarded, name, operands, origins)
    return found


def _add(more: dict[str, frozenset[str]], origins: dict[str, frozenset[str]]) -> None:
    for register, seen in more.items():
        origins[register] = origins.get(register, frozenset()) | seen


def products(sass: str) -> int:
    """How many wgmma instructions there are."""
    return sum(name.startswith("HGMMA") for _, _, name, _ in _instructions(sass))


def _instructions(sass: str) -> list[Instruction]:
    found = []
    for number, text in enumerate(sass.splitlines(), 1):
        label = re.match(r"(\.L_x_\d+):", text)
        match = LINE.search(text)
        if label:
            found.append((number, False, "label", [label[1]]))
        elif match:
            operands = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", match[3].replace(".reuse", ""))
            found.append((number, match[1] is not None, match[2], [o.strip() for o in operands if o.strip()]))
    return found


def _foreign(operands: list[str], origins: dict[str, frozenset[str]]) -> set[str]:
    """Where a wgmma's descriptors come from that they must not: four registers, of which the first two are A's."""
    at = next(o for o in operands if "gdesc" in o)
    match = re.search(r"UR(\d+)", at)
    assert match, f"a descriptor without a register: {at}"
    kept = range(4) if operands[1] == at else range(2, 4)
    seen = (origins.get(f"UR{int(match[1]) + k}", frozenset()) for k in kept)
    return set().union(*seen) & {"the program's number", "arguments"}


def _follow(guarded: bool, name: str, operands: list[str], origins: dict[str, frozenset[str]]) -> None:
    """Gives what an instruction writes the origins of what it reads; a guarded one may leave the old value."""
    results = _results(name, operands)
    source = frozenset().union(*(_origin(name, o, origins) for o in operands[results:]))
    for place, operand in enumerate(operands[:results]):
        for register in _registers(operand, _width(name) if place == 0 else 1):
            origins[register] = source | (origins.get(register, frozenset()) if guarded else frozenset())


def _results(name: str, operands: list[str]) -> int:
    base = name.split(".")[0].removeprefix("U")
    if base == "SHFL" or (base == "LOP3" and re.fullmatch(r"U?P[\dT]", operands[0])):
        return 2
    number = 1
    while base in SEVERAL_RESULTS and number < len(operands) and re.fullmatch(r"U?P[\dT]", operands[number]):
        number += 1
    return number


def _width(name: str) -> int:
    """Registers of a result, and of each operand of a 64-bit sum."""
    if "128" in name or name.endswith("88.4") or name.startswith("HMMA"):
        return 4
    return 2 if "64" in name.split(".") or "WIDE" in name or name.startswith("CS2R") else 1


def _registers(operand: str, width: int) -> list[str]:
    found = []
    for kind, number in re.findall(r"\b(U?[RP])(\d+)\b", operand):
        found += [f"{kind}{int(number) + k}" for k in range(width if kind.endswith("R") else 1)]
    return found


def _origin(name: str, operand: str, origins: dict[str, frozenset[str]]) -> frozenset[str]:
    wide = 2 if name.endswith("ADD3.64") or ".64" in operand else 1
    found = frozenset().union(*(origins.get(r, frozenset()) for r in _registers(operand, wide)))
    constant = re.match(r"c\[0x0\]\[(0x[0-9a-f]+)\]", operand)
    if constant and int(constant[1], 16) >= PARAMETERS:
        found |= {"arguments"}
    return found | {"the program's number"} if "SR_CTAID" in operand else found
