"""The routes: each turns a request's body into a job and the job's outputs into an answer."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import fastapi
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import tilewise
from tilewise.engine.outputs import RequestOutput
from tilewise.errors import EngineClosedError
from tilewise.server.answers import DONE, CompletionAnswer, usage_of
from tilewise.server.chat_job import ChatJob
from tilewise.server.errors import ApiError, invalid, unserved
from tilewise.server.front import App, Front, Receive, Scope, Send, caller_of
from tilewise.server.job import DISCARD, Job, Prompt, sink_of
from tilewise.server.protocol import (
    SERVED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    prompts_of,
    refuse_stream_options,
    sampling_of,
    shown,
    tokens_asked,
)
from tilewise.server.questions import EngineSilent
from tilewise.server.recipes import facts_before, recipe_for, with_recipe
from tilewise.server.reply import Reply, while_there
from tilewise.server.schema import body_of, describe
from tilewise.server.service import Service
from tilewise.server.structured import structured_of

__all__ = ["build_app"]

LOG = logging.getLogger("tilewise.server")
# number of ids whose JSON is encoded before checking whether the client is still there
AT_ONCE = 2**16
# of a completion, as in OpenAI's API; a chat's default is the rest of the context
DEFAULT_MAX_TOKENS = 16


def options_of(service: Service, request: GenerationRequest) -> dict[str, Any]:
    """Return the keyword arguments of `Bridge.run` that a request's body sets, beside its sampling
    parameters: user, cache_salt, adapter, priority, timeout and most."""
    return {
        "user": request.user or request.safety_identifier or "",
        "cache_salt": request.cache_salt,
        "adapter": service.adapter_of(request.model),
        "priority": request.priority or 0,
        "timeout": request.timeout,
        "most": request.n or 1,
    }


def refuse_if_late(outputs: Sequence[RequestOutput]) -> None:
    """Raise an ApiError of status 504 if the deadline ended any choice of `outputs` before its
    first token."""
    for output in outputs:
        for completion in output.outputs:
            if completion.finish_reason == "deadline" and not completion.token_ids:
                raise ApiError(504, "the deadline has passed before the first token")


def _completions(service: Service, request: CompletionRequest) -> Reply:
    bridge, limits = service.bridge, service.bridge.limits
    service.check_task("generate")
    given = prompts_of(request.prompt, limits.max_prompts)
    limits.check(request, len(given))
    refuse_stream_options(request)
    more: dict[str, Any] = {"logprobs": request.logprobs}
    if request.echo and request.logprobs is not None:
        if "prompt_logprobs" not in SERVED:
            raise unserved("echo", "together with logprobs")
        more["prompt_logprobs"] = request.logprobs
    more["structured"] = structured_of(request)
    asked = tokens_asked(request)
    max_tokens = DEFAULT_MAX_TOKENS if asked is None else asked
    sampling = sampling_of(request, defaults=service.defaults, max_tokens=max_tokens, **more)
    sampling = with_recipe(request, sampling, len(given))
    wants_special = request.add_special_tokens is not False

    async def prepare(job: Job) -> tuple[list[Prompt], CompletionAnswer]:
        truncate = request.truncate_prompt_tokens
        prompts = await service.prompts(given, truncate, wants_special, max_tokens)
        echoes = None
        if request.echo:
            echoes = [_text_of(service, prompt) for prompt in prompts]
        answer = CompletionAnswer(
            job.job_id,
            service.names[0] if request.model is None else request.model,
            bridge.llm.tokenizer,
            samples=request.n or 1,
            logprobs=request.logprobs,
            echoes=echoes,
            tells_ids=bool(request.return_token_ids),
            tells_prompt_logprobs=request.prompt_logprobs is not None,
            shows_special=request.skip_special_tokens is False,
        )
        return prompts, answer

    is_long = request.logprobs is not None or request.prompt_logprobs is not None

    async def whole(job: Job) -> bytes:
        prompts, answer = await prepare(job)
        facts = await facts_before(service, request)
        async with contextlib.aclosing(
            bridge.run(job, prompts, sampling, sink=DISCARD, **options_of(service, request))
        ) as outputs:
            async for _ in outputs:
                pass
        last = [job.outputs[i] for i in range(len(prompts))]
        refuse_if_late(last)
        if facts is not None:
            recipe = await recipe_for(service, request, facts, last[0], sampling)
            return await asyncio.to_thread(answer.whole, last, recipe)
        if is_long or request.return_token_ids:
            return await asyncio.to_thread(answer.whole, last)
        return answer.whole(last)

    async def stream(job: Job) -> AsyncGenerator[bytes, None]:
        prompts, answer = await prepare(job)
        options = request.stream_options
        is_told = options is not None and options.continuous_usage_stats

        def events(place: int, output: RequestOutput) -> bytes:
            refuse_if_late([output])
            usage = usage_of(list(job.outputs.values())) if is_told else None
            return answer.events(place, output, usage)

        tells_prompts = sampling.prompt_logprobs is not None
        sink = None if tells_prompts else sink_of(job, events)
        prepared = set[int]()
        async with contextlib.aclosing(
            bridge.run(job, prompts, sampling, sink=sink, **options_of(service, request))
        ) as outputs:
            async for place, output in outputs:
                if tells_prompts and place not in prepared and output.prompt_logprobs is not None:
                    prepared.add(place)
                    await asyncio.to_thread(answer.prepare, place, output)
                chunk = events(place, output)
                if chunk:
                    yield chunk
        if options is not None and options.include_usage:
            yield answer.last(list(job.outputs.values()))
        yield DONE

    if request.stream:
        return Reply(bridge, "cmpl", request.request_id, stream=stream)
    return Reply(bridge, "cmpl", request.request_id, whole=whole)


def _text_of(service: Service, prompt: Prompt) -> str:
    tokenizer = service.bridge.llm.tokenizer
    if prompt.text is not None:
        return prompt.text
    return "" if tokenizer is None else tokenizer.decode(prompt.ids)


async def _tokenize(service: Service, request: TokenizeRequest) -> bytes:
    bridge = service.bridge
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt or messages must be given, and not both", "prompt")
    if request.prompt is not None:
        text, adds = request.prompt, request.add_special_tokens is not False
    else:
        text = await bridge.in_thread(lambda: service.template.render(request))
        adds = bool(request.add_special_tokens)
    ids = await bridge.encode(text, adds_special_tokens=adds)

    # Encoding millions of tokens would delay other streams, and the client may leave meanwhile.
    parts = [ids[begin : begin + AT_ONCE] for begin in range(0, len(ids), AT_ONCE)]
    told = [f'{{"count": {len(ids)}, "max_model_len": {bridge.max_model_len}, "tokens": [']
    told.append(", ".join([await bridge.in_thread(functools.partial(_entries, p)) for p in parts]))
    if request.return_token_strs:
        work = functools.partial(_strings, service)
        strings = [await bridge.in_thread(functools.partial(work, part)) for part in parts]
        told += ['], "token_strs": [', ", ".join(strings)]
    told.append("]}")
    return await bridge.in_thread(lambda: "".join(told).encode())


def _strings(service: Service, ids: Sequence[int]) -> str:
    tokenizer = service.bridge.llm.tokenizer
    assert tokenizer is not None  # `encode` above has used it
    return _entries([tokenizer.token_bytes(i).decode("utf-8", "backslashreplace") for i in ids])


def _entries(values: Sequence[int | str]) -> str:
    """Return a list's entries as JSON, separated by commas, without the brackets; "" for none."""
    return json.dumps(values)[1:-1]


def _detokenize(service: Service, request: DetokenizeRequest) -> bytes:
    tokenizer = service.bridge.llm.tokenizer
    if tokenizer is None:
        raise ApiError(400, "tokens must be of a model with tokenizer.json")
    vocab_size = service.bridge.llm.config.vocab_size
    for i, token in enumerate(request.tokens):
        if not 0 <= token < vocab_size:
            raise invalid(
                f"tokens[{i}] must be in 0 ... {vocab_size - 1}, got {token}", f"tokens[{i}]"
            )
    return json.dumps({"prompt": tokenizer.decode(request.tokens)}).encode()


def build_app(service: Service, routers: Sequence[fastapi.APIRouter] = ()) -> Any:
    """Return the ASGI application of the server: the routes of this file and of `routers`, behind
    `_ShortWay` and `Front`.

    At its shutdown the application closes the service's bridge and the process that renders
    templates. Every error is answered with the JSON of `ApiError`.

    Args:
        service: the server's state, which all routes share.
        routers: additional routers to include.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.bridge.aclose()
        service.template.renderer.close()

    app = FastAPI(
        title="tilewise",
        version=tilewise.__version__,
        lifespan=lifespan,
        # FastAPI's documentation pages load scripts from other hosts.
        docs_url=None,
        redoc_url=None,
    )

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return JSONResponse(error.body, error.status, error.headers)

    async def on_http_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail))
        return JSONResponse(told.body, told.status, dict(error.headers or {}))

    async def on_wrong_query(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problem = error.errors()[0]
        name = str(problem["loc"][-1])
        rule = problem["msg"].removeprefix("Input should be ")
        told = invalid(f"{name} must be {rule}, got {shown(problem['input'])}", name)
        return JSONResponse(told.body, told.status)

    async def on_ended_engine(_: Request, error: Exception) -> Response:
        told = ApiError(503, str(error), code="engine_error")
        return JSONResponse(told.body, told.status)

    async def on_mistake(_: Request, error: Exception) -> Response:
        LOG.error("a route failed in the server", exc_info=error)
        told = ApiError(500, f"the server failed: {type(error).__name__}")
        return JSONResponse(told.body, told.status)

    app.add_exception_handler(Exception, on_mistake)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    app.add_exception_handler(EngineClosedError, on_ended_engine)
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)

    @app.post("/v1/completions", openapi_extra=body_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        begin = functools.partial(_completions, service)
        return await service.read(request, CompletionRequest, begin)

    @app.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await service.read(request, ChatRequest, lambda b: ChatJob(service, b).reply())

    @app.post("/tokenize", openapi_extra=body_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await service.read(request, TokenizeRequest, lambda body: body)
        found = await while_there(request, _tokenize(service, body))
        return Response(found, media_type="application/json")

    @app.post("/detokenize", openapi_extra=body_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await service.read(request, DetokenizeRequest, lambda body: body)
        work = service.bridge.in_thread(lambda: _detokenize(service, body))
        found = await while_there(request, work)
        return Response(found, media_type="application/json")

    @app.get("/v1/models")
    async def models() -> Response:
        names = (*service.names, *service.adapters)
        return JSONResponse({"object": "list", "data": [_model(service, n) for n in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONResponse(_model(service, name))

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": tilewise.__version__})

    @app.get("/health")
    async def health() -> Response:
        trouble = service.bridge.trouble()
        if trouble is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unhealthy", "reason": trouble}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        trouble = service.bridge.trouble()
        if service.bridge.is_draining:
            trouble = "the server is shutting down"
        if trouble is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": trouble}, 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        caller = caller_of(request.scope)
        own, metrics = None if caller.admin else caller.name, service.bridge.metrics
        # The last snapshot of metrics is kept, and health reports the hang.
        with contextlib.suppress(EngineSilent):
            await service.bridge.questions.ask(metrics.look)
        text = await asyncio.to_thread(metrics.text, own)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/usage")
    async def usage(request: Request) -> Response:
        caller = caller_of(request.scope)
        ledger = service.bridge.ledger
        data = ledger.all if caller.admin else [ledger.of(caller.name)]
        return JSONResponse({"object": "list", "data": data})

    for router in routers:
        app.include_router(router)
    describe(app)
    short = _ShortWay(
        app,
        {"/v1/completions": completions, "/v1/chat/completions": chat_completions},
        on_api_error,
        on_mistake,
    )
    limit = service.bridge.limits.max_header_bytes
    return Front(
        short,
        service.keys,
        limit,
        service.is_for_this_machine,
        service.bodies,
        service.allowed_origins,
    )


class _ShortWay:
    """Call the busiest routes directly, without the framework's layers around each route.

    The framework finds the route, resolves dependencies that these routes do not have, and catches
    errors. That is a tenth of what the event loop does for a request.

    Args:
        app: the ASGI application that serves all other requests.
        routes: the handler of a POST, by path.
        on_api_error, on_mistake: handlers of the exceptions that a route raises.
    """

    def __init__(
        self,
        app: App,
        routes: dict[str, Callable[[Request], Awaitable[Response]]],
        on_api_error: Callable[[Request, Exception], Awaitable[Response]],
        on_mistake: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app, self._routes = app, routes
        self._on_api_error, self._on_mistake = on_api_error, on_mistake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI request: a POST to one of the routes directly, any other by the
        application.

        An exception of a direct route is answered by one of the two handlers.
        """
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        route = self._routes.get(scope["path"]) if is_post else None
        if route is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            answer = await route(request)
        except ApiError as error:
            answer = await self._on_api_error(request, error)
        except Exception as error:
            answer = await self._on_mistake(request, error)
        await answer(scope, receive, send)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "tilewise",
        "root": service.adapters.get(name, service.names[0]),
        "parent": service.names[0] if name in service.adapters else None,
        "max_model_len": service.bridge.max_model_len,
    }
