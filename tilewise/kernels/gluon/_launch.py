"""Start a kernel in microseconds: the one place where the host meets the driver.

Triton's own launcher binds, specialises and hashes every argument and encodes every descriptor
anew, which takes 60 to 100 us of host time for a kernel of attention. Here a first call goes that
way; what it compiled is remembered with a buffer of parameters, and later calls only write into it
and start the kernel. Anything unexpected (another parameter layout, an integer that Triton compiled
in, a profiler's hook, a CPU) goes Triton's way always.
"""

from __future__ import annotations

import ctypes
import operator
import re
import struct
import threading
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as _Descriptor

from tilewise.kernels.gluon._descriptors import driver, found_kind, parameters_of

__all__ = ["Prepared", "launch"]

_SCRATCH_POINTERS = 2  # Triton appends them; none of our kernels uses them
_MAX_REMEMBERED = 1024
_remembered: dict[tuple[object, ...], _Calls] = {}
_lock = threading.Lock()


def launch(
    kernel: Any, grid: int, *arguments: Any, num_warps: int = 4, **constants: Any
) -> Prepared | None:
    """Run `kernel` on `grid` CTAs, on the current stream of the current device.

    Args:
        kernel: a jitted Triton or Gluon function.
        arguments: its run-time arguments: tensors, None, descriptors, numbers, and flat tuples of
            tensors, None and floats. Integers must stand by themselves and be marked
            do_not_specialize: inside a tuple Triton compiles anew for each kind of value.
        num_warps: of the default partition; the workers' warps come on top.
        constants: its constexpr parameters, by name.

    Returns:
        what was launched, for `_repeat.Repeat`; None where Triton's launcher did it.
    """
    leaves: list[Any] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            leaves += argument
        else:
            leaves.append(argument)
    types = tuple(map(type, leaves))
    key = (id(kernel), num_warps, types, *constants.values())
    calls = _remembered.get(key)
    if calls is None:
        _refuse_numbers_in_tuples(arguments)
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        calls = _remembered[key] = _Calls(leaves)
    kind = calls.kind_of(leaves)
    prepared = calls.prepared.get(kind)
    hook = knobs.runtime.launch_enter_hook
    if prepared is None or getattr(hook, "calls", hook) or not prepared.start(grid, leaves, calls):
        compiled = kernel[(grid,)](*arguments, num_warps=num_warps, **constants)
        if kind not in calls.prepared:
            calls.prepared[kind] = _prepare(compiled, arguments)
        return None
    return prepared


def _refuse_numbers_in_tuples(arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        for field in argument if isinstance(argument, tuple) else ():
            if isinstance(field, int | tuple):
                raise TypeError(
                    f"numbers must be arguments of their own, got {field!r} in "
                    f"{type(argument).__name__}"
                )


class _Calls:
    """Calls of one kernel whose arguments have the same types; what was prepared for their kinds.

    Attributes:
        tensors, descriptors: where they stand among the arguments.
        prepared: by kind; None where only Triton's launcher will do.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.descriptors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _Descriptor)]
        numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, int | float | Tensor)]
        # A second place makes it return a tuple of one number, too; `values` cuts it off.
        self._numbers = operator.itemgetter(*numbers, 0, 0)
        self.prepared: dict[tuple[object, ...], Prepared | None] = {}

    def kind_of(self, leaves: list[Any]) -> tuple[object, ...]:
        """Return what Triton compiles anew for; tensors become their addresses in `leaves`."""
        kind: list[object] = [found_kind(leaves[i]) for i in self.descriptors]
        for i in self.tensors:
            tensor = leaves[i]
            address = tensor.data_ptr()
            kind += tensor.dtype, address & 15 == 0, tensor.device
            leaves[i] = address
        return tuple(kind)

    def values(self, leaves: list[Any]) -> tuple[Any, ...]:
        """Return the numbers and addresses among the arguments."""
        values: tuple[Any, ...] = self._numbers(leaves)[:-2]
        return values


class Prepared:
    """A compiled kernel and the memory of its parameters.

    Attributes:
        device: the index of the device that it was loaded on.
        places: the first parameter of each descriptor, and how many it has.
        positions: of each number or address the parameter, and where it lies among all of them.
    """

    def __init__(
        self, compiled: Any, form: str, order: list[int], places: list[slice], device: int
    ) -> None:
        self._function = ctypes.c_void_p(compiled.function)
        self._threads = 32 * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        self.device = device
        self._form = struct.Struct(form)
        self._numbers = ctypes.create_string_buffer(max(1, self._form.size))
        self._scratch = ctypes.c_void_p(0)
        self.places = places
        self.positions = [
            (position, struct.calcsize(form[: 1 + index])) for index, position in enumerate(order)
        ]
        self._end = max([*order, *(place.stop - 1 for place in places), -1]) + 1
        self._pointers = self.new_pointers()
        start = ctypes.addressof(self._numbers)
        for position, offset in self.positions:
            self._pointers[position] = start + offset

    def new_pointers(self) -> Any:
        """Return pointers to all parameters; those to numbers and descriptors are to be set."""
        pointers = (ctypes.c_void_p * (self._end + _SCRATCH_POINTERS))()
        for position in range(self._end, self._end + _SCRATCH_POINTERS):
            pointers[position] = ctypes.addressof(self._scratch)
        return pointers

    def new_numbers(self, values: list[Any]) -> Any:
        """Return memory that holds these numbers and addresses."""
        memory = ctypes.create_string_buffer(max(1, self._form.size))
        self._form.pack_into(memory, 0, *values)
        return memory

    def start(self, grid: int, leaves: list[Any], calls: _Calls) -> bool:
        """Launch with these arguments; False when a number does not fit its parameter."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with _lock:
            try:
                self._form.pack_into(self._numbers, 0, *calls.values(leaves))
            except struct.error:
                return False
            for place, index in zip(self.places, calls.descriptors, strict=True):
                self._pointers[place] = parameters_of(leaves[index])
            self.submit(grid, stream, self._pointers)
        return True

    def submit(self, grid: int, stream: int, pointers: Any) -> None:
        """Start the kernel; pointers: to its parameters, which the driver copies."""
        status = driver().cuLaunchKernel(
            self._function, grid, 1, 1, self._threads, 1, 1, self._shared,
            ctypes.c_void_p(stream), pointers, None,
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"cuLaunchKernel failed with CUDA error {status}")


def _prepare(compiled: Any, arguments: tuple[Any, ...]) -> Prepared | None:
    """Match the kernel's parameters with its arguments, or return None when they do not match."""
    leaves = [
        leaf
        for argument in arguments
        for leaf in (argument if isinstance(argument, tuple) else (argument,))
    ]
    if not _is_on_gpu(leaves) or not hasattr(compiled, "asm"):
        return None
    metadata = compiled.metadata
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    if metadata.num_ctas != 1 or any(getattr(metadata, n, 0) for n in (*unusual, "launch_pdl")):
        return None
    form, order, places, types = "=", list[int](), list[slice](), list[str]()
    for leaf in leaves:
        if leaf is None:
            continue
        if isinstance(leaf, _Descriptor):
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
    return Prepared(compiled, form, order, places, torch.cuda.current_device())


def _is_on_gpu(leaves: list[Any]) -> bool:
    return next((x.is_cuda for x in leaves if isinstance(x, Tensor)), False)


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
