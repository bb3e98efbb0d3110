"""gpt-oss's harmony format: parse its answers, and prepare messages for its template.

An answer is a list of messages. Each has a header, with its channel and perhaps a recipient, and a
text:

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

Messages in the analysis channel are reasoning, a message to functions.NAME is a call of that tool,
and all others are content.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tilewise.server.calls.parts import Part

__all__ = [
    "ANSWER",
    "MESSAGE",
    "HarmonyParser",
    "messages_for_template",
    "prompt_end",
    "tools_for_template",
    "with_preambles",
]

ANSWER = "<|channel|>final<|message|>"  # the header of the answer itself, after analysis
MESSAGE = "<|message|>"  # the end of a header
_START, _CHANNEL = "<|start|>", "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BREAKS = (*_ENDS, _START, _CHANNEL)  # marks that end a text
_CHANNELS = ("analysis", "commentary", "final")
_FUNCTIONS = "functions."
_ASSISTANT = "assistant"
MAX_HEADER = 256  # characters; names of tools have at most 64
# The beginning of a header after its role: the recipient, then marks followed by words.
_HEADER = re.compile(r"\s*(?:t|to|to=[^\s<]*\s*)?(?:<\|\w+\|>[^<\n]*)*(?:<(?:\|(?:\w+\|?)?)?)?")
_MARK = re.compile(r"<\|\w*\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# Marks text for the user that the template puts into analysis or final; see `with_preambles`.
_PREAMBLE = "\N{NULL}tilewise-preamble\N{NULL}"


class HarmonyParser:
    """Parse an answer incrementally: text in, parts out; see `parts.Parser`.

    Text outside of messages of this format is content, its marks included.

    Args:
        names: the names of the tools that may be called.
        begun: the end of the prompt, as far as it belongs to the message that the answer continues.

    Attributes:
        kind: the kind of the open message; None while its header is incomplete.
        thoughts: (first, end) character indices of each message of reasoning that has ended.
    """

    def __init__(self, names: Collection[str] = (), begun: str = "") -> None:
        self._names = names
        self._parts: list[Part] = []
        self._held = ""  # the end of the text so far, which may become a mark
        self._header: str | None = ""
        self._has_role = True  # True if the prompt ends with the header's role
        self._is_between = False  # True after a message's end, before the next one begins
        self._count = 0  # number of calls so far
        self._is_bare = False  # True while the open call has no text yet
        # indices of the next character, and of the open message's first one
        self._place = self._first = 0
        self._seen: set[str] = set()  # kinds of messages that have had text
        # separator before the next text: messages of one kind are put on separate lines
        self._joint = ""
        self.kind: str | None = None
        self.thoughts: list[tuple[int, int]] = []
        self.push(begun)
        self._place = self._first = self._count = 0
        self._seen.clear()
        self._joint = ""

    def push(self, text: str) -> list[Part]:
        """Process the next piece of the answer's text, and return the parts that are certain now;
        text that may belong to a mark or a header is held back."""
        place = 0
        while place < len(text):
            if self._header is None and not self._held and not self._is_between:
                mark = text.find("<", place)
                end = len(text) if mark < 0 else mark
                if end > place:
                    self._tell(text[place:end])
                    self._place += end - place
                    place = end
                    continue
            self._take(text[place])
            place += 1
        return self._taken()

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts that were held back."""
        header, self._header = self._header, None
        if header is not None:
            self._leave(header)
        elif self._held:
            held, self._held = self._held, ""
            self._tell(held)
        self._close()
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        merged: list[Part] = []
        for part in parts:
            last = merged[-1] if merged else None
            is_same = last is not None and (last.kind, last.index) == (part.kind, part.index)
            if last is not None and is_same:
                merged[-1] = Part(part.kind, last.text + part.text, part.index, last.name)
            else:
                merged.append(part)
        return merged

    def _take(self, char: str) -> None:
        """Process a character of a header, or of a possible mark."""
        self._place += 1
        if self._header is not None:
            self._in_header(char)
            return
        self._held += char
        if self._held in _BREAKS:
            mark, self._held = self._held, ""
            self._broken(mark)
        elif not any(mark.startswith(self._held) for mark in _BREAKS):
            held, self._held = self._held, ""
            # Only a mark's first character can begin another one.
            self._tell(held[:-1] if char == "<" else held)
            self._held = char if char == "<" else ""

    def _broken(self, mark: str) -> None:
        """Process a mark that ends a message's text: end the message, and begin the next one's
        header if the mark does."""
        self._close()
        self._is_between = mark in _ENDS
        if not self._is_between:
            self._begin("" if mark == _START else mark, has_role=mark != _START)

    def _begin(self, header: str, *, has_role: bool) -> None:
        self._header, self._has_role, self._is_between = header, has_role, False
        self._first = self._place

    def _in_header(self, char: str) -> None:
        assert self._header is not None
        self._header += char
        header = self._header
        marks = _MARK.findall(header) if char == ">" else []
        if not marks or not header.endswith(marks[-1]):
            if not self._is_header(header):
                self._header = None
                # The last character may begin a mark.
                kept = header.removesuffix("<")
                self._set("content")
                self._tell(kept)
                self._held = header[len(kept) :]
        elif marks[-1] in _ENDS or marks[-1] == _START:
            self._header = None
            self._leave(header.removesuffix(marks[-1]))
            self._broken(marks[-1])
        elif marks[-1] == _CHANNEL:
            if len(marks) > 1:
                self._leave(header.removesuffix(_CHANNEL))
                self._header, self._has_role = _CHANNEL, True
        elif marks[-1] == MESSAGE or (marks[-1] != _CONSTRAIN and _channel(header)):
            self._open(header)  # another mark in this place is read as <|message|>

    def _is_header(self, header: str) -> bool:
        """Return whether a text may be the beginning of a message's header."""
        if len(header) > MAX_HEADER:
            return False
        if not self._has_role:
            if _ASSISTANT.startswith(header):
                return True
            if not header.startswith(_ASSISTANT):
                return False
            header = header.removeprefix(_ASSISTANT)
        return _HEADER.fullmatch(header) is not None

    def _leave(self, header: str) -> None:
        """Drop an incomplete header that no text follows; if its words are no header's, pass it on
        as content."""
        words = re.sub(r"<\|?\w*\|?>?", " ", header).split()
        known = (_ASSISTANT, *_CHANNELS, "json", "to=")
        if all(w.startswith("to=") or any(k.startswith(w) for k in known) for w in words):
            return
        self._set("content")
        self._tell(header)
        self._close()

    def _open(self, header: str) -> None:
        """Begin the text of a message after its complete header, which decides the kind: a call, if
        its recipient is a tool, reasoning or content."""
        self._header = None
        channel, found = _channel(header), _RECIPIENT.search(header)
        recipient = "" if found is None else found[1]
        name = recipient.removeprefix(_FUNCTIONS)
        is_tool = recipient.startswith(_FUNCTIONS) or recipient in self._names
        if name and self._names and is_tool:
            self.kind, self._is_bare, self._joint = "call", True, ""
            self._parts.append(Part("call", "", self._count, name))
            return
        self._set("reasoning" if channel == "analysis" else "content")

    def _set(self, kind: str) -> None:
        self._is_between = False
        self._joint = "\n" if kind in self._seen else ""
        self.kind = kind

    def _tell(self, text: str) -> None:
        if not text:
            return
        if self._is_between:
            if not text.strip():
                return
            self._set("content")
        if self.kind == "call":
            self._is_bare = False
            self._parts.append(Part("call", text, self._count))
            return
        kind = self.kind or "content"
        self._seen.add(kind)
        joint, self._joint = self._joint, ""
        self._parts.append(Part(kind, joint + text))

    def _close(self) -> None:
        """End the open message: a call without text gets the arguments {}, and the place of
        reasoning is noted in `thoughts`."""
        if self.kind == "call":
            if self._is_bare:
                self._parts.append(Part("call", "{}", self._count))
            self._count += 1
        elif self.kind == "reasoning":
            self.thoughts.append((self._first, self._place))
        self.kind = None
        self._first = self._place


def _channel(header: str) -> str:
    found = re.search(r"<\|\w*\|>\s*(\w+)", header)
    return found[1] if found is not None and found[1] in _CHANNELS else ""


def prompt_end(prompt: str) -> str:
    """Return the beginning of the message that the answer continues: the end of a rendered prompt
    after the last assistant's role; "" if the last message is of another role."""
    _, start, last = prompt.rpartition(_START)
    if not start or not last.startswith(_ASSISTANT):
        return ""
    return last.removeprefix(_ASSISTANT)


def messages_for_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat's messages as the template of gpt-oss expects them.

    The template reads reasoning under "thinking", accepts one message of instructions, at the
    beginning, and one call per assistant message, whose result must be the next message. It takes
    content beside a call for analysis, and refuses a message with both; `with_preambles` makes the
    content a message of its own.

    Args:
        messages: the result of `chat.messages_of`; system and developer messages are changed.
    """
    made: list[dict[str, Any]] = []
    place = 0
    while place < len(messages) and messages[place]["role"] in ("system", "developer"):
        if place:
            made[0]["content"] += "\n\n" + messages[place]["content"]
        else:
            made.append(messages[0])
        place += 1
    last_final = max(
        (i for i, m in enumerate(messages) if m["role"] == _ASSISTANT and "tool_calls" not in m),
        default=-1,
    )
    while place < len(messages):
        message = messages[place]
        place += 1
        if message["role"] != _ASSISTANT:
            made.append(message)
            continue
        message = dict(message)
        made.append(message)
        thinking = message.get("reasoning_content")
        if thinking:
            message["thinking"] = thinking
        if "tool_calls" not in message:
            continue
        content, message["content"] = message["content"], ""
        if content and last_final >= place:  # the template drops the analysis of earlier turns
            made.insert(-1, {"role": _ASSISTANT, "content": _PREAMBLE + content})
        elif content:
            message["thinking"] = (thinking or "") + _PREAMBLE + content
        first, *others = message["tool_calls"]
        if not others:
            continue
        results = []
        while place < len(messages) and messages[place]["role"] in ("tool", "function"):
            results.append(messages[place])
            place += 1
        message["tool_calls"] = [first]
        for call in (first, *others):
            if call is not first:
                made.append({"role": _ASSISTANT, "content": "", "tool_calls": [call]})
            asked = call.get("id")
            own = [r for r in results if asked is not None and r.get("tool_call_id") == asked]
            made += own
            results = [r for r in results if not any(r is o for o in own)]
        made += results
    return made


def tools_for_template(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a request's tools as the template of gpt-oss expects them: each function has a
    description, "" if the client gave none."""
    return [{**tool, "function": {"description": "", **tool.get("function", {})}} for tool in tools]


def with_preambles(text: str) -> str:
    """Return a rendered prompt in which each text that `messages_for_template` marked, which was
    shown to the user before a call, is a message of the commentary channel."""
    if _PREAMBLE not in text:
        return text
    for channel in ("analysis", "final"):
        text = text.replace(
            f"{_CHANNEL}{channel}{MESSAGE}{_PREAMBLE}", f"{_CHANNEL}commentary{MESSAGE}"
        )
    return text.replace(_PREAMBLE, f"<|end|>{_START}{_ASSISTANT}{_CHANNEL}commentary{MESSAGE}")
