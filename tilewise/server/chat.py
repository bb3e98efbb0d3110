"""From a chat's messages to a prompt: what is checked, and what the template is given."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.server.errors import ApiError, invalid, unknown, unserved
from tilewise.server.protocol import (
    CACHE_MARKS,
    ChatRequest,
    TokenizeRequest,
    refuse_unknown,
    shown,
)
from tilewise.server.templates import Templates

__all__ = ["ChatTemplate", "messages_of", "read_template", "strict_tools", "tool_names"]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FIELDS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
    "refusal", "function_call", "audio", "annotations", "type",
}  # fmt: skip
_TEXT_PARTS = ("text", "input_text", "output_text")
# Beside its text a part may have what was told of it when it was made; models read the text.
_PART = {
    "type", "text", "annotations", "citations", "id", "index", "logprobs", "phase", *CACHE_MARKS,
}  # fmt: skip
# What a template's arguments may not replace: these decide what is a message and what is not.
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
# Marks the end of a message that is continued; in no text that a tokenizer sees.
_END = "\N{NULL}tilewise-end-of-message\N{NULL}"


@dataclass(slots=True)
class ChatTemplate:
    """A model's template.

    Attributes:
        source: Jinja; None for a model that has none.
        special_tokens: such as bos_token, which templates write.
        allows_others: requests may bring their own.
        renderer: runs them.
    """

    source: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    allows_others: bool = False
    renderer: Templates = field(default_factory=Templates)

    def render(self, request: ChatRequest | TokenizeRequest) -> str:
        """Return the prompt of a chat.

        Raises:
            ApiError: 400, messages or template are at fault.
        """
        source = self.source
        if request.chat_template is not None:
            if not self.allows_others:
                raise unserved(
                    "chat_template", "start the server with --trust-request-chat-template"
                )
            source = request.chat_template
        if source is None:
            raise invalid(
                "messages must be of a model with a chat template, this one has none "
                "(--chat-template FILE gives one)",
                "messages",
                code="no_chat_template",
            )
        given = dict(request.chat_template_kwargs or {})
        for name in given:
            if name in _RESERVED or name in self.special_tokens:
                raise invalid(
                    f"chat_template_kwargs must not hold {name}", f"chat_template_kwargs.{name}"
                )
        effort = getattr(request, "reasoning_effort", None)
        if effort is not None:
            given.setdefault("reasoning_effort", effort)
        messages = messages_of(request.messages or [])
        is_continued = request.continue_final_message
        if is_continued:
            _mark_end(messages, request.add_generation_prompt)
        text = self.renderer.render(
            source,
            {
                **self.special_tokens,
                **given,
                "messages": messages,
                "tools": request.tools or None,
                "add_generation_prompt": request.add_generation_prompt and not is_continued,
            },
        )
        if is_continued:
            if _END not in text:
                raise invalid(
                    "continue_final_message must be of a message that the chat template "
                    "writes as it is",
                    "continue_final_message",
                    code="template_error",
                )
            text = text[: text.rindex(_END)]
        return text


def _mark_end(messages: list[dict[str, Any]], wants_prompt: bool) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise invalid(
            "continue_final_message must follow an assistant's message with content",
            "continue_final_message",
        )
    last["content"] += _END


def messages_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates read them: content one text, arguments of calls as objects.

    Raises:
        ApiError: 400, a message is wrong, or of more than text.
    """
    if not messages:
        raise _wrong("messages", "hold at least 1 message", messages)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _wrong(param: str, rule: str, value: object) -> ApiError:
    return invalid(f"{param} must {rule}, got {shown(value)}", param)


def _message(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"be one of {', '.join(_ROLES)}", role)
    for name, value in message.items():
        if name not in _FIELDS:
            raise unknown(f"{where}.{name}")
        if name in ("function_call", "audio", "refusal", "annotations") and value:
            raise unserved(f"{where}.{name}")
        if name == "type" and value not in (None, "text", "message"):
            raise _wrong(f"{where}.type", "be text or message", value)
    made = {k: v for k, v in message.items() if v is not None and k != "type"}
    content = _text(f"{where}.content", message.get("content"))
    if content is None and role != "assistant":
        raise _wrong(f"{where}.content", "be a text or parts of text", None)
    if content is not None:
        made["content"] = content
    elif "tool_calls" not in made:
        raise _wrong(f"{where}.content", "be a text where there are no tool_calls", None)
    else:
        made["content"] = ""
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        if name in made and not isinstance(made[name], str):
            raise _wrong(f"{where}.{name}", "be a text", made[name])
    reasoning = made.get("reasoning_content", made.get("reasoning"))
    if reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = reasoning
    if "tool_calls" in made:
        made["tool_calls"] = _calls(f"{where}.tool_calls", made["tool_calls"])
    return made


def _text(where: str, content: object) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "be a text or parts of text", content)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise _wrong(f"{where}[{i}]", "be a part", part)
        kind = part.get("type")
        if kind not in _TEXT_PARTS:
            raise unserved(f"{where}[{i}].type", f"must be text, got {shown(kind)}")
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{i}].text", "be a text", part.get("text"))
        refuse_unknown(f"{where}[{i}]", part, _PART)
        texts.append(part["text"])
    return "\n".join(texts)


def _calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "be a list", calls)
    made = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{i}].function", "be an object with a name", function)
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise _wrong(f"{where}[{i}].function.arguments", "be JSON", arguments) from None
        made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def tool_names(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return the parameters' schema of each tool by its name.

    Raises:
        ApiError: 400, a tool is not a function with a name.
    """
    found: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools or []):
        where = f"tools[{i}]"
        if tool.get("type") != "function":
            raise unserved(f"{where}.type", f"must be function, got {shown(tool.get('type'))}")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise _wrong(f"{where}.function", "be an object with a name", function)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _wrong(f"{where}.function.parameters", "be a JSON schema", parameters)
        if name in found:
            raise _wrong(f"{where}.function.name", "be of one tool only", name)
        found[name] = parameters or {"type": "object"}
    return found


def strict_tools(tools: list[dict[str, Any]] | None) -> frozenset[str]:
    """Return the names of the tools whose calls must follow their schema.

    Raises:
        ApiError: 400, `strict` is something else than true, false or null.
    """
    found = set()
    for i, tool in enumerate(tools or []):
        function = tool["function"]
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise _wrong(f"tools[{i}].function.strict", "be true or false", strict)
        if strict:
            found.add(function["name"])
    return frozenset(found)


def read_template(directory: Path | None, given: str | None) -> tuple[str | None, dict[str, str]]:
    """Return a model's template and special tokens.

    Args:
        directory: the checkpoint's.
        given: a file's name, or a template itself (it then holds "{"); None is the checkpoint's.

    Raises:
        ValueError: there is no such file.
    """
    config: dict[str, Any] = {}
    source: str | None = None
    if directory is not None:
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                config.update(json.loads((directory / name).read_text(encoding="utf-8-sig")))
        source = _configured(config.get("chat_template"))
        file = directory / "chat_template.jinja"
        if file.is_file():
            source = file.read_text(encoding="utf-8")
    if given is not None:
        path = Path(given)
        if "{" in given:
            source = given
        elif path.is_file():
            source = path.read_text(encoding="utf-8")
        else:
            raise ValueError(f"--chat-template must be a file or a template, got {given!r}")
    tokens = {}
    for name, token in config.items():
        if name.endswith("_token"):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[name] = text
    return source, tokens


def _configured(template: object) -> str | None:
    """Return the template of tokenizer_config.json, which may list several by name."""
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
