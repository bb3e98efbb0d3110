"""xformers.ops.memory_efficient_attention and its masks, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.ops import attention, attention_varlen, paged_attention

__all__ = [
    "AttentionBias",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
    "memory_efficient_attention",
]


class AttentionBias:
    """The base of masks that are rules, not tensors, as `memory_efficient_attention` takes them."""


class LowerTriangularMask(AttentionBias):
    """A mask by which query i sees keys 0 ... i, whatever the lengths."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """Return a causal mask like this one with a tensor (B, H, Mq, Mk) that is added to the
        logits."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """A causal mask with a tensor that is added to the logits, (B, H, Mq, Mk)."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """A causal mask aligned to the bottom right: the last query is at the position of the last
    key."""

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """Return a causal mask like this one by which a query sees only the last `window_size` keys
        up to its own."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass(frozen=True)
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """A causal mask, aligned to the bottom right, by which a query sees only the last
    `_window_size` keys, its own included."""

    _window_size: int


@dataclass(frozen=True)
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A mask by which a query sees window_left keys before and window_right keys after its own
    position, aligned to the bottom right."""

    window_left: int
    window_right: int


@dataclass(frozen=True)
class _Lengths:
    """The lengths of packed sequences.

    Attributes:
        seqstart: int32 (n + 1,), the first row of each sequence, and the end of the last.
        max_seqlen: the length of the longest sequence, padding included.
        seqstart_py: the values of seqstart as a list.
        seqlen: int32 (n,), the numbers of valid keys of sequences padded to one length; None
            without padding.
    """

    seqstart: Tensor
    max_seqlen: int
    seqstart_py: list[int]
    seqlen: Tensor | None = None

    @classmethod
    def of(cls, lengths: Iterable[int], device: Any = None) -> _Lengths:
        edges = [0]
        for length in lengths:
            edges.append(edges[-1] + length)
        longest = max((b - a for a, b in pairwise(edges)), default=0)
        return cls(torch.tensor(edges, dtype=torch.int32, device=device), longest, edges)


@dataclass
class BlockDiagonalMask(AttentionBias):
    """A mask of packed sequences: a query sees all keys of its own sequence."""

    q_seqinfo: _Lengths
    k_seqinfo: _Lengths
    _batch_sizes: Sequence[int] | None = field(default=None)

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalMask:
        """Return a mask of sequences with q_seqlen queries and kv_seqlen keys, as many as queries
        when None.

        Raises ValueError if the lists have different lengths.
        """
        if kv_seqlen is not None and len(kv_seqlen) != len(q_seqlen):
            raise ValueError(f"kv_seqlen must have {len(q_seqlen)} lengths, got {len(kv_seqlen)}")
        queries = _Lengths.of(q_seqlen, device)
        return cls(queries, queries if kv_seqlen is None else _Lengths.of(kv_seqlen, device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """Pack tensors (B_i, M_i, ...) into one (1, T, ...); return the mask of their sequences,
        and the tensor."""
        lengths = [x.shape[1] for x in tensors for _ in range(x.shape[0])]
        mask = cls.from_seqlens(lengths, device=tensors[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors]
        return mask, torch.cat([x.flatten(0, 1) for x in tensors]).unsqueeze(0)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Cut a packed result (1, M, ...) into the results of the tensors given to
        `from_tensor_list`, (B_i, M_i, ...) each; of a mask made otherwise, into (1, M_i, ...) for
        each sequence."""
        edges = self.q_seqinfo.seqstart_py
        sizes = self._batch_sizes or [1] * (len(edges) - 1)
        found, at = [], 0
        for size in sizes:
            part = tensor[0, edges[at] : edges[at + size]]
            found.append(part.reshape(size, -1, *tensor.shape[2:]))
            at += size
        return found

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Return a mask of the same sequences that is causal, each sequence aligned to the top
        left."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Return a mask of the same sequences that is causal, with each sequence's last query at
        its last key."""
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        )


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """A causal mask of packed sequences, each aligned to the top left; here each must have as many
    keys as queries."""


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """A causal mask of packed sequences, each aligned to the bottom right."""


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(AttentionBias):
    """A causal mask of packed queries over keys that are padded to one length, as in a cache.

    Each sequence's last query is at its last valid key.
    """

    q_seqinfo: _Lengths
    k_seqinfo: _Lengths

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: object = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalCausalWithOffsetPaddedKeysMask:
        """Return a mask of sequences with q_seqlen queries and kv_seqlen keys, padded to kv_padding
        keys each.

        Raises ValueError if a sequence has more keys than kv_padding.
        """
        if causal_diagonal is not None:
            raise UnsupportedError("causal_diagonal must be None")
        if max(kv_seqlen, default=0) > kv_padding:
            raise ValueError(f"kv_seqlen must be at most {kv_padding}, got {max(kv_seqlen)}")
        padded = _Lengths.of([kv_padding] * len(q_seqlen), device)
        lengths = torch.tensor(list(kv_seqlen), dtype=torch.int32, device=device)
        keys = _Lengths(padded.seqstart, kv_padding, padded.seqstart_py, lengths)
        return cls(_Lengths.of(q_seqlen, device), keys)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Attend as xformers.ops.memory_efficient_attention does; grouped heads have gradients, too.

    Args:
        query: (B, Mq, H, K); (B, Mq, K) for one head; or (B, Mq, G, H, K) for G groups of heads.
        key, value: (B, Mk, H, K) and (B, Mk, H, Kv), with dims like query's. Of five dims an
            expanded H is read once, as grouped heads.
        attn_bias: a tensor that broadcasts to (B, H, Mq, Mk), with a gradient, or a mask of this
            module or of xformers, known by its class's name. Packed sequences have B = 1.
        p: the probability of dropping a weight.
        scale: the factor of query . key; K ** -0.5 when None.
        op: the choice of a kernel in xformers; not read here.
        output_dtype: the dtype of the result; that of query when None.

    Returns:
        (B, Mq, H, Kv), with dims like query's.

    Raises:
        ValueError: shapes do not fit.
        UnsupportedError: a mask that is not one of this module's, padded keys with p > 0.

    Source: the documentation of xformers.ops.

    Example:
        >>> o = memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())
    """
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4, 5):
        dims = (query.dim(), key.dim(), value.dim())
        raise ValueError(f"query, key and value must have 3, 4 or 5 dims alike, got {dims}")
    if query.dim() == 3:
        if isinstance(attn_bias, Tensor) and attn_bias.dim() == 3:
            attn_bias = attn_bias.unsqueeze(1)
        q, k, v = (x.unsqueeze(2) for x in (query, key, value))
    elif query.dim() == 5:
        if isinstance(attn_bias, Tensor) and attn_bias.dim() == 5:
            attn_bias = attn_bias.flatten(1, 2)
        q, (k, v) = query.flatten(2, 3), _grouped(key, value)
    else:
        q, k, v = query, key, value
    o = _attend(q, k, v, attn_bias, p, scale)
    o = o.reshape(*query.shape[:-1], v.shape[-1])
    return o if output_dtype is None else o.to(output_dtype)


class _Options(TypedDict):
    softmax_scale: float | None
    dropout_p: float


def _grouped(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, Mk, G, H, K) as (B, Mk, G, K) if H is expanded or 1 in both, else
    as (B, Mk, G H, K)."""
    if all(x.stride(3) == 0 or x.shape[3] == 1 for x in (key, value)):
        return key.select(3, 0), value.select(3, 0)
    return key.flatten(2, 3), value.flatten(2, 3)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, dropout_p: float, scale: float | None
) -> Tensor:
    """Attend with a mask of xformers, translated to the arguments of `attention`; return (B, Mq, H,
    Kv).

    q, k and v have four dims. Raises UnsupportedError for a mask that is not known.
    """
    options = _Options(softmax_scale=scale, dropout_p=dropout_p)
    if bias is None or isinstance(bias, Tensor):
        return attention(q, k, v, bias=bias, **options)
    kind = type(bias).__name__
    if kind in ("LowerTriangularMask", "LowerTriangularMaskWithTensorBias"):
        tensor = getattr(bias, "_bias", None)
        more = q.shape[1] - k.shape[1]
        if more < 0:  # no query sees the keys behind the square
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
            tensor = None if tensor is None else tensor[..., : q.shape[1]]
        window = (None, max(more, 0))
        return attention(q, k, v, bias=tensor, window=window, **options)
    if kind == "LowerTriangularFromBottomRightMask":
        return attention(q, k, v, causal=True, **options)
    if kind == "LowerTriangularFromBottomRightLocalAttentionMask":
        return attention(q, k, v, window=bias._window_size, **options)
    if kind == "LocalAttentionFromBottomRightMask":
        window = (bias.window_left, bias.window_right)
        return attention(q, k, v, window=window, **options)
    if kind == "BlockDiagonalCausalWithOffsetPaddedKeysMask":
        return _over_padded_keys(q, k, v, bias, dropout_p, scale)
    if kind not in _PACKED:
        raise UnsupportedError(f"attn_bias must be a tensor or a mask of {__name__}, got {kind}")
    queries, keys = bias.q_seqinfo, bias.k_seqinfo
    if kind == "BlockDiagonalCausalMask" and queries.seqstart_py != keys.seqstart_py:
        raise UnsupportedError(
            "a BlockDiagonalCausalMask must have as many keys as queries; "
            "make_causal_from_bottomright() takes others"
        )
    _check_packed(q, queries)
    _check_packed(k, keys)
    o = attention_varlen(
        q[0],
        k[0],
        v[0],
        cu_seqlens_q=queries.seqstart.to(q.device),
        cu_seqlens_k=keys.seqstart.to(q.device),
        max_seqlen_q=queries.max_seqlen,
        max_seqlen_k=keys.max_seqlen,
        causal=kind != "BlockDiagonalMask",
        **options,
    )
    return o.unsqueeze(0)


_PACKED = (
    "BlockDiagonalMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalCausalFromBottomRightMask",
)


def _check_packed(x: Tensor, lengths: Any) -> None:
    if x.shape[0] != 1 or x.shape[1] != lengths.seqstart_py[-1]:
        wanted = f"(1, {lengths.seqstart_py[-1]}, ...)"
        raise ValueError(f"packed tensors must have shape {wanted}, got {tuple(x.shape)}")


def _over_padded_keys(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, dropout_p: float, scale: float | None
) -> Tensor:
    """Attend causally to padded keys, as to a paged cache with one block for each sequence.

    No gradient flows. Raises UnsupportedError with dropout.
    """
    if dropout_p > 0:
        raise UnsupportedError(f"p must be 0 over padded keys, got {dropout_p}")
    queries, keys = bias.q_seqinfo, bias.k_seqinfo
    _check_packed(q, queries)
    _check_packed(k, keys)
    count = len(keys.seqstart_py) - 1
    table = torch.arange(count, dtype=torch.int32, device=q.device).unsqueeze(1)
    o = paged_attention(
        q[0],
        k[0].unflatten(0, (count, -1)),
        v[0].unflatten(0, (count, -1)),
        block_table=table,
        seqlens_k=keys.seqlen.to(q.device),
        cu_seqlens_q=queries.seqstart.to(q.device),
        max_seqlen_q=queries.max_seqlen,
        softmax_scale=scale,
    )
    return o.unsqueeze(0)
