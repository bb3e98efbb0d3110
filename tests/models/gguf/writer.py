"""A small writer of GGUF files, as llama.cpp's converter lays them out."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["F32", "Raw", "encoded", "llama_pairs", "random_blocks", "write"]

F32, F16, Q4_0, Q8_0, Q4_K, BF16, MXFP4 = 0, 1, 2, 8, 12, 30, 39
SIZES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 20: (32, 18),
    23: (256, 136), 30: (1, 2), 39: (32, 17),
}  # fmt: skip
# Where the float16 factors of a block lie.
_HALVES = {
    2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 10: (80, 82), 11: (108,), 12: (0, 2),
    13: (0, 2), 14: (208,), 20: (0,), 23: (0,),
}  # fmt: skip
_FORMS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}
_ARRAYS = {"int32": 5, "uint32": 4, "float32": 6, "bool": 7, "uint8": 0, "int8": 1}


class Raw(tuple[int, tuple[int, ...], bytes]):
    """A tensor as it lies in a file: ggml's type, the shape (columns last), the bytes."""


def encoded(values: Tensor, kind: int = F32) -> Raw:
    """Return float numbers in F32, F16 or BF16."""
    dtype = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}[kind]
    raw = values.detach().to(dtype).contiguous().view(torch.uint8).numpy().tobytes()
    return Raw((kind, tuple(values.shape), raw))


def random_blocks(shape: tuple[int, ...], kind: int, rng: np.random.Generator) -> Raw:
    """Return random codes and scales of a type, of numbers of the size of weights."""
    block, size = SIZES[kind]
    assert shape[-1] % block == 0
    count = int(np.prod(shape)) // block
    raw = rng.integers(0, 256, (count, size), dtype=np.uint8)
    most = {10: 45.0, 11: 124.0, 12: 945.0, 13: 1953.0, 14: 4064.0, 20: 127.0, 23: 4064.0}
    for at in _HALVES.get(kind, ()):
        scale = rng.uniform(0.2, 0.6, count) / most.get(kind, 8.0 if kind == 2 else 127.0)
        raw[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(count, 2)
    if kind == MXFP4:
        raw[:, 0] = rng.integers(121, 125, count)
    return Raw((kind, shape, raw.tobytes()))


def llama_pairs(rows: Tensor, heads: int) -> Tensor:
    """Return rows of q or k in llama.cpp's order, with the halves of a head side by side."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, Raw],
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write a file; numbers of metadata are uint32 and float32, arrays are numpy's or of texts."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": alignment}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    offset, body = 0, b""
    for name, (kind, shape, raw) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        body += raw + bytes(-len(raw) % alignment)
        offset = len(body)
    path.write_bytes(head + bytes(-len(head) % alignment) + body)
    return path


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, _ARRAYS[str(value.dtype)], len(value)) + value.tobytes()
    kind, form = _FORMS[type(value)]
    return struct.pack("<I", kind) + struct.pack(form, value)
