"""Tile maps: a mask as one number per tile, and the bit tiles that the numbers refer to. Numpy
only.

Everything here costs O(tiles) plus the distinct bit tiles, never O(Sq Sk): builders and the algebra
evaluate a pair of tiles once, however often it occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Bools = NDArray[np.bool_]

EMPTY, FULL = -1, -2  # special numbers of a tile map; other numbers are indices of bit tiles
TILES = (64, 128)  # side lengths of a mask tile, which the compute tiles of every kernel divide
WORD = 32  # keys whose bits share one word
_CHUNK = 512  # bit tiles made at a time: 8 MiB while they are still one byte a bit


class TileMap(NamedTuple):
    """A mask in main memory as a number for each tile, before its tiles are listed in a
    `BlockMask`.

    Attributes:
        shape: (Bm, Hm, Sq, Sk).
        tile: (tile_q, tile_k).
        numbers: int32 (Bm, Hm, R, C): EMPTY, FULL or the index of a bit tile.
        bits: int32 (n, tile_q, tile_k / 32), as in BlockMask.
    """

    shape: tuple[int, int, int, int]
    tile: tuple[int, int]
    numbers: Ints
    bits: Ints

    def words(self, numbers: NDArray[Any]) -> Ints:
        """Return the words (..., tile_q, tile_k / 32) of the tiles that `numbers` (...) name: zeros
        for EMPTY, ones in every bit for FULL, else the bit tile of that index."""
        words = np.zeros((*numbers.shape, *self.bits.shape[1:]), np.int32)
        words[numbers == FULL] = -1
        partial = numbers >= 0
        words[partial] = self.bits[numbers[partial]]
        return words


class BitTiles:
    """The distinct bit tiles of a mask that is being built: equal tiles get the same number.

    Args:
        tile: the queries and keys of a tile.
    """

    def __init__(self, tile: tuple[int, int]) -> None:
        self.tile = tile
        self._numbers: dict[bytes, int] = {}

    def add(self, words: Ints) -> Ints:
        """Return the numbers of tiles (n, tile_q, tile_k / 32): EMPTY, FULL or an index into
        `bits()`."""
        rows = words.reshape(len(words), self.tile[0] * self.tile[1] // WORD)
        numbers = np.where((rows == -1).all(-1), FULL, EMPTY).astype(np.int32)
        for at in np.flatnonzero(rows.any(-1) & (numbers != FULL)):
            numbers[at] = self._numbers.setdefault(rows[at].tobytes(), len(self._numbers))
        return numbers

    def add_made(self, count: int, make: Callable[[slice], Ints]) -> Ints:
        """Return the numbers of `count` tiles, as `add` does; make(part) returns the words of a
        slice of them, at most _CHUNK tiles."""
        parts = [
            self.add(make(slice(at, min(at + _CHUNK, count)))) for at in range(0, count, _CHUNK)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def bits(self) -> Ints:
        """Return all bit tiles added so far, int32 (n, tile_q, tile_k / 32), in the order of their
        numbers."""
        joined = np.frombuffer(bytearray().join(self._numbers), np.int32)
        return joined.reshape(-1, self.tile[0], self.tile[1] // WORD)


def tiles_of(shape: tuple[int, int, int, int], tile: tuple[int, int]) -> tuple[int, int]:
    """Return how many tiles of queries and of keys cover the shape."""
    return -(-shape[2] // tile[0]), -(-shape[3] // tile[1])


def pack(visible: Bools) -> Ints:
    """Pack bools (..., keys) into words (..., keys / 32), key 32 w + b into bit b of word w."""
    return np.packbits(np.ascontiguousarray(visible), axis=-1, bitorder="little").view("<i4")


def combine(a: TileMap, b: TileMap, op: np.ufunc) -> TileMap:
    """Return a bitwise op of two maps of the same tile sizes, queries and keys, such as their `&`;
    Bm and Hm of 1 broadcast."""
    left, right = np.broadcast_arrays(a.numbers, b.numbers)
    numbers = np.full(left.shape, EMPTY, np.int32)
    numbers[op(left == FULL, right == FULL)] = FULL
    mixed = (left >= 0) | (right >= 0)
    bits = _evaluate_pairs(a, b, left, right, numbers, mixed, op)
    batch, heads = left.shape[:2]
    return TileMap((batch, heads, *a.shape[2:]), a.tile, numbers, bits)


def _evaluate_pairs(
    a: TileMap,
    b: TileMap,
    left: Ints,
    right: Ints,
    numbers: Ints,
    mixed: Bools,
    op: Callable[[Ints, Ints], Ints],
) -> Ints:
    """Set numbers[mixed] in place to the numbers of op(a's tile, b's tile), and return the bit
    tiles of the new map.

    left, right: the tiles' numbers in a and b, in the shape of `numbers`; each distinct pair is
    evaluated once. mixed: True where a tile must be evaluated.
    """
    width = len(b.bits) + 2
    pairs = (left[mixed].astype(np.int64) + 2) * width + (right[mixed] + 2)
    distinct, inverse = np.unique(pairs, return_inverse=True)
    of_a, of_b = (part - 2 for part in np.divmod(distinct, width))
    store = BitTiles(a.tile)
    codes = store.add_made(len(distinct), lambda s: op(a.words(of_a[s]), b.words(of_b[s])))
    numbers[mixed] = codes[inverse]
    return store.bits()


def by_key(flags: Bools, seqlen_q: int, tile: tuple[int, int]) -> TileMap:
    """Return the tile map (Bm, 1, Sq, Sk) of the rule visible(b, i, j) = flags[b, j], flags (Bm,
    Sk); keys beyond Sk are hidden, rows of the last tiles beyond Sq are not."""
    shape = (len(flags), 1, seqlen_q, flags.shape[1])
    numbers, blocks, partial = _flag_tiles(flags, tile[1])
    store = BitTiles(tile)

    def make(some: slice) -> Ints:
        words = pack(blocks[some])[:, None]
        return np.broadcast_to(words, (len(words), tile[0], words.shape[-1]))

    numbers[partial] = store.add_made(len(blocks), make)
    rows, columns = tiles_of(shape, tile)
    whole = np.broadcast_to(numbers[:, None, None], (shape[0], 1, rows, columns))
    return TileMap(shape, tile, whole, store.bits())


def by_query(flags: Bools, seqlen_k: int, tile: tuple[int, int]) -> TileMap:
    """Return the tile map (Bm, 1, Sq, Sk) of the rule visible(b, i, j) = flags[b, i], flags (Bm,
    Sq); rows beyond Sq are hidden, keys of the last tiles beyond Sk are not."""
    shape = (len(flags), 1, flags.shape[1], seqlen_k)
    numbers, blocks, partial = _flag_tiles(flags, tile[0])
    store = BitTiles(tile)

    def make(some: slice) -> Ints:
        rows = -blocks[some].astype(np.int32)
        return np.broadcast_to(rows[..., None], (*rows.shape, tile[1] // WORD))

    numbers[partial] = store.add_made(len(blocks), make)
    rows, columns = tiles_of(shape, tile)
    whole = np.broadcast_to(numbers[:, None, :, None], (shape[0], 1, rows, columns))
    return TileMap(shape, tile, whole, store.bits())


def _flag_tiles(flags: Bools, length: int) -> tuple[Ints, Bools, Bools]:
    """Cut flags (Bm, S) into tiles of `length` tokens.

    Returns:
        int32 (Bm, tiles), FULL where all flags of a tile are set, else EMPTY; the bools (n, length)
        of the tiles with both values; and bool (Bm, tiles), True for these tiles.
    """
    tiles = -(-flags.shape[1] // length)
    padded = np.zeros((len(flags), tiles * length), dtype=bool)
    padded[:, : flags.shape[1]] = flags
    cut = padded.reshape(len(flags), tiles, length)
    numbers = np.where(cut.all(-1), FULL, EMPTY).astype(np.int32)
    partial = cut.any(-1) & (numbers != FULL)
    return numbers, cut[partial], partial


def everything(shape: tuple[int, int, int, int], tile: tuple[int, int]) -> TileMap:
    """Return the tile map (1, 1, Sq, Sk) of all pairs inside (Sq, Sk) of `shape`, to `combine` with
    others: tiles that reach beyond are bit tiles, in which the pairs outside are hidden, and the
    other tiles are full."""
    queries = by_query(np.ones((1, shape[2]), dtype=bool), shape[3], tile)
    keys = by_key(np.ones((1, shape[3]), dtype=bool), shape[2], tile)
    return combine(queries, keys, np.bitwise_and)


def bounded(raw: TileMap) -> TileMap:
    """Return a map that hides the pairs outside (Sq, Sk); `raw` itself if its tiles fit exactly."""
    if raw.shape[2] % raw.tile[0] == 0 and raw.shape[3] % raw.tile[1] == 0:
        return raw
    return combine(raw, everything(raw.shape, raw.tile), np.bitwise_and)


def refine(whole: TileMap, tile: tuple[int, int]) -> TileMap:
    """Return a map with its tiles cut into smaller ones of size `tile`, which divides the map's;
    the map itself if that is its tile size."""
    if whole.tile == tile:
        return whole
    over_q, over_k = whole.tile[0] // tile[0], whole.tile[1] // tile[1]
    store = BitTiles(tile)
    cut = whole.bits.reshape(-1, over_q, tile[0], over_k, tile[1] // WORD).swapaxes(2, 3)
    codes = np.empty((len(cut) + 2, over_q, over_k), np.int32)
    codes[:-2] = store.add(np.ascontiguousarray(cut).reshape(-1, tile[0], tile[1] // WORD)).reshape(
        -1, over_q, over_k
    )
    # the last two entries, which the indices -1 and -2 select
    codes[EMPTY], codes[FULL] = EMPTY, FULL
    rows, columns = tiles_of(whole.shape, tile)
    numbers = codes[whole.numbers].swapaxes(3, 4)
    batch, heads, high, _, wide, _ = numbers.shape
    numbers = numbers.reshape(batch, heads, high * over_q, wide * over_k)
    return TileMap(whole.shape, tile, numbers[..., :rows, :columns], store.bits())


def crop(whole: TileMap, start: int, stop: int, seqlen_k: int) -> TileMap:
    """Return the map of queries start ... stop - 1 and the first seqlen_k keys of a map."""
    tile_q = whole.tile[0]
    shape = (*whole.shape[:2], stop - start, seqlen_k)
    rows, columns = tiles_of(shape, whole.tile)
    skipped, inside = divmod(start, tile_q)
    padded = np.full((*shape[:2], rows + 1, columns), EMPTY, np.int32)
    kept = whole.numbers[:, :, skipped : skipped + rows + 1, :columns]
    padded[:, :, : kept.shape[2]] = kept
    upper, lower = padded[:, :, :-1], padded[:, :, 1:]

    def shift(above: Ints, below: Ints) -> Ints:
        return np.concatenate((above[:, inside:], below[:, :inside]), axis=1)

    numbers = upper.copy()
    mixed = (upper != lower) | (upper >= 0)
    bits = _evaluate_pairs(whole, whole, upper, lower, numbers, mixed, shift)
    return bounded(TileMap(shape, whole.tile, numbers, bits))


def join(maps: list[TileMap], axis: int) -> TileMap:
    """Return maps of the same tile and (Sq, Sk) concatenated along Bm (axis 0) or Hm (axis 1)."""
    store = BitTiles(maps[0].tile)
    numbers = []
    for part in maps:
        codes = np.empty(len(part.bits) + 2, np.int32)
        codes[:-2] = store.add(part.bits)
        codes[EMPTY], codes[FULL] = EMPTY, FULL
        numbers.append(codes[part.numbers])
    whole = np.concatenate(numbers, axis=axis)
    return TileMap((*whole.shape[:2], *maps[0].shape[2:]), maps[0].tile, whole, store.bits())


def check_lists(
    shape: tuple[int, int, int, int],
    tile: tuple[int, int],
    bits: Ints,
    rows: tuple[Ints, Ints],
    columns: tuple[Ints, Ints],
) -> None:
    """Refuse lists of tiles that refer outside of a mask, contradict each other, or list a tile
    twice.

    Args:
        rows, columns: spans (Bm, Hm, R or C, 3) and entries (n, 2), as `tile_lists` makes them.

    Raises:
        ValueError: a kernel would read outside of its tensors, or see other pairs forward than
            backward.
    """
    counts = tiles_of(shape, tile)
    found = [
        _tiles_in_lists(name, lists, across, len(bits))
        for name, lists, across in (("rows", rows, counts[1]), ("columns", columns, counts[0]))
    ]
    (row_of, column, number), (column_of, row, other) = found
    batch, row_of = np.divmod(row_of, max(counts[0], 1))
    other_batch, column_of = np.divmod(column_of, max(counts[1], 1))
    one, two = np.lexsort((column, row_of, batch)), np.lexsort((column_of, row, other_batch))
    tiles = np.stack((batch, row_of, column, number))[:, one]
    if not np.array_equal(tiles, np.stack((other_batch, row, column_of, other))[:, two]):
        raise ValueError("mask must have the same tiles in rows and in columns, got others")
    if (np.diff(tiles[:3]) == 0).all(0).any():
        raise ValueError("mask must name each tile at most once, got one twice")
    height = np.minimum(shape[2] - row_of * tile[0], tile[0])
    width = np.minimum(shape[3] - column * tile[1], tile[1])
    for size in (
        (shape[2] % tile[0], tile[1]),
        (tile[0], shape[3] % tile[1]),
        (shape[2] % tile[0], shape[3] % tile[1]),
    ):
        cut = (height == size[0]) & (width == size[1]) & ((height < tile[0]) | (width < tile[1]))
        outside = np.ones(tile, dtype=bool)
        outside[: size[0], : size[1]] = False
        numbers = np.unique(number[cut])
        if (numbers < 0).any() or (bits[numbers] & pack(outside)).any():
            raise ValueError(f"mask must show nothing outside of {shape[2:]}, got a tile that does")


def _tiles_in_lists(
    name: str, lists: tuple[Ints, Ints], across: int, num_bits: int
) -> tuple[NDArray[np.signedinteger], ...]:
    """Return three flat arrays with a value for each entry of lists of tiles: the index of its
    list, its tile's index in the list's direction, and the number of its bit tile, -1 for a full
    tile.

    Args:
        name: the name of the lists, rows or columns, for messages.
        lists: the spans (Bm, Hm, R or C, 3) and the entries (n, 2).
        across: the number of tiles in the list's direction.
        num_bits: the number of bit tiles.

    Raises:
        ValueError: spans or entries leave their ranges, are out of order, or leave entries out.
    """
    spans, entries = (part.astype(np.int64) for part in lists)
    flat = spans.reshape(-1, 3)
    wrong = (flat[:, 0] < 0) | (np.diff(flat) < 0).any(1) | (flat[:, 2] > len(entries))
    if wrong.any():
        raise ValueError(
            f"{name}.spans of a mask must rise within 0 to {len(entries)}, got {flat[wrong][0]}"
        )
    lengths = flat[:, 2] - flat[:, 0]
    if lengths.sum() != len(entries):
        raise ValueError(
            f"{name}.spans of a mask must hold each of {len(entries)} entries once, "
            f"got {lengths.sum()}"
        )
    owner = np.repeat(np.arange(len(flat)), lengths)
    at = np.arange(len(entries)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    at += np.repeat(flat[:, 0], lengths)
    place, number = entries[at, 0], entries[at, 1]
    is_full = at < np.repeat(flat[:, 1], lengths)
    follows = (np.diff(owner) == 0) & (np.diff(is_full.astype(np.int8)) == 0)
    if (follows & (np.diff(place) <= 0)).any():
        raise ValueError(f"{name}.entries of a mask must ascend within a list, got others")
    for what, values, least, most in (
        ("name tiles", place, 0, across - 1),
        ("number full tiles", number[is_full], -1, -1),
        ("number partial tiles", number[~is_full], 0, num_bits - 1),
    ):
        wrong = (values < least) | (values > most)
        if wrong.any():
            raise ValueError(
                f"{name}.entries of a mask must {what} in [{least}, {most}], got {values[wrong][0]}"
            )
    return owner, place, number


def tile_lists(numbers: Ints) -> tuple[Ints, Ints]:
    """Return the spans and entries of `TileLists`: the visible tiles of each row of `numbers` (Bm,
    Hm, R, C), full ones first, each kind by ascending column. Raise ValueError for 2**31 tiles or
    more."""
    batch, heads, count, columns = numbers.shape
    flat = numbers.reshape(batch * heads * count, columns)
    full_row, full_column = np.nonzero(flat == FULL)
    partial_row, partial_column = np.nonzero(flat >= 0)
    num_full = np.bincount(full_row, minlength=len(flat))
    num_partial = np.bincount(partial_row, minlength=len(flat))
    end = np.cumsum(num_full + num_partial)
    total = len(full_row) + len(partial_row)
    if total > np.iinfo(np.int32).max:
        raise ValueError(f"a mask must have less than 2**31 visible tiles, got {total}")
    entries = np.empty((total, 2), np.int32)
    # A full tile comes after the partial ones of earlier rows, a partial one after all full ones.
    place = np.arange(len(full_row)) + (np.cumsum(num_partial) - num_partial)[full_row]
    entries[place, 0], entries[place, 1] = full_column, -1
    place = np.arange(len(partial_row)) + np.cumsum(num_full)[partial_row]
    entries[place, 0], entries[place, 1] = partial_column, flat[partial_row, partial_column]
    first = end - num_full - num_partial
    spans = np.stack((first, first + num_full, end), -1).astype(np.int32)
    return spans.reshape(batch, heads, count, 3), entries
