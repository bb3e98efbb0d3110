"""Normalise, rotate, quantise and scatter the rows of a step, in one pass over them.

What      q = rope(norm(q)) to a new tensor; rope(norm(k)) and v to their slots of the cache. Each
          of the steps may be missing: `write_kv_cache` of an 8-bit cache is this kernel without
          queries, norm and rotation.
Grid      tasks of 64 tokens, taken from a counter; one task, so one thread, while decoding.
One task  every head of its tokens, one row of D channels in scratch at a time.
Traffic   every element is read once and written once; scratch and tables stay in the L1 cache.
Numerics  float32 (float64 for float64), rounded once to the type that is written.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import (
    inner,
    kernel,
    next_task,
    overloaded,
    run_tasks,
    scratch,
)
from tilewise.kernels.cpu.paged.ids import slots_of
from tilewise.kernels.cpu.paged.quantise import CACHE_CODES, INT8, quantise_row
from tilewise.kernels.cpu.rope import rotate_row
from tilewise.kernels.spec import ElementSpec, scale_per_slot

TOKENS_PER_TASK = 64  # as for rope: several times a thread's wake-up
_CODES = DTYPE_CODES | CACHE_CODES


class Rows(NamedTuple):
    """The addresses, byte strides and dtype codes of the source and target rows of q, k or v of one
    call, for compiled code.

    Row `offset` of block `block` goes to target + block * to_block + offset * to_row; for q, which
    goes to a dense tensor, slots are tokens. scale, the address of the scales, is 0 unless the
    target is 8-bit; owns_scale is true if each row writes its own.
    """

    source: int
    row: int
    head: int
    num_heads: int
    dim: int
    code: int
    target: int
    to_block: int
    to_row: int
    to_head: int
    to_code: int
    scale: int = 0
    scale_block: int = 0
    scale_row: int = 0
    scale_head: int = 0
    owns_scale: bool = False


def why_not(spec: ElementSpec) -> str | None:
    """Return why this kernel cannot write to a cache of the spec's dtype, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return None if spec.dtype in CACHE_CODES else why_not_dtype(spec.dtype)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write k and v to their slots, in place, and return q as a new tensor (T, Hq, D); q and k are
    normalised, where weights are given, and rotated.

    Args:
        q, k, v: (T, H, D), strided in all dims but the last; k_cache, v_cache: (N, P, Hk, D).
        slot_mapping: (T,) int64; -1 skips the row.
        cos, sin: (T, R / 2) float32.
        q_norm, k_norm: (D,), the weights of the norms.
        k_scale, v_scale: (N, P, Hk), written for each row, or (Hk,), read; float32, of an 8-bit
            cache.
    """
    q = q.detach() if q.stride(-1) == 1 else q.detach().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    size = q.element_size()
    q_rows = Rows(
        q.data_ptr(),
        q.stride(0) * size,
        q.stride(1) * size,
        q.shape[1],
        q.shape[2],
        _CODES[q.dtype],
        out.data_ptr(),
        out.stride(0) * k_cache.shape[1] * size,
        out.stride(0) * size,
        out.stride(1) * size,
        _CODES[q.dtype],
    )
    _launch(
        q_rows,
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        cos,
        sin,
        interleaved,
        q_norm,
        k_norm,
        norm_eps,
        k_scale,
        v_scale,
    )
    return out


def write_quantised(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Quantise k and v and write them to their slots of an 8-bit cache, in place, without norm and
    rotation; scales (N, P, Hk) are written for each row, (Hk,) are read."""
    nothing = Rows(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    angles = torch.empty((k.shape[0], 0), dtype=torch.float32)
    _launch(
        nothing,
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        angles,
        angles,
        False,
        None,
        None,
        0.0,
        k_scale,
        v_scale,
    )


def _cache_rows(new: Tensor, cache: Tensor, scale: Tensor | None) -> Rows:
    size, width = new.element_size(), cache.element_size()
    to_block, to_row, to_head = (stride * width for stride in cache.stride()[:3])
    rows = Rows(
        new.data_ptr(),
        new.stride(0) * size,
        new.stride(1) * size,
        new.shape[1],
        new.shape[2],
        _CODES[new.dtype],
        cache.data_ptr(),
        to_block,
        to_row,
        to_head,
        _CODES[cache.dtype],
    )
    if scale is None:
        return rows
    block, row, head = (stride * 4 for stride in scale_per_slot(scale, cache).stride())
    return rows._replace(
        scale=scale.data_ptr(),
        scale_block=block,
        scale_row=row,
        scale_head=head,
        owns_scale=scale.dim() == 3,
    )


def _launch(
    q_rows: Rows,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    k, v = (x.detach() if x.stride(-1) == 1 else x.detach().contiguous() for x in (k, v))
    # Bytes are computed from float32, so a float64 row would gain nothing from more.
    real = torch.float32 if k_scale is not None else float_type(k.dtype)
    tables = [t.detach().to(real).contiguous().view(-1).numpy() for t in (cos, sin)]
    weights = [
        np.empty(0, tables[0].dtype) if w is None else w.detach().to(real).contiguous().numpy()
        for w in (q_norm, k_norm)
    ]
    num_tasks = -(-k.shape[0] // TOKENS_PER_TASK)
    run_tasks(
        _prepare,
        num_tasks,
        q_rows,
        _cache_rows(k, k_cache, k_scale),
        _cache_rows(v, v_cache, v_scale),
        slots_of(slot_mapping, k_cache),
        k_cache.shape[1],
        *tables,
        cos.shape[1],
        interleaved,
        *weights,
        float(norm_eps),
    )


@inner
def _normalise(row, count, weight, eps):
    """Replace row[0 : count] by row / sqrt(mean(row^2) + eps) * weight, in place."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    squares = simd.splat(row, 0.0)
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        vector = simd.load(row, column)
        squares = simd.fma(vector, vector, squares)
    total = simd.sum_lanes(squares)
    for column in range(done, count):
        total += row[column] * row[column]
    factor = row.dtype.type(1.0 / math.sqrt(total / count + eps))
    factors = simd.splat(row, factor)
    for column in range(0, done, lanes):
        scaled = simd.mul(simd.load(row, column), factors)
        simd.store(row, column, simd.mul(scaled, simd.load(weight, column)))
    for column in range(done, count):
        row[column] = row[column] * factor * weight[column]


def _to_bytes(row, count, code, address, scale_address, owns_scale):
    """Store one row to the cache as `quantise_row` does; for a float64 row, which has no rule,
    nothing is done."""


@overloaded(_to_bytes)
def _overload_to_bytes(row, count, code, address, scale_address, owns_scale):
    if row.dtype == types.float64:
        return lambda row, count, code, address, scale_address, owns_scale: None

    def of_float32(row, count, code, address, scale_address, owns_scale):
        quantise_row(row, count, code, address, scale_address, owns_scale)

    return of_float32


@inner
def move_heads(rows, token, angle, slot, block_size, row, weight, eps, cos, sin, half, interleaved):
    """Copy each head of one token from its source to its slot, normalised and rotated where wanted,
    and quantised where the target has 8 or 4 bits.

    Args:
        rows: the addresses and strides of source and target.
        token, slot: the row of the source, and the cache slot of the target.
        angle: the row of cos and sin.
        block_size: the tokens of a block.
        row: scratch for a head.
        weight, eps: the weight of the norm, empty for none, and its epsilon.
        half: half of the rotated channels.
        interleaved: True for pairs (2i, 2i + 1), False for (i, i + half).
    """
    block = slot // block_size
    offset = slot - block * block_size
    source = rows.source + token * rows.row
    target = rows.target + block * rows.to_block + offset * rows.to_row
    scale = rows.scale + block * rows.scale_block + offset * rows.scale_row
    for head in range(rows.num_heads):
        load_row(row, rows.code, row, 0, source + head * rows.head, rows.dim)
        if len(weight) > 0:
            _normalise(row, rows.dim, weight, eps)
        if half > 0:
            rotate_row(row, row, cos, sin, angle, half, interleaved)
        to = target + head * rows.to_head
        if rows.to_code < INT8:
            store_row(row, rows.to_code, row, types.int64(0), row.dtype.type(1.0), to, rows.dim)
        else:
            _to_bytes(
                row, rows.dim, rows.to_code, to, scale + head * rows.scale_head, rows.owns_scale
            )


@kernel
def _prepare(
    q,
    k,
    v,
    slots,
    block_size,
    cos,
    sin,
    half,
    interleaved,
    q_weight,
    k_weight,
    eps,
    counter,
    num_tasks,
):
    row = scratch(max(q.dim, k.dim, v.dim), cos)
    nothing = cos[:0]
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        for token in range(task * TOKENS_PER_TASK, min((task + 1) * TOKENS_PER_TASK, len(slots))):
            if q.num_heads > 0:
                move_heads(
                    q,
                    token,
                    token,
                    token,
                    block_size,
                    row,
                    q_weight,
                    eps,
                    cos,
                    sin,
                    half,
                    interleaved,
                )
            if slots[token] >= 0:
                move_heads(
                    k,
                    token,
                    token,
                    slots[token],
                    block_size,
                    row,
                    k_weight,
                    eps,
                    cos,
                    sin,
                    half,
                    interleaved,
                )
                move_heads(
                    v,
                    token,
                    token,
                    slots[token],
                    block_size,
                    row,
                    nothing,
                    eps,
                    cos,
                    sin,
                    types.int64(0),
                    interleaved,
                )
