"""From a user's arguments to the registered op's: checks and defaults of both attention calls."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.masks import BlockMask
from tilewise.ops import checks, dispatch
from tilewise.ops.attention.dropout import Seed, philox_of
from tilewise.ops.attention.op import AttentionOptions

Window = int | tuple[int | None, int | None] | None


class Rule(NamedTuple):
    """What a user says of a call of attention besides q, k, v and where sequences lie."""

    causal: bool = False
    window: Window = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    mask: BlockMask | None = None
    dropout_p: float = 0.0
    seed: Seed = None
    deterministic: bool = False
    backend: str | None = None


class Lengths(NamedTuple):
    """Where sequences lie: of a dense call nothing or seqlens_k, of a packed one all the others."""

    seqlens_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int = -1
    max_seqlen_k: int = -1


DENSE = Lengths()


def as_kernels_read(lengths: Lengths) -> Lengths:
    """Return the same with int32 tensors."""
    seqlens_k, cu_seqlens_q, cu_seqlens_k = (
        None if x is None else checks.as_int32(x) for x in lengths[:3]
    )
    return Lengths(seqlens_k, cu_seqlens_q, cu_seqlens_k, *lengths[3:])


def prepare(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, lengths: Lengths = DENSE
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """Check the arguments of a call and put them into the registered op's order."""
    check_types(q, k, v, rule, lengths)
    q, k, v = autocast(q, k, v)
    return q, k, v, options_of(q, k, v, rule, lengths)


def options_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    lengths: Lengths = DENSE,
    *,
    check_dtype: Callable[[str, Tensor], None] = checks.check_float,
) -> AttentionOptions:
    """Check the arguments of a call and return those beside q, k and v in the op's order.

    Args:
        check_dtype: raises unless q, by its name, has a dtype of the call.
    """
    is_packed = lengths.cu_seqlens_q is not None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_dims(name, tensor, "(T, H, D)" if is_packed else "(B, S, H, D)")
    if is_packed:
        batch = _check_packed(q, lengths)
        longest = (checks.check_length(n, getattr(lengths, n)) for n in lengths._fields[3:])
        lengths = Lengths(*lengths[:3], *longest)
    else:
        batch = q.shape[0]
        if k.shape[0] != batch:
            raise ValueError(f"k must have the batch of q, {batch}, got {k.shape[0]}")
        if lengths.seqlens_k is not None:
            checks.check_integers("seqlens_k", lengths.seqlens_k, (batch,), q.device)
        lengths = lengths._replace(max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1])
    lengths = as_kernels_read(lengths)
    check_dtype("q", q)
    check_alike(q, k, v)
    if not (is_packed or _told_of_layout or torch.compiler.is_compiling()):
        _tell_of_layout(q, k)
    if rule.mask is not None:
        _check_mask(rule.mask, q, batch, lengths)
    return _options(q, rule, batch, lengths)


_told_of_layout = False


def _tell_of_layout(q: Tensor, k: Tensor) -> None:
    """Warn once of q and k that look as torch's attention takes them, (B, H, S, D).

    Every length is read as a number of heads then, and what comes out has the right shape. The
    library's own modules know what they hand over.
    """
    global _told_of_layout
    (_, seqlen_q, heads_q, _), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    if not (heads_q == heads_k > max(seqlen_q, seqlen_k) and min(seqlen_q, seqlen_k) > 1):
        return
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("tilewise.ops."):
        level, frame = level + 1, frame.f_back
    if frame.f_globals["__name__"].startswith("tilewise."):
        return
    _told_of_layout = True
    warnings.warn(
        f"q is read as (B, S, H, D): {tuple(q.shape)} has {heads_q} heads and {seqlen_q} tokens. "
        "If it is torch's (B, H, S, D), give q.transpose(1, 2), k and v likewise, and take "
        "o.transpose(1, 2); tilewise.integrations.torch_sdpa does. This is said once.",
        UserWarning,
        stacklevel=level,
    )


def check_types(q: Tensor, k: Tensor, v: Tensor, rule: Rule, lengths: Lengths) -> None:
    """Raise TypeError for arrays, lists and None where tensors belong, tensors where masks do."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        checks.check_type(name, value, Tensor)
    for name, given in (
        ("bias", rule.bias),
        ("alibi_slopes", rule.alibi_slopes),
        ("sinks", rule.sinks),
        ("seqlens_k", lengths.seqlens_k),
        ("cu_seqlens_q", lengths.cu_seqlens_q),
        ("cu_seqlens_k", lengths.cu_seqlens_k),
    ):
        if given is not None:
            checks.check_type(name, given, Tensor)
    # Field by field: a traced tensor cannot be compared with None by torch 2.11's torch.compile.
    packs = lengths.cu_seqlens_q is not None or lengths.cu_seqlens_k is not None
    if packs or lengths[3:] != DENSE[3:]:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            checks.check_type(name, getattr(lengths, name), Tensor)
    check_mask_type(rule.mask)


def check_mask_type(mask: BlockMask | None) -> None:
    """Raise TypeError for a tensor where a BlockMask belongs."""
    if mask is not None and not isinstance(mask, BlockMask):
        raise TypeError(
            f"mask must be a BlockMask, as masks.dense(visible) makes it, got {type(mask).__name__}"
        )


def _check_packed(q: Tensor, lengths: Lengths) -> int:
    """Return how many sequences there are."""
    cu_seqlens_q, cu_seqlens_k = lengths.cu_seqlens_q, lengths.cu_seqlens_k
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    checks.check_dims("cu_seqlens_q", cu_seqlens_q, "(B + 1)")
    count = cu_seqlens_q.shape[0]
    if count < 1:
        raise ValueError("cu_seqlens_q must hold at least the leading 0, got an empty tensor")
    checks.check_integers("cu_seqlens_q", cu_seqlens_q, (count,), q.device)
    checks.check_integers("cu_seqlens_k", cu_seqlens_k, (count,), q.device)
    return count - 1


def _check_mask(mask: BlockMask, q: Tensor, batch: int, lengths: Lengths) -> None:
    covered, wanted = mask.shape[2:], (lengths.max_seqlen_q, lengths.max_seqlen_k)
    if lengths.cu_seqlens_q is None:
        if covered != wanted:
            raise ValueError(f"mask must cover {wanted} queries and keys, got {covered}")
    elif covered[0] < wanted[0] or covered[1] < wanted[1]:
        raise ValueError(f"mask must cover at least {wanted} queries and keys, got {covered}")
    if mask.device != q.device:
        raise ValueError(f"mask must be on {q.device}, got {mask.device}; see mask.to(device)")
    if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, q.shape[-2]):
        raise ValueError(
            f"mask must be for 1 or {batch} sequences and 1 or {q.shape[-2]} query heads, "
            f"got {mask.shape[0]} and {mask.shape[1]}"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow torch.autocast as its own matrix products do: float64 stays float64."""
    device_type = q.device.type
    if device_type not in ("cpu", "cuda") or not torch.is_autocast_enabled(device_type):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    casts = [x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)]
    q, k, v = (x.to(dtype) if cast else x for x, cast in zip((q, k, v), casts, strict=True))
    return q, k, v


def wide(per_head: Tensor | None, q: Tensor) -> Tensor | None:
    """Numbers of a head are float32, or float64 beside float64 queries."""
    if per_head is None:
        return None
    # Not promote_types, which refuses 8-bit queries.
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return per_head.to(dtype).contiguous()


def _options(q: Tensor, rule: Rule, batch: int, lengths: Lengths) -> AttentionOptions:
    """Check what both calls share, fill in defaults and put everything in the op's order."""
    num_q_heads = q.shape[-2]
    full = (batch, num_q_heads, lengths.max_seqlen_q, lengths.max_seqlen_k)
    checks.check_bias("bias", rule.bias, q, full)
    checks.check_alibi(rule.alibi_slopes, batch, num_q_heads, q.device)
    checks.check_per_head("sinks", rule.sinks, num_q_heads, q.device)
    checks.check_softcap(rule.softcap)
    dispatch.check_backend_name(rule.backend)
    left, right = checks.window_bounds(rule.causal, rule.window)
    checks.check_dropout(rule.dropout_p)
    bits, rows, row_entries, columns, column_entries = (
        (None,) * 5 if rule.mask is None else rule.mask.tensors()
    )
    return AttentionOptions(
        lengths.cu_seqlens_q,
        lengths.cu_seqlens_k,
        lengths.seqlens_k,
        rule.bias,
        wide(rule.alibi_slopes, q),
        wide(rule.sinks, q),
        philox_of(rule.seed, q.device) if rule.dropout_p > 0 else None,
        bits,
        rows,
        row_entries,
        columns,
        column_entries,
        max_seqlen_q=lengths.max_seqlen_q,
        max_seqlen_k=lengths.max_seqlen_k,
        window_left=left,
        window_right=right,
        softmax_scale=checks.scale_of(rule.softmax_scale, q.shape[-1]),
        softcap=rule.softcap,
        dropout_p=rule.dropout_p,
        deterministic=rule.deterministic or torch.are_deterministic_algorithms_enabled(),
        backend=rule.backend,
    )


def check_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless k and v go with q, whatever its dtype: dtypes, devices, widths and heads."""
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ValueError(
            f"head dims must be at least 1, got {q.shape[-1]} for q and {v.shape[-1]} for v"
        )
    for name, tensor in (("k", k), ("v", v)):
        checks.check_same_dtype(name, tensor, q.dtype)
        checks.check_device(name, tensor, q.device)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but for its head dim, {tuple(k.shape[:-1])}, "
            f"got {tuple(v.shape[:-1])}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        checks.check_last_dim_contiguous(name, tensor)
    checks.check_heads(q.shape[-2], k.shape[-2])
