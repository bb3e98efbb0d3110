"""Launch the repair of attention: what hidden values that are not finite have reached.

The kernels of attention multiply whole tiles, and a tile at the edge of a mask holds pairs that do
not see one another: their weight is 0, but 0 * NaN is NaN. Where that happened it shows in the
last row of the tile, so one row in many is looked at, and only tiles that are wrong are computed
anew, by kernels that are careful and slow. What is not wrong keeps its bits. Calls in which all
rows of a tile see the same keys need none of this.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.attention_tiles import Part, candidates
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.triton._geometry import bias_strides, variant_of
from tilewise.kernels.triton._start import Start, by_triton
from tilewise.kernels.triton._tile import Extras
from tilewise.kernels.triton.attention_repair_bwd import attention_repair_bwd_kernel
from tilewise.kernels.triton.attention_repair_fwd import Given, attention_repair_fwd_kernel

__all__ = ["needs_repair", "repair_bwd", "repair_fwd"]

_WIDEST_STEP = 64  # rows of a warpgroup on Hopper
_VECTOR_BYTES = 16  # the widest load of one thread
_TILE = 32  # rows, keys and channels of a product
_REGISTERS = 128  # so that many programs look at once; what repairs may spill
_SCANNED = 4096  # elements that a program looks at


def needs_repair(spec: AttentionSpec) -> bool:
    """Say whether rows of one tile may see different keys."""
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    return left or right or spec.mask_tile is not None


def repair_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
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
    start: Start = by_triton,
) -> None:
    """Repair o, in place, of a forward pass with these arguments; see the module's docstring.

    Args:
        start: launches (kernel, grid, *arguments, **constants).
    """
    del sinks  # lse holds them
    if not needs_repair(spec) or o.numel() == 0 or k.numel() == 0:
        return
    unit, strides = _places(spec, q, k, v, o)
    has_rows = None if bias is None else bias_strides(bias)[2] != 0
    grid, numbers, constants = _plan_fwd(spec, device.arch_of(q.device), has_rows, unit)
    given, steps = _given(
        spec, cu_seqlens_q, cu_seqlens_k, seqlens_k, bias, alibi_slopes, philox, mask
    )
    start(
        attention_repair_fwd_kernel, grid, q, k, v, o, lse, given, *numbers, *steps,
        *_lse_strides(lse), *strides, **constants,
    )  # fmt: skip


def repair_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
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
    start: Start = by_triton,
) -> None:
    """Repair dq, dk and dv, in place, of a backward pass with these arguments."""
    del sinks
    if not needs_repair(spec) or q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return
    if do.stride(-1) != 1:
        do = do.contiguous()
    lse = lse.contiguous()
    unit, strides = _places(spec, q, k, v, o, do, dq, dk, dv)
    has_rows = None if bias is None else bias_strides(bias)[2] != 0
    grid, numbers, constants = _plan_bwd(spec, device.arch_of(q.device), has_rows, unit)
    given, steps = _given(
        spec, cu_seqlens_q, cu_seqlens_k, seqlens_k, bias, alibi_slopes, philox, mask
    )
    start(
        attention_repair_bwd_kernel, grid, q, k, v, o, do, dq, dk, dv, lse,
        None if dlse is None else dlse.contiguous(), given, *numbers, *steps,
        *_lse_strides(lse), *strides, **constants,
    )  # fmt: skip


_Plan = tuple[int, tuple[float, ...], dict[str, Any]]  # grid, numbers, constants


@functools.lru_cache(maxsize=1024)
def _plan_fwd(spec: AttentionSpec, arch: int, bias_rows: bool | None, unit: int) -> _Plan:
    """Return how the repair of a forward pass is cut.

    Args:
        bias_rows: whether the bias differs from query to query; None without one.
        unit: elements that strides and widths are counted in.
    """
    step = _step(spec, "fwd", arch)
    width = triton.next_power_of_2(spec.v_head_dim)
    tiles = _tiles(triton.cdiv(spec.max_seqlen_q, step), width)
    parts = triton.cdiv(spec.max_seqlen_q, step * tiles)
    constants = _constants(spec, bias_rows, unit, step, _TILE)
    constants |= {"DV_PAD": width, "STEP": step, "TILES": tiles}
    numbers = (spec.head_dim // unit, spec.v_head_dim // unit, parts, *_numbers(spec))
    return parts * spec.batch * spec.num_q_heads, numbers, constants


@functools.lru_cache(maxsize=1024)
def _plan_bwd(spec: AttentionSpec, arch: int, bias_rows: bool | None, unit: int) -> _Plan:
    """Return how the repair of a backward pass is cut; arguments as for `_plan_fwd`."""
    step_q, step_k = _step(spec, "dq", arch), _step(spec, "dkdv", arch)
    d_pad, dv_pad = (triton.next_power_of_2(x) for x in (spec.head_dim, spec.v_head_dim))
    tiles_q, tiles_k = (
        triton.cdiv(spec.max_seqlen_q, step_q), triton.cdiv(spec.max_seqlen_k, step_k)
    )  # fmt: skip
    tiles = _tiles(max(tiles_q, tiles_k), max(d_pad, dv_pad))
    parts_q, parts_k = triton.cdiv(tiles_q, tiles), triton.cdiv(tiles_k, tiles)
    programs_q = parts_q * spec.batch * spec.num_q_heads
    constants = _constants(spec, bias_rows, unit, step_q, step_k)
    constants |= {"D_PAD": d_pad, "DV_PAD": dv_pad, "TILES": tiles}
    constants |= {"STEP_Q": step_q, "STEP_K": step_k}
    numbers = (
        spec.head_dim // unit, spec.v_head_dim // unit, parts_q, parts_k, programs_q,
        *_numbers(spec),
    )  # fmt: skip
    return programs_q + parts_k * spec.batch * spec.num_kv_heads, numbers, constants


def _step(spec: AttentionSpec, part: Part, arch: int) -> int:
    """Return how many rows surely lie in one compute tile, of either backend."""
    tile = candidates(spec, part, arch)[0]
    return min(_WIDEST_STEP, tile.tile_n if part == "dkdv" else tile.tile_m)


def _tiles(count: int, width: int) -> int:
    """Return how many tiles a program looks at: not more than there are."""
    return min(max(1, _SCANNED // width), triton.next_power_of_2(count))


def _constants(
    spec: AttentionSpec, bias_rows: bool | None, unit: int, rows: int, keys: int
) -> dict[str, Any]:
    """Return what both kernels compile in. Small products compile soon and keep few registers."""
    extras = Extras() if bias_rows is None else Extras(bias=True, bias_row=int(bias_rows))
    return {
        "UNIT": unit, "variant": variant_of(spec, extras), "ROWS": min(_TILE, rows),
        "KEYS": min(_TILE, keys), "CHUNK": _TILE, "maxnreg": _REGISTERS,
    }  # fmt: skip


def _numbers(spec: AttentionSpec) -> tuple[float, ...]:
    """Return the numbers of a call, in the kernels' order."""
    return (
        spec.num_q_heads, spec.group_size, spec.max_seqlen_q, spec.max_seqlen_k,
        spec.window_left, spec.window_right, float(spec.softmax_scale), float(spec.softcap),
        spec.dropout_threshold, float(spec.dropout_scale),
    )  # fmt: skip


def _given(
    spec: AttentionSpec,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqlens_k: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    philox: Tensor | None,
    mask: MaskTensors | None,
) -> tuple[Given, tuple[int, ...]]:
    """Return the tensors of a call, and their strides in the kernels' order."""
    alibi_batch = 0
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        alibi_batch = alibi_slopes.shape[-1]
    mask_batch = mask_head = 0
    if mask is not None:
        batch, heads, tiles, _ = mask.rows.shape
        mask_batch, mask_head = heads * tiles if batch > 1 else 0, tiles if heads > 1 else 0
    tensors = (
        cu_seqlens_q, cu_seqlens_k, seqlens_k, alibi_slopes, None,
        philox if spec.dropout_p > 0 else None,
        *((mask.bits, mask.rows, mask.row_entries) if mask is not None else (None,) * 3),
    )  # fmt: skip
    given = Given(*(None if x is None else x.contiguous() for x in tensors))._replace(bias=bias)
    steps = (
        alibi_batch, *((0, 0, 0, 0) if bias is None else bias_strides(bias)), mask_batch,
        mask_head,
    )  # fmt: skip
    return given, steps


def _places(spec: AttentionSpec, *tensors: Tensor) -> tuple[int, list[int]]:
    """Return what strides and widths are counted in, and (batch, row, head) of each tensor."""
    steps: list[int] = []
    for x in tensors:
        steps += (0, *x.stride()[:2]) if spec.is_varlen else x.stride()[:3]
    unit = _VECTOR_BYTES // spec.dtype.itemsize
    if any(step % unit for step in (*steps, spec.head_dim, spec.v_head_dim)):
        return 1, steps
    return unit, [step // unit for step in steps]


def _lse_strides(lse: Tensor) -> tuple[int, int]:
    """Return the (batch, head) strides of (B, Hq, Sq) or (Hq, T)."""
    return (0, lse.stride(0)) if lse.dim() == 2 else lse.stride()[:2]
