"""From a user's arguments to the registered op's: checks and defaults of both attention calls."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.ops import _checks, _dispatch
from tilewise.ops._attention_op import AttentionOptions

Window = int | tuple[int | None, int | None] | None


def prepare_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """Check the arguments of `attention` and put them into the registered op's order."""
    q, k, v = _autocast(q, k, v)
    _check_dense(q, k, v, bias, seqlens_k)
    left, right = _check_common(q, k, v, causal, window, softcap, alibi_slopes, sinks, backend)
    return (
        q,
        k,
        v,
        AttentionOptions(
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            seqlens_k=seqlens_k,
            bias=bias,
            alibi_slopes=_float(alibi_slopes),
            sinks=_float(sinks),
            max_seqlen_q=q.shape[1],
            max_seqlen_k=k.shape[1],
            window_left=left,
            window_right=right,
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap,
            deterministic=deterministic,
            backend=backend,
        ),
    )


def prepare_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """Check the arguments of `attention_varlen` and put them into the registered op's order."""
    q, k, v = _autocast(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _checks.check_dims(name, tensor, "(T, H, D)")
    _checks.check_dims("cu_seqlens_q", cu_seqlens_q, "(B + 1)")
    count = cu_seqlens_q.shape[0]
    if count < 1:
        raise ValueError("cu_seqlens_q must hold at least the leading 0, got an empty tensor")
    _checks.check_int32("cu_seqlens_q", cu_seqlens_q, (count,), q.device)
    _checks.check_int32("cu_seqlens_k", cu_seqlens_k, (count,), q.device)
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if length < 0:
            raise ValueError(f"{name} must be at least 0, got {length}")
    left, right = _check_common(q, k, v, causal, window, softcap, alibi_slopes, sinks, backend)
    return (
        q,
        k,
        v,
        AttentionOptions(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqlens_k=None,
            bias=None,
            alibi_slopes=_float(alibi_slopes),
            sinks=_float(sinks),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            window_left=left,
            window_right=right,
            softmax_scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap,
            deterministic=deterministic,
            backend=backend,
        ),
    )


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Follow torch.autocast as its own matrix products do."""
    device_type = q.device.type
    if device_type in ("cpu", "cuda") and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _float(per_head: Tensor | None) -> Tensor | None:
    return None if per_head is None else per_head.float().contiguous()


def _check_dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seqlens_k: Tensor | None
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _checks.check_dims(name, tensor, "(B, S, H, D)")
    batch, seqlen_q, num_q_heads, _ = q.shape
    if k.shape[0] != batch:
        raise ValueError(f"k must have the batch of q, {batch}, got {k.shape[0]}")
    if seqlens_k is not None:
        _checks.check_int32("seqlens_k", seqlens_k, (batch,), q.device)
    if bias is None:
        return
    _checks.check_device("bias", bias, q.device)
    if bias.dtype not in (q.dtype, torch.float32):
        raise TypeError(
            f"bias must have dtype {_checks.dtype_name(q.dtype)} or float32, "
            f"got {_checks.dtype_name(bias.dtype)}"
        )
    full = (batch, num_q_heads, seqlen_q, k.shape[1])
    fits = bias.dim() <= 4 and all(
        have in (1, want) for have, want in zip(reversed(bias.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"bias must broadcast to {full}, got shape {tuple(bias.shape)}")


def _check_common(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    backend: str | None,
) -> tuple[int, int]:
    _checks.check_float("q", q)
    if q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ValueError(
            f"head dims must be at least 1, got {q.shape[-1]} for q and {v.shape[-1]} for v"
        )
    for name, tensor in (("k", k), ("v", v)):
        _checks.check_same_dtype(name, tensor, q.dtype)
        _checks.check_device(name, tensor, q.device)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must have the shape of k but for its head dim, {tuple(k.shape[:-1])}, "
            f"got {tuple(v.shape[:-1])}"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _checks.check_last_dim_contiguous(name, tensor)
    _checks.check_heads(q.shape[-2], k.shape[-2])
    _checks.check_per_head("alibi_slopes", alibi_slopes, q.shape[-2], q.device)
    _checks.check_per_head("sinks", sinks, q.shape[-2], q.device)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes must not require a gradient; pass a bias to learn one")
    _checks.check_softcap(softcap)
    _dispatch.check_backend_name(backend)
    return _checks.window_bounds(causal, window)
