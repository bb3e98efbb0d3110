"""Windows and the diagonal are reckoned with in one file of each backend."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_KERNELS = Path(__file__).parents[2] / "tilewise" / "kernels"
_BOUNDS = {"window_left", "window_right", "WINDOW_LEFT", "diagonal", "diagonals"}
_LENGTHS_K = {"length_k", "seqlen_k", "k_len", "K_LEN", "length"}
_LENGTHS_Q = {"length_q", "seqlen_q", "q_len", "Q_LEN", "run", "num_rows"}
# What stands elsewhere, by file and function, and why.
_ALIBI = "the distance from the diagonal is part of a logit: ALiBi's slope multiplies it"
_EXCEPTIONS = {
    ("cpu/attention/softmax.py", "logits_row"): _ALIBI,
    ("triton/attention/dkdv.py", "_fold"): _ALIBI,
    ("triton/attention/dq.py", "_fold"): _ALIBI,
    ("triton/attention/forward.py", "_attend"): _ALIBI,
    ("gluon/device/logits.py", "slant_of"): _ALIBI,
    ("gluon/device/logits.py", "_add_alibi"): _ALIBI,
}
_BACKENDS = ("cpu", "triton", "gluon")


def _names(node: ast.expr) -> set[str]:
    """Return the names of the terms of a sum: x, of.x, and of array[i, X] X."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.BinOp):
        return _names(node.left) | _names(node.right)
    if isinstance(node, ast.Subscript):
        inner = {part.id for part in ast.walk(node.slice) if isinstance(part, ast.Name)}
        return inner | _names(node.value)
    return set()


def _is_reckoning(node: ast.AST) -> bool:
    """Whether an expression adds to a bound, or takes the queries of a sequence from its keys."""
    if isinstance(node, ast.AugAssign):
        return bool((_names(node.target) | _names(node.value)) & _BOUNDS)
    if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.BitAnd | ast.BitOr):
        return False
    left, right = _names(node.left), _names(node.right)
    if (left | right) & _BOUNDS:
        return True
    pairs = ((_LENGTHS_K, _LENGTHS_Q), (_LENGTHS_Q, _LENGTHS_K))
    return isinstance(node.op, ast.Sub) and any(left & a and right & b for a, b in pairs)


def _places(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.expr | ast.AugAssign]]:
    """Yield the expressions that reckon with bounds, each with the function that it stands in."""
    for child in ast.iter_child_nodes(tree):
        name = child.name if isinstance(child, ast.FunctionDef) else function
        if isinstance(child, ast.expr | ast.AugAssign) and _is_reckoning(child):
            yield name, child
        else:
            yield from _places(child, name)


def _found(backend: str) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for file in sorted((_KERNELS / backend).rglob("*.py")):
        if file == _KERNELS / backend / "visible.py":
            continue
        for function, node in _places(ast.parse(file.read_text())):
            place = f"line {node.lineno}: {ast.unparse(node)}"
            found.setdefault((str(file.relative_to(_KERNELS)), function), []).append(place)
    return found


@pytest.mark.parametrize("backend", _BACKENDS)
def test_windows_are_reckoned_with_in_one_file(backend: str) -> None:
    found = _found(backend)
    assert not {key: lines for key, lines in found.items() if key not in _EXCEPTIONS}
    told = {key for key in _EXCEPTIONS if key[0].startswith(f"{backend}/")}
    assert told <= set(found), "an exception that is none any more"


def test_the_one_file_reckons_with_windows() -> None:
    for backend in _BACKENDS:
        tree = ast.parse((_KERNELS / backend / "visible.py").read_text())
        assert len(list(_places(tree))) > 3


@pytest.mark.parametrize(
    ("text", "is_seen"),
    [
        ("max(row + shift - work.window_left, 0)", True),
        ("keys.diagonal - first", True),
        ("starts[s, K_LEN] - starts[s, Q_LEN]", True),
        ("rows + (length_k - at.length_q)", True),
        ("seqlen_k - run + token", True),
        ("0 <= spec.window_left < longest", False),
        ("length_k - first_key", False),
        ("length_q - first_row", False),
        ("variant.left and window_left >= 0", False),
    ],
)
def test_arithmetic_on_bounds_is_told_from_other(text: str, is_seen: bool) -> None:
    assert bool(list(_places(ast.parse(text)))) == is_seen
