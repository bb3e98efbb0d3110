"""Launch Hopper's backward pass: choose the kernels, allocate, fill the grids.

The contract is that of `kernels.triton.attention`: `why_not_bwd` refuses with a reason,
`launch_bwd` runs a call.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon._bwd_scores import BwdScores
from tilewise.kernels.gluon._bwd_walk import BwdVariant, Sequences
from tilewise.kernels.gluon._descriptors import descriptor, row_descriptor, why_no_descriptor
from tilewise.kernels.gluon._launch import launch
from tilewise.kernels.gluon.attention_bwd import attention_bwd_kernel
from tilewise.kernels.gluon.attention_bwd_dkdv import attention_bwd_dkdv_kernel
from tilewise.kernels.gluon.attention_bwd_dq import attention_bwd_dq_kernel
from tilewise.kernels.gluon.attention_bwd_rows import (
    attention_bwd_after_kernel,
    attention_bwd_before_kernel,
)
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.triton import attention as portable
from tilewise.kernels.triton._geometry import dense, device_of, extras_of
from tilewise.kernels.triton._tile import Extras

__all__ = ["launch_bwd", "why_not_bwd"]

_LOG2E = math.log2(math.e)
_UNIT = 8  # elements; TMA wants strides in multiples of 16 bytes
_KEYS = 128  # of a tile
_WIDE_KEYS = 64  # where dq has a kernel of its own
_ROWS = 128  # of a tile of dq where it has a kernel of its own
_SLOTS = 3  # of its ring of k and v
_L2_BYTES = 16 << 20  # what CTAs that run together share; of 50 MB, of which half is near
_PADDING = 128  # rows of packed sequences start on multiples of it in buffers
_ELEMENTS = 4096  # of a tile of the kernels before and after
_ROWS_WARPS = 4  # of their programs
_SPARE_SMS = 32  # which other kernels may hold while a head's CTAs wait for one another
_FEW_WAVES = 6  # of CTAs: no more, and balance matters more than L2
_BYTES_PER_ELEMENT = 8  # of q, do and the sum of dq


class _Rows(NamedTuple):
    """Row terms, float32 (planes, rows): a plane a head, padded as in `_bwd_walk`."""

    lse_log2: Tensor
    delta: Tensor
    dq_sum: Tensor | None  # (planes, rows, d)
    turns: Tensor | None  # int32 (planes, rows / tile_m): CTAs that have added to a tile of dq


def why_not_bwd(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run the backward pass of `spec`, or return None."""
    if not device.has_triton():
        return "triton is not installed"
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if width % _UNIT or not 8 <= width <= 256:
            return f"{name} must be a multiple of 8 up to 256, got {width}"
    if _is_apart(spec) and (spec.has_bias or spec.mask_tile or spec.dropout_p):
        return (
            "heads wider than 128, and reproducible sums without a diagonal, have no bias, "
            "block mask or dropout"
        )
    if spec.mask_tile not in (None, (128, 128)):
        return f"tiles of a block mask must be (128, 128), got {spec.mask_tile}"
    return None


def launch_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    philox: Tensor | None = None,
    mask: MaskTensors | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the backward pass.

    Args:
        do: gradient of o, any strides.
        dlse: gradient of lse, None for zero.
        o, lse: of the forward pass.

    Returns:
        dq, dk, dv like q, k, v; dbias like bias where spec.needs_dbias, else None; dsinks (Hq,)
        float32 or None.
    """
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return _nothing_seen(q, k, v, dlse, bias, sinks, spec)
    if mask is not None and mask.columns.shape[1] > 1 and spec.group_size > 1:
        # Heads of a group that see different tiles cannot share the walk of a tile of keys.
        alone = replace(spec, num_kv_heads=spec.num_q_heads)
        k_alone, v_alone = (x.repeat_interleave(spec.group_size, dim=-2) for x in (k, v))
        dq, dk, dv, dbias, dsinks = launch_bwd(
            do, dlse, q, k_alone, v_alone, o, lse, alone, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k, bias=bias, alibi_slopes=alibi_slopes,
            sinks=sinks, philox=philox, mask=mask,
        )  # fmt: skip
        dk, dv = (_sum_of_group(x, spec) for x in (dk, dv))
        return dq, dk, dv, dbias, dsinks
    q, k, v, do, o = (_readable(x) for x in (q, k, v, do, o))
    sequences = Sequences(dense(cu_seqlens_q), dense(cu_seqlens_k), dense(seqlens_k))
    extras = extras_of(spec, bias=bias, alibi_slopes=alibi_slopes, mask=mask, philox=philox)
    allocate = torch.zeros if spec.is_varlen else torch.empty
    dq, dk, dv = (allocate(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    variant = variant_of(spec, _together(q, spec))
    dbias = None
    with device_of(q):
        rows = launch_before(o, do, lse, dlse, spec, sequences, variant)
        scores, places = scores_of(spec, extras)
        if _is_apart(spec):
            launch_dkdv(do, q, k, v, dk, dv, rows, spec, sequences, scores, places, variant)
            launch_dq(do, q, k, v, dq, rows, spec, sequences, scores, places, variant)
        else:
            launch_main(do, q, k, v, dk, dv, rows, spec, sequences, scores, places, variant)
            launch_after(rows, dq, spec, sequences, variant)
        if bias is not None and spec.needs_dbias:
            # The portable kernel: a bias with a gradient is rare, and it reads q, k, v anew anyway.
            row_terms = portable.launch_rows(o, do, lse, dlse, spec)
            given = {"sequences": portable.Sequences(*sequences), "extras": extras}
            dbias = portable.launch_dbias(do, q, k, v, *row_terms, bias, spec, **given)
    dsinks = None if sinks is None else _sink_gradient(sinks, rows)
    return dq, dk, dv, dbias, dsinks


def order_of(spec: AttentionSpec, together: int) -> tuple[str, bool]:
    """Return the order of the sums of dq, and whether the last tiles of keys start first.

    Reproducible sums with a diagonal come from the last tile of keys to the first. Where all tiles
    of a head run at the same time they are launched in the other order, for balance; else the last
    ones first, so that everybody waits for CTAs that were launched before.
    """
    if _is_apart(spec) or (spec.mask_tile and spec.is_varlen):
        return "any", False  # lists of a mask may visit tiles past the end of a sequence
    has_diagonal = 0 <= spec.window_right < spec.max_seqlen_q - 1
    if not spec.deterministic:
        # Not zeroing beats not waiting by 2 to 4 % here, elsewhere it loses 1 to 8 % (H200, bf16,
        # 16,384 tokens, hidden 2,048, N 1,024 to 16,384; 2026-11-20).
        is_narrow = max(spec.head_dim, spec.v_head_dim) <= 64
        return "first" if is_narrow and not has_diagonal else "any", False
    fits = not spec.is_varlen and triton.cdiv(spec.max_seqlen_k, _KEYS) + _SPARE_SMS <= together
    return "all", has_diagonal and not fits


def variant_of(spec: AttentionSpec, together: int = 132) -> BwdVariant:
    """Return the code that `spec` needs; a window that hides nothing is compiled away."""
    d = max(64, triton.next_power_of_2(max(spec.head_dim, spec.v_head_dim)))
    lengths_vary = spec.is_varlen or spec.has_seqlens_k
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    apart = _is_apart(spec)
    keys = _WIDE_KEYS if apart else _KEYS
    order, last_first = order_of(spec, together)
    softcap = "fast" if spec.dtype == torch.bfloat16 else "exact"
    hides = left or right or lengths_vary
    ring = order != "any" and not (hides or spec.mask_tile)
    return BwdVariant(
        # Measured on an H200 (bf16, 16,384 tokens, hidden 2,048; 2026-11-20).
        tile_m=128 if d == 64 and not apart else 64,
        tile_n=keys,
        d=d,
        width=spec.head_dim,
        v_width=spec.v_head_dim,
        stages=2,
        two_loops=d == 128 and not apart and not ring and not (left and order == "all"),
        left=left,
        right=right,
        tail=lengths_vary or (spec.max_seqlen_k % keys > 0 and (hides or not spec.mask_tile)),
        packed=spec.is_varlen,
        ragged=spec.has_seqlens_k,
        positive=spec.softmax_scale > 0,
        softcap=softcap if spec.softcap > 0 else "none",
        alibi=spec.has_alibi,
        bias=spec.has_bias,
        dropout=spec.dropout_threshold > 0,
        mask=spec.mask_tile is not None,
        ruled=spec.mask_tile is not None and hides,
        order=order,
        ring=ring,
        last_first=last_first,
    )


def scores_of(spec: AttentionSpec, extras: Extras) -> tuple[BwdScores, tuple[int, ...]]:
    """Return what the logits are made of, and the numbers of `_bwd_scores.Places`."""
    scale, cap = spec.softmax_scale, spec.softcap
    scores = BwdScores(
        scale, scale * _LOG2E, scale / cap if cap else 0.0, cap * _LOG2E, spec.dropout_scale,
        extras.alibi, extras.bias, extras.philox if spec.dropout_threshold else None,
        extras.mask_bits, extras.mask_columns, extras.mask_column_entries,
    )  # fmt: skip
    limit = (spec.dropout_threshold << 16) - 1
    places = (
        extras.alibi_batch, extras.bias_batch, extras.bias_head, extras.bias_row, extras.bias_key,
        3 * (extras.mask_all_column_tiles or 0), extras.mask_column_tiles,
        limit - (1 << 32) if limit >= 1 << 31 else limit,
    )  # fmt: skip
    return scores, tuple(place or 0 for place in places)


def launch_before(
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    spec: AttentionSpec,
    sequences: Sequences,
    variant: BwdVariant,
) -> _Rows:
    """Return the row terms and the sum of dq, which is zero where adding starts at once."""
    planes, count = _planes(o, spec)
    lse_log2, delta = torch.empty((2, planes, count), dtype=torch.float32, device=o.device)
    if spec.is_varlen and spec.has_sinks:  # torch sums them, gaps between sequences too
        lse_log2.fill_(math.inf)
        delta.zero_()
    dq_sum = turns = None
    if not _is_apart(spec):
        dq_sum = torch.empty((planes, count, variant.d), dtype=torch.float32, device=o.device)
    if variant.order != "any":
        shape = (planes, count // variant.tile_m)
        turns = torch.empty(shape, dtype=torch.int32, device=o.device)
    lse, dlse = lse.contiguous(), dense(dlse)
    d = triton.next_power_of_2(spec.v_head_dim)
    tile = min(_ELEMENTS // d, _PADDING)
    lse_batch, lse_head = (0, lse.stride(0)) if spec.is_varlen else lse.stride()[:2]
    launch(
        attention_bwd_before_kernel,
        triton.cdiv(_padded(spec.max_seqlen_q), tile) * spec.batch * spec.num_q_heads,
        o, do, lse, dlse, lse_log2, delta, dq_sum if turns is None else None, turns,
        sequences.cu_q, spec.batch, spec.num_q_heads, spec.max_seqlen_q, count,
        *_strides(o, spec), *_strides(do, spec), lse_batch, lse_head,
        WIDTH=spec.v_head_dim, D=d, D_SUM=variant.d, UNIT=_UNIT, TILE_M=variant.tile_m,
        TILE=tile, num_warps=_ROWS_WARPS,
    )  # fmt: skip
    return _Rows(lse_log2, delta, dq_sum, turns)


def launch_after(
    rows: _Rows, dq: Tensor, spec: AttentionSpec, sequences: Sequences, variant: BwdVariant
) -> None:
    """Round the sum of dq."""
    assert rows.dq_sum is not None
    tile = _ELEMENTS // variant.d
    launch(
        attention_bwd_after_kernel,
        triton.cdiv(spec.max_seqlen_q, tile) * spec.batch * spec.num_q_heads,
        rows.dq_sum, rows.turns, dq, sequences.cu_q, spec.batch, spec.num_q_heads,
        spec.max_seqlen_q, rows.dq_sum.shape[1], *_strides(dq, spec), spec.softmax_scale,
        WIDTH=spec.head_dim, D=variant.d, UNIT=_UNIT, TILE_M=variant.tile_m, TILE=tile,
        num_warps=_ROWS_WARPS,
    )  # fmt: skip


def launch_main(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: _Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    scores: BwdScores,
    places: tuple[int, ...],
    variant: BwdVariant,
) -> None:
    """Fill dk and dv, and add to the sum of dq."""
    assert rows.dq_sum is not None
    m, d = variant.tile_m, variant.d
    num_tiles = triton.cdiv(spec.max_seqlen_k, _KEYS)
    heads = spec.batch * spec.num_kv_heads
    launch(
        attention_bwd_kernel,
        num_tiles * heads,
        descriptor(q, m, d), descriptor(k, _KEYS, d), descriptor(v, _KEYS, d), descriptor(do, m, d),
        descriptor(rows.dq_sum.transpose(0, 1), m, d),
        descriptor(dk, _KEYS // 2, d), descriptor(dv, _KEYS // 2, d),
        row_descriptor(rows.lse_log2, m), row_descriptor(rows.delta, m), dk, dv, rows.turns,
        sequences,
        spec.batch, spec.num_kv_heads, spec.group_size, spec.max_seqlen_q, spec.max_seqlen_k,
        spec.window_left, spec.window_right, num_tiles,
        _heads_per_section(q, spec, num_tiles, d), _together(q, spec),
        rows.dq_sum.shape[1],
        scores, *places, variant=variant,
    )  # fmt: skip


def _nothing_seen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dlse: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of a call without queries or keys: only sinks may have one."""
    dsinks = None
    if sinks is not None:
        axes = (1,) if spec.is_varlen else (0, 2)
        dsinks = torch.zeros_like(sinks) if dlse is None else dlse.sum(dim=axes)
    dbias = torch.zeros_like(bias) if bias is not None and spec.needs_dbias else None
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dbias, dsinks


def _sum_of_group(x: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the gradient of key heads, given that of each query head's own copy."""
    parts = x.unflatten(-2, (spec.num_kv_heads, spec.group_size))
    return parts.sum(dim=-2, dtype=torch.float32).to(x.dtype)


def launch_dkdv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: _Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    scores: BwdScores,
    places: tuple[int, ...],
    variant: BwdVariant,
) -> None:
    """Fill dk and dv."""
    m, n, d = variant.tile_m, variant.tile_n, variant.d
    num_tiles = triton.cdiv(spec.max_seqlen_k, n)
    heads = spec.batch * spec.num_kv_heads
    section = _heads_per_section(q, spec, num_tiles, d)
    launch(
        attention_bwd_dkdv_kernel,
        num_tiles * heads,
        descriptor(q, m, d), descriptor(k, n, d), descriptor(v, n, d), descriptor(do, m, d),
        descriptor(dk, n, d), descriptor(dv, n, d),
        row_descriptor(rows.lse_log2, m), row_descriptor(rows.delta, m), dk, dv, sequences,
        spec.batch, spec.num_kv_heads, spec.group_size, spec.max_seqlen_q, spec.max_seqlen_k,
        spec.window_left, spec.window_right, num_tiles, section, rows.delta.shape[1],
        scores, places[0], variant=variant,
    )  # fmt: skip


def launch_dq(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    rows: _Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    scores: BwdScores,
    places: tuple[int, ...],
    variant: BwdVariant,
) -> None:
    """Fill dq."""
    n, d, half = variant.tile_n, variant.d, _ROWS // 2
    num_tiles = triton.cdiv(spec.max_seqlen_q, _ROWS)
    heads = spec.batch * spec.num_q_heads
    section = 1
    if spec.is_varlen:
        section = min(heads, 4 * spec.batch)
    elif variant.right:
        section = min(heads, max(2, _L2_BYTES // (spec.max_seqlen_k * d * 4)))
    launch(
        attention_bwd_dq_kernel,
        num_tiles * heads,
        descriptor(q, half, d), descriptor(k, n, d), descriptor(v, n, d), descriptor(do, half, d),
        descriptor(dq, half, d), dq, rows.lse_log2, rows.delta, sequences,
        spec.batch, spec.num_kv_heads, spec.group_size, spec.max_seqlen_q, spec.max_seqlen_k,
        spec.window_left, spec.window_right, num_tiles, section, rows.delta.shape[1],
        scores, places[0], variant=variant._replace(stages=_SLOTS),
    )  # fmt: skip


def _is_apart(spec: AttentionSpec) -> bool:
    """Say whether dq has a kernel of its own.

    It has where sums of a CTA leave no room for dq beside dk and dv, and where no order of the sums
    of dq is reproducible and keeps CTAs from waiting for one another.
    """
    if max(spec.head_dim, spec.v_head_dim) > 128:
        return True
    has_diagonal = 0 <= spec.window_right < spec.max_seqlen_q - 1
    has_left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    is_uneven = has_left or spec.is_varlen or spec.has_seqlens_k
    return spec.deterministic and (spec.mask_tile is not None or (is_uneven and not has_diagonal))


def _readable(x: Tensor) -> Tensor:
    """Return x, or a copy where TMA cannot read x."""
    return x if x.stride(-1) == 1 and why_no_descriptor(x) is None else x.contiguous().clone()


def _heads_per_section(q: Tensor, spec: AttentionSpec, num_tiles: int, d: int) -> int:
    """Return the key heads whose tiles are launched together, those with most work first.

    More of them leave fewer long tiles to the end, but q, do and sums of dq should stay in L2.
    """
    heads = spec.batch * spec.num_kv_heads
    rows = q.shape[0] if spec.is_varlen else spec.max_seqlen_q
    in_l2 = max(1, _L2_BYTES // (spec.group_size * rows * d * _BYTES_PER_ELEMENT))
    if spec.is_varlen:
        return min(heads, in_l2 * spec.batch)
    if spec.window_right < 0 or (spec.deterministic and not _is_apart(spec)):
        return 1
    few = heads * num_tiles < _FEW_WAVES * device.sm_count_of(q.device)
    return heads if few else min(heads, in_l2)


def _together(x: Tensor, spec: AttentionSpec) -> int:
    """Return how many CTAs run at the same time; other kernels may hold some of the device."""
    count = device.sm_count_of(x.device)
    return count if spec.deterministic else count // 2


def _padded(count: int) -> int:
    return triton.cdiv(count, _PADDING) * _PADDING


def _planes(o: Tensor, spec: AttentionSpec) -> tuple[int, int]:
    """Return how many planes of row terms there are, and their rows."""
    if spec.is_varlen:
        return spec.num_q_heads, _padded(o.shape[0] + spec.batch * _PADDING)
    return spec.batch * spec.num_q_heads, _padded(spec.max_seqlen_q)


def _strides(x: Tensor, spec: AttentionSpec) -> tuple[int, int, int]:
    """Return the (batch, row, head) strides of (B, S, H, D) or (T, H, D), in units."""
    batch, row, head = (0, *x.stride()[:2]) if spec.is_varlen else x.stride()[:3]
    return batch // _UNIT, row // _UNIT, head // _UNIT


def _sink_gradient(sinks: Tensor, rows: _Rows) -> Tensor:
    """Return dsinks (Hq,): a sink is one more probability of each row, with a value of zero."""
    planes = rows.delta.shape[0]
    of_planes = sinks.float().repeat(planes // len(sinks)).unsqueeze(-1)
    p_sink = torch.exp2(of_planes * _LOG2E - rows.lse_log2)
    return -(p_sink * rows.delta).sum(dim=1).view(-1, len(sinks)).sum(dim=0)
