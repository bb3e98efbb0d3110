"""Masks that follow a rule of distances or of a few tokens, built in O(tiles).

A tile whose pairs are all visible or all hidden by the rule is never evaluated pair by pair; tiles
that must be equal are evaluated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from tilewise.masks import arguments, tile_map
from tilewise.masks.arguments import Device, Tile, Window
from tilewise.masks.block_mask import BlockMask, from_tile_map
from tilewise.masks.eager import eager
from tilewise.masks.tile_map import EMPTY, FULL, BitTiles, Bools, TileMap

Distances = Callable[[Tensor], Tensor]


@eager
def from_distance(
    fn: Distances,
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when fn(i + Sk - Sq - j): 0 is its own position, positive is the past.

    Args:
        fn: a function that maps the int64 distances of all diagonals, one tensor, to as many bools.
        seqlen_q, seqlen_k: Sq and Sk, the latter Sq when None; with Sq < Sk the queries are the
            last positions (bottom-right aligned).
        tile: the tile sizes: 64, 128 or (tile_q, tile_k) of them.
        device: the device of the mask's tensors; torch's default when None.

    Returns:
        A mask of shape (1, 1, Sq, Sk).

    Raises:
        ValueError, TypeError: an argument or the result of fn breaks a rule above.

    Example:
        >>> dilated = from_distance(lambda d: (d.abs() <= 64) & (d % 2 == 0), 4096)
    """
    seqlen_q, seqlen_k = arguments.check_seqlens(seqlen_q, seqlen_k)
    raw = _by_distance(fn, seqlen_q, seqlen_k, arguments.check_tile(tile))
    return from_tile_map(tile_map.bounded(raw), arguments.home(device))


def causal(
    seqlen_q: int, seqlen_k: int | None = None, *, tile: Tile = 128, device: Device = None
) -> BlockMask:
    """Let query i see key j when j <= i + Sk - Sq.

    `attention(..., causal=True)` means the same and is faster; this one is for combining masks.
    Arguments, result and errors as in `from_distance`.

    Example:
        >>> inside = causal(8) & document([5, 3])
    """
    return from_distance(lambda d: d >= 0, seqlen_q, seqlen_k, tile=tile, device=device)


@eager
def window(
    seqlen_q: int,
    seqlen_k: int | None = None,
    *,
    window: Window,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when -right <= i + Sk - Sq - j <= left.

    `attention(..., window=window)` means the same and is faster; this one is for combining masks.

    Args:
        window: an int w for the last w keys, the query's own included, or (left, right) for that
            many keys on each side of it, None or -1 unlimited.

    The other arguments, result and errors as in `from_distance`.

    Example:
        >>> mask = window(4096, window=(256, 256))
    """
    seqlen_q, seqlen_k = arguments.check_seqlens(seqlen_q, seqlen_k)
    raw = _by_distance(_within(window), seqlen_q, seqlen_k, arguments.check_tile(tile))
    return from_tile_map(tile_map.bounded(raw), arguments.home(device))


def strided(
    seqlen: int,
    *,
    stride: int,
    window: int | None = None,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j <= i when i - j < window or (i - j) mod stride = 0.

    This is both heads of the strided pattern of Sparse Transformers (Child et al., 2019) in one
    mask.

    Args:
        seqlen: S, the number of queries and of keys.
        stride: the distance between visible keys beyond the window, at least 1.
        window: the number of last keys that are all visible, the query's own included; stride if
            None.

    The other arguments, result and errors as in `from_distance`.

    Example:
        >>> mask = strided(4096, stride=128)
    """
    stride = arguments.check_count("stride", stride, 1)
    near = stride if window is None else arguments.check_count("window", window)
    return from_distance(
        lambda d: (d >= 0) & ((d < near) | (d % stride == 0)), seqlen, tile=tile, device=device
    )


@eager
def prefix_lm(
    seqlen: int,
    prefix: int | Sequence[int] | Tensor,
    *,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when j <= i or j < prefix[b]: causal after a prefix that sees itself.

    Args:
        seqlen: S, the number of queries and of keys.
        prefix: the number of tokens of the prefix, from 0 to S: an int, or B of them for B
            sequences.
        device: the device of the mask's tensors; that of prefix or torch's default when None.

    The other arguments and errors as in `from_distance`.

    Returns:
        A mask of shape (1, 1, S, S), or (B, 1, S, S) when prefix is B numbers.

    Example:
        >>> mask = prefix_lm(4096, [100, 2000])
    """
    seqlen, _ = arguments.check_seqlens(seqlen, None)
    tile = arguments.check_tile(tile)
    if isinstance(prefix, (Tensor, Sequence)) and np.ndim(prefix) > 0:
        prefixes = arguments.check_integers("prefix", prefix, 1)
    else:
        prefixes = np.array([arguments.check_count("prefix", prefix)])
    if ((prefixes < 0) | (prefixes > seqlen)).any():
        raise ValueError(f"prefix must lie from 0 to {seqlen}, got {prefixes.tolist()}")
    before = tile_map.by_key(np.arange(seqlen) < prefixes[:, None], seqlen, tile)
    past = _by_distance(lambda d: d >= 0, seqlen, seqlen, tile)
    raw = tile_map.combine(past, before, np.bitwise_or)
    return from_tile_map(tile_map.bounded(raw), arguments.home(device, prefix))


@eager
def global_local(
    seqlen: int,
    *,
    window: Window,
    global_tokens: int | Sequence[int] | Tensor,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when j is in its window, or i is global, or j is global.

    This is the pattern of Longformer (Beltagy et al., 2020), whose window of w is (w // 2, w // 2)
    here.

    Args:
        seqlen: S, the number of queries and of keys.
        window: the window as in `window`; an int looks back only.
        global_tokens: the number of first tokens that are global, or the positions of global
            tokens, or bool flags (S,) or (B, S).
        device: the device of the mask's tensors; that of global_tokens or torch's default when
            None.

    The other arguments and errors as in `from_distance`.

    Returns:
        A mask of shape (1, 1, S, S), or (B, 1, S, S) for flags (B, S).

    Example:
        >>> mask = global_local(4096, window=(256, 256), global_tokens=[0, 17])
    """
    seqlen, _ = arguments.check_seqlens(seqlen, None)
    tile = arguments.check_tile(tile)
    flags = arguments.token_flags("global_tokens", global_tokens, seqlen)
    raw = _by_distance(_within(window), seqlen, seqlen, tile)
    for tokens in (tile_map.by_key(flags, seqlen, tile), tile_map.by_query(flags, seqlen, tile)):
        raw = tile_map.combine(raw, tokens, np.bitwise_or)
    return from_tile_map(tile_map.bounded(raw), arguments.home(device, global_tokens))


def _within(window: Window) -> Distances:
    left, right = arguments.check_window(window)

    def visible(d: Tensor) -> Tensor:
        seen = torch.ones_like(d, dtype=torch.bool)
        if left is not None:
            seen &= d <= left
        if right is not None:
            seen &= d >= -right
        return seen

    return visible


def _by_distance(fn: Distances, seqlen_q: int, seqlen_k: int, tile: tuple[int, int]) -> TileMap:
    """Return the tile map (1, 1, Sq, Sk) of the rule fn(i + Sk - Sq - j); tiles on one diagonal of
    tiles are equal and are evaluated once.

    The rule also decides the pairs of the last tiles beyond Sq and Sk, which `tile_map.bounded`
    hides.
    """
    shape = (1, 1, seqlen_q, seqlen_k)
    tile_q, tile_k = tile
    rows, columns = tile_map.tiles_of(shape, tile)
    # The distances from the upper right corner of the padded mask to its lower left one.
    num_distances = max(rows * tile_q + columns * tile_k - 1, 0)
    lowest = seqlen_k - seqlen_q - (columns * tile_k - 1)
    seen = _ask(fn, torch.arange(lowest, lowest + num_distances, device="cpu"))
    # A tile has tile_q + tile_k - 1 distances, the first at its upper right corner.
    step = gcd(tile_q, tile_k)
    diagonal = np.arange(rows)[:, None] * (tile_q // step) + (
        np.arange(columns)[::-1] * (tile_k // step)
    )
    used = np.zeros(num_distances // step + 1, dtype=bool)
    used[diagonal] = True
    corners = np.flatnonzero(used) * step
    sums = np.concatenate(([0], np.cumsum(seen)))
    span = tile_q + tile_k - 1
    counts = sums[corners + span] - sums[corners]
    kinds = np.where(counts == span, FULL, EMPTY).astype(np.int32)
    partial = np.flatnonzero((counts > 0) & (counts < span))
    inside = np.arange(tile_q)[:, None] + np.arange(tile_k)[::-1]
    store = BitTiles(tile)
    kinds[partial] = store.add_made(
        len(partial), lambda s: tile_map.pack(seen[corners[partial[s], None, None] + inside])
    )
    numbers = np.empty(len(used), np.int32)
    numbers[used] = kinds
    return TileMap(shape, tile, numbers[diagonal][None, None], store.bits())


def _ask(fn: Distances, distances: Tensor) -> Bools:
    """Return fn(distances) as numpy bools.

    Raises:
        TypeError: the result is no bool tensor.
        ValueError: the result has another shape than `distances`.
    """
    visible = fn(distances)
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        got = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise TypeError(f"fn must return a bool tensor, got {got}")
    if visible.shape != distances.shape:
        raise ValueError(
            f"fn must return shape {tuple(distances.shape)}, got {tuple(visible.shape)}"
        )
    seen: Bools = visible.cpu().numpy()
    return seen
