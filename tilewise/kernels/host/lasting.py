"""Memory on a GPU that outlives the call which makes it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.kernels.host.memory import launches

__all__ = ["Zeros", "is_capturing", "lasting", "made_once", "zeros_of_stream"]

_MAX_TENSORS = 512
_ZEROS = 1 << 20  # of a device: what launches inside of graphs take is never given back
_TOGETHER = 32  # counters of 128 bytes: every launch's start where Triton takes it for aligned
_OF_A_STREAM = 1 << 12  # counters of the launches of one stream outside of graphs


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream captures a CUDA graph; False for a device that is no GPU.

    Tensors that are allocated meanwhile belong to that graph.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def lasting(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return the tensor of `make()`, complete, in memory that belongs to no pool of the caller.

    While torch warms up a CUDA graph (`torch.compile(mode="reduce-overhead")`), or inside of
    `torch.cuda.use_mem_pool`, all that a thread allocates comes from one pool. A tensor that stays
    there after the call is an error, or its memory is given out again. The pool is that thread's,
    so on a GPU a new thread calls `make` and waits for the stream. The caller must not be capturing
    a graph. Exceptions of `make` are raised here.

    Args:
        make: a function that allocates and fills a tensor on `device`.
    """
    if device.type != "cuda":
        return make()
    made: list[Tensor] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.device(device):
                made.append(make())
                torch.cuda.current_stream().synchronize()  # other streams will read it
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="tilewise-lasting")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]


def made_once(key: tuple[object, ...], make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return the tensor of `key`, made when it is first asked for and kept for the process.

    Memory that a graph allocates must not outlive the graph, and its launches share no counter with
    others: while a graph is captured a key that is not there yet gets a new tensor that is not
    kept. The same holds once 512 tensors are kept.

    Args:
        key: the name of the use, and all that the contents of the tensor depend on, the device
            included.
        make: a function that allocates and fills the tensor on `device`.
    """
    found = launches.tensors.get(key)
    if found is not None:
        return found
    if is_capturing(device) or len(launches.tensors) >= _MAX_TENSORS:
        return make()
    found = launches.tensors[key] = lasting(make, device)
    return found


class Zeros:
    """Counters of one device: int32 zeros that kernels count with and leave as zeros again.

    Launches of one stream follow one another and share the same zeros. A launch that a graph
    captures gets zeros of its own for good, because another graph may run at the same time.

    Args:
        where: the device; 2 ** 20 zeros are allocated there (4 MiB), and never more.
    """

    def __init__(self, where: torch.device) -> None:
        self._zeros = lasting(lambda: torch.zeros(_ZEROS, dtype=torch.int32, device=where), where)
        self._used = 0
        self._of_stream: dict[int, int] = {}

    def take(self, count: int, stream: int, capturing: bool) -> Tensor | None:
        """Return `count` zeros for a launch, a view of int32 memory, or None if they are too few.

        Launches of one stream share the same zeros, and each launch leaves zeros behind. A launch
        that a graph captures gets zeros that no other launch ever gets.

        Args:
            count: the number of zeros.
            stream: the handle of the stream on which the kernel runs.
            capturing: True if a graph captures the launch.

        Returns:
            (count,) int32. None if too little memory is left, or if `count` exceeds the fixed
            number of zeros of a stream.
        """
        if capturing:
            return self._next(count)
        if count > _OF_A_STREAM:
            return None
        begin = self._of_stream.get(stream)
        if begin is not None:
            return self._zeros[begin : begin + count]
        found = self._next(_OF_A_STREAM)
        if found is None:
            return None
        self._of_stream[stream] = self._used - _OF_A_STREAM
        return found[:count]

    def _next(self, count: int) -> Tensor | None:
        count = -(-count // _TOGETHER) * _TOGETHER
        if self._used + count > _ZEROS:
            return None
        self._used += count
        return self._zeros[self._used - count : self._used]


def zeros_of_stream(count: int, where: torch.device) -> Tensor:
    """Return `count` zeros, int32 on `where`, for the next launch on the current stream.

    The kernel must leave them as zeros, since other launches of the stream get the same memory. On
    a CPU, and where the kept zeros do not suffice, they are a new tensor.
    """
    if where.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=where)
    capturing = torch.cuda.is_current_stream_capturing()
    index = torch.cuda.current_device()
    known: Zeros | None = launches.zeros.get(index)
    if known is None and not capturing:
        known = launches.zeros[index] = Zeros(where)
    stream = torch._C._cuda_getCurrentRawStream(index)
    found = None if known is None else known.take(count, stream, capturing)
    if found is None:  # a graph before anything else: it fills its own at each replay
        found = torch.zeros(count, dtype=torch.int32, device=where)
    return found
