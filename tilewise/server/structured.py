"""The constraint on a request's text: from response_format, structured_outputs or tool_choice."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tilewise.engine import request as engine_request
from tilewise.engine.request import SamplingParams
from tilewise.server.errors import ApiError, invalid, unserved
from tilewise.server.protocol import GenerationRequest, refuse_unknown, shown

__all__ = ["make_structured", "structured_of"]

_KINDS = ("json", "regex", "choice", "grammar")
_NAMED = ("name", "schema", "strict", "description")


def structured_of(request: GenerationRequest) -> Any:
    """Return the StructuredOutputs of a request, None if it has no constraint.

    Raises:
        ApiError: 400, the constraint is wrong, or there is more than one.
    """
    asked: list[tuple[str, dict[str, Any]]] = []
    form = request.response_format
    if form is not None:
        kind, served = form.get("type"), ["type"]
        if kind == "json_object":
            # llama.cpp's server and others accept a schema next to "type".
            served.append("schema")
            schema = form.get("schema")
            schema = {"type": "object"} if schema is None else _schema("schema", schema)
            asked.append(("response_format", {"json": schema}))
        elif kind == "json_schema":
            served.append("json_schema")
            named = form.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            asked.append(("response_format", {"json": _schema("json_schema.schema", schema)}))
            # A schema is always followed strictly; its name and description are for the client.
            refuse_unknown("response_format.json_schema", named or {}, _NAMED)
        elif kind != "text":
            raise _wrong("response_format.type", "be text, json_object or json_schema", kind)
        refuse_unknown("response_format", form, served)
    outputs = request.structured_outputs
    if outputs is not None:
        given = {name: value for name, value in outputs.items() if value is not None}
        for name in given:
            if name not in _KINDS:
                raise unserved(f"structured_outputs.{name}")
        if len(given) != 1:
            raise _wrong("structured_outputs", f"hold one of {', '.join(_KINDS)}", sorted(given))
        asked.append(("structured_outputs", given))
    if not asked:
        return None
    if len(asked) > 1:
        raise _wrong("structured_outputs", "stand without response_format", "both")
    param, constraint = asked[0]
    return make_structured(param, constraint)


def _schema(where: str, schema: object) -> dict[str, Any] | bool:
    if not isinstance(schema, dict | bool):
        raise _wrong(f"response_format.{where}", "be a JSON schema", schema)
    return schema


def make_structured(param: str, constraint: dict[str, Any]) -> Any:
    """Return StructuredOutputs with one constraint.

    Args:
        param: the field of the request that errors name.
        constraint: the arguments of StructuredOutputs, such as {"grammar": ...}.

    Raises:
        ApiError: 400, the engine does not support the constraint, or refuses it.
    """
    kind = getattr(engine_request, "StructuredOutputs", None)
    if kind is None or "structured" not in {f.name for f in fields(SamplingParams)}:
        raise unserved(param)
    try:
        return kind(**constraint)
    except (TypeError, ValueError) as error:
        raise invalid(f"{param}: {error}", param) from None


def _wrong(param: str, rule: str, value: object) -> ApiError:
    return invalid(f"{param} must {rule}, got {shown(value)}", param)
