"""Answers of /v1/chat/completions: text, reasoning and calls of tools, whole or as a stream."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from tilewise.engine.outputs import CompletionOutput, RequestOutput
from tilewise.engine.tokenizer import Tokenizer
from tilewise.server.answers import (
    Delta,
    Deltas,
    chat_logprobs,
    encoded_answer,
    event,
    prompt_logprobs,
    usage_of,
)
from tilewise.server.calls.parts import Parser, Part

__all__ = ["ChatAnswer", "Message"]


class Message:
    """The message of one choice, accumulated from the parts that a parser found.

    Attributes:
        content: the text without reasoning and calls.
        reasoning: the text of the reasoning.
        calls: the name of each call's tool, and the text of its arguments.
    """

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[tuple[str, str]] = []

    def add(self, parts: Iterable[Part]) -> None:
        """Append parts: texts to the content, the reasoning or the arguments of their call."""
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                while len(self.calls) <= part.index:
                    self.calls.append(("", ""))
                name, arguments = self.calls[part.index]
                self.calls[part.index] = (part.name or name, arguments + part.text)


class ChatAnswer:
    """Build the answer to one request of /v1/chat/completions: whole, or as events of a stream.

    Args:
        answer_id: the id of the answer, "chatcmpl-...".
        model: name of the model as the client wrote it.
        tokenizer: the tokenizer that turns the ids of log-probabilities into text.
        new_parser: a function that returns a parser for the text of one choice.
        logprobs: number of most likely tokens to list beside each generated one; None leaves
            log-probabilities out.
        echo: the text of a continued message, with which the answer begins; may be empty.
        tells_ids: True if the answer contains token ids.
        tells_prompt_logprobs: True if the answer contains the log-probabilities of its prompt.
        tells_reasoning: False leaves the reasoning out; its tokens are counted all the same.
        most_calls: the largest number of tool calls kept in a choice, further ones are dropped;
            None keeps all.
        reasoning_tokens: a function that counts the reasoning tokens of a finished RequestOutput;
            None for a model without reasoning.
    """

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        new_parser: Callable[[], Parser],
        *,
        logprobs: int | None = None,
        echo: str = "",
        tells_ids: bool = False,
        tells_prompt_logprobs: bool = False,
        tells_reasoning: bool = True,
        most_calls: int | None = None,
        reasoning_tokens: Callable[[RequestOutput], int] | None = None,
    ) -> None:
        self._id = answer_id
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._prefix = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._tokenizer = tokenizer
        self._new_parser = new_parser
        self._logprobs = logprobs
        self._echo = echo
        self._tells_ids = tells_ids
        self._tells_prompt_logprobs = tells_prompt_logprobs
        self._tells_reasoning = tells_reasoning
        self._most_calls = most_calls
        self._reasoning_tokens = reasoning_tokens
        self._deltas = Deltas(1, tells_ids or logprobs is not None)
        self._parsers: dict[int, Parser] = {}
        self._has_calls: set[int] = set()
        self._is_begun = False  # True once the stream's first event is made

    def whole(self, output: RequestOutput, recipe: Mapping[str, Any] | None = None) -> bytes:
        """Return the JSON of the answer once all choices have ended, with its recipe if given.

        A caller with a long answer calls this on a thread, see `CompletionAnswer.whole`.
        """
        choices = [json.dumps(self._choice(output, one)) for one in output.outputs]
        tail: dict[str, Any] = {"usage": self._usage(output)}
        if self._tells_ids:
            tail["prompt_token_ids"] = output.prompt_token_ids
        if self._tells_prompt_logprobs:
            tail["prompt_logprobs"] = prompt_logprobs(output, self._tokenizer)
        if recipe is not None:
            tail["recipe"] = recipe
        return encoded_answer({**self._head, "object": "chat.completion"}, choices, tail)

    def reasoning_tokens(self, output: RequestOutput) -> int | None:
        """Return how many tokens of an ended output are reasoning, the marks around it included;
        None for a model without reasoning."""
        return None if self._reasoning_tokens is None else self._reasoning_tokens(output)

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        return usage_of([output], self.reasoning_tokens(output))

    def parts(self, delta: Delta) -> list[Part]:
        """Push a delta's text into the parser of its choice, and return the parts that are found.

        The last delta of a choice also returns the parts that the parser held back. Hidden
        reasoning, and calls beyond `most_calls`, are left out.
        """
        parser = self._parsers.get(delta.choice)
        if parser is None:
            parser = self._parsers[delta.choice] = self._new_parser()
        parts = parser.push(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts = [*parts, *parser.finish()]
        kept = [part for part in parts if self._keeps(part)]
        if any(part.kind == "call" for part in kept):
            self._has_calls.add(delta.choice)
        return kept

    def deltas(self, output: RequestOutput) -> Iterable[Delta]:
        """Yield the delta of each choice that has something new."""
        return self._deltas.of(0, output)

    def reason(self, delta: Delta) -> str | None:
        """Return the finish_reason of a delta; "tool_calls" instead of "stop" if the choice has
        called a tool; None before the choice has ended."""
        if delta.finish_reason == "stop" and delta.choice in self._has_calls:
            return "tool_calls"
        return delta.finish_reason

    def call_id(self, choice: int, index: int) -> str:
        """Return the id of the call with this index in a choice: nine hexadecimal digits, as
        Mistral's templates require, which are the same each time."""
        return hashlib.sha256(f"{self._id}/{choice}/{index}".encode()).hexdigest()[:9]

    def events(self, output: RequestOutput, usage: dict[str, Any] | None) -> bytes:
        """Return the server-sent events with the new text, reasoning and calls of all choices; b""
        if nothing is new.

        Args:
            output: the newest output, with all text so far.
            usage: token counts to put in every event; None puts none.
        """
        lines: list[str] = []
        for delta in self.deltas(output):
            bodies = [self._body(delta.choice, part) for part in self.parts(delta)]
            if delta.is_first:
                opening = f'"role":"assistant","content":{quoted(self._echo)}'
                lines.append(self._line(delta.choice, opening, "null", "", usage, output))
            reason = self.reason(delta)
            if not bodies and (reason is not None or self._logprobs is not None or self._tells_ids):
                bodies = [""]
            for place, body in enumerate(bodies):
                is_last = place == len(bodies) - 1
                ending = "null" if reason is None or not is_last else quoted(reason)
                more = self._extras(delta) if is_last else ""
                lines.append(self._line(delta.choice, body, ending, more, usage, output))
        return "".join(lines).encode()

    def last(self, output: RequestOutput) -> bytes:
        """Return a stream's final event, which has the usage of `output` and no choice."""
        return event({**self._head, "choices": [], "usage": self._usage(output)})

    def _keeps(self, part: Part) -> bool:
        if part.kind == "reasoning":
            return self._tells_reasoning
        return part.kind != "call" or self._most_calls is None or part.index < self._most_calls

    def _body(self, choice: int, part: Part) -> str:
        if part.kind == "content":
            return f'"content":{quoted(part.text)}'
        if part.kind == "reasoning":
            text = quoted(part.text)
            return f'"reasoning":{text},"reasoning_content":{text}'
        call: dict[str, Any] = {"index": part.index}
        if part.name is not None:
            call.update(id=self.call_id(choice, part.index), type="function")
            call["function"] = {"name": part.name, "arguments": part.text}
        else:
            call["function"] = {"arguments": part.text}
        return f'"tool_calls":[{json.dumps(call)}]'

    def _extras(self, delta: Delta) -> str:
        more = ""
        if self._logprobs is not None and delta.logprobs is not None:
            told = chat_logprobs(delta.token_ids, delta.logprobs, self._logprobs, self._tokenizer)
            more += f',"logprobs":{json.dumps(told)}'
        if delta.finish_reason is not None:
            more += f',"stop_reason":{json.dumps(delta.stop_reason)}'
        if self._tells_ids:
            more += f',"token_ids":{json.dumps(delta.token_ids)}'
        return more

    def _line(
        self,
        choice: int,
        body: str,
        reason: str,
        more: str,
        usage: dict[str, Any] | None,
        output: RequestOutput,
    ) -> str:
        told = "" if usage is None else f',"usage":{json.dumps(usage)}'
        is_first, self._is_begun = not self._is_begun, True
        if is_first and self._tells_ids:
            told += f',"prompt_token_ids":{json.dumps(output.prompt_token_ids)}'
        if is_first and self._tells_prompt_logprobs:
            told += f',"prompt_logprobs":{json.dumps(prompt_logprobs(output, self._tokenizer))}'
        logprobs = "" if '"logprobs":' in more[:13] else ',"logprobs":null'
        return (
            f'data: {self._prefix},"choices":[{{"index":{choice},"delta":{{{body}}}{logprobs}'
            f',"finish_reason":{reason}{more}}}]{told}}}\n\n'
        )

    def _choice(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        message, parser = Message(), self._new_parser()
        parts = (
            [*parser.push(completion.text), *parser.finish()]
            if completion.text
            else (parser.finish())
        )
        message.add(part for part in parts if self._keeps(part))
        reason = completion.finish_reason
        body: dict[str, Any] = {"role": "assistant"}
        content = self._echo + message.content
        body["content"] = content if content or not message.calls else None
        if message.reasoning:
            body["reasoning"] = body["reasoning_content"] = message.reasoning
        if message.calls:
            body["tool_calls"] = [
                {
                    "id": self.call_id(completion.index, i),
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
                for i, (name, arguments) in enumerate(message.calls)
            ]
            reason = "tool_calls" if reason == "stop" else reason
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": body,
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }
        if self._logprobs is not None:
            choice["logprobs"] = chat_logprobs(
                completion.token_ids, completion.logprobs or [], self._logprobs, self._tokenizer
            )
        if self._tells_ids:
            choice["token_ids"] = completion.token_ids
        return choice
