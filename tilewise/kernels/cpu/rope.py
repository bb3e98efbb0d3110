"""Rotary position embedding on the CPU.

What      rotates pairs of the first R channels of each head by the angle of its position.
Grid      tasks of 64 tokens, taken from a counter; one task, so one thread, while decoding.
One task  every head of its tokens, one row of D channels in scratch at a time.
Traffic   x is read once and the result written once; cos and sin stay in the L1 cache.
Numerics  float32 (float64 for float64), rounded once to the type of x.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import inner, kernel, next_task, run_tasks, scratch
from tilewise.kernels.spec import ElementSpec

TOKENS_PER_TASK = 64  # about 100 us of work for 8 heads of 128, several times a thread's wake-up


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel of rotary embeddings cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x with the first R channels of each head rotated and the rest copied; a table of S
    positions is shared by all sequences.

    (a, b) -> (a cos - b sin, b cos + a sin) for pairs (i, i + R/2), or (2i, 2i + 1) if interleaved.

    Args:
        x: (T, H, D) or (B, S, H, D), strided in all dims but the last.
        cos, sin: (T, R/2), (S, R/2) or (B, S, R/2).

    Returns:
        A new contiguous tensor of the shape and dtype of x.

    Source: Su et al. 2021, "RoFormer", eq. 34.
    """
    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    wide = x if x.ndim == 4 else x.unsqueeze(0)
    batch, seqlen, num_heads, head_dim = wide.shape
    real = float_type(x.dtype)
    angles = [
        table.detach().to(real).contiguous().view(-1, table.shape[-1]) for table in (cos, sin)
    ]
    size = x.element_size()
    num_tokens = batch * seqlen
    num_tasks = -(-num_tokens // TOKENS_PER_TASK)
    run_tasks(
        _rotate,
        num_tasks,
        np.empty(0, np.float64 if real == torch.float64 else np.float32),
        DTYPE_CODES[x.dtype],
        size,
        wide.data_ptr(),
        wide.stride(0) * size,
        wide.stride(1) * size,
        wide.stride(2) * size,
        out.data_ptr(),
        num_tokens,
        max(seqlen, 1),
        num_heads,
        head_dim,
        angles[0].numpy(),
        angles[1].numpy(),
        interleaved,
    )
    return out


@inner
def rotate_row(like, row, cos, sin, angle, half, interleaved):
    """Rotate row[0 : 2 * half] in place by row number `angle` of the flat tables cos and sin, whose
    rows have `half` numbers.

    A pair is two neighbours if interleaved, else elements `half` apart.
    """
    lanes = simd.REGISTER_BYTES // like.itemsize
    done = 0
    if not interleaved:
        done = half // lanes * lanes
        start = angle * half
        for pair in range(0, done, lanes):
            c, s = simd.load(cos, start + pair), simd.load(sin, start + pair)
            a, b = simd.load(row, pair), simd.load(row, half + pair)
            simd.store(row, pair, simd.sub(simd.mul(a, c), simd.mul(b, s)))
            simd.store(row, half + pair, simd.add(simd.mul(b, c), simd.mul(a, s)))
    for pair in range(done, half):
        c, s = cos[angle * half + pair], sin[angle * half + pair]
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, half + pair)
        a, b = row[first], row[second]
        row[first] = a * c - b * s
        row[second] = b * c + a * s


@kernel
def _rotate(
    like,
    code,
    size,
    x,
    x_batch,
    x_row,
    x_head,
    out,
    num_tokens,
    seqlen,
    num_heads,
    head_dim,
    cos,
    sin,
    interleaved,
    counter,
    num_tasks,
):
    row = scratch(head_dim, like)
    half, num_angles = cos.shape[1], cos.shape[0]
    flat_cos, flat_sin = cos.ravel(), sin.ravel()
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        first = task * TOKENS_PER_TASK
        for token in range(first, min(first + TOKENS_PER_TASK, num_tokens)):
            batch = token // seqlen
            start = x + batch * x_batch + (token - batch * seqlen) * x_row
            target = out + token * num_heads * head_dim * size
            for head in range(num_heads):
                load_row(like, code, row, 0, start + head * x_head, head_dim)
                rotate_row(like, row, flat_cos, flat_sin, token % num_angles, half, interleaved)
                store_row(like, code, row, 0, 1.0, target + head * head_dim * size, head_dim)
