"""The registered boundary of attention: the call, its gradient and what comes after.

    attention_fwd(q, k, v, *options) -> (o, lse)
    attention_bwd(do, dlse, q, k, v, o, lse, needs_dbias, *options) -> (dq, dk, dv, dbias, dsinks)
    attention_tangent(q, k, v, o, lse, *direction, *options) -> (o_dot, lse_dot)
    attention_second(do, dlse, q, k, v, o, lse, o_dot, lse_dot, *direction, needs_dbias, *options)
        -> the derivative of attention_bwd's results along the direction
    attention_curve(q, k, v, o, lse, lse_dot, lse_dot2, *direction, *direction2, *options)
        -> the second derivative of (o, lse) along two directions

`options` are the fields of `AttentionOptions` in order; api.py has validated them. A
direction is tangents of q, k, v, bias and sinks, None where zero. The first two ops run on a
backend; the others, all that second order needs, are tiles of torch (see second_order.py). How
they are one another's derivatives is in gradient.py.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.ops import dispatch
from tilewise.ops.attention import second_order as _attention_second
from tilewise.ops.attention.tiles import Tangents
from tilewise.ops.library import register


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

# The arguments of each op, in the order of its schema.
_CALL = ("q", "k", "v", "o", "lse")
DIRECTION = ("q_dot", "k_dot", "v_dot", "bias_dot", "sinks_dot")
DIRECTION2 = tuple(f"{name}2" for name in DIRECTION)
OPTIONS = AttentionOptions._fields
FWD = ("q", "k", "v", *OPTIONS)
BWD = ("do", "dlse", *_CALL, "needs_dbias", *OPTIONS)
TANGENT = (*_CALL, *DIRECTION, *OPTIONS)
SECOND = ("do", "dlse", *_CALL, "o_dot", "lse_dot", *DIRECTION, "needs_dbias", *OPTIONS)
CURVE = (*_CALL, "lse_dot", "lse_dot2", *DIRECTION, *DIRECTION2, *OPTIONS)
NUM_FWD_TENSORS = 3 + _TENSORS  # q, k, v and the optional tensors of AttentionOptions

_OPTIONS_SCHEMA = (
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqlens_k, Tensor? bias, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? philox, Tensor? mask_bits, Tensor? mask_rows, "
    "Tensor? mask_row_entries, Tensor? mask_columns, Tensor? mask_column_entries, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, int window_left, int window_right, "
    "float softmax_scale, float softcap, float dropout_p, "
    "bool deterministic, str? backend"
)


_spec_of = functools.lru_cache(maxsize=4096)(AttentionSpec)  # calls come again


def make_spec(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, needs_dbias: bool = False
) -> AttentionSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    cu_seqlens_q, bits = options.cu_seqlens_q, options.mask_bits
    return _spec_of(
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


def chosen(spec: AttentionSpec, backend: str | None) -> ModuleType:
    """Return the kernels of a call."""
    return dispatch.kernel_module("attention", dispatch.choose("attention", spec, backend))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    options = AttentionOptions(*values)
    spec = make_spec(q, k, v, options)
    return run_forward(q, k, v, spec, chosen(spec, options.backend), **options.tensors())


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kernels: ModuleType, **tensors: Any
) -> tuple[Tensor, Tensor]:
    """Compute a call on the kernels that are `chosen` for it."""
    o, lse = kernels.launch_fwd(q, k, v, spec, **tensors)
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
    bias = options.bias if needs_dbias else None
    is_row_bias = bias is not None and bias.shape[-1:] in ((), (1,))
    spec = make_spec(q, k, v, options, needs_dbias=needs_dbias and not is_row_bias)
    dq, dk, dv, dbias, dsinks = run_backward(
        do, dlse, q, k, v, o, lse, spec, chosen(spec, options.backend), **options.tensors()
    )
    if bias is not None and is_row_bias:
        dbias = _row_bias_gradient(do, dlse, o, lse, bias, options)
    return tuple(q.new_empty(0) if g is None else g for g in (dq, dk, dv, dbias, dsinks))


def _row_bias_gradient(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    bias: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return the gradient of a bias that all keys of a row share.

    Such a bias moves all logits of a row alike, lse with them, and o where a sink stays behind.
    With the sink's share of the row, w = exp(sink - lse), sum_j ds_ij = w delta + dlse. A kernel
    would sum p (dp - delta) instead, whose terms cancel to a rounding of o.
    """
    if dlse is None and options.sinks is None:
        return torch.zeros_like(bias, memory_format=torch.contiguous_format)
    rows = torch.zeros_like(lse) if dlse is None else dlse.to(lse.dtype)
    if options.sinks is not None:
        share = torch.exp(options.sinks.unsqueeze(-1) - lse)
        delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1).transpose(-1, -2) - rows
        rows = rows + share * delta
    rows = torch.where(lse.isneginf(), 0.0, rows)
    edges = options.cu_seqlens_q
    if edges is not None:
        count = torch.arange(options.max_seqlen_q, device=rows.device)
        at = edges[:-1, None] + count  # (B, max_seqlen_q)
        exists = at < edges[1:, None]
        padded = torch.nn.functional.pad(rows, (0, 1))  # one row to read where none exists
        rows = padded[:, torch.where(exists, at, rows.shape[1])].transpose(0, 1)
    return rows.unsqueeze(-1).sum_to_size(bias.shape).to(bias.dtype)


def run_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    kernels: ModuleType,
    **tensors: Any,
) -> tuple[Tensor | None, ...]:
    """Compute a gradient on the kernels that are `chosen` for it; see their `launch_bwd`."""
    if do.shape[-1] > 1 and do.stride(-1) != 1:
        do = do.contiguous()
    grads = kernels.launch_bwd(do, dlse, q, k, v, o, lse, spec, **tensors)
    return tuple(None if g is None else g.contiguous() for g in grads)


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


def _tangent(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, o, lse = args[:5]
    options = AttentionOptions(*args[10:])
    spec = make_spec(q, k, v, options)
    with torch.autocast(q.device.type, enabled=False):
        return _attention_second.tangent(
            q, k, v, o, lse, Tangents(*args[5:10]), spec, **options.tensors()
        )


def _tangent_fake(*args: Any) -> tuple[Tensor, Tensor]:
    o, lse = args[3:5]
    return o.new_empty(o.shape), lse.new_empty(lse.shape)


def _second(*args: Any) -> tuple[Tensor, ...]:
    do, dlse, q, k, v, o, lse, o_dot, lse_dot = args[:9]
    needs_dbias, options = args[14], AttentionOptions(*args[15:])
    spec = make_spec(q, k, v, options, needs_dbias=needs_dbias)
    with torch.autocast(q.device.type, enabled=False):
        grads = _attention_second.second(
            do,
            dlse,
            q,
            k,
            v,
            o,
            lse,
            o_dot,
            lse_dot,
            Tangents(*args[9:14]),
            spec,
            **options.tensors(),
        )
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _second_fake(*args: Any) -> tuple[Tensor, ...]:
    return _backward_fake(*args[:7], *args[14:])


def _curve(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, o, lse, *lse_dots = args[:7]
    options = AttentionOptions(*args[17:])
    spec = make_spec(q, k, v, options)
    along = (Tangents(*args[7:12]), Tangents(*args[12:17]))
    with torch.autocast(q.device.type, enabled=False):
        return _attention_second.curve(
            q, k, v, o, lse, (lse_dots[0], lse_dots[1]), along, spec, **options.tensors()
        )


def _schema(name: str, arguments: tuple[str, ...], num_results: int) -> str:
    """Write the schema of an op whose arguments end with the options."""
    typed = []
    for argument in arguments[: -len(OPTIONS)]:
        optional = argument == "dlse" or argument in DIRECTION + DIRECTION2
        kind = "bool" if argument == "needs_dbias" else "Tensor?" if optional else "Tensor"
        typed.append(f"{kind} {argument}")
    results = ", ".join(["Tensor"] * num_results)
    return f"{name}({', '.join(typed)}, {_OPTIONS_SCHEMA}) -> ({results})"


attention_fwd = register(_schema("attention_fwd", FWD, 2), _forward, _forward_fake)
attention_bwd = register(_schema("attention_bwd", BWD, 5), _backward, _backward_fake)
attention_tangent = register(_schema("attention_tangent", TANGENT, 2), _tangent, _tangent_fake)
attention_second = register(_schema("attention_second", SECOND, 5), _second, _second_fake)
attention_curve = register(_schema("attention_curve", CURVE, 2), _curve, _tangent_fake)
