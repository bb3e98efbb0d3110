"""Mixtures of experts from MXFP4 files, unpacked or as they are; see test_llama for the decoder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import PROMPTS, greedy_dense, greedy_hf, make_hf, save_hf
from tilewise.cost.model import read_sizes
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, load_model, save_model
from tilewise.models.registry import empty_model
from tilewise.models.weights import load_weights
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.ops.mxfp4 import pack_mxfp4, unpack_mxfp4

FILE = "model.safetensors"
MIXTURE = ExpertsConfig(
    5, 2, 40, router_bias=True, activation="clamped", has_bias=True, is_interleaved=True
)


def save_mxfp4(hf, directory):
    """Save a checkpoint in MXFP4, as openai/gpt-oss-20b is laid out, and round the model to it."""
    save_hf(hf, directory)
    tensors = load_file(directory / FILE)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = pack_mxfp4(tensors.pop(name).mT)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            hf.get_parameter(name).copy_(unpack_mxfp4(blocks, scales, torch.float32).mT)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A checkpoint in MXFP4, and transformers' model of it."""
    hf = make_hf("gpt_oss")
    return hf, save_mxfp4(hf, tmp_path_factory.mktemp("gpt_oss"))


def as_it_is(directory):
    """The model as a GPU loads it: its experts stay packed."""
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    assert config.experts.is_packed
    model = empty_model(config, "float32", "cpu")
    load_weights(model, directory)
    return model.eval()


def test_unpacked_when_loaded_on_a_cpu_it_gives_transformers_tokens(packed):
    hf, directory = packed
    model = load_model(directory)
    assert not model.config.experts.is_packed
    assert model.get_parameter("layers.0.mlp.up").dtype == torch.float32
    assert greedy_dense(model, PROMPTS[0], 12) == greedy_hf(hf, PROMPTS[0], 12)


def test_left_packed_it_gives_the_same_bits(packed):
    _, directory = packed
    plain, model = load_model(directory), as_it_is(directory)
    up = model.get_parameter("layers.1.mlp.up")
    assert (up.dtype, up.shape, up.requires_grad) == (torch.uint8, (6, 64, 2, 16), False)
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))


def test_packed_weights_are_saved_as_they_are(packed, tmp_path):
    _, directory = packed
    save_model(as_it_is(directory), tmp_path)
    theirs, ours = load_file(directory / FILE), load_file(tmp_path / FILE)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert as_it_is(tmp_path).config == as_it_is(directory).config


def test_drawn_weights_are_finite(packed):
    _, directory = packed
    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    model = empty_model(config, "float32", "cpu")
    model.init_weights(generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.compute_logits(model(torch.tensor([PROMPTS[0]])))
    assert logits.isfinite().all()
    assert logits.std() > 0


def without_scales(tensors):
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def of_another_shape(tensors):
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name][:, :-2].contiguous()


def of_another_dtype(tensors):
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].int()


DAMAGE = {
    without_scales: "must hold tensor model.layers.1.mlp.experts.down_proj_scales",
    of_another_shape: r"gate_up_proj_blocks of model.safetensors must have shape \(6, 64, 2, 16\)",
    of_another_dtype: "blocks must be uint8",
}


@pytest.mark.parametrize("change", DAMAGE, ids=lambda f: f.__name__)
def test_damaged_checkpoints_are_refused(packed, tmp_path, change):
    tensors = load_file(packed[1] / FILE)
    change(tensors)
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text((packed[1] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=DAMAGE[change]):
        load_model(tmp_path)


def test_mxfp4_is_for_experts_and_int8_is_not(packed):
    hf = json.loads((packed[1] / "config.json").read_text())
    with pytest.raises(CheckpointError, match="quant_method must be one of fp8, .*, got 'mxfp4'"):
        ModelConfig.from_hf(hf | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(CheckpointError, match="num_experts_per_tok must be at most the 6 experts"):
        ModelConfig.from_hf(hf | {"num_experts_per_tok": 7})
    with pytest.raises(ValueError, match="weight_dtype must be auto with mixtures"):
        load_model(packed[1]).pack_for_inference(is_int8=True)


def test_published_defaults():
    """What openai/gpt-oss-20b's config.json leaves to the class, and what it says."""
    config = ModelConfig.from_hf(
        {"architectures": ["GptOssForCausalLM"], "vocab_size": 201_088, "hidden_size": 2880,
         "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
         "num_local_experts": 32, "rope_theta": 150_000, "torch_dtype": "bfloat16",
         "eos_token_id": 200_002, "quantization_config": {"quant_method": "mxfp4"}}
    )  # fmt: skip
    assert config.windows[:3] == (128, None, 128)
    assert config.experts == replace(
        MIXTURE, num_experts=32, num_active=4, intermediate_size=2880, is_packed=True
    )
    rope = config.ropes[0]
    assert (rope.rope_type, rope.factor, rope.original_max_positions) == ("yarn", 32.0, 4096)
    assert (rope.truncate, rope.theta) == (False, 150_000.0)
    assert (config.num_kv_heads, config.head_dim, config.layers[0].attention.o_bias) == (
        8,
        64,
        True,
    )


@pytest.mark.parametrize("count", [0, 1, 9])
def test_panels_of_experts_give_what_their_weights_give(count):
    """Rows by expert in panels against the definition, and no more rows than there are."""
    plain, ours = Experts(48, MIXTURE), Experts(48, MIXTURE)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_(0, 0.2)
        ours.load_state_dict(plain.state_dict())
        ours.pack_for_inference()
        assert not hasattr(ours, "up") or ours.up is not None
        x = torch.randn(3, count, 48)
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-5, atol=1e-5)


def test_inference_bits_on_a_gpu_are_those_of_one_tile_for_any_number_of_rows(packed, monkeypatch):
    """A batch-invariant engine's tile of experts does not follow the rows; nor does the model's."""
    model = load_model(packed[1])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        model.use_inference_bits()
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    assert all(each.has_inference_bits and each.is_invariant for each in experts)


@pytest.mark.gpu
def test_experts_learn_on_a_gpu_also_where_nothing_before_them_does():
    experts, x = Experts(64, MIXTURE), torch.randn(9, 64)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.2)
    experts.router.requires_grad_(False)
    [expected] = torch.autograd.grad(experts(x).sum(), [experts.down_bias])
    experts.cuda()
    [got] = torch.autograd.grad(experts(x.cuda()).sum(), [experts.down_bias])
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_what_reads_an_expert_in_part_is_refused(packed):
    config = ModelConfig.from_hf(json.loads((packed[1] / "config.json").read_text()))
    with pytest.raises(ValueError, match="must have dense feed-forward blocks"):
        read_sizes(config.to_hf())
