"""Grammars for tool calls, and for the reasoning before an answer.

An answer consists of calls only, or is text in which strict calls may occur.

With `tool_choice` "auto" an answer is any text up to a mark with which the parser of the format
begins a call. After the mark the grammar requires a call of one of the request's tools, with
arguments by that tool's schema if the tool is strict. The mark is a lazy lexeme, so the text after
it cannot be read in another way. If the mark is also a token of its own, the grammar accepts that
token as well. If the request allows one call only, the answer ends after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tilewise.server.calls.json_objects import JsonCalls
from tilewise.server.calls.rules import ANY, Rules, Tool, W, quoted
from tilewise.server.calls.table import Reasoning, Syntax

__all__ = [
    "calls_alone",
    "harmony_calls",
    "harmony_lead",
    "reasoning_lead",
    "text_with_calls",
    "tool_at_fault",
]

SpecialId = Callable[[str], int | None]
_SPACE = r"[ \t\r\n]"
# The grammar compiler's message: line and column, the reason, and lines of the grammar.
_FAULT = re.compile(r"\bat (\d+)\(\d+\): (.*?)(?:\n +\d+ \| |\Z)", re.DOTALL)
# Models write one or two line ends between the reasoning and the answer.
_GAP = f"/{_SPACE}{{1,4}}/"
# What may stand between two of Llama's calls.
_BETWEEN = " \\t\\r\\n;,"


def calls_alone(
    syntax: Syntax, tools: Sequence[Tool], *, special_id: SpecialId, is_one: bool
) -> str:
    """Return the grammar, in llguidance's Lark, of an answer that is tool calls and nothing else.

    Each schema is compiled by itself, so that its own references (`$defs`) resolve.

    Args:
        syntax: the syntax of the calls that the model writes.
        tools: the tools that may be called.
        special_id: a function from a mark to the id of the special token that it is; None if the
            mark is ordinary text.
        is_one: True for exactly one call, False for one or more.

    Raises:
        Unwritable: a tool's schema cannot be followed in this syntax.
    """
    rules = Rules(tools, special_id)
    if syntax.at_start:
        one, between = syntax.section(rules, "", is_one), f'{W} ";" {W}'
    else:
        mark = syntax.begin[0]
        one, between = f"{rules.either(mark)} {syntax.section(rules, mark, is_one)}", W
    more = f" ({between} {one})*" if syntax.repeats() and not is_one else ""
    return f"start: {one}{more}\n{rules}"


def text_with_calls(
    syntax: Syntax,
    tools: Sequence[Tool],
    *,
    special_id: SpecialId,
    reasoning: Reasoning | None,
    is_open: bool,
    is_one: bool,
) -> str:
    """Return the grammar, in llguidance's Lark, of an answer of text that may contain tool calls.

    Args:
        syntax, tools, special_id: as of `calls_alone`.
        reasoning: the format of the reasoning with which an answer may begin, and in which nothing
            is a call; None for a model without.
        is_open: True if the prompt ends within reasoning.
        is_one: True if the answer ends after its first call.

    Raises:
        Unwritable: a tool's schema cannot be followed in this syntax.
    """
    rules = Rules(tools, special_id)
    if syntax.at_start:
        _calls_at_start(rules, syntax, is_one)
    else:
        made = []
        for i, mark in enumerate(syntax.begin):
            before = rules.ended(f"call_mark_{i}", ANY, mark)
            made.append(rules.add(f"call_{i}", f"{before} {syntax.section(rules, mark, is_one)}"))
        calls = " | ".join(made)
        rules.add("content", f"{calls} | TEXT?" if is_one else f"({calls})* TEXT?")
    if reasoning is None:
        start = "content"
    else:
        end = rules.ended("think_end", ANY, reasoning.end)
        start = f"{end} content | TEXT?"
        if not is_open:
            begin = rules.ended("think_begin", f"/{_SPACE}*/", reasoning.begin)
            start = f"{begin} ({start}) | content"
    return f"start: {start}\n{rules}"


def _calls_at_start(rules: Rules, syntax: Syntax, is_one: bool) -> None:
    """Add the rule `content`, and those it needs, for an answer that is a call if it begins with a
    bracket, and text otherwise.

    A mark may stand anywhere, and a bracket after a mark begins a call as well. Llama's calls may
    follow one another.

    Args:
        rules: the rules, to be extended.
        syntax: the syntax of the model's calls.
        is_one: True if the answer may have one call only.
    """
    call = syntax.section(rules, "", is_one)
    follows = isinstance(syntax, JsonCalls) and not syntax.is_listed
    opener = "{" if follows else r"\["
    if isinstance(syntax, JsonCalls) and syntax.reads_lists:
        opener = r"{\["
    plain = f"/{_SPACE}+|{_SPACE}*[^ \\t\\r\\n{opener}](.|\\n)*/"
    marked = []
    for i, mark in enumerate(syntax.begin):
        text = f"/{_SPACE}*([^ \\t\\r\\n{opener}](.|\\n)*)?/"
        marked.append(f"{rules.ended(f'plain_mark_{i}', text, mark)} content")
    if is_one:
        more = ""
    else:
        after = []
        if follows:
            separator = f"/[{_BETWEEN}]+/"
            after.append(f"({separator})? {call} more")
            before = f"/[{_BETWEEN}]*([^{_BETWEEN}{opener}](.|\\n)*)?/"
            rest = f"/[{_BETWEEN}]+|[{_BETWEEN}]*[^{_BETWEEN}{opener}](.|\\n)*/"
        else:
            before, rest = ANY, "TEXT"
        for i, mark in enumerate(syntax.begin):
            again = "more" if follows else "content"
            after.append(f"{rules.ended(f'after_mark_{i}', before, mark)} {again}")
        rules.add("more", " | ".join((*after, f"({rest})?")))
        more = "more"
    rules.add("PLAIN", plain)
    rules.add("content", " | ".join((f"{call} {more}", *marked, "PLAIN?")))


def reasoning_lead(special_id: SpecialId, reasoning: Reasoning, *, is_open: bool) -> str:
    """Return the grammar of the lead of a constrained answer: its part up to the end of the
    reasoning.

    In the grammar `@text` stands for the constrained rest, see `StructuredOutputs.lead`.

    Args:
        special_id: as of `calls_alone`.
        reasoning: the format of the reasoning.
        is_open: True if the prompt ends within reasoning; otherwise the answer may begin with it.
    """
    rules = Rules((), special_id)
    end, gap = rules.ended("think_end", ANY, reasoning.end), rules.add("GAP", _GAP)
    start = f"{end} {gap}? @text"
    if not is_open:
        begin = rules.ended("think_begin", f"/{_SPACE}*/", reasoning.begin)
        start = f"{begin} {start} | @text"
    return f"start: {start}\n{rules}"


def harmony_lead(special_id: SpecialId, *, is_open: bool) -> str:
    """Return the grammar of the lead of a constrained answer in gpt-oss's format: analysis messages
    and the header of the final channel.

    In the grammar `@text` stands for the constrained rest, see `StructuredOutputs.lead`.

    Args:
        special_id: as of `calls_alone`.
        is_open: True if the prompt ends within analysis.
    """
    rules = Rules((), special_id)
    _add_channels(rules)
    first = "thought_end next " if is_open else ""
    return f'start: {first}thoughts channel "final" message @text\n{rules}'


def harmony_calls(
    tools: Sequence[Tool], *, special_id: SpecialId, is_open: bool, is_asked_for: bool
) -> str:
    """Return the grammar of an answer in gpt-oss's channels that may end with a tool call.

    Args:
        tools, special_id: as of `calls_alone`.
        is_open: True if the prompt ends within analysis.
        is_asked_for: True if the answer must end with a call, with only analysis before it.
    """
    rules = Rules(tools, special_id)
    _add_channels(rules)
    if is_asked_for:
        start = f"{'thought_end next ' if is_open else ''}thoughts call"
    else:
        start = "(head head_end next)* (head TEXT? | call)"
        if is_open:
            start = f"TEXT? | thought_end next {start}"
        rules.ended("head_end", ANY, "<|end|>")
        rules.add("head", 'channel ("analysis" | "commentary" | "final") message')
    made = []
    for i, tool in enumerate(tools):
        to = quoted(f"to=functions.{tool.name}")
        head = f'(" "? {to} channel "commentary" | channel "commentary " {to})'
        made.append(rules.add(f"call_{i}", f"{head} form message {rules.arguments(i)}"))
    rules.add("call", " | ".join(made))
    rules.add("form", '" "? constrain? " "? "json"? " "?')
    return f"start: {start}\n{rules}"


def _add_channels(rules: Rules) -> None:
    """Add to `rules` those of at most two analysis messages, and of the marks of all messages of
    gpt-oss's format.

    The answer begins after the role of the first message. Models write one analysis message; a weak
    model that may write any number never reaches its answer.
    """
    rules.add("thoughts", "(thought_head thought_end next){0,2}")
    rules.add("thought_head", 'channel "analysis" message')
    rules.add("next", 'begin "assistant"')
    for name, mark in (
        ("channel", "<|channel|>"),
        ("message", "<|message|>"),
        ("begin", "<|start|>"),
        ("constrain", "<|constrain|>"),
    ):
        rules.add(name, rules.either(mark))
    rules.ended("thought_end", ANY, "<|end|>")


def tool_at_fault(grammar: str, message: str) -> tuple[int, str] | None:
    """Return the index of the tool whose schema a message of the grammar's compiler blames, and the
    reason; None if the message blames no tool's schema.

    Args:
        grammar: the text that was compiled, of one of this file's functions.
        message: the compiler's error.
    """
    found = _FAULT.search(message)
    if found is None:
        return None
    line = "\n".join(grammar.split("\n")[int(found[1]) - 1 : int(found[1])])
    rule = re.match(r"arguments_(\d+)\w*: ", line, re.IGNORECASE)
    return None if rule is None else (int(rule[1]), " ".join(found[2].split()))
