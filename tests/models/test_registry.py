"""Models are built without doubling memory, initialised sanely, and import nothing heavy."""

from __future__ import annotations

import json

import pytest
import torch

from tests.models.tiny import VOCAB, make_hf, save_hf
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, build_model, load_model
from tilewise.models.config import read_config
from tilewise.models.native import NativeDecoder
from tilewise.models.weights import load_weights
from tilewise.nn import AttentionContext

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_embd": 128,
    "n_layer": 8,
    "n_head": 4,
    "n_positions": 64,
}


@pytest.mark.parametrize("hf", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_random_weights_have_the_spread_of_gpt2(hf):
    model = build_model(ModelConfig.from_hf(hf))
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / 4, rel=0.05), name  # sqrt(2 * 8)
        elif parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, not name.endswith("bias")))


@pytest.mark.parametrize("hf", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_fresh_model_predicts_uniformly_and_learns(hf):
    model = build_model(ModelConfig.from_hf(hf), generator=torch.Generator().manual_seed(1))
    assert model.training
    ids = torch.randint(0, 512, (4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        logits = model.compute_logits(model(ids[:, :-1]))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(512.0).log().item(), abs=0.3)
    assert losses[-1] < losses[0] - 1


def test_a_generator_makes_the_weights_reproducible():
    config = ModelConfig.from_hf(LLAMA)
    first, second = (
        build_model(config, generator=torch.Generator().manual_seed(5)).state_dict()
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_random_weights_need_only_a_configuration(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    first, again = (load_model(tmp_path, dtype="bfloat16", random_weights=True) for _ in range(2))
    assert not first.training
    assert first.embed_tokens.weight.dtype == torch.bfloat16
    assert torch.equal(first.embed_tokens.weight, again.embed_tokens.weight)
    assert first.embed_tokens.weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(CheckpointError, match="must hold model.safetensors"):
        load_model(tmp_path)


def test_construction_allocates_no_weights_before_they_are_needed(monkeypatch):
    devices = []
    original = torch.nn.Module.to_empty

    def spy(module, **kwargs):
        devices.extend(parameter.device.type for parameter in module.parameters())
        return original(module, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "to_empty", spy)
    build_model(ModelConfig.from_hf(LLAMA))
    assert set(devices) == {"meta"}


@pytest.mark.parametrize("case", ["llama", "gpt2_untied", "qwen2_bias_tied"])
def test_a_model_built_without_memory_is_that_of_torchs_own_construction(tmp_path, case):
    save_hf(make_hf(case), tmp_path)
    got = load_model(tmp_path)
    config = read_config(tmp_path)
    want = NativeDecoder(config)
    load_weights(want, tmp_path)
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
    assert [n for n, _ in got.named_buffers()] == [n for n, _ in want.named_buffers()]
    assert all(p.requires_grad for p in got.parameters())


@pytest.mark.parametrize("hf", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_packed_rows_need_positions(hf):
    model = build_model(ModelConfig.from_hf(hf))
    nothing = torch.zeros(1, dtype=torch.int32)
    ctx = AttentionContext(nothing, 1, nothing, nothing, nothing)
    with pytest.raises(ValueError, match="positions must be given with ctx, got None"):
        model(torch.zeros(1, dtype=torch.int64), ctx=ctx, kv=[])


def test_loaded_model_is_in_eval_mode_with_its_config(tmp_path):
    model = load_model(save_hf(make_hf("qwen3_norm_wide_heads"), tmp_path))
    assert not model.training
    assert type(model) is NativeDecoder
    assert (model.config.vocab_size, model.config.head_dim) == (VOCAB, 16)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_is_converted_on_load(tmp_path, dtype):
    hf = make_hf("llama")
    model = load_model(save_hf(hf, tmp_path), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight, hf.model.norm.weight.bfloat16())


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "float31", "float8_e4m3fn"])
def test_a_dtype_that_is_no_float_is_refused(tmp_path, dtype):
    save_hf(make_hf("llama"), tmp_path)
    with pytest.raises(
        TypeError, match="dtype must be 'auto' or a floating point dtype of 16 bits or more, got"
    ):
        load_model(tmp_path, dtype=dtype)


def test_dense_path_compiles_to_one_graph():
    model = build_model(ModelConfig.from_hf({**LLAMA, "num_hidden_layers": 1}))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids, positions = torch.randint(0, 512, (2, 16)), torch.arange(16).expand(2, 16)
    for arguments in ((ids,), (ids, positions)):
        actual = compiled(*arguments)
        torch.testing.assert_close(actual, model(*arguments))
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in model.layers.parameters())
