"""Scales, zero points and minimums of a stage of codes, for products on Hopper.

What: what a tile's outputs multiply and subtract, as float32.
Grid: none, inlined into the kernels.
One call: TILE_N outputs, and the groups of a stage's channels.
Traffic: each scale once for each tile of rows.
Numerics: float32; see `QuantisedWeight`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels import quantised_weight
from tilewise.kernels.gluon.quantised.operands import pairs, scales_layout, small, wide

_ROWS = gl.constexpr(quantised_weight.SCALE_ROWS)
_WORD = gl.constexpr(quantised_weight.SCALE_WORD)


@gluon.constexpr_function
def has_offset(shape):
    """Return whether outputs have an offset, so that the sums of rows of x are needed."""
    return (shape.has_zeros and not shape.subtracts) or shape.minimum_kind >= 0


@gluon.constexpr_function
def bases_layout(shape):
    """Return the register layout of the rows of a tile's scales."""
    columns = shape.blocks if shape.folds else shape.groups
    return gl.SliceLayout(1, scales_layout(shape.num_warps, columns))


@gluon.jit
def base_of(first, outputs, grid, outer_grid, block_rows, outer_rows, shape: gl.constexpr):
    """Return the places of the first scales and outer scales of the tile of outputs from `first`
    on, (tile_n, 1) each; rows past the last output repeat it."""
    layout: gl.constexpr = bases_layout(shape)
    row = gl.minimum(first + gl.arange(0, shape.tile_n, layout), outputs - 1)
    return bases_of(row, grid, outer_grid, block_rows, outer_rows, shape)


@gluon.jit
def bases_of(row, grid, outer_grid, block_rows, outer_rows, shape: gl.constexpr):
    """Return the places of the first scales and outer scales of `row` numbers (n,) of a weight, (n,
    1) each."""
    if shape.turned:  # see `QuantisedWeight.lanes`; folded scales are counted by words
        EACH: gl.constexpr = 1 if shape.folds else _WORD
        scale = row // _ROWS * (grid * _ROWS) + row % _ROWS * EACH
    else:
        scale = row // block_rows * grid
    return gl.expand_dims(scale, 1), gl.expand_dims(row // outer_rows * outer_grid, 1)


@gluon.jit
def _columns_of(stage, groups: gl.constexpr, shared: gl.constexpr, layout: gl.constexpr):
    """Return the columns (1, groups) of the scales of a stage's groups; `shared` groups in a row
    share a scale, 0: all of a row."""
    column = gl.expand_dims(gl.arange(0, groups, gl.SliceLayout(0, layout)), 0)
    if shared == 0:
        return column * 0
    elif shared == 1:
        return column + stage * groups
    else:
        return (column + stage * groups) // shared


@gluon.jit
def raw_scales(tensors, base, stage, shape: gl.constexpr):
    """Load scale, zero point, minimum and the outer factors of scale and minimum of a stage,
    (outputs, groups); what the shape lacks is the scale once more."""
    scales, zeros, minimums, outer, outer_minimums = tensors
    layout: gl.constexpr = scales_layout(shape.num_warps, shape.groups)
    column = _columns_of(stage, shape.groups, shape.shared, layout)
    if shape.turned:
        column = column // _WORD * (_ROWS * _WORD) + column % _WORD
    at = base[0] + column
    outer_at = base[1] + _columns_of(stage, shape.groups, shape.outer_shared, layout)
    scale = gl.load(scales + at)
    zero = scale
    minimum = scale
    factor = scale
    minimum_factor = scale
    if shape.has_zeros:
        zero = gl.load(zeros + at)
    if shape.minimum_kind >= 0:
        minimum = gl.load(minimums + at)
    if shape.has_outer:
        factor = gl.load(outer + outer_at)
    if shape.has_outer_minimums:
        minimum_factor = gl.load(outer_minimums + outer_at)
    return scale, zero, minimum, factor, minimum_factor


@gluon.jit
def stage_scales(tensors, base, stage, grid, shape: gl.constexpr):
    """Load the scales of a stage as `raw_scales` does.

    With shape.folds load words of four exponents (outputs, blocks), which are folded into operands.
    """
    if shape.folds:
        layout: gl.constexpr = scales_layout(shape.num_warps, shape.blocks)
        column = gl.expand_dims(gl.arange(0, shape.blocks, gl.SliceLayout(0, layout)), 0)
        at = base[0] + gl.minimum(column + stage * shape.blocks, grid - 1) * _ROWS
        scale = gl.load(tensors[0] + at)
        return scale, scale, scale, scale, scale
    else:
        return raw_scales(tensors, base, stage, shape)


@gluon.jit
def scale_and_offset(raw, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return scale and offset (outputs, groups), float32: W = operand * scale - offset, where
    operands are those of `lanes_registers`."""
    scale, zero, minimum, factor, minimum_factor = raw
    SMALL: gl.constexpr = small(shape.kind, DTYPE)
    scale = wide(scale, shape.scale_kind)
    if shape.has_outer:
        scale = scale * factor.to(gl.float32)
    offset = scale
    if shape.has_zeros and not shape.subtracts:
        offset = scale * zero.to(gl.float32)
    if shape.minimum_kind >= 0:
        less = wide(minimum, shape.minimum_kind)
        if shape.has_outer_minimums:
            less = less * minimum_factor.to(gl.float32)
        if shape.has_zeros and not shape.subtracts:
            offset = offset + less
        else:
            offset = less
    return scale * (1.0 / SMALL), offset


@gluon.jit
def negated_zeros(raw, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return pairs of -zero * SMALL (outputs, groups), which `lanes_registers` adds to INT4."""
    SMALL: gl.constexpr = small(shape.kind, DTYPE)
    if shape.has_zeros and shape.subtracts:
        zero = raw[1].to(gl.float32) * -SMALL
    else:
        layout: gl.constexpr = scales_layout(shape.num_warps, shape.groups)
        size: gl.constexpr = [16 * shape.num_warps, shape.groups]
        zero = gl.zeros(size, gl.float32, layout)
    return pairs(zero, DTYPE)
