"""Arguments of device functions that Triton 3.6 cannot take, which newer ones do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilewise

GLUON = Path(tilewise.__file__).parent / "kernels" / "gluon"

SOFTCAP = """
class Variant:
    softcap: str = "none"

@gluon.jit
def capped(s, variant): ...

@gluon.jit
def logits(s, variant):
    return capped(s, {})
"""


def texts_passed_on(trees: list[ast.Module]) -> Iterator[str]:
    """Find fields of text, such as a variant's softcap, among the arguments of device functions.

    Triton 3.6 unwraps a field of a constexpr, and an argument that is a bare str has no type.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    fields = {
        line.target.id
        for node in nodes if isinstance(node, ast.ClassDef)
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        and ast.unparse(line.annotation) == "str"
    }  # fmt: skip
    on_device = [
        node for node in nodes if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).startswith("gluon.jit") for d in node.decorator_list)
    ]  # fmt: skip
    names = {function.name for function in on_device}
    for function in on_device:
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in names:
                continue
            for given in (*call.args, *(keyword.value for keyword in call.keywords)):
                if isinstance(given, ast.Attribute) and given.attr in fields:
                    yield f"{function.name}: {ast.unparse(call)}"


def test_no_device_function_is_given_a_field_of_text():
    trees = [ast.parse(path.read_text()) for path in GLUON.rglob("*.py")]
    assert len(trees) > 40
    assert not list(texts_passed_on(trees))


@pytest.mark.parametrize(("given", "count"), [("variant", 0), ("variant.softcap", 1)])
def test_one_would_be_found(given, count):
    assert len(list(texts_passed_on([ast.parse(SOFTCAP.replace("{}", given))]))) == count
