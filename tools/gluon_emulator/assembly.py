"""Inline assembly: the few PTX instructions that our kernels use, element by element."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from tools.gluon_emulator import copies, numbers
from tools.gluon_emulator.barriers import named_barrier
from tools.gluon_emulator.errors import NotEmulated
from tools.gluon_emulator.registers import dtype_of, register, values_of

_Values = dict[str, np.ndarray]  # bit patterns, by register
_F32 = gl.float32


def _floats(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Lift a function of float32 values to bit patterns."""

    def lifted(*operands: np.ndarray) -> np.ndarray:
        values = (numbers.from_bits(bits.astype(np.uint32), _F32) for bits in operands)
        return numbers.to_bits(np.asarray(function(*values), np.float32), _F32)

    return lifted


def _flushed(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) < 2.0**-126, np.float32(0), values)


def _pair(dtype: gl.dtype, bits: int) -> Callable[..., np.ndarray]:
    """Return the instruction that rounds two float32 to one register, the second one low."""

    def convert(high: np.ndarray, low: np.ndarray) -> np.ndarray:
        parts = [
            numbers.to_bits(numbers.from_bits(x.astype(np.uint32), _F32), dtype).astype(np.uint32)
            for x in (low, high)
        ]
        return parts[0] | (parts[1] << bits)

    return convert


def _halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two float16 of a register as float32, the low one first."""
    word = bits.astype(np.uint32)
    low, high = (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)
    return low.view(np.float16).astype(np.float32), high.view(np.float16).astype(np.float32)


def _half_pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the register of two float16, rounded from float32."""
    parts = [x.astype(np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
    return parts[0] | (parts[1] << 16)


def _subtracted_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _half_pair(*(x - y for x, y in zip(_halves(a), _halves(b), strict=True)))


def _bfloat16_halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two bfloat16 of a register as float32, the low one first."""
    word = bits.astype(np.uint32)
    low, high = word << np.uint32(16), word & np.uint32(0xFFFF0000)
    return low.view(np.float32), high.view(np.float32)


def _fused(halves: Callable[..., Any], dtype: gl.dtype) -> Callable[..., np.ndarray]:
    """Return a * b + c of registers of two 16-bit numbers, rounded once from float64."""

    def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        operands = zip(halves(a), halves(b), halves(c), strict=True)
        sums = [(x.astype(np.float64) * y + z).astype(np.float32) for x, y, z in operands]
        low, high = (numbers.to_bits(x, dtype).astype(np.uint32) for x in sums)
        return low | (high << np.uint32(16))

    return fused


def _widened_e4m3(pair: np.ndarray) -> np.ndarray:
    """Widen the two e4m3 of 16 bits, exactly."""
    bits = pair.astype(np.uint32)
    parts = [((bits >> shift) & 0xFF).astype(np.uint8) for shift in (0, 8)]
    return _half_pair(*(numbers.from_bits(x, gl.float8e4nv) for x in parts))


def _turned(pairs: np.ndarray) -> np.ndarray:
    """Transpose blocks of 8 x 8 halves, of which a row is four neighbouring registers."""
    words = np.ascontiguousarray(pairs.astype(np.uint32))
    halves = words.view(np.uint16)
    *lead, rows, columns = halves.shape
    blocks = halves.reshape(*lead, rows // 8, 8, columns // 8, 8).swapaxes(-3, -1)
    return np.ascontiguousarray(blocks.reshape(halves.shape)).view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "ex2.approx.ftz.f32": _floats(lambda x: _flushed(np.exp2(_flushed(x)))),
    "ex2.approx.f32": _floats(np.exp2),
    "lg2.approx.f32": _floats(np.log2),
    "lg2.approx.ftz.f32": _floats(np.log2),
    "rcp.approx.ftz.f32": _floats(lambda x: 1 / x),
    "rcp.approx.f32": _floats(lambda x: 1 / x),
    "tanh.approx.f32": _floats(np.tanh),
    "fma.rn.f32": _floats(lambda a, b, c: np.float32(np.float64(a) * b + c)),
    "mul.f32": _floats(np.multiply),
    "add.f32": _floats(np.add),
    "sub.f32": _floats(np.subtract),
    "neg.f32": _floats(np.negative),
    "abs.f32": _floats(np.abs),
    "max.f32": _floats(np.fmax),
    "min.f32": _floats(np.fmin),
    "cvt.rn.bf16x2.f32": _pair(gl.bfloat16, 16),
    "cvt.rn.f16x2.f32": _pair(gl.float16, 16),
    "cvt.rn.satfinite.e4m3x2.f32": _pair(gl.float8e4nv, 8),
    "cvt.rn.f16x2.e4m3x2": _widened_e4m3,
    "sub.rn.f16x2": _subtracted_halves,
    "fma.rn.bf16x2": _fused(_bfloat16_halves, gl.bfloat16),
    "fma.rn.f16x2": _fused(_halves, gl.float16),
    "movmatrix.sync.aligned.m8n8.trans.b16": _turned,
    "mov.b32": lambda x: x,
    "mov.u32": lambda x: x,
    "mov.b16": lambda x: x,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "shr.b32": np.right_shift,
    "shf.r.wrap.b32": lambda low, high, by: low >> by | high << np.uint32(32) - by,
    "add.u32": np.add,
    "add.s32": np.add,
    "mul.lo.u32": np.multiply,
    "mul.hi.u32": lambda a, b: ((a.astype(np.uint64) * b) >> np.uint64(32)).astype(np.uint32),
    "lop3.b32": lambda a, b, c, table: _of_three(a, b, c, int(table)),
    "prmt.b32": lambda a, b, select: _permuted(a, b, select),
    "shfl.sync.idx.b32": lambda *operands: _of_thread(*operands),
}


def _of_three(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Return the bits that a table of eight gives for those of three registers."""
    result = np.zeros(np.broadcast_shapes(*(np.shape(x) for x in (a, b, c))), np.uint32)
    ones = np.uint32(0xFFFFFFFF)
    for case in range(8):
        if table >> case & 1:
            parts = (x.astype(np.uint32) if case >> bit & 1 else x.astype(np.uint32) ^ ones
                     for x, bit in ((a, 2), (b, 1), (c, 0)))  # fmt: skip
            first, second, third = parts
            result |= first & second & third
    return result


def _permuted(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """Pick each of four bytes from the eight of b and a, or eight times the sign of one."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(np.broadcast_shapes(both.shape, np.shape(select)), np.uint32)
    for byte in range(4):
        nibble = np.asarray(select).astype(np.uint64) >> np.uint64(4 * byte) & np.uint64(15)
        picked = (both >> np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        signs = np.where(picked > 127, np.uint64(255), np.uint64(0))
        picked = np.where(nibble > 7, signs, picked)
        result |= picked.astype(np.uint32) << np.uint32(8 * byte)
    return result


def _of_thread(words: np.ndarray, thread: np.ndarray, *modes: np.ndarray) -> np.ndarray:
    """Give four neighbouring threads, the last axis, what one of them has."""
    if [int(mode) for mode in modes] != [0x1C1F, 0xFFFFFFFF] or words.shape[-1] != 4:
        raise NotEmulated("shfl of other than all warps' groups of four threads")
    return np.broadcast_to(words[..., int(thread), None], words.shape).copy()


def _split(operands: str) -> list[str]:
    """Split at the commas outside of braces."""
    return [part.strip() for part in re.split(r",(?![^{]*\})", operands)]


def _operand(text: str, values: _Values) -> np.ndarray:
    if text.startswith("{"):
        low, high = (_operand(part, values) for part in _split(text[1:-1]))
        return (low & 0xFFFF).astype(np.uint32) | (high.astype(np.uint32) << 16)
    if text in values:
        return values[text]
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", text):
        return np.asarray(int(text, 0) & 0xFFFFFFFF, np.uint32)
    if found := re.fullmatch(r"0f([0-9a-fA-F]{8})", text):
        return np.asarray(int(found[1], 16), np.uint32)
    raise NotEmulated(f"operand {text} of inline assembly")


def _assign(target: str, result: np.ndarray, values: _Values) -> None:
    if target.startswith("{"):
        low, high = _split(target[1:-1])
        values[low], values[high] = result & 0xFFFF, result >> 16
    else:
        values[target] = result


def _run(statement: str, values: _Values) -> None:
    opcode, _, rest = statement.partition(" ")
    operands = _split(rest)
    if found := re.fullmatch(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", opcode):
        number, threads = (int(operand) for operand in operands)
        named_barrier(number, threads, blocks=found[1] == "sync")
    elif opcode == "cp.async.bulk.wait_group":
        copies.wait_group(int(operands[0]))
    elif opcode in (".reg", "bar.warp.sync") or opcode.startswith(("fence.", "griddepcontrol.")):
        pass  # one warp is one actor; fences of global memory are not judged, nor kernels' order
    elif opcode in _INSTRUCTIONS:
        sources = [_operand(text, values) for text in operands[1:]]
        _assign(operands[0], _INSTRUCTIONS[opcode](*sources), values)
    else:
        raise NotEmulated(f"inline assembly {opcode}")


def _statements(asm: str) -> list[str]:
    text = re.sub(r"\s+", " ", asm).strip()
    if re.match(r"\{ ?\.reg", text):
        text = text[1 : text.rindex("}")]
    return [part.strip() for part in text.split(";") if part.strip()]


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Any:
    """Run PTX on each element, or on each `pack` of them that are neighbours in the last axis."""
    dtypes = list(dtype) if isinstance(dtype, list | tuple) else [dtype]
    arrays = np.broadcast_arrays(*(values_of(arg) for arg in args))
    registers: list[np.ndarray] = []
    for array, arg in zip(arrays, args, strict=True):
        registers += _registers_of(numbers.to_bits(array, dtype_of(arg)), pack)
    outputs = [pack * min(4, numbers.itemsize(kind)) // 4 or 1 for kind in dtypes]
    values = {f"${sum(outputs) + index}": bits for index, bits in enumerate(registers)}
    for statement in _statements(asm):
        _run(statement, values)
    results, first = [], 0
    for kind, count in zip(dtypes, outputs, strict=True):
        words = [values[f"${first + index}"] for index in range(count)]
        bits = _elements_of(words, numbers.bits_type(kind), pack)
        results.append(register(numbers.from_bits(bits, kind), kind))
        first += count
    return tuple(results) if isinstance(dtype, list | tuple) else results[0]


def _registers_of(bits: np.ndarray, pack: int) -> list[np.ndarray]:
    """Return the registers of an operand; one of `pack` elements holds as many as fit 32 bits."""
    if pack == 1:
        return [bits]
    words = np.ascontiguousarray(bits).view(np.uint32)
    count = pack * bits.itemsize // 4
    return [words[..., index::count] for index in range(count)]


def _elements_of(words: list[np.ndarray], kind: type, pack: int) -> np.ndarray:
    """Return the elements that output registers hold."""
    if pack == 1:
        return words[0].astype(kind)
    joined = np.stack([word.astype(np.uint32) for word in words], axis=-1)
    flat = joined.reshape(*words[0].shape[:-1], -1)
    return np.ascontiguousarray(flat).view(kind)
