"""Start a kernel in microseconds: the one place where the host meets the driver.

Triton's own launcher binds, specialises and hashes every argument and encodes every descriptor
anew, which takes 60 to 100 us of host time for a kernel of attention. Here a first call goes that
way; what it compiled is remembered with a buffer of parameters, and later calls only fill in what
changed and start it. Anything unexpected (another parameter layout, a profiler's hook, a CPU) goes
Triton's way always.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gluon._descriptors import driver, parameters_of

__all__ = ["launch"]

_SCRATCH_POINTERS = 2  # Triton appends them; none of our kernels uses them
_MAX_REMEMBERED = 1024
_remembered: dict[tuple[object, ...], _Prepared | None] = {}
_lock = threading.Lock()


def launch(kernel: Any, grid: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run `kernel` on `grid` CTAs, on the current stream of the current device.

    Args:
        kernel: a jitted Triton or Gluon function.
        arguments: its run-time arguments: tensors, None, descriptors, numbers, and flat tuples of
            tensors, None and floats. Integers must stand by themselves and be marked
            do_not_specialize: inside a tuple Triton compiles anew for each kind of value.
        num_warps: of the default partition; the workers' warps come on top.
        constants: its constexpr parameters, by name.
    """
    leaves = list(_leaves(arguments))
    key = (id(kernel), num_warps, *map(_kind, leaves), *constants.values())
    prepared = _remembered.get(key)
    hook = knobs.runtime.launch_enter_hook
    if prepared is None or getattr(hook, "calls", hook):
        compiled = kernel[(grid,)](*arguments, num_warps=num_warps, **constants)
        if key not in _remembered:
            if len(_remembered) >= _MAX_REMEMBERED:
                _remembered.clear()
            _remembered[key] = _prepare(compiled, leaves)
    else:
        prepared.start(grid, leaves)


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yield arguments with the fields of tuples in their place."""
    for argument in arguments:
        if isinstance(argument, tuple):
            for field in argument:
                if isinstance(field, int | tuple):
                    raise TypeError(
                        f"numbers must be arguments of their own, got {field!r} in "
                        f"{type(argument).__name__}"
                    )
                yield field
        else:
            yield argument


def _kind(leaf: Any) -> object:
    """Return what Triton may compile anew for: a type, an alignment, a special value."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.data_ptr() % 16 == 0, leaf.device
    if isinstance(leaf, TensorDescriptor):
        return leaf.base.dtype, tuple(leaf.block_shape), len(leaf.shape)
    if isinstance(leaf, int):
        return int, leaf == 1, leaf % 16 == 0, -(2**31) <= leaf < 2**31
    return type(leaf)


class _Prepared:
    """A compiled kernel and its parameters."""

    def __init__(self, compiled: Any, fields: list[_Field], device: int) -> None:
        self._function = ctypes.c_void_p(compiled.function)
        self._threads = 32 * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        self._device = device
        self._fields = fields
        self._scratch = ctypes.c_void_p(0)
        size = sum(field.size for field in fields)
        self._pointers = (ctypes.c_void_p * (size + _SCRATCH_POINTERS))()
        position = 0
        for field in fields:
            field.place(self._pointers, position)
            position += field.size
        for index in range(position, position + _SCRATCH_POINTERS):
            self._pointers[index] = ctypes.addressof(self._scratch)

    def start(self, grid: int, leaves: list[Any]) -> None:
        """Launch with these arguments."""
        with _lock:
            for field in self._fields:
                field.fill(leaves[field.leaf])
            status = driver().cuLaunchKernel(
                self._function, grid, 1, 1, self._threads, 1, 1, self._shared,
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._device)),
                self._pointers, None,
            )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"cuLaunchKernel failed with CUDA error {status}")


class _Field:
    """One argument of a kernel and where its parameters lie."""

    size = 1

    def __init__(self, leaf: int, kind: type) -> None:
        self.leaf = leaf
        self._cell = kind()

    def place(self, pointers: Any, position: int) -> None:
        pointers[position] = ctypes.addressof(self._cell)

    def fill(self, value: Any) -> None:
        self._cell.value = value


class _Pointer(_Field):
    def fill(self, value: Tensor) -> None:
        self._cell.value = value.data_ptr()


class _Descriptor(_Field):
    """A descriptor: its 128 bytes, then its shape and strides, all remembered with it."""

    def __init__(self, leaf: int, rank: int) -> None:
        super().__init__(leaf, ctypes.c_void_p)
        self.size = 1 + 2 * rank

    def place(self, pointers: Any, position: int) -> None:
        self._pointers, self._slice = pointers, slice(position, position + self.size)

    def fill(self, value: TensorDescriptor) -> None:
        self._pointers[self._slice] = parameters_of(value)


def _prepare(compiled: Any, leaves: list[Any]) -> _Prepared | None:
    """Match the kernel's parameters with its arguments, or return None when they do not match."""
    device = next((x.device for x in leaves if isinstance(x, Tensor)), None)
    if device is None or device.type != "cuda" or not hasattr(compiled, "asm"):
        return None
    metadata = compiled.metadata
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    if any(getattr(metadata, name, 0) for name in (*unusual, "launch_pdl")):
        return None
    if metadata.num_ctas != 1:
        return None
    fields: list[_Field] = []
    expected: list[str] = []
    compiled_away = {index for index, _ in _constant_leaves(compiled)}
    for index, leaf in enumerate(leaves):
        if leaf is None or index in compiled_away:
            continue
        if isinstance(leaf, TensorDescriptor):
            rank = len(leaf.shape)
            fields.append(_Descriptor(index, rank))
            expected += ["b8", *["u32"] * rank, *["u64"] * rank]
        elif isinstance(leaf, Tensor):
            fields.append(_Pointer(index, ctypes.c_uint64))
            expected.append("u64")
        elif isinstance(leaf, float):
            fields.append(_Field(index, ctypes.c_float))
            expected.append("f32")
        else:
            narrow = -(2**31) <= leaf < 2**31
            fields.append(_Field(index, ctypes.c_int32 if narrow else ctypes.c_int64))
            expected.append("u32" if narrow else "u64")
    if _parameter_types(compiled.asm["ptx"]) != [*expected, *["u64"] * _SCRATCH_POINTERS]:
        return None
    return _Prepared(compiled, fields, torch.cuda.current_device())


def _constant_leaves(compiled: Any) -> Iterator[tuple[int, object]]:
    """Yield the leaves that Triton compiled into the kernel, such as a number that is 1."""
    index = 0
    for kind in compiled.src.signature.values():
        if isinstance(kind, tuple):
            for field in kind:
                if field == "constexpr":
                    yield index, field
                index += 1
        else:
            if kind == "constexpr":
                yield index, kind
            index += 1


def _parameter_types(ptx: str) -> list[str]:
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("{")]
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", entry)
