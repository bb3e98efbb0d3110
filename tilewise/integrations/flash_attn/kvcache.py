"""flash_attn_with_kvcache(): append to a cache in place, rotate, and attend; for inference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.integrations.flash_attn.cache import PagedCache, RowCache
from tilewise.integrations.flash_attn.chunks import check_chunk, cut_cached
from tilewise.integrations.flash_attn.kvcache_checks import check_call
from tilewise.integrations.flash_attn.pages import can_page, paged_options
from tilewise.integrations.flash_attn.rule import Rule, WindowSize, padded
from tilewise.ops import checks


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Write new keys and values into a cache, in place, and attend to all that it then holds.

    Sequence b has L = cache_seqlens[b] tokens in the cache before the call and L + Sn after it; the
    queries are aligned to the last of them, as in `flash_attn_func`. There are no gradients.

    Args:
        q: (B, Sq, Hq, D).
        k_cache, v_cache: (Bc, S, Hk, D) and (Bc, S, Hk, Dv), B at most Bc; with block_table the
            pages (num_blocks, block_size, Hk, D) and (..., Dv), of any block_size. Last dim
            contiguous.
        k, v: (B, Sn, Hk, D) and (B, Sn, Hk, Dv), written to positions L ... L + Sn - 1.
        rotary_cos, rotary_sin: (R, r / 2) with r <= D, a row a position, R at least the capacity of
            a sequence. k is rotated by position L + i before it is written; q by L + i when causal
            or windowed, otherwise all of it by L. Positions after the last row are not rotated.
            Only with k and v.
        cache_seqlens: int or (B,) int32, L, leftpad included; None means a full cache.
        cache_batch_idx: (B,) int32, the row of the cache that holds each sequence; row b when None.
        cache_leftpad: (B,) int32, the start of each sequence in its row; 0 when None.
        block_table: (B, max_blocks) int32; not with cache_batch_idx or cache_leftpad.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
        rotary_interleaved: True to pair channels (2i, 2i + 1), False for (i, i + r / 2).
        num_splits: the number of splits of the keys. Here it is only a hint, except that 1 also
            asks that the bits of a sequence do not depend on the rest of the batch.
        return_softmax_lse: True to return softmax_lse, too.

    Returns:
        out (B, Sq, Hq, Dv); with return_softmax_lse also softmax_lse (B, Hq, Sq), float32, natural
        log, -inf where nothing is seen.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it. A tensor
            cache_seqlens is not read: tokens beyond the capacity are neither written nor seen.
        UnsupportedError: as in `tilewise.paged_attention` and `tilewise.attention`.

    Source: the interface of flash-attn 2.8; PagedAttention (2023), flash-decoding (2023).

    Example:
        >>> k_cache = v_cache = torch.zeros(1, 512, 8, 64)
        >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True)
    """
    out, lse = append_and_attend(
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
        block_table,
        Rule.of(q, softmax_scale, causal, window_size, softcap, alibi_slopes),
        rotary_interleaved,
        num_splits,
    )
    return (out, lse) if return_softmax_lse else out


def append_and_attend(
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
    rule: Rule,
    rotary_interleaved: bool,
    num_splits: int,
    *,
    rotary_seqlens: Tensor | None = None,
    attention_chunk: int = 0,
    pages_are_padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Append k and v to the cache and attend; return out (B, Sq, Hq, Dv) and lse (B, Hq, Sq).

    The arguments are those of `flash_attn_with_kvcache`, with FlashAttention-3's additions. It
    checks them, and runs without gradients.

    Args:
        rule: the scale, window, softcap and slopes of the call.
        rotary_seqlens: (B,) int32, the position of the first new token in the rotary tables; L when
            None.
        attention_chunk: the number of keys of a chunk, see `chunks`; 0 is off.
        pages_are_padded: True if cache_leftpad may come with a block_table.
    """
    check_call(
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
        block_table,
        num_splits,
        rotary_seqlens,
        pages_are_padded=pages_are_padded,
    )
    check_chunk(attention_chunk)
    batch, seqlen_q = q.shape[:2]
    cache: PagedCache | RowCache
    if block_table is not None:
        cache = PagedCache(k_cache, v_cache, block_table, cache_leftpad)
    else:
        cache = RowCache(k_cache, v_cache, batch, cache_batch_idx, cache_leftpad)
    with torch.no_grad():
        seqlens = cache_seqlens
        if not isinstance(seqlens, Tensor):
            count = cache.capacity if seqlens is None else seqlens
            seqlens = torch.full((batch,), count, dtype=torch.int32, device=q.device)
        if k is not None and v is not None:
            if rotary_cos is not None and rotary_sin is not None:
                angles, moves = (rotary_cos, rotary_sin), rule.window != (-1, -1)
                moves = moves or attention_chunk > 0
                first = seqlens if rotary_seqlens is None else rotary_seqlens
                k = _rotate(k, _positions(first, k.shape[1]), *angles, rotary_interleaved)
                positions = _positions(first, seqlen_q) if moves else first.view(-1, 1)
                q = _rotate(q, positions.expand(batch, seqlen_q), *angles, rotary_interleaved)
            _append(cache, k, v, seqlens)
            seqlens = seqlens + k.shape[1]
        seqlens_k = cache.lengths(seqlens.clamp(max=cache.capacity))
        is_invariant = num_splits == 1
        if attention_chunk > 0:
            return _attend_chunks(q, cache, seqlens_k, rule, attention_chunk, is_invariant)
        blocks = cache.blocks() if can_page(rule, k_cache, v_cache, seqlen_q) else None
        if blocks is None:
            return _attend_dense(q, *cache.dense(), seqlens_k, rule)
        return _attend_blocks(q, *blocks, seqlens_k, rule, batch_invariant=is_invariant)


def _attend_chunks(
    q: Tensor,
    cache: PagedCache | RowCache,
    seqlens_k: Tensor,
    rule: Rule,
    size: int,
    is_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Attend from q (B, Sq, Hq, D) to the cached keys of each query's own chunk of `size` keys.

    Returns out (B, Sq, Hq, Dv) and lse (B, Hq, Sq).
    """
    batch, seqlen_q = q.shape[:2]
    edges = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    edges, lengths, span = cut_cached(
        edges, seqlens_k, cache.leftpad, seqlen_q, cache.capacity, size
    )
    longest = min(size, seqlen_q)
    blocks = cache.blocks(span) if can_page(rule, cache.k, cache.v, longest) else None
    if blocks is not None:
        o, lse = ops.paged_attention(
            checks.with_packed_rows(q).flatten(0, 1),
            *blocks[:2],
            block_table=blocks[2],
            seqlens_k=lengths,
            cu_seqlens_q=edges,
            max_seqlen_q=longest,
            **paged_options(rule),
            batch_invariant=is_invariant,
            return_lse=True,
        )
    else:
        # The queries of a piece end where its keys do, so they stand at the end of its rows.
        rows = torch.arange(batch * seqlen_q, device=q.device)
        piece = torch.searchsorted(edges[1:], rows, right=True).clamp(max=len(lengths) - 1)
        place = rows - edges[piece + 1] + longest
        wide = q.new_zeros((len(lengths), longest, *q.shape[2:]))
        wide[piece, place] = q.flatten(0, 1)
        o, lse = _attend_dense(wide, *cache.dense(span), lengths, rule)
        o, lse = o[piece, place], lse[piece, :, place].transpose(0, 1)
    return o.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)


def _attend_dense(
    q: Tensor, keys: Tensor, values: Tensor, seqlens_k: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Run `ops.attention` on q (B, Sq, Hq, D) and the first seqlens_k of n keys; return out and
    lse.

    keys and values are (B, n, Hk, D) and (B, n, Hk, Dv); out is (B, Sq, Hq, Dv), lse (B, Hq, Sq).
    """
    out, lse = ops.attention(
        padded(q),
        padded(keys),
        padded(values),
        **rule._asdict(),
        seqlens_k=seqlens_k,
        return_lse=True,
    )
    return out[..., : values.shape[-1]], lse


def _positions(seqlens: Tensor, count: int) -> Tensor:
    """Return the positions seqlens + i of `count` new tokens of each sequence: (B, count)."""
    first = seqlens.view(-1, 1)
    return first if count == 1 else first + torch.arange(count, device=seqlens.device)


def _rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (B, S, H, D) rotated by the angles of positions (B, S); not rotated beyond the
    tables."""
    known = positions < cos.shape[0]
    at = torch.where(known, positions, 0)
    rows = (
        torch.where(known.unsqueeze(-1), table[at], unturned)
        for table, unturned in ((cos, 1.0), (sin, 0.0))
    )
    angles = (row if row.element_size() >= 4 else row.float() for row in rows)
    return ops.apply_rope(checks.with_packed_rows(x), *angles, interleaved=interleaved)


def _append(cache: PagedCache | RowCache, k: Tensor, v: Tensor, seqlens: Tensor) -> None:
    """Write k and v (B, Sn, Hk, D) into the cache, in place, from position seqlens (B,) of each
    sequence on.

    Tokens beyond the capacity are not written.
    """
    positions = _positions(seqlens, k.shape[1]).long()
    fits = positions < cache.capacity
    places = torch.where(fits, cache.places(torch.where(fits, positions, 0)), -1)
    k, v = (checks.with_packed_rows(x).flatten(0, 1) for x in (k, v))
    k_blocks, v_blocks = cache.writable()
    ops.write_kv_cache(k, v, k_blocks, v_blocks, places.flatten())


def _attend_blocks(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    rule: Rule,
    *,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """Run paged_attention on q (B, Sq, Hq, D); return out (B, Sq, Hq, Dv) and lse (B, Hq, Sq)."""
    batch, seqlen_q = q.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen_q
    o, lse = ops.paged_attention(
        checks.with_packed_rows(q).flatten(0, 1),
        k_blocks,
        v_blocks,
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=starts,
        max_seqlen_q=seqlen_q,
        **paged_options(rule),
        batch_invariant=batch_invariant,
        return_lse=True,
    )
    return o.unflatten(0, (batch, seqlen_q)), lse.unflatten(1, (batch, seqlen_q)).transpose(0, 1)
