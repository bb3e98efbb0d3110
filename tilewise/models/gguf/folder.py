"""The checkpoint folder that a GGUF file stands for: its configuration and tokenizer written out.

The folder lies in the user's cache and links to the file, so that whatever reads a checkpoint reads
a GGUF file, too, and worker processes find what the first one made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.gguf.config import config_of
from tilewise.models.gguf.file import GgufFile, parts_of, read_gguf
from tilewise.models.gguf.tokenizer import end_tokens, tokenizer_files

__all__ = ["cache_of", "gguf_choices", "gguf_folder", "gguf_in", "write_folder"]

# How to draw, as newer files say it.
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def gguf_folder(path: str | Path) -> Path:
    """Return the checkpoint folder of a GGUF file, written to the user's cache if it is not there.

    Args:
        path: the file, or a part of a split one.

    Raises:
        CheckpointError: the file cannot be read, or is of a model or with a tokenizer that is not
            known.
    """
    parts = parts_of(Path(path).absolute())
    if not parts[0].is_file():
        raise CheckpointError(f"checkpoint must be a file that exists, got no {str(path)!r}")
    place = cache_of("gguf") / _key(parts)
    if (place / "config.json").is_file():
        return place
    made = _contents(read_gguf(parts[0]))
    try:
        return write_folder(place, parts, made)
    except OSError:  # a home that cannot be written
        return write_folder(
            Path(tempfile.mkdtemp(prefix="tilewise-gguf-")) / place.name, parts, made
        )


def gguf_in(folder: Path) -> Path | None:
    """Return the first GGUF file in a folder, by name; None if there is none."""
    found = sorted(folder.glob("*.gguf"))
    return found[0] if found else None


def gguf_choices(names: list[str]) -> list[str]:
    """Return the names of whole models among files, the first part of split ones; sorted.

    Projectors of pictures, which are named mmproj, are no models.
    """
    files = [x for x in names if x.lower().endswith(".gguf") and "mmproj" not in x.lower()]
    return sorted(x for x in files if "-of-" not in x or "-00001-of-" in x)


def cache_of(kind: str) -> Path:
    """Return the folder in the user's cache in which folders of a kind, such as "gguf", are
    written."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tilewise" / kind


def _key(parts: tuple[Path, ...]) -> str:
    """Return a name for the folder of these files, from their paths, sizes and times and this
    package's code."""
    digest = hashlib.sha256()
    for part in parts:
        stat = part.stat()
        digest.update(f"{part}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def _contents(file: GgufFile) -> dict[str, Any]:
    """Return the contents of the JSON files of the folder, by their names."""
    made: dict[str, Any] = {"config.json": config_of(file)}
    made |= tokenizer_files(file.metadata) or {}
    ends = end_tokens(file.metadata)
    drawing = {
        ours: file.metadata[f"general.sampling.{name}"]
        for name, ours in _SAMPLING.items()
        if f"general.sampling.{name}" in file.metadata
    }
    made["generation_config.json"] = {**({"eos_token_id": ends} if ends else {}), **drawing}
    return made


def write_folder(place: Path, parts: tuple[Path, ...], made: dict[str, Any]) -> Path:
    """Write a folder with links to `parts` and the JSON files of `made`, and return it.

    It is written under a temporary name and renamed, since several processes may do so at once.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    try:
        for part in parts:
            (temporary / part.name).symlink_to(part)
        for name, value in made.items():
            (temporary / name).write_text(json.dumps(value), encoding="utf-8")
        try:
            temporary.rename(place)
        except OSError:
            if not (place / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return place
