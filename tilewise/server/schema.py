"""The OpenAPI description of bodies and answers, since the routes parse their bodies themselves.

Bodies are described by the models that the routes parse. Answers are described as far as clients
rely on them; further fields are allowed. All errors but Anthropic's have one format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

__all__ = ["body_of", "describe"]

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}


def _object(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
    }
)
_REASON: Schema = {"enum": ["stop", "length", "tool_calls", "abort", "deadline", "error"]}
_CALL = _object(
    {
        "id": TEXT,
        "type": {"const": "function"},
        "function": _object({"name": TEXT, "arguments": TEXT}),
    }
)
_HEAD = {"id": TEXT, "created": COUNT, "model": TEXT, "usage": _USAGE}
_MODEL = _object(
    {"id": TEXT, "object": {"const": "model"}, "created": COUNT, "max_model_len": COUNT}
)
_COMPLETION = _object(
    {
        **_HEAD,
        "object": {"const": "text_completion"},
        "choices": _list(
            _object(
                {
                    "index": COUNT,
                    "text": TEXT,
                    "finish_reason": _REASON,
                    "logprobs": {"type": ["object", "null"]},
                }
            )
        ),
    }
)
_CHAT = _object(
    {
        **_HEAD,
        "object": {"const": "chat.completion"},
        "choices": _list(
            _object(
                {
                    "index": COUNT,
                    "finish_reason": _REASON,
                    "message": _object(
                        {"role": {"const": "assistant"}, "content": MAYBE_TEXT},
                        tool_calls=_list(_CALL),
                        reasoning_content=TEXT,
                    ),
                    "logprobs": {"type": ["object", "null"]},
                }
            )
        ),
    }
)
_RESPONSE = _object(
    {
        "id": TEXT,
        "object": {"const": "response"},
        "created_at": COUNT,
        "status": {"enum": ["completed", "incomplete", "failed"]},
        "model": TEXT,
        "output": _list(_object({"id": TEXT, "type": TEXT, "status": TEXT})),
        "usage": _object({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT}),
    }
)
_MESSAGE = _object(
    {
        "id": TEXT,
        "type": {"const": "message"},
        "role": {"const": "assistant"},
        "model": TEXT,
        "content": _list(_object({"type": {"enum": ["text", "thinking", "tool_use"]}})),
        "stop_reason": TEXT,
        "stop_sequence": MAYBE_TEXT,
        "usage": _object({"input_tokens": COUNT, "output_tokens": COUNT}),
    }
)
_ANSWERS: dict[str, Schema] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/responses": _RESPONSE,
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _object({"input_tokens": COUNT}),
    "/tokenize": _object({"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT)}),
    "/detokenize": _object({"prompt": TEXT}),
    "/v1/models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "/v1/models/{name}": _MODEL,
    "/version": _object({"version": TEXT}),
    "/health": _object({"status": TEXT}, reason=TEXT),
    "/ready": _object({"status": TEXT}, reason=TEXT),
    "/v1/usage": _object({"object": {"const": "list"}, "data": _list({"type": "object"})}),
    "/v1/trace": _object({"data": _list({"type": "object"}), "next": COUNT}),
}
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_MEDIA = {"/metrics": "text/plain", "/v1/events": "text/event-stream"}
_ERROR = _object(
    {"error": _object({"message": TEXT, "type": TEXT, "param": MAYBE_TEXT, "code": TEXT})}
)
_ANTHROPIC_ERROR = _object(
    {"type": {"const": "error"}, "error": _object({"type": TEXT, "message": TEXT})}
)


def body_of(kind: type[BaseModel]) -> Schema:
    """Return the OpenAPI entry of a route whose JSON body is parsed as `kind`, for the route's
    argument openapi_extra."""
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}-{{model}}")
    # Definitions are inlined: FastAPI collects only those of bodies that it parses itself.
    whole = _without_refs(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _without_refs(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, dict):
        if "$ref" in node:
            return _without_refs(definitions[node["$ref"].rsplit("-", 1)[-1]], definitions)
        return {k: _without_refs(v, definitions) for k, v in node.items()}
    if isinstance(node, list):
        return [_without_refs(part, definitions) for part in node]
    return node


def describe(app: FastAPI) -> None:
    """Replace `app.openapi` by a function that adds answers and errors to the description in
    /openapi.json, which is made when it is first asked for."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    operation["responses"] = _responses(path)
            # schemas of FastAPI's own parsing
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _responses(path: str) -> dict[str, Any]:
    if path in _MEDIA:
        content: dict[str, Any] = {_MEDIA[path]: {"schema": TEXT} if path == "/metrics" else {}}
    else:
        content = {"application/json": {"schema": _ANSWERS.get(path, {"type": "object"})}}
    if path in _STREAMS:
        content["text/event-stream"] = {}  # a schema here would describe a single event
    # Errors raised before the route, such as for a wrong key, have OpenAI's format everywhere.
    error = {"anyOf": [_ANTHROPIC_ERROR, _ERROR]} if path.startswith("/v1/messages") else _ERROR
    if path in ("/health", "/ready"):
        error = {"anyOf": [_ERROR, _ANSWERS[path]]}
    return {
        "200": {"description": "The answer.", "content": content},
        "default": {"description": "Why not.", "content": {"application/json": {"schema": error}}},
    }
