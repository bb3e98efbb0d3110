"""The registered boundary of e4m3 attention; fp8.py has validated what arrives here.

    quantize_heads(x, seqlens, cu_seqlens, rotation, max_seqlen) -> (x8, scale)
    quantize_tokens(x, seqlens, rotation) -> (x8, scale)
    attention_fp8_fwd(*own, *options) -> (o, lse)

`own` are the fields of `Fp8Options` in order but for the last one, `options` those of
`AttentionOptions`, of a call without bias, slopes and dropout. None of the ops has a gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.plan import FP8_TENSORS, Plan, Results
from tilewise.kernels.spec import AttentionTensors, Fp8Spec, QuantizeSpec
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.ops import dispatch
from tilewise.ops.attention.op import OPTIONS_SCHEMA, AttentionOptions, make_spec
from tilewise.ops.call import Bound, plan_of, recall, remember
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.library import register
from tilewise.reference import fp8

E4M3 = torch.float8_e4m3fn


class Fp8Options(NamedTuple):
    """The checked arguments of a call of attention_fp8; the order is that of the op's schema.

    Attributes:
        rotation: the seed of a rotation, or None.
        attention: the options that a call of attention has, too.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    rotation: int | None
    per_token: bool
    attention: AttentionOptions

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order of `FP8_TENSORS`."""
        scales = self.q_scale, self.k_scale, self.v_scale
        matrix = rotation_of(self.q, self.rotation)
        return (*scales, matrix, self.q, self.k, self.v, *self.attention.beside)

    def spec(self) -> Fp8Spec:
        """Return the hashable spec of a call: shapes, dtypes and numbers."""
        q, k, v = self[:3]
        spec = make_spec(q, k, v, self.attention)._replace(dtype=E4M3)
        return Fp8Spec(spec, torch.bfloat16 if q.dtype == E4M3 else q.dtype, self.per_token)

    def planned(self) -> Bound:
        """Return the plan of the call for the tensors of `tensors()`, of e4m3 or of 16 bits.

        For 16-bit tensors and a backend that does not quantise them itself, the plan quantises
        first.

        Raises:
            UnsupportedError: no backend can run it, or not the one that is named.
        """
        backend = self.attention.backend
        bound = plan_of("attention_fp8", self.spec(), self.tensors(), backend)
        module = dispatch.kernel_module("attention_fp8", bound.backend)
        if self.q.dtype == E4M3 or module.QUANTIZES:
            return bound
        return replace(bound, plan=_Quantised(bound.plan, self.rotation, self.per_token))

    def dispatch(self) -> Results:
        """Call the registered op and return o and lse."""
        *own, options = self
        results: tuple[Tensor, Tensor] = attention_fp8_fwd(*own, *options)
        return results


_OPTIONS = Fp8Options._fields.index("attention")


def rotation_of(x: Tensor, seed: int | None) -> Tensor | None:
    """Return the matrix (D, D) that rotates the channels of `x`, for Hopper's kernels.

    It has the dtype and device of `x` and is remembered, so each is made once. For a seed of None
    the result is None.
    """
    if seed is None:
        return None
    key = ("rotation", x.shape[-1], seed, x.dtype, x.device)
    found: Tensor | None = recall(key)
    if found is None:
        found = fp8.rotation_matrix(x.shape[-1], seed).to(x.device, x.dtype)
        remember(key, found)
    return found


class _Quantised:
    """The plan of a call with 16-bit tensors that kernels of e4m3 run: it quantises them first.

    Args:
        plan: the plan of attention over e4m3 tensors.
        rotation: the seed of a rotation of q and k, or None.
        per_token: whether q and k get a scale for each token instead of one for a head.
    """

    def __init__(self, plan: Plan, rotation: int | None, per_token: bool) -> None:
        self._plan, self._rotation, self._per_token = plan, rotation, per_token

    @property
    def tiles(self) -> dict[str, TileConfig]:
        return self._plan.tiles

    @property
    def steps(self) -> list[str]:
        return ["torch: quantise q, k and v", *self._plan.steps]

    def run(self, *tensors: Tensor | None) -> Results:
        """Quantise q, k and v of a call and run the plan over them; return o and lse.

        Args:
            tensors: the tensors of the call, in the order of `FP8_TENSORS`; the first four, scales
                and rotation, are not read.
        """
        q, k, v, *beside = tensors[FP8_TENSORS.index("q") :]
        given = AttentionTensors(q, k, v, *beside)
        of_k: dict[str, Any] = {"seqlens": given.seqlens_k}
        of_rows: dict[str, Any] = {"rotation": self._rotation}
        if self._per_token:
            q, q_scale = fp8.quantize_tokens(given.q, **of_rows)
            k, k_scale = fp8.quantize_tokens(given.k, **of_rows, **of_k)
            of_k["cu_seqlens"] = given.cu_seqlens_k
        else:
            of_k["cu_seqlens"] = given.cu_seqlens_k
            q, q_scale = fp8.quantize_heads(given.q, **of_rows, cu_seqlens=given.cu_seqlens_q)
            k, k_scale = fp8.quantize_heads(given.k, **of_rows, **of_k)
        v, v_scale = fp8.quantize_heads(given.v, **of_k)
        return self._plan.run(q_scale, k_scale, v_scale, None, q, k, v, *beside)


def _forward(*values: Any) -> Results:
    options = Fp8Options._make([*values[:_OPTIONS], AttentionOptions(*values[_OPTIONS:])])
    return options.planned().run(options.tensors())


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
) -> Results:
    if cu_seqlens is not None:
        max_seqlen = min(max_seqlen, max(1, x.shape[0]))
    spec = QuantizeSpec(max_seqlen, rotation=rotation, device_type=x.device.type)
    return _quantised(x, seqlens, cu_seqlens, spec)


def _quantize_tokens(x: Tensor, seqlens: Tensor | None, rotation: int | None) -> Results:
    spec = QuantizeSpec(per_token=True, rotation=rotation, device_type=x.device.type)
    return _quantised(x, seqlens, None, spec)


def _quantised(
    x: Tensor, seqlens: Tensor | None, cu_seqlens: Tensor | None, spec: QuantizeSpec
) -> Results:
    """Return x in e4m3 and its float32 scales, both contiguous, by the first backend that can.

    Args:
        seqlens, cu_seqlens: the lengths of a dense batch or the edges of a packed one, or None.
        spec: the description of the call: the rotation, and if scales are of heads or of tokens.
    """
    tensors = (x, seqlens, cu_seqlens, rotation_of(x, spec.rotation))
    return plan_of("quantize", spec, tensors, None).run(tensors)


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
