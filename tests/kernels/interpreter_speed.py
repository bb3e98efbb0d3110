"""Work that Triton's interpreter repeats and need not: results stay the same, bit for bit.

Most of the time of an interpreted kernel goes where nothing is computed. The interpreter patches
its language anew at each call of a device function, though the launch has patched it already;
repeats each operation on integers in int64 to find overflow, and then drops the finding, because
asserts on the device need its option `debug`; builds a table of dtypes at every look-up of one;
wraps the shape of every result; asks five times what class a dtype is of to compare it; and goes
through eight functions from `+` to numpy's, however plain the operands are. Without that, attention
with its gradients takes a quarter of it.

`hasten()` is called once, with `interpreter.repair()`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
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
        for name, make in _operators().items():
            scope.set_attr(core.tensor, name, make(getattr(core.tensor, name)))
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

    def create_masked_load(
        self: Any, ptrs: Any, mask: Any, other: Any, cache: Any, eviction: Any, is_volatile: bool
    ) -> Any:
        if is_volatile:
            time.sleep(_PAUSE_S)
        return load(self, ptrs, mask, other, cache, eviction, is_volatile)

    builder.create_masked_load = create_masked_load


_NUMBERS = {
    "int32": np.int32, "int64": np.int64, "fp32": np.float32, "fp64": np.float64,
}  # fmt: skip
_FLOATS, _INTEGERS = frozenset(("fp32", "fp64")), frozenset(("int32", "int64"))
_OFFSETS = _INTEGERS | {"uint32"}  # what an address may be moved by
_ALL = _FLOATS | _INTEGERS
_BITS = _INTEGERS | {"int1"}
_MOST_FLOAT = (2 - 2.0**-23) * 2.0**127
_MOST = {"int32": 1 << 31, "int64": 1 << 63}


def _becomes(number: Any, name: str) -> bool:
    """Whether an operation of a tensor of this dtype and a number is one of the dtype."""
    kind, most = type(number), _MOST.get(name)
    if most is None:
        return kind is float or (kind is int and abs(number) < 1 << 31)
    return kind is int and -most <= number < most


def _compares(number: Any, name: str) -> bool:
    """Whether the number, which a comparison makes a tensor of its own, is one of this dtype."""
    if name == "int32":
        return type(number) is int and -(1 << 31) <= number < 1 << 31
    return (
        name == "fp32"
        and type(number) is float
        and not 0 < abs(number) < 2.0**-126
        and (abs(number) == math.inf or not abs(number) > _MOST_FLOAT)
    )


_types: dict[Any, tuple[Any, Any, Any]] = {}  # a block's type, its shape and size as tensors have


def _block(scalar: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    is_pointer = type(scalar) is core.pointer_type
    key = (scalar.name, is_pointer and scalar.address_space, shape)
    found = _types.get(key)
    if found is None:
        block = core.block_type(scalar, list(shape))
        example = core.tensor(None, block)
        found = _types[key] = block, example.shape, example.numel
    return found


_make = object.__new__


def _made(data: Any, held: Any, dtype: Any, kind: tuple[Any, Any, Any]) -> Any:
    """Return a tensor as `core.tensor` and its handle are made, of data that need no check."""
    handle = _make(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, held, {}
    made = _make(core.tensor)
    made.handle, made.dtype = handle, dtype
    made.type, made.shape, made.numel = kind
    return made


def _spread(a: Any, b: Any) -> tuple[Any, Any]:
    """Return both in the shape of the two: numpy would give the result other strides by itself."""
    shape = tuple(map(max, a.shape, b.shape))
    return (
        a if a.shape == shape else np.broadcast_to(a, shape),
        b if b.shape == shape else np.broadcast_to(b, shape),
    )


def _widened(x: Any) -> Any:
    """Return an integer tensor of 32 or 64 bits with 64."""
    if x.dtype.name == "int64":
        return x
    data = x.handle.data.astype(np.int64)
    if type(x.type) is core.block_type:
        return _made(data, tl.int64, tl.int64, _block(tl.int64, data.shape))
    return _made(data, tl.int64, tl.int64, (tl.int64, x.shape, x.numel))


def _computed(
    x: Any, y: Any, compute: Callable[..., Any], dtypes: frozenset[str], fits: Callable[..., bool],
    is_bool: bool,
) -> Any:  # fmt: skip
    """Return x operator y where both have one dtype of these and numpy finds the shape, or None.

    A scalar beside a block would be written out in rows: results have the strides of that.
    """
    if type(x) is not core.tensor:
        tensor, number = y, x
    elif type(y) is not core.tensor:
        tensor, number = x, y
    else:
        name, other = x.dtype.name, y.dtype.name
        if name != other:
            if not (name in _INTEGERS and other in _INTEGERS and name in dtypes):
                return None
            return _computed(_widened(x), _widened(y), compute, dtypes, fits, is_bool)
        a, b = x.handle.data, y.handle.data
        if name not in dtypes or a.dtype is not b.dtype:
            return None
        like = x
        if x.shape is not y.shape:
            if type(x.type) is not core.block_type:
                like = None
                if not (a.size == 1 and a.ndim == 1 and b.flags.c_contiguous):
                    return None
            elif type(y.type) is not core.block_type:
                if not (b.size == 1 and b.ndim == 1 and a.flags.c_contiguous):
                    return None
            elif a.ndim == b.ndim:
                like = None
                a, b = _spread(a, b)
            else:
                return None
        return _result(compute(a, b), x, like, is_bool)
    if type(number) is core.constexpr:
        number = number.value
    name = tensor.dtype.name
    if name not in dtypes or not fits(number, name):
        return None
    data = tensor.handle.data
    number = _NUMBERS[name](number or 0)  # the interpreter has one zero
    if number.dtype is not data.dtype or not data.flags.c_contiguous:
        return None
    data = compute(data, number) if tensor is x else compute(number, data)
    return _result(data, tensor, tensor, is_bool)


def _result(data: Any, x: Any, like: Any, is_bool: bool) -> Any:
    held = x.handle.dtype.scalar
    if like is None or (is_bool and type(like.type) is core.block_type):
        dtype = tl.int1 if is_bool else x.dtype
        return _made(data, held, dtype, _block(dtype, data.shape))
    if is_bool:
        return _made(data, held, tl.int1, (tl.int1, like.shape, like.numel))
    return _made(data, held, x.dtype, (like.type, like.shape, like.numel))


def _moved(pointer: Any, offset: Any) -> Any:
    """Return a pointer and an integer offset, or None for what else they may be."""
    if type(pointer.dtype) is not core.pointer_type:
        return None
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    data, like = pointer.handle.data, pointer
    if type(offset) is core.tensor:
        if offset.dtype.name not in _OFFSETS:
            return None
        far = offset.handle.data
        if pointer.shape is not offset.shape:
            if type(pointer.type) is not core.block_type:
                if not (data.size == 1 and data.ndim == 1 and far.flags.c_contiguous):
                    return None
                like = None
            elif type(offset.type) is not core.block_type:
                if not (far.size == 1 and far.ndim == 1 and data.flags.c_contiguous):
                    return None
            elif data.ndim == far.ndim:
                like = None
                data, far = _spread(data, far)
            else:
                return None
        data = data + size * far.astype(np.uint64)
    elif _becomes(offset, "int32") and data.flags.c_contiguous:
        data = data + np.uint64(size * offset % (1 << 64))
    else:
        return None
    kind = (
        _block(pointer.dtype, data.shape) if like is None else (like.type, like.shape, like.numel)
    )
    return _made(data, pointer.handle.dtype.scalar, pointer.dtype, kind)


def _divided(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


def _operators() -> dict[str, Callable[[Any], Any]]:
    """Return how each operator is made of the interpreter's, which it falls back to."""

    def of(
        compute: Callable[..., Any], dtypes: frozenset[str], *, is_right: bool = False,
        fits: Callable[..., bool] = _becomes, is_bool: bool = False, moves: bool = False,
    ) -> Callable[[Any], Any]:  # fmt: skip
        def make(slow: Any) -> Any:
            def apply(self: Any, other: Any) -> Any:
                if is_right:
                    found = _computed(other, self, compute, dtypes, fits, is_bool)
                else:
                    found = _computed(self, other, compute, dtypes, fits, is_bool)
                    if found is None and moves:
                        found = _moved(self, other)
                return slow(self, other) if found is None else found

            return apply

        return make

    found = {}
    for name, compute, dtypes in (
        ("add", np.add, _ALL), ("sub", np.subtract, _ALL), ("mul", np.multiply, _ALL),
        ("truediv", np.divide, _FLOATS), ("floordiv", _divided, _INTEGERS),
        ("mod", np.fmod, _INTEGERS),
    ):  # fmt: skip
        found[f"__{name}__"] = of(compute, dtypes, moves=name == "add")
        found[f"__r{name}__"] = of(compute, dtypes, is_right=True)
    for name, compute in (
        ("lt", np.less), ("le", np.less_equal), ("gt", np.greater), ("ge", np.greater_equal),
        ("eq", np.equal), ("ne", np.not_equal),
    ):  # fmt: skip
        found[f"__{name}__"] = of(compute, _ALL, fits=_compares, is_bool=True)
    for name, compute in (("and", np.bitwise_and), ("or", np.bitwise_or)):
        found[f"__{name}__"] = of(compute, _BITS, fits=lambda *_: False)

    def indexed(slow: Any) -> Any:
        whole = slice(None)

        def apply(self: Any, slices: Any) -> Any:
            if type(slices) is not tuple or type(self.type) is not core.block_type:
                return slow(self, slices)
            shape = list(self.handle.data.shape)
            for place, one in enumerate(slices):
                if one is None:
                    shape.insert(place, 1)
                elif type(one) is not slice or one != whole or place >= len(shape):
                    return slow(self, slices)
            data = self.handle.data.reshape(shape)
            kind = _block(self.type.scalar, data.shape)
            return _made(data, self.handle.dtype.scalar, self.dtype, kind)

        return apply

    found["__getitem__"] = indexed
    return found


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
