"""Backward repair: tiles of dq, dk and dv that a NaN or infinity reached through 0 * NaN.

What: the rule of attention_bwd over the pairs that see one another, nothing else; see
      attention_repair_fwd for why.
Grid: one axis, groups of TILES tiles of dq x (batch x query heads), then of dk and dv x (batch x
      key heads).
One program: looks at the last row of each of its tiles. A hidden pair may also spoil a single row;
      then it has spoiled whole tiles of the other side (dk of dq, dq of dk and dv), so a channel of
      those is looked at too, and if it is wrong every row. Tiles that are wrong it computes again.
Traffic: one row of dq, dk and dv in so many; of a tile that is repaired, all operands once for each
      chunk of channels.
Numerics: as the backward pass; values that are not finite as in attention_repair_fwd.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton._dropout import draw_of_head, kept
from tilewise.kernels.triton._mask import kind_of_tile
from tilewise.kernels.triton._pairs import load_chunk, products, score_pairs
from tilewise.kernels.triton._tile import (
    Extras,
    Scores,
    bias_of_head,
    head_base,
    keys_of_rows,
    sequence,
    slope_of_head,
    span_of_tile,
)
from tilewise.kernels.triton.attention_repair_fwd import (
    Head,
    add_carefully,
    lse_of_rows,
    settled,
    tiles_not_finite,
)

_SAMPLES = tl.constexpr(256)  # of the other side, at once


@triton.jit
def _any_not_finite(base, step, head_step, heads, length, STEP: tl.constexpr):
    """Say whether the first channel of the last row of any tile of any of these heads is wrong."""
    found = 0
    tiles = tl.cdiv(length, STEP)
    for first in range(0, tiles * heads, _SAMPLES):
        index = first + tl.arange(0, _SAMPLES)
        row = tl.minimum(index % tiles * STEP + STEP - 1, length - 1)
        at = row.to(tl.int64) * step + (index // tiles).to(tl.int64) * head_step
        x = tl.load(base + at, mask=index < tiles * heads, other=0.0)
        wrong = (tl.abs(x.to(tl.float32)) < float("inf")) == 0
        found = tl.maximum(found, tl.max(wrong.to(tl.int32), 0))
    return found


@triton.jit
def _delta_of_rows(head, o, do, dlse, o_step, do_step, rows, CHUNK: tl.constexpr):  # fmt: skip
    """Return rowsum(do * o) - dlse."""
    delta = tl.zeros([rows.shape[0]], tl.float32)
    for first in range(0, head.v_width, CHUNK):
        x = load_chunk(o, o_step, rows, head.length_q, first, head.v_width, CHUNK).to(tl.float32)
        y = load_chunk(do, do_step, rows, head.length_q, first, head.v_width, CHUNK).to(tl.float32)
        delta += tl.sum(x * y, 1)
    if dlse is not None:
        delta -= tl.load(dlse + rows, mask=rows < head.length_q, other=0.0)
    return delta


@triton.jit
def _weights(
    head, o, do, dlse, o_step, do_step, scores, draw, extras, row, col, kind,
    variant: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return (p after dropout, ds, who sees whom) of a tile of pairs; 0 where nobody sees."""
    rows = row + tl.arange(0, ROWS)
    cols = col + tl.arange(0, KEYS)
    length_q, length_k = head.length_q, head.length_k
    key_begin, key_end = keys_of_rows(
        rows, length_q, length_k, head.window_left, head.window_right, variant
    )
    qk = products(
        head.q, head.k, head.q_step, head.k_step, rows, cols, length_q, length_k, head.width, CHUNK
    )
    s, capped, seen = score_pairs(
        qk, row, col, length_q, length_k, key_begin, key_end, kind, scores, extras, variant
    )
    p = tl.where(seen, tl.exp2(s - lse_of_rows(head, rows)[:, None]), 0.0)
    dp = products(
        do, head.v, do_step, head.v_step, rows, cols, length_q, length_k, head.v_width, CHUNK
    )
    p_kept = p
    if variant.dropout:
        keep = kept(draw, row, col, ROWS, KEYS, False)
        p_kept = tl.where(keep, p * draw.scale, 0.0)
        dp = tl.where(keep, dp * draw.scale, 0.0)
    delta = _delta_of_rows(head, o, do, dlse, o_step, do_step, rows, CHUNK)
    ds = p * (dp - delta[:, None])
    if variant.softcap:
        ds *= 1.0 - capped * capped
    return p_kept, tl.where(seen, ds, 0.0), seen


@triton.jit
def _repair_dq(
    dq, dq_step, head, o, do, dlse, o_step, do_step, extras, first_row, softmax_scale, softcap,
    num_q_heads,
    variant: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute dq of ROWS rows of a head again."""
    scores = Scores(
        softmax_scale, softcap, slope_of_head(extras, head.b, head.h, variant),
        bias_of_head(extras, head.b, head.h, variant), extras.bias_row, extras.bias_key,
    )  # fmt: skip
    draw = None
    if variant.dropout:
        draw = draw_of_head(extras, head.b * num_q_heads + head.h)
    rows = first_row + tl.arange(0, ROWS)
    length_q, length_k = head.length_q, head.length_k
    begin, _, _, end, _ = span_of_tile(
        first_row, ROWS, length_q, length_k, length_k - length_q, head.window_left,
        head.window_right, KEYS, variant.left, variant.right,
    )  # fmt: skip
    for channel in range(0, head.width, CHUNK):
        acc = tl.zeros([ROWS, CHUNK], tl.float32)
        above = tl.zeros([ROWS, CHUNK], tl.float32)
        below = tl.zeros([ROWS, CHUNK], tl.float32)
        for col in range(begin, end, KEYS):
            kind = kind_of_tile(extras, head.b, head.h, first_row, col, variant)
            if kind >= -1:
                _p, ds, seen = _weights(
                    head, o, do, dlse, o_step, do_step, scores, draw, extras, first_row, col, kind,
                    variant, ROWS, KEYS, CHUNK,
                )  # fmt: skip
                cols = col + tl.arange(0, KEYS)
                k = load_chunk(head.k, head.k_step, cols, length_k, channel, head.width, CHUNK)
                acc, above, below = add_carefully(acc, above, below, ds, seen, k)
        channels = channel + tl.arange(0, CHUNK)
        ptrs = dq + (rows.to(tl.int64) * dq_step)[:, None] + channels[None, :]
        inside = (rows < length_q)[:, None] & (channels < head.width)[None, :]
        tl.store(
            ptrs, settled(acc * softmax_scale, above, below).to(dq.dtype.element_ty), mask=inside
        )


@triton.jit
def _repair_keys(
    dk, dv, dk_step, dv_step, head, q_head, o_head, do_head, lse_head, o, do, dlse, o_step, do_step,
    extras, first_col, softmax_scale, softcap, group_size, num_q_heads,
    variant: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of KEYS keys again; head: the first one of their group."""
    chunks_dk = tl.cdiv(head.width, CHUNK)
    cols = first_col + tl.arange(0, KEYS)
    length_q, length_k = head.length_q, head.length_k
    begin, _, _, end, _ = span_of_tile(
        first_col, KEYS, length_k, length_q, length_q - length_k, head.window_right,
        head.window_left, ROWS, variant.right, variant.left,
    )  # fmt: skip
    for chunk in range(0, chunks_dk + tl.cdiv(head.v_width, CHUNK)):
        # One loop for both, since each copy of its body is seconds of the compiler's time.
        of_dk = chunk < chunks_dk
        channel = tl.where(of_dk, chunk, chunk - chunks_dk) * CHUNK
        width = tl.where(of_dk, head.width, head.v_width)
        acc = tl.zeros([KEYS, CHUNK], tl.float32)
        above = tl.zeros([KEYS, CHUNK], tl.float32)
        below = tl.zeros([KEYS, CHUNK], tl.float32)
        for g in range(0, group_size):
            h = head.h + g
            at = (h - head.h).to(tl.int64)
            own_do, own_dlse = do + at * do_head, dlse
            if dlse is not None:
                own_dlse = dlse + at * lse_head
            own = Head(
                head.q + at * q_head, head.k, head.v, head.lse + at * lse_head, head.q_step,
                head.k_step, head.v_step, head.width, head.v_width, head.b, h, length_q, length_k,
                head.window_left, head.window_right,
            )  # fmt: skip
            scores = Scores(
                softmax_scale, softcap, slope_of_head(extras, head.b, h, variant),
                bias_of_head(extras, head.b, h, variant), extras.bias_row, extras.bias_key,
            )  # fmt: skip
            draw = None
            if variant.dropout:
                draw = draw_of_head(extras, head.b * num_q_heads + h)
            x, x_step = own_do, do_step
            if of_dk:
                x, x_step = own.q, own.q_step
            for row in range(begin, end, ROWS):
                kind = kind_of_tile(extras, head.b, h, row, first_col, variant)
                if kind >= -1:
                    p, ds, seen = _weights(
                        own, o + at * o_head, own_do, own_dlse, o_step, do_step, scores, draw,
                        extras, row, first_col, kind, variant, ROWS, KEYS, CHUNK,
                    )  # fmt: skip
                    rows = row + tl.arange(0, ROWS)
                    rows_of_x = load_chunk(x, x_step, rows, length_q, channel, width, CHUNK)
                    acc, above, below = add_carefully(
                        acc, above, below, tl.trans(tl.where(of_dk, ds, p)), tl.trans(seen),
                        rows_of_x,
                    )  # fmt: skip
        dx, dx_step = dv, dv_step
        if of_dk:
            dx, dx_step = dk, dk_step
            acc *= softmax_scale
        channels = channel + tl.arange(0, CHUNK)
        ptrs = dx + (cols.to(tl.int64) * dx_step)[:, None] + channels[None, :]
        inside = (cols < length_k)[:, None] & (channels < width)[None, :]
        tl.store(ptrs, settled(acc, above, below).to(dx.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=[
        "width", "v_width",
        "parts_q", "parts_k", "programs_q", "num_q_heads", "group_size", "seqlen_q", "seqlen_k",
        "window_left", "window_right", "drop_threshold", "q_batch", "q_row", "q_head", "k_batch",
        "k_row", "k_head", "v_batch", "v_row", "v_head", "o_batch", "o_row", "o_head", "do_batch",
        "do_row", "do_head", "dq_batch", "dq_row", "dq_head", "dk_batch", "dk_row", "dk_head",
        "dv_batch", "dv_row", "dv_head", "lse_batch", "lse_head", "alibi_batch", "bias_batch",
        "bias_head", "bias_row", "bias_key", "mask_batch", "mask_head",
    ]
)  # fmt: skip
def attention_repair_bwd_kernel(
    q, k, v, o, do, dq, dk, dv, lse, dlse, given, width, v_width, parts_q, parts_k, programs_q,
    num_q_heads, group_size, seqlen_q, seqlen_k, window_left, window_right,
    softmax_scale, softcap, drop_threshold, keep_scale,
    alibi_batch, bias_batch, bias_head, bias_row, bias_key, mask_batch, mask_head,
    lse_batch, lse_head,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    do_batch, do_row, do_head, dq_batch, dq_row, dq_head, dk_batch, dk_row, dk_head,
    dv_batch, dv_row, dv_head,
    UNIT: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, variant: tl.constexpr,
    STEP_Q: tl.constexpr, STEP_K: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Repair TILES tiles of dq, or of dk and dv; see the module's docstring."""
    pid = tl.program_id(0)
    of_queries = pid < programs_q
    if of_queries:
        plane, part = pid // parts_q, pid % parts_q
        b, h = plane // num_q_heads, plane % num_q_heads
        h_k = h // group_size
    else:
        num_kv_heads = num_q_heads // group_size
        plane, part = (pid - programs_q) // parts_k, (pid - programs_q) % parts_k
        b, h_k = plane // num_kv_heads, plane % num_kv_heads
        h = h_k * group_size
    first_q, length_q = sequence(b, given.cu_q, None, seqlen_q)
    first_k, length_k = sequence(b, given.cu_k, given.seqlens_k, seqlen_k)
    first_tile = part * TILES
    if (length_q == 0) | (length_k == 0):
        return
    dq_base = head_base(dq, b, first_q, h, (dq_batch, dq_row, dq_head), UNIT)
    dk_base = head_base(dk, b, first_k, h_k, (dk_batch, dk_row, dk_head), UNIT)
    dv_base = head_base(dv, b, first_k, h_k, (dv_batch, dv_row, dv_head), UNIT)
    if of_queries:
        if first_tile * STEP_Q >= length_q:
            return
        spoiled = _any_not_finite(dk_base, dk_row * UNIT, dk_head * UNIT, 1, length_k, STEP_K)
        from_row = tl.where(spoiled > 0, 0, STEP_Q - 1)
        wrong = tiles_not_finite(
            dq_base,
            dq_row * UNIT,
            first_tile,
            length_q,
            from_row,
            width * UNIT,
            D_PAD,
            STEP_Q,
            TILES,
        )
    else:
        if first_tile * STEP_K >= length_k:
            return
        spoiled = _any_not_finite(
            dq_base, dq_row * UNIT, dq_head * UNIT, group_size, length_q, STEP_Q
        )
        from_row = tl.where(spoiled > 0, 0, STEP_K - 1)
        wrong = tiles_not_finite(
            dk_base,
            dk_row * UNIT,
            first_tile,
            length_k,
            from_row,
            width * UNIT,
            D_PAD,
            STEP_K,
            TILES,
        )
        wrong |= tiles_not_finite(
            dv_base,
            dv_row * UNIT,
            first_tile,
            length_k,
            from_row,
            v_width * UNIT,
            DV_PAD,
            STEP_K,
            TILES,
        )
    if tl.max(wrong, 0) > 0:
        extras = Extras(
            given.alibi, alibi_batch, given.bias, bias_batch, bias_head, bias_row, bias_key,
            given.mask_bits, None, given.mask_rows, given.mask_row_entries, None, None,
            mask_head, mask_batch, None, None, given.philox, drop_threshold, keep_scale,
        )  # fmt: skip
        head = Head(
            head_base(q, b, first_q, h, (q_batch, q_row, q_head), UNIT),
            head_base(k, b, first_k, h_k, (k_batch, k_row, k_head), UNIT),
            head_base(v, b, first_k, h_k, (v_batch, v_row, v_head), UNIT),
            head_base(lse, b, first_q, h, (lse_batch, 1, lse_head), 1),
            q_row * UNIT, k_row * UNIT, v_row * UNIT, width * UNIT, v_width * UNIT, b, h, length_q,
            length_k, window_left, window_right,
        )  # fmt: skip
        o_base = head_base(o, b, first_q, h, (o_batch, o_row, o_head), UNIT)
        do_base = head_base(do, b, first_q, h, (do_batch, do_row, do_head), UNIT)
        dlse_base = dlse
        if dlse is not None:
            dlse_base = head_base(dlse, b, first_q, h, (lse_batch, 1, lse_head), 1)
        for tile in range(0, TILES):
            if tl.max(tl.where(tl.arange(0, TILES) == tile, wrong, 0), 0) > 0:
                if of_queries:
                    for row in range(0, STEP_Q, ROWS):
                        _repair_dq(
                            dq_base, dq_row * UNIT, head, o_base, do_base, dlse_base, o_row * UNIT,
                            do_row * UNIT,
                            extras, (first_tile + tile) * STEP_Q + row, softmax_scale, softcap,
                            num_q_heads, variant, ROWS, KEYS, CHUNK,
                        )  # fmt: skip
                else:
                    for col in range(0, STEP_K, KEYS):
                        _repair_keys(
                            dk_base, dv_base, dk_row * UNIT, dv_row * UNIT, head, q_head * UNIT,
                            o_head * UNIT, do_head * UNIT, lse_head, o_base, do_base, dlse_base,
                            o_row * UNIT, do_row * UNIT, extras,
                            (first_tile + tile) * STEP_K + col, softmax_scale, softcap,
                            group_size, num_q_heads, variant, ROWS, KEYS, CHUNK,
                        )  # fmt: skip
