"""How a model writes calls of tools and its reasoning, by the marks in its chat templates."""

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
# Marks of reasoning that other servers read and this one does not, as templates write them.
_OTHER_REASONING = re.compile(
    r"\[THINK\]|<\|channel>|<seed:think>|<reasoning>|<thought>|◁think▷|<\|START_THINKING\|>"
    r"|<\|begin_of_thought\|>|<\|inner_prefix\|>"
)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What of an answer is read.

    Attributes:
        calls: how the model writes calls, a name of `--tool-call-parser`; None where it cannot.
        thinks: reasoning stands between <think> and </think>.
        is_harmony: the answer is written in channels.
    """

    calls: str | None
    thinks: bool
    is_harmony: bool


def is_harmony(template: str) -> bool:
    """Whether a template writes messages in channels, as that of gpt-oss."""
    return "<|channel|>" in template


def format_of(template: str, calls: str, reasoning: str) -> ChatFormat:
    """Return how a model writes.

    Args:
        template: all templates of the model.
        calls, reasoning: of --tool-call-parser and --reasoning-parser: "auto" is by the template.

    Raises:
        ValueError: calls and reasoning are to be read in ways of which one excludes the other.
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
    """Yield what of a model's answers is told as it is, because its form is not known here."""
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
