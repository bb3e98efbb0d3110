"""The routes that load and unload adapters, which requests then name as their model.

Both require a key with `admin = true` if keys are set. Paths are the server's own: folders, or
names on the hub. Source: the names of routes and fields are vLLM's.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict

from tilewise.errors import CheckpointError, RequestError
from tilewise.server.errors import ApiError, invalid
from tilewise.server.protocol import shown
from tilewise.server.routes import admin_only, engine_method
from tilewise.server.schema import body_of
from tilewise.server.service import Service

__all__ = ["adapters_router"]


class LoadRequest(BaseModel):
    """The JSON body of /v1/load_lora_adapter: the adapter's new name, its folder or hub name, and
    whether it may replace a loaded adapter of that name."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    """The JSON body of /v1/unload_lora_adapter: the name of a loaded adapter; `lora_int_id` is
    ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)
    lora_name: str
    # accepted and ignored: names tell adapters apart
    lora_int_id: int | None = None


def adapters_router(service: Service) -> APIRouter:
    """Return the routes /v1/load_lora_adapter and /v1/unload_lora_adapter of the application.

    They load an adapter into the running engine and unload one, and keep `service.adapters`, the
    paths by name, up to date. A wrong name or file is an error 400; unloading an adapter that is
    not loaded is 404.
    """
    router = APIRouter()
    llm, questions = service.bridge.llm, service.bridge.questions

    @router.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadRequest))
    async def load(request: Request) -> Response:
        admin_only(request)
        body = await service.read(request, LoadRequest, lambda body: body)
        name, path = body.lora_name, body.lora_path
        for field in ("lora_name", "lora_path"):
            if not getattr(body, field):
                raise invalid(f"{field} must not be empty, got ''", field)
        if name in service.names:
            raise invalid(f"lora_name must not be the model's name, got {shown(name)}", "lora_name")
        work = engine_method(llm, "load_lora_adapter")
        try:
            await questions.finish(work(name, path, replaces=body.load_inplace))
        except (CheckpointError, RequestError) as error:
            field = "lora_name" if isinstance(error, RequestError) else "lora_path"
            raise invalid(str(error), field) from None
        service.adapters[name] = path
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadRequest))
    async def unload(request: Request) -> Response:
        admin_only(request)
        body = await service.read(request, UnloadRequest, lambda body: body)
        name = body.lora_name
        work = engine_method(llm, "unload_lora_adapter")
        try:
            await questions.within(work(name))
        except RequestError as error:
            raise ApiError(404, str(error), param="lora_name", code="adapter_not_found") from None
        service.adapters.pop(name, None)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    return router
