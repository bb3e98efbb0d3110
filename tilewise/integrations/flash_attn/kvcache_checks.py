"""Argument checks of flash_attn_with_kvcache, by shapes, dtypes and devices; on a CPU also by
values."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.integrations.flash_attn.pages import check_block_table
from tilewise.ops import checks, values

MAX_SPLITS = 128  # flash-attn's limit


def check_call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    num_splits: int,
    rotary_seqlens: Tensor | None = None,
    *,
    pages_are_padded: bool = False,
) -> None:
    """Raise ValueError or TypeError unless these arguments of `append_and_attend` fit together;
    values of tensors are looked at on a CPU only."""
    checks.check_dims("q", q, "(B, Sq, Hq, D)")
    batch = q.shape[0]
    check_caches(q, k_cache, v_cache, q.dtype)
    capacity = k_cache.shape[1]
    per_sequence = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    if block_table is not None:
        for name, tensor in per_sequence.items():
            is_taken = pages_are_padded and name == "cache_leftpad"
            if tensor is not None and not is_taken:
                raise ValueError(f"{name} must be None with a block_table, got a tensor")
        check_block_table(block_table, batch, k_cache, v_cache)
        checks.check_device("block_table", block_table, q.device)
        capacity *= block_table.shape[1]
        check_leftpad(cache_leftpad, batch, capacity, q.device)
    else:
        check_rows(k_cache, batch, cache_batch_idx, cache_leftpad)
    num_new = _check_new(q, k_cache, v_cache, k, v)
    if num_new > capacity:
        raise ValueError(f"k must have at most the {capacity} tokens of the cache, got {num_new}")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v, got None")
    check_seqlens(cache_seqlens, capacity - num_new, batch, q.device)
    _check_rotary(q, rotary_cos, rotary_sin, capacity)
    if k is None and rotary_cos is not None:
        raise ValueError("rotary_cos must come with new keys k and values v, got None for them")
    if rotary_seqlens is not None:
        if rotary_cos is None:
            raise ValueError("rotary_seqlens must come with rotary_cos, got None for it")
        checks.check_int32("rotary_seqlens", rotary_seqlens, (batch,), q.device)
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must lie in [0, {MAX_SPLITS}], got {num_splits}")


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError unless the caches or pages have 4 dims, `dtype` and the head
    dim and device of q (..., Hq, D), and are contiguous in the last dim."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.check_dims(name, cache, "(Bc, S, Hk, D)")
        checks.check_same_dtype(name, cache, dtype)
        checks.check_device(name, cache, q.device)
        checks.check_last_dim_contiguous(name, cache)
    if k_cache.shape[3] != q.shape[-1]:
        raise ValueError(
            f"k_cache must have the head dim of q, {q.shape[-1]}, got {k_cache.shape[3]}"
        )
    checks.check_shape("v_cache", v_cache, (*k_cache.shape[:3], v_cache.shape[3]))


def check_rows(
    k_cache: Tensor, batch: int, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None
) -> None:
    """Raise unless each of `batch` sequences has a row in k_cache (Bc, S, ...), with a valid index
    and leftpad; these two are looked at on a CPU only."""
    rows, capacity = k_cache.shape[:2]
    if cache_batch_idx is None and rows < batch:
        raise ValueError(f"k_cache must have a row for each of {batch} sequences, got {rows}")
    if cache_batch_idx is not None:
        checks.check_int32("cache_batch_idx", cache_batch_idx, (batch,), k_cache.device)
        values.check_lengths("cache_batch_idx", cache_batch_idx, rows - 1)
    check_leftpad(cache_leftpad, batch, capacity, k_cache.device)


def check_leftpad(
    cache_leftpad: Tensor | None, batch: int, capacity: int, device: torch.device
) -> None:
    """Raise unless cache_leftpad is None or int32 (batch,) on `device` with values of 0 ...
    capacity.

    Values are looked at on a CPU only.
    """
    if cache_leftpad is not None:
        checks.check_int32("cache_leftpad", cache_leftpad, (batch,), device)
        values.check_lengths("cache_leftpad", cache_leftpad, capacity)


def _check_new(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None
) -> int:
    """Check the new k and v against q and the caches; return the number of new tokens, 0 without
    both.

    Raises ValueError or TypeError if only one is given, or shapes, dtypes or devices differ.
    """
    if k is None and v is None:
        return 0
    if k is None or v is None:
        missing, other = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} must be given with {other}, got None")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        checks.check_dims(name, new, "(B, Sn, Hk, D)")
        checks.check_shape(name, new, (q.shape[0], k.shape[1], *cache.shape[2:]))
        checks.check_same_dtype(name, new, q.dtype)
        checks.check_device(name, new, q.device)
    return k.shape[1]


def check_seqlens(
    seqlens: int | Tensor | None, most: int, batch: int, device: torch.device
) -> None:
    """Raise unless cache_seqlens is None, an int in [0, most] or an int32 (B,) on `device`, the
    values of which are not looked at."""
    if isinstance(seqlens, Tensor):
        checks.check_int32("cache_seqlens", seqlens, (batch,), device)
    elif isinstance(seqlens, int | torch.SymInt):
        if not 0 <= seqlens <= most:
            raise ValueError(
                f"cache_seqlens must lie in [0, {most}] to fit the cache, got {seqlens}"
            )
    elif seqlens is not None:
        raise TypeError(f"cache_seqlens must be an int or an int32 tensor, got {seqlens!r}")


def _check_rotary(q: Tensor, cos: Tensor | None, sin: Tensor | None, capacity: int) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        names = ("rotary_cos", "rotary_sin")
        missing, other = names if cos is None else reversed(names)
        raise ValueError(f"{missing} must be given with {other}, got None")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.check_dims(name, table, "(R, r / 2)")
        checks.check_float(name, table)
        checks.check_device(name, table, q.device)
        checks.check_shape(name, table, tuple(cos.shape))
    if 2 * cos.shape[1] > q.shape[3]:
        raise ValueError(
            f"rotary_cos must have at most D / 2 = {q.shape[3] // 2} columns, got {cos.shape[1]}"
        )
    if cos.shape[0] < capacity:
        raise ValueError(
            f"rotary_cos must have a row for each of {capacity} positions, got {cos.shape[0]}"
        )
