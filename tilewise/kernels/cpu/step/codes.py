"""The format of a list of operations: codes, columns, and the arrays of a call.

An operation is a row of int64: its code, and the addresses, strides in bytes and sizes of its
operands; see `run.py`, which runs the list, and `program.py`, which makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Operations, and the columns of their rows.
EMBED, NORM, PRODUCT, ROTATE, ATTEND = range(5)
(CODE, SOURCE, SOURCE_ROW, TARGET, TARGET_ROW, WEIGHT, INPUTS, GROUPS, BIAS, EPILOGUE, IS_SAMPLED,
 LAYER, K_CACHE, V_CACHE, K_SCALE, V_SCALE, WINDOW, FORM, JOINS, Q_NORM, K_NORM,
 NORM_CODE) = range(22)  # fmt: skip
NUM_COLUMNS = 22
FRAME = WEIGHT
# JOINS: for a norm, whether the threads of the next product may compute it themselves; for a
# product, whether a thread may apply the rotation that follows to its own results: then the number
# of groups that contain whole heads, otherwise 0.
# FRAME: for attention, the address of the part of its problem that is the same in all steps, see
# `attention/frame.py`; it has no weight.
# Q_NORM, K_NORM: for a rotation, the addresses of the weights of the heads' norms, 0 without;
# NORM_CODE is their dtype.
# Layout of a weight: rows (only for an embedding table), panels, or 8-bit panels.
ROWS, PANELS, PANELS_OF_INT8 = range(3)

# What is done with the sums of a product: stored, added to the target, used as a gate and its
# factor, or rounded and stored as float32; see `layers.py`.
STORE, ADD, GATE, LOGITS = range(4)


class Batch(NamedTuple):
    """The tokens and sequences of a step, all as arrays on the host.

    Attributes:
        ids, positions, slots: (T,) int64, for each token.
        edges, lengths: (B + 1,), (B,) int32, cu_seqlens_q and seqlens_k.
        table: (B, M) int32, the block table.
        sampled: (R,) int64, the rows whose logits are needed.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    edges: np.ndarray
    lengths: np.ndarray
    table: np.ndarray
    sampled: np.ndarray


class Shape(NamedTuple):
    """The numbers that all attention operations of a list share.

    They are the numbers of heads, the channels, the dtype codes and, for the cache, the bytes from
    block to block and so on, equal for keys and values.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    half: int
    code: int
    cache_code: int
    cache_size: int
    block_size: int
    block_bytes: int
    row_bytes: int
    head_bytes: int
    scale_block: int
    scale_row: int
    scale_head: int


class Tables(NamedTuple):
    """The constant arrays: cosines and sines of all positions, flat."""

    cos: np.ndarray
    sin: np.ndarray


class Workspace(NamedTuple):
    """The memory that attention writes: partial results, counters of a layer's splits, lse."""

    sums: np.ndarray
    finished: np.ndarray
    lse: np.ndarray


class Likes(NamedTuple):
    """Empty arrays that carry dtypes, of sums and words, and the kernel of attention.

    Attributes:
        attend: the address of `attend_rows`, or of the kernel in `paged/decode_tiles.py` if
            in_tiles is 1.
        cache_size, packed_size: the bytes of an element of the cache and of packed queries.
        chunk: the keys of a chunk.
    """

    real: np.ndarray
    word: np.ndarray
    attend: int
    in_tiles: int
    cache_size: int
    packed_size: int
    chunk: int
