"""Start a kernel in microseconds: the one place where the host meets the driver.

Triton's own launcher binds, specialises and hashes every argument and encodes every descriptor
anew, which takes 60 to 100 us of host time for a kernel of attention. Here a first call goes that
way; what it compiled is remembered with a buffer of parameters, and later calls only write into it
and start the kernel. Anything unexpected (another parameter layout, an integer that Triton compiled
in unasked, a profiler's hook, a CPU) goes Triton's way always.
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

from tilewise.kernels.host.descriptors import driver, form_of, parameters_of
from tilewise.kernels.host.requests import is_recording

__all__ = [
    "Calls", "Config", "Grid", "Prepared", "calls_of", "launch", "observed", "prepare_nested",
]  # fmt: skip

Grid = tuple[int, int]
_SCRATCH_POINTERS = 2  # Triton appends them; none of our kernels uses them
_MAX_REMEMBERED = 1024
_remembered: dict[tuple[object, ...], Calls] = {}
_lock = threading.Lock()


def observed() -> bool:
    """Whether somebody wants to see launches, which only Triton's launcher shows them.

    A profiler, or who notes what would be compiled.
    """
    if is_recording():
        return True
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def launch(
    kernel: Any, grid: int | Grid, *arguments: Any, num_warps: int = 4, **constants: Any
) -> Prepared | None:
    """Run `kernel` on `grid` CTAs, on the current stream of the current device.

    Return what starts it again; None where only Triton's launcher can.

    Args:
        kernel: a jitted Triton or Gluon function.
        arguments: its run-time arguments: tensors, None, descriptors, numbers, and flat tuples of
            tensors, None and floats. Integers must stand by themselves: inside a tuple Triton
            compiles anew for each kind of value. It may compile in those that are not marked
            do_not_specialize, so each of their values counts as a kernel of its own here.
        num_warps: of the default partition; the workers' warps come on top.
        constants: its constexpr parameters, and Triton's options, by name.
    """
    leaves: list[Any] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            leaves += argument
        else:
            leaves.append(argument)
    types = tuple(map(type, leaves))
    key = _key(kernel, types, num_warps, constants)
    calls = _remembered.get(key)
    if calls is None:
        _refuse_numbers_in_tuples(arguments)
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        calls = _remembered[key] = Calls(kernel, leaves, _specialised(kernel, arguments))
    size = grid if isinstance(grid, tuple) else (grid, 1)
    kind = calls.kind_of(leaves)
    prepared = calls.prepared.get(kind)
    if prepared is None or observed() or not prepared.start(size, leaves, calls):
        where = grid if isinstance(grid, tuple) else (grid,)
        compiled = kernel[where](*arguments, num_warps=num_warps, **constants)
        prepared = None
        if is_recording():
            return None  # nothing was compiled, so nothing is known of its launches
        if kind not in calls.prepared:
            if len(calls.prepared) >= _MAX_REMEMBERED:  # of integers any number of values may come
                calls.prepared.clear()
            prepared = calls.prepared[kind] = _prepare(compiled, arguments, calls.specialised)
    return prepared


def _key(
    kernel: Any, types: tuple[type, ...], num_warps: int, constants: dict[str, Any]
) -> tuple[object, ...]:
    return id(kernel), num_warps, types, *constants, *constants.values()


def calls_of(
    kernel: Any, types: tuple[type, ...], *, num_warps: int = 4, **constants: Any
) -> Calls | None:
    """Return what is prepared for launches of `kernel` with leaves of these types."""
    return _remembered.get(_key(kernel, types, num_warps, constants))


def _refuse_numbers_in_tuples(arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        for field in argument if isinstance(argument, tuple) else ():
            if isinstance(field, int | tuple):
                raise TypeError(
                    f"numbers must be arguments of their own, got {field!r} in "
                    f"{type(argument).__name__}"
                )


def _specialised(kernel: Any, arguments: tuple[Any, ...]) -> list[int]:
    """Return where among the leaves the integers stand that Triton may compile in."""
    parameters = getattr(kernel, "params", ())  # those of the constants come last
    places, place = list[int](), 0
    for argument, parameter in zip(arguments, parameters, strict=False):
        if isinstance(argument, int) and not parameter.do_not_specialize:
            places.append(place)
        place += len(argument) if isinstance(argument, tuple) else 1
    return places


class Calls:
    """Calls of one kernel whose arguments have the same types; what was prepared for their kinds.

    Attributes:
        tensors, descriptors: where they stand among the leaves.
        specialised: where integers stand whose values are part of a kind.
        prepared: by kind; None where only Triton's launcher will do.
    """

    def __init__(self, kernel: Any, leaves: list[Any], specialised: list[int]) -> None:
        self._kernel = kernel  # it lives as long as its id is part of a key
        self.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.descriptors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _Descriptor)]
        self.specialised = specialised
        self.prepared: dict[tuple[object, ...], Prepared | None] = {}

    def kind_of(self, leaves: list[Any]) -> tuple[object, ...]:
        """Return what Triton compiles anew for; tensors become their addresses in `leaves`."""
        kind: list[object] = [form_of(leaves[i]).kind for i in self.descriptors]
        for i in self.tensors:
            tensor = leaves[i]
            address = tensor.data_ptr()
            kind.append((tensor.dtype, address & 15 == 0, tensor.device))
            leaves[i] = address
        kind += [leaves[i] for i in self.specialised]
        return tuple(kind)


class _Config(ctypes.Structure):
    """CUlaunchConfig of the driver's interface."""

    _fields_ = [
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Config:
    """Where a kernel runs, on how many CTAs, and on which stream.

    Args:
        memory: begins with it; who writes FORM there, `where` and a stream, has set both.
    """

    SIZE, FORM = ctypes.sizeof(_Config), "32sQ16x"

    def __init__(self, function: int, threads: int, shared: int, memory: Any = None) -> None:
        self._function = ctypes.c_void_p(function)
        it = _Config(1, 1, 1, threads, 1, 1, shared)
        self._block = bytes(it)[8:32]
        self._it = it if memory is None else _Config.from_buffer(memory)
        self._pointer = ctypes.byref(self._it)
        self._driver = driver()

    def cut(self, grid: Grid) -> None:
        """Set the number of CTAs on both axes."""
        self._it.grid_x, self._it.grid_y = grid

    def where(self, grid: Grid) -> bytes:
        """Return all but the stream, for this number of CTAs."""
        return struct.pack("=2I", *grid) + self._block

    def submit(self, pointers: Any) -> None:
        """Start the kernel on the stream; pointers: to its parameters, which the driver copies.

        Not for two threads at once.
        """
        status = self._driver.cuLaunchKernelEx(self._pointer, self._function, pointers, None)
        if status != 0:
            raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {status}")

    def submit_on(self, stream: int, pointers: Any) -> None:
        """Start the kernel on `stream`."""
        self._it.stream = stream
        self.submit(pointers)


class Prepared:
    """A compiled kernel and the memory of its parameters.

    Attributes:
        device: the index of the device that it was loaded on.
        places: the first parameter of each descriptor, and how many it has.
        numbers: where the numbers and addresses that are parameters stand among the leaves.
        order, letters: of each of them the parameter, and its format.
        parameters: memory of them that launches of plans share; the first one makes it.
    """

    def __init__(
        self,
        compiled: Any,
        form: str,
        numbers: list[int],
        order: list[int],
        places: list[slice],
        device: int,
    ) -> None:
        self._compiled = compiled
        self._config = self.new_config()
        self.device = device
        self._form = struct.Struct(form)
        self.numbers = numbers
        # A second place makes it return a tuple of one number, too; `start` cuts it off.
        self._pick = operator.itemgetter(*numbers, 0, 0)
        self._memory = ctypes.create_string_buffer(max(1, self._form.size))
        self._scratch = ctypes.c_void_p(0)
        self.places = places
        self.order, self.letters = order, form[1:]
        self.parameters: Any = None
        self._end = max([*order, *(place.stop - 1 for place in places), -1]) + 1
        self._pointers = self.new_pointers()
        start = ctypes.addressof(self._memory)
        for index, position in enumerate(order):
            self._pointers[position] = start + struct.calcsize(form[: 1 + index])

    def new_config(self, memory: Any = None) -> Config:
        """Return what a launch of the kernel takes beside its parameters."""
        metadata = self._compiled.metadata
        return Config(self._compiled.function, 32 * metadata.num_warps, metadata.shared, memory)

    def new_pointers(self) -> Any:
        """Return pointers to all parameters; those to numbers and descriptors are to be set."""
        pointers = (ctypes.c_void_p * (self._end + _SCRATCH_POINTERS))()
        for position in range(self._end, self._end + _SCRATCH_POINTERS):
            pointers[position] = ctypes.addressof(self._scratch)
        return pointers

    def start(self, grid: Grid, leaves: list[Any], calls: Calls) -> bool:
        """Launch with these arguments; False when a number does not fit its parameter."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with _lock:
            try:
                self._form.pack_into(self._memory, 0, *self._pick(leaves)[:-2])
            except struct.error:
                return False
            for place, index in zip(self.places, calls.descriptors, strict=True):
                self._pointers[place] = parameters_of(leaves[index])
            self._config.cut(grid)
            self._config.submit_on(stream, self._pointers)
        return True


def _prepare(compiled: Any, arguments: tuple[Any, ...], specialised: list[int]) -> Prepared | None:
    """Match the kernel's parameters with its arguments, or return None when they do not match."""
    leaves = [
        leaf
        for argument in arguments
        for leaf in (argument if isinstance(argument, tuple) else (argument,))
    ]
    if not _is_on_gpu(leaves) or not _is_usual(compiled):
        return None
    compiled_in = _compiled_in(compiled, arguments, specialised)
    if compiled_in is None:
        return None
    form, order, places, types, numbers = "=", list[int](), list[slice](), list[str](), list[int]()
    for place, leaf in enumerate(leaves):
        if leaf is None or place in compiled_in:
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
        numbers.append(place)
        order.append(len(types))
        types.append(kind)
    if _parameter_types(compiled.asm["ptx"]) != [*types, *["u64"] * _SCRATCH_POINTERS]:
        return None
    return Prepared(compiled, form, numbers, order, places, torch.cuda.current_device())


def _is_usual(compiled: Any) -> bool:
    """Whether a kernel takes its arguments and nothing else, on one CTA each."""
    if "ptx" not in getattr(compiled, "asm", ()):
        return False
    metadata = compiled.metadata
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    return metadata.num_ctas == 1 and not any(
        getattr(metadata, name, 0) for name in (*unusual, "launch_pdl")
    )


_KINDS = {"i32": ("i", "u32"), "i64": ("q", "u64"), "fp32": ("f", "f32")}


def prepare_nested(compiled: Any, arguments: tuple[Any, ...]) -> tuple[Prepared, list[Any]] | None:
    """Match a kernel's parameters with arguments that may be tuples, with numbers inside.

    Of a number inside of a tuple Triton compiles in what it likes, so this is for launches with
    just these numbers.

    Returns:
        What starts it, and the arguments one by one without what was compiled in; None where they
        do not match.
    """
    if not _is_usual(compiled):
        return None
    form, types, leaves = "=", list[str](), list[Any]()

    def take(kind: Any, argument: Any) -> bool:
        nonlocal form
        if isinstance(kind, tuple):
            return len(kind) == len(argument) and all(map(take, kind, argument))
        if kind == "constexpr":
            return True
        letter, parameter = ("q", "u64") if kind.startswith("*") else _KINDS.get(kind, ("", ""))
        form += letter
        types.append(parameter)
        leaves.append(argument)
        return bool(letter)

    if not all(map(take, compiled.src.signature.values(), arguments)):
        return None
    if _parameter_types(compiled.asm["ptx"]) != [*types, *["u64"] * _SCRATCH_POINTERS]:
        return None
    order, device = list(range(len(leaves))), torch.cuda.current_device()
    return Prepared(compiled, form, order, order, [], device), leaves


def _is_on_gpu(leaves: list[Any]) -> bool:
    return next((x.is_cuda for x in leaves if isinstance(x, Tensor)), False)


def _compiled_in(
    compiled: Any, arguments: tuple[Any, ...], specialised: list[int]
) -> set[int] | None:
    """Return which leaves are integers that are no parameter of the kernel: Triton compiled them.

    None where it compiled in a value, or a multiple, of an integer that is not `specialised`.
    """
    kinds = list(compiled.src.signature.values())
    attributes = compiled.src.attrs
    found, place = set[int](), 0
    for index, argument in enumerate(arguments):
        if isinstance(argument, int):
            is_constant = kinds[index] == "constexpr"
            if place not in specialised and (is_constant or attributes.get((index,))):
                return None
            if is_constant:
                found.add(place)
        place += len(argument) if isinstance(argument, tuple) else 1
    return found


def _parameter_types(ptx: str) -> list[str]:
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("{")]
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", entry)
