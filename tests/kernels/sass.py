"""Read the machine code of a kernel: its loops, what they hold, and what they overwrite."""

from __future__ import annotations

import functools
import re
import struct
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

_LOCAL_MEMORY = ("LDL", "STL")
_ENDS = ("BRA", "BRX", "EXIT", "RET")  # of a block
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


_Code = tuple[list[str], dict[str, int]]  # instructions, and the index each label stands before
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")


def disassemble(cubin: Path) -> _Code:
    """Return the instructions, and the index that each label stands before.

    Predicates are left out; a branch or exit that has one begins with "@".
    """
    text = _say("-c", cubin)  # with an analysis, which knows where a branch by a table may go
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(instructions)
        if found := _INSTRUCTION.search(line):
            instructions.append(_bare(found[2]))
    return instructions, labels


def disassemble_all(cubins: list[Path], arch: int) -> list[_Code]:
    """Return `disassemble` of cubins of one architecture, one kernel each.

    The disassembler takes 0.2 s of a core to begin, and few of them for a kernel: it reads the code
    of all at once, which has addresses in place of labels.
    """
    codes = [_code_of(cubin.read_bytes()) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        text = _say("-ndf", "-b", f"SM{arch}a" if arch >= 90 else f"SM{arch}", Path(file.name))
    lines = deque((int(at, 16), said) for at, said in _INSTRUCTION.findall(text))
    found, end = [], 0
    for cubin, code in zip(cubins, codes, strict=True):
        end += len(code)
        mine = []
        while lines and lines[0][0] < end:
            mine.append(lines.popleft())
        assert mine, cubin
        has_tables = any(re.search(r"\bBRX\b", said) for _, said in mine)
        found.append(disassemble(cubin) if has_tables else _labelled(mine))
    return found


def _labelled(lines: list[tuple[int, str]]) -> _Code:
    """Put labels for the addresses that branches have."""
    index = {at: number for number, (at, _) in enumerate(lines)}
    instructions, labels = [], {}
    for _, said in lines:
        bare = _bare(said)
        jump = re.search(r"\b0x([0-9a-f]+)$", bare)
        if jump is not None and bare.removeprefix("@ ").startswith(_ENDS):
            label, target = f".L_{jump[1]}", int(jump[1], 16)
            bare = f"{bare[: jump.start()]}`({label})"
            if target in index:
                labels[label] = index[target]
        instructions.append(bare)
    return instructions, labels


def _bare(said: str) -> str:
    bare = re.sub(r"^@!?U?P\w+\s+", "", said)
    predicated = bare != said or re.match(r"BRA\S*\s+!?U?P\d", bare) is not None
    return f"@ {bare}" if predicated and bare.startswith(_ENDS) else bare


def _say(*options: str | Path) -> str:
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return subprocess.run([nvdisasm, *options], capture_output=True, text=True, check=True).stdout


def _code_of(elf: bytes) -> bytes:
    """Return the code of the one kernel of a cubin: the section .text.NAME of a 64-bit ELF file."""
    table, size, count, names = (
        struct.unpack_from(kind, elf, at)[0]
        for kind, at in (("<Q", 0x28), ("<H", 0x3A), ("<H", 0x3C), ("<H", 0x3E))
    )
    sections = [struct.unpack_from("<IIQQQQ", elf, table + size * n) for n in range(count)]
    first = sections[names][4]
    [(start, length)] = [
        section[4:6] for section in sections if elf.startswith(b".text.", first + section[0])
    ]
    return elf[start : start + length]


_UNIFORM = ("UIADD3", "UIMAD", "ULEA", "ULOP3", "UMOV", "UPRMT", "USEL", "USGXT", "USHF")
_WRITES_UNIFORM = (*_UNIFORM, "CS2UR", "LDCU", "R2UR", "REDUX", "S2UR", "UFLO", "ULDC", "UPOPC")


def unwritten_registers(instructions: list[str], labels: dict[str, int]) -> list[str]:
    """Return uniform arithmetic that reads what nothing has written on some way to it."""
    if not instructions:
        return []
    starts, following = _blocks(instructions, labels)
    ends = [*starts[1:], len(instructions)]
    written: list[set[int] | None] = [set(), *[None] * (len(starts) - 1)]
    waiting = [0]
    while waiting:
        block = waiting.pop()
        now = set(written[block] or ())
        for text in instructions[starts[block] : ends[block]]:
            now |= _uniform(text)[0]
        for after in following[block]:
            before = written[after]
            both = now if before is None else before & now
            if both != before:
                written[after] = set(both)
                waiting.append(after)
    found = []
    for block, before in enumerate(written):
        now = set(before or ())
        for text in instructions[starts[block] : ends[block]] if before is not None else ():
            writes, reads = _uniform(text)
            if text.startswith(_UNIFORM) and reads - now:
                found.append(text)
            now |= writes
    return found


@functools.lru_cache(100_000)
def _uniform(text: str) -> tuple[set[int], set[int]]:
    """Return the uniform registers that an instruction writes and reads."""
    operation, _, rest = text.removeprefix("@ ").partition(" ")
    wide = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
    if operation.startswith("USHF"):
        wide = 1  # its .U64 is what it shifts
    operands = [re.findall(r"\bUR(\d+)\b", operand) for operand in rest.split(",")]
    first = 1 if operation.startswith(_WRITES_UNIFORM) else 0
    if operation.startswith(("R2UR", "ULOP3")) and not operands[0]:
        first = 2  # a predicate comes before it
    writes = {int(n) + i for operand in operands[:first] for n in operand for i in range(wide)}
    return writes, {int(n) for operand in operands[first:] for n in operand}


def innermost_loops(instructions: list[str], labels: dict[str, int]) -> list[Loop]:
    """Return the innermost loops that multiply; the shortest comes first.

    It is the one without a mask. A loop is what can come back to a block that all of it passed:
    ptxas moves the bodies of waits out of line, and their jumps back are no loops.
    """
    starts, following = _blocks(instructions, labels)
    sizes = [b - a for a, b in zip(starts, [*starts[1:], len(instructions)], strict=True)]
    loops = _natural_loops(following)
    found = []
    for header, body in loops.items():
        inside = [i for b in body for i in instructions[starts[b] : starts[b] + sizes[b]]]
        products = sum(i.startswith(_MMA) for i in inside)
        local = sum(i.startswith(_LOCAL_MEMORY) for i in inside)
        has_inner = any(
            other != header and inner < body and _multiplies(inner, instructions, starts, sizes)
            for other, inner in loops.items()
        )
        if products and not has_inner:
            found.append(Loop(len(inside), local, products))
    return sorted(found, key=lambda loop: loop.length)


def _multiplies(
    body: set[int], instructions: list[str], starts: list[int], sizes: list[int]
) -> bool:
    return any(
        i.startswith(_MMA) for b in body for i in instructions[starts[b] : starts[b] + sizes[b]]
    )


def _blocks(instructions: list[str], labels: dict[str, int]) -> tuple[list[int], list[list[int]]]:
    """Return where straight pieces of code start, and which come after each."""
    ends = [
        index
        for index, text in enumerate(instructions)
        if text.removeprefix("@ ").startswith(_ENDS)
    ]
    cuts = {0, *labels.values(), *(end + 1 for end in ends)}
    starts = sorted(cut for cut in cuts if cut < len(instructions))
    number = {start: block for block, start in enumerate(starts)}
    following: list[list[int]] = []
    for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True):
        last = instructions[end - 1] if end > start else ""
        jumps = last.removeprefix("@ ").startswith(_ENDS)
        targets = re.findall(r"\.L_[\w.]+", last) if jumps else []
        after = [number[labels[t]] for t in targets if labels.get(t) in number]
        if (not jumps or last.startswith("@")) and end in number:
            after.append(number[end])
        following.append(after)
    return starts, following


def _natural_loops(following: list[list[int]]) -> dict[int, set[int]]:
    """Return the blocks of each loop by its header: all that reach a jump back to it."""
    before: list[list[int]] = [[] for _ in following]
    for block, after in enumerate(following):
        for other in after:
            before[other].append(block)
    order, seen = [], set()
    stack = [(0, iter(following[0]))]
    seen.add(0)
    while stack:  # depth first, for an order in which dominators settle soon
        block, rest = stack[-1]
        successor = next((other for other in rest if other not in seen), None)
        if successor is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(successor)
            stack.append((successor, iter(following[successor])))
    dominators = {block: set(seen) for block in seen}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [dominators[other] for other in before[block] if other in seen]
            new = set.intersection(*known) | {block}
            if new != dominators[block]:
                dominators[block], changed = new, True
    loops: dict[int, set[int]] = {}
    for block in seen:
        for header in following[block]:
            if header in dominators[block]:
                body = loops.setdefault(header, {header})
                waiting = [block]
                while waiting:
                    current = waiting.pop()
                    if current not in body:
                        body.add(current)
                        waiting += [other for other in before[current] if other in seen]
    return loops


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
            if read and read & set(_written(instruction)):
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
