"""From a user's arguments to the registered op's: checks and defaults of paged attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import PagedTensors
from tilewise.ops import checks, dispatch
from tilewise.ops.paged.op import PagedOptions
from tilewise.ops.paged.shared_prefixes import SharedPrefixes

_WINDOW = "None or an integer"
QUANTISED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def prepare_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> PagedOptions:
    """Check the arguments of `paged_attention` and put them into the registered op's order."""
    checks.check_float("q", q)
    checks.check_dims("q", q, "(T, Hq, D)")
    check_cache_pair(k_cache, v_cache)
    check_scales(k_cache, k_scale, v_scale)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.check_device(name, cache, q.device)
    num_q_heads, head_dim = q.shape[1:]
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"k_cache must have the head dim of q, {head_dim}, got {k_cache.shape[3]}")
    checks.check_heads(num_q_heads, k_cache.shape[2])
    checks.check_last_dim_contiguous("q", q)
    checks.check_dims("block_table", block_table, "(B, max_blocks)")
    num_seqs = block_table.shape[0]
    checks.check_integers("block_table", block_table, tuple(block_table.shape), q.device)
    checks.check_integers("seqlens_k", seqlens_k, (num_seqs,), q.device)
    checks.check_integers("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), q.device)
    max_seqlen_q = checks.check_length("max_seqlen_q", max_seqlen_q)
    window_left = -1
    if window is not None:
        window_left, _ = checks.window_bounds(True, checks.host_int("window", window, _WINDOW))
    checks.check_softcap(softcap)
    checks.check_per_head("alibi_slopes", alibi_slopes, num_q_heads, q.device)
    checks.check_per_head("sinks", sinks, num_q_heads, q.device)
    if tree_mask is not None:
        _check_tree_mask(tree_mask, q, max_seqlen_q)
    if shared is not None:
        checks.check_type("shared", shared, SharedPrefixes)
        checks.check_int32("shared", shared.skipped, (num_seqs,), q.device)
        _check_made_for(shared, k_cache.shape[1], q.shape[0])
        for name, value in (("window", window), ("alibi_slopes", alibi_slopes)):
            if value is not None:  # a pass over a group knows no distances
                raise ValueError(f"{name} must be None with shared prefixes, got one")
        if batch_invariant:  # a row's sum over the prefix would be cut as its group is
            raise ValueError("shared must be None with batch_invariant, got shared prefixes")
    dispatch.check_backend_name(backend)
    tensors = (block_table, seqlens_k, cu_seqlens_q, alibi_slopes, sinks)
    return PagedOptions(
        *_as_kernels_read(*tensors),
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        shared=[] if shared is None else shared.tensors,
        shared_rows=[] if shared is None else shared.max_rows,
        max_seqlen_q=max_seqlen_q,
        window_left=window_left,
        softmax_scale=checks.scale_of(softmax_scale, head_dim),
        softcap=softcap,
        batch_invariant=batch_invariant,
        backend=backend,
    )


def as_kernels_read(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the tensors of a call, in the order of its plan, as `prepare_paged` gives them on."""
    converted: Any = tensors[_CONVERTED]
    return (
        *tensors[: _CONVERTED.start],
        *_as_kernels_read(*converted),
        *tensors[_CONVERTED.stop :],
    )


_CONVERTED = slice(
    PagedTensors._fields.index("block_table"), PagedTensors._fields.index("sinks") + 1
)


def _as_kernels_read(
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    return (
        checks.with_packed_rows(checks.as_int32(block_table)),
        checks.with_packed_rows(checks.as_int32(seqlens_k)),
        checks.with_packed_rows(checks.as_int32(cu_seqlens_q)),
        None if alibi_slopes is None else alibi_slopes.float().contiguous(),
        None if sinks is None else sinks.float().contiguous(),
    )


def _check_tree_mask(tree_mask: Tensor, q: Tensor, max_seqlen_q: int) -> None:
    checks.check_same_dtype("tree_mask", tree_mask, torch.bool)
    checks.check_device("tree_mask", tree_mask, q.device)
    checks.check_dims("tree_mask", tree_mask, "(T, max_seqlen_q)")
    checks.check_last_dim_contiguous("tree_mask", tree_mask)
    if tree_mask.shape[0] != q.shape[0] or tree_mask.shape[1] < max_seqlen_q:
        raise ValueError(
            f"tree_mask must have {q.shape[0]} rows and at least {max_seqlen_q} columns, "
            f"got shape {tuple(tree_mask.shape)}"
        )


def _check_made_for(shared: SharedPrefixes, block_size: int, num_tokens: int) -> None:
    if shared.block_size != block_size:
        raise ValueError(
            f"shared must be for blocks of {block_size} tokens, got some of {shared.block_size}"
        )
    most = max(level.rows.shape[0] for level in shared.levels)
    if most > num_tokens:
        raise ValueError(f"shared must be for at most {num_tokens} rows, got {most}")


def check_cache_pair(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise unless the two caches have the same blocks, heads, dtype and device."""
    layout = "(num_blocks, block_size, Hk, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_cache_dtype(name, cache)
        checks.check_dims(name, cache, layout)
        checks.check_last_dim_contiguous(name, cache)
    checks.check_same_dtype("v_cache", v_cache, k_cache.dtype)
    checks.check_device("v_cache", v_cache, k_cache.device)
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"v_cache must have the blocks and heads of k_cache, {tuple(k_cache.shape[:3])}, "
            f"got {tuple(v_cache.shape[:3])}"
        )


def _check_cache_dtype(name: str, cache: Tensor) -> None:
    known = (*checks.FLOAT_DTYPES, *QUANTISED_DTYPES)
    if cache.dtype not in known:
        wanted = ", ".join(map(checks.dtype_name, known))
        raise TypeError(f"{name} must be one of {wanted}, got {checks.dtype_name(cache.dtype)}")


def check_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise unless an 8-bit cache has two scales of one kind, and any other cache has none."""
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    dtype = checks.dtype_name(k_cache.dtype)
    kinds = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype not in QUANTISED_DTYPES:
            if scale is not None:
                raise ValueError(f"{name} must be None for a {dtype} cache, got a tensor")
            continue
        if scale is None:
            raise ValueError(f"{name} must be given for a {dtype} cache, got None")
        checks.check_same_dtype(name, scale, torch.float32)
        checks.check_device(name, scale, k_cache.device)
        kinds.append(scale.dim())
        if tuple(scale.shape) not in ((num_blocks, block_size, num_kv_heads), (num_kv_heads,)):
            raise ValueError(
                f"{name} must have shape {(num_blocks, block_size, num_kv_heads)} or "
                f"{(num_kv_heads,)}, got {tuple(scale.shape)}"
            )
    if len(set(kinds)) > 1:
        raise ValueError(
            "v_scale must be of the kind of k_scale, each token's or each head's, got "
            f"{kinds[1]} and {kinds[0]} dimensions"
        )
