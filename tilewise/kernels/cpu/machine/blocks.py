"""Blocks of a tile of attention, multiplied with as many partial sums as the registers hold.

What      BLOCK rows of c (M, N) = or += a (M, K) b (K, N), by the loops that `gemm.py` emits.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  BLOCK rows x two registers of columns, or one where no more columns are wanted.
Traffic   see `gemm.py`. What an array's type says is constant here: strides of one word become
          parts of addresses, and none of them needs a register.
Numerics  see `gemm.py`.

On a core of an EPYC with AVX2 (102 GFLOP/s are its peak; 2026-11-22, float32): 100 GFLOP/s at
K = 128, 95 with c added to at K = 66. 4 x 2 sums reached 55 to 85, whatever fed them: they are
only as many as the multiply-adds in flight, so each late one leaves its unit idle.
"""

from __future__ import annotations

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import block_of, lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.threads import inlined

# 8 x 2 partial sums + 2 of b + 1 of a fit 32 registers, 6 x 2 + 3 the 16 of AVX2.
BLOCK = 8 if simd.NUM_REGISTERS == 32 else 6
UNROLLED = 1 if simd.NUM_REGISTERS == 32 else 2  # K is a multiple of this number of words

HALF = 4  # rows of a block for tiles of few rows
_set_1, _set_2 = block_of(BLOCK, 1, "zero", UNROLLED), block_of(BLOCK, 2, "zero", UNROLLED)
_set_half_1 = block_of(HALF, 1, "zero", UNROLLED)
_set_half_2 = block_of(HALF, 2, "zero", UNROLLED)
_add_1, _add_2 = block_of(BLOCK, 1, "sums", UNROLLED), block_of(BLOCK, 2, "sums", UNROLLED)
_rescale_1 = block_of(BLOCK, 1, "scaled", UNROLLED)
_rescale_2 = block_of(BLOCK, 2, "scaled", UNROLLED)
_rescale_half_1 = block_of(HALF, 1, "scaled", UNROLLED)
_rescale_half_2 = block_of(HALF, 2, "scaled", UNROLLED)


@inlined
def set_rows(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, b_word, k_words):
    """Compute BLOCK rows of c = a b for a b that does not lie in panels.

    Args:
        c, ci, ldc, columns: the sums, which are overwritten, the index of the first, the elements
            from row to row, and the columns: one register of them is computed if it has room for
            all, else two.
        a, ai, a_row, a_word: the left operand, the index of its first word, the elements from row
            to row and from word to word along K.
        b, bi, b_word: the right operand, and the elements from word to word along K.
        k_words: the words along K.
    """
    if columns <= lanes_in(c):
        _set_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, c, 0)
    else:
        _set_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, c, 0)


@inlined
def set_first(c, ci, ldc, columns, rows, a, ai, a_row, a_word, b, bi, b_word, k_words):
    """Compute the first `rows` rows of a block of c = a b and some more: HALF rows, or BLOCK if
    `rows` is more than HALF; the other arguments are those of `set_rows`."""
    if rows > HALF:
        set_rows(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, b_word, k_words)
    elif columns <= lanes_in(c):
        _set_half_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, c, 0)
    else:
        _set_half_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, c, 0)


@inlined
def set_block(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, k_words):
    """Set BLOCK rows of c to a b for one panel of b.

    Args:
        c, ci, ldc: the sums, the index of the first one, and the elements from row to row; old sums
            are overwritten.
        columns: the number of columns that c has from ci on. One register of columns is computed if
            it has room for all of them, otherwise two registers.
        a, ai, a_row, a_word: the left operand, the index of its first word, and the elements from
            row to row and from word to word along K.
        b, bi: the panels of the right operand, and the index of the first word of this panel.
        k_words: the words along K, a multiple of UNROLLED.
    """
    b_word = panel_columns(c) * words_to_elements(b)
    set_rows(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, b_word, k_words)


@inlined
def add_rows(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, b_word, k_words):
    """Compute BLOCK rows of c += a b for a b that does not lie in panels; the arguments are those
    of `set_rows`."""
    if columns <= lanes_in(c):
        _add_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, c, 0)
    else:
        _add_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, c, 0)


@inlined
def add_block(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, k_words):
    """Compute BLOCK rows of c += a b for one panel of b; the arguments are those of `set_block`,
    except that old sums are added to."""
    b_word = panel_columns(c) * words_to_elements(b)
    add_rows(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, b_word, k_words)


@inlined
def rescale_first(
    c, ci, ldc, columns, rows, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si
):
    """Compute the first `rows` rows of a block of c = c * scale[si + row] + a b and some more: HALF
    rows, or BLOCK if `rows` is more than HALF; the other arguments are those of `set_rows`."""
    if columns <= lanes_in(c):
        if rows > HALF:
            _rescale_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
        else:
            _rescale_half_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
    elif rows > HALF:
        _rescale_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
    else:
        _rescale_half_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
