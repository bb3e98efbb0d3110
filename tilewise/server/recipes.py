"""Recipes of served answers: `"recipe": true` in a request, see `tilewise.engine.recipe`."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace
from typing import Any

from tilewise.engine.outputs import RequestOutput
from tilewise.engine.recipe import Facts, pinned, recipe_of, why_no_recipe
from tilewise.engine.request import SamplingParams
from tilewise.errors import RequestError, UnsupportedError
from tilewise.server.errors import ApiError, invalid
from tilewise.server.protocol import GenerationRequest
from tilewise.server.routes import engine_method
from tilewise.server.service import Service

__all__ = ["facts_before", "recipe_for", "with_recipe"]


def with_recipe(
    request: GenerationRequest, sampling: SamplingParams, num_prompts: int
) -> SamplingParams:
    """Return `sampling` with the seed and the log-probabilities that a recipe needs; unchanged if
    the request asks for no recipe.

    Raises:
        ApiError: 400, a recipe is asked for a stream, several prompts or parameters that allow
            none.
    """
    if not request.recipe:
        return sampling
    if request.stream:
        raise invalid("recipe must be false in a stream, got true", "recipe")
    if num_prompts > 1:
        raise invalid(f"recipe must be false for several prompts, got {num_prompts}", "recipe")
    found = pinned(sampling, secrets.randbits(53))
    reason = why_no_recipe(found)
    if reason is not None:
        raise invalid(f"recipe must be false here: {reason}", "recipe")
    return found


async def facts_before(service: Service, request: GenerationRequest) -> Facts | None:
    """Return the facts about the engine on which an answer's bits depend, read before a request
    runs; None unless the request asks for a recipe.

    Raises:
        ApiError: 501: this engine or its settings allow no recipes.
    """
    if not request.recipe:
        return None
    facts_of = engine_method(service.bridge.llm, "facts")
    try:
        facts: Facts = await service.bridge.questions.finish(facts_of())
    except UnsupportedError as error:
        raise ApiError(501, str(error), code="not_implemented") from None
    return facts


async def recipe_for(
    service: Service,
    request: GenerationRequest,
    facts: Facts,
    output: RequestOutput,
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Return the recipe of an answer, for the field "recipe".

    Args:
        service: the server's state.
        request: the parsed body.
        facts: the result of `facts_before`.
        output: the answer, finished.
        sampling: the parameters of the answer, of `with_recipe`.

    Raises:
        ApiError: 409: weights have changed since the facts were read, or the answer has not come to
            its own end.
    """
    llm, questions = service.bridge.llm, service.bridge.questions
    if await facts_before(service, request) != facts:
        raise ApiError(409, "weights must stay for a recipe, got others while the request ran")
    template = "\n".join(service.template.sources)
    told = replace(facts, template=hashlib.sha256(template.encode()).hexdigest())
    adapter = service.adapter_of(request.model)
    try:
        fingerprint = ""
        if adapter:
            fingerprint = await questions.finish(engine_method(llm, "fingerprint_of")(adapter))
        return recipe_of(told, output, sampling, fingerprint)
    except RequestError as error:
        raise ApiError(409, str(error)) from None
