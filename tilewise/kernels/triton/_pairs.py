"""A tile of (query, key) pairs looked at on its own: its logits, and who sees whom.

What: products of rows, logits and visibility, for kernels that visit few pairs and may visit any.
Grid: none, inlined into the kernels of a bias' gradient and of the repair.
One call: one tile of pairs. Products run over the channels in chunks, so that one shape of tile
      serves every head dim.
Traffic: the rows of both sides, once a call.
Numerics: products in the input type with float32 sums; logits in base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton._mask import visible_bits
from tilewise.kernels.triton._tile import load_bias, logits_log2, visible


@triton.jit
def load_chunk(base, row_step, rows, length, first, width, CHUNK: tl.constexpr):
    """Load CHUNK channels from `first` of rows; zero past `length` and `width`."""
    channels = first + tl.arange(0, CHUNK)
    ptrs = base + (rows.to(tl.int64) * row_step)[:, None] + channels[None, :]
    inside = (rows < length)[:, None] & (channels < width)[None, :]
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def products(
    a_base, b_base, a_step, b_step, rows_a, rows_b, length_a, length_b, width,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the products of two tiles of rows, summed over their channels; steps in elements."""
    product = tl.zeros([rows_a.shape[0], rows_b.shape[0]], tl.float32)
    for first in range(0, width, CHUNK):
        a = load_chunk(a_base, a_step, rows_a, length_a, first, width, CHUNK)
        b = load_chunk(b_base, b_step, rows_b, length_b, first, width, CHUNK)
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
    return product


@triton.jit
def score_pairs(
    qk, row, col, length_q, length_k, key_begin, key_end, kind, scores, extras,
    variant: tl.constexpr,
):  # fmt: skip
    """Return (logits in base 2, tanh of the capped ones, who sees whom) of products.

    row, col: the first ones; key_begin, key_end: of each row, see `_tile.keys_of_rows`; kind: of
    the mask tile, see `_mask.kind_of_tile`.
    """
    rows = row + tl.arange(0, qk.shape[0])
    cols = col + tl.arange(0, qk.shape[1])
    distance = (rows + (length_k - length_q))[:, None] - cols[None, :]
    bias = None
    if variant.bias:
        last = tl.minimum(rows, length_q - 1)
        bias = load_bias(scores, last, cols, cols < length_k, variant, False, True)
    s, capped = logits_log2(qk, distance, bias, scores, variant)
    seen = visible(cols[None, :], key_begin[:, None], key_end[:, None], variant)
    seen = seen & (rows < length_q)[:, None]
    if variant.mask_q > 0:
        allowed = visible_bits(
            extras.mask_bits, tl.maximum(kind, 0), row % variant.mask_q, col % variant.mask_k,
            variant, qk.shape[0], qk.shape[1], False,
        )  # fmt: skip
        seen = seen & (allowed | (kind < 0))
    return s, capped, seen
