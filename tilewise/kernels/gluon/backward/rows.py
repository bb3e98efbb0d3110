"""What comes before and after the backward kernels of Hopper: row terms, and dq's last step.

What: delta = rowsum(o * do) - dlse and lse in base 2, padded: rows of packed sequences start on
      multiples of 128, and rows that see nothing, do not exist or have an lse beyond FAR in
      size, of which rounding leaves no p, have lse = +inf; delta of the first two is 0.
      dq = scale * (its float32 sum). dk and dv of a key head, given those of its query heads.
      dsinks of a head: -sum exp(sink - lse) delta, over its rows of all sequences.
Grid: one axis, tiles of rows x (batch x query heads), heads fastest, since they are neighbours.
      delta and dq of some heads are left to the CTAs between (`prepost`).
One program: a tile of rows of one head.
Traffic: o and do once; the sum of dq is set to zero here and read and rounded there.
Numerics: float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import FAR

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _edge(cu_ptr, b, total):
    """Return cu[b], an edge of packed sequences, clamped to 0 ... `total`: a GPU cannot raise an
    error without a wait."""
    return tl.minimum(tl.maximum(tl.load(cu_ptr + b), 0), total)


@triton.jit
def _rows_of_head(n, cu_ptr, batch, num_heads, group_size, seqlen, total, rows_per_plane):
    """Return (b, head, first row in o, rows, where its row terms start) of head n of all.

    Packed sequences have what `span.place_of_head` says, at most seqlen of `total` rows.
    """
    b, h = n // num_heads, n % num_heads
    start, length, plane, padded = 0, seqlen, n, 0
    if cu_ptr is not None:
        b, h = n // group_size % batch, n // group_size // batch * group_size + n % group_size
        start = _edge(cu_ptr, b, total)
        length = tl.minimum(tl.maximum(_edge(cu_ptr, b + 1, total) - start, 0), seqlen)
        plane = h
        padded = (start + b * 128) // 128 * 128
    return b, h, start, length, plane.to(tl.int64) * rows_per_plane + padded


@triton.jit(
    do_not_specialize=[
        "heads_before",
        "tile_programs",
        "batch",
        "num_heads",
        "group_size",
        "seqlen",
        "total",
        "rows_per_plane",
        "o_batch",
        "o_row",
        "o_head",
        "do_batch",
        "do_row",
        "do_head",
        "lse_batch",
        "lse_head",
    ]
)
def attention_bwd_before_kernel(
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    lse_log2_ptr,
    delta_ptr,
    dq_sum_ptr,
    semaphores_ptr,
    counts_ptr,
    cu_ptr,
    heads_before,
    tile_programs,
    batch,
    num_heads,
    group_size,
    seqlen,
    total,
    rows_per_plane,
    o_batch,
    o_row,
    o_head,
    do_batch,
    do_row,
    do_head,
    lse_batch,
    lse_head,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    D_SUM: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write delta of a tile of rows of the first `heads_before` heads and set its sum of dq to 0,
    or, in later programs, write lse in base 2 of RUN rows of any head.

    The later programs also set the semaphores of their tiles and the counts of their head to 0.
    Strides of o and do are in units of UNIT elements. A row of the sums has SUM_WIDTH channels, at
    most D_SUM.
    """
    pid = tl.program_id(0)
    if pid < tile_programs:
        first = pid // heads_before * TILE
        b, h, start, length, buffer = _rows_of_head(
            pid % heads_before, cu_ptr, batch, num_heads, group_size, seqlen, total, rows_per_plane
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
            if dlse_ptr is not None:
                delta -= tl.load(dlse_ptr + at, mask=real, other=0.0)
            tl.store(delta_ptr + buffer + rows, delta)
            if dq_sum_ptr is not None:
                channels = tl.arange(0, D_SUM)[None, :]
                sums = dq_sum_ptr + (buffer + rows)[:, None] * SUM_WIDTH + channels
                zeros = tl.zeros([TILE, D_SUM], tl.float32)
                if SUM_WIDTH < D_SUM:
                    tl.store(sums, zeros, mask=channels < SUM_WIDTH)
                else:
                    tl.store(sums, zeros)
    else:
        heads = batch * num_heads
        n = (pid - tile_programs) % heads
        first = (pid - tile_programs) // heads * RUN
        b, h, start, length, buffer = _rows_of_head(
            n, cu_ptr, batch, num_heads, group_size, seqlen, total, rows_per_plane
        )
        rows = first + tl.arange(0, RUN)
        stored = rows < tl.cdiv(length, 128) * 128
        at = (start + rows).to(tl.int64) + b.to(tl.int64) * lse_batch + h.to(tl.int64) * lse_head
        lse = tl.load(lse_ptr + at, mask=rows < length, other=float("-inf"))
        lse_log2 = tl.where((lse <= -FAR) | (lse >= FAR), float("inf"), lse * LOG2E)
        tl.store(lse_log2_ptr + buffer + rows, lse_log2, mask=stored)
        if semaphores_ptr is not None:
            tiles = tl.arange(0, RUN // TILE_M)
            used = first + tiles * TILE_M < length
            tl.store(semaphores_ptr + (buffer + first) // TILE_M + tiles, 0, mask=used)
        if counts_ptr is not None:
            tl.store(counts_ptr + 2 * n + tl.arange(0, 2), 0, mask=first == 0)


@triton.jit(
    do_not_specialize=[
        "first_head",
        "heads_after",
        "batch",
        "num_heads",
        "group_size",
        "seqlen",
        "total",
        "rows_per_plane",
        "dq_batch",
        "dq_row",
        "dq_head",
    ]
)
def attention_bwd_after_kernel(
    dq_sum_ptr,
    semaphores_ptr,
    dq_ptr,
    cu_ptr,
    first_head,
    heads_after,
    batch,
    num_heads,
    group_size,
    seqlen,
    total,
    rows_per_plane,
    dq_batch,
    dq_row,
    dq_head,
    scale,
    WIDTH: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE: tl.constexpr,
    FLAT: tl.constexpr,
):
    """Scale the float32 sums of a tile of dq of one of the last `heads_after` heads, and write them
    to dq in its dtype.

    FLAT: the layout of the sums: 0 row by row, of SUM_WIDTH channels, 1 as `consumer.flat_dq` left
    them, 2 as `mma.backward` did. Strides of dq are in units of UNIT elements.
    """
    pid = tl.program_id(0)
    first = pid // heads_after * TILE
    b, h, start, length, buffer = _rows_of_head(
        first_head + pid % heads_after,
        cu_ptr,
        batch,
        num_heads,
        group_size,
        seqlen,
        total,
        rows_per_plane,
    )
    if first < length:
        rows = first + tl.arange(0, TILE)
        columns = tl.arange(0, D)
        if FLAT == 2:  # 8 x 8 of them as lanes of mma.sync hold them, see `mma.backward`
            in_rows = (buffer + rows // 8 * 8) * D + rows % 8 * 4
            in_columns = columns // 8 * 64 + columns % 2 * 32 + columns % 8 // 2
            dq = tl.load(dq_sum_ptr + in_rows[:, None] + in_columns[None, :])
        elif FLAT:  # as `consumer.flat_dq` left it
            within = rows % 64
            in_rows = within // 16 * 1024 + within % 8 * 16 + within // 8 % 2 * 2
            block = (buffer + rows - within) * D
            in_columns = columns // 64 * 4096 + columns % 64 // 8 * 128
            in_columns += columns // 2 % 4 * 4 + columns % 2
            dq = tl.load(dq_sum_ptr + (block + in_rows)[:, None] + in_columns[None, :])
        else:
            at = dq_sum_ptr + (buffer + rows)[:, None] * SUM_WIDTH + columns[None, :]
            if SUM_WIDTH < D:
                dq = tl.load(at, mask=(columns < SUM_WIDTH)[None, :], other=0.0)
            else:
                dq = tl.load(at)
        if semaphores_ptr is not None:  # a tile that sees nothing holds anything
            dq = tl.where(tl.load(semaphores_ptr + (buffer + first) // TILE_M) > 0, dq, 0.0)
        stored = (rows < length)[:, None]
        if WIDTH < D:
            stored = stored & (columns < WIDTH)[None, :]
        at = (start + rows).to(tl.int64) * dq_row + b.to(tl.int64) * dq_batch
        at = (at + h.to(tl.int64) * dq_head) * UNIT
        dq = (dq * scale).to(dq_ptr.dtype.element_ty)
        tl.store(dq_ptr + at[:, None] + columns[None, :], dq, mask=stored)


@triton.jit(do_not_specialize=["count", "group_size"])
def attention_bwd_group_kernel(
    x_ptr, sum_ptr, count, group_size, WIDTH: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr
):
    """Add up the heads of a group: x (count, group_size, WIDTH) to (count, WIDTH)."""
    rows = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = tl.arange(0, D)
    used = (rows < count)[:, None] & (columns < WIDTH)[None, :]
    total = tl.zeros([TILE, D], tl.float32)
    for g in range(0, group_size):
        at = (rows * group_size + g)[:, None] * WIDTH + columns[None, :]
        total += tl.load(x_ptr + at, mask=used, other=0.0).to(tl.float32)
    at = rows[:, None] * WIDTH + columns[None, :]
    tl.store(sum_ptr + at, total.to(sum_ptr.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["num_heads", "count", "rows_per_plane"])
def attention_bwd_sinks_kernel(
    sinks_ptr,
    lse_log2_ptr,
    delta_ptr,
    dsinks_ptr,
    num_heads,
    count,
    rows_per_plane,
    TILE: tl.constexpr,
):
    """Compute dsinks of one head: minus the sum over its rows of exp(sink - lse) * delta.

    count: the number of rows of a head in all planes; padded rows have lse = +inf and delta = 0.
    """
    head = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks_ptr + head) * LOG2E
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, count, TILE):
        rows = first + tl.arange(0, TILE)
        plane = rows // rows_per_plane
        at = (plane * num_heads + head) * rows_per_plane + (rows - plane * rows_per_plane)
        lse_log2 = tl.load(lse_log2_ptr + at, mask=rows < count, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=rows < count, other=0.0)
        total += tl.exp2(sink - lse_log2) * delta
    tl.store(dsinks_ptr + head, -tl.sum(total, 0))


@triton.jit(do_not_specialize=["batch", "total_q", "total_k", "q_width", "k_width", "v_width"])
def attention_bwd_gaps_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    cu_q_ptr,
    cu_k_ptr,
    batch,
    total_q,
    total_k,
    q_width,
    k_width,
    v_width,
    TILE: tl.constexpr,
):
    """Set to 0 the rows of packed gradients before the first sequence and behind the last one."""
    _zero_outside(dq_ptr, cu_q_ptr, batch, total_q, q_width, TILE)
    _zero_outside(dk_ptr, cu_k_ptr, batch, total_k, k_width, TILE)
    _zero_outside(dv_ptr, cu_k_ptr, batch, total_k, v_width, TILE)


@triton.jit
def _zero_outside(x_ptr, cu_ptr, batch, total, width, TILE: tl.constexpr):
    """Set to 0 the rows of contiguous x (total, width) that no sequence has."""
    first = _edge(cu_ptr, 0, total).to(tl.int64) * width
    last = _edge(cu_ptr, batch, total).to(tl.int64) * width
    end = tl.cast(total, tl.int64) * width
    zeros = tl.zeros([TILE], x_ptr.dtype.element_ty)
    mine = tl.program_id(0).to(tl.int64) * TILE
    step = tl.num_programs(0) * TILE
    while mine < first:
        at = mine + tl.arange(0, TILE)
        tl.store(x_ptr + at, zeros, mask=at < first)
        mine += step
    mine = last + tl.program_id(0).to(tl.int64) * TILE
    while mine < end:
        at = mine + tl.arange(0, TILE)
        tl.store(x_ptr + at, zeros, mask=at < end)
        mine += step
