"""Command-line flags: suggest known flags for unknown ones, and phrase messages with flags.

Imports nothing heavy: the command line reads it before it knows the command.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Parser", "as_typed", "flags_of", "hint", "unknown_argument"]

_LIKE = 0.65  # similarity of two names from which one is suggested for the other
_PARTS_OF_A_SUBJECT = 5  # "a, b and c"; a longer text before " must " is a sentence
_PARAMETERS = {"swap_space_gib": "swap_space"}  # arguments of LLM whose flags have other names
# parameter names that are ordinary nouns in a message: a prompt may come from a file
_NOUNS = {"prompt"}


class Parser(argparse.ArgumentParser):
    """A parser that suggests a known option for an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments; print an unknown one and exit with 2."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_argument(unknown, flags_of(self).values()))
        return options


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the long option of each of a parser's destinations."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            found.setdefault(action.dest, max(action.option_strings, key=len))
    return found


def hint(asked: str, known: Iterable[str]) -> str:
    """Return "; did you mean --flag?" for the most similar known flag, or ""."""
    like = difflib.get_close_matches(asked, list(known), n=1, cutoff=_LIKE)
    return f"; did you mean {like[0]}?" if like else ""


def unknown_argument(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Return a message about what a parser does not know: the first option, else all words."""
    for word in unknown:
        if word.startswith("-"):
            asked = word.split("=", 1)[0]
            return f"{asked} is not an option here{hint(asked, known)}"
    return f"nothing is expected here, got {' '.join(unknown)}"


def as_typed(sentence: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Rewrite a message in the words of the command line.

    Names of parameters become flags: names with an underscore everywhere, the others where they are
    the subject of "must". A default value, which no flag gave, loses its "got".

    Args:
        sentence: the message of an error, "name must <rule>, got <value>".
        parser, options: the command's parser, and its result.

    Example:
        "top_p must be in (0, 1], got 2.0" becomes "--top-p must be in (0, 1], got 2.0".
    """
    flags = flags_of(parser)
    given = {n for n, x in vars(options).items() if n in flags and x != parser.get_default(n)}
    for parameter, name in _PARAMETERS.items():
        if name in flags:
            flags[parameter] = flags[name]
            given |= {parameter} if name in given else set()
    subject, must, rule = sentence.partition(" must ")
    parts = re.split(r"(,? and |,? or |, )", subject)
    named = [part for part in parts if part in flags]
    if must and named and len(parts) <= _PARTS_OF_A_SUBJECT:
        subject = "".join(part if part in _NOUNS else flags.get(part, part) for part in parts)
        body, got, value = rule.rpartition(", got ")
        if got and not set(named) & {*given, *_NOUNS}:
            rule = f"{body}; by default it is {value}"
    sentence = subject + must + rule
    for name in flags:
        if "_" in name:
            sentence = re.sub(rf"(?<![\w'\"./-]){name}(?![\w'\"./-])", flags[name], sentence)
    return sentence
