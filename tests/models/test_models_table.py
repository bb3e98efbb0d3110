"""The table of native decoders in docs/models.md is what the families say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_table_that_the_families_give():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    script = runpy.run_path(str(ROOT / "docs" / "models_table.py"))
    assert script["written"](page) == page, "python docs/models_table.py writes it"
