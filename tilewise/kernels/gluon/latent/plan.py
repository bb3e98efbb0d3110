"""Attention over latents on Hopper: which calls its own kernels take, and what they launch.

The contract is that of `kernels.triton.latent.plan`. There are two kernels, `mla_decode_kernel`
for latents of 16 bits and `mla_bytes_kernel` for those of 8; they share their cut of the work, and
the merge of what that cut into parts.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.device.byte_operands import E4M3, INT8
from tilewise.kernels.gluon.device.warpgroup import LOG2E
from tilewise.kernels.gluon.latent.bytes.kernel import Variant as BytesVariant
from tilewise.kernels.gluon.latent.bytes.kernel import mla_bytes_kernel
from tilewise.kernels.gluon.latent.kernel import Variant, mla_decode_kernel
from tilewise.kernels.gluon.latent.merge import COLUMNS, mla_merge_kernel
from tilewise.kernels.gluon.latent.share import KEYS, ROWS
from tilewise.kernels.gluon.latent.tiles import STAGES
from tilewise.kernels.host.descriptors import descriptor
from tilewise.kernels.host.plan import LaunchPlan, Maker
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import LatentTensors, PagedSpec
from tilewise.kernels.tiles.paged import TileConfig

__all__ = ["made_fwd", "plan_fwd", "why_not"]

_RANK, _ROPE_DIM = 512, 64
_TABLE, _SCALE = map(LatentTensors._fields.index, ("block_table", "latent_scale"))
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
    """The cut of a call's work and its tensors, which `mla_decode_kernel` and `mla_bytes_kernel`
    take alike.

    Attributes:
        shares: the number of shares into which all keys are cut.
        row_tiles: the number of tiles of rows of a sequence.
        outputs: o and lse, the partial o and lse of shares, and the plan of their merge.
    """

    shares: int
    row_tiles: int
    outputs: tuple[Tensor, ...]


def why_not(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run `spec` on the GPU at hand, which must be a Hopper, or return
    None when one can; `why_not_on_hopper` has the other rules."""
    return device.why_not_hopper(spec.device_type, needs_gpu=True) or why_not_on_hopper(spec)


def why_not_on_hopper(spec: PagedSpec) -> str | None:
    """Say why these kernels cannot run `spec` on any Hopper GPU, or return None when one can:
    16-bit queries, a cache of their dtype or of 8 bits, R 512 and Dr 64, blocks of 16, 32 or
    multiples of 64, runs of at most 8 tokens, no batch invariance, and a positive scale."""
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
    """Return the rows of a tile: 64, or 16 or 32 where an 8-bit cache has a run that small."""
    return _run_rows_of(spec) if spec.cache_dtype in _KINDS else ROWS.value


def _tiles_of(spec: PagedSpec) -> dict[str, TileConfig]:
    """Return the tile sizes of the kernel that runs `spec`, under the key "split"."""
    rows = _rows_of(spec)
    if spec.cache_dtype in _KINDS:
        return {"split": TileConfig(rows, KEYS.value, 13, _BYTE_STAGES[rows])}
    return {"split": TileConfig(rows, KEYS.value, 12, STAGES.value)}


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return the plan of attention over a paged cache of latents, or why these kernels cannot run
    the call.

    Its results are o (T, Hq, R) in the dtype of the queries and lse (Hq, T) float32. Rows past
    cu_seqlens_q[B] get o = 0 and lse = -inf.
    """
    reason = why_not(call.spec)
    return Refusal(reason) if reason is not None else made_fwd(call)


def made_fwd(
    call: Call, publish: int = 2, prefetch: int = 1, registers: int | None = None
) -> LaunchPlan:
    """Return the plan of a call that `plan_fwd` would not refuse.

    Args:
        publish, prefetch, registers: see the kernels' `Variant`, for tuning.
    """
    spec, maker = call.spec, Maker(call, LatentTensors._fields)
    given = LatentTensors(*maker.inputs)
    tokens, heads, tile_rows = spec.num_tokens, spec.num_q_heads, _rows_of(spec)
    shape = given.q_latent.shape
    tiles = functools.partial(_tiles_of, spec)
    if tokens == 0:
        o, lse = maker.empty(shape, spec.dtype), maker.empty((heads, tokens), torch.float32)
        return maker.finish((o, lse), tiles)
    if spec.num_seqs == 0 or given.latent_cache.numel() == 0:
        o = maker.full(shape, 0.0, spec.dtype)
        lse = maker.full((heads, tokens), float("-inf"), torch.float32)
        return maker.finish((o, lse), tiles)
    o, lse = maker.empty(shape, spec.dtype), maker.empty((heads, tokens), torch.float32)
    given = given._replace(
        block_table=maker.dense(given.block_table),
        seqlens_k=maker.dense(given.seqlens_k),
        cu_seqlens_q=maker.dense(given.cu_seqlens_q),
    )
    longest = max(1, spec.max_seqlen_q)
    row_tiles = -(-longest * heads // tile_rows)
    shares = max(1, device.sm_count_of(maker.device) // row_tiles)
    parts = (spec.num_seqs + shares) * row_tiles * tile_rows
    part_o, part_lse = (maker.empty(s, torch.float32) for s in ((parts, _RANK), (parts,)))
    plan = maker.empty((spec.num_seqs, 2), torch.int32)
    work = _Work(shares, row_tiles, (o, lse, part_o, part_lse, plan))
    if given.latent_scale is None:
        box = min(spec.block_size, KEYS.value)
        variant = Variant(
            spec.block_size,
            box,
            _run_rows_of(spec),
            longest > 1,
            publish,
            prefetch,
            registers or 160,
        )
        _start_wide(maker, given, spec, work, variant)
    else:
        bytes_variant = BytesVariant(
            spec.block_size,
            min(spec.block_size, KEYS.value),
            tile_rows,
            _BYTE_STAGES[tile_rows],
            _KINDS[spec.cache_dtype],
            *_BYTE_REGISTERS[tile_rows],
        )
        _start_bytes(maker, given, spec, work, bytes_variant)
    runs = spec.num_seqs * longest
    groups = min(max(1, _MERGE_PROGRAMS // runs), heads * _RANK // COLUMNS)
    at_once = min(_MOST_PARTS, 2 << (shares // spec.num_seqs).bit_length())
    maker.launch(
        mla_merge_kernel,
        runs * groups,
        part_o,
        part_lse,
        plan,
        given.cu_seqlens_q,
        o,
        lse,
        spec.num_seqs,
        tokens,
        heads,
        row_tiles,
        longest,
        groups,
        WIDTH=_RANK,
        COLUMNS=COLUMNS,
        ROWS=tile_rows,
        PARTS=at_once,
    )
    return maker.finish((o, lse), tiles)


def _start_wide(
    maker: Maker, given: LatentTensors, spec: PagedSpec, work: _Work, variant: Variant
) -> None:
    """Add to the plan the launch of the kernel for latents of 16 bits."""
    rows, rope_rows = (
        maker.addressable(_flat(maker, x).unsqueeze(1)) for x in (given.q_latent, given.q_rope)
    )
    cache = maker.addressable(given.latent_cache.unsqueeze(2))
    maker.launch(
        mla_decode_kernel,
        work.shares * work.row_tiles,
        *(descriptor(rows, variant.q_box, width) for width in _WIDTHS[:2]),
        descriptor(rope_rows, variant.q_box, _ROPE_DIM),
        *(descriptor(cache, variant.box, width) for width in _WIDTHS),
        *work.outputs,
        cache,
        *given[_TABLE:_SCALE],
        cache.stride(0),
        cache.stride(1),
        given.block_table.shape[1],
        spec.num_seqs,
        spec.num_tokens,
        spec.num_q_heads,
        work.row_tiles,
        _LEAST_TILES,
        cache.shape[0],
        spec.softmax_scale * LOG2E.value,
        variant=variant,
    )


def _start_bytes(
    maker: Maker, given: LatentTensors, spec: PagedSpec, work: _Work, variant: BytesVariant
) -> None:
    """Add to the plan the launch of the kernel for latents of 8 bits."""
    rows, rope_rows = (_sixteens(maker, _flat(maker, x)) for x in (given.q_latent, given.q_rope))
    cache = maker.addressable(given.latent_cache.view(torch.int8).unsqueeze(2))
    scale = given.latent_scale
    if scale.stride()[1:] != (2, 1):
        scale = maker.copy(scale)
    maker.launch(
        mla_bytes_kernel,
        work.shares * work.row_tiles,
        *(descriptor(cache, variant.box, width) for width in (_BYTE_WIDTH, _ROPE_DIM)),
        scale,
        scale.stride(0),
        rows,
        rope_rows,
        rows.stride(0) // 16,
        rope_rows.stride(0) // 16,
        *work.outputs,
        *given[_TABLE:_SCALE],
        given.block_table.shape[1],
        spec.num_seqs,
        spec.num_tokens,
        spec.num_q_heads,
        work.row_tiles,
        _LEAST_TILES,
        cache.shape[0],
        spec.softmax_scale * LOG2E.value,
        variant=variant,
    )


def _flat(maker: Maker, x: Tensor) -> Tensor:
    """Return queries (T, Hq, channels) as (T * Hq, channels), copied where heads lie otherwise."""
    tokens, heads, channels = x.shape
    if tokens > 1 and heads > 1 and x.stride(0) != heads * x.stride(1):
        x = maker.copy(x)
    return x.view(tokens * heads, channels)


def _sixteens(maker: Maker, x: Tensor) -> Tensor:
    """Return x (rows, channels) with neighbouring channels and rows a multiple of 16 elements
    apart, copied if it lies otherwise."""
    return x if x.stride(1) == 1 and x.stride(0) % 16 == 0 else maker.copy(x)
