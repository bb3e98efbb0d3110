"""The end of a tile of the forward pass: 64 rows of o and lse leave the registers of a warpgroup.

What: o = acc / l and lse, the sink and the scale of dropout included; where wanted, the largest
      logit of each row, the sink apart.
Grid: none, inlined into the warpgroups of the forward pass.
One call: 64 rows of one head.
Traffic: o through shared memory and TMA, the last rows of a packed sequence by plain stores; lse.
Numerics: float32, o rounded once; rows that see nothing give o = 0, lse = -inf.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.kernels.gluon.device.compat import tma_store
from tilewise.kernels.gluon.device.warpgroup import LN2, scale_rows, sum_layout
from tilewise.kernels.gluon.forward.softmax import finish


class Output(NamedTuple):
    """The result tensors of a call, and the numbers with which `store_rows` finishes and writes
    them."""

    o: object  # descriptor of (64, tile.o_columns) tiles
    o_ptr: object  # address for the last rows of packed sequences
    o_row: object  # Hq Dv / 8
    width: object  # Dv / 8
    lse: object
    lse_batch: object
    lse_head: object
    maxima: object  # largest logit of each row, laid out as lse; None without
    sinks: object  # float32 (Hq,), None without
    philox: object  # int64 (2,), None without dropout
    drop_limit: object
    keep_scale: object


@gluon.jit
def store_rows(
    acc,
    m,
    l,
    rows,
    head,
    output,
    factor,
    shared,
    tile: gl.constexpr,
    variant: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Finish 64 rows of one head and write them: o from acc, m and l, their lse and, with
    variant.maxima, their largest logits; rows past the end of a sequence are not written.

    factor: the factor of FACTORED logits. shared: the buffer `o` of warpgroup GROUP is used.
    """
    sink = 0.0
    if variant.sinks:
        sink = gl.load(output.sinks + rows.h)
    lse, scale = finish(m, l, factor, sink, variant.factored, variant.sinks)
    row = head.first_row + gl.arange(0, 64, lse.type.layout)
    at = rows.b.to(gl.int64) * output.lse_batch + rows.h.to(gl.int64) * output.lse_head
    gl.store(output.lse + (at + rows.first_q) + row, lse, mask=row < rows.length_q)
    if variant.maxima:
        most = m * LN2
        if variant.factored:
            most = most * factor
        gl.store(output.maxima + (at + rows.first_q) + row, most, mask=row < rows.length_q)
    if variant.dropout:
        scale = scale * output.keep_scale
    o = scale_rows(acc, scale).to(shared.o.dtype)
    memory = shared.o.index(GROUP)
    COLUMNS: gl.constexpr = tile.o_columns
    if tile.dv == COLUMNS:
        store_columns(o, memory, rows, head.first_row, 0, output, variant)
    else:
        HALF: gl.constexpr = sum_layout(COLUMNS)
        left, right = gl.split(o.reshape([64, 2, COLUMNS]).permute((0, 2, 1)))
        left = gl.convert_layout(left, HALF, assert_trivial=True)
        right = gl.convert_layout(right, HALF, assert_trivial=True)
        store_columns(left, memory, rows, head.first_row, 0, output, variant)
        store_columns(right, memory, rows, head.first_row, COLUMNS, output, variant)


@gluon.jit
def store_columns(
    o, memory, rows, first_row, first_column: gl.constexpr, output, variant: gl.constexpr
):
    """Write o (64, n) to the rows from `first_row` and the columns from `first_column` of the
    output, through shared `memory` (1, 1, 64, n), by an asynchronous copy; in a packed batch the
    last rows of a sequence by plain stores."""
    WIDTH: gl.constexpr = o.shape[1]
    b = rows.b
    if variant.packed:
        b = rows.b * 0
    tma.store_wait(0)  # what was in this memory before has been read
    memory.reshape([64, WIDTH]).store(o)
    if variant.packed:
        if first_row + 64 > rows.length_q:  # the rows after the last are another sequence's
            _copy_rows(memory.reshape([64, WIDTH]), rows, first_row, first_column, output)
        else:
            fence_async_shared()
            row = rows.first_q + first_row
            tma_store(output.o, [b, rows.h, row, first_column], memory)
    else:
        fence_async_shared()
        tma_store(output.o, [b, rows.h, first_row, first_column], memory)


@gluon.jit
def _copy_rows(memory, rows, first_row, first_column: gl.constexpr, output):
    """Copy the rows of `memory` (64, n) that lie before the end of the sequence to o, 16 bytes a
    thread."""
    WIDTH: gl.constexpr = memory.shape[1]
    ACROSS: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout)) + first_column
    start = output.o_ptr + rows.h.to(gl.int64) * (output.width * 8)
    # Whole row numbers: what each thread adds to the first would be kept in registers all along.
    at = (rows.first_q + first_row + row).to(gl.int64) * (output.o_row * 8)
    at = gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(row < rows.length_q - first_row, 1)
    inside = inside & gl.expand_dims(column // 8 < output.width, 0)
    gl.store(start + at, memory.load(layout), mask=inside)
