"""What comes before and after the backward kernels of Hopper: row terms, and dq's last step.

What: delta = rowsum(o * do) - dlse and lse in base 2, padded: rows of packed sequences start on
      multiples of 128, and rows that see nothing or do not exist have lse = +inf and delta = 0.
      dq = scale * (its float32 sum).
Grid: one axis, tiles of rows x (batch x query heads), heads fastest, since they are neighbours.
One program: TILE rows of one head.
Traffic: o and do once; the sum of dq is set to zero here and read and rounded there.
Numerics: float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows_of_program(cu_ptr, batch, num_heads, seqlen, rows_per_plane, TILE: tl.constexpr):
    """Return (b, head, first row in o, rows of the sequence, first row of the tile, buffers)."""
    heads = batch * num_heads
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    b, h = head // num_heads, head % num_heads
    start, length, plane, padded = 0, seqlen, head, 0
    if cu_ptr is not None:
        start = tl.load(cu_ptr + b)
        length = tl.load(cu_ptr + b + 1) - start
        plane = h
        padded = (start + b * 128) // 128 * 128
    return b, h, start, length, tile * TILE, plane.to(tl.int64) * rows_per_plane + padded


@triton.jit(
    do_not_specialize=[
        "batch", "num_heads", "seqlen", "rows_per_plane", "o_batch", "o_row", "o_head", "do_batch",
        "do_row", "do_head", "lse_batch", "lse_head",
    ]
)  # fmt: skip
def attention_bwd_before_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lse_log2_ptr, delta_ptr, dq_sum_ptr, turns_ptr, cu_ptr, batch,
    num_heads, seqlen, rows_per_plane, o_batch, o_row, o_head, do_batch, do_row, do_head,
    lse_batch, lse_head, WIDTH: tl.constexpr, D: tl.constexpr, D_SUM: tl.constexpr,
    UNIT: tl.constexpr, TILE_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill the row terms of a tile and set its sum of dq to zero; strides are in units."""
    b, h, start, length, first, buffer = _rows_of_program(
        cu_ptr, batch, num_heads, seqlen, rows_per_plane, TILE
    )
    if first < tl.cdiv(length, 128) * 128:
        rows = first + tl.arange(0, TILE)
        columns = tl.arange(0, D)
        real = rows < length
        loaded = real[:, None]
        if WIDTH < D:
            loaded = loaded & (columns < WIDTH)[None, :]
        at = (start + rows).to(tl.int64)
        o_rows = (b.to(tl.int64) * o_batch + h.to(tl.int64) * o_head + at * o_row) * UNIT
        do_rows = (b.to(tl.int64) * do_batch + h.to(tl.int64) * do_head + at * do_row) * UNIT
        o = tl.load(o_ptr + o_rows[:, None] + columns[None, :], mask=loaded, other=0.0)
        do = tl.load(do_ptr + do_rows[:, None] + columns[None, :], mask=loaded, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        at += b.to(tl.int64) * lse_batch + h.to(tl.int64) * lse_head
        lse = tl.load(lse_ptr + at, mask=real, other=float("-inf"))
        if dlse_ptr is not None:
            delta -= tl.load(dlse_ptr + at, mask=real, other=0.0)
        lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        tl.store(lse_log2_ptr + buffer + rows, lse_log2)
        tl.store(delta_ptr + buffer + rows, delta)
        if dq_sum_ptr is not None:
            sums = dq_sum_ptr + (buffer + rows)[:, None] * D_SUM + tl.arange(0, D_SUM)[None, :]
            tl.store(sums, tl.zeros([TILE, D_SUM], tl.float32))
        if turns_ptr is not None:
            turns = (buffer + first) // TILE_M
            tl.store(turns_ptr + turns, 0, mask=first % TILE_M == 0)


@triton.jit(
    do_not_specialize=[
        "batch", "num_heads", "seqlen", "rows_per_plane", "dq_batch", "dq_row", "dq_head",
    ]
)  # fmt: skip
def attention_bwd_after_kernel(
    dq_sum_ptr, turns_ptr, dq_ptr, cu_ptr, batch, num_heads, seqlen, rows_per_plane,
    dq_batch, dq_row, dq_head, scale, WIDTH: tl.constexpr, D: tl.constexpr,
    UNIT: tl.constexpr, TILE_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scale and round a tile of dq."""
    b, h, start, length, first, buffer = _rows_of_program(
        cu_ptr, batch, num_heads, seqlen, rows_per_plane, TILE
    )
    if first < length:
        rows = first + tl.arange(0, TILE)
        columns = tl.arange(0, D)
        dq = tl.load(dq_sum_ptr + (buffer + rows)[:, None] * D + columns[None, :])
        if turns_ptr is not None:  # a tile that sees nothing holds anything
            dq = tl.where(tl.load(turns_ptr + (buffer + first) // TILE_M) > 0, dq, 0.0)
        stored = (rows < length)[:, None]
        if WIDTH < D:
            stored = stored & (columns < WIDTH)[None, :]
        at = (start + rows).to(tl.int64) * dq_row + b.to(tl.int64) * dq_batch
        at = (at + h.to(tl.int64) * dq_head) * UNIT
        dq = (dq * scale).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + at[:, None] + columns[None, :], dq, mask=stored)
