"""Bytes of the cache for each kind of attention, and slots that hold nothing.

Lengths are tokens, sizes are elements unless the name says bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = [
    "WastedSlots",
    "cache_bytes_by_kind",
    "grouped_heads",
    "kv_cache_bytes",
    "latent_dims",
    "mla_cache_bytes",
    "wasted_slots",
    "wasted_slots_contiguous",
]


def kv_cache_bytes(
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    num_layers: int = 1,
    itemsize: float = 2,
) -> int:
    """Return the bytes of keys and values of one token: Hk (D + Dv) elements a layer.

    Multi-head attention has Hk = Hq, multi-query attention Hk = 1, grouped-query attention
    Hk = Hq / G and so 1 / G of the bytes.

    Source: Stratos, "Efficient Attention", section 3.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return int(num_layers * num_kv_heads * (head_dim + v_head_dim) * itemsize)


def mla_cache_bytes(
    latent_dim: int, rope_dim: int, *, num_layers: int = 1, itemsize: float = 2
) -> int:
    """Return the bytes of the latent and the rotated key of one token: R + Dr elements a layer.

    Source: Stratos, "Efficient Attention", section 3.2.1.
    """
    return int(num_layers * (latent_dim + rope_dim) * itemsize)


def grouped_heads(num_q_heads: int, num_kv_heads: int) -> int:
    """Return the key heads of GQA in a comparison: the model's own if it has groups (1 < Hk < Hq),
    else the largest divisor of Hq that is at most Hq / 8.

    The GQA paper converts its models to groups of eight (8 heads of 64).
    """
    if 1 < num_kv_heads < num_q_heads:
        return num_kv_heads
    return next(g for g in range(max(1, num_q_heads // 8), 0, -1) if num_q_heads % g == 0)


def latent_dims(
    head_dim: int, latent_dim: int | None = None, rope_dim: int | None = None
) -> tuple[int, int]:
    """Return R and Dr: the given ones, otherwise in DeepSeek-V2's proportions, 4 D and D / 2.

    Source: DeepSeek-V2 (2024), table 1.
    """
    return latent_dim or 4 * head_dim, rope_dim or head_dim // 2


def cache_bytes_by_kind(
    num_q_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int,
    v_head_dim: int | None = None,
    latent_dim: int | None = None,
    rope_dim: int | None = None,
    num_layers: int = 1,
    itemsize: float = 2,
) -> dict[str, int]:
    """Return the bytes that one token would take in the cache with MHA, GQA, MQA and MLA of one
    shape.

    Hq (D + Dv), Hk (D + Dv), D + Dv and R + Dr elements a layer.

    Args:
        num_q_heads, head_dim, v_head_dim: Hq, D, and Dv (D by default).
        num_kv_heads: Hk, see `grouped_heads`.
        latent_dim, rope_dim: R and Dr, see `latent_dims`.

    Source: Stratos, "Efficient Attention", section 3.
    """
    heads = {"MHA": num_q_heads, "GQA": grouped_heads(num_q_heads, num_kv_heads), "MQA": 1}
    options: dict[str, Any] = {"num_layers": num_layers, "itemsize": itemsize}
    sizes = {
        kind: kv_cache_bytes(count, head_dim, v_head_dim=v_head_dim, **options)
        for kind, count in heads.items()
    }
    latents = latent_dims(head_dim, latent_dim, rope_dim)
    return sizes | {"MLA": mla_cache_bytes(*latents, **options)}


class WastedSlots(NamedTuple):
    """Token slots that are reserved and hold no token.

    Attributes:
        internal: the slots between the length of a request and its own reservation.
        external: the slots beyond a reservation that the layout of the memory adds to it.
    """

    internal: int
    external: int


def wasted_slots(seqlens: Sequence[int], *, block_size: int) -> WastedSlots:
    """Count the empty slots in the last blocks of sequences of a paged cache: internal ones, less
    than a block for each sequence; there are no external ones.

    Args:
        seqlens: the tokens of each sequence.
        block_size: the tokens of a block, at least 1.

    Source: Stratos, "Efficient Attention", section 1.4; Kwon et al. 2023.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    return WastedSlots(sum(-length % block_size for length in seqlens), 0)


def wasted_slots_contiguous(seqlens: Sequence[int], *, limits: Sequence[int]) -> WastedSlots:
    """Count the empty slots of one contiguous tensor in which every sequence has the largest limit.

    Internal: limit - length of each sequence, for tokens that never come. External: the largest
    limit - its own limit, which it could never use.

    Args:
        seqlens: the tokens of each sequence.
        limits: the largest number of tokens that each sequence may reach.

    Raises:
        ValueError: a length is above its limit, or the arguments differ in length.

    Source: Stratos, "Efficient Attention", section 1.4.
    """
    for length, limit in zip(seqlens, limits, strict=True):
        if length > limit:
            raise ValueError(f"seqlens must be at most limits, got {length} > {limit}")
    longest = max(limits, default=0)
    return WastedSlots(sum(limits) - sum(seqlens), longest * len(limits) - sum(limits))
