"""The functions whose q, k and v, or k and v, are one tensor, which also receives the gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.integrations.flash_attn.functional import flash_attn_func, flash_attn_varlen_func
from tilewise.integrations.flash_attn.rule import WindowSize


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_func` does, with q, k and v in one tensor.

    Args:
        qkv: (B, S, 3, H, D): q, k and v of the same heads; its gradient has that shape.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`.

    Returns:
        out (B, S, H, D), or (out, softmax_lse, S_dmask) as in `flash_attn_func`.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention`.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> qkv = torch.randn(1, 128, 3, 8, 64, requires_grad=True)
        >>> flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    """
    q, k, v = _parts("qkv", qkv, "(B, S, 3, H, D)")
    rule = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *rule, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_func` does, with k and v in one tensor.

    Args:
        q: (B, Sq, Hq, D).
        kv: (B, Sk, 2, Hk, D): k and v; its gradient has that shape.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`.

    Returns:
        out (B, Sq, Hq, D), or (out, softmax_lse, S_dmask) as in `flash_attn_func`.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention`.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> kv = torch.randn(1, 128, 2, 2, 64, requires_grad=True)
        >>> flash_attn_kvpacked_func(torch.randn(1, 16, 8, 64), kv, causal=True).sum().backward()
    """
    k, v = _parts("kv", kv, "(B, S, 2, Hk, D)")
    rule = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *rule, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attend as `flash_attn_varlen_func` does, with q, k and v in one tensor.

    Args:
        qkv: (T, 3, H, D): q, k and v of the same heads; its gradient has that shape.
        cu_seqlens: (B + 1,) int32, starts at 0, never decreases.
        max_seqlen: at least the longest sequence, in tokens.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`.

    Returns:
        out (T, H, D), or (out, softmax_lse, S_dmask) as in `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention_varlen`.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> out = flash_attn_varlen_qkvpacked_func(torch.randn(8, 3, 4, 64), cu, 5)
    """
    q, k, v = _parts("qkv", qkv, "(T, 3, H, D)")
    rule = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rule, return_attn_probs
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Any:
    """Attend as `flash_attn_varlen_func` does, with k and v in one tensor.

    Args:
        q: (Tq, Hq, D).
        kv: (Tk, 2, Hk, D): k and v; its gradient has that shape.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32, start at 0, never decrease.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as in `flash_attn_func`.

    Returns:
        out (Tq, Hq, D), or (out, softmax_lse, S_dmask) as in `flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `tilewise.attention_varlen`.

    Source: the interface of flash-attn 2.8.

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> out = flash_attn_varlen_kvpacked_func(q, torch.randn(8, 2, 4, 64), cu, cu, 5, 5)
    """
    k, v = _parts("kv", kv, "(T, 2, Hk, D)")
    rule = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rule, return_attn_probs
    )


def _parts(name: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Return views of a tensor, split along the dim for which `layout`, e.g. "(T, 3, H, D)", has a
    number.

    Raises ValueError if the shape does not fit the layout. Gradients of the views arrive stacked in
    `packed`.
    """
    sizes = layout.strip("()").split(", ")
    dim, count = next((d, int(size)) for d, size in enumerate(sizes) if size.isdigit())
    if packed.dim() != len(sizes) or packed.shape[dim] != count:
        raise ValueError(f"{name} must be {layout}, got shape {tuple(packed.shape)}")
    return packed.unbind(dim)
