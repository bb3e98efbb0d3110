"""`tilewise chat`: a conversation with a server in a terminal, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

__all__ = ["MAX_TOKENS", "Conversation", "chat", "with_scheme"]

MAX_TOKENS = 2048  # largest answer by default: some models never end one
# Most tokens that a template adds around a message; a text has at most a token per byte.
_AROUND = 64
_LOOK_S = 10.0  # seconds that a server may take to list its models

HELP = """\
/reset        begin anew
/save FILE    write the conversation as JSON
/help         this
/exit         end (or the end of input)
Ctrl-C        stop an answer; without one, end"""


class Conversation:
    """A conversation of `tilewise chat`: its messages, and the server that answers them.

    Args:
        url: the address of the server, without /v1.
        key: the API key; None if the server needs none.
        settings: further fields of each request.
        limit: the largest number of tokens of an answer.
    """

    def __init__(
        self, url: str, key: str | None, settings: dict[str, Any], limit: int = MAX_TOKENS
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._settings = settings
        self._limit = limit
        self._room: int | None = None  # the model's context; None if the server does not report it
        self.messages: list[dict[str, str]] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None

    def look(self) -> None:
        """Check that a server is there and lets this model chat.

        Raises:
            ValueError: the server is not there, refuses the key, lacks the model, or the model
                cannot chat.
        """
        try:
            models = self._call("/v1/models")["data"]
            names = [str(model["id"]) for model in models]
        except (KeyError, TypeError):
            raise ValueError(f"{self._url} must tell its models, got something else") from None
        asked = self._settings.get("model")
        if asked is not None and asked not in names:
            raise ValueError(f"--model must be one of {', '.join(names)}, got {asked!r}")
        for model in models:
            if asked in (None, model["id"]) and isinstance(model.get("max_model_len"), int):
                self._room = model["max_model_len"]
                break
        # Other servers lack this route; errors then show at the first message.
        hello = {"messages": [{"role": "user", "content": "Hello"}]}
        self._call("/tokenize", {**hello, "model": asked or names[0]}, or_none=(404, 405, 422))

    def _call(self, path: str, body: Any = None, or_none: tuple[int, ...] = ()) -> Any:
        """Return the parsed JSON of a route, called with POST if there is a body; None for the HTTP
        statuses in `or_none`.

        Raises:
            ValueError: the server is not there, answers with another error, or with no JSON.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_LOOK_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code in or_none:
                return None
            raise ValueError(_message(error)) from None
        except urllib.error.URLError as error:
            raise ValueError(self._no_server(error)) from None
        except (http.client.HTTPException, OSError, ValueError) as error:
            got = str(error) or type(error).__name__
            raise ValueError(f"{self._url} must be a server with {path}, got {got}") from None

    def _no_server(self, error: urllib.error.URLError) -> str:
        reason = getattr(error.reason, "strerror", None) or error.reason
        return (
            f"there is no server at {self._url} ({str(reason).lower()}): start one with "
            "tilewise serve, or give the address of another"
        )

    def _most(self, messages: list[dict[str, str]]) -> dict[str, int]:
        """Return the request's field max_tokens, which limits the answer; {} if the rest of the
        model's context may be less."""
        used = sum(len(m["content"].encode()) + _AROUND for m in messages)
        if self._room is not None and used + self._limit > self._room:
            return {}
        return {"max_tokens": self._limit}

    def reset(self) -> None:
        """Forget all messages but those of the system."""
        self.messages = [m for m in self.messages if m["role"] == "system"]

    def ask(self, text: str) -> Iterator[str]:
        """Yield the texts of the answer to a message as they arrive; the message and the answer are
        remembered when the answer has ended.

        Raises:
            ValueError: the server refuses the message, cannot be reached, is no such server, or its
                answer breaks off.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {
            **self._most(messages),
            **self._settings,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions", json.dumps(body).encode(), self._headers
        )
        answer, is_whole = "", False
        self.usage, self.finish_reason = {}, None
        try:
            with urllib.request.urlopen(request) as response:
                for line in response:
                    if line.startswith(b"data: [DONE]"):
                        is_whole = True
                    elif line.startswith(b"data: "):
                        part = self._part(line[6:])
                        answer += part
                        if part:
                            yield part
        except urllib.error.HTTPError as error:
            raise ValueError(_message(error)) from None
        except urllib.error.URLError as error:
            raise ValueError(self._no_server(error)) from None
        except (http.client.HTTPException, OSError) as error:
            got = str(error) or type(error).__name__
            raise ValueError(f"{self._url} must answer to the end, got {got}") from None
        if not is_whole:
            raise ValueError(f"{self._url} must answer to the end, got {len(answer)} characters")
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _part(self, data: bytes) -> str:
        """Return the new text of a stream's event; keep its usage and its finish_reason.

        Args:
            data: the JSON of the event.

        Raises:
            ValueError: the event is an error, or does not belong to a chat.
        """
        try:
            event = json.loads(data)
            if "error" in event:
                raise ValueError(event["error"]["message"])
            self.usage = event.get("usage") or self.usage
            for choice in event["choices"]:
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
            return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError):
            shown = ascii(data[:80])
            raise ValueError(f"{self._url} must send events of a chat, got {shown}") from None


def with_scheme(address: str) -> str:
    """Return an address with http:// in front if it names no scheme, such as 127.0.0.1:8000."""
    return address if "://" in address else f"http://{address}"


def _message(error: urllib.error.HTTPError) -> str:
    try:
        with error:
            return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        return f"HTTP {error.code}"


def chat(
    url: str,
    key: str | None,
    settings: dict[str, Any],
    *,
    read: Callable[[str], str] = input,
    out: TextIO | None = None,
) -> int:
    """Run a conversation in the terminal until the input ends or /exit.

    The server is checked before the first line is read.

    Args:
        url: the address of the server.
        key: the API key; None takes the variable TILEWISE_API_KEY.
        settings: further fields of each request; without "max_tokens" an answer has `MAX_TOKENS`.
        read: a function that shows a prompt and returns a line.
        out: the file for answers; None for standard output.

    Returns:
        The exit code: 1 if the server cannot be used or the last message failed, else 0.
    """
    out = out or sys.stdout
    conversation = Conversation(url, key or os.environ.get("TILEWISE_API_KEY"), settings)
    try:
        conversation.look()
    except ValueError as error:
        print(f"tilewise: {_as_typed(error, settings)}", file=sys.stderr)
        return 1
    code = 0
    print("/help tells what can be said beside words.", file=out)
    while True:
        try:
            text = read("> ").strip()
        except EOFError:
            return code
        except UnicodeDecodeError as error:
            print(f"tilewise: a line must be UTF-8, got {error}", file=out)
            continue
        if not text:
            continue
        if text.startswith("/"):
            if not _obey(conversation, text, out):
                return code
            continue
        try:
            _answer(conversation, text, out)
            code = 0
        except ValueError as error:
            print(f"tilewise: {_as_typed(error, settings)}", file=out)
            code = 1
        except KeyboardInterrupt:  # Ctrl-C ends the answer; at the prompt it ends the conversation
            print("(stopped; the message is forgotten)", file=out)


def _as_typed(error: ValueError, settings: dict[str, Any]) -> str:
    """Return the message of an error, with the setting that it begins with named by its flag."""
    said = str(error)
    for name in settings:
        if said.startswith(f"{name} must"):
            return f"--{name.replace('_', '-')}{said.removeprefix(name)}"
    return said


def _obey(conversation: Conversation, text: str, out: TextIO) -> bool:
    """Run a command such as /reset; return False if it ends the conversation.

    Args:
        text: the command, which begins with a slash.
        out: the stream for replies.
    """
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
    try:
        for part in conversation.ask(text):
            if first is None:
                first = time.perf_counter()
            out.write(part)
            out.flush()
    finally:
        if first is not None:
            print(file=out)
    usage = conversation.usage
    prompt, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    share = cached / prompt if prompt else 0.0
    seconds = time.perf_counter() - (first or begun)
    rate = (made - 1) / seconds if made > 1 and seconds > 0 else 0.0
    print(
        f"[{made} tokens, {rate:,.0f} a second after {(first or begun) - begun:.2f} s; "
        f"{share:.0%} of {prompt} prompt tokens cached]",
        file=out,
    )
    if conversation.finish_reason == "length":
        print("(cut at its limit: /reset makes room, --max-tokens allows more)", file=out)
