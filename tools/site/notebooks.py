"""Notebooks of docs/learn as pages: their cells, run, with what they print and draw.

A notebook is a file of Python in jupytext's percent form: `# %%` begins a cell of code,
`# %% [markdown]` one of text in comments. It is a program, too, and opens as a notebook by
`jupytext --to ipynb FILE`.
"""

from __future__ import annotations

import ast
import contextlib
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.site.marks import ROOT

FOLDER = ROOT / "docs" / "learn"
# The staircase: each needs what is above it.
ORDER = (
    "softmax_by_hand",
    "online_softmax",
    "tiles_and_traffic",
    "backward_by_recomputation",
    "what_a_cache_holds",
    "blocks_and_forks",
    "a_scheduler",
    "exactness",
)


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook.

    Attributes:
        is_code: True for code, False for text.
        text: text of the cell, of Markdown without the comments' marks.
        line: number of its first line in the file.
    """

    is_code: bool
    text: str
    line: int


@dataclass(frozen=True)
class Output:
    """What a cell of code gave.

    Attributes:
        printed: text on standard output.
        value: value of the last line, if that is an expression; None for none.
    """

    printed: str
    value: Any


def cells(path: Path) -> list[Cell]:
    """Return the cells of a notebook."""
    found, begin = list[Cell](), 0
    lines = path.read_text(encoding="utf-8").split("\n")
    marks = [i for i, line in enumerate(lines) if line.startswith("# %%")]
    if not marks or "".join(lines[: marks[0]]).strip():
        raise ValueError(f"{path.name} must begin with a cell, # %%")
    for begin, end in zip(marks, [*marks[1:], len(lines)], strict=True):
        body = lines[begin + 1 : end]
        is_code = "[markdown]" not in lines[begin]
        if not is_code:
            body = [line.removeprefix("#").removeprefix(" ") for line in body]
        found.append(Cell(is_code, "\n".join(body).strip("\n"), begin + 2))
    return found


def run(cell: Cell, name: str, space: dict[str, Any]) -> Output:
    """Run a cell of code in a namespace, as a notebook would."""
    tree = ast.parse("\n" * (cell.line - 1) + cell.text, name)
    last = tree.body[-1] if tree.body else None
    said, value = io.StringIO(), None
    with contextlib.redirect_stdout(said):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), space)
            value = eval(compile(ast.Expression(last.value), name, "eval"), space)
        else:
            exec(compile(tree, name, "exec"), space)
    return Output(said.getvalue(), value)


def shown(output: Output) -> str:
    """Return what a cell gave, in Markdown."""
    parts = []
    if output.printed:
        parts.append(f'<pre tabindex="0">{html.escape(output.printed.rstrip())}</pre>')
    if hasattr(output.value, "_repr_svg_"):
        parts.append(output.value._repr_svg_())
    elif output.value is not None:
        parts.append(f'<pre tabindex="0">{html.escape(repr(output.value))}</pre>')
    return f'<div class="notebook-output" markdown="0">{"".join(parts)}</div>\n' if parts else ""


def page(path: Path) -> str:
    """Return a notebook as a page: its text, its code, and what it gives when it is run now."""
    parts, space = list[str](), {"__name__": "__main__"}
    for cell in cells(path):
        if cell.is_code:
            parts.append(f"```python\n{cell.text}\n```\n")
            parts.append(shown(run(cell, path.name, space)))
        else:
            parts.append(f"{cell.text}\n")
    place = path.relative_to(ROOT).as_posix()
    parts.append(
        f'---\n\nThis page is <a href="{path.name}">{path.name}</a>, run when the site was built. '
        f"To play with it: `pip install jupytext notebook`, then `jupytext --to ipynb {place}`, or "
        "run it as a program.\n"
    )
    return "\n".join(part for part in parts if part)
