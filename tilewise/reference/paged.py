"""Attention over a paged KV cache: gather the blocks of a sequence, then attend to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.reference.standard import Window, attention

__all__ = ["copy_blocks", "gather_sequence", "paged_attention", "write_kv_cache"]


def gather_sequence(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens that a row of a block table points at.

    Args:
        cache: (N, P, ...), N blocks of P tokens.
        blocks: (max_blocks,) int, one row of a block table; only the first ceil(length / P)
            entries are read.
        length: tokens, at least 0.

    Returns:
        (length, ...), position t from block blocks[t // P], slot t % P.
    """
    count = -(-length // cache.shape[1])
    return cache[blocks[:count].long()].flatten(0, 1)[:length]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float | None = None,
    window: Window = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from the last tokens of each sequence to its cached keys and values, causally.

    Sequence b owns rows cu_seqlens_q[b] ... cu_seqlens_q[b + 1] - 1 of q, n of them; row i of n
    sees keys j <= seqlens_k[b] - n + i, within `window`.

    Args:
        q: (T, Hq, D).
        k_cache: (N, P, Hk, D), of the dtype of q or one that converts to it.
        v_cache: (N, P, Hk, Dv).
        block_table: (B, max_blocks) int; entries past a sequence's last block are never read.
        seqlens_k: (B,) int, tokens of each sequence with the new ones counted; may be 0.
        cu_seqlens_q: (B + 1,) int, ascending from 0.
        softmax_scale, window, softcap, alibi_slopes, sinks: as for `standard.attention`.

    Returns:
        o (T, Hq, Dv) [, lse (Hq, T)]; rows past the last sequence have o = 0, lse = -inf.

    Source: Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention".
    """
    starts, lengths = cu_seqlens_q.tolist(), seqlens_k.tolist()
    outputs, lses = [], []
    for row, length in enumerate(lengths):
        k, v = (
            gather_sequence(cache, block_table[row], length).to(q.dtype).unsqueeze(0)
            for cache in (k_cache, v_cache)
        )
        result = attention(
            q[starts[row] : starts[row + 1]].unsqueeze(0),
            k,
            v,
            causal=True,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=True,
        )
        outputs.append(result[0].squeeze(0))
        lses.append(result[1].squeeze(0))
    rest, wide = q.shape[0] - starts[-1], torch.promote_types(q.dtype, torch.float32)
    outputs.append(q.new_zeros(rest, q.shape[1], v_cache.shape[3]))
    lses.append(q.new_full((q.shape[1], rest), -math.inf, dtype=wide))
    o, lse = torch.cat(outputs), torch.cat(lses, dim=1)
    return (o, lse) if return_lse else o


def write_kv_cache(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values into their slots, in place.

    Args:
        k: (T, Hk, D).
        v: (T, Hk, Dv).
        k_cache: (N, P, Hk, D), written in its own dtype.
        v_cache: (N, P, Hk, Dv).
        slot_mapping: (T,) int64, block * P + offset of each row; -1 skips the row.
    """
    rows = slot_mapping >= 0
    slots, block_size = slot_mapping[rows], k_cache.shape[1]
    for new, cache in ((k, k_cache), (v, v_cache)):
        cache[slots // block_size, slots % block_size] = new[rows].to(cache.dtype)


def copy_blocks(k_cache: Tensor, v_cache: Tensor, block_pairs: Tensor) -> None:
    """Copy whole blocks, in place: cache[destination] = cache[source] for both caches.

    Args:
        k_cache, v_cache: (N, P, Hk, D) and (N, P, Hk, Dv).
        block_pairs: (n, 2) int64, source and destination; no source is a destination.
    """
    sources, destinations = block_pairs.unbind(dim=1)
    for cache in (k_cache, v_cache):
        cache[destinations] = cache[sources]
