"""The site's pages are complete: every document has its place, every public name its entry."""

from __future__ import annotations

import re

import tilewise
from tools.site import command_line, marks, notebooks
from tools.site.fields import joined

DOCS = marks.ROOT / "docs"
ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


def entries() -> list[str]:
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    return [name for page in pages for name in ENTRY.findall(page.read_text())]


def test_every_public_name_has_one_entry_in_the_reference():
    found = entries()
    assert len(set(found)) == len(found)
    missing = [name for name in tilewise.__all__ if f"tilewise.{name}" not in found]
    modules = [f"tilewise.nn.{name}" for name in tilewise.nn.__all__]
    assert missing + [name for name in modules if name not in found] == []


def test_every_document_has_its_place_in_the_navigation():
    listed = re.findall(r"[\w./-]+\.md$", (marks.ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    written = {"reference/command-line.md", "design/kernels.md", "design/contributing.md"}
    written |= {"reference/changelog.md", "guide/security.md"}
    written |= {f"learn/{name}.md" for name in notebooks.ORDER}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("**/*.md")}
    records = {name for name in pages if re.match(r"design/\d{3}-", name)}
    assert sorted(listed) == sorted((pages - records) | written)


def test_the_page_of_the_command_line_has_every_command_and_flag():
    page = command_line.page()
    for words in (["serve"], ["bench", "engine"], ["explain", "attention"]):
        flags = set(
            re.findall(r"^  (?:-\w(?: [A-Z]+)?, )?(--[\w-]+)", command_line.help_of(words), re.M)
        )
        assert flags
        for flag in flags - {"--help"}:
            assert flag in page, (words, flag)
    assert "\n## doctor\n" in page


def test_names_of_a_field_are_joined_whatever_the_lines():
    fields = "    a, b,\n        c: numbers of the\n        call.\n    d: one,\n        too.\n"
    text = f"Do it.\n\nArgs:\n{fields}"
    assert "    a, b, c: numbers of the\n        call.\n    d: one,\n        too." in joined(text)
    assert joined(joined(text)) == joined(text)
