"""Attention of a few new tokens to a paged cache of latents, on Hopper.

What: o = softmax(softmax_scale * q z^T) v, where v is the first 512 of the 576 channels of z.
Grid: one CTA a multiprocessor; each takes an equal share of all tiles (see `share`) for
      one tile of 64 rows (new tokens times heads).
One CTA: a warpgroup for the logits, q in its registers, and two for o, 256 columns each, which is
      128 registers a thread. Two products can run while the third warpgroup exponentiates.
Traffic: latents once a CTA: as key and as value from the same shared memory; q and o once; parts of
      sequences that several CTAs share 4 * (512 + 1) bytes a row, merged by `merge`.
Numerics: products of 16-bit inputs with float32 sums; m, l, o float32; exponentials in base 2.
Rows that see nothing give o = 0, lse = -inf.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import reinterpret
from tilewise.kernels.gluon.latent.item import FIELDS
from tilewise.kernels.gluon.latent.scores import score_items
from tilewise.kernels.gluon.latent.share import KEYS, ROWS, Step, lengths_of, share_of
from tilewise.kernels.gluon.latent.tiles import STAGES, TAIL_STAGES, Loads
from tilewise.kernels.gluon.latent.values import add_items


class Variant(NamedTuple):
    """Constexpr: the compile-time choices of `mla_decode_kernel`."""

    block: int  # tokens of a cache block
    box: int  # keys of one copy: those of a block, at most 64
    q_box: int  # rows of q that are copied at once: those of the longest run, as 16, 32 or 64
    several: bool  # runs may be longer than one token, so that rows differ in what they see
    publish: int  # products of a tile's logits that may still run when the p before it is handed on
    prefetch: int  # tiles, beyond those in the ring, whose last channels L2 is asked for
    registers: int  # registers of a thread that sums o


class Output(NamedTuple):
    """The tensors of the results and of partial results of attention over latents, and the plan by
    which parts are merged."""

    o: object  # (T, Hq, 512)
    lse: object  # float32 (Hq, T)
    part_o: object  # float32 (items, row tiles, 64, 512)
    part_lse: object  # float32 (items, row tiles, 64)
    plan: object  # int32 (B, 2): the first item of a sequence, and how many it has
    tokens: object  # T


class Shared(NamedTuple):
    """Shared memory: rings of tiles, and barriers that say what is full and what is free.

    The rope channels of a tile are read once, by the logits; then p of the tile takes their place.
    """

    left: object  # z[:, :256]; three stages
    middle: object  # z[:, 256:384]; three
    tail: object  # z[:, 384:512]; two
    rope: object  # z[:, 512:], then p; three
    q_tail: object
    q_rope: object
    alpha: object  # the factor by which a tile multiplies the sums before it
    scale: object  # the factor of an item's o, in the end
    item: object  # see `item`; two slots, as scale has
    items: object  # the same, a slot at a time
    left_full: object
    middle_full: object
    tail_full: object
    rope_full: object
    p_full: object  # p and alpha of a tile are there
    empty: object  # both halves of o have taken a tile
    q_full: object
    item_full: object
    item_empty: object
    scale_full: object


@gluon.jit
def _allocate(loads):
    """Return the Shared memory of a CTA, with its barriers ready."""
    DTYPE: gl.constexpr = loads.left.dtype
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ITEM: gl.constexpr = mbarrier.MBarrierLayout()
    left = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, 256], loads.left.layout)
    middle = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, 128], loads.middle.layout)
    tail = gl.allocate_shared_memory(DTYPE, [TAIL_STAGES, 1, 1, KEYS, 128], loads.middle.layout)
    rope = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, 64], loads.rope.layout)
    q_tail = gl.allocate_shared_memory(DTYPE, [1, 1, ROWS, 128], loads.middle.layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, 1, ROWS, 64], loads.rope.layout)
    alpha = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINE)
    scale = gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE)
    item = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], ITEM)
    return Shared(
        left,
        middle,
        tail,
        rope,
        q_tail,
        q_rope,
        alpha,
        scale,
        item,
        reinterpret(item, gl.int32, [2, FIELDS], LINE),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(TAIL_STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(1, 1),
        barriers(2, 1),
        barriers(2, 2),
        barriers(2, 1),
    )


@gluon.jit(
    do_not_specialize=[
        "cache_block",
        "cache_slot",
        "table_row",
        "batch",
        "tokens",
        "heads",
        "row_tiles",
        "least_tiles",
        "blocks",
    ]
)
def mla_decode_kernel(
    q_left,
    q_middle,
    q_rope,
    left,
    middle,
    rope,
    o,
    lse,
    part_o,
    part_lse,
    plan,
    cache,
    block_table,
    seqlens_k,
    cu_seqlens_q,
    cache_block,
    cache_slot,
    table_row,
    batch,
    tokens,
    heads,
    row_tiles,
    least_tiles,
    blocks,
    softmax_scale_log2,
    variant: gl.constexpr,
):
    """Compute o and lse of attention of a few new tokens to a paged cache of 16-bit latents, for a
    CTA's share of all tiles of keys; what it has of a sequence that other CTAs share goes to parts.
    See the module's docstring.

    The first six are TMA descriptors: of q_latent (T Hq, 512), 256 and 128 channels wide, and of
    q_rope (T Hq, 64); of the cache (blocks, slots, 576), 256, 128 and 64 channels wide.
    """
    step = Step(
        cache,
        cache_block,
        cache_slot,
        block_table,
        table_row,
        seqlens_k,
        cu_seqlens_q,
        batch,
        heads,
        row_tiles,
        tokens,
        table_row * variant.block,
        blocks,
    )
    output = Output(o, lse, part_o, part_lse, plan, tokens)
    lengths = lengths_of(step, 0)  # on their way while barriers are made
    loads = Loads(q_left, q_middle, q_rope, left, middle, rope)
    shared = _allocate(loads)
    share = share_of(step, lengths, least_tiles)
    gl.warp_specialize(
        [
            (score_items, (loads, step, share, output, softmax_scale_log2, shared, variant)),
            (add_items, (loads, step, output, shared, variant, 0)),
            (add_items, (loads, step, output, shared, variant, 1)),
        ],
        [4, 4],
        [variant.registers, variant.registers],
    )
