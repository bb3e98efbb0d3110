"""Weights of 8 and 4 bits in panels, as narrow as a checkpoint stores them.

A group of 64 outputs, see `panels.py`, is a run of parts, each of as many inputs as share the outer
factor of their scales, or else a scale:

    header   outer factors of scales, of minimums; scales, zero points, minimums: of each run of
             inputs that shares them, for the 64 outputs, in the dtype of the file
    codes    for each step of 32 inputs and each of the 4 panels, 32 registers of 16 codes

A register of codes has 16 numbers that become 16 lanes of float32: an input of 16 outputs, or where
a word has two elements two inputs of 8 outputs, so that 16 and 16 rounded lanes are the words of
`panels.py`. Codes of 4 bits are words of 32 bits, of which the lanes of 8 registers take 4 bits
each. `dequantise.py` computes

    W = (value(code) - zero) * (scale * outer) - minimum * outer_minimum

in float32, and rounds it once to the dtype of the words.

A weight that does not fit stays in plain panels: `why_not` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.cpu.step.panels import (
    COLUMNS,
    GROUP,
    STEP,
    WIDTH,
    Panels,
    check_dtype,
    elements_of,
    fresh_words,
    pack,
    pad_bias,
    padded,
)
from tilewise.kernels.quantised_weight import QuantisedWeight

__all__ = ["FIELDS", "pack_narrow", "why_not"]

# What a code is: an index of a table of 16 numbers, or a number of 8 bits.
TABLE, INT8, E4M3, E5M2 = range(4)
# What is done with its value: times the scale; less a zero point before, or a minimum after.
PLAIN, ZERO, MINIMUM = range(3)
# How a factor is stored; NONE is 1 for a factor and 0 for a term.
(NONE, FLOAT32, FLOAT16, BFLOAT16, UINT8, SIGNED8, FLOAT8, EXPONENT) = range(8)
# The words of a form, int64: offsets are in bytes from the start of a part.
(KIND, MODE, PART_STEPS, PART_BYTES, HEADER, RUN, SCALE, SCALE_AT, TERM, TERM_AT, OUTER, OUTER_AT,
 OUTER_TERM, OUTER_TERM_AT, LOOKUP, ORDER) = FIELDS = range(16)  # fmt: skip
# PART_STEPS: steps of a part, and RUN: the inputs that share a scale: 16 or a multiple of 32.
# SCALE, TERM, OUTER, OUTER_TERM: how scales, zero points or minimums, and their factors are stored.
# LOOKUP: the address of 16 float32. ORDER: the address of int32 inputs that columns multiply, or 0.

_STORED = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.uint8: UINT8,
    torch.int8: SIGNED8,
    torch.float8_e4m3fn: FLOAT8,
    torch.float8_e8m0fnu: EXPONENT,
}
_HALF_STEP = STEP // 2
_GAIN = 256.0  # of e4m3 read as float16, whose exponent has a bias of 15 in place of 7
_AT_ONCE = 1 << 22  # weights that are laid out at once: temporaries stay small beside the weight


class _Form(NamedTuple):
    """The description of how one quantised weight is stored in groups of 64 outputs; made by
    `_form_of` when the weight is packed.

    Attributes:
        words: the words of FIELDS, an int64 tensor.
        tensors: the header's tensors in order, each with True if it has a column for each run of
            inputs, False for one column for each part.
        run, part: inputs of a run and of a part.
        group_bytes: the bytes of a group of 64 outputs.
        kept: tensors to whose addresses the words refer.
    """

    words: Tensor
    tensors: tuple[tuple[Tensor, bool], ...]
    run: int
    part: int
    group_bytes: int
    kept: tuple[Tensor, ...]


def why_not(weight: QuantisedWeight) -> str | None:
    """Return why a quantised weight cannot be packed as narrow panels, or None if it can; codes of
    8-bit floats are read to find NaN and infinity."""
    columns, run = weight.shape[1], weight.block[1]
    kind = _kind_of(weight)
    is_one_run = run >= columns
    if not is_one_run and run != _HALF_STEP and run % STEP:
        return f"groups must be of 16 inputs or a multiple of 32, got {run}"
    if weight.has_outer and weight.outer_block[1] < columns and weight.outer_block[1] % STEP:
        return f"outer groups must be of a multiple of 32 inputs, got {weight.outer_block[1]}"
    if weight.zeros is not None and weight.minimums is not None:
        return "a weight must have zero points or minimums, got both"
    if kind in (E4M3, E5M2):
        if weight.zeros is not None or weight.minimums is not None:
            return "floats of 8 bits must have neither zero points nor minimums"
        infinite = 0x7F if kind == E4M3 else 0x7C
        codes = weight.codes
        if not codes.is_meta and ((codes.view(torch.uint8) & 0x7F) >= infinite).any():
            return "codes must be finite, got NaN or infinity"
    is_odd = is_one_run and columns % STEP
    if is_odd and (kind == TABLE or weight.zeros is not None or weight.minimums is not None):
        return f"columns must be a multiple of 32, got {columns}"
    return None


def _kind_of(weight: QuantisedWeight) -> int:
    kinds = {torch.int8: INT8, torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
    return kinds.get(weight.codes.dtype, TABLE)


def _factor(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor of factors or terms in a dtype that the kernels read, with the same values:
    float32 for float16 without conversion instructions and for exponents at the ends of their
    range; None stays None."""
    if tensor is None:
        return None
    from tilewise.kernels.cpu.machine.simd import HAS_HALF  # brings numba, which few programs need

    if tensor.dtype == torch.float16 and not HAS_HALF:
        return tensor.float()
    if tensor.dtype == torch.float8_e8m0fnu:
        bits = tensor.view(torch.uint8)
        if ((bits == 0) | (bits == 0xFF)).any():  # 2^-127 is subnormal
            return tensor.float()
    return tensor


def _form_of(weight: QuantisedWeight) -> _Form:
    """Return how a weight is stored in panels: its words, and the tensors of its headers."""
    columns = padded(weight.shape[1], STEP)
    run = min(weight.block[1], columns)
    run = columns if weight.block[1] >= weight.shape[1] else run
    part = max(run, STEP)
    if weight.has_outer:
        part = min(weight.outer_block[1], columns)
        part = columns if weight.outer_block[1] >= weight.shape[1] else part
    kind = _kind_of(weight)
    table, zeros = weight.table, weight.zeros
    if kind == TABLE and zeros is not None and (zeros == zeros.view(-1)[0]).all():
        # One zero point for all is subtracted from the table, where the difference is exact.
        zero = float(zeros.view(-1)[0])
        if table is None and zero == int(zero):
            table, zeros = tuple(float(code) - zero for code in range(16)), None
    scales = _factor(weight.scales)
    assert scales is not None
    if kind in (E4M3, E5M2):
        scales = scales.float() * (_GAIN if kind == E4M3 else 1.0)
    term, mode = (zeros, ZERO) if zeros is not None else (weight.minimums, MINIMUM)
    if term is None:
        mode = PLAIN
    words = torch.zeros(len(FIELDS), dtype=torch.int64)
    tensors: list[tuple[Tensor, bool]] = []
    offset = 0
    runs = part // run if run >= STEP else part // _HALF_STEP
    for tensor, stored, at, has_runs in (
        (_factor(weight.outer), OUTER, OUTER_AT, False),
        (_factor(weight.outer_minimums), OUTER_TERM, OUTER_TERM_AT, False),
        (scales, SCALE, SCALE_AT, True),
        (_factor(term), TERM, TERM_AT, True),
    ):
        if tensor is None:
            continue
        words[stored], words[at] = _STORED[tensor.dtype], offset
        tensors.append((tensor, has_runs))
        offset += WIDTH * tensor.element_size() * (runs if has_runs else 1)
    steps, step_bytes = part // STEP, WIDTH * STEP * weight.bits // 8
    header = padded(offset, 64)
    lookup = torch.tensor(table or range(16), dtype=torch.float32)
    kept = [lookup]
    words[KIND], words[MODE], words[RUN] = kind, mode, run
    words[PART_STEPS], words[HEADER] = steps, header
    words[PART_BYTES] = header + steps * step_bytes
    words[LOOKUP] = lookup.data_ptr()
    if weight.permutation is not None:
        padding = torch.arange(weight.shape[1], columns, dtype=torch.int32)
        kept.append(torch.cat((weight.permutation, padding)))
        words[ORDER] = kept[-1].data_ptr()
    group_bytes = -(-columns // part) * header + columns // STEP * step_bytes
    return _Form(words, tuple(tensors), run, part, group_bytes, tuple(kept))


def pack_narrow(
    parts: Sequence[QuantisedWeight],
    bias: Tensor | None,
    dtype: torch.dtype,
    order: Tensor | None = None,
) -> Panels:
    """Return the panels of quantised weights, stacked along their outputs, without widening their
    codes.

    The module's first lines describe the memory. A group of 64 outputs that has rows of two weights
    is an exception: it is widened to `dtype`.

    Args:
        parts: weights for which `why_not` is None, with the same number of columns.
        bias: (N,), one number for each output, or None.
        dtype: the dtype of rows and results, float32, float16 or bfloat16.
        order: int64 (N,), the row of the stacked weights that each output has, -1 for a row of
            zeros; None keeps the order of the rows.

    Raises:
        UnsupportedError: the CPU has no instructions for the dtype.
    """
    check_dtype(dtype)
    total = sum(part.shape[0] for part in parts)
    order = torch.arange(total) if order is None else order
    outputs, inputs = len(order), parts[0].shape[1]
    rows = torch.full((padded(outputs, WIDTH),), -1)
    rows[:outputs] = order
    groups = rows.view(-1, WIDTH)
    part_of, first = torch.full_like(rows, -1), 0
    for index, part in enumerate(parts):
        end = first + part.shape[0]
        part_of[(rows >= first) & (rows < end)] = index
        first = end
    holders = part_of.view(-1, WIDTH)
    most = holders.amax(1)
    is_mixed = ((holders != most[:, None]) & (holders >= 0)).any(1)
    forms = [_form_of(part) for part in parts]
    plain_bytes = padded(inputs, STEP) * WIDTH * dtype.itemsize
    sizes = torch.tensor([form.group_bytes for form in forms])[most.clamp(min=0)]
    sizes[is_mixed] = plain_bytes
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))
    words = fresh_words(int(starts[-1]))
    table = torch.zeros((len(groups), 2), dtype=torch.int64)
    table[:, 0] = words.data_ptr() + starts[:-1]
    first = 0
    for index, (part, form) in enumerate(zip(parts, forms, strict=True)):
        mine = ((most == index) & ~is_mixed).nonzero().view(-1)
        table[mine, 1] = form.words.data_ptr()
        at_once = max(1, _AT_ONCE // (WIDTH * inputs))
        for some in mine.split(at_once) if len(mine) else ():
            local = groups[some].reshape(-1)
            local = torch.where(local < 0, local, local - first)
            laid = _lay_out(part, form, local, elements_of(dtype))
            for group, block in zip(some.tolist(), laid, strict=True):
                words[starts[group] : starts[group + 1]] = block
        first += part.shape[0]
    for group in is_mixed.nonzero().view(-1).tolist():
        block = pack(_values(parts, groups[group]).to(dtype)).words.view(torch.uint8)
        words[starts[group] : starts[group + 1]] = block
    kept = tuple(tensor for form in forms for tensor in (form.words, *form.kept))
    is_permuted = any(part.permutation is not None for part in parts)
    wide_bias = pad_bias(bias, len(rows))
    return Panels(words, outputs, inputs, wide_bias, dtype, table, is_permuted, kept)


def _values(parts: Sequence[QuantisedWeight], rows: Tensor) -> Tensor:
    """Return rows `rows` of weights that lie one below another, dequantised to float32 (len(rows),
    K); zeros for the row -1."""
    found, first = torch.zeros((len(rows), parts[0].shape[1])), 0
    for part in parts:
        end = first + part.shape[0]
        mine = ((rows >= first) & (rows < end)).nonzero().view(-1)
        if len(mine):
            found[mine] = part.rows_of(rows[mine] - first).float()
        first = end
    return found


def _lay_out(weight: QuantisedWeight, form: _Form, rows: Tensor, width: int) -> Tensor:
    """Return groups of 64 rows of a weight as they are stored, uint8 (groups, bytes of a group).

    Args:
        rows: int64 (64 * groups,), the row of the weight for each output; a negative number is a
            row of zeros.
        width: the elements of a word of the dtype to which codes are widened, 1 or 2.
    """
    is_zero = rows < 0
    local = rows.clamp(min=0)
    count, columns = len(rows) // WIDTH, weight.shape[1]
    parts = -(-columns // form.part)
    runs = form.part // (form.run if form.run >= STEP else _HALF_STEP)
    headers: list[Tensor] = []
    for tensor, has_runs in form.tensors:
        block = weight.block if has_runs else weight.outer_block
        raw = tensor.contiguous().view(torch.uint8).view(len(tensor), -1, tensor.element_size())
        found = raw[local // block[0]]
        found[is_zero] = 0  # zeros in any of the dtypes but an exponent, whose codes are zero
        each = runs if has_runs else 1
        wide = torch.zeros((len(rows), parts * each, tensor.element_size()), dtype=torch.uint8)
        wide[:, : found.shape[1]] = found
        wide = wide.view(count, WIDTH, parts, each, -1)
        headers.append(wide.permute(0, 2, 3, 1, 4).reshape(count, parts, -1))
    header = int(form.words[HEADER])
    filled = sum(each.shape[-1] for each in headers)
    headers.append(torch.zeros((count, parts, header - filled), dtype=torch.uint8))
    codes = weight.codes.view(torch.uint8)[local]
    codes[is_zero] = 0
    if weight.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    steps = parts * form.part // STEP
    wide_codes = torch.zeros((len(rows), steps * STEP), dtype=torch.uint8)
    wide_codes[:, :columns] = codes
    laid = _registers(wide_codes.view(count, GROUP, COLUMNS, steps, STEP), width)
    if weight.bits == 4:
        # Register 8 j + s is bits 4 s ... 4 s + 3 of the words of 32 bits of place j.
        nibbles = laid.view(*laid.shape[:-2], 4, 4, 2, COLUMNS)
        bytes_ = nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)
        laid = bytes_.transpose(-1, -2)
    laid = laid.reshape(count, parts, -1)
    whole = torch.cat((*headers, laid), -1).view(count, -1)
    return whole[:, : form.group_bytes]


def _registers(codes: Tensor, width: int) -> Tensor:
    """Return codes (groups, panels, outputs, steps, inputs) in the order of registers, (groups,
    steps, panels, 32, 16): a register has one input of 16 outputs, or with `width` 2 two inputs of
    8."""
    if width == 1:
        return codes.permute(0, 3, 1, 4, 2)
    split = codes.unflatten(-1, (-1, 2)).unflatten(2, (2, -1))
    # groups, panels, halves, outputs, steps, words, elements
    laid = split.permute(0, 4, 1, 5, 2, 3, 6)
    return laid.reshape(codes.shape[0], codes.shape[3], GROUP, STEP, COLUMNS)
