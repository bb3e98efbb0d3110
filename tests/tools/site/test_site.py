"""The site: built without the network, with strict links and search; `make docs-test` runs this."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tools.site.marks import ROOT

pytest.importorskip("mkdocs", reason="pip install 'tilewise[docs]'")
pytest.importorskip("mkdocstrings")
from tools.site import hooks


def test_links_that_leave_the_documents_lead_to_their_copies():
    text = (
        "[a](../../lab/results/waste.json), [b](hopper.md#how-they-work), [c](../../lab/results), "
        "[d](../../tilewise/kernels/README.md), [e](https://example.com), [f](../guide/masks.md)\n"
        "```md\n[g](../../lab/README.md)\n```\n"
    )
    page, needed = hooks.relinked(text, "design/ampere.md")
    assert "[a](../source/lab/results/waste.json)" in page
    assert "[b](hopper.md#how-they-work), c, [d](kernels.md)" in page
    assert "[e](https://example.com), [f](../guide/masks.md)" in page
    assert "[g](../../lab/README.md)" in page  # a block is no text
    assert needed == {"lab/results/waste.json"}


def test_a_page_of_another_folder_has_links_from_its_place():
    page, needed = hooks.relinked("[a](../../docs/design/hopper.md)", "design/kernels.md")
    assert page == "[a](hopper.md)"
    assert needed == set()


class Links(HTMLParser):
    """The addresses that a page loads or leads to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.led: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        of = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.loaded += [of[name] for name in ("src", "srcset") if of.get(name)]
        if tag == "link" and of.get("rel") != "canonical":
            self.loaded.append(of["href"])
        if tag == "a" and of.get("href"):
            self.led.append(of["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_a_page_loads_nothing_from_elsewhere(site):
    pages = sorted(site.glob("**/*.html"))
    assert len(pages) > 100
    for page in pages:
        links = Links(page.read_text(encoding="utf-8"))
        assert not [x for x in links.loaded if re.match(r"(https?:)?//", x)], page.name


@pytest.mark.slow
def test_every_link_within_the_site_leads_somewhere(site):
    for page in sorted(site.glob("**/*.html")):
        if page.name == "404.html":
            continue
        for link in Links(page.read_text(encoding="utf-8")).led:
            if not re.match(r"[a-z]+:|//|#", link):
                place = (page.parent / link.partition("#")[0]).resolve()
                assert place.exists(), f"{page.relative_to(site)}: {link}"


@pytest.mark.slow
def test_search_finds_functions_options_and_guides(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[2] for entry in index["docs"]}
    names = {"tilewise.attention_varlen", "tilewise.SamplingParams", "bench-engine", "dropout"}
    assert names <= found
    assert (site / "index.html").read_text(encoding="utf-8").count("md-search__input") == 1


@pytest.mark.slow
def test_the_reference_shows_the_options_that_are_made_on_import(site):
    page = (site / "reference" / "api" / "engine.html").read_text(encoding="utf-8")
    assert "gpu_memory_utilization" in page
    assert "&lt;options&gt;" not in page
