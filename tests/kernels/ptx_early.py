"""What PTX does before it has seen the end of the kernel before, see `tilewise.kernels.early`."""

from __future__ import annotations

import re

# What others may see, or what may wait for others.
_EFFECTS = re.compile(
    r"^\s*(?:@!?%\w+\s+)?((?:st|red|atom)\.(?!shared)[\w.:]*|cp\.(?:reduce\.)?async\.bulk[\w.:]*)",
    re.M,
)
_HARMLESS = ("cp.async.bulk.prefetch", "cp.async.bulk.tensor", "cp.async.bulk.commit")
_WAIT, _BEGIN = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


def waits(ptx: str) -> int:
    """Return how many places wait."""
    return ptx.count(_WAIT)


def lets_go(ptx: str) -> int:
    """Return how many places let the next kernel begin."""
    return ptx.count(_BEGIN)


def effects_before_waiting(ptx: str) -> list[str]:
    """Return stores and atomics to global memory that stand before the first wait."""
    before = ptx[: ptx.index(_WAIT)] if _WAIT in ptx else ptx
    found = [match[1] for match in _EFFECTS.finditer(before)]
    return [each for each in found if not each.startswith(_HARMLESS)]


def returns_before_waiting(ptx: str) -> bool:
    """Whether a program may end without having waited."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    return bool(re.search(r"^\s*(?:@!?%\w+\s+)?ret;", body[: body.find(_WAIT)], re.M))
