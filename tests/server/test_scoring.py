"""/v1/rerank, /v1/score, /v1/classify and the rest of a server over encoders."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import httpx
import openai
import pytest

from tests.models.encoders import texts, words, write_encoder, write_tokenizer
from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.embeddings import embeddings_router
from tilewise.server.messages import messages_router
from tilewise.server.scoring import scoring_router

CLASSIFIES = "ForSequenceClassification"


def made(path, family, *kind, **changes):
    write_encoder(path, family, *kind, **changes)
    write_tokenizer(path)
    return LLM(path, device="cpu", max_num_seqs=8)


def served(llm):
    def routers(service):
        return [embeddings_router(service), messages_router(service), scoring_router(service)]

    return serving(AsyncLLM(llm), loop=llm.loop, routers=routers, purpose=llm.purpose)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    llm = made(tmp_path_factory.mktemp("reranker"), "Bert", CLASSIFIES, num_labels=1)
    with llm, served(llm) as running:
        yield llm, running


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    llm = made(tmp_path_factory.mktemp("embedder"), "ModernBert")
    with llm, served(llm) as running:
        yield llm, running


def ask(running, path, **body):
    return httpx.post(f"{running.url}{path}", json=body, timeout=60)


def error(running, path, **body):
    answer = ask(running, path, **body)
    assert answer.status_code == 400
    told = answer.json()["error"]
    return told["param"], told["message"]


DOCUMENTS = [words(*ids) for ids in texts([3, 30, 1, 8])]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(reranker, path):
    llm, running = reranker
    wanted = llm.rerank("w10 w11", DOCUMENTS)
    given = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    answer = ask(running, path, query="w10 w11", documents=given, top_n=3).json()
    assert [one["index"] for one in answer["results"]] == [one.index for one in wanted][:3]
    for one, own in zip(answer["results"], wanted, strict=False):
        assert one["relevance_score"] == pytest.approx(own.score, abs=1e-6)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["total_tokens"] == sum(one.num_prompt_tokens for one in wanted)
    assert answer["model"] == "story"
    assert answer["id"].startswith("rerank-")
    bare = ask(running, path, query="w10 w11", documents=DOCUMENTS, return_documents=False, top_n=0)
    assert [set(one) for one in bare.json()["results"]] == [{"index", "relevance_score"}] * 4


def test_512_documents_are_one_request(reranker):
    llm, running = reranker
    documents = [words(*ids) for ids in texts([1 + i % 20 for i in range(512)])]
    answer = ask(running, "/v1/rerank", query="w10", documents=documents, return_documents=False)
    results = answer.json()["results"]
    assert sorted(one["index"] for one in results) == list(range(512))
    assert llm.engine.stats().scheduler.blocks_used == 0
    many = ["w7"] * 1025
    param, message = error(running, "/v1/rerank", query="w10", documents=many)
    assert (param, message) == ("documents", "documents must be at most 1,024 texts, got 1,025")


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_pairs_are_scored_in_their_order(reranker, path):
    llm, running = reranker
    wanted = [one.score for one in llm.score("w10", DOCUMENTS)]
    answer = ask(running, path, text_1="w10", text_2=DOCUMENTS).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-6)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    raw = ask(running, path, text_1="w10", text_2=DOCUMENTS[0], use_activation=False).json()
    [logit] = llm.score("w10", DOCUMENTS[0], use_activation=False)
    assert raw["data"][0]["score"] == pytest.approx(logit.score, abs=1e-6)


def test_vectors_are_compared_where_a_model_embeds(embedder):
    llm, running = embedder
    wanted = [one.score for one in llm.score("w10", DOCUMENTS)]
    answer = ask(running, "/v1/score", text_1="w10", text_2=DOCUMENTS).json()
    assert [one["score"] for one in answer["data"]] == pytest.approx(wanted, abs=1e-6)
    ranked = ask(running, "/v1/rerank", query="w10", documents=DOCUMENTS).json()["results"]
    assert ranked[0]["relevance_score"] == pytest.approx(max(wanted), abs=1e-6)
    # Each text is computed once, with two special tokens.
    assert answer["usage"]["total_tokens"] == 3 + 42 + 2 * 4


def test_openais_client_gets_an_encoders_vectors(embedder):
    llm, running = embedder
    given = [*DOCUMENTS, ""]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="story", input=given, dimensions=16)
    for one, output in zip(answer.data, llm.embed(given), strict=True):
        vector = output.embedding[:16]
        length = sum(x * x for x in vector) ** 0.5
        assert one.embedding == pytest.approx([x / length for x in vector], abs=1e-5)


def test_labels_are_told(tmp_path):
    labels = {0: "sad", 1: "glad", 2: "mad"}
    llm = made(tmp_path, "XLMRoberta", CLASSIFIES, id2label=labels, type_vocab_size=2)
    with llm, served(llm) as running:
        wanted = llm.classify(DOCUMENTS)
        for path in ("/v1/classify", "/classify"):
            data = ask(running, path, input=DOCUMENTS).json()["data"]
            for one, own in zip(data, wanted, strict=True):
                assert one["probs"] == pytest.approx(list(own.probs), abs=1e-6)
                assert (one["label"], one["num_classes"]) == (own.label, 3)
        param, message = error(running, "/v1/score", text_1="a", text_2="b")
    assert param == "model"
    assert message.endswith("as it has 3 labels and not 1")


def test_texts_that_are_too_long_are_named_or_cut(reranker, embedder):
    _, running = reranker
    long = words(*range(10, 80))
    param, message = error(running, "/v1/rerank", query="w9", documents=["w8", long])
    assert param == "pairs[1]"
    assert message.startswith("pairs[1] must be at most 66 tokens, which the model has positions")
    cut = ask(running, "/v1/rerank", query="w9", documents=[long], truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["prompt_tokens"] == 66
    param, message = error(
        running, "/v1/score", text_1=long, text_2="w9", truncate_prompt_tokens=20
    )
    assert "must leave room for what is not cut, 73 tokens, got 20" in message
    llm, running = embedder
    cut = ask(running, "/v1/embeddings", input=long, truncate_prompt_tokens=9, normalize=False)
    assert cut.json()["usage"]["prompt_tokens"] == 9
    [wanted] = llm.embed(long, truncate_prompt_tokens=9)
    assert cut.json()["data"][0]["embedding"] == pytest.approx(wanted.embedding, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", 3]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "max_chunks_per_doc": 1}, "max_chunks_p"),
        ("/v1/rerank", {"documents": ["b"]}, "query"),
        ("/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": 3}, "text_2"),
        ("/v1/classify", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a"}, "model"),
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "model"),
        (
            "/v1/messages",
            {"model": "story", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]},
            "model",
        ),
    ],
)
def test_what_is_wrong_is_named(reranker, path, body, param):
    _, running = reranker
    answer = ask(running, path, **body)
    assert answer.status_code == 400
    told = answer.json()["error"]
    if path == "/v1/messages":  # whose errors have no field
        assert "model must be one to generate text, got BertForSeq" in told["message"]
        return
    assert told["param"].startswith(param)
    if param == "model":
        assert told["code"] == "unsupported_task"


def test_a_client_that_leaves_leaves_nothing(reranker):
    llm, running = reranker

    def leave():
        body = {"query": "w7", "documents": ["w8"] * 20}
        with suppress(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/rerank", json=body, timeout=0.5)

    llm.loop.pause()
    try:
        thread = threading.Thread(target=leave)
        thread.start()
        wait_for(lambda: llm.loop.num_live == 20)
        thread.join(60)
        wait_for(lambda: not running.bridge.jobs)
    finally:
        llm.loop.resume()
    wait_for(lambda: llm.loop.num_live == 0)
    assert llm.engine.stats().scheduler.blocks_used == 0


def test_requests_that_wait_share_steps(reranker):
    llm, running = reranker

    async def several():
        async with httpx.AsyncClient(timeout=60) as client:
            asked = [
                client.post(f"{running.url}/v1/score", json={"text_1": "w9", "text_2": text})
                for text in DOCUMENTS
            ]
            return [answer.json() for answer in await asyncio.gather(*asked)]

    wanted = [one.score for one in llm.score("w9", DOCUMENTS)]
    found = [answer["data"][0]["score"] for answer in asyncio.run(several())]
    assert found == pytest.approx(wanted, abs=1e-6)
