"""Launch the Hopper forward pass: which calls it takes, how they are cut, and the call itself."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon._descriptors import addressable, descriptor
from tilewise.kernels.gluon._launch import launch
from tilewise.kernels.gluon._tiles import PLAN_FIELDS
from tilewise.kernels.gluon.attention_fwd import Tensors, Tile, Variant, attention_fwd_kernel
from tilewise.kernels.gluon.attention_fwd_tiles import GROUP_ROWS, WIDTHS, tile_config_fwd
from tilewise.kernels.gluon.attention_plan import (
    CLEAR_ROWS,
    ENTRIES,
    attention_order_kernel,
    attention_plan_kernel,
)
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.triton._geometry import device_of
from tilewise.kernels.triton._mask import mask_reach_kernel

__all__ = ["launch_fwd", "tile_config_fwd", "why_not_fwd"]

_MASK_ROWS = 128  # of a mask tile: those of the two warpgroups
_CHANNELS = 8  # 16 bytes: what strides and widths of o are counted in
# K and V of the heads whose tiles are computed side by side: 16 MiB of Hopper's 50 MB L2 was the
# best of 4 to 64 (H200, causal, 16,384 tokens, 2026-11-20).
_SECTION_BYTES = 16 << 20
# Beyond so many units tanh's absolute error of 1e-7 could be seen in float32 logits; nobody caps
# there.
_WIDEST_SOFTCAP = 1024.0
# Of capped logits with the exponents of bfloat16: exp(-2 * 40) is 2**-116, no denormal, so that
# the cap may stand for the maximum of a row.
_WIDEST_BOUND = 40.0


def why_not_fwd(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if not 8 <= width <= WIDTHS[-1] or width % 8 != 0:
            return f"{name} must be a multiple of 8 from 8 to {WIDTHS[-1]}, got {width}"
    if spec.mask_tile is not None and spec.mask_tile[0] != _MASK_ROWS:
        return f"mask tiles must have {_MASK_ROWS} queries, got {spec.mask_tile[0]}"
    if spec.softcap > _WIDEST_SOFTCAP:
        return f"softcap must be at most {_WIDEST_SOFTCAP:g}, got {spec.softcap}"
    return None


def launch_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    philox: Tensor | None = None,
    mask: MaskTensors | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the forward pass; see `ops.attention` for shapes and rules.

    Args:
        tile: overrides the choice of `tile_config_fwd`, for tuning.

    Returns:
        o like q with Dv channels; lse float32 (B, Hq, Sq) or (Hq, T).
    """
    rows = q.shape[0] if spec.is_varlen else q.shape[1]
    heads = spec.num_q_heads
    o = torch.empty((*q.shape[:-1], spec.v_head_dim), dtype=q.dtype, device=q.device)
    shape = (heads, rows) if spec.is_varlen else (spec.batch, heads, rows)
    lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if spec.batch * heads * spec.max_seqlen_q == 0 or lse.numel() == 0:
        return o.zero_(), lse.fill_(-math.inf)
    bias_strides, bias_pairs = _bias_strides(bias)
    bias_rows = bias_strides[2] != 0
    tile = tile or tile_config_fwd(spec, bias_rows=bias_rows)
    variant, numbers = _choice(spec, tile, bias_rows, bias_pairs)
    # Named, because a descriptor does not keep the memory of a copy alive.
    q, k, v = (addressable(_some(x)) for x in (q, k, v))
    with device_of(q):
        tensors, upper_bound = _tensors_of(
            o, lse, spec, tile,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k,
            bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, philox=philox, mask=mask,
        )  # fmt: skip
        num_heads = heads if spec.is_varlen else spec.batch * heads
        num_tiles = upper_bound * num_heads
        launch(
            attention_fwd_kernel, min(num_tiles, device.sm_count_of(q.device)),
            *_split_descriptors(q, GROUP_ROWS, tile), *_split_descriptors(k, tile.keys, tile),
            descriptor(v, tile.keys, tile.dv), descriptor(o, GROUP_ROWS, tile.o_columns),
            o, lse, _counter(q.device), tensors, num_tiles, upper_bound, num_heads, *numbers,
            0 if spec.is_varlen else heads * rows, rows,
            _alibi_stride(alibi_slopes), *_mask_strides(mask), *bias_strides,
            tile=tile, variant=variant,
        )  # fmt: skip
    return o, lse


def _split_descriptors(x: Tensor, rows: int, tile: Tile) -> tuple[Any, Any]:
    """Return the descriptors of q or k for its first channels and for the rest, if there is one."""
    first = descriptor(x, rows, tile.d)
    return first, descriptor(x, rows, tile.d_rest) if tile.d_rest > 0 else first


@functools.lru_cache(maxsize=1024)
def _choice(
    spec: AttentionSpec, tile: Tile, bias_rows: bool, bias_pairs: bool
) -> tuple[Variant, tuple[float, ...]]:
    """Return the code and the kernel's numbers of `spec`."""
    heads, width = spec.num_q_heads, spec.v_head_dim // _CHANNELS
    numbers = (
        _heads_per_section(spec), heads, spec.group_size, spec.max_seqlen_q, spec.max_seqlen_k,
        spec.window_left, spec.window_right, spec.softmax_scale, spec.softcap,
        heads * width, width, _drop_limit(spec), spec.dropout_scale,
    )  # fmt: skip
    return _variant_of(spec, tile, bias_rows, bias_pairs), numbers


def _variant_of(spec: AttentionSpec, tile: Tile, bias_rows: bool, bias_pairs: bool) -> Variant:
    """Return which code `spec` needs; a window that hides nothing is compiled away."""
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    lengths = spec.is_varlen or spec.has_seqlens_k
    mask_rows, mask_keys = spec.mask_tile or (0, 0)
    tail = mask_keys == 0 and spec.max_seqlen_k % tile.keys != 0
    softcap = "none"
    if spec.softcap > 0:  # bfloat16 has 8 bits, tanh of the special function unit 11, float16 11
        softcap = "fast" if spec.dtype == torch.bfloat16 else "exact"
    unshifted = not (spec.has_alibi or spec.has_bias)
    return Variant(
        left=left,
        right=right,
        ruled=left or right or lengths or tail or spec.max_seqlen_k == 0,
        factored=unshifted and (spec.softcap > 0 or spec.softmax_scale > 0),
        bounded=unshifted and softcap == "fast" and spec.softcap <= _WIDEST_BOUND,
        softcap=softcap,
        alibi=spec.has_alibi,
        bias=spec.has_bias,
        bias_rows=bias_rows,
        bias_pairs=bias_pairs,
        mask_rows=mask_rows,
        mask_keys=mask_keys,
        dropout=spec.dropout_threshold > 0,
        drops_most=spec.dropout_threshold > 1 << 15,
        sinks=spec.has_sinks,
        packed=spec.is_varlen,
        lengths=spec.has_seqlens_k,
    )


def _tensors_of(
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    tile: Tile,
    *,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqlens_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    philox: Tensor | None,
    mask: MaskTensors | None,
) -> tuple[Tensors, int]:
    """Return what the call adds, and how many tiles of rows a head has at most."""
    given: dict[str, Tensor] = {}
    upper_bound = -(-spec.max_seqlen_q // tile.rows)
    vectors = {"seqlens_k": seqlens_k, "alibi": alibi_slopes, "sinks": sinks, "philox": philox}
    given |= {name: x.contiguous() for name, x in vectors.items() if x is not None}
    if bias is not None:
        given["bias"] = bias
    if mask is not None:
        bits = mask.bits.contiguous()
        count, mask_rows, words = bits.shape
        reach = torch.empty((count, words), dtype=bits.dtype, device=bits.device)
        if count > 0:
            launch(mask_reach_kernel, count, bits, reach, TILE_M=mask_rows, WORDS=words)
        given |= {"mask_bits": bits, "mask_reach": reach}
        given |= {"mask_spans": mask.rows.contiguous()}
        given |= {"mask_entries": mask.row_entries.contiguous()}
    if spec.is_varlen:
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        upper_bound = o.shape[0] // tile.rows + spec.batch
        given["plan"], given["plan_size"] = _plan(
            cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), o, lse, spec, tile, upper_bound
        )
    return Tensors(**given), upper_bound


def _plan(
    cu_q: Tensor,
    cu_k: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    tile: Tile,
    upper_bound: int,
) -> tuple[Tensor, Tensor]:
    """List the tiles of a packed batch on the device, and clear rows of no sequence."""
    fields = PLAN_FIELDS.value
    memory = torch.empty(upper_bound * (2 * fields + 1) + 1, dtype=torch.int32, device=o.device)
    size, work, entries, plan = memory.split(
        [1, upper_bound, upper_bound * fields, upper_bound * fields]
    )
    programs = max(spec.batch, -(-o.shape[0] // CLEAR_ROWS))
    launch(
        attention_plan_kernel, programs, cu_q, cu_k, entries, work, size, o, lse,
        spec.batch, o.shape[0], spec.num_q_heads, spec.v_head_dim,
        spec.window_left, spec.window_right,
        ROWS=tile.rows, KEYS=tile.keys, CLEAR=CLEAR_ROWS, CHUNK=128,
    )  # fmt: skip
    launch(
        attention_order_kernel, -(-upper_bound // ENTRIES), entries, work, size, plan,
        COUNT=ENTRIES, FIELDS_PAD=8,
    )  # fmt: skip
    return plan, size


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(where: torch.device) -> Tensor:
    """Return the counter of the current stream: it goes back to 0 by itself at a launch's end."""
    if where.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=where)
    if torch.cuda.is_current_stream_capturing():  # memory of a graph must not outlive it
        return torch.zeros(1, dtype=torch.int32, device=where)
    key = (where, torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(1, dtype=torch.int32, device=where)
    return counter


def _some(x: Tensor) -> Tensor:
    """Return x; where it has no rows, one of zeros, which no query sees."""
    if x.numel() > 0:
        return x
    return x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:]))


def _heads_per_section(spec: AttentionSpec) -> int:
    """Return how many query heads are computed side by side; groups stay whole."""
    row_bytes = (spec.head_dim + spec.v_head_dim) * spec.dtype.itemsize
    key_heads = max(2, _SECTION_BYTES // max(1, spec.max_seqlen_k * row_bytes))
    num_heads = spec.num_q_heads * (1 if spec.is_varlen else spec.batch)
    return min(num_heads, key_heads * spec.group_size)


def _drop_limit(spec: AttentionSpec) -> int:
    """Return 65,536 * threshold - 1 as the int32 of the same bits (see `_dropout.Draw`)."""
    limit = (spec.dropout_threshold << 16) - 1
    return limit - (1 << 32) if limit >= 1 << 31 else limit


def _alibi_stride(slopes: Tensor | None) -> int:
    return slopes.shape[-1] if slopes is not None and slopes.dim() == 2 else 0


def _bias_strides(bias: Tensor | None) -> tuple[tuple[int, int, int, int], bool]:
    """Return the strides of a bias that broadcasts to four dims, and whether they count pairs.

    They are 0 where it is broadcast. Pairs are read at once where keys are neighbours and rows
    start at even places.
    """
    if bias is None:
        return (0, 0, 0, 0), False
    steps = [step if size > 1 else 0 for size, step in zip(bias.shape, bias.stride(), strict=True)]
    batch, head, row, key = (0,) * (4 - bias.dim()) + tuple(steps)
    if key != 1 or batch % 2 or head % 2 or row % 2:
        return (batch, head, row, key), False
    return (batch // 2, head // 2, row // 2, key), True


def _mask_strides(mask: MaskTensors | None) -> tuple[int, int]:
    """Return how many spans lie between sequences and between heads, 0 where they share them."""
    if mask is None:
        return 0, 0
    batch, heads, tiles, _ = mask.rows.shape
    return (heads * tiles if batch > 1 else 0), (tiles if heads > 1 else 0)
