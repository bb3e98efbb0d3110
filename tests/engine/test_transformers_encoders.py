"""Encoders that run through transformers: its vectors and logits, whatever shares a step."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.models.encoders import texts, write_encoder, write_tokenizer
from tilewise.engine.llm import LLM
from tilewise.errors import CheckpointError
from tilewise.models.transformers_encoder import why_no_encoder

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
MORE = {
    "Albert": {"embedding_size": 16},
    "Electra": {"embedding_size": 16},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "XLMRobertaXL": {"pad_token_id": 1, "type_vocab_size": 1},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*runs through transformers, texts of like")


def write(directory, family, kind, **changes):
    fields = SHAPE | MORE[family] | changes
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, family + kind)(config).eval()
    model.save_pretrained(directory)
    return model


def near(found, wanted):
    found, wanted = torch.tensor(found), torch.as_tensor(wanted)
    assert (found - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("family", MORE)
def test_vectors_are_those_of_each_text_alone(tmp_path, family):
    peer = write(tmp_path, family, "Model")
    given = texts([1, 60, 2, 33, 30, 58])
    with LLM(tmp_path, device="cpu", max_num_seqs=8) as llm:
        assert llm.config.context_length == (64 if family == "XLMRobertaXL" else 66)
        found = llm.embed([{"prompt_token_ids": ids} for ids in given], pooling="mean")
    for output, ids in zip(found, given, strict=True):
        with torch.inference_mode():
            near(output.embedding, peer(torch.tensor([ids])).last_hidden_state[0].mean(0))


@pytest.mark.parametrize("family", ["Electra", "DebertaV2"])
def test_pairs_have_the_logits_of_transformers(tmp_path, family):
    peer = write(tmp_path, family, "ForSequenceClassification", num_labels=1, type_vocab_size=2)
    write_tokenizer(tmp_path)
    with LLM(tmp_path, device="cpu", max_num_seqs=8) as llm:
        found = llm.score("w9", ["w7 w8", ""], use_activation=False)
    pairs = [([2, 9, 3, 7, 8, 3], [0, 0, 0, 1, 1, 1]), ([2, 9, 3, 3], [0, 0, 0, 1])]
    for one, (ids, types) in zip(found, pairs, strict=True):
        with torch.inference_mode():
            wanted = peer(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits[0]
        near([one.score], wanted)


def test_a_family_of_this_package_runs_there_when_asked(tmp_path):
    write_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=3)
    asked = [{"prompt_token_ids": ids} for ids in texts([5, 9])]
    with (
        LLM(tmp_path, device="cpu", model_impl="transformers") as other,
        LLM(tmp_path, device="cpu", model_impl="tilewise") as own,
    ):
        for one, wanted in zip(other.classify(asked), own.classify(asked), strict=True):
            near(one.probs, wanted.probs)


def test_what_is_no_encoder_is_said(tmp_path):
    write(tmp_path, "Electra", "Model")
    with pytest.raises(CheckpointError, match="must name an encoder of Bert, .*, got .'ElectraMod"):
        LLM(tmp_path, device="cpu", model_impl="tilewise")
    with pytest.warns(UserWarning, match="ElectraModel runs through transformers, texts of like"):
        LLM(tmp_path, device="cpu", random_weights=True).close()
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong, message in (
        ({"architectures": ["ElectraForTokenClassification"]}, "must name a bare model or a class"),
        ({"is_encoder_decoder": True}, "must be an encoder, got one with a decoder"),
        ({"model_type": "llama"}, "has no encoder of that name"),
    ):
        assert message in why_no_encoder(config | wrong)
