"""The state that all routes share: how a body is read, and how its prompts become ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from tilewise.engine.purpose import Purpose
from tilewise.errors import RequestError
from tilewise.server.bodies import MOST_ENTRIES, SHORT, Bodies, read_body, refuse_crowded
from tilewise.server.bridge import Bridge
from tilewise.server.chat import ChatTemplate
from tilewise.server.chat_format import ChatFormat
from tilewise.server.errors import ApiError, invalid
from tilewise.server.fairness import Pace
from tilewise.server.job import Prompt
from tilewise.server.keys import KeyRing
from tilewise.server.protocol import parse

__all__ = ["Service"]

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """The state of one server that all routes share.

    Attributes:
        bridge: the bridge to the engine.
        names: the model's names that clients may ask for; answers contain the first.
        adapters: the places that adapters came from, by the names that clients may ask for.
        template: the chat template.
        keys: the API keys that are accepted, by hash.
        defaults: default values of request fields, from the model's generation_config.json.
        purpose: the tasks of the model, and how its vectors are made.
        form: the formats in which the model writes calls of tools and reasoning.
        body_timeout_s: seconds within which a body must arrive.
        changes_weights: True if administrators may change the model's weights.
        shows_text: True if administrators may read the tokens of other keys' requests.
        is_for_this_machine, allowed_origins: see `Front`.
        started: the time of the start, in seconds of time.time.
        bodies: the bound on the bytes of all bodies in memory.
    """

    bridge: Bridge
    names: Sequence[str]
    template: ChatTemplate
    adapters: dict[str, str] = field(default_factory=dict)
    keys: KeyRing = field(default_factory=lambda: KeyRing({}))
    defaults: dict[str, Any] = field(default_factory=dict)
    purpose: Purpose = field(default_factory=Purpose)
    form: ChatFormat = field(default_factory=ChatFormat)
    body_timeout_s: float = 30.0
    changes_weights: bool = False
    shows_text: bool = False
    is_for_this_machine: bool = False
    allowed_origins: frozenset[str] = frozenset()
    started: float = field(default_factory=time.time)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.bridge.limits.max_bodies_bytes)

    async def read(self, request: Request, kind: type[M], make: Callable[[M], T]) -> T:
        """Read, check and parse the body of a request; return `make` of the parsed body.

        A long body is parsed, and `make` called, on a thread.

        Args:
            request: the request, whose body has not been read.
            kind: the model of the body's fields.
            make: a function of the parsed body.

        Raises:
            ApiError: the body is too long, late or malformed, names another model, or `make`
                raises.
        """
        limits = self.bridge.limits
        ignored = request.scope["state"].setdefault("ignored", list[str]())
        body = await read_body(request, self.bodies, limits.max_body_bytes, self.body_timeout_s)

        def made() -> T:
            if len(body) > SHORT:
                # The prompt is token ids: a batch of prompts, or a prompt to be truncated.
                refuse_crowded(body, max(MOST_ENTRIES, 2 * self.bridge.max_model_len))
            parsed = parse(kind, body, ignored)
            limits.check_lists(parsed)
            self.check_model(getattr(parsed, "model", None))
            return make(parsed)

        return made() if len(body) <= SHORT else await self.bridge.in_thread(made)

    def check_model(self, model: str | None) -> None:
        """Refuse a request for a model that this server does not have; None is the server's model.

        Raises:
            ApiError: 404, `model` is no name of the model or of an adapter.
        """
        if model is not None and model not in self.names and model not in self.adapters:
            names = ", ".join((*self.names, *self.adapters))
            raise ApiError(
                404,
                f"model must be one of {names}, got {model[:80]}",
                param="model",
                code="model_not_found",
            )

    def adapter_of(self, model: str | None) -> str:
        """Return `model` if it is the name of an adapter, else "", for no adapter."""
        return model if model in self.adapters and model is not None else ""

    def check_task(self, task: str) -> None:
        """Refuse a request for a task that the model is not made for, see `Purpose.check`.

        Args:
            task: one of "generate", "embed", "score" and "classify".

        Raises:
            ApiError: 400, code "unsupported_task".
        """
        try:
            self.purpose.check(task)
        except RequestError as error:
            raise invalid(str(error), "model", code="unsupported_task") from None

    async def prompt(
        self,
        given: str | list[int],
        truncate: int | None,
        adds_special_tokens: bool = True,
        *,
        is_counted: bool = False,
        max_tokens: int | None = None,
    ) -> Prompt:
        """Return a prompt with its token ids, cut to its last `truncate` tokens unless that is
        None.

        A `truncate` of -1 keeps as many tokens as the server accepts and as leave room for
        `max_tokens` in the context. A prompt that is only counted or truncated may exceed the limit
        of `RequestLimits`. A prompt that was cut has no text.

        Args:
            given: the text, or the token ids.
            truncate: the number of tokens to keep; None keeps all.
            adds_special_tokens: True adds the tokenizer's special tokens to a text.
            is_counted: True if the prompt is only to be counted.
            max_tokens: number of tokens of the answer that `truncate` -1 leaves room for.

        Raises:
            ApiError: 400, the text has characters without tokens, or is far too long.
        """
        if isinstance(given, str):
            most = None
            if not is_counted and truncate is None:
                most = self.bridge.limits.longest_prompt(self.bridge.max_prompt_len)
            ids = await self.bridge.encode(
                given, adds_special_tokens=adds_special_tokens, most=most
            )
            text: str | None = given
        else:
            ids, text = given, None
        if truncate == -1:
            truncate = max(1, self.bridge.max_prompt_len + 1 - (max_tokens or 1))
            truncate = min(truncate, self.bridge.limits.max_prompt_tokens or truncate)
        if truncate is not None and len(ids) > truncate:
            ids, text = ids[-truncate:], None
        return Prompt(text, ids)

    async def text_prompts(
        self,
        given: Sequence[str | list[int]],
        truncate: int | None,
        adds_special_tokens: bool,
        prompt_name: str | None = None,
    ) -> list[Prompt]:
        """Return the prompts of texts to embed or classify, with their token ids.

        Of a text that is truncated the beginning is kept; of token ids, of a text without special
        tokens, and for a model that is made to generate, the end is kept, as by `prompt`.

        Args:
            given: the texts or token ids.
            truncate: the number of tokens to keep; -1 for as many as are accepted, None for all.
            adds_special_tokens: True adds the tokenizer's special tokens to texts.
            prompt_name: the name of the instruction that is put before each text, see
                `Purpose.with_prompt`; None for the default.

        Raises:
            ApiError: 400, there is no such instruction, or as of `prompt`.
        """
        try:
            given = [
                self.purpose.with_prompt(one, prompt_name) if isinstance(one, str) else one
                for one in given
            ]
        except RequestError as error:
            raise invalid(str(error), "prompt_name") from None
        if truncate is None or not adds_special_tokens or "score" not in self.purpose.tasks:
            return await self.prompts(given, truncate, adds_special_tokens)
        kept = self.cut_at(truncate)
        pace, found = Pace(), list[Prompt]()
        for one in given:
            if isinstance(one, str):
                found.append(Prompt(None, await self.bridge.encode(one, kept=kept)))
            else:
                found.append(await self.prompt(one, truncate))
            await pace.rest()
        return found

    def cut_at(self, truncate: int) -> int:
        """Return the number of tokens to which `truncate` cuts a prompt: itself, or for -1 as many
        as the server accepts."""
        longest = self.bridge.limits.longest_prompt(self.bridge.max_prompt_len)
        return longest if truncate == -1 else truncate

    async def prompts(
        self,
        given: Sequence[str | list[int]],
        truncate: int | None,
        adds_special_tokens: bool,
        max_tokens: int | None = None,
    ) -> list[Prompt]:
        """Return several prompts with their token ids, in order, each as by `prompt`; other tasks
        of the event loop run between two of them."""
        pace, found = Pace(), list[Prompt]()
        for one in given:
            found.append(
                await self.prompt(one, truncate, adds_special_tokens, max_tokens=max_tokens)
            )
            await pace.rest()
        return found
