"""Adapters of low rank on the CPU, mixed in a batch.

What      y[t] += scale (x[t] A^T) B with the A, B and scale of the row's slot, in place.
Grid      first a task for each tile of rows and TILE ranks of a part, then one for each tile of
          rows and CHUNK columns of a part, each taken from a counter.
One task  its rows of x and of A, widened in scratch; then its part of B, row by row, for all rows
          of the tile.
Traffic   A and B once for each tile of rows, x once for each TILE ranks; y once and back.
Numerics  float32 (float64 for float64); along K in the lanes of two sums, along the ranks four at a
          time: the order depends on K and the ranks alone. y is rounded once more.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import (
    inner,
    kernel,
    next_task,
    run_alone,
    run_tasks,
    scratch,
    zero_scratch,
)
from tilewise.kernels.low_rank import TILE, LowRank, RowTiles
from tilewise.kernels.spec import ElementSpec

CHUNK = 512  # columns: 32 KB of sums for a tile of rows, half of an L1 cache
WORK_PER_THREAD = 1 << 20  # multiplications, about 50 us of a core: a thread's wake-up


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel of adapters cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def launch(y: Tensor, x: Tensor, weights: LowRank, tiles: RowTiles) -> None:
    """Add the outputs of adapters for x to y in place: y[t] += scale (x[t] A^T) B for each row t in
    a tile, with A, B and scale of the tile's slot.

    Args:
        y, x: (T, N) and (T, K).
        weights: the adapters of all slots of the layer.
        tiles: the rows that use adapters, by slot; other rows of y stay as they are.
    """
    parts, rank, count = weights.parts, weights.rank, len(tiles.slots)
    channels, size = x.shape[1], x.element_size()
    wide = float_type(x.dtype)
    h = torch.empty((count, TILE, parts * rank), dtype=wide)
    like = np.empty(0, np.float64 if wide == torch.float64 else np.float32)
    slots, rows = tiles.slots.numpy(), tiles.rows.numpy()
    ranks, edges = weights.ranks.numpy(), weights.edges.numpy()
    code = DTYPE_CODES[x.dtype]
    rows_used, most = int((rows >= 0).sum()), int(ranks[slots[slots >= 0]].max(initial=0))
    work = rows_used * most * parts * (channels + y.shape[1] // parts)
    run = run_alone if work < 2 * WORK_PER_THREAD else run_tasks
    run(
        _shrink,
        count * (parts * rank // TILE),
        like,
        code,
        size,
        slots,
        rows,
        ranks,
        x.data_ptr(),
        x.stride(0) * size,
        weights.a.data_ptr(),
        channels,
        rank,
        h.data_ptr(),
        h.element_size(),
        code if wide == torch.float64 else DTYPE_CODES[torch.float32],
    )
    chunks = int((-(-np.diff(edges) // CHUNK)).sum())
    run(
        _expand,
        count * chunks,
        like,
        code,
        size,
        slots,
        rows,
        ranks,
        edges,
        weights.scale.numpy(),
        h.view(-1).numpy(),
        weights.b.data_ptr(),
        rank,
        y.data_ptr(),
        DTYPE_CODES[y.dtype],
        y.element_size(),
        chunks,
    )


@inner
def _dots(like, rows, base, stride, own, sums, count):
    """Set sums[0 : 4] to the dot products of `own` with four rows of scratch, from rows[base] on
    and `stride` apart; `count` elements, padded with zeros to whole pairs of registers."""
    lanes = simd.REGISTER_BYTES // own.itemsize
    a = b = c = d = e = f = g = h = simd.splat(own, 0.0)
    for k in range(0, count, 2 * lanes):
        low, high = simd.load(own, k), simd.load(own, k + lanes)
        at = base + k
        a = simd.fma(simd.load(rows, at), low, a)
        b = simd.fma(simd.load(rows, at + lanes), high, b)
        at += stride
        c = simd.fma(simd.load(rows, at), low, c)
        d = simd.fma(simd.load(rows, at + lanes), high, d)
        at += stride
        e = simd.fma(simd.load(rows, at), low, e)
        f = simd.fma(simd.load(rows, at + lanes), high, f)
        at += stride
        g = simd.fma(simd.load(rows, at), low, g)
        h = simd.fma(simd.load(rows, at + lanes), high, h)
    sums[0] = simd.sum_lanes(simd.add(a, b))
    sums[1] = simd.sum_lanes(simd.add(c, d))
    sums[2] = simd.sum_lanes(simd.add(e, f))
    sums[3] = simd.sum_lanes(simd.add(g, h))


@kernel
def _shrink(
    like,
    code,
    size,
    slots,
    rows,
    ranks,
    x,
    x_row,
    a,
    channels,
    rank,
    h,
    h_size,
    h_code,
    counter,
    num_tasks,
):
    padded = (channels + 63) // 64 * 64
    own, sums = zero_scratch(padded, like), scratch(4, like)
    wide, out = zero_scratch(TILE * padded, like), scratch(TILE * TILE, like)
    total = ranks.shape[1] * rank
    groups = total // TILE
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        tile, group = task // groups, task % groups
        slot, part = slots[tile], group * TILE // rank
        lowest = group * TILE - part * rank
        if slot < 0 or lowest >= ranks[slot, part]:
            continue
        used = 0
        while used < TILE and rows[tile, used] >= 0:
            load_row(like, code, wide, used * padded, x + rows[tile, used] * x_row, channels)
            used += 1
        out[:] = 0
        for r in range(min(TILE, ranks[slot, part] - lowest)):
            at = (np.int64(slot) * total + group * TILE + r) * channels
            load_row(like, code, own, 0, a + at * size, channels)
            for first in range(0, used, 4):
                _dots(like, wide, first * padded, padded, own, sums, padded)
                for i in range(first, min(first + 4, used)):
                    out[i * TILE + r] = sums[i - first]
        for i in range(used):
            to = h + ((tile * TILE + i) * total + group * TILE) * h_size
            store_row(like, h_code, out, i * TILE, 1.0, to, TILE)


@inner
def _add_four(sums, base, width, values, at, factor, b):
    """Add four rows of b, CHUNK elements apart, to sums[base : base + width] in place, row i times
    factor * values[at + i]; in whole registers."""
    lanes = simd.REGISTER_BYTES // sums.itemsize
    p = simd.splat(sums, values[at] * factor)
    q = simd.splat(sums, values[at + 1] * factor)
    r = simd.splat(sums, values[at + 2] * factor)
    s = simd.splat(sums, values[at + 3] * factor)
    for column in range(0, width, lanes):
        total = simd.load(sums, base + column)
        total = simd.fma(p, simd.load(b, column), total)
        total = simd.fma(q, simd.load(b, CHUNK + column), total)
        total = simd.fma(r, simd.load(b, 2 * CHUNK + column), total)
        total = simd.fma(s, simd.load(b, 3 * CHUNK + column), total)
        simd.store(sums, base + column, total)


@kernel
def _expand(
    like,
    code,
    size,
    slots,
    rows,
    ranks,
    edges,
    scales,
    h,
    b,
    rank,
    y,
    y_code,
    y_size,
    chunks,
    counter,
    num_tasks,
):
    sums, four = scratch(TILE * CHUNK, like), zero_scratch(4 * CHUNK, like)
    found = zero_scratch(CHUNK, like)
    parts = ranks.shape[1]
    outputs = np.int64(edges[parts])
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        tile, chunk, part = task // chunks, task % chunks, 0
        slot = slots[tile]
        if slot < 0:
            continue
        while chunk >= (edges[part + 1] - edges[part] + CHUNK - 1) // CHUNK:
            chunk -= (edges[part + 1] - edges[part] + CHUNK - 1) // CHUNK
            part += 1
        if ranks[slot, part] == 0:
            continue
        first = np.int64(edges[part]) + chunk * CHUNK
        width = min(CHUNK, edges[part + 1] - first)
        padded = (width + 15) // 16 * 16
        factor = scales[slot, part]
        sums[:] = 0
        for r in range(0, ranks[slot, part], 4):
            for i in range(4):
                at = (np.int64(slot) * rank + r + i) * outputs + first
                load_row(like, code, four, i * CHUNK, b + at * size, width)
            for i in range(TILE):
                if rows[tile, i] < 0:
                    break
                at = (tile * TILE + i) * parts * rank + part * rank + r
                _add_four(sums, i * CHUNK, padded, h, at, factor, four)
        for i in range(TILE):
            if rows[tile, i] < 0:
                break
            to = y + (rows[tile, i] * outputs + first) * y_size
            load_row(like, y_code, found, 0, to, width)
            for column in range(width):
                found[column] += sums[i * CHUNK + column]
            store_row(like, y_code, found, 0, 1.0, to, width)
