"""BlockMask: any attention mask as data, so that one kernel path runs every mask.

A mask over (Sq, Sk) is cut into tiles. An empty tile is skipped, a full one is computed without a
mask, and a partial one refers to a bit tile; equal bit tiles are stored once, so that a causal
diagonal costs one. Query rows and keys are counted from the start of their sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

from tilewise.masks import tile_map
from tilewise.masks.arguments import check_count
from tilewise.masks.eager import eager
from tilewise.masks.plot import draw
from tilewise.masks.tile_map import EMPTY, FULL, TileMap


class TileLists(NamedTuple):
    """The visible tiles of each row (or column) of tiles, full ones first.

    Attributes:
        spans: int32 (Bm, Hm, R, 3): first entry, end of the full ones, end of the partial ones.
        entries: int32 (n, 2): column (or row) of the tile, and its bit tile, -1 for a full tile.
    """

    spans: Tensor
    entries: Tensor


class TileCounts(NamedTuple):
    """The number of tiles of each kind in a mask, over all its sequences and heads."""

    empty: int
    partial: int
    full: int


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """An attention mask as tiles. Make one with the functions of `tilewise.masks`.

    `a & b`, `a | b` and `~a` combine masks; sequences and heads broadcast, and of different tile
    sizes the smaller ones are used. `==` is identity, so that masks are hashable and compare fast:
    use `same_as` to compare contents.

    Attributes:
        shape: (Bm, Hm, Sq, Sk); Bm and Hm are 1 where all sequences or heads share the mask.
        tile: (tile_q, tile_k), each 64 or 128.
        bits: int32 (n, tile_q, tile_k / 32), the distinct partial tiles: key 32 w + b of row r
            is visible when bit b of bits[t, r, w] is set. Bits outside (Sq, Sk) are 0.
        rows: the visible tiles of each row of tiles (for a tile of queries).
        columns: the visible tiles of each column of tiles (for a tile of keys).
    """

    shape: tuple[int, int, int, int]
    tile: tuple[int, int]
    bits: Tensor
    rows: TileLists
    columns: TileLists

    def __post_init__(self) -> None:
        """Check the attributes; the functions of `tilewise.masks` make masks that need no check.

        Raises:
            ValueError, TypeError: a list refers outside of the mask, or an attribute is malformed.
        """
        _check(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied mask, and check it: a file may contain anything.

        The tensors are copied: the file could otherwise still change them.
        """
        if not isinstance(state, dict) or set(state) != set(_FIELDS):
            raise ValueError(f"a pickled mask must hold {', '.join(_FIELDS)}, got {state!r:.200}")
        self.__dict__.update(state)
        _check(self, is_loaded=True)
        copies = (t.clone(memory_format=torch.contiguous_format) for t in self.tensors())
        self.__dict__.update(_from_tensors(copies, (self.shape, self.tile)).__dict__)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.bits.device

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the five tensors in the order in which the registered ops take them: bits, spans
        and entries of rows, spans and entries of columns."""
        return (self.bits, *self.rows, *self.columns)

    def to(self, device: torch.device | str) -> BlockMask:
        """Return the mask with its tensors on `device`; the mask itself if it is there already."""
        if self.device == torch.device(device):
            return self
        return _from_tensors((t.to(device) for t in self.tensors()), (self.shape, self.tile))

    def memory(self) -> int:
        """Return the size of the tensors in bytes."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    @property
    def tiles(self) -> TileCounts:
        """The number of empty, partial and full tiles."""
        batch, heads, *_ = self.shape
        rows, columns = tile_map.tiles_of(self.shape, self.tile)
        first, full_end, end = self.rows.spans.long().sum((0, 1, 2)).tolist()
        total = batch * heads * rows * columns
        return TileCounts(total - (end - first), end - full_end, full_end - first)

    @property
    def sparsity(self) -> float:
        """The fraction of the Bm Hm Sq Sk scores that are not computed: those of empty tiles.

        It is 0 for a mask without scores.
        """
        seqlen_q, seqlen_k = self.shape[2:]
        spans, entries = (t.cpu().numpy() for t in self.rows)
        heights = np.minimum(seqlen_q - np.arange(spans.shape[2]) * self.tile[0], self.tile[0])
        widths = np.minimum(
            seqlen_k - np.arange(self.columns.spans.shape[2]) * self.tile[1], self.tile[1]
        )
        height = np.broadcast_to(heights, spans.shape[:3]).ravel()
        each = np.repeat(height, (spans[..., 2] - spans[..., 0]).ravel())
        computed = int((each * widths[entries[:, 0]]).sum())
        return 1 - computed / self._scores if self._scores else 0.0

    @property
    def visible_fraction(self) -> float:
        """The fraction of the Bm Hm Sq Sk scores that are visible; 0 without scores.

        It is at most 1 - sparsity, since partial tiles are computed whole.
        """
        numbers = self.rows.entries[:, 1].cpu().numpy()
        counts = np.bitwise_count(self.bits.cpu().numpy().view(np.uint32)).sum((1, 2), np.int64)
        of_full = int((numbers < 0).sum()) * self.tile[0] * self.tile[1]
        visible = of_full + int(counts[numbers[numbers >= 0]].sum())
        return visible / self._scores if self._scores else 0.0

    @property
    def _scores(self) -> int:
        batch, heads, seqlen_q, seqlen_k = self.shape
        return batch * heads * seqlen_q * seqlen_k

    @eager
    def to_dense(self) -> Tensor:
        """Return bool (Bm, Hm, Sq, Sk), True where visible. It takes O(Sq Sk) memory; for tests and
        plots."""
        whole = to_tile_map(self)
        words = whole.words(whole.numbers).swapaxes(3, 4)  # (Bm, Hm, R, tile_q, C, words)
        bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
        batch, heads, rows, tile_q, columns, _ = words.shape
        dense = bits.reshape(batch, heads, rows * tile_q, columns * self.tile[1])
        visible = dense[..., : self.shape[2], : self.shape[3]].astype(bool)
        return torch.from_numpy(visible).to(self.device)

    @eager
    def crop(self, start: int, stop: int, seqlen_k: int | None = None) -> BlockMask:
        """Return the mask of queries start ... stop - 1 over the first seqlen_k keys (all if None).

        Chunked prefill of a long prompt takes one chunk of the mask after another:
        `mask.crop(start, stop, stop)`.

        Raises:
            ValueError, TypeError: start, stop or seqlen_k lie outside the mask or are no ints.
        """
        start, stop = check_count("start", start), check_count("stop", stop)
        seqlen_k = self.shape[3] if seqlen_k is None else check_count("seqlen_k", seqlen_k)
        if not start <= stop <= self.shape[2]:
            raise ValueError(
                f"start and stop must lie in order from 0 to {self.shape[2]}, "
                f"got {start} and {stop}"
            )
        if seqlen_k > self.shape[3]:
            raise ValueError(f"seqlen_k must be at most {self.shape[3]}, got {seqlen_k}")
        cropped = tile_map.crop(to_tile_map(self), start, stop, seqlen_k)
        return from_tile_map(cropped, self.device)

    def same_as(self, other: BlockMask) -> bool:
        """Return whether both masks have the same shape and the same visible pairs, whatever their
        tiles.

        Raises:
            ValueError: masks of the same shape lie on different devices.
        """
        if self.shape != other.shape:
            return False
        different = self._combine(other, np.bitwise_xor)
        return len(different.rows.entries) == 0

    def __and__(self, other: BlockMask) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combine(other, np.bitwise_and)

    def __or__(self, other: BlockMask) -> BlockMask:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self._combine(other, np.bitwise_or)

    @eager
    def __invert__(self) -> BlockMask:
        whole = tile_map.everything(self.shape, self.tile)
        inverse = tile_map.combine(to_tile_map(self), whole, np.bitwise_xor)
        return from_tile_map(inverse, self.device)

    @eager
    def _combine(self, other: BlockMask, op: np.ufunc) -> BlockMask:
        if self.device != other.device:
            raise ValueError(f"masks must be on one device, got {self.device} and {other.device}")
        left, right = aligned([self, other])
        combined = tile_map.combine(left, right, op)
        return from_tile_map(combined, self.device)

    def plot(self, ax: Any = None, *, batch: int = 0, head: int = 0) -> Any:
        """Draw the tiles of one sequence and head, with one colour each for empty, partial and
        full.

        Where tiles are smaller than pixels, one cell stands for several: partial if one of them
        is, else full if one is.

        Args:
            ax: the matplotlib axes, new ones when None. Axes run in queries (down) and keys.
            batch, head: the indices of sequence and head; arbitrary when they share the mask.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: batch or head lie outside the mask.

        Example:
            >>> masks.causal(4096).plot().figure.savefig("causal.png")
        """
        at = []
        for name, index, size in zip(("batch", "head"), (batch, head), self.shape[:2], strict=True):
            if index < 0 or (size > 1 and index >= size):
                raise ValueError(f"{name} must lie from 0 to {size - 1}, got {index}")
            at.append(index if size > 1 else 0)
        return draw(to_tile_map(self).numbers[at[0], at[1]], self.shape, self.tile, ax)

    def __repr__(self) -> str:
        text = f"BlockMask({self.shape}, tiles {self.tile[0]} x {self.tile[1]}"
        if self.device.type == "meta":
            return f"{text} on meta)"
        tiles = self.tiles
        return (
            f"{text}: {tiles.empty:,} empty, {tiles.partial:,} partial ({len(self.bits):,} "
            f"distinct), {tiles.full:,} full; {self.memory() / 1024:,.1f} KiB on {self.device})"
        )


def _from_tensors(tensors: Iterable[Any], context: tuple[Any, Any]) -> BlockMask:
    bits, rows, row_entries, columns, column_entries = tensors
    lists = TileLists(rows, row_entries), TileLists(columns, column_entries)
    # unchecked: in a pytree any object may stand in for a mask's tensors
    mask = object.__new__(BlockMask)
    for name, value in zip(_FIELDS, (*context, bits, *lists), strict=True):
        object.__setattr__(mask, name, value)
    return mask


def _check(mask: BlockMask, *, is_loaded: bool = False) -> None:
    """Raise an error unless the attributes of a mask are as `BlockMask` documents.

    Args:
        is_loaded: True if they come from a file, where subclasses of Tensor are refused.
    """
    _check_numbers(mask)
    for name, lists in (("rows", mask.rows), ("columns", mask.columns)):
        if not isinstance(lists, TileLists):
            raise TypeError(f"{name} of a mask must be TileLists, got {type(lists).__name__}")
    high, wide = tile_map.tiles_of(mask.shape, mask.tile)
    shapes = (
        (None, mask.tile[0], mask.tile[1] // tile_map.WORD),
        (*mask.shape[:2], high, 3),
        (None, 2),
        (*mask.shape[:2], wide, 3),
        (None, 2),
    )
    for name, tensor, shape in zip(_TENSORS, mask.tensors(), shapes, strict=True):
        if not isinstance(tensor, Tensor) or (is_loaded and type(tensor) is not Tensor):
            raise TypeError(f"{name} of a mask must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != torch.int32 or tensor.layout != torch.strided:
            raise TypeError(f"{name} of a mask must be int32, got {tensor.dtype}, {tensor.layout}")
        fits = len(tensor.shape) == len(shape) and all(
            size is None or size == have for size, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits or tensor.device != mask.bits.device:
            raise ValueError(
                f"{name} of a mask must have shape {shape} and lie on {mask.bits.device}, "
                f"got {tuple(tensor.shape)} on {tensor.device}"
            )
    if mask.device.type != "meta" and all(type(t) is Tensor for t in mask.tensors()):
        bits, rows, row_entries, columns, column_entries = (
            t.detach().cpu().numpy() for t in mask.tensors()
        )
        tile_map.check_lists(
            mask.shape, mask.tile, bits, (rows, row_entries), (columns, column_entries)
        )


def _check_numbers(mask: BlockMask) -> None:
    shape, tile = mask.shape, mask.tile
    if (
        type(shape) is not tuple
        or len(shape) != 4
        or not all(type(n) is int and 0 <= n < 2**31 for n in shape)
    ):
        raise ValueError(f"shape of a mask must be four lengths (Bm, Hm, Sq, Sk), got {shape!r}")
    is_pair = type(tile) is tuple and len(tile) == 2 and all(type(n) is int for n in tile)
    if not is_pair or not all(n in tile_map.TILES for n in tile):
        raise ValueError(f"tile of a mask must be a pair of 64 or 128, got {tile!r}")


_FIELDS = ("shape", "tile", "bits", "rows", "columns")
_TENSORS = ("bits", "row_spans", "row_entries", "column_spans", "column_entries")
# A mask can be an argument of exported and transformed functions, as its tensors.
_pytree.register_pytree_node(
    BlockMask,
    lambda mask: (list(mask.tensors()), (mask.shape, mask.tile)),
    _from_tensors,
    serialized_type_name="tilewise.masks.BlockMask",
    to_dumpable_context=lambda context: [list(part) for part in context],
    from_dumpable_context=lambda context: tuple(tuple(part) for part in context),
    flatten_with_keys_fn=lambda mask: (
        [(_pytree.GetAttrKey(n), t) for n, t in zip(_TENSORS, mask.tensors(), strict=True)],
        (mask.shape, mask.tile),
    ),
)
# so that torch.load accepts masks with its default weights_only=True
torch.serialization.add_safe_globals([BlockMask, TileLists])


def from_tile_map(whole: TileMap, device: torch.device) -> BlockMask:
    """Return the BlockMask, on `device`, of a tile map whose bit tiles are distinct, all used, and
    0 outside (Sq, Sk); this is not checked."""
    rows, columns = (
        TileLists(*(torch.from_numpy(part) for part in tile_map.tile_lists(numbers)))
        for numbers in (whole.numbers, np.ascontiguousarray(whole.numbers.swapaxes(2, 3)))
    )
    tensors = (torch.from_numpy(whole.bits), *rows, *columns)
    return _from_tensors(tensors, (whole.shape, whole.tile)).to(device)


def to_tile_map(mask: BlockMask) -> TileMap:
    """Return the tile map of a mask, in main memory; the inverse of `from_tile_map`."""
    bits, (spans, entries) = mask.bits.cpu().numpy(), (t.cpu().numpy() for t in mask.rows)
    rows, columns = tile_map.tiles_of(mask.shape, mask.tile)
    seen = (spans[..., 2] - spans[..., 0]).ravel()
    numbers = np.full((len(seen), columns), EMPTY, np.int32)
    owners = np.repeat(np.arange(len(seen)), seen)
    numbers[owners, entries[:, 0]] = np.where(entries[:, 1] < 0, FULL, entries[:, 1])
    return TileMap(mask.shape, mask.tile, numbers.reshape(*mask.shape[:2], rows, columns), bits)


def aligned(masks: list[BlockMask], dims: tuple[int, ...] = (0, 1)) -> list[TileMap]:
    """Return the tile maps of masks, all cut to the smallest of their tile sizes; sizes Bm and Hm
    stay.

    Raises:
        ValueError: masks differ in (Sq, Sk), or do not broadcast in a dimension of `dims`.
    """
    first = masks[0].shape
    for mask in masks[1:]:
        if mask.shape[2:] != first[2:]:
            raise ValueError(
                f"masks must cover the same queries and keys, got {first[2:]} and {mask.shape[2:]}"
            )
    for dim in dims:
        sizes = sorted({mask.shape[dim] for mask in masks} - {1})
        if len(sizes) > 1:
            raise ValueError(
                f"masks must be for 1 or the same number of {('sequences', 'heads')[dim]}, "
                f"got {sizes[0]} and {sizes[1]}"
            )
    tile = min(mask.tile[0] for mask in masks), min(mask.tile[1] for mask in masks)
    return [tile_map.refine(to_tile_map(mask), tile) for mask in masks]
