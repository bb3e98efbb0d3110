"""Weights as the products of `product.py` read them, whatever the number of rows.

A weight (N, K) becomes panels of 16 outputs, [N / 16][K / w][16][w], with w = 2 elements of
bfloat16 in a word and 1 of others: what a tile register of AMX, a VDPBF16PS and a multiply-add of
every width can load as it lies. One row streams the panels from memory, many rows multiply the very
same bytes in tiles, so weights are held once. N is padded to 32 and K to 32 with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 16  # outputs of a panel: a register of AVX-512, a row of a tile register
PAD = 32  # outputs and inputs are padded to its multiples: two panels, one step of a tile


class Panels(NamedTuple):
    """A packed weight.

    Attributes:
        words: flat, of the weight's dtype.
        num_outputs, num_inputs: N and K without padding.
        bias: float32, padded like the outputs, or None.
    """

    words: Tensor
    num_outputs: int
    num_inputs: int
    bias: Tensor | None

    @property
    def padded_outputs(self) -> int:
        """N up to the next multiple of 32."""
        return padded(self.num_outputs)

    @property
    def padded_inputs(self) -> int:
        """K up to the next multiple of 32."""
        return padded(self.num_inputs)


def padded(count: int) -> int:
    """`count` up to the next multiple of 32."""
    return -(-count // PAD) * PAD


def row_stride(count: int) -> int:
    """Elements from row to row of an operand with `count` inputs.

    32 more than there are: rows a multiple of 4 KiB apart would share the sets of an L1 cache.
    """
    return padded(count) + PAD


def pack(weight: Tensor, bias: Tensor | None = None) -> Panels:
    """Lay a (N, K) weight out in panels; see the head of this file."""
    outputs, inputs = weight.shape
    width = 2 if weight.dtype == torch.bfloat16 else 1
    wide = weight.detach()
    rows, columns = padded(outputs), padded(inputs)
    if (rows, columns) != (outputs, inputs):
        wide = torch.zeros((rows, columns), dtype=weight.dtype)
        wide[:outputs, :inputs] = weight.detach()
    wide = wide.contiguous()
    words = wide.view(torch.int32) if width == 2 else wide
    grouped = words.view(rows // COLUMNS, COLUMNS, columns // width).transpose(1, 2).contiguous()
    if bias is not None:
        wide_bias = torch.zeros(rows, dtype=torch.float32)
        wide_bias[:outputs] = bias.detach().float()
        bias = wide_bias
    return Panels(grouped.view(weight.dtype).view(-1), outputs, inputs, bias)


def unpack(panels: Panels) -> Tensor:
    """Return the (N, K) weight that was packed."""
    words, width = panels.words, 1
    if words.dtype == torch.bfloat16:
        words, width = words.view(torch.int32), 2
    grouped = words.view(-1, panels.padded_inputs // width, COLUMNS).transpose(1, 2)
    rows = grouped.reshape(panels.padded_outputs, -1).view(panels.words.dtype)
    return rows[: panels.num_outputs, : panels.num_inputs]


def interleave(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Rows of gate and up, (2 I, K), in turns of 16, so that one block computes both of a column.

    I is padded with zeros to a multiple of 16.
    """
    half = weight.shape[0] // 2
    count = -(-half // COLUMNS) * COLUMNS

    def mixed(x: Tensor) -> Tensor:
        parts = x.new_zeros((2, count, *x.shape[1:]))
        parts[0, :half], parts[1, :half] = x[:half], x[half:]
        return parts.view(2, count // COLUMNS, COLUMNS, *x.shape[1:]).transpose(0, 1).flatten(0, 2)

    return mixed(weight.detach()), None if bias is None else mixed(bias.detach())
