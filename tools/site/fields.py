"""Fields of docstrings whose names take several lines."""

from __future__ import annotations

import re

_NAMES = re.compile(r"^(    [\w*]+(?:, [\w*]+)*,)\n +(?=[\w*]+(?:, [\w*]+)*(?:,$|:))", re.MULTILINE)


def joined(docstring: str) -> str:
    """Return a docstring in which a field's names stand on one line, however many they are."""
    text, count = docstring, 1
    while count:
        text, count = _NAMES.subn(r"\1 ", text)
    return text
