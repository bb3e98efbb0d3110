"""torch.vmap over the registered ops of attention: the mapped dim becomes part of the batch.

vmap(op) must give what a loop over op gives. Sequences of a batch know nothing of one another, so
the mapped dim of size N is laid over the batch, (N, B, ...) -> (N * B, ...), in every argument that
has one, and one call computes all; gradients of a bias are kept apart for each of the N. Where that
would not be the loop, the loop is run: dropout, whose random bits depend on the number of the
sequence; packed calls; sinks that differ, or whose gradient is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.ops._attention_op import (
    BWD,
    CURVE,
    FWD,
    SECOND,
    TANGENT,
    attention_bwd,
    attention_curve,
    attention_fwd,
    attention_second,
    attention_tangent,
)
from tilewise.ops._library import register_vmap

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
    has_sink_gradient = "needs_dbias" in names

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        # Where the mapped dim is not None, it comes first.
        mapped = {name for name, dim in zip(names, in_dims, strict=True) if dim is not None}
        named = {
            name: value if dim is None else value.movedim(dim, 0)
            for name, value, dim in zip(names, args, in_dims, strict=True)
        }
        if (
            named["cu_seqlens_q"] is not None
            or named["dropout_p"] > 0
            or (has_sink_gradient and named["sinks"] is not None)
            or not mapped.isdisjoint(_SHARED)
        ):
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
    keeps_dbias = named.get("needs_dbias", False)
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
            if is_mapped and value.dim() == 2:
                value = value.unsqueeze(1).expand(-1, batch, -1)
            value = _over_batch(value, is_mapped, size).contiguous()
        elif name in _MASK_LISTS and value.shape[0] > 1:
            value = _over_batch(value, is_mapped, size).contiguous()
        folded[name] = value
    results = op(*folded.values())
    unfolded: list[Tensor] = []
    dims: list[int | None] = []
    for number, result in enumerate(results):
        if number >= 3 and not (number == 3 and keeps_dbias):  # a place holder
            unfolded.append(result)
            dims.append(None)
            continue
        result = result.unflatten(0, (size, batch))
        if number == 3:
            result = _sum_to(result, named["bias"].shape["bias" in mapped :])
        unfolded.append(result)
        dims.append(0)
    return tuple(unfolded), tuple(dims)


def _over_batch(value: Tensor, is_mapped: bool, size: int) -> Tensor:
    """(N, B, ...), or (B, ...) for all N alike, to (N * B, ...)."""
    value = value if is_mapped else value.unsqueeze(0).expand(size, *value.shape)
    return value.flatten(0, 1)


def _four_dims(bias: Tensor, is_mapped: bool) -> Tensor:
    """Give what broadcasts to (B, Hq, Sq, Sk) all four dims, beside the mapped one."""
    missing = 4 + is_mapped - bias.dim()
    first = bias.shape[:is_mapped]
    return bias.reshape(*first, *(1,) * missing, *bias.shape[is_mapped:])


def _expand(bias: Tensor, is_mapped: bool, batch: int) -> Tensor:
    """Give each sequence of the batch its bias."""
    sizes = [-1] * bias.dim()
    sizes[int(is_mapped)] = batch
    return bias.expand(sizes)


def _sum_to(dbias: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(N, B, b_h, b_q, b_k) to (N, *shape): add up the sequences that shared a bias."""
    shared = len(shape) < 4 or shape[0] == 1
    if shared and dbias.shape[1] > 1:
        wide = torch.promote_types(dbias.dtype, torch.float32)
        dbias = dbias.sum(1, dtype=wide).to(dbias.dtype)
    return dbias.reshape(dbias.shape[0], *shape)


register_vmap("attention_fwd", _rule(attention_fwd, FWD))
register_vmap("attention_bwd", _rule(attention_bwd, BWD))
register_vmap("attention_tangent", _rule(attention_tangent, TANGENT))
register_vmap("attention_second", _rule(attention_second, SECOND))
register_vmap("attention_curve", _rule(attention_curve, CURVE))
