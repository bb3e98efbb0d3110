"""All layers of a Llama's decode step for a few rows, as one kernel that never leaves the device.

what     for every layer: norm, qkv product, rotation and write to the paged cache, attention over
         it, o product, norm, gate-up product, silu, down product; the residual stream in two terms
grid     (programs,), one a multiprocessor: they walk through the layers together and meet after
         each of a layer's six phases at a counter in memory
program  of a product every GRID-th tile of outputs, for all rows; of attention one span of keys of
         one key head of one row; what a phase reads of weights and cache is asked for before the
         programs meet, and that of the phases after it is fetched into the L2 cache
traffic  every weight, key and value once; what passes from phase to phase stays in the L2 cache
numerics products summed in float32 in an order that depends on shapes and the number of programs;
         rounded where the kernels rounded that this one replaces
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device

DTYPES = (torch.float16, torch.bfloat16)
NUM_WARPS = 8
TILE_KEYS = 64
SPAN_STEP = 16  # spans of keys are whole multiples of it
MOST_SPLITS = 32
GROUP = 16  # rows of the smallest matrix instruction; heads of a group are padded to it
SLAB = 16384  # weights that a program holds of a product at once: 32 KiB in 16 bits
LOG2E = 1.4426950408889634


@triton.jit
def _load_acquire(ptr):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _meet(meeting_ptr, count, GRID: tl.constexpr):
    """Wait until all programs are here for the `count`-th time; what they wrote can be read."""
    if GRID > 1:
        tl.debug_barrier()
        tl.atomic_add(meeting_ptr, 1, sem="release", scope="gpu")
        while _load_acquire(meeting_ptr) < count * GRID:
            pass
        tl.debug_barrier()


@triton.jit
def _fetch(ptr, first, BYTES: tl.constexpr, GRID: tl.constexpr):
    """Ask for BYTES from element `first` on to come into the L2 cache."""
    if GRID > 1:
        lane = tl.arange(0, 256)
        at = (ptr + first).to(tl.int64) + lane * (BYTES // 256)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [at, tl.full([256], BYTES // 256, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _fetch_tiles(
    ptr, tile, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TILE_N: tl.constexpr,
    GRID: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Fetch the first MOST tiles of a program of a weight (OUTPUTS, CHANNELS)."""
    BYTES: tl.constexpr = TILE_N * CHANNELS * 2
    if BYTES % 4096 == 0:
        for i in tl.static_range(MOST):
            if (tile + i * GRID + 1) * TILE_N <= OUTPUTS:
                _fetch(ptr, (tile + i * GRID).to(tl.int64) * (TILE_N * CHANNELS), BYTES, GRID)


@triton.jit
def _weights(
    ptr, tile, chunk, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):  # fmt: skip
    """Load (TILE_N, TILE_K) of a weight (OUTPUTS, CHANNELS), 0 outside of it."""
    output = tile * TILE_N + tl.arange(0, TILE_N)
    channel = chunk * TILE_K + tl.arange(0, TILE_K)
    at = ptr + output.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    inside = (output < OUTPUTS)[:, None] & (channel < CHANNELS)[None, :]
    return tl.load(tl.multiple_of(at, [16, 16]), mask=inside, other=0.0)


@triton.jit
def _dot_rows(weight, x):
    """Return (ROWS, TILE_N) float32 of weight (TILE_N, TILE_K) and x (ROWS, TILE_K)."""
    return tl.sum(weight.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :], 2)


@triton.jit
def _store_rows(
    ptr, y, tile, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    row = tl.arange(0, ROWS)
    output = tile * TILE_N + tl.arange(0, TILE_N)
    at = ptr + row[:, None] * OUTPUTS + output[None, :]
    inside = (output < OUTPUTS)[None, :] & (row >= 0)[:, None]
    tl.store(at, y.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normed(
    residual_ptr, x_ptr, weight_ptr, new_residual_ptr, has_x, eps,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, TILE_E: tl.constexpr,
):  # fmt: skip
    """Return the norm of residual + x (ROWS, TILE_E); program 0 stores the sum."""
    dtype = x_ptr.dtype.element_ty
    row, column = tl.arange(0, ROWS), tl.arange(0, TILE_E)
    inside = (row >= 0)[:, None] & (column < HIDDEN)[None, :]
    at = row[:, None] * HIDDEN + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside & has_x, other=0.0, cache_modifier=".cg")
    total = (total + x.to(tl.float32)).to(dtype)
    if tl.program_id(0) == 0:
        tl.store(new_residual_ptr + at, total, mask=inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 1) / HIDDEN + eps)
    return ((total * scale[:, None]).to(dtype).to(tl.float32) * weight[None, :]).to(dtype)


@triton.jit
def _product(
    weight, weight_ptr, x_ptr, y_ptr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """y = x weight^T from memory to memory; `weight` is the first tile, loaded before."""
    CHUNKS: tl.constexpr = (CHANNELS + TILE_K - 1) // TILE_K
    row, offset = tl.arange(0, ROWS), tl.arange(0, TILE_K)
    for tile in range(tl.program_id(0), (OUTPUTS + TILE_N - 1) // TILE_N, GRID):
        acc = tl.zeros([ROWS, TILE_N, TILE_K], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            channel = chunk * TILE_K + offset
            inside = (row >= 0)[:, None] & (channel < CHANNELS)[None, :]
            x = tl.load(
                x_ptr + row[:, None] * CHANNELS + channel[None, :], mask=inside, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            if chunk + 1 < CHUNKS:
                following = _weights(weight_ptr, tile, chunk + 1, OUTPUTS, CHANNELS, TILE_N, TILE_K)
            else:
                following = _weights(weight_ptr, tile + GRID, 0, OUTPUTS, CHANNELS, TILE_N, TILE_K)
            acc += weight.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
            weight = following
        _store_rows(y_ptr, tl.sum(acc, 2), tile, OUTPUTS, ROWS, TILE_N)


@triton.jit
def _head_halves(
    ptr, norm_ptr, cos, sin, inside, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """Return the halves (heads, D / 2) of heads at `ptr` (heads, 1), normalised and rotated."""
    HALF: tl.constexpr = HEAD_DIM // 2
    pair = tl.arange(0, HALF)
    mask = inside & (pair >= 0)[None, :]
    dtype = ptr.dtype.element_ty
    at = ptr + pair[None, :]
    first = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)
        scale = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)[:, None]
        first *= scale * tl.load(norm_ptr + pair).to(tl.float32)[None, :]
        second *= scale * tl.load(norm_ptr + HALF + pair).to(tl.float32)[None, :]
    turned = first * cos[None, :] - second * sin[None, :]
    return turned.to(dtype), (second * cos[None, :] + first * sin[None, :]).to(dtype)


@triton.jit
def _keys(
    cache_ptr, table_ptr, start, end, stride_b, stride_p,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load channels FIRST ... FIRST + WIDTH of keys (or values) start ... start + TILE < end."""
    key, channel = start + tl.arange(0, TILE), FIRST + tl.arange(0, WIDTH)
    block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=0).to(tl.int64)
    row = cache_ptr + block * stride_b + (key % BLOCK_SIZE) * stride_p
    at = tl.multiple_of(row[:, None] + channel[None, :], [16, 16])
    return tl.load(at, mask=(key < end)[:, None] & (channel >= 0)[None, :], other=0.0)


@triton.jit
def _keys_and_values(
    k_cache, v_cache, blocks_ptr, start, end, at_head, stride_b, stride_p,
    HALF: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load keys start ... start + TILE < end in two halves of their channels, and their values."""
    k = k_cache + at_head
    first = _keys(k, blocks_ptr, start, end, stride_b, stride_p, 0, HALF, TILE, BLOCK_SIZE)
    second = _keys(k, blocks_ptr, start, end, stride_b, stride_p, HALF, HALF, TILE, BLOCK_SIZE)
    v = _keys(
        v_cache + at_head, blocks_ptr, start, end, stride_b, stride_p, 0, 2 * HALF, TILE,
        BLOCK_SIZE,
    )  # fmt: skip
    return first, second, v


@triton.jit
def _span_of(
    item, seqlens_ptr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, SPLITS: tl.constexpr,
    SPAN_STEP: tl.constexpr,
):  # fmt: skip
    """Return row, key head, first key and end of an item's span (empty past the last item), and
    how many keys its row has."""
    last: tl.constexpr = ROWS * KV_HEADS * SPLITS - 1
    inside = tl.minimum(item, last)
    split, head = inside % SPLITS, inside // SPLITS % KV_HEADS
    row = inside // SPLITS // KV_HEADS
    length = tl.load(seqlens_ptr + row)
    span = tl.cdiv(tl.cdiv(length, SPLITS), SPAN_STEP) * SPAN_STEP
    begin = split * span
    end = tl.where(item > last, 0, tl.minimum(begin + span, length))
    return row, head, begin, end, length


@triton.jit
def _decode_layers_kernel(
    table_ptr, start_ptr, residual_ptr, x_ptr, qkv_ptr, part_ptr, state_ptr, o_ptr, act_ptr,
    meeting_ptr, cos_ptr, sin_ptr, slot_ptr, seqlens_ptr, block_table_ptr,
    num_layers, stride_table, stride_cos, stride_sin, stride_b, stride_p, stride_h,
    eps, qk_eps, logit_scale,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, TILE_E: tl.constexpr, INNER: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
    HAS_QK_NORM: tl.constexpr, HAS_QKV_BIAS: tl.constexpr,
    QKV_N: tl.constexpr, O_N: tl.constexpr, O_K: tl.constexpr, GATE_N: tl.constexpr,
    DOWN_N: tl.constexpr, DOWN_K: tl.constexpr,
    TILE_KEYS: tl.constexpr, SPAN_STEP: tl.constexpr, GROUP: tl.constexpr, FIELDS: tl.constexpr,
    GRID: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    G: tl.constexpr = Q_HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    QKV: tl.constexpr = HEADS * HEAD_DIM
    O_WIDTH: tl.constexpr = Q_HEADS * HEAD_DIM

    pair = tl.arange(0, HALF)
    group = tl.arange(0, GROUP)
    channel = tl.arange(0, HEAD_DIM)
    key_offset = tl.arange(0, TILE_KEYS)
    # Which keys this program attends to first, in every layer.
    my_row, my_head, my_begin, my_end, my_length = _span_of(
        pid, seqlens_ptr, ROWS, KV_HEADS, SPLITS, SPAN_STEP
    )

    for layer in range(num_layers):
        fields = table_ptr + layer * FIELDS
        weight_type = tl.pointer_type(dtype)
        attention_norm = tl.load(fields).to(weight_type)
        qkv_weight = tl.load(fields + 1).to(weight_type)
        qkv_bias = tl.load(fields + 2).to(weight_type)
        q_norm = tl.load(fields + 3).to(weight_type)
        k_norm = tl.load(fields + 4).to(weight_type)
        o_weight = tl.load(fields + 5).to(weight_type)
        mlp_norm = tl.load(fields + 6).to(weight_type)
        gate_weight = tl.load(fields + 7).to(weight_type)
        down_weight = tl.load(fields + 8).to(weight_type)
        k_cache = tl.load(fields + 9).to(weight_type)
        v_cache = tl.load(fields + 10).to(weight_type)
        up_weight = gate_weight + INNER * HIDDEN
        met = layer * 6

        # 1. norm and qkv product
        weight = _weights(qkv_weight, pid, 0, QKV, HIDDEN, QKV_N, TILE_E)
        _fetch_tiles(qkv_weight, pid + GRID, QKV, HIDDEN, QKV_N, GRID, 2)
        _fetch_tiles(o_weight, pid, HIDDEN, O_WIDTH, O_N, GRID, 1)
        _meet(meeting_ptr, met + 1, GRID)
        source = residual_ptr
        if layer == 0:
            source = start_ptr
        x = _normed(
            source, x_ptr, attention_norm, residual_ptr + ROWS * HIDDEN, layer > 0, eps,
            ROWS, HIDDEN, TILE_E,
        )  # fmt: skip
        for tile in range(pid, (QKV + QKV_N - 1) // QKV_N, GRID):
            following = _weights(qkv_weight, tile + GRID, 0, QKV, HIDDEN, QKV_N, TILE_E)
            y = _dot_rows(weight, x)
            if HAS_QKV_BIAS:
                output = tile * QKV_N + tl.arange(0, QKV_N)
                bias = tl.load(qkv_bias + output, mask=output < QKV, other=0.0)
                y += bias.to(tl.float32)[None, :]
            _store_rows(qkv_ptr, y, tile, QKV, ROWS, QKV_N)
            weight = following

        # 2. rotation, write, attention over a span of keys
        row, head, begin, end, length = my_row, my_head, my_begin, my_end, my_length
        k_first, k_second, v = _keys_and_values(
            k_cache, v_cache, block_table_ptr + row.to(tl.int64) * stride_table, begin,
            tl.minimum(end, length - 1), head * stride_h, stride_b, stride_p,
            HALF, TILE_KEYS, BLOCK_SIZE,
        )  # fmt: skip
        _fetch_tiles(gate_weight, pid, INNER, HIDDEN, GATE_N, GRID, 3)
        _fetch_tiles(up_weight, pid, INNER, HIDDEN, GATE_N, GRID, 3)
        _meet(meeting_ptr, met + 2, GRID)
        for item in range(pid, ROWS * KV_HEADS * SPLITS, GRID):
            old_end = tl.minimum(end, length - 1)  # the newest key is in no cache yet
            blocks_ptr = block_table_ptr + row.to(tl.int64) * stride_table
            cos = tl.load(cos_ptr + row * stride_cos + pair)
            sin = tl.load(sin_ptr + row * stride_sin + pair)
            heads_ptr = qkv_ptr + row * QKV
            q_first, q_second = _head_halves(
                heads_ptr + ((head * G + group) * HEAD_DIM)[:, None], q_norm, cos, sin,
                (group < G)[:, None], qk_eps, HEAD_DIM, HAS_QK_NORM,
            )  # fmt: skip
            # One head, in the first of GROUP rows; the others are 0.
            new_first, new_second = _head_halves(
                heads_ptr + ((Q_HEADS + head) * HEAD_DIM + group * 0)[:, None], k_norm, cos, sin,
                (group == 0)[:, None], qk_eps, HEAD_DIM, HAS_QK_NORM,
            )  # fmt: skip
            new_first = tl.sum(new_first.to(tl.float32), 0).to(dtype)
            new_second = tl.sum(new_second.to(tl.float32), 0).to(dtype)
            new_v = tl.load(
                heads_ptr + (Q_HEADS + KV_HEADS + head) * HEAD_DIM + channel, cache_modifier=".cg"
            )
            slot = tl.load(slot_ptr + row)
            if (begin < end) & (end == length) & (slot >= 0):
                place = slot // BLOCK_SIZE * stride_b + slot % BLOCK_SIZE * stride_p
                place += head * stride_h
                tl.store(k_cache + place + pair, new_first)
                tl.store(k_cache + place + HALF + pair, new_second)
                tl.store(v_cache + place + channel, new_v)
            m = tl.full([GROUP], float("-inf"), tl.float32)
            total = tl.zeros([GROUP], tl.float32)
            acc = tl.zeros([GROUP, HEAD_DIM], tl.float32)
            for start in range(begin, end, TILE_KEYS):
                key = start + key_offset
                is_new = (key == length - 1)[:, None]
                k_1 = tl.where(is_new, new_first[None, :], k_first)
                k_2 = tl.where(is_new, new_second[None, :], k_second)
                values = tl.where(is_new, new_v[None, :], v)
                k_first, k_second, v = _keys_and_values(
                    k_cache, v_cache, blocks_ptr, start + TILE_KEYS, old_end, head * stride_h,
                    stride_b, stride_p, HALF, TILE_KEYS, BLOCK_SIZE,
                )  # fmt: skip
                s = tl.dot(q_first, tl.trans(k_1))
                s = tl.dot(q_second, tl.trans(k_2), s) * logit_scale
                s = tl.where((key < end)[None, :], s, float("-inf"))
                new_m = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - new_m[:, None])
                fade = tl.exp2(m - new_m)
                total = total * fade + tl.sum(p, 1)
                acc = tl.dot(p.to(dtype), values, acc * fade[:, None])
                m = new_m
            at = item * GROUP + group
            tl.store(
                part_ptr + (at * HEAD_DIM)[:, None] + channel[None, :], acc,
                mask=(group < G)[:, None] & (channel >= 0)[None, :],
            )  # fmt: skip
            tl.store(state_ptr + at * 2, m)
            tl.store(state_ptr + at * 2 + 1, total)
            row, head, begin, end, length = _span_of(
                item + GRID, seqlens_ptr, ROWS, KV_HEADS, SPLITS, SPAN_STEP
            )
            k_first, k_second, v = _keys_and_values(
                k_cache, v_cache, block_table_ptr + row.to(tl.int64) * stride_table, begin,
                tl.minimum(end, length - 1), head * stride_h, stride_b, stride_p,
                HALF, TILE_KEYS, BLOCK_SIZE,
            )  # fmt: skip

        # 3. the spans of one head put together
        weight = _weights(o_weight, pid, 0, HIDDEN, O_WIDTH, O_N, O_K)
        _fetch_tiles(down_weight, pid, HIDDEN, INNER, DOWN_N, GRID, 1)
        _meet(meeting_ptr, met + 3, GRID)
        for one in range(pid, ROWS * Q_HEADS, GRID):
            q_head, its_row = one % Q_HEADS, one // Q_HEADS
            number = tl.arange(0, SPLITS_PADDED)
            there = number < SPLITS
            first = (its_row * KV_HEADS + q_head // G) * SPLITS + number
            at = first * GROUP + q_head % G
            m = tl.load(state_ptr + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            total = tl.load(state_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            parts = tl.load(
                part_ptr + (at * HEAD_DIM)[:, None] + channel[None, :],
                mask=(there & (total > 0))[:, None] & (channel >= 0)[None, :], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            largest = tl.max(m, 0)
            share = tl.where(total > 0, tl.exp2(m - largest), 0.0)
            whole = tl.sum(share * total, 0)
            o = tl.sum(parts * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
            tl.store(o_ptr + its_row * O_WIDTH + q_head * HEAD_DIM + channel, o.to(dtype))

        # 4. o product
        _meet(meeting_ptr, met + 4, GRID)
        _product(weight, o_weight, o_ptr, x_ptr, HIDDEN, O_WIDTH, ROWS, O_N, O_K, GRID)

        # 5. norm, gate-up product, activation
        gate = _weights(gate_weight, pid, 0, INNER, HIDDEN, GATE_N, TILE_E)
        up = _weights(up_weight, pid, 0, INNER, HIDDEN, GATE_N, TILE_E)
        if layer + 1 < num_layers:
            next_qkv = tl.load(fields + FIELDS + 1).to(weight_type)
            _fetch_tiles(next_qkv, pid, QKV, HIDDEN, QKV_N, GRID, 1)
        _meet(meeting_ptr, met + 5, GRID)
        x = _normed(
            residual_ptr + ROWS * HIDDEN, x_ptr, mlp_norm, residual_ptr, layer >= 0, eps,
            ROWS, HIDDEN, TILE_E,
        )  # fmt: skip
        for tile in range(pid, (INNER + GATE_N - 1) // GATE_N, GRID):
            next_gate = _weights(gate_weight, tile + GRID, 0, INNER, HIDDEN, GATE_N, TILE_E)
            next_up = _weights(up_weight, tile + GRID, 0, INNER, HIDDEN, GATE_N, TILE_E)
            g = _dot_rows(gate, x).to(dtype).to(tl.float32)
            u = _dot_rows(up, x).to(dtype).to(tl.float32)
            activated = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
            _store_rows(act_ptr, activated * u, tile, INNER, ROWS, GATE_N)
            gate, up = next_gate, next_up

        # 6. down product
        weight = _weights(down_weight, pid, 0, HIDDEN, INNER, DOWN_N, DOWN_K)
        _meet(meeting_ptr, met + 6, GRID)
        _product(weight, down_weight, act_ptr, x_ptr, HIDDEN, INNER, ROWS, DOWN_N, DOWN_K, GRID)

    if GRID > 1:
        # The last to leave makes the counters ready for the next launch: all have met by then.
        tl.debug_barrier()
        if tl.atomic_add(meeting_ptr + 1, 1, sem="acq_rel", scope="gpu") == GRID - 1:
            tl.store(meeting_ptr, 0)
            tl.store(meeting_ptr + 1, 0)


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
    """How the products of a step are cut, see `cut_of`: tiles of outputs, and of channels."""

    qkv_n: int
    o_n: int
    o_k: int
    gate_n: int
    down_n: int
    down_k: int


def _rounds(outputs: int, tile: int, grid: int) -> int:
    return triton.cdiv(triton.cdiv(outputs, tile), grid) * tile


def _tile_n(outputs: int, channels: int, grid: int, most: int) -> int:
    """Return the tile, of at most `most` weights, with which the busiest program has least."""
    widest = max(1, most // triton.next_power_of_2(channels))
    tiles = [1 << i for i in range(widest.bit_length())]
    return min(reversed(tiles), key=lambda tile: _rounds(outputs, tile, grid))


def cut_of(shape: Shape, rows: int, grid: int) -> Cut:
    """Return the tiles of a step of `rows` rows on `grid` programs.

    Products after a norm take all channels of an output at once; the others add up (rows, tile)
    sums in float32, which bounds their tiles.
    """
    qkv = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    most = max(1, SLAB // max(rows, 2))

    def narrow(channels: int) -> tuple[int, int]:
        tile_k = min(1024, triton.next_power_of_2(channels))
        return _tile_n(shape.hidden, tile_k, grid, most), tile_k

    o_n, o_k = narrow(shape.num_q_heads * shape.head_dim)
    down_n, down_k = narrow(shape.inner)
    return Cut(
        qkv_n=_tile_n(qkv, shape.hidden, grid, 2 * SLAB // max(1, rows // 2)),
        o_n=o_n, o_k=o_k,
        gate_n=_tile_n(shape.inner, shape.hidden, grid, SLAB // 2),
        down_n=down_n, down_k=down_k,
    )  # fmt: skip


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
    if shape.hidden % 8 or shape.inner % 8 or shape.hidden > 8192:
        return (
            "hidden and inner size must be multiples of 8, hidden at most 8192, "
            f"got {shape.hidden} and {shape.inner}"
        )
    return None


class DecodeLayers:
    """The layers of a model, ready to be run for a fixed number of rows.

    Args:
        shape: what all layers have in common.
        layers: of each layer its tensors, contiguous: attention norm, qkv weight, qkv bias, q norm,
            k norm, o weight, mlp norm, gate-up weight, down weight, k_cache, v_cache; None where
            there is none.
        rows: of a step, 1, 2 or 4.
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
        self._o, self._act = buffer(rows, width), buffer(rows, shape.inner)
        self._meeting = buffer(2, like=torch.int32)
        self.cut = cut_of(shape, rows, grid)

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
        shape, cut = self.shape, self.cut
        scale = shape.softmax_scale * LOG2E
        _decode_layers_kernel[(self.grid,)](
            self._table, x, self.residual, self.x, self._qkv, self._parts, self._states, self._o,
            self._act, self._meeting, cos, sin, slot_mapping, seqlens_k, block_table,
            len(self._layers), block_table.stride(0), cos.stride(0), sin.stride(0),
            *self._cache_strides, shape.eps, shape.qk_eps, scale,
            ROWS=self.rows, HIDDEN=shape.hidden, TILE_E=triton.next_power_of_2(shape.hidden),
            INNER=shape.inner, Q_HEADS=shape.num_q_heads, KV_HEADS=shape.num_kv_heads,
            HEAD_DIM=shape.head_dim, BLOCK_SIZE=self._block_size, SPLITS=self.splits,
            SPLITS_PADDED=triton.next_power_of_2(self.splits), HAS_QK_NORM=shape.has_qk_norm,
            HAS_QKV_BIAS=shape.has_qkv_bias, QKV_N=cut.qkv_n, O_N=cut.o_n, O_K=cut.o_k,
            GATE_N=cut.gate_n, DOWN_N=cut.down_n, DOWN_K=cut.down_k, TILE_KEYS=TILE_KEYS,
            SPAN_STEP=SPAN_STEP, GROUP=GROUP, FIELDS=self.FIELDS, GRID=self.grid,
            num_warps=NUM_WARPS, num_stages=1,
        )  # fmt: skip
        return self.x, self.residual[0]
