"""The server over the real engine and the packaged model: the same answers as LLM.generate."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.server.routes import admin_router


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", device="cpu", num_blocks=512, max_num_seqs=32)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    engine = AsyncLLM(llm)
    with serving(engine, loop=llm.loop, routers=lambda s: [admin_router(s)]) as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


FIELDS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11},
    "top_p": {"seed": 1, "top_p": 0.5},
    "top_k": {"seed": 2, "top_k": 5},
    "min_p": {"seed": 3, "min_p": 0.2},
    "samples": {"seed": 4, "n": 3},
    "stop": {"temperature": 0.0, "stop": ["her", "the"]},
    "stop_ids": {"temperature": 0.0, "stop_token_ids": [14, 15, 16, 17]},
    "ignore_eos": {"temperature": 0.0, "ignore_eos": True},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}
PROMPT = "Once upon a time, there was a little"


@pytest.mark.parametrize("name", FIELDS)
def test_streamed_whole_and_offline_answers_are_equal(llm, running, name):
    fields = {"max_tokens": 24, **FIELDS[name]}
    [offline] = llm.generate(PROMPT, SamplingParams(**fields))
    body = {"prompt": PROMPT, "return_token_ids": True, **fields}
    whole = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).json()
    streamed = {}
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        extra = {k: v for k, v in body.items() if k not in ("prompt", "max_tokens")}
        for chunk in client.completions.create(
            model="story", prompt=PROMPT, max_tokens=24, stream=True, extra_body=extra
        ):
            for choice in chunk.choices:
                old = streamed.setdefault(choice.index, ["", [], None, None])
                old[0] += choice.text
                old[1] += choice.model_extra["token_ids"]
                old[2] = choice.finish_reason
                old[3] = choice.model_extra.get("stop_reason")
    assert len(whole["choices"]) == len(offline.outputs) == len(streamed)
    for sample, choice in zip(offline.outputs, whole["choices"], strict=True):
        assert choice["text"] == sample.text
        assert choice["token_ids"] == sample.token_ids
        assert choice["finish_reason"] == sample.finish_reason
        assert choice["stop_reason"] == sample.stop_reason
        assert streamed[choice["index"]] == [
            sample.text, sample.token_ids, sample.finish_reason, sample.stop_reason,
        ]  # fmt: skip
        if sample.logprobs is not None:
            told = choice["logprobs"]["token_logprobs"]
            best = [entry[t] for entry, t in zip(sample.logprobs, sample.token_ids, strict=True)]
            assert told == best


def test_a_chat_answers_and_its_prefix_is_cached(client):
    messages = [{"role": "user", "content": "Once upon a time there was a dragon. " * 8}]
    first = client.chat.completions.create(model="story", messages=messages, max_tokens=12)
    again = client.chat.completions.create(model="story", messages=messages, max_tokens=12)
    assert first.choices[0].message.content
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens >= 64


def test_the_async_clients_texts_are_those_of_each_alone(llm, running):
    prompts = [f"{PROMPT} {animal}" for animal in ("dog", "cat", "frog", "bird")] * 4
    params = SamplingParams(temperature=0.0, max_tokens=20)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]

    async def one(client, prompt):
        stream = await client.completions.create(
            model="story", prompt=prompt, max_tokens=20, temperature=0.0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x") as client:
            return await asyncio.gather(*[one(client, prompt) for prompt in prompts])

    assert asyncio.run(main()) == expected


def test_what_can_never_fit_is_refused_with_the_numbers(running):
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": [5] * 5000})
    assert answer.status_code == 400
    assert "at most 1,023 tokens" in answer.json()["error"]["message"]
    odd = httpx.post(f"{running.url}/v1/completions", json={"prompt": [99999]})
    assert odd.status_code == 400
    assert "vocab_size" in odd.json()["error"]["message"]


def test_a_client_that_leaves_frees_its_blocks(llm, running):
    scheduler = llm.engine.scheduler
    sock = socket.create_connection((running.host, running.port))
    body = b'{"prompt": "Once", "max_tokens": 900, "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    sock.sendall(head + body)
    sock.recv(100)
    sock.close()
    wait_for(lambda: scheduler.stats().blocks_used == 0)
    made = running.bridge.ledger.of("")["generated_tokens"]
    assert made < 10_000
    wait_for(lambda: not running.bridge.jobs)


def test_many_clients_that_leave_or_stay_leave_no_block_and_no_task(llm, running):
    draw, failures = random.Random(3), []

    def client(i, kind):
        try:
            with httpx.Client(timeout=60) as http:
                body = {
                    "prompt": f"{PROMPT} {i % 7}", "max_tokens": 30, "n": 1 + i % 3,
                    "stream": kind != "whole",
                }  # fmt: skip
                with http.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
                    assert answer.status_code == 200
                    if kind == "leave":
                        for _ in answer.iter_lines():
                            break
                    else:
                        answer.read()
        except Exception as error:
            failures.append(error)

    kinds = [draw.choice(["whole", "stream", "leave"]) for _ in range(60)]
    for start in range(0, 60, 20):
        threads = [
            threading.Thread(target=client, args=(i, kinds[i])) for i in range(start, start + 20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not failures
    wait_for(lambda: llm.engine.scheduler.stats().blocks_used == 0)
    wait_for(lambda: not running.bridge.jobs and not running.tasks())
    assert llm.loop.num_live == 0


def test_a_pause_stops_steps_and_health_stays_good(running):
    assert httpx.post(f"{running.url}/pause").status_code == 200
    found = []
    body = {"prompt": "x", "max_tokens": 2}
    thread = threading.Thread(
        target=lambda: found.append(httpx.post(f"{running.url}/v1/completions", json=body))
    )
    thread.start()
    wait_for(lambda: running.bridge.jobs and running.engine.llm.loop.num_live)
    [job] = running.bridge.jobs
    told = httpx.get(f"{running.url}/v1/explain/{job}").json()
    assert told["id"] == job
    assert told["prompts"][0]["state"] == "waiting"
    time.sleep(0.1)
    assert not found
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert httpx.post(f"{running.url}/resume").status_code == 200
    thread.join(60)
    assert found[0].status_code == 200
    assert httpx.get(f"{running.url}/v1/explain/{job}").status_code == 404
    events, since = [], 0
    while page := (answer := httpx.get(f"{running.url}/v1/trace?since={since}").json())["data"]:
        events, since = [*events, *page], answer["next"]
    numbers = [event["number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [event for event in events if job in event.values()]
    wait_for(lambda: not running.engine.llm.engine.has_unfinished())
    assert httpx.post(f"{running.url}/reset_prefix_cache").json() == {"reset": True}
