"""Attention of AlphaFold's kind by the names of DeepSpeed and of cuEquivariance.

Two biases are added to the logits: one of the keys of each row (a mask, as a rule) and one of the
pairs, shared by all rows. The pair bias stays as it is, O(S^2) for any number of rows, and its
gradient is summed over the rows in the kernel. The key bias becomes a few more channels of q and k,
whose product it is: no tensor of rows x queries x keys is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.ops import attention, key_bias_channels

__all__ = ["DS4Sci_EvoformerAttention", "triangle_attention"]


def DS4Sci_EvoformerAttention(
    Q: Tensor, K: Tensor, V: Tensor, biases: Sequence[Tensor | None]
) -> Tensor:
    """Attend as deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention does.

    o = softmax(q k^T / sqrt(D) + biases[0] + biases[1]) v for each row of each batch. Gradients of
    q, k, v and both biases are exact, with two exceptions: of biases[0] below -61,440 (a mask) the
    gradient is 0, and on Hopper (`gluon`) a query whose logits have |logsumexp| >= 2^24 adds
    nothing to any. A row whose keys are all masked by one number attends as if none were, which is
    what the formula says.

    Args:
        Q: (*, N, Sq, H, D), any number of batch dims before the rows N; float16, bfloat16, float32,
            or float64 on a CPU (DeepSpeed: 16 bits, one batch dim, more than 16 tokens).
        K, V: (*, N, Sk, H, D), same dtype.
        biases: up to two tensors, None or fewer where there is none: (*, N, 1, 1, Sk), a bias of
            the keys of each row, and (*, 1, H, Sq, Sk), a bias of the pairs. Each has a gradient.
            Q's dtype or float32.

    Returns:
        (*, N, Sq, H, D), in Q's dtype.

    Raises:
        ValueError: a shape breaks a rule above, or there are more than two biases.

    Source: DeepSpeed4Science's tutorial of DS4Sci_EvoformerAttention.

    Example:
        >>> q = k = v = torch.randn(1, 8, 64, 4, 32)
        >>> o = DS4Sci_EvoformerAttention(q, k, v, [mask_bias, pair_bias])
    """
    if len(biases) > 2:
        raise ValueError(f"biases must be at most 2, got {len(biases)}")
    if Q.dim() < 4:
        raise ValueError(f"Q must have 4 dims or more, (..., N, S, H, D), got {tuple(Q.shape)}")
    key_bias, pair_bias = (*biases, None, None)[:2]
    batch, (rows, queries, heads) = Q.shape[:-4], Q.shape[-4:-1]
    keys = K.shape[-3]
    _check("biases[0]", key_bias, (*batch, rows, 1, 1, keys))
    _check("biases[1]", pair_bias, (*batch, 1, heads, queries, keys))
    count = math.prod(batch)
    if key_bias is not None:
        key_bias = key_bias.reshape(count, rows, keys)
    if pair_bias is not None:
        pair_bias = pair_bias.reshape(count, heads, queries, keys)
    q, k, v = (x.reshape(count, *x.shape[-4:]) for x in (Q, K, V))
    return _rows(q, k, v, pair_bias, key_bias, None, None).reshape(*Q.shape[:-1], V.shape[-1])


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """Attend as cuequivariance_torch.triangle_attention does.

    o = softmax(scale * q k^T + bias) v over the keys that `mask` shows. Gradients of q, k, v and
    bias are exact, but on Hopper (`gluon`) a query whose logits have |logsumexp| >= 2^24 adds
    nothing to them. Results differ in one case: where `mask` hides all keys of a row, the row
    attends here as if it saw all, and cuEquivariance gives the mean of v. A row with kv_lengths of
    0 gets 0 here.

    Args:
        q: (B, N, H, Q, D), or (N, H, Q, D) for one batch; any float dtype of `attention`.
        k, v: (B, N, H, K, D), same dtype; with B left out like q.
        bias: (B, 1, H, Q, K), in q's dtype or float32; has a gradient.
        mask: (B, N, 1, 1, K), True or not 0 where a key is seen.
        scale: the positive factor of q . k; D ** -0.5 when None.
        return_aux: must be False; the row maxima that go with it are never stored.
        kv_lengths: int (B, N, 1, 1, 1), the first keys of each row that are seen, in place of a
            mask; keys behind them are not even read.

    Returns:
        (B, N, H, Q, D) with B left out like q, in q's dtype; heads follow queries in memory.

    Raises:
        ValueError: a shape breaks a rule above, or mask and kv_lengths are both given.
        UnsupportedError: return_aux is set.

    Source: the documentation of cuequivariance_torch.triangle_attention.

    Example:
        >>> q = k = v = torch.randn(1, 64, 4, 64, 32)
        >>> o = triangle_attention(q, k, v, torch.randn(1, 1, 4, 64, 64))
    """
    if return_aux:
        raise UnsupportedError("return_aux must be False: row maxima are never stored")
    if mask is not None and kv_lengths is not None:
        raise ValueError("mask must be None when kv_lengths is given, got both")
    if q.dim() == 4:
        beside = (mask, kv_lengths)
        mask, kv_lengths = (None if x is None else _with_batch(x, 4) for x in beside)
        q, k, v, bias = (_with_batch(x, 4) for x in (q, k, v, bias))
        return triangle_attention(q, k, v, bias, mask, scale, kv_lengths=kv_lengths).squeeze(0)
    if q.dim() != 5:
        raise ValueError(f"q must have 4 or 5 dims, (B, N, H, Q, D), got {tuple(q.shape)}")
    batch, rows, heads, queries, _ = q.shape
    keys = k.shape[3]
    _check("bias", bias, (batch, 1, heads, queries, keys))
    _check("mask", mask, (batch, rows, 1, 1, keys))
    _check("kv_lengths", kv_lengths, (batch, rows, 1, 1, 1))
    if mask is not None:
        mask = mask.reshape(batch, rows, keys).bool()
    if kv_lengths is not None:
        kv_lengths = kv_lengths.reshape(batch, rows)
    pairs = bias.reshape(batch, heads, queries, keys)
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    return _rows(q, k, v, pairs, mask, kv_lengths, scale).transpose(2, 3)


def _with_batch(x: Tensor, dims: int) -> Tensor:
    """Return x with a leading dim of size 1 if it has `dims` dims; otherwise x itself."""
    return x.unsqueeze(0) if x.dim() == dims else x


def _check(name: str, given: Tensor | None, shape: tuple[int, ...]) -> None:
    if given is not None and tuple(given.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(given.shape)}")


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: Tensor | None,
    keys: Tensor | None,
    lengths: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Attend in every row: q (B, N, Sq, H, D), k, v (B, N, Sk, H, D) -> (B, N, Sq, H, Dv).

    pairs: (B, H, Sq, Sk) or None; keys: (B, N, Sk), a float bias or which keys are seen, or None;
    lengths: int (B, N) or None. A batch is one call: its rows share the bias of its pairs.
    """
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    none = [None] * q.shape[0]
    found = []
    for q_b, k_b, v_b, pairs_b, keys_b, lengths_b in zip(
        *map(_batches, (q, k, v)),
        none if pairs is None else _batches(pairs),
        none if keys is None else _batches(keys),
        none if lengths is None else lengths,
        strict=True,
    ):
        if keys_b is not None:
            q_b, k_b = key_bias_channels(q_b, k_b, keys_b, scale)
        o = attention(
            q_b,
            k_b,
            v_b,
            bias=None if pairs_b is None else pairs_b.unsqueeze(0),
            seqlens_k=lengths_b,
            softmax_scale=scale,
        )
        found.append(o)
    if not found:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)


def _batches(x: Tensor) -> Sequence[Tensor]:
    """Return x[0], x[1] ... as views.

    The gradient of x is that of the only batch, uncopied, or all of them put together once; that of
    each x[b] would be copied into zeros of x's size.
    """
    return (x.squeeze(0),) if len(x) == 1 else x.unbind(0)
