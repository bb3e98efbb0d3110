"""Rows of tokens by their positions in a sequence, and the numbers of chunks in a packed call."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    new_ptr,
    kept_ptr,
    position,
    start,
    total,
    stride_new,
    stride_kept,
    column,
    WIDTH: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return rows of tokens (TOKENS, columns) at positions of a sequence.

    Positions from `start` on are new tokens, at new_ptr; earlier ones, with HAS_KEPT, are tokens of
    the open chunk that a slot keeps, at kept_ptr; from `total` on rows are 0. column: the numbers
    of the columns, 0 from WIDTH on.
    """
    inside = column[None, :] < WIDTH
    is_new = (position >= start) & (position < total)
    at = new_ptr + ((position - start).to(tl.int64) * stride_new)[:, None] + column[None, :]
    rows = tl.load(at, mask=is_new[:, None] & inside, other=0.0)
    if HAS_KEPT:
        is_kept = (position < start)[:, None]
        at = kept_ptr + ((position % TOKENS) * stride_kept)[:, None] + column[None, :]
        kept = tl.load(at, mask=is_kept & inside, other=0.0)
        rows = tl.where(is_kept, kept.to(rows.dtype), rows)
    return rows


@triton.jit
def load_numbers(
    new_ptr,
    kept_ptr,
    position,
    start,
    total,
    stride,
    HAS_KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return one number of each token at `position`, of a new token or of one kept in a slot.

    Kept ones are read with HAS_KEPT only; positions of neither kind get 0.

    Args:
        new_ptr, kept_ptr: the addresses of the numbers of new tokens and of kept ones.
        start, total: the position of the first new token, and the end.
    """
    is_new = (position >= start) & (position < total)
    new = tl.load(new_ptr + (position - start).to(tl.int64) * stride, mask=is_new, other=0.0)
    if HAS_KEPT:
        is_kept = position < start
        kept = tl.load(kept_ptr + (position % TOKENS) * stride, mask=is_kept, other=0.0)
        new = tl.where(is_kept, kept, new)
    return new


@triton.jit
def zero_rows(
    o_ptr,
    first,
    end,
    head,
    column,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write 0 to some columns of one head in rows first ... end - 1 of o.

    o is contiguous, (rows, NUM_HEADS, VALUE_DIM); column: the numbers of the columns.
    """
    for begins in range(first, end, TOKENS):
        row = begins + tl.arange(0, TOKENS)[:, None]
        at = o_ptr + (row.to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + column[None, :]
        zeros = tl.zeros((TOKENS, column.shape[0]), o_ptr.dtype.element_ty)
        tl.store(at, zeros, mask=(row < end) & (column[None, :] < VALUE_DIM))


@triton.jit
def number_of(first, sequence, HAS_SLOTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the number of a sequence's first chunk among those of a call.

    Numbers are not dense: a sequence that begins at row `first` has room for a chunk more than its
    tokens fill, and for another where it may begin inside of a chunk.
    """
    return first // TOKENS + sequence * (2 if HAS_SLOTS else 1)


@triton.jit
def sequence_of(edges_ptr, num_sequences, number, HAS_SLOTS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the sequence to which the chunk with this number belongs, if any sequence has it.

    It is the last sequence whose first chunk's number, from `number_of`, is at most `number`.
    """
    low, high = 0, num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(edges_ptr + middle)
        if number_of(first, middle, HAS_SLOTS, TOKENS) <= number:
            low = middle
        else:
            high = middle - 1
    return low


def most_chunks(num_rows: int, num_sequences: int, has_slots: bool, tokens: int) -> int:
    """Return a number above that of every chunk in a call, see `number_of`: how many to launch.

    Args:
        num_rows: the tokens of the call.
        has_slots: True if sequences may begin inside of a chunk.
        tokens: the tokens of a chunk.
    """
    return num_rows // tokens + num_sequences * (2 if has_slots else 1)
