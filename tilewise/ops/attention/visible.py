"""The pairs of queries and keys that a block mask lets through, computed in torch.

A strip is some rows of tiles, with all keys. The lists of tiles are read on the host, so this waits
for the device; at any time the map from tiles to bit tiles is held for one strip only.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.kernels.spec import MaskTensors

_EMPTY, _FULL = -1, -2  # others are numbers of bit tiles


class _Where(Protocol):
    """A part of a batch: the slices of its sequences and of its query heads."""

    @property
    def batch(self) -> slice: ...
    @property
    def query_heads(self) -> slice: ...


class MaskWalk:
    """A block mask whose tile lists have been copied to the host; making one waits for the device.

    Attributes:
        bits: the bit tiles of the mask, on its device, see `MaskTensors`.
        tile_q, tile_k: the queries and keys of a tile of the mask.
    """

    def __init__(self, mask: MaskTensors) -> None:
        self.bits = mask.bits
        self.tile_q, self.tile_k = mask.bits.shape[1], mask.bits.shape[2] * 32
        self._spans: NDArray[np.int32] = mask.rows.cpu().numpy()
        self._entries: NDArray[np.int32] = mask.row_entries.cpu().numpy()
        self._num_columns = mask.columns.shape[2]

    def strip(self, where: _Where, first: int, last: int) -> MaskStrip:
        """Return the mask's tiles of queries first ... last - 1 for a part of the batch.

        Args:
            where: the sequences and query heads of the part.
            first, last: the range of queries; `first` is a multiple of `tile_q`.
        """
        spans = self._spans[:, :, first // self.tile_q : -(-last // self.tile_q)]
        spans = spans if spans.shape[0] == 1 else spans[where.batch]
        spans = spans if spans.shape[1] == 1 else spans[:, where.query_heads]
        kinds = np.full((*spans.shape[:3], self._num_columns), _EMPTY, np.int32)
        for row in np.ndindex(*spans.shape[:3]):
            begin, full_end, end = spans[row]
            kinds[row][self._entries[begin:full_end, 0]] = _FULL
            kinds[row][self._entries[full_end:end, 0]] = self._entries[full_end:end, 1]
        return MaskStrip(self, kinds, last - first)


class MaskStrip:
    """The tiles of a block mask for some queries, with all keys; made by `MaskWalk.strip`.

    Args:
        walk: the whole mask.
        kinds: int32 (Bm, Hm, rows, columns), for each tile _EMPTY, _FULL or the number of its bit
            tile; Bm and Hm are 1 where sequences or heads share the mask.
        num_queries: the number of queries, of which the last row of tiles may have fewer.
    """

    def __init__(self, walk: MaskWalk, kinds: NDArray[np.int32], num_queries: int) -> None:
        self._walk, self._num_queries = walk, num_queries
        self._seen = (kinds != _EMPTY).any((0, 1, 2))
        self._kinds = torch.from_numpy(kinds).to(walk.bits.device)

    def _columns(self, first: int, last: int) -> slice:
        return slice(first // self._walk.tile_k, -(-last // self._walk.tile_k))

    def sees_any(self, first: int, last: int) -> bool:
        """Return whether a mask tile with some of keys first ... last - 1 is not empty."""
        return bool(self._seen[self._columns(first, last)].any())

    def visible(self, first: int, last: int) -> Tensor:
        """Return which of keys first ... last - 1 the mask shows to each query of the strip.

        The result is bool (Bm, Hm, m, n). `first` is a multiple of the keys of a mask tile.
        """
        bits, kinds = self._walk.bits, self._kinds[..., self._columns(first, last)]
        if bits.shape[0] == 0:  # full and empty tiles only
            words = bits.new_zeros((*kinds.shape, *bits.shape[1:]))
        else:
            words = bits[kinds.clamp(min=0)]  # (Bm, Hm, rows, columns, tile_q, words)
        kinds = kinds[..., None, None]
        words = torch.where(kinds == _FULL, -1, torch.where(kinds == _EMPTY, 0, words))
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        tiles = (words.unsqueeze(-1) >> shifts & 1).bool().flatten(-2)
        whole = tiles.transpose(3, 4).flatten(4, 5).flatten(2, 3)
        return whole[..., : self._num_queries, : last - first]
