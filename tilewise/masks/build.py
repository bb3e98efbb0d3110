"""Masks built pair by pair or block by block: from a tensor, a predicate, a layout or other
masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tilewise.masks import arguments, tile_map
from tilewise.masks.arguments import Device, Tile
from tilewise.masks.block_mask import BlockMask, aligned, from_tile_map
from tilewise.masks.eager import eager
from tilewise.masks.tile_map import EMPTY, FULL, WORD, BitTiles, Bools, Ints, TileMap

_STRIP = 1 << 22  # pairs that a predicate evaluates at a time: 32 MiB if it makes int64


@eager
def dense(visible: Tensor, *, tile: Tile = 128, device: Device = None) -> BlockMask:
    """Let query i see key j when visible[b, h, i, j].

    Args:
        visible: bool (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk); sizes of 1 are shared.
        tile: the tile sizes: 64, 128 or (tile_q, tile_k) of them.
        device: the device of the mask's tensors; that of visible when None.

    Returns:
        A mask of shape (B, H, Sq, Sk), B and H of 1 where the tensor has no such dimension.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Example:
        >>> mask = dense(torch.rand(8, 300, 300) < 0.5)
    """
    visible = arguments.check_bool("visible", visible, 2, 4)
    batch, heads, seqlen_q, seqlen_k = visible.shape
    flat = visible.detach().cpu().numpy()

    def strip(b: int, h: int, queries: slice, keys: slice) -> Bools:
        return flat[b, h, queries, keys]

    shape = (batch, heads, seqlen_q, seqlen_k)
    return _from_strips(strip, shape, arguments.check_tile(tile), arguments.home(device, visible))


@eager
def from_predicate(
    fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    batch: int = 1,
    heads: int = 1,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when fn(b, h, i, j).

    Every pair is evaluated, in strips, so memory stays small and time is O(B H Sq Sk): a minute or
    two for 131,072 tokens on one CPU core. Rules of distances, documents, prefixes and blocks have
    builders in O(tiles).

    Args:
        fn: a function of int64 tensors that broadcast, b and h (), i (n, 1) and j (1, m), all
            inside the mask and on `device`; it returns bool that broadcasts to (n, m).
        seqlen_q, seqlen_k: Sq and Sk, the latter Sq when None.
        batch, heads: B and H of the mask; 1 if fn does not depend on b or h.
        tile: the tile sizes: 64, 128 or (tile_q, tile_k) of them.
        device: the device of fn's arguments and of the mask's tensors; torch's default when None.

    Returns:
        A mask of shape (B, H, Sq, Sk).

    Raises:
        ValueError, TypeError: an argument or the result of fn breaks a rule above.

    Example:
        >>> mask = from_predicate(lambda b, h, i, j: (i ^ j) % 3 > 0, 1000)
    """
    seqlen_q, seqlen_k = arguments.check_seqlens(seqlen_q, seqlen_k)
    shape = (
        arguments.check_count("batch", batch, 1),
        arguments.check_count("heads", heads, 1),
        seqlen_q,
        seqlen_k,
    )
    home = arguments.home(device)
    # fn is evaluated on the CPU if the mask is on meta, where tensors have no values
    place = torch.device("cpu") if home.type == "meta" else home

    def strip(b: int, h: int, queries: slice, keys: slice) -> Bools:
        i = torch.arange(queries.start, queries.stop, device=place)[:, None]
        j = torch.arange(keys.start, keys.stop, device=place)[None]
        visible = fn(torch.tensor(b, device=place), torch.tensor(h, device=place), i, j)
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
            raise TypeError(f"fn must return a bool tensor, got {got}")
        wanted = (len(i), j.shape[1])
        try:
            part: Bools = visible.expand(wanted).cpu().numpy()
        except RuntimeError:
            raise ValueError(
                f"fn must return what broadcasts to {wanted}, got shape {tuple(visible.shape)}"
            ) from None
        return part

    return _from_strips(strip, shape, arguments.check_tile(tile), home)


def _from_strips(
    strip: Callable[[int, int, slice, slice], Bools],
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    device: torch.device,
) -> BlockMask:
    """Build a mask of `shape` on `device`; strip(b, h, queries, keys) returns the bools of two
    ranges.

    It is called for a few rows of tiles at a time, or for a part of one row of tiles if that has
    more than `_STRIP` pairs.
    """
    rows, columns = tile_map.tiles_of(shape, tile)
    numbers = np.empty((*shape[:2], rows, columns), np.int32)
    store = BitTiles(tile)
    wide = max(1, min(columns, _STRIP // (tile[0] * tile[1])))
    high = max(1, min(rows, _STRIP // (tile[0] * tile[1] * wide)))
    for b, h, r, c in product(
        range(shape[0]), range(shape[1]), range(0, rows, high), range(0, columns, wide)
    ):
        queries = slice(r * tile[0], min((r + high) * tile[0], shape[2]))
        keys = slice(c * tile[1], min((c + wide) * tile[1], shape[3]))
        part = numbers[b, h, r : r + high, c : c + wide]
        words = _cut(strip(b, h, queries, keys), part.shape, tile)
        part[...] = store.add(words).reshape(part.shape)
    return from_tile_map(TileMap(shape, tile, numbers, store.bits()), device)


def _cut(visible: Bools, counts: tuple[int, ...], tile: tuple[int, int]) -> Ints:
    """Cut a strip of bools (queries, keys) into counts[0] x counts[1] bit tiles, row by row: int32
    (n, tile_q, tile_k / 32), with 0 beyond the strip."""
    padded = np.zeros((counts[0] * tile[0], counts[1] * tile[1]), dtype=bool)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    width = tile[1] // WORD
    words = tile_map.pack(padded).reshape(counts[0], tile[0], counts[1], width)
    return np.ascontiguousarray(words.swapaxes(1, 2)).reshape(-1, tile[0], width)


@eager
def block_sparse(
    layout: Tensor,
    *,
    block_size: int | tuple[int, int],
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    tile: Tile | None = None,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when layout[b, h, i // block_q, j // block_k].

    Args:
        layout: bool (R, C), (H, R, C) or (B, H, R, C).
        block_size: tokens of a block, at least 1, or (block_q, block_k); need not fit the tile.
        seqlen_q, seqlen_k: Sq and Sk, which need exactly R and C blocks; R block_q and C block_k
            when None.
        tile: the tile sizes: 64, 128 or (tile_q, tile_k) of them; when None the largest that divide
            the blocks, so that no tile is partial, and 128 if none does.
        device: the device of the mask's tensors; that of layout when None.

    Returns:
        A mask of shape (B, H, Sq, Sk), B and H of 1 where the layout has no such dimension.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Example:
        >>> mask = block_sparse(torch.rand(8, 16, 16) < 0.2, block_size=64)
    """
    layout = arguments.check_bool("layout", layout, 2, 4)
    batch, heads, *counts = layout.shape
    blocks = [
        arguments.check_count("block_size", size, 1)
        for size in arguments.check_pair("block_size", block_size)
    ]
    lengths = []
    for name, given, block, count in zip(
        ("seqlen_q", "seqlen_k"), (seqlen_q, seqlen_k), blocks, counts, strict=True
    ):
        length = block * count if given is None else arguments.check_count(name, given)
        if -(-length // block) != count:
            raise ValueError(
                f"{name} must be covered by just {count} blocks of {block}, got {length}"
            )
        lengths.append(length)
    if tile is None:
        tile = (_longest_tile(blocks[0]), _longest_tile(blocks[1]))
    tile = arguments.check_tile(tile)
    shape = (batch, heads, lengths[0], lengths[1])
    raw = _by_block(layout.cpu().numpy(), (blocks[0], blocks[1]), shape, tile)
    return from_tile_map(tile_map.bounded(raw), arguments.home(device, layout))


def _longest_tile(block: int) -> int:
    return 64 if block % 64 == 0 and block % 128 else 128


def _by_block(
    layout: Bools, block: tuple[int, int], shape: tuple[int, int, int, int], tile: tuple[int, int]
) -> TileMap:
    rows, columns = tile_map.tiles_of(shape, tile)
    store = BitTiles(tile)
    if block[0] % tile[0] == 0 and block[1] % tile[1] == 0:  # every tile lies in one block
        of_row = np.arange(rows) * tile[0] // block[0]
        of_column = np.arange(columns) * tile[1] // block[1]
        kinds = np.where(layout, FULL, EMPTY).astype(np.int32)
        return TileMap(shape, tile, kinds[:, :, of_row][..., of_column], store.bits())
    numbers = np.empty((*shape[:2], rows, columns), np.int32)
    of_query = np.minimum(np.arange(rows * tile[0]) // block[0], layout.shape[2] - 1)
    # Tiles of a row of tiles differ only in the few layout rows that cross it. Expand each distinct
    # strip once for each way in which those rows divide the queries.
    known_of: dict[bytes, dict[bytes, int]] = {}
    for b, h, r in product(range(shape[0]), range(shape[1]), range(rows)):
        queries = of_query[r * tile[0] : (r + 1) * tile[0]]
        line = queries - queries[0]
        lines = np.zeros((line[-1] + 1, columns * tile[1]), dtype=bool)
        seen = layout[b, h, queries[0] : queries[-1] + 1].repeat(block[1], axis=1)
        lines[:, : shape[3]] = seen[:, : shape[3]]
        words = tile_map.pack(lines).reshape(len(lines), columns, tile[1] // WORD).swapaxes(0, 1)
        joined, size = words.tobytes(), len(lines) * tile[1] // 8
        strips = [joined[at : at + size] for at in range(0, len(joined), size)]
        known = known_of.setdefault(line.tobytes(), {})
        fresh = {strip: c for c, strip in enumerate(strips) if strip not in known}
        known.update(zip(fresh, store.add(words[list(fresh.values())][:, line]), strict=True))
        numbers[b, h, r] = [known[strip] for strip in strips]
    return TileMap(shape, tile, numbers, store.bits())


@eager
def cat(masks: Sequence[BlockMask], *, dim: int) -> BlockMask:
    """Concatenate masks of the same (Sq, Sk) as sequences (dim 0) or heads (dim 1).

    Args:
        masks: at least one mask, all on one device; in the other dimension sizes of 1 broadcast. Of
            different tile sizes the smaller ones are used.
        dim: the dimension, 0 or 1.

    Returns:
        A mask with as many sequences (heads) as all of them together.

    Raises:
        ValueError: the masks or dim break a rule above.

    Example:
        >>> mask = cat([window(4096, window=256), strided(4096, stride=64)], dim=1)
    """
    if dim not in (0, 1):
        raise ValueError(f"dim must be 0 (sequences) or 1 (heads), got {dim}")
    if len(masks) == 0:
        raise ValueError("masks must be at least one, got none")
    for mask in masks[1:]:
        if mask.device != masks[0].device:
            raise ValueError(
                f"masks must be on one device, got {masks[0].device} and {mask.device}"
            )
    other = 1 - dim
    maps = aligned(list(masks), dims=(other,))
    size = max(part.shape[other] for part in maps)
    wide = [
        part._replace(
            numbers=np.repeat(part.numbers, size // part.shape[other], axis=other),
        )
        for part in maps
    ]
    return from_tile_map(tile_map.join(wide, dim), masks[0].device)
