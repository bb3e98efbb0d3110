"""The routes that change the model's weights, and let the engine sleep and wake.

They are off unless the server was started with --enable-weight-updates, and require a key with
`admin = true` if keys are set. Paths are the server's own folders, or names on the hub.
"""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from tilewise.errors import CheckpointError, EngineClosedError, UnsupportedError
from tilewise.server.errors import ApiError, invalid
from tilewise.server.routes import admin_only, engine_method
from tilewise.server.schema import body_of
from tilewise.server.service import Service

__all__ = ["weights_router"]


class UpdateRequest(BaseModel):
    """The JSON body of /update_weights: the folder or hub name of the new weights, and the fate of
    running requests."""

    model_config = ConfigDict(extra="forbid", strict=True)
    path: str
    running: Literal["wait", "abort", "keep"] = "wait"


class SleepRequest(BaseModel):
    """The JSON body of /sleep: how much memory is freed, see `LLM.sleep`, and the fate of running
    requests."""

    model_config = ConfigDict(extra="forbid", strict=True)
    level: Literal[1, 2] = 1
    running: Literal["wait", "abort"] = "wait"


def weights_router(service: Service) -> APIRouter:
    """Return the routes /update_weights, /sleep and /wake_up, which answer when the work is done.

    A caller that is no administrator, or a server without --enable-weight-updates, is an error 403;
    an engine in the wrong state is 409; one that hangs is 503.
    """
    router = APIRouter()
    llm, questions = service.bridge.llm, service.bridge.questions

    def check(request: Request) -> None:
        admin_only(request)
        if not service.changes_weights:
            raise ApiError(
                403,
                "the server must be started with --enable-weight-updates for this",
                code="weight_updates_disabled",
            )

    @router.post("/update_weights", openapi_extra=body_of(UpdateRequest))
    async def update(request: Request) -> Response:
        check(request)
        body = await service.read(request, UpdateRequest, lambda body: body)
        if not body.path:
            raise invalid("path must not be empty, got ''", "path")
        work = engine_method(llm, "update_weights")
        try:
            await questions.finish(work(body.path, running=body.running))
        except CheckpointError as error:
            raise invalid(str(error), "path") from None
        except UnsupportedError as error:
            raise ApiError(501, str(error), code="not_implemented") from None
        except RuntimeError as error:
            raise _conflict(error) from None
        return JSONResponse({"updated": True})

    @router.post("/sleep", openapi_extra=body_of(SleepRequest))
    async def sleep(request: Request) -> Response:
        check(request)
        body = await service.read(request, SleepRequest, lambda body: body)
        work = engine_method(llm, "sleep")
        try:
            await questions.finish(work(body.level, running=body.running))
        except UnsupportedError as error:
            raise ApiError(501, str(error), code="not_implemented") from None
        except RuntimeError as error:
            raise _conflict(error) from None
        return JSONResponse({"asleep": True})

    @router.post("/wake_up")
    async def wake(request: Request) -> Response:
        check(request)
        try:
            await questions.finish(engine_method(llm, "wake")())
        except RuntimeError as error:
            raise _conflict(error) from None
        return JSONResponse({"asleep": False})

    return router


def _conflict(error: RuntimeError) -> Exception:
    """Return the answer 409 for what the engine cannot do now; the error itself of an engine that
    has ended, which the app answers with 503."""
    return error if isinstance(error, EngineClosedError) else ApiError(409, str(error))
