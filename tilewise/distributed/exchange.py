"""Communication of ranks that share a sequence: agreement, rings, gathers, all-to-all.

gloo cannot send a GPU's memory from rank to rank: such tensors are copied through main memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Agreement",
    "Exchange",
    "Pending",
    "agree",
    "goes_through_host",
    "ordered_sum",
    "rank_and_size",
]

_OF_ATTENTION = (
    "method, causal, window, softmax_scale, layout, cu_seqlens, deterministic and backend"
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in a group, and the number of ranks in the group.

    Raises:
        ValueError: torch.distributed is not initialised, or this process is not in the group.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "group must be a process group, or torch.distributed be initialised, got None"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group must have this process, got one without it")
    return rank, dist.get_world_size(group)


def goes_through_host(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Return whether ranks exchange a device's tensors through main memory.

    True if the device is a GPU, and gloo is the group's backend for GPUs.

    Args:
        group: the ranks that exchange tensors; None for the default group.
        device: the device of the tensors.
    """
    if device.type != "cuda":
        return False
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get(device.type) == "gloo"


def ordered_sum(parts: Tensor) -> Tensor:
    """Return the sum of parts (size, ...) over dim 0, added in the order of the ranks.

    parts[0] is overwritten: the sum is written there.
    """
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total


def agree(
    group: dist.ProcessGroup | None,
    tensors: dict[str, Tensor],
    options: Sequence[object],
    problem: str | None,
) -> None:
    """Raise ValueError on every rank if shapes or options differ, or one rank has a problem.

    Every rank must call it, even with a problem of its own; otherwise the others would hang.

    Args:
        group: the ranks that must agree.
        tensors: tensors by name.
        options: plain values, compared by their repr.
        problem: the reason why this rank refuses the call, or None.
    """
    Agreement(group, tensors, options, problem).finish()


class Agreement:
    """The check of `agree` in two halves: the constructor sends this rank's shapes and options,
    `finish` waits for the others'.

    Between them a rank may compute, but must not exchange anything else in the group.

    Args:
        group, tensors, options, problem: as `agree` takes them; an object that is no tensor is
            reported as None.
        names: the names of the options, for a message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        tensors: dict[str, Tensor],
        options: Sequence[object],
        problem: str | None,
        names: str = _OF_ATTENTION,
    ) -> None:
        self._rank, self._size = rank_and_size(group)
        self._names, self._problem, self._options = tuple(tensors), problem, names
        self._work: Any = None
        if self._size == 1:
            return
        own: list[int] = [problem is not None, zlib.crc32(repr(tuple(options)).encode())]
        for tensor in tensors.values():
            if not isinstance(tensor, Tensor):
                own += [-1] * 6
                continue
            dtype = _DTYPES.index(tensor.dtype) if tensor.dtype in _DTYPES else -1
            own += [dtype, tensor.dim(), *(*tensor.shape, 0, 0, 0, 0)[:4]]
        # Referenced until it was sent.
        self._sent = torch.tensor(own, dtype=torch.int64)
        self._rows = self._sent.new_empty((self._size, len(own)))
        self._work = _words_of(group).allgather([list(self._rows.unbind(0))], [self._sent])

    def finish(self) -> None:
        """Wait for the other ranks' messages; raise ValueError if a rank, this one included,
        refuses the call, or shapes, dtypes or options differ."""
        problem = self._problem
        if self._work is not None:
            self._work.wait()
            told = self._rows.tolist()
        if problem is not None:
            raise ValueError(problem)
        if self._work is None:
            return
        self._work = None
        refusing = [other for other, row in enumerate(told) if row[0]]
        if refusing:
            raise ValueError(
                f"arguments must be right on every rank, got them refused on {refusing}"
            )
        for place, name in enumerate(self._names):
            kinds = [_kind(row[2 + 6 * place : 8 + 6 * place]) for row in told]
            if len(set(kinds)) > 1:
                listed = ", ".join(f"{kind} on rank {i}" for i, kind in enumerate(kinds))
                raise ValueError(
                    f"{name} must be of one shape and dtype on all ranks, got {listed}"
                )
        if len({row[1] for row in told}) > 1:
            rank = self._rank
            other = next(i for i, row in enumerate(told) if row[1] != told[rank][1])
            raise ValueError(
                f"{self._options} must be the same on all ranks, got others on rank {other} than "
                f"on rank {rank}"
            )


def _words_of(group: dist.ProcessGroup | None) -> Any:
    """Return the group that carries messages from host to host: the ranks' own, or a gloo one
    beside NCCL.

    Over NCCL a message would wait behind the GPU's work, and the host with it. The first call makes
    the gloo group; all ranks must make that call. torch does not know this group: `new_group` would
    have to be called by all ranks of the world, and its variant for some ranks
    (`use_local_synchronization`) hangs if one of them has been in more groups than another.
    """
    own: Any = dist.group.WORLD if group is None else group
    backend = str(dist.get_backend(group))
    return gloo_of(own) if "nccl" in backend and "gloo" not in backend else own


def gloo_of(group: dist.ProcessGroup) -> Any:
    """Return a gloo group of a group's ranks, made once for each set of ranks.

    A store may outlive its ranks' WORLD (under torchrun it does), and then contains the addresses
    of their earlier meetings. So the ranks count their meetings in the store.
    """
    made = _GLOO.setdefault(dist.group.WORLD, {})
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in made:
        from torch.distributed.constants import default_pg_timeout  # not in every build of torch

        name = "tilewise/words/" + "-".join(map(str, ranks)) + "/"
        whole = dist.distributed_c10d._get_default_store()
        # no rank passes before all have added
        times = (whole.add(name + "met", 1) - 1) // len(ranks)
        store = dist.PrefixStore(f"{name}{times}/", whole)  # type: ignore[attr-defined]
        made[ranks] = dist.ProcessGroupGloo(
            store, dist.get_rank(group), len(ranks), timeout=default_pg_timeout
        )
    return made[ranks]


_GLOO: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def _all_gather(room: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> Any:
    """Begin to gather `x` of all ranks into `room` (size, ...); return torch's work to wait for."""
    if x.is_cuda:
        return dist.all_gather_into_tensor(room, x, group=group, async_op=True)
    # the form that gloo supports
    return dist.all_gather(list(room.unbind(0)), x, group=group, async_op=True)


def _kind(row: Sequence[int]) -> str:
    dtype = str(_DTYPES[row[0]]).removeprefix("torch.") if row[0] >= 0 else "another dtype"
    return f"{tuple(row[2 : 2 + row[1]])} {dtype}"


class Pending:
    """Tensors that an `Exchange` is receiving; `wait` returns them. Without works they are there
    already."""

    def __init__(self, tensors: list[Tensor], works: list[Any], sent: list[Tensor]) -> None:
        self._tensors, self._works, self._sent = tensors, works, sent

    def wait(self) -> list[Tensor]:
        """Wait until the tensors have arrived, and return them; the tensors sent may then be
        changed again."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self._tensors

    def in_turn(self) -> Iterator[Tensor]:
        """Yield each tensor of a gather when it has arrived, while the next are in transfer.

        A caller that does not take all of them must call `wait`.
        """
        if len(self._works) == len(self._tensors):
            for work, tensor in zip(self._works, self._tensors, strict=True):
                work.wait()
                yield tensor
            self._sent = []
        else:
            yield from self.wait()


class _FromHost(Pending):
    """A `Pending` whose tensors arrive in main memory and are then copied to `device`."""

    def __init__(self, pending: Pending, device: torch.device) -> None:
        self._pending, self._device = pending, device

    def wait(self) -> list[Tensor]:
        return [tensor.to(self._device) for tensor in self._pending.wait()]

    def in_turn(self) -> Iterator[Tensor]:
        return (tensor.to(self._device) for tensor in self._pending.in_turn())


class Exchange:
    """The transfers of ranks that share a sequence, which run while something else is computed.

    Every method must be called by all ranks of the group, in the same order.

    Args:
        group: the ranks that exchange tensors; None for the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = rank_and_size(group)

    def shift(self, tensors: Sequence[Tensor], distance: int = 1) -> Pending:
        """Begin to send tensors to the rank `distance` ahead in the ring, and to receive tensors of
        the same shapes from the rank `distance` behind. Returns the received ones as a
        `Pending`."""
        if distance % self.size == 0:
            return Pending(list(tensors), [], [])
        if self._goes_through_host(tensors):
            return _FromHost(self.shift(_on_host(tensors), distance), tensors[0].device)
        to, source = (self._global((self.rank + d) % self.size) for d in (distance, -distance))
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        ops = []
        for tensor, room in zip(sent, received, strict=True):
            ops.append(dist.P2POp(dist.isend, tensor, to, self.group))
            ops.append(dist.P2POp(dist.irecv, room, source, self.group))
        return Pending(received, dist.batch_isend_irecv(ops), sent)

    def gather(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin to gather each tensor from all ranks; the `Pending` returns them as (size, ...)
        each."""
        if self._goes_through_host(tensors):
            return _FromHost(self.gather(_on_host(tensors)), tensors[0].device)
        sent = [tensor.contiguous() for tensor in tensors]
        if self.size == 1:
            return Pending([tensor.unsqueeze(0) for tensor in sent], [], [])
        received = [tensor.new_empty((self.size, *tensor.shape)) for tensor in sent]
        works = [
            _all_gather(room, tensor, self.group)
            for tensor, room in zip(sent, received, strict=True)
        ]
        return Pending(received, works, sent)

    def trade(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin an all-to-all: part i of dim 0 of each tensor goes to rank i.

        Returns a `Pending` with tensors of the same shapes, whose part i came from rank i.
        """
        if self.size == 1:
            return Pending(list(tensors), [], [])
        if self._goes_through_host(tensors):
            return _FromHost(self.trade(_on_host(tensors)), tensors[0].device)
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        works = [
            dist.all_to_all_single(room, tensor, group=self.group, async_op=True)
            for tensor, room in zip(sent, received, strict=True)
        ]
        return Pending(received, works, sent)

    def _goes_through_host(self, tensors: Sequence[Tensor]) -> bool:
        return self.size > 1 and goes_through_host(self.group, tensors[0].device)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]
