"""Rearrange tiles of rows into the panels that `gemm.py` multiplies by.

What      A tile is `count` rows in scratch, `ld` elements apart. There are two layouts:
          transposed panels, where rows of the tile are columns of the operand (K in Q K^T);
          paired panels, where rows of the tile run along the operand's K (V in P V).
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  packs one tile.
Traffic   reads and writes every element of the tile once per layout, in the L2 cache.
Numerics  copies bits.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.threads import bare, inner

_i16, _i32, _i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _order(lanes):
    return ir.Constant(ir.VectorType(_i32, len(lanes)), lanes)


def emit_transpose(builder, rows):
    """Emit the transposition of a list of vectors, as many as each has lanes, and return the list
    of the transposed ones.

    There are log2(lanes) rounds; the round of distance d exchanges bit d of the row with bit d of
    the lane.
    """
    rows, lanes, distance = list(rows), len(rows), 1
    while distance < lanes:
        low = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
        high = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
        for row in range(lanes):
            if not row & distance:
                a, b = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(a, b, _order(low))
                rows[row + distance] = builder.shuffle_vector(a, b, _order(high))
        distance *= 2
    return rows


@intrinsic
def transpose_block(typingctx, source, si, source_row, target, ti, target_row):
    """Transpose a block of LANES x LANES words from source[si:] to target[ti:]; a word is a float
    or a pair of bfloat16.

    source_row and target_row count elements from row to row.
    """

    def codegen(context, builder, sig, args):
        source_, si_, source_row_, target_, ti_, target_row_ = args
        word = _i64 if source.dtype == types.float64 else _i32
        align = 2 if source.dtype == types.uint16 else 4
        lanes = simd.REGISTER_BYTES * 8 // word.width
        kind = ir.VectorType(word, lanes)
        read = simd.pointer_to(context, builder, source, source_, si_)
        rows = [
            simd.load_vector(
                builder, builder.gep(read, [builder.mul(source_row_, _i64(row))]), kind, align
            )
            for row in range(lanes)
        ]
        write = simd.pointer_to(context, builder, target, target_, ti_)
        for row, value in enumerate(emit_transpose(builder, rows)):
            pointer = builder.gep(write, [builder.mul(target_row_, _i64(row))])
            simd.store_vector(builder, value, pointer, align)
        return context.get_dummy_value()

    index = types.int64
    return types.void(source, index, index, target, index, index), codegen


@intrinsic
def pair_words(typingctx, source, even, odd, target, ti):
    """Interleave LANES bfloat16 from source[even:] with LANES from source[odd:], and store the
    words (even[lane], odd[lane]) to target[ti:]."""

    def codegen(context, builder, sig, args):
        source_, even_, odd_, target_, ti_ = args
        lanes = simd.REGISTER_BYTES // 4
        kind = ir.VectorType(_i16, lanes)
        low, high = (
            simd.load_vector(
                builder, simd.pointer_to(context, builder, source, source_, at), kind, 2
            )
            for at in (even_, odd_)
        )
        order = _order([half * lanes + lane for lane in range(lanes) for half in (0, 1)])
        pointer = simd.pointer_to(context, builder, target, target_, ti_)
        simd.store_vector(builder, builder.shuffle_vector(low, high, order), pointer, 2)
        return context.get_dummy_value()

    index = types.int64
    return types.void(source, index, index, target, index), codegen


@inner
def transpose_tile(like, source, count, ld, panels):
    """Pack `count` rows (a multiple of the panel width) of `ld` elements into transposed panels.

    `source` holds the rows. Word w of row r goes to panels[r // P][w][r % P], P = panel_columns; a
    panel has ld's words.
    """
    transpose_rows(bare(like), bare(source), ld, 0, count, ld, bare(panels))


@inner
def transpose_rows(like, source, source_row, first, end, ld, panels):
    """Pack rows first ... end - 1 of `ld` elements, source_row elements apart, into transposed
    panels: word w of row r goes to panels[r // P][w][r % P], P = panel_columns.

    Row `first` begins at source[0].

    Args:
        like, source, panels: bare pointers, so that one compiled function serves all callers.
        first, end: the range of rows, multiples of a register's lanes.
    """
    lanes = lanes_in(like)
    elements = words_to_elements(source)
    width = panel_columns(like) * elements
    words = ld // elements
    for row in range(first, end, lanes):
        panel = row // (2 * lanes)
        base = panel * words * width + (row - panel * 2 * lanes) * elements
        for word in range(0, words, lanes):
            transpose_block(
                source,
                (row - first) * source_row + word * elements,
                source_row,
                panels,
                base + word * width,
                width,
            )


@inner
def pair_tile(like, source, count, ld, panels, tile_rows):
    """Pack `count` rows (even) of `ld` elements (a multiple of the panel width) into paired panels.

    `source` holds the rows. Column c of rows 2 w, 2 w + 1 (of row w for floats) goes to panels[c //
    P][w][c % P]; a panel has the words of tile_rows rows.
    """
    pair_rows(bare(like), bare(source), ld, count, ld, bare(panels), tile_rows)


@inner
def pair_rows(like, source, source_row, count, ld, panels, tile_rows):
    """Pack rows into panels of words of two neighbouring rows, as `pair_tile` does, from strided
    rows.

    Args:
        like, source, panels: bare pointers, see `transpose_rows`.
        source_row: the elements from row to row of the source.
        count, ld: the number of rows to pack, and their columns with padding.
        tile_rows: the rows of a panel.
    """
    lanes = lanes_in(like)
    elements = words_to_elements(source)
    width = panel_columns(like) * elements
    words = tile_rows // elements
    for column in range(0, ld, lanes):
        panel = column // (2 * lanes)
        base = panel * words * width + (column - panel * 2 * lanes) * elements
        for word in range(count // elements):
            if elements == 2:
                even = 2 * word * source_row + column
                pair_words(source, even, even + source_row, panels, base + word * width)
            else:
                vector = simd.load(source, word * source_row + column)
                simd.store(panels, base + word * width, vector)


def emit_prefetch(builder, address, writes=False):
    """Emit a prefetch into the L2 cache of the cache line at `address`, an int; harmless for any
    address. With `writes` the line is fetched to be written."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, _i32, _i32, _i32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [pointer, _i32(int(writes)), _i32(2), _i32(1)])  # to L2, data


@intrinsic
def prefetch(typingctx, address):
    """Prefetch the cache line at an address, an int, into the L2 cache; harmless for any
    address."""

    def codegen(context, builder, sig, args):
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def prefetch_to_write(typingctx, address):
    """Prefetch the cache line at an address, an int, that will be written, so that other cores give
    it up; harmless for any address."""

    def codegen(context, builder, sig, args):
        emit_prefetch(builder, args[0], writes=True)
        return context.get_dummy_value()

    return types.void(types.int64), codegen
