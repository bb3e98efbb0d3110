"""One block of keys in the forward pass: what its logits need, and its softmax.

What: p of 64 rows and `tile.keys` keys, with all that a call adds: caps, bias, masks, dropout.
Grid: none, inlined into the warpgroups of the forward pass.
One call: `gather` while the product q k^T runs, `probabilities` after it.
Traffic: bias and bit tiles, once a block; shared memory where hidden values must be cleared.
Numerics: see `device.logits`, `softmax` and `device.dropout`.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.barriers import release_loaded
from tilewise.kernels.gluon.device.dropout import drop_pairs, random_words
from tilewise.kernels.gluon.device.logits import (
    hide,
    hide_by_bits,
    load_bias,
    logits,
    slant_of,
)
from tilewise.kernels.gluon.device.warpgroup import pack, sum_layout, widen
from tilewise.kernels.gluon.forward.softmax import fold
from tilewise.kernels.gluon.forward.span import block_of_step
from tilewise.kernels.gluon.forward.values import clear_hidden
from tilewise.kernels.gluon.visible import load_bits, reached


class Task(NamedTuple):
    """The values that are the same for all blocks of keys of a warpgroup's tile of rows: walk,
    head, mask, options and shared memory."""

    walk: object
    head: object
    mask: object
    extras: object
    draw: object
    plane: object  # b Hq + h, which dropout counts by
    factor: object  # the factor that `softmax` takes
    shared: object


class Block(NamedTuple):
    """The numbers that `gather` found for one block of keys; for features that the call lacks
    fields hold an unused number."""

    first_key: object
    number: object  # number of its bit tile, see `span.block_of_step`
    bits: object
    words: object  # random words that say what dropout keeps
    bias: object  # the result of `load_bias`


@gluon.jit
def gather(
    task,
    index,
    tile: gl.constexpr,
    variant: gl.constexpr,
    EDGE: gl.constexpr,
    BITS: gl.constexpr,
    ROWS: gl.constexpr = 64,
):
    """Return the Block of step `index` of a walk; needs no product, so it may overlap one.

    EDGE, BITS: as `probabilities` takes them.
    """
    KEYS: gl.constexpr = tile.keys
    S: gl.constexpr = sum_layout(KEYS, ROWS // 16)
    first_row = task.head.first_row
    block, number = block_of_step(task.walk, index, task.mask, tile, variant)
    first_key = block * KEYS
    bits = number
    if BITS:
        WORDS: gl.constexpr = variant.mask_keys // 32
        first_word = first_key % variant.mask_keys // 32
        start = task.mask.bits + number.to(gl.int64) * (variant.mask_rows * WORDS)
        row = first_row % variant.mask_rows
        bits = load_bits(start, number, row, first_word, S, KEYS, WORDS, ROWS)
    words = number
    if variant.dropout:
        words = random_words(task.draw, task.plane, first_row, first_key, KEYS, S, ROWS)
    bias = number
    if variant.bias and tile.bias_stages == 0:
        like = gl.zeros([ROWS, KEYS], gl.float32, S)  # no instruction
        masked: gl.constexpr = EDGE != "none" or BITS
        bias = load_bias(like, task.head, task.extras, first_key, masked, variant)
    return Block(first_key, number, bits, words, bias)


@gluon.jit
def probabilities(
    s,
    m,
    l,
    block,
    task,
    index,
    step,
    tile: gl.constexpr,
    variant: gl.constexpr,
    GROUP: gl.constexpr,
    EDGE: gl.constexpr,
    BITS: gl.constexpr,
):
    """Return p, m, l and alpha, as `softmax.fold` does, of one block of products s; with dropout p
    comes as packed 16-bit pairs in which dropped ones are 0.

    EDGE: what hides keys of this block beside bit tiles: the "left" edge of windows, their "right"
    edge or the end of the keys (and the left one, where a window is narrow), or "none"; BITS: a bit
    tile does.
    """
    bias = block.bias
    if tile.bias_stages > 0:
        bias = _copied_bias(task.shared, step, tile, GROUP)
    p, m, l, alpha = soften(s, m, l, block, bias, task, index, variant, EDGE, BITS)
    if variant.dropout:  # after the sum: dropout does not change what the others are divided by
        p = drop_pairs(pack(p, task.shared.v.dtype), block.words)
    if variant.mask_keys > 0 and (EDGE != "none" or BITS):
        _clear_values(block, task, step, tile, variant, BITS)
    return p, m, l, alpha


@gluon.jit
def soften(
    s,
    m,
    l,
    block,
    bias,
    task,
    index,
    variant: gl.constexpr,
    EDGE: gl.constexpr,
    BITS: gl.constexpr,
):
    """Return p, m, l and alpha of one block of products s, before dropout; see `probabilities`."""
    MASKED: gl.constexpr = EDGE != "none" or BITS
    head = task.head
    added = None
    if variant.slanted:
        added = slant_of(s, head, block.first_key)
    if not variant.factored or variant.softcap != "none" or variant.slanted or variant.bias:
        s = logits(s, head, task.extras, block.first_key, bias, variant)
    if EDGE == "right":
        s = hide(s, head, block.first_key, False, True)
        if variant.left:  # noqa: SIM102 (constexpr)
            if index >= task.walk.left_begin:
                s = hide(s, head, block.first_key, True, False)
    if EDGE == "left":
        s = hide(s, head, block.first_key, True, False)
    if BITS:
        s = hide_by_bits(s, block.bits)
    return fold(
        s, m, l, task.factor, variant.factored, variant.bounded, MASKED or variant.bias, added
    )


@gluon.jit
def _copied_bias(shared, step, tile: gl.constexpr, GROUP: gl.constexpr):
    """Wait for the bias of this step in shared memory, return it as float32 (64, tile.keys), and
    give the buffer back."""
    STAGES: gl.constexpr = tile.bias_stages
    slot = GROUP * STAGES + step % STAGES
    mbarrier.wait(shared.bias_full.index(slot), (step // STAGES) & 1)
    bias = shared.bias.index(slot).reshape([64, tile.keys]).load(sum_layout(tile.keys))
    release_loaded(shared.bias_empty.index(slot))
    return widen(bias)


@gluon.jit
def _clear_values(block, task, step, tile: gl.constexpr, variant: gl.constexpr, BITS: gl.constexpr):
    """Set the values of this step's V tile in shared memory to 0 for keys that no row of the tile
    sees; nothing is done where all are seen. BITS: the block has a bit tile."""
    begin = task.walk.seen_begin - block.first_key
    end = task.walk.seen_end - block.first_key
    some = (begin > 0) | (end < tile.keys)
    reach = None
    if BITS:
        WORDS: gl.constexpr = variant.mask_keys // 32
        COUNT: gl.constexpr = tile.keys // 32
        first_word = block.first_key % variant.mask_keys // 32
        reach = task.mask.reach + block.number.to(gl.int64) * WORDS + first_word
        for word in gl.static_range(COUNT):
            some = some | (reached(reach + word, block.number) != -1)
    if some:
        stage = step % tile.stages
        mbarrier.wait(task.shared.v_full.index(stage), (step // tile.stages) & 1)
        clear_hidden(task.shared.v.index(stage), begin, end, reach, block.number, BITS)
