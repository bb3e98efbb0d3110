"""No constant of a module chooses between two ways: the one that loses is deleted."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tilewise"
# What a backend's kernels take, which dispatch asks; no second way stands beside it.
FACTS = {
    "kernels/cpu/attention/fp8.py": {"QUANTIZES"},
    "kernels/gluon/attention/fp8.py": {"QUANTIZES"},
    "kernels/triton/attention/fp8.py": {"QUANTIZES"},
}
FILES = sorted(path for room in ("engine", "kernels") for path in (PACKAGE / room).rglob("*.py"))


def switches(source: str) -> set[str]:
    """Return the constants that a module binds to True or False, wrapped in a call or not."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            if isinstance(value, ast.Call) and len(value.args) == 1:  # tl.constexpr(True)
                value = value.args[0]
            if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {x.id for t in targets for x in ast.walk(t) if isinstance(x, ast.Name)}
    return {name for name in found if name.isupper()}  # others are state, which code binds anew


def test_no_constant_chooses_between_two_ways():
    found = {path.relative_to(PACKAGE).as_posix(): switches(path.read_text()) for path in FILES}
    assert {name: names for name, names in found.items() if names} == FACTS


@pytest.mark.parametrize(
    "source", ["MERGES = True", "MERGES: bool = False", "MERGES = tl.constexpr(True)"]
)
def test_a_switch_is_seen(source):
    assert switches(source) == {"MERGES"}
    assert switches("MOST = 3\nNAMES = (True,)\nclass A:\n    merges = True") == set()


def skipped(source: str) -> list[ast.stmt]:
    """Return the statements that the formatter is told to skip."""
    ends = {i for i, line in enumerate(source.split("\n"), 1) if "# fmt:" in line}
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    found = []
    for node in nodes:
        body = getattr(node, "body", None)  # of what has one, its head is laid out by itself
        end = body[0].lineno - 1 if body else node.end_lineno
        if ends & {end if body is None else line for line in range(node.lineno, end + 1)}:
            found.append(node)
    assert bool(found) == bool(ends), "a comment for the formatter that belongs to no statement"
    return found


def is_for_layout(node: ast.stmt) -> bool:
    """Whether a statement is inline assembly or names the columns of a table of numbers."""
    if not isinstance(node, ast.Assign | ast.Return | ast.Expr):
        return False
    calls = [x.func for x in ast.walk(node) if isinstance(x, ast.Call)]
    if "inline_asm_elementwise" in [getattr(x, "attr", "") for x in calls]:
        return True
    value = getattr(node, "value", None)
    elements = getattr(value, "elts", [])
    is_numbers = bool(elements) and all(isinstance(x, ast.Constant) for x in elements)
    is_range = isinstance(value, ast.Call) and getattr(value.func, "id", "") == "range"
    return is_numbers or is_range


def test_the_formatter_lays_out_all_but_assembly_and_tables_of_numbers():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in skipped(path.read_text()):
            where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
            assert "kernels" in path.parts, where
            assert is_for_layout(node), f"{where}: change the shape of the call"


@pytest.mark.parametrize(
    ("source", "is_fine"),
    [
        ("x = gl.inline_asm_elementwise(\n    'mov', [a], pack=1\n)  # fmt: skip", True),
        ("(A, B,\n C) = range(3)  # fmt: skip", True),
        ("def f(\n    a, b,\n):  # fmt: skip\n    return gl.inline_asm_elementwise(a, b)", False),
        ("def f():\n    return g(\n        a, b,\n    )  # fmt: skip", False),
    ],
)
def test_a_line_that_the_formatter_skips_is_seen(source, is_fine):
    assert skipped(source)
    assert all(map(is_for_layout, skipped(source))) == is_fine


def way_of(node: ast.AST) -> str | None:
    """Return how a call starts a kernel: "subscript", "now" or "plan"; None for other calls."""
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Subscript):
        name = node.func.value
        return "subscript" if getattr(name, "id", "").endswith("_kernel") else None
    if getattr(node.func, "id", "") == "launch_now":
        return "now"
    is_makers = getattr(getattr(node.func, "value", None), "id", "") == "maker"
    return "plan" if is_makers and getattr(node.func, "attr", "") == "launch" else None


def launched(source: str) -> list[str]:
    """Return how a module starts its kernels."""
    return [way for node in ast.walk(ast.parse(source)) if (way := way_of(node)) is not None]


def test_kernels_are_launched_by_plans_alone():
    found = {
        path.relative_to(PACKAGE).as_posix(): launched(path.read_text())
        for path in sorted((PACKAGE / "kernels").rglob("*.py"))
    }
    ways = [way for launches in found.values() for way in launches]
    assert "subscript" not in ways, found
    assert ways.count("plan") > 40
    assert {name for name, launches in found.items() if "now" in launches} == AT_ONCE


# Where `launch_now` is called: for the first launch of a plan.
AT_ONCE = {"kernels/host/plan.py"}


@pytest.mark.parametrize(
    ("source", "way"),
    [
        ("_norm_kernel[(3,)](x)", "subscript"),
        ("launch_now(_norm_kernel, 3, x)", "now"),
        ("maker.launch(_norm_kernel, 3, x)", "plan"),
    ],
)
def test_a_launch_is_seen(source, way):
    assert launched(source) == [way]
    assert launched("kernels[0](x)\nrun(x)\nself.launch(x)") == []


def test_what_a_launch_names_is_a_constant_of_its_kernel():
    """An argument by name is compiled in, so that it must not be a tensor or a length."""
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        tree = ast.parse(path.read_text())
        kernels = {
            node.name: {
                arg.arg
                for arg in (*node.args.args, *node.args.kwonlyargs)
                if arg.annotation is not None and "constexpr" in ast.unparse(arg.annotation)
            }
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and way_of(node) in ("now", "plan"):
                constants = kernels.get(getattr(node.args[0], "id", ""))
                names = {each.arg for each in node.keywords if each.arg} - OPTIONS
                assert constants is None or names <= constants, (path.name, names - constants)


OPTIONS = {"enable_fp_fusion", "launch_pdl", "maxnreg", "num_stages", "num_warps"}  # Triton's own
