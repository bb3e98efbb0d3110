"""Compile cases without a GPU, each for its architecture, and report what ptxas made of them.

    python -m tests.kernels.compile_worker NAME ...

Its own process, because Triton must not be in interpreter mode here and because LLVM aborts the
process when an instruction does not exist on a target. Prints one JSON object per kernel.
"""

from __future__ import annotations

import contextlib
import gc
import io
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

from tests.kernels import (
    compile_cases,
    compile_cases_gluon,
    compile_cases_mma,
    compile_cases_paged,
    compile_cases_quantised,
    compile_cases_recurrent,
    compile_cases_step,
    compile_elsewhere,
    ptx_barriers,
    ptx_early,
    ptx_flags,
)
from tilewise.kernels import device


class _StubDriver:
    """Stands in for a CUDA driver: it knows its target and nothing else.

    Each architecture is a device of its own, as Triton remembers the target of a device.
    """

    def __init__(self) -> None:
        self.arch = 0
        self.target = ""  # the name of an AMD GPU

    @staticmethod
    def is_active() -> bool:
        return False

    def get_current_target(self) -> GPUTarget:
        if self.target:
            return GPUTarget("hip", self.target, compile_elsewhere.AMD[self.target][0])
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        if self.target:
            return 1000 + [*compile_elsewhere.AMD].index(self.target)
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def _target_name(arch: int) -> str:
    """Return ptxas's name; Hopper's and Blackwell's own instructions need the suffix a."""
    return f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"


def _ptxas_report(kernel: Any, arch: int, folder: Path) -> str:
    """Return what `ptxas -v` says of a kernel, remembered by the kernel's hash."""
    report, ptx = folder / f"{kernel.hash}.txt", folder / f"{kernel.hash}.ptx"
    if not report.exists():  # its code came from Triton's cache
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


def _keep_report(kernel: Any, said: str, folder: Path) -> None:
    """Keep what ptxas said when Triton ran it, so that it need not run twice."""
    if "bytes spill stores" in said:
        (folder / f"{kernel.hash}.txt").write_text(said)


def describe(kernel: Any, arch: int, folder: Path) -> dict[str, Any]:
    """Return registers, spills, shared memory, MMA instructions and complaints of one kernel.

    Its machine code lies where "cubin" says.
    """
    report = _ptxas_report(kernel, arch, folder)
    cubin = folder / f"{kernel.hash}.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert spills is not None, report
    assert registers is not None, report
    ptx = kernel.asm["ptx"]
    mma = [m for m in ("mma.sync", "wgmma.mma_async", "tcgen05.mma") if m in ptx]
    return {
        "kernel": kernel.name,
        "registers": int(registers[1]),
        "spilled_bytes": int(spills[1]),
        "shared": kernel.metadata.shared,
        "mma": mma,
        "arch": arch,
        "cubin": str(cubin),
        "bare_handovers": ptx_barriers.bare_handovers(ptx),
        "bare_flags": ptx_flags.bare_flags(ptx),
        "waits": ptx_early.waits(ptx),
        "lets_go": ptx_early.lets_go(ptx),
        "effects_before_waiting": ptx_early.effects_before_waiting(ptx),
        "returns_before_waiting": ptx_early.returns_before_waiting(ptx),
        "complaints": re.findall(r"C75\d\d.*", report),
    }


def describe_amd(kernel: Any) -> dict[str, Any]:
    """Return the registers, spills, shared memory and products of a kernel for an AMD GPU."""
    code = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.findall(rf"{name}: *(\d+)", code)[0])

    return {
        "kernel": kernel.name,
        "registers": number("NumVgprs"),
        "spilled_bytes": number("ScratchSize"),  # of a thread
        "shared": kernel.metadata.shared,
        "mma": [name for name in ("v_mfma", "v_wmma") if name in code],
    }


def main(names: list[str], folder: Path) -> None:
    assert not device.interpreting(), "the interpreter compiles nothing"
    # What is imported stays, and compilers make few circles: to look for them is for nothing.
    gc.freeze()
    gc.disable()
    driver = _StubDriver()
    triton.runtime.driver.set_active(driver)
    device.arch_of = lambda _: driver.arch
    device.sm_count_of = lambda _: 132
    device.runs_ptx = lambda: not driver.target
    triton.knobs.nvidia.dump_ptxas_log = True
    compiled: list[Any] = []
    original = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            kernel = original(self, *args, grid=grid, warmup=True, **options)
        _keep_report(kernel, said.getvalue(), folder)
        compiled.append(kernel)

    JITFunction.run = compile_only
    modules = (
        compile_cases, compile_cases_paged, compile_cases_gluon, compile_cases_quantised,
        compile_cases_mma, compile_cases_recurrent, compile_cases_step, compile_elsewhere,
    )  # fmt: skip
    cases = {case.name: case for module in modules for case in module.CASES}
    for name in names:
        print(json.dumps({"case": name, "begins": True}), flush=True)
        compiled.clear()
        driver.arch, driver.target = cases[name].arch, cases[name].target
        try:
            cases[name].launch()
            for kernel in compiled:
                if driver.target:
                    said = describe_amd(kernel)
                else:
                    said = describe(kernel, driver.arch, folder)
                print(json.dumps({"case": name, **said}), flush=True)
        except Exception as error:
            print(json.dumps({"case": name, "error": f"{error!r}"[-2000:]}), flush=True)


if __name__ == "__main__":
    reports = Path(os.environ["TRITON_CACHE_DIR"]) / "reports"
    reports.mkdir(parents=True, exist_ok=True)
    main(sys.argv[1:], reports)
