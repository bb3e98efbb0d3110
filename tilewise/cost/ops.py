"""Predict the bytes, FLOPs and time of an operation from the papers' formulas.

All functions count arithmetic of matrix products (a multiply-add is 2 FLOPs) and traffic between
HBM and the chip. They need no torch and no device. Lengths are tokens, sizes are elements unless
the name says bytes.

    standard   8 n d + 4 n^2 bytes           4 n^2 d FLOPs      (one head, 2-byte elements)
    flash      4 n d + 4 n^2 d / b_q bytes   4 n^2 d FLOPs
    decode     the bytes of K and V, once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "H200",
    "Cost",
    "DevicePeaks",
    "Tiles",
    "activation_cost",
    "choose_tiles",
    "copy_blocks_cost",
    "flash_attention_backward_cost",
    "flash_attention_cost",
    "io_flash",
    "io_standard",
    "merge_states_cost",
    "mla_decode_cost",
    "norm_cost",
    "on_chip_elements",
    "paged_attention_cost",
    "product_cost",
    "rope_cost",
    "standard_attention_cost",
    "visible_pairs",
    "write_kv_cache_cost",
]

LSE_BYTES = 4  # lse is float32 whatever the inputs are


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """The best measured rates of a device.

    Attributes:
        name: the name of the device.
        flops: FLOP/s of a large matrix product in the dtype in use.
        read_bandwidth: bytes/s of a kernel that only reads.
        copy_bandwidth: bytes/s, read and written together, of a copy.
    """

    name: str
    flops: float
    read_bandwidth: float
    copy_bandwidth: float

    @property
    def write_bandwidth(self) -> float:
        """Bytes/s of writes, from the rate of a copy: 2 / copy = 1 / read + 1 / write."""
        return 1 / (2 / self.copy_bandwidth - 1 / self.read_bandwidth)


H200 = DevicePeaks("NVIDIA H200", flops=747e12, read_bandwidth=4.42e12, copy_bandwidth=4.27e12)
"""bf16 product of 8,192^3, read and copy of HBM; torch 2.11.0+cu130, 2026-11-20."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work and traffic of one call; costs can be added.

    Attributes:
        flops: the FLOPs of matrix products.
        bytes_read: the bytes read from HBM.
        bytes_written: the bytes written to HBM.
    """

    flops: int
    bytes_read: int
    bytes_written: int

    @property
    def bytes(self) -> int:
        """Bytes moved in either direction."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved; above flops / bandwidth of a device, compute is the limit."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
        )

    def time(self, device: DevicePeaks, *, overlaps: bool = True) -> float:
        """Return the predicted seconds of the call on a device.

        Args:
            device: the peaks of the device.
            overlaps: True if memory and compute work at the same time, so that the slower one
                decides (a roofline, the best a kernel can do); False adds them, as the third paper
                does.
        """
        compute = self.flops / device.flops
        memory = self.bytes_read / device.read_bandwidth
        memory += self.bytes_written / device.write_bandwidth
        return max(compute, memory) if overlaps else compute + memory


def _clamped_sum(start: int, count: int, limit: int) -> int:
    """Return the sum of min(max(t, 0), limit) for t = start ... start + count - 1."""

    def below(end: int) -> int:
        ramp = min(max(end, 0), limit)
        return ramp * (ramp - 1) // 2 + limit * max(end - limit, 0)

    return below(start + count) - below(start)


def visible_pairs(
    seqlen_q: int, seqlen_k: int, *, window_left: int = -1, window_right: int = -1
) -> int:
    """Count pairs (i, j) with -window_right <= i + Sk - Sq - j <= window_left, 0 <= j < Sk.

    A causal square has n (n + 1) / 2, which the papers round to n^2 / 2.

    Args:
        seqlen_q, seqlen_k: Sq and Sk.
        window_left, window_right: keys on each side of the diagonal, -1 for unlimited; causal is
            window_right = 0.
    """
    offset = seqlen_k - seqlen_q
    pairs = seqlen_q * seqlen_k
    if window_right >= 0:
        pairs = _clamped_sum(offset + window_right + 1, seqlen_q, seqlen_k)
    if window_left >= 0:
        pairs -= _clamped_sum(offset - window_left, seqlen_q, seqlen_k)
    return pairs


def _visible_span(start: int, stop: int, length: int, before: int, after: int, tile: int) -> int:
    """Return how many of `length` keys lie in a tile of `tile` keys of which at least one is
    visible to a query of positions start ... stop - 1.

    Position x sees keys x - before ... x + after; a negative limit means unlimited. The last tile
    ends at `length`.
    """
    first = 0 if before < 0 else min(max(start - before, 0), length)
    last = length if after < 0 else min(max(stop + after, 0), length)
    if last <= first:
        return 0
    return min(-(-last // tile) * tile, length) - first // tile * tile


def standard_attention_cost(
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    num_q_heads: int = 1,
    num_kv_heads: int | None = None,
    v_head_dim: int | None = None,
    batch: int = 1,
    itemsize: int = 2,
) -> Cost:
    """Return the cost of attention that writes S to HBM and reads it back in softmax(S) V.

    For one head and n tokens: 4 n d + 2 n^2 elements, 8 n d + 4 n^2 bytes of 2-byte elements, and 4
    n^2 d FLOPs. A mask saves nothing, since the whole matrix is computed.

    Args:
        seqlen_q, seqlen_k, head_dim: Sq, Sk, D.
        num_q_heads, num_kv_heads: Hq, and Hk (Hq by default).
        v_head_dim: Dv, D by default.
        batch: the number of sequences.
        itemsize: the bytes of an element.

    Source: "The MathemaTricks behind FlashAttention", analysis.
    """
    num_kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    scores = num_q_heads * seqlen_q * seqlen_k
    keys_and_values = num_kv_heads * seqlen_k * (head_dim + v_head_dim)
    read = num_q_heads * seqlen_q * head_dim + keys_and_values + scores
    written = scores + num_q_heads * seqlen_q * v_head_dim
    flops = 2 * scores * (head_dim + v_head_dim)
    return Cost(batch * flops, batch * itemsize * read, batch * itemsize * written)


def flash_attention_cost(
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    tile_q: int,
    tile_k: int = 1,
    num_q_heads: int = 1,
    v_head_dim: int | None = None,
    batch: int = 1,
    window_left: int = -1,
    window_right: int = -1,
    itemsize: int = 2,
    writes_lse: bool = False,
) -> Cost:
    """Return the cost of the tiled forward pass: a query tile stays on chip and sweeps the keys it
    sees.

    For one head and n tokens: 4 n d + 4 n^2 d / tile_q bytes of 2-byte elements and 4 n^2 d FLOPs,
    (n + 1) / 2n of that when causal. Each query head reads the keys and values of its group anew.

    Args:
        seqlen_q, seqlen_k, head_dim: Sq, Sk, D.
        tile_q: the query rows that share one read of K and V from HBM: the tile of one program, or
            more if a cache serves several programs in flight.
        tile_k: the keys of a tile; a tile with one visible key is read whole.
        num_q_heads: Hq, the number of query heads.
        v_head_dim: Dv, D by default.
        batch: the number of sequences.
        window_left, window_right: as for `visible_pairs`; causal is window_right = 0.
        itemsize: the bytes of an element.
        writes_lse: True to count the float32 lse too, which the papers leave out as lower-order.

    Source: "The MathemaTricks behind FlashAttention", analysis; FlashForward2.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    offset, heads = seqlen_k - seqlen_q, batch * num_q_heads
    pairs = visible_pairs(seqlen_q, seqlen_k, window_left=window_left, window_right=window_right)
    swept = 0
    for start in range(0, seqlen_q, tile_q):
        stop = min(start + tile_q, seqlen_q)
        rows = (start + offset, stop + offset)
        swept += _visible_span(*rows, seqlen_k, window_left, window_right, tile_k)
    read = seqlen_q * head_dim + swept * (head_dim + v_head_dim)
    written = itemsize * seqlen_q * v_head_dim + (LSE_BYTES * seqlen_q if writes_lse else 0)
    flops = 2 * pairs * (head_dim + v_head_dim)
    return Cost(heads * flops, heads * itemsize * read, heads * written)


def flash_attention_backward_cost(
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    *,
    tile_k: int,
    tile_q: int = 1,
    num_q_heads: int = 1,
    batch: int = 1,
    window_left: int = -1,
    window_right: int = -1,
    itemsize: int = 2,
) -> Cost:
    """Return the cost of the tiled backward pass: a key tile stays on chip while its queries are
    read.

    FLOPs are those of five matrix products over the visible pairs, 2.5 times the forward pass. For
    one head, n queries and n keys without a window, 9 n d + (n / tile_k) (5 n d + n) elements move.
    Once: K and V are read, dK and dV are read and written, and dQ, dK and dV are set to zero. For
    each key tile: Q, O, dO, dQ and lse are read, and dQ is written.

    Args:
        seqlen_q, seqlen_k, head_dim: Sq, Sk and D, which is the width of values as well.
        tile_k: the keys that share one read of the queries.
        tile_q: the queries of a tile; elements of the whole tile move if one pair in it is visible.
        num_q_heads, batch: Hq and the number of sequences; keys and values count once for each
            query head.
        window_left, window_right: the keys that a query sees before and after its own position, -1
            for all; the last query is at the last key. Causal is window_right = 0.
        itemsize: the bytes of an element, of lse, too.

    Source: Stratos, "Efficient Attention", FlashBackward and appendix D.
    """
    offset, heads = seqlen_k - seqlen_q, batch * num_q_heads
    pairs = visible_pairs(seqlen_q, seqlen_k, window_left=window_left, window_right=window_right)
    swept = 0
    for start in range(0, seqlen_k, tile_k):
        stop = min(start + tile_k, seqlen_k)
        columns = (start - offset, stop - offset)
        swept += _visible_span(*columns, seqlen_q, window_right, window_left, tile_q)
    read = 4 * seqlen_k * head_dim + swept * (4 * head_dim + 1)
    written = (seqlen_q + 4 * seqlen_k) * head_dim + swept * head_dim
    return Cost(heads * 10 * pairs * head_dim, heads * itemsize * read, heads * itemsize * written)


def paged_attention_cost(
    seqlens_k: Sequence[int],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    seqlens_q: Sequence[int] | None = None,
    window_left: int = -1,
    itemsize: int = 2,
    cache_itemsize: float | None = None,
) -> Cost:
    """Return the cost of causal attention over a paged cache that reads each visible key and value
    once.

    With one new token a sequence, the intensity is about G = Hq / Hk FLOPs for each byte of a
    2-byte cache: decoding is bound by memory.

    Args:
        seqlens_k: the tokens of each sequence, the new ones included.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: Hq, Hk, D, and Dv (D by default).
        seqlens_q: the new tokens of each sequence, 1 by default.
        window_left: the keys visible left of a query's own, -1 for all.
        itemsize: the bytes of an element of q and o.
        cache_itemsize: the bytes of an element of the cache, `itemsize` by default.
    """
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    seqlens_q = [1] * len(seqlens_k) if seqlens_q is None else seqlens_q
    cache_itemsize = itemsize if cache_itemsize is None else cache_itemsize
    pairs, keys = 0, 0
    for new, length in zip(seqlens_q, seqlens_k, strict=True):
        pairs += visible_pairs(new, length, window_left=window_left, window_right=0)
        if new:
            keys += _visible_span(length - new, length, length, window_left, 0, 1)
    tokens, channels = sum(seqlens_q), head_dim + v_head_dim
    read = int(keys * num_kv_heads * channels * cache_itemsize)
    read += tokens * num_q_heads * head_dim * itemsize
    written = tokens * num_q_heads * v_head_dim * itemsize
    return Cost(2 * pairs * num_q_heads * channels, read, written)


def mla_decode_cost(
    seqlens_k: Sequence[int],
    *,
    num_q_heads: int,
    latent_dim: int,
    rope_dim: int,
    seqlens_q: Sequence[int] | None = None,
    itemsize: int = 2,
    cache_itemsize: int | None = None,
) -> Cost:
    """Return the cost of causal attention over a paged cache of latents, in which keys are also
    values.

    Each token costs R + Dr elements once, for all heads; each pair 2 (R + Dr) + 2 R FLOPs a head.

    Args:
        seqlens_k, seqlens_q, itemsize, cache_itemsize: as for `paged_attention_cost`; 8-bit latents
            are read with two float32 scales.
        num_q_heads: Hq, the number of query heads.
        latent_dim, rope_dim: R and Dr.
    """
    seqlens_q = [1] * len(seqlens_k) if seqlens_q is None else seqlens_q
    pairs, keys = 0, 0
    for new, length in zip(seqlens_q, seqlens_k, strict=True):
        pairs += visible_pairs(new, length, window_right=0)
        keys += length if new else 0
    cache_itemsize = itemsize if cache_itemsize is None else cache_itemsize
    tokens, width = sum(seqlens_q), latent_dim + rope_dim
    read = keys * (width * cache_itemsize + (8 if cache_itemsize == 1 else 0))
    read += tokens * num_q_heads * width * itemsize
    written = tokens * num_q_heads * latent_dim * itemsize
    return Cost(2 * pairs * num_q_heads * (width + latent_dim), read, written)


def merge_states_cost(num_tokens: int, num_heads: int, v_head_dim: int, itemsize: int = 2) -> Cost:
    """Return the cost of merging two partial outputs (T, H, Dv) and their float32 lse into one of
    each."""
    output, lse = num_tokens * num_heads * v_head_dim * itemsize, num_tokens * num_heads * LSE_BYTES
    return Cost(0, 2 * (output + lse), output + lse)


def rope_cost(
    num_tokens: int, num_heads: int, head_dim: int, rotary_dim: int, itemsize: int = 2
) -> Cost:
    """Return the cost of rotating (T, H, D) by float32 cos and sin of rotary_dim / 2 angles a
    token."""
    tensor = num_tokens * num_heads * head_dim * itemsize
    return Cost(0, tensor + num_tokens * rotary_dim * 4, tensor)


def product_cost(
    rows: int, width_in: int, width_out: int, *, itemsize: int = 2, weight_itemsize: float = 2
) -> Cost:
    """Return the cost of a matrix product (rows, in) x (in, out): 2 rows in out FLOPs, each operand
    moved once.

    Args:
        rows: the number of tokens.
        width_in, width_out: the sizes of the weight.
        itemsize: the bytes of an element of the input and the output.
        weight_itemsize: the bytes of a weight, its share of a scale included.
    """
    weights = int(width_in * width_out * weight_itemsize)
    read = weights + rows * width_in * itemsize
    return Cost(2 * rows * width_in * width_out, read, rows * width_out * itemsize)


def norm_cost(rows: int, width: int, *, itemsize: int = 2) -> Cost:
    """Return the cost of adding a residual and normalising by RMS: two tensors (rows, width) and
    the weight are read, the sum and its norm are written."""
    tensor = rows * width * itemsize
    return Cost(0, 2 * tensor + width * itemsize, 2 * tensor)


def activation_cost(rows: int, width: int, *, itemsize: int = 2) -> Cost:
    """Return the cost of silu(gate) * up for tensors (rows, width): both are read, one is
    written."""
    tensor = rows * width * itemsize
    return Cost(0, 2 * tensor, tensor)


def write_kv_cache_cost(
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    itemsize: int = 2,
) -> Cost:
    """Return the cost of writing new keys and values into their slots; a slot number is 8 bytes."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    tensors = num_tokens * num_kv_heads * (head_dim + v_head_dim) * itemsize
    return Cost(0, tensors + 8 * num_tokens, tensors)


def copy_blocks_cost(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    v_head_dim: int | None = None,
    itemsize: int = 2,
) -> Cost:
    """Return the cost of copying whole blocks of keys and values; a pair of block numbers is 16
    bytes."""
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    blocks = num_blocks * block_size * num_kv_heads * (head_dim + v_head_dim) * itemsize
    return Cost(0, blocks + 16 * num_blocks, blocks)


class Tiles(NamedTuple):
    """The query rows and the keys of a tile of flash attention, as `choose_tiles` returns them."""

    tile_q: int
    tile_k: int


def on_chip_elements(tile_q: int, tile_k: int, head_dim: int) -> int:
    """Return the elements that a tile needs on chip: Q, O, K, V, S and two statistics a row.

    2 (b_q + b_k) d + b_q b_k + 2 b_q elements.

    Source: "The MathemaTricks behind FlashAttention", on-chip working set.
    """
    return 2 * (tile_q + tile_k) * head_dim + tile_q * tile_k + 2 * tile_q


def choose_tiles(sram_bytes: int, head_dim: int, itemsize: int) -> Tiles:
    """Choose the tiles of Algorithm 1 and shrink them until they fit on chip exactly.

    Line 1, with M in elements: b_k = ceil(M / 4d), b_q = min(ceil(M / 4d), d). Those promise only
    Theta(M). So b_k is reduced to the largest value that `on_chip_elements` allows with b_q; if
    that is less than b_q, both become the largest square tile that fits.

    Args:
        sram_bytes: the on-chip memory of one program in bytes.
        head_dim: D, at least 1.
        itemsize: the bytes of an element on chip.

    Raises:
        ValueError: not even one query and one key fit.

    Source: Dao et al. 2022, Algorithm 1.
    """
    room = sram_bytes // itemsize
    least = on_chip_elements(1, 1, head_dim)
    if room < least:
        raise ValueError(f"sram_bytes must be at least {least * itemsize}, got {sram_bytes}")
    first = -(-room // (4 * head_dim))
    tile_q = min(first, head_dim)
    tile_k = min(first, (room - 2 * tile_q * (head_dim + 1)) // (2 * head_dim + tile_q))
    if tile_k >= tile_q:
        return Tiles(tile_q, tile_k)
    side = 1
    while on_chip_elements(side + 1, side + 1, head_dim) <= room:
        side += 1
    return Tiles(side, side)


def io_standard(n: int, d: int) -> int:
    """Return HBM accesses of standard attention, S and P both written and read: 4 n d + 4 n^2.

    Source: Dao et al. 2022, Algorithm 0 and theorem 2, Theta(n d + n^2).
    """
    return 4 * n * d + 4 * n * n


def io_flash(n: int, d: int, sram: int) -> int:
    """Return HBM accesses of Algorithm 1 with M elements of SRAM, Theta(n^2 d^2 / M).

    3 n d + 2 n + Tc (3 n d + 4 n), Tc = ceil(n / ceil(M / 4d)): K, V once and O, l, m set once;
    Q, O, l, m read and O, l, m written for each of the Tc tiles of keys.

    Source: Dao et al. 2022, Algorithm 1 and theorem 2.
    """
    sweeps = -(-n // -(-sram // (4 * d)))
    return 3 * n * d + 2 * n + sweeps * (3 * n * d + 4 * n)
