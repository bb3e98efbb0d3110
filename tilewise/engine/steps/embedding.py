"""Embeddings as callers get them: a prompt's pooled hidden states. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.engine.outputs import RequestOutput
from tilewise.engine.request import SamplingParams
from tilewise.errors import RequestError

__all__ = ["EMBEDDING_PARAMS", "POOLINGS", "EmbeddingOutput", "embedding_of"]

POOLINGS = ("mean", "last", "cls", "max", "weightedmean")
# A request ends with its first token, so an embedding draws one, which is not read.
EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt as one vector.

    Attributes:
        prompt: the text, None when token ids were given.
        embedding: hidden_size floats, or as many as the layers behind the pooling give.
        pooling: the function of the prompt's hidden states that gave the vector, one of POOLINGS.
        num_cached_tokens: prompt tokens that the prefix cache had; 0 but for "last".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: tuple[float, ...]
    pooling: str
    num_cached_tokens: int = 0


def embedding_of(output: RequestOutput, pooling: str) -> EmbeddingOutput:
    """Return the embedding that a finished request has.

    Raises:
        TimeoutError: its deadline has passed.
        RequestError: the request was aborted.
        RuntimeError: the request ended before its prompt was computed, for another reason.
    """
    if output.prompt_state is None:
        reason = output.outputs[0].finish_reason
        if reason == "deadline":
            raise TimeoutError("the deadline has passed before the prompt was computed")
        if reason == "abort":
            raise RequestError("the request was aborted before its prompt was computed")
        raise RuntimeError(f"the request ended before its prompt was computed: {reason}")
    return EmbeddingOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        output.prompt_state,
        pooling,
        output.num_cached_tokens,
    )
