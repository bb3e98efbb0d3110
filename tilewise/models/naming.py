"""Explain a model name that is no checkpoint folder, and suggest what to give instead."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

__all__ = ["PACKAGED", "like", "not_a_checkpoint"]

PACKAGED = "story"  # the model that comes with the package
# A repository's address on the hub; paths shorten the two slashes of https:// to one.
_ADDRESS = re.compile(
    r"(?:(?:https?:/{1,2})?[\w-]+(?:\.[\w-]+)+/|hf:/{1,2})"
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/tree/[\w.-]+)?/?"
)
_FOLDER = "give a folder with config.json, safetensors and a tokenizer"
_LIKE = 0.65  # similarity of two names from which one is suggested for the other


def not_a_checkpoint(given: str | Path) -> str:
    """Return a message about a name that is no folder with a config.json, with a suggestion.

    Args:
        given: the name as the user typed it.
    """
    name, path = str(given), Path(given)
    if path.is_dir():
        return f"checkpoint must hold config.json, got none in {name!r}: {_inside(path)}"
    return (
        f"checkpoint must be a folder, a GGUF file, a name on the hub or {PACKAGED!r}, "
        f"got {name!r}: {_instead(name, path)}"
    )


def _instead(name: str, path: Path) -> str:
    """Return a suggestion for a name that is no folder."""
    home = Path(os.path.expanduser(name))
    if name.lower().endswith(".gguf"):
        return "there is no GGUF file of that name"
    if path.is_file():
        folder = f"give its folder, {str(path.parent)!r}"
        return f"that is a file; {folder if _is_checkpoint(path.parent) else _FOLDER}"
    if home != path:
        if _is_checkpoint(home):
            return f"~ is read by a shell, not here; give {str(home)!r}"
        return f"there is no folder {str(home)!r}"
    if name.casefold() == PACKAGED:
        return f"the packaged model is {PACKAGED!r}, in lower case"
    near = like(path)
    if near is not None:
        return f"there is none of that name; did you mean {near!r}?"
    if address := _ADDRESS.fullmatch(name):
        return f"of a model of the hub give its name, {address.group(1)!r}"
    return "there is none of that name"


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file()


def _inside(path: Path) -> str:
    """Return the advice that ends the message about a folder without config.json.

    It names subfolders that have one; if there are none it speaks of adapters, of Mistral's and
    Meta's own files, or of checkpoints in general.
    """
    files = {x.name.lower() for x in path.iterdir()}
    below = [*sorted(path.glob("*/")), *sorted(path.glob("snapshots/*/"))]
    found = [repr(str(x)) for x in below if _is_checkpoint(x)]
    if found:
        return f"give {' or '.join(found[:3])}"
    if "adapter_config.json" in files:
        return "adapters (LoRA) are not read; merge it into its model and give that folder"
    if any(file == "params.json" or file.startswith("consolidated.") for file in files):
        return f"files of Mistral's and Meta's own are not read; {_FOLDER}, of the same model"
    return _FOLDER


def like(path: Path) -> str | None:
    """Return an existing folder, or the packaged model, whose name is similar to a missing
    folder's."""
    known = {PACKAGED: PACKAGED} if path == Path(path.name) else {}
    if path.parent.is_dir():
        known |= {x.parent.name: str(x.parent) for x in path.parent.glob("*/config.json")}
    names = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(path.name.casefold(), names, n=1, cutoff=_LIKE)
    return known[names[near[0]]] if near else None
