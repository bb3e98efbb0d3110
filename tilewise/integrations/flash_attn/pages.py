"""Keys in pages, and the rows of a cache viewed as pages, without a copy if possible.

A cache (Bc, S, Hk, D) is a paged cache whose blocks are slices of its rows: only strides change.
Block sizes are powers of two, so that the kernels are compiled for few sizes, and 1 if sequences
start in the middle of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.integrations.flash_attn.rule import CHANNELS, Rule
from tilewise.ops import checks

MAX_BLOCK = 256  # the page size of flash-attn; a multiple of every tile of keys
# largest head dim of paged_attention on a GPU; wider heads use the dense kernels
MAX_HEAD_DIM = 256


class RowBlocks(NamedTuple):
    """The rows of two caches as blocks of tokens.

    Attributes:
        k, v: views (num_blocks, block_size, Hk, D) and (..., Dv) of the caches.
        period: the number of token slots from the start of a row to the start of the next in the
            views.
    """

    k: Tensor
    v: Tensor
    period: int


def row_blocks(k_cache: Tensor, v_cache: Tensor, *, single: bool = False) -> RowBlocks | None:
    """View caches (Bc, S, Hk, D) and (Bc, S, Hk, Dv) as blocks that slices of their rows fill.

    Args:
        k_cache, v_cache: the caches, which are viewed and not copied.
        single: True for blocks of one token, so that a sequence may start anywhere; otherwise
            blocks are as large as S allows, up to MAX_BLOCK.

    Returns:
        The views, or None if the strides allow only whole rows as blocks.
    """
    num_rows, capacity = k_cache.shape[:2]
    periods = {_period(cache) for cache in (k_cache, v_cache)}
    period = periods.pop()
    if periods or period is None:
        return None
    size = 1 if single else MAX_BLOCK
    while period % size or capacity % size:  # this is math.gcd, which torch.compile cannot trace
        size //= 2
    num_blocks = ((num_rows - 1) * period + capacity) // size if num_rows else 0

    def sliced(cache: Tensor) -> Tensor:
        _, token, head, _ = cache.stride()
        return cache.as_strided(
            (num_blocks, size, *cache.shape[2:]), (size * token, token, head, 1)
        )

    return RowBlocks(sliced(k_cache), sliced(v_cache), period)


def _period(cache: Tensor) -> int | None:
    """Return the distance between the starts of two rows of `cache` (Bc, S, ...), in tokens.

    None if the strides give no whole number of at least S.
    """
    num_rows, capacity = cache.shape[:2]
    row, token = cache.stride()[:2]
    if num_rows <= 1 or capacity <= 1:
        return capacity if num_rows <= 1 else None
    if token == 0 or row % token or row // token < capacity:
        return None
    return row // token


def check_block_table(block_table: Tensor, batch: int, k: Tensor, v: Tensor) -> None:
    """Raise ValueError or TypeError unless block_table is int32 (batch, max_blocks) on k's device,
    and k and v are pages (num_blocks, block_size, Hk, D) and (..., Dv)."""
    checks.check_dims("block_table", block_table, "(B, max_blocks)")
    checks.check_int32("block_table", block_table, (batch, block_table.shape[1]), k.device)
    for name, pages in (("k", k), ("v", v)):
        checks.check_dims(name, pages, "(num_blocks, block_size, Hk, D)")
    checks.check_shape("v", v, (*k.shape[:3], v.shape[3]))


def can_page(rule: Rule, k: Tensor, v: Tensor, max_seqlen_q: int) -> bool:
    """Return whether `paged_attention` supports a call with this rule, these caches and run length.

    It needs no dropout, slopes of a head, causality or one query, head dims that are multiples of 8
    up to 256, and a contiguous last dim.
    """
    widths = (k.shape[-1], v.shape[-1])
    return (
        rule.dropout_p == 0
        and (rule.alibi_slopes is None or rule.alibi_slopes.dim() == 1)
        and (rule.window[1] == 0 or max_seqlen_q <= 1)  # the last query has no keys to its right
        and all(width % CHANNELS == 0 and width <= MAX_HEAD_DIM for width in widths)
        and all(cache.stride(-1) == 1 for cache in (k, v))
    )


def paged_options(rule: Rule) -> dict[str, Any]:
    """Return the arguments of paged_attention for a rule that it supports."""
    left = rule.window[0]
    return {
        "softmax_scale": rule.softmax_scale,
        "window": None if left < 0 else left + 1,  # that window counts the query's own key
        "softcap": rule.softcap,
        "alibi_slopes": rule.alibi_slopes,
    }


def gather_pages(pages: Tensor, block_table: Tensor) -> Tensor:
    """Copy the pages of each sequence end to end: (B, max_blocks * block_size, Hk, D).

    Entries of the table after a sequence's blocks may be any number; they are clamped, and give
    arbitrary rows after the end of the sequence.
    """
    return pages[block_table.clamp(0, pages.shape[0] - 1).long()].flatten(1, 2)


def pack_pages(
    pages: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int
) -> Tensor:
    """Copy the keys of each sequence out of its pages, packed: (B * max_seqlen_k, Hk, D).

    Rows from cu_seqlens_k[B] on belong to no sequence and are 0: only the device knows how many
    there are. Differentiable in `pages`. On a GPU, where values are not checked, an index outside
    of the table or of the pages is replaced by a valid one.
    """
    batch, block_size = block_table.shape[0], pages.shape[1]
    most = block_table.shape[1] * block_size
    starts = cu_seqlens_k.long()
    row = torch.arange(batch * max_seqlen_k, device=pages.device)
    sequence = torch.searchsorted(starts[1:], row, right=True).clamp(max=max(batch - 1, 0))
    owned = row < starts[-1]
    position = torch.where(owned, row - starts[sequence], 0).clamp(0, most - 1)
    block = torch.where(owned, block_table[sequence, position // block_size], 0)
    block = block.clamp(0, pages.shape[0] - 1).long()
    return torch.where(owned.view(-1, 1, 1), pages[block, position % block_size], 0)
