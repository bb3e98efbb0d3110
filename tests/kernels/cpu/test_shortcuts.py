"""What is left out of numba's work has no result."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from llvmlite import ir as llvm
from numba import types
from numba.core import compiler, ir
from numba.core.base import BaseContext
from numba.core.registry import cpu_target
from numba.core.runtime.context import NRTContext

from tilewise.kernels.cpu.machine import shortcuts


class _Pair(NamedTuple):
    count: int
    rows: object


_ARRAY = types.float32[::1]
_KINDS = [
    types.int64,
    _ARRAY,
    types.UniTuple(types.int64, 40),
    types.UniTuple(_ARRAY, 3),
    types.Optional(_ARRAY),
    types.NamedTuple((types.int64, _ARRAY), _Pair),
    types.Tuple((types.float64, types.Tuple((types.int8, _ARRAY)), types.UniTuple(types.int64, 9))),
]  # fmt: skip


def _context():
    return cpu_target.target_context.subtarget(enable_nrt=True)


def _counted(find, kind):
    """Types of what is counted in a value, and how many instructions it took to find."""
    context = _context()
    value_type = context.get_value_type(kind)
    function = llvm.Function(llvm.Module(), llvm.FunctionType(llvm.VoidType(), [value_type]), "f")
    builder = llvm.IRBuilder(function.append_basic_block())
    found = find(context.nrt, builder, kind, function.args[0])
    return [each for each, _ in found], len(builder.block.instructions)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_all_counted_memory_is_found(monkeypatch, kind):
    wanted, most = _counted(NRTContext.get_meminfos, kind)
    monkeypatch.setattr(NRTContext, "get_meminfos", shortcuts._get_meminfos)
    found, count = _counted(NRTContext.get_meminfos, kind)
    assert found == wanted
    assert count <= most
    if kind == _KINDS[2]:
        assert (count, most) == (0, 40)


def _example(a, b, c):
    total = (a + b, [c, a])
    for i in range(len(c)):
        if c[i] > a:
            total = (total[0] * c[i], [c, b])
    return {"x": total}, c[1:], -a


def test_variables_of_statements_are_those_that_numba_lists():
    function = compiler.run_frontend(_example)
    a, b, c = (ir.Var(None, name, function.loc) for name in "abc")
    values = [
        *(each for block in function.blocks.values() for each in block.body),
        {"x": [a, (b, 3), {"y": [c, "d"]}], "z": a},
    ]
    assert len(values) > 30
    seen = 0
    for value in values:
        one = ir.Inst()
        wanted = [each.name for each in ir.Inst._rec_list_vars(one, value)]
        assert [each.name for each in shortcuts._rec_list_vars(one, value)] == wanted
        seen += len(wanted)
    assert seen > 40


def test_sizes_are_those_of_llvm():
    context = _context()
    for kind in [*_KINDS, types.int8, *_KINDS]:
        for type_of in (context.get_value_type, context.get_data_type):
            found = shortcuts._get_abi_sizeof(context, type_of(kind))
            assert found == BaseContext.get_abi_sizeof(context, type_of(kind))


def test_types_are_found_by_either_hash_and_all_is_as_it_was_afterwards():
    before = [vars(owner)[name] for owner, name, _ in shortcuts._WAYS]
    known = {kind: number for number, kind in enumerate(_KINDS)}
    with pytest.raises(LookupError), shortcuts.shortcuts():  # noqa: PT012
        assert [vars(owner)[name] for owner, name, _ in shortcuts._WAYS] != before
        assert [known[kind] for kind in _KINDS] == list(range(len(_KINDS)))
        again = types.NamedTuple((types.int64, _ARRAY), _Pair)
        assert known[again] == 5
        raise LookupError
    assert [vars(owner)[name] for owner, name, _ in shortcuts._WAYS] == before
    assert not shortcuts._hashes
