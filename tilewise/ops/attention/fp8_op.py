"""The registered boundary of e4m3 attention; fp8.py has validated what arrives here.

    quantize_heads(x, seqlens, cu_seqlens, rotation, max_seqlen) -> (x8, scale)
    quantize_tokens(x, seqlens, rotation) -> (x8, scale)
    attention_fp8_fwd(q, k, v, *own, *options) -> (o, lse)

`own` are the fields of `Fp8Options` in order, `options` those of `AttentionOptions`, of a call
without bias, slopes and dropout. None of the ops has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.plan import Call, device_of
from tilewise.kernels.spec import AttentionSpec, Fp8Spec, QuantizeSpec
from tilewise.ops import dispatch
from tilewise.ops.attention.op import (
    NUM_TENSORS,
    OPTIONS_SCHEMA,
    AttentionOptions,
    key_of,
    make_spec,
)
from tilewise.ops.library import register
from tilewise.reference import fp8

E4M3 = torch.float8_e4m3fn
_OWN, _SCALES = 5, 3  # fields of Fp8Options, and its first


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


Run = Callable[..., tuple[Tensor, Tensor]]  # of q, k, v, their scales, and the options' tensors


def _run_of(q: Tensor, k: Tensor, v: Tensor, own: Fp8Options, options: AttentionOptions) -> Run:
    """Plan a call; return what runs it for tensors that lie alike, to contiguous o and lse."""
    spec = Fp8Spec(spec_of(q, k, v, options), _o_dtype(q), own.per_token)
    matrix = None
    if own.rotation is not None:
        matrix = _rotation(q.shape[-1], own.rotation, q.dtype, q.device)
    with device_of(q.device):
        call = Call.of(spec, (*own[:_SCALES], matrix, q, k, v, *options.beside))
        name, plan = dispatch.choose_plan("attention_fp8", call, options.backend)
    quantizes = dispatch.kernel_module("attention_fp8", name).QUANTIZES

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> tuple[Tensor, Tensor]:
        results: Any = plan.run(*more[:_SCALES], matrix, q, k, v, *more[_SCALES:])
        return results

    def quantize_and_run(
        q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        beside = more[_SCALES:]
        edges = dict(zip(AttentionOptions._fields, beside, strict=False))
        parts = _quantized(q, k, v, own, edges)
        (q, q_scale), (k, k_scale), (v, v_scale) = parts
        results: Any = plan.run(q_scale, k_scale, v_scale, None, q, k, v, *beside)
        return results

    return run if quantizes or q.dtype == E4M3 else quantize_and_run


def _quantized(
    q: Tensor, k: Tensor, v: Tensor, own: Fp8Options, given: dict[str, Tensor | None]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return 16-bit q, k and v as e4m3, each with its scales."""
    of_k: dict[str, Any] = {"seqlens": given["seqlens_k"]}
    edges_q, edges_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    seed = own.rotation
    if own.per_token:
        of_q = fp8.quantize_tokens(q, rotation=seed), fp8.quantize_tokens(k, rotation=seed, **of_k)
        return *of_q, fp8.quantize_heads(v, cu_seqlens=edges_k, **of_k)
    of_k["cu_seqlens"] = edges_k
    return (
        fp8.quantize_heads(q, rotation=seed, cu_seqlens=edges_q),
        fp8.quantize_heads(k, rotation=seed, **of_k),
        fp8.quantize_heads(v, **of_k),
    )


_MAX_PLANNED = 1024
_planned: dict[tuple[object, ...], Run] = {}


def planned(
    q: Tensor, k: Tensor, v: Tensor, own: Fp8Options, options: AttentionOptions,
    key: tuple[object, ...],
) -> Run:  # fmt: skip
    """Return what runs a call with checked arguments; `key` is that of `op.key_of`."""
    found = _planned.get(key)
    if found is None:
        if len(_planned) >= _MAX_PLANNED:
            _planned.clear()
        found = _planned[key] = _run_of(q, k, v, own, options)
    return found


def known(key: tuple[object, ...]) -> Run | None:
    """Return what runs calls of this key, if one of them was planned."""
    return _planned.get(key)


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    own, options = Fp8Options(*values[:_OWN]), AttentionOptions(*values[_OWN:])
    tensors = (*own[:_SCALES], *options.beside)
    odd = q.data_ptr() | k.data_ptr() | v.data_ptr()
    key = key_of(q, k, v, odd, tensors, (own[_SCALES:], *options[NUM_TENSORS:]))
    return planned(q, k, v, own, options, key)(q, k, v, *tensors)


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
    run = _hopper(x, seqlens, cu_seqlens, rotation, QuantizeSpec(max_seqlen))
    if run is not None:
        return run(x, seqlens, cu_seqlens)
    x8, scale = fp8.quantize_heads(x, rotation=rotation, seqlens=seqlens, cu_seqlens=cu_seqlens)
    return x8.contiguous(), scale.contiguous()


def _quantize_tokens(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    run = _hopper(x, seqlens, None, rotation, QuantizeSpec(per_token=True))
    if run is not None:
        return run(x, seqlens, None)
    x8, scale = fp8.quantize_tokens(x, rotation=rotation, seqlens=seqlens)
    return x8.contiguous(), scale.contiguous()


def _hopper(
    x: Tensor, seqlens: Tensor | None, cu_seqlens: Tensor | None, rotation: int | None,
    spec: QuantizeSpec,
) -> Run | None:  # fmt: skip
    """Return what quantises tensors that lie like these on Hopper, None where its kernels cannot.

    It takes x, seqlens and cu_seqlens.
    """
    if x.device.type != "cuda" or not device.has_triton():
        return None
    key = key_of(x, x, x, x.data_ptr(), (seqlens, cu_seqlens), (spec, rotation))
    found = _planned.get(key)
    if found is None:
        module = dispatch.kernel_module("quantize", "gluon")
        if module.why_not_quantize(x, rotation is not None) is not None:
            return None
        matrix = None
        if rotation is not None:
            matrix = _rotation(x.shape[-1], rotation, x.dtype, x.device)
        plan = module.plan_quantize(Call.of(spec, (x, seqlens, cu_seqlens, matrix)))

        def run(*tensors: Tensor | None) -> tuple[Tensor, Tensor]:
            results: tuple[Tensor, Tensor] = plan.run(*tensors, matrix)
            return results

        found = _planned[key] = run
    return found


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
