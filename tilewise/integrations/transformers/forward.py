"""The attention function of transformers' models, as a call of tilewise."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewise.errors import UnsupportedError
from tilewise.integrations.transformers.mask import (
    AttentionMask,
    made_here,
    tell_of_a_matrix,
    visible_of,
)
from tilewise.masks.of_transformers import Visible, as_bias
from tilewise.ops import attention, attention_varlen, checks

# Arguments that models pass and no attention function reads: they are used before or after
# attention, or are already in the mask.
INERT = frozenset(
    {
        "cache",  # from 5.24 on, past_key_values before
        "cache_params",
        "cache_position",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "hidden_states",
        "ignore_index",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "token_type_ids",
        "use_cache",
    }
)


class Packing(NamedTuple):
    """n sequences that lie end to end: the edges (n + 1,) of their queries and keys, and the
    numbers of queries and keys of the longest one."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | Tensor
    max_seqlen_k: int | Tensor


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    deterministic: bool | None = None,
    _backend: str | None = None,
    _inert: frozenset[str] = INERT,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention; registered in transformers' AttentionInterface.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv) -> (B, Sq, Hq, Dv), None. If
    there is a mask, is_causal and sliding_window are part of it and are not read. Dropout applies
    only while `module` is training.

    Raises UnsupportedError for an unknown argument that is not None, False or in `_inert`;
    ValueError if no mask is given where one is needed, or a caller's own mask or a position_bias
    comes with packed sequences.
    """
    _refuse_unknown(kwargs, _inert)
    q, k, v = (_rows(tensor) for tensor in (query, key, value))
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.reshape(-1),
        "dropout_p": dropout if module.training else 0.0,
        "deterministic": deterministic,
        "backend": _backend,
    }
    packing = _packing(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    bias: Tensor | None = None
    if attention_mask is not None:
        visible, bias = _with_mask(attention_mask, q, k)
    else:
        causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
        lengths = None if packing else (q.shape[1], k.shape[1])
        visible = _without_mask(causal, sliding_window, k.shape[1], lengths)

    if packing is None and visible.cu_seqlens is not None:
        edges, longest = visible.cu_seqlens, visible.max_seqlen
        packing = Packing(edges, edges, longest, longest)
    if packing is not None:
        hides_more = bias is not None or visible.seqlens_k is not None
        theirs = attention_mask is not None and not made_here(attention_mask)
        if position_bias is not None or (hides_more and theirs) or visible.num_keys < k.shape[1]:
            raise ValueError(
                "attention_mask and position_bias must be None with cu_seq_lens_q, got one"
            )
        if not hides_more:
            return _attend_packed(q, k, v, visible, packing, options), None
        bias = _apart(packing, q, k, bias)

    if visible.num_keys < k.shape[1]:
        k, v = k[:, : visible.num_keys], v[:, : visible.num_keys]
    if position_bias is not None:
        position_bias = position_bias[..., : visible.num_keys]
        bias = position_bias if bias is None else position_bias + bias
    window = (visible.left, visible.right)
    o = attention(q, k, v, window=window, bias=bias, seqlens_k=visible.seqlens_k, **options)
    return o, None


def _refuse_unknown(kwargs: dict[str, Any], inert: frozenset[str]) -> None:
    for name, value in kwargs.items():
        if value is None or value is False or name in inert:
            continue
        if name == "output_attentions":
            raise UnsupportedError(
                "output_attentions must be False, got True: the probabilities are never stored; "
                'use attn_implementation="eager" to look at them'
            )
        raise UnsupportedError(
            f"{name} must be None, got {type(value).__name__}: this attention does not know the "
            "argument; if it cannot change the result, name it in register(ignored=...)"
        )


def _rows(tensor: Tensor) -> Tensor:
    """Return tensor (B, H, S, D) as (B, S, H, D), with the last dim contiguous."""
    return checks.with_packed_rows(tensor.transpose(1, 2))


def _without_mask(
    causal: bool, window: int | None, num_keys: int, lengths: tuple[int, int] | None
) -> Visible:
    """Return the keys that queries see by the arguments alone, for a call without a mask.

    Raises ValueError where the arguments do not say what is visible: a window that is not causal,
    or several causal queries that are fewer than the keys.

    lengths: the numbers of queries and keys; None if packed sequences have lengths of their own.
    """
    if window is not None and window >= num_keys:
        window = None
    if lengths is not None and not causal and window is not None:
        raise ValueError(
            f"attention_mask must say what sliding_window={window} hides from queries that see "
            f"both ways over {num_keys} keys, got None"
        )
    if lengths is not None and causal and lengths[0] not in (1, lengths[1]):
        raise ValueError(
            f"attention_mask must say which of {lengths[1]} keys the first of {lengths[0]} causal "
            "queries sees, got None"
        )
    side = None if window is None else window - 1
    return Visible(num_keys, side, 0 if causal else side)


def _with_mask(mask: Tensor, q: Tensor, k: Tensor) -> tuple[Visible, Tensor | None]:
    """Return the visible keys that a mask describes, and a bias or None.

    A mask made by `attention_mask` gives its description, and a bias of keys if it has one. Any
    other matrix makes all keys visible and is itself the bias.
    """
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    visible = visible_of(mask)
    if visible is not None or isinstance(mask, AttentionMask):
        if mask.shape[-2:] != (seqlen_q, seqlen_k):
            raise ValueError(
                f"attention_mask must be for {(seqlen_q, seqlen_k)} queries and keys, "
                f"got {tuple(mask.shape[-2:])}"
            )
        if visible is not None:
            return visible, visible.key_bias
        assert isinstance(mask, AttentionMask)
        tell_of_a_matrix(mask)
        return Visible(seqlen_k), mask.bias(q.dtype)
    if mask.dim() != 4:
        raise ValueError(f"attention_mask must have 4 dims, got shape {tuple(mask.shape)}")
    tell_of_a_matrix(mask)
    if mask.shape[-1] > seqlen_k:  # the mask covers places of a cache that this layer does not have
        mask = mask[..., :seqlen_k]
    if mask.dtype == torch.bool:
        return Visible(seqlen_k), as_bias(mask, q.dtype)
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask must be bool or float, got {mask.dtype}")
    return Visible(seqlen_k), mask if mask.dtype == torch.float32 else mask.to(q.dtype)


def _packing(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
) -> Packing | None:
    given = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if all(part is None for part in given):
        return None
    if cu_seqlens_q is None or cu_seqlens_k is None or max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError(
            "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k must be given together, "
            "got some of them"
        )
    return Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, packing: Packing, options: dict[str, Any]
) -> Tensor:
    """Attend within each of the packed sequences in q, k, v (B, S, H, D), whose batch and rows are
    one dim.

    Returns o (B, S, Hq, Dv).
    """
    o: Tensor = attention_varlen(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        cu_seqlens_q=packing.cu_seqlens_q.to(torch.int32),
        cu_seqlens_k=packing.cu_seqlens_k.to(torch.int32),
        max_seqlen_q=int(packing.max_seqlen_q),
        max_seqlen_k=int(packing.max_seqlen_k),
        window=(visible.left, visible.right),
        **options,
    )
    return o.view(*q.shape[:2], *o.shape[1:])


def _apart(packing: Packing, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return `bias` with -inf where query and key belong to different sequences of a packed batch.

    Args:
        packing: the edges of the sequences.
        q, k: (B, S, H, D) and (B, T, H, D), whose sizes and device are read.
        bias: the mask's additive matrix; None is zeros.

    Returns:
        (B, 1 or H, S, T).
    """

    def numbers(cu_seqlens: Tensor, like: Tensor) -> Tensor:
        rows = torch.arange(like.shape[0] * like.shape[1], device=like.device)
        edges = cu_seqlens[1:].to(rows.dtype)
        return torch.searchsorted(edges, rows, right=True).view(like.shape[:2])

    of_q, of_k = numbers(packing.cu_seqlens_q, q), numbers(packing.cu_seqlens_k, k)
    bias = q.new_zeros(()) if bias is None else bias
    return bias.masked_fill(of_q[:, None, :, None] != of_k[:, None, None], float("-inf"))
