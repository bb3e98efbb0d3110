"""Detect from the marks in a chat template how a model writes tool calls and reasoning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ChatFormat", "format_of", "is_harmony", "unread"]

_CALL_MARKS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
)
# Marks of reasoning formats that other servers parse and this one does not.
_OTHER_REASONING = re.compile(
    r"\[THINK\]|<\|channel>|<seed:think>|<reasoning>|<thought>|◁think▷|<\|START_THINKING\|>"
    r"|<\|begin_of_thought\|>|<\|inner_prefix\|>"
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The parts of an answer that are parsed.

    Attributes:
        calls: the format of tool calls, a name of `--tool-call-parser`; None for a model without.
        thinks: True if reasoning stands between <think> and </think>.
        is_harmony: True if the answer is written in channels.
    """

    calls: str | None
    thinks: bool
    is_harmony: bool


def is_harmony(template: str) -> bool:
    """Return whether a template writes messages in channels, as gpt-oss's does."""
    return "<|channel|>" in template


def format_of(template: str, calls: str, reasoning: str) -> ChatFormat:
    """Return the formats in which a model writes.

    Args:
        template: the sources of all templates of the model.
        calls, reasoning: values of --tool-call-parser and --reasoning-parser; "auto" looks into the
            template.

    Raises:
        ValueError: the two formats exclude each other.
    """
    channels = is_harmony(template)
    if calls == "auto":
        found = next((name for mark, name in _CALL_MARKS if mark in template), None)
        calls = "harmony" if channels else found or "none"
    if reasoning == "auto":
        found = "think" if "<think>" in template or "</think>" in template else "none"
        reasoning = "harmony" if channels or calls == "harmony" else found
    if "harmony" in (calls, reasoning) and (
        calls not in ("harmony", "none") or reasoning == "think"
    ):
        raise ValueError(
            "--tool-call-parser and --reasoning-parser must both be harmony or auto where one is "
            f"harmony, got {calls} and {reasoning}"
        )
    return ChatFormat(
        None if calls == "none" else calls, reasoning == "think", "harmony" in (calls, reasoning)
    )


def unread(template: str, form: ChatFormat) -> Iterator[str]:
    """Yield a message for each part of answers that stays text because its format has no parser."""
    if form.calls is None and re.search(r"\btools\b", template):
        yield (
            "the form in which this model calls tools is not known: requests with tools are "
            "refused (--tool-call-parser names a form)"
        )
    elif form.calls is not None and template and not re.search(r"\btools\b", template):
        yield "the chat template does not write tools: the model is not told of those of a request"
    other = _OTHER_REASONING.search(template)
    if other is not None and not form.thinks and not form.is_harmony:
        yield (
            f"reasoning in the form of this model's chat template ({other[0]}) is not known: it is "
            "told as content"
        )
