"""Plans on Hopper: launches past Triton, to which a call gives nothing but addresses.

What `launch.launch` works out, types, kinds, descriptors and numbers, follows from a call's spec
and layouts. A launch of a plan goes that way the first time; from then on it writes the addresses
into parameters that are ready, encodes the descriptors that it has not met at these addresses, and
starts the kernel. What is allocated for a call besides its results is one workspace.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels import plan
from tilewise.kernels.gluon.host import descriptors
from tilewise.kernels.gluon.host.descriptors import Encoder, Maps, parameters_of
from tilewise.kernels.gluon.host.launch import Grid, Prepared, calls_of, launch, observed
from tilewise.kernels.plan import Buffer, Place, Results, device_of, filled

__all__ = ["LaunchPlan", "Maker"]

_MAX_MET = 256
_PIECE = 512  # bytes; what torch's allocator aligns to
Slots = Callable[[Sequence[int]], tuple[int, ...]]

try:  # what torch's own compiler allocates with, in a third of the time
    from torch._C._dynamo.guards import _empty_strided_cuda as _fresh
except ImportError:  # an earlier or a later torch

    def _fresh(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def _is_on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _current_device() -> int:
    return torch._C._cuda_getDevice()  # torch.cuda's own asks first whether CUDA is there


class _Described(NamedTuple):
    """A descriptor of a plan: of which place."""

    place: Place
    like: TensorDescriptor

    def fill(self, run: plan.Run) -> TensorDescriptor:
        """Return that of the place's tensor."""
        return descriptors.at(self.like, run.tensor(self.place).data_ptr())


class Run(plan.Run):
    """The buffers of a call on a GPU.

    Attributes:
        at: addresses, of each buffer and then of `LaunchPlan.inner`; 0 before a buffer is made.
    """

    __slots__ = ("_plan", "at", "device", "has_addresses", "workspace")

    def __init__(
        self, tensors: list[Any], stream: int, at: list[int], workspace: Tensor | None,
        its_plan: LaunchPlan,
    ) -> None:  # fmt: skip
        super().__init__(tensors, stream)
        self.at, self.workspace, self._plan = at, workspace, its_plan
        self.device, self.has_addresses = its_plan.device, its_plan.has_addresses

    def buffer(self, index: int) -> Tensor:
        """Return all of a buffer, of the workspace where it is part of that."""
        x: Tensor | None = self.tensors[index]
        if x is None:
            assert self.workspace is not None
            first, each = self._plan.pieces[index]
            x = self.workspace[first : first + each.num_bytes].view(each.dtype)
            if each.whole is not None:
                x = x.view(each.whole.shape)
            self.tensors[index] = x
        return x

    def store(self, index: int, x: Tensor) -> None:
        """Let a buffer be `x`."""
        self.tensors[index] = x
        self.at[index] = x.data_ptr()
        self._plan.place_inner(self.at, index)


class Launch(plan.Launch):
    """A launch of a plan; see the head of this file.

    Attributes:
        slots: gives the number that a place has among a run's addresses, once a plan has them all.
    """

    slots: Callable[[Place], int]

    def __init__(
        self, kernel: Any, grid: int | Grid, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        super().__init__(kernel, grid, arguments, options)
        self._leaves = _leaves(arguments)
        self._prepared: Prepared | None = None
        self._repeat: _Repeat | None = None

    def run(self, run: plan.Run) -> None:
        """Start it."""
        assert isinstance(run, Run)
        if self._prepared is None and run.has_addresses:
            self._prepared = self._find(run)
        if self._prepared is None or observed():
            arguments = filled(self.arguments, run)
            self._prepared = launch(self.kernel, self.grid, *arguments, **self.options)
            return
        if self._repeat is None:
            grid = self.grid if isinstance(self.grid, tuple) else (self.grid, 1)
            self._repeat = _Repeat(self._prepared, grid, self._leaves, self.slots)
        self._repeat.start(run.stream, run.at)

    def _find(self, run: Run) -> Prepared | None:
        """Return what starts the kernel where launches of its kind were prepared before."""
        stand_in = {Place: Tensor, _Described: TensorDescriptor}
        types = tuple(stand_in.get(type(leaf), type(leaf)) for leaf in self._leaves)
        calls = calls_of(self.kernel, types, **self.options)
        if calls is None:
            return None
        found = [leaf for leaf in self._leaves if isinstance(leaf, _Described)]
        kind: list[object] = [descriptors.found_kind(each.like) for each in found]
        for leaf in self._leaves:
            if isinstance(leaf, Place):
                kind += leaf.dtype, run.at[self.slots(leaf)] & 15 == 0, run.device
        kind += [self._leaves[i] for i in calls.specialised]
        return calls.prepared.get(tuple(kind))

    def places(self) -> list[Place]:
        """Return those of all its tensors and descriptors."""
        found = []
        for leaf in self._leaves:
            if isinstance(leaf, _Described):
                found.append(leaf.place)
            elif isinstance(leaf, Place):
                found.append(leaf)
        return found


def _leaves(arguments: tuple[Any, ...]) -> list[Any]:
    """Return arguments one by one, those of tuples as well."""
    leaves: list[Any] = []
    for argument in arguments:
        if isinstance(argument, tuple) and not hasattr(argument, "fill"):
            leaves += argument
        else:
            leaves.append(argument)
    return leaves


class _Repeat:
    """A launch of `prepared` of which nothing but addresses changes.

    Args:
        leaves: the arguments one by one, with places.
        slots: which of the addresses that `start` is given a place has.
    """

    def __init__(
        self, prepared: Prepared, grid: Grid, leaves: list[Any], slots: Callable[[Place], int]
    ) -> None:
        self._prepared = prepared
        self._lock = threading.Lock()
        self._config = prepared.new_config()
        self._config.cut(grid)
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Place)]
        numbers = [0 if isinstance(leaf, Place) else leaf for leaf in leaves]
        self._numbers = prepared.new_memory(numbers)
        moving = [index for index, place in enumerate(prepared.numbers) if place in tensors]
        self._addresses = (ctypes.c_uint64 * len(moving))()
        self._pack = struct.Struct(f"={len(moving)}Q").pack_into
        self._tensors = _picker([slots(leaves[prepared.numbers[index]]) for index in moving])
        found = [leaf for leaf in leaves if isinstance(leaf, _Described)]
        self._encoders = [Encoder(each.like) for each in found]
        self._maps = _picker([slots(each.place) for each in found])
        self._kept = [each.like for each in found]  # whose sizes and strides the kernel reads
        self._met: dict[tuple[int, ...], tuple[Any, Maps]] = {}
        self._pointers = prepared.new_pointers()
        for place, each in zip(prepared.places, found, strict=True):
            self._pointers[place] = parameters_of(each.like)
        start = ctypes.addressof(self._numbers)
        for index, (position, offset) in enumerate(prepared.positions):
            self._pointers[position] = start + offset
            if index in moving:
                at = ctypes.addressof(self._addresses) + 8 * moving.index(index)
                self._pointers[position] = at

    def start(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on `stream`; addresses: of all places that `slots` knows."""
        places = self._maps(addresses)
        with self._lock:
            met = self._met.get(places)
            if met is None:
                met = self._meet(places)
            self._pack(self._addresses, 0, *self._tensors(addresses))
            self._config.submit(stream, met[0])

    def _meet(self, places: tuple[int, ...]) -> tuple[Any, Maps]:
        """Return the pointers to the parameters where descriptors are those of `places`."""
        if len(self._met) >= _MAX_MET:
            self._met.clear()
        maps = Maps(len(self._encoders))
        pointers = type(self._pointers).from_buffer_copy(self._pointers)
        for index, encoder in enumerate(self._encoders):
            encoder.write(maps.places[index], places[index])
            pointers[self._prepared.places[index].start] = maps.places[index]
        met = self._met[places] = pointers, maps
        return met


def _picker(slots: list[int]) -> Slots:
    """Return what picks the addresses of these slots."""
    if not slots:
        return lambda addresses: ()
    if len(slots) == 1:
        return lambda addresses: (addresses[slots[0]],)
    picker: Slots = operator.itemgetter(*slots)
    return picker


class LaunchPlan(plan.LaunchPlan):
    """A plan whose launches take addresses; on a CPU, where kernels are emulated, tensors.

    Attributes:
        pieces: where a buffer lies in the workspace.
        has_addresses: whether launches take them, as on a GPU.
    """

    def __init__(
        self, device: torch.device, num_inputs: int, buffers: list[Buffer], *rest: Any
    ) -> None:
        super().__init__(device, num_inputs, buffers, *rest)
        self._made = [
            (i, (tuple(each.whole.shape), tuple(each.whole.stride), each.dtype))
            for i, each in enumerate(buffers)
            if each.kind == "result" and each.whole is not None
        ]
        size = 0
        self.pieces: dict[int, tuple[int, Buffer]] = {}
        for index, each in enumerate(buffers):
            if each.kind == "work":
                self.pieces[index] = size, each
                size += -(-each.num_bytes // _PIECE) * _PIECE
        self._workspace = ((size,), (1,), torch.uint8)
        self._inner: dict[tuple[int, int], int] = {}  # places inside of buffers
        self.has_addresses = _is_on_gpu(device)
        for action in self.actions:
            if isinstance(action, Launch):
                for place in action.places():
                    if place.offset > 0:
                        slot = len(buffers) + len(self._inner)
                        self._inner.setdefault((place.buffer, place.offset), slot)
                action.slots = self._slot_of

    def _slot_of(self, place: Place) -> int:
        if place.offset == 0:
            return place.buffer
        return self._inner[place.buffer, place.offset]

    def place_inner(self, at: list[int], buffer: int) -> None:
        """Write the addresses inside of a buffer that was made."""
        for (index, offset), slot in self._inner.items():
            if index == buffer:
                at[slot] = at[buffer] + offset

    def run(self, *tensors: Tensor | None) -> Results:
        """Run the steps for tensors that lie as those of its call do."""
        if self.has_addresses and _current_device() != self.device.index:
            with device_of(self.device):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Sequence[Tensor | None]) -> Results:
        run = self._begin(tensors)
        for action in self.actions:
            action.run(run)
        found = run.tensors
        return tuple([None if i is None else found[i] for i in self._results])

    def _begin(self, tensors: Sequence[Tensor | None]) -> Run:
        """Allocate what a call needs."""
        if not self.has_addresses:
            slow = super()._begin(tensors)
            return Run(slow.tensors, 0, [0] * (len(self._buffers) + len(self._inner)), None, self)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        at = [0 if x is None else x.data_ptr() for x in tensors]
        found: list[Any] = [*tensors]
        more = len(self._buffers) - len(found)
        at += [0] * (more + len(self._inner))
        found += [None] * more
        for index, made in self._made:
            x = found[index] = _fresh(*made)
            at[index] = x.data_ptr()
        for index, ask in self._asked:
            x = found[index] = ask(stream)
            at[index] = x.data_ptr()
        workspace = None
        if self.pieces:
            workspace = _fresh(*self._workspace)
            start = workspace.data_ptr()
            for index, (first, _) in self.pieces.items():
                at[index] = start + first
        for (index, offset), slot in self._inner.items():
            at[slot] = at[index] + offset
        return Run(found, stream, at, workspace, self)


class Maker(plan.Maker):
    """Writes down plans of Hopper's kernels, and of portable ones between them."""

    _plan = LaunchPlan

    def _launch(
        self, kernel: Any, grid: int | Grid, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> plan.Launch:
        """Return a launch; only Triton's launcher takes numbers inside of tuples."""
        nested = [x for x in arguments if isinstance(x, tuple) and not hasattr(x, "fill")]
        if any(isinstance(field, int) for each in nested for field in each):
            return plan.Launch(kernel, grid, arguments, options)
        return Launch(kernel, grid, arguments, options)

    def placed(self, argument: Any) -> Any:
        """Return an argument with places for tensors and descriptors."""
        if isinstance(argument, TensorDescriptor):
            return _Described(self.place(argument.base), argument)
        return super().placed(argument)

    def addressable(self, x: Tensor) -> Tensor:
        """Return `x`, or a copy of it where TMA cannot read it in place."""
        if x.stride(-1) == 1 and self.is_aligned(x) and not descriptors.why_no_descriptor(x):
            return x
        return self.copy(x)
