"""A GGUF file: its metadata, and where its tensors lie.

Any file may be hostile: every count, length, product and offset is a Python integer, which has no
bound, and is compared with the bytes that are left before anything is allocated. Source: the GGUF
specification of ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import CheckpointError, shown
from tilewise.models.gguf.types import TYPES, GgufType

__all__ = ["GgufFile", "TensorInfo", "parts_of", "read_gguf"]

_MAGIC = b"GGUF"
_LFS = b"version https://git-lfs"  # the beginning of Git LFS's pointer files
_VERSIONS = (2, 3)
_MOST_DIMS = 4  # GGML_MAX_DIMS
_LONGEST_NAME = 255  # bytes of a tensor's name; ggml has 63
_LONGEST_KEY = 65_535  # bytes, by the specification
_ALIGNMENT = 32  # bytes, where the file says none
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file.

    Attributes:
        name: the tensor's name in llama.cpp.
        type: the type of the numbers.
        shape: the sizes of the dims, that of a row last (ggml has it first).
        data: uint8 (rows, bytes of a row), a view of the mapped file.
    """

    name: str
    type: GgufType
    shape: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The contents of a GGUF file, or of all parts of a split one.

    Attributes:
        paths: the files, the first part first.
        metadata: the values by their keys: int, float, bool, str, a list of str or bool, or an
            array of numbers.
        tensors: the tensors by their names.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all files of a split file, by the name of one of them; of a whole file, itself.

    Raises:
        CheckpointError: a part is missing.
    """
    found = _SPLIT.fullmatch(path.name)
    if found is None:
        return (path,)
    stem, number, total = found[1], int(found[2]), int(found[3])
    if not 1 <= number <= total:
        raise CheckpointError(f"{path.name} must be one of {total} parts, got number {number}")
    parts = tuple(
        path.with_name(f"{stem}-{part:05d}-of-{total:05d}{path.suffix}")
        for part in range(1, total + 1)
    )
    for part in parts:
        if not part.is_file():
            raise CheckpointError(f"{path.name} must lie beside all its parts, got no {part.name}")
    return parts


def read_gguf(path: str | Path) -> GgufFile:
    """Read the head of a GGUF file and map its tensors; numbers are read when they are used.

    Args:
        path: the file, or one part of a split file.

    Raises:
        CheckpointError: the file is no GGUF, of another version or byte order, torn, or says
            something that cannot be.
    """
    paths = parts_of(Path(path))
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(paths):
        fields, found = _read_part(part)
        if len(paths) > 1:
            for key, wanted in (("split.count", len(paths)), ("split.no", number)):
                if fields.get(key) != wanted:
                    raise CheckpointError(
                        f"{key} of {part.name} must be {wanted}, got {shown(fields.get(key))}"
                    )
        elif fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(
                f"{part.name} is one of {fields['split.count']} parts, and must be named as such, "
                "NAME-00001-of-0000N.gguf, beside the others"
            )
        metadata = metadata or fields
        for name, tensor in found.items():
            if name in tensors:
                raise CheckpointError(f"tensor {shown(name)} must be in one part, got two")
            tensors[name] = tensor
    total = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and total != len(tensors):
        raise CheckpointError(
            f"the parts of {paths[0].name} must hold {shown(total)} tensors, got {len(tensors)}"
        )
    return GgufFile(paths, metadata, tensors)


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        with path.open("rb") as opened:
            begin = opened.read(len(_LFS))
            if begin == _LFS:
                raise CheckpointError(
                    f"{path.name} must be a GGUF file, got a Git LFS pointer: run `git lfs pull`"
                )
            if begin[: len(_MAGIC)] != _MAGIC:
                raise CheckpointError(
                    f"{path.name} must begin with GGUF, got {shown(begin[: len(_MAGIC)])}"
                )
            # A private copy: torch wants memory that could be written, and none is.
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} must be readable, got {error}") from error
    return _Head(mapped, path.name).read()


class _Head:
    """Reads and checks the head of a file, after its magic number, from first to last byte."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self._at = data, name, len(_MAGIC)
        self._size = len(data)

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        version = self._integer("<I", "the version")
        if version in (v << 24 for v in (1, *_VERSIONS)):
            raise CheckpointError(f"{self._name} must be little endian, got big endian")
        if version not in _VERSIONS:
            raise CheckpointError(f"{self._name} must be of GGUF version 2 or 3, got {version}")
        num_tensors = self._integer("<Q", "the number of tensors")
        num_fields = self._integer("<Q", "the number of fields")
        self._need(num_tensors, 8 + 4 + 4 + 8, "tensors")  # name, dims, type, offset
        self._need(num_fields, 8 + 4 + 1, "fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._text("a key", _LONGEST_KEY)
            if key in fields:
                raise CheckpointError(f"{self._name} must hold {shown(key)} once, got it twice")
            fields[key] = self._value(self._integer("<I", "a type"), key)
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"general.alignment of {self._name} must be a power of 2, got {shown(alignment)}"
            )
        heads = [self._tensor() for _ in range(num_tensors)]
        begin = -(-self._at // alignment) * alignment
        return fields, self._placed(heads, begin, alignment)

    def _tensor(self) -> tuple[str, tuple[int, ...], GgufType, int]:
        name = self._text("a tensor's name", _LONGEST_NAME)
        num_dims = self._integer("<I", "the dims of a tensor")
        if not 1 <= num_dims <= _MOST_DIMS:
            raise CheckpointError(
                f"tensor {shown(name)} must have 1 to {_MOST_DIMS} dims, got {num_dims}"
            )
        dims = [self._integer("<Q", "a size") for _ in range(num_dims)]
        kind = self._integer("<I", "a tensor's type")
        offset = self._integer("<Q", "an offset")
        found = TYPES.get(kind)
        if not isinstance(found, GgufType):
            named = f"type {kind}" if found is None else found
            raise CheckpointError(
                f"tensor {shown(name)} must be of one of the types "
                f"{', '.join(x.name for x in TYPES.values() if isinstance(x, GgufType))}, "
                f"got {named}"
            )
        if min(dims) < 1:
            raise CheckpointError(f"tensor {shown(name)} must have positive sizes, got {dims}")
        if dims[0] % found.block:
            raise CheckpointError(
                f"tensor {shown(name)} must have rows of a multiple of {found.block} numbers in "
                f"{found.name}, got {dims[0]}"
            )
        return name, tuple(reversed(dims)), found, offset

    def _placed(
        self, heads: list[tuple[str, tuple[int, ...], GgufType, int]], begin: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """Check that all tensors lie within the file without overlap; return them by name, mapped.

        Args:
            heads: each tensor's name, shape, type and offset from `begin`.
            begin: the offset of the first tensor in the file.
            alignment: the bytes of which each offset is a multiple.
        """
        tensors: dict[str, TensorInfo] = {}
        last = 0
        whole: Tensor | None = None
        for name, shape, kind, offset in sorted(heads, key=lambda head: head[3]):
            row = shape[-1] // kind.block * kind.size
            rows = math.prod(shape[:-1])
            if name in tensors:
                raise CheckpointError(f"{self._name} must hold {shown(name)} once, got it twice")
            if offset % alignment:
                raise CheckpointError(
                    f"tensor {shown(name)} must lie at a multiple of {alignment}, got {offset}"
                )
            if offset < last:
                raise CheckpointError(
                    f"tensor {shown(name)} must lie behind the one before, which ends at {last}, "
                    f"got {offset}"
                )
            last = offset + rows * row
            if begin + last > self._size:
                raise CheckpointError(
                    f"tensor {shown(name)} must end within the {self._size} bytes of "
                    f"{self._name}, got {begin + last}: the file is cut off"
                )
            if whole is None:
                whole = torch.frombuffer(self._data, dtype=torch.uint8)
            data = whole[begin + offset : begin + last].view(rows, row)
            tensors[name] = TensorInfo(name, kind, shape, data)
        return tensors

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(key)
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            raise CheckpointError(
                f"{shown(key)} of {self._name} must be of a type to 12, got {kind}"
            )
        value = self._numbers(kind, 1, key)[0]
        if kind == _BOOL:
            return self._flags(value[None], key)[0]
        return value.item()

    def _array(self, key: str) -> Any:
        kind = self._integer("<I", key)
        length = self._integer("<Q", key)
        if kind == _ARRAY:
            raise CheckpointError(f"{shown(key)} of {self._name} must not hold arrays, got some")
        if kind == _STRING:
            self._need(length, 8, key)
            return [self._text(key) for _ in range(length)]
        if kind not in _NUMBERS:
            raise CheckpointError(
                f"{shown(key)} of {self._name} must be of a type to 12, got {kind}"
            )
        values = self._numbers(kind, length, key)
        return self._flags(values, key) if kind == _BOOL else values

    def _flags(self, values: np.ndarray[Any, Any], key: str) -> list[bool]:
        if values.size and values.max() > 1:
            raise CheckpointError(
                f"{shown(key)} of {self._name} must be 0 or 1, got {values.max()}"
            )
        return [bool(value) for value in values]

    def _numbers(self, kind: int, length: int, key: str) -> np.ndarray[Any, Any]:
        dtype = np.dtype(_NUMBERS[kind])
        raw = self._take(length * dtype.itemsize, key)
        return np.frombuffer(raw, dtype)

    def _integer(self, form: str, what: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form), what))[0]
        return value

    def _text(self, what: str, most: int | None = None) -> str:
        length = self._integer("<Q", what)
        if most is not None and length > most:
            raise CheckpointError(
                f"{what} of {self._name} must have at most {most} bytes, got {length}"
            )
        raw = self._take(length, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            if what.startswith("tokenizer."):  # a piece of a character, which no text holds
                return raw.decode(errors="replace")
            raise CheckpointError(f"{shown(what)} of {self._name} must be UTF-8: {error}") from None

    def _need(self, count: int, each: int, what: str) -> None:
        if count * each > self._size - self._at:
            raise CheckpointError(
                f"{self._name} must hold {count} of {shown(what)}, got {self._size - self._at} "
                "bytes for them: the file is cut off or damaged"
            )

    def _take(self, length: int, what: str) -> bytes:
        self._need(length, 1, what)
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw
