"""The rows of keys and values that the queries of one head of a sequence meet.

What      addresses and strides of a `Source`, of a dense or packed tensor or of a paged cache.
Grid      none: called by one thread of a kernel.
One call  one key head of a sequence.
Traffic   none.
Numerics  integers.
"""

from __future__ import annotations

from numba import types

from tilewise.kernels.cpu.attention.problem import K_LEN, Q_LEN, K, V
from tilewise.kernels.cpu.machine.source import Source
from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.visible import first_seen


@inner
def _first_row(sizes, arrays, sequence):
    """Return the position of the first key that any query of the sequence sees by the window,
    before which no block of a cache is read.

    For keys that are not paged it is 0.
    """
    if sizes.block_size == 0:
        return types.int64(0)
    q_len, k_len = arrays.starts[sequence, Q_LEN], arrays.starts[sequence, K_LEN]
    return first_seen(sizes.window_left, q_len, k_len, 0)


@inner
def keys_of(sizes, arrays, sequence, kv_head):
    """Return a `Source`: the addresses, strides and dtype of one key head's keys in memory.

    Args:
        sizes, arrays: the call's `Sizes` and `Arrays`.
        sequence, kv_head: the numbers of the sequence and of the key head.
    """
    return Source(
        arrays.starts[sequence, K] + kv_head * sizes.k_head,
        sizes.k_row,
        sizes.k_block,
        sizes.block_size,
        sizes.k_code,
        sizes.head_dim,
        sizes.k_size * sizes.head_dim,
        sizes.k_scale + kv_head * sizes.k_scale_head,
        sizes.k_scale_row,
        sizes.k_scale_block,
        arrays.table,
        sequence,
        _first_row(sizes, arrays, sequence),
    )


@inner
def values_of(sizes, arrays, sequence, kv_head):
    """Return a `Source`: the addresses, strides and dtype of one key head's values in memory.

    Args:
        sizes, arrays: the call's `Sizes` and `Arrays`.
        sequence, kv_head: the numbers of the sequence and of the key head.
    """
    return Source(
        arrays.starts[sequence, V] + kv_head * sizes.v_head,
        sizes.v_row,
        sizes.v_block,
        sizes.block_size,
        sizes.k_code,
        sizes.v_head_dim,
        sizes.k_size * sizes.v_head_dim,
        sizes.v_scale + kv_head * sizes.v_scale_head,
        sizes.v_scale_row,
        sizes.v_scale_block,
        arrays.table,
        sequence,
        _first_row(sizes, arrays, sequence),
    )
