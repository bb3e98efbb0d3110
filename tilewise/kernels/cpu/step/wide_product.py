"""A product in float32 within a step of 16 bits: the logits of a router that is kept in float32.

What      y (T, N) float32 = x (T, K) weight (N, K)^T + bias, with the weight in float32 panels.
Grid      tasks of some rows and some groups of panels, taken from a counter.
One task  widens up to 32 rows in scratch and multiplies them; see `product.py`.
Traffic   the weight once for 32 rows.
Numerics  float32 sums in the order of every other product: what `nn.PackedLinear` computes.
"""

from __future__ import annotations

from numba import types

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import keep_alive, kernel, next_task, scratch
from tilewise.kernels.cpu.step.codes import (
    BIAS,
    GROUPS,
    INPUTS,
    SOURCE,
    SOURCE_ROW,
    TARGET,
    TARGET_ROW,
    WEIGHT,
)
from tilewise.kernels.cpu.step.layers import BLOCK_ROWS, bytes_of_group, widen_rows
from tilewise.kernels.cpu.step.panels import STEP, WIDTH
from tilewise.kernels.cpu.step.product import multiply_rows
from tilewise.kernels.cpu.step.words import get, put


@kernel
def multiply_wide(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Compute a float32 product whose rows are widened: an operation of a step, whose tasks this
    thread takes beside the others until none is left.

    Args:
        op: the operation's record: INPUTS, GROUPS, addresses.
        counter: the shared counter from which threads take tasks.
    """
    num_rows, inputs, groups = len(batch.ids), op[INPUTS], op[GROUPS]
    lda, lanes = 4 * (inputs + STEP), simd.REGISTER_BYTES // 4
    wide, c = scratch(BLOCK_ROWS * (inputs + STEP), like), scratch(BLOCK_ROWS * WIDTH, like)
    at, c_at = types.int64(wide.ctypes.data), types.int64(c.ctypes.data)
    held = -1
    while True:
        task = next_task(counter)
        block = task // groups
        if block * BLOCK_ROWS >= num_rows:
            break
        group, first = task - block * groups, block * BLOCK_ROWS
        count = min(BLOCK_ROWS, num_rows - first)
        if block != held:
            widen_rows(
                word_like,
                like,
                op[SOURCE] + first * op[SOURCE_ROW],
                op[SOURCE_ROW],
                count,
                inputs,
                at,
                lda,
            )
            held = block
        start = op[WEIGHT] + group * bytes_of_group(like, inputs)
        multiply_rows(like, c_at, count, at, lda, start, inputs, False, block == 0)
        for row in range(count):
            target = op[TARGET] + (first + row) * op[TARGET_ROW] + 4 * group * WIDTH
            for column in range(0, WIDTH, lanes):
                x = get(like, c_at + 4 * (row * WIDTH + column))
                if op[BIAS] != 0:
                    x = simd.add(x, get(like, op[BIAS] + 4 * (group * WIDTH + column)))
                put(like, target + 4 * column, x)
    keep_alive((wide, c))
