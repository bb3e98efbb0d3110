"""The registered boundary of attention: the call, its gradient and what comes after.

    attention_fwd(q, k, v, *options) -> (o, lse)
    attention_fwd_max(q, k, v, *options) -> (o, lse, the largest logit of each row)
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, Plan, Results, device_of
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.ops import dispatch
from tilewise.ops.attention import second_order as _attention_second
from tilewise.ops.attention.tiles import Tangents
from tilewise.ops.call import Bound, key_of, recall, remember
from tilewise.ops.derivatives import check_of, never
from tilewise.ops.library import register


class AttentionOptions(NamedTuple):
    """The checked arguments of an attention call but q, k and v, in the order of the op's schema.

    Absent tensors are None. `philox` is the seed and offset of dropout, int64 (2,); the fields
    mask_* are the tensors of a block mask, see `kernels.spec.MaskTensors`; a window bound of -1 is
    unlimited.
    """

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

    @property
    def beside(self) -> tuple[Tensor | None, ...]:
        """The optional tensors, None for absent ones, in the order of plans after q, k and v."""
        given: Any = self[:_TENSORS]
        found: tuple[Tensor | None, ...] = given
        return found

    def tensors(self) -> dict[str, Any]:
        """Return the optional tensors by name; the five of a mask are one MaskTensors, or None."""
        named: dict[str, Any] = dict(zip(self._fields[:_MASK], self[:_MASK], strict=True))
        mask: Any = self[_MASK:_TENSORS]
        named["mask"] = None if mask[0] is None else MaskTensors(*mask)
        return named


class AttentionArguments(NamedTuple):
    """The checked arguments of a call of attention, in the order of the registered op's schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: AttentionOptions

    def planned(self) -> BoundAttention:
        """Choose a backend and plan the call; nothing is looked up or remembered here.

        Raises:
            UnsupportedError: no backend can run it, or not the one that is named.
        """
        return _plan(self.q, self.k, self.v, self.options)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order in which plans take them."""
        return (*self[:3], *self.options.beside)

    def dispatch(self) -> Results:
        """Call the registered op and return o and lse."""
        results: tuple[Tensor, Tensor] = attention_fwd(*self[:3], *self.options)
        return results


_MAX_GRADIENTS = 64
_MASK = AttentionOptions._fields.index("mask_bits")
_BIAS = AttentionOptions._fields.index("bias")
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
NUM_TENSORS = _TENSORS  # of AttentionOptions; its numbers follow
NUM_FWD_TENSORS = 3 + NUM_TENSORS  # with q, k and v
NOTHING = (None,) * NUM_TENSORS
_SCHEMA_TYPES = {"Tensor | None": "Tensor?", "str | None": "str?"}
OPTIONS_SCHEMA = ", ".join(
    f"{'SymInt' if name.startswith('max_') else _SCHEMA_TYPES.get(kind, kind)} {name}"
    for name, kind in (
        (name, kind.__forward_arg__) for name, kind in AttentionOptions.__annotations__.items()
    )
)


def make_spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *,
    needs_dbias: bool = False,
    needs_max: bool = False,
) -> AttentionSpec:
    """Return the hashable spec of a call: shapes, dtypes, numbers and which options it has.

    Args:
        needs_dbias: True if the gradient of bias is computed.
        needs_max: True if the largest logits are returned.
    """
    cu_seqlens_q, bits = options.cu_seqlens_q, options.mask_bits
    longest_q, longest_k = options.max_seqlen_q, options.max_seqlen_k
    if cu_seqlens_q is not None:  # no sequence is longer than all of them together
        longest_q = _bounded(longest_q, q.shape[0], options.bias, -2)
        longest_k = _bounded(longest_k, k.shape[0], options.bias, -1)
    return AttentionSpec(
        device_type=q.device.type,
        dtype=q.dtype,
        batch=q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        num_q_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim=q.shape[-1],
        v_head_dim=v.shape[-1],
        window_left=options.window_left,
        window_right=options.window_right,
        softmax_scale=float(options.softmax_scale),
        softcap=float(options.softcap),
        is_varlen=cu_seqlens_q is not None,
        has_seqlens_k=options.seqlens_k is not None,
        has_bias=options.bias is not None,
        has_alibi=options.alibi_slopes is not None,
        has_sinks=options.sinks is not None,
        needs_dbias=needs_dbias,
        mask_tile=None if bits is None else (bits.shape[1], bits.shape[2] * 32),
        dropout_p=options.dropout_p,
        deterministic=options.deterministic,
        needs_max=needs_max,
    )


def _bounded(longest: int, num_rows: int, bias: Tensor | None, dim: int) -> int:
    """Return the max_seqlen of a packed call, cut to the number of rows of q or k.

    It is not cut where bias has a row (or column) for each query (or key): it is the size of bias
    then.

    Args:
        longest: the max_seqlen of the call.
        num_rows: the rows of q or k.
        dim: the dimension of bias for these rows: -2 for queries, -1 for keys.
    """
    if bias is not None and bias.dim() >= -dim and bias.shape[dim] != 1:
        return longest
    return min(longest, max(1, num_rows))


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _forward(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    options = AttentionOptions(*values)
    results: Any = planned(q, k, v, options).plan.run(q, k, v, *options.beside)
    return results  # type: ignore[no-any-return]


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    packed = AttentionOptions(*values).cu_seqlens_q is not None
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return o, q.new_empty(lse_shape, dtype=_lse_dtype(q))


def _forward_max(q: Tensor, k: Tensor, v: Tensor, *values: Any) -> tuple[Tensor, Tensor, Tensor]:
    options = AttentionOptions(*values)
    call = planned(q, k, v, options, needs_max=True)
    results: Any = call.plan.run(q, k, v, *options.beside)
    return results  # type: ignore[no-any-return]


def _forward_max_fake(
    q: Tensor, k: Tensor, v: Tensor, *values: Any
) -> tuple[Tensor, Tensor, Tensor]:
    o, lse = _forward_fake(q, k, v, *values)
    return o, lse, torch.empty_like(lse)


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
    grads = planned(q, k, v, options).backward(
        do, dlse, o, lse, q, k, v, *options.beside, needs_dbias=needs_dbias
    )
    return tuple(q.new_empty(0) if g is None else g for g in grads)


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


@dataclass(slots=True)
class BoundAttention(Bound):
    """A checked and planned call of attention, with the plans of its gradients made so far.

    Attributes:
        numbers: the options that are no tensors.
        shapes: the shapes of q, k, v and o.
        spec: everything that decides how the call is computed, beside its tensors.
        device: the device of its tensors.
        last_gradient: a check of do, o, lse, q, k and v, and the `run` of a gradient's plan, which
            the backward pass calls at once if the check passes. Only for calls on a CPU that have
            no further tensors and no dlse.
        gradients: plans of gradients, by how their tensors lie; at most 64.
        num_unchecked: the number of gradients of such calls that the check did not find.
    """

    numbers: tuple[Any, ...] = ()
    shapes: tuple[torch.Size, ...] = ()
    spec: Any = None
    device: Any = None
    last_gradient: tuple[Callable[..., bool], Any] = (never, None)
    gradients: dict[tuple[object, ...], Plan] = field(default_factory=dict)
    num_unchecked: int = 0

    def backward(
        self,
        do: Tensor,
        dlse: Tensor | None,
        o: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *beside: Tensor | None,
        needs_dbias: bool,
    ) -> Results:
        """Return dq, dk, dv, dbias and dsinks.

        dbias is None unless needs_dbias, dsinks without sinks.

        Args:
            do, dlse: the gradients of o and lse; dlse may be None.
            o, lse, q, k, v: the results and inputs of the forward pass.
            beside: the further tensors of the call (bias, sinks ...), in the op's order.
            needs_dbias: True if the gradient of bias is wanted.
        """
        bias = beside[_BIAS] if needs_dbias else None
        is_row_bias = bias is not None and bias.shape[-1:] in ((), (1,))
        given = (do, dlse, o, lse, q, k, v, *beside)
        needs_dbias = needs_dbias and not is_row_bias
        plan = self._gradient_plan(given, needs_dbias=needs_dbias)
        if dlse is None and do.is_cpu and all(x is None for x in beside):
            self.num_unchecked += 1
            if self.num_unchecked & 15 == 1:  # those of the next call may be others again
                self.last_gradient = check_of(do, o, lse, q, k, v), plan.run
        dq, dk, dv, dbias, dsinks = plan.run(*given)
        if bias is not None and is_row_bias:
            options = AttentionOptions(*beside, *self.numbers)  # type: ignore[arg-type]
            dbias = _row_bias_gradient(do, dlse, o, lse, bias, options)
        return dq, dk, dv, dbias, dsinks

    def _gradient_plan(self, given: Sequence[Any], *, needs_dbias: bool) -> Plan:
        """Return the plan of a gradient whose tensors lie like `given`, remembered or made now.

        Args:
            given: the tensors of the gradient, in the order of `GRADIENT_TENSORS`.
            needs_dbias: True if the plan computes the gradient of bias.
        """
        odd, lies, dtypes = 0, given[0].is_cpu, []
        for x in given:
            if x is not None:
                odd |= x.data_ptr()
                lies = lies and x.is_contiguous()
                dtypes.append(x.dtype)
        # Where all are contiguous, the call's own numbers say the strides.
        strides = None if lies else [x if x is None else x.stride() for x in given]
        key = (
            needs_dbias,
            given[1] is None,
            *dtypes,
            strides and tuple(strides),
            odd & 15 and _odd(given),
        )
        plan = self.gradients.get(key)
        if plan is None:
            with device_of(self.device):
                spec = self.spec._replace(needs_dbias=True) if needs_dbias else self.spec
                call = Call.of(spec, given)
                plan = dispatch.kernel_module("attention", self.backend).plan_bwd(call)
            if len(self.gradients) >= _MAX_GRADIENTS:
                self.gradients.clear()
            self.gradients[key] = plan
        return plan


def _odd(tensors: Sequence[Tensor | None]) -> tuple[bool, ...]:
    """Return for each tensor whether its address is not a multiple of 16 bytes; False for None.

    Kernels are made for addresses that are multiples of 16; other addresses need their own plan.
    """
    return tuple([x is not None and x.data_ptr() & 15 != 0 for x in tensors])


def planned(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, needs_max: bool = False
) -> BoundAttention:
    """Return the planned call of checked arguments, remembered from a like call or planned now.

    Args:
        needs_max: True for a plan that also returns the largest logit of each row.
    """
    op = "attention_max" if needs_max else "attention"
    key = key_of(op, (q, k, v, *options.beside), options[NUM_TENSORS:])
    bound: BoundAttention | None = recall(key)
    if bound is None:
        bound = _plan(q, k, v, options, needs_max=needs_max)
        remember(key, bound)
    return bound


def _plan(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, needs_max: bool = False
) -> BoundAttention:
    shapes = (q.shape, k.shape, v.shape, torch.Size((*q.shape[:-1], v.shape[-1])))
    spec = make_spec(q, k, v, options, needs_max=needs_max)
    with device_of(q.device):
        call = Call.of(spec, (q, k, v, *options.beside))
        backend, plan = dispatch.choose_plan("attention", call, options.backend)
    numbers = options[NUM_TENSORS:]
    return BoundAttention(backend, plan, numbers=numbers, shapes=shapes, spec=spec, device=q.device)


def _row_bias_gradient(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    bias: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Return the gradient of a bias that all keys of a row share, in its shape and dtype.

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
        most = _bounded(options.max_seqlen_q, rows.shape[1], bias, -2)
        count = torch.arange(most, device=rows.device)
        at = edges[:-1, None] + count  # (B, most rows of a sequence)
        exists = at < edges[1:, None]
        padded = torch.nn.functional.pad(rows, (0, 1))  # one row to read where none exists
        rows = padded[:, torch.where(exists, at, rows.shape[1])].transpose(0, 1)
    return rows.unsqueeze(-1).sum_to_size(bias.shape).to(bias.dtype)


def _schema(name: str, arguments: tuple[str, ...], num_results: int) -> str:
    """Return the schema, in torch's notation, of an op whose arguments end with the options.

    Args:
        name: the name of the op.
        arguments: the names of all arguments in order.
        num_results: the number of tensors that the op returns.
    """
    typed = []
    for argument in arguments[: -len(OPTIONS)]:
        optional = argument == "dlse" or argument in DIRECTION + DIRECTION2
        kind = "bool" if argument == "needs_dbias" else "Tensor?" if optional else "Tensor"
        typed.append(f"{kind} {argument}")
    results = ", ".join(["Tensor"] * num_results)
    return f"{name}({', '.join(typed)}, {OPTIONS_SCHEMA}) -> ({results})"


attention_fwd = register(_schema("attention_fwd", FWD, 2), _forward, _forward_fake)
attention_fwd_max = register(_schema("attention_fwd_max", FWD, 3), _forward_max, _forward_max_fake)
attention_bwd = register(_schema("attention_bwd", BWD, 5), _backward, _backward_fake)
attention_tangent = register(_schema("attention_tangent", TANGENT, 2), _tangent, _tangent_fake)
attention_second = register(_schema("attention_second", SECOND, 5), _second, _second_fake)
attention_curve = register(_schema("attention_curve", CURVE, 2), _curve, _tangent_fake)
