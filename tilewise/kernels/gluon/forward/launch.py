"""Plan the Hopper forward pass: which calls it takes, how they are cut, and what is launched."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention.bias import copied_bias
from tilewise.kernels.gluon.forward.fp8.tiles import Variant
from tilewise.kernels.gluon.forward.kernel import Tensors, Tile, attention_fwd_kernel
from tilewise.kernels.gluon.forward.sorted_tiles import (
    CLEAR_ROWS,
    ENTRIES,
    FIELDS_PAD,
    PLAN_CHUNK,
    attention_order_kernel,
    attention_plan_kernel,
    plan_sizes,
)
from tilewise.kernels.gluon.forward.tiles import GROUP_ROWS, WIDTHS, tile_config_fwd
from tilewise.kernels.gluon.forward.variant import choice, in_pairs
from tilewise.kernels.host.descriptors import descriptor
from tilewise.kernels.host.lasting import is_capturing, made_once
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, MaskTensors
from tilewise.kernels.triton.attention.geometry import bias_strides
from tilewise.kernels.triton.visible import mask_reach_kernel

__all__ = [
    "WIDEST_SOFTCAP",
    "add_fwd",
    "add_sorted_tiles",
    "added_tensors",
    "alibi_stride",
    "counter_of",
    "mask_strides",
    "tile_config_fwd",
    "why_not_fwd",
]

_MASK_ROWS = 128  # of a mask tile: those of the two warpgroups
# Beyond so many units tanh's absolute error of 1e-7 could be seen in float32 logits; nobody caps
# there.
WIDEST_SOFTCAP = 1024.0


def why_not_fwd(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can: on CUDA, in 16 bits, head
    dims that are multiples of 8 up to 256, mask tiles of 128 queries, and a bounded softcap."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if not 8 <= width <= WIDTHS[-1] or width % 8 != 0:
            return f"{name} must be a multiple of 8 from 8 to {WIDTHS[-1]}, got {width}"
    if spec.mask_tile is not None and spec.mask_tile[0] != _MASK_ROWS:
        return f"mask tiles must have {_MASK_ROWS} queries, got {spec.mask_tile[0]}"
    if spec.softcap > WIDEST_SOFTCAP:
        return f"softcap must be at most {WIDEST_SOFTCAP:g}, got {spec.softcap}"
    return None


def add_fwd(
    maker: Maker, spec: AttentionSpec, tensors: AttentionTensors, tile: Tile | None = None
) -> tuple[Tensor, ...]:
    """Add to the plan the launches of the forward pass with `maker` and return the results'
    tensors; see `ops.attention` for shapes and rules. A call without rows is only filled: o = 0,
    lse = -inf.

    Args:
        tile: overrides the choice of `tile_config_fwd`, for tuning.

    Returns:
        o like q with Dv channels; lse float32 (B, Hq, Sq) or (Hq, T); with spec.needs_max the
        largest logits, lying as lse does.
    """
    q, bias, heads = tensors.q, tensors.bias, spec.num_q_heads
    rows = q.shape[0] if spec.is_varlen else q.shape[1]
    o_shape = (*q.shape[:-1], spec.v_head_dim)
    lse_shape = (heads, rows) if spec.is_varlen else (spec.batch, heads, rows)
    if spec.batch * heads * spec.max_seqlen_q * rows == 0:
        count = 2 if spec.needs_max else 1
        nothing = [maker.full(lse_shape, -math.inf, torch.float32) for _ in range(count)]
        return maker.full(o_shape, 0.0, q.dtype), *nothing
    o, lse = maker.empty(o_shape, q.dtype), maker.empty(lse_shape, torch.float32)
    strides, bias_pairs = in_pairs(*((0, 0, 0, 0) if bias is None else bias_strides(bias)))
    bias_rows = strides[2] != 0
    tiles_of_bias = copied_bias(maker, spec, bias)
    bias_copied = tiles_of_bias is not None
    tile = tile or tile_config_fwd(spec, bias_rows=bias_rows, bias_copied=bias_copied)
    shares_bias = tile.bias_stages > 0 and strides[0] == 0 and spec.batch > 1 and not spec.is_varlen
    variant, numbers = choice(spec, tile, bias_rows, bias_pairs, shares_bias)
    bias_desc = None
    if tile.bias_stages > 0 and tiles_of_bias is not None:
        bias_desc = descriptor(tiles_of_bias, GROUP_ROWS, tile.keys)
    q, k, v = (maker.addressable(_some(maker, x)) for x in tensors[:3])
    added, upper_bound = added_tensors(maker, o, lse, spec, tensors, tile)
    results: tuple[Tensor, ...] = o, lse
    if spec.needs_max:  # rows that belong to no packed sequence are not written
        maxima = maker.empty(lse_shape, torch.float32)
        if spec.is_varlen:
            maxima = maker.full(lse_shape, -math.inf, torch.float32)
        added, results = added._replace(maxima=maxima), (o, lse, maxima)
    num_heads = heads if spec.is_varlen else spec.batch * heads
    num_tiles = upper_bound * num_heads
    grid = min(num_tiles, device.sm_count_of(maker.device))
    one = torch.empty(1, dtype=torch.int32, device="meta")
    counter = maker.ask(functools.partial(counter_of, maker.device), one)
    maker.launch(
        attention_fwd_kernel,
        grid,
        *_split_descriptors(q, GROUP_ROWS, tile),
        *_split_descriptors(k, tile.keys, tile),
        descriptor(v, tile.keys, tile.dv),
        descriptor(o, GROUP_ROWS, tile.o_columns),
        bias_desc,
        o,
        lse,
        counter,
        added,
        num_tiles,
        upper_bound,
        num_heads,
        *numbers,
        0 if spec.is_varlen else heads * rows,
        rows,
        alibi_stride(tensors.alibi_slopes),
        *mask_strides(tensors.mask),
        *strides,
        tile=tile,
        variant=variant,
    )
    return results


def _split_descriptors(
    x: Tensor, rows: int, tile: Tile
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the descriptors of q or k, in tiles of `rows` rows, for its first tile.d channels and
    for the rest; the first twice if there is no rest."""
    first = descriptor(x, rows, tile.d)
    return first, descriptor(x, rows, tile.d_high) if tile.d_high > 0 else first


def added_tensors(
    maker: Maker, o: Tensor, lse: Tensor, spec: AttentionSpec, tensors: AttentionTensors, tile: Tile
) -> tuple[Tensors, int]:
    """Return the optional tensors of a call, as the kernel takes them, and an upper bound of the
    tiles of rows of a head.

    Adds to the plan the launches that compute the reach of a block mask and the plan of a packed
    batch.
    """
    mask, upper_bound = tensors.mask, -(-spec.max_seqlen_q // tile.rows)
    given: dict[str, Tensor | None] = {
        "seqlens_k": tensors.seqlens_k,
        "alibi": tensors.alibi_slopes,
        "sinks": tensors.sinks,
        "philox": tensors.philox,
        "bias": tensors.bias,
    }
    if mask is not None:
        count, mask_rows, words = mask.bits.shape
        reach = maker.empty((count, words), mask.bits.dtype)
        if count > 0:
            maker.launch(mask_reach_kernel, count, mask.bits, reach, TILE_M=mask_rows, WORDS=words)
        given |= {"mask_bits": mask.bits, "mask_reach": reach, "mask_spans": mask.rows}
        given["mask_entries"] = mask.row_entries
    if spec.is_varlen:
        upper_bound = o.shape[0] // tile.rows + spec.batch
        rows_k = tensors.k.shape[0]
        tiles = add_sorted_tiles(maker, tensors, o, lse, spec, tile, upper_bound, rows_k)
        given["plan"], given["plan_size"] = tiles
    return Tensors(**{name: x for name, x in given.items() if x is not None}), upper_bound


def add_sorted_tiles(
    maker: Maker,
    tensors: AttentionTensors,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    tile: Tile | Variant,
    upper_bound: int,
    rows_k: int,
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launches that list a packed batch's tiles by work, and zero rows of no
    sequence.

    Args:
        upper_bound: the largest number of tiles of rows that all sequences together may have.
        rows_k: the rows of k.

    Returns:
        The list of tiles, int32 (upper_bound * 6,), and its length, int32 (1,), on the device.
    """
    sizes, programs = plan_sizes(spec.batch, o.shape[0], upper_bound)
    size, work, entries, plan = maker.empty((sum(sizes),), torch.int32).split(sizes)
    maker.launch(
        attention_plan_kernel,
        programs,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
        entries,
        work,
        size,
        o,
        lse,
        spec.batch,
        o.shape[0],
        rows_k,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        upper_bound,
        spec.num_q_heads,
        spec.v_head_dim,
        spec.window_left,
        spec.window_right,
        ROWS=tile.rows,
        KEYS=tile.keys,
        CLEAR=CLEAR_ROWS,
        CHUNK=PLAN_CHUNK,
    )
    maker.launch(
        attention_order_kernel,
        -(-upper_bound // ENTRIES),
        entries,
        work,
        size,
        plan,
        COUNT=ENTRIES,
        FIELDS_PAD=FIELDS_PAD,
    )
    return plan, size


def counter_of(where: torch.device, stream: int) -> Tensor:
    """Return the counter of tiles of a device's stream, int32 (1,), which every launch leaves at 0.

    Launches that are captured in a graph, and calls that are not on CUDA, get a fresh one.
    """

    def zero() -> Tensor:
        return torch.zeros(1, dtype=torch.int32, device=where)

    if where.type != "cuda" or is_capturing(where):
        return zero()
    return made_once(("tiles of a stream", where, stream), zero, where)


def _some(maker: Maker, x: Tensor) -> Tensor:
    """Return x, or a tensor with one row of zeros, which no query sees, if x has no elements."""
    if x.numel() > 0:
        return x
    return maker.full((*x.shape[:-3], 1, *x.shape[-2:]), 0.0, x.dtype)


def alibi_stride(slopes: Tensor | None) -> int:
    return slopes.shape[-1] if slopes is not None and slopes.dim() == 2 else 0


def mask_strides(mask: MaskTensors | None) -> tuple[int, int]:
    """Return how many spans of a block mask lie between sequences and between heads, 0 where they
    share them or there is no mask."""
    if mask is None:
        return 0, 0
    batch, heads, tiles, _ = mask.rows.shape
    return (heads * tiles if batch > 1 else 0), (tiles if heads > 1 else 0)
