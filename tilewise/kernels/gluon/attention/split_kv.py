"""Few queries over many keys: dense calls that the paged kernels compute, which split keys.

The Hopper kernel gives every head and 128 rows of queries a CTA of its own. Where queries are few,
such CTAs are few or nearly empty. The paged kernels have the query heads of a group in one tile and
split the keys of a sequence over CTAs; to them k and v of a dense batch are a cache whose blocks
lie one after the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.lasting import made_once
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, PagedSpec, PagedTensors
from tilewise.kernels.tiles.paged import TileConfig, paged_work
from tilewise.kernels.tiles.paged_rows import extend_config, plan_rows
from tilewise.kernels.triton.paged import plan as paged_attention
from tilewise.kernels.triton.paged.quantise import Scales
from tilewise.kernels.triton.paged.rows import launch_rows

__all__ = ["add_split_kv", "blocks_of", "is_faster", "tile_config_split_kv"]

_MAX_ROWS = 128  # queries of a sequence: a tile of the other kernel
_BLOCKS = (128, 64, 32, 16)
_LSE_TILE = 1024
_RUN, _ALIGNED = 1024, 4  # lengths of a tensor, of which each starts at a multiple of 16 bytes
# What decides which kernels are faster: seconds on one H200, bf16, D 64 and 128, 2,048 to 65,536
# keys (2026-11-22). A wave of tiles with 64 rows takes so long for each key, and longer for each
# channel; with 128 rows a quarter more. The paged kernels take so long for each row and key, and
# for their merge, and on the host longer than most calls do on the GPU.
_TILE_KEY, _TILE_CHANNEL, _TILE_BOTH, _TILE_START = 5.7e-9, 1.33e-11, 1.25, 5e-6
_PACKED_KEY, _PACKED_CHANNEL, _PACKED_START = 0.77e-12, 1.64e-15, 15e-6
_BYTES, _PACKED_TRAFFIC = 4.2e12, 1.15  # a second; what splits read more slowly
_HOST = 50e-6


class Blocks(NamedTuple):
    """How k and v of a dense batch are read in place as a paged cache."""

    size: int
    step: int


def is_faster(spec: AttentionSpec, num_sms: int) -> bool:
    """Say whether the paged kernels can compute the dense call `spec` and would take less time, by
    a model of measured times.

    They can if it has 1 to 128 queries, 128 keys or more, and no window other than causal, no
    packed sequences, bias, ALiBi, mask, dropout or row maxima.
    """
    rows = spec.max_seqlen_q
    if not 1 <= rows <= _MAX_ROWS or spec.max_seqlen_k < _BLOCKS[0]:
        return False
    if spec.is_varlen or spec.has_bias or spec.has_alibi or spec.mask_tile or spec.dropout_p > 0:
        return False
    if spec.needs_max:
        return False
    if spec.window_left >= 0 or spec.window_right > 0:
        return False
    width = spec.head_dim + spec.v_head_dim
    keys = spec.batch * spec.num_kv_heads * spec.max_seqlen_k
    moving = keys * width * spec.dtype.itemsize / _BYTES
    waves = -(-spec.batch * spec.num_q_heads // num_sms)
    wave = spec.max_seqlen_k * (_TILE_KEY + _TILE_CHANNEL * width)
    wave *= 1 if rows <= _MAX_ROWS // 2 else _TILE_BOTH
    packed = max(16, -(-rows * spec.group_size // 16) * 16)
    products = packed * keys * (_PACKED_KEY + _PACKED_CHANNEL * width)
    split = _PACKED_START + max(products, moving * _PACKED_TRAFFIC)
    return max(split, _HOST) < max(waves * wave + _TILE_START, moving)


def blocks_of(k: Tensor, v: Tensor) -> Blocks | None:
    """Return the largest Blocks as which k (B, S, Hk, D) and v (B, S, Hk, Dv) can be read in place,
    or None if their strides allow none."""
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        return None
    for size in _BLOCKS:
        if k.shape[0] == 1:
            return Blocks(size, 0)
        steps = [(x.stride(0), size * x.stride(1)) for x in (k, v)]
        if all(inner > 0 and outer % inner == 0 for outer, inner in steps):
            (k_outer, k_inner), (v_outer, v_inner) = steps
            if k_outer // k_inner == v_outer // v_inner:
                return Blocks(size, k_outer // k_inner)
    return None


def tile_config_split_kv(spec: AttentionSpec, arch: int, num_sms: int) -> TileConfig:
    """Return the tile sizes with which the paged kernels compute the dense call `spec`."""
    paged = _paged_spec(spec, Blocks(_BLOCKS[0], 0))
    if not paged.causal:
        return extend_config(paged, arch)
    work = paged_work(paged, arch, num_sms)
    return work.rows_config or work.split_config


def add_split_kv(
    maker: Maker, spec: AttentionSpec, tensors: AttentionTensors, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launches of the paged kernels for a dense forward pass with `maker`;
    return o (B, Sq, Hq, Dv) and lse float32 (B, Hq, Sq)."""
    q, k, v = tensors[:3]
    batch, rows, heads = spec.batch, spec.max_seqlen_q, spec.num_q_heads
    paged = _paged_spec(spec, blocks)

    def metadata(index: int) -> Tensor:
        def make(stream: int = 0) -> Tensor:
            return _metadata(batch, rows, spec.max_seqlen_k, blocks, maker.device)[index]

        x = make()
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return maker.ask(make, like)

    table, lengths, starts = (metadata(index) for index in range(3))
    if tensors.seqlens_k is not None:
        lengths = tensors.seqlens_k
        if spec.max_seqlen_k % blocks.size > 0:  # the last block has fewer rows than others
            cut = functools.partial(torch.clamp, max=spec.max_seqlen_k)
            like = torch.empty(lengths.shape, dtype=lengths.dtype, device="meta")
            lengths = maker.compute(cut, lengths, like=like)
    if q.stride(-1) != 1 or not _is_one_row_after_another(q):
        q = maker.copy(q)
    packed_q = q.view(batch * rows, heads, spec.head_dim)
    # Kernels read strides and the number of blocks, none of which holds a row that is not there.
    num_blocks = (batch - 1) * blocks.step + -(-spec.max_seqlen_k // blocks.size)
    k_cache, v_cache = (
        x.as_strided((num_blocks, 1, *x.shape[2:]), (blocks.size * x.stride(1), *x.stride()[1:]))
        for x in (k, v)
    )
    given = {
        "block_table": table,
        "seqlens_k": lengths,
        "cu_seqlens_q": starts,
        "sinks": tensors.sinks,
    }
    if paged.causal:
        tensors_of_paged = PagedTensors(packed_q, k_cache, v_cache, **given)
        (o, lse), _ = paged_attention.add_fwd(maker, paged, tensors_of_paged)
    else:
        shape = (*packed_q.shape[:-1], spec.v_head_dim)
        o = maker.empty(shape, q.dtype)
        lse = maker.empty((heads, batch * rows), torch.float32)
        arch, num_sms = device.arch_of(maker.device), device.sm_count_of(maker.device)
        plan = plan_rows(paged, extend_config(paged, arch), num_sms)
        scales = Scales.of(k_cache, None, None, lse, arch)
        launch_rows(maker, packed_q, k_cache, v_cache, paged, o, lse, plan, scales=scales, **given)
    return o.view(batch, rows, heads, spec.v_head_dim), _by_sequence(maker, lse, batch)


def _is_one_row_after_another(q: Tensor) -> bool:
    """Whether q (B, Sq, Hq, D) can be viewed as (B * Sq, Hq, D) without a copy."""
    batch, rows = q.shape[:2]
    return batch == 1 or rows == 1 or q.stride(0) == rows * q.stride(1)


def _by_sequence(maker: Maker, lse: Tensor, batch: int) -> Tensor:
    """Return lse (Hq, B * Sq) as (B, Hq, Sq): a view if B is 1, else a copy that a launch in the
    plan makes."""
    heads, rows = lse.shape[0], lse.shape[1] // batch
    if batch == 1:
        return lse.view(1, heads, rows)
    sorted_lse = maker.empty((batch, heads, rows), lse.dtype)
    maker.launch(
        _by_sequence_kernel,
        -(-lse.numel() // _LSE_TILE),
        lse,
        sorted_lse,
        batch,
        heads,
        rows,
        TILE=_LSE_TILE,
    )
    return sorted_lse


@triton.jit(do_not_specialize=["batch", "heads", "rows"])
def _by_sequence_kernel(x_ptr, y_ptr, batch, heads, rows, TILE: tl.constexpr):
    """Copy x (heads, batch, rows) to y (batch, heads, rows)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row, head, b = at % rows, at // rows % heads, at // rows // heads
    inside = b < batch
    x = tl.load(x_ptr + (head * batch + b) * rows + row, mask=inside)
    tl.store(y_ptr + at, x, mask=inside)


def _paged_spec(spec: AttentionSpec, blocks: Blocks) -> PagedSpec:
    return PagedSpec(
        spec.device_type,
        spec.dtype,
        spec.dtype,
        spec.batch,
        spec.batch * spec.max_seqlen_q,
        spec.max_seqlen_q,
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.v_head_dim,
        blocks.size,
        -(-spec.max_seqlen_k // blocks.size),
        softmax_scale=spec.softmax_scale,
        softcap=spec.softcap,
        has_sinks=spec.has_sinks,
        causal=spec.causal or spec.max_seqlen_q == 1,
    )


def _metadata(
    batch: int, rows: int, keys: int, blocks: Blocks, where: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return int32 block_table, seqlens_k and cu_seqlens_q of a batch of equal sequences of `rows`
    queries and `keys` keys.

    The tensors are cached. The table may have more columns than there are blocks, and lengths are a
    row of a larger tensor for many lengths: while a cache grows by a key a step, few of these
    tensors are new.
    """

    def arange(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=where)

    def table() -> Tensor:
        return (arange(batch) * blocks.step)[:, None] + arange(columns)

    def lengths() -> Tensor:
        return (arange(_RUN) + first)[:, None].repeat(1, width)

    columns = 1 << (-(-keys // blocks.size) - 1).bit_length()
    first, width = keys - keys % _RUN, -(-batch // _ALIGNED) * _ALIGNED
    return (
        made_once(("table", batch, columns, blocks, where), table, where),
        made_once(("lengths", width, first, where), lengths, where)[keys - first, :batch],
        made_once(("starts", batch, rows, where), lambda: arange(batch + 1) * rows, where),
    )
