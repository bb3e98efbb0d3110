"""Forward repair: o of tiles that a NaN or infinity reached through 0 * NaN.

What: o = sum_j p_ij v_j over the keys that query i sees, p from lse, which no hidden key reaches.
      The kernels of attention multiply whole tiles, so a value that is not finite and that some row
      of a tile sees turns a channel of all its rows into NaN. Only such tiles are computed anew.
Grid: one axis, groups of TILES tiles of STEP queries x (batch x query heads).
One program: looks at the last row of each of its tiles; where one is not finite, it computes the
      tile again, one chunk of channels after the other.
Traffic: one row of o in STEP; of a tile that is repaired, k once a chunk of channels, and v.
Numerics: as the forward pass. Values that are not finite stand as 0 in the product; rows that see
      one get +inf, -inf or, of both or of NaN, NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton._dropout import draw_of_head, kept
from tilewise.kernels.triton._mask import kind_of_tile
from tilewise.kernels.triton._pairs import load_chunk, products, score_pairs
from tilewise.kernels.triton._tile import (
    LOG2E,
    Extras,
    Scores,
    bias_of_head,
    head_base,
    keys_of_rows,
    sequence,
    slope_of_head,
    span_of_tile,
)

# p is at most 1; float16 would lose what is below 2**-24 of it.
_SHIFT = tl.constexpr(15.0)
_UNSHIFT = tl.constexpr(2.0**-15)


class Given(NamedTuple):
    """The tensors of a call beside q, k, v and results; None where it has none."""

    cu_q: object = None
    cu_k: object = None
    seqlens_k: object = None
    alibi: object = None
    bias: object = None
    philox: object = None
    mask_bits: object = None
    mask_rows: object = None
    mask_row_entries: object = None


class Head(NamedTuple):
    """One query head of one sequence; made inside a kernel."""

    q: object  # where its first rows lie
    k: object
    v: object
    lse: object
    q_step: object  # of rows, in elements
    k_step: object
    v_step: object
    width: object  # channels: numbers at run time, so that no loop over them is unrolled
    v_width: object
    b: object
    h: object
    length_q: object
    length_k: object
    window_left: object
    window_right: object


@triton.jit
def lse_of_rows(head, rows):
    """Return lse in base 2, +inf for rows that see nothing or do not exist: their p is then 0."""
    lse = tl.load(head.lse + rows, mask=rows < head.length_q, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)


@triton.jit
def tiles_not_finite(
    base, step, first_tile, length, from_row, width, WIDTH_PAD: tl.constexpr,
    STEP: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return which tiles of STEP rows hold NaN or infinity in a row from `from_row`, int32."""
    starts = (first_tile + tl.arange(0, TILES)) * STEP
    channels = tl.arange(0, WIDTH_PAD)
    inside = (starts < length)[:, None] & (channels < width)[None, :]
    found = tl.zeros([TILES], tl.int32)
    for row in range(from_row, STEP):
        rows = tl.minimum(starts + row, length - 1).to(tl.int64)
        x = tl.load(base + (rows * step)[:, None] + channels[None, :], mask=inside, other=0.0)
        wrong = (tl.abs(x.to(tl.float32)) < float("inf")) == 0
        found = tl.maximum(found, tl.max(wrong.to(tl.int32), 1))
    return found


@triton.jit
def add_carefully(acc, above, below, weights, seen, x):
    """Add weights x to acc; count +inf in above, -inf in below, and NaN in both, where seen.

    weights, seen (rows, n); x (n, channels). Weights are 0 where not seen.
    """
    wide = x.to(tl.float32)
    finite = tl.abs(wide) < float("inf")
    ones = seen.to(x.dtype)
    acc = tl.dot(
        weights.to(x.dtype), tl.where(finite, x, 0.0).to(x.dtype), acc, input_precision="ieee"
    )
    up = tl.where(finite | (wide == float("-inf")), 0.0, 1.0).to(x.dtype)
    down = tl.where(finite | (wide == float("inf")), 0.0, 1.0).to(x.dtype)
    above = tl.dot(ones, up, above, input_precision="ieee")
    below = tl.dot(ones, down, below, input_precision="ieee")
    return acc, above, below


@triton.jit
def settled(acc, above, below):
    """Return acc with the infinities and NaN that `add_carefully` counted."""
    acc += tl.where(above > 0.0, float("inf"), 0.0)
    return acc - tl.where(below > 0.0, float("inf"), 0.0)


@triton.jit
def _repair_tile(
    o, o_step, head, scores, draw, extras, first_row,
    variant: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute o of ROWS rows of a head again."""
    rows = first_row + tl.arange(0, ROWS)
    lse_log2 = lse_of_rows(head, rows)
    length_q, length_k = head.length_q, head.length_k
    key_begin, key_end = keys_of_rows(
        rows, length_q, length_k, head.window_left, head.window_right, variant
    )
    begin, _, _, end, _ = span_of_tile(
        first_row, ROWS, length_q, length_k, length_k - length_q, head.window_left,
        head.window_right, KEYS, variant.left, variant.right,
    )  # fmt: skip
    for channel in range(0, head.v_width, CHUNK):
        acc = tl.zeros([ROWS, CHUNK], tl.float32)
        above = tl.zeros([ROWS, CHUNK], tl.float32)
        below = tl.zeros([ROWS, CHUNK], tl.float32)
        for col in range(begin, end, KEYS):
            kind = kind_of_tile(extras, head.b, head.h, first_row, col, variant)
            if kind >= -1:
                cols = col + tl.arange(0, KEYS)
                qk = products(
                    head.q, head.k, head.q_step, head.k_step, rows, cols, length_q, length_k,
                    head.width, CHUNK,
                )  # fmt: skip
                s, _capped, seen = score_pairs(
                    qk, first_row, col, length_q, length_k, key_begin, key_end, kind, scores,
                    extras, variant,
                )  # fmt: skip
                p = tl.where(seen, tl.exp2(s - lse_log2[:, None] + _SHIFT), 0.0)
                if variant.dropout:
                    p = tl.where(kept(draw, first_row, col, ROWS, KEYS, False), p, 0.0)
                v = load_chunk(head.v, head.v_step, cols, length_k, channel, head.v_width, CHUNK)
                acc, above, below = add_carefully(acc, above, below, p, seen, v)
        acc *= _UNSHIFT
        if variant.dropout:
            acc *= draw.scale
        channels = channel + tl.arange(0, CHUNK)
        ptrs = o + (rows.to(tl.int64) * o_step)[:, None] + channels[None, :]
        inside = (rows < length_q)[:, None] & (channels < head.v_width)[None, :]
        tl.store(ptrs, settled(acc, above, below).to(o.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "width", "v_width",
        "parts", "num_q_heads", "group_size", "seqlen_q", "seqlen_k", "window_left",
        "window_right", "drop_threshold", "q_batch", "q_row", "q_head", "k_batch", "k_row",
        "k_head", "v_batch", "v_row", "v_head", "o_batch", "o_row", "o_head", "lse_batch",
        "lse_head", "alibi_batch", "bias_batch", "bias_head", "bias_row", "bias_key", "mask_batch",
        "mask_head",
    ]
)  # fmt: skip
def attention_repair_fwd_kernel(
    q, k, v, o, lse, given, width, v_width, parts, num_q_heads, group_size, seqlen_q, seqlen_k,
    window_left, window_right, softmax_scale, softcap, drop_threshold, keep_scale,
    alibi_batch, bias_batch, bias_head, bias_row, bias_key, mask_batch, mask_head,
    lse_batch, lse_head,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    UNIT: tl.constexpr, DV_PAD: tl.constexpr, variant: tl.constexpr, STEP: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Repair TILES tiles of o; see the module's docstring."""
    head_index, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    b, h = head_index // num_q_heads, head_index % num_q_heads
    first_q, length_q = sequence(b, given.cu_q, None, seqlen_q)
    first_tile = part * TILES
    if first_tile * STEP >= length_q:
        return
    o_base = head_base(o, b, first_q, h, (o_batch, o_row, o_head), UNIT)
    wrong = tiles_not_finite(
        o_base, o_row * UNIT, first_tile, length_q, STEP - 1, v_width * UNIT, DV_PAD, STEP, TILES
    )
    if tl.max(wrong, 0) > 0:
        extras = Extras(
            given.alibi, alibi_batch, given.bias, bias_batch, bias_head, bias_row, bias_key,
            given.mask_bits, None, given.mask_rows, given.mask_row_entries, None, None,
            mask_head, mask_batch, None, None, given.philox, drop_threshold, keep_scale,
        )  # fmt: skip
        first_k, length_k = sequence(b, given.cu_k, given.seqlens_k, seqlen_k)
        h_k = h // group_size
        head = Head(
            head_base(q, b, first_q, h, (q_batch, q_row, q_head), UNIT),
            head_base(k, b, first_k, h_k, (k_batch, k_row, k_head), UNIT),
            head_base(v, b, first_k, h_k, (v_batch, v_row, v_head), UNIT),
            head_base(lse, b, first_q, h, (lse_batch, 1, lse_head), 1),
            q_row * UNIT, k_row * UNIT, v_row * UNIT, width * UNIT, v_width * UNIT, b, h, length_q,
            length_k, window_left, window_right,
        )  # fmt: skip
        scores = Scores(
            softmax_scale, softcap, slope_of_head(extras, b, h, variant),
            bias_of_head(extras, b, h, variant), extras.bias_row, extras.bias_key,
        )  # fmt: skip
        draw = None
        if variant.dropout:
            draw = draw_of_head(extras, head_index)
        for tile in range(0, TILES):
            if tl.max(tl.where(tl.arange(0, TILES) == tile, wrong, 0), 0) > 0:
                for row in range(0, STEP, ROWS):
                    _repair_tile(
                        o_base, o_row * UNIT, head, scores, draw, extras,
                        (first_tile + tile) * STEP + row, variant, ROWS, KEYS, CHUNK,
                    )  # fmt: skip
