"""The steps of a backward pass on Hopper, one launch each: row terms, kernels, dq's last step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels import device
from tilewise.kernels.gluon.backward.dkdv import attention_bwd_dkdv_kernel
from tilewise.kernels.gluon.backward.dq import attention_bwd_dq_kernel
from tilewise.kernels.gluon.backward.kernel import attention_bwd_kernel
from tilewise.kernels.gluon.backward.logits import BwdScores
from tilewise.kernels.gluon.backward.plan import (
    KEYS,
    L2_BYTES,
    ROW_TILE,
    UNIT,
    PrePostPlan,
    Turns,
    cdiv,
    heads_per_section,
    power_of_2,
    prepost_of,
    ring_size,
    turns_of,
)
from tilewise.kernels.gluon.backward.prepost import PrePost, rows_of_part
from tilewise.kernels.gluon.backward.rows import (
    attention_bwd_after_kernel,
    attention_bwd_before_kernel,
    attention_bwd_gaps_kernel,
    attention_bwd_group_kernel,
    attention_bwd_sinks_kernel,
)
from tilewise.kernels.gluon.backward.span import BwdVariant, Sequences
from tilewise.kernels.gluon.forward.variant import in_pairs
from tilewise.kernels.host.descriptors import descriptor, row_descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec

_ELEMENTS = 4096  # of a tile of the kernels before and after
_RUN = 1024  # rows of lse of a program
_SINK_ROWS, _SINK_WARPS = 4096, 8  # of a step of the sum of dsinks of a head, which is one program
_GAP_PROGRAMS = 64  # gaps are rare, and short
_ROWS_WARPS = 4  # of their programs
_ROWS = 128  # of a tile of dq where it has a kernel of its own
_SLOTS = 3  # of its ring of k and v


class Rows(NamedTuple):
    """Row terms, float32 (planes, rows): a plane a head, padded as in `span`."""

    lse_log2: Tensor
    delta: Tensor
    dq_sum: Tensor | None  # (planes, rows, d), or as many channels as a head has
    semaphores: Tensor | None  # int32 (planes, rows / tile_m): CTAs that have added to a tile of dq
    counts: Tensor | None  # int32, see prepost.PrePost
    dlse: Tensor | None  # float32, contiguous
    plan: PrePostPlan
    section: int  # heads whose CTAs are launched together
    turns: Turns


def launch_before(
    maker: Maker,
    q: Tensor,
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    spec: AttentionSpec,
    sequences: Sequences,
    variant: BwdVariant,
    *,
    sum_width: int | None,
) -> Rows:
    """Allocate the tensors that the kernels of a backward pass share; compute the first row terms.

    The launch computes lse in base 2 of all heads, and delta of the first `plan.ahead` key heads of
    the batch; the main kernel computes delta of the others.

    Args:
        sum_width: the channels of a row of the float32 sums of dq, which are allocated together
            with the counts by which their heads are known to be complete; None for no sums.
    """
    planes, count = _planes(o, spec)
    lse_log2, delta = (maker.empty((planes, count), torch.float32) for _ in range(2))
    if spec.is_varlen and (spec.has_sinks or spec.mask_tile):
        # Gaps between sequences: torch sums them for sinks, and lists of a mask may visit them.
        maker.compute(_clear_lse, lse_log2, like=lse_log2)
        maker.compute(torch.Tensor.zero_, delta, like=delta)
    heads = spec.batch * spec.num_kv_heads
    num_tiles = cdiv(spec.max_seqlen_k, variant.tile_n)
    num_sms = device.sm_count_of(maker.device)
    rows = q.shape[0] if spec.is_varlen else spec.max_seqlen_q
    section = heads_per_section(rows, spec, num_tiles, _channels(variant), num_sms)
    dq_sum = semaphores = counts = None
    plan = PrePostPlan(heads, heads, 0, 0)
    turns = turns_of(spec, variant, section, num_sms)
    if sum_width is not None:
        dq_sum = maker.empty((planes, count, sum_width), torch.float32)
        counts = maker.empty((2 * spec.batch * spec.num_q_heads,), torch.int32)
        if variant.prepost != "none":
            plan = prepost_of(spec, section, num_tiles, num_sms, turns)
    if variant.ordered:
        semaphores = maker.empty((planes, count // variant.tile_m), torch.int32)
    lse, dlse = maker.dense(lse), maker.dense(dlse)
    d = power_of_2(spec.v_head_dim)
    tile = min(_ELEMENTS // d, ROW_TILE)
    heads_before = plan.ahead * spec.group_size
    tile_programs = cdiv(_padded(spec.max_seqlen_q), tile) * heads_before
    runs = cdiv(_padded(spec.max_seqlen_q), _RUN) * spec.batch * spec.num_q_heads
    lse_batch, lse_head = (0, lse.stride(0)) if spec.is_varlen else lse.stride()[:2]
    maker.launch(
        attention_bwd_before_kernel,
        tile_programs + runs,
        o,
        do,
        lse,
        dlse,
        lse_log2,
        delta,
        dq_sum if semaphores is None else None,
        semaphores,
        counts,
        sequences.cu_q,
        heads_before,
        tile_programs,
        spec.batch,
        spec.num_q_heads,
        spec.group_size,
        spec.max_seqlen_q,
        rows,
        count,
        *strides_of(o, is_packed=spec.is_varlen),
        *strides_of(do, is_packed=spec.is_varlen),
        lse_batch,
        lse_head,
        WIDTH=spec.v_head_dim,
        D=d,
        SUM_WIDTH=sum_width or 0,
        D_SUM=variant.d,
        UNIT=UNIT,
        TILE_M=variant.tile_m,
        TILE=tile,
        RUN=_RUN,
        num_warps=_ROWS_WARPS,
    )
    return Rows(lse_log2, delta, dq_sum, semaphores, counts, dlse, plan, section, turns)


def _clear_lse(lse_log2: Tensor) -> Tensor:
    return lse_log2.fill_(math.inf)


def launch_after(
    maker: Maker,
    rows: Rows,
    dq: Tensor,
    spec: AttentionSpec,
    sequences: Sequences,
    variant: BwdVariant,
    flat: int,
) -> None:
    """Add to the plan the launch that rounds the float32 sums of dq of the last heads to dq.

    Args:
        rows: the row terms and the sums.
        flat: the constant for the layout of the sums, as the kernel takes it.
    """
    assert rows.dq_sum is not None
    tile = _ELEMENTS // variant.d
    heads_after = rows.plan.behind * spec.group_size
    maker.launch(
        attention_bwd_after_kernel,
        cdiv(spec.max_seqlen_q, tile) * heads_after,
        rows.dq_sum,
        rows.semaphores,
        dq,
        sequences.cu_q,
        spec.batch * spec.num_q_heads - heads_after,
        heads_after,
        spec.batch,
        spec.num_q_heads,
        spec.group_size,
        spec.max_seqlen_q,
        dq.shape[0],
        rows.dq_sum.shape[1],
        *strides_of(dq, is_packed=spec.is_varlen),
        spec.softmax_scale,
        WIDTH=spec.head_dim,
        SUM_WIDTH=rows.dq_sum.shape[2],
        D=variant.d,
        UNIT=UNIT,
        TILE_M=variant.tile_m,
        TILE=tile,
        FLAT=flat,
        num_warps=_ROWS_WARPS,
    )


def zero_gaps(
    maker: Maker, dq: Tensor, dk: Tensor, dv: Tensor, spec: AttentionSpec, sequences: Sequences
) -> None:
    """Add to the plan the launch that zeroes gradients before the first sequence and after the
    last.

    Their number is known on the device only.
    """
    widths = (x.shape[-2] * x.shape[-1] for x in (dq, dk, dv))
    maker.launch(
        attention_bwd_gaps_kernel,
        _GAP_PROGRAMS,
        dq,
        dk,
        dv,
        sequences.cu_q,
        sequences.cu_k,
        spec.batch,
        dq.shape[0],
        dk.shape[0],
        *widths,
        TILE=_ELEMENTS,
        num_warps=_ROWS_WARPS,
    )


def sum_groups(maker: Maker, x: Tensor, group_size: int) -> Tensor:
    """Add to the plan the launch that adds up gradients (..., Hq, D) of the query heads of each
    group, and return the sums, those of key heads (..., Hk, D)."""
    heads, width = x.shape[-2] // group_size, x.shape[-1]
    total = maker.empty((*x.shape[:-2], heads, width), x.dtype)
    count, d = total.numel() // width, power_of_2(width)
    tile = _ELEMENTS // d
    maker.launch(
        attention_bwd_group_kernel,
        cdiv(count, tile),
        x,
        total,
        count,
        group_size,
        WIDTH=width,
        D=d,
        TILE=tile,
        num_warps=_ROWS_WARPS,
    )
    return total


def sum_sinks(maker: Maker, sinks: Tensor, rows: Rows) -> Tensor:
    """Add to the plan the launch that computes the gradients of the sinks from the row terms, and
    return them, float32 (Hq,)."""
    dsinks = maker.empty(tuple(sinks.shape), torch.float32)
    heads, (planes, rows_per_plane) = len(sinks), rows.delta.shape
    maker.launch(
        attention_bwd_sinks_kernel,
        heads,
        sinks,
        rows.lse_log2,
        rows.delta,
        dsinks,
        heads,
        planes // heads * rows_per_plane,
        rows_per_plane,
        TILE=_SINK_ROWS,
        num_warps=_SINK_WARPS,
    )
    return dsinks


def launch_main(
    maker: Maker,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    bias: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    scores: BwdScores,
    places: tuple[int, ...],
    variant: BwdVariant,
) -> None:
    """Add to the plan the launch of the kernel that writes dk and dv, adds to the sums of dq, and
    rounds the sums of most heads to dq.

    bias: a bias that comes by copies (variant.bias_copied), as (batch, queries, heads, keys), else
    None.
    """
    assert rows.dq_sum is not None
    m, d = variant.tile_m, variant.d
    part, sums = rows_of_part(d), rows.dq_sum.transpose(0, 1)
    dq_desc, part_desc = descriptor(sums, m, d), descriptor(sums, part, d)
    if variant.flat:
        planes, count, _ = rows.dq_sum.shape
        flat = rows.dq_sum.view(planes, count * d // 32, 32).transpose(0, 1)
        dq_desc, part_desc = descriptor(flat, 128, 32), descriptor(flat, 32, 32)
    num_tiles = cdiv(spec.max_seqlen_k, KEYS)
    heads = spec.batch * spec.num_kv_heads
    each, turning = rows.turns.each, rows.turns.heads
    maker.launch(
        attention_bwd_kernel,
        num_tiles // each * turning + num_tiles * (heads - turning),
        descriptor(q, m, d),
        descriptor(k, KEYS, d),
        descriptor(v, KEYS, d),
        descriptor(do, m, d),
        dq_desc,
        descriptor(dk, KEYS // 2, d),
        descriptor(dv, KEYS // 2, d),
        row_descriptor(rows.lse_log2, m),
        row_descriptor(rows.delta, m),
        None if bias is None else descriptor(bias, m, KEYS),
        descriptor(o, part, d),
        descriptor(do, part, d),
        part_desc,
        dk,
        dv,
        rows.semaphores,
        sequences,
        PrePost(dq, rows.dq_sum, rows.dlse, rows.delta, rows.counts),
        spec.batch,
        spec.num_kv_heads,
        spec.group_size,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        *_packed_rows(spec, q, k),
        spec.window_left,
        spec.window_right,
        num_tiles,
        rows.section,
        ring_size(spec, device.sm_count_of(maker.device)),
        rows.dq_sum.shape[1],
        q.shape[0] if spec.is_varlen else spec.max_seqlen_q,
        spec.num_kv_heads // k.shape[-2],
        *rows.plan,
        each,
        turning,
        scores,
        *places,
        variant=variant,
    )


def launch_dkdv(
    maker: Maker,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    scores: BwdScores,
    places: tuple[int, ...],
    variant: BwdVariant,
) -> None:
    """Add to the plan the launch of the kernel that writes dk and dv, where dq has a kernel of its
    own."""
    m, n, d = variant.tile_m, variant.tile_n, variant.d
    num_tiles = cdiv(spec.max_seqlen_k, n)
    heads = spec.batch * spec.num_kv_heads
    maker.launch(
        attention_bwd_dkdv_kernel,
        num_tiles * heads,
        descriptor(q, m, d),
        descriptor(k, n, d),
        descriptor(v, n, variant.dv),
        descriptor(do, m, variant.dv),
        descriptor(dk, n, d),
        descriptor(dv, n, variant.dv),
        row_descriptor(rows.lse_log2, m),
        row_descriptor(rows.delta, m),
        _rest(q, m, variant),
        _rest(k, n, variant),
        _rest(dk, n, variant),
        dk,
        dv,
        sequences,
        spec.batch,
        spec.num_kv_heads,
        spec.group_size,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        *_packed_rows(spec, q, k),
        spec.window_left,
        spec.window_right,
        num_tiles,
        rows.section,
        rows.delta.shape[1],
        spec.num_kv_heads // k.shape[-2],
        scores,
        *places,
        variant=variant,
    )


def launch_dq(
    maker: Maker,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    rows: Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    scores: BwdScores,
    places: tuple[int, ...],
    variant: BwdVariant,
) -> None:
    """Add to the plan the launch of the kernel that writes dq, where dq has a kernel of its own."""
    n, d, half = variant.tile_n, variant.d, _ROWS // 2
    strides, pairs = in_pairs(*places[1:5])
    places = (places[0], *strides, *places[5:])
    variant = variant._replace(
        stages=_SLOTS, bias_rows=strides[2] != 0, bias_pairs=variant.bias and pairs
    )
    num_tiles = cdiv(spec.max_seqlen_q, _ROWS)
    heads = spec.batch * spec.num_q_heads
    section = 1
    if spec.is_varlen:
        section = min(heads, 4 * spec.batch)
    elif variant.right:
        section = min(heads, max(2, L2_BYTES // (spec.max_seqlen_k * _channels(variant) * 4)))
    maker.launch(
        attention_bwd_dq_kernel,
        num_tiles * heads,
        descriptor(q, half, d),
        descriptor(k, n, d),
        descriptor(v, n, variant.dv),
        descriptor(do, half, variant.dv),
        descriptor(dq, half, d),
        _rest(q, half, variant),
        _rest(k, n, variant),
        _rest(dq, half, variant),
        dq,
        rows.lse_log2,
        rows.delta,
        sequences,
        spec.batch,
        spec.num_kv_heads,
        spec.group_size,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        *_packed_rows(spec, q, k),
        spec.window_left,
        spec.window_right,
        num_tiles,
        section,
        rows.delta.shape[1],
        scores,
        *places,
        variant=variant,
    )


def _channels(variant: BwdVariant) -> int:
    """Return the channels of a tile, the mean of q's and v's, padding included."""
    return (variant.d + variant.d_high + variant.dv) // 2


def _rest(x: Tensor, rows: int, variant: BwdVariant) -> TensorDescriptor | None:
    """Return the descriptor of tiles of x's channels past variant.d, or None if there are none."""
    return descriptor(x, rows, variant.d_high) if variant.d_high > 0 else None


def _padded(count: int) -> int:
    return cdiv(count, ROW_TILE) * ROW_TILE


def _planes(o: Tensor, spec: AttentionSpec) -> tuple[int, int]:
    """Return the number of planes of row terms (one for each query head, packed or of each
    sequence) and the number of rows of a plane, padding included."""
    if spec.is_varlen:
        return spec.num_q_heads, _padded(o.shape[0] + spec.batch * ROW_TILE)
    return spec.batch * spec.num_q_heads, _padded(spec.max_seqlen_q)


def strides_of(x: Tensor, *, is_packed: bool) -> tuple[int, int, int]:
    """Return the (batch, row, head) strides of (B, S, H, D) or (T, H, D), in units of 16 bytes."""
    steps = [
        step // UNIT if size > 1 else 0
        for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    batch, row, head = (0, *steps) if is_packed else steps
    return batch, row, head


def _packed_rows(spec: AttentionSpec, q: Tensor, k: Tensor) -> tuple[int, int]:
    """Return the numbers of rows of packed q and of packed k, (0, 0) for dense ones.

    A kernel cuts off sequences there, whatever cu_seqlens says.
    """
    return (q.shape[0], k.shape[0]) if spec.is_varlen else (0, 0)
