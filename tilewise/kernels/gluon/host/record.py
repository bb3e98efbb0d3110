"""Repeat a whole call: what it allocates and launches is recorded once and done again.

A call of attention allocates its results and a workspace and launches one kernel or several. All
of that follows from its key: spec, dtypes and strides. `Memory.run` records it the first time, by
watching torch's dispatcher and `launch`, and does it again in microseconds for other tensors of
the same key. A recording is kept only if nothing but allocations, views and launches was seen, and
if every address that a kernel took is known: of an input, of something allocated, or of something
that was declared to last (`keep`) or to be asked for each time (`ask`). A copy, a sum that torch
makes or a kernel that only Triton's launcher starts: such calls are computed anew every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.kernels.gluon.host.launch import Grid, Prepared, observed, watching
from tilewise.kernels.gluon.host.repeat import Repeat

__all__ = ["Call", "Key", "Memory", "Results", "ask", "keep"]

_MAX_CALLS, _MAX_TRIED = 256, 1024
_MOST_TRIES = 4  # the first ones may fill caches, of constant tensors for instance
_ALIGNED = 15  # addresses are multiples of 16, or Triton compiles another kernel
_PIECE = 512  # bytes; what torch's allocator aligns to
_aten = torch.ops.aten
_ALLOCATES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten.view.dtype,
    _aten._reshape_alias.default,
}

try:  # what torch's own compiler allocates with, in a third of the time
    from torch._C._dynamo.guards import _empty_strided_cuda as _fresh
except ImportError:  # an earlier or a later torch

    def _fresh(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


Key = tuple[object, ...]
Results = tuple[Tensor | None, ...]
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def keep(*tensors: Tensor) -> None:
    """Declare that kernels of this call read `tensors`, which later calls of its key read, too."""
    recording: _Recording | None = getattr(watching, "watcher", None)
    if recording is not None:
        recording.kept += tensors


def ask(tensor: Tensor, again: Callable[[int], Tensor]) -> None:
    """Declare that in a repeated call on a stream `again` of it takes the place of `tensor`."""
    recording: _Recording | None = getattr(watching, "watcher", None)
    if recording is not None:
        recording.asked.append((tensor, again))


class Memory:
    """Calls of one function, by key."""

    def __init__(self) -> None:
        self._calls: dict[Key, Call] = {}
        self._tries: dict[Key, int] = {}

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
        self._tries.clear()

    def run(self, key: Key, inputs: Sequence[Tensor], compute: Callable[[], Results]) -> Results:
        """Return what `compute` does, on the current device, by repeating it where that is known.

        Args:
            key: all that decides how `compute` goes about it, but for the addresses of `inputs`.
            inputs: every tensor that it reads, on a GPU; only their memory may differ under a key.
        """
        call = self._calls.get(key)
        if call is not None:
            results = call.run(inputs)
            if results is not None:
                return results
        tries = self._tries.get(key, 0)
        if tries > _MOST_TRIES or not _can_record(inputs):
            return compute()
        if tries == 0:  # a recording is worth its time where calls come again
            if len(self._tries) >= _MAX_TRIED:
                self._tries.clear()
            self._tries[key] = 1
            return compute()
        return self._record(key, inputs, compute)

    def known(self, key: Key) -> Call | None:
        """Return what repeats the call of `key`, if it was recorded."""
        return self._calls.get(key)

    def _record(
        self, key: Key, inputs: Sequence[Tensor], compute: Callable[[], Results]
    ) -> Results:
        recording = _Recording(inputs)
        watching.watcher = recording
        try:
            with recording:
                results = compute()
        finally:
            watching.watcher = None
        call = recording.call(results)
        if call is None:
            self._tries[key] = self._tries.get(key, 0) + 1
            return results
        if len(self._calls) >= _MAX_CALLS:
            self._calls.clear()
        self._calls[key] = call
        return results


def _can_record(inputs: Sequence[Tensor]) -> bool:
    if not _is_on_gpu(inputs[0]) or getattr(watching, "watcher", None) is not None or observed():
        return False
    # Memory of a graph must not outlive it.
    return not any(x.data_ptr() & _ALIGNED for x in inputs) and not _capturing()


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def _current_device() -> int:
    return torch._C._cuda_getDevice()  # torch.cuda's own asks first whether CUDA is there


class Call:
    """A recorded call.

    Args:
        repeats: its launches, in order.
        device: the index of the one on which all of its tensors lie.
        same: pairs of inputs that must lie at the same address, as they did.
        results: shapes, strides and dtypes; None where it had none.
        kept, asked: see `keep` and `ask`.
        size: of its workspace, bytes.
        offsets: in it, that kernels take.
    """

    def __init__(
        self, repeats: list[Repeat], device: int, same: list[tuple[int, int]],
        results: list[Made | None], kept: list[Tensor], asked: list[Callable[[int], Tensor]],
        size: int, offsets: list[int],
    ) -> None:  # fmt: skip
        self._repeats, self._device, self._same = repeats, device, same
        self._results, self._kept, self._asked = results, kept, asked
        self._kept_at = [x.data_ptr() for x in kept]
        self._workspace, self._offsets = ((size,), (1,), torch.uint8), offsets

    def run(self, inputs: Sequence[Tensor]) -> Results | None:
        """Return the results of the same call of `inputs`; None where it is another one."""
        at, odd = list[int](), 0
        for x in inputs:
            address = x.data_ptr()
            odd |= address
            at.append(address)
        for one, other in self._same:
            odd |= at[one] != at[other]
        if odd & _ALIGNED or _current_device() != self._device or observed():
            return None
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        results, beside = self._allocate(at, stream)
        for repeat in self._repeats:
            repeat.start(stream, at)
        del beside  # the allocator gives it to what comes later on this stream
        return results

    def _allocate(self, at: list[int], stream: int) -> tuple[Results, list[Tensor]]:
        """Return results and what else must live, and append where all of it lies."""
        results = [None if made is None else _fresh(*made) for made in self._results]
        at += [x.data_ptr() for x in results if x is not None]
        at += self._kept_at
        beside = [again(stream) for again in self._asked]
        at += [x.data_ptr() for x in beside]
        if self._offsets:
            workspace = _fresh(*self._workspace)
            start = workspace.data_ptr()
            at += [start + offset for offset in self._offsets]
            beside.append(workspace)
        return tuple(results), beside

    def launcher(self, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Return what only launches, into memory that is allocated here: it is to be measured."""
        at = [x.data_ptr() for x in inputs]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        memory = self._allocate(at, stream)

        def launch(memory: object = (inputs, memory)) -> None:
            for repeat in self._repeats:
                repeat.start(stream, at)

        return launch


class _Allocated(NamedTuple):
    tensor: Tensor
    start: int
    size: int


class _Launched(NamedTuple):
    prepared: Prepared
    grid: Grid
    leaves: list[Any]
    tensors: list[int]


class _Recording(TorchDispatchMode):
    """What one call does, as seen by torch's dispatcher and by `launch`."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.asked: list[tuple[Tensor, Callable[[int], Tensor]]] = []
        self._inputs = [x.data_ptr() for x in inputs]
        self._allocated: list[_Allocated] = []  # alive, so that no two have the same address
        self._launched: list[_Launched] = []
        self._refused = False
        self._device = inputs[0].device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and note what it allocates."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATES:
            size = result.untyped_storage().nbytes()
            self._refused |= result.device != self._device
            self._allocated.append(_Allocated(result, result.data_ptr(), size))
        elif func not in _VIEWS:
            self._refused = True
        return result

    def launched(
        self, prepared: Prepared | None, grid: Grid, leaves: list[Any], tensors: list[int]
    ) -> None:
        """Note a launch."""
        if prepared is None:
            self._refused = True
        else:
            self._launched.append(_Launched(prepared, grid, list(leaves), tensors))

    def call(self, results: Results) -> Call | None:
        """Return what repeats the call; None where that is not known."""
        if self._refused or not self._launched:
            return None
        made = [self._allocation_of(x) for x in results if x is not None]
        if None in made or len(set(made)) < len(made):
            return None
        pieces = [index for index in range(len(self._allocated)) if index not in made]
        starts, size = dict[int, int](), 0
        for index in pieces:
            starts[index], size = size, size + -(-self._allocated[index].size // _PIECE) * _PIECE
        # In the order of `Call.run`: then come places in a workspace.
        fixed = [*self._inputs, *(self._allocated[i].start for i in made if i is not None)]
        fixed += [x.data_ptr() for x in (*self.kept, *(x for x, _ in self.asked))]
        offsets, unknown = list[int](), False

        def slot_of(address: int) -> int:
            nonlocal unknown
            if address in fixed:
                return fixed.index(address)
            for index in pieces:
                offset = address - self._allocated[index].start
                if 0 <= offset < self._allocated[index].size:
                    offset += starts[index]
                    if offset not in offsets:
                        offsets.append(offset)
                    return len(fixed) + offsets.index(offset)
            unknown = True
            return 0

        repeats = [Repeat(*launched, slot_of) for launched in self._launched]
        if unknown:
            return None
        return Call(
            repeats=repeats,
            device=self._device.index,
            same=self._same(),
            results=[None if x is None else (tuple(x.shape), x.stride(), x.dtype) for x in results],
            kept=self.kept,
            asked=[again for _, again in self.asked],
            size=size,
            offsets=offsets,
        )

    def _allocation_of(self, result: Tensor) -> int | None:
        """Return which allocation a result is, all of it and in order."""
        for index, (_, start, size) in enumerate(self._allocated):
            if result.data_ptr() == start and result.nbytes == size and result.is_contiguous():
                return index
        return None

    def _same(self) -> list[tuple[int, int]]:
        """Return which inputs lie at the same address: a kernel's argument may be either."""
        first = [self._inputs.index(address) for address in self._inputs]
        return [(index, other) for index, other in enumerate(first) if index != other]
