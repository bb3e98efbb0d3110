"""Start a kernel in microseconds: the one place where the host meets the driver.

Triton's own launcher binds, specialises and hashes every argument and encodes every descriptor
anew, which takes 60 to 100 us of host time for a kernel of attention. Here a first call goes that
way; what it compiled is remembered with a buffer of parameters, and later calls only write into it
and start the kernel. Anything unexpected (another parameter layout, an integer that Triton compiled
in unasked, a profiler's hook, a CPU) goes Triton's way always.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as _Descriptor

from tilewise.kernels.host.descriptors import Described, Maps, driver, encode, form_of
from tilewise.kernels.host.memory import launches
from tilewise.kernels.host.requests import is_recording, observed
from tilewise.kernels.plan import Grid

__all__ = [
    "Addressed",
    "Calls",
    "Prepared",
    "calls_of",
    "kind_of_integer",
    "launch_now",
    "prepare_nested",
]

Slots = Callable[[list[Any]], Sequence[Any]]
_SCRATCH_POINTERS = 2  # Triton appends them; none of our kernels uses them
_MAX_CALLS = 1024
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def launch_now(
    kernel: Any, grid: int | Grid, *arguments: Any, num_warps: int = 4, **constants: Any
) -> Prepared | None:
    """Run `kernel` on `grid` CTAs, on the current stream of the current device.

    Args:
        kernel: a jitted Triton or Gluon function.
        arguments: the kernel's run-time arguments: tensors, None, descriptors, numbers, and tuples
            of them. For an integer of a parameter that is not marked do_not_specialize Triton
            compiles one kernel for 1, one for multiples of 16 and one for the rest.
        num_warps: the warps of the default partition, without those of the workers.
        constants: the kernel's constexpr parameters, and Triton's options, by name.

    Returns:
        The prepared launch, which can start the kernel again; None where only Triton's launcher
        can.
    """
    leaves = _leaves(arguments)
    types = tuple(map(type, leaves))
    key = _key(kernel, types, num_warps, constants)
    calls = launches.calls.get(key)
    if calls is None:
        if len(launches.calls) >= _MAX_CALLS:
            launches.calls.clear()
        calls = Calls(kernel, leaves, _specialised(kernel, arguments))
        launches.calls[key] = calls
    kind = calls.kind_of(leaves)
    prepared = calls.prepared.get(kind)
    if prepared is None or observed() or not prepared.start(grid, leaves):
        where = grid if isinstance(grid, tuple) else (grid,)
        compiled = kernel[where](*arguments, num_warps=num_warps, **constants)
        prepared = None
        if is_recording():
            return None  # nothing was compiled, so nothing is known of its launches
        if kind not in calls.prepared:
            if len(calls.prepared) >= _MAX_CALLS:  # of integers any number of values may come
                calls.prepared.clear()
            prepared = calls.prepared[kind] = _prepare(compiled, arguments, calls)
    return prepared


def _key(
    kernel: Any, types: tuple[type, ...], num_warps: int, constants: dict[str, Any]
) -> tuple[object, ...]:
    return id(kernel), num_warps, types, *constants, *constants.values()


def calls_of(
    kernel: Any, types: tuple[type, ...], *, num_warps: int = 4, **constants: Any
) -> Calls | None:
    """Return the prepared launches of `kernel` for arguments of these types, or None.

    Args:
        types: the types of the arguments one by one, those inside of tuples as well.
        num_warps, constants: as of `launch_now`.
    """
    return launches.calls.get(_key(kernel, types, num_warps, constants))


def _leaves(arguments: Sequence[Any]) -> list[Any]:
    """Return the arguments one by one, those inside of tuples as well."""
    found: list[Any] = []
    for argument in arguments:
        if isinstance(argument, tuple):
            found += _leaves(argument)
        else:
            found.append(argument)
    return found


def _specialised(kernel: Any, arguments: tuple[Any, ...]) -> list[int]:
    """Return the places of the integers that Triton may compile into the kernel.

    These are integers of parameters that are not marked do_not_specialize. A place is an index
    among the arguments taken one by one, see `_leaves`.
    """
    parameters = getattr(kernel, "params", ())  # those of the constants come last
    places, place = list[int](), 0
    for argument, parameter in zip(arguments, parameters, strict=False):
        leaves = _leaves((argument,))
        if not parameter.do_not_specialize:
            places += [place + i for i, leaf in enumerate(leaves) if isinstance(leaf, int)]
        place += len(leaves)
    return places


def kind_of_integer(number: int) -> tuple[bool, bool, bool]:
    """Return three bools: whether an integer is 1, is a multiple of 16, and fits 32 bits.

    Triton compiles a kernel of its own for each combination.
    """
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31


class Calls:
    """The memory of the launches of one kernel with arguments of the same types.

    Leaves are the arguments taken one by one, see `_leaves`. A kind is all for which Triton
    compiles the kernel anew, see `kind_of`.

    Attributes:
        tensors, descriptors: the places of tensors and of descriptors among the leaves.
        specialised: the places of integers with a `kind_of_integer` that is part of a kind.
        prepared: the prepared kernels by kind; None where only Triton's launcher can start the
            kernel.
    """

    def __init__(self, kernel: Any, leaves: list[Any], specialised: list[int]) -> None:
        self._kernel = kernel  # it lives as long as its id is part of a key
        self.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.descriptors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _Descriptor)]
        self.specialised = specialised
        self.prepared: dict[tuple[object, ...], Prepared | None] = {}

    def kind_of(self, leaves: list[Any]) -> tuple[object, ...]:
        """Return the facts of a launch for which Triton compiles anew, as a key of `prepared`.

        Tensors in `leaves`, the arguments one by one, are replaced in place by their addresses.
        """
        kind: list[object] = [form_of(leaves[i]).kind for i in self.descriptors]
        for i in self.tensors:
            tensor = leaves[i]
            address = tensor.data_ptr()
            kind.append((tensor.dtype, address & 15 == 0, tensor.device))
            leaves[i] = address
        kind += [kind_of_integer(leaves[i]) for i in self.specialised]
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


class Prepared:
    """A compiled kernel, and the memory that all of its launches write their parameters to.

    One piece of memory has where the kernel runs, then its parameters: addresses, numbers, and the
    sizes and strides of descriptors. So a launch writes all that it needs at once.

    Args:
        letters: the format of each number and address, in the order of `numbers`.
        numbers: the places among the leaves of the numbers and addresses that are parameters.
        order: the index of the kernel's parameter for each of `numbers`.
        places: the slice of the kernel's parameters of each descriptor: its map, its sizes and its
            strides.
        tensors, descriptors: the places of tensors and descriptors among the leaves.
        device: the index of the device that the kernel was loaded on.

    Attributes:
        device: see Args.
        tensors, descriptors: the places of the leaves with addresses that a launch writes, and of
            those that are descriptors.
        lock: is held from `pack` to `submit`, since all launches share the memory.
        memory, pack: `pack(memory, 0, where, stream, *addresses, constants)` writes a launch.
        submit: `submit(pointers, None)` starts the kernel; the driver copies its parameters.
    """

    def __init__(
        self,
        compiled: Any,
        letters: str,
        numbers: list[int],
        order: list[int],
        places: list[slice],
        tensors: Collection[int],
        descriptors: list[int],
        device: int,
    ) -> None:
        self._compiled = compiled
        self.device, self.descriptors = device, descriptors
        self.lock = threading.Lock()
        moving, fixed = list[int](), list[int]()
        for index, leaf in enumerate(numbers):
            (moving if leaf in tensors else fixed).append(index)
        self.tensors = [numbers[index] for index in moving]
        self._fixed = [numbers[index] for index in fixed]
        form = "=" + "".join(letters[index] for index in fixed)
        ends = [struct.calcsize(form[: 1 + count]) for count in range(len(fixed))]
        size = ctypes.sizeof(_Config)
        first = size + 8 * len(moving)
        offsets = {order[i]: size + 8 * count for count, i in enumerate(moving)}
        offsets |= {order[i]: first + end for i, end in zip(fixed, ends, strict=True)}
        for place in places:
            rank = (place.stop - place.start) // 2
            for letter, start in (("i", place.start + 1), ("q", place.start + 1 + rank)):
                for axis in range(rank):
                    offsets[start + axis] = first + struct.calcsize(form)
                    form += letter
        self._constants = struct.Struct(form)
        size = self._constants.size
        self.memory = ctypes.create_string_buffer(first + size)
        self.pack = struct.Struct(f"=32sQ16x{len(moving)}Q{size}s").pack_into
        metadata = compiled.metadata
        config = _Config(1, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared)
        self._block = bytes(config)[12:32]
        self._maps = [place.start for place in places]
        end = max([*offsets, *self._maps, -1]) + 1
        self._scratch = ctypes.c_void_p(0)
        self._pointers = (ctypes.c_void_p * (end + _SCRATCH_POINTERS))()
        for position in range(end, end + _SCRATCH_POINTERS):
            self._pointers[position] = ctypes.addressof(self._scratch)
        for position, offset in offsets.items():
            self._pointers[position] = ctypes.addressof(self.memory) + offset
        self.submit: Callable[..., int] = functools.partial(
            driver().cuLaunchKernelEx,
            ctypes.byref(_Config.from_buffer(self.memory)),
            ctypes.c_void_p(compiled.function),
        )

    def where(self, grid: int | Grid) -> bytes:
        """Return the first 32 bytes of a launch's memory: the grid, the block and shared memory.

        Args:
            grid: the number of CTAs along each axis; an int for one axis.
        """
        axes = grid if isinstance(grid, tuple) else (grid,)
        return struct.pack("=3I", *(*axes, 1, 1)[:3]) + self._block

    def constants(self, leaves: Sequence[Any]) -> bytes:
        """Return the packed numbers and descriptors' sizes of a launch, the same for all addresses.

        Raises:
            struct.error: a number does not fit its parameter.
        """
        numbers = [leaves[i] for i in self._fixed]
        for i in self.descriptors:
            numbers += leaves[i].shape
            numbers += leaves[i].strides
        return self._constants.pack(*numbers)

    def pointers_to(
        self, descriptors: Sequence[Described], addresses: Sequence[int]
    ) -> tuple[Any, Maps]:
        """Encode descriptors, and return pointers to all parameters of a launch with them.

        Args:
            descriptors: the launch's descriptors.
            addresses: the address of each descriptor's tensor.

        Returns:
            The pointers, and the memory of the descriptors, which must live as long.
        """
        maps = Maps(len(addresses))
        pointers = type(self._pointers).from_buffer_copy(self._pointers)
        each_one = zip(descriptors, self._maps, maps.places, addresses, strict=True)
        for each, position, at, address in each_one:
            encode(each, at, address)
            pointers[position] = at
        return pointers, maps

    def start(self, grid: int | Grid, leaves: list[Any]) -> bool:
        """Launch the kernel with these arguments on the current stream of its device.

        Args:
            grid: the number of CTAs along each axis; an int for one axis.
            leaves: the arguments one by one, with addresses in place of tensors.

        Returns:
            True; False, and nothing is launched, when a number does not fit its parameter.
        """
        try:
            constants = self.constants(leaves)
        except struct.error:
            return False
        found = [_described(leaves[i]) for i in self.descriptors]
        pointers, maps = self.pointers_to(found, [each.base.data_ptr() for each in found])
        addresses = [leaves[i] for i in self.tensors]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        with self.lock:
            self.pack(self.memory, 0, self.where(grid), stream, *addresses, constants)
            if status := self.submit(pointers, None):
                self.submit_again(status, pointers)
        del maps  # until here the pointers lead there
        return True

    def submit_again(self, status: int, pointers: Any) -> None:
        """Handle a launch that the driver refused: launch once more, or raise RuntimeError.

        It is repeated where the thread had no CUDA context, as a thread of autograd's has none
        before its first call of CUDA's runtime; a context is made first.

        Args:
            status: the error code of the launch.
            pointers: the pointers to the kernel's parameters.
        """
        if status == _NO_CONTEXT:
            torch.zeros(1, device=torch.device("cuda", self.device))
            status = self.submit(pointers, None)
        if status != 0:
            raise launch_error(status)


def _described(found: _Descriptor) -> Described:
    return Described(found.base, tuple(found.shape), tuple(found.strides), form_of(found))


def launch_error(status: int) -> RuntimeError:
    """Return the exception for a launch that the CUDA driver refused with `status`."""
    return RuntimeError(f"cuLaunchKernelEx failed with CUDA error {status}")


class Addressed:
    """A prepared launch of a plan in which only addresses and the stream change between runs.

    Args:
        prepared: the kernel's prepared launch.
        grid: the number of CTAs.
        leaves: the arguments one by one, with a place for each tensor, and a `Described` of a place
            for each descriptor. A place's `slot` is its index among the addresses of a run.

    Attributes:
        met: the pointers to the parameters, with the TMA descriptors that must live as long, by the
            addresses of the descriptors' tensors.

    Raises:
        struct.error: a number does not fit its parameter.
    """

    __slots__ = ("_constants", "_descriptors", "_maps", "_prepared", "_tensors", "_where", "met")

    def __init__(self, prepared: Prepared, grid: int | Grid, leaves: Sequence[Any]) -> None:
        self._prepared = prepared
        self._where, self._constants = prepared.where(grid), prepared.constants(leaves)
        self._tensors = picker([leaves[i].slot for i in prepared.tensors])
        self._descriptors: list[Described] = [leaves[i] for i in prepared.descriptors]
        self._maps = picker([each.base.slot for each in self._descriptors])
        self.met: dict[tuple[int, ...], tuple[Any, Maps]] = {}

    def run(self, run: Any) -> None:
        """Launch on the stream `run.stream` with the addresses `run.at` of the run's tensors."""
        at, prepared = run.at, self._prepared
        places = tuple(self._maps(at))
        met = self.met.get(places) or self._meet(places)
        with prepared.lock:
            prepared.pack(
                prepared.memory, 0, self._where, run.stream, *self._tensors(at), self._constants
            )
            if status := prepared.submit(met[0], None):
                prepared.submit_again(status, met[0])

    def _meet(self, places: tuple[int, ...]) -> tuple[Any, Maps]:
        """Return the pointers to parameters, with descriptors encoded for these addresses.

        They are remembered in `met`.

        Args:
            places: the addresses of the descriptors' tensors.
        """
        met = self._prepared.pointers_to(self._descriptors, places)
        launches.add_met(self.met, places, met)
        return met


def picker(slots: Sequence[int]) -> Slots:
    """Return a function of a list that returns the elements at `slots`, as a sequence.

    The function is C code, so that it takes no Python frame.
    """
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return operator.itemgetter(slice(slots[0], slots[0] + 1 or None) if slots else slice(0))


def _prepare(compiled: Any, arguments: tuple[Any, ...], calls: Calls) -> Prepared | None:
    """Prepare a compiled kernel to be launched without Triton's launcher.

    Args:
        compiled: the kernel that Triton has compiled for these arguments.
        arguments: the run-time arguments of its launch.
        calls: the memory of launches with arguments of these types.

    Returns:
        The prepared kernel; None when its parameters do not match the arguments, on a CPU, or for a
        kernel that is not `_is_usual`.
    """
    leaves = _leaves(arguments)
    if not _is_on_gpu(leaves) or not _is_usual(compiled):
        return None
    compiled_in = _compiled_in(compiled, leaves, calls.specialised)
    if compiled_in is None:
        return None
    form, order, places, types, numbers = "", list[int](), list[slice](), list[str](), list[int]()
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
    tensors, device = set(calls.tensors), torch.cuda.current_device()
    return Prepared(compiled, form, numbers, order, places, tensors, calls.descriptors, device)


def _is_usual(compiled: Any) -> bool:
    """Return whether a compiled kernel is for NVIDIA's GPUs and is launched in the plain way.

    The plain way has no clusters, no cooperative grid, no early start (programmatic dependent
    launch), and no scratch memory of Triton's own.
    """
    if "ptx" not in getattr(compiled, "asm", ()):
        return False
    metadata = compiled.metadata
    unusual = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid")
    return metadata.num_ctas == 1 and not any(
        getattr(metadata, name, 0) for name in (*unusual, "launch_pdl")
    )


_KINDS = {"i32": ("i", "u32"), "i64": ("q", "u64"), "fp32": ("f", "f32")}


def prepare_nested(compiled: Any, arguments: tuple[Any, ...]) -> tuple[Prepared, list[Any]] | None:
    """Prepare a compiled kernel for launches with exactly these numbers in its arguments.

    Arguments may be tuples with numbers inside. Which of those Triton compiles in is its own
    choice, so a launch with other numbers needs another preparation.

    Returns:
        The prepared kernel, and the arguments one by one without those that were compiled in; None
        where the parameters do not match or the kernel is not `_is_usual`.
    """
    if not _is_usual(compiled):
        return None
    form, types, leaves = "", list[str](), list[Any]()

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
    tensors = {i for i in order if not isinstance(leaves[i], int | float)}
    return Prepared(compiled, form, order, order, [], tensors, [], device), leaves


def _is_on_gpu(leaves: list[Any]) -> bool:
    return next((x.is_cuda for x in leaves if isinstance(x, Tensor)), False)


def _compiled_in(compiled: Any, leaves: list[Any], specialised: list[int]) -> set[int] | None:
    """Return the indices of integer leaves that Triton made constants of the compiled kernel.

    Args:
        compiled: the compiled kernel.
        leaves: the arguments of the launch, flattened.
        specialised: the indices of leaves whose values may be compiled in.

    Returns:
        The indices; None if the value of another integer was compiled in, or a divisor of it.
    """
    kinds = list(_kinds(tuple(compiled.src.signature.values())))
    attributes = compiled.src.attrs
    found = set[int]()
    for place, (leaf, (kind, path)) in enumerate(zip(leaves, kinds, strict=False)):
        if isinstance(leaf, int):
            is_constant = kind == "constexpr"
            if place not in specialised and (is_constant or attributes.get(path)):
                return None
            if is_constant:
                found.add(place)
    return found


def _kinds(kinds: tuple[Any, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the type of each leaf of a kernel's signature, and the path of indices to it.

    Args:
        kinds: the types of the arguments, as Triton names them; a tuple for a tuple.
        path: the path to `kinds` itself.
    """
    for index, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from _kinds(kind, (*path, index))
        else:
            yield kind, (*path, index)


def _parameter_types(ptx: str) -> list[str]:
    entry = ptx[ptx.index(".entry") :]
    entry = entry[: entry.index("{")]
    return re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", entry)
