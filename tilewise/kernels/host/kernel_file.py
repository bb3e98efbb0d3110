"""Compiled kernels as one file, which another machine puts into its cache of Triton.

The file is a zip: `manifest.json` says by which versions and for what its kernels were compiled,
and the files of a kernel lie in a folder named by its hash. Nothing in there
runs on a CPU: what Triton builds in C for a launch is left out, and no entry may lie elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.cache import get_cache_manager

from tilewise.kernels.host.first_run import STAMPS
from tilewise.kernels.host.requests import Request
from tilewise.version import __version__

__all__ = ["Manifest", "Taken", "pack", "unpack"]

_MANIFEST = "manifest.json"
_FORM = 1  # of the file
# A kernel's hash, and one of its files; not the steps on the way, nor a library.
_ENTRY = re.compile(r"([0-9a-f]{64})/(\w[\w.\-]{0,199}\.(?:json|cubin|ptx))")
_MOST_BYTES = 64 << 20  # of one entry; the largest kernel's are 4 MB
_MOST_ENTRIES = 100_000


@dataclass(frozen=True)
class Manifest:
    """The description that a file of kernels has inside: its versions, GPU and kernels.

    Attributes:
        tilewise, torch, triton: the versions that compiled them.
        arch: the compute capability that they run on, as 89.
        about: the model, or the heads, that they were compiled for.
        kernels: the name of each kernel, by its hash.
        form: the version of the file's layout.
    """

    tilewise: str
    torch: str
    triton: str
    arch: int
    about: str
    kernels: dict[str, str] = field(default_factory=dict)
    form: int = _FORM


@dataclass(frozen=True)
class Taken:
    """The result of taking a file's kernels into the cache.

    Attributes:
        manifest: the manifest of the file.
        num_taken: the number of kernels that were put into the cache.
        num_there: the number of kernels that were there already.
    """

    manifest: Manifest
    num_taken: int
    num_there: int


def pack(path: Path, requests: Iterable[Request], *, arch: int, about: str) -> Manifest:
    """Write the kernels of `requests` that are in Triton's cache on disk to one file at `path`.

    Requests that are not compiled yet are left out. A file at `path` is replaced at the end.

    Args:
        arch: the compute capability of the GPU, such as 90.
        about: a line of text about their origin.

    Returns:
        The manifest of the file.

    Raises:
        ValueError: none of the kernels is in the cache.
        OSError: the file cannot be written.
    """
    there = {request.hash: request for request in requests if request.is_on_disk}
    if not there:
        raise ValueError("kernels must have been compiled before they are packed, got none")
    names = {name: request.name for name, request in sorted(there.items())}
    manifest = Manifest(__version__, torch.__version__, triton.__version__, arch, about, names)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(_MANIFEST, json.dumps(asdict(manifest), indent=1))
            for name, request in sorted(there.items()):
                group = get_cache_manager(name).get_group(f"{request.file}.json") or {}
                for each, where in sorted(group.items()):
                    if _ENTRY.fullmatch(f"{name}/{each}"):
                        file.write(where, f"{name}/{each}")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return manifest


def unpack(path: Path, *, arch: int | None) -> Taken:
    """Put the kernels of the file at `path` into Triton's cache on disk.

    Kernels that are there already are not written again. A stamp beside the cache lets the next run
    report how many of the file's kernels it used, see `FirstRun`.

    Args:
        arch: the compute capability of the GPU here; None without one, which allows any.

    Returns:
        The manifest, and the numbers of kernels put into the cache and there already.

    Raises:
        ValueError: the file is no file of kernels, an entry is none of a kernel's files, or another
            Triton, tilewise or GPU is here than it was written for.
        OSError: the file cannot be read, or the cache not be written.
    """
    try:
        with zipfile.ZipFile(path) as file:
            manifest = _manifest_of(file, path)
            _check_here(manifest, arch)
            entries = _entries_of(file, manifest, path)
            there = {name for name in entries if _is_there(name, entries[name])}
            for name in entries.keys() - there:
                _take(file, name, entries[name])
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"FILE must be a whole file of kernels, got {path}: {error}") from error
    stamps = _folder() / STAMPS
    stamps.mkdir(parents=True, exist_ok=True)
    stamp = stamps / f"{path.stem}-{os.getpid()}.json"
    stamp.write_text(json.dumps(sorted(manifest.kernels)))
    return Taken(manifest, len(entries) - len(there), len(there))


def _folder() -> Path:
    return Path(knobs.cache.dir)


def _manifest_of(file: zipfile.ZipFile, path: Path) -> Manifest:
    try:
        if file.getinfo(_MANIFEST).file_size > _MOST_BYTES:
            raise ValueError("its manifest is too large")
        told: Any = json.loads(file.read(_MANIFEST))
        manifest = Manifest(**told)
        texts = (manifest.tilewise, manifest.torch, manifest.triton, manifest.about)
        kinds = {*map(type, texts)}, {type(manifest.arch), type(manifest.form)}
        if kinds != ({str}, {int}) or type(manifest.kernels) is not dict:
            raise ValueError("its manifest has other types")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"FILE must be a file of kernels, got {path}: {error}") from error
    return manifest


def _check_here(manifest: Manifest, arch: int | None) -> None:
    if manifest.form != _FORM:
        raise ValueError(f"FILE must have layout {_FORM}, got {manifest.form}")
    if manifest.triton != triton.__version__:
        raise ValueError(
            f"FILE must be of Triton {triton.__version__}, which is installed here, "
            f"got {manifest.triton}"
        )
    if manifest.tilewise != __version__:
        raise ValueError(f"FILE must be of tilewise {__version__}, got {manifest.tilewise}")
    if arch is not None and manifest.arch != arch:
        raise ValueError(f"FILE must be for sm{arch}, the GPU here, got sm{manifest.arch}")


def _entries_of(
    file: zipfile.ZipFile, manifest: Manifest, path: Path
) -> dict[str, list[zipfile.ZipInfo]]:
    """Return the zip entries of each kernel in a file of kernels, by the kernel's hash.

    Args:
        path: the path of the file, for messages.

    Raises:
        ValueError: an entry has no valid name, is too large, or belongs to no kernel of the
            manifest; or a kernel of the manifest has no entries, or not one .json among them.
    """
    found: dict[str, list[zipfile.ZipInfo]] = {}
    listed = file.infolist()
    if len(listed) > _MOST_ENTRIES:
        raise ValueError(f"FILE must have at most {_MOST_ENTRIES} entries, got {len(listed)}")
    for info in listed:
        if info.filename == _MANIFEST:
            continue
        match = _ENTRY.fullmatch(info.filename)
        if match is None or match[1] not in manifest.kernels or info.file_size > _MOST_BYTES:
            raise ValueError(
                f"entries of FILE must be files of its kernels, got {info.filename!r} in {path}"
            )
        found.setdefault(match[1], []).append(info)
    for name, entries in found.items():
        if _metadata_of(entries) is None:
            raise ValueError(f"kernels of FILE must have one .json each, got none of {name}")
    if len(found) < len(manifest.kernels):
        raise ValueError(
            f"FILE must have all {len(manifest.kernels)} kernels of its manifest, got {len(found)}"
        )
    return found


def _metadata_of(entries: Sequence[zipfile.ZipInfo]) -> str | None:
    names = [Path(info.filename).name for info in entries]
    told = [name for name in names if name.endswith(".json")]
    return told[0] if len(told) == 1 else None


def _is_there(name: str, entries: Sequence[zipfile.ZipInfo]) -> bool:
    metadata = _metadata_of(entries)
    assert metadata is not None
    return metadata in (get_cache_manager(name).get_group(metadata) or {})


def _take(file: zipfile.ZipFile, name: str, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Write a kernel's files to Triton's cache, and last the list of them, which makes it complete.

    Args:
        file: the kernel file.
        name: the kernel's hash, which names its folder.
        entries: the kernel's files.
    """
    manager = get_cache_manager(name)
    group = {}
    for info in entries:
        each = Path(info.filename).name
        group[each] = manager.put(file.read(info), each)
    metadata = _metadata_of(entries)
    assert metadata is not None
    manager.put_group(metadata, group)
