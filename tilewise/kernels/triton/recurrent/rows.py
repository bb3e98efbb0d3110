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
    """Load rows of tokens at positions of a sequence, new ones or those of its open chunk."""
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
    """Load one number of each token at `position`, of the call or kept in slots.

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
    """Set rows of o from `first` to `end` to 0."""
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
    """Return the last sequence whose first chunk has at most this number."""
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
    """Return a bound of the numbers of chunks in a call."""
    return num_rows // tokens + num_sequences * (2 if has_slots else 1)
