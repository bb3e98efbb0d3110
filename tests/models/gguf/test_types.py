"""Values of each type are those of a block read number by number, and of the gguf package, bit for
bit."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.models.gguf.writer import SIZES, random_blocks
from tilewise.models.gguf.types import TYPES, GgufType, repack
from tilewise.ops import QuantisedWeight

f32 = np.float32
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, as in ggml


def half(block: bytes, at: int) -> np.float32:
    return f32(struct.unpack_from("<e", block, at)[0])


def split(block: bytes, at: int, i: int) -> int:
    """Code i of 32, the first 16 in the lower halves."""
    byte = block[at + i % 16]
    return byte >> 4 if i >= 16 else byte & 15


def fifth(block: bytes, at: int, i: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> i & 1) << 4


def six(s: bytes, j: int) -> tuple[int, int]:
    """ggml's get_scale_min_k4."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4)


def q2_k(b: bytes, i: int) -> np.float32:
    code = b[16 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
    scale = b[i // 16]
    return half(b, 80) * f32(scale & 15) * f32(code) - half(b, 82) * f32(scale >> 4)


def q3_k(b: bytes, i: int) -> np.float32:
    low = b[32 + i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
    high = b[i % 32] >> (i // 32) & 1
    j, s = i // 16, b[96:108]
    scale = (s[j % 8] >> (4 * (j // 8)) & 15) | (s[8 + j % 4] >> (2 * (j // 4)) & 3) << 4
    return half(b, 108) * f32(scale - 32) * f32(low - (0 if high else 4))


def q4_k(b: bytes, i: int) -> np.float32:
    code = b[16 + i // 64 * 32 + i % 32] >> (i % 64 // 32 * 4) & 15
    scale, minimum = six(b[4:16], i // 32)
    return half(b, 0) * f32(scale) * f32(code) - half(b, 2) * f32(minimum)


def q5_k(b: bytes, i: int) -> np.float32:
    code = b[48 + i // 64 * 32 + i % 32] >> (i % 64 // 32 * 4) & 15
    code |= (b[16 + i % 32] >> (i // 32) & 1) << 4
    scale, minimum = six(b[4:16], i // 32)
    return half(b, 0) * f32(scale) * f32(code) - half(b, 2) * f32(minimum)


def q6_k(b: bytes, i: int) -> np.float32:
    part, j = divmod(i, 128)
    low = b[part * 64 + j % 64] >> (j // 64 * 4) & 15
    high = b[128 + part * 32 + j % 32] >> (j // 32 * 2) & 3
    (scale,) = struct.unpack_from("<b", b, 192 + i // 16)
    return half(b, 208) * f32(scale) * f32((low | high << 4) - 32)


def iq4_xs(b: bytes, i: int) -> np.float32:
    j, (high,) = i // 32, struct.unpack_from("<H", b, 2)
    scale = (b[4 + j // 2] >> (4 * (j % 2)) & 15) | (high >> (2 * j) & 3) << 4
    return half(b, 0) * f32(scale - 32) * f32(_IQ4[split(b, 8 + 16 * j, i % 32)])


READ: dict[int, Callable[[bytes, int], np.float32]] = {
    2: lambda b, i: half(b, 0) * f32(split(b, 2, i) - 8),
    3: lambda b, i: half(b, 0) * f32(split(b, 4, i)) + half(b, 2),
    6: lambda b, i: half(b, 0) * f32((split(b, 6, i) | fifth(b, 2, i)) - 16),
    7: lambda b, i: half(b, 0) * f32(split(b, 8, i) | fifth(b, 4, i)) + half(b, 2),
    8: lambda b, i: half(b, 0) * f32(struct.unpack_from("<b", b, 2 + i)[0]),
    10: q2_k,
    11: q3_k,
    12: q4_k,
    13: q5_k,
    14: q6_k,
    20: lambda b, i: half(b, 0) * f32(_IQ4[split(b, 2, i)]),
    23: iq4_xs,
    39: lambda b, i: f32(2.0 ** (b[0] - 128)) * f32(_E2M1[split(b, 1, i)]),
}
NARROW = [kind for kind, found in TYPES.items() if isinstance(found, GgufType) and found.unpack]


def rows_of(kind: int, rows: int, blocks: int) -> torch.Tensor:
    block, size = SIZES[kind]
    raw = random_blocks((rows, blocks * block), kind, np.random.default_rng(kind))[2]
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).view(rows, blocks * size)


def kind_of(kind: int) -> GgufType:
    found = TYPES[kind]
    assert isinstance(found, GgufType)
    return found


@pytest.mark.parametrize("kind", NARROW)
def test_values_are_those_of_a_block_read_number_by_number(kind):
    assert list(READ) == NARROW
    block, size = SIZES[kind]
    assert (kind_of(kind).block, kind_of(kind).size) == (block, size)
    data = rows_of(kind, 3, 2)
    weight = repack(data, kind_of(kind))
    assert isinstance(weight, QuantisedWeight)
    weight.check()
    want = [
        READ[kind](bytes(line[at * size : (at + 1) * size].tolist()), i)
        for line in data
        for at in range(2)
        for i in range(block)
    ]
    got = weight.dequantise().numpy().reshape(-1)
    assert (got.view(np.uint32) == np.array(want, np.float32).view(np.uint32)).all()


@pytest.mark.parametrize("kind", NARROW)
def test_values_are_those_of_the_gguf_package(kind):
    quants = pytest.importorskip("gguf.quants")
    data = rows_of(kind, 7, 3)
    want = quants.dequantize(data.numpy(), quants.GGMLQuantizationType(kind))
    got = repack(data, kind_of(kind)).dequantise().numpy()
    assert (got.view(np.uint32) == want.view(np.uint32)).all()


def test_types_of_up_to_4_bits_stay_so_and_wider_ones_take_8():
    bits = {kind_of(kind).name: repack(rows_of(kind, 1, 1), kind_of(kind)).bits for kind in NARROW}
    wide = {name for name, n in bits.items() if n == 8}
    assert wide == {"Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"}
    q4_k = repack(rows_of(12, 4, 8), kind_of(12))
    assert q4_k.nbytes * 8 / (4 * 8 * 256) == 4.625  # its scales of 6 bits take 8


def test_large_tensors_are_repacked_in_parts(monkeypatch):
    data = rows_of(12, 9, 2)
    whole = repack(data, kind_of(12)).dequantise()
    monkeypatch.setattr("tilewise.models.gguf.types._AT_ONCE", 2 * data.shape[1])
    assert torch.equal(repack(data, kind_of(12)).dequantise(), whole)


def test_floats_keep_their_dtype():
    raw = torch.arange(1, 17, dtype=torch.float32).view(torch.uint8)
    for kind, dtype in ((0, torch.float32), (1, torch.float16), (30, torch.bfloat16)):
        assert torch.equal(repack(raw[None], kind_of(kind))[0], raw.view(dtype))
