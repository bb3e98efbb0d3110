"""flash_attn_func() and flash_attn_varlen_func(): dense and packed attention, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.integrations.flash_attn.pages import (
    can_page,
    check_block_table,
    pack_pages,
    paged_options,
)
from tilewise.integrations.flash_attn.probabilities import dense_rows, signed_probabilities
from tilewise.integrations.flash_attn.rule import Rule, WindowSize, host_int, padded
from tilewise.ops import checks, values
from tilewise.ops.attention.dropout import philox_of, scaled_as_given


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend from every query to the keys it may see; flash-attn's dense call.

    The rule is that of `tilewise.attention`; causal and window are aligned to the bottom right.

    Args:
        q: (B, Sq, Hq, D); k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), Hq a multiple of Hk. D need not
            be a multiple of 8: zero channels are added, and the default scale uses the true D.
        dropout_p: probability of dropping each weight, rounded to a multiple of 1/256; kept
            weights are multiplied by 1 / (1 - dropout_p) of the exact dropout_p, both as in
            flash-attn. The seed comes from torch's generator of q's device, so torch.manual_seed
            and activation checkpointing repeat it.
        softmax_scale: D ** -0.5 when None.
        window_size: (left, right) keys around the diagonal; negative is unlimited.
        softcap: bound of the logits; 0 or less is off.
        alibi_slopes: (Hq,) or (B, Hq); adds -slope * |i + Sk - Sq - j|.
        deterministic: True if the backward pass must be bitwise reproducible.
        return_attn_probs: True to also return softmax_lse and S_dmask.

    Returns:
        out (B, Sq, Hq, Dv); with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse
        (B, Hq, Sq), float32, natural log, differentiable, -inf where nothing is seen; S_dmask
        empty without dropout, else (B, Hq, Sq, Sk) as in `signed_probabilities`, O(Sq Sk) memory.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention`.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> q = k = v = torch.randn(1, 128, 8, 64, requires_grad=True)
        >>> flash_attn_func(q, k, v, causal=True).sum().backward()
    """
    rule = Rule.of(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, deterministic
    )
    seed = philox_of(None, q.device) if dropout_p > 0 and return_attn_probs else None
    out, lse = ops.attention(
        padded(q), padded(k), padded(v), **rule._asdict(), seed=seed, return_lse=True
    )
    out = scaled_as_given(out[..., : v.shape[-1]], dropout_p)
    if not return_attn_probs:
        return out
    if seed is None:
        return out, lse, q.new_empty(0)
    return out, lse, signed_probabilities(q, k, rule, seed)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attend within each of several packed sequences; flash-attn's call without padding.

    Args:
        q: (Tq, Hq, D); k, v: (Tk, Hk, D) and (Tk, Hk, Dv), or with block_table the pages
            (num_blocks, block_size, Hk, D) and (..., Dv), of any block_size.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, start at 0, never decrease.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens.
        block_table: (B, max_blocks) int32; the cu_seqlens_k[b + 1] - cu_seqlens_k[b] keys of
            sequence b lie in these blocks, in order; later entries are not read. Gradients flow
            into the pages.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`, in each sequence's own rows and keys.

    Returns:
        out (Tq, Hq, Dv); with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse (Hq, Tq);
        S_dmask empty without dropout, else (B, Hq, max_seqlen_q, max_seqlen_k), 0 past the end of a
        sequence.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention_varlen`.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> out = flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, causal=True)
    """
    rule = Rule.of(
        q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, deterministic
    )
    max_seqlen_q, max_seqlen_k = host_int(max_seqlen_q), host_int(max_seqlen_k)
    width = v.shape[-1]
    if block_table is not None:
        checks.check_dims("cu_seqlens_k", cu_seqlens_k, "(B + 1)")
        checks.check_int32("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), q.device)
        batch = cu_seqlens_k.shape[0] - 1
        check_block_table(block_table, batch, k, v)
        if can_page(rule, k, v, max_seqlen_q) and not _needs_gradient(q, k, v):
            out, lse = ops.paged_attention(
                checks.with_packed_rows(q),
                k,
                v,
                block_table=block_table,
                seqlens_k=cu_seqlens_k.diff(),
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=max_seqlen_q,
                **paged_options(rule),
                return_lse=True,
            )
            return (out, lse, q.new_empty(0)) if return_attn_probs else out
        values.check_edges("cu_seqlens_k", cu_seqlens_k, batch * max_seqlen_k)
        lengths_k = cu_seqlens_k.diff()
        values.check_lengths("cu_seqlens_k.diff()", lengths_k, block_table.shape[1] * k.shape[1])
        values.check_table(block_table, lengths_k, k)
        k, v = (pack_pages(pages, block_table, cu_seqlens_k, max_seqlen_k) for pages in (k, v))
    seed = philox_of(None, q.device) if dropout_p > 0 and return_attn_probs else None
    out, lse = ops.attention_varlen(
        padded(q),
        padded(k),
        padded(v),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **rule._asdict(),
        seed=seed,
        return_lse=True,
    )
    out = scaled_as_given(out[..., :width], dropout_p)
    if not return_attn_probs:
        return out
    if seed is None:
        return out, lse, q.new_empty(0)
    lengths = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    q, k = dense_rows(q, cu_seqlens_q, max_seqlen_q), dense_rows(k, cu_seqlens_k, max_seqlen_k)
    return out, lse, signed_probabilities(q, k, rule, seed, *lengths)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
