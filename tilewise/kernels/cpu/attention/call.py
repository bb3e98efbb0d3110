"""A call of attention in plain numbers, as the kernels take it, without the numbers of each run.

What      strides, sizes and rules of a call, computed once for its plan; a run adds addresses,
          and the lengths in tensors, which are checked there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import (
    K_LEN,
    LSE,
    NUM_STARTS,
    Q_LEN,
    Arrays,
    K,
    O,
    Problem,
    Q,
    Rule,
    Sizes,
    V,
    bias_numbers,
    check_edges,
    check_longest,
    dropout_numbers,
    mask_numbers,
    packed_type,
    per_head,
    sizes_of,
)
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES
from tilewise.kernels.cpu.visible import check_lists
from tilewise.kernels.plan import Layout
from tilewise.kernels.spec import AttentionSpec, AttentionTensors

_NO_ADDRESSES = (0,) * (NUM_STARTS - 4)


class CallFrame:
    """A call as the kernels take it, without addresses and without lengths in tensors; made once by
    its plan, of layouts alone.

    Attributes:
        sizes: the sizes, with 0 for the address of the bias.
        starts: the starts of a dense call, with offsets instead of addresses.
        copies: True if q, k or v has a strided last dim, so that each run copies it.
        numbers: 0 ... B - 1, the numbers of the sequences.
        like: an empty array of the float type to compute in.
        is_plain: True for a dense call of q, k and v alone, without dropout.
    """

    def __init__(self, spec: AttentionSpec, layouts: AttentionTensors, o: Tensor) -> None:
        q, k, v = (unit_stride(x.meta()) for x in layouts[:3])
        bias = None if layouts.bias is None else layouts.bias.meta()
        slopes = layouts.alibi_slopes
        self.spec = spec
        self.copies = any(is_strided(x) for x in layouts[:3])
        self._steps = [x.stride(0) * x.element_size() for x in (q, k, v, o)]
        starts = np.zeros((spec.batch, NUM_STARTS), np.int64)
        self.numbers = np.arange(spec.batch)
        if not spec.is_varlen:
            starts[:, Q_LEN], starts[:, K_LEN] = q.shape[1], k.shape[1]
            starts[:, LSE] = self.numbers * spec.num_q_heads * q.shape[1]
            self._place(starts, self.numbers, self.numbers)
        self.starts = starts
        self.sizes = _sizes_of(spec, q, k, v, o, bias, slopes)
        self._rule = Rule(
            is_scaled_only=bias is None
            and slopes is None
            and spec.softcap == 0.0
            and spec.softmax_scale > 0.0,
            scale=float(spec.softmax_scale),
            softcap=float(spec.softcap),
            has_bias=bias is not None,
            has_alibi=slopes is not None,
        )
        self._real = np.float64 if q.dtype == torch.float64 else np.float32
        self.like = np.empty(0, self._real)
        self._packed_like = np.empty(0, packed_type(q.dtype, simd.HAS_BF16_DOT))
        self._table = np.empty((0, 0), np.int32)
        self.is_plain = not (spec.is_varlen or spec.has_seqlens_k or spec.has_sinks) and (
            bias is None and slopes is None and not (spec.mask_tile or spec.dropout_threshold)
        )

    def _place(self, starts: np.ndarray, first_q: np.ndarray, first_k: np.ndarray) -> None:
        firsts = (first_q, first_k, first_k, first_q)
        for column, step, first in zip((Q, K, V, O), self._steps, firsts, strict=True):
            starts[:, column] = first * step

    def problem(self, tensors: AttentionTensors, o: Tensor) -> Problem:
        """Return the `Problem` of a run: this call with the addresses of `tensors`, whose last dims
        are contiguous, and of `o`, and with the lengths that the tensors hold.

        Raises:
            ValueError: cu_seqlens, seqlens_k or the lists of a mask do not fit the other tensors.
        """
        q, k, v = tensors[:3]
        spec, sizes = self.spec, self.sizes
        # The columns of Q, K, V and O are the first ones.
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr(), *_NO_ADDRESSES)
        starts = self.starts + np.array(addresses, np.int64)
        if self.is_plain:
            return self._problem(starts)
        if spec.is_varlen:
            self._fill_packed(starts, tensors)
            starts[:, :4] += np.array(addresses[:4], np.int64)
        elif tensors.seqlens_k is not None:
            lengths = tensors.seqlens_k.numpy()
            if lengths.size and not 0 <= lengths.min() <= lengths.max() <= k.shape[1]:
                raise ValueError(f"seqlens_k must lie in [0, {k.shape[1]}], got {lengths}")
            starts[:, K_LEN] = lengths
        if tensors.bias is not None:
            sizes = sizes._replace(bias=tensors.bias.data_ptr())
        slopes = per_head(tensors.alibi_slopes, spec.num_q_heads, 0.0, self._real)
        sinks = per_head(tensors.sinks, spec.num_q_heads, -np.inf, self._real)
        mask = mask_numbers(tensors.mask, spec.mask_tile)
        check_lists(mask)
        return Problem(
            sizes,
            self._rule,
            Arrays(self.like, self._packed_like, starts, self._table, slopes, sinks),
            mask,
            dropout_numbers(tensors.philox, spec),
        )

    def plain_problem(self) -> Problem:
        """Return the `Problem` of a call of q, k and v alone, with offsets instead of addresses,
        which kernels add."""
        return self._problem(self.starts.copy())

    def _problem(self, starts: np.ndarray) -> Problem:
        heads = self.spec.num_q_heads
        slopes, sinks = (per_head(None, heads, x, self._real) for x in (0.0, -np.inf))
        arrays = Arrays(self.like, self._packed_like, starts, self._table, slopes, sinks)
        return Problem(self.sizes, self._rule, arrays)

    def _fill_packed(self, starts: np.ndarray, tensors: AttentionTensors) -> None:
        edges_q, edges_k = tensors.cu_seqlens_q.numpy(), tensors.cu_seqlens_k.numpy()
        check_edges("cu_seqlens_q", edges_q, tensors.q.shape[0])
        check_edges("cu_seqlens_k", edges_k, tensors.k.shape[0])
        first_q, first_k = self.firsts(tensors)
        starts[:, Q_LEN], starts[:, K_LEN] = np.diff(edges_q), np.diff(edges_k)
        check_longest("max_seqlen_q", starts[:, Q_LEN], self.spec.max_seqlen_q)
        check_longest("max_seqlen_k", starts[:, K_LEN], self.spec.max_seqlen_k)
        starts[:, LSE] = first_q
        self._place(starts, first_q, first_k)

    def firsts(self, tensors: AttentionTensors) -> list[np.ndarray]:
        """Return the first row of each packed sequence in q and in k, int64 (B,) each.

        For dense sequences both arrays are 0 ... B - 1, the numbers of the sequences.
        """
        if not self.spec.is_varlen:
            return [self.numbers, self.numbers]
        edges = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        return [each.numpy()[:-1].astype(np.int64) for each in edges]


def _sizes_of(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    bias: Tensor | None,
    slopes: Layout | None,
) -> Sizes:
    sizes = sizes_of(spec, q, k, v, o, DTYPE_CODES[k.dtype], spec.window_right)
    shape = (spec.batch, spec.num_q_heads, spec.max_seqlen_q, spec.max_seqlen_k)
    _, code, to_batch, to_head, to_row, to_column = bias_numbers(bias, shape)
    return sizes._replace(
        bias_code=code,
        bias_batch=to_batch,
        bias_head=to_head,
        bias_row=to_row,
        bias_column=to_column,
        slopes_batch=spec.num_q_heads if slopes is not None and len(slopes.shape) == 2 else 0,
    )


def is_strided(x: Tensor | Layout) -> bool:
    step = x.stride(-1) if isinstance(x, Tensor) else x.stride[-1]
    return step != 1 and x.shape[-1] != 1


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a detached contiguous copy if its last dim is strided."""
    return tensor.detach().contiguous() if is_strided(tensor) else tensor


def with_unit_strides(frame: CallFrame, tensors: AttentionTensors) -> AttentionTensors:
    """Return the tensors of a call, with contiguous copies of q, k and v if the frame says that one
    has a strided last dim."""
    if not frame.copies:
        return tensors
    q, k, v = (unit_stride(x) for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)
