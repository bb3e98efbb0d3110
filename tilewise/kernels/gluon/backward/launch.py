"""Plan Hopper's backward pass: what is allocated, the launches, and what torch adds up itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention.bias import copied_bias
from tilewise.kernels.gluon.backward.logits import BwdScores
from tilewise.kernels.gluon.backward.plan import (
    has_separate_dq,
    splits_groups,
    sum_width_of,
    variant_of,
    why_not_bwd,
    with_copied_bias,
    with_ungrouped_heads,
)
from tilewise.kernels.gluon.backward.span import BwdVariant, Sequences
from tilewise.kernels.gluon.backward.steps import (
    Rows,
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

__all__ = [
    "Gradients",
    "Parts",
    "add_around",
    "add_bwd",
    "rows_before",
    "scores_of",
    "variant_of",
    "why_not_bwd",
]

_LOG2E = math.log2(math.e)


class Parts(NamedTuple):
    """The tensors that the kernels of a backward pass read and write, and the specs of the call;
    `add_around` makes it."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor  # of each query head where `spec` has ungrouped heads
    dv: Tensor
    bias: Tensor | None
    spec: AttentionSpec
    given: AttentionSpec  # the call's own
    sequences: Sequences
    extras: Extras


Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def add_bwd(
    maker: Maker,
    spec: AttentionSpec,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    tensors: AttentionTensors,
) -> Gradients:
    """Add to the plan the launches of the backward pass by Hopper's kernels; arguments and results
    are `add_around`'s."""
    return add_around(maker, spec, do, dlse, o, lse, tensors, _add_kernels)


def add_around(
    maker: Maker,
    spec: AttentionSpec,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    tensors: AttentionTensors,
    add_kernels: Callable[[Maker, Parts], Rows],
) -> Gradients:
    """Add to the plan the launches of a backward pass: those of `add_kernels`, which write dq, dk
    and dv, and those before and after them, for gaps, groups, a bias and sinks.

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
        return _nothing_seen(maker, q, k, v, dlse, bias, sinks, spec)
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
    if spec.is_varlen:
        zero_gaps(maker, dq, dk, dv, spec, sequences)
    parts = Parts(do, q, k, v, o, lse, dlse, dq, dk, dv, bias, spec, given, sequences, extras)
    rows = add_kernels(maker, parts)
    if group_size > 1:
        dk, dv = sum_groups(maker, dk, group_size), sum_groups(maker, dv, group_size)
    dbias = dsinks = None
    if bias is not None and spec.needs_dbias:
        # The portable kernel: a bias with a gradient is rare, and it reads q, k, v anew anyway.
        if given.is_varlen:  # whose rows lie at other places here
            row_terms = portable.launch_rows(maker, o, do, lse, dlse, given)
        else:
            planes = (given.batch, given.num_q_heads, -1)
            row_terms = tuple(
                x.view(planes)[..., : given.max_seqlen_q] for x in (rows.lse_log2, rows.delta)
            )
        beside = {"sequences": portable.sequences_of(tensors), "extras": extras}
        dbias = portable.launch_dbias(maker, do, q, k, v, *row_terms, bias, given, **beside)
    if sinks is not None:
        dsinks = sum_sinks(maker, sinks, rows)
    return dq, dk, dv, dbias, dsinks


def rows_before(maker: Maker, x: Parts, variant: BwdVariant, *, sum_width: int | None) -> Rows:
    """Add to the plan the launches before the main kernels, which compute delta and lse in base 2,
    and return these tensors.

    Args:
        x: the tensors of the pass.
        sum_width: the channels of a row of the float32 sums of dq, which are zeroed, too; None for
            no sums.
    """
    return launch_before(
        maker, x.q, x.o, x.do, x.lse, x.dlse, x.spec, x.sequences, variant, sum_width=sum_width
    )


def _add_kernels(maker: Maker, x: Parts) -> Rows:
    """Add to the plan the launches of Hopper's kernels, which write x.dq, x.dk and x.dv, and return
    the row terms that they read."""
    spec, extras = x.spec, x.extras
    is_separate = has_separate_dq(spec)
    variant = variant_of(spec)
    tiles_of_bias = None if is_separate else copied_bias(maker, spec, x.bias)
    if tiles_of_bias is not None:
        is_shared = spec.batch > 1 and extras.bias_batch == 0
        variant = with_copied_bias(variant, is_shared=is_shared)
    width = sum_width_of(variant)
    rows = rows_before(maker, x, variant, sum_width=None if is_separate else width)
    scores, places = scores_of(spec, extras)
    call = (rows, spec, x.sequences, scores, places, variant)
    if is_separate:
        launch_dkdv(maker, x.do, x.q, x.k, x.v, x.dk, x.dv, *call)
        by_rows = scores_of(spec, extras, by_rows=True)
        launch_dq(maker, x.do, x.q, x.k, x.v, x.dq, rows, x.given, x.sequences, *by_rows, variant)
    else:
        launch_main(maker, x.do, x.q, x.k, x.v, x.o, tiles_of_bias, x.dq, x.dk, x.dv, *call)
        launch_after(maker, rows, x.dq, spec, x.sequences, variant, int(variant.flat))
    return rows


def scores_of(
    spec: AttentionSpec, extras: Extras, *, by_rows: bool = False
) -> tuple[BwdScores, tuple[int, ...]]:
    """Return the `BwdScores` of a call, and the numbers of its `logits.Places`.

    Args:
        by_rows: True for the block mask's lists of tiles of queries instead of tiles of keys.
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


def _nothing_seen(
    maker: Maker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dlse: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
) -> Gradients:
    """Return the gradients of a call without queries or keys: zeros, but for the sinks' gradient.

    The sinks' gradient is the sum of dlse over the rows of each head, or zeros without dlse. The
    gradient of the sinks is None without sinks; the gradient of the bias is None if not needed.

    Args:
        maker: the maker of the plan, which allocates the gradients.
        q, k, v, bias, sinks: the inputs of the call, of which shapes and dtypes are used.
        dlse: the gradient of lse, or None.
        spec: the spec of the call.
    """

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
