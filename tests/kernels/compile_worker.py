"""Compile cases for one architecture without a GPU and report what ptxas made of them.

    python -m tests.kernels.compile_worker 90 NAME ...

Its own process, because Triton must not be in interpreter mode here and because LLVM aborts the
process when an instruction does not exist on a target. Prints one JSON object per kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from tests.kernels import compile_cases, compile_cases_paged
from tilewise.kernels import device

_LOCAL_MEMORY = ("LDL", "STL")
_MMA_SASS = ("HGMMA", "UTCHMMA", "UTCMMA", "HMMA")


class _StubDriver:
    """Stands in for a CUDA driver: it knows its target and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @staticmethod
    def is_active() -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _target_name(arch: int) -> str:
    """Return ptxas's name; Hopper's and Blackwell's own instructions need the suffix a."""
    return f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"


def _ptxas_report(kernel: Any, arch: int, folder: Path) -> str:
    """Return what `ptxas -v` says of a kernel, remembered by the kernel's hash."""
    report, ptx = folder / f"{kernel.hash}.txt", folder / f"{kernel.hash}.ptx"
    if not report.exists():
        ptx.write_text(kernel.asm["ptx"])
        done = subprocess.run(
            [
                get_ptxas(arch).path,
                "-v",
                f"--gpu-name={_target_name(arch)}",
                ptx,
                "-o",
                "/dev/null",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        report.write_text(done.stderr)
    return report.read_text()


def _instructions(cubin: Path) -> tuple[list[str], dict[str, int]]:
    """Disassemble: instructions, and the index that each label stands before."""
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
            instructions.append(re.sub(r"^@!?U?P\w+\s+", "", found[1]))
    return instructions, labels


def local_shares(instructions: list[str], labels: dict[str, int]) -> list[float]:
    """Return which part of each innermost loop that multiplies goes to local memory.

    The shortest loop comes first: it is the one without a mask.
    """
    loops = []
    for index, instruction in enumerate(instructions):
        jump = re.search(r"BRA.*`\((\.L_\S+?)\)", instruction)
        if jump and labels.get(jump[1], index + 1) <= index:
            loops.append((labels[jump[1]], index))
    loops = [
        (a, b) for a, b in loops if any(i.startswith(_MMA_SASS) for i in instructions[a : b + 1])
    ]
    innermost = [
        (a, b)
        for a, b in loops
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in loops)
    ]
    return [
        sum(i.startswith(_LOCAL_MEMORY) for i in instructions[a : b + 1]) / (b - a + 1)
        for a, b in sorted(innermost, key=lambda loop: loop[1] - loop[0])
    ]


def describe(kernel: Any, arch: int, folder: Path) -> dict[str, Any]:
    """Return registers, spills, shared memory, MMA instructions and complaints of one kernel."""
    report = _ptxas_report(kernel, arch, folder)
    cubin = folder / f"{kernel.hash}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spills is not None, report
    assert registers is not None, report
    ptx = kernel.asm["ptx"]
    return {
        "kernel": kernel.name,
        "registers": int(registers[1]),
        "spilled_bytes": int(spills[1]),
        "local_shares": local_shares(*_instructions(cubin)),
        "shared": kernel.metadata.shared,
        "mma": [m for m in ("mma.sync", "wgmma.mma_async", "tcgen05.mma") if m in ptx],
        "complaints": re.findall(r"C75\d\d.*", report),
    }


def main(arch: int, names: list[str], folder: Path) -> None:
    assert not device.interpreting(), "the interpreter compiles nothing"
    triton.runtime.driver.set_active(_StubDriver(GPUTarget("cuda", arch, 32)))
    device.arch_of = lambda _: arch
    device.sm_count_of = lambda _: 132
    compiled: list[Any] = []
    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(original(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    cases = {case.name: case for case in (*compile_cases.CASES, *compile_cases_paged.CASES)}
    for name in names:
        print(json.dumps({"case": name, "begins": True}), flush=True)
        compiled.clear()
        try:
            cases[name].launch()
            for kernel in compiled:
                print(json.dumps({"case": name, **describe(kernel, arch, folder)}), flush=True)
        except Exception as error:
            print(json.dumps({"case": name, "error": f"{error!r}"[-2000:]}), flush=True)


if __name__ == "__main__":
    reports = Path(os.environ["TRITON_CACHE_DIR"]) / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    main(int(sys.argv[1]), sys.argv[2:], reports)
