"""Fields of requests over the real engine: beams, log-probabilities of prompts, offsets."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams

PROMPT = "Once upon a time, there was a little"
CHAT = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", device="cpu", num_blocks=256, max_num_seqs=16)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop) as server:
        yield server


def ask(running, path="/v1/completions", **body):
    return httpx.post(f"{running.url}{path}", json={"max_tokens": 8, **body}, timeout=60)


def events(answer):
    lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("n", "best_of"), [(3, None), (2, 4), (1, 1)])
def test_beams_are_those_of_the_engine_whole_and_streamed(llm, running, n, best_of):
    width = best_of or n
    [offline] = llm.generate(PROMPT, BeamSearchParams(width, max_tokens=8, length_penalty=0.5))
    body = {"prompt": PROMPT, "use_beam_search": True, "n": n, "best_of": best_of,
            "length_penalty": 0.5, "return_token_ids": True}  # fmt: skip
    choices = ask(running, **body).json()["choices"]
    assert [c["token_ids"] for c in choices] == [o.token_ids for o in offline.outputs[:n]]
    assert [c["text"] for c in choices] == [o.text for o in offline.outputs[:n]]
    streamed = {}
    for event in events(ask(running, **body, stream=True)):
        for choice in event["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert streamed == {c["index"]: c["text"] for c in choices}


def test_beams_of_several_prompts_and_of_a_chat_have_numbers_of_their_own(running):
    two = ask(running, prompt=[PROMPT, "The dog"], use_beam_search=True, n=2).json()
    assert [c["index"] for c in two["choices"]] == [0, 1, 2, 3]
    body = {"messages": CHAT, "use_beam_search": True, "n": 2}
    whole = ask(running, "/v1/chat/completions", **body).json()
    texts = [c["message"]["content"] for c in whole["choices"]]
    assert len(set(texts)) == 2
    streamed = ["", ""]
    for event in events(ask(running, "/v1/chat/completions", **body, stream=True)):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": "a"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"n": 1000}, "n"),
        ({"length_penalty": 5000}, "length_penalty"),
    ],
)
def test_what_a_search_does_not_serve_is_named(running, more, param):
    answer = ask(running, prompt="x", use_beam_search=True, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_what_asks_a_search_for_nothing_is_taken(running):
    more = {"temperature": 1.0, "top_p": 1, "top_k": -1, "seed": 4, "presence_penalty": 0}
    assert ask(running, prompt="x", use_beam_search=True, n=2, **more).status_code == 200


def test_a_chat_tells_the_log_probabilities_of_its_prompt(llm, running):
    body = {"messages": CHAT, "prompt_logprobs": 2, "return_token_ids": True, "temperature": 0}
    whole = ask(running, "/v1/chat/completions", **body).json()
    ids = whole["prompt_token_ids"]
    [offline] = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(prompt_logprobs=2, temperature=0, max_tokens=1)
    )
    told = whole["prompt_logprobs"]
    assert told[0] is None
    assert [{int(i): e["logprob"] for i, e in one.items()} for one in told[1:]] == (
        offline.prompt_logprobs[1:]
    )
    streamed = events(ask(running, "/v1/chat/completions", **body, stream=True))
    assert [e["prompt_logprobs"] for e in streamed if "prompt_logprobs" in e] == [told]


def test_best_of_counts_as_samples(running):
    answer = ask(running, prompt="x", best_of=10_000)
    assert answer.status_code == 400
    assert "at most" in answer.json()["error"]["message"]
