"""The registered boundary of attention: forward, backward and the gradient that links them.

    attention_fwd(q, k, v, *options) -> (o, lse)
    attention_bwd(do, dlse, q, k, v, o, lse, needs_dbias, *options) -> (dq, dk, dv, dbias, dsinks)

`options` are the fields of `AttentionOptions` in order; attention.py has validated them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.ops import _dispatch
from tilewise.ops._library import register, register_gradient


class AttentionOptions(NamedTuple):
    """All of an attention call but q, k and v; the order is that of the op's schema."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqlens_k: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    philox: Tensor | None
    mask_bits: Tensor | None
    mask_rows: Tensor | None
    mask_row_entries: Tensor | None
    mask_columns: Tensor | None
    mask_column_entries: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    window_left: int
    window_right: int
    softmax_scale: float
    softcap: float
    dropout_p: float
    deterministic: bool
    backend: str | None

    def tensors(self) -> dict[str, Any]:
        """The optional tensors by name, as launchers take them; the mask's in one tuple."""
        named: dict[str, Any] = dict(zip(self._fields[:_MASK], self[:_MASK], strict=True))
        mask: Any = self[_MASK:_TENSORS]
        named["mask"] = None if mask[0] is None else MaskTensors(*mask)
        return named


_MASK = AttentionOptions._fields.index("mask_bits")
_TENSORS = AttentionOptions._fields.index("max_seqlen_q")
_BIAS = 3 + AttentionOptions._fields.index("bias")
_SINKS = 3 + AttentionOptions._fields.index("sinks")
_NUM_TENSORS = 3 + _TENSORS  # q, k, v and the optional tensors of AttentionOptions
_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqlens_k, Tensor? bias, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? philox, Tensor? mask_bits, Tensor? mask_rows, "
    "Tensor? mask_row_entries, Tensor? mask_columns, Tensor? mask_column_entries, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, int window_left, int window_right, "
    "float softmax_scale, float softcap, float dropout_p, "
    "bool deterministic, str? backend"
)


def make_spec(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, needs_dbias: bool = False
) -> AttentionSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    cu_seqlens_q, bits = options.cu_seqlens_q, options.mask_bits
    return AttentionSpec(
        device_type=q.device.type,
        dtype=q.dtype,
        batch=q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        max_seqlen_q=options.max_seqlen_q,
        max_seqlen_k=options.max_seqlen_k,
        num_q_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        v_head_dim=v.shape[-1],
        window_left=options.window_left,
        window_right=options.window_right,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        is_varlen=cu_seqlens_q is not None,
        has_seqlens_k=options.seqlens_k is not None,
        has_bias=options.bias is not None,
        has_alibi=options.alibi_slopes is not None,
        has_sinks=options.sinks is not None,
        needs_dbias=needs_dbias,
        mask_tile=None if bits is None else (bits.shape[1], bits.shape[2] * 32),
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
    )


def _chosen(spec: AttentionSpec, backend: str | None) -> ModuleType:
    return _dispatch.kernel_module("attention", _dispatch.choose("attention", spec, backend))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    options = AttentionOptions(*values)
    spec = make_spec(q, k, v, options)
    o, lse = _chosen(spec, options.backend).launch_fwd(q, k, v, spec, **options.tensors())
    return o.contiguous(), lse.contiguous()


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    packed = AttentionOptions(*values).cu_seqlens_q is not None
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty(lse_shape, dtype=_lse_dtype(q))


def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    needs_dbias: bool,
    *values: Any,
) -> tuple[Tensor, ...]:
    options = AttentionOptions(*values)
    spec = make_spec(q, k, v, options, needs_dbias=needs_dbias)
    if do.shape[-1] > 1 and do.stride(-1) != 1:
        do = do.contiguous()
    grads = _chosen(spec, options.backend).launch_bwd(
        do, dlse, q, k, v, o, lse, spec, **options.tensors()
    )
    return tuple(q.new_empty(0) if g is None else g.contiguous() for g in grads)


def _backward_fake(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    needs_dbias: bool,
    *values: Any,
) -> tuple[Tensor, ...]:
    options = AttentionOptions(*values)
    inputs = (q, k, v, options.bias if needs_dbias else None, options.sinks)
    return tuple(q.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs)


attention_fwd = register(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, {_SCHEMA}) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
attention_bwd = register(
    "attention_bwd(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"bool needs_dbias, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output)
    ctx.values = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, o, lse = ctx.saved_tensors
    q, k, v, *optional = inputs
    nothing: list[None] = [None] * len(ctx.values)
    if do is None and dlse is None:
        return (*[None] * _NUM_TENSORS, *nothing)
    do = torch.zeros_like(o) if do is None else do
    needs_dbias = ctx.needs_input_grad[_BIAS]
    dq, dk, dv, dbias, dsinks = attention_bwd(
        do, dlse, q, k, v, o, lse, needs_dbias, *optional, *ctx.values
    )
    grads: list[Tensor | None] = [dq, dk, dv, *[None] * _TENSORS, *nothing]
    if needs_dbias:
        grads[_BIAS] = dbias
    if inputs[_SINKS] is not None:
        grads[_SINKS] = dsinks
    return tuple(grads)


register_gradient("attention_fwd", _gradient, _save)
