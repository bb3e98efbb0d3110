"""/v1/embeddings over the real engine: OpenAI's client, both encodings, what is refused."""

from __future__ import annotations

import base64
import math
import threading

import httpx
import numpy as np
import openai
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.purpose import Purpose
from tilewise.server.embeddings import embeddings_router
from tilewise.server.limits import Queue
from tilewise.server.routes import admin_router

TEXTS = ["Once upon a time", "The dog was happy. " * 20]


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", device="cpu", num_blocks=256, max_num_seqs=8)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop, routers=lambda s: [embeddings_router(s)]) as server:
        yield server


def ask(running, **body):
    return httpx.post(f"{running.url}/v1/embeddings", json=body, timeout=60)


def cosine(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_openais_client_gets_the_engines_vectors(llm, running, pooling):
    offline = llm.embed(TEXTS, pooling=pooling)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(  # it asks for base64 and decodes it
            model="story", input=TEXTS, extra_body={"pooling": pooling}
        )
    assert [one.index for one in answer.data] == [0, 1]
    assert answer.pooling == pooling
    assert answer.normalized
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in offline)
    for one, output in zip(answer.data, offline, strict=True):
        assert len(one.embedding) == 256
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-5)
        assert cosine(one.embedding, output.embedding) > 1 - 1e-6


def test_a_request_without_a_pooling_gets_the_models_own(llm):
    with serving(
        AsyncLLM(llm),
        loop=llm.loop,
        routers=lambda s: [embeddings_router(s)],
        purpose=Purpose(pooling="last"),
    ) as server:
        own, mean = (ask(server, input="a cat", **m).json() for m in ({}, {"pooling": "mean"}))
    assert (own["pooling"], mean["pooling"]) == ("last", "mean")
    [last] = llm.embed("a cat", pooling="last")
    assert cosine(own["data"][0]["embedding"], last.embedding) > 1 - 1e-6
    assert cosine(mean["data"][0]["embedding"], last.embedding) < 1 - 1e-6


def test_both_encodings_hold_the_same_numbers(llm, running):
    ids = llm.tokenizer.encode(TEXTS[0])
    asked = {"input": [ids, ids[:3]], "normalize": False}
    plain = ask(running, **asked, encoding_format="float").json()
    packed = ask(running, **asked, encoding_format="base64").json()
    assert not plain["normalized"]
    for one, other in zip(plain["data"], packed["data"], strict=True):
        numbers = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert numbers.tolist() == one["embedding"]
    [mean] = llm.embed({"prompt_token_ids": ids})
    assert plain["data"][0]["embedding"] == np.float32(mean.embedding).tolist()
    cut = ask(running, input=ids, truncate_prompt_tokens=3, normalize=False).json()
    [tail] = llm.embed({"prompt_token_ids": ids[-3:]})
    assert cut["data"][0]["embedding"] == np.float32(tail.embedding).tolist()
    assert cut["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"dimensions": 64}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": ["a", 3]}, "input[1]"),
        ({"input": ""}, None),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "sum"}, "pooling"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"max_tokens": 3}, "max_tokens"),
    ],
)
def test_what_is_not_served_is_named(running, more, param):
    answer = ask(running, **{"input": "a", **more})
    if more == {"input": ""}:  # a beginning is put before it: one token
        assert answer.status_code == 200
        return
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_its_own_dimensions_may_be_asked_for(running):
    assert ask(running, input="a", dimensions=256).status_code == 200


def test_prompts_count_in_queue_usage_and_metrics(running):
    before = httpx.get(f"{running.url}/v1/usage").json()["data"][0]["prompt_tokens"]
    used = ask(running, input=TEXTS).json()["usage"]["prompt_tokens"]
    after = httpx.get(f"{running.url}/v1/usage").json()["data"][0]["prompt_tokens"]
    assert after - before == used
    assert running.bridge.queue.num_live == running.bridge.queue.num_waiting == 0
    late = ask(running, input=TEXTS[1], timeout=1e-9)
    assert late.status_code == 504


def test_a_full_queue_refuses_and_an_engine_without_states_says_so():
    with serving(queue=Queue(max_tokens=2), routers=lambda s: [embeddings_router(s)]) as running:
        assert isinstance(running.engine, FakeEngine)
        assert ask(running, input="a").status_code == 501


@pytest.mark.parametrize("path", ["embeddings", "completions"])
def test_an_engine_whose_own_queue_is_full_asks_to_come_again(path):
    llm = LLM("story", device="cpu", num_blocks=64, max_waiting_requests=1)
    field = "input" if path == "embeddings" else "prompt"
    with serving(AsyncLLM(llm), loop=llm.loop, routers=lambda s: [embeddings_router(s)]) as running:
        llm.loop.pause()
        try:
            url, body = f"{running.url}/v1/{path}", {field: [[1, 2], [3, 4], [5, 6]]}
            answer = httpx.post(url, json=body, timeout=60)
        finally:
            llm.loop.resume()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
        assert httpx.post(url, json={field: [[1, 2]]}, timeout=60).status_code == 200
    llm.close()


def test_an_embedding_that_an_administrator_ends_is_no_fault_of_the_server(llm):
    found = []
    with serving(
        AsyncLLM(llm), loop=llm.loop, routers=lambda s: [embeddings_router(s), admin_router(s)]
    ) as running:
        llm.loop.pause()
        try:
            thread = threading.Thread(target=lambda: found.append(ask(running, input="x")))
            thread.start()
            wait_for(lambda: llm.loop.num_live)
            told = httpx.post(f"{running.url}/abort", json={"all": True}, timeout=60)
            assert len(told.json()["aborted"]) == 1
            thread.join(60)
        finally:
            llm.loop.resume()
    assert found[0].status_code == 400
    assert "aborted" in found[0].json()["error"]["message"]
