"""A copy of the package whose Hopper kernels stall at random wherever memory changes hands.

What a run on a GPU tries of all orders of events is little: partitions go on as their work lets
them. In the copy every warp may sleep before and after a wait, before an arrival, a copy, a fence,
a named barrier, a product and an access of shared memory. The product itself has no such code, so
it costs nothing.

    python -m tests.kernels.gluon.delays FOLDER      # then PYTHONPATH=FOLDER

Kernels that begin before the one before them has ended, Triton's too, may sleep after they have let
the next one begin and after they have seen the end of the one before: so they are late while the
next one is there.

The chance is one in CHANCE for each place, warp and time; times are up to MOST ns, by the clock.
"""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import tilewise

CHANCE, MOST = 8, 4096  # powers of two
_KERNELS = Path("kernels") / "gluon"
_MODULE = "_delays"
_EARLY = Path("kernels") / "triton" / "early.py"
# Functions before which a warp may stall, by the name by which they are called.
_BEFORE = {
    "wait", "arrive", "expect", "tma_load", "tma_store", "tma_add", "store_wait", "store", "load",
    "fence_async_shared", "named_barrier", "partition_barrier", "warpgroup_mma",
    "warpgroup_mma_wait", "wait_for_copies", "atomic_add",
}  # fmt: skip
_AFTER = {"wait", "await_previous", "begin_next"}
_STALL = """(
        "{{ .reg .u32 a, b; .reg .pred p; mov.u32 a, %clock; mov.u32 b, %smid; "
        "mad.lo.u32 a, b, 40503, a; xor.b32 a, a, $1; "
        f"add.u32 a, a, {{SITE}}; "
        "mul.lo.u32 a, a, 0x9E3779B1; shr.u32 b, a, 15; xor.b32 a, a, b; "
        "mul.lo.u32 a, a, 0x85EBCA77; shr.u32 b, a, 13; xor.b32 a, a, b; "
        "shfl.sync.idx.b32 a, a, 0, 31, 0xffffffff; "
        "and.b32 b, a, {chance}; setp.eq.u32 p, b, 0; shr.u32 a, a, 8; and.b32 a, a, {most}; "
        "@p nanosleep.u32 a; bar.warp.sync 0xffffffff; mov.b32 $0, $1; }}"
    )"""
_SOURCE = f'''"""Stalls at random, in a copy of the package that is made for tests."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def stall(SITE: gl.constexpr):
    """Let each warp of this partition sleep, by chance; its lanes stay together."""
    WARPS: gl.constexpr = gl.num_warps()
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, lanes)
    gl.inline_asm_elementwise(
        {_STALL}, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1,
    )
'''
_EARLY_SOURCE = f'''

@triton.jit
def _stall(SITE: tl.constexpr):
    """Let each warp sleep, by chance; its lanes stay together."""
    THREADS: tl.constexpr = num_threads()
    thread = tl.arange(0, THREADS)
    tl.inline_asm_elementwise(
        {_STALL}, "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1,
    )
'''


def _called(node: ast.AST) -> set[str]:
    """Return the names of the functions that a statement without a body calls."""
    names = set()
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = call.func
            if isinstance(function, ast.Attribute):
                names.add(function.attr)
            elif isinstance(function, ast.Name):
                names.add(function.id)
    return names


def _is_jitted(node: ast.FunctionDef) -> bool:
    return any("gluon.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def delayed(text: str, first_site: int = 0) -> tuple[str, int]:
    """Return the text of a module with stalls in its jitted functions, and how many there are."""
    lines = text.split("\n")
    added: list[tuple[int, str, bool]] = []  # (line, indent, after it)
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef) or not _is_jitted(function):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Expr | ast.Assign | ast.Return):
                continue
            called = _called(node)
            indent = " " * node.col_offset
            if called & _BEFORE:
                added.append((node.lineno - 1, indent, False))
            if called & _AFTER and isinstance(node, ast.Expr):
                added.append((node.end_lineno, indent, True))
    # Where a statement that ends a block and the one behind it both want one, its own comes first.
    order = sorted(added, key=lambda stall: (stall[0], not stall[2], stall[1]), reverse=True)
    for number, (line, indent, _) in enumerate(order):
        lines.insert(line, f"{indent}{_MODULE}_stall({7919 * (first_site + number)})")
    text = "\n".join(lines)
    if added:
        package = f"{tilewise.__name__}.{'.'.join(_KERNELS.parts)}"
        text = text.replace(
            "from __future__ import annotations\n",
            "from __future__ import annotations\n"
            f"from {package}.{_MODULE} import stall as {_MODULE}_stall\n", 1,
        )  # fmt: skip
    return text, len(added)


def delayed_early(text: str, first_site: int = 0) -> tuple[str, int]:
    """Return the text of `kernels.triton.early` with stalls, and how many there are."""
    lines, sites = [], 0
    for line in text.split("\n"):
        lines.append(line)
        if line.strip() in ("gdc_launch_dependents()", "gdc_wait()"):
            lines.append(line[: -len(line.lstrip())] + f"_stall({7919 * (first_site + sites)})")
            sites += 1
    source = "\n".join(lines).replace(
        "import gdc_launch_dependents, gdc_wait\n",
        "import gdc_launch_dependents, gdc_wait, num_threads\n",
    )
    return source, sites


def write_package(folder: Path, chance: int = CHANCE, most: int = MOST) -> int:
    """Write the copy into a folder; return the number of places where warps may stall."""
    for size, name in ((chance, "chance"), (most, "most")):
        if size < 1 or size & (size - 1):
            raise ValueError(f"{name} must be a power of two, got {size}")
    source, target = Path(tilewise.__file__).parent, folder / tilewise.__name__
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    count = 0
    for file in sorted((target / _KERNELS).rglob("*.py")):
        text, found = delayed(file.read_text(), count)
        file.write_text(text)
        count += found
    text, found = delayed_early((target / _EARLY).read_text(), count)
    stalls = {"chance": chance - 1, "most": most - 1}
    (target / _EARLY).write_text(text + _EARLY_SOURCE.format(**stalls))
    count += found
    (target / _KERNELS / f"{_MODULE}.py").write_text(_SOURCE.format(**stalls))
    return count


if __name__ == "__main__":
    print(write_package(Path(sys.argv[1])), "places")
