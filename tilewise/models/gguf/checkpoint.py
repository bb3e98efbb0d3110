"""A GGUF file as a checkpoint: its tensors by Hugging Face's names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.models.gguf.config import Fields
from tilewise.models.gguf.file import GgufFile, TensorInfo, read_gguf
from tilewise.models.gguf.names import Source, sources_of
from tilewise.models.gguf.types import repack
from tilewise.ops import QuantisedWeight

__all__ = ["GgufCheckpoint"]


class GgufCheckpoint:
    """The tensors of a GGUF file by Hugging Face's names, as they are stored or as numbers.

    Args:
        file: the path, or a file that was read.

    Raises:
        CheckpointError: see `read_gguf` and `sources_of`.
    """

    def __init__(self, file: str | Path | GgufFile) -> None:
        self.file = file if isinstance(file, GgufFile) else read_gguf(file)
        self._sources = sources_of(Fields(self.file))

    def names(self) -> set[str]:
        """Return Hugging Face's names of all tensors."""
        return set(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor by Hugging Face's name."""
        return self._sources[name].shape

    def read(self, name: str) -> Tensor | QuantisedWeight:
        """Return a tensor as it is stored.

        Returns:
            A tensor of a float dtype, or a quantised weight (N, K) whose rows are all dims but the
            last. Tensors that llama.cpp transposed, split (kv_b_proj), added 1 to, or stored in
            parts of different types are dequantised; codes and
            scales of gpt-oss's experts are uint8.
        """
        source = self._sources[name]
        if source.heads is not None:
            return self._latent(source)
        found = self._rows(source, source.rows)
        if isinstance(found, QuantisedWeight):
            if source.part is not None:
                half = found.codes if source.part == "codes" else found.scales
                return half.view(torch.uint8).reshape(source.shape)
            if not (source.transposed or source.excess):
                return found
            found = found.dequantise()
        return _shaped(found, source)

    def is_narrow(self, name: str) -> bool:
        """Return whether a tensor is a matrix of codes of few bits, which `read` returns as a
        `QuantisedWeight`.

        Any unknown name, and a matrix that must be changed in its numbers, gives False.
        """
        source = self._sources.get(name)
        if source is None or len(source.shape) != 2 or source.heads is not None:
            return False
        if source.part is not None or source.transposed or source.excess or source.numbers:
            return False
        types = [self.file.tensors[each].type for each in source.tensors]
        return len({kind.name for kind in types}) == 1 and types[0].dtype is None

    def row_of(self, name: str) -> QuantisedWeight:
        """Return the first row, a quantised weight (1, K), of a matrix for which `is_narrow` is
        True."""
        info = self.file.tensors[self._sources[name].tensors[0]]
        found = repack(info.data[:1], info.type)
        assert isinstance(found, QuantisedWeight)
        return found

    def numbers(self, name: str, first: int = 0, end: int | None = None) -> Tensor:
        """Return rows first ... end - 1 of the first dim of a tensor as numbers, dequantised if
        need be.

        Args:
            name: Hugging Face's name of the tensor.
            first, end: the range of rows; None is the last row's end.

        Returns:
            The rows in the dtype of the file, float32 for quantised ones.
        """
        source, end = self._sources[name], self.shape(name)[0] if end is None else end
        at_once = len(source.shape) == 2 and source.rows is None and len(source.tensors) == 1
        if at_once and not (source.transposed or source.part or source.heads):
            found = self._rows(source, (first, end))
            wide = found.dequantise() if isinstance(found, QuantisedWeight) else found
            shape = (wide.numel() // source.shape[-1], source.shape[-1])
            return _less(wide.reshape(shape)) if source.excess else wide.reshape(shape)
        found = self.read(name)
        wide = found.dequantise() if isinstance(found, QuantisedWeight) else found
        return wide.reshape(source.shape)[first:end]

    def get_tensor(self, name: str) -> Tensor:
        """Return a whole tensor as numbers, as `numbers` does."""
        return self.numbers(name)

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor of which rows can be cut; only the rows that are asked for are read."""
        return _Slice(self, name)

    def _rows(
        self, source: Source, rows: tuple[int, int] | Tensor | None
    ) -> Tensor | QuantisedWeight:
        infos = [self.file.tensors[name] for name in source.tensors]
        datas = [_lines(info, source) for info in infos]
        if len({info.type.name for info in infos}) == 1:
            raw = datas[0] if len(datas) == 1 else torch.cat(datas)
            return repack(_taken(raw, rows), infos[0].type)
        wide = []
        for info, data in zip(infos, datas, strict=True):
            found = repack(data, info.type)
            wide.append(found.dequantise() if isinstance(found, QuantisedWeight) else found.float())
        return _taken(torch.cat(wide), rows)

    def _latent(self, source: Source) -> Tensor:
        """Return the up-projection of latents, kv_b_proj: for each head the rows of keys, then of
        values.

        The file has the two apart, the keys' transposed; the result is numbers.
        """
        assert source.heads is not None
        parts = []
        for name in source.tensors:
            info = self.file.tensors[name]
            found = repack(info.data, info.type)
            wide = found.dequantise() if isinstance(found, QuantisedWeight) else found.float()
            parts.append(wide.view(info.shape))
        return torch.cat((parts[0].mT, parts[1]), 1).reshape(source.shape)


class _Slice:
    """A tensor of a GGUF file with the interface of safetensors' slices."""

    def __init__(self, checkpoint: GgufCheckpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._checkpoint.shape(self._name))

    def __getitem__(self, at: int | slice | tuple[int | slice, ...]) -> Tensor:
        """Return the part at an index or ranges without steps, as numbers; only its rows are
        read."""
        first, *others = at if isinstance(at, tuple) else (at,)
        size = self.get_shape()[0]
        begin, end, step = (
            first.indices(size) if isinstance(first, slice) else (first, first + 1, 1)
        )
        assert step == 1
        found = self._checkpoint.numbers(self._name, begin, end)
        return found[(slice(None) if isinstance(first, slice) else 0, *others)]


def _lines(info: TensorInfo, source: Source) -> Tensor:
    """Return a tensor's bytes in the rows that the source's `rows` count: uint8 (rows, bytes of a
    row).

    They are single numbers where source.numbers is True.

    Raises:
        CheckpointError: single numbers are wanted of a tensor that is not of floats.
    """
    if not source.numbers:
        return info.data
    if info.type.dtype is None:
        raise CheckpointError(f"tensor {info.name} must be of floats, got {info.type.name}")
    return info.data.reshape(-1, info.type.size)


def _taken(rows: Tensor, which: tuple[int, int] | Tensor | None) -> Tensor:
    if which is None:
        return rows
    return rows[which[0] : which[1]] if isinstance(which, tuple) else rows[which]


def _shaped(found: Tensor, source: Source) -> Tensor:
    if source.transposed:
        *outer, rows, columns = source.shape
        found = found.reshape(*outer, columns, rows).mT
    else:
        found = found.reshape(source.shape)
    return _less(found) if source.excess else found


def _less(norm: Tensor) -> Tensor:
    """Return the weight of a norm minus 1, in float32."""
    return norm.float() - 1
