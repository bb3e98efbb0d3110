"""Convert the engine's outputs to the JSON of OpenAI's API, as a whole answer or as stream deltas.

A stream is written once a step: all new tokens of a choice become one event. The fields that are
equal in all events are encoded once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from tilewise.engine.outputs import CompletionOutput, RequestOutput
from tilewise.engine.tokenizer import Tokenizer

__all__ = [
    "DONE",
    "CompletionAnswer",
    "Delta",
    "Deltas",
    "chat_logprobs",
    "completion_logprobs",
    "encoded_answer",
    "event",
    "prompt_logprobs",
    "token_text",
    "tokens_within",
    "usage_of",
]

LEAST = -9999.0  # JSON has no infinity; OpenAI writes -9999.0 for minus infinity
DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """Return one server-sent event, `data: ...` and an empty line, with `content` as JSON."""
    return b"data: %b\n\n" % json.dumps(content, separators=(",", ":")).encode()


def usage_of(
    outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None
) -> dict[str, Any]:
    """Return the `usage` object of an answer: its numbers of prompt tokens, cached prompt tokens
    and completion tokens.

    Args:
        outputs: the newest output of each prompt of the request.
        reasoning_tokens: number of completion tokens that are reasoning; None for a model that does
            not reason.
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def tokens_within(
    chars: int, token_ids: Sequence[int], tokenizer: Tokenizer, shows_special: bool
) -> int:
    """Return how many of `token_ids` begin in the first `chars` characters of the tokens' text.

    Args:
        chars: a number of characters from the text's beginning on.
        token_ids: all tokens of the text, in order.
        shows_special: True if special tokens have text; otherwise they have a width of 0.
    """
    count = place = 0
    for token in token_ids:
        if place >= chars:
            break
        place += width_of(token, tokenizer, shows_special)
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Delta:
    """The part of one choice that is new since the choice's last delta.

    Attributes:
        choice: the index of the choice in the answer.
        text: the new text; empty when the new tokens have no text yet.
        token_ids: the ids of the new tokens.
        logprobs: the log-probabilities of the new tokens; None unless the request asked for them.
        finish_reason: the reason why the choice ended, in its last delta; None before that.
        stop_reason: the token or text that ended the choice, see `CompletionOutput`.
        is_first: True for the first delta of the choice.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    is_first: bool


class Deltas:
    """Compute deltas from the engine's outputs, each of which contains all text and tokens so far.

    One instance belongs to one streamed answer: it remembers how many characters and tokens of each
    choice were yielded, and which choices have ended.

    Args:
        samples: the number of choices of each prompt.
        tells_tokens: True if new tokens make an event even before their text is certain.
    """

    def __init__(self, samples: int, tells_tokens: bool) -> None:
        self._samples = samples
        self._tells_tokens = tells_tokens
        self._seen: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()

    def of(self, prompt: int, output: RequestOutput) -> Iterator[Delta]:
        """Yield one delta for each choice in `output` that has new text or has just ended.

        New tokens without text make a delta only with `tells_tokens`. A choice yields nothing more
        after its end.

        Args:
            prompt: the index of the output's prompt in the request.
            output: the newest output of that prompt.
        """
        for completion in output.outputs:
            choice = prompt * self._samples + completion.index
            if choice in self._ended:
                continue
            chars, tokens = self._seen.get(choice, (0, 0))
            text, reason = completion.text[chars:], completion.finish_reason
            has_tokens = self._tells_tokens and len(completion.token_ids) > tokens
            if not text and reason is None and not has_tokens:
                continue
            logprobs = completion.logprobs
            yield Delta(
                choice,
                text,
                completion.token_ids[tokens:],
                None if logprobs is None else logprobs[tokens:],
                reason,
                completion.stop_reason,
                choice not in self._seen,
            )
            self._seen[choice] = (chars + len(text), len(completion.token_ids))
            if reason is not None:
                self._ended.add(choice)


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[dict[int, float] | None],
    count: int,
    tokenizer: Tokenizer | None,
    offset: int,
    shown_from: int | None = None,
) -> dict[str, Any]:
    """Return log-probabilities in the shape of /v1/completions.

    Args:
        token_ids: the generated tokens, or the tokens of an echoed prompt.
        entries: a table from token ids to log-probabilities for each of `token_ids`; None for a
            token without a predecessor.
        count: number of most likely tokens to list, beside the generated one.
        offset: number of characters of the text before the first token.
        shown_from: index in `token_ids` from which special tokens have text; None if none have.

    Returns:
        Four lists with an entry per token: tokens (texts), token_logprobs, top_logprobs (None
        instead of the list if `count` is 0) and text_offset.
    """
    tokens, offsets, own, best = [], [], [], []
    for place, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
        tokens.append(token_text(token, tokenizer))
        offsets.append(offset)
        offset += width_of(token, tokenizer, shown_from is not None and place >= shown_from)
        own.append(None if entry is None else max(entry[token], LEAST))
        ranked = None
        if entry is not None:
            ranked = {token_text(i, tokenizer): p for i, p in _best(entry, count)}
            # OpenAI lists the generated token beside the most likely ones.
            ranked.setdefault(tokens[-1], max(entry[token], LEAST))
        best.append(ranked)
    return {
        "tokens": tokens,
        "token_logprobs": own,
        "top_logprobs": best if count else None,
        "text_offset": offsets,
    }


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[dict[int, float]],
    count: int,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return log-probabilities in the shape of /v1/chat/completions.

    Args:
        token_ids: the generated tokens.
        entries: a table from token ids to log-probabilities for each of `token_ids`.
        count: number of most likely tokens to list for each generated token.

    Returns:
        The object with "content", one entry per generated token, and "refusal", which is None.
    """
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        best = [_chat_token(i, p, tokenizer) for i, p in _best(entry, count)]
        content.append({**_chat_token(token, entry[token], tokenizer), "top_logprobs": best})
    return {"content": content, "refusal": None}


def width_of(token: int, tokenizer: Tokenizer | None, shows_special: bool) -> int:
    """Return the number of characters whose first byte, in UTF-8, is in this token.

    So a character that several tokens share is counted once. It is 0 for a special token without
    `shows_special`, and for a model without a tokenizer.
    """
    if tokenizer is None or (token in tokenizer.special_ids and not shows_special):
        return 0
    return sum(byte & 0xC0 != 0x80 for byte in tokenizer.token_bytes(token))


def _chat_token(token: int, logprob: float, tokenizer: Tokenizer | None) -> dict[str, Any]:
    data = token_text(token, tokenizer) if tokenizer is None else tokenizer.token_bytes(token)
    raw = data.encode() if isinstance(data, str) else data
    return {
        "token": token_text(token, tokenizer),
        "logprob": max(logprob, LEAST),
        "bytes": list(raw),
    }


def _best(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens of `entry` as pairs (token id, log-probability), the
    most likely first.

    `entry` may have one entry more, for the generated token. A log-probability below -9999 becomes
    -9999.
    """
    ranked = sorted(entry.items(), key=lambda pair: -pair[1])[:count]
    return [(i, max(p, LEAST)) for i, p in ranked]


def token_text(token: int, tokenizer: Tokenizer | None) -> str:
    r"""Return a token's text for an answer.

    Bytes that are no whole character become "bytes:\\xe2", as in OpenAI's answers. Without a
    tokenizer the text is "token_id:" and the id.
    """
    if tokenizer is None:
        return f"token_id:{token}"
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(
    output: RequestOutput, tokenizer: Tokenizer | None
) -> list[dict[str, Any] | None]:
    """Return a prompt's log-probabilities in vLLM's format.

    Returns:
        One entry per prompt token: {"ID": {"logprob": ..., "decoded_token": ...}}, or None for the
        first token, which has no predecessor. The list is empty if the output has none.
    """
    told: Sequence[dict[int, float] | None] = output.prompt_logprobs or []
    return [
        None
        if entry is None
        else {
            str(i): {"logprob": max(p, LEAST), "decoded_token": token_text(i, tokenizer)}
            for i, p in entry.items()
        }
        for entry in told
    ]


def encoded_answer(head: dict[str, Any], choices: Sequence[str], tail: dict[str, Any]) -> bytes:
    """Return the JSON of an answer: the fields of `head`, then "choices", then the fields of
    `tail`.

    Args:
        head, tail: the fields before and after the choices; neither is empty.
        choices: the JSON of each choice.
    """
    begun, ended = json.dumps(head)[:-1], json.dumps(tail)[1:]
    return f'{begun}, "choices": [{", ".join(choices)}], {ended}'.encode()


class CompletionAnswer:
    """Build the answer to one request of /v1/completions: whole, or as the events of a stream.

    Args:
        answer_id: id of the answer, "cmpl-...".
        model: name of the model as the client wrote it.
        tokenizer: the tokenizer that turns the ids of log-probabilities into text.
        samples: the number of choices of each prompt.
        logprobs: number of most likely tokens to list per position; None lists none.
        echoes: the texts of the prompts, with which each choice begins; None unless the request
            sets `echo`.
        tells_ids: True if the answer contains token ids.
        tells_prompt_logprobs: True if each choice contains the log-probabilities of its prompt.
        shows_special: True if special tokens appear in the text.
    """

    kind = "text_completion"

    def __init__(
        self,
        answer_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        *,
        samples: int,
        logprobs: int | None,
        echoes: Sequence[str] | None,
        tells_ids: bool,
        tells_prompt_logprobs: bool = False,
        shows_special: bool = False,
    ) -> None:
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model,
        }
        self._prefix = json.dumps(self._head, separators=(",", ":"))[:-1]
        self._tokenizer = tokenizer
        self._samples = samples
        self._logprobs = logprobs
        self._echoes = echoes
        self._tells_ids = tells_ids
        self._tells_prompt_logprobs = tells_prompt_logprobs
        self._shows_special = shows_special
        self._offsets: dict[int, int] = {}  # text offset of each choice's next token, in a stream
        # Log-probabilities of an echoed prompt and vLLM's prompt_logprobs; each is computed once.
        self._echoed: dict[int, dict[str, Any]] = {}
        self._told: dict[int, str] = {}
        self._deltas = Deltas(samples, tells_ids or logprobs is not None)

    def whole(
        self, outputs: Sequence[RequestOutput], recipe: Mapping[str, Any] | None = None
    ) -> bytes:
        """Return the JSON of the answer once all choices have ended, with its recipe if given.

        Log-probabilities of long prompts are megabytes, and the encoder holds the interpreter lock.
        Each choice is therefore encoded for itself, and other threads run between two of them; the
        caller calls this on a thread if the answer is long.
        """
        choices = [
            json.dumps(self._choice(prompt, output, completion))
            for prompt, output in enumerate(outputs)
            for completion in output.outputs
        ]
        tail: dict[str, Any] = {"usage": usage_of(outputs)}
        if recipe is not None:
            tail["recipe"] = recipe
        return encoded_answer(self._head, choices, tail)

    def prepare(self, prompt: int, output: RequestOutput) -> None:
        """Compute and keep the log-probabilities of a prompt that `events` will write.

        They may be megabytes, so a stream calls this on a thread before it calls `events`.
        """
        if self._echoes is not None and self._logprobs is not None:
            self._echoed_logprobs(prompt, output)
        if self._tells_prompt_logprobs:
            self._prompt_logprobs(prompt, output)

    def events(self, prompt: int, output: RequestOutput, usage: dict[str, Any] | None) -> bytes:
        """Return the server-sent events with the new text and tokens of a prompt's choices, one
        event per choice; b"" if nothing is new.

        Args:
            prompt: the index of the prompt in the request.
            output: the prompt's newest output, with all text so far.
            usage: token counts to put in every event; None where the client did not ask for them.
        """
        parts = []
        for delta in self._deltas.of(prompt, output):
            text = delta.text
            echo = self._echo(prompt)
            if delta.is_first:
                text = echo + text
            more = self._extras(delta, prompt, output, usage)
            reason = "null" if delta.finish_reason is None else quoted(delta.finish_reason)
            logprobs = "null"
            if self._logprobs is not None:
                logprobs = json.dumps(self._entries(delta, prompt, output))
            parts.append(
                f'data: {self._prefix},"choices":[{{"index":{delta.choice},"text":{quoted(text)},'
                f'"logprobs":{logprobs},"finish_reason":{reason}{more}\n\n'
            )
        return "".join(parts).encode()

    def last(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return a stream's final event, which has the usage of all `outputs` and no choice."""
        return event({**self._head, "choices": [], "usage": usage_of(outputs)})

    def _extras(
        self, delta: Delta, prompt: int, output: RequestOutput, usage: dict[str, Any] | None
    ) -> str:
        more = ""
        if delta.finish_reason is not None:
            more += f',"stop_reason":{json.dumps(delta.stop_reason)}'
        if self._tells_ids:
            more += f',"token_ids":{json.dumps(delta.token_ids)}'
            if delta.is_first:
                more += f',"prompt_token_ids":{json.dumps(output.prompt_token_ids)}'
        if self._tells_prompt_logprobs and delta.is_first:
            more += f',"prompt_logprobs":{self._prompt_logprobs(prompt, output)}'
        more += "}]"
        if usage is not None:
            more += f',"usage":{json.dumps(usage)}'
        return more + "}"

    def _echo(self, prompt: int) -> str:
        return "" if self._echoes is None else self._echoes[prompt]

    def _entries(self, delta: Delta, prompt: int, output: RequestOutput) -> dict[str, Any]:
        # Text may be held back after its tokens are sent, so token offsets are counted separately.
        has_prompt = delta.is_first and self._echoes is not None
        told, self._offsets[delta.choice] = self._logprobs_of(
            delta.token_ids,
            delta.logprobs or [],
            self._echoed_logprobs(prompt, output) if has_prompt else None,
            self._offsets.get(delta.choice, 0),
        )
        return told

    def _logprobs_of(
        self,
        ids: Sequence[int],
        entries: Sequence[dict[int, float] | None],
        echoed: dict[str, Any] | None,
        offset: int,
    ) -> tuple[dict[str, Any], int]:
        """Return log-probabilities in the form of `completion_logprobs`.

        Args:
            ids: the generated tokens.
            entries: the log-probabilities at each of `ids`, by token id.
            echoed: the result of `_echoed_logprobs`, to which the tokens' lists are appended and
                from the end of which offsets count; None leaves the prompt out.
            offset: the text offset of the first token; unused with `echoed`.

        Returns:
            The log-probabilities, and the text offset of the next token.
        """
        assert self._logprobs is not None
        if echoed is not None:
            offset = echoed["end"]
        shown = 0 if self._shows_special else None
        told = completion_logprobs(ids, entries, self._logprobs, self._tokenizer, offset, shown)
        if ids:
            is_shown = shown is not None
            offset = told["text_offset"][-1] + width_of(ids[-1], self._tokenizer, is_shown)
        if echoed is not None:
            for name, values in told.items():
                told[name] = None if values is None else [*echoed[name], *values]
        return told, offset

    def _echoed_logprobs(self, prompt: int, output: RequestOutput) -> dict[str, Any]:
        """Return the log-probabilities of an echoed prompt: the table of `completion_logprobs`, and
        under "end" the text offset of the prompt's end.

        The table is computed once for each prompt index and kept.
        """
        found = self._echoed.get(prompt)
        if found is None:
            assert self._logprobs is not None
            ids, told = output.prompt_token_ids, output.prompt_logprobs
            if told is None:  # the request ended before they were computed
                told = [None] * len(ids)
            found = completion_logprobs(ids, told, self._logprobs, self._tokenizer, 0)
            end = found["text_offset"][-1] + width_of(ids[-1], self._tokenizer, False)
            found = self._echoed[prompt] = {**found, "end": end}
        return found

    def _prompt_logprobs(self, prompt: int, output: RequestOutput) -> str:
        """Return the JSON of `prompt_logprobs` for a prompt, computed once for each prompt
        index."""
        found = self._told.get(prompt)
        if found is None:
            told = prompt_logprobs(output, self._tokenizer)
            found = self._told[prompt] = json.dumps(told)
        return found

    def _choice(
        self, prompt: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        echo = self._echo(prompt)
        choice: dict[str, Any] = {
            "index": prompt * self._samples + completion.index,
            "text": echo + completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._logprobs is not None:
            choice["logprobs"], _ = self._logprobs_of(
                completion.token_ids,
                completion.logprobs or [],
                None if self._echoes is None else self._echoed_logprobs(prompt, output),
                0,
            )
        if self._tells_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(output, self._tokenizer)
        if self._tells_ids:
            choice["token_ids"] = completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice
