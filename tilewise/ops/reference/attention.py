"""The planner of attention for backend="reference": the equations in float64, forward and
backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, Results
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, MaskTensors
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.ops import values
from tilewise.reference import dropout, standard

_Tensors = dict[str, Any]


def plan_fwd(call: Call) -> OraclePlan:
    """Return the plan of a forward pass; the reference refuses no call.

    Its results are o in q's dtype and lse in float32 (float64 for float64 q), and, if the spec asks
    for them, the largest logits of rows.
    """
    return OraclePlan(call.spec, _forward)


def plan_bwd(call: Call) -> OraclePlan:
    """Return the plan of a gradient; the reference refuses no call.

    Its results are dq, dk, dv, dbias and dsinks, in the dtypes of the inputs; dbias is None unless
    the spec asks for it, dsinks without sinks.
    """
    return OraclePlan(call.spec, _backward)


class OraclePlan:
    """The plan of a call that a function computes by definition, without kernels.

    Args:
        spec: the description of the call, the first argument of `compute`.
        compute: a function of the spec and the tensors of a call, which returns the results.
        step: the line that describes the call.

    Attributes:
        tiles: an empty table, since there are none.
        steps: the line that describes the call.
    """

    def __init__(
        self, spec: Any, compute: Callable[..., Results], step: str = "compute in float64"
    ) -> None:
        self.tiles: dict[str, TileConfig] = {}
        self.steps = [step]
        self._spec, self._compute = spec, compute

    def run(self, *tensors: Tensor | None) -> Results:
        """Return the results of `compute` for the tensors of a call, made contiguous."""
        results = self._compute(self._spec, *tensors)
        return tuple(None if x is None else x.contiguous() for x in results)


def _rule(spec: AttentionSpec, tensors: _Tensors) -> dict[str, Any]:
    """Return the keyword arguments of the oracle's functions for a call, for the whole batch.

    Args:
        tensors: the optional tensors of the call by name; "mask" is a MaskTensors or None.
    """
    rule: dict[str, Any] = {
        "window": (spec.window_left, spec.window_right),
        "softmax_scale": spec.softmax_scale,
        "softcap": spec.softcap,
        "alibi_slopes": tensors.get("alibi_slopes"),
        "sinks": tensors.get("sinks"),
        "bias": tensors.get("bias"),
        "seqlens_k": tensors.get("seqlens_k"),
    }
    shape = (spec.batch, spec.num_q_heads, spec.max_seqlen_q, spec.max_seqlen_k)
    if tensors.get("mask") is not None:
        rule["mask"] = visible_by_mask(tensors["mask"], spec.max_seqlen_q, spec.max_seqlen_k)
    if spec.dropout_p > 0:
        rule["keep_mask"] = dropout.keep_mask(tensors["philox"], shape, spec.dropout_p)
        rule["dropout_p"] = spec.dropout_threshold / 256
    return rule


def visible_by_mask(mask: MaskTensors, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return a block mask as a dense tensor, bool (Bm, Hm, Sq, Sk), True where a key is visible.

    Bm and Hm are 1 where all sequences or heads share the mask.
    """
    tile_q, tile_k = mask.bits.shape[1], mask.bits.shape[2] * 32
    shifts = torch.arange(32, device=mask.bits.device, dtype=torch.int32)
    bits = (mask.bits.unsqueeze(-1) >> shifts & 1).bool().flatten(2)  # (n, tile_q, tile_k)
    batch, heads, rows, _ = mask.rows.shape
    visible = bits.new_zeros(batch * heads * rows, mask.columns.shape[2], tile_q, tile_k)
    spans = mask.rows.flatten(0, 2).tolist()
    for row, (first, full_end, end) in enumerate(spans):
        columns = mask.row_entries[first:end, 0].long()
        visible[row, columns[: full_end - first]] = True
        visible[row, columns[full_end - first :]] = bits[mask.row_entries[full_end:end, 1].long()]
    whole = visible.view(batch, heads, rows, -1, tile_q, tile_k).transpose(3, 4)
    return whole.reshape(batch, heads, rows * tile_q, -1)[..., :seqlen_q, :seqlen_k]


def _float64(tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and tensor.is_floating_point():
        return tensor.detach().double()
    return tensor


def _named(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor, _Tensors]:
    """Return q, k, v and a dict of the other tensors by name, with the five of the mask as "mask".

    Raises:
        ValueError: lengths or edges do not fit the rows.
    """
    given = AttentionTensors(*tensors)
    for name, edges, rows in (
        ("cu_seqlens_q", given.cu_seqlens_q, given.q),
        ("cu_seqlens_k", given.cu_seqlens_k, given.k),
    ):
        if edges is not None:
            values.check_edges(name, edges, rows.shape[0])
    if given.seqlens_k is not None:
        values.check_lengths("seqlens_k", given.seqlens_k, given.k.shape[1])
    others: _Tensors = given._asdict() | {"mask": given.mask}
    return others.pop("q"), others.pop("k"), others.pop("v"), others


def _forward(spec: AttentionSpec, *given: Tensor | None) -> Results:
    q, k, v, tensors = _named(given)
    rule = _rule(spec, {name: _float64(t) for name, t in tensors.items()})
    if spec.is_varlen:
        _check_lengths(spec, q, k, tensors)
        rule |= {name: tensors[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    run = standard.attention_varlen if spec.is_varlen else standard.attention
    with torch.no_grad():
        o, *rows = run(q.double(), k.double(), v.double(), **rule, return_max=True)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse, top = (x.to(wide) for x in rows)
    return (o.to(q.dtype), lse, top) if spec.needs_max else (o.to(q.dtype), lse)


def _check_lengths(spec: AttentionSpec, q: Tensor, k: Tensor, tensors: _Tensors) -> None:
    """Raise ValueError if packed sequences lie outside of q or k, or are longer than max_seqlen.

    The edges are read on any device.
    """
    for side, rows, most in (("q", q, spec.max_seqlen_q), ("k", k, spec.max_seqlen_k)):
        name = f"cu_seqlens_{side}"
        edges = tensors[name].tolist()
        if edges[0] != 0 or edges[-1] > len(rows) or edges != sorted(edges):
            raise ValueError(f"{name} must rise from 0 to at most {len(rows)}, got {edges}")
        longest = max((end - start for start, end in pairwise(edges)), default=0)
        if longest > most:
            raise ValueError(
                f"max_seqlen_{side} must be at least {longest}, the longest sequence, got {most}"
            )


def _backward(spec: AttentionSpec, *given: Tensor | None) -> Results:
    do, dlse, _, _, *rest = given
    q, k, v, tensors = _named(tuple(rest))
    rule = _rule(spec, {name: _float64(t) for name, t in tensors.items()})
    run: Any = standard.attention_backward
    if spec.is_varlen:
        run = functools.partial(_packed_backward, tensors["cu_seqlens_q"], tensors["cu_seqlens_k"])
    with torch.no_grad():
        grads = run(*(_float64(x) for x in (do, q, k, v)), dlse=_float64(dlse), **rule)
    dbias, dsinks = (
        None if like is None else grad.to(like.dtype)
        for like, grad in zip(
            (tensors.get("bias") if spec.needs_dbias else None, tensors.get("sinks")),
            grads[3:],
            strict=True,
        )
    )
    dq, dk, dv = (grad.to(like.dtype) for like, grad in zip((q, k, v), grads[:3], strict=True))
    return dq, dk, dv, dbias, dsinks


def _packed_backward(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dlse: Tensor | None,
    **rule: Any,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a packed batch, computed sequence by sequence in float64.

    Args:
        do, dlse: the gradients of o and lse; dlse may be None.
        rule: the other arguments of `standard.attention_backward`, for the whole batch.

    Returns:
        dq, dk, dv, dbias and dsinks; the last two are None without bias or sinks.
    """
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    bias, sinks, slopes = (rule[name] for name in ("bias", "sinks", "alibi_slopes"))
    dbias, dsinks = (None if x is None else torch.zeros_like(x) for x in (bias, sinks))
    edges_q, edges_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(edges_q) - 1):
        rows, keys = slice(edges_q[b], edges_q[b + 1]), slice(edges_k[b], edges_k[b + 1])
        corner = (b, rows.stop - rows.start, keys.stop - keys.start)
        own = rule | {
            name: _corner(rule[name], *corner)
            for name in ("bias", "mask", "keep_mask")
            if rule.get(name) is not None
        }
        if slopes is not None and slopes.dim() == 2:
            own["alibi_slopes"] = slopes[b]
        grads = standard.attention_backward(
            *(x.unsqueeze(0) for x in (do[rows], q[rows], k[keys], v[keys])),
            dlse=None if dlse is None else dlse[:, rows].unsqueeze(0),
            **own,
        )
        dq[rows], dk[keys], dv[keys] = (x.squeeze(0) for x in grads[:3])
        if dbias is not None and grads[3] is not None:
            part = _corner(dbias, *corner)
            part += grads[3]
        if dsinks is not None and grads[4] is not None:
            dsinks += grads[4]
    return dq, dk, dv, dbias, dsinks


def _corner(x: Tensor, b: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the part of bias or a mask that belongs to sequence b: its first rows and keys.

    Args:
        x: a tensor broadcastable to (B, Hq, max Sq, max Sk).
    """
    x = x.view((1,) * (4 - x.dim()) + tuple(x.shape))
    x = x if x.shape[0] == 1 else x[b : b + 1]
    x = x if x.shape[2] == 1 else x[:, :, :seqlen_q]
    return x if x.shape[3] == 1 else x[..., :seqlen_k]
