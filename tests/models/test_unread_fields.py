"""No field of a checkpoint is dropped in silence: it is read, refused, named, or harmless."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings

import pytest
import torch

from tests.models.tiny import config_of
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig
from tilewise.models.config import read_config
from tilewise.models.families import FAMILIES
from tilewise.models.unread_fields import HARMLESS, ReadFields, must_be

CASES = {
    "llama": "llama",
    "mistral": "mistral_window",
    "qwen2": "qwen2_second_layer_window",
    "qwen3": "qwen3_biases",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "gpt_oss": "gpt_oss",
    "deepseek": "deepseek",
}
# Values that differ from those of the tiny models, where adding one or turning a flag says nothing.
OTHERS = {
    "hidden_act": "gelu",
    "hidden_activation": "silu",
    "activation_function": "gelu",
    "dtype": "bfloat16",
    "head_dim": 20,
    "n_inner": 40,
    "num_key_value_heads": 3,
    "num_attention_heads": 12,
    "n_head": 6,
    "hidden_size": 96,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"],
    "rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 3.0},
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 2.0,
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "q_lora_rank": 16,
    "summary_activation": "tanh",
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "transformers_version": "4.1.0",
    "pad_token_id": 3,
    "architectures": ["BertModel"],
    "tie_word_embeddings": None,
}


def written(case):
    """What transformers writes for a tiny model, and its class."""
    config_class, model_class, fields = config_of(case)
    config = json.loads(config_class(**copy.deepcopy(fields)).to_json_string(use_diff=False))
    return config_class, model_class, {**config, "architectures": [model_class.__name__]}


def changed(config, name):
    """Another value of a field."""
    value = config.get(name)
    if OTHERS.get(name) is not None:
        other = OTHERS[name]
        if name == "layer_types":
            return other[: len(config[name])]
        if name == "rope_parameters" and isinstance(config.get("layer_types"), list):
            kinds = set(config["layer_types"])
            return dict.fromkeys(kinds, other) if "sliding_window_pattern" in config else other
        return other
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value + 0.25
    if isinstance(value, str):
        return value + "x"
    return 3 if value is None else value


def outcome(config, name, base):
    """What becomes of a config: "refused", "named", "read", or "" if nothing does."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = ModelConfig.from_hf(config)
        except CheckpointError:
            return "refused"
    if any(name in str(warning.message) for warning in told):
        return "named"
    return "read" if found != base else ""


def fields_of(config_class, config):
    return sorted({*(f.name for f in dataclasses.fields(config_class)), *config} - {"model_type"})


@pytest.mark.parametrize("family", CASES)
def test_what_transformers_writes_is_known(family):
    _, _, config = written(CASES[family])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelConfig.from_hf(config)


@pytest.mark.parametrize("family", CASES)
def test_no_field_that_transformers_knows_is_dropped(family):
    config_class, model_class, config = written(CASES[family])
    base = ModelConfig.from_hf(config)
    harmless = HARMLESS["config.json"] | {*FAMILIES[model_class.__name__].harmless.split()}
    # What another field of the same file overrules, in transformers too.
    overruled = {
        "gemma3": {"sliding_window_pattern", "rope_theta", "rope_local_base_freq"},
        "qwen2": {"max_window_layers"},
        "qwen3": {"max_window_layers", "sliding_window", "use_sliding_window"},
        "deepseek": {"first_k_dense_replace", "n_routed_experts"},
    }.get(family, set())
    for name in fields_of(config_class, config):
        what = outcome({**config, name: changed(config, name)}, name, base)
        assert what or name in harmless | overruled, name


# As published: what transformers of that time and others wrote beside the sizes.
PUBLISHED = {
    "llama": {
        "_name_or_path": "m", "is_llama_config": True, "pad_token_id": 2, "pretraining_tp": 1,
        "rope_interleaved": False, "rope_scaling": None, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {}}, "unsloth_version": "2025.1",
        "quantization_config": None,
    },
    "qwen2": {"use_mrope": False, "max_window_layers": 21, "torch_dtype": "bfloat16"},
    "gemma3": {
        "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "rope_local_base_freq": 10_000, "rope_theta": 1_000_000, "sliding_window_pattern": 2,
    },
    "gpt2": {"n_ctx": 128, "task_specific_params": {"text-generation": {"do_sample": True}}},
    "gpt_oss": {"experts_per_token": 3, "initial_context_length": 64, "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702},
    "deepseek": {
        "auto_map": {"AutoConfig": "x.Y"}, "aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True,
        "moe_layer_freq": 1, "scoring_func": "softmax",
    },
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_fields_that_change_nothing_are_not_named(family):
    _, _, config = written(CASES[family])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ModelConfig.from_hf({**config, **PUBLISHED[family]})


@pytest.mark.parametrize("family", CASES)
def test_a_field_that_nobody_knows_is_named(family):
    _, _, config = written(CASES[family])
    with pytest.warns(UserWarning, match="config.json has fields that .* leaves out: 'logits_scal"):
        ModelConfig.from_hf({**config, "logits_scaling": 8.0})
    ModelConfig.from_hf({**config, "logits_scaling": None})
    if "rope_parameters" in config and family != "gemma3":
        rope = {**config["rope_parameters"], "mrope_section": [1, 2]}
        with pytest.warns(UserWarning, match="rope_parameters of config.json has .*'mrope_section"):
            ModelConfig.from_hf({**config, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent, got"),
        ("gemma3", {"use_bidirectional_attention": True}, "must be false, got true"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be false, got true"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder must be false, got true"),
        ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config must be {}"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads must be {}, got"),
        ("llama", {"compression_config": {"format": "x"}}, "compression_config must be absent"),
        ("qwen2", {"use_mrope": True}, "use_mrope must be false, got true"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved must be false, got true"),
        ("llama", {"model_type": "mistral"}, "model_type must be 'llama' for LlamaForCausalLM"),
        ("qwen2", {"use_sliding_window": False}, "sliding_window must be given .* got none"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters must be objects by layer type",
        ),
        (
            "llama",
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            "rope_scaling must hold rope_theta .* where that is 1000000",
        ),
        (
            "llama",
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0},
            },
            "must be that of the rotary settings, which have None, got 16",
        ),
    ],
)
def test_what_matters_and_is_not_built_is_refused(family, changes, message):
    _, _, config = written(CASES[family])
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf({**config, **changes})


def test_a_type_that_is_not_its_architectures_is_named():
    _, _, config = written("llama")
    with pytest.warns(UserWarning, match="leaves out: 'model_type yi'"):
        ModelConfig.from_hf({**config, "model_type": "yi"})


def test_settings_of_the_packing_of_experts_are_read_or_named():
    _, _, config = written("gpt_oss")
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": False}
    config |= {"hidden_size": 64, "intermediate_size": 32}
    assert ModelConfig.from_hf({**config, "quantization_config": packed}).experts.is_packed
    with pytest.warns(UserWarning, match="quantization_config of config.json has .*'group_size'"):
        ModelConfig.from_hf({**config, "quantization_config": {**packed, "group_size": 16}})


def test_flags_and_numbers_are_not_taken_for_one_another():
    must_be({}, "x")
    must_be({"x": None}, "x")
    must_be({"x": False}, "x", False)
    with pytest.raises(CheckpointError, match="x must be false, got 0"):
        must_be({"x": 0}, "x", False)
    fields = ReadFields({"a": 1, "b": None, "use_cache": True, "c": 2})
    assert fields.get("a") == 1
    assert fields.unread("config.json") == ["c"]


@pytest.mark.parametrize(
    ("name", "told", "message"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8"}},
            "quant_algo of ModelOpt",
        ),
        (
            "quantize_config.json",
            {"bits": 3},
            "bits of the quantisation must be one of 4, 8, got 3",
        ),
    ],
)
def test_quantised_weights_that_another_file_tells_of_are_refused(tmp_path, name, told, message):
    _, _, config = written("llama")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    assert read_config(tmp_path).architecture == "LlamaForCausalLM"
    (tmp_path / name).write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_harmless_fields_change_no_logit_in_transformers(family):
    config_class, model_class, config = written(CASES[family])
    harmless = HARMLESS["config.json"] | {*FAMILIES[model_class.__name__].harmless.split()}
    ids = torch.arange(1, 60)[None]

    def logits(changes):
        torch.manual_seed(3)
        fields = copy.deepcopy({**config, **changes})
        for name in ("architectures", "model_type", "transformers_version"):
            fields.pop(name, None)
        model = model_class(config_class(**fields)).float().eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
            return model(ids).logits

    base = logits({})
    for name in sorted(harmless & set(fields_of(config_class, config))):
        if name in ("dtype", "transformers_version", "return_dict"):
            continue  # read, written by whoever saves, and the shape of the answer
        if family == "deepseek" and name in ("topk_method", "head_dim", "qk_head_dim"):
            continue  # names of rules; what follows from other fields
        other = logits({name: changed(config, name)})
        torch.testing.assert_close(other, base, rtol=1e-5, atol=1e-5, msg=name)
