"""Paged attention on Hopper, and where mma.sync is the product: which calls kernels of their own
take, and what is launched for them.

The contract is that of `kernels.triton.paged.plan`. Taken are short runs over 8-bit caches,
where widening by the portable kernel costs more than memory; 16-bit caches it reads at the speed of
memory itself. `direct_plan` has what differs where mma.sync is the product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.device.byte_operands import HEADS, LINE
from tilewise.kernels.gluon.device.warpgroup import LOG2E
from tilewise.kernels.gluon.mma import plan as mma
from tilewise.kernels.gluon.paged import direct_plan as direct
from tilewise.kernels.gluon.paged.decode import ROWS, Shape, paged_decode_kernel
from tilewise.kernels.host.descriptors import token_descriptor, why_no_descriptor
from tilewise.kernels.host.plan import LaunchPlan, Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import FOUR_BITS, PagedSpec, PagedTensors
from tilewise.kernels.tiles import paged as tiles
from tilewise.kernels.tiles.paged import SplitPlan, TileConfig
from tilewise.kernels.tiles.paged_rows import plan_rows
from tilewise.kernels.triton.early import options_of
from tilewise.kernels.triton.paged.decode import launch_merge
from tilewise.kernels.triton.paged.four_bits import log_of_rotated
from tilewise.kernels.triton.paged.plan import launch_plan
from tilewise.kernels.triton.paged.quantise import Scales, as_bytes
from tilewise.kernels.triton.paged.rows import launch_rows
from tilewise.kernels.triton.paged.splits import FIELDS

__all__ = ["fill_plan", "made_fwd", "plan_fwd", "plan_pairs", "why_not"]

_WIDTHS = (64, 128)
_NIBBLE_WIDTHS = (64, 128, 256)
_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, FOUR_BITS: 4}
LOADER_REGISTERS = 40
REGISTERS = 128  # of a thread at the start: two CTAs of eight warps fill the file
# The number of CTAs of a multiprocessor that stay and take pair after pair, in calls that have as
# many pairs without splits. With a plan such a call also merges in the last split of a sequence to
# end and begins early where others do: 256 x 1,024 keys of e4m3 take 138.5 us so, and 140.9 with a
# CTA for each pair. With many splits of few sequences the last one would merge for long: 64 x 4,096
# keys of 4 bits take 95.5 us, and 94.3 with a CTA for each pair and a kernel that merges (H200,
# 2026-11-30, lab/results/paged_int4_h200.json).
SEATS = 2
_SMALLEST_BLOCK = 8  # rows of a swizzled tile; smaller copies are slower than 8 bits are worth


def why_not(spec: PagedSpec) -> str | None:
    """Say why no kernel can run `spec` on the device at hand, which must be a Hopper GPU (or "cuda"
    where no GPU is seen) or have mma.sync and nothing faster, or return None when one can;
    `why_not_decode` has the rules of both."""
    if _is_direct(spec):
        return direct.why_not(spec) or why_not_decode(spec)
    return device.why_not_hopper(spec.device_type) or why_not_decode(spec)


def _is_direct(spec: PagedSpec) -> bool:
    """Return whether a call is for CUDA and the GPU at hand has mma.sync and nothing faster."""
    where = spec.device_type == "cuda" and torch.cuda.is_available()
    return where and mma.is_served(device.arch_of(torch.device("cuda")))


def why_not_decode(spec: PagedSpec) -> str | None:
    """Say why no kernel can run `spec` on any GPU, or return None when one can: a cache of 8 or 4
    bits, D = Dv of 64 or 128 (256 of 4 bits), at most 16 rows (new tokens times group), blocks of a
    power of two from 8 on, key heads in fours, and none of softcap, ALiBi, trees, shared prefixes
    and batch invariance."""
    if spec.cache_dtype not in _KINDS:
        return f"dtype of the cache must be int8, float8_e4m3fn or uint8, got {spec.cache_dtype}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype of q must be bfloat16 or float16, got {spec.dtype}"
    widths = _NIBBLE_WIDTHS if spec.cache_dtype == FOUR_BITS else _WIDTHS
    if spec.head_dim not in widths or spec.v_head_dim != spec.head_dim:
        wanted = ", ".join(map(str, widths))
        return f"both head dims must be one of {wanted}, got {spec.head_dim} and {spec.v_head_dim}"
    rows = spec.max_seqlen_q * spec.group_size
    if not 1 <= rows <= ROWS.value and not _is_mixed(spec):
        return f"max_seqlen_q * Hq / Hk must be 1 ... {ROWS.value}, got {rows}"
    if spec.block_size < _SMALLEST_BLOCK or spec.block_size & (spec.block_size - 1):
        return f"block_size must be a power of two from {_SMALLEST_BLOCK} on, got {spec.block_size}"
    if spec.num_kv_heads % HEADS.value:
        return f"Hk must be a multiple of {HEADS.value}, got {spec.num_kv_heads}"
    if spec.softcap > 0 or spec.has_alibi:
        return "softcap and alibi_slopes are not in this kernel"
    if spec.has_tree or spec.has_shared or not spec.causal:
        return "tree_mask and shared are not in this kernel"
    if spec.batch_invariant:
        return "batch_invariant is not in this kernel: longer runs have another order of sums"
    return None


def _is_mixed(spec: PagedSpec) -> bool:
    """Return whether single tokens may lie beside runs that are too long for the kernel, so that it
    takes the former and the portable kernel the latter."""
    longest = spec.max_seqlen_q
    rows = longest * spec.group_size
    is_short = spec.group_size <= ROWS.value
    return is_short and rows > ROWS.value and spec.num_tokens < spec.num_seqs * longest


def _short(spec: PagedSpec) -> PagedSpec:
    """Return the spec of the runs that the kernel takes: with max_seqlen_q 1 if long runs are left
    to the portable kernel, else `spec`."""
    return replace(spec, max_seqlen_q=1) if _is_mixed(spec) else spec


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return the plan of a call, or why the kernel cannot run it; the results are o (T, Hq, D) in
    the dtype of q and lse (Hq, T)."""
    reason = why_not_call(call)
    return Refusal(reason) if reason is not None else made_fwd(call)


def why_not_call(call: Call) -> str | None:
    """Say why `plan_fwd` refuses a call, or return None when it does not."""
    layouts = direct.why_not_layouts if _is_direct(call.spec) else why_not_layouts
    return why_not(call.spec) or layouts(call)


def why_not_layouts(call: Call) -> str | None:
    """Say why the copy engine cannot read the call's caches or scales where they lie, or return
    None."""
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        layout = call.layouts[PagedTensors._fields.index(name)]
        if layout is None or len(layout.shape) == 1:  # a scale for each head is read by its address
            continue
        reason = "tensors must start on a 16-byte boundary"
        if layout.is_aligned:
            reason = why_no_descriptor(layout.meta())
        if reason is None and layout.stride[-1] != 1:
            reason = f"the last stride must be 1, got {layout.stride}"
        if reason is not None:
            return f"{name} must be addressable by TMA: {reason}"
        if name.endswith("cache") and layout.stride[2] != layout.shape[3]:
            return f"{name} must have heads one behind another, got strides {layout.stride}"
    return None


def made_fwd(call: Call, tuned: tuple[int, SplitPlan] | None = None) -> LaunchPlan:
    """Return the plan of a call that `plan_fwd` would not refuse.

    Args:
        tuned: stages and splits instead of the table's, for tuning.
    """
    spec, maker = call.spec, Maker(call, PagedTensors._fields)
    given, _ = PagedTensors.of(maker.inputs, ())
    o = maker.empty((spec.num_tokens, spec.num_q_heads, spec.v_head_dim), spec.dtype)
    lse = maker.empty((spec.num_q_heads, spec.num_tokens), torch.float32)
    if spec.num_tokens == 0:
        return maker.finish((o, lse))
    short, sm_count = _short(spec), device.sm_count_of(maker.device)
    if _is_direct(spec):
        direct.add_decode(maker, short, given, o, lse, tiles.direct_decode_plan(short, sm_count))
        chosen = {"split": direct.tile_of(short)}
    else:
        stages, splits = tuned or tiles.byte_decode_plan(short, sm_count)
        _add_decode(maker, short, given, o, lse, stages, splits)
        tile_n = tiles.byte_decode_keys(short)
        chosen = {"split": TileConfig(_rows_of(short), tile_n, 5, stages)}  # a warp loads
    if short is not spec:
        _add_rows(maker, spec, given, o, lse)
        chosen["rows"] = tiles.paged_rows_config(spec, device.arch_of(maker.device))
    return maker.finish((o, lse), lambda: chosen)


def _add_rows(maker: Maker, spec: PagedSpec, given: PagedTensors, o: Tensor, lse: Tensor) -> None:
    """Add to the plan the launch of the portable kernel for runs of more than one token, which
    writes their rows of o and lse."""
    arch = device.arch_of(maker.device)
    scales = Scales.of(given.k_cache, given.k_scale, given.v_scale, lse, arch)
    config = tiles.paged_rows_config(spec, arch)
    launch_rows(
        maker,
        given.q,
        as_bytes(given.k_cache),
        as_bytes(given.v_cache),
        spec,
        o,
        lse,
        plan_rows(spec, config, device.sm_count_of(maker.device)),
        block_table=given.block_table,
        seqlens_k=given.seqlens_k,
        cu_seqlens_q=given.cu_seqlens_q,
        scales=scales,
        sinks=given.sinks,
        split_run=1,
    )


def _rows_of(spec: PagedSpec) -> int:
    """Return the rows of a head's tile, new tokens times group, padded: 8 or 16."""
    return 8 if spec.max_seqlen_q * spec.group_size <= 8 else ROWS.value


def _add_decode(
    maker: Maker,
    spec: PagedSpec,
    given: PagedTensors,
    o: Tensor,
    lse: Tensor,
    stages: int,
    splits: SplitPlan,
) -> None:
    """Add to the plan the launches of the kernel and of those around it (the plan's records, the
    merge of parts), which write o and lse."""
    q, sinks, run, records = given.q, given.sinks, spec.max_seqlen_q, given.records
    caches, scales = (given.k_cache, given.v_cache), (given.k_scale, given.v_scale)
    slot_scales = scales[0].dim() == 3
    if not slot_scales:  # one for all heads may come as `scale.expand(Hk)`
        scales = (maker.dense(scales[0]), maker.dense(scales[1]))
    table, starts = given.block_table, given.cu_seqlens_q
    if records is None:
        records = maker.empty((splits.num_pairs, FIELDS.value), torch.int32)
        _fill(maker.launch, records, spec, given.seqlens_k, starts, splits)
    parts = splits.num_pairs * spec.num_q_heads * run
    part_o, part_lse, bounds = o, lse, records  # never touched
    seats = _seats(spec, device.sm_count_of(maker.device))
    merges = _merges(splits, seats) and given.records is not None
    early = options_of(spec.early if seats and given.records is not None else 0)
    if not splits.alone:
        part_o = maker.empty((parts, spec.v_head_dim), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
    if not (splits.alone or merges):
        bounds = maker.empty((spec.num_seqs, 2), torch.int32)
    keys = tiles.byte_decode_keys(spec)
    box = min(spec.block_size, keys)
    row = spec.head_dim // 2 if spec.cache_dtype == FOUR_BITS else spec.head_dim
    tensors = [_lines_descriptor(cache, box) for cache in caches]
    variant = Shape(
        spec.num_kv_heads,
        spec.group_size,
        _rows_of(spec),
        spec.head_dim,
        row,
        keys,
        spec.block_size,
        box,
        stages,
        _KINDS[spec.cache_dtype],
        slot_scales,
        spec.window_left >= 0,
        sinks is not None,
        splits.alone,
        merges,
        early.pop("EARLY"),
        LOADER_REGISTERS,
        log_of_rotated(spec.head_dim),
    )
    items = splits.num_pairs * spec.num_kv_heads // HEADS.value
    strides = [*scales[0].stride()[:2], *scales[1].stride()[:2]] if slot_scales else [0] * 4
    maker.launch(
        paged_decode_kernel,
        min(items, seats) if seats else items,
        q,
        *tensors,
        *scales,
        sinks if sinks is not None else lse,
        o,
        lse,
        part_o,
        part_lse,
        bounds,
        records,
        table,
        starts,
        q.stride(0),
        q.stride(1),
        table.stride(0),
        *strides,
        spec.num_seqs,
        spec.num_tokens,
        caches[0].shape[0],
        run,
        splits.num_pairs,
        spec.window_left,
        spec.softmax_scale * LOG2E.value,
        shape=variant,
        maxnreg=REGISTERS,
        **early,
    )
    if not (splits.alone or merges):
        launch_merge(maker, part_o, part_lse, bounds, starts, spec, o, lse, splits.num_pairs, run)


def _lines_descriptor(cache: Tensor, rows: int) -> object:
    return token_descriptor(cache.view(torch.float8_e4m3fn), rows, LINE.value)


def plan_pairs(spec: PagedSpec, where: torch.device) -> int:
    """Return how many rows the records of a plan of `spec` have, rows of counters included; 0
    without tokens."""
    if spec.num_tokens == 0:
        return 0
    if _is_direct(spec):
        return tiles.direct_decode_plan(_short(spec), device.sm_count_of(where)).num_pairs
    plan = tiles.byte_decode_plan(_short(spec), device.sm_count_of(where))[1]
    return plan.num_pairs + counter_rows(spec, plan, device.sm_count_of(where))


def counter_rows(spec: PagedSpec, plan: SplitPlan, sm_count: int) -> int:
    """Return the number of rows of counters that a plan has behind its records.

    Where the kernel merges the splits itself, it counts those that have ended: one int32 for each
    sequence and HEADS of its key heads. A row holds FIELDS counters, as a record holds FIELDS
    numbers. Other plans have no counters: the number is 0.
    """
    if not _merges(plan, _seats(spec, sm_count)):
        return 0
    return -(-spec.num_seqs * spec.num_kv_heads // (HEADS.value * FIELDS.value))


def _merges(plan: SplitPlan, seats: int) -> bool:
    """Return whether the kernel merges splits itself in calls whose plan has counters: where CTAs
    stay and sequences have splits."""
    return seats > 0 and not plan.alone


def _seats(spec: PagedSpec, sm_count: int) -> int:
    """Return how many CTAs stay and take pair after pair; 0 where there is one for each pair."""
    seats = SEATS * sm_count
    return seats if spec.num_seqs * spec.num_kv_heads // HEADS.value >= seats else 0


@planned
def fill_plan(
    maker: Maker, records: Tensor, spec: PagedSpec, seqlens_k: Tensor, cu_seqlens_q: Tensor
) -> None:
    """Write the records of sequences with these lengths, which CTAs attend over which keys, to
    `records` of `plan_pairs` rows; counters are not written."""
    if _is_direct(spec):
        pieces = tiles.direct_decode_plan(_short(spec), device.sm_count_of(maker.device))
        direct.fill(maker.launch, records, _short(spec), seqlens_k, cu_seqlens_q, pieces)
        return
    _, splits = tiles.byte_decode_plan(_short(spec), device.sm_count_of(maker.device))
    _fill(maker.launch, records, _short(spec), seqlens_k, cu_seqlens_q, splits)


def _fill(
    start: Callable[..., object],
    records: Tensor,
    spec: PagedSpec,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    splits: SplitPlan,
) -> None:
    launch_plan(
        start,
        seqlens_k,
        cu_seqlens_q,
        records,
        plan=splits,
        tile_n=tiles.byte_decode_keys(spec),
        max_run=spec.max_seqlen_q,
        window_left=spec.window_left,
        num_tokens=spec.num_tokens,
        max_keys=spec.max_blocks * spec.block_size,
    )
