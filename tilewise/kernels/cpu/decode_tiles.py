"""Launch decoding by the sums of a prompt: one query row, rounded as in a chunk of many.

What      chooses the key heads of a task, and the kernel whose chunks take the call's operands.
Grid      one task per (sequence, some key heads): keys are not split, since a chunk's are not.
One call  is one parallel region.
Traffic   see decode_amx.py and decode_simd.py.
Numerics  those of `run_forward`: a token has the same bits whether it is computed alone, in a chunk
          of any length, or in `attention()` over the whole sequence.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import overload
from torch import Tensor, get_num_threads

from tilewise.kernels.cpu import amx
from tilewise.kernels.cpu.decode_amx import decode_tiles_amx
from tilewise.kernels.cpu.decode_simd import decode_tiles_simd
from tilewise.kernels.cpu.problem import Problem
from tilewise.kernels.cpu.threads import inner, kernel, run_tasks

__all__ = ["decode_tiles", "heads_of_task", "run_decode_tiles"]


def decode_tiles(
    sizes: Any, rule: Any, arrays: Any, heads_per_task: Any, lse: Any, counter: Any, num_tasks: Any
) -> None:
    """Take tasks until none is left, see `decode_tiles_amx`; for compiled code only."""
    raise NotImplementedError


@overload(decode_tiles)
def _decode_tiles(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
    """The kernel of `run_forward` for these operands decides."""
    packed = arrays.types[arrays.fields.index("packed_like")]
    if packed.dtype == types.uint16 and amx.HAS_AMX:

        def run(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
            decode_tiles_amx(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks)

    else:

        def run(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
            decode_tiles_simd(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks)

    return run


@inner
def heads_of_task(num_sequences, num_kv_heads, num_threads):
    """All key heads of a block lie side by side; part them only to keep every thread busy."""
    heads = num_kv_heads
    while num_sequences * (num_kv_heads // heads) < 4 * num_threads and heads % 2 == 0:
        heads //= 2
    return heads


@kernel
def _decode(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
    decode_tiles(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks)


def run_decode_tiles(problem: Problem, lse: Tensor) -> None:
    """Run the sequences of `problem`, one query row each; `packed_like` is that of the chunks."""
    num_sequences, num_kv_heads = len(problem.arrays.starts), problem.sizes.num_kv_heads
    heads = heads_of_task.py_func(num_sequences, num_kv_heads, get_num_threads())
    run_tasks(
        _decode, num_sequences * num_kv_heads // heads, problem.sizes, problem.rule, problem.arrays,
        heads, lse.view(-1).numpy(),
    )  # fmt: skip
