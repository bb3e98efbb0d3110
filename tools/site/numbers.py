"""Committed results, and numbers as pages show them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from tools.site.marks import ROOT

RESULTS = ROOT / "lab" / "results"


def load(name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def number(x: float | None, digits: int = 3) -> str:
    """Return a number in so many digits, with separators and without an exponent."""
    if x is None:
        return "-"
    size = len(str(int(abs(x))))
    places = 0 if abs(x) >= 100 else max(0, digits - (size if abs(x) >= 1 else 0))
    return f"{round(x, places):,.{places}f}"


def pair(values: Iterable[float | None], digits: int = 3) -> str:
    """Return numbers with strokes between them."""
    return " / ".join(number(x, digits) for x in values)
