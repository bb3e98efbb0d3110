"""Attention over latents on Hopper: which calls its own kernels take, and the call itself.

The contract is that of `kernels.triton.latent.launch`. There are two kernels, `mla_decode_kernel`
for latents of 16 bits and `mla_bytes_kernel` for those of 8; they share their cut of the work, and
the merge of what that cut into parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.device.byte_operands import E4M3, INT8
from tilewise.kernels.gluon.device.warpgroup import LOG2E
from tilewise.kernels.gluon.host.descriptors import addressable, descriptor
from tilewise.kernels.gluon.host.launch import launch as start
from tilewise.kernels.gluon.latent.bytes.kernel import Variant as BytesVariant
from tilewise.kernels.gluon.latent.bytes.kernel import mla_bytes_kernel
from tilewise.kernels.gluon.latent.kernel import Variant, mla_decode_kernel
from tilewise.kernels.gluon.latent.merge import COLUMNS, mla_merge_kernel
from tilewise.kernels.gluon.latent.share import KEYS, ROWS
from tilewise.kernels.gluon.latent.tiles import STAGES
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles.paged import TileConfig

__all__ = ["launch", "tile_configs", "why_not"]

_RANK, _ROPE_DIM = 512, 64
_WIDTHS = (256, 128, 64)  # of channels that are loaded at once
_BYTE_WIDTH = 128  # of 8 bits
_KINDS = {torch.int8: INT8.value, torch.float8_e4m3fn: E4M3.value}
# Rows of a tile of the kernel for 8 bits, and how many tiles of keys fit beside their q.
_BYTE_STAGES = {16: 5, 32: 4, 64: 3}
# Of a thread that sums o, and of one that loads.
_BYTE_REGISTERS = {16: (136, 56), 32: (136, 56), 64: (176, 24)}
# Blocks of which a tile takes several.
_SMALL_BLOCKS = (16, 32)
# New tokens of a run: longer ones are prompts, which attend in their expanded form.
_LONGEST_RUN = 8
_LEAST_TILES = 2  # a share of 128 keys: less is all start and end
_MERGE_PROGRAMS = 2048
_MOST_PARTS = 128  # merged at once: 128 x 64 float32 are 64 registers a thread


class _Work(NamedTuple):
    """What both kernels are given."""

    shares: int
    row_tiles: int
    outputs: tuple[Tensor, ...]  # o, lse, and the parts and the plan of the merge
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor


def why_not(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when one can."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    arch = device.arch_of(torch.device("cuda"))
    if arch // 10 != 9:
        return f"needs a Hopper GPU (compute capability 9.x), got {arch // 10}.{arch % 10}"
    return why_not_on_hopper(spec)


def why_not_on_hopper(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run `spec` on any Hopper GPU, or return None when one can."""
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype != spec.dtype and spec.cache_dtype not in _KINDS:
        return f"the cache must have the dtype of the queries or 8 bits, got {spec.cache_dtype}"
    widths = (spec.v_head_dim, spec.head_dim - spec.v_head_dim)
    if widths != (_RANK, _ROPE_DIM):
        return f"R and Dr must be {_RANK} and {_ROPE_DIM}, got {widths[0]} and {widths[1]}"
    if spec.block_size % KEYS.value != 0 and spec.block_size not in _SMALL_BLOCKS:
        return f"block_size must be 16, 32 or a multiple of {KEYS.value}, got {spec.block_size}"
    if spec.max_seqlen_q > _LONGEST_RUN:
        return f"max_seqlen_q must be at most {_LONGEST_RUN}, got {spec.max_seqlen_q}"
    if spec.batch_invariant:
        return "batch_invariant: shares of keys depend on the other sequences"
    if spec.softmax_scale <= 0.0:
        return f"softmax_scale must be positive, got {spec.softmax_scale}"
    return None


def _run_rows_of(spec: PagedSpec) -> int:
    """Return the rows of a run, new tokens times heads, as 16, 32 or, for more, 64."""
    rows = max(1, spec.max_seqlen_q) * spec.num_q_heads
    return 16 if rows <= 16 else 32 if rows <= 32 else ROWS.value


def _rows_of(spec: PagedSpec) -> int:
    """Return the rows of a tile: products of 8 bits are as narrow as few rows allow."""
    return _run_rows_of(spec) if spec.cache_dtype in _KINDS else ROWS.value


def tile_configs(spec: PagedSpec) -> dict[str, TileConfig]:
    """Return the tiles of the kernel of `spec`."""
    rows = _rows_of(spec)
    if spec.cache_dtype in _KINDS:
        return {"split": TileConfig(rows, KEYS.value, 13, _BYTE_STAGES[rows])}
    return {"split": TileConfig(rows, KEYS.value, 12, STAGES.value)}


def launch(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    latent_scale: Tensor | None = None,
    publish: int = 2,
    prefetch: int = 1,
    registers: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o (T, Hq, R) in the dtype of the queries and lse (Hq, T) float32.

    Rows past cu_seqlens_q[B] get o = 0 and lse = -inf.

    Args:
        latent_scale: float32 (num_blocks, block_size, 2), of an 8-bit cache.
        publish, prefetch, registers: see the kernels' `Variant`, for tuning.
    """
    tokens, heads, where = spec.num_tokens, spec.num_q_heads, q_latent.device
    o = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=where)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=where)
    if tokens == 0:
        return o, lse
    if spec.num_seqs == 0 or latent_cache.numel() == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    longest = max(1, spec.max_seqlen_q)
    tile_rows = _rows_of(spec)
    row_tiles = -(-longest * heads // tile_rows)
    shares = max(1, device.sm_count_of(where) // row_tiles)
    parts = (spec.num_seqs + shares) * row_tiles * tile_rows
    part_o = torch.empty((parts, _RANK), dtype=torch.float32, device=where)
    part_lse = torch.empty((parts,), dtype=torch.float32, device=where)
    plan = torch.empty((spec.num_seqs, 2), dtype=torch.int32, device=where)
    starts = cu_seqlens_q.contiguous()
    work = _Work(
        shares, row_tiles, (o, lse, part_o, part_lse, plan),
        block_table.contiguous(), seqlens_k.contiguous(), starts,
    )  # fmt: skip
    if latent_scale is None:
        box = min(spec.block_size, KEYS.value)
        variant = Variant(
            spec.block_size, box, _run_rows_of(spec), longest > 1, publish, prefetch,
            registers or 160,
        )  # fmt: skip
        _start_wide(q_latent, q_rope, latent_cache, spec, work, variant)
    else:
        bytes_variant = BytesVariant(
            spec.block_size, min(spec.block_size, KEYS.value), tile_rows, _BYTE_STAGES[tile_rows],
            _KINDS[spec.cache_dtype], *_BYTE_REGISTERS[tile_rows],
        )  # fmt: skip
        _start_bytes(q_latent, q_rope, latent_cache, latent_scale, spec, work, bytes_variant)
    runs = spec.num_seqs * longest
    groups = min(max(1, _MERGE_PROGRAMS // runs), heads * _RANK // COLUMNS)
    at_once = min(_MOST_PARTS, 2 << (shares // spec.num_seqs).bit_length())
    start(
        mla_merge_kernel, runs * groups, part_o, part_lse, plan, starts,
        o, lse, spec.num_seqs, tokens, heads, row_tiles, longest, groups,
        WIDTH=_RANK, COLUMNS=COLUMNS, ROWS=tile_rows, PARTS=at_once,
    )  # fmt: skip
    return o, lse


def _start_wide(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    spec: PagedSpec,
    work: _Work,
    variant: Variant,
) -> None:
    """Start the kernel for latents of 16 bits."""
    # Named, because a descriptor does not keep the memory of a copy alive.
    rows, rope_rows = (addressable(x.flatten(0, 1).unsqueeze(1)) for x in (q_latent, q_rope))
    cache = addressable(latent_cache.unsqueeze(2))
    start(
        mla_decode_kernel, work.shares * work.row_tiles,
        *(descriptor(rows, variant.q_box, width) for width in _WIDTHS[:2]),
        descriptor(rope_rows, variant.q_box, _ROPE_DIM),
        *(descriptor(cache, variant.box, width) for width in _WIDTHS),
        *work.outputs, cache, work.block_table, work.seqlens_k, work.cu_seqlens_q,
        cache.stride(0), cache.stride(1), work.block_table.shape[1],
        spec.num_seqs, spec.num_tokens, spec.num_q_heads, work.row_tiles, _LEAST_TILES,
        spec.softmax_scale * LOG2E.value, variant=variant,
    )  # fmt: skip


def _start_bytes(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    latent_scale: Tensor,
    spec: PagedSpec,
    work: _Work,
    variant: BytesVariant,
) -> None:
    """Start the kernel for latents of 8 bits."""
    rows, rope_rows = (_sixteens(x.flatten(0, 1)) for x in (q_latent, q_rope))
    cache = addressable(latent_cache.view(torch.int8).unsqueeze(2))
    scale = latent_scale
    if scale.stride()[1:] != (2, 1):
        scale = scale.contiguous()
    start(
        mla_bytes_kernel, work.shares * work.row_tiles,
        *(descriptor(cache, variant.box, width) for width in (_BYTE_WIDTH, _ROPE_DIM)),
        scale, scale.stride(0),
        rows, rope_rows, rows.stride(0) // 16, rope_rows.stride(0) // 16,
        *work.outputs, work.block_table, work.seqlens_k, work.cu_seqlens_q,
        work.block_table.shape[1],
        spec.num_seqs, spec.num_tokens, spec.num_q_heads, work.row_tiles, _LEAST_TILES,
        spec.softmax_scale * LOG2E.value, variant=variant,
    )  # fmt: skip


def _sixteens(x: Tensor) -> Tensor:
    """Return x (rows, channels) with rows that are multiples of 16 elements apart."""
    return x if x.stride(1) == 1 and x.stride(0) % 16 == 0 else x.contiguous()
