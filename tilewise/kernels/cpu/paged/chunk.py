"""One chunk of keys and the query heads that share its key head.

What      scores, softmax and weighted sum of a chunk, into acc, m and l.
Grid      none: called by one thread of `decode.py` for every chunk and key head of a task.
One call  4 query heads per pass; the rows of the next chunk are prefetched meanwhile.
Traffic   the chunk's rows come from the L2 cache, into which the call before has prefetched them.
Numerics  see `decode.py`. Arguments are numbers and bare pointers: references to arrays that are
          counted for every chunk and head took a fifth of the time.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tilewise.kernels.cpu.attention.softmax import LOG2_E
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import prefetch
from tilewise.kernels.cpu.machine.products import LARGEST_INTEGER
from tilewise.kernels.cpu.machine.rows import read_f32
from tilewise.kernels.cpu.machine.threads import inlined
from tilewise.kernels.cpu.paged.cache_rows import (
    HEADS,
    LINE,
    has_integers,
    heads_of_pass,
    span_of,
    unit_of,
)
from tilewise.kernels.cpu.paged.dot_products import (
    dots_1,
    dots_4,
    dots_dry_1,
    keys_1,
    keys_4,
    max_1,
    max_4,
    spread_4,
    sum_1,
    sum_4,
)
from tilewise.kernels.cpu.paged.quantise import E4M3, E4M3_FACTOR, SMALLEST_SCALE
from tilewise.kernels.cpu.paged.weighted_sums import (
    weigh_1,
    weigh_4,
    weigh_dry_1,
    weigh_dry_4,
    weigh_rest_1,
    weigh_rest_4,
)
from tilewise.kernels.cpu.paged.weights import store_pairs_1, store_pairs_4


class Rows(NamedTuple):
    """Bare pointers to arrays of addresses: of the rows of keys and values and, for an 8-bit cache,
    of their scales, by key of a task and of the chunk after it.

    `ahead` points to the addresses of the rows to prefetch, see `look_ahead`.
    """

    k: Any
    v: Any
    k_scale: Any
    v_scale: Any
    ahead: Any


class Sums(NamedTuple):
    """Bare pointers to the state of a task, which all chunks of its keys update.

    Attributes:
        q: the packed queries.
        scale: the factor of each head's products, a register wide.
        acc: the sums of values.
        m, l: the maximum and the sum of each head, a register wide.
    """

    q: Any
    scale: Any
    acc: Any
    m: Any
    l: Any


class Strip(NamedTuple):
    """Bare pointers to the scratch for one chunk of keys and one pass of heads, of like's float
    type; s is in the order [key][head].

    Attributes:
        s: the scores, then the probabilities.
        rescale: the factor of each head's old sums; after them, for integer probabilities, the
            value of one unit of each head.
        slopes: the ALiBi slope of each lane.
        k_scale, v_scale: the scale of each key and of each value of an 8-bit cache.
    """

    s: Any
    rescale: Any
    slopes: Any
    k_scale: Any
    v_scale: Any


@inlined
def look_ahead(sizes, rows, chunk, at, first_head, num_heads):
    """Fill rows.ahead with the addresses of the rows of the chunk whose first key is at index `at`,
    to be prefetched while the chunk before is computed.

    In the order of memory, all heads of a key side by side: the CPU's own prefetcher then follows
    ahead of us; rows of one head alone are too far apart for it. Keys and values take turns, since
    two streams come faster than one, unless their rows differ in size. Every head's pass over its
    keys takes the next `chunk` of them, and then its pass over its values.
    """
    k_head, v_head = first_head * sizes.k_head, first_head * sizes.v_head
    if sizes.head_dim == sizes.v_head_dim:
        to = 0
        for key in range(at, at + chunk):
            k_row, v_row = rows.k[key] + k_head, rows.v[key] + v_head
            for head in range(num_heads):
                rows.ahead[to + 2 * head] = k_row + head * sizes.k_head
                rows.ahead[to + 2 * head + 1] = v_row + head * sizes.v_head
            to += 2 * num_heads
    else:
        to = within = 0
        for key in range(at, at + chunk):
            for head in range(num_heads):
                rows.ahead[to + within] = rows.k[key] + k_head + head * sizes.k_head
                rows.ahead[to + chunk + within] = rows.v[key] + v_head + head * sizes.v_head
                within += 1
                if within == chunk:
                    within = 0
                    to += 2 * chunk


@inlined
def fetch_scales(sizes, rows, chunk, at, first_head):
    """Prefetch the scales of `chunk` keys and values from index `at` on, those of all heads side by
    side, from the address of key head first_head's."""
    for key in range(at, at + chunk):
        prefetch(rows.k_scale[key] + first_head * sizes.k_scale_head)
        prefetch(rows.v_scale[key] + first_head * sizes.v_scale_head)


@inlined
def _fill_scales(sizes, like, rows, strip, at, kv_head, count):
    """Load the scales of `count` keys and values from index `at` on, of one key head of an 8-bit
    cache, into strip.k_scale and strip.v_scale; those of e4m3 with the factor that widening leaves
    out."""
    factor = E4M3_FACTOR if sizes.k_code == E4M3 else 1.0
    for key in range(count):
        k_scale = read_f32(like, rows.k_scale[at + key] + kv_head * sizes.k_scale_head)
        v_scale = read_f32(like, rows.v_scale[at + key] + kv_head * sizes.v_scale_head)
        strip.k_scale[key], strip.v_scale[key] = k_scale * factor, v_scale * factor


@inlined
def _softmax(like, lanes, rule, heads, count, distance, strip, sums, lane, has_scales, in_integers):
    """Replace a chunk's products in strip.s by probabilities, in place; update m and l of the
    pass's heads, and set strip.rescale to the factors of their old sums.

    Args:
        like, lanes: an empty float32 array, and the numbers of a register.
        rule: the computation of a logit.
        heads, count: the heads of the pass, 1 or 4, and the keys; products lie as [key][head].
        distance: positions from the chunk's first key to the query.
        strip, sums: the scratch of the chunk, and the state of the task.
        lane: the index of the heads in m and l.
        has_scales: whether each key's scale multiplies its products, and each value's scale its
            probabilities.
        in_integers: whether the probabilities become pairs of integers, see `weights.py`.
    """
    total = count * heads
    scale, softcap = simd.load(sums.scale, lane), simd.splat(like, rule.softcap)
    lowest, log2_e = simd.splat(like, -math.inf), simd.splat(like, LOG2_E)
    zero = simd.splat(like, 0.0)
    offsets = keys_1(like) if heads == 1 else keys_4(like)
    slope = simd.load(strip.slopes, 0)
    old = simd.load(sums.m, lane)
    top = old
    for at in range(0, total, lanes):
        x = simd.mul(simd.load(strip.s, at), scale)
        if has_scales:
            k_scale = (
                simd.load(strip.k_scale, at) if heads == 1 else spread_4(strip.k_scale, at // HEADS)
            )
            x = simd.mul(x, k_scale)
        if rule.softcap > 0.0:
            x = simd.mul(simd.tanh(simd.div(x, softcap)), softcap)
        if rule.has_alibi:
            far = simd.sub(simd.splat(like, float(distance - at // heads)), offsets)
            x = simd.sub(x, simd.mul(slope, far))
        if at + lanes > total:
            x = simd.select(simd.within(like, at, 0, total), x, lowest)
        simd.store(strip.s, at, x)
        top = simd.maximum(x, top)
    new = max_1(top) if heads == 1 else max_4(top)
    shift = simd.select(simd.at_least(lowest, new), zero, new)
    partial, largest, check = zero, zero, zero
    for at in range(0, total, lanes):
        x = simd.exp2(simd.mul(simd.sub(simd.load(strip.s, at), shift), log2_e))
        partial = simd.add(partial, x)
        if has_scales:
            v_scale = (
                simd.load(strip.v_scale, at) if heads == 1 else spread_4(strip.v_scale, at // HEADS)
            )
            x = simd.mul(x, v_scale)
        if in_integers:
            if at + lanes > total:
                x = simd.select(simd.within(like, at, 0, total), x, zero)
            largest = simd.maximum(simd.absolute(x), largest)
            check = simd.fma(x, zero, check)
        simd.store(strip.s, at, x)
    if in_integers:
        largest = max_1(largest) if heads == 1 else max_4(largest)
        check = sum_1(check) if heads == 1 else sum_4(check)
        unit = simd.mul(largest, simd.splat(like, 1.0 / LARGEST_INTEGER))
        is_usual = simd.at_least(unit, simd.splat(like, SMALLEST_SCALE))
        inverse = simd.select(is_usual, simd.div(simd.splat(like, 1.0), unit), zero)
        simd.store(strip.rescale, lanes, simd.add(unit, check))
        for at in range(0, total, lanes):
            x = simd.mul(simd.load(strip.s, at), inverse)
            if heads == 1:
                store_pairs_1(strip.s, at // 2, x)
            else:
                store_pairs_4(strip.s, at // 2, x)
    factor = simd.exp2(simd.mul(simd.sub(old, shift), log2_e))
    added = sum_1(partial) if heads == 1 else sum_4(partial)
    simd.store(sums.m, lane, new)
    simd.store(sums.l, lane, simd.fma(simd.load(sums.l, lane), factor, added))
    simd.store(strip.rescale, 0, factor)


@inlined
def _weigh(
    sizes, like, cache_like, heads, ci, ld, rows, strip, sums, at, shift, later, count, fetches
):
    """Compute acc = acc * rescale + p V for one pass of heads and one chunk of keys.

    Args:
        heads: 1 or 4, the heads of the pass.
        ci, ld: the index of the first head's sums, and the elements of a head.
        rows, strip, sums: the addresses of values, the scratch of the chunk, the state of the task.
        at, shift: the first key of the chunk, and the byte offset of the head in a row.
        later: the index of the addresses to prefetch.
        count: the number of keys.
        fetches: whether rows of the next chunk are prefetched; those of columns that fill no span
            always are.
    """
    unit, span, dim = unit_of(cache_like, like), span_of(cache_like, like), sizes.v_head_dim
    unit_bytes = unit * sizes.k_size
    column = 0
    while column + span <= dim:
        offset = column // unit * unit_bytes
        if heads == 1 and offset % LINE == 0 and fetches:
            weigh_1(
                cache_like,
                sums.q,
                sums.acc,
                ci + column,
                ld,
                strip.rescale,
                strip.s,
                rows.v,
                at,
                shift,
                rows.ahead,
                later,
                offset,
                count,
                0,
            )
        elif heads == 1:
            weigh_dry_1(
                cache_like,
                sums.q,
                sums.acc,
                ci + column,
                ld,
                strip.rescale,
                strip.s,
                rows.v,
                at,
                shift,
                rows.ahead,
                later,
                offset,
                count,
                0,
            )
        elif offset % LINE == 0 and fetches:
            weigh_4(
                cache_like,
                sums.q,
                sums.acc,
                ci + column,
                ld,
                strip.rescale,
                strip.s,
                rows.v,
                at,
                shift,
                rows.ahead,
                later,
                offset,
                count,
                0,
            )
        else:
            weigh_dry_4(
                cache_like,
                sums.q,
                sums.acc,
                ci + column,
                ld,
                strip.rescale,
                strip.s,
                rows.v,
                at,
                shift,
                rows.ahead,
                later,
                offset,
                count,
                0,
            )
        column += span
    while column < dim:
        offset, rest = column // unit * unit_bytes, min(unit, dim - column)
        if heads == 1:
            weigh_rest_1(
                cache_like,
                sums.q,
                sums.acc,
                ci + column,
                ld,
                strip.rescale,
                strip.s,
                rows.v,
                at,
                shift,
                rows.ahead,
                later,
                offset,
                count,
                rest,
            )
        else:
            weigh_rest_4(
                cache_like,
                sums.q,
                sums.acc,
                ci + column,
                ld,
                strip.rescale,
                strip.s,
                rows.v,
                at,
                shift,
                rows.ahead,
                later,
                offset,
                count,
                rest,
            )
        column += unit


@inlined
def attend_chunk(
    sizes,
    rule,
    like,
    cache_like,
    lanes,
    has_scales,
    kv_head,
    distance,
    slopes,
    rows,
    at,
    later,
    chunk,
    count,
    fetches,
    strip,
    sums,
    qi,
    ci,
    state,
):
    """Fold one chunk of keys into acc, m and l of the query heads of one key head, padding
    included.

    Args:
        sizes, rule: the sizes and the rule of the call's `Problem`.
        like, cache_like: bare pointers of the types to compute in and to read.
        lanes: the lanes of a register.
        has_scales: True if the cache is one of 8 bits with scales.
        kv_head: the number of the key head.
        distance: the query's position minus that of the chunk's first key.
        slopes: the ALiBi slopes, of all query heads.
        rows, strip, sums: the addresses of keys and values, the scratch of a chunk, and the state
            of the task.
        at, count: the index of the chunk's first key in `rows`, and the number of its keys.
        fetches: True to prefetch the rows of the next chunk, which `look_ahead` has put into
            `rows.ahead`. If False, some loops prefetch from there all the same: passes of several
            heads over keys, and the last columns of values, of which fewer than `span_of` are left.
            For these the caller fills `rows.ahead` with the address of one row.
        later, chunk: the start of this head's share of 2 * chunk addresses in `rows.ahead`, and the
            keys of a whole chunk. The pass over keys prefetches the first half of the share, the
            pass over values the second.
        qi, ci, state: the starts of the key head's queries, of its sums in acc, and of m and l.
    """
    unit = unit_of(cache_like, like)
    heads = heads_of_pass(sizes.group, lanes)
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    if has_scales:
        _fill_scales(sizes, like, rows, strip, at, kv_head, count)
    for index in range((sizes.group + heads - 1) // heads):
        start = qi + index * heads * ld
        for key in range(0, count, lanes // heads):
            if heads == 1 and fetches:
                dots_1(
                    cache_like,
                    strip.s,
                    key,
                    rows.k,
                    at + key,
                    kv_head * sizes.k_head,
                    rows.ahead,
                    later + key,
                    sums.q,
                    start,
                    ld,
                    sizes.head_dim,
                )
            elif heads == 1:
                dots_dry_1(
                    cache_like,
                    strip.s,
                    key,
                    rows.k,
                    at + key,
                    kv_head * sizes.k_head,
                    rows.ahead,
                    later + key,
                    sums.q,
                    start,
                    ld,
                    sizes.head_dim,
                )
            else:
                dots_4(
                    cache_like,
                    strip.s,
                    key * HEADS,
                    rows.k,
                    at + key,
                    kv_head * sizes.k_head,
                    rows.ahead,
                    later + key,
                    sums.q,
                    start,
                    ld,
                    sizes.head_dim,
                )
        if rule.has_alibi:
            for lane in range(lanes):
                head = min(index * heads + lane % heads, sizes.group - 1)
                strip.slopes[lane] = slopes[kv_head * sizes.group + head]
        _softmax(
            like,
            lanes,
            rule,
            heads,
            count,
            distance,
            strip,
            sums,
            state + index * lanes,
            has_scales,
            has_integers(cache_like, sums.q),
        )
        _weigh(
            sizes,
            like,
            cache_like,
            heads,
            ci + index * heads * ldv,
            ldv,
            rows,
            strip,
            sums,
            at,
            kv_head * sizes.v_head,
            later + chunk,
            count,
            fetches,
        )
