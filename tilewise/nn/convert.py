"""to_gqa(): replace groups of a trained model's key and value heads by their means."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from tilewise.nn.attention import Attention

__all__ = ["to_gqa"]


@overload
def to_gqa(
    module_or_state: nn.Module,
    num_kv_heads: int,
    *,
    num_q_heads: int | None = ...,
    head_dim: int | None = ...,
) -> nn.Module: ...


@overload
def to_gqa(
    module_or_state: Mapping[str, Tensor],
    num_kv_heads: int,
    *,
    num_q_heads: int | None = ...,
    head_dim: int | None = ...,
) -> dict[str, Tensor]: ...


def to_gqa(
    module_or_state: nn.Module | Mapping[str, Tensor],
    num_kv_heads: int,
    *,
    num_q_heads: int | None = None,
    head_dim: int | None = None,
) -> nn.Module | dict[str, Tensor]:
    """Mean-pool neighbouring key heads, and value heads, into num_kv_heads of each.

    Query head h reads the head into which its own key head was pooled. The result computes another
    function than the model did, which training with about 5 % of the original steps restores (the
    paper's uptraining).

    Args:
        module_or_state: an `nn.Attention`, a model that contains some (its `config`, if that has
            `with_kv_heads`, is changed too), or a state dict with `qkv_proj` parameters as
            `nn.Attention` names them, or with `k_proj` and `v_proj` ones.
        num_kv_heads: Hk of the result; it must divide that of every layer.
        num_q_heads: Hq, needed to split the rows of qkv_proj in a state dict; not read otherwise.
        head_dim: D, needed for a state dict.

    Returns:
        A new module, or a new state dict; the argument is unchanged.

    Raises:
        ValueError: num_kv_heads does not divide the heads at hand, or num_q_heads or head_dim is
            missing.
        TypeError: a module contains no `nn.Attention`.

    Source: Ainslie et al. 2023, "GQA", section 2.1.

    Example:
        >>> small = to_gqa(model, num_kv_heads=8)
    """
    if isinstance(module_or_state, Attention):
        return _convert(module_or_state, num_kv_heads)
    if isinstance(module_or_state, nn.Module):
        return _convert_model(module_or_state, num_kv_heads)
    if head_dim is None or head_dim < 1:
        raise ValueError(f"head_dim must be given for a state dict, got {head_dim}")
    return {
        name: _convert_entry(name, tensor, num_kv_heads, num_q_heads, head_dim)
        for name, tensor in module_or_state.items()
    }


def _convert_model(model: nn.Module, num_kv_heads: int) -> nn.Module:
    found = [name for name, module in model.named_modules() if isinstance(module, Attention)]
    if not found:
        raise TypeError(f"module must hold nn.Attention, got {type(model).__name__} without any")
    # Convert before copying, so that heads that do not divide are refused at little cost.
    converted = {name: _convert(_attention_at(model, name), num_kv_heads) for name in found}
    result = copy.deepcopy(model)
    for name, attention in converted.items():
        parent, _, child = name.rpartition(".")
        setattr(result.get_submodule(parent), child, attention)
    config: Any = getattr(result, "config", None)
    if hasattr(config, "with_kv_heads"):
        result.config = config.with_kv_heads(num_kv_heads)
    return result


def _attention_at(model: nn.Module, name: str) -> Attention:
    module = model.get_submodule(name)
    assert isinstance(module, Attention)
    return module


def _convert(attention: Attention, num_kv_heads: int) -> Attention:
    """Return a copy of an attention layer with num_kv_heads key and value heads, each the mean of a
    group of neighbouring old ones."""
    result = copy.deepcopy(attention)
    old, new = attention.qkv_proj, result.qkv_proj
    heads, dim = (attention.num_q_heads, attention.num_kv_heads), attention.head_dim
    result.num_kv_heads = num_kv_heads
    for name in ("weight", "bias"):
        parameter = getattr(old, name)
        if parameter is not None:
            rows = _pool_fused(parameter.detach(), *heads, num_kv_heads, dim)
            setattr(new, name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
    new.out_features = new.weight.shape[0]
    return result


def _convert_entry(
    name: str, tensor: Tensor, num_kv_heads: int, num_q_heads: int | None, head_dim: int
) -> Tensor:
    owner = name.split(".")[-2] if "." in name else ""
    if owner in ("k_proj", "v_proj"):
        return _pool(tensor, num_kv_heads, head_dim)
    if owner == "qkv_proj":
        if num_q_heads is None:
            raise ValueError(f"num_q_heads must be given to part the rows of {name}, got None")
        kv_heads = (tensor.shape[0] // head_dim - num_q_heads) // 2
        return _pool_fused(tensor, num_q_heads, kv_heads, num_kv_heads, head_dim)
    return tensor


def _pool_fused(
    rows: Tensor, num_q_heads: int, old_kv_heads: int, num_kv_heads: int, head_dim: int
) -> Tensor:
    """Return the rows [q, k, v] of a fused projection with k and v pooled to num_kv_heads each by
    `_pool`."""
    kv = old_kv_heads * head_dim
    q, k, v = rows.split([num_q_heads * head_dim, kv, kv])
    return torch.cat([q, _pool(k, num_kv_heads, head_dim), _pool(v, num_kv_heads, head_dim)])


def _pool(rows: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the rows of num_kv_heads heads, each the mean of a group of neighbouring heads of
    `rows`.

    A head has head_dim rows. Means are computed in float32 at least, and returned in the dtype of
    `rows`. Raises ValueError if num_kv_heads does not divide the heads.
    """
    old = rows.shape[0] // head_dim
    if num_kv_heads < 1 or old % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the {old} there are, got {num_kv_heads}")
    heads = rows.detach().unflatten(0, (num_kv_heads, old // num_kv_heads, head_dim))
    wide = torch.promote_types(rows.dtype, torch.float32)
    pooled: Tensor = heads.to(wide).mean(1).flatten(0, 1).to(rows.dtype)
    return pooled
