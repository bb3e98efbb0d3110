"""Which tiles of keys one CTA of the kernel for dq meets.

What: the tiles of 64 keys that 128 queries of one head see, in ascending order or, with a block
      mask, places in its lists; every partition of the CTA walks them alike.
Grid: none, inlined into the kernel.
One call: scalars of one CTA.
Traffic: two or three lengths of a packed or ragged batch, lists of a block mask.
Numerics: integers.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.backward.span import head_of_cta, place_of_head
from tilewise.kernels.gluon.visible import key_tiles, listed_tiles

ROWS = gl.constexpr(128)  # queries of a CTA, and of a tile of the block mask


class Rows(NamedTuple):
    """The queries of one CTA and the tiles of keys that they see; made inside a kernel."""

    b: object
    head: object
    first_row: object
    length_q: object
    length_k: object
    start_q: object
    start_k: object
    row_terms: object  # the place of the first row's terms
    begin: object  # first tile that a query sees
    full_begin: object  # first that needs no mask
    full_end: object
    end: object
    partial_entries: object  # entries of a block mask, in place of tiles
    full_entries: object
    partial_end: object


@gluon.jit
def rows_of_cta(shape, scores, places, variant: gl.constexpr):
    """Return the Rows of this CTA of the kernel for dq."""
    TILE_N: gl.constexpr = variant.tile_n
    num_heads = shape.num_kv_heads * shape.group_size
    tile, index = head_of_cta(shape, num_heads)
    if variant.right:
        tile = shape.num_tiles - 1 - tile
    first_row = tile * ROWS
    place = place_of_head(index, num_heads, shape, variant)
    length_q = place.length_q
    length_k = place.length_k
    plane = index
    if variant.packed:
        plane = place.head
    row_terms = plane.to(gl.int64) * shape.rows_per_plane + place.start_row + first_row
    begin, full_begin, full_end, end = key_tiles(
        first_row, ROWS, length_q, length_k, shape.window_left, shape.window_right, variant
    )
    partial_entries = 0
    full_entries = 0
    partial_end = 0
    if variant.mask:
        number = place.head * places.mask_head + tile
        partial_entries, full_entries, partial_end, full_begin, full_end, end = listed_tiles(
            place.b, number, begin, full_begin, full_end, end, scores, places, TILE_N, variant.ruled
        )
        begin = 0
    return Rows(
        place.b,
        place.head,
        first_row,
        length_q,
        length_k,
        place.start_q,
        place.start_k,
        row_terms,
        begin,
        full_begin,
        full_end,
        end,
        partial_entries,
        full_entries,
        partial_end,
    )
