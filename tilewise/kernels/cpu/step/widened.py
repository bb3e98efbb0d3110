"""Groups of narrow panels as words: rows of a tied embedding outside of a step, and tests.

What      words of chosen groups of 64 outputs; see `dequantise.py`.
Grid      a group is a task, taken from a counter.
One task  widens all inputs of a group.
Traffic   a group's codes are read and its words written once.
Numerics  those of `dequantise.py`.
"""

from __future__ import annotations

import torch
from numba import types
from torch import Tensor

from tilewise.kernels.cpu.machine.threads import keep_alive, kernel, next_task, run_tasks, scratch
from tilewise.kernels.cpu.step.dequantise import SPARE, field, widen_steps
from tilewise.kernels.cpu.step.layers import bytes_of_group
from tilewise.kernels.cpu.step.panels import STEP, WIDTH, Panels
from tilewise.kernels.cpu.step.program import REAL_LIKE, WORD_LIKE
from tilewise.kernels.cpu.step.words import copy_word


def launch(weight: Panels, groups: Tensor) -> Tensor:
    """Return the words of the groups of 64 outputs with these numbers, int64 (n,), of a narrow
    weight: one group after another, a flat tensor in the weight's dtype and in the order of
    `panels.py`."""
    assert weight.table is not None
    words = torch.empty(len(groups) * WIDTH * weight.padded_inputs, dtype=weight.dtype)
    run_tasks(
        _widen,
        len(groups),
        WORD_LIKE[weight.dtype],
        REAL_LIKE,
        weight.table.data_ptr(),
        groups.numpy(),
        weight.padded_inputs,
        words.data_ptr(),
    )
    return words


@kernel
def _widen(word_like, like, table, groups, inputs, target, counter, num_tasks):
    spare = scratch(SPARE // 4, like)
    spare_at = types.int64(spare.ctypes.data)
    size = bytes_of_group(word_like, inputs)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        entry, to = table + 16 * groups[task], target + task * size
        start, form = field(entry, 0), field(entry, 1)
        if form != 0:
            widen_steps(word_like, start, form, types.int64(0), inputs // STEP, to, spare_at)
        else:
            for byte in range(0, size, 4):
                copy_word(to + byte, start + byte)
    keep_alive(spare)
