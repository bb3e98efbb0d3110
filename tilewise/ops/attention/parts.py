"""A call of attention cut into parts that share matrix products, in torch.

A part is sequences of equal lengths together, or some heads of one sequence, so that a temporary of
one of its tiles stays small whatever the batch. It knows where its tensors lie: dense or packed,
they are seen heads first, with the query heads that share a key head side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.kernels.spec import AttentionSpec

TILE = 512  # queries and keys of a tile
# Elements of one temporary: 4 MiB of float32 stay in a CPU's cache; a GPU wants work for all of it.
_ELEMENTS = {"cpu": 2**20}
_ELEMENTS_ELSEWHERE = 2**24


class Part(NamedTuple):
    """A part of a call of attention: sequences of equal lengths, or some heads of one sequence.

    Its methods view or slice tensors of the whole call. In their shapes b is the part's number of
    sequences, Hk its key heads, G the query heads of each, and Sq and Sk its queries and keys.
    """

    spec: AttentionSpec
    batch: slice
    heads: slice  # of the keys
    tokens_q: slice
    tokens_k: slice

    @property
    def length_q(self) -> int:
        """The number of queries of each sequence."""
        return int(self.tokens_q.stop - self.tokens_q.start)

    @property
    def length_k(self) -> int:
        """The number of keys of each sequence."""
        return int(self.tokens_k.stop - self.tokens_k.start)

    @property
    def query_heads(self) -> slice:
        """The slice of query heads that read the key heads `heads`."""
        group = self.spec.group_size
        return slice(self.heads.start * group, self.heads.stop * group)

    def queries(self, x: Tensor) -> Tensor:
        """View (B, Sq, Hq, D) or (T, Hq, D) as (b, Hk, G, Sq, D)."""
        tokens = x[self.tokens_q].unsqueeze(0) if self.spec.is_varlen else x[self.batch]
        heads: Tensor = tokens[:, :, self.query_heads].unflatten(2, (-1, self.spec.group_size))
        return heads.permute(0, 2, 3, 1, 4)

    def keys(self, x: Tensor) -> Tensor:
        """View (B, Sk, Hk, D) or (T, Hk, D) as (b, Hk, Sk, D)."""
        varlen = self.spec.is_varlen
        tokens = x[self.tokens_k].unsqueeze(0) if varlen else x[self.batch, self.tokens_k]
        return tokens[:, :, self.heads].transpose(1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """View (B, Hq, Sq) or (Hq, T) as (b, Hk, G, Sq)."""
        tokens = x[:, self.tokens_q].unsqueeze(0) if self.spec.is_varlen else x[self.batch]
        return self.grouped(tokens[:, self.query_heads])

    def pairs(self, x: Tensor) -> Tensor:
        """Return this part of a tensor x that broadcasts to (B, Hq, Sq, Sk).

        The result has the five dims (b, Hk, G, Sq, Sk); dims of size 1 stay so, and queries and
        keys are not cut.
        """
        x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
        x = x if x.shape[0] == 1 else x[self.batch]
        return self.grouped(x if x.shape[1] == 1 else x[:, self.query_heads])

    def per_head(self, x: Tensor) -> Tensor:
        """View (Hq,) or (B, Hq) as (b or 1, Hk, G, 1, 1)."""
        x = x.unsqueeze(0) if x.dim() == 1 else x[self.batch]
        return self.grouped(x[:, self.query_heads])[..., None, None]

    def grouped(self, x: Tensor) -> Tensor:
        """View dim 1 of x, of length 1 or of the part's query heads, as (1, 1) or (Hk, G)."""
        grouped: Tensor = x.unflatten(1, (1, 1) if x.shape[1] == 1 else (-1, self.spec.group_size))
        return grouped


def parts(spec: AttentionSpec, tensors: dict[str, Any]) -> Iterator[Part]:
    """Yield the parts of a call, each small enough that a temporary of a tile stays small.

    Parts without queries or without keys are left out. Lengths are read from the device if the call
    has any.

    Args:
        spec: the description of the call.
        tensors: the optional tensors by name, as `AttentionOptions.tensors` returns them.
    """
    limit = _ELEMENTS.get(spec.device_type, _ELEMENTS_ELSEWHERE)
    for batch, tokens_q, tokens_k in _sequences(spec, tensors, limit):
        whole = Part(spec, batch, slice(0, spec.num_kv_heads), tokens_q, tokens_k)
        rows, keys = min(TILE, whole.length_q), min(TILE, whole.length_k)
        if rows * keys == 0:
            continue
        step = spec.num_kv_heads
        if batch.stop - batch.start == 1:
            step = max(1, limit // (spec.group_size * rows * keys))
        for head in range(0, spec.num_kv_heads, step):
            yield whole._replace(heads=slice(head, min(head + step, spec.num_kv_heads)))


def _sequences(
    spec: AttentionSpec, tensors: dict[str, Any], limit: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Yield a slice of sequences of equal lengths, and the slices of their queries and of keys.

    Packed sequences, and those with lengths, come one by one, and the lengths are read, which waits
    for the device; others come as many together as keep a tile's temporary within `limit` elements.
    """
    all_q, all_k = slice(0, spec.max_seqlen_q), slice(0, spec.max_seqlen_k)
    if spec.is_varlen:
        edges_q, edges_k = (tensors[f"cu_seqlens_{x}"].tolist() for x in "qk")
        for b in range(spec.batch):
            keys = slice(edges_k[b], edges_k[b + 1])
            yield slice(b, b + 1), slice(edges_q[b], edges_q[b + 1]), keys
    elif spec.has_seqlens_k:
        for b, length in enumerate(tensors["seqlens_k"].tolist()):
            yield slice(b, b + 1), all_q, slice(0, length)
    else:
        size = spec.num_q_heads * min(TILE, all_q.stop) * min(TILE, all_k.stop)
        step = max(1, limit // max(1, size))
        for b in range(0, spec.batch, step):
            yield slice(b, min(b + step, spec.batch)), all_q, all_k
