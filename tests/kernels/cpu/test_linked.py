"""Parts of kernels are compiled alone and linked once; types of arithmetic are found once."""

from __future__ import annotations

import ast
import operator
from pathlib import Path

import numpy as np
import pytest
from numba import njit, typeof, types
from numba.core.codegen import JITCodeLibrary
from numba.core.errors import TypingError
from numba.core.registry import cpu_target
from numba.core.types.functions import BaseFunction

from tilewise.kernels.cpu.machine import known_types, threads
from tilewise.kernels.cpu.machine.known_types import remembering_types
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


NUMBERS = [types.boolean, types.int8, types.uint64, types.int64, types.float32, types.float64,
           types.literal(3)]  # fmt: skip
OPERATORS = [operator.add, operator.mul, operator.floordiv, operator.truediv, operator.and_,
             operator.lt, operator.neg, min]  # fmt: skip


def _type_of(function, args):
    context = cpu_target.typing_context
    context.refresh()
    try:
        return context.resolve_value_type(function).get_call_type(context, args, {})
    except TypingError:
        return None


@pytest.mark.parametrize("function", OPERATORS, ids=lambda each: each.__name__)
def test_remembered_types_are_those_that_numba_finds(function, monkeypatch):
    monkeypatch.setattr(known_types, "_known", {})
    if function is operator.neg:
        calls = [(a,) for a in NUMBERS]
    else:
        calls = [(a, b) for a in NUMBERS for b in NUMBERS]
    wanted = [_type_of(function, call) for call in calls]
    assert len({str(each) for each in wanted}) > 2
    for _ in range(2):  # found, then remembered
        with remembering_types():
            assert [_type_of(function, call) for call in calls] == wanted


def test_types_of_one_function_are_not_those_of_another(monkeypatch):
    monkeypatch.setattr(known_types, "_known", {})
    with remembering_types():
        found = [
            _type_of(each, (types.int64, types.int64)).return_type
            for each in (operator.add, operator.lt, operator.truediv)
        ]
    assert found == [types.int64, types.boolean, types.float64]


def test_arrays_are_asked_for_each_time(monkeypatch):
    monkeypatch.setattr(known_types, "_known", {})
    array = typeof(np.zeros(2, np.float32))
    with remembering_types():
        assert _type_of(operator.add, (array, array)).return_type == array
    assert not known_types._known


def test_nothing_is_changed_where_no_kernel_is_compiled():
    before = BaseFunction.get_call_type
    with remembering_types():
        assert BaseFunction.get_call_type is not before
    assert BaseFunction.get_call_type is before


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
