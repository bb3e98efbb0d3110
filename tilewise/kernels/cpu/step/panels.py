"""The layout of packed weights, in which `product.py` reads them for any number of rows.

A weight (N, K) becomes [N / 64][K / 32][4][32 / w][16][w], with w = 2 elements of bfloat16 in a
word and 1 of others: groups of four panels of 16 outputs, in steps of 32 inputs. A step of a panel
is the content of a tile register of AMX, and its rows of 16 words the operands of a VDPBF16PS or of
a multiply-add of any width. One row streams the groups from memory in their order, many rows
multiply the same bytes in tiles, so weights are stored once. N is padded to 64 and K to 32 with
zeros.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.huge_pages import ask_for_huge_pages

COLUMNS = 16  # outputs of a panel: a register of AVX-512, a row of a tile register
GROUP = 4  # panels of a group: as many chains of sums as keep the units busy
WIDTH = GROUP * COLUMNS
STEP = 32  # inputs in a tile register


_ARENA_BYTES = 32 << 20
_arena = torch.empty(0, dtype=torch.uint8)  # the rest of memory from which words are taken
_taking = threading.Lock()


def fresh_words(size: int) -> Tensor:
    """Return uninitialised memory for `size` bytes of words, a uint8 tensor on a cache line's
    boundary.

    Words of several weights lie in the same large pages, where the system has them: a decode step
    reads all once, in pages of 4 KiB a third slower (Q4_0, one core of an EPYC with AVX-512,
    2026-11-29).
    """
    global _arena
    whole = padded(size, 64)
    with _taking:
        if whole > len(_arena):
            with torch.inference_mode(False):  # it is written to in either mode
                fresh = torch.empty(max(whole, _ARENA_BYTES) + 64, dtype=torch.uint8)
            ask_for_huge_pages(fresh)
            fresh = fresh[-fresh.data_ptr() % 64 :]
            if whole > _ARENA_BYTES // 2:
                return fresh[:size]
            _arena = fresh
        taken, _arena = _arena[:size], _arena[whole:]
    return taken


class Panels(NamedTuple):
    """A packed weight (N, K) with its bias, in the layout of this file or, if narrow, of
    `narrow.py`; made by `pack` or `pack_narrow`.

    Attributes:
        words: a flat tensor of the weight's dtype, or of uint8 for a narrow weight, see
            `narrow.py`.
        num_outputs, num_inputs: N and K without padding.
        bias: float32, padded like the outputs, or None.
        dtype: the dtype of the weight, of rows and of results.
        table: the addresses of each group of 64 outputs of a narrow weight and of
            how it is stored, int64 (groups, 2); None for words.
        is_permuted: True if columns of a narrow weight multiply inputs in an order of their own.
        kept: tensors to which the addresses refer, and which live as long as this one.
    """

    words: Tensor
    num_outputs: int
    num_inputs: int
    bias: Tensor | None
    dtype: torch.dtype
    table: Tensor | None = None
    is_permuted: bool = False
    kept: tuple[Tensor, ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether weights are stored in 8 or 4 bits."""
        return self.table is not None

    @property
    def num_weights(self) -> int:
        """The number of elements of the weight, padding included."""
        return self.padded_outputs * self.padded_inputs

    @property
    def num_bytes(self) -> int:
        """The bytes of the words, scales included, without the bias."""
        return self.words.nbytes

    @property
    def padded_outputs(self) -> int:
        """N rounded up to a multiple of 64."""
        return padded(self.num_outputs, WIDTH)

    @property
    def padded_inputs(self) -> int:
        """K rounded up to a multiple of 32."""
        return padded(self.num_inputs, STEP)

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of words that are not narrow: (groups, steps, panels, words, outputs,
        elements)."""
        width = elements_of(self.dtype)
        groups, steps = self.padded_outputs // WIDTH, self.padded_inputs // STEP
        return groups, steps, GROUP, STEP // width, COLUMNS, width


def elements_of(dtype: torch.dtype) -> int:
    """Return the number of elements in a word of packed weights of `dtype`: 2 for bfloat16, else
    1."""
    return 2 if dtype == torch.bfloat16 else 1


def padded(count: int, unit: int) -> int:
    """Return `count` rounded up to a multiple of `unit`."""
    return -(-count // unit) * unit


def row_stride(count: int) -> int:
    """Return the elements from row to row of a buffer of `count` inputs or outputs of products.

    It is 32 more than necessary: rows a multiple of 4 KiB apart would share the sets of an L1
    cache.
    """
    return padded(count, WIDTH) + STEP


def check_dtype(dtype: torch.dtype) -> None:
    """Raise UnsupportedError if `dtype` is not one of the CPU's kernels or this CPU has no
    instructions for it."""
    from tilewise.kernels.cpu.machine.rows import why_not_dtype  # with numba, which takes a second

    if reason := why_not_dtype(dtype):
        raise UnsupportedError(reason)


def pack(weight: Tensor, bias: Tensor | None = None, *, into: Panels | None = None) -> Panels:
    """Return the panels of a (N, K) weight and its bias (N,): groups of 64 outputs in steps of 32
    inputs.

    Args:
        into: the panels of an earlier weight of this shape and dtype, whose memory is overwritten
            and which are returned; None allocates.

    Raises:
        UnsupportedError: the CPU has no instructions for the dtype.
    """
    check_dtype(weight.dtype)
    outputs, inputs = weight.shape
    dtype, width = weight.dtype, elements_of(weight.dtype)
    rows, columns = padded(outputs, WIDTH), padded(inputs, STEP)
    wide = weight.detach()
    if (rows, columns) != (outputs, inputs):
        wide = torch.zeros((rows, columns), dtype=dtype)
        wide[:outputs, :inputs] = weight.detach()
    wide = wide.contiguous()
    if wide.storage_offset() % width:  # a part of a buffer, which begins inside a word
        wide = wide.clone()
    words = wide.view(torch.int32 if width == 2 else dtype)
    parts = words.view(rows // WIDTH, GROUP, COLUMNS, columns // STEP, STEP // width)
    packed = (fresh_words(words.nbytes) if into is None else into.words).view(words.dtype)
    packed.view(parts.permute(0, 3, 1, 4, 2).shape).copy_(parts.permute(0, 3, 1, 4, 2))
    if into is not None:
        copy_bias(bias, into)
        return into
    packed = packed.view(dtype)
    return Panels(packed, outputs, inputs, pad_bias(bias, rows), dtype)


def copy_bias(bias: Tensor | None, into: Panels) -> None:
    """Overwrite the bias of packed panels by `bias` (N,) in place; nothing is done if either is
    None."""
    if bias is not None and into.bias is not None:
        into.bias[: len(bias)] = bias.detach().float()


def pad_bias(bias: Tensor | None, count: int) -> Tensor | None:
    """Return a bias as `count` float32, followed by zeros; None stays None."""
    if bias is None:
        return None
    wide = torch.zeros(count, dtype=torch.float32)
    wide[: len(bias)] = bias.detach().float()
    return wide


def unpack(panels: Panels) -> Tensor:
    """Return the (N, K) weight that was packed, a new tensor; the panels must not be narrow."""
    words = panels.words.view(panels.grid).permute(0, 2, 4, 1, 3, 5)
    rows = words.reshape(panels.padded_outputs, panels.padded_inputs)
    return rows[: panels.num_outputs, : panels.num_inputs]


def rows_of(panels: Panels, rows: Tensor) -> Tensor:
    """Return rows (...,) of the packed weight, (..., K), as an embedding looks them up; the panels
    must not be narrow."""
    words = panels.words.view(panels.grid)
    found = words[rows // WIDTH, :, rows // COLUMNS % GROUP, :, rows % COLUMNS]
    return found.flatten(-3)[..., : panels.num_inputs].contiguous()


def interleaved(rows: int) -> Tensor:
    """Return int64 numbers of the rows of gate and up, (2 I,) one below the other, in the order in
    which they are packed: 16 rows of gate, 16 of up, and so on.

    Args:
        rows: 2 I; I is padded to a multiple of 16 by the number -1.
    """
    half = rows // 2
    count = -(-half // COLUMNS) * COLUMNS
    parts = torch.full((2, count), -1)
    parts[:, :half] = torch.arange(rows).view(2, half)
    return parts.view(2, -1, COLUMNS).transpose(0, 1).flatten()


def interleave(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the rows of gate and up, (2 I, K), and their bias in groups of 16 in turn, so that one
    block of outputs computes both.

    I is padded with rows of zeros to a multiple of 16.
    """
    half = weight.shape[0] // 2
    count = -(-half // COLUMNS) * COLUMNS

    def mixed(x: Tensor) -> Tensor:
        parts = x.new_zeros((2, count, *x.shape[1:]))
        parts[0, :half], parts[1, :half] = x[:half], x[half:]
        return parts.view(2, count // COLUMNS, COLUMNS, *x.shape[1:]).transpose(0, 1).flatten(0, 2)

    return mixed(weight.detach()), None if bias is None else mixed(bias.detach())
