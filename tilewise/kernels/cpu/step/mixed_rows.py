"""A mixture of experts outside of a step, by the operations of a step.

What      y (T, E) = the weighted sum of what the experts of each row make of it; see `mixture.py`.
Grid      a list of five operations on one thread, made for one call.
One task  see `mixture.py` and `layers.py`.
Traffic   rows are copied in and out once.
Numerics  those of a step, to the bit.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.step.codes import Batch, Tables
from tilewise.kernels.cpu.step.operands import Mixture
from tilewise.kernels.cpu.step.program import REAL_LIKE, Program


def launch(x: Tensor, logits: Tensor, mixture: Mixture) -> Tensor:
    """Return the output y (T, E) of a mixture of experts for rows x (T, E), in x's dtype; logits
    (T, N), float32 or of x's dtype, choose each row's experts. The calling thread computes
    alone."""
    num_rows, width = x.shape
    if num_rows == 0:
        return torch.empty_like(x)
    program = Program(x.dtype, (torch.empty((0, 1, 1, 1), dtype=x.dtype),))
    source, target = program.buffer("x", width), program.buffer("y", width)
    scores = program.buffer("logits", logits.shape[1], logits.dtype)
    program.mix(source, scores, target, mixture, has_wide_logits=logits.dtype != x.dtype)
    program.reserve(num_rows, 0)
    program.buffers["x"][:num_rows, :width] = x.detach()
    program.buffers["logits"][:num_rows, : logits.shape[1]] = logits.detach()
    tokens, sequence = np.zeros(num_rows, np.int64), np.array([num_rows], np.int32)
    batch = Batch(
        tokens,
        tokens,
        tokens,
        np.array([0, num_rows], np.int32),
        sequence,
        np.zeros((1, 1), np.int32),
        tokens[:0],
    )
    program.run(batch, Tables(REAL_LIKE, REAL_LIKE, 0), 1, 0, len(program))
    return program.buffers["y"][:num_rows, :width].clone()
