"""Paged attention of many rows a sequence: prompt chunks, draft trees, groups with a shared prefix.

what     o = softmax(scale * q k^T) v of packed rows over the cached keys of their own sequence,
         causal among the new tokens, by a tree mask, or without a mask; keys found through a block
         table
grid     (items * Hk,): tiles of TILE_M rows of one sequence, last tile first because it sees the
         most keys, heads fastest; where such tiles are few, (split of keys, tile) pairs of them,
         and a merge (`rows_merge`); of sequences that decode, one item each
program  finds its item, loops over the keys that every row sees without a mask, and over those at
         an edge with one. An item that is a sequence is not looked for, which reads all lengths:
         4,096 sequences with 64 keys of their own took 1,990 us, 417 without (H200, 2026-11-23)
traffic  q and o once; K and V of a sequence once per tile of rows, mostly from L2; with splits
         4 * (Dv + 1) bytes a row and split, written and read; without, a pass of groups reads o
numerics as in `keys`; partial o float32 and normalised
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.plan import Maker
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import padded_value_dim
from tilewise.kernels.tiles.paged_rows import RowsPlan
from tilewise.kernels.triton.attention.tile import LN2, LOG2E
from tilewise.kernels.triton.paged.decode import reach_of
from tilewise.kernels.triton.paged.items import find_item, find_tile
from tilewise.kernels.triton.paged.keys import (
    LOWEST,
    Form,
    add_sink,
    attend_keys,
    cached_keys,
    clear_padding_rows,
    load_rest,
    normalise,
    rotated_back,
    rotated_like_keys,
    run_of,
)
from tilewise.kernels.triton.paged.quantise import FLOAT, Scales
from tilewise.kernels.triton.paged.rows_merge import launch_merge
from tilewise.kernels.triton.visible import key_at, keys_of_row_tile

TILE_B = 128  # sequences scanned at once


class Memory(NamedTuple):
    """The tensors that the rows kernel reads and writes.

    A field that a launch does not use holds any tensor, which is not touched through that field.
    """

    q: object
    k: object
    v: object
    o: object
    lse: object
    part_o: object
    part_lse: object
    plan: object
    block_table: object
    seqlens_k: object
    cu_seqlens_q: object
    slopes: object
    sinks: object
    rows: object
    skipped: object
    tree: object
    k_scale: object
    v_scale: object


class Way(NamedTuple):
    """Constexpr: the rows of a call, the keys they see, and the destination of the results."""

    causal: bool
    tree: bool  # True for a mask instead of the causal rule
    rows: bool  # True if cu_seqlens_q counts entries of a list of rows of q
    skipped: bool  # True if the first keys of each sequence are left out
    splits: bool  # True if keys are split over programs
    lone: bool  # True if an item is a sequence
    adds: bool  # True if o and lse contain the result of other keys
    invariant: bool


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_entries",
        "num_tokens",
        "max_keys",
        "num_blocks",
        "min_run",
        "num_items",
        "num_parts",
        "num_merged",
        "target_items",
        "split_tiles",
        "tree_width",
        "stride_lh",
        "stride_table",
    ]
)
def _rows_kernel(
    at,
    stride_ksb,
    stride_ksp,
    stride_ksh,
    stride_vsb,
    stride_vsp,
    stride_vsh,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kp,
    stride_kh,
    stride_vb,
    stride_vp,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_lh,
    stride_table,
    stride_tree,
    tree_width,
    num_seqs,
    num_entries,
    num_tokens,
    max_keys,
    num_blocks,
    min_run,
    num_items,
    num_parts,
    num_merged,
    target_items,
    split_tiles,
    scale_log2,
    softcap_log2,
    form: tl.constexpr,
    way: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    TILE_DV: tl.constexpr = form.dv_pad
    head = tl.program_id(0) % form.kv_heads
    item = tl.program_id(0) // form.kv_heads
    if not way.adds:
        used = tl.minimum(tl.maximum(tl.load(at.cu_seqlens_q + num_seqs), 0), num_tokens)
        clear_padding_rows(
            at.o,
            at.lse,
            stride_ot,
            stride_oh,
            stride_lh,
            used + item,
            num_items,
            num_tokens,
            head,
            form.group,
            form.tile_g,
            form.dv,
            form.dv_pad,
        )
    split = 0
    num_splits = 1
    part = 0
    if way.splits:
        seq, own, num_splits, part, merged, all_merged = find_item(
            at.seqlens_k,
            at.cu_seqlens_q,
            at.skipped,
            item,
            num_seqs,
            num_entries,
            max_keys,
            min_run,
            target_items,
            split_tiles,
            form.group,
            form.window_left,
            way.skipped,
            TILE_M,
            TILE_N,
            TILE_B,
            way.adds,
        )
        if tl.program_id(0) == 0:
            tl.store(at.plan, tl.minimum(all_merged, num_merged))
    elif way.lone:
        seq, tile = num_items - 1 - item, 0
    else:
        seq, tile = find_tile(
            at.cu_seqlens_q,
            num_items - 1 - item,
            num_seqs,
            num_entries,
            min_run,
            form.group,
            TILE_M,
            TILE_B,
        )
    if seq >= num_seqs:
        return
    start, run = run_of(at.cu_seqlens_q, seq, True, num_entries)
    if run < min_run:
        return
    seqlen_k = cached_keys(at.seqlens_k, seq, True, max_keys)
    if way.splits:
        row_tiles = (run * form.group + TILE_M - 1) // TILE_M
        split = own // row_tiles
        tile = own % row_tiles
        part += own
        is_first = (split == 0) & (head == 0) & (merged + tile < num_merged)
        if (num_splits > (0 if way.adds else 1)) & is_first:
            entry = at.plan + (1 + 4 * (merged + tile))
            tl.store(entry, seq)
            tl.store(entry + 1, tile)
            tl.store(entry + 2, part)
            tl.store(entry + 3, num_splits)

    row = tile * TILE_M + tl.arange(0, TILE_M)
    token = row // form.group
    q_head = head * form.group + row % form.group
    in_run = token < run
    first_new = key_at(0, run, seqlen_k)
    # The last key that each row of this tile sees.
    pos = first_new + token
    if not (way.causal or way.tree):
        pos = tl.full([TILE_M], 0, tl.int32) + seqlen_k
    skipped = 0
    if way.skipped:
        skipped = cached_keys(at.skipped, seq, True, max_keys)
    key_lo, key_hi, clean_lo, clean_hi = keys_of_row_tile(
        seqlen_k, run, tile * TILE_M, skipped, form, way, TILE_M, TILE_N
    )
    first = key_lo // TILE_N
    last = tl.maximum((key_hi + TILE_N - 1) // TILE_N, first)
    clean_lo = tl.minimum(clean_lo, last)
    clean_hi = tl.maximum(clean_hi, clean_lo)
    if way.invariant:
        # Without a mask the compiler fuses the scale into the subtraction of the maximum and rounds
        # once. The bits of a row must not depend on whether its neighbours see the whole tile of
        # keys.
        clean_lo, clean_hi = first, first
    split_lo = first + split * (last - first) // num_splits
    split_hi = first + (split + 1) * (last - first) // num_splits

    q_token = start + token
    if way.rows:
        q_token = tl.load(at.rows + q_token, mask=in_run, other=0)
        q_token = tl.minimum(tl.maximum(q_token, 0), num_tokens - 1)
    offs_d = tl.arange(0, form.d_pad)
    offs_dv = tl.arange(0, form.dv_pad)
    q_row = at.q + q_token.to(tl.int64) * stride_qt + q_head * stride_qh
    q_inside = in_run[:, None] & (offs_d[None, :] < form.d)
    q = tl.load(q_row[:, None] + offs_d[None, :], mask=q_inside, other=0.0)
    q_rest = None
    if form.rest > 0:
        q_rest = load_rest(q_row[:, None], in_run, form, True)
    if form.kind == FLOAT and at.q.dtype.element_ty != at.k.dtype.element_ty:
        q = q.to(tl.float32)
        if form.rest > 0:
            q_rest = q_rest.to(tl.float32)
    q = rotated_like_keys(q, form)
    if form.rest > 0:
        q_rest = rotated_like_keys(q_rest, form)
    slope = tl.zeros([TILE_M], dtype=tl.float32)
    if form.alibi:
        slope = tl.load(at.slopes + q_head).to(tl.float32) * LOG2E
    k_head = at.k + head.to(tl.int64) * stride_kh
    v_head = at.v + head.to(tl.int64) * stride_vh
    k_scales = at.k_scale + head * stride_ksh
    v_scales = at.v_scale + head * stride_vsh
    block_row_ptr = at.block_table + seq.to(tl.int64) * stride_table
    # Rows after the run read the mask of its first row; their results are not stored.
    tree_row_ptr = at.tree + tl.where(in_run, start + token, start).to(tl.int64) * stride_tree

    acc = tl.zeros([TILE_M, TILE_DV], dtype=tl.float32)
    l = tl.zeros([TILE_M], dtype=tl.float32)
    m = tl.full([TILE_M], LOWEST, dtype=tl.float32)
    for phase in tl.static_range(3):
        # 0: tiles cut by a left edge; 1: tiles seen whole; 2: tiles cut by the diagonal or the end
        if phase == 0:
            lo, hi = first, clean_lo
        elif phase == 1:
            lo, hi = clean_lo, clean_hi
        else:
            lo, hi = clean_hi, last
        if way.splits:
            lo, hi = tl.maximum(lo, split_lo), tl.minimum(hi, split_hi)
        if phase > 0 or form.window_left >= 0 or way.skipped:
            acc, l, m = attend_keys(
                q,
                q_rest,
                acc,
                l,
                m,
                pos,
                slope,
                k_head,
                v_head,
                k_scales,
                v_scales,
                block_row_ptr,
                stride_kb,
                stride_kp,
                stride_vb,
                stride_vp,
                stride_ksb,
                stride_ksp,
                stride_vsb,
                stride_vsp,
                lo,
                hi,
                key_lo,
                key_hi,
                num_blocks,
                scale_log2,
                softcap_log2,
                form,
                TILE_N,
                phase != 1,
                tree_row_ptr,
                first_new,
                tree_width,
                way.tree,
            )
    if form.sinks:
        sink = tl.load(at.sinks + q_head).to(tl.float32) * LOG2E
        acc, l, m = add_sink(acc, l, m, tl.where(split == 0, sink, float("-inf")))
    o, lse = normalise(acc, l, m)
    o = rotated_back(o, form)

    inside = in_run[:, None] & (offs_dv[None, :] < form.dv)
    if way.adds and not way.splits:
        # The result of other keys in o and lse is one summand, these keys are the other.
        o_tile = at.o + (q_token.to(tl.int64) * stride_ot + q_head * stride_oh)[:, None]
        o_tile += offs_dv[None, :]
        lse_row = at.lse + q_head * stride_lh + q_token
        other = tl.load(lse_row, mask=in_run, other=float("-inf"))
        other_o = tl.load(o_tile, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(lse, other)
        top = tl.where(top > float("-inf"), top, 0.0)
        share = tl.math.exp2((lse - top) * LOG2E)
        other_share = tl.math.exp2((other - top) * LOG2E)
        total = share + other_share
        seen = total != 0.0  # True for NaN, too
        total = tl.where(seen, total, 1.0)
        o = (o * share[:, None] + other_o * other_share[:, None]) / total[:, None]
        lse = tl.where(seen, top + tl.math.log2(total) * LN2, float("-inf"))
        tl.store(o_tile, o.to(at.o.dtype.element_ty), mask=inside)
        tl.store(lse_row, lse, mask=in_run)
    elif way.adds or (way.splits and num_splits > 1):
        own_part = (part.to(tl.int64) * form.kv_heads + head) * TILE_M + tl.arange(0, TILE_M)
        in_part = in_run & (part < num_parts)
        inside &= in_part[:, None]
        tl.store(at.part_o + own_part[:, None] * form.dv + offs_dv[None, :], o, mask=inside)
        tl.store(at.part_lse + own_part, lse, mask=in_part)
    else:
        o_row = at.o + q_token.to(tl.int64) * stride_ot + q_head * stride_oh
        tl.store(o_row[:, None] + offs_dv[None, :], o.to(at.o.dtype.element_ty), mask=inside)
        tl.store(at.lse + q_head * stride_lh + q_token, lse, mask=in_run)


def launch_rows(
    maker: Maker,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    o: Tensor,
    lse: Tensor,
    plan: RowsPlan,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    scales: Scales,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    skipped: Tensor | None = None,
    rows: Tensor | None = None,
    adds: bool = False,
    split_run: int = 0,
) -> None:
    """Add to a plan: write o and lse of sequences with more than split_run new tokens.

    Rows after the last sequence get o = 0 and lse = -inf, unless `adds`.

    Args:
        o, lse: (T, Hq, Dv) and (Hq, T) float32, written in place.
        plan: the result of `plan_rows` for this spec.
        tree_mask: as in `paged_attention`, in place of the causal rule; None without a tree.
        skipped: int32 (B,), the number of first keys of each sequence that are left out.
        rows: int32, a list of rows of q, into which cu_seqlens_q points; None if sequence b owns
            rows cu_seqlens_q[b] ... of q itself.
        adds: True to merge with the result of other keys in o and lse.
    """
    config = plan.config
    part_o, part_lse, bounds = o, lse, seqlens_k  # never touched without parts
    if plan.splits:
        parts = plan.num_parts * spec.num_kv_heads * config.tile_m
        part_o = maker.empty((parts, spec.v_head_dim), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
        bounds = maker.empty((1 + 4 * plan.num_merged,), torch.int32)
    memory = Memory(
        q,
        k_cache,
        v_cache,
        o,
        lse,
        part_o,
        part_lse,
        bounds,
        block_table,
        seqlens_k,
        cu_seqlens_q,
        alibi_slopes if alibi_slopes is not None else lse,
        sinks if sinks is not None else lse,
        rows if rows is not None else seqlens_k,
        skipped if skipped is not None else seqlens_k,
        tree_mask.view(torch.uint8) if tree_mask is not None else seqlens_k,
        *scales.arguments[:2],
    )
    maker.launch(
        _rows_kernel,
        plan.num_items * spec.num_kv_heads,
        memory,
        *scales.arguments[2:],
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        o.stride(0),
        o.stride(1),
        lse.stride(0),
        block_table.stride(0),
        *((0, 0) if tree_mask is None else (tree_mask.stride(0), tree_mask.shape[1])),
        spec.num_seqs,
        spec.num_tokens,
        q.shape[0],
        *reach_of(spec, k_cache),
        split_run + 1,
        plan.num_items,
        plan.num_parts,
        plan.num_merged,
        plan.target_items,
        plan.split_tiles,
        spec.softmax_scale * LOG2E.value,
        spec.softcap * LOG2E.value,
        form=Form.of(
            spec,
            padded_value_dim(spec.head_dim, spec.v_head_dim),
            scales.kind,
            config.tile_m,
            same_strides=k_cache.stride() == v_cache.stride(),
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
        ),
        way=Way(
            spec.causal and tree_mask is None,
            tree_mask is not None,
            rows is not None,
            skipped is not None,
            plan.splits,
            plan.lone,
            adds,
            spec.batch_invariant,
        ),
        TILE_B=TILE_B,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if plan.splits:
        launch_merge(
            maker, o, lse, part_o, part_lse, bounds, cu_seqlens_q, rows, spec, plan, adds=adds
        )
