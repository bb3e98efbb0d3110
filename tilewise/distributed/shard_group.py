"""The collectives of a model that is cut into shards: sums and concatenations over its ranks.

On a CPU a sum is gathered and added in the order of the ranks, so that its bits depend neither on
the number of rows in a call nor on the rank. On GPUs small sums are one kernel that reads the
buffers of all ranks (torch's symmetric memory, without multicast), large ones use NCCL; both may be
captured in a CUDA graph. Rows of the model's width are added up in inboxes (`distributed.inbox`),
and normalised there. Ranks that share one GPU, which NCCL refuses, also gather through buffers;
larger messages go through main memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed import inbox as inboxes
from tilewise.distributed.environment import MULTICAST_OFF
from tilewise.distributed.exchange import goes_through_host, ordered_sum
from tilewise.distributed.inbox import Inbox

__all__ = ["ShardGroup"]

# Bytes up to which each rank reads the buffers of all others. Every rank then reads size - 1 times
# the message, a ring about twice; but it waits twice instead of 2 (size - 1) times. Not yet
# measured here; 256 KiB is 16 rows of a hidden size of 8,192 in 16 bits.
SMALL_BYTES = 256 << 10
# The same if ranks share a GPU: larger messages cannot be captured in a graph.
SHARED_GPU_BYTES = 64 << 20


class ShardGroup:
    """The ranks that hold the shards of one model, and the collectives that a step runs over them.

    Each rank has one; `meet` connects it, and all ranks must make the same calls in the same order.

    Args:
        rank, size: the rank, and the number of ranks.
        device: the device of the tensors.
        group: the torch.distributed group; None is the default one. Unused when `size` is 1.

    Attributes:
        num_calls: the number of collectives so far, which shows whether a step makes progress.
        inbox: the inbox in which few rows are added up; None before `open_inbox` has made it.
        why_no_inbox: the reason why there is no inbox; None if there is one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank, self.size, self.device, self.group = rank, size, device, group
        self.num_calls = 0
        self._is_alone = False
        self._buffer: Tensor | None = None
        self._refusal: str | None = None
        self._shares_gpu = False
        self.inbox: Inbox | None = None
        self.why_no_inbox: str | None = "it was not asked for"
        self._own_inbox: Tensor | None = None
        self._inboxes: list[Tensor] = []
        self._inbox_memory: Any = None
        self._memory: Any = None  # symmetric memory with the buffers of all ranks

    @property
    def why_no_symmetric_memory(self) -> str | None:
        """The reason why small sums do not use symmetric memory; None if they do, or before
        `meet`."""
        return self._refusal

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let collectives use this rank's tensors alone during the block, without communication.

        The results have the right shapes but wrong values; the calls are not counted. It is for
        steps whose kernels are recorded and not run (`kernels.host.requests`).
        """
        self._is_alone, calls = True, self.num_calls
        try:
            yield
        finally:
            self._is_alone, self.num_calls = False, calls

    def meet(self) -> None:
        """Connect to the other ranks, and on GPUs share a buffer for small sums; all ranks call it
        once.

        A rank that cannot reach the others fails here, not in a step.
        """
        if self.size == 1:
            return
        self._shares_gpu = goes_through_host(self.group, self.device)
        self.stack(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            if not self._shares_gpu:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            self._refusal = self._share_buffer()

    def open_inbox(self, dim: int, dtype: torch.dtype, *, deals: bool) -> None:
        """Make an inbox for rows of `dim` elements; all ranks call it, with the same arguments.

        Sets `inbox`, or `why_no_inbox` if any rank cannot have one: without a GPU, say.

        Args:
            dim, dtype: the width and dtype of the rows.
            deals: True if ranks may add up shares of the rows, see `Inbox`.

        Raises:
            torch.OutOfMemoryError: this rank has no memory for the inbox. The other ranks wait
                until this process has ended.
        """
        if self.size == 1 or self.device.type != "cuda":
            self.why_no_inbox = "there is one rank" if self.size == 1 else "there is no GPU"
            return
        refusal = self._refusal or inboxes.why_not(dim, dtype, self.size)
        if self._shares_gpu:
            # A kernel that waits for another rank's kernel would keep it from running on the same
            # GPU.
            refusal = "ranks share a GPU"
        count = inboxes.inbox_words(dim, dtype.itemsize, self.size, deals=deals)
        addresses: list[int] = []
        if refusal is None:
            refusal = self._agreed(_why_not(lambda: self._allocate_inbox(count)))
        if refusal is None:
            refusal = self._agreed(_why_not(lambda: addresses.extend(self._addresses(count))))
        self.why_no_inbox = refusal
        if refusal is None:  # all ranks have agreed, so all inboxes are zeros
            self.inbox = Inbox(self.rank, addresses, dim, dtype, self.device, deals=deals)

    def _allocate_inbox(self, count: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        # Referenced, because the symmetric memory is freed with the tensor it was allocated for.
        self._own_inbox = symmetric.empty(count, dtype=torch.int64, device=self.device)
        self._own_inbox.zero_()
        torch.cuda.synchronize(self.device)

    def _addresses(self, count: int) -> list[int]:
        """Exchange the inboxes with all ranks; return the address of each rank's inbox, as this
        device writes to it."""
        from torch.distributed import _symmetric_memory as symmetric

        assert self.group is not None
        assert self._own_inbox is not None
        memory = symmetric.rendezvous(self._own_inbox, self.group.group_name)
        self._inboxes = [memory.get_buffer(r, (count,), torch.int64) for r in range(self.size)]
        self._inbox_memory = memory
        return [x.data_ptr() for x in self._inboxes]

    def adds_rows(self, rows: int, dtype: torch.dtype, dim: int | None = None) -> bool:
        """Return whether `rows` rows of `dim` elements are added up in inboxes; None is the inbox's
        width."""
        if self.inbox is None:
            return False
        return self.inbox.takes(rows, self.inbox.dim if dim is None else dim, dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, parts: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of (the sum of x over all ranks + residual), and that sum, by
        `Inbox.add_rms_norm`.

        Only for rows for which `adds_rows` is True.
        """
        self.num_calls += 1
        assert self.inbox is not None
        return self.inbox.add_rms_norm(x, residual, weight, eps, parts=parts)

    def embed(self, table: Tensor, ids: Tensor, rows: tuple[int, int]) -> Tensor:
        """Return the embeddings (..., E) of ids, from a table whose rows are split over ranks, by
        `Inbox.embed`.

        Only for rows for which `adds_rows` is True.
        """
        self.num_calls += 1
        assert self.inbox is not None
        return self.inbox.embed(table, ids, rows)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, in its dtype, on every rank; all ranks call it. `x`
        may be overwritten."""
        self.num_calls += 1
        if self.size == 1:
            return x
        if x.device.type == "cpu":
            return self._ordered_sum(x)
        x = x.contiguous()
        dim = x.shape[-1] if x.dim() else 0
        if self.inbox is not None and self.adds_rows(x.numel() // max(dim, 1), x.dtype, dim):
            return self.inbox.sum(x)
        if self._is_alone:
            return x
        if self._buffer is not None and self._is_small(x):
            assert self.group is not None
            one_shot: Any = torch.ops.symm_mem.one_shot_all_reduce_copy
            flat = x.view(-1)
            buffer = self._buffer.view(x.dtype)[: flat.numel()]
            total: Tensor = one_shot(buffer, flat, "sum", self.group.group_name)
            return total.view(x.shape)
        if self._shares_gpu:
            return self._ordered_sum(x)
        dist.all_reduce(x, group=self.group)
        return x

    def concatenate(self, x: Tensor) -> Tensor:
        """Return x (..., n) of all ranks, joined along the last dim in the order of ranks: (...,
        size * n)."""
        self.num_calls += 1
        if self.size == 1:
            return x
        parts = self.stack(x)
        return parts.movedim(0, -2).flatten(-2)

    def stack(self, x: Tensor) -> Tensor:
        """Return `x` of all ranks, (size, ...), in the order of ranks; all give one shape and
        dtype."""
        x = x.contiguous()
        if self._is_alone:
            return x.expand(self.size, *x.shape).contiguous()
        if self._shares_gpu and x.device.type == "cuda":
            return self._stack_on_one_gpu(x)
        parts = x.new_empty((self.size, *x.shape))
        if x.device.type == "cpu":
            dist.all_gather(list(parts.unbind(0)), x, group=self.group)
        else:
            dist.all_gather_into_tensor(parts, x, group=self.group)
        return parts

    def _stack_on_one_gpu(self, x: Tensor) -> Tensor:
        """Return `stack` of ranks that share one GPU, through their buffers there.

        A message larger than a buffer goes through main memory.
        """
        if self._memory is None or not 0 < x.numel() * x.itemsize <= SHARED_GPU_BYTES:
            return self.stack(x.cpu()).to(x.device)
        buffers = [self._memory.get_buffer(r, x.shape, x.dtype) for r in range(self.size)]
        buffers[self.rank].copy_(x)
        self._memory.barrier(channel=0)
        parts = torch.stack(buffers)
        self._memory.barrier(channel=0)  # before any rank writes again
        return parts

    def _ordered_sum(self, x: Tensor) -> Tensor:
        parts = self.stack(x)
        if x.itemsize < 4:
            parts = parts.float()  # rounded once, at the end
        return ordered_sum(parts).to(x.dtype)

    def _agreed(self, refusal: str | None) -> str | None:
        """Return a reason on every rank if any rank gives one, since all must add up in the same
        way.

        The result is this rank's own `refusal`, or a text that names the ranks that refuse; None if
        none does.
        """
        # Not through the buffers: a rank that refuses has none, and would be waited for.
        memory, self._memory = self._memory, None
        refused = self.stack(torch.tensor([float(refusal is not None)], device=self.device))
        if not refused.any():
            self._memory = memory
            return None
        ranks = ", ".join(str(rank) for rank in refused.flatten().nonzero().flatten().tolist())
        return refusal or f"rank {ranks} cannot"

    def _share_buffer(self) -> str | None:
        """Make the buffer that other ranks read; return None, or on every rank a reason why there
        is none.

        Raises:
            torch.OutOfMemoryError: this rank has no memory for the buffer. The other ranks wait
                until this process has ended.
        """
        os.environ.update(MULTICAST_OFF)
        if self._shares_gpu:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        # A rank without a buffer would not come to the rendezvous, and the others would wait for
        # ever.
        refusal = self._agreed_on_buffer(_why_not(self._allocate))
        if refusal is None:
            refusal = self._agreed_on_buffer(_why_not(self._open))
        return refusal

    def _agreed_on_buffer(self, refusal: str | None) -> str | None:
        """Return `_agreed(refusal)`; if any rank refuses, drop this rank's buffer as well."""
        refusal = self._agreed(refusal)
        if refusal is not None:
            self._buffer = None
        return refusal

    def _allocate(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        room = SHARED_GPU_BYTES if self._shares_gpu else SMALL_BYTES
        self._buffer = symmetric.empty(room, dtype=torch.uint8, device=self.device)

    def _open(self) -> None:
        """Map the ranks' buffers into one another's address space."""
        from torch.distributed import _symmetric_memory as symmetric

        assert self.group is not None
        assert self._buffer is not None
        memory = symmetric.rendezvous(self._buffer, self.group.group_name)
        if self._shares_gpu:
            self._memory = memory

    def _is_small(self, x: Tensor) -> bool:
        """Return whether the buffers of all ranks are used: x is small, in whole words of 16
        bytes."""
        num_bytes = x.numel() * x.itemsize
        most = SHARED_GPU_BYTES if self._shares_gpu else SMALL_BYTES
        types = (torch.bfloat16, torch.float32)
        return 0 < num_bytes <= most and num_bytes % 16 == 0 and x.dtype in types


def _why_not(step: Callable[[], None]) -> str | None:
    """Run `step`, a part of sharing memory; return the text of its ImportError or RuntimeError, or
    None.

    Lack of memory is raised.
    """
    try:
        step()
    except torch.OutOfMemoryError:
        raise  # a lack of memory is an error, and no reason to use another way
    except (ImportError, RuntimeError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None
