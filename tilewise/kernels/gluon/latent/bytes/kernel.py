"""Attention of a few new tokens to a paged cache of 8-bit latents, on Hopper.

What: o = softmax(softmax_scale * q z^T) v, where v is the first 512 of the 576 channels of z, and
      each token has a scale for its latent and one for its rotated key.
Grid: as `mla_decode_kernel`: equal shares of all tiles, for one tile of 16, 32 or 64 rows (new
      tokens times heads).
One CTA: a warp that loads, a warpgroup for the logits and two for o, 256 channels each. Products
      are transposed, so that bytes of latents are widened in registers (`operands`) and
      few heads need few columns: no row of a product is there for padding alone.
Traffic: latents and scales once a CTA, each byte twice out of shared memory; q and o once; parts of
      sequences that several CTAs share 4 * (512 + 1) bytes a row, merged by `latent.merge`.
Numerics: products of float16 with float32 sums; rows of q are divided by powers of two, so that
      they fit. Scales multiply logits, in float32. A latent's scale, over the largest so far,
      multiplies its probability, which is then rounded to float16. m, l, o float32; base 2.
Rows that see nothing give o = 0, lse = -inf.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import reinterpret
from tilewise.kernels.gluon.latent.bytes.loader import TILES, Loads, load_items
from tilewise.kernels.gluon.latent.bytes.operands import KEYS, WIDTH
from tilewise.kernels.gluon.latent.bytes.scores import Queries, score_items
from tilewise.kernels.gluon.latent.bytes.values import add_items
from tilewise.kernels.gluon.latent.item import FIELDS
from tilewise.kernels.gluon.latent.kernel import Output
from tilewise.kernels.gluon.latent.share import Step, lengths_of, share_of

P_STAGES = gl.constexpr(2)
QUERY_PARTS = gl.constexpr(9)  # of 64 channels


class Variant(NamedTuple):
    """Constexpr: the compile-time choices of `mla_bytes_kernel`."""

    block: int  # tokens of a cache block
    box: int  # keys of one copy: those of a block, at most 64
    rows: int  # rows of a tile: 16, 32 or 64
    stages: int
    kind: int  # INT8 or E4M3 of `device.byte_operands`
    registers: int  # registers of a thread that sums o
    loader_registers: int


class Shared(NamedTuple):
    """Shared memory: rings in the shapes of copies and in those of products, and barriers."""

    latent: object  # boxes of 128 channels
    rope: object  # boxes
    key_scale: object  # (stages, 128): two a key
    latent_tiles: object  # (stages * 4, 64, 128)
    rope_tiles: object  # (stages, 64, 64)
    q: object  # float16 (9, rows, 64), in the order of `query_parts`
    power: object  # the power of two by which a row of q was divided
    p: object  # float16 (stages * 2, 32, rows), in the order of `probability_halves`
    alpha: object  # the factor by which a tile multiplies the sums before it
    scale: object  # the factor of an item's o, in the end
    item: object  # see `latent.item`; two slots, as scale has
    full: object  # the copies of a stage have come, and the scales
    empty: object  # the logits and both halves of o have taken a tile
    p_full: object
    p_empty: object
    item_full: object
    item_empty: object
    scale_full: object


@gluon.constexpr_function
def _lines(width, bits):
    """Return the layout in shared memory of a tile with rows of `width` bytes, swizzled for TMA.

    In this layout boxes that are copied one below the other are one tile.

    Args:
        bits: the bits of an element.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=bits, rank=2)


@gluon.jit
def _allocate(loads, variant: gl.constexpr):
    """Return the Shared memory of a CTA, with its barriers ready."""
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ITEM: gl.constexpr = mbarrier.MBarrierLayout()
    BOX: gl.constexpr = variant.box
    ROWS: gl.constexpr = variant.rows
    STAGES: gl.constexpr = variant.stages
    BOXES: gl.constexpr = STAGES * (KEYS // BOX)
    latent = gl.allocate_shared_memory(
        gl.int8, [TILES * BOXES, 1, 1, BOX, WIDTH], loads.latent.layout
    )
    rope = gl.allocate_shared_memory(gl.int8, [BOXES, 1, 1, BOX, 64], loads.rope.layout)
    key_scale = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * KEYS], LINE)
    q = gl.allocate_shared_memory(gl.float16, [QUERY_PARTS, ROWS, 64], _lines(128, 16))
    power = gl.allocate_shared_memory(gl.float32, [ROWS], LINE)
    p = gl.allocate_shared_memory(gl.float16, [2 * P_STAGES, 32, ROWS], _lines(2 * ROWS, 16))
    alpha = gl.allocate_shared_memory(gl.float32, [P_STAGES, ROWS], LINE)
    scale = gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE)
    item = gl.allocate_shared_memory(gl.int32, [2 * FIELDS, 1], ITEM)
    return Shared(
        latent,
        rope,
        key_scale,
        reinterpret(latent, gl.int8, [STAGES * TILES, KEYS, WIDTH], _lines(128, 8)),
        reinterpret(rope, gl.int8, [STAGES, KEYS, 64], _lines(64, 8)),
        q,
        power,
        p,
        alpha,
        scale,
        item,
        barriers(STAGES, 2),
        barriers(STAGES, 3),
        barriers(P_STAGES, 1),
        barriers(P_STAGES, 2),
        barriers(2, 1),
        barriers(2, 2),
        barriers(2, 1),
    )


@gluon.jit(
    do_not_specialize=[
        "scale_block",
        "latent_row",
        "rope_row",
        "table_row",
        "batch",
        "tokens",
        "heads",
        "row_tiles",
        "least_tiles",
        "blocks",
    ]
)
def mla_bytes_kernel(
    latent,
    rope,
    scale,
    scale_block,
    q_latent,
    q_rope,
    latent_row,
    rope_row,
    o,
    lse,
    part_o,
    part_lse,
    plan,
    block_table,
    seqlens_k,
    cu_seqlens_q,
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
    """Compute o and lse of attention of a few new tokens to a paged cache of 8-bit latents, for a
    CTA's share of all tiles of keys; what it has of a sequence that other CTAs share goes to parts.
    See the module's docstring.

    The first four are `Loads`, the next four `Queries`.
    """
    step = Step(
        None,
        None,
        None,
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
    share = share_of(step, lengths_of(step, 0), least_tiles)
    loads = Loads(latent, rope, scale, scale_block)
    shared = _allocate(loads, variant)
    queries = Queries(q_latent, q_rope, latent_row, rope_row)
    gl.warp_specialize(
        [
            (score_items, (queries, step, share, output, softmax_scale_log2, shared, variant)),
            (add_items, (output, shared, variant, 0)),
            (add_items, (output, shared, variant, 1)),
            (load_items, (loads, step, share, shared, variant)),
        ],
        [4, 4, 1],
        [variant.registers, variant.registers, variant.loader_registers],
    )
