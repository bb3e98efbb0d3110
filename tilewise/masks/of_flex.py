"""Masks of torch's flex_attention, as masks of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.masks import arguments, tile_map
from tilewise.masks.arguments import Device, Tile
from tilewise.masks.block_mask import BlockMask, from_tile_map
from tilewise.masks.eager import eager
from tilewise.masks.tile_map import EMPTY, FULL, BitTiles, Bools, Ints, TileMap

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@eager
def from_flex(mask: Any, *, tile: Tile = 128, device: Device = None) -> BlockMask:
    """Take over a BlockMask of torch.nn.attention.flex_attention.

    Its full blocks are visible without a look, its `mask_mod` is asked inside of its partial blocks
    alone, and the blocks that it does not list are hidden. A `mask_mod` by itself is what
    `from_predicate` takes.

    Args:
        mask: a BlockMask of torch, of any block size. Its mask_mod is called with tensors that
            broadcast, b and h (), q (n, m, 1) and k (n, 1, m), on its device.
        tile: the tile sizes: 64, 128 or (tile_q, tile_k) of them.
        device: the device of the mask's tensors; that of `mask` when None.

    Returns:
        A mask of shape (B, H, Sq, Sk), those of `mask`.

    Raises:
        TypeError: mask is no BlockMask of torch, or its mask_mod returns no bools.
        ValueError: the mask_mod returns what does not broadcast.

    Source: the documentation of torch.nn.attention.flex_attention.BlockMask.

    Example:
        >>> flex = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1000, 1000, "cpu")
        >>> o = tilewise.attention(q, k, v, mask=from_flex(flex))
    """
    for name in ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "seq_lengths", "mask_mod"):
        if not hasattr(mask, name):
            raise TypeError(
                f"mask must be a BlockMask of torch.nn.attention.flex_attention, got {mask!r:.100}"
            )
    tile = arguments.check_tile(tile)
    home = arguments.home(device, mask.kv_num_blocks)
    partial = _blocks(mask.kv_num_blocks, mask.kv_indices)
    full = np.zeros_like(partial)
    if mask.full_kv_num_blocks is not None:
        full = _blocks(mask.full_kv_num_blocks, mask.full_kv_indices)
    shape = (*partial.shape[:2], int(mask.seq_lengths[0]), int(mask.seq_lengths[1]))
    place = mask.kv_num_blocks.device
    return from_tile_map(_by_block(full, partial, mask, shape, tile, place), home)


def _blocks(counts: Tensor, indices: Tensor) -> Bools:
    """Return bool (B, H, rows, columns), True for each block that is listed: the first counts[b, h,
    r] of indices[b, h, r] are columns of blocks."""
    counted, listed = counts.cpu().numpy(), indices.cpu().numpy()
    columns = listed.shape[-1]
    is_listed = np.arange(columns) < counted[..., None]
    found = np.zeros(listed.shape, dtype=bool)
    at = np.nonzero(is_listed)
    found[(*at[:-1], listed[at])] = True
    return found


def _by_block(
    full: Bools,
    partial: Bools,
    mask: Any,
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    place: torch.device,
) -> TileMap:
    """Return the tile map of torch's `mask`: a tile inside of full blocks is full, a tile without
    listed blocks is empty, and `mask_mod` is evaluated on `place` for the others.

    full, partial: bool (B, H, rows, columns) of blocks, as `_blocks` returns them.
    """
    rows, columns = tile_map.tiles_of(shape, tile)
    # The block of each query and of each key; behind the mask's end that of the last one.
    of_query = np.minimum(np.arange(rows * tile[0]), max(shape[2] - 1, 0)) // mask.BLOCK_SIZE[0]
    of_key = np.minimum(np.arange(columns * tile[1]), max(shape[3] - 1, 0)) // mask.BLOCK_SIZE[1]
    numbers = np.full((*shape[:2], rows, columns), EMPTY, np.int32)
    store = BitTiles(tile)
    for b, h in product(range(shape[0]), range(shape[1])):
        sure, listed = full[b, h], (full | partial)[b, h]
        some = _over_tiles(listed, of_query, of_key, tile) > 0
        whole = _over_tiles(~sure, of_query, of_key, tile) == 0
        # Bits behind the mask's end are 0, so a tile across it is no full one.
        whole[shape[2] // tile[0] :] = False
        whole[:, shape[3] // tile[1] :] = False
        numbers[b, h][whole] = FULL
        asked = np.argwhere(some & ~whole)

        def make(part: slice, asked: Any, b: int, h: int, sure: Bools, listed: Bools) -> Ints:
            i = asked[part, :1] * tile[0] + np.arange(tile[0])
            j = asked[part, 1:] * tile[1] + np.arange(tile[1])
            blocks = of_query[i][:, :, None], of_key[j][:, None]
            visible = listed[blocks]
            visible &= sure[blocks] | _rule(mask.mask_mod, b, h, i, j, shape, place)
            visible &= (i < shape[2])[:, :, None] & (j < shape[3])[:, None]
            return tile_map.pack(visible)

        tiles = functools.partial(make, asked=asked, b=b, h=h, sure=sure, listed=listed)
        numbers[b, h][tuple(asked.T)] = store.add_made(len(asked), tiles)
    return TileMap(shape, tile, numbers, store.bits())


def _over_tiles(blocks: Bools, of_query: Any, of_key: Any, tile: tuple[int, int]) -> Any:
    """Return for each tile, (rows, columns), how many True blocks of `blocks`, (block rows, block
    columns), reach into it; `of_query` and `of_key` are the block of each query and key."""
    sums = np.zeros((blocks.shape[0] + 1, blocks.shape[1] + 1), np.int64)
    sums[1:, 1:] = blocks.cumsum(0).cumsum(1)
    top, bottom = of_query[:: tile[0]], of_query[tile[0] - 1 :: tile[0]] + 1
    left, right = of_key[:: tile[1]], of_key[tile[1] - 1 :: tile[1]] + 1
    return sums[bottom][:, right] - sums[top][:, right] - sums[bottom][:, left] + sums[top][:, left]


def _rule(
    rule: Rule, b: int, h: int, i: Any, j: Any, shape: tuple[int, ...], place: torch.device
) -> Bools:
    """Return the values of a mask function for the pairs of n tiles, numpy bool (n, tile_q,
    tile_k); raise TypeError if they are not bool, ValueError if they do not broadcast to that
    shape.

    i, j: (n, tile_q) and (n, tile_k) positions; positions after the mask's end count as its last.
    """
    queries = torch.from_numpy(np.minimum(i, shape[2] - 1)).to(place)[:, :, None]
    keys = torch.from_numpy(np.minimum(j, shape[3] - 1)).to(place)[:, None]
    visible = rule(torch.tensor(b, device=place), torch.tensor(h, device=place), queries, keys)
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"mask_mod must return a bool tensor, got {got}")
    wanted = (len(i), i.shape[1], j.shape[1])
    try:
        found: Bools = visible.expand(wanted).cpu().numpy()
    except RuntimeError:
        raise ValueError(
            f"mask_mod must return what broadcasts to {wanted}, got shape {tuple(visible.shape)}"
        ) from None
    return found
