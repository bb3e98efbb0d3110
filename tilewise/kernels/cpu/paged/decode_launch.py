"""Launch the decode kernel: one query row of each sequence attends to its keys, in any layout.

What      chooses the keys of a chunk and the heads of a task, and allocates partial results.
Grid      one task per (sequence, split, some key heads), see decode.py.
One call  is one parallel region.
Traffic   see decode.py.
Numerics  see decode.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.frame import frame_of
from tilewise.kernels.cpu.attention.problem import Problem
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.calls import address_of
from tilewise.kernels.cpu.machine.products import LONGEST_INTEGER_DOT
from tilewise.kernels.cpu.machine.rows import BF16, F16
from tilewise.kernels.cpu.machine.threads import run_tasks
from tilewise.kernels.cpu.paged.decode import attend_rows, chunk_of, plan_decode
from tilewise.kernels.device import l2_bytes

CACHE_LIKE = {
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float16: np.empty(0, np.int16),
    torch.int8: np.empty(0, np.int8),
    torch.float8_e4m3fn: np.empty(0, np.uint8),
}


# Size of a call's keys and values, in L2 caches, beyond which rows that may be cached are
# prefetched: a core of an EPYC with 1 MiB of L2 and 32 of L3 took a tenth less without for 0.8 to 6
# MiB, the same for 12, a fifth more for 24 (12 heads, D 64, float32; 2026-11-27).
FETCHED = 8
NOT_SHARED = np.empty(0, np.int64)
_zeros, _int64 = np.zeros, np.int64  # each name look-up costs a noticeable part of a short call


class Rows(NamedTuple):
    """A problem of one query row a sequence, as `attend_rows` takes it; made by `rows_of`, and run
    by `run_decode` any number of times.

    Attributes:
        given: the arguments that are the same in all calls of a plan, of which the first is an
            empty array of the type of sums.
        num_sums: the number of elements of the partial results of splits, which each run allocates.
        num_finished: the number of counters of finished splits.
        kept: the arrays to which the frame points.
    """

    num_tasks: int
    given: tuple[Any, ...]
    num_sums: int
    num_finished: int
    kept: Problem


def rows_of(
    problem: Problem, cache_dtype: torch.dtype, threads: int, *, size: int | None = None
) -> Rows:
    """Return a problem whose sequences have one query row each as `attend_rows` takes it, with
    tasks for a number of threads; the tasks are numbered in problem.arrays.starts, in place.

    Args:
        size: the bytes of keys and values that were just written or read; None for a cache, where
            other layers' were in between.
    """
    sizes, arrays = problem.sizes, problem.arrays
    num_sequences = len(arrays.starts)
    splits = np.empty((num_sequences, 2), np.int64)
    num_slots = plan_decode(arrays.starts, sizes.window_left, sizes.num_kv_heads, splits)
    # All key heads of a block are adjacent; divide them only to keep every thread busy.
    heads_per_task = sizes.num_kv_heads
    while threads > 1 and num_slots // heads_per_task < 4 * threads and heads_per_task % 2 == 0:
        heads_per_task //= 2
    chunk = chunk_of(
        sizes.num_kv_heads * key_bytes(sizes.head_dim + sizes.v_head_dim, sizes.k_size)
    )
    group = sizes.group if sizes.group == 1 else -(-sizes.group // 4) * 4
    packed_like = arrays.packed_like
    if takes_integers(cache_dtype, sizes.q_code, sizes.head_dim):
        packed_like = np.empty(0, np.uint16)
    padded_dim = -(-sizes.v_head_dim // 64) * 64  # 64: elements of the widest load
    given = (
        arrays.like,
        packed_like,
        CACHE_LIKE[cache_dtype],
        frame_of(problem),
        chunk,
        size is None or size > FETCHED * l2_bytes(),
        heads_per_task,
        splits,
    )
    return Rows(
        num_slots // heads_per_task,
        given,
        num_slots * group * (padded_dim + 2),
        num_sequences * sizes.num_kv_heads,
        problem,
    )


def run_decode(
    rows: Rows,
    lse: Tensor | None,
    addresses: tuple[int, int, int, int] = (0, 0, 0, 0),
    *,
    is_small: bool = False,
) -> None:
    """Compute attention for a problem: write o through its addresses, and fill lse unless it is
    None; on this thread alone if `is_small`.

    Args:
        addresses: the addresses of q, k, v and o, if the problem's starts are offsets.
    """
    num_tasks, given, num_sums, num_finished, _ = rows
    like, to = given[0], 0 if lse is None else lse.data_ptr()
    if is_small:  # as `run_alone` would
        attend_rows(*given, *addresses, to, like, NOT_SHARED, _zeros(1, _int64), num_tasks)
        return
    work, finished = np.empty(num_sums, like.dtype), np.zeros(num_finished, np.int64)
    run_tasks(attend_rows, num_tasks, *given, *addresses, to, work, finished)


def address_of_rows(like: np.ndarray, packed_like: np.ndarray, cache_dtype: torch.dtype) -> int:
    """Return the address of `attend_rows` compiled for these types, for kernels that call it; it is
    compiled now if it is not yet."""
    return address_of(
        attend_rows,
        like,
        packed_like,
        CACHE_LIKE[cache_dtype],
        NOT_SHARED,
        1,
        True,
        1,
        NOT_SHARED.reshape(0, 2),
        0,
        0,
        0,
        0,
        0,
        like,
        NOT_SHARED,
        NOT_SHARED,
        1,
    )


def key_bytes(channels: int, size: int) -> int:
    """Return the bytes of a key and its value as `chunk_of` counts them: `channels` in all of
    `size` bytes, at least 2.

    8-bit rows count as 16 bits: on an EPYC with 512 KiB of L2 16 keys took 6 to 10 % less than 32
    with int8 from memory, though 8 % more with all of them in the L2 cache (2026-11-22).
    """
    return channels * max(size, 2)


def takes_integers(cache_dtype: torch.dtype, q_code: int, head_dim: int) -> bool:
    """Return whether queries of the dtype with code q_code are rounded to 16-bit integers, to be
    multiplied with the cache's int8 numbers directly."""
    return (
        cache_dtype == torch.int8
        and simd.HAS_INTEGER_DOT
        and q_code in (BF16, F16)
        and head_dim <= LONGEST_INTEGER_DOT
    )
