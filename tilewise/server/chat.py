"""Check a chat's messages and render them with the model's template to a prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.server.calls.table import ToolFormat
from tilewise.server.chat_format import is_harmony
from tilewise.server.cut_json import completed
from tilewise.server.errors import ApiError, invalid, unknown, unserved
from tilewise.server.harmony import messages_for_template, tools_for_template, with_preambles
from tilewise.server.history import (
    shows_python,
    with_calls_as_text,
    with_ids,
    with_responses,
    with_text,
)
from tilewise.server.protocol import (
    CACHE_MARKS,
    ChatRequest,
    TokenizeRequest,
    refuse_unknown,
    shown,
)
from tilewise.server.templates import TemplateError, Templates

__all__ = [
    "ChatTemplate",
    "added_tokens",
    "messages_of",
    "model_type_of",
    "named_templates",
    "read_template",
    "strict_tools",
    "tool_names",
]

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_FIELDS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
    "refusal",
    "function_call",
    "audio",
    "annotations",
    "type",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
# A part of a message may also contain what a response said about it; models read the text only.
_PART = {
    "type",
    "text",
    "annotations",
    "citations",
    "id",
    "index",
    "logprobs",
    "phase",
    *CACHE_MARKS,
}
# Names that a request's template arguments may not set: they decide where messages begin.
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
# Marks the end of a continued message in the rendered text; removed before tokenising.
_END = "\N{NULL}tilewise-end-of-message\N{NULL}"
_PROBE = "\N{NULL}tilewise-probe\N{NULL}"
# messages checked for being left out by a template; each check is one more rendering
MAX_PROBES = 4
TOOL_USE = "tool_use"  # name of the template that transformers uses when there are tools


@dataclass(slots=True)
class ChatTemplate:
    """The chat templates of the served model, and all that is needed to render chats with them.

    Attributes:
        source: the Jinja source of the default template; None for a model without one.
        special_tokens: the special tokens that templates write, such as bos_token.
        allows_others: True if requests may contain their own template.
        renderer: the process that renders templates.
        named: further templates of the model, by name. "tool_use" is used for requests with tools,
            any other one when the request's `chat_template` is its name.
        calls: the format in which the model calls tools; None if it is not known.
    """

    source: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    allows_others: bool = False
    renderer: Templates = field(default_factory=Templates)
    named: Mapping[str, str] = field(default_factory=dict)
    calls: ToolFormat | None = None
    # templates that expect the arguments of calls as texts
    _wants_text: set[str] = field(default_factory=set)

    @property
    def sources(self) -> list[str]:
        """The Jinja sources of all templates of the model, the default one first."""
        return [*([] if self.source is None else [self.source]), *self.named.values()]

    def faults(self) -> Iterator[str]:
        """Yield a message, for the server's start, about each template of the model that is no
        valid Jinja or leaves system messages out.

        The server starts all the same: only chats that use an invalid template are refused.
        """
        for name, source in {"default": self.source or "", **self.named}.items():
            try:
                self.renderer.check(source)
            except TemplateError as error:
                yield f"chats are refused that take the chat template {name!r}: {error.message}"
                continue
            asked = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hi"}]
            more = {**self.special_tokens, "add_generation_prompt": True}
            # A template that refuses the probe's messages reports it itself.
            with contextlib.suppress(TemplateError):
                if source and _PROBE not in self.renderer.render(
                    source, {**more, "messages": asked}
                ):
                    yield f"the chat template {name!r} leaves messages of the system out"

    def _source_of(self, request: ChatRequest | TokenizeRequest) -> str:
        asked = request.chat_template
        if asked is not None and asked in self.named:
            return self.named[asked]
        if asked == "default" and self.source is not None:
            return self.source
        if asked is not None:
            if not self.allows_others:
                names = f", or name one of {', '.join(self.named)}" if self.named else ""
                raise unserved(
                    "chat_template", f"start the server with --trust-request-chat-template{names}"
                )
            return asked
        if request.tools and TOOL_USE in self.named:
            return self.named[TOOL_USE]
        if self.source is None and self.named:
            raise invalid(
                f"chat_template must be one of {', '.join(self.named)}, as this model has no "
                "default",
                "chat_template",
                code="no_chat_template",
            )
        if self.source is None:
            raise invalid(
                "messages must be of a model with a chat template, this one has none "
                "(--chat-template FILE gives one)",
                "messages",
                code="no_chat_template",
            )
        return self.source

    def render(self, request: ChatRequest | TokenizeRequest) -> str:
        """Return the text of the prompt that a chat template makes of a request's messages and
        tools.

        The template is chosen by the request's `chat_template` and tools, see the class.

        Raises:
            ApiError: 400, the template does not accept the messages, or the request's own template
                or its arguments are invalid.
        """
        source = self._source_of(request)
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
        place_of = {id(message): place for place, message in enumerate(messages)}
        has_developer = any(message["role"] == "developer" for message in messages)
        tools = request.tools or None
        if is_harmony(source):
            messages = messages_for_template(messages)
            tools = None if tools is None else tools_for_template(tools)
        else:
            if "developer" not in source:
                messages = _as_system(messages)
            messages = self._with_calls(messages, source)
        variables: dict[str, Any] = {
            **self.special_tokens,
            **given,
            "tools": tools,
            "add_generation_prompt": request.add_generation_prompt and not is_continued,
        }

        def rendered(messages: list[dict[str, Any]]) -> str:
            return with_preambles(self._render(source, variables, messages))

        text = rendered(messages)
        # A template's author decides how it treats a system message.
        for message in _unseen(messages, text)[:MAX_PROBES] if has_developer else ():
            # A template may change a message's text: rendering another text shows whether it is
            # used.
            others = [{**m, "content": _PROBE} if m is message else m for m in messages]
            if rendered(others) == text:
                place = place_of[id(message)]
                raise invalid(
                    f"messages[{place}] must be one that the chat template writes, got "
                    "instructions of the developer that it leaves out there",
                    f"messages[{place}]",
                    code="template_error",
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

    def _with_calls(self, messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
        """Return messages with earlier tool calls and their results in the form that the template
        `source` expects, by the names that occur in it."""
        messages = with_ids(messages, self.calls)
        if "tool_responses" in source and "tool_call_id" not in source:
            messages = with_responses(messages)
        if self.calls is not None and "tool_calls" not in source:
            messages = with_calls_as_text(messages, self.calls)
        return messages

    def _render(
        self, source: str, variables: dict[str, Any], messages: list[dict[str, Any]]
    ) -> str:
        """Return the text that the template `source` makes of messages and variables.

        Most templates expect the arguments of calls as objects. One that expects texts fails with
        objects, or writes Python's notation: it is rendered again with texts of JSON, and
        remembered.
        """
        has_calls = any("tool_calls" in message for message in messages)
        if source in self._wants_text:
            messages = with_text(messages)
        elif has_calls:
            refused: TemplateError | None = None
            text = ""
            try:
                text = self.renderer.render(source, {**variables, "messages": messages})
            except TemplateError as error:
                refused = error
            if refused is None and not shows_python(messages, text):
                return text
            try:
                text = self.renderer.render(source, {**variables, "messages": with_text(messages)})
            except TemplateError:
                if refused is not None:
                    raise refused from None
                return text
            self._wants_text.add(source)
            return text
        return self.renderer.render(source, {**variables, "messages": messages})


def _unseen(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the system and developer messages whose contents are not in a rendered prompt.

    Each content is searched for after the place of the one before: a message that the prompt has in
    another order is returned, too.

    Args:
        text: the rendered prompt.
    """
    found, end = [], 0
    for message in messages:
        if message["role"] in ("system", "developer"):
            content = message["content"].strip()
            place = text.find(content, end)
            if place < 0:
                found.append(message)
            else:
                end = place + len(content)
    return found


def _as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the role "developer" replaced by "system", for a template that does not
    know "developer", OpenAI's newer name.

    The text of a developer message next to a system or another developer message is joined with it,
    since templates write only one. The given messages are changed.
    """
    made: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role = message["role"]
        if "developer" in (role, before) and {role, before} <= {"developer", "system"}:
            made[-1]["content"] += "\n\n" + message["content"]
        else:
            made.append(message)
        if role == "developer":
            message["role"] = "system"
        before = role
    return made


def _mark_end(messages: list[dict[str, Any]], wants_prompt: bool) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise invalid(
            "continue_final_message must follow an assistant's message with content",
            "continue_final_message",
        )
    last["content"] += _END


def messages_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check a chat's messages and return them as templates expect them.

    Contents become one text each, arguments of calls values instead of JSON, and reasoning is under
    both of its names.

    Raises:
        ApiError: 400, a message is malformed, or contains something other than text.
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
        if not made["tool_calls"]:
            del made["tool_calls"]
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
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                # Clients send the arguments of a call that was cut off back unchanged, as invalid
                # JSON.
                arguments = completed(arguments) if arguments.strip() else {}
            except ValueError:
                raise _wrong(f"{where}[{i}].function.arguments", "be JSON", arguments) from None
        made.append({**call, "function": {**function, "arguments": arguments or {}}})
    return made


def tool_names(tools: list[dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of the parameters of each of a request's tools, by the tool's name.

    A tool without parameters has {"type": "object"}.

    Raises:
        ApiError: 400, a tool is not a function with a name of its own, or its schema no object.
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
    """Return the names of the tools with `strict`, whose calls must follow their schema.

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
    """Return the Jinja source of a model's default chat template, and its special tokens.

    Args:
        directory: the directory of the checkpoint.
        given: a file's name, or the source of a template (recognised by "{"); None for the
            checkpoint's own: chat_template.jinja, else the one in tokenizer_config.json.

    Returns:
        The source, None if there is none, and the texts of the special tokens by their names, such
        as bos_token.

    Raises:
        ValueError: there is no such file.
    """
    config = _tokenizer_config(directory)
    source = _configured(config.get("chat_template")).get("default")
    file = None if directory is None else directory / "chat_template.jinja"
    if file is not None and file.is_file():
        source = file.read_text(encoding="utf-8-sig")
    if given is not None:
        path = Path(given)
        if "{" in given:
            source = given
        elif path.is_file():
            source = path.read_text(encoding="utf-8-sig")
        else:
            raise ValueError(f"--chat-template must be a file or a template, got {given!r}")
    tokens = {}
    for name, token in config.items():
        if name.endswith("_token"):
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                tokens[name] = text
    return source, tokens


def named_templates(directory: Path) -> dict[str, str]:
    """Return the Jinja sources of a checkpoint's templates beside its default one, by name.

    They are entries of a list in tokenizer_config.json, or files in additional_chat_templates.
    """
    found = _configured(_tokenizer_config(directory).get("chat_template"))
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8-sig")
    found.pop("default", None)
    return found


def added_tokens(directory: Path) -> frozenset[str]:
    """Return the texts of the tokens that tokenizer_config.json adds to a checkpoint's
    vocabulary."""
    config = _tokenizer_config(directory)
    decoder = config.get("added_tokens_decoder")
    entries = list(decoder.values()) if isinstance(decoder, dict) else []
    more = config.get("additional_special_tokens")
    entries += more if isinstance(more, list) else []
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return frozenset(text for text in texts if isinstance(text, str))


def model_type_of(directory: Path) -> str:
    """Return the `model_type` of a checkpoint's config.json, "" if there is none."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8-sig")) if file.is_file() else {}
    found = config.get("model_type") if isinstance(config, dict) else None
    return found if isinstance(found, str) else ""


def _tokenizer_config(directory: Path | None) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if directory is not None and (directory / name).is_file():
            config.update(json.loads((directory / name).read_text(encoding="utf-8-sig")))
    return config


def _configured(template: object) -> dict[str, str]:
    """Return the Jinja sources in `template`, the entry "chat_template" of tokenizer_config.json,
    by name: "default" for a single text; {} if there is none."""
    if isinstance(template, str):
        return {"default": template}
    entries = template if isinstance(template, list) else []
    named = {t.get("name"): t.get("template") for t in entries if isinstance(t, dict)}
    return {
        name: text
        for name, text in named.items()
        if isinstance(name, str) and isinstance(text, str)
    }
