"""Ask for what a step's one kernel will read, a meeting early: it comes to the L2 cache."""

from __future__ import annotations

import triton
import triton.language as tl

# The first thread of the second warp asks, as that of the first waits.
_ASK = tl.constexpr(
    """{
    .reg .pred asks; .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 asks, thread, 32;
    setp.gt.and.s32 asks, $2, 0, asks;
    @asks cp.async.bulk.prefetch.L2.global [$1], $2;
    mov.s32 $0, 0;
    }"""
)
_ASK_LINE = tl.constexpr("{ prefetch.global.L2 [$1]; mov.s32 $0, 0; }")


@triton.jit
def ask_weights(ptr, tile, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TILE_N: tl.constexpr):
    """Ask for the weights of a tile, which lie side by side, into the L2 cache; no load follows."""
    outputs = tl.maximum(tl.minimum(OUTPUTS - tile * TILE_N, TILE_N), 0)
    first = ptr + tl.minimum(tile * TILE_N, OUTPUTS - 1).to(tl.int64) * CHANNELS
    tl.inline_asm_elementwise(
        _ASK, "=r,l,r", [first.to(tl.int64), outputs * (CHANNELS * 2)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _ask_lines(address):
    """Ask for the lines of 128 bytes at addresses, int64, into the L2 cache."""
    tl.inline_asm_elementwise(
        _ASK_LINE, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def ask_head_weights(ptr, item, form: tl.constexpr):
    """Ask for what `_head_weights` loads."""
    N: tl.constexpr = form.o_part_n
    TILES: tl.constexpr = (form.hidden + N - 1) // N
    LINES: tl.constexpr = (form.group_padded * form.head_dim * 2 + 127) // 128  # of an output
    inside = tl.minimum(item, form.kv_heads * TILES - 1)
    head, tile = inside // TILES, inside % TILES
    one = tl.arange(0, N * LINES)
    output = tl.minimum(tile * N + one // LINES, form.hidden - 1)
    member: tl.constexpr = form.q_heads // form.kv_heads
    column = (
        tl.minimum(one % LINES * 64, member * form.head_dim - 1) + head * member * form.head_dim
    )
    at = ptr + output.to(tl.int64) * (form.q_heads * form.head_dim) + column
    _ask_lines(at.to(tl.int64))


@triton.jit
def ask_keys(
    k_cache, v_cache, blocks_ptr, begin, end, at_head, stride_b, stride_p, form: tl.constexpr
):
    """Ask for the first tile of keys begin ... end and their values."""
    LINES: tl.constexpr = (form.head_dim * 2 + 127) // 128
    one = tl.arange(0, form.tile_keys * LINES)
    key = tl.maximum(tl.minimum(begin + one // LINES, end - 1), 0)
    block = tl.load(blocks_ptr + key // form.block_size, mask=key < end, other=0).to(tl.int64)
    at = block * stride_b + key % form.block_size * stride_p + at_head + one % LINES * 64
    _ask_lines((k_cache + at).to(tl.int64))
    _ask_lines((v_cache + at).to(tl.int64))
