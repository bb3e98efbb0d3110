"""The page of the command line: every command and its options, from the parsers themselves."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator

from tilewise import cli
from tools.site.marks import table

HEAD = """# The command line

`tilewise COMMAND --help` prints the same. A flag that does not exist is refused with the nearest
one that does.
Exit code 2 is a wrong command line, 1 a failure that the last line tells, 130 Ctrl-C.

"""
# Those whose own parsers the command hands its words to: the module that has `main(argv)`.
_ELSEWHERE = ("bench",)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the groups of a parser's arguments: title, and a row for each argument."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        rows = []
        for action in group._group_actions:
            if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
                continue
            if isinstance(action, argparse._HelpAction):
                continue
            name = formatter._format_action_invocation(action)
            text = formatter._expand_help(action) if action.help else ""
            rows.append([f"`{_cell(name)}`", _cell(text)])
        if rows:
            yield group.title or "options", rows


def command(name: str, parser: argparse.ArgumentParser, level: int = 2) -> str:
    """Return the section of a command and of those under it."""
    parts = [f"{'#' * level} {name}\n\n{parser.description or ''}\n"]
    for title, rows in options(parser):
        parts.append(f"{title[0].upper()}{title[1:]}:\n\n{table(['option', 'what it is'], rows)}")
    for word, below in _subparsers(parser).items():
        parts.append(command(f"{name} {word}", below, level + 1))
    return "\n".join(parts)


def help_of(words: list[str]) -> str:
    """Return what a command prints for --help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return said.getvalue().rstrip("\n")


def page() -> str:
    """Return the page in Markdown."""
    parts = [HEAD]
    for name, parser in _subparsers(cli._parser()).items():
        parts.append(command(name, parser))
        if name in _ELSEWHERE:
            (what,) = [a for a in parser._actions if a.choices]
            for word in what.choices or ():
                said = help_of([name, word])
                parts.append(f"### {name} {word}\n\n```text\n{said}\n```\n")
    return "\n".join(parts)
