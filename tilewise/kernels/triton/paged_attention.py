"""Paged attention of any batch: prompt chunks, short runs and single tokens side by side.

what     o = softmax(scale * q k^T) v of packed rows over the cached keys of their own sequence,
         causal among the new tokens; keys found through a block table
grid     (tiles * Hk,): tiles of TILE_M rows of one sequence, last tile first because it sees the
         most keys, heads fastest; short runs go to `paged_decode`, which also splits their keys
program  finds its (sequence, tile) from the running count of tiles per sequence, loops over the
         keys that every row sees without a mask, then over those at an edge with one
traffic  q and o once; K and V of a sequence once per tile of rows, mostly from L2
numerics as in `_paged`
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device, tiles
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import TileConfig, padded_head_dim
from tilewise.kernels.triton import paged_decode
from tilewise.kernels.triton._paged import (
    LOWEST,
    add_sink,
    attend_keys,
    clear_padding_rows,
    normalise,
)
from tilewise.kernels.triton._quantise import FLOAT, Scales, as_bytes
from tilewise.kernels.triton._tile import LOG2E

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256  # a tile of keys of this width still fits shared memory twice
TILE_B = 128  # sequences scanned at once


@triton.jit
def _find_tile(
    cu_seqlens_q_ptr, tile, num_seqs, min_run,
    GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_B: tl.constexpr,
):  # fmt: skip
    """Return (sequence, tile within it) of a tile of rows; sequence = B past the last one."""
    found = 0
    first_tile = 0
    tiles_before = 0
    for base in range(0, num_seqs, TILE_B):
        seq = base + tl.arange(0, TILE_B)
        start = tl.load(cu_seqlens_q_ptr + seq, mask=seq < num_seqs, other=0)
        stop = tl.load(cu_seqlens_q_ptr + seq + 1, mask=seq < num_seqs, other=0)
        tiles = ((stop - start) * GROUP + TILE_M - 1) // TILE_M
        tiles = tl.where(stop - start >= min_run, tiles, 0)
        ends = tiles_before + tl.cumsum(tiles, 0)
        passed = (ends <= tile) & (seq < num_seqs)
        found += tl.sum(passed.to(tl.int32))
        first_tile = tl.maximum(first_tile, tl.max(tl.where(passed, ends, 0)))
        tiles_before = tl.max(ends)
    return found, tile - first_tile


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "min_run", "num_tiles"])
def _rows_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    block_table_ptr, seqlens_k_ptr, cu_seqlens_q_ptr, slopes_ptr, sinks_ptr, k_scale_ptr,
    v_scale_ptr, stride_ksb, stride_ksp, stride_ksh, stride_vsb, stride_vsp, stride_vsh,
    stride_qt, stride_qh, stride_kb, stride_kp, stride_kh, stride_vb, stride_vp, stride_vh,
    stride_ot, stride_oh, stride_lh, stride_table,
    num_seqs, num_tokens, min_run, num_tiles, scale_log2, softcap_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_G: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, TILE_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr, WINDOW_LEFT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr,
    KIND: tl.constexpr,
    TILE_B: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % NUM_KV_HEADS
    tile = num_tiles - 1 - tl.program_id(0) // NUM_KV_HEADS
    used = tl.load(cu_seqlens_q_ptr + num_seqs)
    clear_padding_rows(o_ptr, lse_ptr, stride_ot, stride_oh, stride_lh, used + tile, num_tiles,
                       num_tokens, head, GROUP, TILE_G, V_HEAD_DIM, TILE_DV)  # fmt: skip
    seq, tile = _find_tile(cu_seqlens_q_ptr, tile, num_seqs, min_run, GROUP, TILE_M, TILE_B)
    if seq >= num_seqs:
        return
    start = tl.load(cu_seqlens_q_ptr + seq)
    run = tl.load(cu_seqlens_q_ptr + seq + 1) - start
    seqlen_k = tl.load(seqlens_k_ptr + seq)

    row = tile * TILE_M + tl.arange(0, TILE_M)
    token = row // GROUP
    q_head = head * GROUP + row % GROUP
    in_run = token < run
    pos = seqlen_k - run + token
    offs_d = tl.arange(0, TILE_D)
    offs_dv = tl.arange(0, TILE_DV)
    q_row = q_ptr + (start + token).to(tl.int64) * stride_qt + q_head * stride_qh
    q_inside = in_run[:, None] & (offs_d[None, :] < HEAD_DIM)
    q = tl.load(q_row[:, None] + offs_d[None, :], mask=q_inside, other=0.0)
    if KIND == FLOAT and q_ptr.dtype.element_ty != k_ptr.dtype.element_ty:
        q = q.to(tl.float32)
    slope = tl.zeros([TILE_M], dtype=tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes_ptr + q_head).to(tl.float32) * LOG2E
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh
    k_scale_ptr += head * stride_ksh
    v_scale_ptr += head * stride_vsh
    block_row_ptr = block_table_ptr + seq.to(tl.int64) * stride_table

    # Last keys that the first and the last row of this tile see.
    pos_first = seqlen_k - run + tile * TILE_M // GROUP
    pos_last = seqlen_k - run + tl.minimum((tile * TILE_M + TILE_M - 1) // GROUP, run - 1)
    key_hi = tl.maximum(pos_last + 1, 0)
    key_lo = 0
    clean_lo = 0
    if WINDOW_LEFT >= 0:
        key_lo = tl.maximum(pos_first - WINDOW_LEFT, 0)
        clean_lo = (tl.maximum(pos_last - WINDOW_LEFT, 0) + TILE_N - 1) // TILE_N
    first = key_lo // TILE_N
    last = (key_hi + TILE_N - 1) // TILE_N
    clean_lo = tl.minimum(clean_lo, last)
    clean_hi = tl.maximum(tl.maximum(pos_first + 1, 0) // TILE_N, clean_lo)

    acc = tl.zeros([TILE_M, TILE_DV], dtype=tl.float32)
    l = tl.zeros([TILE_M], dtype=tl.float32)
    m = tl.full([TILE_M], LOWEST, dtype=tl.float32)
    for phase in tl.static_range(3):
        # 0: tiles cut by the window's left edge; 1: tiles seen whole; 2: tiles cut by the diagonal
        if phase == 0:
            lo, hi = first, clean_lo
        elif phase == 1:
            lo, hi = clean_lo, clean_hi
        else:
            lo, hi = clean_hi, last
        if phase > 0 or WINDOW_LEFT >= 0:
            acc, l, m = attend_keys(
                q, acc, l, m, pos, slope, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, block_row_ptr,
                stride_kb, stride_kp, stride_vb, stride_vp,
                stride_ksb, stride_ksp, stride_vsb, stride_vsp, lo, hi, key_lo, key_hi,
                scale_log2, softcap_log2, HEAD_DIM, V_HEAD_DIM, TILE_D, TILE_DV, TILE_N, BLOCK_SIZE,
                SAME_STRIDES, WINDOW_LEFT, HAS_SOFTCAP, HAS_ALIBI, KIND, phase != 1)  # fmt: skip
    if HAS_SINKS:
        acc, l, m = add_sink(acc, l, m, tl.load(sinks_ptr + q_head).to(tl.float32) * LOG2E)
    o, lse = normalise(acc, l, m)

    o_row = o_ptr + (start + token).to(tl.int64) * stride_ot + q_head * stride_oh
    inside = in_run[:, None] & (offs_dv[None, :] < V_HEAD_DIM)
    tl.store(o_row[:, None] + offs_dv[None, :], o.to(o_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + q_head * stride_lh + start + token, lse, mask=in_run)


def why_not(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run a call, or return None when they can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.has_tree or spec.has_shared:
        return "tree masks and shared prefixes are not written for it yet"
    if spec.dtype not in DTYPES:
        return f"dtype of q must be float32, float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8 or float8_e4m3fn, "
            f"got {spec.cache_dtype}"
        )
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if width > MAX_HEAD_DIM:
            return f"{name} must be at most {MAX_HEAD_DIM}, got {width}"
    return None


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o (T, Hq, Dv) in the dtype of q and lse (Hq, T) float32.

    Rows past cu_seqlens_q[B] get o = 0 and lse = -inf. No synchronisation: what depends on the
    lengths is decided on the device, so that a captured CUDA graph can be replayed with others.
    """
    shape = (spec.num_tokens, spec.num_q_heads, spec.v_head_dim)
    o = torch.empty(shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((spec.num_q_heads, spec.num_tokens), dtype=torch.float32, device=q.device)
    if spec.num_tokens == 0:
        return o, lse
    work = tiles.paged_work(spec, device.arch_of(q.device), device.sm_count_of(q.device))
    scales = Scales.of(k_cache, k_scale, v_scale, lse)
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    tensors: dict[str, Any] = {
        "block_table": block_table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": cu_seqlens_q,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "scales": scales,
    }
    if work.split_run > 0:
        paged_decode.launch_decode(
            q, k_cache, v_cache, spec, o, lse, **tensors, config=work.split_config,
            plan=work.split_plan, max_run=work.split_run, clears=work.rows_config is None,
        )  # fmt: skip
    if work.rows_config is not None:
        launch_rows(q, k_cache, v_cache, spec, o, lse, work.rows_config, work.split_run, **tensors)
    return o, lse


def launch_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    o: Tensor,
    lse: Tensor,
    config: TileConfig,
    split_run: int,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    scales: Scales,
) -> None:
    """Write the rows of sequences with more than split_run new tokens, and the padding rows."""
    group = spec.group_size
    # Every sequence wastes less than one tile, so this bounds the tiles of any cu_seqlens_q.
    num_tiles = spec.num_tokens * group // config.tile_m + spec.num_seqs
    _rows_kernel[(num_tiles * spec.num_kv_heads,)](
        q, k_cache, v_cache, o, lse, block_table, seqlens_k, cu_seqlens_q,
        alibi_slopes if alibi_slopes is not None else lse, sinks if sinks is not None else lse,
        *scales.arguments,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        o.stride(0), o.stride(1), lse.stride(0), block_table.stride(0),
        spec.num_seqs, spec.num_tokens, split_run + 1, num_tiles,
        spec.softmax_scale * LOG2E.value, spec.softcap * LOG2E.value,
        NUM_KV_HEADS=spec.num_kv_heads, GROUP=group, TILE_G=triton.next_power_of_2(group),
        HEAD_DIM=spec.head_dim, V_HEAD_DIM=spec.v_head_dim,
        TILE_D=padded_head_dim(spec.head_dim), TILE_DV=padded_head_dim(spec.v_head_dim),
        BLOCK_SIZE=spec.block_size, SAME_STRIDES=k_cache.stride() == v_cache.stride(),
        WINDOW_LEFT=spec.window_left, HAS_SOFTCAP=spec.softcap > 0,
        HAS_ALIBI=alibi_slopes is not None, HAS_SINKS=sinks is not None, KIND=scales.kind,
        TILE_B=TILE_B,
        TILE_M=config.tile_m, TILE_N=config.tile_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
