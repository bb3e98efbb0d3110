"""`tilewise chat`: a conversation with a server, in a terminal, with the standard library alone."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Conversation", "chat"]

HELP = """\
/reset        begin anew
/save FILE    write the conversation as JSON
/help         this
/exit         end (or the end of input)"""


class Conversation:
    """Messages, and a server that answers them.

    Args:
        url: of the server, without /v1.
        key: where it needs one.
        settings: further fields of each request.
    """

    def __init__(self, url: str, key: str | None, settings: dict[str, Any]) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._settings = settings
        self.messages: list[dict[str, str]] = []
        self.usage: dict[str, Any] = {}

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer to a message as it comes; both are remembered when it has ended.

        Raises:
            ValueError: the server refuses it, or cannot be reached.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {
            **self._settings,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), self._headers
        )
        answer = ""
        try:
            with urllib.request.urlopen(request) as response:
                for line in response:
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    self.usage = event.get("usage") or self.usage
                    for choice in event["choices"]:
                        part = choice["delta"].get("content") or ""
                        answer += part
                        if part:
                            yield part
        except urllib.error.HTTPError as error:
            raise ValueError(_message(error)) from None
        except urllib.error.URLError as error:
            raise ValueError(f"{self._url} must be a server, got {error.reason}") from None
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def _message(error: urllib.error.HTTPError) -> str:
    with error:
        body = error.read()
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"


def chat(
    url: str,
    key: str | None,
    settings: dict[str, Any],
    *,
    read: Callable[[str], str] = input,
    out: TextIO | None = None,
) -> int:
    """Talk until the input ends; return the exit code.

    Args:
        read: returns a line, given the prompt to show.
        out: where answers go; None is standard output.
    """
    out = out or sys.stdout
    conversation = Conversation(url, key or os.environ.get("TILEWISE_API_KEY"), settings)
    print("/help tells what can be said beside words.", file=out)
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            return 0
        if not text:
            continue
        if text.startswith("/"):
            if not _obey(conversation, text, out):
                return 0
            continue
        try:
            _answer(conversation, text, out)
        except ValueError as error:
            print(f"tilewise: {error}", file=out)


def _obey(conversation: Conversation, text: str, out: TextIO) -> bool:
    """Do what a line with a slash says; False ends the conversation."""
    command, _, argument = text.partition(" ")
    if command in ("/exit", "/quit"):
        return False
    if command == "/reset":
        conversation.reset()
        print("(begun anew)", file=out)
    elif command == "/save" and argument:
        try:
            Path(argument).write_text(json.dumps(conversation.messages, indent=2), "utf-8")
            print(f"(saved to {argument})", file=out)
        except OSError as error:
            print(f"tilewise: {argument} must be a file to write: {error.strerror}", file=out)
    else:
        print(HELP, file=out)
    return True


def _answer(conversation: Conversation, text: str, out: TextIO) -> None:
    begun, first = time.perf_counter(), None
    for part in conversation.ask(text):
        if first is None:
            first = time.perf_counter()
        out.write(part)
        out.flush()
    print(file=out)
    usage = conversation.usage
    prompt, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    share = cached / prompt if prompt else 0.0
    seconds = time.perf_counter() - (first or begun)
    rate = (made - 1) / seconds if made > 1 and seconds > 0 else 0.0
    print(
        f"[{made} tokens, {rate:,.0f} a second after {(first or begun) - begun:.2f} s; "
        f"{share:.0%} of {prompt} prompt tokens cached]",
        file=out,
    )
