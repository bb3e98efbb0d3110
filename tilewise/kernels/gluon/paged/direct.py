"""Paged attention of short runs over 8-bit caches where mma.sync is the product: from memory
straight to registers.

What: o = softmax(s) v and lse of at most 16 rows (new tokens x heads of a group) of a sequence.
Grid: (pairs * Hk / 4,), heads fastest; a pair is a sequence and a split of its keys, read from a
plan.
One CTA: four warps, each of one head. A warp loads the bytes of its own keys and values in the
layout of a left operand of mma.sync, a tile before it multiplies them: in the loop nothing goes
through shared memory, and no warp waits for another.
Traffic: K, V and their scales once; q once a split; partials as in `triton.paged.decode`.
Numerics: those of `decode`, but for e4m3, which is widened by its bits to a float16 of 2^-8 of its
value, which the scales of logits and of sums undo.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from tilewise.kernels.gluon.device.byte_operands import (
    E4M3,
    HEADS,
    INT8,
    probabilities_operand,
    sum_layout,
    value_order,
    values_operand,
    word_order,
)
from tilewise.kernels.gluon.device.warpgroup import exp2, reciprocal
from tilewise.kernels.gluon.paged.decode import (
    FIELDS,
    LOWEST,
    clear_rows,
    finish_rows,
    queries_operand,
)
from tilewise.kernels.gluon.visible import first_key_of_run, full_keys_of_run, inside_window, key_at

KEYS = gl.constexpr(16)  # of a part of a tile, which lies in one block: rows of an instruction
WORD = gl.constexpr(4)  # channels
UNIT = gl.constexpr(4)  # words of 16 bytes, in which strides of caches are counted
# Four bytes of a word: the float16 of bytes 0 and 2 in one register, of 1 and 3 in another. Shifts
# to the left may run beside the logic, as multiplications.
_WIDEN_E4M3 = """
shl.b32 a, {0}, 7; shl.b32 c, {0}, 8; shr.b32 b, {0}, 1;
and.b32 a, a, 0x3F803F80; and.b32 b, b, 0x3F803F80;
lop3.b32 {1}, c, 0x80008000, a, 0xEA; lop3.b32 {2}, {0}, 0x80008000, b, 0xEA;
"""
_WIDEN_INT8 = """
xor.b32 a, {0}, 0x80808080;
prmt.b32 b, a, 0x64646464, 0x4341; prmt.b32 a, a, 0x64646464, 0x4240;
mov.b32 c, 0x64806480;
sub.rn.f16x2 {1}, a, c; sub.rn.f16x2 {2}, b, c;
"""


def _word(widen: str) -> gl.constexpr:
    """Return the assembly of one word to its four numbers."""
    body = widen.format("$4", "x", "y")
    return gl.constexpr(
        f"{{ .reg .b32 a, b, c, x, y; {body} mov.b32 {{$0, $2}}, x; mov.b32 {{$1, $3}}, y; }}"
    )


def _pair(widen: str) -> gl.constexpr:
    """Return the assembly of a word of each of two keys to four registers of (even key, odd
    key)."""
    body = widen.format("x", "$0", "$1") + widen.format("y", "$2", "$3")
    return gl.constexpr(
        "{ .reg .b32 a, b, c, x, y; "
        f"prmt.b32 x, $4, $5, 0x5410; prmt.b32 y, $4, $5, 0x7632; {body} }}"
    )


_WORD_E4M3, _WORD_INT8 = _word(_WIDEN_E4M3), _word(_WIDEN_INT8)
_PAIR_E4M3, _PAIR_INT8 = _pair(_WIDEN_E4M3), _pair(_WIDEN_INT8)


class Direct(NamedTuple):
    """Constexpr: the sizes and features of a call that change the kernel's code; `direct_plan`
    makes it."""

    num_kv_heads: int
    group: int
    rows: int  # 8 or 16: new tokens x group, padded
    width: int  # channels, 64 or 128
    parts: int  # of KEYS keys, of a tile
    keys: int  # of a tile
    block: int  # tokens of a cache block, a multiple of KEYS
    kind: int  # INT8 or E4M3
    window: bool
    sinks: bool
    alone: bool  # no sequence has a second split
    ahead: bool  # the next tile is loaded before this one is multiplied, not after
    in_words: bool = True  # keys are multiplied in `word_order`


@gluon.constexpr_function
def key_words_layout(width):
    """Return the register layout in which four warps, a head each, load the words of KEYS keys of
    `width` channels, (HEADS * KEYS, width / WORD): a lane takes 16 bytes of two keys, or twice."""
    wide = [[0, 16]] if width == 128 else []
    registers = [[0, 1], [0, 2], *wide, [8, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers,
        lanes,
        [[KEYS.value, 0], [2 * KEYS.value, 0]],
        [],
        [HEADS.value * KEYS.value, width // WORD.value],
    )


@gluon.constexpr_function
def value_words_layout(width):
    """Return the register layout in which four warps, a head each, load the words of KEYS values of
    `width` channels, (HEADS * KEYS, width / WORD): a lane takes an eighth of four of them."""
    run = width // 32  # neighbouring words of a lane
    registers = [[0, 1 << bit] for bit in range(run.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return gl.DistributedLinearLayout(
        [*registers, [1, 0], [8, 0]],
        lanes,
        [[KEYS.value, 0], [2 * KEYS.value, 0]],
        [],
        [HEADS.value * KEYS.value, width // WORD.value],
    )


@gluon.jit
def _joined(a, b, c, d):
    """Return (..., 4 n) of four tensors (..., n): element 4 i + j is element i of the j-th one."""
    x = gl.join(gl.join(a, c), gl.join(b, d))
    return x.reshape([x.shape[0], x.shape[1] * 4])


@gluon.jit
def key_words_operand(x, KIND: gl.constexpr):
    """Return the left operand (HEADS, KEYS, width) of k q^T from words (HEADS * KEYS, width / 4);
    of e4m3 2^-8 of it."""
    width: gl.constexpr = x.shape[1] * WORD
    asm: gl.constexpr = _WORD_INT8 if KIND == INT8 else _WORD_E4M3
    a, b, c, d = gl.inline_asm_elementwise(
        asm,
        "=h,=h,=h,=h,r",
        [x],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    keys = word_order(_joined(a, b, c, d)).reshape([HEADS, KEYS, width])
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(), 2)
    return gl.convert_layout(keys, layout, assert_trivial=True)


@gluon.jit
def value_word_pairs(x, KIND: gl.constexpr):
    """Return words of values (HEADS * KEYS, width / 4) as pairs of float16 of two neighbouring
    keys, int32 (HEADS * KEYS / 2, width), as `byte_operands.value_pairs`; of e4m3 2^-8 of them."""
    even, odd = gl.split(x.reshape([x.shape[0] // 2, 2, x.shape[1]]).permute((0, 2, 1)))
    asm: gl.constexpr = _PAIR_INT8 if KIND == INT8 else _PAIR_E4M3
    a, b, c, d = gl.inline_asm_elementwise(
        asm,
        "=r,=r,=r,=r,r,r",
        [even, odd],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return _joined(a, b, c, d)


@gluon.jit
def _block_ids(table, tile, num_blocks, low, high, shape: gl.constexpr):
    """Return the ids of the blocks of the parts of a tile, a tuple of int64.

    Columns of the table outside low ... high - 1 are not read; an invalid id becomes that of the
    last block.
    """
    PARTS: gl.constexpr = shape.parts
    blocks = ()
    for part in gl.static_range(PARTS):
        column = (tile * shape.keys + part * KEYS) // shape.block
        column = gl.minimum(gl.maximum(column, low), high - 1)
        block = gl.load(table + column).to(gl.uint32, bitcast=True)
        block = gl.minimum(block, (num_blocks - 1).to(gl.uint32)).to(gl.int64)
        blocks = blocks + (block,)  # noqa: RUF005
    return blocks


@gluon.jit
def _load_words(start, stride_b, stride_p, lanes, tile, blocks, shape: gl.constexpr):
    """Return the words of the parts of a tile, a tuple; lanes: the offset of each word from a
    part's first key."""
    PARTS: gl.constexpr = shape.parts
    words = ()
    for part in gl.static_range(PARTS):
        slot = (tile * shape.keys + part * KEYS) % shape.block
        first = start + (blocks[part] * stride_b + slot * stride_p) * UNIT
        x = gl.load(first + lanes, eviction_policy="evict_first")
        words = words + (x,)  # noqa: RUF005
    return words


@gluon.jit
def _load_scales(start, stride_b, stride_p, lanes, tile, blocks, shape: gl.constexpr):
    """Return the scales (HEADS, KEYS) of the parts of a tile, a tuple."""
    PARTS: gl.constexpr = shape.parts
    scales = ()
    for part in gl.static_range(PARTS):
        slot = (tile * shape.keys + part * KEYS) % shape.block
        x = gl.load(start + (blocks[part] * stride_b + slot * stride_p) + lanes)
        scales = scales + (x,)  # noqa: RUF005
    return scales


@gluon.jit
def _pin_loads():
    """Keep loads that stand before this in the program before it in machine code, too.

    The assembler would move them to the end of the loop, right before they are needed.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [HEADS], [0])
    thread = gl.arange(0, 32 * HEADS, lanes)
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r",
        [thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fold(
    k,
    v,
    k_scale,
    v_scale,
    table,
    q,
    stride_qt,
    stride_qh,
    scale_log2,
    start,
    first,
    last,
    run,
    seqlen_k,
    group,
    num_blocks,
    window_left,
    strides,
    shape: gl.constexpr,
):
    """Attend over tiles first ... last - 1 of a sequence for a group of key heads, and return sums
    (HEADS, width, rows) in the order of `value_order`, the sums of p (HEADS, rows) and the largest
    logits."""
    kb, kp, kh, vb, vp, vh, ksb, ksp, ksh, vsb, vsp, vsh = strides
    MMA: gl.constexpr = sum_layout()
    W: gl.constexpr = shape.width
    R: gl.constexpr = shape.rows
    H: gl.constexpr = HEADS
    N: gl.constexpr = KEYS
    PARTS: gl.constexpr = shape.parts
    KL: gl.constexpr = key_words_layout(W)
    VL: gl.constexpr = value_words_layout(W)
    rows: gl.constexpr = gl.SliceLayout(1, MMA)  # (HEADS, R): head, row
    keys: gl.constexpr = gl.SliceLayout(2, MMA)  # (HEADS, KEYS): head, key
    heads: gl.constexpr = gl.SliceLayout(1, keys)  # (HEADS,)
    k_row = gl.arange(0, H * N, gl.SliceLayout(1, KL))
    v_row = gl.arange(0, H * N, gl.SliceLayout(1, VL))
    k_at = (k_row % N * kp + (group * H + k_row // N) * kh) * UNIT
    v_at = (v_row % N * vp + (group * H + v_row // N) * vh) * UNIT
    k_at = gl.expand_dims(k_at, 1) + gl.expand_dims(gl.arange(0, W // 4, gl.SliceLayout(0, KL)), 0)
    v_at = gl.expand_dims(v_at, 1) + gl.expand_dims(gl.arange(0, W // 4, gl.SliceLayout(0, VL)), 0)
    head = gl.expand_dims(group * H + gl.arange(0, H, heads), 1)
    within = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, keys)), 0)
    ks_at = within * ksp + head * ksh
    vs_at = within * vsp + head * vsh
    row = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(0, rows)), 0)
    last_key = gl.expand_dims(key_at(row // shape.group, run, seqlen_k), 1)  # that each row sees
    key_lo = first_key_of_run(seqlen_k, run, window_left, shape)
    low = key_lo // shape.block
    high = gl.maximum((seqlen_k + shape.block - 1) // shape.block, low + 1)
    low_edge, high_edge = full_keys_of_run(key_lo, seqlen_k, run, shape)
    acc = gl.zeros([H, W, R], gl.float32, MMA)
    sums = gl.zeros([H, N, R], gl.float32, MMA)  # of p, by the lane that made it
    m = gl.full([H, R], LOWEST, gl.float32, rows)
    unit = gl.full([H], 0.0, gl.float32, heads)  # the largest scale of a value so far
    end = gl.maximum(last - 1, 0)
    at = gl.minimum(first, end)
    blocks = _block_ids(table, at, num_blocks, low, high, shape)
    k_words = _load_words(k, kb, kp, k_at, at, blocks, shape)
    k_scales = _load_scales(k_scale, ksb, ksp, ks_at, at, blocks, shape)
    v_words = _load_words(v, vb, vp, v_at, at, blocks, shape)
    v_scales = _load_scales(v_scale, vsb, vsp, vs_at, at, blocks, shape)
    blocks = _block_ids(table, gl.minimum(first + 1, end), num_blocks, low, high, shape)
    operand, power, _ = queries_operand(q, start, run, group, stride_qt, stride_qh, shape)
    factor: gl.constexpr = 256.0 if shape.kind == E4M3 else 1.0
    row_scale = gl.expand_dims(power * (scale_log2 * factor), 1)
    for tile in range(first, last):
        # The last tile is loaded twice, the second time from L1 or L2.
        following = gl.minimum(tile + 1, end)
        if shape.ahead:
            k_next = _load_words(k, kb, kp, k_at, following, blocks, shape)
            v_next = _load_words(v, vb, vp, v_at, following, blocks, shape)
            _pin_loads()
        logits = ()
        for part in gl.static_range(PARTS):
            zeros = gl.zeros([H, N, R], gl.float32, MMA)
            s = mma_v2(key_words_operand(k_words[part], shape.kind), operand, zeros) * row_scale
            logits = logits + (s * gl.expand_dims(k_scales[part], 2),)  # noqa: RUF005
        if not shape.ahead:
            k_next = _load_words(k, kb, kp, k_at, following, blocks, shape)
            _pin_loads()
        k_scales = _load_scales(k_scale, ksb, ksp, ks_at, following, blocks, shape)
        first_key = tile * shape.keys
        if (first_key < low_edge) | (first_key + shape.keys > high_edge):
            masked = ()
            owners = ()
            for part in gl.static_range(PARTS):
                key = first_key + part * N + within
                owned = (key >= key_lo) & (key < seqlen_k)
                place = gl.expand_dims(key, 2)
                visible = gl.expand_dims(owned, 2) & (place <= last_key)
                if shape.window:
                    visible = visible & inside_window(place, last_key, window_left)
                masked = masked + (gl.where(visible, logits[part], float("-inf")),)  # noqa: RUF005
                # Slots without an owner may be NaN, and 0 * NaN is NaN.
                owners = owners + (gl.where(owned, v_scales[part], 0.0),)  # noqa: RUF005
            logits = masked
            v_scales = owners
        largest = logits[0]
        scale = v_scales[0]
        for part in gl.static_range(1, PARTS):
            largest = gl.maximum(largest, logits[part])
            scale = gl.maximum(scale, v_scales[part])
        m_new = gl.maximum(m, gl.max(largest, 1))
        alpha = gl.expand_dims(exp2(m - m_new), 1)
        m = m_new
        unit_new = gl.maximum(unit, gl.max(scale, 1))
        inverse = gl.where(unit_new > 0.0, reciprocal(unit_new), 0.0)
        ratio = gl.convert_layout(unit * inverse, gl.SliceLayout(1, rows))
        sums = sums * alpha
        alpha = alpha * gl.expand_dims(gl.expand_dims(ratio, 1), 1)
        unit = unit_new
        acc = acc * alpha
        for part in gl.static_range(PARTS):
            p = exp2(logits[part] - gl.expand_dims(m, 1))
            sums = sums + p
            p = p * gl.expand_dims(v_scales[part] * gl.expand_dims(inverse, 1), 2)
            values = values_operand(value_word_pairs(v_words[part], shape.kind))
            acc = mma_v2(values, probabilities_operand(p), acc)
        if not shape.ahead:
            v_next = _load_words(v, vb, vp, v_at, following, blocks, shape)
        v_scales = _load_scales(v_scale, vsb, vsp, vs_at, following, blocks, shape)
        k_words = k_next
        v_words = v_next
        blocks = _block_ids(table, gl.minimum(tile + 2, end), num_blocks, low, high, shape)
    acc = acc * gl.expand_dims(gl.expand_dims(unit * factor, 1), 2)
    return acc, gl.sum(sums, 1), m


@gluon.jit(
    do_not_specialize=[
        "stride_table",
        "num_seqs",
        "num_tokens",
        "num_blocks",
        "max_run",
        "num_pairs",
        "window_left",
    ]
)
def direct_decode_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    sinks,
    o,
    lse,
    part_o,
    part_lse,
    bounds,
    plan,
    block_table,
    cu_seqlens_q,
    stride_qt,
    stride_qh,
    stride_table,
    stride_kb,
    stride_kp,
    stride_kh,
    stride_vb,
    stride_vp,
    stride_vh,
    stride_ksb,
    stride_ksp,
    stride_ksh,
    stride_vsb,
    stride_vsp,
    stride_vsh,
    num_seqs,
    num_tokens,
    num_blocks,
    max_run,
    num_pairs,
    window_left,
    scale_log2,
    shape: gl.constexpr,
):
    """Compute o and lse of short runs of queries over a paged cache of 8 bits; a program has a
    split of a sequence's keys and four key heads. See the module's docstring.

    k, v: int32, words of four channels, with strides of blocks, slots and heads in units of 16
    bytes; plan: (pairs, FIELDS) int32 of `triton.paged.splits`; k_scale, v_scale: float32 with
    strides of blocks, slots and heads. o (T, Hq, D) and lse (Hq, T) are contiguous.
    """
    groups: gl.constexpr = shape.num_kv_heads // HEADS
    R: gl.constexpr = shape.rows
    group = gl.program_id(0) % groups
    pair = gl.program_id(0) // groups
    record = plan + pair * FIELDS
    seq = gl.load(record)
    start = gl.load(record + 1)
    run = gl.load(record + 2)
    seqlen_k = gl.load(record + 3)
    first = gl.load(record + 4)
    last = gl.load(record + 5)
    first_pair = gl.load(record + 6)
    num_splits = gl.load(record + 7)
    used = gl.minimum(gl.maximum(gl.load(cu_seqlens_q + num_seqs), 0), num_tokens)
    if num_splits > 0:
        strides = (
            stride_kb,
            stride_kp,
            stride_kh,
            stride_vb,
            stride_vp,
            stride_vh,
            stride_ksb,
            stride_ksp,
            stride_ksh,
            stride_vsb,
            stride_vsp,
            stride_vsh,
        )
        table = block_table + seq.to(gl.int64) * stride_table
        acc, l, m = _fold(
            k,
            v,
            k_scale,
            v_scale,
            table,
            q,
            stride_qt,
            stride_qh,
            scale_log2,
            start,
            first,
            last,
            run,
            seqlen_k,
            group,
            num_blocks,
            window_left,
            strides,
            shape,
        )
        if not shape.alone and (pair == first_pair) & (group == 0):
            gl.store(bounds + 2 * seq, first_pair)
            gl.store(bounds + 2 * seq + 1, num_splits)
        l = l.reshape([HEADS * R])
        m = m.reshape([HEADS * R])
        finish_rows(
            value_order(acc),
            l,
            l,
            m,
            sinks,
            o,
            lse,
            part_o,
            part_lse,
            pair,
            first_pair,
            num_splits,
            start,
            run,
            group,
            num_tokens,
            max_run,
            shape,
        )
    clear_rows(o, lse, used + pair, num_pairs, num_tokens, group, shape)
