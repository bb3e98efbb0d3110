"""A part of a page that a script writes, between two marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
END = "<!-- end -->\n"


def begin(what: str, script: str) -> str:
    """Return the mark before a written part, which names the command that writes it."""
    return f"<!-- begin of {what}: python -m tools.site.{script} -->\n"


def replaced(page: str, mark: str, text: str) -> str:
    """Return a page whose part behind a mark is the text."""
    before, rest = page.split(mark)
    _, after = rest.split(END, 1)
    return before + mark + text + END + after


def row(cells: Sequence[object]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |\n"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    return row(head) + "|" + "---|" * len(head) + "\n" + "".join(map(row, rows))


def write(path: Path, written: Callable[[str], str]) -> None:
    """Write a page anew."""
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
