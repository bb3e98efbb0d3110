"""Launch the portable Triton attention kernels: allocate, choose tiles, fill the grid.

The contract of these functions is shared by every backend: `why_not` refuses with a reason,
`tile_config` says how a call would be cut, `launch_fwd` and `launch_bwd` run it. `launch_rows`,
`launch_dkdv` and `launch_dq` are the three steps of the backward pass, which the tuner times alone.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.tiles.attention import WIDEST, WIDEST_QK, Part, candidates
from tilewise.kernels.tiles.paged import WIDE_SHARED_MEMORY, TileConfig
from tilewise.kernels.triton.attention.bias import attention_bwd_bias_kernel
from tilewise.kernels.triton.attention.dkdv import attention_bwd_dkdv_kernel
from tilewise.kernels.triton.attention.dq import attention_bwd_dq_kernel
from tilewise.kernels.triton.attention.forward import FwdStrides, attention_fwd_kernel
from tilewise.kernels.triton.attention.geometry import (
    dense,
    extras_of,
    head_dims,
    key_heads_per_section,
    numbers_of,
    query_heads_per_section,
    row_strides,
    strides_of,
    variant_of,
)
from tilewise.kernels.triton.attention.mask import mask_reach_kernel
from tilewise.kernels.triton.attention.rows import BwdStrides, attention_bwd_rows_kernel
from tilewise.kernels.triton.attention.tile import Extras, HeadDims, Sequences

__all__ = ["launch_bwd", "launch_fwd", "tile_config", "tile_configs", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BIAS_TILE, _BIAS_CHUNK = 64, 64  # rows and keys, channels of a step; divide every mask tile
_BIAS_PROGRAMS_PER_SM = 2
_ROWS_TILE = 64  # rows per program of the row terms: bandwidth-bound, any power of two will do


def why_not(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can."""
    if spec.device_type not in ("cpu", "cuda"):
        return f"device must be cuda, got {spec.device_type}"
    if spec.device_type == "cpu" and not device.interpreting():
        return "a CPU runs Triton kernels only in the interpreter (TRITON_INTERPRET=1)"
    if spec.dtype not in _DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {spec.dtype}"
    widths = (("head_dim", spec.head_dim, WIDEST_QK), ("v_head_dim", spec.v_head_dim, WIDEST))
    for name, width, widest in widths:
        if not 1 <= width <= widest:
            return f"{name} must be from 1 to {widest}, got {width}"
    if spec.dtype == torch.float32 and max(spec.head_dim, spec.v_head_dim) > 256:
        arch = _current_arch(spec)
        if arch not in WIDE_SHARED_MEMORY:
            return f"float32 heads wider than 256 need 132 KiB of shared memory, got sm_{arch}"
    return None


def _current_arch(spec: AttentionSpec) -> int:
    """Return the compute capability of the GPU in use; Hopper's where none is at hand."""
    has_gpu = spec.device_type == "cuda" and torch.cuda.is_available()
    return device.arch_of(torch.device("cuda" if has_gpu else "cpu"))


def tile_config(spec: AttentionSpec, part: Part = "fwd", arch: int = 90) -> TileConfig:
    """Return the tiles with which `part` of `spec` runs on compute capability `arch`."""
    return candidates(spec, part, arch)[0]


def tile_configs(spec: AttentionSpec, arch: int = 90) -> dict[str, TileConfig]:
    """Return the tiles of each kernel that `spec` runs."""
    parts: tuple[Part, ...] = ("fwd", "dkdv", "dq")
    return {part: tile_config(spec, part, arch) for part in parts}


def launch_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    philox: Tensor | None = None,
    mask: MaskTensors | None = None,
    tile: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the forward pass; see `ops.attention` for shapes and rules.

    Args:
        tile: overrides the table, for tuning.

    Returns:
        o like q with Dv channels; lse float32 (B, Hq, Sq) or (Hq, T).
    """
    o = _allocate(q, (*q.shape[:-1], spec.v_head_dim), spec)
    lse = _allocate_rows(q, spec)
    tile = tile or tile_config(spec, "fwd", device.arch_of(q.device))
    tensors = (q, k, v, o)
    dims = head_dims(spec, *tensors)
    strides = FwdStrides(*(strides_of(x, spec, dims) for x in tensors), row_strides(lse))
    num_tiles = triton.cdiv(spec.max_seqlen_q, tile.tile_m)
    num_heads = spec.batch * spec.num_q_heads
    if num_tiles * num_heads == 0:
        return o, lse
    sequences = Sequences(dense(cu_seqlens_q), dense(cu_seqlens_k), dense(seqlens_k))
    extras = extras_of(spec, bias=bias, alibi_slopes=alibi_slopes, mask=mask, philox=philox)
    extras = _with_reach(extras, tile)
    attention_fwd_kernel[(num_tiles * num_heads,)](
        q, k, v, o, lse, dense(sinks), sequences, strides,
        num_tiles, query_heads_per_section(spec), *numbers_of(spec), extras,
        dims=dims, variant=variant_of(spec, extras), TILE_M=tile.tile_m, TILE_N=tile.tile_n,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return o, lse


def launch_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    philox: Tensor | None = None,
    mask: MaskTensors | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the backward pass; bitwise reproducible.

    Args:
        do: gradient of o, any strides.
        dlse: gradient of lse, None for zero.
        o, lse: what `launch_fwd` returned.

    Returns:
        dq, dk, dv like q, k, v; dbias like bias where spec.needs_dbias, else None; dsinks (Hq,)
        float32 or None.
    """
    if do.stride(-1) != 1:
        do = do.contiguous()
    given = {
        "sequences": Sequences(dense(cu_seqlens_q), dense(cu_seqlens_k), dense(seqlens_k)),
        "extras": extras_of(spec, bias=bias, alibi_slopes=alibi_slopes, mask=mask, philox=philox),
    }
    lse_log2, delta = launch_rows(o, do, lse, dlse, spec)
    dk, dv = launch_dkdv(do, q, k, v, lse_log2, delta, spec, **given)
    dq = launch_dq(do, q, k, v, lse_log2, delta, spec, **given)
    dbias = None
    if bias is not None and spec.needs_dbias:
        dbias = launch_dbias(do, q, k, v, lse_log2, delta, bias, spec, **given)
    dsinks = None
    if sinks is not None:
        p_sink = torch.exp(sinks.unsqueeze(-1) - lse.masked_fill(lse == -math.inf, math.inf))
        axes = (1,) if spec.is_varlen else (0, 2)
        dsinks = -(p_sink * delta).sum(dim=axes)
    return dq, dk, dv, dbias, dsinks


def launch_rows(
    o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Return (lse in base 2, delta), both float32 in the shape of lse."""
    lse, dlse = lse.contiguous(), dense(dlse)
    lse_log2, delta = torch.empty_like(lse), torch.empty_like(lse)
    num_rows = lse.shape[-1]
    num_tiles = triton.cdiv(num_rows, _ROWS_TILE)
    if lse.numel() > 0:
        dims = head_dims(spec, o, do)
        # A packed batch is one long sequence here: no row looks at another.
        attention_bwd_rows_kernel[(num_tiles * (lse.numel() // num_rows),)](
            o, do, lse, dlse, lse_log2, delta,
            strides_of(o, spec, dims), strides_of(do, spec, dims), row_strides(lse),
            num_rows, num_tiles, spec.num_q_heads,
            dims=dims, TILE_M=_ROWS_TILE,
        )  # fmt: skip
    return lse_log2, delta


def launch_dkdv(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    spec: AttentionSpec,
    *,
    sequences: Sequences,
    extras: Extras = Extras(),
    tile: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dk and dv, given the row terms of `launch_rows`."""
    dk, dv = _allocate(k, k.shape, spec), _allocate(v, v.shape, spec)
    tile = tile or tile_config(spec, "dkdv", device.arch_of(q.device))
    num_tiles = triton.cdiv(spec.max_seqlen_k, tile.tile_n)
    num_heads = spec.batch * spec.num_kv_heads
    if num_tiles * num_heads > 0:
        dims, strides = _bwd_strides(spec, q, k, v, do, q, dk, dv, lse_log2)
        attention_bwd_dkdv_kernel[(num_tiles * num_heads,)](
            q, k, v, do, lse_log2, delta, dk, dv, sequences, strides,
            num_tiles, key_heads_per_section(spec), *numbers_of(spec), extras,
            dims=dims, variant=variant_of(spec, extras), TILE_M=tile.tile_m, TILE_N=tile.tile_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dk, dv


def launch_dq(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    spec: AttentionSpec,
    *,
    sequences: Sequences,
    extras: Extras = Extras(),
    tile: TileConfig | None = None,
) -> Tensor:
    """Return dq, given the row terms of `launch_rows`."""
    dq = _allocate(q, q.shape, spec)
    tile = tile or tile_config(spec, "dq", device.arch_of(q.device))
    num_tiles = triton.cdiv(spec.max_seqlen_q, tile.tile_m)
    num_heads = spec.batch * spec.num_q_heads
    if num_tiles * num_heads > 0:
        dims, strides = _bwd_strides(spec, q, k, v, do, dq, k, v, lse_log2)
        extras = _with_reach(extras, tile)
        attention_bwd_dq_kernel[(num_tiles * num_heads,)](
            q, k, v, do, lse_log2, delta, dq, sequences, strides,
            num_tiles, query_heads_per_section(spec), *numbers_of(spec), extras,
            dims=dims, variant=variant_of(spec, extras), TILE_M=tile.tile_m, TILE_N=tile.tile_n,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq


def launch_dbias(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse_log2: Tensor,
    delta: Tensor,
    bias: Tensor,
    spec: AttentionSpec,
    *,
    sequences: Sequences,
    extras: Extras,
) -> Tensor:
    """Return dbias in the shape and dtype of bias, given the row terms of `launch_rows`."""
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    batch, heads, rows, keys = shape
    tiles = batch * heads * triton.cdiv(rows, _BIAS_TILE) * triton.cdiv(keys, _BIAS_TILE)
    if tiles == 0:
        return torch.empty_like(bias)
    pairs = spec.batch // batch * (spec.num_q_heads // heads)
    wanted = triton.cdiv(_BIAS_PROGRAMS_PER_SM * device.sm_count_of(q.device), tiles)
    num_parts = max(1, min(pairs, wanted))
    dtype = bias.dtype if num_parts == 1 else torch.float32
    parts = torch.empty((num_parts, *bias.shape), dtype=dtype, device=bias.device)
    dims, strides = _bwd_strides(spec, q, k, v, do, q, k, v, lse_log2)
    attention_bwd_bias_kernel[(num_parts * tiles,)](
        q, k, v, do, lse_log2, delta, parts, sequences, strides,
        rows, keys, num_parts, batch, heads, spec.batch, *numbers_of(spec), extras,
        dims=dims, variant=variant_of(spec, extras),
        SHARED_ROWS=rows == 1, SHARED_KEYS=keys == 1, TILE_M=_BIAS_TILE, TILE_N=_BIAS_TILE,
        CHUNK=_BIAS_CHUNK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return parts[0] if num_parts == 1 else parts.sum(dim=0).to(bias.dtype)


def _with_reach(extras: Extras, tile: TileConfig) -> Extras:
    """Add which keys the rows of each compute tile see of a bit tile, (n, mask_q / tile_m, words).

    Keys that no row of its tile sees are not loaded, so that NaN in them stays where it is.
    """
    bits = extras.mask_bits
    if bits is None:
        return extras
    count, mask_q, words = bits.shape
    reach = torch.empty((count, mask_q // tile.tile_m, words), dtype=bits.dtype, device=bits.device)
    if reach.numel() > 0:
        mask_reach_kernel[(reach.numel() // words,)](bits, reach, TILE_M=tile.tile_m, WORDS=words)
    return extras._replace(mask_reach=reach)


def _allocate(like: Tensor, shape: tuple[int, ...], spec: AttentionSpec) -> Tensor:
    """Return an output; packed rows that belong to no sequence are never written, so zero them."""
    if spec.is_varlen:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _allocate_rows(q: Tensor, spec: AttentionSpec) -> Tensor:
    """Return lse (B, Hq, Sq) or (Hq, T); -inf in packed rows that belong to no sequence."""
    if spec.is_varlen:
        shape = (spec.num_q_heads, q.shape[0])
        return torch.full(shape, -math.inf, dtype=torch.float32, device=q.device)
    shape = (spec.batch, spec.num_q_heads, q.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _bwd_strides(spec: AttentionSpec, *tensors: Tensor) -> tuple[HeadDims, BwdStrides]:
    """Return dims and strides of q, k, v, do, dq, dk, dv and the row terms."""
    *rows_of_heads, row_terms = tensors
    dims = head_dims(spec, *rows_of_heads)
    steps = (strides_of(x, spec, dims) for x in rows_of_heads)
    return dims, BwdStrides(*steps, row_strides(row_terms))
