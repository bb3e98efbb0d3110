"""A bias whose tiles the copy engine brings to shared memory, for Hopper's attention kernels."""

from __future__ import annotations

from torch import Tensor

from tilewise.kernels.host.descriptors import why_no_descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec

__all__ = ["copied_bias"]

_MOST_CHANNELS = 128  # of a head; beside wider ones shared memory has no room


def copied_bias(maker: Maker, spec: AttentionSpec, bias: Tensor | None) -> Tensor | None:
    """Return a bias as a view (1 or batch, queries, 1 or heads, keys) of which TMA can copy tiles,
    or None if it cannot or there is none.

    The bias must have 16 bits, a number for each query and key, neighbouring keys, and rows on
    multiples of 16 bytes; heads may have 128 channels at most.
    """
    if bias is None or bias.dim() < 2 or bias.dtype.itemsize != 2:
        return None
    if max(spec.head_dim, spec.v_head_dim) > _MOST_CHANNELS or not maker.is_aligned(bias):
        return None
    rows, keys = bias.shape[-2:]
    if (rows == 1 < spec.max_seqlen_q) or (keys == 1 < spec.max_seqlen_k) or bias.stride(-1) != 1:
        return None
    bias = bias[(None,) * (4 - bias.dim())]
    for axis in range(2):
        if bias.stride(axis) == 0:  # expanded
            bias = bias.narrow(axis, 0, 1)
    bias = bias.transpose(1, 2)
    return bias if why_no_descriptor(bias) is None else None
