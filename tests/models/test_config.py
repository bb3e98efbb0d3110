"""config.json of every age becomes the same ModelConfig; what is not supported is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re

import pytest
import torch

from tests.models.tiny import CASES, DEEPSEEK_CASES, GPT2_CASES, PagedLoop, config_of, save_hf
from tilewise.engine.settings import context_length
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, build_model, load_model
from tilewise.models.config import read_config
from tilewise.models.families import llama as llama_families
from tilewise.nn.mla import LatentConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def llama(**changes):
    return ModelConfig.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize("case", [*CASES, *GPT2_CASES, *DEEPSEEK_CASES])
def test_what_transformers_writes_survives_a_round_trip(case):
    config_class, model_class, fields = config_of(case)
    written = json.loads(config_class(**fields).to_json_string())
    config = ModelConfig.from_hf({**written, "architectures": [model_class.__name__]})
    assert ModelConfig.from_hf(config.to_hf()) == config
    # and transformers reads ours as the same model
    again = json.loads(config_class(**config.to_hf()).to_json_string())
    again["architectures"] = [model_class.__name__]
    assert ModelConfig.from_hf(again) == config


def test_defaults_of_a_sparse_config():
    config = llama()
    assert (config.num_kv_heads, config.head_dim, config.norm.eps) == (4, 4, 1e-6)
    assert config.windows == (None,) * 3
    assert config.softmax_scales == (0.5,) * 3
    assert (config.ropes[0].theta, config.ropes[0].rope_type, config.ropes[0].rotary_dim) == (
        1e4,
        "default",
        4,
    )
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), "float32")
    assert not config.tie_word_embeddings
    assert ModelConfig.from_hf(GPT2).tie_word_embeddings


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        llama().vocab_size = 1


def test_old_and_new_rope_spellings_are_one():
    old = llama(
        rope_theta=5e5,
        rope_scaling={
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    )
    settings = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    new = llama(rope_parameters=settings)
    per_type = llama(rope_parameters={"full_attention": settings, "sliding_attention": settings})
    assert old == new == per_type
    assert (new.ropes[0].theta, new.ropes[0].factor, new.ropes[0].original_max_positions) == (
        5e5,
        8.0,
        16,
    )
    assert llama(rope_theta=3e4, rope_scaling=None).ropes[0].theta == 3e4


def test_an_older_spelling_beside_the_newer_one_counts():
    """As in transformers: who follows a model card adds rope_scaling to a newer file."""
    newer = {"rope_type": "default", "rope_theta": 10_000.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    both = llama(rope_parameters=newer, rope_scaling=yarn)
    assert both == llama(rope_scaling=yarn, rope_theta=10_000.0)
    assert (both.ropes[0].rope_type, both.ropes[0].factor) == ("yarn", 4.0)
    assert llama(rope_parameters=newer, rope_scaling=None).ropes[0].rope_type == "default"
    assert llama(rope_parameters=newer, rope_scaling={}).ropes[0].rope_type == "default"
    given = {**newer, "rope_theta": 1e6}
    for changes in ({"rope_theta": 5e5}, {"rope_scaling": {**yarn, "rope_theta": 5e5}}):
        config = llama(**{"rope_parameters": given, "rope_scaling": yarn, **changes})
        assert (config.ropes[0].rope_type, config.ropes[0].theta) == ("yarn", 5e5)


@pytest.mark.parametrize(
    ("settings", "positions", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 64, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 64, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, 256, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "linear", "factor": 4.0}, 64, 256),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "linear", "factor": 0.5}, 64, 64),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
            64,
            64,
        ),
        ({"rope_type": "default"}, 64, 64),
    ],
)
def test_a_stretched_context_is_as_long_as_its_scaling_makes_it(settings, positions, length):
    config = llama(rope_scaling=settings, max_position_embeddings=positions)
    # On a GPU the tables of angles are as long as the configuration says, and no check is made.
    assert config.context_length == config.ropes[0].max_positions == length
    assert config.max_position_embeddings == positions
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert context_length(None, config) == context_length(length, config) == length
    with pytest.raises(ValueError, match=f"max_model_len must be in 2 ... {length} "):
        context_length(length + 1, config)


def test_positions_of_gemma_are_those_of_the_stretched_model():
    config = ModelConfig.from_hf(
        {
            **LLAMA,
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 6,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    local, whole = config.ropes
    assert (whole.rope_type, whole.factor, whole.theta) == ("linear", 8.0, 5e5)
    assert config.context_length == whole.max_positions == 64
    assert local.rope_type == "default"


def test_yarn_without_factor_takes_the_ratio_of_the_lengths():
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    assert llama(rope_parameters=rope).ropes[0].factor == 4.0


def test_partial_rotary_factor_is_read_as_transformers_reads_it():
    """Whole heads are rotated, and what transformers cannot run is refused."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    for given in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ):
        theirs = modeling.LlamaConfig(
            hidden_size=32, num_attention_heads=4, head_dim=8, **copy.deepcopy(given)
        )
        angles = modeling.LlamaRotaryEmbedding(theirs).inv_freq
        assert llama(head_dim=8, **given).ropes[0].rotary_dim == 2 * len(angles) == 8
    scaled = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor must be 1 .*got 0\.5"):
        llama(head_dim=8, rope_parameters=scaled)
    config_class, model_class, fields = config_of("llama")
    theirs = config_class(**{**fields, "rope_parameters": {**scaled, "rope_theta": 1e4}})
    with pytest.raises(RuntimeError, match="size of tensor"):
        model_class(theirs)(torch.arange(3)[None])


@pytest.mark.parametrize("case", ["llama", "mistral_window", "qwen2_bias_tied", "qwen3_biases"])
def test_a_model_of_a_partial_rotary_factor_computes_what_transformers_computes(case, tmp_path):
    config_class, model_class, fields = config_of(case)
    theirs = model_class(config_class(**fields, partial_rotary_factor=0.5)).eval()
    save_hf(theirs, tmp_path)
    assert "partial_rotary_factor" in (tmp_path / "config.json").read_text()
    ids = torch.arange(1, 25)[None]
    ours = load_model(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.compute_logits(ours(ids)), theirs(ids).logits, rtol=1e-4, atol=1e-5
        )


def test_a_config_that_rotates_part_of_a_head_is_not_written():
    config = llama(head_dim=8)
    part = dataclasses.replace(config.ropes[0], rotary_dim=4)
    layers = tuple(
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, rope=part))
        for layer in config.layers
    )
    with pytest.raises(CheckpointError, match="rotary_dim must be 8, got 4"):
        dataclasses.replace(config, layers=layers).to_hf()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8}, (None, None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 4096, 4096),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 8, 8),
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": None,
                "layer_types": ["full_attention"] * 3,
            },
            (None, None, None),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
    ids=[
        "llama_ignores",
        "mistral",
        "mistral_null",
        "mistral_absent",
        "qwen_off",
        "qwen_absent",
        "qwen_upper",
        "mistral_layer_types",
        "mistral_null_layer_types",
        "qwen_layer_types",
    ],
)
def test_windows_follow_each_familys_rule(changes, windows):
    assert llama(num_key_value_heads=4, **changes).windows == windows


def test_shared_keys_are_found_in_a_model_with_layers_without_attention():
    """The layer read is told by its number among all layers, a cache by its place."""
    config = llama(num_hidden_layers=4)
    layers = list(config.layers)
    layers[0] = dataclasses.replace(layers[0], attention=None)
    reading = dataclasses.replace(layers[3].attention, kv_layer=2)
    layers[3] = dataclasses.replace(layers[3], attention=reading)
    config = dataclasses.replace(config, layers=tuple(layers))
    assert config.kv_sources == (0, 1, 1)
    torch.manual_seed(0)
    model = build_model(config, dtype="float32").eval()
    ids = torch.randint(0, 32, (1, 9))
    with torch.inference_mode():
        expected = model.compute_logits(model(ids))[0]
    loop = PagedLoop(model, max_tokens=9, num_seqs=1)
    got = torch.cat([loop.step({0: ids[0, :5].tolist()}), loop.step({0: ids[0, 5:].tolist()})])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_each_family_sets_its_own_switches():
    given = {**LLAMA, "num_key_value_heads": 4}  # absent, Mistral's class has 8
    by_family = {
        name: ModelConfig.from_hf({**given, "architectures": [name]}).layers[0]
        for name in (family.architecture for family in llama_families.FAMILIES)
    }
    attentions = {name: layer.attention for name, layer in by_family.items()}
    assert [name for name, a in attentions.items() if a.qkv_bias] == ["Qwen2ForCausalLM"]
    assert [name for name, a in attentions.items() if a.qk_norm] == ["Qwen3ForCausalLM"]
    assert not any(a.o_bias for a in attentions.values())
    assert not any(layer.feed_forward.bias for layer in by_family.values())
    assert attentions["Qwen3ForCausalLM"].head_dim == 128
    with_bias = {
        name: ModelConfig.from_hf(
            {**given, "architectures": [name], "attention_bias": True}
        ).attentions[0]
        for name in by_family
    }
    assert not with_bias["Qwen2ForCausalLM"].o_bias  # its output projection never has one
    assert with_bias["LlamaForCausalLM"].o_bias
    assert with_bias["Qwen3ForCausalLM"].o_bias


DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def test_latent_attention_is_read_with_its_scale():
    plain = ModelConfig.from_hf(DEEPSEEK)
    assert plain.latent == LatentConfig(8, 6, 4, 5)
    assert (plain.head_dim, plain.ropes[0].rotary_dim) == (10, 4)
    assert plain.softmax_scales == (10**-0.5,) * 3
    old = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    stretched = ModelConfig.from_hf({**DEEPSEEK, "rope_scaling": old})
    assert stretched.softmax_scales[0] == pytest.approx(
        10**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    )
    dense = {**DEEPSEEK, "n_routed_experts": None, "first_k_dense_replace": 1, "q_lora_rank": 7}
    assert ModelConfig.from_hf(dense).latent == LatentConfig(8, 6, 4, 5, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": 1, "topk_method": "noaux_tc"}, "topk_method must be"),
        ({"kv_lora_rank": None}, "config.json must hold kv_lora_rank, got none"),
        ({"q_lora_rank": 0}, "q_lora_rank must be a positive integer, got 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads 4"),
    ],
)
def test_latent_attention_that_is_not_served_is_refused(changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        ModelConfig.from_hf({**DEEPSEEK, **changes})


def test_model_type_stands_in_for_a_missing_architecture():
    config = {**LLAMA, "model_type": "qwen2"}
    del config["architectures"]
    assert ModelConfig.from_hf(config).architecture == "Qwen2ForCausalLM"


def test_either_name_of_the_dtype_is_read():
    assert llama(torch_dtype="bfloat16").dtype == "bfloat16"
    assert llama(dtype="float16").dtype == "float16"


def test_end_tokens_of_both_files_are_joined(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 2}))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert read_config(tmp_path).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["BertModel"]},
            r"architecture must be one of GPT2.*got 'BertForCausalLM'",
        ),
        ({"architectures": None}, r"architecture must be one of .*, got None"),
        ({"hidden_size": None}, r"config.json must hold hidden_size, got none"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": "32"}, r"vocab_size must be a positive integer, got '32'"),
        ({"num_key_value_heads": 3}, r"num_q_heads must be a multiple of num_kv_heads 3, got 4"),
        ({"hidden_act": "xielu"}, r"hidden_act must be one of silu, .*, got 'xielu'"),
        ({"dtype": "int8"}, r"dtype must be one of float32, .*, got 'int8'"),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2.0}},
            r"rope_type must be one of default, linear, llama3, yarn, .*, got 'proportional'",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_type 'linear' must come with factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            r"rope_type 'llama3' must come with low_freq_factor, got none",
        ),
        ({"head_dim": 5}, r"rotary_dim must be even and at least 2, got 5"),
        ({"rope_theta": -1.0}, r"theta must be positive and finite, got -1.0"),
        (
            {"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}},
            r"rope_parameters must be the same for all layer types",
        ),
        (
            {"quantization_config": {"quant_method": "quip"}},
            r"quant_method must be one of fp8, .*, got 'quip'",
        ),
    ],
)
def test_unsupported_settings_are_refused_in_one_sentence(changes, message):
    with pytest.raises(CheckpointError, match=message):
        llama(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names"),
        ({"architectures": [{}]}, "architectures must be a list of names"),
        ({"quantization_config": "gptq"}, "quantization_config must be a JSON object, got 'gptq'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number, got '1e-6'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be token ids, got '</s>'"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be token ids"),
        ({"rope_parameters": "linear"}, "rope_parameters must be a JSON object, got 'linear'"),
        ({"rope_scaling": [1]}, "rope_scaling must be a JSON object"),
        ({"rope_theta": "10000"}, "rope_theta must be a number, got '10000'"),
        ({"rope_theta": math.inf}, "rope_theta must be finite, got inf"),
        ({"rms_norm_eps": -1e-6}, "norm_eps must be finite and at least 0, got -1e-06"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be finite, got nan"),
        ({"hidden_act": ["silu"]}, "gelu_pytorch_tanh, got ['silu']"),
        ({"num_attention_heads": 64}, "num_attention_heads must be at most hidden_size, got 64"),
        # Texts are true to Python, and with a tied head the stored one is not read.
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, got 'false'",
        ),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"mlp_bias": []}, "mlp_bias must be true or false, got []"),
        ({"bos_token_id": "<s>"}, "bos_token_id must be a token id, got '<s>'"),
        ({"dtype": 0}, "dtype must be a text, got 0"),
        ({"architectures": False}, "architectures must be a list of names, got False"),
        ({"architectures": None, "model_type": []}, "model_type must be a text, got []"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000000"),
        ({"vocab_size": 2**31}, "vocab_size must be at most 2147483647, got 2147483648"),
        ({"rope_theta": 10**400}, "rope_theta must be finite"),
        ({"rope_parameters": {"rope_type": False}}, "rope_type must be one of default, linear"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": {}}},
            "rope_parameters must be settings, or objects of them by layer type",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}},
            "truncate must be true or false, got 'no'",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}},
            "theta must be above 1 with rope_type 'yarn', got 1",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "high_freq_factor must be above low_freq_factor 4, got 4",
        ),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_type must be one of default, linear"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number, got '2'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": True}},
            "beta_fast must be a number, got True",
        ),
    ],
)
def test_values_of_the_wrong_type_are_named(changes, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        llama(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types must be among full_attention"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of names, got"),
        ({"layer_types": [["x"]] * 3}, "layer_types must be among full_attention, .* got .'x'."),
        ({"max_window_layers": "2"}, "max_window_layers must be a number, got '2'"),
        (
            {"layer_types": ["full_attention"]},
            "layer_types must have one entry per layer .3., got 1",
        ),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
    ],
)
def test_wrong_windows_are_refused(changes, message):
    qwen = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 4}
    with pytest.raises(CheckpointError, match=message):
        llama(**{**qwen, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, got 0"),
        ({"query_pre_attn_scalar": -16}, "query_pre_attn_scalar must be positive, got -16"),
        ({"final_logit_softcapping": -3.0}, "logit_softcap must be positive and finite, got -3.0"),
    ],
)
def test_wrong_gemma_settings_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        llama(architectures=["Gemma3ForCausalLM"], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 3}, "n_embd must be a multiple of n_head 3, got 16"),
        ({"add_cross_attention": True}, "add_cross_attention must be false, got true"),
        ({"n_positions": None}, "config.json must hold n_positions, got none"),
    ],
)
def test_wrong_gpt2_settings_are_refused(changes, message):
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf({**GPT2, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"checkpoint must hold config.json, got none in "),
        ("{", r"config.json must be valid JSON, got "),
        ("[" * 100_000, r"config.json must be valid JSON, got "),
        ("[]", r"config.json must be a JSON object, got list"),
    ],
)
def test_unreadable_config_json_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_a_directory_that_is_none_is_named(tmp_path):
    with pytest.raises(
        CheckpointError,
        match="must be a folder, a GGUF file, a name on the hub or 'story', got '.*nowhere'",
    ):
        read_config(tmp_path / "nowhere")
