"""Paged attention of short runs of new tokens: the keys of a sequence are split over programs.

what     flash-decoding (Dao et al. 2023) over a block table: partial o and lse per split of a
         sequence's keys, then one merge by log-sum-exp
grid     split kernel: (pairs * Hk, tiles of rows), a pair being (sequence, split), heads fastest so
         that neighbours read neighbouring bytes; merge kernel: (B * run, Hq)
program  reads the record of its pair from a plan or makes it (see `splits`), folds its keys; a
         sequence with one split is written straight to o and lse. With a plan there is no second
         kernel, but for heads of more than 256 channels and where `plan.merges_apart`: the plan
         has a counter for each (sequence, key head, tile of rows), and the program that is the last
         to raise it merges all splits, in their order, and sets it back to 0
traffic  K and V once (once per tile of rows), q once per split; partials 4 * (Dv + 1) bytes per
         row and split, which is under 1 % of the keys for splits of 512 keys or more
numerics as in `keys`; partial o float32 and normalised; weights of the merge are exp2(lse - max)

With batch_invariant the size of a split is a constant, so how a sequence is cut depends on its own
length alone.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.plan import Maker
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import (
    SplitPlan,
    TileConfig,
    has_only_mma_sync,
    is_wide,
    padded_head_dim,
)
from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.early import await_previous, begin_next, options_of, prefetch
from tilewise.kernels.triton.merge import add_parts, store_whole
from tilewise.kernels.triton.paged.keys import (
    LOWEST,
    MERGE_TILE,
    Form,
    add_sink,
    attend_keys,
    clear_padding_rows,
    load_rest,
    normalise,
    rotated_back,
    rotated_like_keys,
    run_of,
)
from tilewise.kernels.triton.paged.quantise import FLOAT, Scales
from tilewise.kernels.triton.paged.splits import FIELDS, TILE_B, plan_record
from tilewise.kernels.triton.visible import first_key_of_run, key_at

# Numbers of parts that a program merges at once: 32 registers a thread, so that four programs fit a
# multiprocessor. One sequence alone has as many splits as twice that; 28 layers of Qwen3-0.6B take
# 3 % less of a step (H200, lab/results/lone_decode_h200.json, 2026-11-30).
MERGED, MERGED_ALONE = 4096, 8192
KEYS_AHEAD = 64  # keys of each split: 16 MiB for the programs that an H200 runs at a time
FEW_ROWS = 1024  # so few rows leave most of a GPU idle: use 4 warps and 4 times the splits for each


class Memory(NamedTuple):
    """The tensors that a split kernel reads and writes.

    A field that a launch does not use holds some other tensor, which is not touched.
    """

    q: object
    k: object
    v: object
    o: object
    lse: object
    part_o: object
    part_lse: object
    bounds: object
    records: object
    block_table: object
    seqlens_k: object
    cu_seqlens_q: object
    slopes: object
    sinks: object
    k_scale: object
    v_scale: object


class Way(NamedTuple):
    """Constexpr: how the keys of a sequence are split, and who merges the parts."""

    fixed: bool  # True if splits have one size in every batch
    alone: bool  # True if every sequence has one split
    clears: bool  # True if rows after the last sequence are written, too
    plan: bool  # True if the records of a plan assign keys to programs
    merges: bool  # True if the last split of a sequence to end merges them all


@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_tokens",
        "max_keys",
        "num_blocks",
        "max_run",
        "target_pairs",
        "split_tiles",
        "num_pairs",
        "stride_lh",
    ]
)
def _split_kernel(
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
    num_seqs,
    num_tokens,
    max_keys,
    num_blocks,
    max_run,
    target_pairs,
    split_tiles,
    num_pairs,
    scale_log2,
    softcap_log2,
    form: tl.constexpr,
    way: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE_B: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    MERGED: tl.constexpr,
):
    TILE_DV: tl.constexpr = form.dv_pad
    begin_next(EARLY)
    head = tl.program_id(0) % form.kv_heads
    pair = tl.program_id(0) // form.kv_heads
    if way.plan:
        # A step's plan and table are written long before, so a kernel that begins early may read
        # them.
        record_ptr = at.records + pair * FIELDS
        seq = tl.load(record_ptr)
        start = tl.load(record_ptr + 1)
        run = tl.load(record_ptr + 2)
        seqlen_k = tl.load(record_ptr + 3)
        first = tl.load(record_ptr + 4)
        last = tl.load(record_ptr + 5)
        first_pair = tl.load(record_ptr + 6)
        num_splits = tl.load(record_ptr + 7)
        if EARLY > 0 and AHEAD > 0:
            _ask_for_keys(
                at.k,
                at.v,
                at.block_table + seq.to(tl.int64) * stride_table,
                head,
                stride_kb,
                stride_kp,
                stride_kh,
                stride_vb,
                stride_vp,
                stride_vh,
                first * TILE_N,
                tl.where(num_splits > 0, tl.minimum(last * TILE_N, seqlen_k), 0),
                num_blocks,
                form,
                AHEAD,
            )
    await_previous(EARLY)
    if way.clears and tl.program_id(1) == 0:
        used = tl.minimum(tl.maximum(tl.load(at.cu_seqlens_q + num_seqs), 0), num_tokens)
        clear_padding_rows(
            at.o,
            at.lse,
            stride_ot,
            stride_oh,
            stride_lh,
            used + pair,
            num_pairs,
            num_tokens,
            head,
            form.group,
            form.tile_g,
            form.dv,
            form.dv_pad,
        )
    if not way.plan:
        seq, start, run, seqlen_k, first, last, first_pair, num_splits = plan_record(
            at.seqlens_k,
            at.cu_seqlens_q,
            pair,
            num_seqs,
            num_tokens,
            max_keys,
            max_run,
            target_pairs,
            split_tiles,
            form.window_left,
            TILE_N,
            way.fixed,
            TILE_B,
        )
    if num_splits == 0:
        return
    split = pair - first_pair
    if not (way.alone or way.merges) and (split == 0) and (tl.program_id(0) % form.kv_heads == 0):
        tl.store(at.bounds + 2 * seq, first_pair)
        tl.store(at.bounds + 2 * seq + 1, num_splits)

    row = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    token = row // form.group
    q_head = head * form.group + row % form.group
    in_run = token < run
    pos = key_at(token, run, seqlen_k)
    offs_d = tl.arange(0, form.d_pad)
    offs_dv = tl.arange(0, form.dv_pad)
    q_row = at.q + (start + token).to(tl.int64) * stride_qt + q_head * stride_qh
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

    key_lo = 0
    if form.window_left >= 0:
        key_lo = first_key_of_run(seqlen_k, run, form.window_left)
    acc = tl.zeros([TILE_M, TILE_DV], dtype=tl.float32)
    l = tl.zeros([TILE_M], dtype=tl.float32)
    m = tl.full([TILE_M], LOWEST, dtype=tl.float32)
    acc, l, m = attend_keys(
        q,
        q_rest,
        acc,
        l,
        m,
        pos,
        slope,
        at.k + head.to(tl.int64) * stride_kh,
        at.v + head.to(tl.int64) * stride_vh,
        at.k_scale + head * stride_ksh,
        at.v_scale + head * stride_vsh,
        at.block_table + seq.to(tl.int64) * stride_table,
        stride_kb,
        stride_kp,
        stride_vb,
        stride_vp,
        stride_ksb,
        stride_ksp,
        stride_vsb,
        stride_vsp,
        first,
        last,
        key_lo,
        seqlen_k,
        num_blocks,
        scale_log2,
        softcap_log2,
        form,
        TILE_N,
        True,
    )
    if form.sinks:
        sink = tl.load(at.sinks + q_head).to(tl.float32) * LOG2E
        if not way.alone:  # with a branch the compiler would not fuse as it does in `rows`
            sink = tl.where(split == 0, sink, float("-inf"))
        acc, l, m = add_sink(acc, l, m, sink)
    o, lse = normalise(acc, l, m)
    o = rotated_back(o, form)

    inside = in_run[:, None] & (offs_dv[None, :] < form.dv)
    if way.alone or num_splits == 1:
        o_row = at.o + (start + token).to(tl.int64) * stride_ot + q_head * stride_oh
        tl.store(o_row[:, None] + offs_dv[None, :], o.to(at.o.dtype.element_ty), mask=inside)
        tl.store(at.lse + q_head * stride_lh + start + token, lse, mask=in_run)
    else:
        part = (pair.to(tl.int64) * form.kv_heads + head) * (max_run * form.group) + row
        tl.store(at.part_o + part[:, None] * form.dv + offs_dv[None, :], o, mask=inside)
        tl.store(at.part_lse + part, lse, mask=in_run)
        if way.merges:
            counter = at.records + num_pairs * FIELDS + tl.program_id(1)
            counter += (seq * form.kv_heads + head) * tl.num_programs(1)
            tl.debug_barrier()  # all threads must have stored their parts before one announces them
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                tl.store(counter, 0)
                _merge_parts(
                    at,
                    stride_ot,
                    stride_oh,
                    stride_lh,
                    first_pair,
                    num_splits,
                    start,
                    run,
                    max_run,
                    head,
                    form,
                    TILE_M,
                    MERGED,
                )


@triton.jit
def _ask_for_keys(
    k_ptr,
    v_ptr,
    block_row_ptr,
    head,
    stride_kb,
    stride_kp,
    stride_kh,
    stride_vb,
    stride_vp,
    stride_vh,
    first_key,
    end_key,
    num_blocks,
    form: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Ask for the keys and values first_key ... first_key + AHEAD - 1 of a split to be in L2.

    Keys from end_key on are left out; the cache has 16-bit channels. It runs before the kernel
    waits for the kernel before it, which may still write the newest keys; all are read only after
    the wait.
    """
    key = first_key + tl.arange(0, AHEAD)
    inside = key < end_key
    block = tl.load(block_row_ptr + key // form.block_size, mask=inside, other=0).to(tl.uint32)
    block = tl.minimum(block, (num_blocks - 1).to(tl.uint32)).to(tl.int64)
    slot, head = key % form.block_size, head.to(tl.int64)
    k_rows = k_ptr + (block * stride_kb + slot * stride_kp + head * stride_kh)
    v_rows = v_ptr + (block * stride_vb + slot * stride_vp + head * stride_vh)
    prefetch(k_rows, inside, 2 * (form.d + form.rest))
    prefetch(v_rows, inside, 2 * form.dv)


@triton.jit
def _merge_parts(
    at,
    stride_ot,
    stride_oh,
    stride_lh,
    first_pair,
    num_splits,
    start,
    run,
    max_run,
    head,
    form: tl.constexpr,
    TILE_M: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Write o and lse of this program's tile of rows, merged from all splits of the sequence.

    first_pair, num_splits: the range of the sequence's parts in at.part_o and at.part_lse; start,
    run: its first row and number of rows; head: the key head; MERGED: the numbers of parts at once.
    """
    TILE_DV: tl.constexpr = form.dv_pad
    TILE_R: tl.constexpr = form.tile_g if form.tile_g < TILE_M else TILE_M
    WANTED: tl.constexpr = MERGED // (TILE_R * TILE_DV)
    PARTS: tl.constexpr = WANTED if WANTED > 1 else 1
    offs_s = tl.arange(0, PARTS)
    offs_dv = tl.arange(0, form.dv_pad)
    first_row = tl.program_id(1) * TILE_M
    for row_base in range(first_row, tl.minimum(first_row + TILE_M, run * form.group), TILE_R):
        row = row_base + tl.arange(0, TILE_R)
        is_row = row < run * form.group
        acc = tl.zeros([TILE_R, TILE_DV], dtype=tl.float32)
        l = tl.zeros([TILE_R], dtype=tl.float32)
        m = tl.full([TILE_R], LOWEST, dtype=tl.float32)
        for base in range(0, num_splits, PARTS):
            split = base + offs_s
            part = (first_pair + split).to(tl.int64) * form.kv_heads + head
            part = part[:, None] * (max_run * form.group) + row[None, :]
            inside = (split < num_splits)[:, None] & is_row[None, :]
            # From L2, where the other programs have written them.
            part_lse = tl.load(
                at.part_lse + part, mask=inside, other=float("-inf"), cache_modifier=".cg"
            )
            part_o = tl.load(
                at.part_o + part[:, :, None] * form.dv + offs_dv[None, None, :],
                mask=inside[:, :, None] & (offs_dv < form.dv)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc, l, m = add_parts(acc, l, m, part_o, part_lse)
        o, lse = normalise(acc, l, m * LOG2E)
        token = start + row // form.group
        q_head = head * form.group + row % form.group
        o_row = at.o + token.to(tl.int64) * stride_ot + q_head * stride_oh
        inside = is_row[:, None] & (offs_dv < form.dv)[None, :]
        tl.store(o_row[:, None] + offs_dv[None, :], o.to(at.o.dtype.element_ty), mask=inside)
        tl.store(at.lse + q_head * stride_lh + token, lse, mask=is_row)


@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "max_run", "stride_lh"])
def _merge_kernel(
    part_o_ptr,
    part_lse_ptr,
    bounds_ptr,
    cu_seqlens_q_ptr,
    o_ptr,
    lse_ptr,
    stride_ot,
    stride_oh,
    stride_lh,
    num_tokens,
    num_pairs,
    max_run,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    TILE_DV: tl.constexpr,
    MERGE_TILE: tl.constexpr,
):
    seq = tl.program_id(0) // max_run
    token = tl.program_id(0) % max_run
    q_head = tl.program_id(1)
    start, run = run_of(cu_seqlens_q_ptr, seq, True, num_tokens)
    if (token >= run) | (run > max_run):
        return
    # Overlapping runs have more pairs than there are programs, with bounds that were never written.
    first_pair = tl.minimum(tl.maximum(tl.load(bounds_ptr + 2 * seq), 0), num_pairs)
    num_splits = tl.minimum(tl.load(bounds_ptr + 2 * seq + 1), num_pairs - first_pair)
    if num_splits == 1:
        return
    row = token * GROUP + q_head % GROUP
    offs_s = tl.arange(0, MERGE_TILE)
    offs_dv = tl.arange(0, TILE_DV)
    acc = tl.zeros([TILE_DV], dtype=tl.float32)
    l = 0.0
    m = LOWEST
    for base in range(0, num_splits, MERGE_TILE):
        split = base + offs_s
        part = (first_pair + split).to(tl.int64) * NUM_KV_HEADS + q_head // GROUP
        part = part * (max_run * GROUP) + row
        inside = split < num_splits
        lse = tl.load(part_lse_ptr + part, mask=inside, other=float("-inf"))
        o = tl.load(
            part_o_ptr + part[:, None] * V_HEAD_DIM + offs_dv[None, :],
            mask=inside[:, None] & (offs_dv[None, :] < V_HEAD_DIM),
            other=0.0,
        )
        acc, l, m = add_parts(acc, l, m, o, lse)
    o_row = o_ptr + (start + token).to(tl.int64) * stride_ot + q_head * stride_oh
    lse_at = lse_ptr + q_head * stride_lh + start + token
    store_whole(acc, l, m, o_row + offs_dv, offs_dv < V_HEAD_DIM, lse_at)


def launch_decode(
    maker: Maker,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    o: Tensor,
    lse: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scales: Scales,
    config: TileConfig,
    plan: SplitPlan,
    max_run: int,
    clears: bool,
    records: Tensor | None = None,
) -> None:
    """Add to a plan: write rows of o and lse of every sequence that has 1 ... max_run new tokens.

    Args:
        o, lse: (T, Hq, Dv) and (Hq, T) float32, written in place; other rows are left alone.
        plan: the result of `tiles.plan_splits` for this spec, config and max_run.
        clears: True to write also the rows after the last sequence (o = 0, lse = -inf).
        records: the records of `splits.launch_plan` for this plan, and after them `counter_rows`
            rows that are 0 before and after; None lets programs compute them, and a second kernel
            merge, as it does in heads of more than 256 channels and where `plan.merges_apart`.
    """
    group = spec.group_size
    rows = max_run * group
    num_heads = spec.num_kv_heads * plan.num_pairs
    parts = plan.num_pairs * spec.num_kv_heads * rows
    part_o, part_lse, bounds = o, lse, seqlens_k  # never touched
    merges = records is not None and _merges_in_place(spec, plan)
    if not plan.alone:
        part_o = maker.empty((parts, spec.v_head_dim), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
    if not (plan.alone or merges):
        bounds = maker.empty((spec.num_seqs, 2), torch.int32)
    early = options_of(spec.early if records is not None else 0)
    memory = Memory(
        q,
        k_cache,
        v_cache,
        o,
        lse,
        part_o,
        part_lse,
        bounds,
        records if records is not None else seqlens_k,
        block_table,
        seqlens_k,
        cu_seqlens_q,
        alibi_slopes if alibi_slopes is not None else lse,
        sinks if sinks is not None else lse,
        *scales.arguments[:2],
    )
    maker.launch(
        _split_kernel,
        (num_heads, triton.cdiv(rows, config.tile_m)),
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
        spec.num_seqs,
        spec.num_tokens,
        *reach_of(spec, k_cache),
        max_run,
        plan.target_pairs,
        plan.split_tiles,
        plan.num_pairs,
        spec.softmax_scale * LOG2E.value,
        spec.softcap * LOG2E.value,
        form=Form.of(
            spec,
            padded_head_dim(spec.v_head_dim),
            scales.kind,
            config.tile_m,
            same_strides=k_cache.stride() == v_cache.stride(),
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
            has_words=_has_words(maker, k_cache, v_cache, spec, config),
        ),
        way=Way(plan.fixed, plan.alone, clears, records is not None, merges),
        FIELDS=FIELDS,
        TILE_B=TILE_B,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        AHEAD=_keys_ahead(maker, k_cache, v_cache) if early["EARLY"] else 0,
        MERGED=MERGED_ALONE if spec.num_seqs == 1 and not spec.batch_invariant else MERGED,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **early,
    )
    if plan.alone or merges:
        return
    launch_merge(
        maker, part_o, part_lse, bounds, cu_seqlens_q, spec, o, lse, plan.num_pairs, max_run
    )


def reach_of(spec: PagedSpec, cache: Tensor) -> tuple[int, int]:
    """Return the most keys that a row of the block table can refer to, and the number of blocks.

    Both are 0 for a cache without blocks.
    """
    num_blocks = cache.shape[0]
    return spec.max_blocks * spec.block_size if num_blocks else 0, num_blocks


def _keys_ahead(maker: Maker, k_cache: Tensor, v_cache: Tensor) -> int:
    """Return the number of keys of a split that a kernel which begins early prefetches.

    It is 0 for caches that are not of 16 bits or not aligned to 16 bytes.
    """
    for cache in (k_cache, v_cache):
        steps = (*cache.stride()[:3], cache.shape[-1])
        if cache.itemsize != 2 or not maker.is_aligned(cache) or any(x % 8 for x in steps):
            return 0
    return KEYS_AHEAD


def _has_words(
    maker: Maker, k_cache: Tensor, v_cache: Tensor, spec: PagedSpec, config: TileConfig
) -> bool:
    """Return whether an 8-bit cache is read in words of two channels.

    It is so for bfloat16 queries with tiles of 16 rows on GPUs that have only mma.sync, if all rows
    are aligned to 16 bytes: operands of mma.sync come from registers, and bytes would be loaded
    there one by one.
    """
    is_measured = spec.dtype == torch.bfloat16 and config.tile_m == 16 and not is_wide(spec)
    if spec.cache_dtype not in (torch.int8, torch.float8_e4m3fn) or not is_measured:
        return False
    if not has_only_mma_sync(device.arch_of(maker.device)):
        return False
    widths = (spec.head_dim, spec.v_head_dim)
    steps = (*k_cache.stride()[:3], *v_cache.stride()[:3], *widths)
    is_aligned = maker.is_aligned(k_cache) and maker.is_aligned(v_cache)
    return is_aligned and not any(x % 16 for x in steps)


def _merges_in_place(spec: PagedSpec, plan: SplitPlan) -> bool:
    """Return whether, in a call with records, the last program of a sequence merges its splits.

    Otherwise a second kernel does, with a program for each row, or there is one split only. One
    program would take too long for wide heads: 64 parts of 16 rows of 512 channels are 2 MiB, which
    a multiprocessor takes about as long to read as all others take for 8 MiB of keys.
    """
    return not (plan.alone or plan.merges_apart or is_wide(spec))


def counter_rows(spec: PagedSpec, config: TileConfig, plan: SplitPlan, max_run: int) -> int:
    """Return the number of rows, of FIELDS int32, of counters of ended splits after the records.

    It is 0 where splits are not merged by the program that ends last.
    """
    if not _merges_in_place(spec, plan):
        return 0
    tiles = triton.cdiv(max_run * spec.group_size, config.tile_m)
    return int(triton.cdiv(spec.num_seqs * spec.num_kv_heads * tiles, FIELDS.value))


def launch_merge(
    maker: Maker,
    part_o: Tensor,
    part_lse: Tensor,
    bounds: Tensor,
    cu_seqlens_q: Tensor,
    spec: PagedSpec,
    o: Tensor,
    lse: Tensor,
    num_pairs: int,
    max_run: int,
) -> None:
    """Add to a plan: write rows of o and lse of every sequence with several splits, merged.

    Args:
        part_o, part_lse: the normalised o and the lse of each split and row, float32.
        bounds: int32 (B, 2), the first pair and the number of splits of each sequence.
        o, lse: (T, Hq, Dv) and (Hq, T), written; rows of sequences with one split are left alone.
        num_pairs, max_run: the splits of all sequences, and the longest run of new tokens.
    """
    rows = spec.num_seqs * max_run * spec.num_q_heads
    # The tile decides the order of the sum, so with batch_invariant it is one for every batch.
    num_warps = 4 if rows <= FEW_ROWS and not spec.batch_invariant else 1
    tile_dv = padded_head_dim(spec.v_head_dim)
    maker.launch(
        _merge_kernel,
        (spec.num_seqs * max_run, spec.num_q_heads),
        part_o,
        part_lse,
        bounds,
        cu_seqlens_q,
        o,
        lse,
        o.stride(0),
        o.stride(1),
        lse.stride(0),
        spec.num_tokens,
        num_pairs,
        max_run,
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=spec.group_size,
        V_HEAD_DIM=spec.v_head_dim,
        TILE_DV=tile_dv,
        MERGE_TILE=max(1, MERGE_TILE * num_warps * 256 // max(256, tile_dv)),
        num_warps=num_warps,
    )
