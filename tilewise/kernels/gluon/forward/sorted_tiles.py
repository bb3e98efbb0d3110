"""The plan of a packed batch: its tiles of rows, from much to little work, made on the device.

What: int32 (entries, 6), one row for each tile of rows of each sequence: (sequence, first row,
      first row of the sequence in q, its rows, its first key in k, its keys), and their number.
Grid: `attention_plan_kernel` one program a sequence, which lists its tiles, and one for each
      CLEAR_ROWS rows of q, which clears rows of o and lse that belong to no sequence;
      `attention_order_kernel` one program for each ENTRIES entries.
One program: its entries; in the order kernel also the work of all others, to count who comes first.
Traffic: 28 bytes an entry, written twice; rows without a sequence once.
Numerics: integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.gluon.visible import blocks_of_tiles

CLEAR_ROWS = 128
ENTRIES = 128
FIELDS = tl.constexpr(6)
FIELDS_PAD = 8
PLAN_CHUNK = 128


def plan_sizes(batch: int, rows: int, upper_bound: int) -> tuple[list[int], int]:
    """Return [int32 elements of `size`, `work`, `entries` and the plan], and the number of programs
    of `attention_plan_kernel`.

    Args:
        rows: the rows of q.
        upper_bound: the largest number of tiles of rows that all sequences together may have.
    """
    fields = upper_bound * FIELDS.value
    return [1, upper_bound, fields, fields], max(batch, -(-rows // CLEAR_ROWS))


@triton.jit
def _rows_of(cu, b, mask, rows, longest):
    """Return the first rows of sequences and their numbers of rows, clamped to rows that exist.

    A GPU cannot raise an error without a wait. Lengths are also at most `longest`, the size of bias
    and block mask.
    """
    begin = tl.minimum(tl.maximum(tl.load(cu + b, mask=mask, other=0), 0), rows)
    # At least begin before it is subtracted: of -2^31 the difference would be positive.
    end = tl.minimum(tl.maximum(tl.load(cu + b + 1, mask=mask, other=0), begin), rows)
    return begin, tl.minimum(end - begin, longest)


@triton.jit
def _tiles_before(cu_q, sequence, rows, longest, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many tiles of ROWS rows the sequences before number `sequence` have together."""
    total = sequence * 0
    for first in range(0, sequence, CHUNK):
        b = first + tl.arange(0, CHUNK)
        before = b < sequence
        _, length = _rows_of(cu_q, b, before, rows, longest)
        total += tl.sum(tl.cdiv(length, ROWS))
    return total


@triton.jit(
    do_not_specialize=[
        "batch",
        "rows",
        "rows_k",
        "seqlen_q",
        "seqlen_k",
        "upper_bound",
        "heads",
        "width",
        "window_left",
        "window_right",
    ]
)
def attention_plan_kernel(
    cu_q,
    cu_k,
    entries,
    work,
    size,
    o,
    lse,
    batch,
    rows,
    rows_k,
    seqlen_q,
    seqlen_k,
    upper_bound,
    heads,
    width,
    window_left,
    window_right,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CLEAR: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the entries of one sequence's tiles of rows, and for each its work in blocks of keys;
    the last sequence's program also writes their number to `size`.

    A program also sets o to 0 and lse to -inf in those of its CLEAR rows that belong to no
    sequence.
    """
    program = tl.program_id(0)
    if program < batch:
        first_q, length_q = _rows_of(cu_q, program, True, rows, seqlen_q)
        first_k, length_k = _rows_of(cu_k, program, True, rows_k, seqlen_k)
        start = _tiles_before(cu_q, program, rows, seqlen_q, ROWS, CHUNK)
        tiles = tl.cdiv(length_q, ROWS)
        # Sequences that overlap have more tiles than there is room for.
        tiles = tl.minimum(tiles, tl.maximum(upper_bound - start, 0))
        if program == batch - 1:
            tl.store(size, tl.minimum(start + tiles, upper_bound))
        for first in range(0, tiles, CHUNK):
            tile = first + tl.arange(0, CHUNK)
            exists = tile < tiles
            row = tile * ROWS
            last = tl.minimum(row + ROWS, length_q) - 1
            blocks = blocks_of_tiles(row, last, length_q, length_k, window_left, window_right, KEYS)
            at = entries + (start + tile) * FIELDS
            tl.store(at, tl.zeros_like(row) + program, mask=exists)
            tl.store(at + 1, row, mask=exists)
            tl.store(at + 2, tl.zeros_like(row) + first_q, mask=exists)
            tl.store(at + 3, tl.zeros_like(row) + length_q, mask=exists)
            tl.store(at + 4, tl.zeros_like(row) + first_k, mask=exists)
            tl.store(at + 5, tl.zeros_like(row) + length_k, mask=exists)
            tl.store(work + start + tile, blocks, mask=exists)
    owned_begin, owned_end = tl.load(cu_q), tl.load(cu_q + batch)
    first_row = program * CLEAR
    last_row = tl.minimum(first_row + CLEAR, rows)
    if (first_row < owned_begin) | (last_row > owned_end):
        for row in range(first_row, last_row):
            if (row < owned_begin) | (row >= owned_end):
                place = (owned_end * 0 + row).to(tl.int64)  # in the interpreter `row` is an int
                start = o + place * heads * width
                for first in range(0, heads * width, CHUNK):
                    at = first + tl.arange(0, CHUNK)
                    zero = tl.zeros([CHUNK], o.dtype.element_ty)
                    tl.store(start + at, zero, mask=at < heads * width)
                for first in range(0, heads, CHUNK):
                    head = first + tl.arange(0, CHUNK)
                    at = head.to(tl.int64) * rows + place
                    hidden = tl.full([CHUNK], float("-inf"), tl.float32)
                    tl.store(lse + at, hidden, mask=head < heads)


@triton.jit
def attention_order_kernel(
    entries, work, size, plan, COUNT: tl.constexpr, FIELDS_PAD: tl.constexpr
):
    """Write COUNT `entries` for each program to their places in `plan`, by falling work; entries of
    equal work keep their order."""
    total = tl.load(size)
    first = tl.program_id(0) * COUNT
    if first < total:
        entry = first + tl.arange(0, COUNT)
        exists = entry < total
        mine = tl.load(work + entry, mask=exists, other=0)
        rank = tl.zeros([COUNT], tl.int32)
        for begin in range(0, total, COUNT):
            other = begin + tl.arange(0, COUNT)
            theirs = tl.load(work + other, mask=other < total, other=-1)[None, :]
            earlier = (theirs == mine[:, None]) & (other[None, :] < entry[:, None])
            before = ((theirs > mine[:, None]) | earlier) & (other[None, :] < total)
            rank += tl.sum(before.to(tl.int32), 1)
        field = tl.arange(0, FIELDS_PAD)
        inside = exists[:, None] & (field < FIELDS)[None, :]
        values = tl.load(entries + entry[:, None] * FIELDS + field[None, :], mask=inside)
        tl.store(plan + rank[:, None] * FIELDS + field[None, :], values, mask=inside)
