"""The collectives of a model that is cut into shards: sums and concatenations over its ranks.

On a CPU a sum is gathered and added in the order of the ranks, so that its bits depend neither on
how many rows come at once nor on the rank that asks. On GPUs small sums are one kernel that reads
the buffers of all ranks (torch's symmetric memory, without multicast), large ones NCCL's; both may
be captured in a CUDA graph. Rows of one model's width add up in inboxes (`distributed.inbox`), and
are normalised there. Ranks that share one GPU, which NCCL refuses, also gather through buffers, and
what these do not hold goes through main memory.
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

# Bytes up to which each rank reads the buffers of all others: every rank reads size - 1 times the
# message where a ring reads about twice, but waits twice in place of 2 (size - 1) times. Not yet
# measured here; 256 KiB is 16 rows of a hidden size of 8,192 in 16 bits.
SMALL_BYTES = 256 << 10
# The same where ranks share a GPU: what is larger cannot be captured in a graph.
SHARED_GPU_BYTES = 64 << 20


class ShardGroup:
    """The ranks that hold the shards of one model.

    Args:
        rank, size: which of how many.
        device: of the tensors.
        group: of torch.distributed; None is the default one. Unused when `size` is 1.

    Attributes:
        num_calls: collectives so far, by which others see that a step goes on.
        inbox: where few rows add up, once `open_inbox` has made it.
        why_no_inbox: why there is none.
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
        self._memory: Any = None  # the buffers of all ranks, where the ranks share a GPU

    @property
    def why_no_symmetric_memory(self) -> str | None:
        """Why small sums are NCCL's, too; None where they are not."""
        return self._refusal

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this rank compute as if all others gave what it gives, and wait for none.

        For steps whose kernels are noted and not run (`kernels.host.requests`).
        """
        self._is_alone, calls = True, self.num_calls
        try:
            yield
        finally:
            self._is_alone, self.num_calls = False, calls

    def meet(self) -> None:
        """Make the connections; a rank that cannot reach the others fails here, not in a step."""
        if self.size == 1:
            return
        self._shares_gpu = goes_through_host(self.group, self.device)
        self.stack(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            if not self._shares_gpu:
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
            self._refusal = self._share_buffer()

    def open_inbox(self, dim: int, dtype: torch.dtype, *, deals: bool) -> None:
        """Make an inbox for rows of so many numbers; all ranks call it, with the same arguments.

        Args:
            dim, dtype: of the rows.
            deals: see `Inbox`.

        Raises:
            torch.OutOfMemoryError: there is no room for it here. The others wait for this rank
                until it has ended.
        """
        if self.size == 1 or self.device.type != "cuda":
            self.why_no_inbox = "there is one rank" if self.size == 1 else "there is no GPU"
            return
        refusal = self._refusal or inboxes.why_not(dim, dtype, self.size)
        if self._shares_gpu:
            # A kernel that waits for another rank's would keep it from the GPU.
            refusal = "ranks share a GPU"
        count = inboxes.inbox_words(dim, dtype.itemsize, self.size, deals=deals)
        addresses: list[int] = []
        if refusal is None:
            refusal = self._agreed(_why_not(lambda: self._allocate_inbox(count)))
        if refusal is None:
            refusal = self._agreed(_why_not(lambda: addresses.extend(self._addresses(count))))
        self.why_no_inbox = refusal
        if refusal is None:  # all have agreed, so all inboxes are zeros
            self.inbox = Inbox(self.rank, addresses, dim, dtype, self.device, deals=deals)

    def _allocate_inbox(self, count: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        # Kept: what others write to goes with the tensor that it was allocated for.
        self._own_inbox = symmetric.empty(count, dtype=torch.int64, device=self.device)
        self._own_inbox.zero_()
        torch.cuda.synchronize(self.device)

    def _addresses(self, count: int) -> list[int]:
        """Return where each rank's inbox begins, as this device writes there."""
        from torch.distributed import _symmetric_memory as symmetric

        assert self.group is not None
        assert self._own_inbox is not None
        memory = symmetric.rendezvous(self._own_inbox, self.group.group_name)
        self._inboxes = [memory.get_buffer(r, (count,), torch.int64) for r in range(self.size)]
        self._inbox_memory = memory
        return [x.data_ptr() for x in self._inboxes]

    def adds_rows(self, rows: int, dtype: torch.dtype, dim: int | None = None) -> bool:
        """Whether so many rows, of the model's width unless told, add up in inboxes."""
        if self.inbox is None:
            return False
        return self.inbox.takes(rows, self.inbox.dim if dim is None else dim, dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, parts: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of the sum of all ranks' x + residual, and that: `Inbox.add_rms_norm`."""
        self.num_calls += 1
        assert self.inbox is not None
        return self.inbox.add_rms_norm(x, residual, weight, eps, parts=parts)

    def embed(self, table: Tensor, ids: Tensor, rows: tuple[int, int]) -> Tensor:
        """Return the rows of an embedding that all ranks share: `Inbox.embed`."""
        self.num_calls += 1
        assert self.inbox is not None
        return self.inbox.embed(table, ids, rows)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks, of its dtype; `x` may be written to."""
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
        """Return the last dims of all ranks one after another: (..., n) -> (..., size * n)."""
        self.num_calls += 1
        if self.size == 1:
            return x
        parts = self.stack(x)
        return parts.movedim(0, -2).flatten(-2)

    def stack(self, x: Tensor) -> Tensor:
        """Return `x` of all ranks, (size, ...)."""
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
        """Read the others' buffers; through main memory where they do not hold it."""
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
        """Return why not where any rank has a reason: all must add up in the same way."""
        # Not through the buffers, which a rank that refuses does not have: it would be waited for.
        memory, self._memory = self._memory, None
        refused = self.stack(torch.tensor([float(refusal is not None)], device=self.device))
        if not refused.any():
            self._memory = memory
            return None
        ranks = ", ".join(str(rank) for rank in refused.flatten().nonzero().flatten().tolist())
        return refusal or f"rank {ranks} cannot"

    def _share_buffer(self) -> str | None:
        """Make the buffer that other ranks read; return why not, or None, on all ranks alike.

        Raises:
            torch.OutOfMemoryError: there is no room for it here. The others wait for this rank
                until it has ended.
        """
        os.environ.update(MULTICAST_OFF)
        if self._shares_gpu:
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        # Who has no buffer does not come to the rendezvous, where the others would wait for ever.
        refusal = self._agreed_on_buffer(_why_not(self._allocate))
        if refusal is None:
            refusal = self._agreed_on_buffer(_why_not(self._open))
        return refusal

    def _agreed_on_buffer(self, refusal: str | None) -> str | None:
        """Likewise; a rank forgets its buffer where any rank has a reason."""
        refusal = self._agreed(refusal)
        if refusal is not None:
            self._buffer = None
        return refusal

    def _allocate(self) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        room = SHARED_GPU_BYTES if self._shares_gpu else SMALL_BYTES
        self._buffer = symmetric.empty(room, dtype=torch.uint8, device=self.device)

    def _open(self) -> None:
        """Let the ranks read one another's buffers."""
        from torch.distributed import _symmetric_memory as symmetric

        assert self.group is not None
        assert self._buffer is not None
        memory = symmetric.rendezvous(self._buffer, self.group.group_name)
        if self._shares_gpu:
            self._memory = memory

    def _is_small(self, x: Tensor) -> bool:
        """Whether the buffers of all ranks are read: small, and in whole words of 16 bytes."""
        num_bytes = x.numel() * x.itemsize
        most = SHARED_GPU_BYTES if self._shares_gpu else SMALL_BYTES
        types = (torch.bfloat16, torch.float32)
        return 0 < num_bytes <= most and num_bytes % 16 == 0 and x.dtype in types


def _why_not(step: Callable[[], None]) -> str | None:
    """Do a part of sharing a buffer; return why GPUs cannot read one another's memory, or None."""
    try:
        step()
    except torch.OutOfMemoryError:
        raise  # nothing works without memory: this is an error, and no reason to do without
    except (ImportError, RuntimeError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None
