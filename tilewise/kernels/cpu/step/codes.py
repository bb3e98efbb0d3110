"""The format of a list of operations: codes, columns, and the arrays of a call.

An operation is a row of int64: its code, and the addresses, strides in bytes and sizes of its
operands; see `run.py`, which runs the list, and `program.py`, which makes it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# Operations. From OWN_KERNEL on each is a kernel of its own, called by its address.
EMBED, NORM, PRODUCT, ROTATE, ATTEND, OWN_KERNEL = range(6)
# Columns of their rows.
(CODE, SOURCE, SOURCE_ROW, TARGET, TARGET_ROW, WEIGHT, INPUTS, GROUPS, BIAS, EPILOGUE, IS_SAMPLED,
 LAYER, K_CACHE, V_CACHE, K_SCALE, V_SCALE, WINDOW, FORM, JOINS, Q_NORM, K_NORM, NORM_CODE,
 KIND, COPIES, PARTS, PIECES, SOURCE_STEP, TARGET_STEP, OUTPUTS, NUM_Q, NUM_KV, DIM, V_DIM, HALF,
 ANGLES, IS_INTERLEAVED, Q_AT, K_AT, V_AT, Q_STEP, K_BLOCK, K_ROW, K_HEAD, V_BLOCK, V_ROW, V_HEAD,
 SCALE_BLOCK, SCALE_ROW, SCALE_HEAD, FUNCTION, KERNEL, CHUNK, EXTRA, EXTRA_ROW, Q_WEIGHT, Q_BIAS,
 K_WEIGHT, K_BIAS, NORM_STEP, IS_AFTER, PHASE, NUM_EXPERTS, NUM_ACTIVE, SCORES, IS_NORMALISED,
 NUM_GROUPS, ACTIVE_GROUPS, BEST_IN_GROUP, CORRECTION, EXPERT_SCALE, PLACES, ORDER, WEIGHTS,
 GATE_ROWS, GATE_STRIDE, V_WEIGHT, V_FROM, GROWTH_LENGTH, GROWTH_FIRST, CHUNK_KEYS, STATE,
 NUM_SLOTS, KEPT_KEYS, KEPT_GATES, KEPT_UPDATES, BETA_ROWS, BETA_STRIDE) = range(87)  # fmt: skip
NUM_COLUMNS = 87
FRAME = WEIGHT
# JOINS: for a norm, whether the threads of the next product may compute it themselves; for a
# product, whether a thread may apply the rotation that follows to its own results: then the number
# of groups that contain whole heads, otherwise 0.
# FRAME: for attention, the address of the part of its problem that is the same in all steps, see
# `attention/frame.py`; it has no weight.
# Q_NORM, K_NORM: for a rotation, the addresses of the weights of the heads' norms, 0
# without; NORM_CODE is their dtype.
# Q_WEIGHT, Q_BIAS, K_WEIGHT, K_BIAS: the addresses of weights and biases of norms of heads that
# round, of the kind KIND; NORM_STEP: the bytes from head to head of them; IS_AFTER: whether they
# follow the rotation.
# V_WEIGHT: the address of the weight of the values' norm, which is computed before that of the
# keys, from the columns V_FROM on; 0 without.
# GROWTH_LENGTH, GROWTH_FIRST: the tokens of a step of the queries' growth, 0 without growth, and
# the term of the position; BETA is its factor.
# CHUNK_KEYS: the keys of a chunk, for attention that begins anew with each, or 0.
# Q_AT, K_AT, V_AT: where q, k and v begin in a row; Q_STEP: from a query head to the next.
# BIAS of an embedding: the address of a table whose rows are added by position.
# EXTRA: the address of rows that are added to the sums of ADD before the target is, or that
# multiply what STORE stores, or 0; of a norm that adds, that of the sum's factor, float32, or 0.
# COPIES: how many rows there are for each token; PARTS: how many products or norms of equal size
# lie side by side in a row, SOURCE_STEP and TARGET_STEP apart; PIECES: the address of the runs of
# rows of each expert, see `mixture.py`.
# WEIGHT: with PARTS or PIECES, the address of pairs of addresses, of weights and of biases.
# NORM_STEP of a norm of parts: the bytes from a part's weights to the next's.
# OUTPUTS: how many columns a product may write; 0 for whole groups, which buffers have room for.
# PHASE ... GATE_STRIDE: see `mixture.py`.
# STATE ... BETA_STRIDE: see `recurrence.py`.
# Layout of a weight: rows (only for an embedding table), panels, or narrow panels, of which WEIGHT
# is a table, see `layers.multiply_task`.
ROWS, PANELS, NARROW_PANELS = range(3)

# What is done with the sums of a product: stored (after a function), added to the target, used as
# a gate and its factor, or rounded and stored as float32; see `layers.py`.
STORE, ADD, GATE, LOGITS = range(4)
# Bits of KIND, of a norm: the quotient is rounded before the weight multiplies it; the mean is
# subtracted first; the row is a part of a wider one.
ROUNDS, CENTRES, IS_PART = 1, 2, 4
# Columns of the numbers of an operation: epsilon; the factor of an embedding, of what is stored or
# added to the target, or of logits; what is added to the weight of a norm; the bound and the factor
# of gpt-oss's gate; the softcap of logits; the factor of the logarithm of the queries' growth.
EPS, FACTOR, SHIFT, LIMIT, ALPHA, CAP, BETA = range(7)
NUM_NUMBERS = 7


NO_STATES = np.empty(0, np.int64)


class Batch(NamedTuple):
    """The tokens and sequences of a step, all as arrays on the host.

    Attributes:
        ids, positions, slots: (T,) int64, for each token.
        edges, lengths: (B + 1,) and (B,) int32: the first row of each sequence and the end, and its
            number of keys.
        table: (B, M) int32, the block table.
        sampled: (R,) int64, the rows whose logits are needed.
        state_slots, state_starts: (S,) int64, for layers whose memory is a state: the slot of each
            sequence, -1 for none, and the tokens that came before the step. Empty without such
            layers.
        state_edges: (S + 1,) int64, the first row of each of these sequences, and the end.
    """

    ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    edges: np.ndarray
    lengths: np.ndarray
    table: np.ndarray
    sampled: np.ndarray
    state_slots: np.ndarray = NO_STATES
    state_starts: np.ndarray = NO_STATES
    state_edges: np.ndarray = NO_STATES


class Shape(NamedTuple):
    """The numbers that all operations of a list share: the dtype codes of the model and of its
    cache, the number of tokens of a cache block, and the largest head dimension of its layers."""

    code: int
    cache_code: int
    block_size: int
    most_dim: int


class Tables(NamedTuple):
    """The arrays of a program that never change: cosines and sines of all positions, flat, `row`
    numbers a position."""

    cos: np.ndarray
    sin: np.ndarray
    row: int


class Workspace(NamedTuple):
    """The memory that attention writes in a step: partial results of splits, counters of the splits
    of a layer that have ended, and the log-sum-exps."""

    sums: np.ndarray
    finished: np.ndarray
    lse: np.ndarray


class Likes(NamedTuple):
    """Empty arrays that carry the dtypes of sums (`real`) and of the model's words (`word`) into
    compiled code, and the address of the kernel of attention.

    Attributes:
        attend: the address of `attend_rows`, or of the kernel in `paged/decode_tiles.py` if
            in_tiles is 1.
        cache_size, packed_size: the bytes of an element of the cache and of packed queries.
    """

    real: np.ndarray
    word: np.ndarray
    attend: int
    in_tiles: int
    cache_size: int
    packed_size: int
