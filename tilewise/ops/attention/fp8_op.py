"""The registered boundary of e4m3 attention; fp8.py has validated what arrives here.

    quantize_heads(x, seqlens, rotation) -> (x8, scale)
    quantize_tokens(x, seqlens, rotation) -> (x8, scale)
    attention_fp8_fwd(q, k, v, *options) -> (o, lse)

`options` are the fields of `Fp8Options` in order. None of the ops has a gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.spec import AttentionSpec
from tilewise.ops import dispatch
from tilewise.ops.library import register
from tilewise.reference import fp8

E4M3 = torch.float8_e4m3fn


class Fp8Options(NamedTuple):
    """All of an attention_fp8 call but q, k and v; the order is that of the op's schema."""

    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    seqlens_k: Tensor | None
    rotation: int | None
    per_token: bool
    window_left: int
    window_right: int
    softmax_scale: float
    softcap: float
    backend: str | None


@functools.lru_cache(maxsize=64)
def _rotation(head_dim: int, seed: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    return fp8.rotation_matrix(head_dim, seed).to(where, dtype)


def make_spec(q: Tensor, k: Tensor, v: Tensor, options: Fp8Options) -> AttentionSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    return AttentionSpec(
        device_type=q.device.type,
        dtype=E4M3,
        batch=q.shape[0],
        max_seqlen_q=q.shape[1],
        max_seqlen_k=k.shape[1],
        num_q_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        v_head_dim=v.shape[3],
        window_left=options.window_left,
        window_right=options.window_right,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        has_seqlens_k=options.seqlens_k is not None,
    )


def _o_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == E4M3 else q.dtype


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    options = Fp8Options(*values)
    spec = make_spec(q, k, v, options)
    name = dispatch.choose("attention_fp8", spec, options.backend)
    module = dispatch.kernel_module("attention_fp8", name)
    seed, seqlens_k = options.rotation, options.seqlens_k
    given: dict[str, Any] = {}
    scales: Any = options[:3]
    dtype = _o_dtype(q)
    if q.dtype != E4M3:
        scales = None
        if module.QUANTIZES:
            given["per_token"] = options.per_token
            if seed is not None:
                given["rotation"] = _rotation(q.shape[-1], seed, q.dtype, q.device)
        else:
            quantize = fp8.quantize_tokens if options.per_token else fp8.quantize_heads
            q, q_scale = quantize(q, rotation=seed)
            k, k_scale = quantize(k, rotation=seed, seqlens=seqlens_k)
            v, v_scale = fp8.quantize_heads(v, seqlens=seqlens_k)
            scales = (q_scale, k_scale, v_scale)
    o, lse = module.launch_fwd(
        q, k, v, spec, scales=scales, seqlens_k=seqlens_k, dtype=dtype, **given
    )
    return o.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=_o_dtype(q))
    return o, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _quantize(x: Tensor, seqlens: Tensor | None, rotation: int | None) -> tuple[Tensor, Tensor]:
    return _quantized(x, seqlens, rotation, per_token=False)


def _quantize_tokens(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    return _quantized(x, seqlens, rotation, per_token=True)


def _quantized(
    x: Tensor, seqlens: Tensor | None, rotation: int | None, *, per_token: bool
) -> tuple[Tensor, Tensor]:
    if x.device.type == "cuda" and device.has_triton():
        module = dispatch.kernel_module("quantize", "gluon")
        if module.why_not_quantize(x, rotation is not None) is None:
            matrix = None
            if rotation is not None:
                matrix = _rotation(x.shape[-1], rotation, x.dtype, x.device)
            run = module.quantize_tokens if per_token else module.quantize_rows
            x8, scale = run(x, rotation=matrix, seqlens=seqlens)
            return x8, scale
    quantize = fp8.quantize_tokens if per_token else fp8.quantize_heads
    x8, scale = quantize(x, rotation=rotation, seqlens=seqlens)
    return x8.contiguous(), scale.contiguous()


def _quantize_fake(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((x.shape[0], x.shape[2]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), scale


def _quantize_tokens_fake(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((x.shape[0], x.shape[2], x.shape[1]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), scale


attention_fp8_fwd = register(
    "attention_fp8_fwd(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? seqlens_k, int? rotation, bool per_token, int window_left, "
    "int window_right, float softmax_scale, float softcap, str? backend) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
quantize_heads_op = register(
    "quantize_heads(Tensor x, Tensor? seqlens, int? rotation) -> (Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)
quantize_tokens_op = register(
    "quantize_tokens(Tensor x, Tensor? seqlens, int? rotation) -> (Tensor, Tensor)",
    _quantize_tokens,
    _quantize_tokens_fake,
)
