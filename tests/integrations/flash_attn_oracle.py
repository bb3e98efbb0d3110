"""What flash-attn's functions mean, sequence by sequence and token by token, for its tests here.

Nothing of tilewise but the reference: caches are walked with Python loops, pairs are rotated with
sines and cosines as written in the paper, and attention is `reference.standard` on what was found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilewise.reference import standard


@dataclass(frozen=True)
class KVCacheCase:
    """One call of flash_attn_with_kvcache.

    `seqlens` are the tokens before the call, padding counted; `new` tokens are appended, None
    appends nothing. With a block_size the cache is paged, else it has `cache_rows` rows.
    """

    name: str
    seqlens: tuple[int, ...] = (37, 70)
    capacity: int = 96
    seqlen_q: int = 1
    new: int | None = 1
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int | None = None
    batch_idx: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    alibi: str | None = None  # "heads" or "batch"
    rotary_dim: int = 0
    interleaved: bool = True
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@dataclass
class Drawn:
    """The tensors of a case: arguments by name, and where position p of sequence b lies."""

    arguments: dict[str, Tensor | None]
    places: list[list[tuple[int, int]]]


def draw(case: KVCacheCase, dtype: torch.dtype, device: str) -> Drawn:
    """Draw a case; every slot of the caches that holds no token of a sequence is NaN."""
    generator = torch.Generator().manual_seed(sum(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    batch, width = len(case.seqlens), case.v_head_dim or case.head_dim
    places, table, shape = _places(case, generator)
    k_cache = torch.full((*shape, case.num_kv_heads, case.head_dim), float("nan"), dtype=dtype)
    v_cache = torch.full((*shape, case.num_kv_heads, width), float("nan"), dtype=dtype)
    for row, length in enumerate(case.seqlens):
        first = case.leftpad[row] if case.leftpad else 0
        for block, offset in places[row][first:length]:
            k_cache[block, offset] = normal(case.num_kv_heads, case.head_dim)
            v_cache[block, offset] = normal(case.num_kv_heads, width)

    arguments: dict[str, Tensor | None] = {
        "q": normal(batch, case.seqlen_q, case.num_q_heads, case.head_dim),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": torch.tensor(case.seqlens, dtype=torch.int32),
    }
    if case.new is not None:
        arguments["k"] = normal(batch, case.new, case.num_kv_heads, case.head_dim)
        arguments["v"] = normal(batch, case.new, case.num_kv_heads, width)
    if case.rotary_dim:
        angles = torch.rand(case.capacity, case.rotary_dim // 2, generator=generator) * 6.28
        arguments["rotary_cos"], arguments["rotary_sin"] = (
            angles.cos().to(dtype),
            angles.sin().to(dtype),
        )
    if table is not None:
        arguments["block_table"] = table
    for name, values in (("cache_batch_idx", case.batch_idx), ("cache_leftpad", case.leftpad)):
        if values is not None:
            arguments[name] = torch.tensor(values, dtype=torch.int32)
    if case.alibi:
        slopes = torch.rand(batch, case.num_q_heads, generator=generator) * 0.3
        arguments["alibi_slopes"] = slopes if case.alibi == "batch" else slopes[0]
    return Drawn({name: t.to(device) for name, t in arguments.items()}, places)


def _places(
    case: KVCacheCase, generator: torch.Generator
) -> tuple[list[list[tuple[int, int]]], Tensor | None, tuple[int, int]]:
    """Where each position of each sequence lies; the block table; the shape of the cache."""
    batch = len(case.seqlens)
    if case.block_size is None:
        rows = list(range(batch)) if case.batch_idx is None else list(case.batch_idx)
        places = [[(row, position) for position in range(case.capacity)] for row in rows]
        return places, None, (max(rows) + 2, case.capacity)
    size, columns = case.block_size, case.capacity // case.block_size
    assert columns * size == case.capacity, "the capacity of a paged case is whole blocks"
    order = torch.randperm(batch * columns + 3, generator=generator)[: batch * columns]
    table = order.view(batch, columns).to(torch.int32)
    places = [
        [(int(table[row, p // size]), p % size) for p in range(case.capacity)]
        for row in range(batch)
    ]
    for row, length in enumerate(case.seqlens):  # what no token needs is not a block
        table[row, -(-(length + (case.new or 0)) // size) :] = -1
    return places, table, (batch * columns + 3, size)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """Turn the first pairs of channels of x (H, D) by the angles of one position."""
    out = x.double().clone()
    half = cos.shape[1]
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        c, s = cos[position, pair].double(), sin[position, pair].double()
        out[:, a] = x[:, a].double() * c - x[:, b].double() * s
        out[:, b] = x[:, b].double() * c + x[:, a].double() * s
    return out.to(x.dtype)


def expected(case: KVCacheCase, drawn: Drawn) -> dict[str, Tensor]:
    """Return k_cache and v_cache after the call, and o and lse: the truth and those of eager."""
    given = {name: t.cpu() for name, t in drawn.arguments.items()}
    k_cache, v_cache, q = given["k_cache"].clone(), given["v_cache"].clone(), given["q"].clone()
    causal = case.options.get("causal", False)
    window = case.options.get("window_size", (-1, -1))
    moves = causal or window != (-1, -1)
    for row, length in enumerate(case.seqlens):
        for i in range(case.new or 0):
            place = drawn.places[row][length + i]
            k_cache[place], v_cache[place] = given["k"][row, i], given["v"][row, i]
            if case.rotary_dim:
                tables = given["rotary_cos"], given["rotary_sin"]
                k_cache[place] = rotated(k_cache[place], *tables, length + i, case.interleaved)
        if case.rotary_dim:
            for i in range(case.seqlen_q):
                position = length + (i if moves else 0)
                q[row, i] = rotated(q[row, i], *tables, position, case.interleaved)
    results = {"k_cache": k_cache, "v_cache": v_cache}
    for precision in ("truth", "eager"):
        parts = []
        for row, length in enumerate(case.seqlens):
            first = case.leftpad[row] if case.leftpad else 0
            places = drawn.places[row][first : length + (case.new or 0)]
            keys, values = (
                torch.stack([cache[place] for place in places])
                if places
                else cache.new_zeros(0, *cache.shape[2:])
                for cache in (k_cache, v_cache)
            )
            tensors = [t.unsqueeze(0) for t in (q[row], keys, values)]
            if precision == "truth":
                tensors = [t.double() for t in tensors]
            slopes = given.get("alibi_slopes")
            parts.append(
                standard.attention(
                    *tensors,
                    causal=causal,
                    window=window,
                    softmax_scale=case.options.get("softmax_scale"),
                    softcap=case.options.get("softcap", 0.0),
                    alibi_slopes=slopes[row] if case.alibi == "batch" else slopes,
                    return_lse=True,
                )
            )
        results[f"o_{precision}"], results[f"lse_{precision}"] = (
            torch.cat(part) for part in zip(*parts, strict=True)
        )
    return results
