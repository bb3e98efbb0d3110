"""Where the tokens of a cache lie: two kinds of cache behind one set of questions.

A place is a number that write_kv_cache and paged_attention understand: block * block_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.integrations.flash_attn.pages import RowBlocks, gather_pages, row_blocks

Blocks = tuple[Tensor, Tensor, Tensor]  # k and v (num_blocks, block_size, H, D), block_table


class PagedCache:
    """Pages k (num_blocks, block_size, Hk, D) and v, found through a block table (B, max_blocks).

    Attributes:
        capacity: tokens that a sequence can have.
    """

    def __init__(self, k: Tensor, v: Tensor, block_table: Tensor) -> None:
        self.k, self.v, self.block_table = k, v, block_table
        self.capacity = k.shape[1] * block_table.shape[1]

    def writable(self) -> tuple[Tensor, Tensor]:
        """The caches in whose blocks `places` counts."""
        return self.k, self.v

    def places(self, positions: Tensor) -> Tensor:
        """Where positions (B, n) lie, int64; each must be below the capacity."""
        size = self.k.shape[1]
        return self.block_table.gather(1, positions // size).long() * size + positions % size

    def lengths(self, seqlens: Tensor) -> Tensor:
        """Keys of sequences that end at seqlens (B,)."""
        return seqlens

    def blocks(self) -> Blocks:
        """What paged_attention reads."""
        return self.k, self.v, self.block_table

    def dense(self) -> tuple[Tensor, Tensor]:
        """Copies (B, capacity, Hk, D) of the keys and values."""
        return gather_pages(self.k, self.block_table), gather_pages(self.v, self.block_table)


class RowCache:
    """Rows k (Bc, S, Hk, D) and v, one for each sequence.

    Args:
        batch: B.
        batch_idx: int32 (B,), the row of each sequence; row b when None.
        leftpad: int32 (B,), where in its row each sequence starts; 0 when None.
    """

    def __init__(
        self, k: Tensor, v: Tensor, batch: int, batch_idx: Tensor | None, leftpad: Tensor | None
    ) -> None:
        self.k, self.v, self.batch = k, v, batch
        self.capacity = k.shape[1]
        self.batch_idx, self.leftpad = batch_idx, leftpad
        if batch_idx is None:
            self.rows = torch.arange(batch, dtype=torch.int32, device=k.device)
        else:
            self.rows = batch_idx
        sliced = row_blocks(k, v, single=leftpad is not None)
        self.has_blocks = sliced is not None or leftpad is None
        self.view = RowBlocks(k, v, self.capacity) if sliced is None else sliced

    def writable(self) -> tuple[Tensor, Tensor]:
        """The caches in whose blocks `places` counts."""
        return self.view.k, self.view.v

    def places(self, positions: Tensor) -> Tensor:
        """Where positions (B, n) of the rows lie, int64; each must be below the capacity."""
        return self.rows.long().view(-1, 1) * self.view.period + positions

    def lengths(self, seqlens: Tensor) -> Tensor:
        """Keys of sequences that end at seqlens (B,), the padding not counted."""
        return seqlens if self.leftpad is None else (seqlens - self.leftpad).clamp(min=0)

    def blocks(self) -> Blocks | None:
        """What paged_attention reads; None where no block could start at a sequence's start."""
        if not self.has_blocks:
            return None
        k, v, period = self.view
        size = k.shape[1]
        if size == 0 or self.capacity == 0:
            return None
        first = self.rows * (period // size)
        if self.leftpad is not None:
            first = first + self.leftpad
        columns = torch.arange(self.capacity // size, dtype=torch.int32, device=k.device)
        return k, v, first.view(-1, 1) + columns

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, capacity, Hk, D) from each sequence's start on; copies if need be."""
        if self.leftpad is not None:
            tokens = torch.arange(self.capacity, device=self.k.device)
            places = (self.leftpad.view(-1, 1) + tokens).clamp(max=max(self.capacity - 1, 0))
            rows = self.rows.view(-1, 1)
            return self.k[rows, places], self.v[rows, places]
        if self.batch_idx is not None:
            return self.k.index_select(0, self.batch_idx), self.v.index_select(0, self.batch_idx)
        return self.k[: self.batch], self.v[: self.batch]
