"""Python processes that this package starts: they import it from here, and nothing of their folder.

`python -c` and `python -m` look for modules in the current folder first. In a folder that came from
elsewhere, such as that of a checkpoint, its `json.py` would run. PYTHONSAFEPATH forbids that to a
process, and to those that it starts in turn.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["environment", "spawning"]

_SAFE = "PYTHONSAFEPATH"


def environment(first: str | None = None, **more: str) -> dict[str, str]:
    """Return the environment of a Python process of ours.

    Args:
        first: a folder in which modules are looked for before all others; None is none.
        more: variables in place of this process's.
    """
    folders = [first, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, _SAFE: "1", "PYTHONPATH": os.pathsep.join(filter(None, folders)), **more}


@contextmanager
def spawning() -> Iterator[None]:
    """Hold while multiprocessing may start processes: they have this process's environment."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before
