"""The files of a checkpoint's weights: which there are, and a reader of the tensors of each.

A reader has keys(), get_tensor(name) and get_slice(name), as safetensors' own has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewise.errors import CheckpointError

__all__ = ["DTYPES", "INDEX", "SINGLE", "PickledTensors", "open_weights", "some", "weight_files"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_LFS = b"version https://git-lfs"  # the beginning of Git LFS's pointer files
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)")
_OTHERS = ("adapter_", "training_args", "optimizer", "scheduler")  # files that hold no model
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""The dtypes of tensors by safetensors' names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHOWN = 3  # names listed in a message before "..."


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    They are the first of these that exist: model.safetensors, as transformers prefers; the shards
    of its index; all other safetensors; Mistral's consolidated files; pytorch_model.bin, the shards
    of its index, or its shards alone.

    Raises:
        CheckpointError: the folder has no such file, or a shard is missing.
    """
    plain = [x for x in _named(directory, ".safetensors") if not x.name.startswith("consolidated")]
    for single, index, others in (
        (SINGLE, INDEX, plain or _named(directory, ".safetensors")),
        (_PICKLED, _PICKLED_INDEX, _named(directory, ".bin", "pytorch_model")),
    ):
        if (directory / single).is_file():
            return [directory / single]
        if (directory / index).is_file():
            return _of_index(directory / index)
        if others:
            _check_all(others)
            return others
    found = sorted(x.name for x in directory.glob("*") if x.suffix in (".bin", ".pt", ".pth"))
    raise CheckpointError(
        f"checkpoint must hold {SINGLE}, {INDEX} or {_PICKLED}, "
        f"got {some(found) if found else 'none'}"
    )


def open_weights(file: Path, stack: ExitStack) -> Any:
    """Return a reader of a file's tensors, which stays open as long as `stack`.

    Raises:
        CheckpointError: the file is torn, or a pickle of anything but tensors by name.
    """
    if file.suffix == ".bin":
        return PickledTensors(file)
    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        reason = _POINTER if _is_pointer(file) else error
        raise CheckpointError(
            f"{file.name} must be a whole safetensors file, got {reason}"
        ) from error


_POINTER = "a Git LFS pointer: run `git lfs pull`"


class PickledTensors:
    """The tensors of a file that torch.save wrote, mapped where its format allows it.

    Only tensors are unpickled; a pickle that asks for any code is refused.

    Args:
        file: the path of the file.

    Raises:
        CheckpointError: the file is torn, or holds anything but tensors by name.
    """

    def __init__(self, file: Path) -> None:
        if _is_pointer(file):
            raise CheckpointError(f"{file.name} must be a whole pickle of tensors, got {_POINTER}")
        try:
            try:
                held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files of torch before 1.6 cannot be mapped
                held = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a torn or hostile pickle leads to
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                f"{file.name} must be a whole pickle of tensors, got {reason[0]}"
            ) from error
        if not isinstance(held, dict) or not all(
            isinstance(name, str) and isinstance(x, Tensor) for name, x in held.items()
        ):
            names = some(list(map(str, held))) if isinstance(held, dict) else type(held).__name__
            raise CheckpointError(f"{file.name} must hold tensors by name, got {names}")
        self._held: dict[str, Tensor] = held

    def keys(self) -> Iterable[str]:
        """Return the names of the tensors."""
        return self._held.keys()

    def get_tensor(self, name: str) -> Tensor:
        """Return the tensor of a name, on the CPU."""
        return self._held[name]

    def get_slice(self, name: str) -> TensorSlice:
        """Return the tensor of a name as a `TensorSlice`, of which rows and columns can be cut."""
        return TensorSlice(self._held[name])


class TensorSlice:
    """A tensor in memory with the interface of safetensors' slices.

    Args:
        tensor: the tensor to cut from, of any dtype.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the tensor's dtype, such as "BF16"."""
        return _NAMES[self._tensor.dtype]

    def __getitem__(self, at: Any) -> Tensor:
        """Return the part of the tensor at an index or slices, a view."""
        part: Tensor = self._tensor[at]
        return part


def _named(directory: Path, suffix: str, begin: str = "") -> list[Path]:
    """Return the files whose names begin with `begin` and end with `suffix`, in order.

    Files whose names begin as in `_OTHERS` hold no model and are left out.
    """
    return sorted(
        x
        for x in directory.glob(f"{begin}*{suffix}")
        if x.is_file() and not x.name.startswith(_OTHERS)
    )


def _check_all(files: list[Path]) -> None:
    """Raise CheckpointError if shards are missing, as the names of the others ("-of-N") say."""
    names = {file.name for file in files}
    for file in files:
        found = _SHARD.fullmatch(file.name)
        if found is None:
            continue
        begin, _, count, end = found.groups()
        wanted = [f"{begin}-{i + 1:05}-of-{count}{end}" for i in range(min(int(count), 10_000))]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise CheckpointError(
                f"checkpoint must hold all {int(count)} shards, got no {some(missing)}"
            )


def _of_index(index: Path) -> list[Path]:
    """Return the paths of the shards that an index names, sorted.

    Raises:
        CheckpointError: the index is no such JSON, names a file outside its folder, or a shard is
            missing.
    """
    try:
        shards = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        names = sorted(set(shards.values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index.name} must be JSON with a weight_map of file names, got {error!r}"
        ) from error
    for name in names:
        # The file may be a link, as all files of Hugging Face's cache are.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(
                f"weight_map of {index.name} must name files of the checkpoint's folder, got {name}"
            )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"checkpoint must hold every shard that {index.name} names, got no {some(missing)}"
        )
    return files


def _is_pointer(file: Path) -> bool:
    """Return whether a file is the pointer that Git LFS leaves in its place."""
    with file.open("rb") as opened:
        return opened.read(len(_LFS)) == _LFS


def some(names: list[str]) -> str:
    """Return the first three of a list of names for a message, with the number of further ones."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
