"""Encoders: transformers' hidden states from packed texts, for every family."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.encoders import CASES, texts, write_encoder
from tilewise.errors import CheckpointError
from tilewise.models.encoder import Packed
from tilewise.models.encoder_families import encoder_family, read_encoder
from tilewise.models.registry import load_encoder


def pack(given, types=None):
    lengths = [len(ids) for ids in given]
    return Packed(
        torch.tensor([i for ids in given for i in ids]),
        torch.cat([torch.arange(n) for n in lengths]),
        None if types is None else torch.tensor([i for kinds in types for i in kinds]),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        max(lengths),
    )


def halves(given):
    return [[0] * (len(ids) // 2) + [1] * (len(ids) - len(ids) // 2) for ids in given]


@torch.inference_mode()
def worst_error(own, peer, given, types):
    """Return the largest difference from each text alone, and the largest state."""
    states, begin, worst, most = own(pack(given, types)), 0, 0.0, 0.0
    for place, ids in enumerate(given):
        more = {} if types is None else {"token_type_ids": torch.tensor([types[place]])}
        wanted = peer(torch.tensor([ids]), **more).last_hidden_state[0]
        found = states[begin : begin + len(ids)]
        begin += len(ids)
        worst = max(worst, float((found.float() - wanted).abs().max()))
        most = max(most, float(wanted.abs().max()))
    return worst, most


@pytest.mark.parametrize("family", CASES)
def test_states_of_packed_texts_are_those_of_each_alone(tmp_path, family):
    peer = write_encoder(tmp_path, family)
    own = load_encoder(tmp_path)
    longest = own.config.context_length
    behind = 2 if family in ("Roberta", "XLMRoberta", "Camembert", "MPNet") else 0
    assert longest == peer.config.max_position_embeddings - behind
    given = texts([1, 33, 2, min(longest, 190), 7])
    types = halves(given) if own.config.num_types > 1 else None
    worst, most = worst_error(own, peer, given, types)
    assert worst < 1e-5 * most


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_bfloat16_stays_near(tmp_path, family):
    peer = write_encoder(tmp_path, family)
    own = load_encoder(tmp_path, dtype="bfloat16")
    worst, most = worst_error(own, peer, texts([5, 40]), None)
    assert own.dtype == torch.bfloat16
    assert 0 < worst < 0.05 * most


@pytest.mark.parametrize("kind", ["ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["Bert", "XLMRoberta", "DistilBert", "ModernBert"])
def test_heads_beside_the_encoder_are_left_alone(tmp_path, family, kind):
    peer = write_encoder(tmp_path, family, kind)
    own = load_encoder(tmp_path)
    worst, most = worst_error(own, peer.base_model, texts([3, 9]), None)
    assert worst < 1e-5 * most


def test_the_first_berts_names_of_norms_are_read(tmp_path):
    peer = write_encoder(tmp_path, "Bert")
    file = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(file)
    for new, name in old.items():
        tensors = {key.replace(new, name): tensor for key, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    worst, most = worst_error(load_encoder(tmp_path), peer, texts([3, 9]), None)
    assert worst < 1e-5 * most


def test_random_weights_need_no_file_and_are_the_same_again(tmp_path):
    write_encoder(tmp_path, "Gemma3Text")
    (tmp_path / "model.safetensors").unlink()
    states = [load_encoder(tmp_path, random_weights=True)(pack(texts([9]))) for _ in range(2)]
    assert torch.equal(*states)
    assert states[0].isfinite().all()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Bert", {"is_decoder": True}, "is_decoder must be false, got true"),
        ("Bert", {"num_attention_heads": 5}, "must be a multiple of num_attention_heads 5, got 64"),
        (
            "Bert",
            {"position_embedding_type": "relative_key"},
            "must be 'absolute', got 'relative_key'",
        ),
        ("Bert", {"hidden_act": "tan"}, "hidden_act must be one of silu, .*, got 'tan'"),
        ("Bert", {"quantization_config": {"a": 1}}, "quantization_config must be absent"),
        ("Roberta", {"pad_token_id": -1}, "pad_token_id must be a token id, got -1"),
        ("Roberta", {"max_position_embeddings": 2}, "must leave room for a token, got 2"),
        ("ModernBert", {"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ("NomicBert", {"qkv_proj_bias": True}, "qkv_proj_bias must be false, got true"),
        ("Bert", {"architectures": ["BertForTokenClassification"]}, "must name an encoder of Bert"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path, family, changes, message):
    write_encoder(tmp_path, family)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        load_encoder(tmp_path)


def test_a_field_that_nobody_reads_is_told(tmp_path):
    write_encoder(tmp_path, "Bert")
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.warns(UserWarning, match="does not know and leaves out: 'new_field'"):
        read_encoder(config | {"new_field": 1})


def test_a_file_without_classes_is_known_by_its_type_and_a_gemma_by_its_attention():
    assert encoder_family({"model_type": "xlm-roberta"}) == ("XLMRoberta", "Model")
    gemma = {"architectures": ["Gemma3TextModel"]}
    assert encoder_family(gemma) is None
    assert encoder_family(gemma | {"use_bidirectional_attention": True}) == ("Gemma3Text", "Model")
    for config in ({}, {"architectures": [3]}, {"model_type": "llama"}, {"model_type": 3}):
        assert encoder_family(config) is None
