"""Two layouts of a cache (pages and rows) behind one interface.

A place is a number that write_kv_cache and paged_attention understand: block * block_size + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.integrations.flash_attn.chunks import Span
from tilewise.integrations.flash_attn.pages import RowBlocks, gather_pages, row_blocks

Blocks = tuple[Tensor, Tensor, Tensor]  # k and v (num_blocks, block_size, H, D), block_table


class PagedCache:
    """A cache of pages k (num_blocks, block_size, Hk, D) and v, found through a block table (B,
    max_blocks).

    One call of `flash_attn_with_kvcache` makes it; it has the methods of `RowCache`.

    Args:
        leftpad: int32 (B,), the number of slots before the first token of each sequence; 0 when
            None.

    Attributes:
        capacity: the number of token slots of a sequence, padding included.
    """

    def __init__(
        self, k: Tensor, v: Tensor, block_table: Tensor, leftpad: Tensor | None = None
    ) -> None:
        self.k, self.v, self.block_table, self.leftpad = k, v, block_table, leftpad
        self.capacity = k.shape[1] * block_table.shape[1]

    def writable(self) -> tuple[Tensor, Tensor]:
        """Return k and v as blocks (num_blocks, block_size, Hk, D), to which the numbers of
        `places` refer."""
        return self.k, self.v

    def places(self, positions: Tensor) -> Tensor:
        """Return block * block_size + offset of positions (B, n) in each sequence, int64 (B, n).

        Each position must be below the capacity.
        """
        size = self.k.shape[1]
        return self.block_table.gather(1, positions // size).long() * size + positions % size

    def lengths(self, seqlens: Tensor) -> Tensor:
        """Return the numbers of keys (B,) of sequences that end at seqlens (B,): seqlens - leftpad,
        at least 0."""
        return seqlens if self.leftpad is None else (seqlens - self.leftpad).clamp(min=0)

    def blocks(self, span: Span | None = None) -> Blocks | None:
        """Return k and v blocks and a block table, as `paged_attention` takes them, of all keys or
        of a span.

        The table is (B, n), or (P, n) for the P pieces of `span`; without one it covers all keys
        after the leftpad. None if keys start inside of blocks and the memory cannot be viewed as
        blocks of one token.
        """
        span = self._span() if span is None else span
        if span is None:
            return self.k, self.v, self.block_table
        size, table = self.k.shape[1], self.block_table
        if span.step % size == 0:
            columns = torch.arange(-(-span.most // size), device=table.device)
            columns = span.first.view(-1, 1) // size + columns
            rows = table[span.sequence.view(-1, 1), columns.clamp(max=table.shape[1] - 1)]
            return self.k, self.v, rows
        tokens = row_blocks(self.k, self.v, single=True)
        if tokens is None or self.capacity == 0:
            return None
        at = self._positions(span)
        first = table[span.sequence.view(-1, 1), at // size] * tokens.period
        return tokens.k, tokens.v, (first + at % size).to(torch.int32)

    def dense(self, span: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return copies (B, n, Hk, D) of all keys and values after the leftpad, or (P, n, Hk, D) of
        a span.

        Rows after the end of a sequence or piece are arbitrary.
        """
        span = self._span() if span is None else span
        if span is None:
            return gather_pages(self.k, self.block_table), gather_pages(self.v, self.block_table)
        at, size = self._positions(span), self.k.shape[1]
        block = self.block_table[span.sequence.view(-1, 1), at // size].clamp(min=0).long()
        return self.k[block, at % size], self.v[block, at % size]

    def _span(self) -> Span | None:
        if self.leftpad is None:
            return None
        sequence = torch.arange(len(self.leftpad), device=self.leftpad.device)
        return Span(sequence, self.leftpad, self.capacity, 1)

    def _positions(self, span: Span) -> Tensor:
        at = span.first.view(-1, 1) + torch.arange(span.most, device=span.first.device)
        return at.clamp(max=max(self.capacity - 1, 0))


class RowCache:
    """A cache of rows k (Bc, S, Hk, D) and v, one row for each sequence.

    One call of `flash_attn_with_kvcache` makes it; it has the methods of `PagedCache`.

    Args:
        batch: B, the number of sequences.
        batch_idx: int32 (B,), the row of each sequence; row b when None.
        leftpad: int32 (B,), the start of each sequence in its row; 0 when None.
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
        """Return k and v as blocks (num_blocks, block_size, Hk, D), to which the numbers of
        `places` refer."""
        return self.view.k, self.view.v

    def places(self, positions: Tensor) -> Tensor:
        """Return block * block_size + offset of positions (B, n) in each sequence's row, int64 (B,
        n).

        Each position must be below the capacity.
        """
        return self.rows.long().view(-1, 1) * self.view.period + positions

    def lengths(self, seqlens: Tensor) -> Tensor:
        """Return the numbers of keys (B,) of sequences that end at seqlens (B,): seqlens - leftpad,
        at least 0."""
        return seqlens if self.leftpad is None else (seqlens - self.leftpad).clamp(min=0)

    def blocks(self, span: Span | None = None) -> Blocks | None:
        """Return k and v blocks and a block table, as `paged_attention` takes them, of all keys or
        of a span.

        The blocks are views. The table is (B, n), or (P, n) for the P pieces of `span`. None if the
        cache is empty or its strides allow no block that starts where the keys do.
        """
        if not self.has_blocks:
            return None
        k, v, period = self.view
        size = k.shape[1]
        if size == 0 or self.capacity == 0:
            return None
        if span is not None:
            if span.step % size:
                tokens = row_blocks(self.k, self.v, single=True)
                if tokens is None:
                    return None
                (k, v, period), size = tokens, 1
            first = (self.rows[span.sequence] * period + span.first) // size
            columns = torch.arange(-(-span.most // size), dtype=torch.int32, device=k.device)
            return k, v, (first.view(-1, 1) + columns).to(torch.int32)
        first = self.rows * (period // size)
        if self.leftpad is not None:
            first = first + self.leftpad
        columns = torch.arange(self.capacity // size, dtype=torch.int32, device=k.device)
        return k, v, first.view(-1, 1) + columns

    def dense(self, span: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return all keys and values after the leftpad, (B, n, Hk, D), or those of a span, (P, n,
        Hk, D).

        They are views where nothing needs to be gathered, else copies. Rows after the end of a
        sequence or piece are arbitrary.
        """
        if span is not None:
            at = span.first.view(-1, 1) + torch.arange(span.most, device=self.k.device)
            at, rows = at.clamp(max=max(self.capacity - 1, 0)), self.rows[span.sequence].view(-1, 1)
            return self.k[rows, at], self.v[rows, at]
        if self.leftpad is not None:
            tokens = torch.arange(self.capacity, device=self.k.device)
            places = (self.leftpad.view(-1, 1) + tokens).clamp(max=max(self.capacity - 1, 0))
            rows = self.rows.view(-1, 1)
            return self.k[rows, places], self.v[rows, places]
        if self.batch_idx is not None:
            return self.k.index_select(0, self.batch_idx), self.v.index_select(0, self.batch_idx)
        return self.k[: self.batch], self.v[: self.batch]
