"""The tasks of the backward pass, and the addresses of its gradients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from tilewise.kernels.cpu.attention.backward_scores import FAR
from tilewise.kernels.cpu.attention.problem import (
    DK,
    DO,
    DQ,
    DV,
    Q_LEN,
    TILE_N,
    Gradients,
    byte_strides,
)
from tilewise.kernels.spec import AttentionSpec

ROW_ELEMENTS = 1 << 16  # elements of do that a task of `delta.py` multiplies with o
CHUNK_KEYS = 4 * TILE_N  # their operands and sums fill the better part of an L2 cache


class BackwardTasks(NamedTuple):
    """The tasks of the backward pass, from shapes alone, so that bits do not depend on threads.

    Attributes:
        num_chunks: the number of parts of the keys, of CHUNK_KEYS.
        num_owners: the number of tasks per chunk: one for each sequence and key head whose sums no
            other task shares.
        dbias_shape: the shape (chunks or 1, B or 1, Hq or 1, Sq or 1, Sk or 1) of the sums of the
            bias gradient to which tasks add; (0,) without one.
        shares_batch, shares_heads: True if one task owns all sequences, or all heads, since they
            share the bias gradient.
    """

    num_chunks: int
    num_owners: int
    dbias_shape: tuple[int, ...]
    shares_batch: bool
    shares_heads: bool

    @classmethod
    def of(cls, spec: AttentionSpec, bias: Tensor | None) -> BackwardTasks:
        shares_batch = shares_heads = False
        wide: tuple[int, ...] = (0,)
        if bias is not None:
            shape = (1,) * (4 - bias.ndim) + tuple(bias.shape)
            if shape[2] == 1 or shape[3] == 1:
                # A bias of O(N) per head: sequences and heads may have copies, summed afterwards.
                wide = (spec.batch, spec.num_q_heads, *shape[2:])
            else:
                shares_batch, shares_heads = shape[0] == 1, shape[1] == 1
                wide = shape
        owners = 1 if shares_batch else spec.batch
        owners *= 1 if shares_heads else spec.num_kv_heads
        num_chunks = max(1, -(-spec.max_seqlen_k // CHUNK_KEYS))
        if bias is not None:
            # Chunks add to a number in turn if it has a row of its own; otherwise each has a copy.
            is_number = wide[2] == wide[3] == 1
            wide = (num_chunks if is_number else 1, *wide)
        return cls(num_chunks, owners, wide, shares_batch, shares_heads)

    def over(self, longest: int) -> BackwardTasks:
        """Return the tasks of packed sequences with at most `longest` keys.

        max_seqlen_k of the call, by which `of` counts chunks, may be any larger number, and chunks
        without keys would take time and memory.
        """
        chunks = min(self.num_chunks, max(1, -(-longest // CHUNK_KEYS)))
        copies = min(self.dbias_shape[0], chunks)
        return self._replace(num_chunks=chunks, dbias_shape=(copies, *self.dbias_shape[1:]))


def gradients_of(
    plan: BackwardTasks, do: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dbias_like: Tensor
) -> Gradients:
    """Return the strides of the gradients and the sizes of a plan's tasks, as kernels take them.

    Strides are bytes for do, dk and dv, elements for dq and dbias. num_row_tasks is 0, to be set by
    each run from its lengths.

    Args:
        dbias_like: the gradient of bias, broadcast to five dims; a tensor of other dims stands for
            a call without it.
    """
    (do_row, do_head), (dk_row, dk_head), (dv_row, dv_head) = map(byte_strides, (do, dk, dv))
    rows_per_task = max(1, ROW_ELEMENTS // max(1, do.shape[-1] * do.shape[-2]))
    strides = [0] * 5
    if dbias_like.ndim == 5:
        strides = [
            stride if size > 1 else 0
            for stride, size in zip(dbias_like.stride(), dbias_like.shape, strict=True)
        ]
    return Gradients(
        do_row=do_row,
        do_head=do_head,
        dk_row=dk_row,
        dk_head=dk_head,
        dv_row=dv_row,
        dv_head=dv_head,
        dq_row=dq.stride(-3),
        has_dbias=dbias_like.ndim == 5,
        shares_batch=plan.shares_batch,
        shares_heads=plan.shares_heads,
        dbias_chunk=strides[0],
        dbias_batch=strides[1],
        dbias_head=strides[2],
        dbias_row=strides[3],
        dbias_column=strides[4],
        num_chunks=plan.num_chunks,
        num_owners=plan.num_owners,
        rows_per_task=rows_per_task,
        num_row_tasks=0,
    )


def place_gradients(
    starts: np.ndarray,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    first_q: np.ndarray,
    first_k: np.ndarray,
) -> None:
    """Write the addresses of each sequence's first rows of do, dk and dv, and its offset in dq,
    into `starts` in place.

    Args:
        dq: a tensor like q; its positions are in elements, the others are addresses.
        first_q, first_k: the first row of each sequence, or its number if tensors are dense.
    """
    place_offsets(starts, do, dq, dk, dv, first_q, first_k)
    starts[:, (DO, DK, DV)] += [tensor.data_ptr() for tensor in (do, dk, dv)]


def place_offsets(
    starts: np.ndarray,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    first_q: np.ndarray,
    first_k: np.ndarray,
) -> None:
    """Write the byte offsets of each sequence's first rows in do, dk and dv, and the offset in
    elements in dq, to `starts` in place.

    Args:
        starts: (B, columns) int64.
        first_q, first_k: the first row of each sequence, or its number if tensors are dense.
    """
    for column, tensor, first in ((DO, do, first_q), (DK, dk, first_k), (DV, dv, first_k)):
        starts[:, column] = first * (tensor.stride(0) * tensor.element_size())
    starts[:, DQ] = first_q * dq.stride(0)


def has_far_rows(lse: Tensor) -> bool:
    """Return whether a row of lse (float32) is finite and so large, |lse| above FAR, that the
    rounding of its logits moves probabilities."""
    sizes = np.abs(lse.numpy())
    return bool(((sizes > FAR) & (sizes < np.inf)).any())


def count_row_tasks(starts: np.ndarray, rows_per_task: int) -> int:
    """Return the number of tasks of `delta.py`, each of up to rows_per_task queries of one
    sequence, by the lengths in `starts`."""
    return int((-(-starts[:, Q_LEN] // rows_per_task)).sum())
