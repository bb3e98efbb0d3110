"""Recipes over HTTP: `"recipe": true`, and what the answer then can prove."""

from __future__ import annotations

import httpx
import pytest

from tests import warm
from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.engine_process import remote as process_remote
from tilewise.server.engine_process.remote import RemoteEngine

SETTINGS = {"device": "cpu", "dtype": "float32", "num_blocks": 64}
ASK = {"model": "story", "max_tokens": 8, "recipe": True}


@pytest.fixture(scope="module", params=["in_process", "apart"])
def running(request):
    if request.param == "apart":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_remote, "subprocess", warm)
            engine = RemoteEngine("story", SETTINGS)
            with serving(engine) as running:
                yield running
            engine.close(2.0)
    else:
        with LLM("story", **SETTINGS) as llm, serving(AsyncLLM(llm), loop=llm.loop) as running:
            yield running


@pytest.fixture(scope="module")
def other():
    with LLM("story", **SETTINGS) as llm:
        yield llm


def post(running, path, body):
    return httpx.post(f"{running.url}{path}", json=body, timeout=60)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": "Once upon a time", "n": 2}),
        ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Tell"}]}),
    ],
    ids=["samples", "greedy", "chat"],
)
def test_a_served_answer_is_verified_by_another_engine(running, other, path, more):
    answer = post(running, path, {**ASK, **more}).json()
    recipe = answer["recipe"]
    assert other.verify(recipe).is_equal
    assert len(recipe["facts"]["template"]) == 64
    if "logprobs" not in more:  # they are the recipe's, and not the answer's
        assert all(choice["logprobs"] is None for choice in answer["choices"])
    sizes = [len(each["token_ids"]) for each in recipe["answers"]]
    assert sum(sizes) == answer["usage"]["completion_tokens"]


def test_no_recipe_is_told_unasked(running):
    for value in (False, None):
        body = {**ASK, "prompt": "Once", "recipe": value}
        assert "recipe" not in post(running, "/v1/completions", body).json()


@pytest.mark.parametrize(
    "more",
    [{"stream": True}, {"prompt": ["Once", "Then"]}, {"use_beam_search": True, "n": 2}],
    ids=["stream", "prompts", "beams"],
)
def test_what_has_no_recipe_is_refused(running, more):
    answer = post(running, "/v1/completions", {**ASK, "prompt": "Once", **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("recipe must be false")


def test_bits_that_depend_on_neighbours_have_no_recipe():
    with (
        LLM("story", **SETTINGS, batch_invariant=False) as llm,
        serving(AsyncLLM(llm), loop=llm.loop) as running,
    ):
        answer = post(running, "/v1/completions", {**ASK, "prompt": "Once"})
        assert answer.status_code == 501
        assert "batch_invariant" in answer.json()["error"]["message"]
