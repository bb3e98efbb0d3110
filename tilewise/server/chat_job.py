"""A chat as a job: its prompt from the template, its tools, its parsers and its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tilewise.engine.outputs import RequestOutput
from tilewise.server.answers import DONE, tokens_within, usage_of
from tilewise.server.call_grammar import (
    calls_alone,
    harmony_calls,
    harmony_lead,
    reasoning_lead,
    text_with_calls,
    tool_at_fault,
)
from tilewise.server.calls.parser import CallParser
from tilewise.server.calls.parts import CallsOnly, Parser, PlainParser
from tilewise.server.calls.rules import Tool, Unwritable
from tilewise.server.calls.table import FORMATS, call_format
from tilewise.server.chat import strict_tools, tool_names
from tilewise.server.chat_answer import ChatAnswer
from tilewise.server.errors import ApiError, invalid, unserved
from tilewise.server.harmony import ANSWER, MESSAGE, HarmonyParser, prompt_end
from tilewise.server.job import DISCARD, Job, Prompt, Sink, sink_of
from tilewise.server.protocol import (
    ChatRequest,
    refuse_stream_options,
    refuse_unknown,
    sampling_of,
    shown,
    tokens_asked,
)
from tilewise.server.reasoning import ThinkParser, is_ended_in, is_open_in, reasoning_end
from tilewise.server.recipes import facts_before, recipe_for, with_recipe
from tilewise.server.reply import Reply
from tilewise.server.service import Service
from tilewise.server.structured import make_structured, structured_of

__all__ = ["ChatJob"]


class ChatJob:
    """Serve one chat request: make its prompt, sampling parameters, parsers and answer.

    The constructor refuses all that can be refused without rendering the prompt.

    Args:
        service: the server's state.
        request: the parsed body.

    Raises:
        ApiError: 400, a field is wrong or not served.
    """

    def __init__(self, service: Service, request: ChatRequest) -> None:
        self._service = service
        self._bridge = service.bridge
        service.check_task("generate")
        self._bridge.limits.check(request)
        refuse_stream_options(request)
        self._logprobs = _logprobs(request)
        max_tokens = tokens_asked(request)
        self.request = request
        # The constraint on an answer with calls, for a prompt that ends within reasoning and
        # otherwise.
        self._has_calls: Callable[[bool], Any] | None = None
        self._has_grammar_of_tools = False
        self._names: Collection[str] = ()  # the names of the tools that may be called
        self._asked_tools = request.tools
        self._inner, structured = self._tools(request)
        if request.tool_choice == "none":  # the template then does not show the tools to the model
            self.request = request.model_copy(update={"tools": None})
        if structured is None and request.tool_choice in (None, "auto", "none"):
            structured = structured_of(request)
        if structured is not None:
            self._has_calls = None
        elif self._has_calls is not None:
            structured = self._has_calls(False)
            self._has_grammar_of_tools = True
        self.sampling = sampling_of(
            request,
            defaults=service.defaults,
            max_tokens=max_tokens,
            logprobs=self._logprobs,
            structured=structured,
            **self._shown_special(request),
        )
        self.sampling = with_recipe(request, self.sampling, 1)

    def reply(self) -> Reply:
        """Return the response object, a `Reply`; it begins to run when the server calls it."""
        request = self.request
        if request.stream:
            return Reply(self._bridge, "chatcmpl", request.request_id, stream=self._stream)
        return Reply(self._bridge, "chatcmpl", request.request_id, whole=self._whole)

    async def prompt(self, *, is_counted: bool = False) -> tuple[str, Prompt]:
        """Return the text that the chat template renders, and the prompt for the engine.

        `sampling` is suited to the end of the text. With `is_counted` the prompt is only to be
        counted: it may be longer than the context.
        """
        request = self.request
        text = await self._bridge.in_thread(lambda: self._service.template.render(request))
        self._suit_sampling(text)
        adds = bool(request.add_special_tokens)  # the template writes the special tokens itself
        truncate = request.truncate_prompt_tokens
        most = tokens_asked(request)
        return text, await self._service.prompt(
            text, truncate, adds, is_counted=is_counted, max_tokens=most
        )

    def _suit_sampling(self, text: str) -> None:
        """Replace `sampling` so that constraints and stop strings apply to the answer after its
        reasoning.

        Args:
            text: the rendered prompt; its end shows whether the answer begins within reasoning.
        """
        form = self._service.form
        if not self._reads_marks or self._is_content(text):
            return
        is_open, changed = self._is_open(text), dict[str, Any]()
        structured = getattr(self.sampling, "structured", None)
        special_id = self._special_id
        if self._has_calls is not None:
            if is_open:
                changed["structured"] = self._has_calls(True)
        elif structured is not None and not self._is_ended(text):
            if form.reasoning is None:
                lead = harmony_lead(special_id, is_open=is_open)
            else:
                lead = reasoning_lead(special_id, form.reasoning, is_open=is_open)
            changed["structured"] = replace(structured, lead=lead)
        if self.sampling.stop_strings:
            opening, closing = "", ANSWER
            if form.reasoning is not None:
                opening, closing = form.reasoning.begin, form.reasoning.end
            changed["reasoning"] = ("" if is_open else opening, closing)
        if changed:
            self.sampling = replace(self.sampling, **changed)

    def new_parser(self, text: str) -> Callable[[], Parser]:
        """Return a function of no arguments that makes a parser, called once for each choice of an
        answer to the rendered prompt `text`."""
        form = self._service.form
        if form.is_harmony:
            names, begun = self._names, prompt_end(text)
            return lambda: HarmonyParser(names, begun)
        reasoning = form.reasoning
        if reasoning is None or self._is_content(text):
            return self._inner
        is_open = self._is_open(text)
        return lambda: ThinkParser(reasoning, self._inner(), is_open)

    def _is_open(self, text: str) -> bool:
        """Return whether the rendered prompt `text` ends within reasoning, so that the answer
        begins with more of it."""
        form = self._service.form
        if form.is_harmony:
            return HarmonyParser(begun=prompt_end(text)).kind == "reasoning"
        if form.reasoning is None:
            return False
        if self.request.continue_final_message:
            content = str(self.request.messages[-1].get("content"))
            return content.rfind(form.reasoning.begin) > content.rfind(form.reasoning.end)
        return is_open_in(form.reasoning, text)

    def _is_content(self, text: str) -> bool:
        """Return whether the rendered prompt `text` ends within the content of an answer, so that
        the model continues this content and writes no reasoning."""
        if self._service.form.is_harmony:
            return HarmonyParser(begun=prompt_end(text)).kind == "content"
        if self.request.continue_final_message:
            return not self._is_open(text)
        return False

    def _is_ended(self, text: str) -> bool:
        """Return whether the rendered prompt `text` ends with the mark that ends the reasoning;
        False for a model without such marks."""
        form = self._service.form.reasoning
        return form is not None and is_ended_in(form, text)

    @property
    def _reads_marks(self) -> bool:
        return self._service.form.reasoning is not None or self._service.form.is_harmony

    def _special_id(self, mark: str) -> int | None:
        tokenizer = self._bridge.llm.tokenizer
        return None if tokenizer is None else tokenizer.special_id(mark)

    def reasoning_tokens(self, text: str) -> Callable[[RequestOutput], int] | None:
        """Return a function that counts the reasoning tokens in all choices of an ended output.

        Args:
            text: the rendered prompt.

        Returns:
            The function; None for a model without reasoning or without a tokenizer.
        """
        tokenizer = self._bridge.llm.tokenizer
        if not self._reads_marks or tokenizer is None:
            return None
        is_open, is_content = self._is_open(text), self._is_content(text)
        shows_special = not self.sampling.skip_special_tokens
        begun = prompt_end(text)

        form = self._service.form.reasoning

        def spans(answer: str) -> list[tuple[int, int]]:
            if form is not None:
                return [] if is_content else [(0, reasoning_end(form, answer, is_open))]
            parser = HarmonyParser(begun=begun)
            parser.push(answer)
            parser.finish()
            return parser.thoughts

        def count(output: RequestOutput) -> int:
            return sum(
                tokens_within(end, c.token_ids, tokenizer, shows_special)
                - tokens_within(first, c.token_ids, tokenizer, shows_special)
                for c in output.outputs
                for first, end in spans(c.text)
            )

        return count

    async def outputs(
        self, job: Job, prompt: Prompt, sink: Sink | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs for a chat, each with all text so far, but those that `sink`
        takes.

        Args:
            job: the HTTP request.
            prompt: the prompt for the engine, as the method `prompt` returns it.
            sink: the receiver of streamed outputs; None yields all.

        Raises:
            ApiError: the reason why the request was refused or ended; 504 if its deadline passed
                before the first token.
        """
        request = self.request
        try:
            async with contextlib.aclosing(
                self._bridge.run(
                    job,
                    [prompt],
                    self.sampling,
                    user=request.user or request.safety_identifier or "",
                    cache_salt=request.cache_salt,
                    adapter=self._service.adapter_of(request.model),
                    priority=request.priority or 0,
                    timeout=request.timeout,
                    most=request.n or 1,
                    sink=sink,
                )
            ) as outputs:
                async for _, output in outputs:
                    _refuse_if_late(output)
                    yield output
        except ApiError as error:
            raise self._of_tool(error) from None

    def _of_tool(self, error: ApiError) -> ApiError:
        """Return an error that names the tool, if the grammar's compiler refused a tool's schema
        with `error`; otherwise `error` itself."""
        structured = getattr(self.sampling, "structured", None)
        if not self._has_grammar_of_tools or error.status != 400 or structured is None:
            return error
        found = tool_at_fault(structured.grammar or "", error.message)
        if found is None:
            return error
        place, reason = self._place_of(found[0]), found[1]
        param = f"tools[{place}].function.parameters"
        return invalid(
            f"{param} must be a schema that a call can follow, got an error: {reason}", param
        )

    async def _prepare(self, job: Job) -> tuple[Prompt, ChatAnswer]:
        request = self.request
        text, prompt = await self.prompt()
        echo = ""
        if request.echo:
            last = request.messages[-1]
            if last.get("role") == "assistant" and isinstance(last.get("content"), str):
                echo = last["content"]
        answer = ChatAnswer(
            job.job_id,
            self._service.names[0] if request.model is None else request.model,
            self._bridge.llm.tokenizer,
            self.new_parser(text),
            logprobs=self._logprobs,
            echo=echo,
            tells_ids=bool(request.return_token_ids),
            tells_prompt_logprobs=request.prompt_logprobs is not None,
            tells_reasoning=request.include_reasoning,
            most_calls=1 if request.parallel_tool_calls is False else None,
            reasoning_tokens=self.reasoning_tokens(text),
        )
        return prompt, answer

    async def _whole(self, job: Job) -> bytes:
        prompt, answer = await self._prepare(job)
        facts = await facts_before(self._service, self.request)
        async with contextlib.aclosing(self.outputs(job, prompt, DISCARD)) as outputs:
            async for _ in outputs:
                pass
        request = self.request
        if facts is not None:
            output = job.outputs[0]
            recipe = await recipe_for(self._service, request, facts, output, self.sampling)
            return await asyncio.to_thread(answer.whole, output, recipe)
        if request.logprobs or request.prompt_logprobs is not None or request.return_token_ids:
            return await asyncio.to_thread(answer.whole, job.outputs[0])
        return answer.whole(job.outputs[0])

    async def _stream(self, job: Job) -> AsyncGenerator[bytes, None]:
        prompt, answer = await self._prepare(job)
        options = self.request.stream_options
        is_told = options is not None and options.continuous_usage_stats

        def events(_: int, output: RequestOutput) -> bytes:
            _refuse_if_late(output)
            return answer.events(output, usage_of([output]) if is_told else None)

        sink = sink_of(job, events)
        async with contextlib.aclosing(self.outputs(job, prompt, sink)) as outputs:
            async for output in outputs:
                chunk = events(0, output)
                if chunk:
                    yield chunk
        if options is not None and options.include_usage:
            yield answer.last(job.outputs[0])
        yield DONE

    def _tools(self, request: ChatRequest) -> tuple[Callable[[], Parser], Any]:
        """Check a request's tools and tool_choice.

        The names of the tools that may be called, and the maker of a constraint that depends on the
        prompt's end, are set in this object.

        Returns:
            A function that makes a parser of tool calls, and the constraint that the answer must
            obey; None where it is free, or where the constraint depends on the prompt's end.

        Raises:
            ApiError: 400, a tool or the choice is wrong, or the format of calls is not known.
        """
        names = tool_names(request.tools)
        choice, is_one = request.tool_choice, request.parallel_tool_calls is False
        if choice is None:
            choice = "auto" if names else "none"
        if choice == "none":
            return PlainParser, None
        if not names:
            raise _wrong("tools", "be given with tool_choice", request.tools)
        self._names = names
        form = self._service.form
        if choice == "auto":
            if not form.reads_calls:
                known = ", ".join(one.name for one in FORMATS)
                raise unserved(
                    "tools",
                    "the server does not know how this model calls them (--tool-call-parser with "
                    f"one of {known})",
                )
            strict = strict_tools(request.tools)
            if strict:
                self._has_calls = self._strict_calls(names, strict, is_one)
            calls = form.calls
            if calls is None:
                return PlainParser, None
            return (lambda: CallParser(calls.syntax, names)), None
        if choice == "required":
            return self._asked_for(names, is_one=is_one)
        if isinstance(choice, dict) and choice.get("type") == "function":
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else choice.get("name")
            refuse_unknown("tool_choice", choice, ("type", "function", "name"))
            if isinstance(function, dict):
                refuse_unknown("tool_choice.function", function, ("name",))
            if not isinstance(name, str) or name not in names:
                raise _wrong("tool_choice", f"name one of {', '.join(names)}", name)
            self._names = [name]
            return self._asked_for({name: names[name]}, is_one=True)
        raise _wrong("tool_choice", "be none, auto, required or a function", choice)

    def _asked_for(
        self, names: Mapping[str, dict[str, Any]], *, is_one: bool
    ) -> tuple[Callable[[], Parser], Any]:
        """Return the result of `_tools` for an answer that must consist of calls.

        Args:
            names: the schemas of the tools that may be called, by name.
            is_one: True for exactly one call, False for one or more.
        """
        tools = [Tool(name, schema) for name, schema in names.items()]
        if self._service.form.is_harmony:
            return PlainParser, self._asked_for_in_channels(tools)
        calls = self._service.form.calls or call_format("json")
        assert calls is not None
        syntax = calls.syntax
        self._has_grammar_of_tools = True
        constraint = self._constraint(
            "tool_choice",
            lambda: calls_alone(syntax, tools, special_id=self._special_id, is_one=is_one),
        )
        return (lambda: CallsOnly(CallParser(syntax, names))), constraint

    def _constraint(self, param: str, make: Callable[[], str]) -> Any:
        """Return the engine's constraint with the grammar that `make` returns.

        Args:
            param: the field of the request that errors of the grammar name.
            make: a function that returns a grammar of calls.

        Raises:
            ApiError: 400, the schema of a tool cannot be followed in the model's format.
        """
        try:
            grammar = make()
        except RecursionError:
            raise invalid("tools must have schemas nested less deep", "tools") from None
        except Unwritable as error:
            place = self._place_of(error.place)
            raise invalid(
                f"tools[{place}].function.parameters must be a schema that a call in the format "
                f"{self._service.form.names[0]} can follow, got one that {error.reason}",
                f"tools[{place}].function.parameters",
            ) from None
        return make_structured(param, {"grammar": grammar})

    def _place_of(self, place: int) -> int:
        """Return the index in the request's `tools` of the tool with the index `place` in the
        grammar, which may have fewer tools."""
        names = list(self._names)
        tools = self._asked_tools or []
        return next(
            (i for i, tool in enumerate(tools) if tool["function"]["name"] == names[place]), place
        )

    def _strict_calls(
        self, names: Mapping[str, dict[str, Any]], strict: Collection[str], is_one: bool
    ) -> Callable[[bool], Any] | None:
        """Return a function that makes the constraint on an answer in which strict tools may be
        called; None without a tokenizer.

        The function's argument is True if the prompt ends within reasoning.

        Args:
            names: the schemas of all tools, by name.
            strict: the names of the tools whose calls must follow their schema.
            is_one: True if the answer ends after its first call.
        """
        form, special_id = self._service.form, self._special_id
        if self._bridge.llm.tokenizer is None:
            return None  # the engine has no tokenizer, and so no text
        tools = [Tool(name, names[name] if name in strict else None) for name in names]

        def grammar(is_open: bool) -> str:
            if form.calls is None:
                return harmony_calls(
                    tools, special_id=special_id, is_open=is_open, is_asked_for=False
                )
            return text_with_calls(
                form.calls.syntax,
                tools,
                special_id=special_id,
                reasoning=form.reasoning,
                is_open=is_open,
                is_one=is_one,
            )

        return lambda is_open: self._constraint("tools", lambda: grammar(is_open))

    def _asked_for_in_channels(self, tools: Sequence[Tool]) -> Any:
        """Prepare the constraint on an answer in channels that must end with a call of one of these
        tools; return None.

        The constraint depends on the prompt's end, so `_has_calls` is set to a function that makes
        it.
        """

        def constraint(is_open: bool) -> Any:
            return make_structured(
                "tool_choice",
                {
                    "grammar": harmony_calls(
                        tools, special_id=self._special_id, is_open=is_open, is_asked_for=True
                    )
                },
            )

        self._has_calls = constraint
        return None

    def _shown_special(self, request: ChatRequest) -> dict[str, Any]:
        """Return {"skip_special_tokens": False} if marks of the model's calls or reasoning are
        special tokens, which the parsers must see in the text; otherwise {}."""
        form, marks = self._service.form, list[str]()
        if form.is_harmony:
            marks = [MESSAGE]
        elif form.reasoning is not None:
            marks = [form.reasoning.begin, form.reasoning.end]
        if request.tools and request.tool_choice != "none" and request.skip_special_tokens is None:
            marks += [] if form.calls is None else form.calls.syntax.marks
        has_marks = any(self._special_id(mark) is not None for mark in marks)
        return {"skip_special_tokens": False} if has_marks else {}


def _refuse_if_late(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "deadline" and not completion.token_ids:
            raise ApiError(504, "the deadline has passed before the first token")


def _logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise _wrong("top_logprobs", "stand with logprobs: true", request.top_logprobs)
        return None
    return request.top_logprobs or 0


def _wrong(param: str, rule: str, value: object) -> ApiError:
    return invalid(f"{param} must {rule}, got {shown(value)}", param)
