"""Tiled exact attention, forward: FlashAttention-2 with the caches of a CPU for shared memory.

What      o = softmax(logits) v and lse, for dense, packed and paged keys.
Grid      one task per (sequence, key head, block of query tiles), taken from a counter by each
          thread, the longest rows of a causal sequence first.
One task  holds up to 8 tiles of TILE_M query rows (heads of a group side by side) with their sums;
          for each tile of 128 keys: packs K and V; per query tile S = Q K^T, softmax, O += P V.
          Rows that are multiplied as stored are packed straight from memory, and V's rows are read
          there for a single tile of queries; other rows are copied to scratch first.
Traffic   a task reads q once and writes o once; K and V are read once per task. Scratch is under
          0.7 MB per thread for D = 128, so tiles stay in the L2 cache; no Sq x Sk matrix.
Numerics  m, l and sums in float32 (float64 for float64); P is rounded to the type of the product's
          operands. A row's bits depend on its own keys alone, not on threads or neighbours.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.frame import placed, read_problem, with_starts
from tilewise.kernels.cpu.attention.keys import keys_of, values_of
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
)
from tilewise.kernels.cpu.attention.softmax import join_sink, logits_row, softmax_row
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, UNROLLED, rescale_first, set_first
from tilewise.kernels.cpu.machine.frame import array_at, pointer_at
from tilewise.kernels.cpu.machine.gemm import panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import pair_rows, pair_tile, transpose_tile
from tilewise.kernels.cpu.machine.philox import keep_row
from tilewise.kernels.cpu.machine.rows import F16, copy_rows, load_row, load_strided, store_row
from tilewise.kernels.cpu.machine.source import (
    are_finite,
    gather_rows,
    prefetch_rows,
    transpose_stored,
)
from tilewise.kernels.cpu.machine.threads import (
    bare,
    borrowed,
    inlined,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.visible import (
    WORD,
    WORDS,
    distance_to,
    end_seen,
    first_seen,
    new_seen,
    next_tile,
    see_tile,
    view_rows,
)

MAX_TILES = 8  # query tiles that share a packed tile of keys


class _Scratch(NamedTuple):
    """The scratch of a thread of the forward pass, used by one task after the other; padding of
    rows is always zero.

    q, acc, m and l hold all query rows of a task: operands, sums of P V, running maxima and sums.
    k_* and v_* hold one tile of keys and values, as rows and as packed panels. s, p, bias, rescale
    and keep belong to one tile of scores.
    """

    q: np.ndarray
    acc: np.ndarray
    k_rows: np.ndarray
    v_rows: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray
    s: np.ndarray
    p: np.ndarray
    bias: np.ndarray
    m: np.ndarray
    l: np.ndarray
    rescale: np.ndarray
    keep: np.ndarray


class _Pointers(NamedTuple):
    """Bare pointers to the arrays of `_Scratch` with the same names."""

    acc: Any
    k_rows: Any
    k_panels: Any
    v_panels: Any
    p: Any


@inner
def is_multiplied_as_stored(sizes, packed_like):
    """Return whether rows of keys and values can be operands of the products as they lie in memory:
    not paged, of the operands' dtype, with head dims that are multiples of 32."""
    return (
        sizes.block_size == 0
        and sizes.k_code != F16
        and sizes.k_size == packed_like.itemsize
        and sizes.head_dim % 32 == 0
        and sizes.v_head_dim % 32 == 0
    )


@inner
def _new_scratch(problem, tiles):
    sizes, like, packed = problem.sizes, problem.arrays.like, problem.arrays.packed_like
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    rows = tiles * TILE_M
    return _Scratch(
        zero_scratch(rows * ld, packed),
        scratch(rows * ldv, like),
        zero_scratch(TILE_N * ld, packed),
        zero_scratch(TILE_N * ldv, packed),
        scratch(TILE_N * ld, packed),
        scratch(TILE_N * ldv, packed),
        scratch(TILE_M * SCORE_ROW, like),
        scratch(TILE_M * SCORE_ROW, packed),
        zero_scratch(2 * TILE_N, like),
        scratch(rows, like),
        scratch(rows, like),
        zero_scratch(TILE_M, like),
        scratch(WORDS, problem.mask.bits),
    )


@inner
def score_tile(s, q, qi, q_row, k_panels, head_dim, rows, count, begin, end):
    """Compute the products S = Q K^T of a tile of query rows and `count` keys into s, SCORE_ROW
    apart, for each BLOCK rows only where they see keys.

    Args:
        q, qi, q_row: the rows, the index of the first, and the elements from row to row.
        k_panels: the keys in transposed panels.
        rows: the number of query rows.
        begin, end: the range of keys that each BLOCK rows see, see `Seen`.
    """
    ld = (head_dim + 31) // 32 * 32
    width, elements = panel_columns(s), words_to_elements(q)
    words = -(-head_dim // (UNROLLED * elements)) * UNROLLED  # channels after the head dim are zero
    for first in range(0, count, width):
        for block in range((rows + BLOCK - 1) // BLOCK):
            if begin[block] < first + width and end[block] > first:
                set_first(
                    s,
                    block * BLOCK * SCORE_ROW + first,
                    SCORE_ROW,
                    count - first,
                    rows - block * BLOCK,
                    q,
                    qi + block * BLOCK * q_row,
                    q_row,
                    elements,
                    k_panels,
                    first * ld,
                    width * elements,
                    words,
                )


@inner
def add_rows_exactly(c, ci, ldc, dim, p, v, ld, rescale, seen, count, rows):
    """Compute c = c * rescale + p v row by row over visible keys alone, for a tile whose values
    have inf or NaN, which must not reach rows that do not see them.

    A row that sees finite keys alone has, in float32 and float64, the bits of the products: which
    tiles are multiplied here depends on what else one thread computes.

    Args:
        c, ci, ldc, dim: the sums, the index of the first, the elements from row to row, and the
            channels.
        p: the probabilities, SCORE_ROW from row to row.
        v, ld: the rows of values in scratch, and the elements from row to row.
        rescale: the factor of each row's old sums.
        seen: the keys that each row sees, a `Seen`.
        count, rows: the numbers of keys and of rows.
    """
    for row in range(rows):
        at = ci + row * ldc
        for column in range(dim):
            c[at + column] *= rescale[row]
        for key in range(count):
            if seen.words[row * WORDS + key // WORD] >> key % WORD & 1:
                x = simd.load_one(p, row * SCORE_ROW + key)
                for column in range(dim):
                    value = simd.load_one(v, key * ld + column)
                    c[at + column] = simd.fma(x, value, c[at + column])


@inner
def _add_products(c, ci, ldc, dim, p, values, panel, word, rows, count, begin, end, rescale):
    """Compute c = c * rescale + P V for each BLOCK of `rows` rows, over the range begin ... end of
    keys that the block sees.

    Args:
        values, panel, word: V, elements from panel to panel and from word to word of keys.
        count: the number of keys, a multiple of UNROLLED words.
    """
    width, elements = panel_columns(c), words_to_elements(p)
    for column in range(0, dim, width):
        for block in range((rows + BLOCK - 1) // BLOCK):
            first, last = begin[block], min(end[block], count)
            rescale_first(
                c,
                ci + block * BLOCK * ldc + column,
                ldc,
                dim - column,
                rows - block * BLOCK,
                p,
                block * BLOCK * SCORE_ROW + first,
                SCORE_ROW,
                elements,
                values,
                column // width * panel + first // elements * word,
                word,
                (last - first) // elements,
                rescale,
                block * BLOCK,
            )


@inner
def load_bias_row(sizes, like, bias, sequence, head, query, first, count):
    """Fill bias[0 : count] with the bias of keys first ... first + count - 1 for one query of one
    query head, converted to like's type."""
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
    problem,
    s,
    p,
    tile,
    rows,
    sequence,
    kv_head,
    first_row,
    first_key,
    seen,
    m,
    l,
    rescale,
    bias,
    keep,
):
    """Turn the products in `s` of one tile of rows and keys into probabilities in `p`, 0 for hidden
    keys and where dropout drops; update the rows' running maxima m and sums l, and set `rescale` to
    the factors of their old sums of values."""
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
            diagonal = distance_to(q_len, k_len, query, first_key)
            slope = arrays.slopes[sequence * sizes.slopes_batch + head]
            logits_row(
                like, rule, s, row * SCORE_ROW, begin, end, slope, diagonal, bias, bias, TILE_N
            )
        m[index], total, rescale[row] = softmax_row(
            like,
            s,
            row * SCORE_ROW,
            factor,
            p,
            row * SCORE_ROW,
            begin,
            end,
            seen.words,
            row * WORDS,
            m[index],
            dropout.threshold > 0,
            keep,
        )
        l[index] = l[index] * rescale[row] + total


@inlined
def pack_stored(like, sizes, spare, pointers, keys, values, key, count, tiles):
    """Pack a tile of keys, and of values where needed, whose dtype is multiplied as it is stored,
    into the thread's panels.

    Args:
        spare, pointers: the thread's scratch, as arrays and as bare pointers.
        keys, values: the `Source` of each.
        key, count: the first key and their number.
        tiles: the query tiles that will use the keys; for one, V may be read in place.

    Returns:
        A pointer to V as the product takes it; the elements from panel to panel and from word to
        word of keys; and whether all of V is finite. If not, rows of V are copied to spare.v_rows,
        too.
    """
    size, panels, width = sizes.k_size, pointers.v_panels, panel_columns(like)
    k, v, v_row = keys.start + key * keys.row, values.start + key * values.row, values.row
    transpose_stored(
        like,
        keys.code,
        k,
        keys.row,
        size,
        count,
        keys.width,
        spare.k_rows,
        pointers.k_rows,
        pointers.k_panels,
    )
    stored, dim = pointer_at(panels, v), values.width
    is_finite = are_finite(like, stored, v_row // size, count, dim)
    if not is_finite:
        copy_rows(like, values.code, spare.v_rows, dim, dim, v, v_row, 0, 1, 0, count, count)
    if words_to_elements(panels) == 1 and tiles == 1:
        return stored, width, v_row // size, is_finite
    pair_rows(like, stored, v_row // size, count, dim, panels, TILE_N)
    return panels, TILE_N * width, width * words_to_elements(panels), is_finite


@inner
def _forward_task(
    problem, lse, maxima, is_direct, spare, pointers, seen, sequence, kv_head, first_tile, tiles
):
    """Compute o and lse of query tiles first_tile ... first_tile + tiles - 1 of one key head.

    A tile has TILE_M rows. A row is a query of one of the query heads that share the key head; each
    row attends to all keys that the windows and the mask let it see. o is written through the
    addresses in the problem.

    Args:
        problem: the call's `Problem`, with addresses as starts.
        lse, maxima: flat results of like's type: the logarithm of each row's sum, and the largest
            logit of each row without the sink; maxima is empty if it is not wanted.
        is_direct: True if keys and values can be multiplied as stored; False if rows are converted
            into scratch first.
        spare, pointers, seen: the thread's scratch, the addresses of parts of it, and the scratch
            for the keys that a tile sees.
        sequence, kv_head: the numbers of the sequence and of the key head.
        first_tile, tiles: the first query tile and the number of tiles.
    """
    sizes, arrays, mask = problem.sizes, problem.arrays, problem.mask
    like, starts = arrays.like, arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    group, head_dim, dim = sizes.group, sizes.head_dim, sizes.v_head_dim
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    keys = keys_of(sizes, arrays, sequence, kv_head)
    values = values_of(sizes, arrays, sequence, kv_head)
    first_row = first_tile * TILE_M
    num_rows = min(tiles * TILE_M, q_len * group - first_row)
    q, acc, m, l = spare.q, spare.acc, spare.m, spare.l
    s, p = spare.s, spare.p
    owned_view = view_rows(sizes, mask, sequence, kv_head, first_row, num_rows)
    view = borrowed(owned_view)
    all_rows = (num_rows + BLOCK - 1) // BLOCK * BLOCK
    acc[: all_rows * ldv] = 0
    for row in range(all_rows):
        m[row], l[row] = -math.inf, 0.0
        if row < num_rows:
            query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
            address = starts[sequence, Q] + query * sizes.q_row + head * sizes.q_head
            load_row(like, sizes.q_code, q, row * ld, address, head_dim)
    key = first_seen(sizes.window_left, q_len, k_len, first_row // group) // TILE_N * TILE_N
    last = (first_row + num_rows - 1) // group
    end_key = end_seen(sizes.window_right, q_len, k_len, last)
    key = next_tile(mask, view, key, end_key)
    while key < end_key:
        following = next_tile(mask, view, key + TILE_N, end_key)
        count = min(TILE_N, end_key - key)
        weighed, packed = pointers.v_panels, (count + 31) // 32 * 32
        panel, word = TILE_N * panel_columns(like), panel_columns(like) * words_to_elements(p)
        if is_direct and count % (UNROLLED * words_to_elements(p)) == 0:
            packed = count
            weighed, panel, word, is_finite = pack_stored(
                bare(like), sizes, spare, pointers, keys, values, key, count, tiles
            )
        else:
            gather_rows(like, keys, spare.k_rows, ld, key, count, packed)
            check = gather_rows(like, values, spare.v_rows, ldv, key, count, packed)
            is_finite = check == 0.0
            transpose_tile(like, spare.k_rows, packed, ld, spare.k_panels)
            pair_tile(like, spare.v_rows, packed, ldv, spare.v_panels, TILE_N)
        for tile in range(tiles):
            rows = min(TILE_M, num_rows - tile * TILE_M)
            if rows <= 0:
                break
            # The next tile's rows are prefetched into the L2 cache meanwhile.
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
                s,
                q,
                tile * TILE_M * ld,
                ld,
                spare.k_panels,
                head_dim,
                rows,
                count,
                seen.begin,
                seen.end,
            )
            _softmax_tile(
                problem,
                s,
                p,
                tile,
                blocks * BLOCK,
                sequence,
                kv_head,
                first_row + tile * TILE_M,
                key,
                seen,
                m,
                l,
                spare.rescale,
                spare.bias,
                spare.keep,
            )
            if is_finite:
                _add_products(
                    pointers.acc,
                    tile * TILE_M * ldv,
                    ldv,
                    dim,
                    pointers.p,
                    weighed,
                    panel,
                    word,
                    rows,
                    packed,
                    seen.begin,
                    seen.end,
                    spare.rescale,
                )
            else:
                add_rows_exactly(
                    acc,
                    tile * TILE_M * ldv,
                    ldv,
                    dim,
                    p,
                    spare.v_rows,
                    ldv,
                    spare.rescale,
                    seen,
                    count,
                    rows,
                )
        key = following
    keep_alive(owned_view)
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
def attention_forward(like, packed_like, frame, q, k, v, o, lse, maxima, tiles, counter, num_tasks):
    """Compute attention of one thread: take tasks, each a block of query tiles of a sequence and
    key head, until none is left, and write their o, lse and maxima.

    Args:
        like, packed_like: the empty arrays of the problem.
        frame: the problem, see `frame_of`; o is written through addresses.
        q, k, v, o: the addresses to which starts are relative; all 0 if starts are absolute.
        lse: the address of numbers of like's type.
        maxima: the address of numbers for the largest logit of each row, without the sink, or 0.
        tiles: the query tiles of a task, 1 ... MAX_TILES.
        counter: (1,) int64, the next task.
    """
    offsets = read_problem(frame, like, packed_like)
    owned_starts = placed(offsets.arrays.starts, q, k, v, o)
    problem = with_starts(offsets, borrowed(owned_starts))
    starts, sizes = problem.arrays.starts, problem.sizes
    results = array_at(lse, 0, like)
    tops = array_at(maxima, 1 if maxima != 0 else 0, like)
    owned, owned_seen = _new_scratch(problem, tiles), new_seen(problem.mask.bits, starts[0])
    spare, seen = borrowed(owned), borrowed(owned_seen)
    pointers = _Pointers(
        bare(spare.acc),
        bare(spare.k_rows),
        bare(spare.k_panels),
        bare(spare.v_panels),
        bare(spare.p),
    )
    is_direct = is_multiplied_as_stored(sizes, packed_like)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence = 0
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= task:
            sequence += 1
        task -= starts[sequence, TASK]
        num_tiles = (starts[sequence, Q_LEN] * sizes.group + TILE_M - 1) // TILE_M
        num_blocks = (num_tiles + tiles - 1) // tiles
        first = (num_blocks - 1 - task // sizes.num_kv_heads) * tiles
        _forward_task(
            problem,
            results,
            tops,
            is_direct,
            spare,
            pointers,
            seen,
            sequence,
            task % sizes.num_kv_heads,
            first,
            min(tiles, num_tiles - first),
        )
    keep_alive(owned)
    keep_alive(owned_seen)
    keep_alive(owned_starts)
