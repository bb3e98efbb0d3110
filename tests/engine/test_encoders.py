"""Encoders and classifiers behind LLM: vectors, scores and labels that transformers has."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import torch
from safetensors.torch import save_file

from tests.models.encoders import texts, words, write_encoder, write_tokenizer
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.errors import CheckpointError, RequestError

MODEL = "sentence_transformers.models."


def ids_of(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def near(found, wanted, tolerance=1e-5):
    found, wanted = torch.tensor(found), torch.as_tensor(wanted)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


def write_modules(directory, **pooling):
    modules = [{"type": f"{MODEL}Transformer", "path": ""}]
    modules.append({"type": f"{MODEL}Pooling", "path": "1_Pooling"})
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "modules.json").write_text(json.dumps(modules))
    return modules


@torch.inference_mode()
def states(peer, ids, types=None):
    more = {} if types is None else {"token_type_ids": torch.tensor([types])}
    return peer(torch.tensor([ids]), **more).last_hidden_state[0]


POOLS = {
    "cls": lambda x: x[0],
    "last": lambda x: x[-1],
    "max": lambda x: x.amax(0),
    "mean": lambda x: x.mean(0),
    "weightedmean": lambda x: (
        (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / (len(x) * (len(x) + 1) / 2)
    ),
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    peer = write_encoder(path, "Bert")
    write_tokenizer(path)
    with LLM(path, device="cpu", max_num_seqs=4) as llm:
        yield llm, peer


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    path = tmp_path_factory.mktemp("reranker")
    peer = write_encoder(path, "Bert", "ForSequenceClassification", num_labels=1)
    write_tokenizer(path)
    with LLM(path, device="cpu", max_num_seqs=8, max_num_batched_tokens=100) as llm:
        yield llm, peer


@pytest.mark.parametrize("pooling", POOLS)
def test_vectors_are_pooled_as_asked_whatever_runs_beside_them(bert, pooling):
    llm, peer = bert
    given = texts([1, 66, 2, 33, 7, 5, 12])  # more than there are seats
    found = llm.embed(ids_of(given), pooling=pooling)
    for output, ids in zip(found, given, strict=True):
        near(output.embedding, POOLS[pooling](states(peer, ids)))
        assert (output.pooling, output.prompt_token_ids) == (pooling, ids)
    alone = llm.embed(ids_of([given[3]]), pooling=pooling)
    near(alone[0].embedding, found[3].embedding)


def test_requests_of_different_poolings_share_steps_and_no_block_stays_taken(bert):
    llm, peer = bert
    [ids] = texts([9])

    async def all_at_once():
        engine = AsyncLLM(llm)
        prompt = {"prompt_token_ids": ids}
        found = await asyncio.gather(*(engine.embed(prompt, pooling=name) for name in POOLS))
        await engine.aclose()
        return found

    for output in asyncio.run(all_at_once()):
        near(output.embedding, POOLS[output.pooling](states(peer, ids)))
    stats = llm.engine.stats()
    assert (stats.scheduler.blocks_used, stats.cache_bytes_per_token) == (0, 0)


def test_steps_that_overlap_as_on_a_gpu_give_the_same_vectors(tmp_path):
    write_encoder(tmp_path, "Bert")
    given = ids_of(texts([1 + i % 40 for i in range(60)]))
    with LLM(tmp_path, device="cpu", max_num_seqs=4, max_num_batched_tokens=70) as llm:
        wanted = llm.embed(given)
        llm.engine.overlap, llm.engine.scheduler.max_in_flight = True, 2
        for one, other in zip(llm.embed(given), wanted, strict=True):
            near(one.embedding, other.embedding)
        assert llm.engine.stats().scheduler.blocks_used == 0


def test_texts_get_their_special_tokens_and_may_be_empty_or_cut(bert):
    llm, peer = bert
    found = llm.embed(["", words(7), words(*range(10, 80))], truncate_prompt_tokens=12)
    wanted = [[2, 3], [2, 7, 3], [2, *range(10, 20), 3]]
    assert [one.prompt_token_ids for one in found] == wanted
    for output in found:
        near(output.embedding, states(peer, output.prompt_token_ids).mean(0))
    with pytest.raises(RequestError, match="prompt must be at most 66 tokens, which the model has"):
        llm.embed(words(*range(10, 75)))
    assert len(llm.embed(words(*range(10, 74)))[0].prompt_token_ids) == 66
    with pytest.raises(RequestError, match="must leave room for what is not cut, 2 tokens, got 1"):
        llm.embed("w7", truncate_prompt_tokens=1)
    with pytest.raises(RequestError, match="prompt must hold at least 1 token, got 0"):
        llm.embed({"prompt_token_ids": []})


def test_an_encoder_says_what_it_is_for(bert, reranker):
    with pytest.raises(
        RequestError, match="one to generate text, got BertModel, which is to embed"
    ):
        bert[0].generate("w7")
    with pytest.raises(RequestError, match="one to classify texts, got BertModel"):
        bert[0].classify("w7")
    with pytest.raises(
        RequestError, match="embed texts, got BertForSequence.*score pairs of texts"
    ):
        reranker[0].embed("w7")


def test_types_of_tokens_count(bert):
    llm, peer = bert
    [ids], types = texts([6]), [0, 0, 1, 1, 0, 1]
    [found] = llm.embed({"prompt_token_ids": ids, "token_type_ids": types})
    near(found.embedding, states(peer, ids, types).mean(0))
    for wrong, message in (([0, 1], "as many as the 6 token ids, got 2"), ([2] * 6, "in 0 ... 1")):
        with pytest.raises(RequestError, match=f"token_type_ids must be {message}"):
            llm.embed({"prompt_token_ids": ids, "token_type_ids": wrong})


def test_vectors_of_texts_are_compared_where_no_head_scores(bert):
    llm, _ = bert
    a, b, c = (llm.embed(words(i))[0].embedding for i in (5, 6, 7))
    found = llm.score("w5", ["w6", "w7", "w5"])
    cosine = torch.nn.functional.cosine_similarity
    wanted = [float(cosine(torch.tensor(a), torch.tensor(x), dim=0)) for x in (b, c, a)]
    near([one.score for one in found], wanted)
    with pytest.raises(RequestError, match="text_1 must be one text or as many as text_2"):
        llm.score(["w5", "w6"], ["w7", "w8", "w9"])


@torch.inference_mode()
def logits(peer, ids, types):
    return peer(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]


def pair(a, b):
    return [2, *a, 3, *b, 3], [0] * (len(a) + 2) + [1] * (len(b) + 1)


def test_512_documents_are_ranked_by_the_logits_that_transformers_has(reranker):
    llm, peer = reranker
    query = [10, 11]
    documents = [ids[: 1 + len(ids)] for ids in texts([1 + i % 30 for i in range(512)])]
    documents[5] = []
    found = llm.rerank(words(*query), [words(*ids) for ids in documents])
    assert sorted(one.index for one in found) == list(range(512))
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)
    for one in found[::64] + [one for one in found if one.index == 5]:
        ids, types = pair(query, documents[one.index])
        near([one.score], torch.sigmoid(logits(peer, ids, types)))
        assert one.num_prompt_tokens == len(ids)
    [raw] = llm.score("w10 w11", "w20", use_activation=False)
    near([raw.score], logits(peer, *pair(query, [20])))
    best = llm.rerank("w10", ["w7", "w8", "w9"], top_n=2)
    assert len(best) == 2
    for wrong in (0, "a", True):
        with pytest.raises(RequestError, match="top_n must be a positive integer or None"):
            llm.rerank("w10", ["w7"], top_n=wrong)


def test_a_pair_that_is_too_long_is_refused_or_its_document_is_cut(reranker):
    llm, peer = reranker
    long = list(range(10, 80))
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt must be at most 66 tokens.*74"):
        llm.score("w7", ["w8", words(*long)])
    [cut] = llm.score("w7", words(*long), truncate_prompt_tokens=20)
    near([cut.score], torch.sigmoid(logits(peer, *pair([7], long[:16]))))
    with pytest.raises(RequestError, match="must leave room for what is not cut, 13 tokens, got 9"):
        llm.score(words(*range(10, 20)), "w8", truncate_prompt_tokens=9)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("XLMRoberta", {}),
        ("DistilBert", {"problem_type": "multi_label_classification"}),
        ("ModernBert", {"classifier_pooling": "mean", "classifier_bias": True}),
        ("MPNet", {"problem_type": "regression"}),
        ("NomicBert", {}),
        ("EuroBert", {}),
    ],
)
def test_labels_have_the_probabilities_of_transformers(tmp_path, family, changes):
    labels = {0: "sad", 1: "glad", 2: "mad"}
    kind = "ForSequenceClassification"
    peer = write_encoder(tmp_path, family, kind, id2label=labels, **changes)
    given = texts([9, 3])
    with LLM(tmp_path, device="cpu", max_num_seqs=4) as llm:
        found = llm.classify(ids_of(given))
        with pytest.raises(RequestError, match="as it has 3 labels and not 1"):
            llm.score("a", "b")
    last = {"regression": lambda x: x, "multi_label_classification": torch.sigmoid}
    act = last.get(changes.get("problem_type"), lambda x: x.softmax(-1))
    for output, ids in zip(found, given, strict=True):
        with torch.inference_mode():
            wanted = act(peer(torch.tensor([ids])).logits[0])
        near(output.probs, wanted)
        assert output.label == labels[int(wanted.argmax())]


def test_layers_behind_the_pooling_follow_it_and_vectors_may_be_cut(tmp_path):
    peer = write_encoder(tmp_path, "ModernBert")
    write_tokenizer(tmp_path)
    modules = write_modules(tmp_path, pooling_mode_cls_token=True, include_prompt=True)
    modules += [{"type": f"{MODEL}{name}", "path": f"2_{name}"} for name in ("Dense", "Normalize")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "2_Dense").mkdir()
    dense = {"in_features": 64, "out_features": 24, "activation_function": "torch.nn.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(24, 64), torch.randn(24)
    tensors = {"linear.weight": weight, "linear.bias": bias}
    save_file(tensors, tmp_path / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "w50 w51 ", "document": ""}, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with LLM(tmp_path, device="cpu", max_num_seqs=4) as llm:
        plain, [query] = llm.embed(["w9", "w8"]), llm.embed("w9", prompt_name="query")
        [short] = llm.embed("w9", dimensions=8)
        with pytest.raises(RequestError, match="prompt_name must be query, document, got 'x'"):
            llm.embed("w9", prompt_name="x")
        with pytest.raises(RequestError, match="dimensions must be in 1 ... 24, got 25"):
            llm.embed("w9", dimensions=25)
    for output, ids in ((plain[0], [2, 9, 3]), (query, [2, 50, 51, 9, 3])):
        wanted = torch.tanh(weight @ states(peer, ids)[0] + bias)
        near(output.embedding, wanted / wanted.norm())
        assert math.hypot(*output.embedding) == pytest.approx(1, abs=1e-6)
    near(short.embedding, plain[0].embedding[:8])


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("dot", lambda a, b: a @ b),
        ("euclidean", lambda a, b: -(a - b).norm()),
        ("manhattan", lambda a, b: -(a - b).abs().sum()),
    ],
)
def test_vectors_are_compared_and_texts_cut_as_their_makers_do(tmp_path, name, score):
    peer = write_encoder(tmp_path, "Bert")
    write_tokenizer(tmp_path)
    settings = {"similarity_fn_name": name}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    settings = {"max_seq_length": 6, "do_lower_case": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    with LLM(tmp_path, device="cpu", max_num_seqs=4) as llm:
        [found] = llm.score("W7", "W8 w9")
        with pytest.raises(RequestError, match="prompt must be at most 6 tokens"):
            llm.embed("w4 w5 w6 w7 w8")
    a, b = (states(peer, ids).mean(0) for ids in ([2, 7, 3], [2, 8, 9, 3]))
    near([found.score], [score(a, b)])
    with LLM(tmp_path, device="cpu", max_num_seqs=4, max_model_len=66) as llm:
        assert len(llm.embed("w4 w5 w6 w7 w8")[0].prompt_token_ids) == 7


def test_a_pair_of_a_model_without_types_has_none(tmp_path):
    kind = "ForSequenceClassification"
    peer = write_encoder(tmp_path, "XLMRoberta", kind, num_labels=1, vocab_size=101)
    write_tokenizer(tmp_path, has_types=False)
    told = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | told))
    with LLM(tmp_path, device="cpu", max_num_seqs=2) as llm:
        found = llm.score(["w7", "w8 w9"], ["w10", "w11"])
    for output, ids in zip(found, ([2, 7, 3, 10, 3], [2, 8, 9, 3, 11, 3]), strict=True):
        with torch.inference_mode():
            near([output.score], peer(torch.tensor([ids])).logits[0])


def test_a_text_whose_states_are_not_finite_fails_alone(tmp_path):
    peer = write_encoder(tmp_path, "Bert")
    with torch.no_grad():
        peer.embeddings.word_embeddings.weight[50] = math.nan
    peer.save_pretrained(tmp_path)
    with LLM(tmp_path, device="cpu", max_num_seqs=4) as llm:
        [good] = llm.embed(ids_of([[7, 8]]))

        async def both():
            engine = AsyncLLM(llm)
            found = await asyncio.gather(
                engine.embed({"prompt_token_ids": [7, 50]}),
                engine.embed({"prompt_token_ids": [7, 8]}),
                return_exceptions=True,
            )
            await engine.aclose()
            return found

        bad, same = asyncio.run(both())
    assert isinstance(bad, FloatingPointError)
    near(same.embedding, good.embedding)


def test_a_task_that_is_cancelled_leaves_nothing(bert):
    llm, _ = bert

    async def leave():
        engine = AsyncLLM(llm)
        llm.loop.pause()
        task = asyncio.create_task(engine.embed({"prompt_token_ids": [1, 2, 3]}))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        llm.loop.resume()
        await engine.aclose()

    asyncio.run(leave())
    llm.loop.call(lambda: None)
    assert (llm.loop.num_live, llm.engine.stats().scheduler.blocks_used) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 4}, "num_blocks must be None for an encoder, BertModel, got 4"),
        ({"weight_dtype": "int8"}, "weight_dtype must be auto for an encoder"),
        ({"batch_invariant": True}, "batch_invariant must be False for an encoder"),
        ({"max_num_batched_tokens": 65}, "must be at least max_model_len 66 for an encoder"),
        ({"max_model_len": 67}, "max_model_len must be in 2 ... 66"),
        ({"score_tokens": "w7"}, "score_tokens must be None for a model without an output head"),
        ({"pair_template": "{query}"}, "pair_template must hold {query} and {document} once"),
    ],
)
def test_options_of_decoders_are_refused(tmp_path, options, message):
    write_encoder(tmp_path, "Bert")
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, device="cpu", **options)


def test_a_classifier_of_another_shape_is_refused(tmp_path):
    write_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=2)
    config = tmp_path / "config.json"
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "num_labels": 3}
    config.write_text(json.dumps(json.loads(config.read_text()) | labels))
    with pytest.raises(CheckpointError, match="classifier.weight must have shape .3, 64., got"):
        LLM(tmp_path, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["Bert", "MPNet", "ModernBert", "NomicBert", "Gemma3Text"])
def test_on_a_gpu_vectors_are_those_of_transformers_too(tmp_path, family, dtype):
    peer = write_encoder(tmp_path, family)
    given = texts([1, 60, 2, 33, 7, 5, 12])
    with LLM(tmp_path, device="cuda", dtype=dtype, max_num_seqs=3) as llm:
        found = llm.embed(ids_of(given))
    for output, ids in zip(found, given, strict=True):
        wanted = states(peer, ids).mean(0)
        error = (torch.tensor(output.embedding) - wanted).norm() / wanted.norm()
        assert error < (5e-3 if dtype == "float32" else 5e-2)
