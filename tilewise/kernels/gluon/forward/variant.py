"""What a call of the Hopper forward pass is compiled and told: a pure function of its spec."""

from __future__ import annotations

import torch

from tilewise.kernels.gluon.forward.kernel import Tile, Variant
from tilewise.kernels.gluon.forward.tiles import GROUP_ROWS
from tilewise.kernels.spec import AttentionSpec

__all__ = ["choice", "in_pairs"]

_CHANNELS = 8  # 16 bytes: what strides and widths of o are counted in
# K and V of the heads whose tiles are computed side by side: 16 MiB of Hopper's 50 MB L2 was the
# best of 4 to 64 (H200, causal, 16,384 tokens, 2026-11-20).
_SECTION_BYTES = 16 << 20
# Of capped logits with the exponents of bfloat16: exp(2 * 32) is 2**92, and 2**-92 no denormal, so
# that the cap, or any logit, may stand for the maximum of a row in sums over 2**24 keys and more.
_WIDEST_BOUND = 32.0
_LEAST_FACTOR = 2.0**-40  # that slopes and a bias are divided by: they must stay finite


def choice(
    spec: AttentionSpec,
    tile: Tile,
    bias_rows: bool,
    bias_pairs: bool,
    shares_bias: bool = False,
) -> tuple[Variant, tuple[float, ...]]:
    """Return the Variant of a call, and the numbers that `attention_fwd_kernel` takes from
    heads_per_section to keep_scale, without row_tiles and lse's strides.

    bias_rows, bias_pairs, shares_bias: as in `Variant`.
    """
    heads, width = spec.num_q_heads, spec.v_head_dim // _CHANNELS
    numbers = (
        _heads_per_section(spec),
        heads,
        spec.group_size,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        spec.window_left,
        spec.window_right,
        spec.softmax_scale,
        spec.softcap,
        heads * width,
        width,
        spec.drop_limit,
        spec.dropout_scale,
    )
    variant = _variant_of(spec, tile, bias_rows, bias_pairs)
    return variant._replace(shares_bias=shares_bias), numbers


def in_pairs(batch: int, head: int, row: int, key: int) -> tuple[tuple[int, int, int, int], bool]:
    """Return the strides of a bias, and whether they count pairs of keys.

    Pairs are read at once where keys are neighbours and rows start at even places.
    """
    if key != 1 or batch % 2 or head % 2 or row % 2:
        return (batch, head, row, key), False
    return (batch // 2, head // 2, row // 2, key), True


def _variant_of(spec: AttentionSpec, tile: Tile, bias_rows: bool, bias_pairs: bool) -> Variant:
    """Return the Variant, the compile-time choices, that `spec` needs; a window that hides nothing
    is compiled away."""
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    lengths = spec.is_varlen or spec.has_seqlens_k
    mask_rows, mask_keys = spec.mask_tile or (0, 0)
    tail = mask_keys == 0 and spec.max_seqlen_k % tile.keys != 0
    softcap = "none"
    if spec.softcap > 0:  # bfloat16 has 8 bits, tanh of the special function unit 11, float16 11
        softcap = "fast" if spec.dtype == torch.bfloat16 else "exact"
    scaled = spec.softcap > 0 or spec.softmax_scale > 0
    factor = spec.softcap or spec.softmax_scale
    if spec.has_bias and (tile.bias_stages == 0 or spec.has_alibi or factor <= _LEAST_FACTOR):
        scaled = False
    slanted = spec.has_alibi and scaled and spec.window_right == 0 and factor > _LEAST_FACTOR
    return Variant(
        left=left,
        right=right,
        ruled=left or right or lengths or tail or spec.max_seqlen_k == 0,
        factored=scaled and (slanted or not spec.has_alibi),
        bounded=scaled
        and not (spec.has_alibi or spec.has_bias or spec.needs_max)
        and softcap == "fast"
        and spec.softcap <= _WIDEST_BOUND,
        softcap=softcap,
        alibi=spec.has_alibi,
        slanted=slanted,
        bias=spec.has_bias,
        bias_rows=bias_rows,
        bias_pairs=bias_pairs,
        mask_rows=mask_rows,
        mask_keys=mask_keys,
        dropout=spec.dropout_threshold > 0,
        sinks=spec.has_sinks,
        packed=spec.is_varlen,
        lengths=spec.has_seqlens_k,
        maxima=spec.needs_max,
        short=_is_short(spec, tile),
    )


def _is_short(spec: AttentionSpec, tile: Tile) -> bool:
    """Whether warpgroups without rows should step aside: True if a tile may have fewer rows than
    its warpgroups and that saves time."""
    if not tile.dynamic and spec.max_seqlen_q > tile.rows:
        return False
    if spec.is_varlen:  # lengths of 70 to 590 are 1 to 3 % faster; of three warpgroups 3 % slower
        return tile.warpgroups == 2
    return (spec.max_seqlen_q - 1) % tile.rows < tile.rows - GROUP_ROWS


def _heads_per_section(spec: AttentionSpec) -> int:
    """Return how many query heads are computed side by side, so that their K and V fit L2 together;
    groups stay whole."""
    row_bytes = (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize
    key_heads = max(2, _SECTION_BYTES // max(1, spec.max_seqlen_k * row_bytes))
    num_heads = spec.num_q_heads * (1 if spec.is_varlen else spec.batch)
    return min(num_heads, key_heads * spec.group_size)
