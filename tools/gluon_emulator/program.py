"""Kernel source as emulated functions: the text itself, run in namespaces that are emulated.

A module's own jitted functions are taken from its file, so that a test may change the text before
it is run. Three things of Triton's language are written into the syntax tree: what a loop assigns
is a value and no longer a literal, as are the parts of a tuple that a call returns once it has a
name, and `range` counts in values.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language import constexpr
from triton.runtime.jit import JITCallable, JITFunction

from tools.gluon_emulator import language
from tools.gluon_emulator.errors import NotEmulated
from tools.gluon_emulator.registers import Scalar, carried

Change = Callable[[str], str]
_MODULES = {
    "triton.experimental.gluon.language": language.gl,
    "triton.language": language.gl,
    hopper.tma.__name__: language.tma,
    hopper.mbarrier.__name__: language.mbarrier,
    ampere.async_copy.__name__: language.async_copy,
}


def values_in(*bounds: Any) -> Iterator[Scalar]:
    """Count like `range`, in values of the kernel."""
    return map(Scalar, range(*bounds))


class Program:
    """Emulated functions of some modules, whose text `changes` may alter, by module name."""

    def __init__(self, changes: Mapping[str, Change] | None = None) -> None:
        self._changes = dict(changes or {})
        self._namespaces: dict[str, dict[str, Any]] = {}

    def function(self, jitted: JITCallable) -> Callable[..., Any]:
        """Return the emulated form of a jitted function."""
        python = jitted.fn
        return self._namespace(python.__module__)[python.__name__]

    def _namespace(self, name: str) -> dict[str, Any]:
        if name not in self._namespaces:
            namespace = self._namespaces[name] = {}
            module = sys.modules[name]
            text = Path(module.__file__).read_text()
            changed = self._changes.get(name, lambda text: text)(text)
            own = {
                value.fn.__name__ for value in vars(module).values() if _is_own(value, name)
            }  # fmt: skip
            for key, value in vars(module).items():
                namespace[key] = self._translated(value)
            namespace |= {"range": values_in, "_carried": carried, "_named": _named}
            exec(_code_of(changed, _file_of(module, changed), frozenset(own)), namespace)
        return self._namespaces[name]

    def _translated(self, value: Any) -> Any:
        """Return what a kernel finds under a global name."""
        if isinstance(value, ModuleType):
            return _MODULES.get(value.__name__, value)
        if isinstance(value, constexpr):
            return value.value
        if isinstance(value, JITFunction):
            home = value.fn.__module__
            if home.startswith("triton."):
                return getattr(language.gl, value.fn.__name__)
            return _found_later(self._namespace(home), value.fn.__name__)
        if isinstance(value, JITCallable):  # a function of constants
            return value.fn
        if getattr(value, "__triton_builtin__", False):
            return _builtin(value.__name__)
        return value


def _file_of(module: ModuleType, text: str) -> str:
    """Return a name under which tracebacks find this text."""
    name = f"<emulated {module.__name__} {hash(text):x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return name


def _found_later(namespace: dict[str, Any], name: str) -> Callable[..., Any]:
    """Return a function of another module, which may not be there yet."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return namespace[name](*args, **kwargs)

    call.__name__ = name
    return call


def _is_own(value: Any, module: str) -> bool:
    return isinstance(value, JITFunction) and value.fn.__module__ == module


def _builtin(name: str) -> Callable[..., Any]:
    if name in language.BY_NAME:
        return language.BY_NAME[name]
    if name in vars(language.Language):
        return getattr(language.gl, name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotEmulated(name)

    return missing


@functools.lru_cache(200)
def _code_of(text: str, file: str, own: frozenset[str]) -> CodeType:
    """Return the code of a module's own jitted functions; most texts stay as they are."""
    tree = ast.parse(text)
    kept = [
        _emulated(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in own
    ]
    tree.body = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0), *kept]
    ast.fix_missing_locations(tree)
    return compile(tree, file, "exec", dont_inherit=True)


def _emulated(function: ast.FunctionDef) -> ast.FunctionDef:
    function.decorator_list = []
    return _Literals().visit(function)


def _named(value: Any) -> Any:
    """Return what an assignment makes of what a call returned: literals in tuples become values."""
    if not isinstance(value, tuple):
        return value
    parts = [_named(part) if isinstance(part, tuple) else carried(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


class _Literals(ast.NodeTransformer):
    """Turns literals into values: those that a loop assigns, and those that a call returns."""

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            node.value = ast.Call(ast.Name("_named", ast.Load()), [node.value], [])
        return node

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        called = node.iter.func if isinstance(node.iter, ast.Call) else None
        static = isinstance(called, ast.Attribute) and called.attr == "static_range"
        return node if static else [*_carry(node), node]

    def visit_While(self, node: ast.While) -> Any:
        self.generic_visit(node)
        return [*_carry(node), node]


def _carry(loop: ast.For | ast.While) -> list[ast.stmt]:
    names: dict[str, None] = {}
    for statement in loop.body:
        for node in ast.walk(statement):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AugAssign):
                targets = [node.target]
            for target in targets:
                names |= {x.id: None for x in ast.walk(target) if isinstance(x, ast.Name)}
    source = "".join(
        f"try:\n    {name} = _carried({name})\nexcept NameError:\n    pass\n" for name in names
    )
    carried_first = ast.parse(source).body
    return [ast.copy_location(statement, loop) for statement in carried_first]
