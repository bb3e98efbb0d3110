"""OpenAI's own client, unmodified, against a running server: whole answers, streams, errors."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from tests.server.fake_engine import STORY
from tests.server.serving import serving
from tilewise.engine.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(STORY)


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models_are_listed_by_the_names_that_are_served(client):
    assert [model.id for model in client.models.list()] == ["story", "alias"]
    assert client.models.retrieve("alias").model_extra["max_model_len"] == 1024
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_completion_counts_its_tokens_and_says_why_it_ended(client):
    answer = client.completions.create(model="story", prompt="Once upon a time", max_tokens=5)
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("Once upon a time"))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("cmpl-")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("prompts", ["one", "two"])
def test_a_stream_adds_up_to_the_whole(client, n, prompts):
    prompt = "The dragon" if prompts == "one" else ["The dragon", "A boat"]
    asked = {
        "model": "story", "prompt": prompt, "max_tokens": 12, "n": n, "seed": 7, "logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = client.completions.create(**asked)
    found = {}
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            old = found.setdefault(choice.index, {"text": "", "ids": [], "logprobs": [], "at": []})
            assert "reason" not in old
            old["text"] += choice.text
            old["ids"] += choice.model_extra["token_ids"]
            old["logprobs"] += choice.logprobs.token_logprobs
            old["at"] += choice.logprobs.text_offset
            if choice.finish_reason is not None:
                old["reason"] = choice.finish_reason
    assert usage == whole.usage
    assert len(found) == len(whole.choices) == n * (1 if prompts == "one" else 2)
    for choice in whole.choices:
        old = found[choice.index]
        assert old["text"] == choice.text
        assert old["ids"] == choice.model_extra["token_ids"]
        assert old["logprobs"] == choice.logprobs.token_logprobs
        assert old["reason"] == choice.finish_reason
        assert len(choice.logprobs.tokens) == 12


def test_prompts_may_be_texts_ids_and_lists_of_either(client):
    ids = TOKENIZER.encode("A boat")
    asked = {"model": "story", "max_tokens": 6, "temperature": 0.5}
    texts = [
        [c.text for c in client.completions.create(prompt=prompt, **asked).choices]
        for prompt in ("A boat", ids, ["A boat"], [ids], ["A boat", "A boat"], [ids, ids])
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert texts[4] == texts[5] == texts[0] * 2


def test_echo_puts_the_prompt_first(client):
    asked = {"model": "story", "prompt": "A boat", "max_tokens": 4}
    plain = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "A boat" + plain
    streamed = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == "A boat" + plain
    from_ids = client.completions.create(
        model="story", prompt=TOKENIZER.encode("A boat"), max_tokens=4, echo=True
    )
    assert from_ids.choices[0].text == "A boat" + plain


def test_stop_strings_end_the_text_and_are_not_part_of_it(client):
    asked = {"model": "story", "prompt": "The dragon", "max_tokens": 20, "seed": 3}
    text = client.completions.create(**asked).choices[0].text
    stop = text[10:14]
    [choice] = client.completions.create(**asked, stop=[stop]).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == stop
    streamed = list(client.completions.create(**asked, stop=[stop], stream=True))
    assert "".join(c.choices[0].text for c in streamed) == choice.text
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_a_chat_streams_what_it_answers_whole(client):
    asked = {
        "model": "story",
        "messages": [{"role": "user", "content": "Tell me of a dragon."}],
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "seed": 5,
    }
    whole = client.chat.completions.create(**asked)
    texts, tokens, reasons, roles = {}, {}, {}, []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.delta.role:
                roles.append(choice.delta.role)
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.content)
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    assert roles == ["assistant"] * 2
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert tokens[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason == "length"
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_the_async_client_runs_many_streams_at_once(running):
    async def one(client, i):
        stream = await client.completions.create(
            model="story", prompt=f"Number {i}", max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            return await asyncio.gather(*[one(client, i) for i in range(32)])

    texts = asyncio.run(main())
    assert len(set(texts)) == 32
    assert all(texts)
    assert not running.engine.live


def test_usage_in_every_chunk_grows_to_the_last(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="story", prompt="A", max_tokens=5, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 5
    assert not chunks[-1].choices


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": "x", "f" * 5000: 1}, f"{'f' * 80}... (5000 characters)", "unknown_parameter"),
        ({"prompt": "x", "a\nb\u00e9": 1}, "a\\nb\\xe9", "unknown_parameter"),
        ({"prompt": "x", "fo": 1}, "fo", "unknown_parameter"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter"),
        ({"prompt": "x", "n": "2"}, "n", "invalid_value"),
        ({"prompt": "x", "n": 1_000_000}, "n", "too_many"),
        ({"prompt": "x", "temperature": -1}, "temperature", "invalid_value"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt[0]", "invalid_value"),
        ({"prompt": [True]}, "prompt[0]", "invalid_value"),
        ({"prompt": [1] * 2000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "stream_options": {"usage": True}}, "stream_options.usage",
         "unknown_parameter"),
        ({"prompt": "x", "logprobs": 100}, "logprobs", "invalid_value"),
        ({"prompt": "x", "stop": [""]}, "stop", "invalid_value"),
        ({"prompt": "x", "structured_outputs": {"regex": "a" * 5000}},
         "structured_outputs.regex", "too_many"),
        ({"prompt": "\ud800"}, "prompt", "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(running, body, param, code):
    if body["prompt"] == "\ud800":
        content = b'{"prompt": "\\ud800"}'
        answer = httpx.post(f"{running.url}/v1/completions", content=content)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        return
    answer = httpx.post(f"{running.url}/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    assert len(error["message"]) < 300


def test_fields_that_ask_for_nothing_are_taken(running):
    body = {
        "prompt": "x", "max_tokens": 1, "suffix": None, "presence_penalty": 0, "logit_bias": {},
        "best_of": 1, "store": False, "service_tier": "auto", "response_format": {"type": "text"},
    }  # fmt: skip
    assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200


def test_the_best_of_more_samples_are_returned(running):
    body = {"prompt": "x", "max_tokens": 3, "n": 2, "best_of": 4, "seed": 1}
    answer = httpx.post(f"{running.url}/v1/completions", json=body)
    assert answer.status_code == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
    answer = httpx.post(f"{running.url}/v1/completions", json={**body, "best_of": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"prompt": NaN}'])
def test_a_body_that_is_no_object_is_refused(running, body):
    answer = httpx.post(f"{running.url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="must be one of story, alias, got other"):
        client.completions.create(model="other", prompt="x")


def test_the_request_id_is_the_clients_own_where_it_gives_one(running):
    body = {"prompt": "x", "max_tokens": 1, "request_id": "mine.1"}
    answer = httpx.post(
        f"{running.url}/v1/completions", json=body, headers={"x-request-id": "abc-1"}
    )
    assert answer.headers["x-request-id"] == "abc-1"
    assert answer.json()["id"] == "cmpl-mine.1"
    odd = httpx.get(f"{running.url}/version", headers={"x-request-id": "a b\u00e9".encode()})
    assert odd.headers["x-request-id"] != "a b\u00e9"


def test_text_and_ids_go_there_and_back(running):
    text = "The dragon's caf\u00e9."
    answer = httpx.post(
        f"{running.url}/tokenize", json={"prompt": text, "return_token_strs": True}
    ).json()
    assert answer["tokens"] == TOKENIZER.encode(text)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    assert len(answer["token_strs"]) == answer["count"]
    back = httpx.post(f"{running.url}/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": text}
    wrong = httpx.post(f"{running.url}/detokenize", json={"tokens": [1, 9999]})
    assert wrong.json()["error"]["param"] == "tokens[1]"
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    assert httpx.post(f"{running.url}/tokenize", json=chat).json()["count"] >= 2
    assert httpx.post(f"{running.url}/tokenize", json={}).status_code == 400


def test_the_plain_routes_answer(running):
    for path in ("/health", "/ready", "/version", "/metrics", "/v1/usage", "/openapi.json"):
        assert httpx.get(f"{running.url}{path}").status_code == 200, path
    assert httpx.get(f"{running.url}/nowhere").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{running.url}/v1/completions").status_code == 405
    text = httpx.get(f"{running.url}/metrics").text
    for name in ("num_requests_running", "generation_tokens_total", "kv_cache_usage_perc"):
        assert f"tilewise:{name}" in text
