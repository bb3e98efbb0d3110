"""attention() and attention_varlen(): exact attention, forward and backward, on every backend."""

from __future__ import annotations

import math
from typing import Any, Literal, Never, TypedDict, Unpack, overload

from torch import Tensor

import tilewise.ops.attention.gradient
import tilewise.ops.attention.vmap  # noqa: F401, to register its rules
from tilewise.keywords import names, unknown_keyword
from tilewise.masks import BlockMask
from tilewise.ops import call, values
from tilewise.ops.attention.arguments import AttentionSignature, Window, check_mask_type
from tilewise.ops.attention.dropout import Seed
from tilewise.ops.attention.op import attention_fwd_max
from tilewise.ops.attention.recorded import record

_new = tuple.__new__  # a named tuple in a third of the time of its class


class _Shared(TypedDict, total=False):
    causal: bool
    window: Window
    softmax_scale: float | None
    softcap: float
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    mask: BlockMask | None
    dropout_p: float
    seed: Seed
    deterministic: bool
    backend: str | None


class _Dense(_Shared, total=False):
    seqlens_k: Tensor | None


class _Packed(_Shared):
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[_Dense]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Dense]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[True],
    **options: Unpack[_Dense],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[_Dense],
) -> tuple[Tensor, Tensor, Tensor]: ...


@names
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: BlockMask | None = None,
    seqlens_k: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Attend from every query to the keys it may see, in O(N) memory.

    o = softmax(s) v with s = softmax_scale * q k^T, then softcap * tanh(s / softcap), then + bias,
    then - alibi_slopes * |i + Sk - Sq - j|, then the mask. Query i sees key j when
    j <= i + Sk - Sq (causal) and j lies inside the window: bottom-right aligned, so with Sq < Sk
    the queries are the last positions. A row that sees nothing gives o = 0 and lse = -inf.

    Differentiable twice in every mode: backward, create_graph, forward mode, torch.func with vmap,
    also compiled. What comes after the gradient is no backend's: tiles of plain torch compute it on
    any device, for every argument below, in O(N) memory.

    Args:
        q: (B, Sq, Hq, D), float16, bfloat16, float32 (or float64 on a CPU); last dim contiguous.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), same dtype; Hq is a multiple of Hk, and query head
            h reads key head h // (Hq / Hk).
        causal: True to hide the keys to the right of the query.
        window: None, or w: the last w keys, the query's own included (implies causal), or
            (left, right): keys i - left ... i + right, None or -1 unlimited.
        softmax_scale: the factor of q . k; D ** -0.5 when None.
        softcap: bound of the logits, 0 is off.
        bias: broadcastable to (B, Hq, Sq, Sk), in q's dtype or float32; has a gradient. A bias
            of last dimension 1 moves all logits of a row alike, and so only lse and the share of a
            sink: its gradient is computed from these, and is exactly 0 without sinks and without a
            gradient of lse.
        alibi_slopes: (Hq,) or (B, Hq) float, no gradient.
        sinks: (Hq,) float; one learnable logit a head in the denominator only; has a gradient.
        mask: a BlockMask over (Sq, Sk), see `tilewise.masks`; a key must be visible by it and by
            the arguments above. Its empty tiles cost nothing.
        seqlens_k: (B,) int32 or int64 in [0, Sk], looked at on a CPU only, as a GPU would have to
            be waited for; sequence b has only its first seqlens_k[b] keys, aligned to them.
        dropout_p: probability of dropping each p_ij, rounded to the nearest multiple r of 1/256 (of
            1/256 to 255/256 but for 0 and 1): 0.1 is 0.1016, and 0.01 and 0.001 are 0.0117 and
            0.0039. The kept ones are multiplied by 1 / (1 - r), so that o is right on average. lse
            does not feel it.
        seed: the number that decides which are dropped: an int, (seed, offset), or int64 (2,) on
            q's device; None draws it from torch's generator. See `dropout_keep_mask`. Under
            torch.vmap a seed is that of every sample, and None follows vmap's `randomness`.
        deterministic: the backward pass must be bitwise reproducible; so it is, too, under
            torch.use_deterministic_algorithms(True). Only "gluon" needs to be told.
        return_lse: True to also return the log-sum-exp of the logits, which is differentiable too.
        return_max_logits: True to also return the largest logit of each head, as the softmax takes
            it: scaled, capped and biased, over all sequences, queries and the keys that they see; a
            sink is no key. What QK-clip compares with its threshold. It has no gradient.
        backend: "cpu", "triton", "gluon" (compute capability 8.x, 9.x, 12.x) or "reference"; None
            chooses. A name is obeyed or refused.

    Returns:
        o (B, Sq, Hq, Dv) in q's dtype; with return_lse also lse (B, Hq, Sq), float32, natural log,
        the sink included; with return_max_logits also, last, float32 (Hq,), -inf for a head whose
        rows see nothing.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: the backend cannot run this call, and the message says why; or a third
            derivative was asked for.

    Source: FlashAttention (2022) Algorithm 1, FlashAttention-2 (FlashForward2) and its backward.

    Example:
        >>> q = k = v = torch.randn(1, 128, 8, 64, requires_grad=True)
        >>> attention(q, k, v, causal=True).sum().backward()
    """
    if unknown:
        raise unknown_keyword(attention, unknown)
    given = _new(
        AttentionSignature,
        (
            q,
            k,
            v,
            causal,
            window,
            softmax_scale,
            softcap,
            bias,
            alibi_slopes,
            sinks,
            mask,
            seqlens_k,
            None,
            None,
            -1,
            -1,
            dropout_p,
            seed,
            deterministic,
            backend,
        ),
    )
    if return_max_logits:
        return _with_maxima(given, return_lse)
    results: Any = call.repeat(given, record) or _attend(given)
    return results if return_lse else results[0]  # type: ignore[no-any-return]


def _attend(given: AttentionSignature) -> tuple[Tensor | None, ...]:
    """Run attention for the arguments of a call, after their first checks; return o and lse.

    With dropout the seed is drawn here if none was given.
    """
    if given.mask is not None:
        check_mask_type(given.mask)
    if values.WAITS:
        check_values(given)
    if isinstance(given.dropout_p, int | float) and given.dropout_p > 0:
        given = given.drawn()
    return call.run(given, record=record)


def _with_maxima(given: AttentionSignature, return_lse: bool) -> tuple[Tensor, ...]:
    """Run attention and return o, then lse if `return_lse`, then the largest logit of each head.

    The largest logits are float32 (Hq,), over all sequences and queries, and -inf for a head that
    sees no key. The call always goes through torch's dispatcher: maxima are asked for once in many
    steps, and have no gradient.
    """
    if values.WAITS:
        check_values(given)
    q, k, v, options = given.bind()
    o, lse, maxima = attention_fwd_max(q, k, v, *options)
    if maxima.numel() == 0:
        most = maxima.new_full((q.shape[-2],), -math.inf)
    else:
        most = maxima.amax((1,) if given.cu_seqlens_q is not None else (0, 2))
    return (o, lse, most) if return_lse else (o, most)


def check_values(given: Any) -> None:
    """Raise ValueError where lengths or edges lead outside of q or k, or exceed a max_seqlen.

    The values of seqlens_k and cu_seqlens are read if they are tensors (other types are found by
    later checks); called for TILEWISE_CHECK=1.

    Args:
        given: the signature of a call of attention.
    """
    if isinstance(given.seqlens_k, Tensor):
        values.check_lengths("seqlens_k", given.seqlens_k, given.k.shape[1])
    for side, rows in (("q", given.q), ("k", given.k)):
        starts = getattr(given, f"cu_seqlens_{side}")
        if isinstance(starts, Tensor):
            values.check_edges(f"cu_seqlens_{side}", starts, rows.shape[0])
            longest = getattr(given, f"max_seqlen_{side}")
            values.check_longest(f"max_seqlen_{side}", starts, longest)


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[_Packed]
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Packed]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    return_max_logits: Literal[True],
    **options: Unpack[_Packed],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[_Packed],
) -> tuple[Tensor, Tensor, Tensor]: ...


@names
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: Seed = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, ...]:
    """Attend within each of several sequences packed end to end, without padding.

    Sequence b owns rows cu_seqlens_q[b]:cu_seqlens_q[b + 1] of q and o, and rows
    cu_seqlens_k[b]:cu_seqlens_k[b + 1] of k and v; inside it everything is as in `attention`.

    Args:
        q: (Tq, Hq, D); k, v: (Tk, Hk, D) and (Tk, Hk, Dv); dtypes as in `attention`.
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 or int64, start at 0, never decrease, end at Tq
            and Tk at most (rows behind get o = 0); looked at on a CPU only.
        max_seqlen_q, max_seqlen_k: host ints, at least the longest sequence; they size the grid of
            a GPU, up to the rows that there are.
        bias: broadcastable to (B, Hq, max_seqlen_q, max_seqlen_k); sequence b reads the upper left
            corner of its part, by the rows and keys of the sequence.
        mask: a BlockMask that covers at least (max_seqlen_q, max_seqlen_k), read as bias is.
        causal, window, softmax_scale, softcap, alibi_slopes, sinks, dropout_p, seed,
            deterministic, return_lse, return_max_logits, backend: as in `attention`.

    Returns:
        o (Tq, Hq, Dv) in q's dtype; with return_lse also lse (Hq, Tq), float32, natural log; with
        return_max_logits also, last, the largest logit of each head, float32 (Hq,).

    Raises:
        ValueError, TypeError, UnsupportedError: as in `attention`.

    Source: FlashAttention-2, over packed sequences.

    Example:
        >>> cu = torch.tensor([0, 3, 8], dtype=torch.int32)
        >>> q = k = v = torch.randn(8, 4, 64)
        >>> o = attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu,
        ...                      max_seqlen_q=5, max_seqlen_k=5, causal=True)
    """
    if unknown:
        raise unknown_keyword(attention_varlen, unknown)
    given = _new(
        AttentionSignature,
        (
            q,
            k,
            v,
            causal,
            window,
            softmax_scale,
            softcap,
            bias,
            alibi_slopes,
            sinks,
            mask,
            None,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            seed,
            deterministic,
            backend,
        ),
    )
    if return_max_logits:
        return _with_maxima(given, return_lse)
    results: Any = _attend(given)
    return results if return_lse else results[0]  # type: ignore[no-any-return]
