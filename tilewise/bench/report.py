"""Rows of measurements: a table for people, one JSON document for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """Return the integer of at least 1 that a command line's option has, for `argparse`'s `type`.

    Raises:
        argparse.ArgumentTypeError: the text is no such integer.
    """
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return count


def format_table(rows: Iterable[Mapping[str, Any]], columns: list[str]) -> str:
    """Return `columns` of `rows` as a table of aligned text with a header; a missing value is a
    dash, and floats have three digits."""
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def say(line: str) -> None:
    """Print a line of progress to standard error, whether that is a terminal or not."""
    if sys.stderr is not None:  # as it is for a process without it
        print(line, file=sys.stderr, flush=True)


def write(document: dict[str, Any], json_path: str) -> None:
    """Write `document` as JSON to a file; meanwhile a reader finds the old file or the new one,
    whole."""
    path = Path(json_path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)


def emit(document: dict[str, Any], json_path: str | None) -> None:
    """Write `document` to the file `json_path` if that is not None, and print it as JSON in one
    line, to be the last of standard output: always with a file, else unless standard output is a
    terminal."""
    if json_path is not None:
        write(document, json_path)
    if json_path is not None or not sys.stdout.isatty():
        print(json.dumps(document))
