"""README.md and the page of results show what the committed results say."""

from __future__ import annotations

import re

import pytest

from tools.site import libraries, numbers, results
from tools.site.marks import END, begin, replaced

README = results.README.read_text()


@pytest.mark.parametrize("module", [results, libraries])
def test_the_pages_of_results_are_what_the_files_say(module):
    assert module.PAGE.read_text() == module.page(), "python -m tools.site.results writes it"


def test_a_board_has_every_library_and_bold_is_the_fastest():
    shape = {"H": 2, "D": 64, "N": 512, "causal": False}
    rows = [
        {"op": op, "peer": peer, "TFLOP/s": rate, **shape}
        for peer, rates in {"tilewise": (300, 200), "fa3": (400, None), "flex": (None, 100)}.items()
        for op, rate in zip(("forward", "backward"), rates, strict=True)
    ]
    head, (cells,) = libraries.speeds(rows)
    assert head == ["shape", "tilewise", "FlashAttention-3", "FlexAttention"]
    assert cells == ["D 64, N 512, full", "300 / **200**", "**400** / -", "- / 100"]
    assert libraries.ratio(libraries.by_shape(rows), "fa3") == "0.750 / -"


def test_the_rows_of_the_readme_are_what_the_files_say():
    assert results.five(README) == README, "python -m tools.site.results writes them"


def test_the_first_screen_says_what_for_whom_how_to_install_and_how_to_run():
    screen = README[: README.index("## ")]
    assert screen.count("\n") <= 40
    assert "pip install" in screen
    assert re.search(r"```python\n(.*\n){6,7}```", screen)
    assert re.findall(r"^!\[.{40,}\]\(docs/images/", screen, re.MULTILINE)
    doors = re.findall(
        r"^\| \w[\w ]+ \| \[[\w ,]+\]\((docs/[\w/-]+\.md)\) \|", screen, re.MULTILINE
    )
    assert len(set(doors)) == 4
    assert len(results._five()) == 5


@pytest.mark.parametrize(
    "document",
    [README, results.page(), libraries.page()],
    ids=["README", "results", "libraries"],
)
def test_pages_for_users_hold_no_diary(document):
    assert not re.search(r"(earlier|later|another) run|before\b.{0,20}\bnow\b", document)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0698, "0.070"), (4.076, "4.08"), (66.18, "66.2"), (1291.6, "1,292")],
)
def test_numbers_have_three_digits(value, shown):
    assert numbers.number(value) == shown


def test_a_pick_of_two_rows_is_refused():
    with pytest.raises(ValueError, match="too many"):
        results.pick([{"D": 64, "n": 1}, {"D": 64, "n": 2}], D=64)


def test_a_written_part_leaves_the_rest_of_its_page():
    mark = begin("rows", "results")
    assert replaced(f"a\n{mark}old\n{END}b\n", mark, "new\n") == f"a\n{mark}new\n{END}b\n"
