"""Sums of few rows over the GPUs of one host: each rank writes into the inboxes of all others.

One kernel adds up the parts, adds the residual stream and normalises (`ops.shared_sum`). The
inboxes lie in symmetric memory, which every GPU of the group can write; NVLink multicast is not
used. CUDA graphs that contain sums may be replayed in any order that is the same on all ranks,
since the number of sums so far is counted on the devices. Few rows are sent in words that contain
the number of their sum, more rows as plain data with flags beside them. An inbox has a part for
each form that its model may send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.ops import shared_sum

__all__ = [
    "FLAGGED_BYTES",
    "MOST_BYTES",
    "MOST_ROWS",
    "ONE_SHOT_ROWS",
    "Inbox",
    "inbox_words",
    "why_not",
]

MOST_ROWS = 256  # largest number of rows of a sum, for which an inbox has room
# Number of ranks -> bytes of a sum that may be sent in words if it has no flags (see below). Larger
# sums use NCCL, those of other numbers of ranks torch's symmetric memory or NCCL. On H100s a step
# of Llama-3-8B's shape, 256 rows, 2 MiB, takes 11.4 ms instead of 12.7 on two GPUs, 8.8 instead of
# 7.9 on four; a step of 70B's on four with 32 rows, 512 KiB, 18.7 instead of 19.0, and with 128
# rows 33.9 instead of 24.5 (2026-11-27, lab/results/tensor_parallel_h100.json).
MOST_BYTES = {2: 2 << 20, 4: 512 << 10}
# Number of ranks -> rows up to which every rank gets all parts; of more rows each rank adds up its
# share. On four GPUs both take as long up to 32 rows; 256 rows take 9.5 and 8.8 ms a step (the same
# file).
ONE_SHOT_ROWS = {2: 256, 4: 32}
# Number of ranks -> bytes of a sum above which, and up to which, rows are sent with flags. On H200s
# such a sum with its norm takes, for 512 KiB, 1 and 2 MiB, 7.2, 8.7, 12.0 us on two GPUs and 9.0,
# 11.3, 15.8 on four; all rows in words to each rank take 6.2, 9.2, 16.3 and 16.3, 30.1, 53.3, NCCL
# 12.9 to 30.6 and 16.9 to 30.8 (2026-11-27, lab/results/tensor_parallel_flags_h200.json).
FLAGGED_BYTES = {2: (768 << 10, 4 << 20), 4: (256 << 10, 4 << 20)}


def inbox_words(dim: int, itemsize: int, size: int, *, deals: bool) -> int:
    """Return the number of 8-byte words of a rank's inbox for rows of `dim` elements of `itemsize`
    bytes.

    `size` is the number of ranks; `deals` as in `Inbox`.
    """
    if not deals:  # there is no second round of messages
        return 2 * _most_rows(size, deals) * size * _row_words(dim, itemsize)
    flagged = shared_sum.flagged_words(dim, itemsize, MOST_ROWS)
    return _first_flagged(dim, itemsize, size) + flagged


def _most_rows(size: int, deals: bool) -> int:
    return MOST_ROWS if deals else min(MOST_ROWS, ONE_SHOT_ROWS[size])


def _first_flagged(dim: int, itemsize: int, size: int) -> int:
    """Return the number of words in an inbox before its part for rows with flags."""
    return 2 * MOST_ROWS * (size + 1) * _row_words(dim, itemsize)


def _row_words(dim: int, itemsize: int) -> int:
    return dim * itemsize // 4  # each word contains four bytes of data


def why_not(dim: int, dtype: torch.dtype, size: int) -> str | None:
    """Return why rows of `dim` elements cannot be added up in inboxes of `size` ranks; None if they
    can."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"rows must be 16 or 32 bits wide, got {dtype}"
    if dim % 8:
        return f"rows must be a multiple of 8 long, got {dim}"
    if size not in ONE_SHOT_ROWS:
        return f"ranks must be {', '.join(map(str, ONE_SHOT_ROWS))}, got {size}"
    return shared_sum.why_not(size * _row_words(dim, dtype.itemsize))


class Inbox:
    """One rank's inbox, and the addresses of the other ranks' inboxes.

    Args:
        rank: the index of this rank.
        addresses: the address of each rank's inbox of `inbox_words` words, all zeros, as this
            device writes to it.
        dim, dtype: the width and dtype of the rows.
        device: the device of the tensors; on a CPU kernels run in Triton's interpreter.
        deals: True if each rank may add up a share of the rows. All sums of a model must then have
            a norm after them, or no sum of a step has one.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deals: bool,
    ) -> None:
        self.rank, self.size, self.dim, self.dtype = rank, len(addresses), dim, dtype
        self.deals = deals
        self.one_shot_rows = ONE_SHOT_ROWS[self.size]
        self.flagged_bytes = FLAGGED_BYTES[self.size]
        self._addresses = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        most_rows = _most_rows(self.size, deals)
        self._epochs = torch.zeros(most_rows, dtype=torch.int32, device=device)
        if deals:
            self._flagged = self._addresses + 8 * _first_flagged(dim, dtype.itemsize, self.size)
            self._group_epochs = self._epochs.new_zeros(MOST_ROWS // self.size)

    def takes(self, rows: int, dim: int, dtype: torch.dtype) -> bool:
        """Return whether `rows` rows of this width and dtype can be added up in inboxes."""
        if rows <= 0 or dim != self.dim or dtype != self.dtype:
            return False
        most = len(self._epochs) if self.deals else min(len(self._epochs), self.one_shot_rows)
        is_small = rows <= most and rows * dim * dtype.itemsize <= MOST_BYTES[self.size]
        return is_small or self.has_flags(rows)

    def has_flags(self, rows: int) -> bool:
        """Return whether sums of `rows` rows are sent as plain data with flags beside them, not in
        words."""
        above, most = self.flagged_bytes
        fits = above < rows * self.dim * self.dtype.itemsize <= most and rows <= MOST_ROWS
        return fits and self.deals

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, parts: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of (the sum of x over all ranks + residual), and that sum, both (...,
        E).

        All ranks must call it. The second result may be valid only in the rows that this rank adds
        up; it is to be used only as the residual of another such call with as many rows.

        Args:
            x: (..., E), or with `parts` float32 (P, ..., E), the partial sums of a product.
            residual: (..., E).
            weight: (E,), the weight of the norm.
            eps: the number added to the mean square.
            parts: P, the number of partial sums; 0 if x has no such dim.
        """
        rows = residual.reshape(-1, self.dim)
        y, total = torch.empty_like(rows), torch.empty_like(rows)
        x = x.reshape(*x.shape[:1], -1, self.dim) if parts else x.reshape(-1, self.dim)
        self._launch(x, rows, weight, eps, y, total, parts)
        return y.view(residual.shape), total.view(residual.shape)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x (..., E) over all ranks, a new tensor; all ranks must call it."""
        rows = x.reshape(-1, self.dim)
        total = torch.empty_like(rows)
        self._launch(rows, None, None, 0.0, total, total, 0)
        return total.view(x.shape)

    def embed(self, table: Tensor, ids: Tensor, rows: tuple[int, int]) -> Tensor:
        """Return the embeddings (..., E) of `ids`, of which each rank has the rows of some tokens.

        All ranks must call it with the same ids; each gets the whole result.

        Args:
            table: (n, E), the rank's rows of the embedding; row 0 is that of token rows[0].
            ids: (...,) int64.
            rows: the range of the rank's tokens, the last not included.
        """
        total = table.new_empty(ids.numel(), self.dim)
        self._launch(table, None, None, 0.0, total, total, 0, ids.reshape(-1), rows)
        return total.view(*ids.shape, self.dim)

    def _launch(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        y: Tensor,
        total: Tensor,
        parts: int,
        ids: Tensor | None = None,
        rows: tuple[int, int] = (0, 0),
    ) -> None:
        if self.has_flags(len(total)):
            shared_sum.add_up_flagged(
                x,
                residual,
                weight,
                eps,
                y,
                total,
                inboxes=self._flagged,
                epochs=self._group_epochs,
                rank=self.rank,
                size=self.size,
                most_rows=MOST_ROWS,
                parts=parts,
                ids=ids,
                first=rows[0],
                end=rows[1],
            )
            return
        shared_sum.add_up(
            x,
            residual,
            weight,
            eps,
            y,
            total,
            inboxes=self._addresses,
            epochs=self._epochs,
            rank=self.rank,
            size=self.size,
            is_dealt=len(total) > self.one_shot_rows,
            parts=parts,
            ids=ids,
            first=rows[0],
            end=rows[1],
        )
