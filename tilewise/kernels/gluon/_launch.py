"""Start a kernel in microseconds: the one place where the host meets the driver.

Triton's own launcher binds, specialises and hashes every argument and encodes every descriptor
anew, which takes 60 to 100 us of host time for a kernel of attention. Here a first call goes that
way; what it compiled is remembered with a buffer of parameters, and later calls only write into it
and start the kernel. Anything unexpected (another parameter layout, an integer that Triton compiled
in, a profiler's hook, a CPU) goes Triton's way always.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
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
    key: list[object] = [id(kernel), num_warps]
    scalars: list[float] = []
    descriptors: list[TensorDescriptor] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            for field in argument:
                if isinstance(field, int | tuple):
                    raise TypeError(
                        f"numbers must be arguments of their own, got {field!r} in "
                        f"{type(argument).__name__}"
                    )
                _add(field, key, scalars, descriptors)
        else:
            _add(argument, key, scalars, descriptors)
    key += constants.values()
    remembered = tuple(key)
    prepared = _remembered.get(remembered)
    hook = knobs.runtime.launch_enter_hook
    if prepared is not None and not getattr(hook, "calls", hook):
        prepared.start(grid, scalars, descriptors)
        return
    compiled = kernel[(grid,)](*arguments, num_warps=num_warps, **constants)
    if remembered not in _remembered:
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        _remembered[remembered] = _prepare(compiled, arguments)


def _add(
    leaf: Any, key: list[object], scalars: list[float], descriptors: list[TensorDescriptor]
) -> None:
    """Sort an argument: what Triton may compile anew for, and what only the kernel reads."""
    if isinstance(leaf, Tensor):
        address = leaf.data_ptr()
        key.append((leaf.dtype, address & 15 == 0, leaf.device.index))
        scalars.append(address)
    elif isinstance(leaf, int):
        key.append(-(2**31) <= leaf < 2**31)
        scalars.append(leaf)
    elif isinstance(leaf, TensorDescriptor):
        key.append((leaf.base.dtype, *leaf.block_shape))
        descriptors.append(leaf)
    elif isinstance(leaf, float):
        key.append(float)
        scalars.append(leaf)
    else:
        key.append(leaf)


class _Prepared:
    """A compiled kernel and the memory of its parameters.

    Attributes:
        form: of the numbers and addresses among them, for `struct`.
        places: the first parameter of each descriptor, and how many it has.
    """

    def __init__(
        self, compiled: Any, form: str, order: list[int], places: list[slice], device: int
    ) -> None:
        self._function = ctypes.c_void_p(compiled.function)
        self._threads = 32 * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        self._device = device
        self._pack = struct.Struct(form).pack_into
        self._numbers = ctypes.create_string_buffer(max(1, struct.calcsize(form)))
        self._scratch = ctypes.c_void_p(0)
        self._places = places
        end = max([*order, *(place.stop - 1 for place in places), -1]) + 1
        self._pointers = (ctypes.c_void_p * (end + _SCRATCH_POINTERS))()
        at = ctypes.addressof(self._numbers)
        for position, letter in zip(order, form[1:], strict=True):
            self._pointers[position] = at
            at += struct.calcsize("=" + letter)
        for position in range(end, end + _SCRATCH_POINTERS):
            self._pointers[position] = ctypes.addressof(self._scratch)

    def start(self, grid: int, scalars: list[float], descriptors: list[TensorDescriptor]) -> None:
        """Launch with these arguments."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        with _lock:
            self._pack(self._numbers, 0, *scalars)
            for place, found in zip(self._places, descriptors, strict=True):
                self._pointers[place] = parameters_of(found)
            status = driver().cuLaunchKernel(
                self._function, grid, 1, 1, self._threads, 1, 1, self._shared,
                ctypes.c_void_p(stream), self._pointers, None,
            )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"cuLaunchKernel failed with CUDA error {status}")


def _prepare(compiled: Any, arguments: tuple[Any, ...]) -> _Prepared | None:
    """Match the kernel's parameters with its arguments, or return None when they do not match."""
    leaves = [
        leaf
        for argument in arguments
        for leaf in (argument if isinstance(argument, tuple) else (argument,))
    ]
    device = next((x.device for x in leaves if isinstance(x, Tensor)), None)
    if device is None or device.type != "cuda" or not hasattr(compiled, "asm"):
        return None
    metadata = compiled.metadata
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    if metadata.num_ctas != 1 or any(getattr(metadata, n, 0) for n in (*unusual, "launch_pdl")):
        return None
    form, order, places, types = "=", list[int](), list[slice](), list[str]()
    for leaf in leaves:
        if leaf is None:
            continue
        if isinstance(leaf, TensorDescriptor):
            rank = len(leaf.shape)
            places.append(slice(len(types), len(types) + 1 + 2 * rank))
            types += ["b8", *["u32"] * rank, *["u64"] * rank]
            continue
        letter, kind = "q", "u64"
        if isinstance(leaf, float):
            letter, kind = "f", "f32"
        elif isinstance(leaf, int) and -(2**31) <= leaf < 2**31:
            letter, kind = "i", "u32"
        form += letter
        order.append(len(types))
        types.append(kind)
    if _has_special_integers(compiled, arguments):
        return None
    if _parameter_types(compiled.asm["ptx"]) != [*types, *["u64"] * _SCRATCH_POINTERS]:
        return None
    return _Prepared(compiled, form, order, places, torch.cuda.current_device())


def _has_special_integers(compiled: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether Triton compiled a value of this call's integers, or a multiple, into the kernel."""
    integers = [index for index, x in enumerate(arguments) if isinstance(x, int)]
    kinds = list(compiled.src.signature.values())
    attributes = compiled.src.attrs
    return any(kinds[index] == "constexpr" or attributes.get((index,)) for index in integers)


def _parameter_types(ptx: str) -> list[str]:
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("{")]
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", entry)
