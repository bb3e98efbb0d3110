"""Mistral's params.json and consolidated safetensors load as the checkpoint of Hugging Face's."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import make_hf, save_hf
from tilewise.errors import CheckpointError
from tilewise.models import load_model

_PARTS = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "layers", "lm_head": "output",
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm",
}  # fmt: skip


@pytest.fixture
def both(tmp_path, monkeypatch):
    """The folder of Hugging Face's files, and of Mistral's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain = save_hf(make_hf("mistral_window"), tmp_path / "plain")
    told = json.loads((plain / "config.json").read_text())
    heads, own = told["num_attention_heads"], {}
    dim = told.get("head_dim") or told["hidden_size"] // heads
    for name, tensor in load_file(plain / "model.safetensors").items():
        short = name
        for theirs, mistrals in _PARTS.items():
            short = short.replace(theirs, mistrals)
        if "q_proj" in name or "k_proj" in name:
            rows = tensor.view(-1, 2, dim // 2, tensor.shape[1])
            tensor = torch.stack((rows[:, 0], rows[:, 1]), 2).reshape(tensor.shape)
        own[short] = tensor.contiguous()
    folder = tmp_path / "own"
    folder.mkdir()
    save_file(own, folder / "consolidated.safetensors")
    params = {
        "dim": told["hidden_size"], "n_layers": told["num_hidden_layers"], "head_dim": dim,
        "hidden_dim": told["intermediate_size"], "n_heads": heads,
        "n_kv_heads": told["num_key_value_heads"], "norm_eps": told["rms_norm_eps"],
        "vocab_size": told["vocab_size"], "sliding_window": told["sliding_window"],
        "max_seq_len": told["max_position_embeddings"],
        "tied_embeddings": told["tie_word_embeddings"],
    }  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    return plain, folder, params


def test_the_model_is_that_of_hugging_faces_files(both):
    plain, folder, _ = both
    found, wanted = (load_model(x, dtype="float32") for x in (folder, plain))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    assert found.config.layers == wanted.config.layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe": {"num_experts": 8}}, "must describe a dense text model, got moe"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "text model, got quantization"),
        ({"use_biases": True}, "must describe a dense text model, got use_biases"),
        ({"dim": None}, "params.json must hold dim, got none"),
    ],
)
def test_what_is_not_served_is_named(both, change, message):
    _, folder, params = both
    (folder / "params.json").write_text(json.dumps(params | change))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_tensor_of_another_model_is_named(both):
    _, folder, _ = both
    file = folder / "consolidated.safetensors"
    save_file(load_file(file) | {"vision_encoder.ln.weight": torch.zeros(2)}, file)
    with pytest.raises(CheckpointError, match=r"of a dense text model, got vision_encoder\.ln"):
        load_model(folder)
