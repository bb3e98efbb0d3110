"""The addresses of one sequence's rows, and their way to scratch.

What      addresses of rows of a dense tensor or of cache blocks; rows of any dtype, and of 8 bits
          times their scales, as rows of the operands' type.
Grid      none: called by one thread of a kernel.
One call  one row, or the rows of a tile.
Traffic   reads every element once; a prefetch fetches lines that a later call reads.
Numerics  copies bits, widens, and rounds 8-bit rows to the operands' type.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.frame import pointer_at
from tilewise.kernels.cpu.machine.gemm import lanes_in
from tilewise.kernels.cpu.machine.pack import prefetch, transpose_rows
from tilewise.kernels.cpu.machine.rows import copy_rows
from tilewise.kernels.cpu.machine.threads import bare, inlined, inner
from tilewise.kernels.cpu.paged.quantise import load_values


class Source(NamedTuple):
    """The addresses of one sequence's keys or values, of one key head if there are several: dense,
    packed or in cache blocks.

    Attributes:
        start, row, block: the address of the first row, the bytes from row to row and from block to
            block.
        block_size: the rows of a cache block; 0 if all rows follow one another.
        code, width, row_size: the dtype code of a row, its number of elements, and its bytes.
        scale, scale_row, scale_block: the address of the first scale of 8-bit rows, and the bytes
            from scale to scale and from block to block.
        table, sequence: the (B, M) int32 block table, and the row of it that is this sequence's.
        first: the first row that a query sees. Neither the rows nor the table entry of a cache
            block that ends before it are read, since they may be arbitrary.
    """

    start: int
    row: int
    block: int
    block_size: int
    code: int
    width: int
    row_size: int
    scale: int
    scale_row: int
    scale_block: int
    table: np.ndarray
    sequence: int
    first: int


@inner
def _offset(source, index, row_bytes, block_bytes):
    """Return the byte offset of row `index` of a source, with the given row and block strides.

    A paged source finds the row's block in its table. The int32 block id is widened before it is
    multiplied.
    """
    if source.block_size == 0:
        return index * row_bytes
    block = index // source.block_size
    return (
        types.int64(source.table[source.sequence, block]) * block_bytes
        + (index - block * source.block_size) * row_bytes
    )


@inner
def address_of(source, index):
    """Return the address of row `index` of the sequence; for a paged source its block is looked
    up."""
    return source.start + _offset(source, index, source.row, source.block)


@inner
def scale_address_of(source, index):
    """Return the address of the scales of the sequence's 8-bit row `index`."""
    return source.scale + _offset(source, index, source.scale_row, source.scale_block)


@inner
def prefetch_rows(source, first, last):
    """Prefetch rows first ... last - 1 of the sequence into the L2 cache, but for rows that no
    query sees."""
    for index in range(max(first, source.first), last):
        address = address_of(source, index)
        for line in range(0, source.row_size, 64):
            prefetch(address + line)


@inner
def gather_rows(like, source, scratch, ld, first, count, padded):
    """Load rows first ... first + count - 1 of the sequence into scratch, `ld` elements apart;
    8-bit rows are multiplied by their scales.

    Rows that no query sees become zeros without being read, and zeros fill scratch up to `padded`
    rows. Returns 0.0, or NaN if a row contains an infinity or NaN.
    """
    check = like.dtype.type(0.0)
    unseen = min(max(source.first - first, 0), count)
    for row in range(unseen, count):
        address, scale = address_of(source, first + row), scale_address_of(source, first + row)
        check += load_values(like, source.code, scratch, row * ld, address, source.width, scale)
    # array indices may count from the end, so stores to an array are not vectorised
    cells = bare(scratch)
    for index in range(unseen * ld):
        cells[index] = 0
    for index in range(count * ld, padded * ld):
        cells[index] = 0
    return check


@inlined
def transpose_stored(like, code, start, row_bytes, size, count, ld, spare, rows, panels):
    """Pack `count` rows of `ld` numbers of the operands' own type, of `size` bytes, at address
    `start` and row_bytes apart, into transposed panels, see `pack.transpose_tile`.

    The last rows, fewer than a register's lanes, go through scratch, padded with rows of zeros.

    Args:
        like, rows, panels: bare pointers; rows points to `spare`, scratch for the last rows.
    """
    lanes = lanes_in(like)
    whole = count // lanes * lanes
    stored = pointer_at(rows, start)
    transpose_rows(like, stored, row_bytes // size, 0, whole, ld, panels)
    if whole < count:
        copy_rows(like, code, spare, ld, ld, start, row_bytes, 0, 1, whole, count - whole, lanes)
        transpose_rows(like, rows, ld, whole, whole + lanes, ld, panels)


@inner
def are_finite(like, rows, row, count, dim):
    """Return whether all numbers of `count` rows, `row` elements apart, are finite.

    A row has `dim` numbers, a multiple of 2 registers.
    """
    lanes = lanes_in(like)
    zero = simd.splat(like, 0.0)
    even = odd = later_even = later_odd = zero  # each of which waits for its last addition
    for pair in range(count // 2):
        start = pair * 2 * row
        for at in range(start, start + dim, 2 * lanes):
            even = simd.fma(simd.load(rows, at), zero, even)
            odd = simd.fma(simd.load(rows, at + lanes), zero, odd)
            later_even = simd.fma(simd.load(rows, at + row), zero, later_even)
            later_odd = simd.fma(simd.load(rows, at + row + lanes), zero, later_odd)
    if count % 2 == 1:
        for at in range((count - 1) * row, (count - 1) * row + dim, 2 * lanes):
            even = simd.fma(simd.load(rows, at), zero, even)
            odd = simd.fma(simd.load(rows, at + lanes), zero, odd)
    total = simd.add(simd.add(even, odd), simd.add(later_even, later_odd))
    return simd.sum_lanes(total) == 0.0
