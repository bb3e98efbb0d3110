"""tilewise as an attention backend of diffusers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.integrations.torch_sdpa import scaled_dot_product_attention

__all__ = ["register"]


def register(name: str = "tilewise") -> None:
    """Let diffusers know a backend, for `model.set_attention_backend(name)`.

    The backend takes what diffusers' "native" backend takes, with the same results: masks of four
    dims, or (batch, keys), bool or float, dropout, scales, grouped heads. A second call with the
    same name changes nothing.

    Args:
        name: the backend's name, of lower case letters, digits and underscores.

    Raises:
        ImportError: diffusers is not installed, or has no registry of backends.
        ValueError: name is no such name, or one of diffusers' own.

    Source: diffusers' guide to attention backends; tried with 0.42.

    Example:
        >>> register()
        >>> pipeline.transformer.set_attention_backend("tilewise")
    """
    try:
        from diffusers.models import attention_dispatch
    except ImportError:
        raise ImportError(
            "tilewise.integrations.diffusers needs diffusers 0.35 or newer: pip install diffusers"
        ) from None
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"name must be an identifier of lower case, got {name!r}")
    names: Any = attention_dispatch.AttentionBackendName
    registry: Any = attention_dispatch._AttentionBackendRegistry
    if name in names._value2member_map_:
        if registry._backends.get(names(name)) is not _attend:
            raise ValueError(f"name must not be one of diffusers' own, got {name!r}")
        return
    # An enum has no way to add a member; its registry is asked by members alone.
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    names._member_map_[member._name_] = names._value2member_map_[name] = member
    names._member_names_.append(member._name_)
    registry.register(member)(_attend)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object = None,
) -> Tensor:
    """Attend as diffusers' "native" backend does: (B, S, H, D) in and out, a new tensor.

    Raises UnsupportedError if return_lse or a parallel config is set.
    """
    if return_lse:
        raise UnsupportedError("return_lse must be False, as with diffusers' native backend")
    if _parallel_config is not None:
        raise UnsupportedError(
            "a parallel config must be None: tilewise.distributed shares sequences by itself"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    o = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return o.transpose(1, 2)
