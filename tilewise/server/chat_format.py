"""Which formats a model writes in: by its chat template, its vocabulary and its configuration."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from tilewise.server.calls.table import (
    FORMATS,
    REASONING,
    Reasoning,
    ToolFormat,
    call_format,
    format_in,
    reasoning_in,
)

__all__ = [
    "ChatFormat",
    "call_names",
    "format_of",
    "is_harmony",
    "reasoning_format",
    "reasoning_names",
    "told",
    "unread",
]

HARMONY = ("harmony", "openai")  # openai is its name in other servers
# Marks of reasoning formats that other servers parse and this one does not.
_OTHER_REASONING = re.compile(
    r"<reasoning>|<thought>|◁think▷|<\|begin_of_thought\|>|<\|inner_prefix\|>"
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The formats in which the served model writes tool calls and reasoning, set at the start.

    Attributes:
        calls: the format of tool calls; None for a model without, and for one that writes channels.
        reasoning: the format of the reasoning; None for a model without, and for one that writes
            channels.
        is_harmony: True if the answer is written in channels, gpt-oss's format.
        reads_calls: True if requests may have tools.
    """

    calls: ToolFormat | None = None
    reasoning: Reasoning | None = None
    is_harmony: bool = False
    reads_calls: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The names of the formats of calls and of reasoning, "none" for a format that is None."""
        if self.is_harmony:
            return "harmony" if self.reads_calls else "none", "harmony"
        return (
            "none" if self.calls is None else self.calls.name,
            "none" if self.reasoning is None else self.reasoning.name,
        )


def call_names() -> tuple[str, ...]:
    """Return all names of formats of tool calls, those in other servers included."""
    return (*HARMONY, *(name for form in FORMATS for name in (form.name, *form.others)))


def reasoning_names() -> tuple[str, ...]:
    """Return all names of formats of reasoning, those in other servers included."""
    return (*HARMONY, *(name for form in REASONING for name in (form.name, *form.others)))


def reasoning_format(name: str) -> Reasoning | None:
    """Return the format of reasoning that has this name here, or else in another server; None if
    none has, as for "none" and "harmony"."""
    found = next((form for form in REASONING if name == form.name), None)
    return found or next((form for form in REASONING if name in form.others), None)


def is_harmony(template: str) -> bool:
    """Return whether the source of a template writes messages in channels, as gpt-oss's does."""
    return "<|channel|>" in template


def format_of(
    template: str,
    calls: str,
    reasoning: str,
    *,
    tokens: Collection[str] = (),
    model_type: str = "",
) -> ChatFormat:
    """Return the formats in which a model writes.

    Args:
        template: the sources of all templates of the model.
        calls, reasoning: values of --tool-call-parser and --reasoning-parser; "auto" looks into
            the template, then at the tokens and at the type.
        tokens, model_type: the texts of the checkpoint's added tokens and its `model_type`, which
            help to find the format of calls for "auto".

    Raises:
        ValueError: the two formats exclude each other.
    """
    channels = is_harmony(template)
    if calls == "auto":
        found = None if channels else format_in(template, tokens, model_type)
        calls = "harmony" if channels else "none" if found is None else found.name
    if reasoning == "auto":
        thinks = reasoning_in(template)
        reasoning = "none" if thinks is None else thinks.name
        reasoning = "harmony" if channels or calls in HARMONY else reasoning
    has_channels = calls in HARMONY or reasoning in HARMONY
    if has_channels and (calls not in (*HARMONY, "none") or reasoning not in (*HARMONY, "none")):
        raise ValueError(
            "--tool-call-parser and --reasoning-parser must both be harmony or auto where one is "
            f"harmony, got {calls} and {reasoning}"
        )
    if has_channels:
        return ChatFormat(is_harmony=True, reads_calls=calls != "none")
    named = call_format(calls)
    return ChatFormat(named, reasoning_format(reasoning), reads_calls=named is not None)


def told(form: ChatFormat) -> str:
    """Return the line about the formats of calls and reasoning that the server prints at its
    start."""
    calls, reasoning = form.names
    return f"calls of tools are read as {calls}, reasoning as {reasoning}"


def unread(template: str, form: ChatFormat) -> Iterator[str]:
    """Yield messages, for the server's start, about chats that the formats do not fit.

    The template writes tools, but the format of calls is not known; or the reverse; or the template
    has marks of a reasoning format without a parser.

    Args:
        template: the sources of all templates of the model.
        form: the formats that were found.
    """
    writes_tools = re.search(r"\btools\b", template) is not None
    if not form.reads_calls and writes_tools:
        yield (
            "the form in which this model calls tools is not known: requests with tools are "
            "refused (--tool-call-parser names a form)"
        )
    elif form.reads_calls and template and not writes_tools:
        yield "the chat template does not write tools: the model is not told of those of a request"
    other = _OTHER_REASONING.search(template)
    if other is not None and form.reasoning is None and not form.is_harmony:
        yield (
            f"reasoning in the form of this model's chat template ({other[0]}) is not known: it is "
            "told as content"
        )
