"""Plan the portable Triton attention kernels: allocate, choose tiles, fill the grid.

All backends share the interface: `plan_fwd` returns the plan of a call or refuses it, `plan_bwd`
that of its gradient. `launch_rows`, `launch_dkdv` and `launch_dq` are the three steps of the
backward pass, which the tuner measures separately.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.plan import (
    GRADIENT_TENSORS,
    Call,
    LaunchPlan,
    Maker,
    Refusal,
)
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.tiles.attention import WIDEST, WIDEST_QK, Part, candidates
from tilewise.kernels.tiles.paged import WIDE_SHARED_MEMORY, TileConfig
from tilewise.kernels.triton.attention.bias import attention_bwd_bias_kernel
from tilewise.kernels.triton.attention.dkdv import attention_bwd_dkdv_kernel
from tilewise.kernels.triton.attention.dq import attention_bwd_dq_kernel
from tilewise.kernels.triton.attention.forward import FwdStrides, attention_fwd_kernel
from tilewise.kernels.triton.attention.geometry import (
    extras_of,
    head_dims,
    key_heads_per_section,
    numbers_of,
    query_heads_per_section,
    row_strides,
    strides_of,
    variant_of,
)
from tilewise.kernels.triton.attention.rows import BwdStrides, attention_bwd_rows_kernel
from tilewise.kernels.triton.attention.shared_bias import attention_bwd_shared_bias_kernel
from tilewise.kernels.triton.attention.tile import Extras, HeadDims, Sequences, Variant
from tilewise.kernels.triton.visible import mask_reach_kernel

__all__ = ["add_fwd", "plan_bwd", "plan_fwd", "plan_part", "tile_config", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BIAS_TILE, _BIAS_CHUNK = 64, 64  # rows and keys, channels of a step; divide every mask tile
_BIAS_PROGRAMS_PER_SM = 2
# Rows, keys, warps and stages of a bias whose pairs all see each other, and channels that fit. On
# an H200 (2026-11-29; 1,024 rows of 1,024 tokens, 4 heads of 40 and 32 channels, bfloat16) a
# forward and a backward pass take 18.5 ms so, 19.7 with two stages, 27.9 by `bias.py`.
_SHARED_BIAS_TILE = (64, 64, 4, 3)
_SHARED_BIAS_CHANNELS = 128
_ROWS_TILE = 64  # rows per program of the row terms: bandwidth-bound, any power of two will do


def why_not(spec: AttentionSpec) -> str | None:
    """Return why these kernels cannot run `spec`, or None if they can."""
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


def plan_fwd(call: Call, tiles: dict[str, TileConfig] | None = None) -> LaunchPlan | Refusal:
    """Return the plan of the forward pass, or a Refusal with the reason.

    Its results are o and lse, and the largest logit of each row if the spec asks for it.

    Args:
        tiles: tile configurations by part that override the table, for tuning.
    """
    reason = why_not(call.spec)
    if reason is not None:
        return Refusal(reason)
    maker = Maker(call)
    chosen = _tiles(call, ("fwd",), tiles)
    return maker.finish(add_fwd(maker, call.spec, maker.tensors, chosen["fwd"]), lambda: chosen)


def plan_bwd(call: Call, tiles: dict[str, TileConfig] | None = None) -> LaunchPlan:
    """Return the plan of the backward pass; it is bitwise reproducible.

    Its results are dq, dk, dv, dbias and dsinks; dbias is None unless the spec asks for it, dsinks
    without sinks. Nothing is refused: the call's forward pass was planned before.

    Args:
        tiles: tile configurations by part that override the table, for tuning.
    """
    maker, spec = Maker(call, GRADIENT_TENSORS), call.spec
    do, dlse, o, lse = maker.inputs[:4]
    assert do is not None
    assert o is not None
    assert lse is not None
    tensors, chosen = maker.tensors, _tiles(call, ("dkdv", "dq"), tiles)
    q, k, v = tensors[:3]
    if do.stride(-1) != 1 and do.shape[-1] > 1:
        do = maker.copy(do)
    given = given_of(spec, tensors)
    lse_log2, delta = launch_rows(maker, o, do, lse, dlse, spec)
    row_terms = lse_log2, delta
    dk, dv = launch_dkdv(maker, do, q, k, v, *row_terms, spec, **given, tile=chosen["dkdv"])
    dq = launch_dq(maker, do, q, k, v, *row_terms, spec, **given, tile=chosen["dq"])
    dbias = dsinks = None
    if tensors.bias is not None and spec.needs_dbias:
        dbias = launch_dbias(maker, do, q, k, v, *row_terms, tensors.bias, spec, **given)
    if tensors.sinks is not None:

        def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
            p_sink = torch.exp(sinks.unsqueeze(-1) - lse.masked_fill(lse == -math.inf, math.inf))
            return -(p_sink * delta).sum(dim=(1,) if spec.is_varlen else (0, 2))

        like = torch.empty(tensors.sinks.shape, dtype=torch.float32, device="meta")
        dsinks = maker.compute(sink_gradient, tensors.sinks, lse, delta, like=like)
    return maker.finish((dq, dk, dv, dbias, dsinks), lambda: chosen)


PART_TENSORS = ("do", "dlse", "o", "lse", "lse_log2", "delta", *AttentionTensors._fields)


def plan_part(
    part: Literal["rows", "dkdv", "dq", "dbias"], call: Call, tile: TileConfig | None = None
) -> LaunchPlan:
    """Return the plan of one step of the backward pass alone, which the tuner measures.

    Args:
        call: the tensors of `PART_TENSORS`; "rows" takes do, dlse, o and lse, the others do and the
            results of "rows".
        tile: the tile configuration, which overrides the table.
    """
    maker, spec = Maker(call, PART_TENSORS), call.spec
    do, dlse, o, lse, lse_log2, delta = maker.inputs[:6]
    assert do is not None
    tensors = maker.tensors
    if part == "rows":
        assert o is not None
        assert lse is not None
        return maker.finish(launch_rows(maker, o, do, lse, dlse, spec))
    assert lse_log2 is not None
    assert delta is not None
    given = (maker, do, *tensors[:3], lse_log2, delta)
    beside = given_of(spec, tensors)
    if part == "dbias":
        return maker.finish([launch_dbias(*given, tensors.bias, spec, **beside)])
    tile = tile or tile_config(spec, part, device.arch_of(call.device))
    if part == "dkdv":
        return maker.finish(launch_dkdv(*given, spec, **beside, tile=tile), lambda: {part: tile})
    return maker.finish([launch_dq(*given, spec, **beside, tile=tile)], lambda: {part: tile})


def _tiles(
    call: Call, parts: tuple[Part, ...], given: dict[str, TileConfig] | None
) -> dict[str, TileConfig]:
    arch = device.arch_of(call.device)
    table = {part: tile_config(call.spec, part, arch) for part in parts}
    return table | {part: tile for part, tile in (given or {}).items() if part in table}


def given_of(spec: AttentionSpec, tensors: AttentionTensors) -> dict[str, Any]:
    """Return a dict of "sequences" and "extras", keyword arguments of all launches but of rows."""
    lengths = sequences_of(tensors)
    extras = extras_of(
        spec,
        bias=tensors.bias,
        alibi_slopes=tensors.alibi_slopes,
        mask=tensors.mask,
        philox=tensors.philox,
    )
    return {"sequences": lengths, "extras": extras}


def sequences_of(tensors: AttentionTensors) -> Sequences:
    """Return the starts and lengths of a call's sequences."""
    given = tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.seqlens_k
    if tensors.cu_seqlens_q is None:
        return Sequences(*given)
    return Sequences(*given, *(2 * x.shape[0] + 3 for x in (tensors.q, tensors.k)))


def add_fwd(
    maker: Maker, spec: AttentionSpec, tensors: AttentionTensors, tile: TileConfig
) -> tuple[Tensor, ...]:
    """Add the forward pass to a plan; see `ops.attention` for shapes and rules.

    Returns:
        Tensors of the plan: o like q with Dv channels; lse float32 (B, Hq, Sq) or (Hq, T); with
        spec.needs_max the largest logit of each row, in the shape of lse.
    """
    q, k, v = tensors[:3]
    o = _allocate(maker, q, (*q.shape[:-1], spec.v_head_dim), spec)
    lse = _allocate_rows(maker, q, spec)
    dims = head_dims(spec, q, k, v, o, is_aligned=all(map(maker.is_aligned, (q, k, v))))
    strides = FwdStrides(*(strides_of(x, spec, dims) for x in (q, k, v, o)), row_strides(lse))
    num_tiles = triton.cdiv(spec.max_seqlen_q, tile.tile_m)
    num_heads = spec.batch * spec.num_q_heads
    results: tuple[Tensor, ...] = o, lse
    given = given_of(spec, tensors)
    extras = given["extras"]
    if spec.needs_max:
        results = o, lse, _allocate_rows(maker, q, spec)
        extras = extras._replace(maxima=results[2])
    if num_tiles * num_heads == 0:
        return results
    extras = _with_reach(maker, extras, tile)
    maker.launch(
        attention_fwd_kernel,
        num_tiles * num_heads,
        q,
        k,
        v,
        o,
        lse,
        tensors.sinks,
        given["sequences"],
        strides,
        num_tiles,
        query_heads_per_section(spec),
        *numbers_of(spec),
        extras,
        dims=dims,
        variant=variant_of(spec, extras),
        TILE_M=tile.tile_m,
        TILE_N=tile.tile_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return results


def launch_rows(
    maker: Maker, o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Add the kernel of the row terms to a plan, and return them: lse in base 2, and delta.

    Row terms are two numbers of each query row, float32 in the shape of lse, which all later
    kernels of the backward pass read; delta is the sum of do * o over the row, less dlse.
    """
    lse, dlse = _dense(maker, lse), maker.dense(dlse)
    lse_log2, delta = (maker.empty(lse.shape, torch.float32) for _ in range(2))
    num_rows = lse.shape[-1]
    num_tiles = triton.cdiv(num_rows, _ROWS_TILE)
    if lse.numel() > 0:
        dims = head_dims(spec, o, do)
        # A packed batch is treated as one long sequence: rows are independent here.
        maker.launch(
            attention_bwd_rows_kernel,
            num_tiles * (lse.numel() // num_rows),
            o,
            do,
            lse,
            dlse,
            lse_log2,
            delta,
            strides_of(o, spec, dims),
            strides_of(do, spec, dims),
            row_strides(lse),
            num_rows,
            num_tiles,
            spec.num_q_heads,
            dims=dims,
            TILE_M=_ROWS_TILE,
        )
    return lse_log2, delta


def launch_dkdv(
    maker: Maker,
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
    tile: TileConfig,
) -> tuple[Tensor, Tensor]:
    """Add the kernel of dk and dv to a plan, and return both, in shape and dtype as k and v.

    The row terms, lse_log2 and delta, are the results of `launch_rows`.
    """
    dk, dv = _allocate(maker, k, k.shape, spec), _allocate(maker, v, v.shape, spec)
    num_tiles = triton.cdiv(spec.max_seqlen_k, tile.tile_n)
    num_heads = spec.batch * spec.num_kv_heads
    if num_tiles * num_heads > 0:
        dims, strides = _bwd_strides(spec, q, k, v, do, q, dk, dv, lse_log2)
        maker.launch(
            attention_bwd_dkdv_kernel,
            num_tiles * num_heads,
            q,
            k,
            v,
            do,
            lse_log2,
            delta,
            dk,
            dv,
            sequences,
            strides,
            num_tiles,
            key_heads_per_section(spec),
            *numbers_of(spec),
            extras,
            dims=dims,
            variant=variant_of(spec, extras),
            TILE_M=tile.tile_m,
            TILE_N=tile.tile_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return dk, dv


def launch_dq(
    maker: Maker,
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
    tile: TileConfig,
) -> Tensor:
    """Add the kernel of dq to a plan, and return dq, in shape and dtype as q.

    The row terms, lse_log2 and delta, are the results of `launch_rows`.
    """
    dq = _allocate(maker, q, q.shape, spec)
    num_tiles = triton.cdiv(spec.max_seqlen_q, tile.tile_m)
    num_heads = spec.batch * spec.num_q_heads
    if num_tiles * num_heads > 0:
        dims, strides = _bwd_strides(spec, q, k, v, do, dq, k, v, lse_log2)
        extras = _with_reach(maker, extras, tile)
        maker.launch(
            attention_bwd_dq_kernel,
            num_tiles * num_heads,
            q,
            k,
            v,
            do,
            lse_log2,
            delta,
            dq,
            sequences,
            strides,
            num_tiles,
            query_heads_per_section(spec),
            *numbers_of(spec),
            extras,
            dims=dims,
            variant=variant_of(spec, extras),
            TILE_M=tile.tile_m,
            TILE_N=tile.tile_n,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return dq


def launch_dbias(
    maker: Maker,
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
    """Add the kernel of dbias to a plan, and return dbias, in shape and dtype as bias.

    The row terms, lse_log2 and delta, are the results of `launch_rows`, or of another kernel of the
    same numbers; both have the shape of lse and the same strides. Hopper's kernel gives rows with
    an lse of 2^24 and more an infinite one: they add nothing to dbias, as to dq, dk and dv there.
    """
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    batch, heads, rows, keys = shape
    if bias.numel() == 0:
        return maker.empty(bias.shape, bias.dtype)
    variant = variant_of(spec, extras)
    is_straight = _sees_every_pair(spec, variant) and rows > 1 < keys
    tile_m, tile_n, num_warps, num_stages = _SHARED_BIAS_TILE
    if not is_straight:
        tile_m, tile_n, num_warps, num_stages = _BIAS_TILE, _BIAS_TILE, 4, 2
    tiles = batch * heads * triton.cdiv(rows, tile_m) * triton.cdiv(keys, tile_n)
    pairs = spec.batch // batch * (spec.num_q_heads // heads)
    at_once = _BIAS_PROGRAMS_PER_SM * device.sm_count_of(q.device)
    if is_straight:
        num_parts = bias_parts(tiles, pairs, at_once)
    else:  # programs take unlike times, so that no wave is the last
        num_parts = max(1, min(pairs, triton.cdiv(at_once, tiles)))
    dtype = bias.dtype if num_parts == 1 else torch.float32
    parts = maker.empty((num_parts, *bias.shape), dtype)
    dims, strides = _bwd_strides(spec, q, k, v, do, q, k, v, lse_log2)
    given = (q, k, v, do, lse_log2, delta, parts)
    planes = (num_parts, batch, heads, spec.batch)
    if is_straight:
        heads_q, group_size, seqlen_q, seqlen_k, _, _, scale, softcap = numbers_of(spec)
        maker.launch(
            attention_bwd_shared_bias_kernel,
            num_parts * tiles,
            *given,
            strides,
            *planes,
            heads_q,
            group_size,
            seqlen_q,
            seqlen_k,
            scale,
            softcap,
            extras,
            dims=dims,
            variant=variant,
            TILE_M=tile_m,
            TILE_N=tile_n,
            D_PAD=max(16, triton.next_power_of_2(spec.head_dim)),
            DV_PAD=max(16, triton.next_power_of_2(spec.v_head_dim)),
            num_warps=num_warps,
            num_stages=num_stages,
        )
    else:
        maker.launch(
            attention_bwd_bias_kernel,
            num_parts * tiles,
            *given,
            sequences,
            strides,
            rows,
            keys,
            *planes,
            *numbers_of(spec),
            extras,
            dims=dims,
            variant=variant,
            SHARED_ROWS=rows == 1,
            SHARED_KEYS=keys == 1,
            TILE_M=tile_m,
            TILE_N=tile_n,
            CHUNK=_BIAS_CHUNK,
            num_warps=num_warps,
            num_stages=num_stages,
        )

    def sum_parts(parts: Tensor) -> Tensor:
        return parts.sum(dim=0).to(bias_dtype)

    bias_dtype = bias.dtype
    if num_parts == 1:
        return parts[0]
    like = torch.empty(bias.shape, dtype=bias_dtype, device="meta")
    return maker.compute(sum_parts, parts, like=like)


def bias_parts(tiles: int, pairs: int, at_once: int) -> int:
    """Return into how many parts the sum over `pairs` sequences and heads is split, of a bias whose
    tiles are programs of equal length.

    It is the split with the fewest steps, each of a pair, in all waves of programs, of those with
    one part and of those with at most two waves; of equal ones the split with the fewest parts.

    Args:
        tiles: the tiles of the bias, each a program for each part.
        pairs: at least 1.
        at_once: the programs that run at a time, two on a multiprocessor: of 64 x 64 numbers they
            hold 226 registers a thread.
    """
    most = max(1, min(pairs, 2 * at_once // tiles))
    return min(
        range(1, most + 1),
        key=lambda parts: triton.cdiv(tiles * parts, at_once) * triton.cdiv(pairs, parts),
    )


def _sees_every_pair(spec: AttentionSpec, variant: Variant) -> bool:
    """Return whether the kernel of `shared_bias` can compute the gradient of a bias.

    It can where every query sees every key, without dropout, in 16 bits, for heads of at most 128
    channels. The caller checks that the bias differs from query to query and from key to key.
    """
    hides = variant.left or variant.right or variant.mask_q or spec.is_varlen or spec.has_seqlens_k
    is_wide = max(spec.head_dim, spec.v_head_dim) > _SHARED_BIAS_CHANNELS
    return spec.dtype.itemsize == 2 and not (hides or variant.dropout or is_wide)


def _with_reach(maker: Maker, extras: Extras, tile: TileConfig) -> Extras:
    """Return `extras` with the bits of the keys that any row of a compute tile sees.

    The launch that computes them is added to the plan; without a block mask `extras` is returned.
    The bits are int32 (n, mask_q / tile_m, words), of 32 keys a word, for n bit tiles: tiles of the
    mask stored as one bit a pair. A kernel loads no key that no row of its tile sees, so that NaN
    in such a key has no effect.
    """
    bits = extras.mask_bits
    if bits is None:
        return extras
    count, mask_q, words = bits.shape
    reach = maker.empty((count, mask_q // tile.tile_m, words), bits.dtype)
    if reach.numel() > 0:
        maker.launch(
            mask_reach_kernel, reach.numel() // words, bits, reach, TILE_M=tile.tile_m, WORDS=words
        )
    return extras._replace(mask_reach=reach)


def _allocate(maker: Maker, like: Tensor, shape: tuple[int, ...], spec: AttentionSpec) -> Tensor:
    """Return a new tensor of the plan for a result, with the dtype of `like`.

    That of a packed batch is filled with zeros, which stay in rows of no sequence.
    """
    if spec.is_varlen:
        return maker.full(shape, 0.0, like.dtype)
    return maker.empty(shape, like.dtype)


def _allocate_rows(maker: Maker, q: Tensor, spec: AttentionSpec) -> Tensor:
    """Allocate float32 lse, (B, Hq, Sq) or packed (Hq, T), for a kernel to fill.

    In a packed batch it is filled with -inf first, which stays in rows of no sequence.
    """
    if spec.is_varlen:
        return maker.full((spec.num_q_heads, q.shape[0]), -math.inf, torch.float32)
    shape = (spec.batch, spec.num_q_heads, q.shape[1])
    return maker.empty(shape, torch.float32)


def _dense(maker: Maker, rows: Tensor) -> Tensor:
    dense = maker.dense(rows)
    assert dense is not None
    return dense


def _bwd_strides(spec: AttentionSpec, *tensors: Tensor) -> tuple[HeadDims, BwdStrides]:
    """Return the sizes of a head and the strides of the tensors of a backward pass.

    Args:
        tensors: q, k, v, do, dq, dk, dv and a row term, in this order.
    """
    *rows_of_heads, row_terms = tensors
    dims = head_dims(spec, *rows_of_heads)
    steps = (strides_of(x, spec, dims) for x in rows_of_heads)
    return dims, BwdStrides(*steps, row_strides(row_terms))
