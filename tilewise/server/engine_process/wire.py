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
    """A message of the server: a new request for the engine.

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
    """A message of the server: the client of the request with this number has left."""

    number: int


class Choice(msgspec.Struct, array_like=True):
    """The new part of one sample since the last message.

    Attributes:
        place: the index of the sample in the request's outputs.
        token_ids, text: the new tokens, and the new text.
        logprobs: log-probabilities at each new token; None unless the request asked for them.
        cumulative_logprob, finish_reason, stop_reason: the present values, see `CompletionOutput`.
    """

    place: int
    token_ids: list[int]
    text: str
    logprobs: Logprobs
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: int | str | None


class Delta(msgspec.Struct, array_like=True):
    """The new part of an unfinished request since the last message.

    Attributes:
        number: the request's number, as in `Ask`.
        num_cached_tokens: number of its prompt's tokens that were found cached.
        choices: the samples that have something new.
        prompt_logprobs: the prompt's log-probabilities, sent once; None in other messages.
    """

    number: int
    num_cached_tokens: int
    choices: list[Choice]
    prompt_logprobs: list[dict[int, float] | None] | None = None


class News(msgspec.Struct, array_like=True, tag=True):
    """A message of the engine: the new parts of all requests since the last one, and its state.

    Attributes:
        last_step_time, num_restarts: the attributes of EngineLoop.
        deltas: the new part of each request that has one.
    """

    last_step_time: float | None
    num_restarts: int
    deltas: list[Delta]


class Failure(msgspec.Struct, array_like=True):
    """An exception as it is sent: the name of its class, its message, and its traceback, "" if it
    is not sent."""

    kind: str
    message: str
    where: str = ""


class End(msgspec.Struct, array_like=True, tag=True):
    """A message of the engine: the request with this number has ended.

    Attributes:
        number: the request's number, as in `Ask`.
        output: the fields of the whole RequestOutput; None if the request never began.
        failure: the error that has ended the request; None if it has finished.
    """

    number: int
    output: dict[str, Any] | None
    failure: Failure | None


def plain(value: Any) -> Any:
    """Return a value of texts, numbers, lists and tables in a form that MessagePack can encode.

    Sets and tuples become lists. MessagePack's integers have 64 bits, so a larger one, such as a
    seed, becomes an extension that `wide` decodes.
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
        ValueError: `code` is of no such integer.
    """
    if code != _WIDE:
        raise ValueError(f"code must be {_WIDE}, got {code}")
    return int.from_bytes(data, "little", signed=True)


def frame(message: Any) -> bytes:
    """Return the bytes of a message: its length in four bytes, then its MessagePack."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frames(buffer: bytearray) -> list[bytes]:
    """Remove the complete frames from a receive buffer, and return the MessagePack of each."""
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
    """Wait for the next frame of a blocking socket, and return its MessagePack.

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
    """Return sampling parameters as a table to send, which `sampling_of` reads.

    It has the fields that differ from their defaults; of a beam search all its fields, and
    "beams".

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
    """Return the sampling parameters from the table of `told_sampling`."""
    told = dict(told)
    if told.pop("beams", False):
        return BeamSearchParams(**told)
    if "structured" in told:
        told["structured"] = StructuredOutputs(**told["structured"])
    return SamplingParams(**told)


def failure_of(error: BaseException) -> Failure:
    """Return an exception as it is sent, without its traceback."""
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
    """Return the exception that was sent: of its class in `tilewise.errors` or Python, or a
    RuntimeError with the class's name.

    A traceback that was sent is added as a note.
    """
    kind = getattr(errors, failure.kind, None) or _BUILTIN.get(failure.kind)
    if isinstance(kind, type) and issubclass(kind, Exception):
        error: Exception = kind(failure.message)
    else:
        error = RuntimeError(f"{failure.kind}: {failure.message}")
    if failure.where:
        error.add_note(f"in the engine's process:\n{failure.where}")
    return error
