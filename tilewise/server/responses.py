"""/v1/responses: OpenAI's newer form of a chat, served as a chat. Nothing is stored.

The parts of a chat's answer become items: reasoning, a message, function calls. The events of a
stream and a whole answer come from one generator.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from tilewise.engine.outputs import RequestOutput
from tilewise.server.bridge import Job
from tilewise.server.calls.parts import Part
from tilewise.server.chat_answer import ChatAnswer
from tilewise.server.chat_job import ChatJob
from tilewise.server.errors import ApiError, invalid, renamed, unserved
from tilewise.server.protocol import (
    CACHE_MARKS,
    REQUEST_ID,
    ChatRequest,
    ListOf,
    Refused,
    refuse_unknown,
    shown,
)
from tilewise.server.reply import Reply
from tilewise.server.schema import body_of
from tilewise.server.service import Service

__all__ = ["responses_router"]

Event = tuple[str, dict[str, Any]]
# Entries that describe an earlier answer's item; they have no effect when it is sent back.
_ITEM = ("type", "id", "status", "phase")
# Entries of calls made by a program, or asynchronous ones: only values without effect are served.
_CALLED: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "namespace": ("",),
}
_VERBOSITIES = ("low", "medium", "high")  # accepted, and without effect


class ResponseStreamOptions(BaseModel):
    """Options of a stream of /v1/responses; the only one, include_obfuscation, must be false."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_obfuscation: Refused | None = None


class ResponsesRequest(BaseModel):
    """The JSON body of /v1/responses; values that need stored responses are refused later."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = None
    input: str | ListOf[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = Field(default=None, max_length=256)
    safety_identifier: str | None = Field(default=None, max_length=256)
    prompt_cache_key: str | None = Field(default=None, max_length=256)
    cache_salt: str | None = Field(default=None, max_length=256)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    priority: int | None = None
    timeout: float | None = Field(default=None, gt=0)
    metadata: dict[str, Any] | None = None  # repeated in the answer
    # Fields that would need stored answers are refused.
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    truncation: str | None = None


def responses_router(service: Service) -> APIRouter:
    """Return the route /v1/responses, which answers whole or as a stream of events."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=body_of(ResponsesRequest))
    async def responses(request: Request) -> Response:
        def begun(body: ResponsesRequest) -> Response:
            if (body.text or {}).get("verbosity") in _VERBOSITIES:
                request.scope["state"]["ignored"].append("text.verbosity")
            return _ResponsesJob(service, body).reply()

        return await service.read(request, ResponsesRequest, begun)

    return router


def _wrong(param: str, rule: str, value: object) -> ApiError:
    return invalid(f"{param} must {rule}, got {shown(value)}", param)


# The fields' names in a chat and in a response; names within messages are added before them.
_NAMES = [
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
]


def _chat_of(request: ResponsesRequest, names: list[tuple[str, str]]) -> ChatRequest:
    """Return the chat request that a request of the Responses API stands for.

    Args:
        request: the parsed body.
        names: a list to which pairs (a field of the chat, the field it came from) are appended, for
            errors.

    Raises:
        ApiError: 400, a field is wrong or not served.
    """
    for name, neutral in (
        ("background", (None, False)),
        ("previous_response_id", (None,)),
        ("conversation", (None,)),
        ("truncation", (None, "disabled")),
        ("top_logprobs", (None, 0)),
    ):
        if getattr(request, name) not in neutral:
            raise unserved(name)
    reasoning, text = dict(request.reasoning or {}), dict(request.text or {})
    effort, form = reasoning.pop("effort", None), text.pop("format", None)
    if not isinstance(effort, str | None):
        raise _wrong("reasoning.effort", "be a text", effort)
    # Reasoning is returned as text, never as a summary.
    refuse_unknown("reasoning", reasoning, summary=("auto",), generate_summary=("auto",))
    refuse_unknown("text", text, verbosity=_VERBOSITIES)
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
        names.append(("messages[0]", "instructions"))
    if isinstance(request.input, str):
        names.append((f"messages[{len(messages)}]", "input"))
        messages.append({"role": "user", "content": request.input})
    else:
        for i, item in enumerate(request.input):
            added = _add_item(messages, f"input[{i}]", item)
            if added is not None:
                names.append((added, f"input[{i}]"))
        # the path of a call is more specific than that of the message which contains it
        names.reverse()
    names += [(f"tools[{i}].function", f"tools[{i}]") for i in range(len(request.tools or ()))]
    names += _NAMES
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "max_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _format(form),
        "reasoning_effort": effort,
        "tool_choice": request.tool_choice,
    }
    for name in (
        "temperature",
        "top_p",
        "user",
        "safety_identifier",
        "cache_salt",
        "request_id",
        "priority",
        "timeout",
    ):
        fields[name] = getattr(request, name)
    if request.tools:
        fields["tools"] = [_tool(i, tool) for i, tool in enumerate(request.tools)]
    return ChatRequest(**fields)


def _add_item(messages: list[dict[str, Any]], where: str, item: dict[str, Any]) -> str | None:
    """Append an item of the input to the chat's messages; return the path of the message or call
    that it became, such as "messages[0]", or None for reasoning, which is dropped.

    Args:
        messages: the messages, to be extended; a call goes into an assistant's message at the end.
        where: the path of the item, for errors.
        item: the item as the client sent it.

    Raises:
        ApiError: 400, the item is of an unknown type or has an entry that is not served.
    """
    kind = item.get("type", "message")
    if kind == "message":
        refuse_unknown(where, item, (*_ITEM, "role", "content"))
        role = item.get("role")
        messages.append({"role": role, "content": item.get("content")})
        return f"messages[{len(messages) - 1}]"
    if kind == "function_call":
        refuse_unknown(where, item, (*_ITEM, "name", "arguments", "call_id"), **_CALLED)
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            last = {"role": "assistant", "content": None, "tool_calls": [call]}
            messages.append(last)
        return f"messages[{len(messages) - 1}].tool_calls[{len(last['tool_calls']) - 1}].function"
    if kind == "function_call_output":
        refuse_unknown(where, item, (*_ITEM, "name", "output", "call_id"), **_CALLED)
        output = item.get("output")
        content = output if isinstance(output, str | list) else json.dumps(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        return f"messages[{len(messages) - 1}]"
    if kind != "reasoning":  # templates do not show earlier reasoning to the model
        raise unserved(f"{where}.type", f"got {shown(kind)}")
    refuse_unknown(where, item, (*_ITEM, "summary", "content", "encrypted_content"))
    return None


def _format(form: object) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict):
        raise _wrong("text.format", "be an object", form)
    if form.get("type") == "json_schema":
        named = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": named}
    return form


def _tool(place: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unserved(f"tools[{place}].type", f"must be function, got {shown(tool.get('type'))}")
    refuse_unknown(
        f"tools[{place}]",
        tool,
        ("type", "name", "description", "parameters", "strict", *CACHE_MARKS),
        **{**_CALLED, "allowed_callers": ([], ["direct"]), "defer_loading": (False,)},
    )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters") or {"type": "object"},
    }
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


class _ResponsesJob:
    """One request of /v1/responses, checked and converted to a chat."""

    def __init__(self, service: Service, request: ResponsesRequest) -> None:
        self._service = service
        self._request = request
        self._names: list[tuple[str, str]] = []
        self._created = int(time.time())
        self._is_forced = request.tool_choice not in (None, "auto", "none")
        chat = _chat_of(request, self._names)
        try:
            self._chat = ChatJob(service, chat)
        except ApiError as error:
            raise self._renamed(error) from None

    def _renamed(self, error: ApiError) -> ApiError:
        return renamed(error, self._names)

    def reply(self) -> Reply:
        """Return the response object, a `Reply`; it begins to run when the server calls it."""
        bridge, asked = self._service.bridge, self._request.request_id
        if self._request.stream:
            return Reply(
                bridge, "resp", asked, stream=self._stream, failed=_failure, rename=self._renamed
            )
        return Reply(bridge, "resp", asked, whole=self._whole, rename=self._renamed)

    async def _whole(self, job: Job) -> dict[str, Any]:
        found: dict[str, Any] = {}
        async with contextlib.aclosing(self._events(job)) as events:
            async for _, event in events:
                found = event.get("response", found)
        return found

    async def _stream(self, job: Job) -> AsyncGenerator[bytes, None]:
        number = 0
        async with contextlib.aclosing(self._events(job)) as events:
            async for name, event in events:
                content = {"type": name, "sequence_number": number, **event}
                yield f"event: {name}\ndata: {json.dumps(content)}\n\n".encode()
                number += 1

    def _response(self, job: Job, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._request
        return {
            "id": job.job_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": request.model or self._service.names[0],
            "output": items,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            # A call follows the tool's schema if a call is required or the tool is strict.
            "tools": [
                {**tool, "strict": self._is_forced or tool.get("strict") is True}
                for tool in request.tools or ()
            ],
            "tool_choice": request.tool_choice or "auto",
            "store": False,
            "usage": None,
        }

    async def _events(self, job: Job) -> AsyncGenerator[Event, None]:
        text, prompt = await self._chat.prompt()
        answer = ChatAnswer(
            job.job_id,
            "",
            None,
            self._chat.new_parser(text),
            most_calls=1 if self._request.parallel_tool_calls is False else None,
            reasoning_tokens=self._chat.reasoning_tokens(text),
        )
        items = _Items(job.job_id, answer)
        output: RequestOutput | None = None
        reason: str | None = None
        async with contextlib.aclosing(self._chat.outputs(job, prompt)) as outputs:
            async for output in outputs:
                if reason is None and not items.is_begun:
                    items.is_begun = True
                    begun = self._response(job, "in_progress", [])
                    yield "response.created", {"response": begun}
                    yield "response.in_progress", {"response": begun}
                for delta in answer.deltas(output):
                    for part in answer.parts(delta):
                        for event in items.of(part):
                            yield event
                    reason = delta.finish_reason or reason
        status = "completed" if reason == "stop" else "incomplete"
        for event in items.end(status):
            yield event
        assert output is not None
        response = self._response(job, status, items.done)
        if status == "incomplete":
            why = "max_output_tokens" if reason == "length" else reason
            response["incomplete_details"] = {"reason": why}
        made = sum(len(c.token_ids) for c in output.outputs)
        prompt_tokens = len(output.prompt_token_ids)
        response["usage"] = {
            "input_tokens": prompt_tokens,
            # Cache writes cost nothing here; OpenAI's clients require the field.
            "input_tokens_details": {
                "cached_tokens": output.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens(output) or 0},
            "total_tokens": prompt_tokens + made,
        }
        yield f"response.{status}", {"response": response}


def _failure(error: ApiError) -> bytes:
    content = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return f"event: error\ndata: {json.dumps(content)}\n\n".encode()


class _Items:
    """Convert the parts of one answer to the events of output items, one item at a time.

    Events are pairs (name, content).

    Attributes:
        done: the items that have ended, as a whole answer has them.
        is_begun: True once the answer's first event is sent.
    """

    def __init__(self, job_id: str, answer: ChatAnswer) -> None:
        self._job_id = job_id
        self._answer = answer
        self._open: tuple[str, int] | None = None
        self._item: dict[str, Any] = {}
        self._text = ""
        self.done: list[dict[str, Any]] = []
        self.is_begun = False

    def of(self, part: Part) -> Iterator[Event]:
        """Yield the events of a part: its text, and before it the end of the open item and the
        start of another one if the part is of another kind or call."""
        kind = (part.kind, part.index)
        if self._open != kind:
            yield from self.end("completed")
            self._open, self._text = kind, ""
            self._item = self._new(part)
            yield "response.output_item.added", {**self._where(False), "item": dict(self._item)}
            if part.kind == "content":
                yield (
                    "response.content_part.added",
                    {**self._where(), "content_index": 0, "part": _part("")},
                )
        self._text += part.text
        if part.kind == "content":
            more = {"content_index": 0, "delta": part.text, "logprobs": []}
            yield "response.output_text.delta", {**self._where(), **more}
        elif part.kind == "reasoning":
            more = {"content_index": 0, "delta": part.text}
            yield "response.reasoning_text.delta", {**self._where(), **more}
        else:
            yield (
                "response.function_call_arguments.delta",
                {**self._where(), "delta": part.text},
            )

    def end(self, status: str) -> Iterator[Event]:
        """Yield the events that end the open item, if there is one, and append it to `done`.

        Args:
            status: the item's status, "completed" or "incomplete".
        """
        if self._open is None:
            return
        kind, text, where = self._open[0], self._text, self._where()
        if kind == "content":
            more = {"content_index": 0, "text": text, "logprobs": []}
            yield "response.output_text.done", {**where, **more}
            yield (
                "response.content_part.done",
                {**where, "content_index": 0, "part": _part(text)},
            )
            self._item["content"] = [_part(text)]
        elif kind == "reasoning":
            yield "response.reasoning_text.done", {**where, "content_index": 0, "text": text}
            self._item["content"] = [{"type": "reasoning_text", "text": text}]
        else:
            more = {"arguments": text, "name": self._item["name"]}
            yield "response.function_call_arguments.done", {**where, **more}
            self._item["arguments"] = text
        self._item["status"] = status
        yield "response.output_item.done", {**self._where(False), "item": self._item}
        self.done.append(self._item)
        self._open = None

    def _where(self, has_id: bool = True) -> dict[str, Any]:
        place: dict[str, Any] = {"output_index": len(self.done)}
        return {"item_id": self._item["id"], **place} if has_id else place

    def _new(self, part: Part) -> dict[str, Any]:
        number = f"{self._job_id.removeprefix('resp-')}_{len(self.done)}"
        if part.kind == "call":
            return {
                "id": f"fc_{number}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": f"call_{self._answer.call_id(0, part.index)}",
                "name": part.name,
                "arguments": "",
            }
        if part.kind == "reasoning":
            return {
                "id": f"rs_{number}",
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
        return {
            "id": f"msg_{number}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
