"""Grammars for tool calls, and for the reasoning before an answer.

An answer consists of calls only, or is text in which strict calls may occur.

With `tool_choice` "auto" an answer is any text up to the mark with which a parser of `tools.py`
begins a call. After the mark the grammar requires a call of one of the request's tools, with
arguments by that tool's schema if the tool is strict. The mark is a lazy lexeme, so the text after
it cannot be read in another way. If the mark is also a token of its own, the grammar accepts that
token as well. If the request allows one call only, the answer ends after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Tool",
    "calls_alone",
    "harmony_calls",
    "harmony_lead",
    "reasoning_lead",
    "text_with_calls",
    "tool_at_fault",
]

# White space between the parts of a call, as `engine.structured` allows it in JSON.
_PARTS = r"""
W: /\n {0,16}| {1,16}/
ANY: /(.|\n)*/
TEXT: /(.|\n)+/
"""
_SPACE = r"[ \t\r\n]"
_JSON = {"whitespace_pattern": r"\n? {0,16}"}
# Keys of a schema that are comments, keys with plain values, and keys that map names to schemas.
_NOTES = ("description", "title", "$comment")
_VALUES = ("enum", "const", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# The grammar compiler's message: line and column, the reason, and lines of the grammar.
_FAULT = re.compile(r"\bat (\d+)\(\d+\): (.*?)(?:\n +\d+ \| |\Z)", re.DOTALL)
# The rule of an answer with at most one call (True), or with any number of calls (False).
_CONTENT = {True: "content: call | TEXT?\n", False: "content: call* TEXT?\n"}
_HERMES = "call: call_mark W? object W? call_end\n"
# Mistral writes a list of whole calls, or a name followed by its arguments.
_MISTRAL = "call: call_mark W? (list | bare)\n"
# At the beginning and after a mark, an object is a call; another call may follow a call.
_LLAMA = rf"""
content: W? object MORE | plain_mark content | PLAIN?
PLAIN: /{_SPACE}+|{_SPACE}*[^ \t\r\n{{](.|\n)*/
"""
_LLAMA_MORE = r"""
more: SEPARATOR? object more | after_mark more | AFTER?
SEPARATOR: /[ \t\r\n;,]+/
AFTER: /[ \t\r\n;,]+|[ \t\r\n;,]*[^ \t\r\n;,{](.|\n)*/
"""
_LLAMA_MARK = rf"/{_SPACE}*([^ \t\r\n{{](.|\n)*)?/"
_LLAMA_MORE_MARK = r"/[ \t\r\n;,]*([^ \t\r\n;,{](.|\n)*)?/"
_THINK = {
    True: "start: think_end content | TEXT?\n",
    False: "start: think_begin (think_end content | TEXT?) | content\n",
}
# Models write one or two line ends between the reasoning and the answer.
_GAP = f"GAP: /{_SPACE}{{1,4}}/\n"
# Messages of an answer in channels, see `harmony`; the answer begins after the role of the first
# message. Models write one analysis message; a weak model that may write any number never reaches
# its answer.
_THOUGHTS = """
thoughts: (thought_head thought_end next){0,2}
thought_head: channel "analysis" message
next: begin "assistant"
"""
_MESSAGES = """
start: (head head_end next)* (head TEXT? | call)
head: channel ("analysis" | "commentary" | "final") message
"""
_CALLS = """
form: " "? constrain? " "? "json"? " "?
"""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, as the grammar needs it.

    Attributes:
        name: the function's name.
        schema: the JSON schema of its arguments; None allows any object.
    """

    name: str
    schema: Mapping[str, Any] | None


def calls_alone(tools: Sequence[Tool], *, is_one: bool) -> str:
    """Return the grammar of a list of calls, the format that `ArrayParser` reads.

    Each schema is compiled by itself, so that its own references (`$defs`) resolve.

    Args:
        is_one: True for a list of exactly one call, False for one or more.
    """
    objects = _objects(tools, ("parameters",))
    return f'start: "[" W? object{_more(is_one)} W? "]"\n{_PARTS}{objects}'


def text_with_calls(
    parser: str,
    tools: Sequence[Tool],
    *,
    special_id: Callable[[str], int | None],
    thinks: bool,
    is_open: bool,
    is_one: bool,
) -> str:
    """Return the grammar of an answer that may contain calls.

    Args:
        parser: a name from TOOL_PARSERS.
        tools: the tools that may be called.
        special_id: the id of the special token that is the mark; None if the mark is ordinary text.
        thinks: True if the answer may begin with reasoning, in which nothing is a call.
        is_open: True if the prompt ends within reasoning.
        is_one: True if the answer ends after its first call.
    """
    marks = {}
    if thinks:
        marks = {"think_end": ("ANY", "</think>"), "think_begin": (f"/{_SPACE}*/", "<think>")}
        if is_open:
            del marks["think_begin"]
    keys: tuple[str, ...] = ("arguments",)
    if parser == "llama3_json":
        body, keys = _LLAMA.replace("MORE", "" if is_one else "more"), ("parameters", "arguments")
        marks["plain_mark"] = (_LLAMA_MARK, "<|python_tag|>")
        if not is_one:
            body += _LLAMA_MORE
            marks["after_mark"] = (_LLAMA_MORE_MARK, "<|python_tag|>")
    elif parser == "mistral":
        body = f"{_CONTENT[is_one]}{_MISTRAL}{_mistral(tools, special_id, is_one)}"
        marks["call_mark"] = ("ANY", "[TOOL_CALLS]")
    else:
        end = _either("</tool_call>", special_id)
        body = f"{_CONTENT[is_one]}{_HERMES}call_end: {end}\n"
        marks["call_mark"] = ("ANY", "<tool_call>")
    start = _THINK[is_open] if thinks else "start: content\n"
    found = [_mark(rule, text, mark, special_id) for rule, (text, mark) in marks.items()]
    return f"{start}{_PARTS}{body}{''.join(found)}{_objects(tools, keys)}"


def reasoning_lead(special_id: Callable[[str], int | None], *, is_open: bool) -> str:
    """Return the lead (the part up to </think>) of a constrained answer, see `StructuredOutputs`.

    Args:
        special_id: the id of the mark's special token, see `text_with_calls`.
        is_open: True if the prompt ends within reasoning; otherwise the answer may begin with it.
    """
    end = _mark("think_end", "ANY", "</think>", special_id)
    if is_open:
        return f"start: think_end GAP? @text\n{_PARTS}{_GAP}{end}"
    begin = _mark("think_begin", f"/{_SPACE}*/", "<think>", special_id)
    return f"start: think_begin think_end GAP? @text | @text\n{_PARTS}{_GAP}{begin}{end}"


def harmony_lead(special_id: Callable[[str], int | None], *, is_open: bool) -> str:
    """Return the lead of a constrained answer in the final channel: the analysis before it.

    Args:
        special_id: the id of the mark's special token, see `text_with_calls`.
        is_open: True if the prompt ends within analysis.
    """
    first = "thought_end next " if is_open else ""
    return f'start: {first}thoughts channel "final" message @text\n{_in_channels(special_id)}'


def harmony_calls(
    tools: Sequence[Tool],
    *,
    special_id: Callable[[str], int | None],
    is_open: bool,
    is_asked_for: bool,
) -> str:
    """Return the grammar of an answer in channels that may end with a call.

    Args:
        tools: the tools that may be called.
        special_id: the id of the mark's special token, see `text_with_calls`.
        is_open: True if the prompt ends within analysis.
        is_asked_for: True if the answer must end with a call, with only analysis before it.
    """
    if is_asked_for:
        start = f"start: {'thought_end next ' if is_open else ''}thoughts call\n"
    else:
        start = _MESSAGES + _mark("head_end", "ANY", "<|end|>", special_id)
        if is_open:
            start = start.replace("start: ", "start: TEXT? | thought_end next ", 1)
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}\n"]
    for i, tool in enumerate(tools):
        to = _quoted(f"to=functions.{tool.name}")
        rules.append(
            f'call_{i}: (" "? {to} channel "commentary" | channel "commentary " {to}) form message '
            f"arguments_{i}\n{_arguments(i, tool)}"
        )
    return f"{start}{_CALLS}{_in_channels(special_id)}{''.join(rules)}"


def _in_channels(special_id: Callable[[str], int | None]) -> str:
    """Return the rules of analysis messages and of the marks of all messages."""
    marks = {
        "channel": "<|channel|>",
        "message": "<|message|>",
        "begin": "<|start|>",
        "constrain": "<|constrain|>",
    }
    rules = "".join(f"{rule}: {_either(mark, special_id)}\n" for rule, mark in marks.items())
    return f"{_PARTS}{_THOUGHTS}{rules}{_mark('thought_end', 'ANY', '<|end|>', special_id)}"


def tool_at_fault(grammar: str, message: str) -> tuple[int, str] | None:
    """Return the name of the tool whose schema a compiler's message blames, and the reason."""
    found = _FAULT.search(message)
    if found is None:
        return None
    line = "\n".join(grammar.split("\n")[int(found[1]) - 1 : int(found[1])])
    rule = re.match(r"arguments_(\d+): %json ", line)
    return None if rule is None else (int(rule[1]), " ".join(found[2].split()))


def _mark(rule: str, text: str, mark: str, special_id: Callable[[str], int | None]) -> str:
    """Return the rule of a text that ends with its first mark."""
    written = f"{rule}_written[lazy]: {text} {_quoted(mark)}\n"
    token = special_id(mark)
    if token is None:
        return f"{written}{rule}: {rule}_written\n"
    return f"{written}{rule}_text: {text}\n{rule}: {rule}_written | {rule}_text? <[{token}]>\n"


def _either(mark: str, special_id: Callable[[str], int | None]) -> str:
    """Return the expression of a mark where nothing else may stand: its token or its text."""
    token = special_id(mark)
    return _quoted(mark) if token is None else f"{_quoted(mark)} | <[{token}]>"


def _mistral(tools: Sequence[Tool], special_id: Callable[[str], int | None], is_one: bool) -> str:
    arguments = _either("[ARGS]", special_id)
    bare = (
        f"{_quoted(tool.name)} W? ({arguments})? W? arguments_{i}" for i, tool in enumerate(tools)
    )
    return f'list: "[" W? object{_more(is_one)} W? "]"\nbare: {" | ".join(bare)}\n'


def _more(is_one: bool) -> str:
    """Return the expression of what may follow the first call of a list."""
    return "" if is_one else ' (W? "," W? object)*'


def _objects(tools: Sequence[Tool], keys: Sequence[str]) -> str:
    """Return the rules of calls as objects: a name, and arguments under one of the keys."""
    rules = [f"object: {' | '.join(f'object_{i}' for i in range(len(tools)))}\n"]
    key = " | ".join(_quoted(json.dumps(key)) for key in keys)
    for i, tool in enumerate(tools):
        name = _quoted(json.dumps(tool.name, ensure_ascii=False))
        rules.append(
            f'object_{i}: "{{" W? "\\"name\\"" W? ":" W? {name} W? "," W? ({key}) W? ":" W? '
            f'arguments_{i} W? "}}"\n{_arguments(i, tool)}'
        )
    return "".join(rules)


def _arguments(place: int, tool: Tool) -> str:
    schema = {"type": "object"} if tool.schema is None else _bare(tool.schema)
    return f"arguments_{place}: %json {json.dumps({**schema, 'x-guidance': _JSON})}\n"


def _bare(schema: Any) -> Any:
    """Return a schema without its comments, since the length of a grammar is limited."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOTES and isinstance(value, str):
            continue
        if key in _VALUES:
            made[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: _bare(part) for name, part in value.items()}
        elif isinstance(value, list):
            made[key] = [_bare(part) for part in value]
        else:
            made[key] = _bare(value)
    return made


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
