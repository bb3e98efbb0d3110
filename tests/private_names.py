"""Find the names that other libraries keep private in source text.

A name is private where a part of its path begins with an underscore, or where it lies in a module
that its library does not document. An attribute of an object of which nothing is known stands as
`.name`; names that this package has itself are not among them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

__all__ = ["names_of", "private_names"]

LIBRARIES = ("llvmlite", "numba", "torch", "transformers", "triton")
UNDOCUMENTED = (
    "numba.core.base", "numba.core.caching", "numba.core.codegen", "numba.core.compiler",
    "numba.core.ir", "numba.core.runtime", "numba.core.types.functions", "numba.np",
    "triton.backends", "triton.compiler", "triton.runtime",
)  # fmt: skip
# Python's own: of named tuples, argparse, os, sys and ctypes.
_PYTHONS = frozenset(
    {
        "_SubParsersAction",
        "_asdict",
        "_exit",
        "_fields",
        "_fields_",
        "_getframe",
        "_make",
        "_replace",
    }
)
_OF_TEXTS = ("endswith", "removeprefix", "removesuffix", "replace", "startswith")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def _is_undocumented(path: str) -> bool:
    return any(path == module or path.startswith(f"{module}.") for module in UNDOCUMENTED)


def names_of(source: str) -> set[str]:
    """Return what a module itself names: functions, classes, variables, attributes of self."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.alias) and node.asname:
            names.add(node.asname)
    return names


def private_names(source: str, own: Collection[str] = ()) -> set[str]:
    """Return the private names that a module uses.

    Args:
        own: names of this package, of which attributes of unknown objects are; a set is quick.
    """
    nodes = list(ast.walk(ast.parse(source)))
    known: dict[str, str] = {}  # paths in libraries, by their names in the module
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= _imported(node)
            found |= {
                path
                for path in _named_by(node)
                if any(map(_is_private, path.split("."))) or _is_undocumented(path)
            }
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    pieces = {id(piece) for node in nodes for piece in _pieces(node)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            path = _path(node, known)
            if path is None:
                if _is_private(node.attr) and node.attr not in own and node.attr not in _PYTHONS:
                    found.add(f".{node.attr}")
            elif id(node) not in inner:
                base = path[: len(path) - _depth(node)].rstrip(".")
                is_new = _is_undocumented(path) and not _is_undocumented(base)
                if is_new or any(map(_is_private, path.removeprefix(base).split("."))):
                    found.add(path)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            is_known = text in own or text in _PYTHONS
            if id(node) not in pieces and re.fullmatch(r"_[a-z]\w+", text) and not is_known:
                found.add(f".{text}")
    return found


def _named_by(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the paths in libraries that an import names."""
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    elif not node.level and node.module:
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return []
    return [path for path in paths if path.split(".")[0] in LIBRARIES]


def _imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return what an import binds, and to which paths."""
    found = {}
    for alias, path in zip(node.names, _named_by(node), strict=False):
        if isinstance(node, ast.Import) and not alias.asname:
            path = path.split(".")[0]
        found[alias.asname or path.split(".")[-1]] = path
    return found


def _pieces(node: ast.AST) -> list[ast.expr]:
    """Return the texts of an expression that are parts of longer ones."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in _OF_TEXTS:
        return node.args
    return [node.left, node.right] if isinstance(node, ast.BinOp) else []


def _path(node: ast.expr, known: dict[str, str]) -> str | None:
    """Return the path of an attribute of what a library's import has bound."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not (isinstance(node, ast.Name) and node.id in known):
        return None
    return ".".join([known[node.id], *reversed(parts)])


def _depth(node: ast.expr) -> int:
    """Return how many characters of a path are attributes."""
    count = 0
    while isinstance(node, ast.Attribute):
        count += 1 + len(node.attr)
        node = node.value
    return count
