"""attention_fp8() and quantize_heads(): attention in 8-bit floating point, forward only."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, Never, TypedDict, Unpack, overload

import torch
from torch import Tensor

from tilewise.kernels.plan import FP8_TENSORS
from tilewise.keywords import names, unknown_keyword
from tilewise.masks import BlockMask
from tilewise.ops import call, checks, values
from tilewise.ops.attention.api import check_values
from tilewise.ops.attention.arguments import AttentionSignature, Window, check_mask_type, wide
from tilewise.ops.attention.fp8_op import (
    E4M3,
    Fp8Options,
    quantize_heads_op,
    quantize_tokens_op,
    rotation_of,
)
from tilewise.ops.attention.op import AttentionOptions
from tilewise.ops.call import Adapter, Tensors
from tilewise.ops.derivatives import no_gradient
from tilewise.reference import fp8

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_ROTATION, _Q, _SINKS = map(FP8_TENSORS.index, ("rotation", "q", "sinks"))
_LENGTHS = slice(FP8_TENSORS.index("cu_seqlens_q"), FP8_TENSORS.index("seqlens_k") + 1)


@names
def quantize_heads(
    x: Tensor,
    *,
    rotation: int | None = None,
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = -1,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Round each head of each sequence to float8_e4m3fn with one scale: x ~ x8 * scale.

    scale = amax / 448, the largest |x| of the head over the largest e4m3 number (1 for a head of
    zeros), and x8 = x * (448 / amax) rounded to nearest even. Infinities and NaN must not occur.

    Args:
        x: (B, S, H, D), float16, bfloat16 or float32; last dim contiguous. Packed sequences, with
            cu_seqlens, are (T, H, D).
        rotation: None, or the seed of a rotation of the channels by random signs and the
            orthonormal Hadamard transform: D must be a power of two. It spreads outliers; q and k
            rotated with the same seed have the same products as before.
        seqlens: int32 or int64 (B,); rows past a sequence's length become 0 and do not count.
        cu_seqlens: (B + 1,) int32 or int64; sequence b owns rows cu_seqlens[b]:cu_seqlens[b + 1] of
            a packed x, and rows of none become 0.
        max_seqlen: with cu_seqlens, a host int, at least the longest sequence.

    Returns:
        x8 float8_e4m3fn in x's shape, scale float32 (B, H).

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: x requires a gradient, which there is none of.

    Source: FlashAttention-3, section 3.3; the rule in full is in `tilewise.reference.fp8`.

    Example:
        >>> x8, scale = quantize_heads(torch.randn(1, 128, 8, 64))
        >>> x = x8.float() * scale[:, None, :, None]
    """
    if unknown:
        raise unknown_keyword(quantize_heads, unknown)
    is_packed = cu_seqlens is not None
    _check_quantized("quantize_heads", x, rotation, seqlens, is_packed)
    if cu_seqlens is not None:
        checks.check_integers("cu_seqlens", cu_seqlens, (max(1, len(cu_seqlens)),), x.device)
        cu_seqlens = checks.as_int32(cu_seqlens)
        max_seqlen = checks.check_length("max_seqlen", max_seqlen)
    seqlens = None if seqlens is None else checks.as_int32(seqlens)
    x8, scale = quantize_heads_op(x, seqlens, cu_seqlens, rotation, max_seqlen)
    return x8, scale


@names
def quantize_tokens(
    x: Tensor,
    *,
    rotation: int | None = None,
    seqlens: Tensor | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Round each token of each head to float8_e4m3fn with a scale of its own, for q and k.

    The rule is that of `quantize_heads` with amax the largest |x| of a token's channels. It needs
    one pass where that of a head needs two.

    Args:
        x, rotation, seqlens: as in `quantize_heads`; where sequences lie in a packed x (T, H, D)
            decides nothing.

    Returns:
        x8 float8_e4m3fn in x's shape, scale float32 (B, H, S), 1 for rows past a length, or
        (1, H, T) of a packed x.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `quantize_heads`.

    Source: SageAttention (Zhang et al. 2024), section 4.3; the rule is in `tilewise.reference.fp8`.

    Example:
        >>> x8, scale = quantize_tokens(torch.randn(1, 128, 8, 64))
        >>> x = x8.float() * scale.transpose(1, 2)[..., None]
    """
    if unknown:
        raise unknown_keyword(quantize_tokens, unknown)
    _check_quantized("quantize_tokens", x, rotation, seqlens, x.dim() == 3)
    seqlens = None if seqlens is None else checks.as_int32(seqlens)
    x8, scale = quantize_tokens_op(x, seqlens, rotation)
    return x8, scale


def _check_quantized(
    name: str, x: Tensor, rotation: int | None, seqlens: Tensor | None, is_packed: bool
) -> None:
    checks.check_dims("x", x, "(T, H, D)" if is_packed else "(B, S, H, D)")
    if is_packed and seqlens is not None:
        raise ValueError("seqlens must be None for packed sequences")
    if x.dtype not in (*_SIXTEEN_BITS, torch.float32):
        raise TypeError(f"x must be float16, bfloat16 or float32, got {checks.dtype_name(x.dtype)}")
    checks.check_last_dim_contiguous("x", x)
    _check_rotation(x.shape[-1], rotation)
    if seqlens is not None:
        checks.check_integers("seqlens", seqlens, (x.shape[0],), x.device)
    _refuse_gradients(name, x)


class _Keywords(TypedDict, total=False):
    causal: bool
    window: Window
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    mask: BlockMask | None
    seqlens_k: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    rotate: bool
    seed: int
    smooth_k: bool
    per_token: bool
    backend: str | None


@overload
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> Tensor: ...


@overload
def attention_fp8(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Keywords]
) -> tuple[Tensor, Tensor]: ...


@names
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: BlockMask | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = -1,
    max_seqlen_k: int = -1,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotate: bool = False,
    seed: int = 0,
    smooth_k: bool = False,
    per_token: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend with queries, keys and values of 8 bits (e4m3), forward only.

    o = softmax(s) v with s = softmax_scale * q k^T over the numbers x8 * scale that
    `quantize_heads` leaves; masks as in `attention`. Hopper's tensor cores multiply e4m3 at twice
    the rate of bfloat16; there the probabilities are rounded to e4m3 as well. The CPU backend
    dequantises to float32 and the portable GPU one to 16 bits: the same numbers at their speed.

    Args:
        q: (B, Sq, Hq, D), float16 or bfloat16, quantised on the fly; or float8_e4m3fn.
        k, v: (B, Sk, Hk, D) and (B, Sk, Hk, Dv), same dtype; Hq is a multiple of Hk.
        causal, window, softmax_scale, softcap, sinks, mask, seqlens_k: as in `attention`.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: edges and longest lengths of packed
            sequences, all four or none, as in
            `attention_varlen`: q is (Tq, Hq, D), k and v (Tk, Hk, D) and (Tk, Hk, Dv), o
            (Tq, Hq, Dv) and lse (Hq, Tq); scales of tokens are (1, Hq, Tq) and (1, Hk, Tk).
        q_scale, k_scale, v_scale: float32 (B, Hq), (B, Hk), (B, Hk); with e4m3 tensors, and only
            with them. Those of q and k may be of tokens, (B, Hq, Sq) and (B, Hk, Sk), both.
        rotate: True to rotate q and k before they are quantised, see `quantize_heads`; for 16-bit
            tensors, D a power of two. Worth its time where single channels or entries are far
            larger than the rest.
        seed: decides the signs of the rotation.
        smooth_k: True to subtract each head's mean key before quantising; for 16-bit tensors,
            without softcap and sinks. It moves all logits of a row by one number, which softmax
            does not feel, and lse gets it back. Worth its pass over k where channels of k are far
            from 0 on average.
        per_token: True to quantise q and k with a scale for each token, see `quantize_tokens`, v
            with one a head; for 16-bit tensors. Worth it where tokens differ in size.
        return_lse: True to also return the log-sum-exp of the logits.
        backend: "gluon" (Hopper; D = Dv of 64, 128 or 256), "triton", "cpu" or "reference"; None
            chooses. A name is obeyed or refused.

    Returns:
        o (B, Sq, Hq, Dv) in q's dtype, bfloat16 for e4m3; with return_lse also lse (B, Hq, Sq),
        float32, natural log, sinks included. A row that sees nothing gives o = 0 and lse = -inf.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
        UnsupportedError: the backend cannot run this call, or an input requires a gradient.

    Source: FlashAttention-3 (Shah et al. 2024), section 3.3; smooth_k: SageAttention (Zhang et al.
    2024), section 4.2.

    Example:
        >>> q = k = v = torch.randn(1, 128, 8, 64, dtype=torch.bfloat16)
        >>> o = attention_fp8(q, k, v, causal=True)
    """
    if unknown:
        raise unknown_keyword(attention_fp8, unknown)
    check_mask_type(mask)
    given = Fp8Signature(
        q,
        k,
        v,
        causal,
        window,
        softmax_scale,
        softcap,
        sinks,
        mask,
        seqlens_k,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        q_scale,
        k_scale,
        v_scale,
        int(seed) if rotate else None,
        per_token,
        backend,
    )
    if values.WAITS:
        check_values(given)
    results: Any
    if not smooth_k:
        results = call.run(given)
        o, lse = results
        return (o, lse) if return_lse else o
    options = given.bind()
    if q.dtype == E4M3:
        raise ValueError("smooth_k must be False with e4m3 tensors: smooth k before them")
    if softcap > 0:
        raise ValueError(f"softcap must be 0 with smooth_k, got {softcap}")
    if sinks is not None:
        raise ValueError("sinks must be None with smooth_k: it moves all logits but theirs")
    mean, lse_mean = _mean_keys(q, k, options.attention)
    results = options._replace(k=(k.float() - mean).to(k.dtype)).dispatch()
    o, lse = results
    if not return_lse:
        only: Tensor = o
        return only
    return o, lse + options.attention.softmax_scale * _products_with(q, lse_mean)


class Fp8Signature(NamedTuple):
    """The arguments of `attention_fp8`, but for smooth_k and whether lse is returned.

    Attributes:
        rotation: the seed of a rotation of q and k, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window: Window
    softmax_scale: float | None
    softcap: float
    sinks: Tensor | None
    mask: BlockMask | None
    seqlens_k: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    q_scale: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    rotation: int | None
    per_token: bool
    backend: str | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order of `FP8_TENSORS`."""
        scales = self.q_scale, self.k_scale, self.v_scale
        edges = self.cu_seqlens_q, self.cu_seqlens_k
        of_mask = (None,) * 5 if self.mask is None else self.mask.tensors()
        beside = (*edges, self.seqlens_k, None, None, self.sinks, None, *of_mask)
        return (*scales, None, self.q, self.k, self.v, *beside)

    def numbers(self) -> tuple[object, ...]:
        """Return the arguments, no tensors, that decide how the call is checked or computed."""
        window = self.window
        bounds = window if isinstance(window, tuple) else (window,)
        return (
            self.causal,
            self.softmax_scale,
            self.softcap,
            self.max_seqlen_q,
            self.max_seqlen_k,
            self.rotation,
            self.per_token,
            self.backend,
            None if self.mask is None else self.mask.shape,
            isinstance(window, tuple),
            *bounds,
        )

    def bind(self) -> Fp8Options:
        """Check the arguments and return those of the registered op.

        Raises ValueError or TypeError where one breaks a rule of `attention_fp8`, and
        UnsupportedError where one requires a gradient.
        """
        q, k, v = self[:3]
        given = AttentionSignature(**{name: getattr(self, name) for name in _SHARED})
        given.check_types()
        options = given.options(_check_dtype)
        edges, q_scale = self.cu_seqlens_q, self.q_scale
        is_packed = edges is not None
        if is_packed and self.seqlens_k is not None:
            raise ValueError("seqlens_k must be None for packed sequences")
        batch = q.shape[0] if edges is None else edges.shape[0] - 1
        shapes: list[tuple[int, ...]] = [(batch, x.shape[-2]) for x in (q, k, k)]
        if q_scale is not None and q_scale.dim() == 3:  # of tokens, those of k too
            shapes[:2] = [(1 if is_packed else batch, x.shape[-2], x.shape[-3]) for x in (q, k)]
        for name, shape in zip(("q_scale", "k_scale", "v_scale"), shapes, strict=True):
            _check_scale(name, getattr(self, name), shape, q)
        if self.rotation is not None and q.dtype == E4M3:
            raise ValueError(
                "rotate must be False with e4m3 tensors: rotate them in quantize_heads"
            )
        if self.per_token and q.dtype == E4M3:
            raise ValueError(
                "per_token must be False with e4m3 tensors: give them scales of tokens"
            )
        if self.rotation is not None and not -(2**63) <= self.rotation < 2**63:
            raise ValueError(f"seed must be an integer of 64 bits, got {self.rotation}")
        _check_rotation(q.shape[-1], self.rotation)
        _refuse_gradients("attention_fp8", q, k, v, self.sinks)
        scales = q_scale, self.k_scale, self.v_scale
        return Fp8Options(q, k, v, *scales, self.rotation, self.per_token, options)

    def adapter(self) -> Adapter:
        """Return a function that makes the tensors of the registered op out of `tensors()`."""
        return partial(_as_kernels_read, self.rotation)


_SHARED = [name for name in Fp8Signature._fields if name in AttentionSignature._fields]


def _as_kernels_read(rotation: int | None, tensors: Tensors) -> Tensors:
    """Return a user's tensors, in the order of `FP8_TENSORS`, as kernels read them.

    The rotation's matrix is filled in, sinks become float32, and edges and lengths int32.

    Args:
        rotation: the seed of a rotation of q and k, or None.
    """
    given = list(tensors)
    q, sinks = given[_Q], given[_SINKS]
    assert q is not None
    given[_ROTATION] = rotation_of(q, rotation)
    given[_SINKS] = wide(sinks, q)
    given[_LENGTHS] = [None if x is None else checks.as_int32(x) for x in given[_LENGTHS]]
    return given


def _mean_keys(q: Tensor, k: Tensor, lengths: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the mean key of a row's sequence, float32, for the rows of k and for those of q.

    Each is (B, 1, Hk, D) for a dense batch; packed ones are (Tk, Hk, D) and (Tq, Hk, D). Rows that
    belong to no sequence do not count, and their mean is 0.

    Args:
        lengths: the options of the call, of which only lengths and edges are read.
    """
    if lengths.cu_seqlens_q is None or lengths.cu_seqlens_k is None:
        mean = _mean_key(k, lengths.seqlens_k)
        return mean, mean
    sequence = fp8.sequence_of_rows(lengths.cu_seqlens_k, k.shape[0])
    counts = torch.cat((lengths.cu_seqlens_k.diff(), lengths.cu_seqlens_k.new_ones(1)))
    mean = k.new_zeros((counts.shape[0], *k.shape[1:]), dtype=torch.float32)
    mean = mean.index_add(0, sequence, k.float()) / counts.clamp(min=1)[:, None, None]
    mean[-1] = 0.0  # rows of no sequence may hold anything
    return mean[sequence], mean[fp8.sequence_of_rows(lengths.cu_seqlens_q, q.shape[0])]


def _mean_key(k: Tensor, seqlens_k: Tensor | None) -> Tensor:
    """Return the mean of each head's keys, (B, 1, Hk, D) float32; 0 if there are no keys."""
    wide = k.float()
    if seqlens_k is None:
        return wide.sum(1, keepdim=True) / max(1, k.shape[1])
    counts = seqlens_k.clamp(0, k.shape[1])[:, None, None, None]
    is_key = torch.arange(k.shape[1], device=k.device)[:, None, None] < counts
    # Rows past a length may hold anything, NaN too.
    mean: Tensor = torch.where(is_key, wide, 0.0).sum(1, keepdim=True) / counts.clamp(min=1)
    return mean


def _products_with(q: Tensor, mean: Tensor) -> Tensor:
    """Return the products of each query with its head's mean key, (B, Hq, Sq) or (Hq, Tq) float32.

    Args:
        q: the queries, (B, Sq, Hq, D) or (Tq, Hq, D).
        mean: the mean keys for the rows of q, as `_mean_keys` returns them second.
    """
    grouped = q.float().unflatten(-2, (mean.shape[-2], -1))
    products: Tensor = (grouped * mean.unsqueeze(-2)).sum(-1).flatten(-2).transpose(-1, -2)
    return products


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in (*_SIXTEEN_BITS, E4M3):
        raise TypeError(
            f"{name} must be float16, bfloat16 or float8_e4m3fn, got {checks.dtype_name(x.dtype)}"
        )


def _check_scale(name: str, scale: Tensor | None, shape: tuple[int, ...], q: Tensor) -> None:
    if (scale is not None) != (q.dtype == E4M3):
        raise ValueError(
            f"{name} must be given with e4m3 tensors and only with them, "
            f"got {'one' if scale is not None else 'none'} with {checks.dtype_name(q.dtype)}"
        )
    if scale is not None:
        checks.check_same_dtype(name, scale, torch.float32)
        checks.check_shape(name, scale, shape)
        checks.check_device(name, scale, q.device)


def _check_rotation(head_dim: int, rotation: int | None) -> None:
    if rotation is not None and head_dim & (head_dim - 1):
        raise ValueError(f"a rotated head dim must be a power of two, got {head_dim}")


def _refuse_gradients(name: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise no_gradient(name)
