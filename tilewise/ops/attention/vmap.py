"""torch.vmap over the registered ops of attention: the mapped dim becomes part of the batch.

vmap(op) must give what a loop over op gives. Sequences of a batch know nothing of one another, so
the mapped dim of size N is laid over the batch, (N, B, ...) -> (N * B, ...), in every argument that
has one, and one call computes all; gradients of a bias and of sinks are kept apart for each of the
N. Where that would not be the loop, the loop is run: dropout, whose random bits depend on the
number of the sequence; packed calls; sinks, or tangents of them, that are not shared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.ops.attention.op import (
    BWD,
    CURVE,
    FWD,
    SECOND,
    TANGENT,
    attention_bwd,
    attention_curve,
    attention_fwd,
    attention_fwd_max,
    attention_second,
    attention_tangent,
)
from tilewise.ops.library import register_vmap

_TOKENS = (
    "q",
    "k",
    "v",
    "o",
    "do",
    "o_dot",
    "q_dot",
    "k_dot",
    "v_dot",
    "q_dot2",
    "k_dot2",
    "v_dot2",
)
_BATCHED = (*_TOKENS, "lse", "dlse", "lse_dot", "lse_dot2", "seqlens_k")
_BIASES = ("bias", "bias_dot", "bias_dot2")
_MASK_LISTS = ("mask_rows", "mask_columns")
# What one call cannot hold N of.
_SHARED = (
    *("cu_seqlens_q", "cu_seqlens_k", "sinks", "sinks_dot", "sinks_dot2", "philox"),
    *("mask_bits", "mask_row_entries", "mask_column_entries", *_MASK_LISTS),
)


def _rule(op: Any, names: tuple[str, ...]) -> Any:
    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        # Where the mapped dim is not None, it comes first.
        mapped = {name for name, dim in zip(names, in_dims, strict=True) if dim is not None}
        named = {
            name: value if dim is None else value.movedim(dim, 0)
            for name, value, dim in zip(names, args, in_dims, strict=True)
        }
        packed = named["cu_seqlens_q"] is not None
        if packed or named["dropout_p"] > 0 or not mapped.isdisjoint(_SHARED):
            return _loop(op, named, mapped, info.batch_size), 0
        return _fold(op, named, mapped, info.batch_size)

    return rule


def _loop(op: Any, named: dict[str, Any], mapped: set[str], size: int) -> tuple[Tensor, ...]:
    results = [
        op(*(value[n] if name in mapped else value for name, value in named.items()))
        for n in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


def _fold(
    op: Any, named: dict[str, Any], mapped: set[str], size: int
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    q = named["q"]
    batch = q.shape[1] if "q" in mapped else q.shape[0]
    is_gradient = "needs_dbias" in named
    keeps_dbias, keeps_dsinks = named.get("needs_dbias", False), named["sinks"] is not None
    folded = {}
    for name, value in named.items():
        is_mapped = name in mapped
        if value is None:
            pass
        elif name in _BATCHED:
            value = _over_batch(value, is_mapped, size)
            if name not in _TOKENS or value.stride(-1) != 1:
                value = value.contiguous()
        elif name in _BIASES:
            value = _four_dims(value, is_mapped)
            if is_mapped or keeps_dbias or value.shape[0] > 1:
                value = _over_batch(_expand(value, is_mapped, batch), is_mapped, size)
        elif name == "alibi_slopes" and (is_mapped or value.dim() == 2):
            if value.dim() - is_mapped == 1:
                value = value.unsqueeze(1).expand(-1, batch, -1)
            value = _over_batch(value, is_mapped, size).contiguous()
        elif name in _MASK_LISTS and value.shape[0] > 1:
            value = _over_batch(value, is_mapped, size).contiguous()
        folded[name] = value
    results = list(op(*folded.values()))
    if not is_gradient:
        return tuple(x.unflatten(0, (size, batch)) for x in results), (0,) * len(results)
    if keeps_dsinks:
        results[4] = _dsinks(folded)
    kept = (True, True, True, keeps_dbias, keeps_dsinks)  # the others are place holders
    results = [
        x.unflatten(0, (size, batch)) if keep else x for x, keep in zip(results, kept, strict=True)
    ]
    if keeps_dbias:
        results[3] = _sum_to(results[3], named["bias"].shape["bias" in mapped :])
    if keeps_dsinks:
        results[4] = _total(results[4])
    return tuple(results), tuple(0 if keep else None for keep in kept)


def _dsinks(named: dict[str, Any]) -> Tensor:
    """Return dsinks of each sequence, (B, Hq), of which the op would return the sum over B.

    Args:
        named: the folded arguments of attention_bwd, or of attention_second if o_dot is among them.
    """
    sinks, lse, do = named["sinks"].unsqueeze(-1), named["lse"], named["do"]
    share = torch.where(lse.isneginf(), 0.0, torch.exp(sinks - lse))
    delta = _row_dots(do, named["o"], lse.dtype)
    if named["dlse"] is not None:
        delta = delta - named["dlse"]
    if "o_dot" in named:
        dot = 0.0 if named["sinks_dot"] is None else named["sinks_dot"].unsqueeze(-1)
        delta = (dot - named["lse_dot"]) * delta + _row_dots(do, named["o_dot"], lse.dtype)
    dsinks: Tensor = -(share * delta).sum(-1).to(sinks.dtype)
    return dsinks


def _row_dots(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the inner products of the rows of a and b (B, S, H, D), as (B, H, S) of `dtype`."""
    return (a.to(dtype) * b.to(dtype)).sum(-1).transpose(1, 2)


def _over_batch(value: Tensor, is_mapped: bool, size: int) -> Tensor:
    """Return a tensor of vmap's size N as (N * B, ...).

    Args:
        value: (N, B, ...) if it is mapped, else (B, ...), which all N share.
        is_mapped: True if `value` has the mapped dim.
        size: the number N.
    """
    value = value if is_mapped else value.unsqueeze(0).expand(size, *value.shape)
    return value.flatten(0, 1)


def _four_dims(bias: Tensor, is_mapped: bool) -> Tensor:
    """Return a bias that broadcasts to (B, Hq, Sq, Sk) with all four dims, some of them of size 1.

    If it is mapped by vmap, the mapped dim comes before them.
    """
    missing = 4 + is_mapped - bias.dim()
    first = bias.shape[:is_mapped]
    return bias.reshape(*first, *(1,) * missing, *bias.shape[is_mapped:])


def _expand(bias: Tensor, is_mapped: bool, batch: int) -> Tensor:
    """Expand a bias of four dims to one for each of `batch` sequences.

    Args:
        is_mapped: True if vmap's mapped dim comes before the four.
    """
    sizes = [-1] * bias.dim()
    sizes[int(is_mapped)] = batch
    return bias.expand(sizes)


def _total(x: Tensor) -> Tensor:
    """Return the sum over dim 1, the batch, of x (N, B, ...), added in float32 or wider."""
    return x.sum(1, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _sum_to(dbias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the gradient of a bias as (N, *shape), summed over sequences that shared the bias.

    Args:
        dbias: (N, B, b_h, b_q, b_k), the gradient for each sequence.
        shape: the shape of the bias, without vmap's mapped dim.
    """
    if dbias.shape[1] > 1 and (len(shape) < 4 or shape[0] == 1):
        dbias = _total(dbias)
    return dbias.reshape(dbias.shape[0], *shape)


register_vmap("attention_fwd", _rule(attention_fwd, FWD))
register_vmap("attention_fwd_max", _rule(attention_fwd_max, FWD))
register_vmap("attention_bwd", _rule(attention_bwd, BWD))
register_vmap("attention_tangent", _rule(attention_tangent, TANGENT))
register_vmap("attention_second", _rule(attention_second, SECOND))
register_vmap("attention_curve", _rule(attention_curve, CURVE))
