"""Work that Triton's interpreter repeats and need not: results stay the same, bit for bit.

Most of the time of an interpreted kernel goes where nothing is computed. The interpreter patches
its language anew at each call of a device function, though the launch has patched it already;
repeats each operation on integers in int64 to find overflow, and then drops the finding, because
asserts on the device need its option `debug`; builds a table of dtypes at every look-up of one;
wraps the shape of every result; and asks five times what class a dtype is of to compare it. Without
that, attention with its gradients takes a quarter of it.

`hasten()` is called once, with `interpreter.repair()`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

# Kept so: the patch looks for these modules among the globals of the function it is given.
_LANGUAGES = (tl, core)


class _Scope:
    """What a launch has patched; values are put back when it ends."""

    def __init__(self, changes: list[tuple[Any, str, Any, Any]]) -> None:
        self._changes = changes
        for owner, name, _, new in changes:
            setattr(owner, name, new)

    def restore(self) -> None:
        for owner, name, old, _ in self._changes:
            if old is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _patch_once_a_launch() -> None:
    """Patch the language when a launch begins, for the kernel and all that it calls.

    What is put where is found at the first launch, and again if a test has put something there.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    running = False
    known: list[tuple[Any, str, Any, Any]] = []

    def patch_lang(function: Any) -> Any:
        nonlocal running, known
        if running:
            return None
        running = True
        missing = interpreter._MISSING
        if known and all(getattr(owner, name, missing) is old for owner, name, old, _ in known):
            return _Scope(known)
        scope = patch(patch_lang)
        old: dict[tuple[int, str], tuple[Any, Any]] = {}
        for owner, name, value in scope._changes:
            old.setdefault((id(owner), name), (owner, value))
        known = [
            (owner, name, value, getattr(owner, name)) for (_, name), (owner, value) in old.items()
        ]
        return scope

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal running
        try:
            return launch(self, *args, **kwargs)
        finally:
            running = False

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


def _look_dtypes_up_by_name() -> None:
    original, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def _skip_checks_without_effect() -> None:
    """Leave out the check of overflow where its finding would be dropped."""
    original = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self: Any, lhs: Any, rhs: Any, operation: Callable[..., Any]) -> None:
        if self.builder.options.debug:
            original(self, lhs, rhs, operation)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = sanitize


def _make_shapes_once() -> None:
    """Keep the shapes of types and tensors, which are wrapped and checked again at each result."""
    new_type, known = core.block_type.__init__, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in known:
            new_type(self, element_ty, shape)
            known[key] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, written = known[key]
        self.name = f"<{written}, {element_ty}>"

    wrapped: dict[Any, Any] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in wrapped:
            sizes = core.tuple([core.constexpr(size) for size in key])
            wrapped[key] = sizes, core.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped[key]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def _compare_types_at_once() -> None:
    """Tell two dtypes apart, and what is no constexpr, without asking for five classes first."""
    unwrap = core._unwrap_if_constexpr
    bare = frozenset((core.tensor, core.dtype, core.block_type, int, bool, float, str, type(None)))

    def unwrapped(o: Any) -> Any:
        return o if type(o) in bare else unwrap(o)

    equal = core.dtype.__eq__

    def is_equal(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else equal(self, other)

    core._unwrap_if_constexpr = unwrapped
    core.dtype.__eq__ = is_equal
    core.dtype.__ne__ = lambda self, other: not is_equal(self, other)


def _convert_only_what_differs() -> None:
    """Return two operands of one type and shape as they are, and make of a number what it becomes.

    Of numbers and dtypes for which Triton's rules say the same as the long way: integers and floats
    of 32 and 64 bits, which no operation widens, and numbers that they can hold.
    """
    semantics = semantic.TritonSemantic
    original = semantics.binary_op_type_checking_impl
    ranges = {tl.int32.name: 1 << 31, tl.int64.name: 1 << 63}
    plain = frozenset((*ranges, tl.float32.name, tl.float64.name))

    def becomes(number: Any, name: str) -> bool:
        """Whether an operation of a tensor of this dtype and a number is one of the dtype."""
        kind, most = type(number), ranges.get(name)
        if most is None:
            return kind is float or (kind is int and abs(number) < 1 << 31)
        return kind is int and -most <= number < most

    @functools.wraps(original)
    def convert(self: Any, lhs: Any, rhs: Any, *rules: Any, **named: Any) -> Any:
        if named or (len(rules) > 2 and not rules[2]):
            pass  # where operands keep their types
        elif type(lhs) is core.tensor:
            name = lhs.dtype.name
            if type(rhs) is core.tensor:
                if rhs.dtype.name == name and name in plain:
                    if lhs.type.is_block() or rhs.type.is_block():
                        return self.broadcast_impl_value(lhs, rhs)
                    return lhs, rhs
            elif name in plain and becomes(rhs, name):
                rhs = self.scalar_constant(rhs, lhs.dtype)
                return self.broadcast_impl_value(lhs, rhs) if lhs.type.is_block() else (lhs, rhs)
        elif type(rhs) is core.tensor:
            name = rhs.dtype.name
            if name in plain and becomes(lhs, name):
                lhs = self.scalar_constant(lhs, rhs.dtype)
                return self.broadcast_impl_value(lhs, rhs) if rhs.type.is_block() else (lhs, rhs)
        return original(self, lhs, rhs, *rules, **named)

    broadcast = semantics.broadcast_impl_value

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:  # shapes that are equal are one: see `_make_shapes_once`
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantics.binary_op_type_checking_impl = convert
    semantics.broadcast_impl_value = of_one_shape


_PAUSE_S = 0.0002


def _wait_without_a_core() -> None:
    """Sleep before a volatile load: it is one of many that wait for what another process writes."""
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def create_masked_load(self: Any, *given: Any, **named: Any) -> Any:
        # It is the last one; between it and the mask stand one argument or two, by the version.
        if named["is_volatile"] if "is_volatile" in named else given[-1]:
            time.sleep(_PAUSE_S)
        return load(self, *given, **named)

    builder.create_masked_load = create_masked_load


def hasten() -> None:
    """Patch the interpreter; where Triton's version has not what is patched, leave it as it is."""
    if hasattr(interpreter, "_LangPatchScope"):
        _patch_once_a_launch()
    _look_dtypes_up_by_name()
    _skip_checks_without_effect()
    _make_shapes_once()
    _compare_types_at_once()
    _convert_only_what_differs()
    _wait_without_a_core()
