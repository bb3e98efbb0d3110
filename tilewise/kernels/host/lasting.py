"""Memory on a GPU that outlives the call which makes it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["is_capturing", "lasting", "made_once"]

_MAX_TENSORS = 512
_tensors: dict[tuple[object, ...], Tensor] = {}


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is being captured on `device`: what is made now belongs to that graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def lasting(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return `make()`, filled and in memory that belongs to no pool of its caller.

    While torch warms up a CUDA graph (`torch.compile(mode="reduce-overhead")`), or inside of
    `torch.cuda.use_mem_pool`, all that a thread allocates comes from one pool. What stays there
    after the call is an error, or is given out again. The pool is that thread's, so another thread
    makes the tensor. The caller must not be capturing a graph.

    Args:
        make: allocates and fills a tensor on `device`.
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
    """Return the tensor of `key`, made when it is first asked for.

    Memory of a graph must not outlive it, and its launches share no counter with others: while one
    is captured, and once there are too many tensors, each call makes its own.

    Args:
        key: the name of the use, and all that the contents of the tensor depend on, the device
            included.
        make: allocates and fills the tensor on `device`.
    """
    found = _tensors.get(key)
    if found is not None:
        return found
    if is_capturing(device) or len(_tensors) >= _MAX_TENSORS:
        return make()
    found = _tensors[key] = lasting(make, device)
    return found
