"""How makers of an embedding model say to pool it: what sentence-transformers writes beside it."""

from __future__ import annotations

import json
from pathlib import Path

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import flag, read_object, text_or_none

__all__ = ["pooling_default"]

_MODULES = "modules.json"
# Of the states that are served, their names there; in newer files the value of pooling_mode.
_SERVED = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "lasttoken": "last",
}


def pooling_default(directory: Path) -> str:
    """Return "mean" or "last", as 1_Pooling/config.json says; "mean" of a model without one.

    Raises:
        CheckpointError: the file says another pooling, or cannot be read.
    """
    path = directory / _folder(directory) / "config.json"
    if not path.is_file():
        return "mean"
    config = read_object(path)
    mode = text_or_none(config, "pooling_mode")
    modes = [mode] if mode is not None else []
    modes += [
        name for name in config if name.startswith("pooling_mode_") and flag(config, name, False)
    ]
    found = {_SERVED.get(name) for name in modes}
    if len(found) == 1 and None not in found:
        return str(found.pop())
    if not modes:
        return "mean"  # as of sentence-transformers' class
    raise CheckpointError(
        f"pooling of {path.parent.name}/config.json must be the mean or the last token's state, "
        f"got {', '.join(modes)}"
    )


def _folder(directory: Path) -> str:
    """Return the folder of the module that pools."""
    path = directory / _MODULES
    if not path.is_file():
        return "1_Pooling"
    try:
        modules = json.loads(path.read_text(encoding="utf-8-sig"))
        pooling = [m["path"] for m in modules if m["type"].rsplit(".", 1)[-1] == "Pooling"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{_MODULES} must be a list of modules with type and path, got {error!r}"
        ) from None
    folder = pooling[0] if pooling else "1_Pooling"
    if not isinstance(folder, str) or Path(folder).is_absolute() or ".." in Path(folder).parts:
        raise CheckpointError(f"{_MODULES} must have paths below it, got {shown(folder)}")
    return folder
