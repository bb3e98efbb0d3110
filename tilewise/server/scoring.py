"""/v1/rerank, /v1/score and /v1/classify: texts against texts, and texts against labels.

A reranker reads each pair of texts as one prompt. Of a model that embeds, a score is the cosine of
two vectors, each text computed once. The forms are Cohere's and Jina's for rerank, vLLM's for the
other two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from tilewise.engine.scoring import (
    ScoreOutput,
    activated,
    classified,
    compared,
    pair_prompt,
    pairs_of,
    ranked,
)
from tilewise.engine.steps.embedding import EMBEDDING_PARAMS, EmbeddingOutput
from tilewise.errors import RequestError
from tilewise.server.bridge import Job
from tilewise.server.errors import ApiError, invalid
from tilewise.server.job import Prompt
from tilewise.server.protocol import REQUEST_ID, Truncation, prompts_of, shown
from tilewise.server.reply import Reply
from tilewise.server.routes import engine_method
from tilewise.server.schema import body_of
from tilewise.server.service import Service

__all__ = ["scoring_router"]


class _Body(BaseModel):
    """The fields that the bodies of /v1/rerank, /v1/score and /v1/classify have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: str | None = Field(default=None, max_length=256)
    priority: int | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    timeout: float | None = Field(default=None, gt=0)


class RerankRequest(_Body):
    """The JSON body of /v1/rerank: a query, and the documents to order by relevance."""

    query: str
    documents: Any = Field(description='a list of texts, or of {"text": text}')
    top_n: int | None = Field(default=None, ge=0, description="0 or none for all documents")
    return_documents: bool = True
    use_activation: bool = True


class ScoreRequest(_Body):
    """The JSON body of /v1/score: two texts, a text and a list, or two lists, compared in pairs."""

    text_1: Any = Field(description="a text, or a list of texts")
    text_2: Any = Field(description="a text, or a list of texts")
    use_activation: bool = True


class ClassifyRequest(_Body):
    """The JSON body of /v1/classify: the texts to which labels are given."""

    input: Any = Field(description="a text, token ids, or a list of either")
    add_special_tokens: bool | None = None


def scoring_router(service: Service) -> APIRouter:
    """Return the routes /v1/rerank, /v1/score and /v1/classify, under their other paths, too.

    A model that is not made for the task is an error 400.
    """
    router = APIRouter()
    bridge = service.bridge

    async def rerank(request: Request) -> Response:
        return await service.read(request, RerankRequest, rerank_begun)

    async def score(request: Request) -> Response:
        return await service.read(request, ScoreRequest, score_begun)

    async def classify(request: Request) -> Response:
        return await service.read(request, ClassifyRequest, classify_begun)

    routes: list[tuple[Callable[[Request], Awaitable[Response]], type[_Body], list[str]]] = [
        (rerank, RerankRequest, ["/v1/rerank", "/v2/rerank", "/rerank"]),
        (score, ScoreRequest, ["/v1/score", "/score"]),
        (classify, ClassifyRequest, ["/v1/classify", "/classify"]),
    ]
    for route, kind, paths in routes:
        for path in paths:
            router.add_api_route(path, route, methods=["POST"], openapi_extra=body_of(kind))

    def rerank_begun(body: RerankRequest) -> Reply:
        check("score")
        documents = _documents(body.documents)
        refuse_many("documents", documents)

        async def whole(job: Job) -> bytes:
            pairs = [(body.query, document) for document in documents]
            scores = await scored(job, body, pairs, body.use_activation)
            best = ranked(documents, scores, body.top_n or None)
            results = [
                {"index": one.index, "relevance_score": one.score}
                | ({"document": {"text": one.document}} if body.return_documents else {})
                for one in best
            ]
            return await bridge.in_thread(lambda: told(job, body, {"results": results}))

        return Reply(bridge, "rerank", body.request_id, whole=whole)

    def score_begun(body: ScoreRequest) -> Reply:
        check("score")
        try:
            pairs = pairs_of(body.text_1, body.text_2)
        except RequestError as error:
            raise invalid(str(error), str(error).split()[0]) from None
        refuse_many("text_2" if isinstance(body.text_2, list) else "text_1", pairs)

        async def whole(job: Job) -> bytes:
            scores = await scored(job, body, pairs, body.use_activation)
            data = [
                {"index": i, "object": "score", "score": one.score} for i, one in enumerate(scores)
            ]
            answer = {"object": "list", "created": int(time.time()), "data": data}
            return await bridge.in_thread(lambda: told(job, body, answer))

        return Reply(bridge, "score", body.request_id, whole=whole)

    def classify_begun(body: ClassifyRequest) -> Reply:
        check("classify")
        given = prompts_of(body.input, bridge.limits.max_prompts, "input")
        refuse_many("input", given)

        async def whole(job: Job) -> bytes:
            adds = body.add_special_tokens is not False
            truncate = body.truncate_prompt_tokens
            prompts = await service.text_prompts(given, truncate, adds)
            found = [
                classified(service.purpose, one)
                for one in await pooled(job, body, prompts, "input")
            ]
            data = [
                {
                    "index": i,
                    "label": one.label,
                    "probs": list(one.probs),
                    "num_classes": len(one.probs),
                }
                for i, one in enumerate(found)
            ]
            answer = {"object": "list", "created": int(time.time()), "data": data}
            return await bridge.in_thread(lambda: told(job, body, answer))

        return Reply(bridge, "classify", body.request_id, whole=whole)

    def check(task: str) -> None:
        engine_method(bridge.llm, "embed")
        service.check_task(task)

    def refuse_many(name: str, given: Sequence[object]) -> None:
        most = bridge.limits.max_samples
        if len(given) > most:
            raise invalid(
                f"{name} must be at most {most:,} texts, got {len(given):,}", name, code="too_many"
            )

    async def scored(
        job: Job, body: _Body, pairs: Sequence[tuple[str, str]], use_activation: bool
    ) -> list[ScoreOutput]:
        purpose = service.purpose
        if purpose.compares_vectors:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            prompts = await service.text_prompts(texts, body.truncate_prompt_tokens, True)
            vectors = await pooled(job, body, prompts, "texts")
            by_text = dict(zip(texts, vectors, strict=True))
            return await bridge.in_thread(
                lambda: [compared(purpose, by_text[a], by_text[b]) for a, b in pairs]
            )
        prompts = await pair_prompts(body, pairs)
        outputs = await pooled(job, body, prompts, "pairs")
        activation = purpose.activation if use_activation else "identity"
        return [
            ScoreOutput(activated(one.embedding, activation)[0], len(one.prompt_token_ids))
            for one in outputs
        ]

    async def pair_prompts(body: _Body, pairs: Sequence[tuple[str, str]]) -> list[Prompt]:
        truncate = body.truncate_prompt_tokens
        kept = None if truncate is None else service.cut_at(truncate)
        longest = bridge.limits.longest_prompt(bridge.max_prompt_len)

        def encoded() -> list[Prompt]:
            made = list[Prompt]()
            for pair in pairs:
                one = pair_prompt(service.purpose, bridge.llm.tokenizer, pair, kept)
                types = one.get("token_type_ids", [])
                made.append(Prompt(None, one["prompt_token_ids"], types))
            return made

        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        return await bridge.tokenised(texts, encoded, longest if kept is None else None)

    async def pooled(
        job: Job, body: _Body, prompts: Sequence[Prompt], name: str
    ) -> list[EmbeddingOutput]:
        for i, prompt in enumerate(prompts):
            try:
                bridge.check_prompt(job.caller, prompt.ids, EMBEDDING_PARAMS)
            except ApiError as error:
                message = error.message.replace("prompt", f"{name}[{i}]", 1)
                raise invalid(message, f"{name}[{i}]", code=error.code) from None
        return await bridge.embed(
            job,
            prompts,
            service.purpose.pooling,
            user=body.user or "",
            cache_salt=body.cache_salt,
            adapter=service.adapter_of(body.model),
            priority=body.priority or 0,
            timeout=body.timeout,
        )

    def told(job: Job, body: _Body, answer: dict[str, Any]) -> bytes:
        tokens = sum(len(output.prompt_token_ids) for output in job.outputs.values())
        name = service.names[0] if body.model is None else body.model
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        whole = {"id": job.job_id, "model": name, **answer, "usage": usage}
        return json.dumps(whole, separators=(",", ":")).encode()

    return router


def _documents(given: object) -> list[str]:
    """Return the texts of the field `documents`, each of which is a text or {"text": text}.

    Raises:
        ApiError: 400: the field is no list of such, or empty.
    """
    if not isinstance(given, list) or not given:
        raise invalid(
            f"documents must be a list of texts that is not empty, got {shown(given)}", "documents"
        )
    found = []
    for i, one in enumerate(given):
        text = one.get("text") if isinstance(one, dict) and len(one) == 1 else one
        if not isinstance(text, str):
            raise invalid(
                f'documents[{i}] must be a text or {{"text": text}}, got {shown(one)}',
                f"documents[{i}]",
            )
        found.append(text)
    return found
