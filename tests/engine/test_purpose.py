"""Decoders without an output head, with a classifier, or that answer yes or no about a pair."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.models.encoders import VOCAB, texts, words, write_tokenizer
from tilewise.engine.llm import LLM
from tilewise.engine.purpose import Purpose, read_purpose
from tilewise.errors import CheckpointError, RequestError
from tilewise.models.causal_body import kind_of_decoder

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MORE = {
    "Qwen3": {"head_dim": 16},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2},
}
OPTIONS = {"device": "cpu", "num_blocks": 64, "block_size": 8, "max_num_seqs": 4}
TEMPLATE = "w9 {query} w8 {document} w7"


def write(directory, family, kind, **changes):
    config = getattr(transformers, f"{family}Config")(**SHAPE, **MORE.get(family, {}), **changes)
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)(config).eval()
    model.save_pretrained(directory)
    return model


def ids_of(prompts):
    return [{"prompt_token_ids": ids} for ids in prompts]


def near(found, wanted):
    found, wanted = torch.tensor(found), torch.as_tensor(wanted)
    assert (found - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3Text"])
def test_a_bare_decoder_embeds_and_draws_nothing(tmp_path, family):
    peer = write(tmp_path, family, "Model")
    given = texts([3, 40, 1])
    with LLM(tmp_path, max_num_batched_tokens=16, **OPTIONS) as llm:
        for pooling in ("mean", "last"):
            for output, ids in zip(llm.embed(ids_of(given), pooling=pooling), given, strict=True):
                with torch.inference_mode():
                    rows = peer(torch.tensor([ids])).last_hidden_state[0]
                near(output.embedding, rows.mean(0) if pooling == "mean" else rows[-1])
        with pytest.raises(RequestError, match=f"to generate text, got {family}Model"):
            llm.generate({"prompt_token_ids": [5]})


@pytest.mark.parametrize(
    ("family", "way"), [("Llama", "auto"), ("Qwen3", "auto"), ("Mistral", "transformers")]
)
def test_a_decoder_with_a_classifier_gives_its_logits(tmp_path, family, way):
    peer = write(tmp_path, family, "ForSequenceClassification", num_labels=3)
    given = texts([3, 40, 1])
    with LLM(tmp_path, max_num_batched_tokens=16, model_impl=way, **OPTIONS) as llm:
        found = llm.classify(ids_of(given))
    for output, ids in zip(found, given, strict=True):
        with torch.inference_mode():
            near(output.probs, peer(torch.tensor([ids])).logits[0].softmax(-1))
        assert output.label == f"LABEL_{output.probs.index(max(output.probs))}"


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_reranker_that_answers_scores_by_the_odds_of_its_tokens(tmp_path, is_tied):
    peer = write(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=is_tied)
    write_tokenizer(tmp_path)
    options = OPTIONS | {"score_tokens": "w50,w51", "pair_template": TEMPLATE}
    with LLM(tmp_path, **options) as llm:
        scores = llm.score("w20 w21", ["w30", "", words(*range(20, 40))])
        raw = llm.score("w20 w21", "w30", use_activation=False)
        [cut] = llm.score("w20", words(*range(30, 60)), truncate_prompt_tokens=9)
        with pytest.raises(RequestError, match="leave room for what is not cut, 6 tokens, got 5"):
            llm.score("w20", "w30 w31", truncate_prompt_tokens=5)
        with pytest.raises(RequestError, match="embed texts, got Qwen3ForCausalLM"):
            llm.embed("w9")

    def logits(*document, query=(20, 21)):
        ids = [2, 9, *query, 8, *document, 7, 3]
        with torch.inference_mode():
            return peer(torch.tensor([ids])).logits[0, -1]

    for one, document in zip(scores, ([30], [], range(20, 40)), strict=True):
        near([one.score], logits(*document)[[50, 51]].softmax(-1)[:1])
    near([raw[0].score], logits(30)[50:51] - logits(30)[51:52])
    near([cut.score], logits(30, 31, 32, query=(20,))[[50, 51]].softmax(-1)[:1])
    assert cut.num_prompt_tokens == 9


def test_files_of_sentence_transformers_name_the_tokens_and_the_class_its_template(tmp_path):
    write(tmp_path, "Qwen3", "ForCausalLM")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": "1"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text('{"true_token_id": 5, "false_token_id": null}')
    found = read_purpose(tmp_path, None)
    assert found.tasks == ("score",)
    assert found.stages[0].rows == (5,)
    assert "<Query>: {query}\n<Document>: {document}<|im_end|>" in found.pair_template


def test_a_model_that_generates_scores_only_if_it_is_made_to_embed(tmp_path):
    write(tmp_path, "Llama", "ForCausalLM")
    told = read_purpose(tmp_path, None)
    assert told.tasks == ("generate", "embed")
    with pytest.raises(RequestError, match="one that answers yes or no takes score_tokens"):
        told.check("score")
    with pytest.raises(RequestError, match="dimensions must be 48, as it has no others, got 8"):
        told.cut_to(8, 48)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    found = read_purpose(tmp_path, None)
    assert (found.tasks, found.pooling) == (("generate", "embed", "score"), "last")
    assert found.cut_to(8, 48) == 8
    with pytest.raises(RequestError, match="dimensions must be one of 16, 32, got 8"):
        Purpose(dimensions=(16, 32)).cut_to(8, 48)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_tokens": "w50,w51"}, "pair_template must be given with score_tokens, got None"),
        ({"score_tokens": "w50 w51"}, "score_tokens must be one or two tokens"),
        ({"score_tokens": "w5,w6,w7"}, "score_tokens must be one or two tokens"),
        ({"score_tokens": "w50", "pair_template": "{query}"}, "must hold {query} and {document}"),
    ],
)
def test_tokens_and_templates_that_cannot_be_used_are_refused(tmp_path, options, message):
    write(tmp_path, "Llama", "ForCausalLM")
    write_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, **OPTIONS, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"1": "a"}}, "id2label must have texts for 0 ... 0"),
        ({"id2label": None, "num_labels": 0}, "num_labels must be a positive integer, got 0"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "activation_fn of sentence_transformers must be Identity or Sigmoid",
        ),
        ({"is_causal": False}, "is_causal must be true for a decoder, got false"),
    ],
)
def test_a_classifier_that_is_not_built_is_refused(tmp_path, changes, message):
    write(tmp_path, "Llama", "ForSequenceClassification")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path, **OPTIONS)


def test_activations_are_those_of_the_files(tmp_path):
    write(tmp_path, "Llama", "ForSequenceClassification", num_labels=1)
    assert read_purpose(tmp_path, None).activation == "sigmoid"
    config = tmp_path / "config.json"
    plain = json.loads(config.read_text())
    for name, activation in (("Identity", "identity"), ("Sigmoid", "sigmoid")):
        told = {"sbert_ce_default_activation_function": f"torch.nn.modules.x.{name}"}
        config.write_text(json.dumps(plain | told))
        assert read_purpose(tmp_path, None).activation == activation


def test_classes_are_told_apart_by_their_names():
    kinds = {
        "Qwen3Model": ("Qwen3ForCausalLM", "embed"),
        "Gemma3TextModel": ("Gemma3ForCausalLM", "embed"),
        "GPT2ForSequenceClassification": ("GPT2LMHeadModel", "classify"),
        "GPT2LMHeadModel": ("GPT2LMHeadModel", "generate"),
        "LlamaForCausalLM": ("LlamaForCausalLM", "generate"),
        "Model": ("Model", "generate"),
    }
    assert {name: kind_of_decoder({"architectures": [name]}) for name in kinds} == kinds
    assert kind_of_decoder({})[1] == "generate"
