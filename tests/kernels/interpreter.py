"""Repairs of Triton's CPU interpreter, so that kernels can be judged by it in every dtype.

The interpreter keeps bfloat16 as uint16 bit patterns and, in the versions we support, computes with
the bits: a product of two bfloat16 tiles is silently garbage, and rounding from float32 truncates.
Here bfloat16 is widened to float32 for arithmetic, products and sums, and rounded to nearest even
on the way back, as hardware does. Products of float16 are summed in float32, as tensor cores do.
Rounding float32 to e4m3 loses a factor of 2 there where the mantissa is carried: it is done anew.
The exponential of a GPU's library, which has none there, is that of `tl.exp`.

`repair()` is called once, before a kernel runs; it changes nothing when kernels are compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from tests.kernels.interpreter_speed import hasten

_BF16 = np.uint16  # how the interpreter stores bfloat16

# Binary and unary builder methods that must not see bit patterns.
_BINARY = (
    "create_fadd", "create_fsub", "create_fmul", "create_fdiv", "create_precise_divf",
    "create_frem", "create_minimumf", "create_minnumf", "create_maximumf", "create_maxnumf",
    "create_approx_divf",
)  # fmt: skip
_COMPARISONS = tuple(
    f"create_fcmp{order}{relation}"
    for order in "OU"
    for relation in ("LT", "GT", "LE", "GE", "EQ", "NE")
)
_UNARY = (
    "create_cos", "create_exp", "create_exp2", "create_floor", "create_ceil", "create_log",
    "create_log2", "create_precise_sqrt", "create_sqrt", "create_sin", "create_rsqrt",
    "create_fneg",
)  # fmt: skip
_NOT_IN_ALL = ("create_approx_divf", "create_fneg")  # from Triton 3.9 and 3.8 on


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Return float32 values as bfloat16 bit patterns, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(_BF16)
    return np.where(np.isnan(values), _BF16(0x7FC0), rounded)


def _e4m3_bits(values: np.ndarray) -> np.ndarray:
    """Return float32 values as e4m3 bit patterns, to nearest even, saturated; NaN stays NaN."""
    clamped = torch.from_numpy(np.clip(values, -448.0, 448.0))
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _is_bf16(operand: Any) -> bool:
    return isinstance(operand, interpreter.TensorHandle) and operand.dtype.scalar == tl.bfloat16


def _as_float(handle: Any) -> Any:
    """Return a float32 handle of a bfloat16 one, any other unchanged."""
    if not _is_bf16(handle):
        return handle
    return interpreter.TensorHandle(widen(handle.data), tl.float32)


def _as_bf16(handle: Any) -> Any:
    return interpreter.TensorHandle(narrow(handle.data), tl.bfloat16)


def _in_float(method: Callable[..., Any], *, narrows: bool) -> Callable[..., Any]:
    """Wrap a builder method so that bfloat16 operands are computed in float32."""

    def wrapped(self: Any, *operands: Any) -> Any:
        if not any(_is_bf16(operand) for operand in operands):
            return method(self, *operands)
        result = method(self, *(_as_float(operand) for operand in operands))
        return _as_bf16(result) if narrows else result

    return wrapped


def _repair_casts(builder: Any) -> None:
    original_cast, original_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp

    def cast(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar == target.scalar:
            return source
        if _is_bf16(source):
            return cast(self, _as_float(source), target)
        if target.scalar == tl.bfloat16:
            values = source.data.astype(np.float32)
            return interpreter.TensorHandle(narrow(values), tl.bfloat16)
        return original_cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        if target.scalar == tl.float8e4nv and source.dtype.scalar == tl.float32:
            return interpreter.TensorHandle(_e4m3_bits(source.data), tl.float8e4nv)
        return original_fp_to_fp(self, source, target, rounding)

    builder.cast_impl, builder.create_fp_to_fp = cast, fp_to_fp


def _repair_dot(builder: Any) -> None:
    original = builder.create_dot

    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
        if not {a.dtype.scalar, b.dtype.scalar} & {tl.bfloat16, tl.float16}:
            return original(self, a, b, acc, precision, imprecise)
        left, right = (_as_float(x).data.astype(np.float32) for x in (a, b))
        total = np.matmul(left, right) + _as_float(acc).data
        if _is_bf16(acc):
            return interpreter.TensorHandle(narrow(total), tl.bfloat16)
        return interpreter.TensorHandle(total.astype(acc.data.dtype), acc.dtype.scalar)

    builder.create_dot = dot


def dot_in_order(
    self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any
) -> interpreter.TensorHandle:
    """Add a product's channels one after another in every row, in the accumulator's dtype."""
    left, right, start = (_as_float(x).data for x in (a, b, acc))
    total = np.zeros_like(start)
    for column, row in zip(left.T, right, strict=True):
        total += column[:, None].astype(total.dtype) * row
    total = total + start
    if _is_bf16(acc):
        return interpreter.TensorHandle(narrow(total), tl.bfloat16)
    return interpreter.TensorHandle(total, acc.dtype.scalar)


def _repair_masks(builder: Any) -> None:
    """Make masks bool: a comparison of scalars that is splat is int32, which Triton 3.9 refuses."""

    def with_bool(method: Callable[..., Any], place: int) -> Callable[..., Any]:
        def wrapped(self: Any, *given: Any, **named: Any) -> Any:
            mask = given[place]
            if mask.data.dtype != np.bool_:
                mask = interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)
            return method(self, *given[:place], mask, *given[place + 1 :], **named)

        return wrapped

    builder.create_masked_load = with_bool(builder.create_masked_load, 1)
    builder.create_masked_store = with_bool(builder.create_masked_store, 2)


def _quieten() -> None:
    """Stop numpy's warnings of overflow and NaN: a GPU does not give them either."""
    original = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return original(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


def repair() -> None:
    """Patch the interpreter once; later calls do nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    builder.repaired = True
    _repair_casts(builder)
    for name in (*_BINARY, *_UNARY, "create_fma", "create_clampf"):
        if name not in _NOT_IN_ALL or hasattr(builder, name):
            setattr(builder, name, _in_float(getattr(builder, name), narrows=True))
    for name in _COMPARISONS:
        setattr(builder, name, _in_float(getattr(builder, name), narrows=False))
    builder.get_bf16 = lambda self, value: _as_bf16(self.get_fp32(value))
    _repair_dot(builder)
    _repair_masks(builder)
    libdevice.exp = lambda x: tl.exp(x)  # looked up at the call, when `tl.exp` is the interpreter's
    _quieten()
    hasten()
