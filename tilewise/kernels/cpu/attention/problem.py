"""A call of the tile kernels as plain numbers: strides, sizes and rules.

A query tile mixes the heads that share a key head: flat row r of a sequence is query r // G of
head hk * G + r % G, so a tile of keys is packed once for the whole group.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, F32
from tilewise.kernels.spec import AttentionSpec, MaskTensors, PagedSpec

TILE_M = 64 if simd.NUM_REGISTERS == 32 else 66  # query rows: 8 or 11 register blocks
TILE_N = 128  # keys: one panel of V (128 x 32 bfloat16, 8 KiB) and P's block fit the L1 cache
# Elements from row to row of a tile of scores: 66 rows 512 bytes apart would share 8 L1 sets.
SCORE_ROW = TILE_N if simd.NUM_REGISTERS == 32 else TILE_N + 16

# Columns of `Problem.starts`: the addresses of a sequence's first rows, and its lengths.
Q, K, V, O, LSE, Q_LEN, K_LEN, TASK, DO, DK, DV, DQ = range(12)  # noqa: E741
NUM_STARTS = 12


class Sizes(NamedTuple):
    """The shapes, dtype codes and byte strides of a call of attention as kernels take them; k_size
    is the bytes of a key element.

    lse_head counts elements. block_size is 0 for dense and packed keys. bias is the address of the
    bias, or 0, and bias_* are its byte strides, 0 where it is broadcast. slopes_batch is Hq if each
    sequence has slopes of its own, else 0. k_scale, v_scale are the addresses of the scales of an
    8-bit cache, and k_scale_*, v_scale_* their strides in bytes.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    window_left: int
    window_right: int
    q_code: int
    k_code: int
    k_size: int
    q_row: int
    q_head: int
    k_row: int
    k_head: int
    v_row: int
    v_head: int
    o_row: int
    o_head: int
    lse_head: int
    block_size: int = 0
    k_block: int = 0
    v_block: int = 0
    bias: int = 0
    bias_code: int = F32
    bias_batch: int = 0
    bias_head: int = 0
    bias_row: int = 0
    bias_column: int = 0
    slopes_batch: int = 0
    k_scale: int = 0
    k_scale_block: int = 0
    k_scale_row: int = 0
    k_scale_head: int = 0
    v_scale: int = 0
    v_scale_block: int = 0
    v_scale_row: int = 0
    v_scale_head: int = 0


class Rule(NamedTuple):
    """The computation of a logit from a product q . k: times `scale`, bounded by `softcap` (0 for
    none), plus a bias and minus ALiBi's term if there are these.

    is_scaled_only: True without softcap, bias and ALiBi, and with a positive scale, so that the
    largest product is the largest logit and the scale can be applied in exp2.
    """

    is_scaled_only: bool
    scale: float
    softcap: float
    has_bias: bool
    has_alibi: bool


class Arrays(NamedTuple):
    """The arrays of a call of attention, as kernels take them.

    Attributes:
        like: an empty array of the float type to compute in.
        packed_like: an empty array of the type of the product's operands; uint16 is bfloat16.
        starts: (B, 12) int64, for each sequence the addresses of its first rows, its lengths and
            its first task; the columns are Q, K, V, O, LSE, Q_LEN, K_LEN, TASK, DO, DK, DV and DQ.
        table: (B, M) int32 block table, (0, 0) without one.
        slopes: (Hq,) or (B * Hq,) of like's type, the slopes of ALiBi, 0 without it.
        sinks: (Hq,) of like's type, the logits of the sinks, -inf without a sink.
    """

    like: np.ndarray
    packed_like: np.ndarray
    starts: np.ndarray
    table: np.ndarray
    slopes: np.ndarray
    sinks: np.ndarray


class Gradients(NamedTuple):
    """The strides of the gradients of a call and the numbers of its tasks, as kernels take them:
    bytes for do, dk and dv; elements for dq and dbias, 0 where the bias is broadcast.

    shares_batch, shares_heads: True if the bias gradient of all sequences, or heads, is the same
    memory, so that one task must own them all. rows_per_task, num_row_tasks: the queries of a task
    of `delta.py`, and the number of such tasks. num_chunks, num_owners: the chunks of keys, and the
    tasks of each chunk.
    """

    do_row: int
    do_head: int
    dk_row: int
    dk_head: int
    dv_row: int
    dv_head: int
    dq_row: int
    has_dbias: bool
    shares_batch: bool
    shares_heads: bool
    dbias_chunk: int
    dbias_batch: int
    dbias_head: int
    dbias_row: int
    dbias_column: int
    num_chunks: int
    num_owners: int
    rows_per_task: int
    num_row_tasks: int


class Mask(NamedTuple):
    """A block mask as kernels take it, its bits, spans and entries as in `spec.MaskTensors` but
    flat; and the tree mask of a call of paged attention.

    Attributes:
        shift_q, shift_k: the binary logarithms of a mask tile's queries and keys; 0 without a mask.
        num_rows, num_columns: the numbers of tiles of queries and of keys.
        batch_step, head_step: the steps from a list to that of the next sequence and query head, in
            units of num_rows or num_columns lists; 0 if shared.
        tree, tree_row, tree_starts: a tree mask of paged attention: its bytes, flat, the length of
            its rows, and the row of each sequence's first query; row lengths of 0 without one.
    """

    shift_q: int
    shift_k: int
    num_rows: int
    num_columns: int
    batch_step: int
    head_step: int
    bits: np.ndarray
    rows: np.ndarray
    row_entries: np.ndarray
    columns: np.ndarray
    column_entries: np.ndarray
    tree: np.ndarray = np.empty(0, np.uint8)
    tree_row: int = 0
    tree_starts: np.ndarray = np.empty(0, np.int64)


_NO_TILES = np.empty(0, np.int32)
NO_MASK = Mask(0, 0, 0, 0, 0, 0, *[_NO_TILES] * 5)


class Dropout(NamedTuple):
    """The dropout of a call, see `machine/philox.py`.

    Attributes:
        threshold: the number of the 256 values of a byte that drop a probability; 0 is off.
        scale: the factor of the kept probabilities.
        key0, key1, offset: 32-bit words of the seed and of the counter.
    """

    threshold: int
    scale: float
    key0: int
    key1: int
    offset: int


NO_DROPOUT = Dropout(0, 1.0, 0, 0, 0)


class Problem(NamedTuple):
    """One call of attention as the CPU's kernels take it: plain numbers, and arrays that hold the
    addresses of its tensors."""

    sizes: Sizes
    rule: Rule
    arrays: Arrays
    mask: Mask = NO_MASK
    dropout: Dropout = NO_DROPOUT


class Backward(NamedTuple):
    """The backward pass of a call of attention as the kernels take it: its problem, and the arrays
    that the tasks of all threads share.

    Attributes:
        sizes, rule, arrays, mask, dropout: the parts of the call's `Problem`; arrays.starts
            contains the addresses of gradients, too.
        grads: the strides of the gradients.
        lse, delta: flat arrays, laid out alike; delta contains dlse until `delta.py` has replaced
            it by rowsum(do * o) - dlse.
        dq: (rows, Hq, D), flat, zeroed: the sums of dq.
        dbias: a flat, zeroed array for the sums of the gradient of the bias, or an empty one.
        done: (tasks of keys + 1,) int64, zeroed, see `Turn`; the last counts tasks of rows.
    """

    sizes: Sizes
    rule: Rule
    arrays: Arrays
    mask: Mask
    dropout: Dropout
    grads: Gradients
    lse: np.ndarray
    delta: np.ndarray
    dq: np.ndarray
    dbias: np.ndarray
    done: np.ndarray


def mask_numbers(mask: MaskTensors | None, tile: tuple[int, int] | None) -> Mask:
    """Return the block mask of a call with mask tiles (queries, keys) as the kernels take it;
    NO_MASK without one."""
    if mask is None or tile is None:
        return NO_MASK
    batch, heads, num_rows, _ = mask.rows.shape
    return Mask(
        tile[0].bit_length() - 1,
        tile[1].bit_length() - 1,
        num_rows,
        mask.columns.shape[2],
        heads if batch > 1 else 0,
        1 if heads > 1 else 0,
        *(tensor.contiguous().view(-1).numpy() for tensor in mask),
    )


def dropout_numbers(philox: Tensor | None, spec: AttentionSpec) -> Dropout:
    """Return the dropout of a call as the kernels take it; `philox` is int64 (2,), seed and offset.
    Without dropout it is NO_DROPOUT."""
    if philox is None or spec.dropout_threshold == 0:
        return NO_DROPOUT
    low = 0xFFFFFFFF
    seed, offset = philox.tolist()
    return Dropout(
        spec.dropout_threshold, spec.dropout_scale, seed & low, seed >> 32 & low, offset & low
    )


def float_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics and sums for inputs of `dtype`: float64 for float64, else
    float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def packed_type(dtype: torch.dtype, has_bf16_dot: bool) -> type:
    """Return the NumPy type of the products' operands for inputs of `dtype`: uint16, which stands
    for bfloat16, if they are bfloat16 and the CPU multiplies it; float64 for float64; else
    float32."""
    if dtype == torch.float64:
        return np.float64
    return np.uint16 if dtype == torch.bfloat16 and has_bf16_dot else np.float32


@functools.cache
def _constant(num_heads: int, value: float, dtype: type) -> np.ndarray:
    return np.full(num_heads, value, dtype)


def per_head(values: Tensor | None, num_heads: int, default: float, dtype: type) -> np.ndarray:
    """Return the values of a (Hq,) or (B, Hq) tensor as a flat array of `dtype`, a copy; for None
    `default` for each head, in an array that calls share and none may write to."""
    if values is None:
        return _constant(num_heads, default, dtype)
    # numpy() forbids its tensor to be resized ever after, and FSDP resizes parameters: a copy.
    return values.detach().to(float_type(values.dtype), copy=True).reshape(-1).numpy().astype(dtype)


def byte_strides(tensor: Tensor) -> tuple[int, int]:
    """Return (bytes from row to row, bytes from head to head) of a (..., S, H, D) tensor."""
    size = tensor.element_size()
    return tensor.stride(-3) * size, tensor.stride(-2) * size


def sizes_of(
    spec: AttentionSpec | PagedSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    k_code: int,
    window_right: int,
) -> Sizes:
    """Return the `Sizes` of a call of q, k, v and o, of which only shapes, strides and dtypes are
    read; callers add blocks, a bias and slopes."""
    (q_row, q_head), (k_row, k_head), (v_row, v_head), (o_row, o_head) = map(
        byte_strides, (q, k, v, o)
    )
    return Sizes(
        spec.num_kv_heads,
        spec.group_size,
        spec.head_dim,
        spec.v_head_dim,
        spec.window_left,
        window_right,
        DTYPE_CODES[q.dtype],
        k_code,
        k.element_size(),
        q_row,
        q_head,
        k_row,
        k_head,
        v_row,
        v_head,
        o_row,
        o_head,
        lse_head=q.shape[-3],
    )


def check_edges(name: str, edges: np.ndarray, num_rows: int) -> None:
    """Raise ValueError, with `name` in it, if the edges of packed sequences do not rise from 0 to
    at most num_rows; on a CPU reading them costs no sync."""
    if edges[0] != 0 or edges[-1] > num_rows or (edges[1:] < edges[:-1]).any():
        refuse_edges(name, edges, num_rows)


def check_longest(name: str, lengths: np.ndarray, most: int) -> None:
    """Raise ValueError if a sequence is longer than `most`, the call's own bound.

    The CPU could compute it, but a GPU sizes its grid by the bound and would leave the end out.

    Args:
        name: the name of the bound, such as "max_seqlen_q".
        lengths: the lengths of the sequences, in tokens.
        most: the value of the bound.
    """
    longest = lengths.max(initial=0)
    if longest > most:
        raise ValueError(f"{name} must be at least {longest}, the longest sequence, got {most}")


def refuse_edges(name: str, edges: np.ndarray, num_rows: int) -> NoReturn:
    """Raise ValueError with the rule that the edges of sequences break: they must rise from 0 to at
    most num_rows."""
    raise ValueError(f"{name} must rise from 0 to at most {num_rows}, got {edges}")


def bias_numbers(bias: Tensor | None, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Return the address, the dtype code and the four byte strides of `bias` broadcast to `shape`
    (B, Hq, Sq, Sk); without a bias all are 0, with the code of float32."""
    if bias is None:
        return 0, F32, 0, 0, 0, 0
    wide = bias.detach().expand(shape)
    size = bias.element_size()
    return wide.data_ptr(), DTYPE_CODES[bias.dtype], *(stride * size for stride in wide.stride())
