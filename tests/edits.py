"""Changes of one function's code, found by its tokens: how the code is laid out does not matter.

A planted mistake names a function and what to change in it. It is looked for without regard to
spaces, ends of lines, comments, quotes, commas before a closing bracket and parentheses that only
group, so that it outlives formatters and moves of the function within its file.
"""

from __future__ import annotations

import ast
import keyword
import re
import textwrap
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<literal>
        [rRbBfFuU]{0,2}(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
        | 0[xXoObB]\w+ | (?:\d|\.\d)(?:[eE][+-]|[\w.])*
    )
    | [^\W\d]\w*
    | \*\*= | //= | >>= | <<= | \.\.\.
    | -> | := | == | != | <= | >= | \*\* | // | << | >> | [-+*/%@&|^]=
    | \#[^\n]*
    | [^\s\w]""",
    re.DOTALL | re.VERBOSE,
)


class _Token(NamedTuple):
    """One token and its place; `counts` is False of what only groups or ends a list."""

    text: str
    begin: int
    end: int
    counts: bool


def changed(text: str, function: str, old: str, new: str) -> str:
    """Return a module's text, as `ast.unparse` writes it, with `new` for `old` in one function.

    Args:
        text: of the module.
        function: its qualified name without `<locals>`, or a class; the whole module if empty.
        old: tokens that stand there exactly once. Parentheses around calls' arguments count; those
            that group may be left out, but not cut in two.
        new: what takes their place, indented as the line in which they begin.

    Raises:
        ValueError: the function is not there once, `old` is not there once or cuts parentheses.
    """
    tree = ast.parse(text)
    places = _places(tree)[function] if function else [(None, 0)]
    if len(places) != 1:
        raise ValueError(f"the module must hold {function} once, got {len(places)}")
    [(body, index)] = places
    code = ast.unparse(tree if body is None else body[index])
    begin, end = _span(code, old, function or "the module")
    line = code[code.rfind("\n", 0, begin) + 1 : begin]
    margin = " " * (len(line) - len(line.lstrip(" ")))
    made = ast.parse(code[:begin] + _indented(new, margin) + code[end:])
    if body is None:
        tree = made
    else:
        body[index : index + 1] = made.body
    return ast.unparse(tree) + "\n"


class _Places(dict[str, list[tuple[list[ast.stmt] | None, int]]]):
    def __missing__(self, name: str) -> list[tuple[list[ast.stmt] | None, int]]:
        return []


def _places(tree: ast.Module) -> _Places:
    """Return in which lists of statements functions and classes stand, by qualified names."""
    found = _Places()

    def visit(node: ast.AST, prefix: str) -> None:
        for _, body in ast.iter_fields(node):
            for index, child in enumerate(body if isinstance(body, list) else ()):
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    name = prefix + child.name
                    found[name] = [*found[name], (body, index)]
                    visit(child, f"{name}.")
                elif isinstance(child, ast.AST):
                    visit(child, prefix)

    visit(tree, "")
    return found


def _span(code: str, old: str, name: str) -> tuple[int, int]:
    """Return where in the code `old` begins and ends."""
    there, sought = _tokens(code), [token.text for token in _tokens(old) if token.counts]
    counting = [index for index, token in enumerate(there) if token.counts]
    words = [there[index].text for index in counting]
    ends = range(len(sought), len(words) + 1) if sought else ()
    found = [end for end in ends if words[end - len(sought) : end] == sought]
    if len(found) != 1:
        raise ValueError(f"{name} must hold the code to be changed once, got {len(found)}: {old!r}")
    first, last = counting[found[0] - len(sought)], counting[found[0] - 1]
    while True:
        opened = deepest = 0
        for token in there[first : last + 1]:
            if not token.counts:
                opened += (token.text == "(") - (token.text == ")")
                deepest = min(deepest, opened)
        if deepest < 0 and _groups(there, first - 1, "("):
            first -= 1
        elif opened > deepest and _groups(there, last + 1, ")"):
            last += 1
        elif opened == 0 == deepest:
            return there[first].begin, there[last].end
        else:
            raise ValueError(f"code to be changed must not cut parentheses, got {old!r}")


def _groups(there: list[_Token], index: int, text: str) -> bool:
    within = 0 <= index < len(there)
    return within and there[index].text == text and not there[index].counts


def _tokens(code: str) -> list[_Token]:
    """Return the tokens of code, which may be a part of a statement."""
    found: list[_Token] = []
    opened: list[int] = []
    for match in _TOKEN.finditer(code):
        text, counts = match[0], True
        if text.startswith("#"):
            continue
        if match["literal"]:
            text = ast.unparse(ast.parse(text))
        before = found[-1].text if found else ""
        if text in ("(", "[", "{"):
            is_operand = before[-1:].isalnum() or before[-1:] in ('"', "'", "_", ")", "]", "}")
            counts = text != "(" or (is_operand and not keyword.iskeyword(before))
            opened.append(len(found))
        elif text in (")", "]", "}"):
            if before == ",":
                found[-1] = found[-1]._replace(counts=False)
            if opened:
                start = opened.pop()
                if start == len(found) - 1:  # an empty tuple, or a call without arguments
                    found[start] = found[start]._replace(counts=True)
                counts = found[start].counts
        found.append(_Token(text, *match.span(), counts))
    if opened[:1] == [0]:  # of a call whose name is not among what is to be changed
        found[0] = found[0]._replace(counts=True)
    return found


def _indented(code: str, margin: str) -> str:
    """Return lines of code with the margin before all but the first."""
    return textwrap.indent(textwrap.dedent(code).rstrip(), margin)[len(margin) :]
