"""Read the machine code of a kernel: its loops, what they hold, and what they overwrite."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

_LOCAL_MEMORY = ("LDL", "STL")
_MMA = ("HGMMA", "QGMMA", "UTCHMMA", "UTCMMA", "HMMA")


@dataclass(frozen=True)
class Loop:
    """An innermost loop that multiplies.

    Attributes:
        length: instructions.
        local: of them, those that touch local memory.
        products: of them, tensor core instructions.
    """

    length: int
    local: int
    products: int


def disassemble(cubin: Path) -> tuple[list[str], dict[str, int]]:
    """Return the instructions, and the index that each label stands before.

    Predicates are left out; a branch that has one begins with "@".
    """
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    text = subprocess.run(
        [nvdisasm, "-c", cubin], capture_output=True, text=True, check=True
    ).stdout
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(instructions)
        if found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            bare = re.sub(r"^@!?U?P\w+\s+", "", found[1])
            conditional = bare != found[1] and bare.startswith("BRA")
            instructions.append(f"@ {bare}" if conditional else bare)
    return instructions, labels


def innermost_loops(instructions: list[str], labels: dict[str, int]) -> list[Loop]:
    """Return the innermost loops that multiply; the shortest comes first.

    It is the one without a mask.
    """
    loops = []
    for index, instruction in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_\S+?)\)", instruction)
        if jump and labels.get(jump[1], index + 1) <= index:
            loops.append((labels[jump[1]], index + 1))
    loops = [(a, b) for a, b in loops if any(i.startswith(_MMA) for i in instructions[a:b])]
    innermost = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    ]
    found = (
        Loop(
            b - a,
            sum(i.startswith(_LOCAL_MEMORY) for i in instructions[a:b]),
            sum(i.startswith(_MMA) for i in instructions[a:b]),
        )
        for a, b in innermost
    )
    return sorted(found, key=lambda loop: loop.length)


def overwritten_operands(instructions: list[str]) -> list[str]:
    """Return instructions that overwrite a register which a product in flight still reads.

    A WGMMA with its left operand in registers reads them until it is waited for; Triton does not
    tell ptxas so in versions before 3.8. Code is read in the order in which it stands, through
    branches that are not taken, which is one way that it can run: what is found is real. Products
    that are in flight where code jumps are not followed.
    """
    found = []
    flight: list[tuple[str, set[int]]] = []  # groups in order; the last one may still be open
    open_group: set[int] = set()
    for instruction in instructions:
        name = instruction.split(" ", 1)[0]
        if name.startswith(("HGMMA", "QGMMA")):
            open_group |= set(_left_operand(instruction))
            if "gsb0" in instruction:
                flight.append((instruction, open_group))
                open_group = set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(instruction.rsplit(",", 1)[1], 16)
            flight = flight[len(flight) - left :] if left else []
        elif name.startswith(("BRA", "EXIT", "RET", "CALL", "BRX", "JMP")):
            flight, open_group = [], set()
        else:
            read = set(open_group).union(*(registers for _, registers in flight))
            if read & set(_written(instruction)):
                found.append(instruction)
    return found


def _left_operand(instruction: str) -> Iterator[int]:
    """Yield the registers of A: 4 of 32 bits for 64 rows of one step of a warpgroup."""
    operands = [part.strip() for part in instruction.split(" ", 1)[1].split(",")]
    if len(operands) > 1 and (register := re.fullmatch(r"R(\d+)", operands[1])):
        yield from range(int(register[1]), int(register[1]) + 4)


def _written(instruction: str) -> Iterator[int]:
    """Yield the registers that an instruction writes, as far as its name tells their number."""
    name, _, rest = instruction.partition(" ")
    if name.startswith(("ST", "RED", "BAR", "SYNCS", "UTMA", "MEMBAR", "FENCE", "WARP", "R2P")):
        return
    for operand in rest.split(",")[:2]:
        register = re.fullmatch(r"R(\d+)(\.64)?", operand.strip())
        if register is None:
            if re.fullmatch(r"!?U?P(T|\d)", operand.strip()):
                continue
            return
        width = 1
        if "128" in name:
            width = 4
        elif ".64" in name or ".WIDE" in name:
            width = 2
        yield from range(int(register[1]), int(register[1]) + width)
        return
