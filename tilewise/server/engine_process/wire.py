"""The messages between the server and an engine in another process: MessagePack in frames.

    server -> Ask, Drop -> engine          server <- News, End <- engine       (the stream)
    server -> [name, arguments] -> engine  server <- [True, value] <- engine   (calls, one by one)

A frame is four bytes of length and as many of MessagePack, over a socket pair that no other process
can open. Nothing is pickled: messages are numbers, texts and lists of them, checked by their types.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
from typing import Any

import msgspec

from tilewise import errors
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.errors import RequestError

__all__ = [
    "Ask",
    "Choice",
    "Delta",
    "Drop",
    "End",
    "Failure",
    "News",
    "error_of",
    "failure_of",
    "frame",
    "frames",
    "plain",
    "receive",
    "sampling_of",
    "told_sampling",
    "wide",
]

_LENGTH = struct.Struct("<I")
_WIDE = 1  # the extension code of an integer that has more than 64 bits
Logprobs = list[dict[int, float]] | None


class Ask(msgspec.Struct, array_like=True, tag=True):
    """A new request.

    Attributes:
        number: the number by which later messages name it.
        prompt_token_ids: the tokens of the prompt.
        prompt: the text of the prompt; None where the client sent ids.
        sampling: the fields of `SamplingParams`, see `told_sampling`.
        terms: the fields of `RequestTerms`.
        request_id: the engine's id of the request.
        pooling: one of `embedding.POOLINGS` for an embedding; None for a text.
        token_type_ids: the types of the tokens; None where all are 0.
    """

    number: int
    prompt_token_ids: list[int]
    prompt: str | None
    sampling: dict[str, Any]
    terms: dict[str, Any]
    request_id: str
    pooling: str | None
    token_type_ids: list[int] | None = None


class Drop(msgspec.Struct, array_like=True, tag=True):
    """The client of a request has left."""

    number: int


class Choice(msgspec.Struct, array_like=True):
    """The new part of a sample; text and finish_reason are as in `CompletionOutput`."""

    place: int
    token_ids: list[int]
    text: str
    logprobs: Logprobs
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | None


class Delta(msgspec.Struct, array_like=True):
    """The new part of an unfinished request; its prompt's log-probabilities are sent once."""

    number: int
    num_cached_tokens: int
    choices: list[Choice]
    prompt_logprobs: list[dict[int, float] | None] | None = None


class News(msgspec.Struct, array_like=True, tag=True):
    """The new parts of all requests since the last message, and the engine's state."""

    last_step_time: float | None
    num_restarts: int
    deltas: list[Delta]


class Failure(msgspec.Struct, array_like=True):
    """An exception: the name of its class, its message, and its traceback if known."""

    kind: str
    message: str
    where: str = ""


class End(msgspec.Struct, array_like=True, tag=True):
    """The whole output of a request that has ended; None if it never began."""

    number: int
    output: dict[str, Any] | None
    failure: Failure | None


def plain(value: Any) -> Any:
    """Return a value of texts, numbers, lists and tables, with integers of any size, for sending.

    MessagePack's integers have 64 bits. A seed may be larger; the engine refuses other large
    values.
    """
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_WIDE, value.to_bytes(size, "little", signed=True))
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(one) for one in value]
    return value


def wide(code: int, data: memoryview) -> int:
    """Return the integer of more than 64 bits that `plain` encoded.

    Raises:
        ValueError: `code` is not that of such an integer.
    """
    if code != _WIDE:
        raise ValueError(f"code must be {_WIDE}, got {code}")
    return int.from_bytes(data, "little", signed=True)


def frame(message: Any) -> bytes:
    """Return the bytes of a message."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frames(buffer: bytearray) -> list[bytes]:
    """Remove the complete messages from a receive buffer and return them."""
    found, start = [], 0
    while len(buffer) - start >= _LENGTH.size:
        end = start + _LENGTH.size + _LENGTH.unpack_from(buffer, start)[0]
        if end > len(buffer):
            break
        found.append(bytes(buffer[start + _LENGTH.size : end]))
        start = end
    del buffer[:start]
    return found


def receive(sock: socket.socket) -> bytes:
    """Return the next message of a blocking socket.

    Raises:
        EOFError: the other end is closed.
    """
    return _exactly(sock, _LENGTH.unpack(_exactly(sock, _LENGTH.size))[0])


def _exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = sock.recv(min(count - len(found), 1 << 20))
        if not part:
            raise EOFError("the other end is closed")
        found += part
    return bytes(found)


def told_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from the defaults, and "beams" for a beam search.

    Raises:
        RequestError: the parameters contain functions, which cannot be sent.
    """
    if sampling.logits_processors:
        raise RequestError(
            "logits_processors must be None for an engine in another process, as functions do not "
            f"leave theirs, got {len(sampling.logits_processors)}"
        )
    names = [field.name for field in dataclasses.fields(sampling) if field.init]
    if isinstance(sampling, BeamSearchParams):
        names = list(_SEARCH)
    told = {name: getattr(sampling, name) for name in names}
    if isinstance(sampling, BeamSearchParams):
        return {**told, "beams": True}
    defaults = SamplingParams()
    told = {name: value for name, value in told.items() if value != getattr(defaults, name)}
    if sampling.structured is not None:
        given = dataclasses.asdict(sampling.structured)
        told["structured"] = {name: value for name, value in given.items() if value is not None}
    if sampling.logit_bias is not None:
        told["logit_bias"] = dict(sampling.logit_bias)
    return told


_SEARCH = (
    "beam_width",
    "length_penalty",
    "early_stopping",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
)


def sampling_of(told: dict[str, Any]) -> SamplingParams:
    """Return the sampling parameters from their message."""
    told = dict(told)
    if told.pop("beams", False):
        return BeamSearchParams(**told)
    if "structured" in told:
        told["structured"] = StructuredOutputs(**told["structured"])
    return SamplingParams(**told)


def failure_of(error: BaseException) -> Failure:
    """Return the message of an exception."""
    return Failure(type(error).__name__, str(error))


_BUILTIN: dict[str, type[Exception]] = {
    one.__name__: one
    for one in (
        ValueError,
        TypeError,
        KeyError,
        ImportError,
        OSError,
        RuntimeError,
        TimeoutError,
        FloatingPointError,
        MemoryError,
    )
}


def error_of(failure: Failure) -> Exception:
    """Return the exception of a message; an unknown class becomes RuntimeError."""
    kind = getattr(errors, failure.kind, None) or _BUILTIN.get(failure.kind)
    if isinstance(kind, type) and issubclass(kind, Exception):
        error: Exception = kind(failure.message)
    else:
        error = RuntimeError(f"{failure.kind}: {failure.message}")
    if failure.where:
        error.add_note(f"in the engine's process:\n{failure.where}")
    return error
