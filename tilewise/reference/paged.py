"""Attention over a paged KV cache: gather the blocks of a sequence, then attend to them.

An 8-bit cache has scales, see `quantise`: (N, P, Hk), one for each token and head, written with the
rows; or (Hk,), one for each head, given by the caller and never changed. A cache of 4 bits is uint8
(N, P, Hk, D / 2), with a scale for each token and head, see `four_bits`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.reference import four_bits
from tilewise.reference.quantise import dequantise, quantise, row_scale
from tilewise.reference.rope import apply_rope
from tilewise.reference.standard import Window, attention, resolve_window

__all__ = [
    "copy_blocks",
    "gather_sequence",
    "paged_attention",
    "rms_norm",
    "rope_write_kv_cache",
    "write_kv_cache",
]


def gather_sequence(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return the first `length` tokens that a row of a block table refers to.

    Args:
        cache: (N, P, ...), N blocks of P tokens.
        blocks: (max_blocks,) int, one row of a block table; only the first ceil(length / P)
            entries are read.
        length: the number of tokens, at least 0.

    Returns:
        (length, ...), position t from block blocks[t // P], slot t % P.
    """
    count = -(-length // cache.shape[1])
    return cache[blocks[:count].long()].flatten(0, 1)[:length]


def _gather_values(
    cache: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """Return the first `length` cached rows (length, Hk, D) of a sequence, dequantised to
    `dtype`."""
    stored = gather_sequence(cache, blocks, length)
    if scale is None:
        return stored.to(dtype)
    if stored.dtype == torch.uint8:
        return four_bits.unpack(stored, gather_sequence(scale, blocks, length), dtype)
    scales = scale if scale.dim() == 1 else gather_sequence(scale, blocks, length)
    return dequantise(stored, scales, dtype)


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
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
        k_scale, v_scale: float32 (N, P, Hk) or (Hk,), the scales of an 8-bit cache; of one of 4
            bits (N, P, Hk).
        tree_mask: bool (T, W), in place of the causal rule among the new tokens: row t, column j is
            whether token t sees new token j of its sequence, whose position is seqlens_k - n + j.

    Returns:
        o (T, Hq, Dv) [, lse (Hq, T)]; rows past the last sequence have o = 0, lse = -inf.

    Source: Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention".
    """
    starts, lengths = cu_seqlens_q.tolist(), seqlens_k.tolist()
    outputs, lses = [], []
    for row, length in enumerate(lengths):
        k, v = (
            _gather_values(cache, scale, block_table[row], length, q.dtype).unsqueeze(0)
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
        )
        rows = slice(starts[row], starts[row + 1])
        result = attention(
            q[rows].unsqueeze(0),
            k,
            v,
            causal=tree_mask is None,
            window=window if tree_mask is None else _left_of(window),
            mask=None if tree_mask is None else _tree_keys(tree_mask[rows], length),
            softmax_scale=softmax_scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=True,
        )
        outputs.append(result[0].squeeze(0))
        lses.append(result[1].squeeze(0))
    rest, wide = q.shape[0] - starts[-1], torch.promote_types(q.dtype, torch.float32)
    v_head_dim = v_cache.shape[3] * (2 if v_cache.dtype == torch.uint8 else 1)
    outputs.append(q.new_zeros(rest, q.shape[1], v_head_dim))
    lses.append(q.new_full((q.shape[1], rest), -math.inf, dtype=wide))
    o, lse = torch.cat(outputs), torch.cat(lses, dim=1)
    return (o, lse) if return_lse else o


def _left_of(window: Window) -> Window:
    """Return (left, None), a window's left side alone, or None; the tree mask decides what is
    visible to the right."""
    return None if window is None else (resolve_window(True, window)[0], None)


def _tree_keys(tree_mask: Tensor, length: int) -> Tensor:
    """Return which of `length` keys the n new tokens of a sequence see, bool (n, length)."""
    run = tree_mask.shape[0]
    new = torch.arange(length, device=tree_mask.device) - (length - run)
    padded = torch.nn.functional.pad(tree_mask[:, :run], (0, 1))  # a sequence may have no row
    return (new < 0) | padded[:, new.clamp(min=0, max=padded.shape[1] - 1)]


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into their slots, in place.

    Args:
        k: (T, Hk, D).
        v: (T, Hk, Dv).
        k_cache: (N, P, Hk, D), written in its own dtype.
        v_cache: (N, P, Hk, Dv).
        slot_mapping: (T,) int64, block * P + offset of each row; -1 skips the row.
        k_scale, v_scale: the scales of an 8-bit cache, (N, P, Hk), written too, or (Hk,), read
            only.
    """
    rows = slot_mapping >= 0
    slots, block_size = slot_mapping[rows], k_cache.shape[1]
    at = (slots // block_size, slots % block_size)
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is None:
            cache[at] = new[rows].to(cache.dtype)
            continue
        if cache.dtype == torch.uint8:
            cache[at], scale[at] = four_bits.pack(new[rows])
            continue
        own = scale if scale.dim() == 1 else row_scale(new[rows], cache.dtype)
        # The bytes are written, since index_put_ does not support float8 on some devices.
        cache.view(torch.int8)[at] = quantise(new[rows], own, cache.dtype).view(torch.int8)
        if scale.dim() > 1:
            scale[at] = own


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


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
) -> Tensor:
    """Normalise and rotate q and k, write k and v into the cache, in place, and return the new q.

    Args:
        q: (T, Hq, D); the other tensors as for `write_kv_cache` and `rope.apply_rope`.
        q_norm, k_norm: (D,) weights of an RMS norm before the rotation; None does not normalise.
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, norm_eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, norm_eps)
    k = apply_rope(k, cos, sin, interleaved=interleaved)
    write_kv_cache(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    return apply_rope(q, cos, sin, interleaved=interleaved)


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_pairs: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copy whole blocks, in place: cache[destination] = cache[source] for both caches.

    Args:
        k_cache, v_cache: (N, P, Hk, D) and (N, P, Hk, Dv).
        block_pairs: (n, 2) int64, source and destination; no source is a destination.
        k_scale, v_scale: scales of each token and head (N, P, Hk) are copied too.
    """
    sources, destinations = block_pairs.unbind(dim=1)
    for cache in (k_cache, v_cache, k_scale, v_scale):
        if cache is None or cache.dim() == 1:
            continue
        bits = cache.view(torch.int8) if cache.dtype.itemsize == 1 else cache
        bits[destinations] = bits[sources]
