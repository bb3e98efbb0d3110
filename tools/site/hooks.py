"""Hooks of mkdocs: pages that code writes, and links that leave docs/.

A link of a page to a file of the repository outside docs/ is right on GitHub. On the site such a
file lies below `source/`, or is a page of the site (`PAGES`).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs imports hooks by their paths

from mkdocs.structure.files import File, Files, InclusionLevel  # noqa: E402

from tools.site import command_line, notebooks  # noqa: E402

# Files of the repository that are pages in the navigation; other Markdown is a page below source/.
PAGES = {
    "CHANGELOG.md": "reference/changelog.md",
    "SECURITY.md": "guide/security.md",
    "tilewise/kernels/README.md": "design/kernels.md",
    "CONTRIBUTING.md": "design/contributing.md",
}
# Who searches wants to know what to do, more often than why or how fast.
BOOSTS = {"guide": 1.4, "reference": 1.2, "design": 0.8, "results": 0.6, "source": 0.2}
_LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s]+)\)")
# A section of the navigation, named by an element that is empty where the section has a page.
_SEARCH = 'data-md-component="search" role="dialog" aria-label="Search"'
_SECTION = re.compile(
    r'(<nav class="md-nav" data-md-level="\d" )aria-labelledby="\w+"([^>]*>)'
    r"(\s*<label[^>]*>\s*<span[^>]*></span>\s*)([^<]*?)(?=\s*</label>)"
)
_BLOCK = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def _place(page: str) -> str:
    """Return where a page of the site lies in the repository."""
    for place, of_site in PAGES.items():
        if of_site == page:
            return place
    return page.removeprefix("source/") if page.startswith("source/") else f"docs/{page}"


def _of_site(place: str) -> str | None:
    """Return where a file of the repository lies on the site; None is a folder without a page."""
    if place in PAGES:
        return PAGES[place]
    if (ROOT / place).is_dir():
        readme = f"{place}/README.md"
        return _of_site(readme) if (ROOT / readme).exists() else None
    if place.startswith("docs/learn/") and place.endswith(".py"):
        return place.removeprefix("docs/").removesuffix(".py") + ".md"
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return f"source/{place}"


def relinked(text: str, page: str) -> tuple[str, set[str]]:
    """Return a page with its links as the site has them, and the files outside docs/ it needs.

    Args:
        text: the page's Markdown.
        page: place of the page on the site.
    """
    here, needed = os.path.dirname(_place(page)), set[str]()

    def of_site(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        name, mark, anchor = target.partition("#")
        place = os.path.normpath(os.path.join(here, name))
        found = _of_site(place)
        if found is None:  # a folder: its name is enough
            return words.strip("[]")
        if found.startswith("source/"):
            needed.add(place)
            if not found.endswith(".md"):
                mark = anchor = ""
        link = os.path.relpath(found, os.path.dirname(page) or ".")
        return f"{words}({link}{mark}{anchor})"

    parts = _BLOCK.split(text)
    parts[::2] = [_LINK.sub(of_site, part) for part in parts[::2]]
    return "".join(parts), needed


def on_files(files: Files, config: Any) -> Files:
    """Add pages that code writes, pages of other folders, and files that pages link to."""
    written = {"reference/command-line.md": command_line.page()}
    for name in notebooks.ORDER:
        written[f"learn/{name}.md"] = notebooks.page(notebooks.FOLDER / f"{name}.py")
    for place, page in PAGES.items():
        written[page] = (ROOT / place).read_text(encoding="utf-8")
    for page, text in written.items():
        files.append(File.generated(config, page, content=text))
    added = set[str]()
    queue = [file for file in files if file.src_uri.endswith(".md")]
    while queue:
        file = queue.pop()
        for place in sorted(relinked(file.content_string, file.src_uri)[1] - added):
            content = (ROOT / place).read_bytes()
            made = File.generated(config, f"source/{place}", content=content)
            made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
            added.add(place)
            if place.endswith(".md"):
                queue.append(made)
    return files


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Return a page's text without headers that are empty: the corner of a table is no header."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page whose sections of the navigation, and whose search, have names."""
    output = output.replace('data-md-component="search" role="dialog"', _SEARCH)
    return _SECTION.sub(r'\1aria-label="Section \4"\2\3\4', output)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page with its links as the site has them, and say how early search shows it."""
    room = page.file.src_uri.partition("/")[0]
    page.meta["search"] = {"boost": BOOSTS.get(room, 1.0)}
    return relinked(markdown, page.file.src_uri)[0]
