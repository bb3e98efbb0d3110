"""Recipes: all that decides an answer's bits, so that anyone can compute it again. No torch.

A recipe is plain JSON. Its `facts` say which weights, files, versions and device there were; its
`class` is the part of them that decides in which order sums are added up: two engines of one class
give the same bits. The answers stand in it whole, with a digest over tokens and log-probabilities.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from tilewise.engine.outputs import CompletionOutput, RequestOutput
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.errors import RequestError, is_integer, is_number, shown

__all__ = [
    "Facts",
    "Verdict",
    "check_recipe",
    "options_of_recipe",
    "pinned",
    "prompt_of",
    "recipe_of",
    "sampling_of",
    "verdict_of",
    "why_no_recipe",
]

FORM = "tilewise recipe 1"
_FIELDS = ("form", "facts", "adapter", "prompt_token_ids", "sampling", "answers", "digest")
_REASONS = ("stop", "length")  # of an answer that has come to its own end
Recipe = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about an engine on which its answers depend, besides the request.

    Attributes:
        weights: a digest of the weights as the engine holds them.
        config: a digest of the model's configuration.
        tokenizer: a digest of the tokenizer's files; "" without any.
        template: a digest of the server's chat template; "" without one. Prompts are ids, so that
            a check needs neither of the two.
        order: the facts that decide the order of sums, by name: versions, kind of device, dtypes,
            sizes.
    """

    weights: str
    config: str
    tokenizer: str
    template: str
    order: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a second computation of an answer.

    Attributes:
        is_equal: True if all tokens, log-probabilities and finish reasons are those of the recipe.
        num_tokens: the number of tokens that were found equal.
        sample: the number of the first sample that differs; -1 where none does.
        position: the place of the first token that differs in it; -1 where only its finish reason
            does.
        recorded, found: the token ids at that place; None where an answer is shorter.
        difference: |log-probability - recorded one| at that place; 0 where tokens differ.
        recorded_reason, found_reason: the finish reasons of the sample, if no token of it differs;
            None where there is no such sample.
    """

    is_equal: bool
    num_tokens: int
    sample: int = -1
    position: int = -1
    recorded: int | None = None
    found: int | None = None
    difference: float = 0.0
    recorded_reason: str | None = None
    found_reason: str | None = None

    def __str__(self) -> str:
        """Return one sentence that says that all is equal, or where and how the answers differ
        first."""
        if self.is_equal:
            return f"equal: all of {self.num_tokens} tokens and log-probabilities, to the bit"
        if self.position < 0:
            return (
                f"different: sample {self.sample}: the recipe has finish_reason "
                f"{shown(self.recorded_reason)}, computed is {shown(self.found_reason)}"
            )
        place = f"sample {self.sample}, token {self.position}"
        if self.recorded != self.found:
            told = ["no token" if t is None else f"token {t}" for t in (self.recorded, self.found)]
            return f"different: {place}: the recipe has {told[0]}, computed is {told[1]}"
        return (
            f"different: {place}: token {self.found} in both, log-probabilities differ by "
            f"{self.difference:g}"
        )


def why_no_recipe(sampling: SamplingParams) -> str | None:
    """Say why an answer cannot be computed again, or return None where it can."""
    if type(sampling) is not SamplingParams:
        return f"the request must sample, got {type(sampling).__name__}"
    if sampling.logits_processors:
        return "logits_processors must be None, as functions are not part of a recipe"
    if sampling.seed is None and not sampling.greedy:
        return "seed must be given, got None"
    if sampling.logprobs is None:
        return "logprobs must be given, got None"
    return None


def recipe_of(
    facts: Facts, output: RequestOutput, sampling: SamplingParams, adapter: str = ""
) -> Recipe:
    """Return the recipe of an answer.

    Args:
        facts: the facts of the answer's engine.
        output: the answer, finished.
        sampling: the parameters that it was asked for with.
        adapter: the fingerprint of its adapter; "" without one.

    Raises:
        RequestError: the answer cannot be computed again, or has not come to its own end.
    """
    reason = why_no_recipe(sampling)
    if reason is not None:
        raise RequestError(f"an answer must be one that can be computed again: {reason}")
    for each in output.outputs:
        if each.finish_reason not in _REASONS:
            raise RequestError(
                f"an answer must have come to its own end for a recipe, got {each.finish_reason}"
            )
    answers = [_answer(each) for each in output.outputs]
    return {
        "form": FORM,
        "facts": {**asdict(facts), "order": dict(facts.order)},
        "adapter": adapter,
        "prompt_token_ids": list(output.prompt_token_ids),
        "sampling": _told(sampling),
        "answers": answers,
        "digest": _digest(answers),
    }


def _answer(each: CompletionOutput) -> dict[str, Any]:
    steps = each.logprobs or []
    own = [step[token] for step, token in zip(steps, each.token_ids, strict=True)]
    return {"finish_reason": each.finish_reason, "token_ids": each.token_ids, "logprobs": own}


def _told(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, by name, of JSON's types."""
    default, told = SamplingParams(), dict[str, Any]()
    for each in fields(sampling):
        value = getattr(sampling, each.name)
        if value == getattr(default, each.name):
            continue
        if isinstance(value, StructuredOutputs):
            value = {k: v for k, v in asdict(value).items() if v is not None}
        elif isinstance(value, Mapping):
            value = {str(k): v for k, v in value.items()}
        elif isinstance(value, tuple | set | frozenset):
            value = list(value)
        told[each.name] = value
    return told


def sampling_of(recipe: Recipe) -> SamplingParams:
    """Return the sampling parameters of a recipe.

    Raises:
        RequestError: a field is unknown or out of its range, or the parameters do not fix the
            answer, see `why_no_recipe`.
    """
    told = dict(recipe["sampling"])
    try:
        if "structured" in told:
            told["structured"] = StructuredOutputs(**told["structured"])
        if "logit_bias" in told:
            told["logit_bias"] = {int(k): v for k, v in told["logit_bias"].items()}
        sampling = SamplingParams(**told)
    except (TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"recipe must have sampling parameters: {error}") from None
    reason = why_no_recipe(sampling)
    if reason is not None:
        raise RequestError(f"recipe must be one that can be computed again: {reason}")
    return sampling


def options_of_recipe(recipe: object) -> dict[str, Any]:
    """Return the keywords of `LLM` with which an engine can compute a recipe's answers to the bit.

    They are dtypes, block_size and max_num_seqs, as far as the recipe has them. Whether weights,
    versions and device agree, `check_recipe` says.

    Raises:
        RequestError: the argument is no recipe.
    """
    facts = recipe.get("facts") if isinstance(recipe, dict) else None
    order = facts.get("order") if isinstance(facts, dict) else None
    sampling = recipe.get("sampling") if isinstance(recipe, dict) else None
    if not isinstance(order, dict) or not isinstance(sampling, dict):
        raise RequestError(f"recipe must have facts with an order, got {shown(recipe)}")
    names = ("dtype", "kv_cache_dtype", "weight_dtype")
    options: dict[str, Any] = {name: order[name] for name in names if name in order}
    size, count = order.get("block_size"), sampling.get("best_of", sampling.get("n", 1))
    if isinstance(size, str) and size.isdecimal():
        options["block_size"] = int(size)
    if is_integer(count) and 1 <= count <= 1024:
        options["max_num_seqs"] = count
    return options


def prompt_of(recipe: Recipe) -> dict[str, list[int]]:
    """Return the prompt of a recipe, as `LLM.generate` takes it."""
    return {"prompt_token_ids": recipe["prompt_token_ids"]}


def check_recipe(recipe: object, facts: Facts) -> Recipe:
    """Return a recipe that an engine of these facts can compute again.

    Raises:
        RequestError: the argument is no recipe, was changed, or is of other weights or another
            class; one sentence says what it must be.
    """
    if not isinstance(recipe, dict) or recipe.get("form") != FORM:
        got = recipe.get("form") if isinstance(recipe, dict) else recipe
        raise RequestError(f"recipe must be an object of form {FORM!r}, got {shown(got)}")
    missing = [name for name in _FIELDS if name not in recipe]
    if missing:
        raise RequestError(f"recipe must have {missing[0]}, got none")
    _check_answers(recipe)
    if _digest(recipe["answers"]) != recipe["digest"]:
        raise RequestError(
            "recipe must have the digest of its own answers, got another: it was changed"
        )
    told = recipe["facts"]
    if not isinstance(told, dict) or not isinstance(told.get("order"), dict):
        raise RequestError(f"recipe must have facts with an order, got {shown(told)}")
    for name, own in facts.order.items():
        if told["order"].get(name) != own:
            raise RequestError(
                f"recipe must be of this engine's class, {name} {own}, got "
                f"{shown(told['order'].get(name))}"
            )
    for name in ("config", "weights"):
        own = getattr(facts, name)
        if told.get(name) != own:
            raise RequestError(
                f"recipe must be of this engine's {name}, {own[:12]}, got "
                f"{shown(str(told.get(name))[:12])}"
            )
    return recipe


def _check_answers(recipe: Recipe) -> None:
    answers, ids = recipe["answers"], recipe["prompt_token_ids"]
    if not isinstance(ids, list) or not ids or not all(map(is_integer, ids)):
        raise RequestError(f"recipe must have prompt_token_ids, got {shown(ids)}")
    if not isinstance(recipe["sampling"], dict) or not isinstance(recipe["adapter"], str):
        raise RequestError("recipe must have sampling parameters and an adapter, got others")
    if not isinstance(answers, list) or not answers:
        raise RequestError(f"recipe must have answers, got {shown(answers)}")
    for answer in answers:
        tokens = answer.get("token_ids") if isinstance(answer, dict) else None
        scores = answer.get("logprobs") if isinstance(answer, dict) else None
        if (
            not isinstance(tokens, list)
            or not isinstance(scores, list)
            or len(tokens) != len(scores)
            or not all(is_integer(t) and 0 <= t < 1 << 31 for t in tokens)
            or not _are_floats(scores)
        ):
            raise RequestError(
                f"recipe must have tokens with their log-probabilities, got {shown(answer)}"
            )
        if answer.get("finish_reason") not in _REASONS:
            raise RequestError(
                f"recipe must have finish_reason 'stop' or 'length', got "
                f"{shown(answer.get('finish_reason'))}"
            )


def _are_floats(scores: list[object]) -> bool:
    """Return whether all of `scores` are numbers that float32 can hold."""
    try:
        struct.pack(f"<{len(scores)}f", *scores)
    except (struct.error, OverflowError):
        return False
    return all(map(is_number, scores))


def verdict_of(recipe: Recipe, output: RequestOutput) -> Verdict:
    """Return the verdict on a recipe: whether a second computation gave as many samples, the same
    tokens, the same bits of log-probabilities and the same finish reasons.

    Args:
        recipe: the recorded request and its answers.
        output: the result of the second computation.
    """
    total, none = 0, dict[str, Any](finish_reason=None, token_ids=[], logprobs=[])
    pairs = zip_longest(recipe["answers"], map(_answer, output.outputs), fillvalue=none)
    for sample, (wanted, own) in enumerate(pairs):
        tokens, scores = own["token_ids"], own["logprobs"]
        for at, (token, score) in enumerate(
            zip(wanted["token_ids"], wanted["logprobs"], strict=True)
        ):
            if at >= len(tokens) or tokens[at] != token:
                other = tokens[at] if at < len(tokens) else None
                return Verdict(False, total, sample, at, token, other)
            if struct.pack("<f", scores[at]) != struct.pack("<f", score):
                gap = abs(scores[at] - score)
                return Verdict(False, total, sample, at, token, token, gap)
            total += 1
        if len(tokens) > len(wanted["token_ids"]):
            at = len(wanted["token_ids"])
            return Verdict(False, total, sample, at, None, tokens[at])
        reasons = wanted["finish_reason"], own["finish_reason"]
        if reasons[0] != reasons[1]:
            return Verdict(
                False, total, sample, recorded_reason=reasons[0], found_reason=reasons[1]
            )
    return Verdict(True, total)


def pinned(sampling: SamplingParams, seed: int) -> SamplingParams:
    """Return sampling parameters with the seed and logprobs that a recipe needs.

    `seed` is used only where a sampling that is not greedy has none. Parameters of another class,
    such as of a beam search, are returned as they are.
    """
    if type(sampling) is not SamplingParams:
        return sampling
    changes: dict[str, Any] = {}
    if sampling.seed is None and not sampling.greedy:
        changes["seed"] = seed
    if sampling.logprobs is None:
        changes["logprobs"] = 0
    return replace(sampling, **changes) if changes else sampling


def _digest(answers: Iterable[Mapping[str, Any]]) -> str:
    """Return the SHA-256 digest of the answers' tokens, log-probabilities (as float32) and reasons,
    in hexadecimal."""
    digest = hashlib.sha256()
    for answer in answers:
        tokens, scores = answer["token_ids"], answer["logprobs"]
        digest.update(json.dumps([answer.get("finish_reason"), len(tokens)]).encode())
        digest.update(struct.pack(f"<{len(tokens)}i", *tokens))
        digest.update(struct.pack(f"<{len(scores)}f", *scores))
    return digest.hexdigest()
