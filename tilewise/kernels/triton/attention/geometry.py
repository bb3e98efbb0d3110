"""The dims, strides, code variants and tile order that launchers pass to the attention kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.tiles.attention import WIDEST
from tilewise.kernels.tiles.paged import padded_head_dim, padded_value_dim
from tilewise.kernels.triton.attention.tile import Extras, HeadDims, Variant

# Bytes of keys and values that one wave of programs shares in L2: 32 MiB of Hopper's 50 MB, which
# FlashAttention-3's tile scheduler assumes as well.
SECTION_BYTES = 32 << 20
_MOST_ROWS = 256  # rows of a tile
# the widest load of one thread; strides are counted in such units if all are multiples
_VECTOR_BYTES = 16
_COPIED_BYTES = 4  # asynchronous copies need rows that start at a multiple of this


def head_dims(spec: AttentionSpec, *tensors: Tensor, is_aligned: bool = True) -> HeadDims:
    """Return the sizes of a head for kernels: its channels, their padding and the unit of strides.

    The unit is 16 bytes if all strides are multiples of 16 bytes, else one element.

    Args:
        tensors: the tensors of the call, whose last dim is contiguous.
        is_aligned: True if each of them starts at a multiple of 16 bytes.
    """
    unit = _VECTOR_BYTES // spec.dtype.itemsize
    for tensor in tensors:
        if tensor.numel() == 0:
            continue  # nothing is read, whatever its strides
        assert tensor.stride(-1) == 1, f"last dim must be contiguous, got {tensor.stride()}"
        sizes_steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        if any(step % unit for size, step in sizes_steps if size > 1):
            unit = 1
    d, dv, rest = min(spec.head_dim, WIDEST), spec.v_head_dim, max(spec.head_dim - WIDEST, 0)
    d_pad, dv_pad, rest_pad = (padded_head_dim(width) if width else 0 for width in (d, dv, rest))
    if (unit if is_aligned else 1) * spec.dtype.itemsize < _COPIED_BYTES:
        dv_pad = padded_value_dim(d, dv)
    longest_row = max(tensor.stride(-3) for tensor in tensors)
    is_narrow = _MOST_ROWS * longest_row < 2**31
    return HeadDims(d, dv, rest, d_pad, dv_pad, rest_pad, unit, narrow=is_narrow)


def strides_of(tensor: Tensor, spec: AttentionSpec, dims: HeadDims) -> tuple[int, int, int]:
    """Return the (batch, row, head) strides of (B, S, H, D) or (T, H, D), in units of `dims.unit`.

    The stride of a dimension of size 1, and the batch stride of a packed tensor, is 0.
    """
    steps = [
        stride // dims.unit if size > 1 else 0
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    batch, row, head = (0, *steps) if spec.is_varlen else steps
    return batch, row, head


def row_strides(rows: Tensor) -> tuple[int, int, int]:
    """Return the (batch, row, head) strides, in elements, of `rows`, (B, Hq, Sq) or (Hq, T).

    The batch stride of a packed tensor is 0.
    """
    batch, head, row = (0, *rows.stride()) if rows.dim() == 2 else rows.stride()
    return batch, row, head


def variant_of(spec: AttentionSpec, extras: Extras) -> Variant:
    """Return the options of a call for which kernels are compiled anew.

    A window that hides no key, since it is as long as the longest sequence, is left out.
    """
    has_bias = extras.bias is not None
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    mask_q, mask_k = spec.mask_tile or (0, 0)
    # The fma leaves p of a row's only key an ulp or so from 1, which 16 bits do not show.
    is_narrow = spec.dtype != torch.float32
    is_scaled_only = not (spec.softcap or spec.has_alibi or has_bias) and spec.softmax_scale > 0
    return Variant(
        left=left,
        right=right,
        softcap=spec.softcap > 0,
        alibi=spec.has_alibi,
        bias=has_bias,
        bias_rows=has_bias and extras.bias_row != 0,
        mask_q=mask_q,
        mask_k=mask_k,
        ruled=mask_q > 0 and (left or right or spec.is_varlen or spec.has_seqlens_k),
        dropout=spec.dropout_p > 0,
        plain=is_narrow and is_scaled_only,
    )


def extras_of(
    spec: AttentionSpec,
    *,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: MaskTensors | None = None,
    philox: Tensor | None = None,
) -> Extras:
    """Return the tensors and numbers that a call adds to plain attention, as kernels take them.

    Slopes, lists of a mask and the seed are made contiguous where needed; tensors that are None
    leave their fields None.
    """
    given: dict[str, object] = {}
    if alibi_slopes is not None:
        batch = alibi_slopes.shape[-1] if alibi_slopes.dim() == 2 else 0
        given |= {"alibi": alibi_slopes.contiguous(), "alibi_batch": batch}
    if bias is not None:
        names = ("bias_batch", "bias_head", "bias_row", "bias_key")
        given |= {"bias": bias, **dict(zip(names, bias_strides(bias), strict=True))}
    if mask is not None:
        # A copy where needed: the kernels index bits, spans and entries without strides.
        given |= {f"mask_{name}": tensor.contiguous() for name, tensor in mask._asdict().items()}
        for name, spans in (("row", mask.rows), ("column", mask.columns)):
            batch, heads, tiles, _ = spans.shape
            given[f"mask_{name}_tiles"] = tiles if heads > 1 else 0
            given[f"mask_all_{name}_tiles"] = heads * tiles if batch > 1 else 0
    if spec.dropout_p > 0:
        assert philox is not None, "dropout needs a seed and an offset"
        given |= {"philox": philox.contiguous(), "drop_limit": spec.drop_limit}
        given["keep_scale"] = spec.dropout_scale
    return Extras(**given)


def bias_strides(bias: Tensor) -> tuple[int, int, int, int]:
    """Return the (batch, head, row, key) strides of a bias in elements, 0 where it is broadcast."""
    steps = [step if size > 1 else 0 for size, step in zip(bias.shape, bias.stride(), strict=True)]
    batch, head, row, key = (0,) * (4 - bias.dim()) + tuple(steps)
    return batch, head, row, key


def numbers_of(spec: AttentionSpec) -> tuple[int, int, int, int, int, int, float, float]:
    """Return the numbers that the kernels of o, of dk and dv, and of dq take, in their order."""
    return (
        spec.num_q_heads,
        spec.group_size,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        spec.window_left,
        spec.window_right,
        spec.softmax_scale,
        spec.softcap,
    )


def query_heads_per_section(spec: AttentionSpec) -> int:
    """Return the number of query heads of a section, for kernels that loop over keys.

    A section is the heads whose tiles run side by side so that their keys and values share L2, see
    `tile.tile_of_program`. Heads of a group share their keys, so groups stay whole.
    """
    bytes_per_head = spec.max_seqlen_k * _bytes_per_row(spec)
    return spec.group_size * _heads_per_section(spec, bytes_per_head)


def key_heads_per_section(spec: AttentionSpec) -> int:
    """Return the number of key heads of a section, for kernels that loop over queries of a group.

    A section is the heads whose tiles run side by side so that q and do of their groups share L2.
    """
    return _heads_per_section(spec, spec.group_size * spec.max_seqlen_q * _bytes_per_row(spec))


def _bytes_per_row(spec: AttentionSpec) -> int:
    """Return the bytes of one row of k and v, or of q and do, of one head."""
    return (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize


def _heads_per_section(spec: AttentionSpec, bytes_per_head: int) -> int:
    """Return the number of heads of a section: as many as SECTION_BYTES hold, at least 1.

    Without a bound on the right, so without a diagonal, it is 1: tiles of equal work use L2 best
    head by head.
    """
    if spec.window_right < 0:
        return 1
    heads = SECTION_BYTES // max(1, bytes_per_head)
    return max(1, min(heads, spec.batch * spec.num_kv_heads))
