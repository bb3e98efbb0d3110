"""The table of native decoders in docs/guide/models.md is what the families say."""

from __future__ import annotations

from tools.site import models


def test_the_page_has_the_table_that_the_families_give():
    page = models.PAGE.read_text(encoding="utf-8")
    assert models.written(page) == page, "python -m tools.site.models writes it"
