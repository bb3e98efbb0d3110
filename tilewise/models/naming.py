"""Explain a model name that is no checkpoint folder, and suggest what to give instead."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

__all__ = ["PACKAGED", "not_a_checkpoint"]

PACKAGED = "story"  # the model that comes with the package
# A repository's name, or its address on the hub; paths shorten the two slashes of https:// to one.
_HUB_NAME = re.compile(
    r"(?:(?:https?:/{1,2})?[\w-]+(?:\.[\w-]+)+/|hf:/{1,2})?"
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/tree/[\w.-]+)?/?"
)
_FOLDER = "give a folder with config.json, safetensors and a tokenizer"
_NO_GGUF = f"GGUF files are not read; {_FOLDER}, of which the file was made"
_LIKE = 0.65  # similarity of two names from which one is suggested for the other


def not_a_checkpoint(given: str | Path) -> str:
    """Return a message about a name that is no folder with a config.json, with a suggestion.

    Args:
        given: the name as the user typed it.
    """
    name, path = str(given), Path(given)
    if path.is_dir():
        return f"checkpoint must hold config.json, got none in {name!r}: {_inside(path)}"
    return f"checkpoint must be a folder or {PACKAGED!r}, got {name!r}: {_instead(name, path)}"


def _instead(name: str, path: Path) -> str:
    """Return a suggestion for a name that is no folder."""
    home = Path(os.path.expanduser(name))
    if name.lower().endswith(".gguf"):
        return _NO_GGUF
    if path.is_file():
        folder = f"give its folder, {str(path.parent)!r}"
        return f"that is a file; {folder if _is_checkpoint(path.parent) else _FOLDER}"
    if home != path:
        if _is_checkpoint(home):
            return f"~ is read by a shell, not here; give {str(home)!r}"
        return f"there is no folder {str(home)!r}"
    if name.casefold() == PACKAGED:
        return f"the packaged model is {PACKAGED!r}, in lower case"
    like = _like(path)
    if like is not None:
        return f"there is none of that name; did you mean {like!r}?"
    if hub := _HUB_NAME.fullmatch(name):
        return _hub(hub.group(1))
    return "there is none of that name"


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file()


def _inside(path: Path) -> str:
    """Return a suggestion for a folder without config.json."""
    files = {x.name.lower() for x in path.iterdir()}
    below = [*sorted(path.glob("*/")), *sorted(path.glob("snapshots/*/"))]
    found = [repr(str(x)) for x in below if _is_checkpoint(x)]
    if found:
        return f"give {' or '.join(found[:3])}"
    if any(file.endswith(".gguf") for file in files):
        return _NO_GGUF
    if "adapter_config.json" in files:
        return "adapters (LoRA) are not read; merge it into its model and give that folder"
    if any(file == "params.json" or file.startswith("consolidated.") for file in files):
        return f"files of Mistral's and Meta's own are not read; {_FOLDER}, of the same model"
    return _FOLDER


def _hub(repo: str) -> str:
    """Return where a model of the hub lies on this machine, or how to download it."""
    local = _cached(repo)
    if local is not None:
        return f"names of the hub are not looked up; the model is here, as {str(local)!r}"
    folder = repo.split("/")[1]
    return (
        f"there is no such folder, and names of the hub are not fetched; hf download {repo} "
        f"--local-dir {folder} does it, then give {folder!r}"
    )


def _cached(repo: str) -> Path | None:
    """Return the newest snapshot of a model in Hugging Face's cache on this machine."""
    home = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = (cache / f"models--{repo.replace('/', '--')}" / "snapshots").glob("*/")
    found = [path for path in snapshots if _is_checkpoint(path)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _like(path: Path) -> str | None:
    """Return an existing folder, or the packaged model, whose name is similar to a missing
    folder's."""
    known = {PACKAGED: PACKAGED} if path == Path(path.name) else {}
    if path.parent.is_dir():
        known |= {x.parent.name: str(x.parent) for x in path.parent.glob("*/config.json")}
    names = {name.casefold(): name for name in known}
    like = difflib.get_close_matches(path.name.casefold(), names, n=1, cutoff=_LIKE)
    return known[names[like[0]]] if like else None
