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
