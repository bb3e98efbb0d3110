"""The bodies of requests, as OpenAI's and vLLM's clients send them, and their meaning.

Every field of the APIs is listed here. An unknown field is refused by its name. So is a known field
that this server does not support, unless its value has no effect (`presence_penalty: 0`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.server.errors import ApiError, invalid, named, unknown, unserved

__all__ = [
    "CACHE_MARKS",
    "REQUEST_ID",
    "SERVED",
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "ListOf",
    "Refused",
    "StreamOptions",
    "TokenizeRequest",
    "Truncation",
    "parse",
    "prompts_of",
    "refuse_stream_options",
    "refuse_unknown",
    "sampling_of",
    "shown",
    "tokens_asked",
]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,64}$"
# Where clients mark the end of a prefix to be cached; here every prompt's prefix is cached.
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
MAX_SHOWN = 80  # characters of a wrong value that an error repeats
# Errors of a body up to which the first is reported: listing one takes longer than finding it.
MAX_PROBLEMS = 256

# Fields of SamplingParams that have the same name and meaning in a request, with their values that
# have no effect: such a value is dropped where SamplingParams lacks the field.
SAMPLING_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "temperature": (),
    "top_p": (),
    "top_k": (),
    "min_p": (),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "prompt_logprobs": (),
    "best_of": (1,),
    "length_penalty": (1,),
}
SERVED = frozenset(field.name for field in fields(SamplingParams))
# Fields of the API that are not supported, with their values that have no effect; null is always
# one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "store": (False,),
    "include": ([],),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "prompt_cache_retention": (),
    "functions": ([],),
    "function_call": ("none",),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    # Fields of Anthropic's API.
    "container": (),
    "context_management": ([], {}, {"edits": []}),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}


def _edits_nothing(asked: Any) -> bool:
    """Return whether the value of context_management asks for no edits, or for edits of reasoning
    alone, which the template handles anyway."""
    edits = asked.get("edits") if isinstance(asked, dict) and set(asked) <= {"edits"} else asked
    return not edits or (
        isinstance(edits, list)
        and all(isinstance(e, dict) and _is_of_thinking(e.get("type")) for e in edits)
    )


def _is_of_thinking(kind: object) -> bool:
    return isinstance(kind, str) and kind.startswith("clear_thinking")


# Fields that are not supported and do not change the answer: accepted if the value is valid, and
# listed in a header of the answer.
_IGNORED: dict[str, Callable[[Any], bool]] = {
    "store": lambda value: value is True,
    "metadata": lambda value: isinstance(value, dict),
    "service_tier": lambda value: isinstance(value, str),
    "verbosity": lambda value: value in ("low", "medium", "high"),
    "prompt_cache_retention": lambda value: isinstance(value, str),
    # Optional parts that this server never sends; a client would miss log-probabilities alone.
    "include": lambda value: (
        isinstance(value, list)
        and all(isinstance(v, str) and not v.endswith("logprobs") for v in value)
    ),
    "context_management": _edits_nothing,
}


class _FailFast(pydantic.FailFast):
    """pydantic's FailFast with a hash, which unions need in Python 3.11."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


# A list whose first wrong entry is reported alone: listing the errors of millions of entries took
# 17 s and two gigabytes, while no other request was served.
ListOf = Annotated[list[T], _FailFast()]


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("False")
    return value


# A boolean that must be false. Literal[False] would accept 0.0, too.
Refused = Annotated[
    bool, pydantic.AfterValidator(_refuse_true), Field(json_schema_extra={"const": False})
]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _check_truncation(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("-1 or at least 1")
    return value


# Number of tokens to which a prompt is truncated; -1 for as many as the context has room for.
Truncation = Annotated[int, pydantic.AfterValidator(_check_truncation)]


class StreamOptions(_Body):
    """Options of a stream: whether token counts come in a last event, and in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Refused | None = None


class GenerationRequest(_Body):
    """The fields that the bodies of completions and of chats have in common; None is a field that
    the client has left out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    echo: bool | None = None
    user: str | None = Field(default=None, max_length=256)
    safety_identifier: str | None = Field(default=None, max_length=256)  # the newer name of user
    # Has no effect: prefixes are cached by their tokens, for every prompt.
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    priority: int | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    return_token_ids: bool | None = None
    recipe: bool | None = None  # all that computes the answer again, see docs/guide/exact.md
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    timeout: float | None = Field(default=None, gt=0)


class CompletionRequest(GenerationRequest):
    """The JSON body of /v1/completions."""

    prompt: Any = Field(
        default=None,
        description="a text, token ids, or a list of either",
    )
    logprobs: int | None = None


class ChatRequest(GenerationRequest):
    """The JSON body of /v1/chat/completions."""

    messages: ListOf[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True


class TokenizeRequest(_Body):
    """The JSON body of /tokenize, which returns the token ids of a text or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(_Body):
    """The JSON body of /detokenize, which turns token ids into text."""

    model: str | None = None
    tokens: ListOf[int]


def parse(kind: type[M], body: bytes, ignored: list[str] | None = None) -> M:
    """Parse and check the JSON body of a request; return it as a `kind`.

    Args:
        kind: the model of the body's fields.
        body: the bytes of the body.
        ignored: a list to which the names of accepted fields without effect are appended.

    Raises:
        ApiError: 400: the body is not JSON, or a field is wrong or unknown; the message names it.
    """
    if b"NaN" in body or b"Infinity" in body:  # pydantic accepts them where a field may be anything
        try:
            pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise invalid(f"body must be JSON, got {error}", code="invalid_json") from None
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > MAX_PROBLEMS:
            raise _many(kind, body, error.error_count()) from None
        problems = error.errors(include_url=False, include_context=False)
    unknown = [p for p in problems if p["type"] == "extra_forbidden"]
    passed = [str(p["loc"][0]) for p in unknown if _is_ignored(p)]
    asked = [p for p in unknown if not _asks_for_nothing(p) and not _is_ignored(p)]
    wrong = [p for p in problems if p["type"] != "extra_forbidden"]
    if wrong or asked:
        raise _refusal((wrong or asked)[0])
    # The remaining unknown fields have no effect: drop them.
    if ignored is not None:
        ignored += passed
    content = pydantic.TypeAdapter(dict[str, Any]).validate_json(body)
    for problem in unknown:
        content.pop(str(problem["loc"][0]))
    return kind.model_validate(content)


def _many(kind: type[BaseModel], body: bytes, count: int) -> ApiError:
    """Return the error for a body with `count` faults, too many to list; it names the first unknown
    field, if there is one."""
    for name in pydantic_core.from_json(body):
        if name not in kind.model_fields and name not in _NEUTRAL:
            return unknown(name)
    return invalid(f"body must be right, got {count:,} values or names that are not")


def _asks_for_nothing(problem: Any) -> bool:
    loc = problem["loc"]
    if len(loc) != 1 or loc[0] not in _NEUTRAL:
        return False
    value = problem["input"]
    return value is None or any(value == neutral for neutral in _NEUTRAL[loc[0]])


def _is_ignored(problem: Any) -> bool:
    loc = problem["loc"]
    if len(loc) != 1 or loc[0] not in _IGNORED or _asks_for_nothing(problem):
        return False
    return _IGNORED[loc[0]](problem["input"])


def _refusal(problem: Any) -> ApiError:
    kind, where = problem["type"], _path(problem["loc"])
    if kind == "json_invalid":
        return invalid(f"body must be JSON, got {problem['msg']}", code="invalid_json")
    if kind == "extra_forbidden":
        if problem["loc"][0] in _NEUTRAL:
            return unserved(where)
        return unknown(where)
    where = named(where)
    if kind == "missing":
        message = f"{where} must be given"
        return invalid(message, where, code="missing_required_parameter")
    rule = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    got = shown(problem["input"])
    return invalid(f"{where or 'body'} must be {rule}, got {got}", where or None)


def _path(loc: tuple[Any, ...]) -> str:
    """Return the path of a field from pydantic's `loc`: messages[0].role for ("messages", 0,
    "role"), without the names of a union's types."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in ("str", "list[str]", "list[int]", "dict[str,any]"):
            path += f".{part}" if path else str(part)
    return path


def shown(value: object) -> str:
    """Return a value as an error repeats it: Python's notation in ASCII, at most about 80
    characters, without line breaks."""
    left = [MAX_SHOWN]
    text = ascii(_beginning(value, left))
    if left[0] < 0:
        return f"{text[:MAX_SHOWN]}... (cut)"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def _beginning(value: object, left: list[int]) -> object:
    """Return a value with its first entries only, since writing millions takes seconds.

    Args:
        left: one number, in a list: how many further entries may be kept; it is counted down.
    """
    left[0] -= 1
    if isinstance(value, dict):
        some: dict[Any, Any] = {}
        for name, one in value.items():
            if left[0] < 0:
                break
            some[name] = _beginning(one, left)
        return some
    if isinstance(value, list):
        entries: list[Any] = []
        for one in value:
            if left[0] < 0:
                break
            entries.append(_beginning(one, left))
        return entries
    return value


def tokens_asked(request: GenerationRequest) -> int | None:
    """Return a request's max_tokens or max_completion_tokens; None if it has neither.

    Raises:
        ApiError: 400, the two disagree.
    """
    older, newer = request.max_tokens, request.max_completion_tokens
    if older is not None and newer is not None and older != newer:  # some clients send both
        raise invalid(
            f"max_completion_tokens must be equal to max_tokens where both are given, got "
            f"{newer} and {older}",
            "max_completion_tokens",
        )
    return newer if older is None else older


def refuse_stream_options(request: GenerationRequest) -> None:
    """Refuse stream_options that ask for token counts in a request without stream.

    Raises:
        ApiError: 400, such an option is set.
    """
    options = request.stream_options
    if options is None or request.stream:
        return
    if options.include_usage or options.continuous_usage_stats:
        raise invalid("stream_options must stand with stream: true", "stream_options")


def refuse_unknown(
    where: str,
    given: dict[str, Any],
    served: Collection[str] = (),
    **neutral: tuple[Any, ...],
) -> None:
    """Refuse an object in a request with an unknown entry, or with a known one that asks for
    something unsupported.

    Args:
        where: the path of the object.
        given: the object to check.
        served: names of entries that are read elsewhere, or that never have an effect.
        neutral: the values without effect of other known entries; null is always one.

    Raises:
        ApiError: 400, which names the first such entry.
    """
    for name, value in given.items():
        if name in served:
            continue
        if name not in neutral:
            raise unknown(f"{where}.{name}")
        if value is not None and not any(value == nothing for nothing in neutral[name]):
            raise unserved(f"{where}.{name}")


def prompts_of(prompt: object, max_prompts: int, name: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a request; each is a text or a list of token ids.

    Args:
        prompt: the value of the field: one prompt, or a list of prompts.
        max_prompts: the largest number of prompts.
        name: the name of the field, for errors.

    Raises:
        ApiError: 400: the field is not a text, ids, a list of texts, or a list of lists of ids, or
            has too many prompts.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        wanted = "a text, token ids or a list of these that is not empty"
        raise invalid(f"{name} must be {wanted}, got {shown(prompt)}", name)
    if all(type(part) is int for part in prompt):
        return [prompt]
    if len(prompt) > max_prompts:
        raise invalid(
            f"{name} must be at most {max_prompts} prompts, got {len(prompt)}",
            name,
            code="too_many",
        )
    for i, part in enumerate(prompt):
        is_ids = isinstance(part, list) and part and all(type(token) is int for token in part)
        if not isinstance(part, str) and not is_ids:
            raise invalid(
                f"{name}[{i}] must be a text or token ids, got {shown(part)}", f"{name}[{i}]"
            )
    return prompt


def sampling_of(
    request: GenerationRequest, *, defaults: dict[str, Any], max_tokens: int | None, **more: Any
) -> SamplingParams:
    """Return the engine's parameters of a request, for sampling or for beam search.

    Args:
        defaults: values of fields that the request omits, from the model's generation_config.json.
        max_tokens: the resolved value of max_tokens.
        more: further fields of SamplingParams.

    Raises:
        ApiError: 400: a value is out of its range, or its field is not supported.
    """
    if request.use_beam_search:
        return _search_of(request, max_tokens, more)
    asked: dict[str, Any] = {k: v for k, v in defaults.items() if k in SERVED}
    asked["max_tokens"] = max_tokens
    for name, neutral in SAMPLING_FIELDS.items():
        value = getattr(request, name)
        if value is None:
            continue
        if name in SERVED:
            asked[name] = _biases(value) if name == "logit_bias" else value
        elif not any(value == nothing for nothing in neutral):
            raise unserved(name)
    for name, value in more.items():
        if value is None:
            continue
        if name not in SERVED:
            raise unserved(name)
        asked[name] = value
    try:
        return SamplingParams(**asked)
    except (TypeError, ValueError) as error:
        raise _refused(request, error) from None


def _refused(request: GenerationRequest, error: Exception) -> ApiError:
    message = str(error)
    if request.max_tokens is None and request.max_completion_tokens is not None:
        # name the field as the client did
        message = re.sub(r"^max_tokens\b", "max_completion_tokens", message)
    name = message.split(" ", 1)[0]
    param = name if name in type(request).model_fields else None
    return invalid(message, param)


# The fields of a beam search, and the values of other fields that do not affect it.
_SEARCH_FIELDS = ("stop_token_ids", "ignore_eos", "length_penalty")
_SEARCH_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **SAMPLING_FIELDS,
    "temperature": (0, 1),  # a beam search samples nothing
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}


def _form_of(request: GenerationRequest) -> str:
    """Return the name of the request's field that constrains the format of its text: tool_choice,
    structured_outputs or response_format, else tools, for strict ones."""
    choice = getattr(request, "tool_choice", None)
    if choice not in (None, "auto", "none"):
        return "tool_choice"
    forms = ("structured_outputs", "response_format")
    return next((name for name in forms if getattr(request, name) is not None), "tools")


def _search_of(
    request: GenerationRequest, max_tokens: int | None, more: dict[str, Any]
) -> BeamSearchParams:
    """Return the parameters of a request's beam search: `best_of` beams, or `n` if that is not
    given.

    Args:
        max_tokens: the resolved value of max_tokens.
        more: further fields of SamplingParams, as of `sampling_of`.

    Raises:
        ApiError: 400, a field has no meaning for a beam search, or a value is out of its range.
    """
    n = 1 if request.n is None else request.n
    width = n if request.best_of is None else request.best_of
    if width < n:
        raise invalid(f"best_of must be at least n, got {width} for n of {n}", "best_of")
    own = ("n", "best_of", "use_beam_search", "seed", *_SEARCH_FIELDS)
    together = "together with use_beam_search"
    for name, neutral in _SEARCH_NEUTRAL.items():
        value = getattr(request, name)
        if name not in own and value is not None and not any(value == v for v in neutral):
            raise unserved(name, together)
    for name, value in more.items():
        if name not in ("logprobs", "skip_special_tokens") and value is not None:
            raise unserved(_form_of(request) if name == "structured" else name, together)
    asked = {name: getattr(request, name) for name in _SEARCH_FIELDS}
    try:
        return BeamSearchParams(
            width,
            max_tokens=max_tokens,
            logprobs=more.get("logprobs"),
            skip_special_tokens=more.get("skip_special_tokens") is not False,
            **{name: value for name, value in asked.items() if value is not None},
        )
    except (TypeError, ValueError) as error:
        told = ValueError(str(error).replace("beam_width", "n", 1))
        raise _refused(request, told) from None


def _biases(given: dict[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not token.isascii() or not token.isdecimal() or len(token) > 10:
            raise invalid(
                f"logit_bias must have token ids as names, got {shown(token)}", "logit_bias"
            )
        biases[int(token)] = bias
    return biases
