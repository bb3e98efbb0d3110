"""Change rows of logits in place by biases, masks and penalties, on the CPU.

What      biases added to single tokens, tokens forbidden by a bit mask, and penalties for tokens
          that a text already contains.
Grid      tasks of one row, taken from a counter; biases before, in numpy.
One task  walks the words of the mask and skips those that forbid nothing; then the counts, and
          skips tokens that are new.
Traffic   the mask and the counts of a row once, and the logits that change.
Numerics  float32, each operation rounded, in the order that `ops.adjust_logits` gives.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.machine.threads import kernel, next_task, run_tasks
from tilewise.kernels.spec import ElementSpec


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel that adjusts logits cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return None


def launch(
    logits: Tensor,
    rows: Tensor,
    mask: Tensor | None,
    mask_of: Tensor | None,
    bias_rows: Tensor | None,
    bias_ids: Tensor | None,
    bias: Tensor | None,
    counts: Tensor | None,
    counts_of: Tensor | None,
    penalties: Tensor | None,
) -> None:
    """Apply biases, then masks and penalties to some rows of logits (R, V) in place. Rows, tokens,
    masks and counts outside of their tensors, such as -1, are skipped.

    Args:
        logits: (R, V) float32.
        rows: int64 (A,), the indices of the rows that masks and penalties change.
        mask, mask_of: int32 (M, ceil(V / 32)) bits of allowed tokens, and int32 (A,), each row's
            mask.
        bias_rows, bias_ids, bias: (E,), logits[bias_rows[e], bias_ids[e]] += bias[e]; a pair may
            occur once.
        counts, counts_of: int32 (S, V), for each token twice its number in the answer, plus 1 if it
            is in the prompt, and int32 (A,), each row's counts.
        penalties: float32 (A, 3): repetition, frequency, presence.
    """
    if bias_rows is not None and bias_ids is not None and bias is not None and len(bias):
        row, token = bias_rows.numpy(), bias_ids.numpy()
        exists = (row >= 0) & (row < logits.shape[0]) & (token >= 0) & (token < logits.shape[1])
        logits.numpy()[row[exists], token[exists]] += bias.numpy()[exists]
    if len(rows) == 0 or (mask is None and counts is None):
        return
    stride, vocab = logits.stride(0), logits.shape[1]
    nothing = np.full(len(rows), -1, np.int32)
    run_tasks(
        _adjust_rows,
        len(rows),
        _flat(logits).numpy(),
        len(logits),
        stride,
        vocab,
        rows.contiguous().numpy(),
        np.empty(0, np.int32) if mask is None else mask.contiguous().view(-1).numpy(),
        -(-vocab // 32),
        0 if mask is None else len(mask),
        nothing if mask_of is None else mask_of.contiguous().numpy(),
        np.empty(0, np.int32) if counts is None else _flat(counts).numpy(),
        0 if counts is None else counts.stride(0),
        0 if counts is None else len(counts),
        nothing if counts_of is None else counts_of.contiguous().numpy(),
        np.empty(0, np.float32) if penalties is None else penalties.contiguous().view(-1).numpy(),
    )


def _flat(x: Tensor) -> Tensor:
    """Return a view of the memory of rows of contiguous elements as one row, from the first element
    to the last, gaps between rows included."""
    span = (x.shape[0] - 1) * x.stride(0) + x.shape[1] if len(x) else 0
    return torch.as_strided(x, (span,), (1,), x.storage_offset())


@kernel
def _adjust_rows(
    logits,
    num_rows,
    stride,
    vocab,
    rows,
    mask,
    num_words,
    num_masks,
    mask_of,
    counts,
    counts_stride,
    num_counts,
    counts_of,
    penalties,
    counter,
    num_tasks,
):
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        if not 0 <= rows[task] < num_rows:
            continue
        first = rows[task] * stride
        if 0 <= mask_of[task] < num_masks:
            words = np.int64(mask_of[task]) * num_words
            for number in range(num_words):
                word = mask[words + number]
                if word == -1:
                    continue
                for bit in range(min(32, vocab - 32 * number)):
                    if (word >> bit) & 1 == 0:
                        logits[first + 32 * number + bit] = -math.inf
        if 0 <= counts_of[task] < num_counts:
            row = np.int64(counts_of[task]) * counts_stride
            repetition = penalties[3 * task]
            frequency, presence = penalties[3 * task + 1], penalties[3 * task + 2]
            for at in range(vocab):
                word = counts[row + at]
                if word == 0:
                    continue
                x = logits[first + at]
                if x > np.float32(0.0):
                    x = x / repetition
                else:
                    x = x * repetition
                if word > 1:
                    x = x - frequency * np.float32(word >> 1)
                    x = x - presence
                logits[first + at] = x
