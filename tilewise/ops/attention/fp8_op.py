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
from tilewise.kernels.plan import FP8_TENSORS, Call, Results
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, Fp8Spec, QuantizeSpec
from tilewise.ops import dispatch
from tilewise.ops.attention.op import OPTIONS_SCHEMA, AttentionOptions, make_spec
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.library import register
from tilewise.ops.plans import Run, key_of, plan_once
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


def rotation_of(x: Tensor, seed: int | None) -> Tensor | None:
    """Return the matrix that rotates the channels of `x`, for Hopper's kernels; None of None."""
    return None if seed is None else _rotation(x.shape[-1], seed, x.dtype, x.device)


def spec_of(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> AttentionSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    return make_spec(q, k, v, options)._replace(dtype=E4M3)


def runner(
    q: Tensor, k: Tensor, v: Tensor, own: Fp8Options, options: AttentionOptions
) -> tuple[Run, tuple[Tensor | None, ...]]:
    """Return what runs a checked call, and the tensors it takes, those of `FP8_TENSORS`.

    Its results are o and lse, contiguous.
    """
    scales = own.q_scale, own.k_scale, own.v_scale
    tensors = (*scales, rotation_of(q, own.rotation), q, k, v, *options.beside)
    o_dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    spec = Fp8Spec(spec_of(q, k, v, options), o_dtype, own.per_token)
    name, run = plan_once("attention_fp8", spec, tensors, options.backend)
    if q.dtype == E4M3 or dispatch.kernel_module("attention_fp8", name).QUANTIZES:
        return run, tensors
    return functools.partial(_quantize_and_run, run, own.rotation, own.per_token), tensors


def _quantize_and_run(
    run: Run, rotation: int | None, per_token: bool, *tensors: Tensor | None
) -> Results:
    """Run a call of 16-bit tensors on kernels that take e4m3 alone."""
    q, k, v, *beside = tensors[FP8_TENSORS.index("q") :]
    given = AttentionTensors(q, k, v, *beside)
    of_k: dict[str, Any] = {"seqlens": given.seqlens_k}
    of_rows: dict[str, Any] = {"rotation": rotation}
    if per_token:
        q, q_scale = fp8.quantize_tokens(given.q, **of_rows)
        k, k_scale = fp8.quantize_tokens(given.k, **of_rows, **of_k)
        of_k["cu_seqlens"] = given.cu_seqlens_k
    else:
        of_k["cu_seqlens"] = given.cu_seqlens_k
        q, q_scale = fp8.quantize_heads(given.q, **of_rows, cu_seqlens=given.cu_seqlens_q)
        k, k_scale = fp8.quantize_heads(given.k, **of_rows, **of_k)
    v, v_scale = fp8.quantize_heads(given.v, **of_k)
    return run(q_scale, k_scale, v_scale, None, q, k, v, *beside)


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    own, options = Fp8Options(*values[:_OWN]), AttentionOptions(*values[_OWN:])
    run, tensors = runner(q, k, v, own, options)
    results: Any = run(*tensors)
    o_and_lse: tuple[Tensor, Tensor] = results
    return o_and_lse


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    o_dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=o_dtype)
    *batch, rows, heads, _ = q.shape
    return o, q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _quantize(
    x: Tensor,
    seqlens: Tensor | None,
    cu_seqlens: Tensor | None,
    rotation: int | None,
    max_seqlen: int,
) -> tuple[Tensor, Tensor]:
    found = _hopper(x, seqlens, cu_seqlens, rotation, QuantizeSpec(max_seqlen))
    if found is not None:
        return found
    x8, scale = fp8.quantize_heads(x, rotation=rotation, seqlens=seqlens, cu_seqlens=cu_seqlens)
    return x8.contiguous(), scale.contiguous()


def _quantize_tokens(
    x: Tensor, seqlens: Tensor | None, rotation: int | None
) -> tuple[Tensor, Tensor]:
    found = _hopper(x, seqlens, None, rotation, QuantizeSpec(per_token=True))
    if found is not None:
        return found
    x8, scale = fp8.quantize_tokens(x, rotation=rotation, seqlens=seqlens)
    return x8.contiguous(), scale.contiguous()


_MAX_QUANTIZERS = 256
_quantizers: dict[tuple[object, ...], Run] = {}


def _hopper(
    x: Tensor,
    seqlens: Tensor | None,
    cu_seqlens: Tensor | None,
    rotation: int | None,
    spec: QuantizeSpec,
) -> tuple[Tensor, Tensor] | None:
    """Quantise a tensor by Hopper's kernels; None where they cannot."""
    if x.device.type != "cuda" or not device.has_triton():
        return None
    if cu_seqlens is not None:
        spec = spec._replace(max_seqlen=min(spec.max_seqlen, max(1, x.shape[0])))
    tensors = (x, seqlens, cu_seqlens, rotation_of(x, rotation))
    key = key_of("quantize", tensors, spec)
    run = _quantizers.get(key)
    if run is None:
        module = dispatch.kernel_module("quantize", "gluon")
        if module.why_not_quantize(x, rotation is not None) is not None:
            return None
        if len(_quantizers) >= _MAX_QUANTIZERS:
            _quantizers.clear()
        run = _quantizers[key] = module.plan_quantize(Call.of(spec, tensors)).run
    results: Any = run(*tensors)
    x8_and_scale: tuple[Tensor, Tensor] = results
    return x8_and_scale


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
for _name in ("attention_fp8_fwd", "quantize_heads", "quantize_tokens"):
    refuse_gradient(_name)
