"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a chat, served as a chat.

A request is converted to a chat, and the parts of the chat's answer to content blocks: text,
thinking and tool_use.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from tilewise.engine.outputs import RequestOutput
from tilewise.server.answers import usage_of
from tilewise.server.bridge import Job
from tilewise.server.calls.parts import Part
from tilewise.server.chat_answer import ChatAnswer
from tilewise.server.chat_job import ChatJob
from tilewise.server.errors import ApiError, invalid, renamed, unserved
from tilewise.server.protocol import CACHE_MARKS, ChatRequest, ListOf, refuse_unknown, shown
from tilewise.server.reply import Reply, while_there
from tilewise.server.schema import body_of
from tilewise.server.service import Service

__all__ = ["messages_router"]

# the only key of a tool's input that was cut off; its value is the text so far
PARTIAL = "partial_json"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CountRequest(_Body):
    """The JSON body of /v1/messages/count_tokens: the fields that make the prompt."""

    model: str
    messages: ListOf[dict[str, Any]]
    system: str | ListOf[dict[str, Any]] | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    # accepted and ignored: the prefix of every prompt is cached anyway
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """The JSON body of /v1/messages: the fields of `CountRequest` and those of the answer."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: ListOf[str] | None = None
    metadata: dict[str, Any] | None = None


def messages_router(service: Service) -> APIRouter:
    """Return the routes /v1/messages and /v1/messages/count_tokens; their errors have Anthropic's
    format."""
    router = APIRouter()

    @router.post("/v1/messages", openapi_extra=body_of(MessagesRequest))
    async def messages(request: Request) -> Response:
        try:
            return await service.read(
                request, MessagesRequest, lambda body: _MessagesJob(service, body).reply()
            )
        except ApiError as error:
            return JSONResponse(_error(error), error.status, error.headers)

    @router.post("/v1/messages/count_tokens", openapi_extra=body_of(CountRequest))
    async def count_tokens(request: Request) -> Response:
        try:
            count = await service.read(request, CountRequest, lambda body: _Count(service, body))
            found = await while_there(request, count.tokens())
        except ApiError as error:
            return JSONResponse(_error(error), error.status, error.headers)
        return JSONResponse({"input_tokens": found})

    return router


class _Count:
    """One request of /v1/messages/count_tokens, checked and converted to a chat."""

    def __init__(self, service: Service, request: CountRequest) -> None:
        self._request = request
        try:
            self._chat = ChatJob(service, _chat_of(request))
        except ApiError as error:
            raise _renamed(request, error) from None

    async def tokens(self) -> int:
        """Return the number of tokens of the prompt that the chat template makes; no request
        runs."""
        try:
            _, prompt = await self._chat.prompt(is_counted=True)
        except ApiError as error:
            raise _renamed(self._request, error) from None
        return len(prompt.ids)


def _renamed(request: CountRequest, error: ApiError) -> ApiError:
    """Return a chat's error with the fields named as in the Messages API."""
    names = [
        (f"tools[{i}].function.parameters", f"tools[{i}].input_schema")
        for i in range(len(request.tools or ()))
    ]
    names += [(f"tools[{i}].function", f"tools[{i}]") for i in range(len(request.tools or ()))]
    names += [
        ("stop", "stop_sequences"),
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
    ]
    return renamed(error, names)


def _error(error: ApiError) -> dict[str, Any]:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _chat_of(request: CountRequest) -> ChatRequest:
    """Return the chat request that a request of the Messages API stands for.

    Raises:
        ApiError: 400, a field is wrong or not served.
    """
    fields: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if request.tools:
        fields["tools"] = [_tool(i, tool) for i, tool in enumerate(request.tools)]
    choice = request.tool_choice or {}
    refuse_unknown("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    kind = choice.get("type", "auto")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        if request.tool_choice is not None:
            fields["tool_choice"] = {"any": "required"}.get(kind, kind)
    else:
        raise _wrong("tool_choice.type", "be auto, any, tool or none", kind)
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    if request.thinking is not None:
        fields["chat_template_kwargs"] = _thinking(request.thinking)
    output = {k: v for k, v in (request.output_config or {}).items() if v is not None}
    form = output.pop("format", None)
    if form is not None:
        form = form if isinstance(form, dict) else {}
        if form.get("type", "json_schema") != "json_schema":
            raise unserved("output_config.format.type", f"got {shown(form['type'])}")
        named = {name: value for name, value in form.items() if name != "type"}
        fields["response_format"] = {"type": "json_schema", "json_schema": named}
    fields["reasoning_effort"] = output.pop("effort", None)
    if output or not isinstance(fields["reasoning_effort"], str | None):
        raise unserved(f"output_config.{next(iter(output), 'effort')}")
    if isinstance(request, MessagesRequest):
        metadata = request.metadata or {}
        user = metadata.get("user_id")
        refuse_unknown("metadata", metadata, ("user_id",))
        fields |= {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stop": request.stop_sequences,
            "user": str(user or "")[:256] or None,
        }
    last = request.messages[-1] if request.messages else {}
    if last.get("role") == "assistant":  # the last message is the beginning of the answer
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return ChatRequest(**fields)


def _thinking(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template for the field `thinking`: whether to reason, under
    the names that templates use, and a budget if given, which some models follow.

    Raises:
        ApiError: 400, an entry is wrong or unknown.
    """
    refuse_unknown("thinking", asked, ("type", "budget_tokens", "display"))
    kind, budget = asked.get("type"), asked.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise _wrong("thinking.type", "be enabled, disabled or adaptive", kind)
    if asked.get("display") not in (None, "summarized", "omitted"):
        raise _wrong("thinking.display", "be summarized or omitted", asked["display"])
    # Templates of DeepSeek, Granite and Kimi have another name for it.
    told = dict.fromkeys(("enable_thinking", "thinking"), kind != "disabled")
    if budget is None:
        return told
    if type(budget) is not int or budget < 1 or kind != "enabled":
        raise _wrong("thinking.budget_tokens", "be at least 1, of thinking that is enabled", budget)
    return {**told, "thinking_budget": budget}


def _messages(request: CountRequest) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if request.system:
        made.append({"role": "system", "content": _text("system", request.system)})
    for i, message in enumerate(request.messages):
        where = f"messages[{i}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise _wrong(f"{where}.role", "be user, assistant or system", role)
        refuse_unknown(where, message, ("role", "content"))
        if isinstance(content, str):
            made.append({"role": role, "content": content})
        elif isinstance(content, list):
            made += _blocks(f"{where}.content", role, content)
        else:
            raise _wrong(f"{where}.content", "be a text or blocks", content)
    return made


def _blocks(where: str, role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Return the chat messages for the content blocks of one message: one for each tool result,
    then one with the texts, the reasoning and the calls, if there are any.

    Args:
        where: the path of the content, for errors.
        role: the role of the message.
        blocks: the content blocks of the Messages API.
    """
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(_text_of(at, block))
        elif kind == "thinking" and role == "assistant":
            refuse_unknown(at, block, ("type", "thinking", "signature"))
            reasoning.append(str(block.get("thinking", "")))
        elif kind == "tool_use" and role == "assistant":
            served = ("type", "id", "name", "input", *CACHE_MARKS)
            refuse_unknown(at, block, served, caller=({"type": "direct"},), toolset_name=())
            given = block.get("input", {})
            is_cut = isinstance(given, dict) and list(given) == [PARTIAL]  # see `_object`
            arguments = str(given[PARTIAL]) if is_cut else json.dumps(given)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            served = ("type", "tool_use_id", "content", "is_error", *CACHE_MARKS)
            refuse_unknown(at, block, served, toolset_name=())
            content = block.get("content")
            text = "" if content is None else _text(f"{at}.content", content)
            failed = block.get("is_error")
            if not isinstance(failed, bool | None):
                raise _wrong(f"{at}.is_error", "be true or false", failed)
            if failed:  # a chat has no field for an error: the model reads it in the text
                text = f"Error: {text}"
            call_id = block.get("tool_use_id")
            results.append({"role": "tool", "tool_call_id": call_id, "content": text})
        else:
            raise unserved(f"{at}.type", f"got {shown(kind)}")
    message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    is_said = bool(texts or calls or not results)
    return [*results, message] if is_said else results


def _text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "be a text or blocks of text", content)
    return "\n".join(_text_of(f"{where}[{i}]", block) for i, block in enumerate(content))


def _text_of(where: str, block: object) -> str:
    if not isinstance(block, dict) or block.get("type") != "text":
        kind = block.get("type") if isinstance(block, dict) else block
        raise unserved(f"{where}.type", f"must be text, got {shown(kind)}")
    text = block.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text", "be a text", text)
    refuse_unknown(where, block, ("type", "text", "citations", *CACHE_MARKS))
    return text


def _tool(place: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unserved(f"tools[{place}].type", f"got {shown(tool['type'])}")
    refuse_unknown(
        f"tools[{place}]",
        tool,
        ("type", "name", "description", "input_schema", "strict", *CACHE_MARKS),
        allowed_callers=([], ["direct"]),
        defer_loading=(False,),
        eager_input_streaming=(True, False),  # arguments are streamed in any case
        input_examples=([],),
    )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description", ""),
        "parameters": tool.get("input_schema") or {"type": "object"},
    }
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _wrong(param: str, rule: str, value: object) -> ApiError:
    return invalid(f"{param} must {rule}, got {shown(value)}", param)


class _MessagesJob:
    """One request of /v1/messages, checked and converted to a chat."""

    def __init__(self, service: Service, request: MessagesRequest) -> None:
        self._service = service
        self._request = request
        try:
            self._chat = ChatJob(service, _chat_of(request))
        except ApiError as error:
            raise _renamed(request, error) from None

    def reply(self) -> Reply:
        """Return the response object, a `Reply`; it begins to run when the server calls it."""
        kinds: dict[str, Any] = (
            {"stream": self._stream} if self._request.stream else {"whole": self._whole}
        )
        return Reply(
            self._service.bridge,
            "msg",
            None,
            wrap=_error,
            failed=lambda error: _event("error", _error(error)),
            rename=lambda error: _renamed(self._request, error),
            **kinds,
        )

    def _answer(self, job: Job, text: str) -> ChatAnswer:
        return ChatAnswer(
            job.job_id,
            self._request.model,
            None,
            self._chat.new_parser(text),
            most_calls=1 if self._chat.request.parallel_tool_calls is False else None,
            reasoning_tokens=self._chat.reasoning_tokens(text),
        )

    def _head(self, job: Job, prompt_tokens: int, cached: int) -> dict[str, Any]:
        return {
            "id": job.job_id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt_tokens - cached,
                "cache_read_input_tokens": cached,
                "output_tokens": 0,
            },
        }

    async def _whole(self, job: Job) -> dict[str, Any]:
        """Return the message object of a whole answer, assembled from the events of a stream."""
        message: dict[str, Any] = {}
        blocks: list[dict[str, Any]] = []
        async for name, event in self._events(job):
            if name == "message_start":
                message = event["message"]
            elif name == "content_block_start":
                blocks.append({**event["content_block"]})
            elif name == "content_block_delta":
                for field, text in event["delta"].items():
                    if field == "partial_json":
                        blocks[-1]["partial"] = blocks[-1].get("partial", "") + text
                    elif field != "type":
                        blocks[-1][field] += text
            elif name == "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _object(block.pop("partial", ""))
        message["content"] = blocks
        return message

    async def _stream(self, job: Job) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._events(job)) as events:
            async for name, event in events:
                yield _event(name, event)

    async def _events(self, job: Job) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        text, prompt = await self._chat.prompt()
        answer = self._answer(job, text)
        is_omitted = (self._request.thinking or {}).get("display") == "omitted"
        writer = _Blocks(answer, shows_thinking=not is_omitted)
        is_told = False
        output: RequestOutput | None = None
        async with contextlib.aclosing(self._chat.outputs(job, prompt)) as outputs:
            async for output in outputs:
                if not is_told:
                    is_told = True
                    head = self._head(job, len(output.prompt_token_ids), output.num_cached_tokens)
                    yield "message_start", {"message": head}
                for delta in answer.deltas(output):
                    for part in answer.parts(delta):
                        for event in writer.of(part):
                            yield event
                    if delta.finish_reason is None:
                        continue
                    for event in writer.end():
                        yield event
                    reason = answer.reason(delta) or "stop"
                    is_string = isinstance(delta.stop_reason, str)
                    told = "stop_sequence" if is_string else _REASONS.get(reason, reason)
                    stop = delta.stop_reason if is_string else None
                    usage: dict[str, Any] = {
                        "output_tokens": usage_of([output])["completion_tokens"]
                    }
                    thought = answer.reasoning_tokens(output)
                    if thought is not None:
                        usage["output_tokens_details"] = {"thinking_tokens": thought}
                    told_delta = {"stop_reason": told, "stop_sequence": stop}
                    yield "message_delta", {"delta": told_delta, "usage": usage}
        yield "message_stop", {}


class _Blocks:
    """Convert the parts of one answer to the events of content blocks, one block at a time.

    Events are pairs (name, content).
    """

    def __init__(self, answer: ChatAnswer, *, shows_thinking: bool) -> None:
        self._answer = answer
        self._shows_thinking = shows_thinking  # if False, a thinking block is sent without its text
        self._count = 0
        self._open: tuple[str, int] | None = None

    def of(self, part: Part) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a part: its text, and before it the end of the open block and the
        start of another one if the part is of another kind or call."""
        events: list[tuple[str, dict[str, Any]]] = []
        kind = (part.kind, part.index)
        if self._open != kind:
            events += self.end()
            self._open = kind
            block: dict[str, Any]
            if part.kind == "call":
                call_id = "toolu_" + self._answer.call_id(0, part.index)
                block = {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}
            elif part.kind == "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
            else:
                block = {"type": "text", "text": ""}
            start = {"index": self._count, "content_block": block}
            events.append(("content_block_start", start))
        if part.kind == "reasoning" and not self._shows_thinking:
            return events
        delta = {
            "call": {"type": "input_json_delta", "partial_json": part.text},
            "reasoning": {"type": "thinking_delta", "thinking": part.text},
            "content": {"type": "text_delta", "text": part.text},
        }[part.kind]
        events.append(("content_block_delta", {"index": self._count, "delta": delta}))
        return events

    def end(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the event that ends the open block, in a list; [] if none is open."""
        if self._open is None:
            return []
        self._open = None
        self._count += 1
        return [("content_block_stop", {"index": self._count - 1})]


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    # the model was cut off within the arguments, or wrote no JSON
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {PARTIAL: text}


def _event(name: str, content: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n".encode()
