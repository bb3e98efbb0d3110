"""Clients that others wrote, unmodified, against a running server.

openai and anthropic are in the everyday set; litellm, langchain-openai and instructor run where
they can be imported, guidellm and lm-eval where their commands are in PATH.
docs/guide/clients-and-tools.md has the versions that were seen working.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import warnings

import openai
import pydantic
import pytest

from tests.server.fake_engine import STORY
from tests.server.serving import serving, wait_for
from tests.server.test_chat_tools import CALLS, TOOLS, says
from tests.server.test_other_forms import routers
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM

ASK = [{"role": "user", "content": "Count."}]
FOUND = [("add", {"a": 1}), ("sub", {"a": [2, "x"]})]


@pytest.fixture(scope="module")
def calling():
    """Thinks, says something, and calls two tools."""
    with serving(says(CALLS), tools="hermes", reasoning="think", routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with serving(says("A short story."), routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def story():
    """The packaged model, which follows a schema."""
    llm = LLM("story", device="cpu", num_blocks=256, max_num_seqs=8)
    with serving(AsyncLLM(llm), loop=llm.loop, routers=routers) as server:
        yield server
    llm.close()


class Animal(pydantic.BaseModel):
    """What answers shall be."""

    model_config = pydantic.ConfigDict(extra="forbid")  # else the model adds what it likes
    kind: str = pydantic.Field(max_length=8)
    legs: int = pydantic.Field(ge=0, le=8)
    is_wild: bool


# OpenAI's


def test_openai_parses_structured_answers_of_both_forms(story):
    with openai.OpenAI(base_url=f"{story.url}/v1", api_key="x", max_retries=0) as client:
        asked = {"model": "story", "messages": ASK, "response_format": Animal, "max_tokens": 400}
        whole = client.chat.completions.parse(**asked, temperature=0)
        animal = whole.choices[0].message.parsed
        assert isinstance(animal, Animal)
        with client.chat.completions.stream(**asked, temperature=0) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == animal
        assert {"content.delta", "content.done", "chunk"} <= kinds
        answer = client.responses.parse(
            model="story", input="Count.", text_format=Animal, max_output_tokens=400, temperature=0
        )
        assert answer.output_parsed == animal


def test_openai_must_call_the_tool_that_it_names(story):
    tools = [openai.pydantic_function_tool(Animal)]
    named = {"type": "function", "function": {"name": "Animal"}}
    with openai.OpenAI(base_url=f"{story.url}/v1", api_key="x", max_retries=0) as client:
        for choice in (named, "required"):
            whole = client.chat.completions.parse(
                model="story", messages=ASK, tools=tools, tool_choice=choice, max_tokens=400,
                temperature=0,
            )  # fmt: skip
            [call] = whole.choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, Animal)
            assert whole.choices[0].finish_reason == "tool_calls"


def test_openai_retries_as_the_server_says(plain):
    waited = []
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="x", max_retries=2) as client:
        client._calculate_retry_timeout = lambda *a, **k: waited.append(a) or 0.01
        plain.bridge.is_draining = True
        try:
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                client.completions.create(model="story", prompt="x")
        finally:
            plain.bridge.is_draining = False
        assert len(waited) == 2
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="story", prompt="x", n=10**6)
        assert len(waited) == 2, "what is wrong is not asked again"


def test_openai_leaves_a_stream_and_its_work_ends(plain):
    async def main():
        async with openai.AsyncOpenAI(base_url=f"{plain.url}/v1", api_key="x") as client:
            stream = await client.chat.completions.create(
                model="story", messages=ASK, stream=True, max_tokens=4000,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in stream:
                break
            await stream.close()

    script, plain.engine.script = plain.engine.script, None
    plain.engine.step_s = 0.005
    try:
        asyncio.run(main())
        wait_for(lambda: not plain.engine.live and not plain.bridge.jobs)
    finally:
        plain.engine.script, plain.engine.step_s = script, 0.0


# Anthropic's

BLOCKS = [
    {"name": name, "description": "Counts.",
     "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for name in ("add", "sub")
]  # fmt: skip


@pytest.fixture(scope="module")
def claude(calling):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=calling.url, api_key="x", max_retries=0) as client:
        yield client


def test_anthropic_streams_what_it_answers_whole(claude):
    asked = {
        "model": "story", "max_tokens": 300, "messages": ASK, "tools": BLOCKS,
        "system": [{"type": "text", "text": "Brief.", "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "auto"}, "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    whole = claude.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert [(b.name, b.input) for b in whole.content[2:]] == FOUND
    with claude.messages.stream(**asked) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert texts == "Here:"
    assert final.usage.output_tokens == whole.usage.output_tokens
    # Anthropic 1.0 adds a field of its own to what it streams.
    final_blocks, whole_blocks = (
        [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        for message in (final, whole)
    )
    assert final_blocks == whole_blocks
    counted = claude.messages.count_tokens(
        model="story", messages=ASK, tools=BLOCKS, system=asked["system"]
    )
    assert counted.input_tokens == whole.usage.input_tokens
    # The next turn: what it said, and what the tools gave.
    turns = [
        *ASK,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            for block in whole.content[2:]
        ]},
    ]  # fmt: skip
    again = claude.messages.create(**{**asked, "messages": turns})
    assert again.usage.input_tokens > whole.usage.input_tokens


def test_anthropics_errors_are_its_own(claude):
    anthropic = pytest.importorskip("anthropic")
    asked = {"model": "story", "max_tokens": 3, "messages": ASK}
    for more, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"extra_body": {"top_k": -9}}, anthropic.BadRequestError),
        ({"extra_body": {"container": "c"}}, anthropic.BadRequestError),
    ):
        with pytest.raises(kind) as error:
            claude.messages.create(**{**asked, **more})
        assert error.value.body["type"] == "error"


def test_anthropics_async_client_and_its_newer_fields(plain):
    anthropic = pytest.importorskip("anthropic")

    async def main():
        async with anthropic.AsyncAnthropic(base_url=plain.url, api_key="x") as client:
            asked = {"model": "story", "max_tokens": 30, "messages": ASK}
            more = {"cache_control": {"type": "ephemeral"}, "output_config": {"effort": "low"}}
            async with client.messages.stream(**asked, extra_body=more) as stream:
                text = "".join([part async for part in stream.text_stream])
            beta = await client.beta.messages.create(**asked)
            models = await client.models.list()
            return text, beta.content[0].text, [model.id for model in models.data]

    text, beta, models = asyncio.run(main())
    assert text == beta == "A short story."
    assert models == ["story", "alias"]


# Libraries over these


def test_litellm_asks_by_every_route(plain, calling):
    litellm = pytest.importorskip("litellm")
    # It warns of its own use of pydantic, in the midst of a stream.
    for kind in (DeprecationWarning, UserWarning):
        warnings.simplefilter("ignore", kind)
    base = {"api_key": "x", "max_tokens": 30}
    chat = {**base, "messages": ASK, "api_base": f"{plain.url}/v1"}
    for model in ("openai/story", "hosted_vllm/story"):
        answer = litellm.completion(model=model, **chat)
        assert answer.choices[0].message.content == "A short story."
    parts = litellm.completion(
        model="openai/story", **chat, stream=True, stream_options={"include_usage": True}
    )
    # The last part has the usage, and as OpenAI's no choice.
    told = [p.choices[0].delta.content or "" for p in parts if p.choices]
    assert "".join(told) == "A short story."
    native = litellm.completion(
        model="anthropic/story", messages=ASK, api_base=plain.url, **base
    )  # fmt: skip
    assert native.choices[0].message.content == "A short story."
    text = litellm.text_completion(
        model="text-completion-openai/story", prompt="x", api_base=f"{plain.url}/v1", **base
    )
    assert text.choices[0].text == "A short story."
    asked = {"model": "openai/story", "messages": ASK, "tools": TOOLS, "max_tokens": 300}
    [choice] = litellm.completion(**asked, api_base=f"{calling.url}/v1", api_key="x").choices
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == FOUND
    assert choice.message.reasoning_content == "Two calls."
    assert choice.finish_reason == "tool_calls"


def test_langchain_streams_batches_and_binds_tools(plain, calling):
    langchain = pytest.importorskip("langchain_openai")
    base = {"model": "story", "api_key": "x", "max_tokens": 300}
    model = langchain.ChatOpenAI(base_url=f"{plain.url}/v1", **base)
    answer = model.invoke("Count.")
    assert answer.content == "A short story."
    assert answer.usage_metadata["output_tokens"] == 5
    assert "".join(part.content for part in model.stream("Count.")) == "A short story."
    assert [one.content for one in model.batch(["a", "b"])] == ["A short story."] * 2
    newer = langchain.ChatOpenAI(base_url=f"{plain.url}/v1", use_responses_api=True, **base)
    assert newer.invoke("Count.").content[0]["text"] == "A short story."
    older = langchain.OpenAI(base_url=f"{plain.url}/v1", **base)
    assert older.invoke("x") == "A short story."
    bound = langchain.ChatOpenAI(base_url=f"{calling.url}/v1", **base).bind_tools(TOOLS)
    whole, added = bound.invoke("Count."), None
    for part in bound.stream("Count."):
        added = part if added is None else added + part
    for one in (whole, added):
        assert [(call["name"], call["args"]) for call in one.tool_calls] == FOUND


def test_langchain_reads_structured_answers(story):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        base_url=f"{story.url}/v1", model="story", api_key="x", max_tokens=400, temperature=0
    )
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Animal, method=method).invoke("Count.")
        assert isinstance(found, Animal), method


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_makes_objects(story, mode):
    instructor = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=f"{story.url}/v1", api_key="x", max_retries=0) as inner:
        client = instructor.from_openai(inner, mode=getattr(instructor.Mode, mode))
        found = client.chat.completions.create(
            response_model=Animal, max_retries=0, model="story", messages=ASK, max_tokens=400,
            temperature=0,
        )  # fmt: skip
        assert isinstance(found, Animal)


# Programs that measure and evaluate


def command(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"needs {name} in PATH")
    return path


def ran(arguments, folder):
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    offline.pop("PYTHONPATH", None)
    done = subprocess.run(
        arguments, cwd=folder, env=offline, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_guidellm_measures_a_closed_loop(story, tmp_path):
    ran(
        [command("guidellm"), "run",
         "--backend", f"kind=openai_http,target={story.url},model=story",
         "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
         "--tokenizer", f"kind=hf_auto,model={STORY}",
         "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
         "--output", "kind=json,path=found.json", "--disable-console-interactive"],
        tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "found.json").read_text())
    [bench] = report["benchmarks"]
    totals = bench["metrics"]["request_totals"]
    assert totals["successful"] == 12
    assert totals["errored"] == 0


ROWS = [
    {"question": "Once upon a time, there was a little", "choices": [" girl", " seventeen"],
     "answer": 0, "text": "Once upon a time, there was a little girl named Lily."},
    {"question": "The cat and the dog liked to", "choices": [" play", " is"], "answer": 0,
     "text": "They played together all day."},
]  # fmt: skip
TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "target_delimiter": "",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric": "acc",
    },
    "gen": {
        "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}", "metric": "exact_match",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 20, "do_sample": False},
    },
    "text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric": "word_perplexity",
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["completions", "chat-completions"])
def test_lm_eval_scores_and_generates(story, tmp_path, kind):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        content = {k: v for k, v in task.items() if k != "metric"}
        higher = task["metric"] != "word_perplexity"
        means = "mean" if higher else "weighted_perplexity"
        content |= {
            "task": f"tw_{name}", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "metric_list": [
                {"metric": task["metric"], "aggregation": means, "higher_is_better": higher}
            ],
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(json.dumps(content))  # YAML holds JSON
    is_chat = kind == "chat-completions"
    path = "chat/completions" if is_chat else "completions"
    options = [
        f"model=story,base_url={story.url}/v1/{path},num_concurrent=2,max_retries=1"
        + ("" if is_chat else f",tokenizer={STORY}")
    ]
    names = ["gen"] if is_chat else list(TASKS)
    ran(
        [command("lm_eval"), "run", "--model", f"local-{kind}", "--model_args", *options,
         "--include_path", ".", "--tasks", ",".join(f"tw_{n}" for n in names),
         "--output_path", "found", *(["--apply_chat_template"] if is_chat else [])],
        tmp_path,
    )  # fmt: skip
    [found] = (tmp_path / "found").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    assert set(results) == {f"tw_{name}" for name in names}
    if not is_chat:
        # The packaged model knows how its stories go on.
        assert results["tw_choice"]["acc,none"] == 1.0
        assert 1 < results["tw_text"]["word_perplexity,none"] < 10
