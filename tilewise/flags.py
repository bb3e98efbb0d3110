"""Flags of the command line: which known one an unknown one is like, and messages in their words.

Imports nothing heavy: the command line reads it before it knows what it is asked for.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Parser", "as_typed", "flags_of", "hint", "unknown_argument"]

_LIKE = 0.65  # share of two names that is the same, from which on one is guessed for the other
_PARTS_OF_A_SUBJECT = 5  # "a, b and c"; a longer text before " must " is a sentence
_PARAMETERS = {"swap_space_gib": "swap_space"}  # arguments of LLM whose flags have other names
_NOUNS = {"prompt"}  # names of parameters that are nouns: a prompt may come from a file


class Parser(argparse.ArgumentParser):
    """A parser that names the known option which an unknown one is like."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse all arguments, or say which one is not known and end with 2."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_argument(unknown, flags_of(self).values()))
        return options


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the long option of each name under which a parser keeps one."""
    found: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            found.setdefault(action.dest, max(action.option_strings, key=len))
    return found


def hint(asked: str, known: Iterable[str]) -> str:
    """Return "; did you mean --flag?" for the known one that is like it, or nothing."""
    like = difflib.get_close_matches(asked, list(known), n=1, cutoff=_LIKE)
    return f"; did you mean {like[0]}?" if like else ""


def unknown_argument(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Say what a parser does not know: the first option, or all words where there is none."""
    for word in unknown:
        if word.startswith("-"):
            asked = word.split("=", 1)[0]
            return f"{asked} is not an option here{hint(asked, known)}"
    return f"nothing is expected here, got {' '.join(unknown)}"


def as_typed(sentence: str, parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Put a message in the words of the command line.

    Names of parameters become flags: those with an underscore wherever they stand, the others
    where they are what must be otherwise. A value that no flag gave is a default, nothing "got".

    Args:
        sentence: "name must <rule>, got <value>", as errors are.
        parser, options: the command's, and what it has parsed.

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
