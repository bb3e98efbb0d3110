"""The ops that fill a paged cache: write new rows, rotated or not, and copy blocks."""

from __future__ import annotations

from typing import Never

import torch
from torch import Tensor

from tilewise.kernels.spec import row_width
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch, values
from tilewise.ops.paged import cache_op
from tilewise.ops.paged.arguments import check_cache_pair, check_scales
from tilewise.ops.step import step


@names
def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> None:
    """Write each row of k and v to its slot of the cache, in place and in one kernel.

    cache[slot // block_size, slot % block_size] = row, for every row whose slot is not -1. An 8-bit
    cache holds row / scale, to nearest even: of int8 in -127 ... 127, of float8_e4m3fn in
    -448 ... 448. What comes back is off by at most amax / 254 (int8), or by 1 / 16 of the value or
    amax / 448 / 1024, whichever is more (float8_e4m3fn), amax being the largest of the row's |x|.
    A cache of 4 bits, uint8 of half as many channels, holds rows rotated by Hadamard matrices as
    scale * (code - zero), codes of 0 ... 15, see `reference.four_bits`: each rotated channel is off
    by at most its row's scale, a fifteenth of what lies between the largest and the smallest.

    Args:
        k, v: (T, Hk, D) and (T, Hk, Dv), any float dtype; cast to the cache's.
        k_cache, v_cache: (num_blocks, block_size, Hk, D) and (..., Dv), of one float dtype, int8 or
            float8_e4m3fn; or uint8 with D / 2 and Dv / 2, D and Dv even (on a GPU multiples of 16).
        slot_mapping: (T,) int64 or int32, block * block_size + offset; -1 skips the row; slots
            differ. Looked at on a CPU only, as a GPU would have to be waited for; there a row whose
            slot lies outside of the cache is skipped, too.
        k_scale, v_scale: float32, with an 8-bit cache and only then. Both
            (num_blocks, block_size, Hk): the scale of each token and head, written with the row:
            amax / 127 or amax / 448; 0 for a row of zeros, NaN for one with an infinity or NaN.
            Or both (Hk,): fixed scales of each head, only read; what they cannot hold is
            saturated, and NaN becomes 0. With a cache of 4 bits the first kind alone: the last four
            bits of such a scale are the row's zero.
        backend: "cpu", "triton" or "reference"; None chooses.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `paged_attention`.

    Source: PagedAttention (2023), the fused reshape-and-write kernel.

    Example:
        >>> write_kv_cache(k, v, k_cache, v_cache, torch.tensor([5, 6, -1]))
    """
    if unknown:
        raise unknown_keyword(write_kv_cache, unknown)
    slots = _widened(slot_mapping)
    _write_kv_cache(k, v, k_cache, v_cache, k_scale, v_scale, slots, backend)


@names
def rope_write_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Prepare a step's q, k and v for `paged_attention` in one kernel; return q.

    q = rope(norm(q)); k_cache[slot], v_cache[slot] = rope(norm(k)), v. It is `apply_rope` of both
    and `write_kv_cache` without what lies between them: all in float32, rounded once. Nothing is
    differentiable.

    Args:
        q: (T, Hq, D), last dim contiguous, the dtype of k.
        k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale: as for `write_kv_cache`. A row that
            is skipped there has its q rotated all the same.
        cos, sin: float32 (T, R / 2), R <= D, as for `apply_rope`.
        interleaved: True to pair channels (2i, 2i + 1) as GPT-J does; else (i, i + R/2) as Llama
            does.
        q_norm, k_norm: (D,) weights of an RMS norm of each head before the rotation (Qwen3), both
            or none: x / sqrt(mean(x^2) + norm_eps) * weight.
        norm_eps: the number added to the mean square in these norms.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        q (T, Hq, D), a new tensor of its dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `paged_attention`.

    Example:
        >>> q = rope_write_kv_cache(q, k, v, k_cache, v_cache, slots, cos=cos, sin=sin)
    """
    if unknown:
        raise unknown_keyword(rope_write_kv_cache, unknown)
    rotated: Tensor = _rope_write_kv_cache(
        q,
        k,
        v,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        _widened(slot_mapping),
        cos,
        sin,
        q_norm,
        k_norm,
        norm_eps,
        interleaved,
        backend,
    )
    return rotated


@names
def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_pairs: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> None:
    """Copy whole cache blocks, all pairs in one kernel: copy-on-write of a forked sequence.

    Args:
        k_cache, v_cache: (num_blocks, block_size, Hk, D) and (..., Dv).
        block_pairs: (n, 2) int64 or int32, rows (source, destination); no block is both. Looked at
            on a CPU only; a GPU skips a pair that lies outside of the cache.
        k_scale, v_scale: as for `write_kv_cache`; those of each token and head are copied too.
        backend: "cpu", "triton" or "reference"; None chooses.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `paged_attention`.

    Source: PagedAttention (2023), the fused block-copy kernel.

    Example:
        >>> copy_blocks(k_cache, v_cache, torch.tensor([[0, 7], [3, 8]]))
    """
    if unknown:
        raise unknown_keyword(copy_blocks, unknown)
    _copy_blocks(k_cache, v_cache, k_scale, v_scale, _widened(block_pairs), backend)


def _widened(ids: Tensor) -> Tensor:
    """Return int32 ids as int64, which kernels read; other tensors are returned unchanged."""
    return ids.long() if ids.dtype is torch.int32 else ids


def _check_copy(
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    block_pairs: Tensor,
    backend: str | None,
) -> None:
    check_cache_pair(k_cache, v_cache)
    check_scales(k_cache, k_scale, v_scale)
    checks.check_integers("block_pairs", block_pairs, tuple(block_pairs.shape), k_cache.device)
    if block_pairs.dim() != 2 or block_pairs.shape[1] != 2:
        raise ValueError(f"block_pairs must be (n, 2), got shape {tuple(block_pairs.shape)}")
    dispatch.check_backend_name(backend)
    if values.WAITS:
        values.check_ids("block_pairs", block_pairs, 0, k_cache.shape[0] - 1)


def _check_rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    interleaved: bool,
    backend: str | None,
) -> None:
    _check_write(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, backend)
    num_tokens, head_dim = k.shape[0], k.shape[2]
    checks.check_same_dtype("q", q, k.dtype)
    checks.check_dims("q", q, "(T, Hq, D)")
    checks.check_shape("q", q, (num_tokens, q.shape[1], head_dim))
    checks.check_device("q", q, k.device)
    checks.check_last_dim_contiguous("q", q)
    for name, table in (("cos", cos), ("sin", sin)):
        checks.check_same_dtype(name, table, torch.float32)
        checks.check_dims(name, table, "(T, R / 2)")
        checks.check_shape(name, table, (num_tokens, cos.shape[1]))
        checks.check_device(name, table, k.device)
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos must have at most D / 2 = {head_dim // 2} columns, got {cos.shape[1]}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must come together, got only one of them")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            checks.check_float(name, weight)
            checks.check_shape(name, weight, (head_dim,))
            checks.check_device(name, weight, k.device)


def _check_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    slot_mapping: Tensor,
    backend: str | None,
) -> None:
    check_cache_pair(k_cache, v_cache)
    check_scales(k_cache, k_scale, v_scale)
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        checks.check_float(name, rows)
        wanted = (slot_mapping.shape[0], cache.shape[2], row_width(cache))
        checks.check_shape(name, rows, wanted)
        checks.check_device(name, rows, k_cache.device)
        checks.check_last_dim_contiguous(name, rows)
    checks.check_dims("slot_mapping", slot_mapping, "(T)")
    checks.check_integers("slot_mapping", slot_mapping, tuple(slot_mapping.shape), k_cache.device)
    dispatch.check_backend_name(backend)
    if values.WAITS:
        num_slots = k_cache.shape[0] * k_cache.shape[1]
        values.check_ids("slot_mapping", slot_mapping, -1, num_slots - 1)


_write_kv_cache = step(cache_op.WRITE, _check_write)
_rope_write_kv_cache = step(cache_op.ROPE_WRITE, _check_rope_write)
_copy_blocks = step(cache_op.COPY, _check_copy)
