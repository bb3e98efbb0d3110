"""Earlier calls of tools and their results as a model's template expects them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tilewise.server.calls.table import ToolFormat

__all__ = ["shows_python", "with_calls_as_text", "with_ids", "with_responses", "with_text"]

Message = dict[str, Any]


def with_ids(messages: Sequence[Message], form: ToolFormat | None) -> list[Message]:
    """Return messages whose tool calls have ids in the model's format; the results name the same
    ids.

    Clients may send any ids, and the ids that this server makes suit no format.

    Args:
        messages: the result of `chat.messages_of`; it is not changed.
        form: the model's format of calls; None, or a format without ids, keeps the clients' ids.
    """
    if form is None or not form.call_ids:
        return list(messages)
    made, number, new = [], 0, dict[object, str]()
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                old = call.get("id")
                found = form.call_ids.format(name=call["function"]["name"], number=number)
                if form.kept_ids and isinstance(old, str) and re.fullmatch(form.kept_ids, old):
                    found = old
                number += 1
                if isinstance(old, str):
                    new[old] = found
                calls.append({**call, "id": found})
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in new:
            message = {**message, "tool_call_id": new[message["tool_call_id"]]}
        made.append(message)
    return made


def with_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the arguments of calls as texts of JSON instead of objects, as older
    templates expect them."""
    made = []
    for message in messages:
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = call["function"]
                text = json.dumps(function["arguments"], ensure_ascii=False)
                calls.append({**call, "function": {**function, "arguments": text}})
            message = {**message, "tool_calls": calls}
        made.append(message)
    return made


def shows_python(messages: Sequence[Message], text: str) -> bool:
    """Return whether a rendered prompt shows the arguments of a call as Python prints a dict, which
    tells that its template expects arguments as texts of JSON.

    Args:
        messages: the messages, with arguments as objects.
        text: the prompt that a template made of them.
    """
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            shown = str(arguments)
            as_json = json.dumps(arguments, ensure_ascii=False)
            if arguments and shown in text and as_json not in text:
                return True
    return False


def with_calls_as_text(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """Return messages whose calls are a part of their text, as a model of the format `form` writes
    them, for a template that writes no calls."""
    made = []
    for message in messages:
        if "tool_calls" in message:
            message = dict(message)
            calls = []
            for one in message.pop("tool_calls"):
                arguments = one["function"]["arguments"]
                # Clients may send a list or a number, which no format has a place for.
                whole = arguments if isinstance(arguments, dict) else {"arguments": arguments}
                calls.append((one["function"]["name"], whole))
            written = form.syntax.write(calls)
            joint = "\n" if message["content"] else ""
            message["content"] += joint + written
        made.append(message)
    return made


def with_responses(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of calls in the message of the calls, as `tool_responses`.

    Gemma 4's first templates expect them so. A result that is a JSON object is given as an object.
    Results without calls before them stay messages.
    """
    made: list[Message] = []
    names: dict[object, str] = {}
    for message in messages:
        if message["role"] not in ("tool", "function"):
            made.append(message)
            for call in message.get("tool_calls") or ():
                names[call.get("id")] = call["function"]["name"]
            continue
        if not made or not made[-1].get("tool_calls"):
            made.append(message)
            continue
        name = message.get("name") or names.get(message.get("tool_call_id")) or "unknown"
        earlier = made[-1].get("tool_responses") or []
        response = {"name": name, "response": _read(message["content"])}
        made[-1] = {**made[-1], "tool_responses": [*earlier, response]}
    return made


def _read(content: str) -> Any:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return found if isinstance(found, dict) else content
