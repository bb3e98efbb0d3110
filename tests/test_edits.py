"""Changes by tokens: layouts do not matter, and what is not there once is refused."""

from __future__ import annotations

import ast

import pytest

from tests.edits import changed

LAYOUTS = {
    "as it is written": """
class Table:
    def extend(self, rows, count):
        key = rows.shape, rows.dtype, 'told'
        if count > 0 and not rows.is_empty() and (count < 9 or count == 2 * 8):
            self.take(rows, count - 1)
            self.number += 1
        return key
""",
    "exploded, with comments": """
import os

class Table:
    @staticmethod
    def other(rows): return rows.dtype

    def extend(
        self,
        rows,  # of the table
        count,
    ):
        key = (
            rows.shape,
            rows.dtype,
            "told",
        )
        if (
            count > 0
            and not rows.is_empty()  # nothing to take
            and (count < 9 or (count == 2 * 8))
        ):
            self.take(
                rows,
                (count - 1),
            )
            self.number += 1
        return key
""",
    "on one line": """
class Table:
    def extend(self, rows, count):
      key = (rows.shape, rows.dtype, "to" "ld")
      if count > 0 and not rows.is_empty() and (count<9 or count==2*8): self.take(rows, count-1); self.number+=1
      return key
""",  # noqa: E501
}
EDITS = {
    "an operand goes": ("and not rows.is_empty()", "", "not rows.is_empty()"),
    "a member of a tuple goes": ("rows.shape, rows.dtype, 'told'", "rows.shape, 'told'", ".dtype"),
    "a member of a call changes": ("take(rows, (count - 1))", "take(rows, count)", "count - 1"),
    "arguments change": ("(rows, count - 1)", "(rows, count)", "count - 1"),
    "parentheses go": ("(count < 9 or count == 2 * 8)", "count < 9", "or"),
    "what they hold changes": ("count < 9 or count == 2 * 8", "count < 9", "or"),
    "a string changes": ('"told"', '"heard"', "told"),
    "statements change places": (
        "    self.take(rows, count - 1)\n    self.number += 1\n",
        "    self.number += 1\n    self.take(rows, count - 1)\n",
        "",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_change_is_the_same_in_every_layout(edit: str) -> None:
    old, new, gone = EDITS[edit]
    results = set()
    for text in LAYOUTS.values():
        found = changed(text, "Table.extend", old, new)
        before, _, function = ast.unparse(ast.parse(text)).partition("    def extend")
        others, _, result = found.partition("    def extend")
        assert others == before
        assert result.strip() != function
        assert not gone or gone not in result
        results.add(result)
    assert len(results) == 1


def test_new_lines_are_indented_as_the_first() -> None:
    text = LAYOUTS["exploded, with comments"]
    found = changed(text, "Table.extend", "self.number += 1", "if count:\n    self.number += 2")
    assert "            if count:\n                self.number += 2\n" in found


def test_code_outside_of_functions_is_changed_where_none_is_named() -> None:
    assert changed("A = bool\nB = (A,)\n", "", "A = bool", "A = int") == "A = int\nB = (A,)\n"


@pytest.mark.parametrize(
    ("function", "old", "match"),
    [
        ("Table.extend", "rows", "once, got 5"),
        ("Table.extend", "columns", "once, got 0"),
        ("Table.extend", "", "once, got 0"),
        ("Table.extend", "and (count < 9", "must not cut parentheses"),
        ("Table.shrink", "rows", "must hold Table.shrink once, got 0"),
    ],
)
def test_what_is_not_there_once_is_refused(function: str, old: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        changed(LAYOUTS["as it is written"], function, old, "pass")


def test_a_function_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="must hold f once, got 2"):
        changed("def f(): return 1\ndef f(): return 2\n", "f", "return", "yield")


def test_a_change_that_is_no_code_is_refused() -> None:
    with pytest.raises(SyntaxError):
        changed("def f(x): return x\n", "f", "return x", "return (x")
