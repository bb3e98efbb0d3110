"""The training forward pass computes what the models and transformers compute."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from tests.training.small import WORDS, make_bert, make_decoder, make_packer
from tilewise.training.decoder import hidden_states
from tilewise.training.parameters import load_parameters, to_hugging_face
from tilewise.training.trainer import Settings, Trainer

DECODERS = [
    ("GPT2LMHeadModel", {}),
    ("LlamaForCausalLM", {}),
    ("LlamaForCausalLM", {"tie_word_embeddings": False}),
    ("MistralForCausalLM", {"sliding_window": 7}),
    ("Qwen3ForCausalLM", {"head_dim": 32}),
    (
        "Qwen3_5ForCausalLM",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
]


@pytest.mark.parametrize(("architecture", "changes"), DECODERS)
def test_rows_give_the_models_own_hidden_states(architecture, changes):
    model = make_decoder(architecture, **changes)
    ids = make_packer(is_rows=True).batch().ids
    got = hidden_states(model, ids, None, None, dtype=torch.float32)
    torch.testing.assert_close(got, model(ids), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("architecture", "changes"), DECODERS)
def test_a_packed_document_gives_what_it_gives_alone(architecture, changes):
    model = make_decoder(architecture, **changes)
    batch = make_packer().batch()
    got = hidden_states(model, batch.ids, batch.positions, batch.documents, dtype=torch.float32)
    bounds = batch.documents.cu_seqlens.tolist()[: batch.count + 1]
    for first, last in itertools.pairwise(bounds):
        alone = model(batch.ids[None, first:last])[0]
        torch.testing.assert_close(got[first:last], alone, rtol=2e-4, atol=2e-5)


def test_a_packed_bert_gives_transformers_loss_and_gradients():
    bert = make_bert()
    shape = bert.shape
    theirs = BertForMaskedLM._from_config(
        BertConfig(
            **{key: v for key, v in shape.to_hf().items() if key not in ("architectures", "dtype")}
        ),
        attn_implementation="eager",
    ).train()
    load_parameters(bert, theirs.state_dict())
    batch = make_packer().batch()
    places = torch.arange(0, 256, 5)
    trainer = Trainer(bert, Settings(dtype="float32", compile=""), words=WORDS)
    x = bert(batch.ids, batch.positions, batch.documents, places, dtype=torch.float32)
    loss = trainer._loss(x, batch.ids[places])
    loss.backward()

    bounds = batch.documents.cu_seqlens.tolist()[: batch.count + 1]
    labels = torch.full((256,), -100)
    labels[places] = batch.ids[places]
    total = torch.zeros(())
    for first, last in itertools.pairwise(bounds):
        logits = theirs(batch.ids[None, first:last]).logits[0]
        total = total + torch.nn.functional.cross_entropy(
            logits, labels[first:last], reduction="sum"
        )
    (total / len(places)).backward()
    torch.testing.assert_close(loss, total.detach() / len(places), rtol=1e-5, atol=1e-5)
    named = dict(theirs.named_parameters())
    for weight in bert.weight_table():
        for name, part in weight.parts(bert.get_parameter(weight.name).grad):
            want = named[name].grad
            if name.endswith("word_embeddings.weight"):
                want[0] = part[0]  # theirs takes id 0, [PAD], to have no gradient as an input
            torch.testing.assert_close(part[: len(want)], want, rtol=1e-3, atol=1e-6)
            assert part[len(want) :].abs().sum() == 0


@pytest.mark.parametrize("model", [make_decoder(), make_decoder("LlamaForCausalLM"), make_bert()])
def test_parameters_travel_to_hugging_faces_names_and_back(model):
    tensors = to_hugging_face(model, WORDS)
    assert sum(len(tensor) == WORDS for tensor in tensors.values()) in (1, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    load_parameters(model, tensors)
    for name, parameter in model.named_parameters():
        rows = WORDS if name in ("embed_tokens.weight", "head_bias") else len(parameter)
        assert torch.equal(parameter[:rows], before[name][:rows])
        assert parameter[rows:].abs().sum() == 0


def test_positions_and_documents_come_together():
    model, batch = make_decoder(), make_packer().batch()
    with pytest.raises(ValueError, match="positions and documents must come together"):
        hidden_states(model, batch.ids, batch.positions, None)
    with pytest.raises(ValueError, match=r"ids must be \(B, S\) without documents, got shape"):
        hidden_states(model, batch.ids, None, None)
    with pytest.raises(TypeError, match="model must be a NativeDecoder, got Linear"):
        hidden_states(torch.nn.Linear(1, 1), batch.ids[None], None, None)
