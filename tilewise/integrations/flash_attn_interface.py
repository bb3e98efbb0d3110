"""FlashAttention-3's module flash_attn_interface on tilewise's kernels, on any device.

Names, order and defaults of the arguments, shapes and meaning are those of the module that
flash-attn builds in its folder hopper. Arguments that only tune a kernel (num_splits, pack_gqa,
sm_margin, scheduler_metadata) are accepted and have no effect; unsupported arguments are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.integrations import flash_attn
from tilewise.integrations.flash_attn.cache import PagedCache, RowCache
from tilewise.integrations.flash_attn.chunks import check_chunk, cut_cached, cut_packed
from tilewise.integrations.flash_attn.eight_bits import (
    E4M3,
    attend_in_8_bits,
    descales_of,
    refuse_descales,
)
from tilewise.integrations.flash_attn.kvcache import append_and_attend
from tilewise.integrations.flash_attn.kvcache_checks import (
    check_caches,
    check_leftpad,
    check_rows,
    check_seqlens,
)
from tilewise.integrations.flash_attn.packing import edges_of, rows_in, rows_of
from tilewise.integrations.flash_attn.pages import can_page, check_block_table, paged_options
from tilewise.integrations.flash_attn.rule import Rule, WindowSize, host_int
from tilewise.ops import checks, values

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend from every query to the keys it may see; FlashAttention-3's dense call.

    Args:
        q: (B, Sq, Hq, D); k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), Hq a multiple of Hk; or all
            three float8_e4m3fn, of which a backward pass is refused.
        q_descale, k_descale, v_descale: float32 (B, Hk), the factors of 8-bit numbers; a query head
            has the factor of its key head; 1 when None; only with 8-bit tensors.
        softmax_scale, causal, window_size, softcap, deterministic: as in
            `tilewise.integrations.flash_attn.flash_attn_func`.
        qv: refused unless None.
        attention_chunk: with a size c, a query at position p = i + Sk - Sq sees only keys of its
            own chunk, floor(p / c) * c ... + c - 1, as in Llama 4; 0 is off. Gradients flow.
        num_splits, pack_gqa, sm_margin: arguments without effect.
        return_attn_probs: True to also return softmax_lse.

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype, bfloat16 for 8 bits; with return_attn_probs also
        softmax_lse (B, Hq, Sq), float32, natural log.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention`.

    Source: the interface of FlashAttention-3 (hopper/flash_attn_interface.py).

    Example:
        >>> q = k = v = torch.randn(1, 128, 8, 64, requires_grad=True)
        >>> flash_attn_func(q, k, v, causal=True).sum().backward()
    """
    _refuse(qv=qv)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if attention_chunk:
        checks.check_dims("q", q, "(B, Sq, Hq, D)")
        checks.check_dims("k", k, "(B, Sk, Hk, D)")
        checks.check_dims("v", v, "(B, Sk, Hk, Dv)")
        batch, seqlens = q.shape[0], (q.shape[1], k.shape[1])
        starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        out, lse = flash_attn_varlen_func(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            starts * seqlens[0],
            starts * seqlens[1],
            *seqlens,
            None,
            None,
            softmax_scale,
            causal,
            None,
            q_descale,
            k_descale,
            v_descale,
            window_size,
            attention_chunk,
            softcap,
            deterministic=deterministic,
            return_attn_probs=True,
        )
        shape = (batch, q.shape[1])
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
        return (out, lse) if return_attn_probs else out
    if q.dtype != E4M3:
        refuse_descales(q, descales)
        given = 0.0, softmax_scale, causal, window_size, softcap, None, deterministic
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, *given, return_attn_probs=True)
        return (out, lse) if return_attn_probs else out
    rule = Rule.of(q, softmax_scale, causal, window_size, softcap, None)
    results = attend_in_8_bits(q, k, v, rule, descales, q.shape[0])
    return results if return_attn_probs else results[0]


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_func` does, with q, k and v in one tensor.

    Args:
        qkv: (B, S, 3, H, D), or with num_heads_q (B, S, num_heads_q + 2 Hk, D).
        num_heads_q: query heads of a qkv of four dims.
        softmax_scale, causal, q_descale, k_descale, v_descale, window_size, attention_chunk,
            softcap, deterministic, sm_margin, return_attn_probs: as in `flash_attn_func`.

    Returns:
        out (B, S, Hq, D), or (out, softmax_lse), as `flash_attn_func`.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `flash_attn_func`.

    Source: the interface of FlashAttention-3 (hopper/flash_attn_interface.py).

    Example:
        >>> out = flash_attn_qkvpacked_func(torch.randn(1, 128, 12, 64), num_heads_q=8)
    """
    if qkv.dim() == 5:
        checks.check_shape("qkv", qkv, (*qkv.shape[:2], 3, *qkv.shape[3:]))
        q, k, v = qkv.unbind(2)
    else:
        checks.check_dims("qkv", qkv, "(B, S, Hq + 2 * Hk, D)")
        if num_heads_q is None:
            raise ValueError("num_heads_q must be given with a qkv of four dims, got None")
        if num_heads_q > qkv.shape[2] or (qkv.shape[2] - num_heads_q) % 2:
            raise ValueError(
                f"num_heads_q must leave an even number of {qkv.shape[2]} heads, got {num_heads_q}"
            )
        num_kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, num_kv_heads, num_kv_heads], 2)
    descales = q_descale, k_descale, v_descale
    given = softmax_scale, causal, None, *descales, window_size, attention_chunk, softcap
    return flash_attn_func(
        q, k, v, *given, deterministic=deterministic, return_attn_probs=return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attend within each of several packed sequences; FlashAttention-3's call without padding.

    Args:
        q: (Tq, Hq, D); k, v: (Tk, Hk, D) and (Tk, Hk, Dv); or all three float8_e4m3fn, of which a
            backward pass is refused.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, start at 0, never decrease.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens.
        seqused_q, seqused_k: (B,) int32, the numbers of rows, and of keys, of each sequence that
            are used, the first ones; None for all. The diagonal is aligned to the last used row and
            key. Unused rows give out = 0 and softmax_lse = -inf. Values above a sequence's length
            are refused on a CPU only.
        qv, q_descale, k_descale, v_descale, softmax_scale, causal, window_size, attention_chunk,
            softcap, num_splits, pack_gqa, deterministic, sm_margin, return_attn_probs: as in
            `flash_attn_func`, in each sequence's own rows and keys.

    Returns:
        out (Tq, Hq, Dv) in q's dtype, bfloat16 for 8 bits; with return_attn_probs also softmax_lse
        (Hq, Tq), float32.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention_varlen`.

    Source: the interface of FlashAttention-3 (hopper/flash_attn_interface.py).

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, causal=True)
    """
    _refuse(qv=qv)
    check_chunk(attention_chunk)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if q.dtype != E4M3:
        refuse_descales(q, descales)
    edges_q, edges_k = cu_seqlens_q, cu_seqlens_k
    batch = cu_seqlens_q.shape[0] - 1
    out_rows = None
    if seqused_q is not None:
        checks.check_int32("seqused_q", seqused_q, (batch,), q.device)
        values.check_lengths("seqused_q", seqused_q, cu_seqlens_q.diff())
        edges_q = edges_of(seqused_q)
        out_rows = rows_in(q.shape[0], cu_seqlens_q, edges_q)
        q = _taken(q, rows_in(q.shape[0], edges_q, cu_seqlens_q).clamp(min=0))
    if seqused_k is not None:
        checks.check_int32("seqused_k", seqused_k, (batch,), k.device)
        values.check_lengths("seqused_k", seqused_k, cu_seqlens_k.diff())
        edges_k = edges_of(seqused_k)
        taken = rows_in(k.shape[0], edges_k, cu_seqlens_k).clamp(min=0)
        k, v = _taken(k, taken), _taken(v, taken)
    max_seqlen_q, max_seqlen_k, count = host_int(max_seqlen_q), host_int(max_seqlen_k), 1
    if attention_chunk:
        checks.check_int32("cu_seqlens_q", edges_q, (batch + 1,), q.device)
        checks.check_int32("cu_seqlens_k", edges_k, (batch + 1,), q.device)
        edges_q, edges_k, max_seqlen_q, max_seqlen_k, count = cut_packed(
            edges_q, edges_k, max_seqlen_q, max_seqlen_k, attention_chunk
        )
    if q.dtype == E4M3:
        rule = Rule.of(q, softmax_scale, causal, window_size, softcap, None)
        out, lse = attend_in_8_bits(
            q,
            k,
            v,
            rule,
            descales,
            batch,
            count,
            cu_seqlens_q=edges_q,
            cu_seqlens_k=edges_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )
    else:
        given = 0.0, softmax_scale, causal, window_size, softcap, None, deterministic
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q, k, v, edges_q, edges_k, max_seqlen_q, max_seqlen_k, *given, return_attn_probs=True
        )
    if out_rows is not None:
        used, at = out_rows >= 0, out_rows.clamp(min=0)
        out = torch.where(used.view(-1, 1, 1), out[at], 0)
        lse = torch.where(used, lse[:, at], float("-inf"))
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write new keys and values into a cache, in place, and attend to all that it then holds.

    Args:
        q: (B, Sq, Hq, D); or packed (T, Hq, D) with cu_seqlens_q, and then without k and v. 8-bit
            queries, float8_e4m3fn, need an 8-bit cache.
        k_cache, v_cache: (Bc, S, Hk, D) and (Bc, S, Hk, Dv), or with page_table the pages
            (num_blocks, block_size, Hk, D) and (..., Dv), of any block_size; in q's dtype, or
            float8_e4m3fn also for wider q, and then without k and v.
        cache_batch_idx: (B,) int32, the row of the cache, or of the page_table, that each sequence
            has.
        page_table: (B, max_blocks) int32; more rows with cache_batch_idx.
        cu_seqlens_q: (B + 1,) int32, start at 0, never decrease; max_seqlen_q comes with it.
        q_descale, k_descale, v_descale: float32 (B, Hk), the factors of 8-bit numbers; 1 when None;
            k_descale and v_descale only with an 8-bit cache, q_descale with 8-bit q.
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_leftpad, softmax_scale, causal,
            window_size, softcap, rotary_interleaved, num_splits: as in
            `tilewise.integrations.flash_attn.flash_attn_with_kvcache`, but cache_leftpad may come
            with a page_table.
        rotary_seqlens: (B,) int32, the position of the first new token in the rotary tables;
            cache_seqlens when None.
        attention_chunk: as in `flash_attn_func`; positions count from the first key after the left
            padding.
        qv, cu_seqlens_k_new: refused unless None.
        scheduler_metadata, pack_gqa, sm_margin: arguments without effect.
        return_softmax_lse: True to also return softmax_lse and, as FlashAttention-3 does, its two
            buffers of partial results, which are empty here.

    Returns:
        out shaped as q with Dv channels, in q's dtype, or bfloat16 for 8-bit q; softmax_lse (B, Hq,
        Sq) or (Hq, T), float32.

    Raises:
        ValueError, TypeError: an argument breaks another rule above; the message names it.
        UnsupportedError: packed queries or an 8-bit cache come with k, v or rotary tables, with
            several queries of a sequence that are not causal, or with head dims that
            `tilewise.paged_attention` does not take; qv or cu_seqlens_k_new is given; or as in
            `tilewise.paged_attention`.

    Source: the interface of FlashAttention-3 (hopper/flash_attn_interface.py).

    Example:
        >>> out = flash_attn_with_kvcache(q, k_pages, v_pages, cache_seqlens=lengths,
        ...                               page_table=table, causal=True)
    """
    _refuse(qv=qv, cu_seqlens_k_new=cu_seqlens_k_new)
    check_chunk(attention_chunk)
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if page_table is not None and cache_batch_idx is not None:
        checks.check_same_dtype("cache_batch_idx", cache_batch_idx, torch.int32)
        values.check_lengths("cache_batch_idx", cache_batch_idx, page_table.shape[0] - 1)
        page_table, cache_batch_idx = page_table[cache_batch_idx], None
    rule = Rule.of(q, softmax_scale, causal, window_size, softcap, None)
    if cu_seqlens_q is None and k_cache.dtype != E4M3:
        refuse_descales(q, descales)
        results = append_and_attend(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos,
            rotary_sin,
            cache_seqlens,
            cache_batch_idx,
            cache_leftpad,
            page_table,
            rule,
            rotary_interleaved,
            min(num_splits, 1),
            rotary_seqlens=rotary_seqlens,
            attention_chunk=attention_chunk,
            pages_are_padded=True,
        )
    else:
        if any(x is not None for x in (k, v, rotary_cos, rotary_sin, rotary_seqlens)):
            raise UnsupportedError(
                "k, v, rotary_cos and rotary_sin must be None with cu_seqlens_q or an 8-bit cache, "
                "got a tensor; tilewise.rope_write_kv_cache turns and writes packed keys before"
            )
        with torch.no_grad():
            results = _attend_in_place(
                q,
                k_cache,
                v_cache,
                cache_seqlens,
                cache_batch_idx,
                cache_leftpad,
                page_table,
                cu_seqlens_q,
                max_seqlen_q,
                rule,
                descales,
                attention_chunk,
                batch_invariant=num_splits == 1,
            )
    out, lse = results
    unused = out.new_empty(0, dtype=torch.float32)
    return (out, lse, unused, unused) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint parts of the keys into attention over all of them.

    Args:
        out_partial: (splits, B, S, H, D) or packed (splits, T, H, D), float32 or 16 bits.
        lse_partial: (splits, B, S, H) or (splits, T, H), float32; -inf where a part saw nothing.
        out: the tensor into which the result is written and which is returned; None for a new one.
        out_dtype: the dtype of a new tensor; that of out_partial when None.

    Returns:
        out (B, S, H, D) or (T, H, D), and softmax_lse (B, S, H) or (T, H), float32; 0 and -inf
        where no part saw a key.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: the interface of FlashAttention-3 (hopper/flash_attn_interface.py); see
    `tilewise.merge_states`.

    Example:
        >>> out, lse = flash_attn_combine(torch.randn(4, 1, 16, 8, 64), torch.randn(4, 1, 16, 8))
    """
    if out_partial.dim() not in (4, 5) or out_partial.shape[0] < 1:
        raise ValueError(
            "out_partial must be (splits, B, S, H, D) or (splits, T, H, D), "
            f"got shape {tuple(out_partial.shape)}"
        )
    checks.check_shape("lse_partial", lse_partial, tuple(out_partial.shape[:-1]))
    checks.check_same_dtype("lse_partial", lse_partial, torch.float32)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    parts = out_partial.float()  # rounded once, at the end
    result, lse = parts[0], lse_partial[0].transpose(-1, -2)
    for o_next, lse_next in zip(parts[1:], lse_partial[1:], strict=True):
        result, lse = ops.merge_states(result, lse, o_next, lse_next.transpose(-1, -2))
    result = torch.where(lse.isneginf().transpose(-1, -2).unsqueeze(-1), 0.0, result)
    if out is None:
        return result.to(dtype), lse.transpose(-1, -2)
    checks.check_shape("out", out, tuple(result.shape))
    return out.copy_(result), lse.transpose(-1, -2)


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """Return None, which flash_attn_with_kvcache takes as scheduler_metadata: nothing is planned.

    Source: the interface of FlashAttention-3 (hopper/flash_attn_interface.py).
    """
    return None


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows]; float8 tensors are indexed as bytes, since torch's index kernels lack
    float8."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.dtype == E4M3 else x[rows]


def _attend_in_place(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    rule: Rule,
    descales: dict[str, Tensor | None],
    attention_chunk: int,
    *,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Attend with packed queries, or to an 8-bit cache, which is not copied; return out and lse.

    The arguments are those of `flash_attn_with_kvcache`, checked here. Nothing is written. Raises
    UnsupportedError where `paged_attention` cannot run the call.
    """
    packed = cu_seqlens_q is not None
    checks.check_dims("q", q, "(T, Hq, D)" if packed else "(B, Sq, Hq, D)")
    if cu_seqlens_q is None:
        batch, longest = q.shape[:2]
        edges = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * longest
    else:
        if max_seqlen_q is None:
            raise ValueError("max_seqlen_q must be given with cu_seqlens_q, got None")
        checks.check_dims("cu_seqlens_q", cu_seqlens_q, "(B + 1)")
        batch, longest, edges = cu_seqlens_q.shape[0] - 1, host_int(max_seqlen_q), cu_seqlens_q
    check_caches(q, k_cache, v_cache, k_cache.dtype if k_cache.dtype == E4M3 else q.dtype)
    checks.check_heads(q.shape[-2], k_cache.shape[2])
    cache: PagedCache | RowCache
    if page_table is None:
        check_rows(k_cache, batch, cache_batch_idx, cache_leftpad)
        cache = RowCache(k_cache, v_cache, batch, cache_batch_idx, cache_leftpad)
    else:
        check_block_table(page_table, batch, k_cache, v_cache)
        cache = PagedCache(k_cache, v_cache, page_table, cache_leftpad)
        check_leftpad(cache_leftpad, batch, cache.capacity, q.device)
    check_seqlens(cache_seqlens, cache.capacity, batch, q.device)
    if not isinstance(cache_seqlens, Tensor):
        count = cache.capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), count, dtype=torch.int32, device=q.device)
    seqlens_k = cache.lengths(cache_seqlens.clamp(max=cache.capacity))
    of_rows, span = edges, None  # the scales belong to a sequence, also if it is cut
    if attention_chunk:
        edges, seqlens_k, span = cut_cached(
            edges, seqlens_k, cache_leftpad, longest, cache.capacity, attention_chunk
        )
    most = min(longest, attention_chunk or longest)
    blocks = cache.blocks(span) if can_page(rule, k_cache, v_cache, most) else None
    if blocks is None:
        raise UnsupportedError(
            "causal must be set with several packed or 8-bit queries of a sequence, head dims be "
            "multiples of 8 up to 256 and rows lie whole tokens apart, "
            f"got causal or window {rule.window}, head dims {q.shape[-1]} and {v_cache.shape[-1]}"
        )
    k_blocks, v_blocks, table = blocks
    rows = (q if packed else q.flatten(0, 1)).contiguous()
    options = paged_options(rule)
    v_scale = None
    if k_cache.dtype == E4M3:
        num_kv_heads = k_cache.shape[2]
        q_scale, k_scale, v_scale = (
            rows_of(scale, of_rows, rows.shape[0]).repeat_interleave(q.shape[-2] // num_kv_heads, 1)
            for scale in descales_of(batch, num_kv_heads, q.device, descales)
        )
        if q.dtype != E4M3 and descales["q_descale"] is not None:
            raise ValueError(f"q_descale must be None with q of {q.dtype}, got a tensor")
        # paged_attention takes scales of a head or of a token: a sequence's scale is given to its
        # rows.
        dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
        rows = (rows.float() * (q_scale * k_scale).unsqueeze(-1)).to(dtype)
        ones = torch.ones(num_kv_heads, device=q.device)
        options |= {"k_scale": ones, "v_scale": ones}
    else:
        refuse_descales(q, descales)
    out, lse = ops.paged_attention(
        rows,
        k_blocks,
        v_blocks,
        block_table=table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=edges,
        max_seqlen_q=most,
        batch_invariant=batch_invariant,
        return_lse=True,
        **options,
    )
    if v_scale is not None:
        out = (out.float() * v_scale.unsqueeze(-1)).to(out.dtype)
    if packed:
        return out, lse
    return out.unflatten(0, (batch, longest)), lse.unflatten(1, (batch, longest)).transpose(0, 1)


_INSTEAD = {
    "qv": "a query for the latent beside one for its rotated key is tilewise.mla_decode",
    "cu_seqlens_k_new": "tilewise.write_kv_cache or rope_write_kv_cache writes packed keys before",
}


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} must not be given: it is not computed here, got one; {_INSTEAD[name]}"
            )
