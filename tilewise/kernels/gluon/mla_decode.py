"""Attention over latents on Hopper: which calls its own kernel takes, and the call itself.

The contract is that of `kernels.triton.mla_decode`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon._descriptors import addressable, descriptor
from tilewise.kernels.gluon._launch import launch as start
from tilewise.kernels.gluon._warpgroup import LOG2E
from tilewise.kernels.gluon.mla_decode_kernel import Variant, mla_decode_kernel
from tilewise.kernels.gluon.mla_decode_merge import COLUMNS, mla_merge_kernel
from tilewise.kernels.gluon.mla_decode_share import KEYS, ROWS
from tilewise.kernels.gluon.mla_decode_tiles import STAGES
from tilewise.kernels.spec import PagedSpec
from tilewise.kernels.tiles import TileConfig

__all__ = ["launch", "tile_configs", "why_not"]

_RANK, _ROPE_DIM = 512, 64
_WIDTHS = (256, 128, 64)  # of channels that are loaded at once
# New tokens of a run: longer ones are prompts, which attend in their expanded form.
_LONGEST_RUN = 8
_LEAST_TILES = 2  # a share of 128 keys: less is all start and end
_MERGE_PROGRAMS = 2048
_MOST_PARTS = 128  # merged at once: 128 x 64 float32 are 64 registers a thread


def why_not(spec: PagedSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    arch = device.arch_of(torch.device("cuda"))
    if arch // 10 != 9:
        return f"needs a Hopper GPU (compute capability 9.x), got {arch // 10}.{arch % 10}"
    return why_not_on_hopper(spec)


def why_not_on_hopper(spec: PagedSpec) -> str | None:
    """Say why this kernel cannot run `spec` on any Hopper GPU, or return None when it can."""
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    if spec.cache_dtype != spec.dtype:
        return f"the cache must have the dtype of the queries, got {spec.cache_dtype}"
    widths = (spec.v_head_dim, spec.head_dim - spec.v_head_dim)
    if widths != (_RANK, _ROPE_DIM):
        return f"R and Dr must be {_RANK} and {_ROPE_DIM}, got {widths[0]} and {widths[1]}"
    if spec.block_size % KEYS.value != 0:
        return f"block_size must be a multiple of {KEYS.value}, got {spec.block_size}"
    if spec.max_seqlen_q > _LONGEST_RUN:
        return f"max_seqlen_q must be at most {_LONGEST_RUN}, got {spec.max_seqlen_q}"
    if spec.batch_invariant:
        return "batch_invariant: shares of keys depend on the other sequences"
    if spec.softmax_scale <= 0.0:
        return f"softmax_scale must be positive, got {spec.softmax_scale}"
    return None


def tile_configs(spec: PagedSpec) -> dict[str, TileConfig]:
    """Return the tiles of the kernel, the same for every `spec`."""
    return {"split": TileConfig(ROWS.value, KEYS.value, 12, STAGES.value)}


def launch(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    latent_scale: None = None,
    publish: int = 2,
    prefetch: int = 1,
    registers: int = 160,
) -> tuple[Tensor, Tensor]:
    """Return o (T, Hq, R) in the dtype of the queries and lse (Hq, T) float32.

    Rows past cu_seqlens_q[B] get o = 0 and lse = -inf.

    Args:
        latent_scale: None, as no 8-bit cache gets here.
        publish, prefetch, registers: see `mla_decode_kernel.Variant`, for tuning.
    """
    tokens, heads, where = spec.num_tokens, spec.num_q_heads, q_latent.device
    o = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=where)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=where)
    if tokens == 0:
        return o, lse
    if spec.num_seqs == 0 or latent_cache.numel() == 0:
        return o.zero_(), lse.fill_(float("-inf"))
    longest = max(1, spec.max_seqlen_q)
    row_tiles = -(-longest * heads // ROWS.value)
    shares = max(1, device.sm_count_of(where) // row_tiles)
    parts = (spec.num_seqs + shares) * row_tiles * ROWS.value
    part_o = torch.empty((parts, _RANK), dtype=torch.float32, device=where)
    part_lse = torch.empty((parts,), dtype=torch.float32, device=where)
    plan = torch.empty((spec.num_seqs, 2), dtype=torch.int32, device=where)
    # Named, because a descriptor does not keep the memory of a copy alive.
    rows, rope_rows = (addressable(x.flatten(0, 1).unsqueeze(1)) for x in (q_latent, q_rope))
    cache = addressable(latent_cache.unsqueeze(2))
    variant = Variant(spec.block_size, longest > 1, publish, prefetch, registers)
    start(
        mla_decode_kernel, shares * row_tiles,
        *(descriptor(rows, ROWS.value, width) for width in _WIDTHS[:2]),
        descriptor(rope_rows, ROWS.value, _ROPE_DIM),
        *(descriptor(cache, KEYS.value, width) for width in _WIDTHS),
        o, lse, part_o, part_lse, plan,
        cache, block_table.contiguous(), seqlens_k.contiguous(), cu_seqlens_q.contiguous(),
        cache.stride(0), cache.stride(1), block_table.shape[1],
        spec.num_seqs, tokens, heads, row_tiles, _LEAST_TILES,
        spec.softmax_scale * LOG2E.value, variant=variant,
    )  # fmt: skip
    runs = spec.num_seqs * longest
    groups = min(max(1, _MERGE_PROGRAMS // runs), heads * _RANK // COLUMNS)
    at_once = min(_MOST_PARTS, 2 << (shares // spec.num_seqs).bit_length())
    start(
        mla_merge_kernel, runs * groups, part_o, part_lse, plan, cu_seqlens_q.contiguous(),
        o, lse, spec.num_seqs, tokens, heads, row_tiles, longest, groups,
        WIDTH=_RANK, COLUMNS=COLUMNS, ROWS=ROWS.value, PARTS=at_once,
    )  # fmt: skip
    return o, lse
