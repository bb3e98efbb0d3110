"""All layers of a Llama's decode step of one or two rows, in one kernel that stays on the device.

what     for every layer: norm, qkv product, rotation and write to the paged cache, attention over
         it, o product, norm, gate-up product, silu, down product; the residual stream in two terms
grid     (programs,), one a multiprocessor, all on the device at once: they walk through the layers
         together and meet after each phase at a counter in memory
program  of each product every GRID-th tile of outputs, for all rows; of attention one span of keys
         of one key head of one row
traffic  every weight, key and value once; what passes between programs through the L2 cache
numerics products summed in float32 in an order that depends on shapes alone; rounded where the
         kernels rounded that this one replaces

What a phase reads of weights and old keys is asked for between a program's arrival and the meeting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.early import await_previous, begin_next

# One thread waits: when all do, their loads keep the additions of others from the counter.
_WAIT = tl.constexpr(
    """{
    .reg .pred others, early; .reg .u32 thread; .reg .s32 seen;
    mov.u32 thread, %tid.x;
    setp.ne.u32 others, thread, 0;
    @others bra THERE;
    AGAIN: ld.acquire.gpu.global.s32 seen, [$1];
    setp.lt.s32 early, seen, $2;
    @early bra AGAIN;
    THERE: mov.s32 $0, 0;
    }"""
)


@triton.jit
def _arrive(meeting_ptr, GRID: tl.constexpr):
    """Say that this program is done with a phase.

    What is asked for ahead of the next phase comes after this: a release waits for loads, too.
    """
    if GRID > 1:
        tl.debug_barrier()
        tl.atomic_add(meeting_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _meet(meeting_ptr, count, GRID: tl.constexpr):
    """Wait until all programs have arrived `count` times; what they wrote before can be read."""
    if GRID > 1:
        tl.inline_asm_elementwise(
            _WAIT, "=r,l,r", [meeting_ptr.to(tl.int64), count * GRID], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def _weights(
    ptr, tile, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, TILE_N: tl.constexpr,
    RUNS: tl.constexpr,
):  # fmt: skip
    """Load TILE_N outputs of a weight (OUTPUTS, CHANNELS), 0 outside of it.

    Channels lie in RUNS of 256, (TILE_N, RUNS, 256): in this order a warp holds whole runs of its
    own outputs, so that a sum over channels stays within it.
    """
    run, lane = tl.arange(0, RUNS), tl.arange(0, 256)
    output = tile * TILE_N + tl.arange(0, TILE_N)
    channel = run[None, :, None] * 256 + lane[None, None, :]
    at = ptr + output.to(tl.int64)[:, None, None] * CHANNELS + channel
    inside = (output < OUTPUTS)[:, None, None] & (channel < CHANNELS)
    return tl.load(tl.multiple_of(at, [16, 16, 16]), mask=inside, other=0.0)


@triton.jit
def _row(ptr, CHANNELS: tl.constexpr, RUNS: tl.constexpr):
    """Load a row, (RUNS, 256)."""
    run, lane = tl.arange(0, RUNS), tl.arange(0, 256)
    channel = run[:, None] * 256 + lane[None, :]
    return tl.load(ptr + channel, mask=channel < CHANNELS, other=0.0, cache_modifier=".cg")


@triton.jit
def _dot(weight, x):
    """Return the products (TILE_N,) of weights (TILE_N, RUNS, 256) and a row (RUNS, 256).

    Only the row changes its layout: a row of three dimensions would have the weights change theirs.
    """
    return tl.sum(tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :, :], 1), 1)


@triton.jit
def _store_outputs(ptr, y, tile, OUTPUTS: tl.constexpr, TILE_N: tl.constexpr):
    output = tile * TILE_N + tl.arange(0, TILE_N)
    tl.store(ptr + output, y.to(ptr.dtype.element_ty), mask=output < OUTPUTS)


@triton.jit
def _normed_row(
    row, residual_ptr, x_ptr, weight, new_residual_ptr, has_x, eps,
    HIDDEN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Return the norm of residual + x, (RUNS, 256); program 0 stores the sum."""
    run, lane = tl.arange(0, RUNS), tl.arange(0, 256)
    column = run[:, None] * 256 + lane[None, :]
    inside = (column < HIDDEN) & has_x
    x = tl.load(x_ptr + row * HIDDEN + column, mask=inside, other=0.0, cache_modifier=".cg")
    return _added_and_normed(row, residual_ptr, x, weight, new_residual_ptr, eps, HIDDEN, RUNS)


@triton.jit
def _added_and_normed(
    row, residual_ptr, x, weight, new_residual_ptr, eps, HIDDEN: tl.constexpr, RUNS: tl.constexpr
):
    """Likewise of x (RUNS, 256) itself."""
    dtype = x.dtype
    run, lane = tl.arange(0, RUNS), tl.arange(0, 256)
    column = run[:, None] * 256 + lane[None, :]
    at = row * HIDDEN + column
    inside = column < HIDDEN
    total = tl.load(residual_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    total = (total + x.to(tl.float32)).to(dtype)
    if tl.program_id(0) == 0:
        tl.store(new_residual_ptr + at, total, mask=inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(tl.sum(total * total, 1), 0) / HIDDEN + eps)
    return ((total * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _normed(
    residual_ptr, x_ptr, weight, new_residual_ptr, has_x, eps,
    ROWS: tl.constexpr, HIDDEN: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Return the norms of both rows; where there is one, it twice."""
    first = _normed_row(0, residual_ptr, x_ptr, weight, new_residual_ptr, has_x, eps, HIDDEN, RUNS)
    second = first
    if ROWS > 1:
        second = _normed_row(
            1, residual_ptr, x_ptr, weight, new_residual_ptr, has_x, eps, HIDDEN, RUNS
        )
    return first, second


@triton.jit
def _product(
    weight, weight_ptr, x_ptr, y_ptr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, TILE_N: tl.constexpr, RUNS: tl.constexpr, GRID: tl.constexpr,
):  # fmt: skip
    """y = x weight^T from memory to memory; `weight` is the first tile, loaded before."""
    x = _row(x_ptr, CHANNELS, RUNS)
    other = x
    if ROWS > 1:
        other = _row(x_ptr + CHANNELS, CHANNELS, RUNS)
    for tile in range(tl.program_id(0), (OUTPUTS + TILE_N - 1) // TILE_N, GRID):
        following = _weights(weight_ptr, tile + GRID, OUTPUTS, CHANNELS, TILE_N, RUNS)
        _store_outputs(y_ptr, _dot(weight, x), tile, OUTPUTS, TILE_N)
        if ROWS > 1:
            _store_outputs(y_ptr + OUTPUTS, _dot(weight, other), tile, OUTPUTS, TILE_N)
        weight = following


@triton.jit
def _store_qkv(
    weight, x, bias_ptr, y_ptr, tile, OUTPUTS: tl.constexpr, TILE_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    y = _dot(weight, x)
    if HAS_BIAS:
        output = tile * TILE_N + tl.arange(0, TILE_N)
        y += tl.load(bias_ptr + output, mask=output < OUTPUTS, other=0.0).to(tl.float32)
    _store_outputs(y_ptr, y, tile, OUTPUTS, TILE_N)


@triton.jit
def _store_gated(gate, up, x, y_ptr, tile, OUTPUTS: tl.constexpr, TILE_N: tl.constexpr):
    dtype = y_ptr.dtype.element_ty
    g = _dot(gate, x).to(dtype).to(tl.float32)
    u = _dot(up, x).to(dtype).to(tl.float32)
    activated = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    _store_outputs(y_ptr, activated * u, tile, OUTPUTS, TILE_N)


@triton.jit
def _head_halves(
    ptr, norm_first, norm_second, cos, sin, inside, eps, HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
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
        first *= scale * norm_first.to(tl.float32)[None, :]
        second *= scale * norm_second.to(tl.float32)[None, :]
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
        v_cache + at_head, blocks_ptr, start, end, stride_b, stride_p, 0, 2 * HALF, TILE, BLOCK_SIZE
    )
    return first, second, v


@triton.jit
def _merged(part_ptr, state_ptr, at, there, form: tl.constexpr):
    """Put the spans `at`, (spans,) or (spans, heads), together: o (D,) or (heads, D)."""
    channel = tl.arange(0, form.head_dim)
    m = tl.load(state_ptr + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(state_ptr + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    parts = tl.load(
        part_ptr + tl.expand_dims(at * form.head_dim, -1) + channel,
        mask=tl.expand_dims(there, -1) & (channel >= 0),
        other=0.0,
        cache_modifier=".cg",
    )
    share = tl.where(total > 0, tl.exp2(m - tl.max(m, 0)), 0.0)
    whole = tl.sum(share * total, 0)
    o = tl.sum(parts * tl.expand_dims(share, -1), 0)
    whole = tl.where(whole > 0, whole, 1.0)
    if len(o.shape) == 2:
        whole = whole[:, None]
    return o / whole


@triton.jit
def _head_weights(ptr, item, form: tl.constexpr):
    """Load o_part_n outputs of the o weight for the channels of one key head, (n, group, D)."""
    N: tl.constexpr = form.o_part_n
    TILES: tl.constexpr = (form.hidden + N - 1) // N
    GROUP: tl.constexpr = form.q_heads // form.kv_heads
    head, tile = item // TILES, item % TILES
    output = tile * N + tl.arange(0, N)
    member, channel = tl.arange(0, form.group_padded), tl.arange(0, form.head_dim)
    column = (head * GROUP + member)[:, None] * form.head_dim + channel[None, :]
    at = output.to(tl.int64)[:, None, None] * (form.q_heads * form.head_dim) + column[None, :, :]
    inside = (output < form.hidden)[:, None, None] & (member < GROUP)[None, :, None]
    inside = inside & (item < form.kv_heads * TILES) & (channel >= 0)[None, None, :]
    return tl.load(ptr + tl.multiple_of(at, [16, 16, 16]), mask=inside, other=0.0)


@triton.jit
def _merged_heads(part_ptr, state_ptr, row, head, dtype: tl.constexpr, form: tl.constexpr):
    """Put the spans of a key head together: (group, D) of its query heads, rounded."""
    number, member = tl.arange(0, form.splits_padded), tl.arange(0, form.group_padded)
    is_head = member < form.q_heads // form.kv_heads
    there = (number < form.splits)[:, None] & is_head[None, :]
    first = (row * form.kv_heads + head) * form.splits
    at = (first + number)[:, None] * form.group + member[None, :]
    return _merged(part_ptr, state_ptr, at, there, form).to(dtype)


@triton.jit
def _o_by_heads(weight, weight_ptr, part_ptr, state_ptr, sums_ptr, form: tl.constexpr):
    """Merge spans and multiply them by the o weight: float32 sums (KV_HEADS, ROWS, HIDDEN)."""
    N: tl.constexpr = form.o_part_n
    TILES: tl.constexpr = (form.hidden + N - 1) // N
    ROWS: tl.constexpr = form.rows
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    for item in range(tl.program_id(0), form.kv_heads * TILES, form.grid):
        head, tile = item // TILES, item % TILES
        for row in tl.static_range(ROWS):
            o = _merged_heads(part_ptr, state_ptr, row, head, dtype, form)
            to = sums_ptr + (head * form.rows + row) * form.hidden
            _store_outputs(to, _dot(weight, o), tile, form.hidden, N)
        if form.kv_heads * TILES > form.grid:
            weight = _head_weights(weight_ptr, item + form.grid, form)


@triton.jit
def _o_sum(sums_ptr, row, dtype: tl.constexpr, form: tl.constexpr):
    """Return the o product of a row, (RUNS, 256), rounded: the sum of its key heads' parts."""
    RUNS: tl.constexpr = form.runs
    KV_HEADS: tl.constexpr = form.kv_heads
    run, lane = tl.arange(0, RUNS), tl.arange(0, 256)
    column = run[:, None] * 256 + lane[None, :]
    inside = column < form.hidden
    total = tl.zeros([RUNS, 256], tl.float32)
    for head in tl.static_range(KV_HEADS):
        at = sums_ptr + (head * form.rows + row) * form.hidden + column
        total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    return total.to(dtype)


@triton.jit
def _span_of(item, seqlens_ptr, form: tl.constexpr):
    """Return row, key head, first key and end of an item's span (empty past the last item), and
    how many keys its row has."""
    KV_HEADS: tl.constexpr = form.kv_heads
    SPLITS: tl.constexpr = form.splits
    last: tl.constexpr = form.rows * KV_HEADS * SPLITS - 1
    inside = tl.minimum(item, last)
    split, head = inside % SPLITS, inside // SPLITS % KV_HEADS
    row = inside // SPLITS // KV_HEADS
    length = tl.load(seqlens_ptr + row)
    span = tl.cdiv(tl.cdiv(length, SPLITS), form.span_step) * form.span_step
    begin = split * span
    end = tl.where(item > last, 0, tl.minimum(begin + span, length))
    return row, head, begin, end, length


@triton.jit(do_not_specialize=["num_layers"])
def decode_layers_kernel(
    table_ptr, start_ptr, residual_ptr, x_ptr, qkv_ptr, part_ptr, state_ptr, sums_ptr, o_ptr,
    act_ptr, meeting_ptr, cos_ptr, sin_ptr, slot_ptr, seqlens_ptr, block_table_ptr,
    num_layers, stride_table, stride_cos, stride_sin, stride_b, stride_p, stride_h,
    eps, qk_eps, logit_scale, form: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute all layers of a step; see the module's docstring.

    table: int64, the addresses of each layer's weights and caches, see `launch.DecodeLayers`.
    """
    begin_next(EARLY)
    await_previous(EARLY)
    dtype = x_ptr.dtype.element_ty
    pid = tl.program_id(0)
    GRID: tl.constexpr = form.grid
    ROWS: tl.constexpr = form.rows
    HIDDEN: tl.constexpr = form.hidden
    RUNS: tl.constexpr = form.runs
    INNER: tl.constexpr = form.inner
    Q_HEADS: tl.constexpr = form.q_heads
    KV_HEADS: tl.constexpr = form.kv_heads
    HEAD_DIM: tl.constexpr = form.head_dim
    BLOCK_SIZE: tl.constexpr = form.block_size
    TILE_KEYS: tl.constexpr = form.tile_keys
    GROUP: tl.constexpr = form.group
    QKV_N: tl.constexpr = form.qkv_n
    GATE_N: tl.constexpr = form.gate_n
    HEADS: tl.constexpr = Q_HEADS + 2 * KV_HEADS
    G: tl.constexpr = Q_HEADS // KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    QKV: tl.constexpr = HEADS * HEAD_DIM
    O_WIDTH: tl.constexpr = Q_HEADS * HEAD_DIM
    ITEMS: tl.constexpr = ROWS * KV_HEADS * form.splits
    BY_HEADS: tl.constexpr = form.o_part_n > 0
    MEETINGS: tl.constexpr = 5 if BY_HEADS else 6

    pair = tl.arange(0, HALF)
    group = tl.arange(0, GROUP)
    channel = tl.arange(0, HEAD_DIM)
    key_offset = tl.arange(0, TILE_KEYS)
    # Which keys this program attends to first, in every layer.
    my_row, my_head, my_begin, my_end, my_length = _span_of(pid, seqlens_ptr, form)
    my_slot = tl.load(slot_ptr + my_row)
    my_cos = tl.load(cos_ptr + my_row * stride_cos + pair)
    my_sin = tl.load(sin_ptr + my_row * stride_sin + pair)

    for layer in range(num_layers):
        fields = table_ptr + layer * form.fields
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
        met = layer * MEETINGS

        # 1. norm and qkv product
        _arrive(meeting_ptr, GRID)
        weight = _weights(qkv_weight, pid, QKV, HIDDEN, QKV_N, RUNS)
        norm = _row(attention_norm, HIDDEN, RUNS)
        _meet(meeting_ptr, met + 1, GRID)
        source = residual_ptr
        if layer == 0:
            source = start_ptr
        x, other = _normed(
            source, x_ptr, norm, residual_ptr + ROWS * HIDDEN, layer > 0, eps, ROWS, HIDDEN, RUNS
        )
        for tile in range(pid, (QKV + QKV_N - 1) // QKV_N, GRID):
            following = _weights(qkv_weight, tile + GRID, QKV, HIDDEN, QKV_N, RUNS)
            _store_qkv(weight, x, qkv_bias, qkv_ptr, tile, QKV, QKV_N, form.has_qkv_bias)
            if ROWS > 1:
                _store_qkv(
                    weight, other, qkv_bias, qkv_ptr + QKV, tile, QKV, QKV_N, form.has_qkv_bias
                )
            weight = following

        # 2. rotation, write, attention over a span of keys
        _arrive(meeting_ptr, GRID)
        row, head, begin, end, length = my_row, my_head, my_begin, my_end, my_length
        slot, cos, sin = my_slot, my_cos, my_sin
        k_first, k_second, v = _keys_and_values(
            k_cache, v_cache, block_table_ptr + row.to(tl.int64) * stride_table, begin,
            tl.minimum(end, length - 1), head * stride_h, stride_b, stride_p,
            HALF, TILE_KEYS, BLOCK_SIZE,
        )  # fmt: skip
        q_norm_first, q_norm_second, k_norm_first, k_norm_second = cos, cos, cos, cos
        if form.has_qk_norm:
            q_norm_first, q_norm_second = tl.load(q_norm + pair), tl.load(q_norm + HALF + pair)
            k_norm_first, k_norm_second = tl.load(k_norm + pair), tl.load(k_norm + HALF + pair)
        _meet(meeting_ptr, met + 2, GRID)
        for item in range(pid, ITEMS, GRID):
            old_end = tl.minimum(end, length - 1)  # the newest key is in no cache yet
            blocks_ptr = block_table_ptr + row.to(tl.int64) * stride_table
            heads_ptr = qkv_ptr + row * QKV
            q_first, q_second = _head_halves(
                heads_ptr + ((head * G + group) * HEAD_DIM)[:, None], q_norm_first, q_norm_second,
                cos, sin, (group < G)[:, None], qk_eps, HEAD_DIM, form.has_qk_norm,
            )  # fmt: skip
            one = tl.arange(0, 1)[:, None]
            new_first, new_second = _head_halves(
                heads_ptr + (Q_HEADS + head) * HEAD_DIM + one, k_norm_first, k_norm_second,
                cos, sin, one == 0, qk_eps, HEAD_DIM, form.has_qk_norm,
            )  # fmt: skip
            new_v = tl.load(
                heads_ptr + (Q_HEADS + KV_HEADS + head) * HEAD_DIM + channel, cache_modifier=".cg"
            )
            if (begin < end) & (end == length) & (slot >= 0):
                place = slot // BLOCK_SIZE * stride_b + slot % BLOCK_SIZE * stride_p
                place += head * stride_h
                tl.store(k_cache + place + pair[None, :], new_first)
                tl.store(k_cache + place + HALF + pair[None, :], new_second)
                tl.store(v_cache + place + channel, new_v)
            m = tl.full([GROUP], float("-inf"), tl.float32)
            total = tl.zeros([GROUP], tl.float32)
            acc = tl.zeros([GROUP, HEAD_DIM], tl.float32)
            for start in range(begin, end, TILE_KEYS):
                key = start + key_offset
                is_new = (key == length - 1)[:, None]
                k_1 = tl.where(is_new, new_first, k_first)
                k_2 = tl.where(is_new, new_second, k_second)
                values = tl.where(is_new, new_v[None, :], v)
                if start + TILE_KEYS < end:
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
                part_ptr + (at * HEAD_DIM)[:, None] + channel[None, :],
                acc,
                mask=(group < G)[:, None] & (channel >= 0)[None, :],
            )
            tl.store(state_ptr + at * 2, m)
            tl.store(state_ptr + at * 2 + 1, total)
            if ITEMS > GRID:
                row, head, begin, end, length = _span_of(item + GRID, seqlens_ptr, form)
                slot = tl.load(slot_ptr + row)
                cos = tl.load(cos_ptr + row * stride_cos + pair)
                sin = tl.load(sin_ptr + row * stride_sin + pair)
                k_first, k_second, v = _keys_and_values(
                    k_cache, v_cache, block_table_ptr + row.to(tl.int64) * stride_table, begin,
                    tl.minimum(end, length - 1), head * stride_h, stride_b, stride_p,
                    HALF, TILE_KEYS, BLOCK_SIZE,
                )  # fmt: skip

        _arrive(meeting_ptr, GRID)
        if BY_HEADS:
            # 3. the spans of a head put together, and its part of the o product
            weight = _head_weights(o_weight, pid, form)
            _meet(meeting_ptr, met + 3, GRID)
            _o_by_heads(weight, o_weight, part_ptr, state_ptr, sums_ptr, form)
        else:
            # 3. the spans of a head put together
            _meet(meeting_ptr, met + 3, GRID)
            for one in range(pid, ROWS * Q_HEADS, GRID):
                number = tl.arange(0, form.splits_padded)
                at = (one // G * form.splits + number) * form.group + one % G
                o = _merged(part_ptr, state_ptr, at, number < form.splits, form)
                o_at = o_ptr + one * HEAD_DIM + tl.arange(0, HEAD_DIM)
                tl.store(o_at, o.to(o_ptr.dtype.element_ty))

            # 4. o product
            _arrive(meeting_ptr, GRID)
            weight = _weights(o_weight, pid, HIDDEN, O_WIDTH, form.o_n, form.o_runs)
            _meet(meeting_ptr, met + 4, GRID)
            _product(
                weight, o_weight, o_ptr, x_ptr, HIDDEN, O_WIDTH, ROWS, form.o_n, form.o_runs, GRID
            )

        # 5. norm, gate-up product, activation
        _arrive(meeting_ptr, GRID)
        gate = _weights(gate_weight, pid, INNER, HIDDEN, GATE_N, RUNS)
        up = _weights(up_weight, pid, INNER, HIDDEN, GATE_N, RUNS)
        gate_2 = _weights(gate_weight, pid + GRID, INNER, HIDDEN, GATE_N, RUNS)
        up_2 = _weights(up_weight, pid + GRID, INNER, HIDDEN, GATE_N, RUNS)
        norm = _row(mlp_norm, HIDDEN, RUNS)
        _meet(meeting_ptr, met + MEETINGS - 1, GRID)
        if BY_HEADS:
            added = residual_ptr + ROWS * HIDDEN
            x = _o_sum(sums_ptr, 0, dtype, form)
            x = _added_and_normed(0, added, x, norm, residual_ptr, eps, HIDDEN, RUNS)
            other = x
            if ROWS > 1:
                other = _o_sum(sums_ptr, 1, dtype, form)
                other = _added_and_normed(1, added, other, norm, residual_ptr, eps, HIDDEN, RUNS)
        else:
            x, other = _normed(
                residual_ptr + ROWS * HIDDEN, x_ptr, norm, residual_ptr, layer >= 0, eps,
                ROWS, HIDDEN, RUNS,
            )  # fmt: skip
        for tile in range(pid, (INNER + GATE_N - 1) // GATE_N, GRID):
            gate_3 = _weights(gate_weight, tile + 2 * GRID, INNER, HIDDEN, GATE_N, RUNS)
            up_3 = _weights(up_weight, tile + 2 * GRID, INNER, HIDDEN, GATE_N, RUNS)
            _store_gated(gate, up, x, act_ptr, tile, INNER, GATE_N)
            if ROWS > 1:
                _store_gated(gate, up, other, act_ptr + INNER, tile, INNER, GATE_N)
            gate, up, gate_2, up_2 = gate_2, up_2, gate_3, up_3

        # 6. down product
        _arrive(meeting_ptr, GRID)
        weight = _weights(down_weight, pid, HIDDEN, INNER, form.down_n, form.down_runs)
        _meet(meeting_ptr, met + MEETINGS, GRID)
        _product(
            weight,
            down_weight,
            act_ptr,
            x_ptr,
            HIDDEN,
            INNER,
            ROWS,
            form.down_n,
            form.down_runs,
            GRID,
        )

    if GRID > 1:
        # The last to leave makes the counters ready for the next launch: all have met by then.
        tl.debug_barrier()
        if tl.atomic_add(meeting_ptr + 1, 1, sem="acq_rel", scope="gpu") == GRID - 1:
            tl.store(meeting_ptr, 0)
            tl.store(meeting_ptr + 1, 0)
