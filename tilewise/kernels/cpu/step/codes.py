"""What a list of operations is written in: codes, columns, and the arrays of a call.

An operation is a row of int64: what it does, and addresses, strides in bytes and sizes of what it
reads and writes; see `run.py`, which runs the list, and `program.py`, which makes it.
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
# JOINS: of a norm, whether it may be done by whoever does the product that comes next; of a
# product, whether its results may be rotated, as the next operation would, by whoever has them:
# the number of groups that hold whole heads, else 0.
# FRAME: of attention, where its problem stands but for what differs from step to step, see
# `attention/frame.py`; it has no weight.
# Q_NORM, K_NORM: of a rotation, where the weights of the norms of heads lie, 0 without; NORM_CODE
# is that of their dtype.
# How a weight lies: as rows (a table of embeddings only), in panels, or there in 8 bits.
ROWS, PANELS, PANELS_OF_INT8 = range(3)

# What becomes of the sums of a product: stored, added to the target, a gate and what it
# multiplies, or rounded and stored as float32; see `layers.py`.
STORE, ADD, GATE, LOGITS = range(4)


class Batch(NamedTuple):
    """The tokens and sequences of a step, all arrays of the host's.

    Attributes:
        ids, positions, slots: (T,) int64.
        edges, lengths: (B + 1,), (B,) int32, cu_seqlens_q and seqlens_k.
        table: (B, M) int32.
        sampled: (R,) int64, rows whose logits are wanted.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    edges: np.ndarray
    lengths: np.ndarray
    table: np.ndarray
    sampled: np.ndarray


class Shape(NamedTuple):
    """What all attention operations of a list have in common: numbers of heads, channels, codes
    and, of the cache, bytes from block to block and so on, keys and values alike."""

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
    """Arrays that stay: cosines and sines of all positions, flat."""

    cos: np.ndarray
    sin: np.ndarray


class Workspace(NamedTuple):
    """What attention writes to: partial results, counters of a layer's splits, lse."""

    sums: np.ndarray
    finished: np.ndarray
    lse: np.ndarray


class Likes(NamedTuple):
    """Empty arrays that tell dtypes, of sums and words, and the kernel that attends.

    Attributes:
        attend: where it lies: `attend_rows`, or that of `paged/decode_tiles.py` if in_tiles is 1.
        cache_size, packed_size: bytes of elements of the cache and of packed queries.
        chunk: keys of a chunk.
    """

    real: np.ndarray
    word: np.ndarray
    attend: int
    in_tiles: int
    cache_size: int
    packed_size: int
    chunk: int
