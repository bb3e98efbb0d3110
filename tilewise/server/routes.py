"""Routes for the operator of the server, and for explaining why a request waits.

Administration requires a key with `admin = true` if keys are set. So does a trace, which shows the
requests of all callers.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from tilewise.server.answers import token_text
from tilewise.server.errors import ApiError, invalid
from tilewise.server.front import caller_of
from tilewise.server.job import Job, name_of
from tilewise.server.keys import Caller
from tilewise.server.protocol import ListOf
from tilewise.server.questions import EngineSilent
from tilewise.server.schema import body_of
from tilewise.server.service import Service

__all__ = ["admin_only", "admin_router", "engine_method"]

MOST_EVENTS = 10_000  # largest number in one answer
MOST_TOKENS = 1024  # largest number in one answer
MOST_IN_LINE = 1000  # largest number in one answer
MOST_EXPLAINED = 64  # largest number of requests in one question


class AbortRequest(BaseModel):
    """The JSON body of /abort: ids of requests as they stand in answers, or `all`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    request_ids: ListOf[str] | None = None
    all: bool = False


def _ids_of(body: AbortRequest) -> list[str] | None:
    """Return the ids of the requests to end, without duplicates; None for all.

    Raises:
        ApiError: 400, the body has both request_ids and all, or neither.
    """
    if body.all == (body.request_ids is not None):
        raise invalid("request_ids or all must be given, and not both", "request_ids")
    return None if body.request_ids is None else list(dict.fromkeys(body.request_ids))


def admin_router(service: Service) -> APIRouter:
    """Return the operator's routes: /pause, /resume, /abort, /reset_prefix_cache, /v1/queue and
    /v1/trace, which need an administrator's key, and /v1/explain, for any caller's own requests."""
    router = APIRouter()
    bridge = service.bridge

    @router.post("/pause")
    async def pause(request: Request) -> Response:
        admin_only(request)
        await bridge.pause()
        return JSONResponse({"paused": True})

    @router.post("/resume")
    async def resume(request: Request) -> Response:
        admin_only(request)
        await bridge.resume()
        return JSONResponse({"paused": False})

    @router.post("/abort", openapi_extra=body_of(AbortRequest))
    async def abort(request: Request) -> Response:
        admin_only(request)
        asked = await service.read(request, AbortRequest, _ids_of)
        names = list(bridge.jobs)
        # an id with its key, or the client's own id, which may belong to several keys
        if asked is not None:
            wanted = set(asked)
            names = [n for n in names if n in wanted or bridge.jobs[n].job_id in wanted]
        jobs = [bridge.jobs[name] for name in names]
        for job in jobs:
            await bridge.abort(job)
        return JSONResponse({"aborted": names if asked is None else [j.job_id for j in jobs]})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        admin_only(request)
        reset = engine_method(bridge.llm, "reset_prefix_cache")
        if not await bridge.questions.within(reset()):
            raise ApiError(409, "the prefix cache must be held by no request to be reset")
        return JSONResponse({"reset": True})

    @router.get("/v1/explain/{request_id:path}")  # the name of a key may contain any character
    async def explain(
        request: Request,
        request_id: str,
        sample: int | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> Response:
        """Answer with the state of each prompt of a running request and why it waits; with
        `sample`, also with that sample's tokens first ... last - 1, prompt included.

        A request that has ended, or is another key's, is an error 404.
        """
        job = visible(caller_of(request.scope), request_id)
        if job is None:
            raise ApiError(404, f"request must be one that runs, got {request_id[:80]}")
        told = await explained(caller_of(request.scope), job, sample, first, last)
        return JSONResponse({"id": request_id, "prompts": told})

    @router.get("/v1/explain")
    async def explain_several(
        request: Request,
        request_id: Annotated[list[str], Query()],
        sample: int | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> Response:
        """Answer with the explanations of several requests in one list; requests that have ended
        are left out."""
        if len(request_id) > MOST_EXPLAINED:
            raise invalid(
                f"request_id must be given at most {MOST_EXPLAINED} times, got {len(request_id)}",
                "request_id",
            )
        caller = caller_of(request.scope)
        told: list[dict[str, Any]] = []
        for name in dict.fromkeys(request_id):
            job = visible(caller, name)
            if job is not None:
                told += await explained(caller, job, sample, first, last)
        return JSONResponse({"object": "list", "data": told})

    def visible(caller: Caller, request_id: str) -> Job | None:
        names = (name_of(request_id, caller), request_id)
        found = [bridge.jobs[name] for name in names if name in bridge.jobs]
        if caller.admin:  # an administrator may use another key's id
            found += [one for one in bridge.jobs.values() if one.job_id == request_id]
        # Another key's request looks as if it did not exist.
        return next((one for one in found if caller.admin or one.caller.name == caller.name), None)

    async def explained(
        caller: Caller, job: Job, sample: int | None, first: int, last: int | None
    ) -> list[dict[str, Any]]:
        explain = engine_method(bridge.llm, "explain")
        told = []
        for engine_id in job.engine_ids:
            try:
                told.append(await bridge.questions.ask(partial(explain, engine_id)))
            except KeyError:  # this prompt of several has ended
                told.append({"request_id": engine_id, "state": "not in the engine"})
        if not caller.admin:  # the number of requests before this one, without their names
            jobs = [one for one in bridge.jobs.values() if one.caller.name == caller.name]
            own = {engine_id for one in jobs for engine_id in one.engine_ids}
            for one in told:
                behind = [i for i in one.get("behind", ()) if i in own]
                one["behind"] = [i.replace(f"@{caller.name}", "", 1) for i in behind]
        if sample is not None:
            # The text of other callers is hidden unless the operator allows it.
            may_read = not len(service.keys) or service.shows_text or job.caller == caller
            end = first + MOST_TOKENS if last is None else min(last, first + MOST_TOKENS)
            for place, one in enumerate(told):
                one["tokens"] = (
                    _tokens(service, job, place, sample, first, end) if may_read else None
                )
        return told

    @router.get("/v1/queue")
    async def queue(request: Request, limit: int = 100) -> Response:
        """Answer with the ids of the first `limit` requests that wait, in the order in which they
        will be admitted.

        If the engine does not answer, these are the server's requests without a first token.
        """
        admin_only(request)
        if not 1 <= limit <= MOST_IN_LINE:
            raise invalid(f"limit must be in 1 ... {MOST_IN_LINE}, got {limit}", "limit")
        ask = partial(engine_method(bridge.llm, "line"), limit)
        try:
            line = await bridge.questions.ask(ask)
        # what the server itself knows: requests without a first token
        except EngineSilent as error:
            jobs = (job for job in bridge.jobs.values() if job.first_token is None)
            line = [engine_id for job in jobs for engine_id in job.engine_ids][:limit]
            told = {"object": "list", "data": line, "engine": error.message}
            return JSONResponse(told)
        return JSONResponse({"object": "list", "data": line})

    @router.get("/v1/trace")
    async def trace(request: Request, since: int = 0, limit: int = 1000) -> Response:
        admin_only(request)
        if not 1 <= limit <= MOST_EVENTS:
            raise invalid(f"limit must be in 1 ... {MOST_EVENTS}, got {limit}", "limit")
        told = engine_method(bridge.llm, "trace")

        def body() -> str:
            events = told(max(0, since))[:limit]
            following = events[-1]["number"] + 1 if events else since
            return json.dumps({"object": "list", "data": events, "next": following})

        # Encoding thousands of events would delay other streams.
        return Response(await bridge.questions.ask(body), media_type="application/json")

    return router


def _tokens(
    service: Service, job: Job, place: int, sample: int, first: int, last: int
) -> list[str] | None:
    """Return the texts of the tokens first ... last - 1 of a sample, counted from its prompt's
    first token; None if the prompt has no output yet.

    Args:
        place: the index of the prompt in the job.
        sample: the index of the sample; only the prompt's tokens are there if there is none.
    """
    output = job.outputs.get(place)
    if output is None:
        return None
    ids = list(output.prompt_token_ids)
    ids += next((c.token_ids for c in output.outputs if c.index == sample), [])
    return [token_text(i, service.bridge.llm.tokenizer) for i in ids[max(0, first) : last]]


def admin_only(request: Request) -> Caller:
    """Return the caller of a request if it is an administrator.

    Raises:
        ApiError: 403, the caller's key has no `admin = true`.
    """
    caller = caller_of(request.scope)
    if not caller.admin:
        raise ApiError(403, "the key must have admin = true for this", code="admin_key_needed")
    return caller


def engine_method(engine: Any, name: str) -> Any:
    """Return the method `name` of an engine; not every engine has every method.

    Raises:
        ApiError: 501, this engine lacks the method.
    """
    method = getattr(engine, name, None)
    if method is None:
        raise ApiError(501, f"{name} is not served by this engine", code="not_implemented")
    return method
