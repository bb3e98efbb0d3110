"""Launch decoding with the sums of a prompt's kernel: one query row, rounded as in a chunk.

What      chooses the key heads of a task, and the kernel whose chunks take the call's operands.
Grid      one task per (sequence, some key heads): keys are not split, since a chunk's are not.
One call  is one parallel region.
Traffic   see decode_amx.py and decode_simd.py.
Numerics  those of `run_forward`: a token has the same bits whether it is computed alone, in a chunk
          of any length, or in `attention()` over the whole sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from torch import Tensor, get_num_threads

from tilewise.kernels.cpu.attention.problem import TILE_N, Problem
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.calls import address_of
from tilewise.kernels.cpu.machine.threads import inner, kernel, overloaded, run_tasks
from tilewise.kernels.cpu.paged.decode_amx import decode_tiles_amx
from tilewise.kernels.cpu.paged.decode_simd import decode_tiles_simd
from tilewise.kernels.device import l2_bytes

_L2 = l2_bytes()

__all__ = ["address_of_tiles", "decode_tiles", "heads_of_task", "run_decode_tiles"]


def decode_tiles(
    sizes: Any, rule: Any, arrays: Any, heads_per_task: Any, lse: Any, counter: Any, num_tasks: Any
) -> None:
    """Decode in this thread: take tasks until none is left, by `decode_tiles_amx` for bfloat16
    operands on a CPU with tile registers, else by `decode_tiles_simd`. For compiled code only:
    Python gets NotImplementedError.

    A thread that decodes bfloat16 on a CPU with tile registers must have configured them.
    """
    raise NotImplementedError


def _has_tiles(packed: types.Array) -> bool:
    return packed.dtype == types.uint16 and simd.HAS_TILES


@overloaded(decode_tiles)
def _decode_tiles(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
    """Return the implementation of `decode_tiles` for these numba types: the matrix unit's where
    `run_forward` would take it for these operands, else the vector unit's."""
    if _has_tiles(arrays.types[arrays.fields.index("packed_like")]):

        def run(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
            decode_tiles_amx(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks)

    else:

        def run(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
            decode_tiles_simd(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks)

    return run


@inner
def heads_of_task(sizes, num_sequences, num_threads):
    """Return the number of key heads of a task, a divisor of all.

    All key heads of a block are adjacent. They are divided to keep every thread busy, and so that a
    tile of keys with the next one fills at most a quarter of the L2 cache.
    """
    heads = sizes.num_kv_heads
    tile = TILE_N * sizes.k_size * (sizes.head_dim + sizes.v_head_dim)
    while heads % 2 == 0 and (
        num_sequences * (sizes.num_kv_heads // heads) < 4 * num_threads or 8 * heads * tile > _L2
    ):
        heads //= 2
    return heads


@intrinsic
def _needs_tiles(typingctx, packed):
    """Return whether `decode_tiles` multiplies in AMX tile registers, known at compile time.

    Args:
        packed: an empty array of the operands' type, which decides.
    """

    def codegen(context, builder, sig, args):
        return context.get_constant(types.boolean, _has_tiles(packed))

    return types.boolean(packed), codegen


@kernel
def _decode(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
    if _needs_tiles(arrays.packed_like):
        amx.configure()
    decode_tiles(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks)
    if _needs_tiles(arrays.packed_like):
        amx.release()


def address_of_tiles(problem: Problem) -> int:
    """Return the address of the kernel that decodes problems with the types of this one, for
    kernels that call it; it is compiled now if it is not yet.

    The kernel takes the problem's sizes, rule and arrays, key heads of a task, lse, counter and
    num_tasks.
    """
    sizes, rule, arrays = problem[:3]
    return address_of(_decode, sizes, rule, arrays, 1, arrays.like, np.empty(0, np.int64), 1)


def run_decode_tiles(problem: Problem, lse: Tensor) -> None:
    """Let the one query row of each sequence of `problem` attend to its keys, with the bits of a
    chunk: write o through its addresses and fill lse, on all threads.

    `packed_like` of the problem's arrays has the type of a chunk's operands, by which the matrix or
    the vector unit is chosen.
    """
    num_sequences, num_kv_heads = len(problem.arrays.starts), problem.sizes.num_kv_heads
    heads = heads_of_task.py_func(problem.sizes, num_sequences, get_num_threads())
    run_tasks(
        _decode,
        num_sequences * num_kv_heads // heads,
        problem.sizes,
        problem.rule,
        problem.arrays,
        heads,
        lse.view(-1).numpy(),
    )
