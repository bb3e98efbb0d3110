"""/v1/embeddings: embed prompts by pooling the model's hidden states.

The hidden states of a decoder that is made to generate are not trained to be compared, so the
answer states how its vectors were made: the pooling, and whether they have unit length.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from tilewise.engine.steps.embedding import EmbeddingOutput
from tilewise.errors import RequestError
from tilewise.server.bridge import Job
from tilewise.server.errors import invalid
from tilewise.server.protocol import REQUEST_ID, Truncation, prompts_of
from tilewise.server.reply import Reply
from tilewise.server.routes import engine_method
from tilewise.server.service import Service

__all__ = ["EmbeddingRequest", "embeddings_router"]


class EmbeddingRequest(BaseModel):
    """The JSON body of /v1/embeddings: OpenAI's fields and those of this server."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str | None = None
    input: Any = Field(description="a text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last", "cls", "max", "weightedmean"] | None = None
    normalize: bool = True
    prompt_name: str | None = Field(default=None, max_length=256)
    truncate_prompt_tokens: Truncation | None = None
    add_special_tokens: bool | None = None
    user: str | None = Field(default=None, max_length=256)
    priority: int | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    request_id: str | None = Field(default=None, pattern=REQUEST_ID)
    timeout: float | None = Field(default=None, gt=0)


def embeddings_router(service: Service) -> APIRouter:
    """Return the route /v1/embeddings, which answers with one vector per prompt, as numbers or in
    base64.

    Vectors may be cut to `dimensions`, and have unit length unless `normalize` is false.
    """
    router = APIRouter()
    bridge = service.bridge

    @router.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        return await service.read(request, EmbeddingRequest, begun)

    def begun(body: EmbeddingRequest) -> Reply:
        engine_method(bridge.llm, "embed")
        service.check_task("embed")
        purpose = service.purpose
        pooling = body.pooling or purpose.pooling
        size = purpose.size(bridge.llm.config.hidden_size)
        try:
            kept = purpose.cut_to(body.dimensions, size)
        except RequestError as error:
            raise invalid(str(error), "dimensions", code="unsupported_parameter") from None
        given = prompts_of(body.input, bridge.limits.max_prompts, "input")
        if len(given) > bridge.limits.max_samples:
            raise invalid(
                f"input must be at most {bridge.limits.max_samples:,} prompts, got {len(given):,}",
                "input",
                code="too_many",
            )

        async def whole(job: Job) -> bytes:
            adds = body.add_special_tokens is not False
            prompts = await service.text_prompts(
                given, body.truncate_prompt_tokens, adds, body.prompt_name
            )
            outputs = await bridge.embed(
                job,
                prompts,
                pooling,
                user=body.user or "",
                cache_salt=body.cache_salt,
                adapter=service.adapter_of(body.model),
                priority=body.priority or 0,
                timeout=body.timeout,
            )
            name = service.names[0] if body.model is None else body.model
            # Encoding thousands of numbers would delay other streams.
            return await bridge.in_thread(lambda: _answer(body, pooling, kept, name, outputs))

        return Reply(bridge, "embd", body.request_id, whole=whole)

    return router


def _answer(
    request: EmbeddingRequest,
    pooling: str,
    kept: int,
    name: str,
    outputs: Sequence[EmbeddingOutput],
) -> bytes:
    import numpy as np

    data = []
    for index, output in enumerate(outputs):
        vector = output.embedding[:kept]
        if request.normalize:
            length = math.hypot(*vector)
            vector = tuple(x / length for x in vector) if length else vector
        told: Any = [float(x) for x in np.asarray(vector, np.float32)]
        if request.encoding_format == "base64":
            told = base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": told})
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    answer = {
        "object": "list",
        "data": data,
        "model": name,
        "pooling": pooling,
        "normalized": request.normalize,
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
    }
    return json.dumps(answer, separators=(",", ":")).encode()
