"""Forward pass of attention on Hopper, dense and packed: TMA, WGMMA, specialised warps.

What: o = softmax(s) v and lse, with s = softmax_scale * q k^T, capped, biased, masked, dropped.
Grid: one CTA a multiprocessor, or fewer where there are fewer tiles; CTAs stay (see `scheduler`).
One CTA: `tile.warpgroups` warpgroups of 64 queries each, and a warp that loads for them.
Traffic: q is read and o, lse are written once, so are the largest logits of rows where a call wants
      them; k and v once per query tile (mostly from L2).
Numerics: products in the input type with float32 sums; m, l, acc float32; exponentials in base 2.
Rows that see nothing give o = 0, lse = -inf.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.logits import Extras, factor_log2
from tilewise.kernels.gluon.forward.epilogue import Output
from tilewise.kernels.gluon.forward.loader import load_tiles
from tilewise.kernels.gluon.forward.scheduler import Work
from tilewise.kernels.gluon.forward.span import Mask
from tilewise.kernels.gluon.forward.warpgroup import compute_tiles


class Tile(NamedTuple):
    """Constexpr: how a CTA of the forward pass is cut: rows, keys, stages, channels, warpgroups,
    registers; every combination gives the same results but for rounding."""

    warpgroups: int  # warpgroups that compute, 64 rows each
    rows: int  # 64 * warpgroups
    keys: int  # keys of a block
    stages: int  # blocks of K and of V in shared memory
    d: int  # channels of q and k, padded with zeros: d and then d_high, 0 where d has all
    d_high: int
    dv: int  # channels of v and o, padded
    o_columns: int  # columns of the buffer through which o leaves: dv or half of it
    dynamic: bool  # tiles are dealt out by a counter, from much to little work
    ping_pong: bool  # warpgroups take turns at issuing products
    q_in_registers: bool  # q is an operand in registers; frees its shared memory at once
    release_together: bool  # K and V of a step are given back at once, with one barrier
    scale_late: bool  # acc is rescaled while the next scores are multiplied, not before they are
    registers: int  # registers of a thread that computes
    loader_registers: int
    bias_stages: int = 0  # blocks of the bias in shared memory; 0: registers load it themselves


class Variant(NamedTuple):
    """Constexpr: the features of a call that change the code of the forward pass's loops, such as
    windows, softcap, bias, masks, dropout; `variant.choice` makes it."""

    left: bool  # keys far to the left of the diagonal are hidden
    right: bool  # keys far to its right are
    ruled: bool  # windows or lengths hide keys of the first block (of any, with a block mask)
    factored: bool  # the last step of the logits is a positive factor, which rides in an fma
    bounded: bool  # no logit exceeds `factor` in size, so a maximum need not be followed
    softcap: str  # "none", "fast" (tanh of the special function unit) or "exact"
    alibi: bool
    slanted: bool  # ALiBi where no row sees a key behind its own, and the logits are factored
    bias: bool
    bias_rows: bool  # the bias differs from query to query, not only from key to key
    bias_pairs: bool  # its keys are neighbours and its other strides count pairs of them
    mask_rows: int  # rows and keys of a tile of the block mask, 0 without one
    mask_keys: int
    dropout: bool
    sinks: bool
    packed: bool  # sequences lie one after the other in one batch
    lengths: bool  # dense sequences have a number of keys of their own
    maxima: bool  # the largest logit of each row is written, too
    short: bool  # warpgroups without rows step aside in the last tile of a head
    shares_bias: bool = False  # all sequences read one bias: those of a head are neighbours


class Tensors(NamedTuple):
    """The optional tensors of a call, beside q, k, v, o and lse; None for an absent tensor.

    Attributes:
        plan: int32 (entries, 6), a packed batch's tiles of rows, from much to little work.
        plan_size: int32 (1,), the number of entries of the plan.
        seqlens_k: the number of keys of each dense sequence.
        alibi, bias, sinks: the slopes of ALiBi, the bias of the logits, and a sink for each head.
        philox: the seed of dropout.
        mask_bits, mask_reach, mask_spans, mask_entries: the block mask's bits and lists of tiles.
        maxima: float32 of lse's shape, a result: the largest logit of each row.
    """

    plan: object = None  # see sorted_tiles.py
    plan_size: object = None  # int32 (1,), entries of the plan
    seqlens_k: object = None
    alibi: object = None
    bias: object = None
    sinks: object = None
    philox: object = None
    mask_bits: object = None
    mask_reach: object = None
    mask_spans: object = None
    mask_entries: object = None
    maxima: object = None  # float32, as lse lies


class Shared(NamedTuple):
    """The shared memory of a CTA of the forward pass: rings of tiles, and barriers that say which
    are full and which are free."""

    q: object
    q_high: object  # channels past tile.d; that of q and k where there are none
    q_full: object
    q_empty: object
    number: object  # number of the tile with the queries that are in q
    k: object
    k_high: object
    k_full: object
    k_empty: object
    v: object
    v_full: object
    v_empty: object
    o: object
    bias: object  # (warpgroups * bias_stages) tiles, those of a warpgroup one after the other
    bias_full: object
    bias_empty: object


@gluon.jit
def _allocate(q, q_high, k, k_high, v, o, bias, tile: gl.constexpr):
    """Allocate the shared memory of a CTA and initialise its barriers.

    Args:
        q, q_high, k, k_high, v, o, bias: the descriptors, whose dtypes and layouts are used.
    """
    GROUPS: gl.constexpr = tile.warpgroups
    STAGES: gl.constexpr = tile.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_tiles = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, 64, tile.d], q.layout)
    k_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, tile.keys, tile.d], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, tile.keys, tile.dv], v.layout)
    o_tiles = gl.allocate_shared_memory(o.dtype, [GROUPS, 1, 1, 64, tile.o_columns], o.layout)
    q_highs = q_tiles
    k_highs = k_tiles
    if tile.d_high > 0:
        HIGH: gl.constexpr = tile.d_high
        q_highs = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, 64, HIGH], q_high.layout)
        k_highs = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, tile.keys, HIGH], k_high.layout)
    number = gl.allocate_shared_memory(gl.int32, [GROUPS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for group in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_empty.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=GROUPS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=GROUPS)
    # Something that is there: Triton 3.6 returns no tuple that holds None.
    bias_tiles = k_tiles
    bias_full = k_full
    bias_empty = k_empty
    if tile.bias_stages > 0:
        COUNT: gl.constexpr = GROUPS * tile.bias_stages
        shape: gl.constexpr = [COUNT, 1, 1, 64, tile.keys]
        bias_tiles = gl.allocate_shared_memory(bias.dtype, shape, bias.layout)
        bias_full = barriers(COUNT, 1)
        bias_empty = barriers(COUNT, 1)
    return Shared(
        q_tiles,
        q_highs,
        q_full,
        q_empty,
        number,
        k_tiles,
        k_highs,
        k_full,
        k_empty,
        v_tiles,
        v_full,
        v_empty,
        o_tiles,
        bias_tiles,
        bias_full,
        bias_empty,
    )


@gluon.jit(
    do_not_specialize=[
        "num_tiles",
        "row_tiles",
        "num_heads",
        "heads_per_section",
        "num_q_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "window_left",
        "window_right",
        "o_row",
        "width",
        "lse_batch",
        "lse_head",
        "alibi_batch",
        "mask_batch",
        "mask_head",
        "drop_limit",
        "bias_batch",
        "bias_head",
        "bias_row",
        "bias_key",
    ]
)
def attention_fwd_kernel(
    q,
    q_high,
    k,
    k_high,
    v,
    o,
    bias_tiles,
    o_ptr,
    lse,
    counter,
    tensors,
    num_tiles,
    row_tiles,
    num_heads,
    heads_per_section,
    num_q_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    o_row,
    width,
    drop_limit,
    keep_scale,
    lse_batch,
    lse_head,
    alibi_batch,
    mask_batch,
    mask_head,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    tile: gl.constexpr,
    variant: gl.constexpr,
):
    """Compute o = softmax(s) v and lse of dense or packed attention, with s as `variant` says:
    capped, biased, masked, dropped. CTAs stay and take tiles of tile.rows queries of a head in
    turn; see the module's docstring.

    q, k, v, o: TMA descriptors; q_high, k_high: those of tiles of the channels past tile.d;
    bias_tiles: that of the bias, None without tile.bias_stages.
    """
    if variant.packed:
        row_tiles = gl.load(tensors.plan_size)
        num_tiles = row_tiles * num_heads
    work = Work(
        num_tiles,
        row_tiles,
        num_heads,
        heads_per_section,
        num_q_heads,
        group_size,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        mask_batch,
        mask_head,
        tensors.seqlens_k,
        tensors.plan,
    )
    mask = Mask(tensors.mask_bits, tensors.mask_reach, tensors.mask_spans, tensors.mask_entries)
    extras = Extras(
        softmax_scale,
        softcap,
        tensors.alibi,
        alibi_batch,
        tensors.bias,
        bias_batch,
        bias_head,
        bias_row,
        bias_key,
    )
    output = Output(
        o,
        o_ptr,
        o_row,
        width,
        lse,
        lse_batch,
        lse_head,
        tensors.maxima,
        tensors.sinks,
        tensors.philox,
        drop_limit,
        keep_scale,
    )
    factor = factor_log2(extras, variant)
    shared = _allocate(q, q_high, k, k_high, v, o, bias_tiles, tile)
    if tile.bias_stages > 0:
        shares = (extras.bias_batch == 0, extras.bias_head == 0)
        loads = (q, q_high, k, k_high, v, counter, work, mask, shared, bias_tiles, shares)
    else:
        loads = (q, q_high, k, k_high, v, counter, work, mask, shared, None, None)
    sums = (output, work, mask, extras, factor, shared)
    if tile.warpgroups == 2:
        gl.warp_specialize(
            [
                (compute_tiles, (sums, tile, variant, 0)),
                (compute_tiles, (sums, tile, variant, 1)),
                (load_tiles, (loads, tile, variant)),
            ],
            [4, 1],
            [tile.registers, tile.loader_registers],
        )
    else:
        gl.warp_specialize(
            [
                (compute_tiles, (sums, tile, variant, 0)),
                (compute_tiles, (sums, tile, variant, 1)),
                (compute_tiles, (sums, tile, variant, 2)),
                (load_tiles, (loads, tile, variant)),
            ],
            [4, 4, 1],
            [tile.registers, tile.registers, tile.loader_registers],
        )
