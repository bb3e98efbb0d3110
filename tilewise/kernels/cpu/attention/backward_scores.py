"""The part of attention's gradient between the matrix products, one tile of scores at a time.

What      products q . k and do . v -> p = exp(s - lse) and ds = p (dp - delta), and a tile's
          contribution to the gradient of the bias.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  some rows of a tile, of which columns begin ... end are needed.
Traffic   S and dP are read and written once, in the L1 and L2 caches.
Numerics  float32 (float64 for float64). Where |lse| is FAR or more, and factor s - lse would keep
          few bits, factor s is rounded first, as it was when lse was computed. Hidden columns and
          rows without keys become exact zeros, whatever their products were.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tilewise.kernels.cpu.attention.forward import load_bias_row
from tilewise.kernels.cpu.attention.problem import K_LEN, LSE, Q_LEN, SCORE_ROW
from tilewise.kernels.cpu.attention.softmax import LOG2_E, logits_row
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK
from tilewise.kernels.cpu.machine.gemm import lanes_in
from tilewise.kernels.cpu.machine.philox import keep_row
from tilewise.kernels.cpu.machine.threads import inlined, inner
from tilewise.kernels.cpu.visible import WORD, WORDS, distance_to, lanes_of

FAR = 2.0**16  # a float of this size has steps of 2^-7


class Place(NamedTuple):
    """A tile of keys: keys key ... key + count - 1 of one key head of a sequence, and the number of
    the chunk to which they belong."""

    chunk: int
    sequence: int
    kv_head: int
    key: int
    count: int


@inner
def centre_row(like, factor, row_lse, s, begin, end):
    """Replace s[begin : end] by factor s - row_lse in place, cut at 0, above which only rounding
    can lift it."""
    factors, offsets = simd.splat(like, factor), simd.splat(like, row_lse)
    for column in range(begin, end, lanes_in(like)):
        x = simd.sub(simd.mul(simd.load(s, column), factors), offsets)
        simd.store(s, column, simd.minimum(x, simd.splat(like, 0.0)))


@inlined
def gradient_row(
    like, factor, row_lse, row_delta, s, dp, base, begin, end, seen, wi, dropout, keep
):
    """Replace columns begin ... end - 1 of one row in place, s by p = exp(factor s - row_lse) and
    dp by ds = p (dp - row_delta), both by 0 where hidden; the row starts at index `base`.

    With dropout, s becomes 0 where dropped, and dp counts as dropout.scale dp where kept, else as
    0. With a softcap, dp stays the gradient of the capped logit; `_chain_softcap` continues from
    there.

    Args:
        seen, wi: the bits of the visible columns, from seen[wi] on.
        keep: the bits of the columns that dropout keeps; unused without dropout.
    """
    lanes = lanes_in(like)
    if abs(row_lse) > FAR:
        centre_row(like, factor, row_lse, s, base + begin, base + end)
        factor, row_lse = simd.number(like, 1.0), simd.number(like, 0.0)
    factors, offsets = simd.splat(like, factor), simd.splat(like, -row_lse)
    delta, log2_e = simd.splat(like, row_delta), simd.splat(like, LOG2_E)
    zero, scale = simd.splat(like, 0.0), simd.splat(like, dropout.scale)
    for first in range(begin, end, lanes):
        word, lane, column = seen[wi + first // WORD], first % WORD, base + first
        p = simd.exp2(simd.mul(simd.fma(simd.load(s, column), factors, offsets), log2_e))
        x = simd.load(dp, column)
        kept = p
        if dropout.threshold > 0:
            stays = lanes_of(like, keep[first // WORD], lane)
            x = simd.select(stays, simd.mul(x, scale), zero)
            kept = simd.select(stays, p, zero)
        ds = simd.mul(p, simd.sub(x, delta))
        if word != -1:
            sight = lanes_of(like, word, lane)
            kept = simd.select(sight, kept, zero)
            ds = simd.select(sight, ds, zero)
        simd.store(s, column, kept)
        simd.store(dp, column, ds)


@inner
def _chain_softcap(like, dp, slack, base, begin, end, seen, wi):
    """Multiply ds of a row's columns begin ... end - 1 by the derivative of the softcap, slack = 1
    - tanh^2, in place; hidden columns become zero."""
    lanes = lanes_in(like)
    zero = simd.splat(like, 0.0)
    for first in range(begin, end, WORD):
        word = seen[wi + first // WORD]
        for lane in range(0, WORD, lanes):
            column = base + first + lane
            ds = simd.mul(simd.load(dp, column), simd.load(slack, column))
            simd.store(dp, column, simd.select(lanes_of(like, word, lane), ds, zero))


@inner
def _add_bias_gradient(call, place, head, query, dp, base, begin, end):
    """Add a row of ds to the gradient of the bias, call.dbias, whose strides are 0 where the bias
    is broadcast.

    Args:
        place: the tile of keys, a `Place`.
        head, query: the row's query head and query.
        dp, base: the array of ds, and the index of the row in it.
        begin, end: the range of columns.
    """
    grads, dbias = call.grads, call.dbias
    where = (
        place.chunk * grads.dbias_chunk
        + place.sequence * grads.dbias_batch
        + head * grads.dbias_head
        + query * grads.dbias_row
        + place.key * grads.dbias_column
    )
    for column in range(begin, end):
        dbias[where + column * grads.dbias_column] += dp[base + column]


@inner
def differentiate_rows(call, place, seen, scores, first_row, num_rows, begin, end, top, bottom):
    """Turn the products S and dP in `scores` into P and dS in place, zero for keys that a row does
    not see, and add dS to the gradient of the bias where one is wanted.

    Rows top ... bottom - 1 of a tile, whose first flat row is first_row and of which `num_rows`
    exist, and its columns begin ... end - 1 are computed. `call` is a `Backward`.
    """
    sizes, rule, arrays, dropout = call.sizes, call.rule, call.arrays, call.dropout
    lse, delta, like = call.lse, call.delta, arrays.like
    sequence, key = place.sequence, place.key
    lanes = lanes_in(like)
    zero = simd.splat(like, 0.0)
    factor = rule.scale if rule.is_scaled_only else 1.0
    q_len, k_len = arrays.starts[sequence, Q_LEN], arrays.starts[sequence, K_LEN]
    num_heads = sizes.num_kv_heads * sizes.group
    left, right = begin, end
    for row in range(top, bottom):
        begin, end = max(left, seen.begin[row // BLOCK]), min(right, seen.end[row // BLOCK])
        end_key = min(end, k_len - key)
        base, is_alive = row * SCORE_ROW, row < num_rows
        query, head = (first_row + row) // sizes.group, place.kv_head * sizes.group
        head += first_row + row - query * sizes.group
        at = arrays.starts[sequence, LSE] + head * sizes.lse_head + query
        if is_alive:
            is_alive = lse[at] != -math.inf
        if not is_alive or begin >= end:
            begin = end = right
        for first, last in ((left, begin), (end, right)):
            for column in range(base + first, base + last, lanes):
                simd.store(scores.s, column, zero)
                simd.store(scores.dp, column, zero)
        if begin == end:
            continue
        if not rule.is_scaled_only:
            if rule.has_bias:
                load_bias_row(sizes, like, scores.bias, sequence, head, query, key, end_key)
            slope = arrays.slopes[sequence * sizes.slopes_batch + head]
            diagonal = distance_to(q_len, k_len, query, key)
            logits_row(
                like,
                rule,
                scores.s,
                base,
                begin,
                end,
                slope,
                diagonal,
                scores.bias,
                scores.slack,
                base,
            )
        if dropout.threshold > 0:
            keep_row(dropout, scores.keep, 0, sequence * num_heads + head, query, key)
        gradient_row(
            like,
            factor,
            lse[at],
            delta[at],
            scores.s,
            scores.dp,
            base,
            begin,
            end,
            seen.words,
            row * WORDS,
            dropout,
            scores.keep,
        )
        if call.grads.has_dbias:
            _add_bias_gradient(call, place, head, query, scores.dp, base, begin, end_key)
        if rule.softcap > 0.0:
            _chain_softcap(like, scores.dp, scores.slack, base, begin, end, seen.words, row * WORDS)
