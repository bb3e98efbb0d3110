"""BlockMask: any attention mask as data, so that one kernel path runs every mask.

A mask over (Sq, Sk) is cut into tiles. An empty tile is not visited at all, a full one is computed
without a mask, and a partial one points at a bit tile; equal bit tiles are stored once, so that a
causal diagonal costs one. Query rows and keys are counted from the start of their sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BlockMask", "dense"]

EMPTY, FULL = -1, -2  # entries of a tile map; others are numbers of bit tiles
TILES = (64, 128)  # lengths of a mask tile: what compute tiles of every kernel divide
_WORD = 32  # keys whose bits share one word


class TileLists(NamedTuple):
    """The visible tiles of each row (or column) of tiles, full ones first.

    Attributes:
        spans: int32 (Bm, Hm, R, 3): first entry, end of the full ones, end of the partial ones.
        entries: int32 (n, 2): column (or row) of the tile, and its bit tile, -1 for a full tile.
    """

    spans: Tensor
    entries: Tensor


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which query sees which key, as tiles. Make one with the functions of this module.

    Attributes:
        shape: (Bm, Hm, Sq, Sk); Bm and Hm are 1 where all sequences or heads share the mask.
        tile: (tile_q, tile_k), each 64 or 128.
        bits: int32 (n, tile_q, tile_k / 32), the distinct partial tiles: key 32 w + b of row r
            is visible when bit b of bits[t, r, w] is set. Rows and keys outside (Sq, Sk) are not.
        rows: the tiles that each tile of queries sees.
        columns: the tiles of queries that see each tile of keys.
    """

    shape: tuple[int, int, int, int]
    tile: tuple[int, int]
    bits: Tensor
    rows: TileLists
    columns: TileLists

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.bits.device

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The tensors in the order in which the registered ops take them."""
        return (self.bits, *self.rows, *self.columns)

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the mask with its tensors on `device`."""
        if self.device == torch.device(device):
            return self
        bits, rows, row_entries, columns, column_entries = (t.to(device) for t in self.tensors())
        return BlockMask(
            self.shape,
            self.tile,
            bits,
            TileLists(rows, row_entries),
            TileLists(columns, column_entries),
        )


def _tile_lists(tile_map: NDArray[np.int32]) -> TileLists:
    """List the visible tiles of each row of (Bm, Hm, R, C), full ones first, by column."""
    order = np.where(tile_map == FULL, 0, np.where(tile_map == EMPTY, 2, 1)).astype(np.int8)
    columns = np.argsort(order, axis=-1, kind="stable").astype(np.int32)
    sorted_map = np.take_along_axis(tile_map, columns, axis=-1)
    full = (tile_map == FULL).sum(-1)
    seen = (tile_map != EMPTY).sum(-1)
    end = np.cumsum(seen.ravel()).reshape(seen.shape)
    spans = np.stack((end - seen, end - seen + full, end), -1).astype(np.int32)
    chosen = sorted_map != EMPTY
    entries = np.stack((columns[chosen], np.maximum(sorted_map[chosen], -1)), -1).astype(np.int32)
    return TileLists(torch.from_numpy(spans), torch.from_numpy(entries))


def _from_tile_map(
    tile_map: NDArray[np.int32],
    bits: NDArray[np.int32],
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
) -> BlockMask:
    return BlockMask(
        shape,
        tile,
        torch.from_numpy(bits),
        _tile_lists(tile_map),
        _tile_lists(np.ascontiguousarray(tile_map.swapaxes(-1, -2))),
    )


def dense(visible: Tensor, *, tile: tuple[int, int] = (128, 128)) -> BlockMask:
    """Make a mask of a bool tensor (Sq, Sk), (H, Sq, Sk) or (B, H, Sq, Sk), True where visible."""
    visible4 = visible.reshape((1,) * (4 - visible.dim()) + tuple(visible.shape))
    batch, heads, seqlen_q, seqlen_k = visible4.shape
    tile_q, tile_k = tile
    rows, columns = -(-seqlen_q // tile_q), -(-seqlen_k // tile_k)
    padded = np.zeros((batch, heads, rows * tile_q, columns * tile_k), dtype=bool)
    padded[:, :, :seqlen_q, :seqlen_k] = visible4.cpu().numpy()
    tiles = padded.reshape(batch, heads, rows, tile_q, columns, tile_k).swapaxes(3, 4)
    words = np.packbits(tiles, axis=-1, bitorder="little").view(np.int32)
    distinct, numbers = np.unique(
        words.reshape(-1, tile_q * tile_k // _WORD), axis=0, return_inverse=True
    )
    kinds = np.full(len(distinct), EMPTY, np.int32)
    kinds[(distinct == -1).all(-1)] = FULL
    partial = (distinct != -1).any(-1) & (distinct != 0).any(-1)
    kinds[partial] = np.arange(int(partial.sum()), dtype=np.int32)
    bits = np.ascontiguousarray(distinct[partial]).reshape(-1, tile_q, tile_k // _WORD)
    tile_map = kinds[numbers.reshape(batch, heads, rows, columns)]
    mask = _from_tile_map(tile_map, bits, (batch, heads, seqlen_q, seqlen_k), tile)
    return mask.to(visible.device)
