"""Tiled exact attention, forward: FlashAttention-2 with the caches of a CPU for shared memory.

What      o = softmax(logits) v and lse, for dense, packed and paged keys.
Grid      one task per (sequence, key head, block of query tiles), taken from a counter by each
          thread, the longest rows of a causal sequence first.
One task  holds up to 8 tiles of TILE_M query rows (heads of a group side by side) with their sums;
          for each tile of 128 keys: packs K and V; per query tile S = Q K^T, softmax, O += P V.
Traffic   a task reads q once and writes o once; K and V are read once per task. Scratch is under
          0.7 MB per thread for D = 128, so tiles stay in the L2 cache; no Sq x Sk matrix.
Numerics  m, l and sums in float32 (float64 for float64); P is rounded to the type of the product's
          operands. A row's bits depend on its own keys alone, not on threads or neighbours.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math

from tilewise.kernels.cpu.attention.problem import (
    K_LEN,
    LSE,
    Q_LEN,
    SCORE_ROW,
    TASK,
    TILE_M,
    TILE_N,
    O,
    Q,
    keys_of,
    values_of,
)
from tilewise.kernels.cpu.attention.softmax import join_sink, logits_row, softmax_row
from tilewise.kernels.cpu.attention.visibility import (
    WORD,
    WORDS,
    end_seen,
    first_seen,
    new_seen,
    next_tile,
    see_tile,
    view_rows,
)
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, UNROLLED, rescale_block, set_block
from tilewise.kernels.cpu.machine.gemm import panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import pair_tile, transpose_tile
from tilewise.kernels.cpu.machine.philox import keep_row
from tilewise.kernels.cpu.machine.rows import load_row, load_strided, store_row
from tilewise.kernels.cpu.machine.source import gather_rows, prefetch_rows
from tilewise.kernels.cpu.machine.threads import (
    borrowed,
    inner,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)

MAX_TILES = 8  # query tiles that share a packed tile of keys


@inner
def score_tile(s, q, qi, ld, k_panels, head_dim, begin, end, blocks):
    """S = Q K^T of one tile, only where BLOCK rows see keys."""
    width = panel_columns(s)
    elements = words_to_elements(q)
    words = -(-head_dim // (UNROLLED * elements)) * UNROLLED  # what is past the head dim is zero
    for panel in range(TILE_N // width):
        for block in range(blocks):
            if begin[block] < (panel + 1) * width and end[block] > panel * width:
                set_block(
                    s, block * BLOCK * SCORE_ROW + panel * width, SCORE_ROW, width,
                    q, qi + block * BLOCK * ld, ld, elements,
                    k_panels, panel * width * ld, words,
                )  # fmt: skip


@inner
def add_rows_exactly(c, ci, ldc, dim, p, v, ld, rescale, seen, count, rows):
    """c = c * rescale + p v row by row over visible keys alone, for tiles with inf or NaN."""
    for row in range(rows):
        at = ci + row * ldc
        for column in range(dim):
            c[at + column] *= rescale[row]
        for key in range(count):
            if seen.words[row * WORDS + key // WORD] >> key % WORD & 1:
                x = simd.load_one(p, row * SCORE_ROW + key)
                for column in range(dim):
                    c[at + column] += x * simd.load_one(v, key * ld + column)


@inner
def add_products(c, ci, ldc, dim, p, v_panels, begin, end, rescale, blocks):
    """c = c * rescale + P V for each BLOCK rows, over their own range of keys."""
    width = panel_columns(c)
    elements = words_to_elements(p)
    for column in range(0, dim, width):
        base = column * TILE_N
        for block in range(blocks):
            rescale_block(
                c, ci + block * BLOCK * ldc + column, ldc, dim - column,
                p, block * BLOCK * SCORE_ROW + begin[block], SCORE_ROW, elements,
                v_panels, base + begin[block] * width,
                (end[block] - begin[block]) // elements, rescale, block * BLOCK,
            )  # fmt: skip


@inner
def load_bias_row(sizes, like, bias, sequence, head, query, first, count):
    """Fill bias[0 : count] with the bias of keys first ... first + count of one query."""
    address = (
        sizes.bias
        + sequence * sizes.bias_batch
        + head * sizes.bias_head
        + query * sizes.bias_row
        + first * sizes.bias_column
    )
    load_strided(like, sizes.bias_code, bias, 0, address, sizes.bias_column, count)


@inner
def _softmax_tile(
    problem, s, p, tile, rows, sequence, kv_head, first_row, first_key, seen, m, l, rescale, bias,
    keep,
):  # fmt: skip
    """Probabilities of one tile, and the running maximum and sum of its rows."""
    sizes, rule, arrays, dropout = problem.sizes, problem.rule, problem.arrays, problem.dropout
    like = arrays.like
    q_len, k_len = arrays.starts[sequence, Q_LEN], arrays.starts[sequence, K_LEN]
    factor = rule.scale if rule.is_scaled_only else 1.0
    last_row, num_heads = q_len * sizes.group, sizes.num_kv_heads * sizes.group
    for row in range(rows):
        block = row // BLOCK
        begin, end = seen.begin[block], seen.end[block]
        index = tile * TILE_M + row
        query, head = (first_row + row) // sizes.group, (first_row + row) % sizes.group
        head += kv_head * sizes.group
        if dropout.threshold > 0 and begin < end:
            keep_row(dropout, keep, 0, sequence * num_heads + head, query, first_key)
        if not rule.is_scaled_only and begin < end and first_row + row < last_row:
            if rule.has_bias:
                count = min(end, k_len - first_key)
                load_bias_row(sizes, like, bias, sequence, head, query, first_key, count)
            diagonal = query + k_len - q_len - first_key
            slope = arrays.slopes[sequence * sizes.slopes_batch + head]
            logits_row(
                like, rule, s, row * SCORE_ROW, begin, end, slope, diagonal, bias, bias, TILE_N
            )
        m[index], total, rescale[row] = softmax_row(
            like, s, row * SCORE_ROW, factor, p, row * SCORE_ROW, begin, end, seen.words,
            row * WORDS, m[index], dropout.threshold > 0, keep,
        )  # fmt: skip
        l[index] = l[index] * rescale[row] + total


@inner
def _forward_task(problem, lse, maxima, sequence, kv_head, first_tile, tiles):
    """All keys for query tiles first_tile ... first_tile + tiles of one key head."""
    sizes, arrays, mask = problem.sizes, problem.arrays, problem.mask
    like, packed, starts = arrays.like, arrays.packed_like, arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    group, head_dim, dim = sizes.group, sizes.head_dim, sizes.v_head_dim
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    keys = keys_of(sizes, arrays, sequence, kv_head)
    values = values_of(sizes, arrays, sequence, kv_head)
    first_row = first_tile * TILE_M
    num_rows = min(tiles * TILE_M, q_len * group - first_row)
    q = zero_scratch(tiles * TILE_M * ld, packed)
    acc = zero_scratch(tiles * TILE_M * ldv, like)
    k_rows, v_rows = zero_scratch(TILE_N * ld, packed), zero_scratch(TILE_N * ldv, packed)
    k_panels, v_panels = scratch(TILE_N * ld, packed), scratch(TILE_N * ldv, packed)
    s, p = scratch(TILE_M * SCORE_ROW, like), scratch(TILE_M * SCORE_ROW, packed)
    bias = zero_scratch(2 * TILE_N, like)
    m, l = scratch(tiles * TILE_M, like), scratch(tiles * TILE_M, like)
    rescale = zero_scratch(TILE_M, like)
    seen, keep = new_seen(mask.bits, starts[0]), scratch(WORDS, mask.bits)
    view = view_rows(sizes, mask, sequence, kv_head, first_row, num_rows)
    for row in range(tiles * TILE_M):
        m[row], l[row] = -math.inf, 0.0
        if row < num_rows:
            query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
            address = starts[sequence, Q] + query * sizes.q_row + head * sizes.q_head
            load_row(like, sizes.q_code, q, row * ld, address, head_dim)
    key = first_seen(sizes, k_len - q_len, first_row // group) // TILE_N * TILE_N
    end_key = end_seen(sizes, k_len - q_len, k_len, (first_row + num_rows - 1) // group)
    key = next_tile(mask, view, key, end_key)
    while key < end_key:
        following = next_tile(mask, view, key + TILE_N, end_key)
        count = min(TILE_N, end_key - key)
        padded = (count + 31) // 32 * 32
        gather_rows(like, keys, k_rows, ld, key, count, padded)
        check = gather_rows(like, values, v_rows, ldv, key, count, padded)
        transpose_tile(like, k_rows, padded, ld, k_panels)
        pair_tile(like, v_rows, padded, ldv, v_panels, TILE_N)
        for tile in range(tiles):
            rows = min(TILE_M, num_rows - tile * TILE_M)
            if rows <= 0:
                break
            # The next tile's rows travel to the L2 cache while this one is computed.
            share = following + tile * TILE_N // tiles
            share_end = min(following + (tile + 1) * TILE_N // tiles, end_key)
            prefetch_rows(keys, share, share_end)
            prefetch_rows(values, share, share_end)
            if not see_tile(
                sizes, mask, view, seen, q_len, k_len, first_row + tile * TILE_M, rows, key
            ):
                continue
            blocks = (rows + BLOCK - 1) // BLOCK
            score_tile(
                s, q, tile * TILE_M * ld, ld, k_panels, head_dim, seen.begin, seen.end, blocks
            )
            _softmax_tile(problem, s, p, tile, blocks * BLOCK, sequence, kv_head,
                          first_row + tile * TILE_M, key, seen, m, l, rescale, bias,
                          keep)  # fmt: skip
            if check == 0.0:
                add_products(acc, tile * TILE_M * ldv, ldv, dim, p, v_panels, seen.begin,
                             seen.end, rescale, blocks)  # fmt: skip
            else:
                add_rows_exactly(
                    acc, tile * TILE_M * ldv, ldv, dim, p, v_rows, ldv, rescale, seen, count, rows
                )
        key = following
    for row in range(num_rows):
        query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
        most, total, share = join_sink(like, m[row], l[row], arrays.sinks[head])
        inverse = like.dtype.type(0.0)
        if total != 0.0:
            inverse = like.dtype.type(problem.dropout.scale) * share / total
        address = starts[sequence, O] + query * sizes.o_row + head * sizes.o_head
        store_row(like, sizes.q_code, acc, row * ldv, inverse, address, dim)
        at = starts[sequence, LSE] + head * sizes.lse_head + query
        lse[at] = most + math.log(total) if total != 0.0 else -math.inf
        if len(maxima) > 0:
            maxima[at] = m[row]


@kernel
def attention_forward(problem, lse, maxima, tiles, counter, num_tasks):
    """Take tasks until none is left; see the head of this file.

    Args:
        problem: a `Problem`; o is written through addresses.
        lse: flat array of like's type.
        maxima: another for the largest logit of each row, the sink apart; empty if not wanted.
        tiles: query tiles of a task, 1 ... MAX_TILES.
        counter: (1,) int64, the next task.
    """
    problem, lse, maxima = borrowed(problem), borrowed(lse), borrowed(maxima)
    starts, sizes = problem.arrays.starts, problem.sizes
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        sequence = 0
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= task:
            sequence += 1
        task -= starts[sequence, TASK]
        num_tiles = (starts[sequence, Q_LEN] * sizes.group + TILE_M - 1) // TILE_M
        num_blocks = (num_tiles + tiles - 1) // tiles
        first = (num_blocks - 1 - task // sizes.num_kv_heads) * tiles
        _forward_task(
            problem,
            lse,
            maxima,
            sequence,
            task % sizes.num_kv_heads,
            first,
            min(tiles, num_tiles - first),
        )
