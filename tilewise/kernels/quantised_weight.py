"""Weights of 8 or 4 bits as data: codes, scales, zero points and minimums; and their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

__all__ = ["E2M1", "LANES_BLOCK", "NIBBLES", "SCALE_ROWS", "SCALE_WORD", "QuantisedWeight"]

NIBBLES = 16
"""Codes of 4 bits."""

LANES_BLOCK = 64
"""Bytes of a row that are ordered together where codes lie in the order of lanes."""

SCALE_ROWS, SCALE_WORD = 8, 4
"""Rows whose scales of MXFP4 lie together in the order of lanes, and scales of a row in a word."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))
"""The table of floats of 4 bits. Source: OCP Microscaling Formats 1.0, section 5.3.3."""

_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SCALES = (*_FLOATS, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A weight (N, K) of narrow numbers; what every format of quantised checkpoints is read into.

    With n // block[0], k // block[1] for g, and outer, outer_minimums likewise by outer_block:

        scale[g]   = scales[g] * outer          minimum[g] = minimums[g] * outer_minimums
        W[n, p(k)] = (table[code[n, k]] - zeros[g]) * scale[g] - minimum[g]

    where an absent table is the identity, an absent zeros or minimums 0, an absent outer 1, and p
    the permutation. The difference, the product and the last difference are each rounded to
    `computed`; scale and minimum are float32.

    Attributes:
        codes: uint8 (N, K / 2), two codes of 4 bits in a byte, the one of the even k in the lower
            half; or (N, K) int8, float8_e4m3fn or float8_e5m2, whose values are the codes.
        scales: (ceil(N / block[0]), ceil(K / block[1])), float32, float16, bfloat16, float8_e4m3fn,
            float8_e8m0fnu, or integers in uint8 or int8.
        block: the rows and columns that share a scale; the columns divide K if there are several
            groups of them.
        table: 16 numbers of float32, the values of codes of 4 bits; None for 0 ... 15.
        zeros: zero points in the shape of scales, uint8, int8 or of a float dtype, those of codes
            of 4 bits at most 127; None for 0.
        minimums: terms to subtract, in the shape of scales, of one of its dtypes; None for 0.
        outer: factors of the scales, float32 or float16, (ceil(N / outer_block[0]),
            ceil(K / outer_block[1])); None for 1.
        outer_minimums: factors of the minimums, likewise.
        outer_block: the rows and columns that share such a factor, multiples of those of block.
        permutation: int32 (K,), the input p(k) that column k of the codes multiplies; None for k.
        computed: the dtype in which the format computes values: float32, float16 or bfloat16.
        in_lanes: True if each 64 bytes of a row of codes are in the order of `lanes`, in which
            tensor cores take them, and not in that of their columns.
        rounds_rows: True if the format rounds the rows that it multiplies to e4m3, 128 channels by
            a scale of their own; products may do so where there are many rows.

    Source: Frantar et al., 2022 (GPTQ); Lin et al., 2023 (AWQ); Dettmers et al., 2023 (NF4); OCP
    Microscaling Formats 1.0, 2023; ggml's k-quants (two levels of scales).
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    table: tuple[float, ...] | None = None
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    outer: Tensor | None = None
    outer_minimums: Tensor | None = None
    outer_block: tuple[int, int] = (1, 1)
    permutation: Tensor | None = None
    computed: torch.dtype = torch.float32
    in_lanes: bool = False
    rounds_rows: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, K) of the weight that the codes stand for: outputs and inputs."""
        return self.codes.shape[0], self.codes.shape[1] * (8 // self.bits)

    @property
    def device(self) -> torch.device:
        """The device of the codes, on which all tensors lie."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that there are, by the names of their attributes."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """Return the weight with all tensors on a device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def check(self, name: str = "weight") -> None:
        """Raise unless shapes, dtypes and devices of the tensors follow the rules of the class;
        values are not read.

        Raises:
            ValueError, TypeError: a tensor breaks a rule; the message names the tensor, after
                `name`.
        """
        if self.codes.dim() != 2:
            raise ValueError(
                f"{name}.codes must be (N, bytes of K), got shape {tuple(self.codes.shape)}"
            )
        _check_dtype(f"{name}.codes", self.codes, _CODES)
        for label, pair in (("block", self.block), ("outer_block", self.outer_block)):
            if min(pair) < 1:
                raise ValueError(f"{name}.{label} must be positive, got {pair}")
        rows, columns = self.shape
        if columns > self.block[1] and columns % self.block[1]:
            raise ValueError(
                f"{name}.block must divide the columns, got {self.block[1]} of {columns}"
            )
        grid = _grid((rows, columns), self.block)
        outer = _grid((rows, columns), self.outer_block)
        for label, tensor, shape, dtypes in (
            ("scales", self.scales, grid, _SCALES),
            ("zeros", self.zeros, grid, (torch.uint8, torch.int8, *_FLOATS)),
            ("minimums", self.minimums, grid, _SCALES),
            ("outer", self.outer, outer, _FLOATS),
            ("outer_minimums", self.outer_minimums, outer, _FLOATS),
            ("permutation", self.permutation, (columns,), (torch.int32,)),
        ):
            if tensor is not None:
                if tuple(tensor.shape) != shape:
                    raise ValueError(
                        f"{name}.{label} must have shape {shape}, got {tuple(tensor.shape)}"
                    )
                _check_dtype(f"{name}.{label}", tensor, dtypes)
                if tensor.device != self.device:
                    raise ValueError(
                        f"{name}.{label} must be on {self.device}, got {tensor.device}"
                    )
        if self.has_outer:
            for inner, wide in zip(self.block, self.outer_block, strict=True):
                if wide % inner:
                    raise ValueError(
                        f"{name}.outer_block must be multiples of block {self.block}, "
                        f"got {self.outer_block}"
                    )
        if self.table is not None and self.bits != 4:
            raise ValueError(f"{name}.table must be None with codes of 8 bits, got a table")
        if self.table is not None and len(self.table) != NIBBLES:
            raise ValueError(f"{name}.table must have {NIBBLES} numbers, got {len(self.table)}")
        if self.minimums is None and self.outer_minimums is not None:
            raise ValueError(f"{name}.outer_minimums must be None without minimums, got a tensor")
        if self.computed not in _FLOATS:
            raise TypeError(f"{name}.computed must be a float dtype, got {self.computed}")

    @property
    def has_outer(self) -> bool:
        """Whether scales or minimums have outer factors."""
        return self.outer is not None or self.outer_minimums is not None

    def dequantise(self) -> Tensor:
        """Return W (N, K) in the dtype `computed`, its columns in the order of the inputs whatever
        the order of codes."""
        if self.in_lanes:
            return self.columns().dequantise()
        rows, columns = self.shape

        def spread(tensor: Tensor, block: tuple[int, int]) -> Tensor:
            wide = tensor.float()
            wide = wide.repeat_interleave(min(block[0], rows), 0)[:rows]
            return wide.repeat_interleave(min(block[1], columns), 1)[:, :columns]

        def scaled(tensor: Tensor, outer: Tensor | None) -> Tensor:
            whole = spread(tensor, self.block)
            return whole if outer is None else whole * spread(outer, self.outer_block)

        def rounded(x: Tensor) -> Tensor:
            return x if self.computed == torch.float32 else x.to(self.computed).float()

        if self.bits == 4:
            pairs = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
            values = pairs.float()
            if self.table is not None:
                values = torch.tensor(self.table, device=self.device)[pairs.int()]
        else:
            values = self.codes.float()
        if self.zeros is not None:
            values = rounded(values - spread(self.zeros, self.block))
        values = rounded(values * scaled(self.scales, self.outer))
        if self.minimums is not None:
            values = rounded(values - scaled(self.minimums, self.outer_minimums))
        if self.permutation is not None:
            inverse = torch.argsort(self.permutation.long())
            values = values[:, inverse]
        return values.to(self.computed)

    @property
    def is_spread(self) -> bool:
        """Whether the order of lanes also spreads the bits of codes and reorders scales: true of
        MXFP4 weights, with the table E2M1, scales in float8_e8m0fnu for blocks of 1 x 32 and
        nothing else, whose rows are a multiple of 8 and whose scales in a row are a multiple of
        4."""
        return (
            self.table == E2M1
            and self.scales.dtype == torch.float8_e8m0fnu
            and self.block == (1, 32)
            and self.shape[0] % SCALE_ROWS == 0
            and self.scales.shape[1] % SCALE_WORD == 0
            and self.zeros is None
            and self.minimums is None
            and not self.has_outer
        )

    def lanes(self) -> QuantisedWeight:
        """Return the weight with codes in the order of lanes.

        A word of codes of 4 bits is 32 channels' for one lane t of 4, nibble 4 j + 2 q + p of it
        channel 16 q + 8 p + 2 t + j; of 8 bits 16 channels', byte 2 j + p channel 8 p + 2 t + j.
        Of a block of 64 bytes the first four words are those of lane 0 for all its channels.

        Of MXFP4 the bits of each word are rotated, see `_SPREAD`, so that few instructions make
        operands of them; and scales are words of four of a row, those of eight rows one after
        another, so that a read of 32 bytes has a word of each.

        Raises:
            ValueError: rows are no multiple of 64 bytes.
        """
        width = self.codes.shape[1]
        if width % LANES_BLOCK:
            raise ValueError(f"codes must have a multiple of {LANES_BLOCK} bytes, got {width}")
        return self if self.in_lanes else self._reordered(True)

    def padded(self) -> QuantisedWeight:
        """Return the weight with columns behind its own, to a multiple of 64 bytes of codes in a
        row; itself if there are no missing ones.

        The new codes are 0, and so are the scales, zeros and minimums of the new groups. Where a
        row has one group, the new columns join it, and their values need not be 0: the other factor
        of a product must be. A permutation keeps its length: no product takes one with new columns.
        """
        missing = -self.codes.shape[1] % LANES_BLOCK
        if missing == 0:
            return self
        rows, columns = self.codes.shape[0], self.shape[1]
        raw = self.codes.view(torch.uint8)
        codes = torch.cat((raw, raw.new_zeros(rows, missing)), 1).view(self.codes.dtype)
        found = {"codes": codes}
        padded = codes.shape[1] * (8 // self.bits)
        for names, size in ((_INNER, self.block[1]), (_OUTER, self.outer_block[1])):
            for name in self.tensors().keys() & names if columns > size else ():
                tensor = getattr(self, name)
                more = -(-padded // size) - tensor.shape[1]
                found[name] = torch.nn.functional.pad(
                    tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor, (0, more)
                ).view(tensor.dtype)
        block, outer_block = (
            (height, size if columns > size else padded)
            for height, size in (self.block, self.outer_block)
        )
        joined = replace(self, block=block, outer_block=outer_block)
        return replace(joined, **found)  # type: ignore[arg-type]

    def columns(self) -> QuantisedWeight:
        """Return the weight with its codes in the order of columns, the inverse of `lanes`; itself
        if they are."""
        return self._reordered(False) if self.in_lanes else self

    def _reordered(self, in_lanes: bool) -> QuantisedWeight:
        raw = self.codes.view(torch.uint8)
        ordered = torch.empty_like(raw)
        if self.bits == 4:  # columns are (word, q, p, lane, j), lanes (lane, word, j, q, p)
            shape: tuple[int, ...] = (4, 2, 2, 4, 2) if in_lanes else (4, 4, 2, 2, 2)
            order: tuple[int, ...] = (3, 0, 4, 1, 2) if in_lanes else (1, 3, 4, 0, 2)
        else:  # columns are (word, p, lane, j), lanes (lane, word, j, p)
            shape = (4, 2, 4, 2) if in_lanes else (4, 4, 2, 2)
            order = (2, 0, 3, 1) if in_lanes else (1, 3, 0, 2)
        dims = (0, 1, *(2 + place for place in order))
        each = max(1, _AT_ONCE // max(1, raw.shape[1]))
        for codes, to in zip(raw.split(each), ordered.split(each), strict=True):
            if self.is_spread and not in_lanes:
                codes = _rotated(codes, is_back=True)
            if self.bits == 4:
                found = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, *shape)
                found = found.permute(dims).reshape(*codes.shape, 2)
                to.copy_(found[..., 0] | (found[..., 1] << 4))
                if self.is_spread and in_lanes:
                    to.copy_(_rotated(to))
            else:
                found = codes.view(len(codes), -1, *shape).permute(dims)
                to.copy_(found.reshape(codes.shape))
        scales = self.scales
        if self.is_spread:
            scales = _turned(scales) if in_lanes else _straight(scales)
        codes = ordered.view(self.codes.dtype)
        return replace(self, codes=codes, scales=scales, in_lanes=in_lanes)

    def rows_of(self, rows: Tensor) -> Tensor:
        """Return rows of W, (..., K) in the dtype `computed`, as an embedding looks them up.

        Args:
            rows: int64 (...,) of numbers in 0 ... N - 1.
        """
        return self._by_row(rows.reshape(-1)).dequantise().view(*rows.shape, -1)

    def _by_row(self, rows: Tensor) -> QuantisedWeight:
        """Return the weight that has the rows `rows` (int64) of this one, in their order, with
        blocks of one row. Scales that several rows share are repeated; codes keep their order, of
        lanes or of columns."""
        inner, outer = rows // self.block[0], rows // self.outer_block[0]
        taken = {
            name: _take(tensor, inner if name in _INNER else outer)
            for name, tensor in self.tensors().items()
            if name in (*_INNER, *_OUTER)
        }
        block, outer_block = (1, self.block[1]), (1, self.outer_block[1])
        narrow = replace(self, codes=_take(self.codes, rows), block=block, outer_block=outer_block)
        narrow = replace(narrow, **taken)  # type: ignore[arg-type]
        if not (self.in_lanes and self.is_spread):
            return narrow
        # The rows need not be whole eights: they lie in lanes as rows of any number do first.
        words = self.scales.view(torch.uint8).view(
            -1, self.scales.shape[1] // SCALE_WORD, SCALE_ROWS, SCALE_WORD
        )
        found = words[rows // SCALE_ROWS, :, rows % SCALE_ROWS].flatten(1)
        narrow = replace(
            narrow,
            codes=_rotated(narrow.codes, is_back=True),
            scales=found.view(torch.float8_e8m0fnu),
        )
        if narrow.is_spread:
            codes, scales = _rotated(narrow.codes), _turned(narrow.scales)
            narrow = replace(narrow, codes=codes, scales=scales)
        return narrow

    def cut(self, rows: tuple[int, int], columns: tuple[int, int]) -> QuantisedWeight:
        """Return the weight that has rows rows[0] ... rows[1] - 1 and columns columns[0] ...
        columns[1] - 1 of this one, as a rank of several holds it.

        Raises:
            ValueError: the columns cut a group, a byte of codes or 64 bytes in the order of lanes,
                or the weight has a permutation and columns are cut.
        """
        (first, end), (left, right) = rows, columns
        height, width = self.shape
        whole = (left, right) == (0, width)
        if not whole and self.permutation is not None:
            raise ValueError("columns must be whole with a permutation of the inputs, got a part")
        unit = math.lcm(self.block[1] if width > self.block[1] else 1, 8 // self.bits)
        if self.in_lanes:
            unit = math.lcm(unit, LANES_BLOCK * 8 // self.bits)
        if self.has_outer and width > self.outer_block[1]:
            unit = math.lcm(unit, self.outer_block[1])
        if left % unit or (right % unit and right != width):
            raise ValueError(f"columns must be cut at multiples of {unit}, got {columns}")
        if self.in_lanes and self.is_spread and not whole:
            return self.columns().cut(rows, columns).lanes()
        if (first, end) != (0, height):
            part = self._by_row(torch.arange(first, end, device=self.device))
        else:
            part = self
        if whole:
            return part
        found, per_byte = part.tensors(), 8 // self.bits
        cut = {"codes": part.codes[:, left // per_byte : right // per_byte].contiguous()}
        for names, size in ((_INNER, self.block[1]), (_OUTER, self.outer_block[1])):
            for name in found.keys() & names if width > size else ():
                cut[name] = found[name][:, left // size : -(-right // size)].contiguous()
        return replace(part, **cut)  # type: ignore[arg-type]

    @staticmethod
    def concatenate(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
        """Return the weights one below another as one weight, or None where they are not alike; of
        one weight, itself.

        Weights are alike if they have the same tensors, dtypes, columns, columns that share a
        scale, `computed`, order of codes and `rounds_rows`, and, if any, the same table and
        permutation. Where weights have different blocks, or one begins inside a block of rows, the
        result has blocks of one row.
        """
        first = weights[0]
        for other in weights[1:]:
            if not _are_alike(first, other):
                return None
        if len(weights) == 1:
            return first
        if first.in_lanes and first.table == E2M1:  # eights of rows need not remain eights
            whole = QuantisedWeight.concatenate([weight.columns() for weight in weights])
            assert whole is not None
            return whole.lanes()
        heights = [weight.shape[0] for weight in weights[:-1]]
        same_blocks = {(w.block, w.outer_block) for w in weights} == {
            (first.block, first.outer_block)
        }
        rows = math.lcm(first.block[0], first.outer_block[0] if first.has_outer else 1)
        if not same_blocks or any(height % rows for height in heights):
            weights = [w._by_row(torch.arange(w.shape[0], device=w.device)) for w in weights]
            first = weights[0]
        joined = {
            name: torch.cat([weight.tensors()[name] for weight in weights])
            for name in first.tensors()
            if name in ("codes", *_INNER, *_OUTER)
        }
        return replace(first, **joined)  # type: ignore[arg-type]


_AT_ONCE = 1 << 25  # bytes of codes that are put in another order at a time
_INNER = ("scales", "zeros", "minimums")  # tensors with an element for each block
_OUTER = ("outer", "outer_minimums")  # likewise for each outer block


def _are_alike(a: QuantisedWeight, b: QuantisedWeight) -> bool:
    mine, its = a.tensors(), b.tensors()
    if (
        mine.keys() != its.keys()
        or a.shape[1] != b.shape[1]
        or a.computed != b.computed
        or a.table != b.table
        or a.in_lanes != b.in_lanes
        or a.rounds_rows != b.rounds_rows
    ):
        return False
    width = a.shape[1]
    pairs = [(a.block, b.block)]
    if a.has_outer:
        pairs.append((a.outer_block, b.outer_block))
    if any(min(x[1], width) != min(y[1], width) for x, y in pairs):
        return False
    if any(mine[name].dtype != its[name].dtype for name in mine):
        return False
    if a.permutation is None or b.permutation is None or a.permutation.is_meta:
        return True  # both have none; or only shapes are known
    return torch.equal(a.permutation, b.permutation)


# Codes of FP4 whose bits are spread over a word: (which bits, how far they are rotated to the
# left). Codes 0, 1 and 2 of each half, rotated by 4, 0 and 26 bits, have the sign in bit 15 of a
# half and their magnitude in bits 6 to 8, as the exponent and mantissa of a bfloat16; code 3 by 30,
# but its lowest bit by 6.
_SPREAD = (
    (0x00770077, 2),
    (0x00880088, 8),
    (0x07000700, 4),
    (0x08000800, 10),
    (0x10001000, 20),
    (0x60006000, 28),
    (0x80008000, 2),
)


def _rotated(codes: Tensor, *, is_back: bool = False) -> Tensor:
    """Return uint8 codes (N, bytes of words) with the bits of each 32-bit word moved as `_SPREAD`
    says, or, with `is_back`, moved back."""
    words = codes.view(torch.int32).long() & 0xFFFFFFFF
    found = torch.zeros_like(words)
    for mask, left in _SPREAD:
        shift = 32 - left if is_back else left
        chosen = words if is_back else words & mask
        moved = (chosen << shift | chosen >> (32 - shift)) & 0xFFFFFFFF
        found |= moved & mask if is_back else moved
    return found.to(torch.int32).view(torch.uint8)


def _turned(scales: Tensor) -> Tensor:
    """Return scales (N, G) of MXFP4 in the order of lanes, see `QuantisedWeight.lanes`."""
    rows, columns = scales.shape
    words = scales.view(torch.uint8).view(-1, SCALE_ROWS, columns // SCALE_WORD, SCALE_WORD)
    return words.transpose(1, 2).reshape(rows, columns).view(scales.dtype)


def _straight(scales: Tensor) -> Tensor:
    """Return scales in the order of columns, the inverse of `_turned`."""
    rows, columns = scales.shape
    words = scales.view(torch.uint8).view(-1, columns // SCALE_WORD, SCALE_ROWS, SCALE_WORD)
    return words.transpose(1, 2).reshape(rows, columns).view(scales.dtype)


def _take(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return the rows `rows` of a tensor of any dtype; those of one byte are indexed as uint8,
    since indexing knows no float8_e8m0fnu on a CPU."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)[rows].view(tensor.dtype)
    return tensor[rows]


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be one of {names}, got {tensor.dtype}")
