"""Gradient of queries on Hopper in a kernel of its own; head dims up to 256.

What: dq = ds k of one tile of queries; the rule is that of attention_bwd.
Grid: one axis, tiles of 128 queries x (batch x query heads), those with most keys first.
One CTA: 128 queries of one head, 64 to each of two warpgroups; loops over the tiles of 64 keys that
      they see, from the last to the first. v and k pass through a ring of slots in turn, loaded by
      a warp of its own; with 192 channels of q and k through rings of their own, and tiles of the
      last 64 channels lie apart.
Traffic: q, do and the row terms are read and dq is written once; k, v once per tile of queries.
Numerics: as in attention_bwd; one owner and one order for every sum.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.backward.dq_warpgroup import make_dq
from tilewise.kernels.gluon.backward.logits import Places
from tilewise.kernels.gluon.backward.row_span import rows_of_cta
from tilewise.kernels.gluon.backward.span import Shape
from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.visible import entry_of_tile

CONSUMER_REGISTERS = gl.constexpr(240)
MOVER_REGISTERS = gl.constexpr(24)


class Buffers(NamedTuple):
    """The shared memory of one CTA of the kernel for dq: q, do, k and v; the first axis counts
    warpgroups, or tiles in flight."""

    q: object
    do: object
    k: object  # the same ring as v, whose tiles take turns, where they are as wide
    v: object
    q_high: object  # channels past variant.d, 0 where there are none
    k_high: object


class Barriers(NamedTuple):
    """The mbarriers by which the loader and the two warpgroups of the kernel for dq wait for one
    another."""

    q_full: object  # q and do of a warpgroup
    k_full: object
    k_empty: object  # both warpgroups are done with it
    v_full: object
    v_empty: object


@gluon.jit
def load_for_dq(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    q_high_desc,
    k_high_desc,
    shape,
    scores,
    places,
    bufs,
    bars,
    variant: gl.constexpr,
):
    """Run the loader warp: load v and k of each tile of keys, the last first, into their ring, and
    q and do of both warpgroups with the first tile."""
    SLOTS: gl.constexpr = variant.stages
    D: gl.constexpr = variant.d
    HIGH: gl.constexpr = variant.d_high > 0
    Q_HIGH: gl.constexpr = q_high_desc.block_type.nbytes if HIGH else 0
    K_HIGH: gl.constexpr = k_high_desc.block_type.nbytes if HIGH else 0
    rows = rows_of_cta(shape, scores, places, variant)
    b = rows.b
    if variant.packed:
        b = 0
    key_head = rows.head // shape.group_size
    row = rows.start_q + rows.first_row
    slot = 0
    for step in range(0, rows.end - rows.begin):
        tile = rows.end - 1 - step
        if variant.mask:
            tile, _number = entry_of_tile(rows, tile, scores, variant.tile_n)
        key = rows.start_k + tile * variant.tile_n
        at = slot % SLOTS
        mbarrier.wait(bars.v_empty.index(at), ((slot // SLOTS) & 1) ^ 1)
        mbarrier.expect(bars.v_full.index(at), v_desc.block_type.nbytes)
        tma_load(v_desc, [b, key_head, key, 0], bars.v_full.index(at), bufs.v.index(at))
        if step == 0:
            for part in gl.static_range(2):
                full = bars.q_full.index(part)
                mbarrier.expect(full, q_desc.block_type.nbytes + do_desc.block_type.nbytes + Q_HIGH)
                place = [b, rows.head, row + part * 64, 0]
                tma_load(do_desc, place, full, bufs.do.index(part))
                tma_load(q_desc, place, full, bufs.q.index(part))
                if HIGH:
                    place_high = [b, rows.head, row + part * 64, D]
                    tma_load(q_high_desc, place_high, full, bufs.q_high.index(part))
        if not HIGH:
            slot += 1
        at = slot % SLOTS
        mbarrier.wait(bars.k_empty.index(at), ((slot // SLOTS) & 1) ^ 1)
        mbarrier.expect(bars.k_full.index(at), k_desc.block_type.nbytes + K_HIGH)
        tma_load(k_desc, [b, key_head, key, 0], bars.k_full.index(at), bufs.k.index(at))
        if HIGH:
            place_high = [b, key_head, key, D]
            tma_load(k_high_desc, place_high, bars.k_full.index(at), bufs.k_high.index(at))
        slot += 1


@gluon.jit(
    do_not_specialize=[
        "batch",
        "num_kv_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "rows_q",
        "rows_k",
        "window_left",
        "window_right",
        "num_tiles",
        "heads_per_section",
        "rows_per_plane",
        "alibi_batch",
        "bias_batch",
        "bias_head",
        "bias_row",
        "bias_key",
        "mask_batch",
        "mask_head",
        "drop_limit",
    ]
)
def attention_bwd_dq_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    q_high_desc,
    k_high_desc,
    dq_high_desc,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    sequences,
    batch,
    num_kv_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    rows_q,
    rows_k,
    window_left,
    window_right,
    num_tiles,
    heads_per_section,
    rows_per_plane,
    scores,
    alibi_batch,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    mask_batch,
    mask_head,
    drop_limit,
    variant: gl.constexpr,
):
    """Compute and write dq of one tile of 128 queries of a head, over all keys that they see: p is
    recomputed from lse in base 2, ds from p and delta.

    Two warpgroups have 64 queries each, one warp loads; see the module's docstring.
    """
    shape = Shape(
        sequences.cu_q,
        sequences.cu_k,
        sequences.seqlens_k,
        rows_q,
        rows_k,
        batch,
        num_kv_heads,
        group_size,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        num_tiles,
        heads_per_section,
        0,
        rows_per_plane,
        0,
        1,
        0,
        0,
        0,
        0,
    )
    places = Places(
        alibi_batch, bias_batch, bias_head, bias_row, bias_key, mask_batch, mask_head, drop_limit
    )
    D: gl.constexpr = variant.d
    DV: gl.constexpr = variant.dv
    TILE_N: gl.constexpr = variant.tile_n
    SLOTS: gl.constexpr = variant.stages
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, DV], do_desc.layout)
    k = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, TILE_N, D], k_desc.layout)
    q_full = barriers(2, 1)
    k_full = barriers(SLOTS, 1)
    k_empty = barriers(SLOTS, 2)
    if variant.d_high > 0:
        HIGH: gl.constexpr = variant.d_high
        v = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, TILE_N, DV], v_desc.layout)
        q_high = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, HIGH], q_high_desc.layout)
        k_high = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, TILE_N, HIGH], k_high_desc.layout)
        bufs = Buffers(q, do, k, v, q_high, k_high)
        bars = Barriers(q_full, k_full, k_empty, barriers(SLOTS, 1), barriers(SLOTS, 2))
    else:
        bufs = Buffers(q, do, k, k, 0, 0)
        bars = Barriers(q_full, k_full, k_empty, k_full, k_empty)
    gl.warp_specialize(
        [
            (
                make_dq,
                (
                    dq_desc,
                    dq_high_desc,
                    dq_ptr,
                    lse_ptr,
                    delta_ptr,
                    shape,
                    scores,
                    places,
                    bufs,
                    bars,
                    variant,
                    0,
                ),
            ),
            (
                make_dq,
                (
                    dq_desc,
                    dq_high_desc,
                    dq_ptr,
                    lse_ptr,
                    delta_ptr,
                    shape,
                    scores,
                    places,
                    bufs,
                    bars,
                    variant,
                    1,
                ),
            ),
            (
                load_for_dq,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    do_desc,
                    q_high_desc,
                    k_high_desc,
                    shape,
                    scores,
                    places,
                    bufs,
                    bars,
                    variant,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, MOVER_REGISTERS],
    )
