"""One product of rows with packed weights, outside of a step.

What      y (T, N) = x (T, K) weight (N, K)^T + bias; see `product.py`.
Grid      tasks of some panels of weights and some hundred rows, taken from a counter.
One task  see `layers.multiply_task`.
Traffic   weights come once for each chunk of rows that fits half of an L2 cache.
Numerics  float32 sums, rounded once; a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
from numba import types
from torch import Tensor

from tilewise.kernels.cpu.machine import amx
from tilewise.kernels.cpu.machine.threads import keep_alive, kernel, next_task, run_tasks, scratch
from tilewise.kernels.cpu.step.codes import STORE
from tilewise.kernels.cpu.step.functions import IDENTITY
from tilewise.kernels.cpu.step.layers import BLOCK_ROWS, multiply_task, steps_of_slice
from tilewise.kernels.cpu.step.panels import STEP, WIDTH, Panels, row_stride
from tilewise.kernels.cpu.step.product import has_tiles, has_words
from tilewise.kernels.cpu.step.program import REAL_LIKE, WORD_LIKE
from tilewise.kernels.cpu.step.run import CHUNK_BYTES

GROUPS_PER_TASK = 4


def launch(x: Tensor, weight: Panels) -> Tensor:
    """Return x (T, K) times the packed weight (N, K)^T plus its bias, if it has one: (T, N) in the
    weight's dtype.

    Each call copies x to memory of its own, in the weight's dtype and padded to a multiple of
    BLOCK_ROWS rows, and frees it: no state is kept between calls.
    """
    rows, dtype = x.shape[0], weight.dtype
    blocks = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
    source = torch.zeros((blocks, row_stride(weight.num_inputs)), dtype=dtype)
    source[:rows, : weight.num_inputs] = x.detach()
    target = torch.empty((rows, weight.padded_outputs), dtype=dtype)
    size = dtype.itemsize
    bias = 0 if weight.bias is None else weight.bias.data_ptr()
    source_row = source.stride(0) * size
    wide_row = 4 * row_stride(weight.num_inputs)
    chunk = max(CHUNK_BYTES // max(source_row, wide_row) // BLOCK_ROWS, 1) * BLOCK_ROWS
    groups = weight.padded_outputs // WIDTH
    num_tasks = -(-rows // chunk) * -(-groups // GROUPS_PER_TASK)
    run_tasks(
        _multiply,
        num_tasks,
        WORD_LIKE[dtype],
        REAL_LIKE,
        source.data_ptr(),
        source_row,
        rows,
        chunk,
        (weight.words if weight.table is None else weight.table).data_ptr(),
        weight.is_narrow,
        weight.is_permuted,
        weight.padded_inputs,
        groups,
        bias,
        target.data_ptr(),
        target.stride(0) * size,
    )
    return target[:, : weight.num_outputs].contiguous()


@kernel
def _multiply(
    word_like,
    like,
    source,
    source_row,
    rows,
    chunk,
    weight,
    is_narrow,
    is_permuted,
    inputs,
    groups,
    bias,
    target,
    target_row,
    counter,
    num_tasks,
):
    if has_tiles(word_like):
        amx.configure()
    c = scratch(2 * BLOCK_ROWS * WIDTH, like)
    wide = scratch(1, like)
    blocks = (min(chunk, rows) + BLOCK_ROWS - 1) // BLOCK_ROWS
    if not has_words(word_like):
        wide = scratch(blocks * BLOCK_ROWS * (inputs + STEP), like)
    steps = steps_of_slice(word_like)
    if min(rows, chunk) > BLOCK_ROWS:
        steps = max(steps, inputs // STEP)
    words = scratch(WIDTH * STEP * steps if is_narrow else 1, word_like)
    permuted = scratch(1, word_like)
    if is_permuted:
        permuted = scratch(blocks * BLOCK_ROWS * (inputs + STEP), word_like)
    c_at, words_at = types.int64(c.ctypes.data), types.int64(words.ctypes.data)
    wide_at, permuted_at = types.int64(wide.ctypes.data), types.int64(permuted.ctypes.data)
    per_chunk = (groups + GROUPS_PER_TASK - 1) // GROUPS_PER_TASK
    held, none, shown = -1, 0.0, types.int64(-1)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        which = task // per_chunk
        first = (task - which * per_chunk) * GROUPS_PER_TASK
        shown = multiply_task(
            word_like,
            like,
            source + which * chunk * source_row,
            source_row,
            min(chunk, rows - which * chunk),
            weight,
            is_narrow,
            inputs,
            first,
            min(first + GROUPS_PER_TASK, groups),
            bias,
            STORE,
            IDENTITY,
            1.0,
            none,
            none,
            none,
            0,
            0,
            0,
            target + which * chunk * target_row,
            target_row,
            c_at,
            wide_at,
            words_at,
            permuted_at,
            shown if held == which else types.int64(-1),
        )
        held = which
    if has_tiles(word_like):
        amx.release()
    keep_alive((c, wide, words, permuted))
