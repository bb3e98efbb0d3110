"""Exact attention, backward, where each sequence has one query: there is no tile of rows to fill.

What      dq, dk and dv, from do, o and lse, for dense keys of a call without more than q, k and v.
Grid      one task per (chunk of CHUNK_KEYS keys, sequence, key head), taken from a counter.
One task  for each KEYS keys, which lie in the L1 cache: s = q k and dp = do v, then p and
          ds = p (dp - delta), then dv = p do, dk = ds q and dq += ds k.
Traffic   K, V, dk and dv once.
Numerics  sums, p and ds in float32 (float64 for float64). Each chunk writes its dq, and the thread
that finishes a head's last chunk adds them in their order: bits repeat on any thread count.
Products are not summed as in the forward pass, which matters only where |lse| is above FAR: there
each task searches all keys for its own largest logit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.backward_scores import FAR, centre_row
from tilewise.kernels.cpu.attention.frame import (
    place_gradients_too,
    placed,
    read_gradients,
    read_problem,
    with_starts,
)
from tilewise.kernels.cpu.attention.gradients import CHUNK_KEYS
from tilewise.kernels.cpu.attention.problem import DK, DO, DQ, DV, K_LEN, LSE, K, O, Q, V
from tilewise.kernels.cpu.attention.softmax import LOG2_E
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.frame import pointer_at
from tilewise.kernels.cpu.machine.gemm import lanes_in
from tilewise.kernels.cpu.machine.pack import prefetch, prefetch_to_write
from tilewise.kernels.cpu.machine.rows import F32, F64, copy_rows, store_rows
from tilewise.kernels.cpu.machine.threads import (
    bare,
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.visible import end_seen, first_seen

KEYS = 32  # keys of a step: with D = 64, K, V and their gradients are 32 KiB of float32
ABREAST = 4  # registers of a row whose sums are computed together


class _Rows(NamedTuple):
    """The scratch of a thread; rows are padded with zeros to `padded_dim` numbers.

    Attributes:
        q, do, dq: the rows of the heads of a group.
        k, v, dk, dv: the rows of KEYS keys.
        p, ds: KEYS numbers of each head, computed from the products s and dp.
        delta, lse: a number of each head.
        top: the number subtracted from the logits of each head; 0 unless lse is far.
    """

    q: np.ndarray
    do: np.ndarray
    dq: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    p: np.ndarray
    ds: np.ndarray
    delta: np.ndarray
    lse: np.ndarray
    top: np.ndarray


@inner
def _new_rows(like, group, ld, ldv):
    return _Rows(
        zero_scratch(group * ld, like),
        zero_scratch(group * ldv, like),
        scratch(group * ld, like),
        zero_scratch(KEYS * ld, like),
        zero_scratch(KEYS * ldv, like),
        scratch(KEYS * ld, like),
        scratch(KEYS * ldv, like),
        scratch(group * KEYS, like),
        scratch(group * KEYS, like),
        scratch(group, like),
        scratch(group, like),
        scratch(group, like),
    )


def padded_dim(like: np.ndarray, dim: int) -> int:
    """Return how many numbers of like's type a row of scratch has for a head dim: a multiple of
    ABREAST registers."""
    unit = ABREAST * (simd.REGISTER_BYTES // like.itemsize)
    return (dim + unit - 1) // unit * unit


_padded = inner(padded_dim)


@inner
def _products(like, a, ai, b, b_row, ld, found, at, count):
    """Set found[at + key] to the dot product of a[ai : ai + ld] and row `key` of b, for `count`
    rows that are b_row elements apart."""
    lanes = lanes_in(like)
    for key in range(count):
        base = key * b_row
        x0 = x1 = x2 = x3 = simd.splat(like, 0.0)
        for column in range(0, ld, 4 * lanes):
            row, other = ai + column, base + column
            x0 = simd.fma(simd.load(a, row), simd.load(b, other), x0)
            x1 = simd.fma(simd.load(a, row + lanes), simd.load(b, other + lanes), x1)
            x2 = simd.fma(simd.load(a, row + 2 * lanes), simd.load(b, other + 2 * lanes), x2)
            x3 = simd.fma(simd.load(a, row + 3 * lanes), simd.load(b, other + 3 * lanes), x3)
        found[at + key] = simd.sum_lanes(simd.add(simd.add(x0, x1), simd.add(x2, x3)))


@inner
def _load_queries(sizes, grads, like, starts, lse, rows, sequence, first_head, ld, ldv):
    """Load the one row of q and do of each head of a group into scratch, and each head's delta = do
    . o and lse.

    Args:
        rows: the thread's scratch.
        first_head: the first head of the group.
        ld, ldv: the padded channels of q and of do.
    """
    group, start = sizes.group, starts[sequence]
    copy_rows(
        like,
        sizes.q_code,
        rows.q,
        ld,
        sizes.head_dim,
        start[Q] + first_head * sizes.q_head,
        sizes.q_head,
        0,
        1,
        0,
        group,
        group,
    )
    do, o = start[DO] + first_head * grads.do_head, start[O] + first_head * sizes.o_head
    copy_rows(
        like, sizes.q_code, rows.do, ldv, sizes.v_head_dim, do, grads.do_head, 0, 1, 0, group, group
    )
    for head in range(group):
        rows.lse[head] = lse[start[LSE] + (first_head + head) * sizes.lse_head]
        # With the sums of dp, so that ds is 0 if o is the only value.
        copy_rows(
            like, sizes.q_code, rows.v, ldv, sizes.v_head_dim, o, sizes.o_head, 0, 1, head, 1, 1
        )
        _products(like, rows.do, head * ldv, rows.v, ldv, ldv, rows.delta, head, 1)


@inner
def _differentiate(like, factor, row_top, row_lse, row_delta, p, ds, at):
    """Replace KEYS products from `at` on in place: p by exp(factor p - top - lse), and ds, which
    holds dp, by p (ds - delta); both by 0 for a row with lse -inf."""
    if row_top != 0.0:
        centre_row(like, factor, row_top, p, at, at + KEYS)
        factor = simd.number(like, 1.0)
    factors, offsets = simd.splat(like, factor), simd.splat(like, -row_lse)
    delta, log2_e, zero = simd.splat(like, row_delta), simd.splat(like, LOG2_E), simd.splat(like, 0)
    is_alive = row_lse != -math.inf
    for column in range(at, at + KEYS, lanes_in(like)):
        x = simd.exp2(simd.mul(simd.fma(simd.load(p, column), factors, offsets), log2_e))
        y = simd.mul(x, simd.sub(simd.load(ds, column), delta))
        simd.store(p, column, x if is_alive else zero)
        simd.store(ds, column, y if is_alive else zero)


@inner
def _find_top(sizes, like, factor, rows, is_direct, head, k, low, high, ld):
    """Set rows.top[head] to the largest logit of keys low ... high - 1, and rows.lse[head] to the
    logarithm of the sum of exp(logit - top), so that large logits lose no bits."""
    at, most, total = head * KEYS, simd.number(like, -math.inf), simd.number(like, 0.0)
    for key in range(low, high, KEYS):
        count, keys, step = min(KEYS, high - key), rows.k, ld
        if is_direct:
            keys, step = pointer_at(like, k + key * sizes.k_row), sizes.k_row // sizes.k_size
        else:
            copy_rows(
                like,
                sizes.k_code,
                rows.k,
                ld,
                sizes.head_dim,
                k,
                sizes.k_row,
                0,
                1,
                key,
                count,
                count,
            )
        _products(like, rows.q, head * ld, keys, step, ld, rows.p, at, count)
        for column in range(at, at + count):
            x = simd.number(like, rows.p[column] * factor)
            if x > most:
                total, most = simd.number(like, total * math.exp(most - x) + 1.0), x
            else:
                total = simd.number(like, total + math.exp(x - most))
    rows.top[head], rows.lse[head] = most, math.log(total)


@inner
def _spread(like, weights, a, ld, factor, target, row, group, count):
    """Set row `key` of target to factor times the sum over `group` heads of weights[head * KEYS +
    key] * a[head], for `count` keys; rows of the target are `row` elements apart."""
    lanes, factors = lanes_in(like), simd.splat(like, factor)
    for key in range(count):
        for column in range(0, ld, lanes):
            x = simd.splat(like, 0.0)
            for head in range(group):
                weight = simd.splat(like, weights[head * KEYS + key])
                x = simd.fma(weight, simd.load(a, head * ld + column), x)
            simd.store(target, key * row + column, simd.mul(x, factors))


@inner
def _add_rows(like, weights, at, b, b_row, ld, target, ti, count):
    """Add the sum over `count` keys of weights[at + key] * row `key` of b, in their order, to
    target[ti : ti + ld]; rows of b are b_row elements apart."""
    lanes = lanes_in(like)
    for column in range(0, ld, 4 * lanes):
        first = ti + column
        x0, x1 = simd.load(target, first), simd.load(target, first + lanes)
        x2, x3 = simd.load(target, first + 2 * lanes), simd.load(target, first + 3 * lanes)
        for key in range(count):
            weight, row = simd.splat(like, weights[at + key]), key * b_row + column
            x0 = simd.fma(weight, simd.load(b, row), x0)
            x1 = simd.fma(weight, simd.load(b, row + lanes), x1)
            x2 = simd.fma(weight, simd.load(b, row + 2 * lanes), x2)
            x3 = simd.fma(weight, simd.load(b, row + 3 * lanes), x3)
        simd.store(target, first, x0)
        simd.store(target, first + lanes, x1)
        simd.store(target, first + 2 * lanes, x2)
        simd.store(target, first + 3 * lanes, x3)


@inner
def _fetch(start, row_bytes, size, first, last, writes):
    """Prefetch `size` bytes of each of rows first ... last - 1 from address `start` on, to be
    written if `writes`: a head's rows are too far apart for the hardware's prefetcher."""
    for row in range(first, last):
        for line in range(start + row * row_bytes, start + row * row_bytes + size, 64):
            if writes:
                prefetch_to_write(line)
            else:
                prefetch(line)


@inner
def _row_task(
    sizes, grads, factor, like, starts, rows, is_direct, sequence, kv_head, first, end, ld, ldv
):
    """Write dk and dv of keys first ... end - 1 of a key head, and leave their contribution to dq
    in rows.dq, without the softmax scale.

    Args:
        is_direct: True if rows of keys have the length and type of those of scratch.
    """
    group, code, start = sizes.group, sizes.k_code, starts[sequence]
    low = first_seen(sizes.window_left, 1, start[K_LEN], 0)
    high = end_seen(sizes.window_right, 1, start[K_LEN], 0)
    k, v = start[K] + kv_head * sizes.k_head, start[V] + kv_head * sizes.v_head
    dk, dv = start[DK] + kv_head * grads.dk_head, start[DV] + kv_head * grads.dv_head
    k_bytes, v_bytes = sizes.k_size * sizes.head_dim, sizes.k_size * sizes.v_head_dim
    one = simd.number(like, 1.0)
    for head in range(group):
        rows.top[head] = 0
        if FAR < abs(rows.lse[head]) < math.inf:
            _find_top(sizes, like, factor, rows, is_direct, head, k, low, high, ld)
    for index in range(group * ld):
        rows.dq[index] = 0
    for key in range(first, end, KEYS):
        count = min(KEYS, end - key)
        later = min(key + 2 * KEYS, end)
        _fetch(dk, grads.dk_row, k_bytes, key, key + count, True)
        _fetch(dv, grads.dv_row, v_bytes, key, key + count, True)
        _fetch(k, sizes.k_row, k_bytes, key + count, later, False)
        _fetch(v, sizes.v_row, v_bytes, key + count, later, False)
        seen, unseen = max(low - key, 0), max(high - key, 0)
        sees_all = seen == 0 and unseen >= count
        keys, k_step, values, v_step = rows.k, ld, rows.v, ldv
        if is_direct and sees_all:
            keys, k_step = pointer_at(like, k + key * sizes.k_row), sizes.k_row // sizes.k_size
            values, v_step = pointer_at(like, v + key * sizes.v_row), sizes.v_row // sizes.k_size
        else:
            copy_rows(
                like, code, rows.k, ld, sizes.head_dim, k, sizes.k_row, 0, 1, key, count, count
            )
            copy_rows(
                like, code, rows.v, ldv, sizes.v_head_dim, v, sizes.v_row, 0, 1, key, count, count
            )
        for head in range(group):
            at = head * KEYS
            _products(like, rows.q, head * ld, keys, k_step, ld, rows.p, at, count)
            _products(like, rows.do, head * ldv, values, v_step, ldv, rows.ds, at, count)
            _differentiate(
                like, factor, rows.top[head], rows.lse[head], rows.delta[head], rows.p, rows.ds, at
            )
        if not sees_all:  # hidden K and V may be inf or NaN
            for column in range(count):
                if column < seen or column >= unseen:
                    for head in range(group):
                        rows.p[head * KEYS + column] = rows.ds[head * KEYS + column] = 0
                    for index in range(column * ld, (column + 1) * ld):
                        rows.k[index] = 0
        for head in range(group):
            _add_rows(like, rows.ds, head * KEYS, keys, k_step, ld, rows.dq, head * ld, count)
        to_dk, to_dv = dk + key * grads.dk_row, dv + key * grads.dv_row
        if is_direct:
            _spread(
                like,
                rows.ds,
                rows.q,
                ld,
                factor,
                pointer_at(like, to_dk),
                grads.dk_row // sizes.k_size,
                group,
                count,
            )
            _spread(
                like,
                rows.p,
                rows.do,
                ldv,
                one,
                pointer_at(like, to_dv),
                grads.dv_row // sizes.k_size,
                group,
                count,
            )
            continue
        _spread(like, rows.ds, rows.q, ld, one, rows.dk, ld, group, count)
        _spread(like, rows.p, rows.do, ldv, one, rows.dv, ldv, group, count)
        store_rows(like, code, rows.dk, ld, factor, to_dk, grads.dk_row, count, sizes.head_dim)
        store_rows(like, code, rows.dv, ldv, one, to_dv, grads.dv_row, count, sizes.v_head_dim)


@kernel
def attention_backward_row(
    like, frame, q, k, v, o, do, dk, dv, lse, dq, parts, finished, counter, num_tasks
):
    """Compute dq, dk and dv of sequences of one query each: take tasks, each a chunk of keys of a
    sequence and key head, in this thread until none is left. The task that ends a head's last chunk
    adds up its dq.

    Args:
        like: the empty array of the problem.
        frame: the problem and its gradients, see `frame_of`; its rule is scaled only.
        q, k, v, o, do, dk, dv: the addresses to which starts are relative.
        lse: the address of the log-sum-exps.
        dq: the address of (B, 1, Hq, D) in q's dtype.
        parts: (num_tasks * group * padded D,) of like's type, scratch for each chunk's dq; unused
            with one chunk.
        finished: (B * Hk,) int64, zeroed, the number of finished chunks.
        counter: (1,) int64, the next task.
    """
    problem = read_problem(frame, like, like)
    owned_starts = placed(problem.arrays.starts, q, k, v, o)
    place_gradients_too(owned_starts, do, dk, dv)
    problem = with_starts(problem, borrowed(owned_starts))
    sizes, grads, starts = problem.sizes, read_gradients(frame), problem.arrays.starts
    group, factor = sizes.group, like.dtype.type(problem.rule.scale)
    ld, ldv = _padded(like, sizes.head_dim), _padded(like, sizes.v_head_dim)
    owned_rows, numbers = _new_rows(like, group, ld, ldv), pointer_at(like, lse)
    arrays, size = borrowed(owned_rows), sizes.k_size
    rows = _Rows(
        bare(arrays.q),
        bare(arrays.do),
        bare(arrays.dq),
        bare(arrays.k),
        bare(arrays.v),
        bare(arrays.dk),
        bare(arrays.dv),
        bare(arrays.p),
        bare(arrays.ds),
        bare(arrays.delta),
        bare(arrays.lse),
        bare(arrays.top),
    )
    is_direct = sizes.k_code == F32 or sizes.k_code == F64
    is_direct = is_direct and ld == sizes.head_dim and ldv == sizes.v_head_dim
    is_direct = is_direct and size == like.itemsize
    number = bare(like)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        chunk, owner = task // grads.num_owners, task % grads.num_owners
        sequence, kv_head = owner // sizes.num_kv_heads, owner % sizes.num_kv_heads
        first_head, first = kv_head * group, chunk * CHUNK_KEYS
        end = min(first + CHUNK_KEYS, starts[sequence, K_LEN])
        _load_queries(sizes, grads, number, starts, numbers, rows, sequence, first_head, ld, ldv)
        _row_task(
            sizes,
            grads,
            factor,
            number,
            starts,
            rows,
            is_direct,
            sequence,
            kv_head,
            first,
            end,
            ld,
            ldv,
        )
        if grads.num_chunks > 1:
            for index in range(group * ld):
                parts[task * group * ld + index] = rows.dq[index]
            if next_task(finished[owner : owner + 1]) < grads.num_chunks - 1:
                continue
            for index in range(group * ld):
                rows.dq[index] = 0
            for part in range(grads.num_chunks):
                at = (part * grads.num_owners + owner) * group * ld
                for index in range(group * ld):
                    rows.dq[index] += parts[at + index]
        where = dq + (starts[sequence, DQ] + first_head * sizes.head_dim) * size
        store_rows(
            number,
            sizes.q_code,
            rows.dq,
            ld,
            factor,
            where,
            sizes.head_dim * size,
            group,
            sizes.head_dim,
        )
    keep_alive(owned_starts)
    keep_alive(owned_rows)
