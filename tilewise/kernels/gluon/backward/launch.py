"""Plan Hopper's backward pass: what is allocated, the launches, and what torch adds up itself."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention.bias import copied_bias
from tilewise.kernels.gluon.backward.logits import BwdScores
from tilewise.kernels.gluon.backward.plan import (
    has_separate_dq,
    splits_groups,
    variant_of,
    why_not_bwd,
    with_copied_bias,
    with_ungrouped_heads,
)
from tilewise.kernels.gluon.backward.span import Sequences
from tilewise.kernels.gluon.backward.steps import (
    launch_after,
    launch_before,
    launch_dkdv,
    launch_dq,
    launch_main,
    sum_groups,
    sum_sinks,
    zero_gaps,
)
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.triton.attention import plan as portable
from tilewise.kernels.triton.attention.geometry import extras_of
from tilewise.kernels.triton.attention.tile import Extras

__all__ = ["add_bwd", "nothing_seen", "scores_of", "variant_of", "why_not_bwd"]

_LOG2E = math.log2(math.e)


def add_bwd(
    maker: Maker,
    spec: AttentionSpec,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    tensors: AttentionTensors,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Add the backward pass to a plan.

    Args:
        do: gradient of o, any strides.
        dlse: gradient of lse, None for zero.
        o, lse: results of the forward pass.

    Returns:
        dq, dk, dv like q, k, v; dbias like bias where spec.needs_dbias, else None; dsinks (Hq,)
        float32 or None.
    """
    q, k, v, bias, sinks = *tensors[:3], tensors.bias, tensors.sinks
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return nothing_seen(maker, q, k, v, dlse, bias, sinks, spec)
    q, k, v, do, o = (maker.addressable(x) for x in (q, k, v, do, o))
    sequences = Sequences(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqlens_k)
    mask = tensors.mask
    extras = extras_of(
        spec, bias=bias, alibi_slopes=tensors.alibi_slopes, mask=mask, philox=tensors.philox
    )
    given, group_size = spec, 1
    mask_heads = 1 if mask is None else mask.columns.shape[1]
    if splits_groups(spec, mask_heads, device.sm_count_of(maker.device)):
        spec, group_size = with_ungrouped_heads(spec), spec.group_size
    dq, dk, dv = (
        maker.empty((*x.shape[:-2], heads, x.shape[-1]), x.dtype)
        for x, heads in ((q, spec.num_q_heads), (k, spec.num_kv_heads), (v, spec.num_kv_heads))
    )
    variant = variant_of(spec)
    tiles_of_bias = None
    if not has_separate_dq(spec):
        tiles_of_bias = copied_bias(maker, spec, bias)
    if tiles_of_bias is not None:
        is_shared = spec.batch > 1 and extras.bias_batch == 0
        variant = with_copied_bias(variant, is_shared=is_shared)
    dbias = None
    if spec.is_varlen:
        zero_gaps(maker, dq, dk, dv, spec, sequences)
    rows = launch_before(
        maker,
        q,
        o,
        do,
        lse,
        dlse,
        spec,
        sequences,
        variant,
        has_sums=not has_separate_dq(spec),
    )
    scores, places = scores_of(spec, extras)
    if has_separate_dq(spec):
        launch_dkdv(maker, do, q, k, v, dk, dv, rows, spec, sequences, scores, places, variant)
        scores, places = scores_of(spec, extras, by_rows=True)
        launch_dq(maker, do, q, k, v, dq, rows, given, sequences, scores, places, variant)
    else:
        launch_main(
            maker,
            do,
            q,
            k,
            v,
            o,
            tiles_of_bias,
            dq,
            dk,
            dv,
            rows,
            spec,
            sequences,
            scores,
            places,
            variant,
        )
        launch_after(maker, rows, dq, spec, sequences, variant, int(variant.flat))
    if group_size > 1:
        dk, dv = sum_groups(maker, dk, group_size), sum_groups(maker, dv, group_size)
    if bias is not None and spec.needs_dbias:
        # The portable kernel: a bias with a gradient is rare, and it reads q, k, v anew anyway.
        row_terms = portable.launch_rows(maker, o, do, lse, dlse, given)
        beside = {"sequences": portable.sequences_of(tensors), "extras": extras}
        dbias = portable.launch_dbias(maker, do, q, k, v, *row_terms, bias, given, **beside)
    dsinks = None
    if sinks is not None:
        dsinks = sum_sinks(maker, sinks, rows)
    return dq, dk, dv, dbias, dsinks


def scores_of(
    spec: AttentionSpec, extras: Extras, *, by_rows: bool = False
) -> tuple[BwdScores, tuple[int, ...]]:
    """Return what the logits are made of, and the numbers of `logits.Places`.

    by_rows: with the mask's lists of tiles of queries, not of keys.
    """
    lists = extras.mask_columns, extras.mask_column_entries
    all_tiles, tiles = extras.mask_all_column_tiles, extras.mask_column_tiles
    if by_rows:
        lists = extras.mask_rows, extras.mask_row_entries
        all_tiles, tiles = extras.mask_all_row_tiles, extras.mask_row_tiles
    scale, cap = spec.softmax_scale, spec.softcap
    scores = BwdScores(
        scale,
        scale * _LOG2E,
        scale / cap if cap else 0.0,
        cap * _LOG2E,
        spec.dropout_scale,
        extras.alibi,
        extras.bias,
        extras.philox if spec.dropout_threshold else None,
        extras.mask_bits,
        *lists,
    )
    places = (
        extras.alibi_batch,
        extras.bias_batch,
        extras.bias_head,
        extras.bias_row,
        extras.bias_key,
        3 * (all_tiles or 0),
        tiles,
        spec.drop_limit,
    )
    return scores, tuple(place or 0 for place in places)


def nothing_seen(
    maker: Maker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dlse: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of a call without queries or keys: only sinks may have one."""

    def zeros(x: Tensor) -> Tensor:
        return maker.full(x.shape, 0.0, x.dtype)

    def sum_of_rows(dlse: Tensor) -> Tensor:
        return dlse.sum(dim=(1,) if spec.is_varlen else (0, 2))

    dsinks = None
    if sinks is not None:
        dsinks = (
            zeros(sinks)
            if dlse is None
            else maker.compute(
                sum_of_rows, dlse, like=torch.empty(sinks.shape, dtype=dlse.dtype, device="meta")
            )
        )
    dbias = zeros(bias) if bias is not None and spec.needs_dbias else None
    return zeros(q), zeros(k), zeros(v), dbias, dsinks
