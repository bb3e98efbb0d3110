"""Leave out of numba's work what has no result.

Numba counts references to what a tuple holds by reading each of its numbers, to find that it needs
no counting: half of the instructions that LLVM is given of a backward pass, all of which it takes
out again. And it asks for the variables of each statement again and again, by way of all that a
statement has. The code that LLVM makes is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite.ir import IdentifiedStructType
from numba.core import ir
from numba.core.base import BaseContext
from numba.core.runtime.context import NRTContext
from numba.types import Type

_is_counted: dict[Any, bool] = {}  # by types: whether one has memory whose owners are counted


def _get_meminfos(self: Any, builder: Any, ty: Any, val: Any) -> list[tuple[Any, Any]]:
    """As NRTContext's, without a look at members that have no counted memory."""
    models = self._context.data_model_manager

    def is_counted(kind: Any) -> bool:
        found = _is_counted.get(kind)
        if found is None:
            found = _is_counted[kind] = models[kind].contains_nrt_meminfo()
        return found

    if not is_counted(ty):
        return []
    model, found = models[ty], []
    if model.has_nrt_meminfo():
        found.append((ty, model.get_nrt_meminfo(builder, val)))
    for member, getter in model.traverse(builder):
        if is_counted(member):
            found += self.get_meminfos(builder, member, getter(val))
    return found


_NONE, _VARIABLE, _INSTRUCTION, _ITEMS, _VALUES = range(5)
_kinds: dict[type, int] = {}


def _kind_of(found: type) -> int:
    for kind, classes in (
        (_VARIABLE, ir.Var), (_INSTRUCTION, ir.Inst), (_ITEMS, (list, tuple)), (_VALUES, dict),
    ):  # fmt: skip
        if issubclass(found, classes):
            return kind
    return _NONE


def _rec_list_vars(self: Any, val: Any) -> list[Any]:
    """As that of ir.Inst, which asks five times what each value is."""
    found: list[Any] = []
    waiting = [val]
    while waiting:
        value = waiting.pop()
        kind = _kinds.get(type(value))
        if kind is None:
            kind = _kinds[type(value)] = _kind_of(type(value))
        if kind == _NONE:
            continue
        if kind == _VARIABLE:
            found.append(value)
        elif kind == _INSTRUCTION:
            found += value.list_vars()
        else:
            waiting += reversed(value if kind == _ITEMS else value.values())
    return found


_sizes: dict[str, int] = {}  # bytes by LLVM's types
_size_of = BaseContext.get_abi_sizeof


def _get_abi_sizeof(self: Any, ty: Any) -> int:
    """As BaseContext's, which lets LLVM read a module of one variable to know a type's size."""
    if isinstance(ty, IdentifiedStructType):
        return _size_of(self, ty)  # its name may mean another one elsewhere
    name = str(ty)
    size = _sizes.get(name)
    if size is None:
        size = _sizes[name] = _size_of(self, ty)
    return size


_hashes: dict[int, tuple[Any, int]] = {}  # by numbers of types, which their entries keep


def _hash(self: Any) -> int:
    """As that of a type, which is made of those of all that it holds."""
    found = _hashes.get(id(self))
    if found is None:
        found = _hashes[id(self)] = self, hash(self.key)
    return found[1]


_WAYS = (
    (NRTContext, "get_meminfos", _get_meminfos),
    (ir.Inst, "_rec_list_vars", _rec_list_vars),
    (BaseContext, "get_abi_sizeof", _get_abi_sizeof),
    (Type, "__hash__", _hash),
)


@contextmanager
def shortcuts() -> Iterator[None]:
    """Let numba go these ways; its lock on compiling must be held."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _WAYS]
    for owner, name, way in _WAYS:
        setattr(owner, name, way)
    try:
        yield
    finally:
        for owner, name, way in before:
            setattr(owner, name, way)
        _hashes.clear()
