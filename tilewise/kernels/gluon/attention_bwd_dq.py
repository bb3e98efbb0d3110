"""Gradient of queries on Hopper in a kernel of its own; head dims up to 256.

What: dq = ds k of one tile of queries; the rule is that of attention_bwd.
Grid: one axis, tiles of 128 queries x (batch x query heads), those with most keys first.
One CTA: 128 queries of one head, 64 to each of two warpgroups; loops over the tiles of 64 keys that
      they see, from the last to the first. v and k pass through a ring of slots in turn, loaded by
      a warp of its own.
Traffic: q, do and the row terms are read and dq is written once; k, v once per tile of queries.
Numerics: as in attention_bwd; one owner and one order for every sum.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon._bwd_row_walk import rows_of_cta
from tilewise.kernels.gluon._bwd_scores import Places
from tilewise.kernels.gluon._bwd_walk import Shape, entry_of_tile
from tilewise.kernels.gluon._compat import tma_load
from tilewise.kernels.gluon.attention_bwd_dq_warpgroup import make_dq
from tilewise.kernels.gluon.attention_bwd_moves import barriers

CONSUMER_REGISTERS = gl.constexpr(240)
MOVER_REGISTERS = gl.constexpr(24)


@gluon.jit
def load_for_dq(
    q_desc, k_desc, v_desc, do_desc, shape, scores, places, bufs, bars, variant: gl.constexpr
):  # fmt: skip
    """Load v and k of each tile into the ring, and q and do with the first."""
    SLOTS: gl.constexpr = variant.stages
    q_buf, do_buf, ring = bufs
    q_full, full, empty = bars
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
        mbarrier.wait(empty.index(at), ((slot // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(at), v_desc.block_type.nbytes)
        tma_load(v_desc, [b, key_head, key, 0], full.index(at), ring.index(at))
        if step == 0:
            for part in gl.static_range(2):
                mbarrier.expect(q_full.index(part), q_desc.block_type.nbytes * 2)
                place = [b, rows.head, row + part * 64, 0]
                tma_load(do_desc, place, q_full.index(part), do_buf.index(part))
                tma_load(q_desc, place, q_full.index(part), q_buf.index(part))
        slot += 1
        at = slot % SLOTS
        mbarrier.wait(empty.index(at), ((slot // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(at), k_desc.block_type.nbytes)
        tma_load(k_desc, [b, key_head, key, 0], full.index(at), ring.index(at))
        slot += 1


@gluon.jit(
    do_not_specialize=[
        "batch", "num_kv_heads", "group_size", "seqlen_q", "seqlen_k", "window_left",
        "window_right", "num_tiles", "heads_per_section", "rows_per_plane", "alibi_batch",
        "bias_batch", "bias_head", "bias_row", "bias_key", "mask_batch", "mask_head", "drop_limit",
    ]
)  # fmt: skip
def attention_bwd_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dq_ptr, lse_ptr, delta_ptr, sequences, batch,
    num_kv_heads, group_size, seqlen_q, seqlen_k, window_left, window_right, num_tiles,
    heads_per_section, rows_per_plane, scores, alibi_batch, bias_batch, bias_head, bias_row,
    bias_key, mask_batch, mask_head, drop_limit, variant: gl.constexpr,
):  # fmt: skip
    """Compute one tile of dq; see the module's docstring."""
    shape = Shape(
        sequences.cu_q, sequences.cu_k, sequences.seqlens_k, batch, num_kv_heads, group_size,
        seqlen_q, seqlen_k, window_left, window_right, num_tiles, heads_per_section,
        0, rows_per_plane, 0, 1, 0, 0, 0, 0,
    )  # fmt: skip
    places = Places(
        alibi_batch, bias_batch, bias_head, bias_row, bias_key, mask_batch, mask_head, drop_limit
    )
    D: gl.constexpr = variant.d
    SLOTS: gl.constexpr = variant.stages
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], do_desc.layout)
    ring = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, variant.tile_n, D], k_desc.layout)
    bufs = (q, do, ring)
    bars = (barriers(2, 1), barriers(SLOTS, 1), barriers(SLOTS, 2))
    gl.warp_specialize(
        [
            (make_dq, (dq_desc, dq_ptr, lse_ptr, delta_ptr, shape, scores, places, bufs, bars,
                       variant, 0)),
            (make_dq, (dq_desc, dq_ptr, lse_ptr, delta_ptr, shape, scores, places, bufs, bars,
                       variant, 1)),
            (load_for_dq, (q_desc, k_desc, v_desc, do_desc, shape, scores, places, bufs, bars,
                           variant)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, MOVER_REGISTERS],
    )  # fmt: skip
