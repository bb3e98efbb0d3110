"""mla_attention() and mla_prefill(): latent attention over up-projected keys and values."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor

from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch, values
from tilewise.ops.attention.api import attention, attention_varlen
from tilewise.ops.latent.arguments import check_latent_cache, check_step, check_up_projections
from tilewise.ops.merge import merge_states
from tilewise.reference.mla import dequantise_latents

CHUNK_TOKENS = 4096  # 320 MiB of keys and values: 128 heads x (192 + 128) channels x 2 bytes each


def mla_attention(
    q: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, **options: Any
) -> Any:
    """Attend over keys and values that are projected up from latents: training and whole prompts.

    k_h = [latent w_uk,h^T  k_rope], v_h = latent w_uv,h^T, then `attention` of the dense (B, S)
    layout, or `attention_varlen` of the packed (T) one. Differentiable in every tensor.

    Args:
        q: (B, Sq, Hq, Dn + Dr), or packed (Tq, Hq, Dn + Dr); the last Dr channels rotated.
        latent: (B, Sk, R) or (Tk, R), same dtype.
        k_rope: (B, Sk, Dr) or (Tk, Dr), rotated, shared by all heads.
        w_uk: (Hq, Dn, R); w_uv: (Hq, Dv, R): rows as nn.Linear keeps them, so that both are views
            of one up-projection.
        options: keywords of `attention`, or for packed tensors of `attention_varlen`:
            causal, softmax_scale ((Dn + Dr) ** -0.5 by default), return_lse, ...

    Returns:
        o (..., Hq, Dv); with return_lse=True also lse.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `attention`.

    Source: DeepSeek-V2 (2024), equations 9 to 19.

    Example:
        >>> o = mla_attention(q, latent, k_rope, w_uk, w_uv, causal=True)
    """
    checks.check_float("q", q)
    if q.dim() not in (3, 4):
        raise ValueError(
            f"q must be (B, Sq, Hq, Dn + Dr) or (Tq, Hq, Dn + Dr), got shape {tuple(q.shape)}"
        )
    layouts = ("(B, Sk, R)", "(B, Sk, Dr)") if q.dim() == 4 else ("(Tk, R)", "(Tk, Dr)")
    for name, tensor, layout in (
        ("latent", latent, layouts[0]),
        ("k_rope", k_rope, layouts[1]),
    ):
        checks.check_same_dtype(name, tensor, q.dtype)
        checks.check_device(name, tensor, q.device)
        checks.check_dims(name, tensor, layout)
    checks.check_shape("k_rope", k_rope, (*latent.shape[:-1], k_rope.shape[-1]))
    check_up_projections(q, latent.shape[-1], k_rope.shape[-1], w_uk, w_uv)
    k, v = _expand(latent, k_rope, w_uk, w_uv)
    attend = attention if q.dim() == 4 else attention_varlen
    return attend(q, k, v, **options)


@names
def mla_prefill(
    q: Tensor,
    latent_cache: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    latent_scale: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from prompt chunks to cached latents, projected up a range of positions at a time.

    The new tokens of each sequence come first, causally; then the earlier ones, chunk_tokens of
    them at once over the whole batch, merged by log-sum-exp in float32. However long the history
    is, no more than chunk_tokens or T keys and values exist. Beyond
    R (Dn + Dv) / (2 R - Dn - Dv) new tokens (171 for DeepSeek-V3) this takes fewer FLOPs than
    `mla_decode`. No gradient.

    Args:
        q: (T, Hq, Dn + Dr), the last Dr channels rotated.
        latent_cache: (num_blocks, block_size, R + Dr); R is that of w_uk.
        w_uk, w_uv: as in `mla_attention`.
        block_table, seqlens_k, cu_seqlens_q, max_seqlen_q: as in `mla_decode`.
        max_seqlen_k: host int, at least the longest sequence, looked at on a CPU only; bounds the
            ranges that are walked. None reads it on a CPU, and is the width of the table elsewhere.
        softmax_scale: (Dn + Dr) ** -0.5 when None.
        latent_scale: the scales of an 8-bit cache, as in `mla_decode`.
        chunk_tokens: cached tokens that are up-projected at once, over all sequences.
        return_lse: True to also return lse (Hq, T), float32, natural log.
        backend: "cpu", "triton" or "reference", for the attention and the merging; None chooses.

    Returns:
        o (T, Hq, Dv) in q's dtype; with return_lse also lse. Rows past the last sequence hold
        nothing meaningful.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `mla_decode`.

    Source: DeepSeek-V2 (2024), section 2.1; the merge is FlashAttention (2022), section 3.1.

    Example:
        >>> o = mla_prefill(q, latent_cache, w_uk, w_uv, block_table=table, seqlens_k=lengths,
        ...                 cu_seqlens_q=starts, max_seqlen_q=512)
    """
    if unknown:
        raise unknown_keyword(mla_prefill, unknown)
    checks.check_float("q", q)
    checks.check_dims("q", q, "(T, Hq, Dn + Dr)")
    checks.check_dims("w_uk", w_uk, "(Hq, Dn, R)")
    rank, rope_dim = w_uk.shape[2], q.shape[2] - w_uk.shape[1]
    if rope_dim < 0:
        raise ValueError(
            f"w_uk must have at most q's {q.shape[2]} channels a head, got {w_uk.shape[1]}"
        )
    check_latent_cache(latent_cache, latent_scale, rank + rope_dim, "w_uk's R and q's Dr together")
    checks.check_device("latent_cache", latent_cache, q.device)
    check_up_projections(q, rank, rope_dim, w_uk, w_uv)
    max_seqlen_q = check_step(q, block_table, seqlens_k, cu_seqlens_q, max_seqlen_q)
    block_table, seqlens_k, cu_seqlens_q = map(
        checks.as_int32, (block_table, seqlens_k, cu_seqlens_q)
    )
    dispatch.check_backend_name(backend)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    num_seqs, num_tokens = block_table.shape[0], q.shape[0]
    scale = checks.scale_of(softmax_scale, q.shape[2])
    runs = cu_seqlens_q.diff()
    seqlens_k = values.check_step(block_table, seqlens_k, cu_seqlens_q, num_tokens, latent_cache)
    if 0 in (block_table.shape[1], *latent_cache.shape[:2]):  # there is no key
        block_table = block_table.new_zeros(num_seqs, 1)
        latent_cache = latent_cache.new_zeros(1, 1, latent_cache.shape[2])
        if latent_scale is not None:
            latent_scale = latent_scale.new_zeros(1, 1, 2)
    history = (seqlens_k - runs).clamp(min=0)
    if max_seqlen_k is not None and values.readable(seqlens_k):
        longest = max(seqlens_k.tolist(), default=0)
        if max_seqlen_k < longest:
            raise ValueError(
                f"max_seqlen_k must be at least {longest}, the longest sequence, got {max_seqlen_k}"
            )

    def attend(first: Tensor, counts: Tensor, total: int, longest: int, causal: bool) -> Any:
        slots, owned, cu_seqlens_k = _slots(latent_cache, block_table, first, counts, total)
        if latent_scale is None:
            rows = _gather(latent_cache, slots, owned).to(q.dtype)
        else:
            stored, scales = (_gather(x, slots, owned) for x in (latent_cache, latent_scale))
            rows = dequantise_latents(stored, scales, rank, q.dtype)
        z, k_rope = rows.split_with_sizes((rank, rope_dim), dim=-1)
        k, v = _expand(z, k_rope, w_uk, w_uv)
        return attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=longest,
            causal=causal,
            softmax_scale=scale,
            return_lse=True,
            backend=backend,
        )

    o, lse = attend(history, torch.minimum(runs, seqlens_k), num_tokens, max_seqlen_q, True)
    keys = max(1, chunk_tokens // max(1, num_seqs))
    for start in range(0, _longest(history, max_seqlen_k, block_table, latent_cache), keys):
        first = torch.full_like(history, start)
        counts = (history - start).clamp(0, keys)
        o_part, lse_part = attend(first, counts, num_seqs * keys, keys, False)
        real = lse.dtype
        o, lse = merge_states(o.to(real), lse, o_part.to(real), lse_part, backend=backend)
    o = o.to(q.dtype)
    return (o, lse) if return_lse else o


def _longest(
    history: Tensor, max_seqlen_k: int | None, block_table: Tensor, latent_cache: Tensor
) -> int:
    """Return a bound of the cached tokens before a sequence's new ones, without a synchronisation.

    On a CPU it is the largest number in `history` (B,); elsewhere, and while torch compiles, it is
    max_seqlen_k, or the tokens of a row of the block table if that is smaller or max_seqlen_k is
    None.
    """
    if history.device.type == "cpu" and not torch.compiler.is_compiling():
        return int(history.max()) if history.numel() else 0
    most: int = block_table.shape[1] * latent_cache.shape[1]
    return most if max_seqlen_k is None else min(most, max_seqlen_k)


def _expand(latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """Return k (..., Hq, Dn + Dr) and v (..., Hq, Dv) of latents (..., R) and k_rope (..., Dr)."""
    k_nope = torch.einsum("...r,hdr->...hd", latent, w_uk)
    shared = k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], k_rope.shape[-1])
    return torch.cat([k_nope, shared], dim=-1), torch.einsum("...r,hdr->...hd", latent, w_uv)


def _slots(
    latent_cache: Tensor, block_table: Tensor, first: Tensor, counts: Tensor, total: int
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Find the cached rows of tokens first[b] ... first[b] + counts[b] - 1 of each sequence b.

    The rows are packed, sequence after sequence. Nothing waits for the device.

    Args:
        first, counts: (B,), the first token of each sequence and the number of tokens.
        total: the number of rows to return, at least the sum of counts.

    Returns:
        The block of each row and its place within the block, (total,) each; bool (total,), True
        for rows that exist, which come first; and cu_seqlens int32 (B + 1,) of these.
    """
    block_size = latent_cache.shape[1]
    cu_seqlens = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    row = torch.arange(total, device=counts.device)
    owned = row < cu_seqlens[-1]
    seq = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp(max=counts.shape[0] - 1)
    position = torch.where(owned, first[seq] + row - cu_seqlens[seq], 0)
    # A GPU refuses neither a length beyond the table nor an id of no block without a wait.
    column = (position // block_size).clamp(0, block_table.shape[1] - 1)
    block = torch.where(owned, block_table[seq, column], 0).clamp(0, latent_cache.shape[0] - 1)
    return (block, position % block_size), owned, cu_seqlens.int()


def _gather(cache: Tensor, slots: tuple[Tensor, Tensor], owned: Tensor) -> Tensor:
    """Return rows (total, channels) of a cache, zeros where a row does not exist.

    Args:
        cache: (num_blocks, block_size, channels).
        slots: the block of each row and its place within the block, from `_slots`.
        owned: bool (total,), True for rows that exist.
    """
    # Bytes are moved: indexing knows no float8 on some devices.
    bits = cache.view(torch.int8) if cache.dtype.itemsize == 1 else cache
    return torch.where(owned[:, None], bits[slots], 0).view(cache.dtype)
