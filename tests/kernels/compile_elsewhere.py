"""The portable kernels for GPUs on which nobody has run them: what compiles, and within what.

    python -m tests.kernels.compile_elsewhere [TARGET ...]      prints and records all cases

NVIDIA's sm_86, 89, 103 and 120 by ptxas, AMD's gfx942, gfx950, gfx1100 and gfx1201 by Triton's own
backend, each with the tiles that a plan takes there. A case is one of each family of kernels.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.kernels import (
    compile_cases,
    compile_cases_paged,
    compile_cases_quantised,
    compile_cases_recurrent,
    compile_cases_step,
)
from tests.kernels.compile_cases import Case, attention_spec, launch_attention
from tilewise.kernels import device
from tilewise.kernels.tiles.attention import Part

NVIDIA = (86, 89, 103, 120)
# Threads of a warp, and bytes of shared memory that a program may have (AMD's ISA documents).
AMD = {
    "gfx942": (64, 64 << 10),
    "gfx950": (64, 160 << 10),
    "gfx1100": (32, 64 << 10),
    "gfx1201": (32, 64 << 10),
}
_EVERYTHING: dict[str, Any] = {
    "window_left": 1000, "softcap": 30.0, "is_varlen": True, "has_alibi": True, "has_sinks": True,
    "has_bias": True, "mask_tile": (128, 128), "dropout_p": 0.1,
}  # fmt: skip
_PARTS: tuple[Part, ...] = ("fwd", "dkdv", "dq")
# name -> (head dim, changes of the spec, parts)
_ATTENTION: dict[str, tuple[int, dict[str, Any], tuple[Part, ...]]] = {
    "d64": (64, {}, ("fwd",)),
    "d128": (128, {}, _PARTS),
    "d256": (256, {}, _PARTS),
    "d512": (512, {}, ("fwd",)),
    "everything-d128": (128, _EVERYTHING, ("fwd", "dkdv")),
    "fp32-d64": (64, {"dtype": torch.float32}, ("fwd",)),
}
_SAME_EVERYWHERE = (
    "paged-decode", "paged-decode-d256", "paged-decode-int8", "paged-decode-e4m3", "paged-prefill",
    "paged-tree", "elementwise-d128", "mla-16-heads", "mla-128-heads", "mla-int8-8bit",
    "norms-1024", "linear-1024", "low-rank-3-16-0", "experts-300-bf16", "experts-300-mxfp4",
    "sampling-151936",
)  # fmt: skip
_MODULES = (
    compile_cases,
    compile_cases_paged,
    compile_cases_quantised,
    compile_cases_recurrent,
    compile_cases_step,
)
_TOLD = ("kernel", "registers", "spilled_bytes", "shared", "mma", "error")
_BUDGETS = Path(__file__).with_name("compile_elsewhere.json")


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the launchers' call of a case of each family."""
    for name, (width, changes, parts) in _ATTENTION.items():
        spec = attention_spec(width, **changes)
        for part in parts:
            yield f"{part}-{name}", functools.partial(launch_attention, spec, part)
    cases = {case.name: case for module in _MODULES for case in module.CASES}
    for name in _SAME_EVERYWHERE:
        yield name, cases[f"sm_80-{name}"].launch
    yield "convolution", cases["convolution-sm_80"].launch


def _cases() -> Iterator[Case]:
    for name, launch in launches():
        for arch in NVIDIA:
            yield Case(f"sm_{arch}-elsewhere-{name}", arch, launch, slow=True)
        for target in AMD:
            yield Case(f"{target}-elsewhere-{name}", device.AMD, launch, slow=True, target=target)


CASES: list[Case] = [*_cases()]


def room(case: Case, limits: dict[int, int]) -> int:
    """Return the bytes of shared memory that a program may have."""
    return AMD[case.target][1] if case.target else limits[case.arch]


def budgets() -> dict[str, dict[str, int]]:
    """Return the bytes of a thread that left the registers, by case and kernel, where any did.

    By Triton 3.7.1; kernels of one name count together, by the most.
    """
    found: dict[str, dict[str, int]] = json.loads(_BUDGETS.read_text())
    return found


def recorded(reports: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, int]]:
    """Return the budgets of what the worker said of cases."""
    found: dict[str, dict[str, int]] = {}
    for name, kernels in sorted(reports.items()):
        for kernel in kernels:
            if kernel.get("spilled_bytes", 0) > 0:
                case = found.setdefault(name, {})
                case[kernel["kernel"]] = max(case.get(kernel["kernel"], 0), kernel["spilled_bytes"])
    return found


def main(targets: list[str]) -> None:
    from tests.kernels.test_compile import run_cases

    names = [case.name for case in CASES if not targets or case.name.split("-")[0] in targets]
    reports = run_cases(names)
    for name, kernels in reports.items():
        for kernel in kernels:
            print(name, json.dumps({x: kernel.get(x) for x in _TOLD}))
    found = recorded(reports)
    kept = {name: case for name, case in budgets().items() if name not in names}
    _BUDGETS.write_text(json.dumps(dict(sorted((kept | found).items())), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
