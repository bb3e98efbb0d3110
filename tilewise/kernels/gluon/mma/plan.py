"""Plan attention by mma.sync: which calls its kernels take, how they are cut, what is launched."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention.bias import copied_bias
from tilewise.kernels.gluon.backward.launch import (
    Gradients,
    Parts,
    add_around,
    rows_before,
    scores_of,
)
from tilewise.kernels.gluon.backward.plan import has_separate_dq
from tilewise.kernels.gluon.backward.steps import Rows, launch_after, strides_of
from tilewise.kernels.gluon.forward.launch import (
    WIDEST_SOFTCAP,
    added_tensors,
    alibi_stride,
    mask_strides,
)
from tilewise.kernels.gluon.forward.variant import choice, in_pairs
from tilewise.kernels.gluon.mma.backward import attention_bwd_kernel
from tilewise.kernels.gluon.mma.forward import Tile, attention_fwd_kernel
from tilewise.kernels.gluon.mma.tiles import (
    BwdTile,
    choice_bwd,
    tile_config_bwd,
    tile_config_fwd,
)
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.kernels.triton.attention.geometry import bias_strides

__all__ = [
    "GENERATIONS",
    "add_bwd",
    "add_fwd",
    "is_served",
    "tile_config_bwd",
    "tile_config_fwd",
    "why_not_bwd",
    "why_not_fwd",
]

GENERATIONS = (8, 12)  # of devices that have mma.sync and nothing faster
_UNIT = 8  # elements of 16 bytes
_WIDEST = 512
_WIDEST_WITH_ALL = 256  # channels of heads in which a call may add anything
_MASK_ROWS = 128
_IN_EIGHTS = 2  # how the sum of dq lies, as `backward.rows` takes it


def is_served(arch: int) -> bool:
    """Return whether a device of compute capability `arch` (as 80 for 8.0) has mma.sync and nothing
    faster."""
    return arch // 10 in GENERATIONS


def why_not_fwd(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can: on CUDA, in 16 bits, head
    dims that are multiples of 8 up to 512, above 256 without bias, mask or dropout, and a bounded
    softcap."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if not _UNIT <= width <= _WIDEST or width % _UNIT != 0:
            return f"{name} must be a multiple of {_UNIT} from {_UNIT} to {_WIDEST}, got {width}"
    if spec.mask_tile is not None and spec.mask_tile[0] != _MASK_ROWS:
        return f"mask tiles must have {_MASK_ROWS} queries, got {spec.mask_tile[0]}"
    if max(spec.head_dim, spec.v_head_dim) > _WIDEST_WITH_ALL:
        added = {
            "bias": spec.has_bias,
            "a block mask": spec.mask_tile is not None,
            "dropout": spec.dropout_p > 0,
        }
        for name, is_asked in added.items():
            if is_asked:
                return f"{name} must be left out in heads of more than {_WIDEST_WITH_ALL} channels"
    if spec.softcap > WIDEST_SOFTCAP:
        return f"softcap must be at most {WIDEST_SOFTCAP:g}, got {spec.softcap}"
    return None


def _in_eights(bias: Tensor) -> tuple[int, int, int, int]:
    """Return (batch, head, row, key) strides of a result of `copied_bias`, in units of 16 bytes."""
    batch, row, head = strides_of(bias, is_packed=False)
    return batch, head, row, 1


def add_fwd(
    maker: Maker, spec: AttentionSpec, tensors: AttentionTensors, tile: Tile | None = None
) -> tuple[Tensor, ...]:
    """Add to the plan the launches of the forward pass with `maker`, and return o, lse and, with
    spec.needs_max, the largest logits; see `ops.attention` for shapes and rules.

    tile: overrides the choice of `tile_config_fwd`, for tuning.
    """
    q, bias, heads = tensors.q, tensors.bias, spec.num_q_heads
    tiles_of_bias = copied_bias(maker, spec, bias) if spec.max_seqlen_k % _UNIT == 0 else None
    is_copied = tiles_of_bias is not None
    tile = tile or tile_config_fwd(spec, device.arch_of(maker.device), bias_copied=is_copied)
    rows = q.shape[0] if spec.is_varlen else q.shape[1]
    o_shape = (*q.shape[:-1], spec.v_head_dim)
    lse_shape = (heads, rows) if spec.is_varlen else (spec.batch, heads, rows)
    if spec.batch * heads * spec.max_seqlen_q * rows == 0:
        count = 2 if spec.needs_max else 1
        nothing = [maker.full(lse_shape, -math.inf, torch.float32) for _ in range(count)]
        return maker.full(o_shape, 0.0, q.dtype), *nothing
    o, lse = maker.empty(o_shape, q.dtype), maker.empty(lse_shape, torch.float32)
    strides, bias_pairs = in_pairs(*((0, 0, 0, 0) if bias is None else bias_strides(bias)))
    shares_bias = False
    if tile.bias_stages > 0:
        assert tiles_of_bias is not None
        strides, bias_pairs = _in_eights(tiles_of_bias), False
        shares_bias = strides[0] == 0 and spec.batch > 1 and not spec.is_varlen
    variant, numbers = choice(spec, tile, strides[2] != 0, bias_pairs, shares_bias)
    variant = variant._replace(short=False)
    added, upper_bound = added_tensors(maker, o, lse, spec, tensors, tile)
    results: tuple[Tensor, ...] = o, lse
    if spec.needs_max:  # rows that belong to no packed sequence are not written
        maxima = maker.empty(lse_shape, torch.float32)
        if spec.is_varlen:
            maxima = maker.full(lse_shape, -math.inf, torch.float32)
        added, results = added._replace(maxima=maxima), (o, lse, maxima)
    q, k, v = (maker.addressable(x) for x in tensors[:3])
    num_heads = heads if spec.is_varlen else spec.batch * heads
    num_tiles = upper_bound * num_heads
    steps = [strides_of(x, is_packed=spec.is_varlen) for x in (q, k, v, o)]
    maker.launch(
        attention_fwd_kernel,
        num_tiles,
        q,
        k,
        v,
        o,
        lse,
        added,
        *steps,
        spec.head_dim // _UNIT,
        spec.v_head_dim // _UNIT,
        num_tiles,
        upper_bound,
        num_heads,
        *numbers[:9],
        *numbers[11:],
        0 if spec.is_varlen else heads * rows,
        rows,
        alibi_stride(tensors.alibi_slopes),
        *mask_strides(tensors.mask),
        *strides,
        tile=tile,
        variant=variant,
        num_warps=tile.warps,
    )
    return results


def why_not_bwd(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot make the gradient of `spec`, so that the portable kernels do, or
    return None when it can."""
    if spec.mask_tile not in (None, (_MASK_ROWS, _MASK_ROWS)):
        return f"tiles of a block mask must be (128, 128), got {spec.mask_tile}"
    if spec.deterministic and has_separate_dq(spec._replace(head_dim=64, v_head_dim=64)):
        return "a mask, or lengths without a diagonal, leave sums of dq no order"
    return None


def add_bwd(
    maker: Maker,
    spec: AttentionSpec,
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    tensors: AttentionTensors,
    tile: BwdTile | None = None,
) -> Gradients:
    """Add to the plan the launches of the backward pass, and return the gradients; arguments and
    results are those of `gluon.backward.launch.add_around`."""
    tile = tile or tile_config_bwd(spec, device.arch_of(maker.device))
    add_kernels = functools.partial(_add_kernels, tile=tile)
    return add_around(maker, spec, do, dlse, o, lse, tensors, add_kernels)


def _add_kernels(maker: Maker, x: Parts, *, tile: BwdTile) -> Rows:
    """Add to the plan the launches of a backward pass (row terms, the kernel, and the rounding of
    dq), and return the row terms."""
    spec = x.spec
    variant, grids = choice_bwd(spec, tile)
    tiles_of_bias = None
    if tile.has_room and spec.max_seqlen_k % _UNIT == 0:
        tiles_of_bias = copied_bias(maker, spec, x.bias)
    variant = variant._replace(bias_copied=tiles_of_bias is not None)
    rows = rows_before(maker, x, variant, sum_width=variant.d)
    scores, places = scores_of(spec, x.extras)
    if tiles_of_bias is not None:
        scores = scores._replace(bias=tiles_of_bias)
        places = (places[0], *_in_eights(tiles_of_bias), *places[5:])
    num_tiles = -(-spec.max_seqlen_k // tile.keys)
    tensors = (x.q, x.k, x.v, x.do, x.dk, x.dv)
    maker.launch(
        attention_bwd_kernel,
        num_tiles * spec.batch * spec.num_kv_heads,
        *tensors,
        rows.lse_log2,
        rows.delta,
        rows.dq_sum,
        rows.semaphores,
        x.sequences,
        *(strides_of(tensor, is_packed=spec.is_varlen) for tensor in tensors),
        spec.head_dim // _UNIT,
        spec.v_head_dim // _UNIT,
        spec.batch,
        spec.num_kv_heads,
        spec.group_size,
        spec.max_seqlen_q,
        spec.max_seqlen_k,
        *((x.q.shape[0], x.k.shape[0]) if spec.is_varlen else (0, 0)),
        spec.window_left,
        spec.window_right,
        num_tiles,
        rows.section,
        rows.delta.shape[1],
        spec.num_kv_heads // x.k.shape[-2],
        scores,
        *places,
        variant=variant,
        grids=grids,
        num_warps=grids.warps,
    )
    launch_after(maker, rows, x.dq, spec, x.sequences, variant, _IN_EIGHTS)
    return rows
