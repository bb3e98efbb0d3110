"""Quantise queries, keys and values to e4m3, one scale a head or a token: plain Triton kernels.

What: x8 = x * (448 / amax) with amax over the rows and channels of one head of one sequence.
      Queries and keys may be rotated first, x <- x M / sqrt(D) with M of +-1 (`reference.fp8`).
Grid: (q's, k's, v's) tasks of TILE rows of one head; the second kernel takes v's by themselves.
One program: the first kernel writes the largest |x| of its rows; the second takes the largest of
      its head's, writes its rows as e4m3, and the scale where it has the head's first rows.
      `quantize_tokens_kernel` does both for its rows alone, and reads them once.
Traffic: x twice, x8 once. Rows are visited in opposite orders, so that the second kernel begins
      with what the first left in the L2 cache.
Numerics: float32; a rotation multiplies 16-bit numbers by +-1 on the tensor core, which is exact,
      and sums them in float32. Rows past a sequence's length are 0 and do not count.

Of a packed batch each sequence, rows cu[b] to cu[b + 1], is quantised as if it were alone.

Values are written transposed, (B, Hk, D, S), with every 32 keys in the order of `device.e4m3`:
position 16 a + 4 t + 2 w + h holds key 16 a + 8 w + 2 t + h. Those of a packed batch, (Hk, D,
columns), begin at a multiple of ROOM columns for each sequence, and zeros fill up its last ROOM, so
that a tile of keys reads no other sequence's values.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
TINIEST_AMAX = tl.constexpr(2.0**-100)
ROOM = tl.constexpr(128)  # columns, of a tile of keys


@triton.jit
def first_column(first_key, b):
    """Return the first column of sequence b in the transposed values of a packed batch; `first_key`
    is cu[b]."""
    return (first_key // ROOM + b) * ROOM


@triton.jit
def _edge(cu, b, rows):
    """Return cu[b], clamped to 0 ... `rows`: a GPU cannot raise an error without a wait."""
    return tl.minimum(tl.maximum(tl.load(cu + b), 0), rows)


@triton.jit
def _sequence(cu, rows, batch, chunk, TILE: tl.constexpr, UNIT: tl.constexpr):
    """Return the sequence of a packed tensor to which chunk number `chunk` of TILE rows belongs.

    Sequence b has the units of UNIT rows (UNIT / TILE chunks each) from cu[b] // UNIT + b on: one
    at least, and as many as its values' columns fill. The tensor has `rows` rows, in `batch`
    sequences.

    Returns:
        b, the number of its first chunk, its first row, its number of rows.
    """
    b, end = 0, batch
    while b + 1 < end:
        middle = (b + end) // 2
        if _edge(cu, middle, rows) // UNIT + middle <= chunk // (UNIT // TILE):
            b = middle
        else:
            end = middle
    row = _edge(cu, b, rows)
    count = tl.maximum(_edge(cu, b + 1, rows) - row, 0)
    return b, (row // UNIT + b) * (UNIT // TILE), row, count


@triton.jit
def _task(
    q,
    k,
    v,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    q_tasks,
    k_tasks,
    q_heads,
    k_heads,
    seqlen_q,
    seqlen_k,
    q_chunks,
    k_chunks,
    batch,
    seqlens,
    cu_q,
    cu_k,
    SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    REVERSED: tl.constexpr,
):
    """Return the work of this program: TILE rows of one head of q, k or v, as an address, strides
    and numbers. REVERSED programs take the tasks from the last to the first.

    Returns:
        the task; which tensor (0, 1, 2: q, k, v); the head's first row in memory, how many rows it
        has and how many count; the step from row to row; the tasks of the head's chunks, first and
        count; the sequence, the head, the chunk; the sequence's first row in a packed tensor.
    """
    task = tl.program_id(0)
    if REVERSED:
        task = tl.num_programs(0) - 1 - task
    which = SINGLE
    x, x_batch, row, head = v, v_batch, v_row, v_head
    heads, seqlen, chunks, first = k_heads, seqlen_k, k_chunks, 0
    if SINGLE < 0:
        which = tl.where(task < q_tasks, 0, tl.where(task < q_tasks + k_tasks, 1, 2))
        first = tl.where(which == 0, 0, tl.where(which == 1, q_tasks, q_tasks + k_tasks))
        if which == 0:
            x, x_batch, row, head = q, q_batch, q_row, q_head
            heads, seqlen, chunks = q_heads, seqlen_q, q_chunks
        elif which == 1:
            x, x_batch, row, head = k, k_batch, k_row, k_head
    index = (task - first) // chunks  # of the head, where sequences are not packed of all
    chunk = (task - first) % chunks
    first += index * chunks
    row = row.to(tl.int64)
    if cu_k is None:
        b, h, begin = index // heads, index % heads, 0
        limit = seqlen
        if seqlens is not None:  # noqa: SIM102, one is known when compiling, the other is not
            if which > 0:
                limit = tl.minimum(tl.load(seqlens + b), seqlen)
        start = x + b.to(tl.int64) * x_batch + h.to(tl.int64) * head
    else:
        cu = cu_k
        if which == 0:
            cu = cu_q
        h = index
        b, its_first, begin, seqlen = _sequence(cu, seqlen, batch, chunk, TILE, UNIT)
        limit = seqlen
        first += its_first
        chunk -= its_first
        chunks = tl.cdiv(limit, TILE)
        start = x + begin.to(tl.int64) * row + h.to(tl.int64) * head
    if ALIGNED:  # which is lost where a tensor is one of three
        start = tl.multiple_of(start, 16)
        row = tl.multiple_of(row, 16 // (start.dtype.element_ty.primitive_bitwidth // 8))
    return task, which, start, seqlen, limit, row, first, chunks, b, h, chunk, begin


@triton.jit
def _rows(
    start,
    row_stride,
    row,
    limit,
    rotation,
    head_dim,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    rotated,
):
    """Return the rows `row` of a head as float32 (rows, D), rotated if ROTATED and `rotated`; zeros
    from row `limit` and channel `head_dim` on.

    Args:
        start, row_stride: the address of row 0, and the elements from row to row.
        row: the rows to load.
        rotation: the matrix (D, D) of the rotation.
        rotated: whether this tensor is rotated.
    """
    channel = tl.arange(0, D)
    keep = (row < limit)[:, None] & (channel < head_dim)[None, :]
    address = start + row.to(tl.int64)[:, None] * row_stride + channel[None, :]
    x = tl.load(address, mask=keep, other=0.0)
    y = x.to(tl.float32)
    if ROTATED:  # noqa: SIM102, one is known when compiling, the other is not
        if rotated:
            matrix = tl.load(rotation + channel[:, None] * D + channel[None, :])
            y = tl.dot(x, matrix.to(x.dtype)) * (1.0 / tl.sqrt(D + 0.0))
    return y


@triton.jit
def _store_rows(out, x8, row, step, keep, head_dim, D: tl.constexpr):
    channel = tl.arange(0, D)
    address = out + row.to(tl.int64)[:, None] * step + channel[None, :]
    tl.store(address, x8, mask=keep[:, None] & (channel < head_dim)[None, :])


@triton.jit
def _store_columns(out, x8, position, columns, count, head_dim, D: tl.constexpr):
    channel = tl.arange(0, D)
    address = out + channel.to(tl.int64)[:, None] * columns + position[None, :]
    tl.store(address, x8, mask=(channel < head_dim)[:, None] & (position < count)[None, :])


@triton.jit(
    do_not_specialize=[
        "q_tasks",
        "k_tasks",
        "q_heads",
        "k_heads",
        "seqlen_q",
        "seqlen_k",
        "q_chunks",
        "k_chunks",
        "batch",
    ]
)
def head_maxima_kernel(
    q,
    k,
    v,
    rotation,
    seqlens,
    maxima,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    q_tasks,
    k_tasks,
    q_heads,
    k_heads,
    seqlen_q,
    seqlen_k,
    q_chunks,
    k_chunks,
    batch,
    head_dim,
    cu_q,
    cu_k,
    SINGLE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    ROTATED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write to `maxima`, float32, the largest |x| of the TILE rows of each task, after a rotation
    of q and k if ROTATED. cu_q, cu_k: the edges of a packed batch, else None."""
    task, which, start, _, limit, row_stride, _, _, _, _, chunk, _ = _task(
        q,
        k,
        v,
        q_batch,
        q_row,
        q_head,
        k_batch,
        k_row,
        k_head,
        v_batch,
        v_row,
        v_head,
        q_tasks,
        k_tasks,
        q_heads,
        k_heads,
        seqlen_q,
        seqlen_k,
        q_chunks,
        k_chunks,
        batch,
        seqlens,
        cu_q,
        cu_k,
        SINGLE,
        TILE,
        UNIT,
        ALIGNED,
        False,
    )
    largest = tl.full([], 0.0, tl.float32)
    if chunk * TILE < limit:  # a sequence may have fewer rows than chunks are kept for it
        row = chunk * TILE + tl.arange(0, TILE)
        x = _rows(start, row_stride, row, limit, rotation, head_dim, D, ROTATED, which < 2)
        largest = tl.max(tl.max(tl.abs(x), 1), 0)
    tl.store(maxima + task, largest)


@triton.jit(
    do_not_specialize=[
        "q_tasks",
        "k_tasks",
        "q_heads",
        "k_heads",
        "seqlen_q",
        "seqlen_k",
        "q_chunks",
        "k_chunks",
        "batch",
    ]
)
def quantize_heads_kernel(
    q,
    k,
    v,
    rotation,
    seqlens,
    maxima,
    q8,
    k8,
    v8,
    scales,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    q_tasks,
    k_tasks,
    q_heads,
    k_heads,
    seqlen_q,
    seqlen_k,
    q_chunks,
    k_chunks,
    batch,
    head_dim,
    columns,
    cu_q,
    cu_k,
    SINGLE: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    UNIT: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    ROTATED: tl.constexpr,
    ALIGNED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Write e4m3 rows of q and k (B, S, H, D), or columns of v (B, H, D, columns), and scales.

    SINGLE -1 writes q and k, 1 k alone, 2 v alone: apart, they need fewer registers. q8, k8, v8:
    uint8 views of e4m3. scales: float32, those of q, then k. SCALED False only copies or transposes
    x that is e4m3 already, given as its bytes. cu_q, cu_k: the edges of a packed batch, whose q8
    and k8 are (T, H, D) and v8 (Hk, D, columns), else None.
    """
    _, which, start, seqlen, limit, row_stride, first, chunks, b, h, chunk, begin = _task(
        q,
        k,
        v,
        q_batch,
        q_row,
        q_head,
        k_batch,
        k_row,
        k_head,
        v_batch,
        v_row,
        v_head,
        q_tasks,
        k_tasks,
        q_heads,
        k_heads,
        seqlen_q,
        seqlen_k,
        q_chunks,
        k_chunks,
        batch,
        seqlens,
        cu_q,
        cu_k,
        SINGLE,
        TILE,
        UNIT,
        ALIGNED,
        True,
    )
    heads = k_heads
    if which == 0:
        heads = q_heads
    inverse = 1.0
    if SCALED:
        part = tl.arange(0, MAX_CHUNKS)
        amax = tl.max(tl.load(maxima + first + part, mask=part < chunks, other=0.0), 0)
        tiny = amax < TINIEST_AMAX
        inverse = tl.where(tiny, 1.0, tl.div_rn(E4M3_MAX, tl.where(tiny, 1.0, amax)))
        if chunk == 0:
            place = b * heads + h
            if SINGLE < 0:
                place += tl.where(which == 0, 0, batch * q_heads)
            tl.store(scales + place, tl.where(tiny, 1.0, tl.div_rn(amax, E4M3_MAX)))
    if cu_k is not None:
        last = limit
        if SINGLE == 2:
            last = tl.maximum(tl.cdiv(limit, ROOM), 1) * ROOM
        if (chunk < 0) | (chunk * TILE >= last):  # before the first sequence, or past its own
            return
    channel = tl.arange(0, D)
    position = chunk * TILE + tl.arange(0, TILE)
    row = position
    if SINGLE == 2:
        row = position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2
    if SCALED:
        x = _rows(start, row_stride, row, limit, rotation, head_dim, D, ROTATED, which < 2)
        x = tl.clamp(x * inverse, -E4M3_MAX, E4M3_MAX)
        x8 = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        keep = (row < limit)[:, None] & (channel < head_dim)[None, :]
        address = start + row.to(tl.int64)[:, None] * row_stride + channel[None, :]
        x8 = tl.load(address, mask=keep, other=0)
    if SINGLE == 2:
        v_start = v8 + h.to(tl.int64) * head_dim * columns
        if cu_k is None:
            v_start += b.to(tl.int64) * k_heads * head_dim * columns
            count = columns
        else:
            v_start += first_column(begin, b)
            count = tl.maximum(tl.cdiv(limit, ROOM), 1) * ROOM
        _store_columns(v_start, tl.trans(x8), position, columns, count, head_dim, D)
    else:
        out = q8
        if which == 1:
            out = k8
        step = heads.to(tl.int64) * head_dim
        if cu_k is None:
            out += b.to(tl.int64) * seqlen * step + h * head_dim
        else:
            out += begin.to(tl.int64) * step + h * head_dim
        if ALIGNED:
            out = tl.multiple_of(out, 16)
            step = tl.multiple_of(step, 16)
        _store_rows(out, x8, position, step, position < seqlen, head_dim, D)


@triton.jit(do_not_specialize=["heads", "seqlen", "chunks"])
def quantize_tokens_kernel(
    x,
    rotation,
    seqlens,
    x8,
    scales,
    batch_stride,
    row_stride,
    head_stride,
    heads,
    seqlen,
    chunks,
    head_dim,
    D: tl.constexpr,
    TILE: tl.constexpr,
    ROTATED: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write TILE rows of one head of x as e4m3, x8 (B, S, H, D), with one scale for each row,
    `scales` (B, H, S); rows past a sequence's length count as 0."""
    index = tl.program_id(0) // chunks  # of sequence and head
    chunk = tl.program_id(0) % chunks
    b, h = index // heads, index % heads
    start = x + b.to(tl.int64) * batch_stride + h.to(tl.int64) * head_stride
    step = heads.to(tl.int64) * head_dim
    out = x8 + b.to(tl.int64) * seqlen * step + h * head_dim
    row_stride = row_stride.to(tl.int64)
    if ALIGNED:
        start = tl.multiple_of(start, 16)
        row_stride = tl.multiple_of(row_stride, 8)
        out = tl.multiple_of(out, 16)
        step = tl.multiple_of(step, 16)
    limit = seqlen
    if seqlens is not None:
        limit = tl.minimum(tl.load(seqlens + b), seqlen)
    row = chunk * TILE + tl.arange(0, TILE)
    values = _rows(start, row_stride, row, limit, rotation, head_dim, D, ROTATED, ROTATED)
    amax = tl.max(tl.abs(values), 1)
    tiny = amax < TINIEST_AMAX
    inverse = tl.where(tiny, 1.0, tl.div_rn(E4M3_MAX, tl.where(tiny, 1.0, amax)))
    scale = tl.where(tiny, 1.0, tl.div_rn(amax, E4M3_MAX))
    inside = row < seqlen
    tl.store(scales + index.to(tl.int64) * seqlen + row, scale, mask=inside)
    rounded = tl.clamp(values * inverse[:, None], -E4M3_MAX, E4M3_MAX)
    bits = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    _store_rows(out, bits, row, step, inside, head_dim, D)
