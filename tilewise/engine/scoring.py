"""Scores of pairs and labels of texts, as callers get them. No torch.

A model that reads both texts of a pair has a logit for it; of a model that embeds, the score is
that of two vectors, mostly their cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewise.engine.purpose import Purpose
from tilewise.engine.steps.embedding import EmbeddingOutput
from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import RequestError

__all__ = [
    "ClassifyOutput",
    "RerankOutput",
    "ScoreOutput",
    "activated",
    "classified",
    "compared",
    "pair_prompt",
    "pairs_of",
    "ranked",
]


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well two texts match.

    Attributes:
        score: the logit after the model's activation; of a model that embeds, the similarity of the
            texts' vectors, mostly their cosine. Higher is a better match.
        num_prompt_tokens: the number of tokens of both texts together.
    """

    score: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RerankOutput:
    """A document with the score of how well it matches a query.

    Attributes:
        index: the document's place in the given list.
        document: the text of the document.
        score: see `ScoreOutput`.
        num_prompt_tokens: the number of tokens of query and document together.
    """

    index: int
    document: str
    score: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ClassifyOutput:
    """A text with the probabilities of the model's labels.

    Attributes:
        label: the name of the most probable label.
        probs: the values of all labels, in the model's order: the logits after its activation.
        num_prompt_tokens: the number of tokens of the text.
    """

    label: str
    probs: tuple[float, ...]
    num_prompt_tokens: int


def pairs_of(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of two texts, of one with each of several, or of two lists entry by entry.

    Raises:
        RequestError: an argument is no text or list of texts, or the lists have different lengths.
    """
    sides = []
    for name, given in (("text_1", text_1), ("text_2", text_2)):
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list | tuple) or not all(isinstance(x, str) for x in texts):
            raise RequestError(f"{name} must be a text or a list of texts, got {given!r:.80}")
        if not texts:
            raise RequestError(f"{name} must hold at least 1 text, got 0")
        sides.append(texts)
    first, second = sides
    if len(first) == 1:
        first = [first[0]] * len(second)
    if len(first) != len(second):
        raise RequestError(
            f"text_1 must be one text or as many as text_2 ({len(second)}), got {len(first)}"
        )
    return list(zip(first, second, strict=True))


def pair_prompt(
    purpose: Purpose, tokenizer: Tokenizer | None, pair: tuple[str, str], most: int | None
) -> dict[str, list[int]]:
    """Return a pair as a prompt of token ids, with their types where not all are 0.

    The model's pair_template joins the texts; without one, the tokenizer does.

    Args:
        purpose: the purpose of the model.
        tokenizer: the tokenizer of the model, or None.
        pair: the two texts, or query and document.
        most: the largest number of tokens, to which the second text is cut; None cuts nothing.

    Raises:
        RequestError: the model has no tokenizer, or all but the second text is longer than `most`.
    """
    if tokenizer is None:
        raise RequestError("pairs must be of a model with tokenizer.json, got one without")
    if purpose.pair_template is None:
        ids, types = tokenizer.encode_pair(*pair, most=most)
    else:
        ids, types = tokenizer.encode_template(purpose.pair_template, *pair, most=most), []
    return {"prompt_token_ids": ids} | ({"token_type_ids": types} if any(types) else {})


def activated(logits: Sequence[float], activation: str) -> tuple[float, ...]:
    """Return a classifier's logits after an activation: "softmax", "sigmoid", else unchanged."""
    if activation == "softmax":
        most = max(logits)
        powers = [math.exp(x - most) for x in logits]
        return tuple(x / sum(powers) for x in powers)
    if activation == "sigmoid":
        return tuple(_sigmoid(x) for x in logits)
    return tuple(logits)


def _sigmoid(x: float) -> float:
    power = math.exp(-abs(x))
    return 1 / (1 + power) if x >= 0 else power / (1 + power)


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of two vectors, 0 if one has no length."""
    lengths = math.hypot(*a) * math.hypot(*b)
    return _dot(a, b) / lengths if lengths else 0.0


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


_SIMILARITIES: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "cosine": _cosine,
    "dot": _dot,
    "euclidean": lambda a, b: -math.dist(a, b),
    "manhattan": lambda a, b: -sum(abs(x - y) for x, y in zip(a, b, strict=True)),
}


def compared(purpose: Purpose, a: EmbeddingOutput, b: EmbeddingOutput) -> ScoreOutput:
    """Return the score of two texts: the similarity of their vectors that the purpose names."""
    num_tokens = len(a.prompt_token_ids) + len(b.prompt_token_ids)
    score = _SIMILARITIES[purpose.similarity](a.embedding, b.embedding)
    return ScoreOutput(score, num_tokens)


def classified(purpose: Purpose, output: EmbeddingOutput) -> ClassifyOutput:
    """Return the most probable label of a text, with the probability of each label."""
    probs = activated(output.embedding, purpose.activation)
    label = purpose.labels[max(range(len(probs)), key=probs.__getitem__)]
    return ClassifyOutput(label, probs, len(output.prompt_token_ids))


def ranked(
    documents: Sequence[str], scores: Sequence[ScoreOutput], top_n: int | None
) -> list[RerankOutput]:
    """Return the documents by descending score, equal ones in the given order; the first
    `top_n`."""
    found = [
        RerankOutput(i, document, one.score, one.num_prompt_tokens)
        for i, (document, one) in enumerate(zip(documents, scores, strict=True))
    ]
    found.sort(key=lambda one: -one.score)
    return found[:top_n]
