"""The rows and keys of a program of `rows`, found on the device from lengths alone.

what     work items of the rows kernel: (sequence, tile of its rows, split of its keys)
grid     none: these functions are inlined
program  reads all lengths, TILE_B sequences at a time, twice if keys are split: for the total work,
         then for the position of its own part
traffic  8 bytes a sequence, from L2
numerics integers
"""

import triton
import triton.language as tl

from tilewise.kernels.triton.paged.keys import cached_keys, run_of
from tilewise.kernels.triton.visible import key_tile_range


@triton.jit
def find_tile(
    cu_seqlens_q_ptr,
    tile,
    num_seqs,
    num_tokens,
    min_run,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_B: tl.constexpr,
):
    """Return the sequence of a tile of rows, and the tile's number in it; sequence B past the last.

    Args:
        tile: the number of the tile over all sequences.
        min_run: sequences with fewer rows have no tiles.
    """
    found = 0
    first_tile = 0
    tiles_before = 0
    for base in range(0, num_seqs, TILE_B):
        seq = base + tl.arange(0, TILE_B)
        _, run = run_of(cu_seqlens_q_ptr, seq, seq < num_seqs, num_tokens)
        tiles = (run * GROUP + TILE_M - 1) // TILE_M
        tiles = tl.where(run >= min_run, tiles, 0)
        ends = tiles_before + tl.cumsum(tiles, 0)
        passed = (ends <= tile) & (seq < num_seqs)
        found += tl.sum(passed.to(tl.int32))
        first_tile = tl.maximum(first_tile, tl.max(tl.where(passed, ends, 0)))
        tiles_before = tl.max(ends)
    return found, tile - first_tile


@triton.jit
def _tiles_of(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    skipped_ptr,
    seq,
    num_seqs,
    num_tokens,
    max_keys,
    min_run,
    GROUP: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_SKIPPED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Return the number of tiles of rows, and of keys, of each of the sequences `seq`.

    A run shorter than min_run has 0 tiles of rows; tiles of keys are at least 1. With HAS_SKIPPED
    the keys that a sequence's groups read for it are not counted.
    """
    inside = seq < num_seqs
    _, run = run_of(cu_seqlens_q_ptr, seq, inside, num_tokens)
    seqlen_k = cached_keys(seqlens_k_ptr, seq, inside, max_keys)
    _, key_tiles = key_tile_range(seqlen_k, run, WINDOW_LEFT, TILE_N)
    if HAS_SKIPPED:
        key_tiles -= cached_keys(skipped_ptr, seq, inside, max_keys) // TILE_N
    row_tiles = tl.where(inside & (run >= min_run), (run * GROUP + TILE_M - 1) // TILE_M, 0)
    return row_tiles, tl.maximum(key_tiles, 1)


@triton.jit
def find_item(
    seqlens_k_ptr,
    cu_seqlens_q_ptr,
    skipped_ptr,
    item,
    num_seqs,
    num_tokens,
    max_keys,
    min_run,
    target_items,
    split_tiles,
    GROUP: tl.constexpr,
    WINDOW_LEFT: tl.constexpr,
    HAS_SKIPPED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_B: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Return the position of an item: (sequence, item within it, its splits, part, tile, all
    tiles).

    A sequence's splits have split_tiles key tiles each, or more if that is needed to keep all items
    within target_items plus one for each tile of rows. Items of a sequence are ordered split after
    split, tile after tile. `part` and `tile` count the results to be merged that come before the
    sequence: items, and tiles of rows, of sequences with several splits; with ADDS of all
    sequences. `all tiles` is their total. Sequence = B after the last item.
    """
    total = 0
    for base in range(0, num_seqs, TILE_B):
        row_tiles, key_tiles = _tiles_of(
            seqlens_k_ptr,
            cu_seqlens_q_ptr,
            skipped_ptr,
            base + tl.arange(0, TILE_B),
            num_seqs,
            num_tokens,
            max_keys,
            min_run,
            GROUP,
            WINDOW_LEFT,
            HAS_SKIPPED,
            TILE_M,
            TILE_N,
        )
        total += tl.sum(row_tiles * key_tiles)
    split_tiles = tl.maximum(split_tiles, (total + target_items - 1) // target_items)
    found = 0
    num_splits = 1
    items_before = 0
    first_item = 0
    first_part = 0
    first_tile = 0
    num_tiles = 0
    for base in range(0, num_seqs, TILE_B):
        seq = base + tl.arange(0, TILE_B)
        row_tiles, key_tiles = _tiles_of(
            seqlens_k_ptr,
            cu_seqlens_q_ptr,
            skipped_ptr,
            seq,
            num_seqs,
            num_tokens,
            max_keys,
            min_run,
            GROUP,
            WINDOW_LEFT,
            HAS_SKIPPED,
            TILE_M,
            TILE_N,
        )
        splits = (key_tiles + split_tiles - 1) // split_tiles
        items = row_tiles * splits
        ends = items_before + tl.cumsum(items, 0)
        passed = (ends <= item) & (seq < num_seqs)
        merged = splits > (0 if ADDS else 1)
        found += tl.sum(passed.to(tl.int32))
        first_item = tl.maximum(first_item, tl.max(tl.where(passed, ends, 0)))
        first_part += tl.sum(tl.where(passed & merged, items, 0))
        first_tile += tl.sum(tl.where(passed & merged, row_tiles, 0))
        num_tiles += tl.sum(tl.where(merged, row_tiles, 0))
        owns = (ends > item) & (ends - items <= item)
        num_splits = tl.maximum(num_splits, tl.max(tl.where(owns, splits, 1)))
        items_before = tl.max(ends)
    return found, item - first_item, num_splits, first_part, first_tile, num_tiles
