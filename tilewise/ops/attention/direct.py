"""Calls of attention that go straight to their plans, past torch's dispatcher.

Checks, options, backend and plans of a call follow from its numbers and from how its tensors lie.
Where nothing watches ops, a call like one before finds its plans at once, and so does its gradient;
the dispatcher alone takes longer than the launch of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.masks import BlockMask
from tilewise.ops import values
from tilewise.ops.attention.arguments import DENSE, Lengths, Rule, as_kernels_read, prepare, wide
from tilewise.ops.attention.dropout import philox_of
from tilewise.ops.attention.op import (
    NOTHING,
    Planned,
    attention_bwd,
    attention_fwd,
    attention_fwd_max,
    key_of,
    planned,
)
from tilewise.ops.call import recall
from tilewise.ops.derivatives import (
    are_plain,
    autocasts,
    check_of,
    never,
    places_of,
    records,
    unseen,
    unwatched,
)

__all__ = ["attend", "attend_again", "attend_max"]


def attend_again(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool
) -> Tensor | None:
    """Return o if the last call without more was like this one, and None otherwise.

    All arguments of such a call but these are the defaults.
    """
    if torch.compiler.is_compiling():
        return None
    last = _last
    if (
        causal is not last.causal
        or deterministic is not last.deterministic
        or not last.check(q, k, v)
        # A GPU's kernels are made for multiples of 16 bytes.
        or (last.bits and (q.data_ptr() | k.data_ptr() | v.data_ptr()) & last.bits)
        or not unseen()
        or _is_deterministic()
    ):
        return None
    if last.wants_gradient and torch.is_grad_enabled():
        recorded: Tensor = _apply(q, k, v, None, None, last.call, NOTHING, False)
        return recorded
    o: Tensor = last.call.forward(q, k, v, *NOTHING)[0]
    return o


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    lengths: Lengths,
    needs_lse: bool,
    is_plain: bool = False,
) -> tuple[Tensor, ...]:
    """Return o and lse; o alone where lse is not needed and was not computed.

    Args:
        is_plain: the call has no tensor but q, k and v, needs no lse, and of its rule all but
            causal and deterministic are defaults.

    Raises:
        ValueError, TypeError, UnsupportedError: as `ops.attention`.
    """
    if values.WAITS:
        check_values(q, k, lengths)
    found = None
    if unwatched() and not autocasts():
        found = _find(q, k, v, rule, lengths, is_plain)
    if found is None:
        q, k, v, options = prepare(q, k, v, rule, lengths)
        watched: tuple[Tensor, Tensor] = attention_fwd(q, k, v, *options)
        return watched
    call, tensors, is_recorded = found
    if is_recorded:
        recorded: Tensor | tuple[Tensor, Tensor] = _apply(
            q, k, v, tensors[_BIAS], tensors[_SINKS], call, tensors, needs_lse
        )
        return recorded if isinstance(recorded, tuple) else (recorded,)
    results: tuple[Tensor, Tensor] = call.forward(q, k, v, *tensors)
    return results


def check_values(q: Tensor, k: Tensor, lengths: Lengths) -> None:
    """Raise where lengths lead outside of q or k; those that are no tensors are left to others."""
    seqlens_k, *edges = lengths[:3]
    if isinstance(seqlens_k, Tensor):
        values.check_lengths("seqlens_k", seqlens_k, k.shape[1])
    for side, rows, starts, most in zip("qk", (q, k), edges, lengths[3:], strict=True):
        if isinstance(starts, Tensor):
            values.check_edges(f"cu_seqlens_{side}", starts, rows.shape[0])
            values.check_longest(f"max_seqlen_{side}", starts, most)


class _Last(NamedTuple):
    """The last call without more that came twice, found again by one check of its tensors.

    Attributes:
        bits: the bits that the tensors' addresses must not have.
    """

    causal: bool | None
    deterministic: bool
    check: Callable[..., bool]
    bits: int
    call: Any
    wants_gradient: bool


_NONE = _Last(None, False, never, 0, None, False)
_last = _NONE
_missed: object = None  # the last call that the check did not know
_num_missed = 0  # how often it came again before another one was missed or a check was made
_MOST_MISSES = 8  # of a call whose checks were made in vain before: one takes what it saves a call


def _remember(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, deterministic: bool, call: Planned
) -> None:
    """Let the next call be found at once if this one came before, oftener each time."""
    global _last, _missed, _num_missed
    if call is not _missed:
        _missed, _num_missed = call, 0
        return
    _num_missed += 1
    if _num_missed > min(call.num_checks, _MOST_MISSES):
        _num_missed = 0
        call.num_checks += 1
        check, wants_gradient = check_of(q, k, v), any(x.requires_grad for x in (q, k, v))
        _last = _Last(causal, deterministic, check, 0 if q.is_cpu else 15, call, wants_gradient)


def attend_max(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, lengths: Lengths
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, lse and the largest logit of each head, float32 (Hq,), which has no gradient.

    Through the dispatcher: maxima are asked for once in many steps.

    Raises:
        ValueError, TypeError, UnsupportedError: as `ops.attention`.
    """
    if values.WAITS:
        check_values(q, k, lengths)
    q, k, v, options = prepare(q, k, v, rule, lengths)
    o, lse, maxima = attention_fwd_max(q, k, v, *options)
    if maxima.numel() == 0:
        return o, lse, maxima.new_full((q.shape[-2],), -math.inf)
    rows = (1,) if lengths.cu_seqlens_q is not None else (0, 2)
    return o, lse, maxima.amax(rows)


def _find(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, lengths: Lengths, is_plain: bool
) -> tuple[Planned, Sequence[Tensor | None], bool] | None:
    """Return the plans of a call, its tensors but q, k and v, and whether a gradient is recorded.

    None where an argument is not a usual one.
    """
    (
        causal,
        window,
        scale,
        softcap,
        bias,
        slopes,
        sinks,
        mask,
        dropout_p,
        seed,
        deterministic,
        backend,
    ) = rule
    odd = places_of(q, k, v)
    if odd == 0 or not (q.is_cpu or q.is_cuda):
        return None
    if not (is_plain or _are_usual(rule, lengths)):
        return None
    tensors: Any = NOTHING
    given: Sequence[Tensor] = ()
    mask_is: object = None
    is_alone = bias is None and slopes is None and sinks is None and mask is None
    if not is_alone or lengths is not DENSE or dropout_p != 0.0:
        seqlens_k, cu_seqlens_q, cu_seqlens_k, *_ = lengths
        beside = cu_seqlens_q, cu_seqlens_k, seqlens_k, bias, slopes, sinks
        given = [x for x in beside if x is not None]
        if not are_plain(*given) or (slopes is not None and slopes.requires_grad):
            return None
        if lengths is not DENSE and torch.int64 in [x.dtype for x in lengths[:3] if x is not None]:
            return _find(q, k, v, rule, as_kernels_read(lengths), is_plain)
        philox = None
        mask_tensors = _NO_MASK
        if dropout_p != 0.0:
            if isinstance(seed, Tensor) and not are_plain(seed):
                return None
            philox = philox_of(seed, q.device)
            rule = rule._replace(seed=philox)
        if mask is not None:
            if type(mask) is not BlockMask:
                return None
            mask_is, mask_tensors = (mask.shape, mask.device), mask.tensors()
        tensors = [*beside, philox, *mask_tensors]
    numbers: tuple[object, ...] = (causal, deterministic, _is_deterministic())
    if not is_plain:
        is_packed = None if lengths is DENSE else lengths[3:]
        numbers += (window, scale, softcap, dropout_p, backend, is_packed, mask_is)
    key = key_of(q, k, v, odd, tensors, numbers)
    call: Planned | None = recall(key)
    if call is None:
        _, _, _, options = prepare(q, k, v, rule._replace(softcap=float(softcap)), lengths)
        call = planned(q, k, v, options, key)
    elif is_plain and not numbers[-1] and (q.is_cpu or odd & 15 == 0):
        _remember(q, k, v, causal, deterministic, call)
    if slopes is not None or sinks is not None:
        tensors[_SLOPES], tensors[_SINKS] = wide(slopes, q), wide(sinks, q)
    return call, tensors, records(q, k, v, *given)


_is_deterministic = torch.are_deterministic_algorithms_enabled
_NO_MASK: tuple[Tensor | None, ...] = (None,) * 5
_BIAS, _SLOPES, _SINKS = 3, 4, 5  # in the order of AttentionOptions
_NUMBERS = (float, int)


def _are_usual(rule: Rule, lengths: Lengths) -> bool:
    """Whether all numbers are Python's, whose equals do the same."""
    causal, window, scale, softcap, _, _, _, _, dropout_p, _, _, backend = rule
    if window is None and scale is None and backend is None and lengths is DENSE:
        are_numbers = type(softcap) in _NUMBERS and type(dropout_p) in _NUMBERS
        return type(causal) is bool and are_numbers
    bounds = window if isinstance(window, tuple) else (window,)
    return (
        type(causal) is bool
        and (window is None or all(x is None or type(x) is int for x in bounds))
        and (scale is None or type(scale) is float)
        and type(softcap) in _NUMBERS
        and type(dropout_p) in _NUMBERS
        and (backend is None or type(backend) is str)
        and (lengths is DENSE or type(lengths.max_seqlen_q) is type(lengths.max_seqlen_k) is int)
    )


def _check_saved(call: Planned, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
    """Raise ValueError where hooks gave back tensors of other shapes: plans read what they say."""
    found = (q.shape, k.shape, v.shape, o.shape)
    if found != call.shapes:
        was, now = (", ".join(str(tuple(shape)) for shape in each) for each in (call.shapes, found))
        raise ValueError(
            f"saved_tensors_hooks must give back q, k, v and o of shapes {was}, got {now}"
        )


class _Node(torch.autograd.Function):
    """Records the gradient of a call: that of the op, which computes it where it is watched."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        call: Planned,
        tensors: Sequence[Tensor | None],
        needs_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        o, lse = call.forward(q, k, v, *tensors)
        # What save_for_backward and set_materialize_grads do, in half of their time.
        ctx.to_save = (q, k, v, o, lse) if tensors is NOTHING else (q, k, v, o, lse, *tensors)
        ctx.materialize_grads = False
        ctx.call = call
        return (o, lse) if needs_lse else o  # a result less is a quarter of a microsecond

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        if do is None and dlse is None:
            return (None,) * 8
        q, k, v, o, lse, *saved = ctx.saved_tensors
        if not (saved or dlse is not None or do is None or torch.is_grad_enabled()):
            check, run = ctx.call.last_gradient
            if not torch.compiler.is_compiling() and check(do, o, lse, q, k, v) and unseen():
                dq, dk, dv, *_ = run(do, None, o, lse, q, k, v, *NOTHING)
                return dq, dk, dv, None, None, None, None, None
        _check_saved(ctx.call, q, k, v, o)
        tensors = saved or NOTHING
        do = torch.zeros_like(o) if do is None else do
        needs_dbias = ctx.needs_input_grad[3]
        # What was saved is as plain as it was, unless hooks have made it anew.
        given = [x for x in (do, dlse, o, lse, *saved) if x is not None]
        is_plain = unwatched() and places_of(q, k, v) != 0 and are_plain(*given)
        if is_plain and not records(q, k, v, *given):
            grads = ctx.call.backward(do, dlse, o, lse, q, k, v, *tensors, needs_dbias=needs_dbias)
        else:
            grads = attention_bwd(
                do, dlse, q, k, v, o, lse, needs_dbias, *tensors, *ctx.call.numbers
            )
        dq, dk, dv, dbias, dsinks = grads
        dbias = dbias if needs_dbias else None
        return dq, dk, dv, dbias, None if tensors[_SINKS] is None else dsinks, None, None, None


# Function.apply, past what it does for torch.func: no call comes here under a transform.
_apply: Any = super(torch.autograd.Function, _Node).apply
