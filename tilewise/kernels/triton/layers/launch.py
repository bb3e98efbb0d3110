"""How the one kernel of a decode step's layers is cut, what it cannot run, and its buffers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
from torch import Tensor

from tilewise.kernels import device, early
from tilewise.kernels.triton.early import options, options_of
from tilewise.kernels.triton.layers.form import Form
from tilewise.kernels.triton.layers.kernel import decode_layers_kernel

DTYPES = (torch.float16, torch.bfloat16)
NUM_WARPS = 8
TILE_KEYS = 64
SPAN_STEP = 16  # spans of keys are whole multiples of it
MOST_SPLITS = 32
GROUP = 16  # rows of the smallest matrix instruction; heads of a group are padded to it
UNEVEN = 1.05  # work of the busiest program over what smaller tiles would leave it
SLAB = 32768  # weights that a program holds of a product at once: 64 KiB in 16 bits
# Of a product, so that eight outputs, one a warp, are a slab: with fewer it takes 1.5 to 3 times
# op by op (H200, 2026-11: Llama-3.2-1B 1,521 us in place of 1,063, 8B 12,309 in place of 4,471).
MOST_CHANNELS = 4096
# Whether the program that multiplies a part of the o weight merges the spans of its key head
# itself, in a step of one row: one phase less, and sums by key heads that the next phase adds. A
# step of Qwen3-0.6B takes 773 us in place of 782 (H200, 2026-11-24,
# lab/results/row_forms_h200.json).
MERGES_IN_PRODUCT = True
# Whether the kernel may be launched before the one before it has ended, for which it waits first of
# all, and lets the norm behind it be launched.
BEGINS_EARLY = True
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for.

    Attributes:
        hidden: E; inner: I of the gated feed-forward block.
        has_qk_norm, has_qkv_bias: of each layer alike.
        eps: of the norms; qk_eps of those of q and k.
        softmax_scale: multiplies q . k.
    """

    hidden: int
    inner: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    has_qkv_bias: bool
    eps: float
    qk_eps: float
    softmax_scale: float


@dataclass(frozen=True)
class Cut:
    """How the products of a step are cut, see `cut_of`: tiles of outputs, runs of 256 channels."""

    qkv_n: int
    o_n: int
    o_runs: int
    gate_n: int
    down_n: int
    down_runs: int


def _runs(channels: int) -> int:
    return triton.next_power_of_2(triton.cdiv(channels, 256))


def _tile_n(outputs: int, runs: int, grid: int, most: int) -> int:
    """Return the largest tile of at most `most` weights that leaves programs nearly equal work."""
    widest = max(1, most // (256 * runs))
    tiles = [1 << i for i in range(widest.bit_length())]
    busiest = {n: triton.cdiv(triton.cdiv(outputs, n), grid) * n for n in tiles}
    return max(n for n in tiles if busiest[n] <= UNEVEN * min(busiest.values()))


def cut_of(shape: Shape, grid: int) -> Cut:
    """Return the tiles of the products on `grid` programs; each takes all channels at once."""
    qkv = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    all_runs, down_runs = _runs(shape.hidden), _runs(shape.inner)
    o_runs = _runs(shape.num_q_heads * shape.head_dim)
    return Cut(
        qkv_n=_tile_n(qkv, all_runs, grid, SLAB),
        o_n=_tile_n(shape.hidden, o_runs, grid, SLAB),
        o_runs=o_runs,
        gate_n=_tile_n(shape.inner, all_runs, grid, SLAB // 4),
        down_n=_tile_n(shape.hidden, down_runs, grid, SLAB),
        down_runs=down_runs,
    )


def _part_n(shape: Shape, rows: int, grid: int) -> int:
    """Return the outputs of the o weight that a program has for one key head, 0 without such."""
    if not MERGES_IN_PRODUCT or rows > 1:
        return 0
    group = triton.next_power_of_2(shape.num_q_heads // shape.num_kv_heads)
    each = triton.cdiv(shape.hidden, max(1, grid // shape.num_kv_heads))
    most = max(1, SLAB // (group * shape.head_dim))
    return min(triton.next_power_of_2(each), 1 << (most.bit_length() - 1))


def why_not(
    dtype: torch.dtype, cache_dtype: torch.dtype, shape: Shape, at: torch.device
) -> str | None:
    """Say why this kernel cannot compute the layers of such a model, or return None when it can."""
    if at.type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {at.type}"
    if device.arch_of(at) < 90:
        return "needs Hopper or newer"
    if dtype not in DTYPES:
        return f"dtype must be float16 or bfloat16, got {dtype}"
    if cache_dtype != dtype:
        return f"the cache must have the model's dtype {dtype}, got {cache_dtype}"
    if shape.head_dim not in (32, 64, 128, 256):
        return f"head_dim must be 32, 64, 128 or 256, got {shape.head_dim}"
    if shape.num_q_heads // shape.num_kv_heads > GROUP:
        group = shape.num_q_heads // shape.num_kv_heads
        return f"query heads of a key head must be at most {GROUP}, got {group}"
    width = shape.num_q_heads * shape.head_dim
    if shape.hidden % 8 or shape.inner % 8 or max(shape.hidden, shape.inner, width) > MOST_CHANNELS:
        return (
            f"hidden, inner and head sizes must be multiples of 8 and at most {MOST_CHANNELS}, "
            f"got {shape.hidden}, {shape.inner} and {width}"
        )
    return None


class DecodeLayers:
    """The layers of a model, ready to be run for a fixed number of rows.

    Args:
        shape: what all layers have in common.
        layers: of each layer its tensors, contiguous: attention norm, qkv weight, qkv bias, q norm,
            k norm, o weight, mlp norm, gate-up weight, down weight, k_cache, v_cache; None where
            there is none.
        rows: of a step, 1 or 2.
        grid: programs; all must fit the device at once. None is its number of multiprocessors.
    """

    FIELDS = 11

    def __init__(
        self,
        shape: Shape,
        layers: list[tuple[Tensor | None, ...]],
        rows: int,
        grid: int | None = None,
    ) -> None:
        weight, k_cache = layers[0][1], layers[0][9]
        assert weight is not None
        assert k_cache is not None
        at, dtype = weight.device, weight.dtype
        self.shape, self.rows, self._layers = shape, rows, layers
        if grid is None:
            grid = 1 if device.interpreting() else device.sm_count_of(at)
        self.grid = grid
        pointers = [[0 if t is None else t.data_ptr() for t in layer] for layer in layers]
        self._table = torch.tensor(pointers, dtype=torch.int64, device=at)
        self.splits = max(1, min(grid // (rows * shape.num_kv_heads), MOST_SPLITS))
        if grid == 1:
            self.splits = 3  # so that the interpreter merges
        self._block_size, self._cache_strides = k_cache.shape[1], k_cache.stride()[:3]
        items = rows * shape.num_kv_heads * self.splits

        def buffer(*sizes: int, like: torch.dtype = dtype) -> Tensor:
            return torch.zeros(sizes, dtype=like, device=at)

        width = shape.num_q_heads * shape.head_dim
        self.x, self.residual = buffer(rows, shape.hidden), buffer(2, rows, shape.hidden)
        self._qkv = buffer(rows, width + 2 * shape.num_kv_heads * shape.head_dim)
        self._parts = buffer(items, GROUP, shape.head_dim, like=torch.float32)
        self._states = buffer(items, GROUP, 2, like=torch.float32)
        self._sums = buffer(shape.num_kv_heads, rows, shape.hidden, like=torch.float32)
        self._o, self._act = buffer(rows, width), buffer(rows, shape.inner)
        self._meeting = buffer(2, like=torch.int32)
        self._form = Form(
            grid, rows, shape.hidden, _runs(shape.hidden), shape.inner, shape.num_q_heads,
            shape.num_kv_heads, shape.head_dim, shape.has_qk_norm, shape.has_qkv_bias,
            self._block_size, self.splits, triton.next_power_of_2(self.splits), SPAN_STEP,
            TILE_KEYS, GROUP,
            triton.next_power_of_2(shape.num_q_heads // shape.num_kv_heads), self.FIELDS,
            **asdict(cut_of(shape, grid)), o_part_n=_part_n(shape, rows, grid),
        )  # fmt: skip

    def run(
        self,
        x: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        seqlens_k: Tensor,
        block_table: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the two terms of the residual stream (rows, E) after the last layer.

        They are the same memory in every run. x (rows, E); cos, sin (rows, D / 2) float32;
        slot_mapping (rows,) int64; seqlens_k (rows,) int32, the new key included; block_table
        (rows, max_blocks) int32.
        """
        shape = self.shape
        scale = shape.softmax_scale * LOG2E
        decode_layers_kernel[(self.grid,)](
            self._table, x, self.residual, self.x, self._qkv, self._parts, self._states,
            self._sums, self._o, self._act, self._meeting, cos, sin, slot_mapping, seqlens_k,
            block_table,
            len(self._layers), block_table.stride(0), cos.stride(0), sin.stride(0),
            *self._cache_strides, shape.eps, shape.qk_eps, scale,
            form=self._form, num_warps=NUM_WARPS, num_stages=1,
            **(options("layers") if BEGINS_EARLY else options_of(early.OFF)),
        )  # fmt: skip
        return self.x, self.residual[0]
