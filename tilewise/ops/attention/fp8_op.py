"""The registered boundary of e4m3 attention; fp8.py has validated what arrives here.

    quantize_heads(x, seqlens, cu_seqlens, rotation, max_seqlen) -> (x8, scale)
    quantize_tokens(x, seqlens, rotation) -> (x8, scale)
    attention_fp8_fwd(q, k, v, *own, *options) -> (o, lse)

`own` are the fields of `Fp8Options` in order, `options` those of `AttentionOptions`, of a call
without bias, slopes and dropout. None of the ops has a gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.ops import dispatch
from tilewise.ops.attention.op import OPTIONS_SCHEMA, AttentionOptions, make_spec
from tilewise.ops.library import register
from tilewise.reference import fp8

E4M3 = torch.float8_e4m3fn
_OWN = 5  # fields of Fp8Options


class Fp8Options(NamedTuple):
    """What an attention_fp8 call says beside an attention call; in the order of the op's schema."""

    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    rotation: int | None
    per_token: bool


@functools.lru_cache(maxsize=64)
def _rotation(head_dim: int, seed: int, dtype: torch.dtype, where: torch.device) -> Tensor:
    return fp8.rotation_matrix(head_dim, seed).to(where, dtype)


def spec_of(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AttentionSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    return make_spec(q, k, v, options)._replace(dtype=E4M3)


def _o_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == E4M3 else q.dtype


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    own, options = Fp8Options(*values[:_OWN]), AttentionOptions(*values[_OWN:])
    spec = spec_of(q, k, v, options)
    name = dispatch.choose("attention_fp8", spec, options.backend)
    module = dispatch.kernel_module("attention_fp8", name)
    seed, seqlens_k = own.rotation, options.seqlens_k
    cu_seqlens_q, cu_seqlens_k = options.cu_seqlens_q, options.cu_seqlens_k
    given: dict[str, Any] = {}
    scales: Any = own[:3]
    dtype = _o_dtype(q)
    if q.dtype != E4M3:
        scales = None
        if module.QUANTIZES:
            given["per_token"] = own.per_token
            if seed is not None:
                given["rotation"] = _rotation(q.shape[-1], seed, q.dtype, q.device)
        else:
            of_k: dict[str, Any] = {"seqlens": seqlens_k}
            if own.per_token:
                q, q_scale = fp8.quantize_tokens(q, rotation=seed)
                k, k_scale = fp8.quantize_tokens(k, rotation=seed, **of_k)
                of_k["cu_seqlens"] = cu_seqlens_k
            else:
                of_k["cu_seqlens"] = cu_seqlens_k
                q, q_scale = fp8.quantize_heads(q, rotation=seed, cu_seqlens=cu_seqlens_q)
                k, k_scale = fp8.quantize_heads(k, rotation=seed, **of_k)
            v, v_scale = fp8.quantize_heads(v, **of_k)
            scales = (q_scale, k_scale, v_scale)
    tensors = AttentionTensors(q, k, v, *options.beside)
    o, lse = module.launch_fwd(tensors, spec, scales=scales, dtype=dtype, **given)
    return o.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=_o_dtype(q))
    *batch, rows, heads, _ = q.shape
    return o, q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _quantize(
    x: Tensor,
    seqlens: Tensor | None,
    cu_seqlens: Tensor | None,
    rotation: int | None,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:
    module, matrix = _hopper(x, rotation)
    if module is None:
        x8, scale = fp8.quantize_heads(x, rotation=rotation, seqlens=seqlens, cu_seqlens=cu_seqlens)
        return x8.contiguous(), scale.contiguous()
    packed = None
    if cu_seqlens is not None:
        packed = module.Packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    quantised: tuple[Tensor, Tensor] = module.quantize_rows(
        x, rotation=matrix, seqlens=seqlens, packed=packed
    )
    return quantised


def _quantize_tokens(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    module, matrix = _hopper(x, rotation)
    if module is None:
        x8, scale = fp8.quantize_tokens(x, rotation=rotation, seqlens=seqlens)
        return x8.contiguous(), scale.contiguous()
    quantised: tuple[Tensor, Tensor] = module.quantize_tokens(x, rotation=matrix, seqlens=seqlens)
    return quantised


def _hopper(x: Tensor, rotation: int | None) -> tuple[Any, Tensor | None]:
    """Return the module of Hopper's quantising kernels, None where they cannot, and a rotation."""
    if x.device.type == "cuda" and device.has_triton():
        module = dispatch.kernel_module("quantize", "gluon")
        if module.why_not_quantize(x, rotation is not None) is None:
            if rotation is None:
                return module, None
            return module, _rotation(x.shape[-1], rotation, x.dtype, x.device)
    return None, None


def _quantize_fake(
    x: Tensor,
    seqlens: Tensor | None,
    cu_seqlens: Tensor | None,
    rotation: int | None,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    scale = x.new_empty((batch, x.shape[-2]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), scale


def _quantize_tokens_fake(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    batch = x.shape[0] if x.dim() == 4 else 1
    scale = x.new_empty((batch, x.shape[-2], x.shape[-3]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), scale


attention_fp8_fwd = register(
    "attention_fp8_fwd(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, "
    f"Tensor? v_scale, int? rotation, bool per_token, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
quantize_heads_op = register(
    "quantize_heads(Tensor x, Tensor? seqlens, Tensor? cu_seqlens, int? rotation, "
    "SymInt max_seqlen) -> (Tensor, Tensor)",
    _quantize,
    _quantize_fake,
)
quantize_tokens_op = register(
    "quantize_tokens(Tensor x, Tensor? seqlens, int? rotation) -> (Tensor, Tensor)",
    _quantize_tokens,
    _quantize_tokens_fake,
)
