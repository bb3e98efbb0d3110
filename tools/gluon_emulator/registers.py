"""Values in registers: tensors, and scalars that count like the hardware and not like Python.

A scalar integer is a Python int that remembers its width: division truncates towards zero, and a
signed sum or product that leaves its width is an error, as no address may.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from tools.gluon_emulator import numbers
from tools.gluon_emulator.errors import EmulationError

__all__ = ["Layout", "Register", "Scalar", "carried", "register", "values_of"]


class Layout:
    """Stands in for every layout: where a value lies is not emulated."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Layout:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, axis: int) -> int:
        """Say that one warp or thread lies along an axis."""
        return 1


def _divided(a: Any, b: Any) -> Any:
    """Divide integers towards zero."""
    if isinstance(a, int) and isinstance(b, int):
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    return np.where(b != 0, np.trunc(np.divide(a, np.where(b == 0, 1, b))), 0).astype(a.dtype)


def _remainder(a: Any, b: Any) -> Any:
    return a - _divided(a, b) * b


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift, "floordiv": _divided, "mod": _remainder,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip


def _wider(a: gl.dtype, b: gl.dtype) -> gl.dtype:
    """Return the type in which Triton computes with two types."""
    if a == b:
        return a
    floats = [x for x in (a, b) if numbers.is_float(x)]
    if len(floats) == 1:
        return floats[0]
    if len(floats) == 2:
        widths = (a.primitive_bitwidth, b.primitive_bitwidth)
        return (a if widths[0] > widths[1] else b) if widths[0] != widths[1] else gl.float32
    if a.primitive_bitwidth != b.primitive_bitwidth:
        return a if a.primitive_bitwidth > b.primitive_bitwidth else b
    return a if "u" in str(a) else b


class Scalar(int):
    """A uniform integer of a kernel."""

    dtype: gl.dtype

    def __new__(cls, value: int, dtype: gl.dtype = gl.int32) -> Scalar:
        value, bits = int(value), dtype.primitive_bitwidth
        if str(dtype).startswith("uint"):
            value &= (1 << bits) - 1
        elif dtype != gl.int1 and not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
            raise EmulationError(f"{value} does not fit {dtype}")
        self = super().__new__(cls, value)
        self.dtype = dtype
        return self

    def to(self, dtype: gl.dtype, bitcast: bool = False) -> Any:
        """Convert; narrowing keeps the low bits."""
        if numbers.is_float(dtype) or bitcast:
            return Register(np.asarray(int(self), numbers.working(self.dtype)), self.dtype).to(
                dtype, bitcast=bitcast
            )
        return Scalar(int(np.int64(int(self)).astype(numbers.working(dtype))), dtype)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=Layout(), shape=[], scalar=self.dtype, element_ty=self.dtype)

    @property
    def shape(self) -> list[int]:
        return []

    def __neg__(self) -> Scalar:
        return Scalar(-int(self), self.dtype)

    def __invert__(self) -> Scalar:
        if self.dtype == gl.int1:
            return Scalar(not self, gl.int1)
        return Scalar(~int(self), self.dtype)

    def __truediv__(self, other: Any) -> Any:
        return register(np.asarray(int(self)), gl.int32) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / register(np.asarray(int(self)), gl.int32)

    __hash__ = int.__hash__


def _scalar_operator(function: Callable[[Any, Any], Any], compares: bool, flipped: bool) -> Any:
    def method(self: Scalar, other: Any) -> Any:
        if not isinstance(other, int):
            if isinstance(other, float):
                mine = register(np.asarray(int(self)), gl.int32)
                return function(other, mine) if flipped else function(mine, other)
            return NotImplemented
        a, b = (int(other), int(self)) if flipped else (int(self), int(other))
        if compares:
            return Scalar(function(a, b), gl.int1)
        dtype = _wider(self.dtype, other.dtype) if isinstance(other, Scalar) else self.dtype
        if not isinstance(other, Scalar) and not isinstance(other, bool) and dtype == gl.int1:
            dtype = gl.int32
        return Scalar(function(a, b), dtype)

    return method


for _name, _function in _ARITHMETIC.items():
    setattr(Scalar, f"__{_name}__", _scalar_operator(_function, False, False))
    setattr(Scalar, f"__r{_name}__", _scalar_operator(_function, False, True))
for _name, _function in _COMPARISONS.items():
    setattr(Scalar, f"__{_name}__", _scalar_operator(_function, True, False))


class Register:
    """A tensor in registers (or, without axes, a uniform float)."""

    __array_ufunc__ = None  # numpy leaves operators to this class

    def __init__(self, values: np.ndarray, dtype: gl.dtype) -> None:
        self.values = np.asarray(values, numbers.working(dtype))
        self.dtype = dtype

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(
            layout=Layout(), shape=self.shape, scalar=self.dtype, element_ty=self.dtype
        )

    def to(
        self, dtype: gl.dtype, fp_downcast_rounding: object = None, bitcast: bool = False
    ) -> Any:
        if bitcast:
            bits = numbers.to_bits(self.values, self.dtype)
            return register(numbers.from_bits(bits, dtype), dtype)
        if dtype == gl.int1:
            return register(self.values != 0, dtype)
        return register(numbers.converted(self.values, self.dtype, dtype), dtype)

    def reshape(self, *shape: Any) -> Register:
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
        return Register(self.values.reshape([int(size) for size in wanted]), self.dtype)

    def permute(self, *order: Any) -> Register:
        axes = order[0] if len(order) == 1 and isinstance(order[0], list | tuple) else order
        return Register(self.values.transpose([int(axis) for axis in axes]), self.dtype)

    def trans(self) -> Register:
        return Register(self.values.T, self.dtype)

    @property
    def T(self) -> Register:
        return self.trans()

    def __getitem__(self, index: Any) -> Register:
        index = index if isinstance(index, tuple) else (index,)
        if any(not (i is None or i == slice(None)) for i in index):
            raise EmulationError("registers can only be given axes of one, as in x[:, None]")
        return Register(self.values[index], self.dtype)

    def __bool__(self) -> bool:
        if self.values.ndim:
            raise EmulationError("a tensor has no truth value")
        return bool(self.values)

    def __neg__(self) -> Register:
        return Register(-self.values, self.dtype)

    def __invert__(self) -> Register:
        return Register(~self.values, self.dtype)

    def __truediv__(self, other: Any) -> Any:
        return _divide(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _divide(other, self)

    __hash__ = None  # type: ignore[assignment]


def register(values: np.ndarray, dtype: gl.dtype) -> Any:
    """Return values as a tensor, or as a scalar where they are one integer."""
    values = np.asarray(values)
    if values.ndim == 0 and not numbers.is_float(dtype):
        return Scalar(int(values), dtype)
    return Register(values, dtype)


def values_of(x: Any, dtype: gl.dtype | None = None) -> np.ndarray:
    """Return the numbers of an operand, converted to dtype if given."""
    source = dtype_of(x)
    values = x.values if isinstance(x, Register) else np.asarray(x, numbers.working(source))
    return values if dtype in (None, source) else numbers.converted(values, source, dtype)


def dtype_of(x: Any) -> gl.dtype:
    """Return the type of an operand; Python's numbers are int32 and float32."""
    if isinstance(x, Register | Scalar):
        return x.dtype
    if isinstance(x, bool | np.bool_):
        return gl.int1
    if isinstance(x, int):
        return gl.int32 if -(2**31) <= x < 2**31 else gl.int64
    if isinstance(x, float):
        return gl.float32
    raise EmulationError(f"{type(x).__name__} is no value in registers: {x}")


def common(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray, gl.dtype]:
    """Return two operands in the type in which Triton computes with them."""
    types = dtype_of(a), dtype_of(b)
    bare = [not isinstance(x, Register | Scalar) for x in (a, b)]
    if bare[0] != bare[1]:  # a literal takes the type of the other side
        mine, literal = (types[1], types[0]) if bare[0] else types
        dtype = mine
        if numbers.is_float(literal) and not numbers.is_float(mine):
            dtype = gl.float32
        if mine == gl.int1 and literal != gl.int1:
            dtype = literal
    else:
        dtype = _wider(*types)
    x, y = values_of(a, dtype), values_of(b, dtype)
    if x.ndim and y.ndim and x.ndim != y.ndim:
        raise EmulationError(f"shapes {x.shape} and {y.shape} differ in rank")
    return x, y, dtype


def _rounded(values: np.ndarray, dtype: gl.dtype) -> Any:
    return register(numbers.rounded(values, dtype) if numbers.is_float(dtype) else values, dtype)


def _divide(a: Any, b: Any) -> Any:
    x, y, dtype = common(a, b)
    if not numbers.is_float(dtype):
        x, y, dtype = x.astype(np.float32), y.astype(np.float32), gl.float32
    return _rounded(x / y, dtype)


def _register_operator(function: Callable[[Any, Any], Any], compares: bool, flipped: bool) -> Any:
    def method(self: Register, other: Any) -> Any:
        if not isinstance(other, Register | int | float | np.bool_):
            return NotImplemented
        x, y, dtype = common(other, self) if flipped else common(self, other)
        if compares:
            return register(function(x, y), gl.int1)
        return _rounded(function(x, y), dtype)

    return method


for _name, _function in _ARITHMETIC.items():
    setattr(Register, f"__{_name}__", _register_operator(_function, False, False))
    setattr(Register, f"__r{_name}__", _register_operator(_function, False, True))
for _name, _function in _COMPARISONS.items():
    setattr(Register, f"__{_name}__", _register_operator(_function, True, False))


def carried(x: Any) -> Any:
    """Return what a loop makes of a variable that it assigns: a literal becomes a value."""
    if type(x) is bool:
        return Scalar(x, gl.int1)
    if type(x) is int:
        return Scalar(x, dtype_of(x))
    return register(np.asarray(x), gl.float32) if type(x) is float else x
