"""Parts of kernels are compiled alone and linked once."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
from numba import njit, types
from numba.core.codegen import JITCodeLibrary

from tilewise.kernels.cpu.machine import threads
from tilewise.kernels.cpu.machine.linked import _LinkedLibrary
from tilewise.kernels.cpu.machine.threads import inner


@inner
def _deep(x):
    return x * 2 if x > 1 else np.sqrt(x)


@inner
def _left(x):
    return _deep(x) + 1


@inner
def _right(x):
    return _deep(x) - 1


@njit
def _both(x):
    return _left(x) * _right(x)


@inner
def _shared(n):
    return 3 * n


@inner
def _shares(n):
    return _shared(n) + 1


@inner
def _drops_last(n):
    found = _shares(n)
    if n != n:  # LLVM finds that no integer is
        found += _shared(n)
    return found


@inner
def _drops_first(n):
    found = 0
    if n != n:
        found = _shared(n)
    return found + _shares(n)


@njit
def _last(n):
    return _drops_last(n)


@njit
def _first(n):
    return _drops_first(n)


def _library(function):
    return function.overloads[(types.float64,)].library


@pytest.mark.parametrize("part", [_drops_first, _drops_last])
def test_a_part_comes_with_all_that_is_called(part):
    part.compile((types.int64,))
    whole = part.overloads[(types.int64,)].library._get_module_for_linking()
    for callee in (_shares, _shared):
        name = callee.overloads[(types.int64,)].fndesc.llvm_func_name
        found = [each for each in whole.functions if each.name == name]
        assert found
        assert not found[0].is_declaration


@pytest.mark.parametrize("kernel", [_first, _last])
def test_what_only_a_part_still_calls_is_linked(kernel):
    assert kernel(5) == 16


def test_a_kernel_links_each_part_once():
    assert [_both(x) for x in (0.25, 4.0)] == [-0.75, 63.0]
    left, deep = _library(_left), _library(_deep)
    name = _deep.overloads[(types.float64,)].fndesc.llvm_func_name
    assert left._final_module.get_function(name).is_declaration
    assert not deep._final_module.get_function(name).is_declaration
    whole = left._get_module_for_linking()
    assert not whole.get_function(name).is_declaration
    assert whole is left._get_module_for_linking()


def test_all_passes_are_for_the_whole(monkeypatch):
    """What is optimised within a kernel anyway costs a first step 0.9 s, and makes it no faster."""
    optimised = []
    before = JITCodeLibrary._optimize_final_module

    def optimise(library):
        optimised.append(library.name.split(".")[-1])
        before(library)

    monkeypatch.setattr(JITCodeLibrary, "_optimize_final_module", optimise)

    @inner
    def part(x):
        return 2 * x

    @njit
    def whole(x):
        return part(x)

    assert whole(4) == 8
    assert "whole" in optimised
    assert "part" not in optimised


def test_parts_have_no_machine_code():
    _both(2.0)
    for part in (_left, _right, _deep):
        assert _library(part).get_pointer_to_function("anything") == 0


def test_parts_are_made_by_a_numba_that_reloads_nothing(monkeypatch):
    finalize, finalized = _LinkedLibrary.finalize, []

    def finalize_as_in_0_62(self):
        libraries = (self, *self._linking_libraries)
        kept = [vars(each).pop("_reload_init", set()) for each in libraries]
        finalize(self)
        for each, its in zip(libraries, kept, strict=True):
            each._reload_init = its
        finalized.append(self)

    @inner
    def callee(x):
        return x * 3.0

    @inner
    def part(x):
        return callee(x) + 1.0

    monkeypatch.setattr(_LinkedLibrary, "finalize", finalize_as_in_0_62)
    part.compile((types.float64,))
    library = _library(part)
    whole = library._get_module_for_linking()
    assert library in finalized
    name = callee.overloads[(types.float64,)].fndesc.llvm_func_name
    assert not whole.get_function(name).is_declaration


def test_kernels_compile_nothing_that_they_do_not_run():
    """A slice set to a slice compiles NumPy's error messages, 1.6 s; numba's own `overload`
    optimises all that a function calls by itself, 1.5 s; an address of an array is unsigned, and
    what is given signed ones elsewhere is compiled twice, with float64 where both meet."""
    folder = Path(threads.__file__).parents[1]
    for path in folder.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            names = {ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list}
            assert "overload" not in names, f"{path.name}: {function.name}"
            if not names & {"inner", "inlined", "kernel"}:
                continue
            for node in ast.walk(function):
                where = f"{path.name}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Assign) and _is_slice(node.value):
                    assert not any(map(_is_slice, node.targets)), where
                if isinstance(node, ast.Call) and ast.unparse(node.func) != "types.int64":
                    given = [ast.unparse(each) for each in node.args]
                    assert not any(each.endswith(".ctypes.data") for each in given), where


def _is_slice(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
