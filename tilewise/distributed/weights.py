"""Named tensors from the ranks of a trainer to the process of an engine, over a process group.

    names, dtypes and shapes as JSON -> one broadcast for each tensor

The group is torch's: over NCCL tensors go from GPU to GPU, over gloo between main memories. Nothing
is pickled. A tensor that a trainer has in parts (a DTensor) is made whole by all of its ranks, one
tensor at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["receive_weights", "send_weights"]


def send_weights(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    source: int = 0,
    group: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Send tensors by name to the ranks that call `receive_weights`; every rank of the trainer
    calls it.

    Args:
        tensors: names and tensors, the same on all ranks of the trainer; a DTensor is made whole.
        source: the rank that sends, as all ranks of the job count.
        group: the process group of trainer and engines; None is the default group.
        dtype: the dtype that is sent; None is that of each tensor.

    Example:
        >>> send_weights(model.state_dict())  # on the trainer's ranks
        >>> llm.update_weights(receive_weights())  # meanwhile, in the engine's process

    Raises:
        ValueError: this rank's names, dtypes or shapes differ from those of `source`, whose tensors
            have been sent.
    """
    named = dict(tensors)
    device = _device(group)
    own = [
        [name, str(dtype or tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in named.items()
    ]
    is_source = dist.get_rank() == source
    head = _share_head(own if is_source else None, source, group, device)
    for name, kind, shape in head:
        whole = named[name].detach() if name in named else None
        if whole is not None and hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()  # all of these ranks take part
        if is_source:
            assert whole is not None
            sent = whole.to(device, dtype or whole.dtype).contiguous()
        else:
            sent = torch.empty(shape, dtype=getattr(torch, kind), device=device)
        dist.broadcast(sent, source, group)
    if head != own:  # when nobody waits for this rank any more
        raise ValueError("tensors must have the same names, dtypes and shapes on all ranks")


def receive_weights(
    *, source: int = 0, group: Any = None, device: str | torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors that `send_weights` sends, each with memory of its own.

    Args:
        source: the rank that sends, as all ranks of the job count.
        group: the process group of trainer and engines; None is the default group.
        device: the device of the tensors; None is the current GPU over NCCL, else the CPU.

    Example:
        >>> llm.update_weights(receive_weights())
    """
    over = _device(group)
    where = over if device is None else torch.device(device)
    for name, kind, shape in _share_head(None, source, group, over):
        tensor = torch.empty(shape, dtype=getattr(torch, kind), device=over)
        dist.broadcast(tensor, source, group)
        yield name, tensor.to(where)


def _device(group: Any) -> torch.device:
    """Return the device of tensors that the group broadcasts: the current GPU for NCCL, else the
    CPU."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _share_head(
    own: list[list[Any]] | None, source: int, group: Any, device: torch.device
) -> list[list[Any]]:
    """Return [name, dtype, shape] of each tensor that rank `source` will send; all ranks call it.

    Args:
        own: the list to send, on the source; None on other ranks.
    """
    data = b"" if own is None else json.dumps(own).encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(length, source, group)
    body = torch.zeros(int(length), dtype=torch.uint8, device=device)
    if own is not None:
        body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(body, source, group)
    head: list[list[Any]] = json.loads(bytes(body.cpu().numpy()))
    return head
