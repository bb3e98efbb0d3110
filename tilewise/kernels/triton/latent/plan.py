"""Attention over a paged cache of latents: one row of a token is key and value of all heads.

what     o = softmax(scale (q_latent z^T + q_rope k_rope^T)) z, causal among the new tokens of a
         sequence; z is the first R channels of a cached row, k_rope the other Dr
grid     short runs: (pairs, tiles of rows), a pair being (sequence, split of its keys), then the
         merge of `paged_decode`; long runs: (tiles,), of rows of one sequence, last tile first
program  owns TILE_M rows, row r being new token r // Hq and head r % Hq; loops over tiles of keys,
         each of which is loaded once and multiplied twice
traffic  latents once per tile of rows, from L2 after the first; q and o once; partials of splits
         4 * (R + 1) bytes a row and split
numerics as in `paged.keys`; of an 8-bit row z and k_rope have a scale each, so their products
         with q are summed scaled, in float32

Any block size: rows are addressed one by one through the block table unless a block holds whole
tiles. No synchronisation, so a captured CUDA graph may be replayed with other lengths.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.plan import Call, LaunchPlan, Maker, Refusal
from tilewise.kernels.spec import LatentTensors, PagedSpec
from tilewise.kernels.tiles import latent as mla_tiles
from tilewise.kernels.tiles.paged import SplitPlan, TileConfig, padded_head_dim
from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.paged.decode import FEW_ROWS, _merge_kernel
from tilewise.kernels.triton.paged.items import find_tile
from tilewise.kernels.triton.paged.keys import (
    LOWEST,
    MERGE_TILE,
    _load_blocks,
    _load_rows,
    _load_scales,
    clear_padding_rows,
    key_tile_range,
    normalise,
)
from tilewise.kernels.triton.paged.quantise import (
    FLOAT,
    as_bytes,
    cache_kind,
    factor,
    widen,
    widen_once,
)
from tilewise.kernels.triton.paged.splits import TILE_B, find_split

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
MAX_RANK = 512  # sums of 64 rows of this width are all the registers of 8 warps hold
MAX_ROPE_DIM = 128


@triton.jit
def _attend_latents(
    q, q_rope, acc, l, m, pos, cache_ptr, scale_ptr, block_row_ptr, stride_b, stride_p,
    stride_sb, stride_sp, first, last, key_hi, scale_log2,
    RANK: tl.constexpr, ROPE_DIM: tl.constexpr, TILE_R: tl.constexpr, TILE_DR: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr, WIDENS_ONCE: tl.constexpr,
):  # fmt: skip
    """Fold the keys of tiles first ... last - 1, below key_hi, into acc, l and m of the rows.

    q (TILE_M, TILE_R), q_rope (TILE_M, TILE_DR); pos (TILE_M,) is the last key each row sees.
    """
    offs_n = tl.arange(0, TILE_N)
    offs_r = tl.arange(0, TILE_R)
    offs_dr = tl.arange(0, TILE_DR)
    # Block ids are loaded a tile ahead, see `paged.keys.attend_keys`.
    block = _load_blocks(block_row_ptr, first, last, 0, key_hi, TILE_N, BLOCK_SIZE)
    for tile in range(first, last):
        key = tile * TILE_N + offs_n
        owned = key < key_hi
        if BLOCK_SIZE % TILE_N == 0:
            slot = (tile % (BLOCK_SIZE // TILE_N)) * TILE_N + offs_n
            row = cache_ptr + block * stride_b + slot[:, None] * stride_p
        else:
            slot = key % BLOCK_SIZE
            row = cache_ptr + block[:, None] * stride_b + slot[:, None] * stride_p
        if KIND != FLOAT:
            scales = scale_ptr + block * stride_sb + slot * stride_sp
            z_scale = _load_scales(scales, owned, True) * factor(KIND)
            rope_scale = _load_scales(scales + 1, owned, True) * factor(KIND)
        block = _load_blocks(block_row_ptr, tile + 1, last, 0, key_hi, TILE_N, BLOCK_SIZE)
        z = _load_rows(row, offs_r, owned, RANK, TILE_R, True)
        k_rope = _load_rows(row + RANK, offs_dr, owned, ROPE_DIM, TILE_DR, True)
        if WIDENS_ONCE:
            z, k_rope = widen_once(z, KIND), widen_once(k_rope, KIND)
        else:
            z, k_rope = widen(z, q.dtype, KIND), widen(k_rope, q.dtype, KIND)
        s = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
        if KIND == FLOAT:
            s = tl.dot(q, tl.trans(z), s, input_precision="ieee") * scale_log2
        else:
            s_latent = tl.dot(q, tl.trans(z), input_precision="ieee")
            s = (s_latent * z_scale[None, :] + s * rope_scale[None, :]) * scale_log2
        s = tl.where(owned[None, :] & (key[None, :] <= pos[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        alpha = tl.math.exp2(m - m_new)
        p = tl.math.exp2(s - m_new[:, None])
        l = l * alpha + tl.sum(p, 1)
        if KIND != FLOAT and q.dtype == tl.float16:
            # p times a scale may underflow in float16; times its share of the largest it does not.
            largest = tl.max(z_scale, 0)
            p *= (z_scale / tl.where(largest > 0.0, largest, 1.0))[None, :]
            o = tl.dot(p.to(q.dtype), z, input_precision="ieee")
            acc = acc * alpha[:, None] + o * largest
        else:
            if KIND != FLOAT:
                p *= z_scale[None, :]
            acc = tl.dot(p.to(q.dtype), z, acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, l, m


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "max_run", "target_pairs", "split_tiles",
                               "num_pairs", "min_run", "stride_lh"])  # fmt: skip
def _latent_kernel(
    q_ptr, q_rope_ptr, cache_ptr, o_ptr, lse_ptr, part_o_ptr, part_lse_ptr, plan_ptr,
    block_table_ptr, seqlens_k_ptr, cu_seqlens_q_ptr, scale_ptr, stride_sb, stride_sp,
    stride_qt, stride_qh, stride_rt, stride_rh, stride_b, stride_p,
    stride_ot, stride_oh, stride_lh, stride_table,
    num_seqs, num_tokens, max_run, target_pairs, split_tiles, num_pairs, min_run, scale_log2,
    NUM_HEADS: tl.constexpr, TILE_H: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    TILE_R: tl.constexpr, TILE_DR: tl.constexpr, BLOCK_SIZE: tl.constexpr, KIND: tl.constexpr,
    WIDENS_ONCE: tl.constexpr,
    LONG: tl.constexpr, FIXED: tl.constexpr, ALONE: tl.constexpr, CLEARS: tl.constexpr,
    TILE_B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    row_tile = tl.program_id(1)
    first_pair = 0
    if CLEARS and row_tile == 0:
        used = tl.load(cu_seqlens_q_ptr + num_seqs)
        clear_padding_rows(o_ptr, lse_ptr, stride_ot, stride_oh, stride_lh, used + pair, num_pairs,
                           num_tokens, 0, NUM_HEADS, TILE_H, RANK, TILE_R)  # fmt: skip
    if LONG:
        seq, row_tile = find_tile(cu_seqlens_q_ptr, num_pairs - 1 - pair, num_seqs, min_run,
                                  NUM_HEADS, TILE_M, TILE_B)  # fmt: skip
    else:
        seq, first_pair, split_tiles = find_split(
            seqlens_k_ptr, cu_seqlens_q_ptr, pair, num_seqs, max_run, target_pairs, split_tiles,
            -1, TILE_N, FIXED, TILE_B)  # fmt: skip
    if seq >= num_seqs:
        return
    start = tl.load(cu_seqlens_q_ptr + seq)
    run = tl.load(cu_seqlens_q_ptr + seq + 1) - start
    seqlen_k = tl.load(seqlens_k_ptr + seq)
    _, num_tiles = key_tile_range(seqlen_k, run, -1, TILE_N)
    num_splits = 1
    split = 0
    if not LONG:
        num_splits = (tl.maximum(num_tiles, 1) + split_tiles - 1) // split_tiles
        split = pair - first_pair
        if not ALONE and split == 0:
            tl.store(plan_ptr + 2 * seq, first_pair)
            tl.store(plan_ptr + 2 * seq + 1, num_splits)

    row = row_tile * TILE_M + tl.arange(0, TILE_M)
    token = row // NUM_HEADS
    head = row % NUM_HEADS
    in_run = token < run
    pos = seqlen_k - run + token
    offs_r = tl.arange(0, TILE_R)
    offs_dr = tl.arange(0, TILE_DR)
    t = (start + token).to(tl.int64)
    q = _load_rows((q_ptr + t * stride_qt + head * stride_qh)[:, None], offs_r, in_run, RANK,
                   TILE_R, True)  # fmt: skip
    q_rope = _load_rows((q_rope_ptr + t * stride_rt + head * stride_rh)[:, None], offs_dr, in_run,
                        ROPE_DIM, TILE_DR, True)  # fmt: skip
    if KIND == FLOAT and q_ptr.dtype.element_ty != cache_ptr.dtype.element_ty:
        q = q.to(tl.float32)
        q_rope = q_rope.to(tl.float32)

    # Keys that the last row of this tile sees.
    last_token = tl.minimum((row_tile * TILE_M + TILE_M - 1) // NUM_HEADS, run - 1)
    key_hi = tl.maximum(seqlen_k - run + last_token + 1, 0)
    last = tl.minimum((split + 1) * num_tiles // num_splits, (key_hi + TILE_N - 1) // TILE_N)
    acc = tl.zeros([TILE_M, TILE_R], dtype=tl.float32)
    l = tl.zeros([TILE_M], dtype=tl.float32)
    m = tl.full([TILE_M], LOWEST, dtype=tl.float32)
    acc, l, m = _attend_latents(
        q, q_rope, acc, l, m, pos, cache_ptr, scale_ptr,
        block_table_ptr + seq.to(tl.int64) * stride_table, stride_b, stride_p,
        stride_sb, stride_sp, split * num_tiles // num_splits, last, key_hi, scale_log2,
        RANK, ROPE_DIM, TILE_R, TILE_DR, TILE_N, BLOCK_SIZE, KIND,
        WIDENS_ONCE)  # fmt: skip
    o, lse = normalise(acc, l, m)

    inside = in_run[:, None] & (offs_r[None, :] < RANK)
    if LONG or ALONE or num_splits == 1:
        o_row = o_ptr + t * stride_ot + head * stride_oh
        tl.store(o_row[:, None] + offs_r[None, :], o.to(o_ptr.dtype.element_ty), mask=inside)
        tl.store(lse_ptr + head * stride_lh + start + token, lse, mask=in_run)
    else:
        part = pair.to(tl.int64) * (max_run * NUM_HEADS) + row
        tl.store(part_o_ptr + part[:, None] * RANK + offs_r[None, :], o, mask=inside)
        tl.store(part_lse_ptr + part, lse, mask=in_run)


def why_not(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run a call, or return None when they can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in DTYPES:
        return f"dtype of the queries must be float32, float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8 or float8_e4m3fn, "
            f"got {spec.cache_dtype}"
        )
    rank, rope_dim = spec.v_head_dim, spec.head_dim - spec.v_head_dim
    if not 1 <= rank <= MAX_RANK:
        return f"R must be 1 to {MAX_RANK}, got {rank}"
    if not 1 <= rope_dim <= MAX_ROPE_DIM:
        return f"Dr must be 1 to {MAX_ROPE_DIM}, got {rope_dim}"
    return None


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return how a call is run.

    Its results are o (T, Hq, R) in the dtype of the queries and lse (Hq, T) float32. Rows past
    cu_seqlens_q[B] get o = 0 and lse = -inf.
    """
    reason = why_not(call.spec)
    return Refusal(reason) if reason is not None else made_fwd(call)


def made_fwd(call: Call) -> LaunchPlan:
    """Return the plan of a call that nothing refuses."""
    spec, maker = call.spec, Maker(call, LatentTensors._fields)
    given = LatentTensors(*maker.inputs)
    o = maker.empty(given.q_latent.shape, spec.dtype)
    lse = maker.empty((spec.num_q_heads, spec.num_tokens), torch.float32)
    chosen: dict[str, TileConfig] = {}
    if spec.num_tokens == 0:
        return maker.finish((o, lse))
    arch, sm_count = device.arch_of(maker.device), device.sm_count_of(maker.device)
    work = mla_tiles.mla_work(spec, arch, sm_count)
    if work.split_run > 0:
        chosen["split"] = work.split_config
        launch_splits(
            maker, given, o, lse, spec, config=work.split_config, plan=work.split_plan,
            max_run=work.split_run, clears=work.rows_config is None, arch=arch,
        )  # fmt: skip
    if work.rows_config is not None:
        config = chosen["rows"] = work.rows_config
        launch_rows(maker, given, o, lse, spec, config=config, split_run=work.split_run, arch=arch)
    return maker.finish((o, lse), lambda: chosen)


def launch_splits(
    maker: Maker,
    given: LatentTensors,
    o: Tensor,
    lse: Tensor,
    spec: PagedSpec,
    *,
    config: TileConfig,
    plan: SplitPlan,
    max_run: int,
    clears: bool,
    arch: int,
) -> None:
    """Let a plan write rows of o and lse of every sequence that has 1 ... max_run new tokens.

    Args:
        plan: from `mla_tiles.mla_splits` for this spec, config and max_run.
        clears: also write the rows past the last sequence (o = 0, lse = -inf).
    """
    num_heads, rank = spec.num_q_heads, spec.v_head_dim
    if plan.alone:
        part_o, part_lse, bounds = o, lse, given.seqlens_k  # never touched
    else:
        parts = plan.num_pairs * max_run * num_heads
        part_o = maker.empty((parts, rank), torch.float32)
        part_lse = maker.empty((parts,), torch.float32)
        bounds = maker.empty((spec.num_seqs, 2), torch.int32)
    maker.launch(
        _latent_kernel, (plan.num_pairs, triton.cdiv(max_run * num_heads, config.tile_m)),
        *_arguments(given, o, lse, part_o, part_lse, bounds),
        spec.num_seqs, spec.num_tokens, max_run, plan.target_pairs, plan.split_tiles,
        plan.num_pairs, 0, spec.softmax_scale * LOG2E.value,
        **_constants(spec, config, arch), LONG=False, FIXED=plan.fixed, ALONE=plan.alone,
        CLEARS=clears,
    )  # fmt: skip
    if plan.alone:
        return
    rows = spec.num_seqs * max_run * num_heads
    # The tile is the order of the sum, so with batch_invariant it is one for every batch.
    num_warps = 4 if rows <= FEW_ROWS and not spec.batch_invariant else 1
    maker.launch(
        _merge_kernel, (spec.num_seqs * max_run, num_heads),
        part_o, part_lse, bounds, given.cu_seqlens_q, o, lse,
        *o.stride()[:2], lse.stride(0), max_run,
        NUM_KV_HEADS=1, GROUP=num_heads, V_HEAD_DIM=rank, TILE_DV=padded_head_dim(rank),
        MERGE_TILE=max(1, MERGE_TILE * num_warps * 128 // padded_head_dim(rank)),
        num_warps=num_warps,
    )  # fmt: skip


def launch_rows(
    maker: Maker,
    given: LatentTensors,
    o: Tensor,
    lse: Tensor,
    spec: PagedSpec,
    *,
    config: TileConfig,
    split_run: int,
    arch: int,
) -> None:
    """Let a plan write rows of sequences with more than split_run new tokens, and padding rows."""
    # Every sequence wastes less than one tile, so this bounds the tiles of any cu_seqlens_q.
    num_tiles = spec.num_tokens * spec.num_q_heads // config.tile_m + spec.num_seqs
    maker.launch(
        _latent_kernel, (num_tiles, 1), *_arguments(given, o, lse, o, lse, given.seqlens_k),
        spec.num_seqs, spec.num_tokens, 0, 0, 0, num_tiles, split_run + 1,
        spec.softmax_scale * LOG2E.value,
        **_constants(spec, config, arch), LONG=True, FIXED=True, ALONE=True, CLEARS=True,
    )  # fmt: skip


def _arguments(given: LatentTensors, o: Tensor, lse: Tensor, *parts: Tensor) -> tuple[Any, ...]:
    """What both launches are given of tensors, and their strides."""
    q_latent, q_rope, cache, table, seqlens_k, cu_seqlens_q, scale = given
    # Without scales lse, float32, stands where nothing is read.
    scales = (lse, 0, 0) if scale is None else (scale, *scale.stride()[:2])
    return (
        q_latent, q_rope, as_bytes(cache), o, lse, *parts, table, seqlens_k, cu_seqlens_q, *scales,
        *q_latent.stride()[:2], *q_rope.stride()[:2], *cache.stride()[:2],
        *o.stride()[:2], lse.stride(0), table.stride(0),
    )  # fmt: skip


def _constants(spec: PagedSpec, config: TileConfig, arch: int) -> dict[str, int]:
    """What both launches compile in."""
    widens_once = (
        spec.dtype == torch.bfloat16
        and spec.cache_dtype in BYTE_DTYPES
        and config.tile_m < 64  # so few rows take no product of Blackwell's own
        and not device.interpreting()
    )
    arch = 90 if widens_once else arch
    rank, rope_dim = spec.v_head_dim, spec.head_dim - spec.v_head_dim
    return {
        "NUM_HEADS": spec.num_q_heads,
        "TILE_H": triton.next_power_of_2(spec.num_q_heads),
        "RANK": rank,
        "ROPE_DIM": rope_dim,
        "TILE_R": padded_head_dim(rank),
        "TILE_DR": padded_head_dim(rope_dim),
        "BLOCK_SIZE": spec.block_size,
        "KIND": cache_kind(spec.cache_dtype, arch),
        "WIDENS_ONCE": widens_once,
        "TILE_B": TILE_B,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
