"""Number formats: values as numpy arrays, 8- and 16-bit floats as float32 on their own grid."""

from __future__ import annotations

import numpy as np
import torch
from triton.experimental.gluon import language as gl

_FLOATS = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_OF_TORCH = {torch_dtype: name for name, torch_dtype in _FLOATS.items()} | {
    torch.bool: "int1",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
DTYPES = {
    str(dtype): dtype
    for dtype in (
        gl.int1, gl.int8, gl.int16, gl.int32, gl.int64, gl.uint8, gl.uint16, gl.uint32, gl.uint64,
        gl.float8e4nv, gl.float8e5, gl.float16, gl.bfloat16, gl.float32, gl.float64,
    )
}  # fmt: skip


def of_torch(dtype: torch.dtype) -> gl.dtype:
    """Return Gluon's name of a torch dtype."""
    return DTYPES[_OF_TORCH[dtype]]


def is_float(dtype: gl.dtype) -> bool:
    """Whether dtype is one of the float formats."""
    return str(dtype) in _FLOATS


def itemsize(dtype: gl.dtype) -> int:
    """Bytes of an element in memory."""
    return max(1, dtype.primitive_bitwidth // 8)


def working(dtype: gl.dtype) -> type:
    """Return the numpy type that holds values of dtype in registers and shared memory."""
    name = str(dtype)
    if name in _FLOATS:
        return np.float64 if name == "fp64" else np.float32
    return np.bool_ if name == "int1" else getattr(np, name)


def stored(dtype: gl.dtype) -> type:
    """Return the numpy type of the bytes of dtype in global memory."""
    return working(dtype) if itemsize(dtype) == itemsize_of(working(dtype)) else bits_type(dtype)


def itemsize_of(numpy_type: type) -> int:
    """Bytes of a numpy type."""
    return np.dtype(numpy_type).itemsize


def bits_type(dtype: gl.dtype) -> type:
    """Return the unsigned numpy type as wide as dtype."""
    return _BITS[itemsize(dtype)]


def rounded(values: np.ndarray, dtype: gl.dtype) -> np.ndarray:
    """Return float values on the grid of dtype, to nearest even; 8-bit formats saturate."""
    name = str(dtype)
    if name in ("fp32", "fp64"):
        return np.asarray(values, working(dtype))
    return _from_torch(_to_torch(values, name))


def to_bits(values: np.ndarray, dtype: gl.dtype) -> np.ndarray:
    """Return the bit patterns of values."""
    if not is_float(dtype):
        return np.array(values, working(dtype), order="C").view(bits_type(dtype))
    if str(dtype) in ("fp32", "fp64"):
        return np.array(values, working(dtype), order="C").view(bits_type(dtype))
    narrow = _to_torch(values, str(dtype))
    as_int = narrow.view(torch.uint8 if narrow.itemsize == 1 else torch.int16)
    return as_int.numpy().view(bits_type(dtype))


def from_bits(bits: np.ndarray, dtype: gl.dtype) -> np.ndarray:
    """Return the values of bit patterns."""
    bits = np.asarray(bits, bits_type(dtype))
    if itemsize(dtype) == itemsize_of(working(dtype)):
        return bits.copy().view(working(dtype))
    shape, flat = bits.shape, np.ascontiguousarray(bits).reshape(-1)
    as_int = torch.from_numpy(flat.view(np.uint8 if flat.itemsize == 1 else np.int16))
    return _from_torch(as_int.view(_FLOATS[str(dtype)])).reshape(shape)


def from_memory(raw: np.ndarray, dtype: gl.dtype) -> np.ndarray:
    """Return the values of bytes of global memory, as a copy."""
    return raw.copy() if raw.dtype == working(dtype) else from_bits(raw, dtype)


def to_memory(values: np.ndarray, dtype: gl.dtype) -> np.ndarray:
    """Return what values look like in global memory."""
    return values if stored(dtype) == working(dtype) else to_bits(values, dtype)


def converted(values: np.ndarray, source: gl.dtype, target: gl.dtype) -> np.ndarray:
    """Convert values as Triton's `.to` does."""
    if is_float(target):
        return rounded(np.asarray(values, np.float64 if str(target) == "fp64" else None), target)
    if is_float(source):
        values = np.trunc(np.nan_to_num(values, nan=0.0, posinf=2.0**31 - 1, neginf=-(2.0**31)))
        return values.astype(np.int64).astype(working(target))
    return np.asarray(values).astype(working(target))


def _to_torch(values: np.ndarray, name: str) -> torch.Tensor:
    values = np.asarray(values, np.float32)
    if name in _LARGEST:
        values = np.clip(values, -_LARGEST[name], _LARGEST[name])
    flat = torch.from_numpy(np.ascontiguousarray(values).reshape(-1))
    return flat.to(_FLOATS[name]).reshape(values.shape)


def _from_torch(values: torch.Tensor) -> np.ndarray:
    return values.float().numpy()
