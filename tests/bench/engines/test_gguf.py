"""A GGUF file holds the checkpoint's bits, in llama.cpp's names and order of rows."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tilewise.bench.engines.gguf import write_gguf
from tilewise.bench.engines.shapes import SHAPES
from tilewise.models import build_model
from tilewise.models.config import ModelConfig
from tilewise.models.weights import save_model
from tilewise.reference.rope import apply_rope

SMALL = SHAPES["llama-0.4b"] | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
}


@pytest.fixture
def written(monkeypatch):
    """What is told to a stand-in for the package gguf."""
    found = SimpleNamespace(tensors={}, kinds={}, said={})

    class Writer:
        def __init__(self, path, architecture):
            found.said["architecture"] = architecture

        def add_tensor(self, name, values, raw_shape=None, raw_dtype=None):
            found.tensors[name], found.kinds[name] = values.copy(), raw_dtype

        def __getattr__(self, name):
            return lambda *values: found.said.update({name: values})

    module = ModuleType("gguf")
    module.GGUFWriter = Writer
    module.GGMLQuantizationType = SimpleNamespace(BF16="bf16")
    monkeypatch.setitem(sys.modules, "gguf", module)
    return found


@pytest.fixture
def checkpoint(tmp_path):
    model = build_model(
        ModelConfig.from_hf(SMALL), dtype="bfloat16", generator=torch.Generator().manual_seed(1)
    )
    save_model(model, tmp_path)
    return model, tmp_path


def test_the_bits_of_bfloat16_stay_as_they_are(written, checkpoint):
    model, path = checkpoint
    write_gguf(path, path / "x.gguf", "bf16")
    assert written.said["architecture"] == "llama"
    assert written.said["add_tokenizer_model"] == ("no_vocab",)
    assert len(written.tensors) == 2 + 2 * 9  # the head is tied
    table = written.tensors["token_embd.weight"].view(np.uint16)
    ours = model.embed_tokens.weight.detach().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(table, ours)
    assert written.kinds["token_embd.weight"] == "bf16"
    assert written.tensors["blk.1.ffn_norm.weight"].dtype == np.float32


def test_q_rotated_in_pairs_is_q_rotated_in_halves(written, checkpoint):
    model, path = checkpoint
    write_gguf(path, path / "x.gguf", "f16")
    d, heads = 8, 4
    x = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ours = model.layers[0].attention.qkv_proj.weight[: heads * d].detach().half().double()
    theirs = torch.from_numpy(written.tensors["blk.0.attn_q.weight"]).double()
    angles = torch.arange(3, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    tables = angles.cos(), angles.sin()
    halves = apply_rope((x @ ours.T).view(3, heads, d), *tables)
    pairs = apply_rope((x @ theirs.T).view(3, heads, d), *tables, interleaved=True)
    reordered = pairs.unflatten(-1, (d // 2, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(reordered, halves)
    assert not torch.allclose(ours, theirs)


def test_a_gemma_has_its_norms_with_their_1_and_its_rows_as_they_are(written, tmp_path):
    small = {name: SMALL[name] for name in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size",
    )}  # fmt: skip
    shape = SHAPES["gemma-3-1b"] | small | {"num_hidden_layers": 6}
    model = build_model(ModelConfig.from_hf(shape), dtype="bfloat16")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.randn(parameter.shape))
    save_model(model, tmp_path)
    write_gguf(tmp_path, tmp_path / "x.gguf", "bf16")
    assert written.said["architecture"] == "gemma3"
    assert written.said["add_sliding_window"] == (512,)
    assert written.said["add_rope_freq_base"] == (1_000_000.0,)
    assert len(written.tensors) == 2 + 6 * 13
    for theirs, ours in (("attn_k_norm", "attention.k_norm"), ("post_ffw_norm", "mlp_out_norm")):
        weight = model.get_parameter(f"layers.5.{ours}.weight").detach().float().numpy()
        assert np.array_equal(written.tensors[f"blk.5.{theirs}.weight"], weight + 1)
    q = written.tensors["blk.0.attn_q.weight"].view(np.uint16)
    own = model.layers[0].attention.qkv_proj.weight[:32].detach().view(torch.int16).numpy()
    assert np.array_equal(q, own.view(np.uint16))


def _small_states(**changed):
    return SHAPES["qwen3.5-0.8b"] | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 40,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    } | changed  # fmt: skip


def test_layers_with_states_have_llama_cpps_names_and_rates(written, tmp_path):
    model = build_model(ModelConfig.from_hf(_small_states()), dtype="bfloat16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    save_model(model, tmp_path)
    write_gguf(tmp_path, tmp_path / "x.gguf", "bf16")
    assert written.said["architecture"] == "qwen35"
    assert written.said["add_rope_dimension_count"] == (4,)
    assert written.said["add_ssm_inner_size"] == (16,)
    assert len(written.tensors) == 2 + 3 * 14 + 11
    states = {name: x.detach().float().numpy() for name, x in model.named_parameters()}
    of_layer = {
        name.split(".", 2)[2]: x for name, x in states.items() if ".layers.1." in f".{name}"
    }
    (rates,) = (x for name, x in of_layer.items() if name.endswith(("A_log", "a_log")))
    assert np.allclose(written.tensors["blk.1.ssm_a"], -np.exp(rates))
    assert written.tensors["blk.1.ssm_conv1d.weight"].shape == (48, 4)
    (norm,) = (x for name, x in of_layer.items() if x.shape == (8,))
    assert np.array_equal(written.tensors["blk.1.ssm_norm.weight"], norm)
    shifted = written.tensors["blk.3.attn_k_norm.weight"]
    (own,) = (x for name, x in states.items() if "layers.3" in name and "k_norm" in name)
    assert np.array_equal(shifted, own + 1)


def test_value_heads_that_share_key_heads_are_refused(written, tmp_path):
    shape = _small_states(linear_num_value_heads=4)
    save_model(build_model(ModelConfig.from_hf(shape), dtype="bfloat16"), tmp_path)
    with pytest.raises(ValueError, match="linear_num_value_heads must be linear_num_key_heads"):
        write_gguf(tmp_path, tmp_path / "x.gguf", "bf16")


def test_other_models_are_refused(written, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    with pytest.raises(
        ValueError, match="must be a Llama, a Gemma 3 or a Qwen3.5 with a plain rope"
    ):
        write_gguf(tmp_path, tmp_path / "x.gguf", "bf16")
