"""Small random models of every decoder family of transformers, by its `model_type`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import test_families, test_mixtures, test_state_families, tiny

__all__ = ["CASES", "FAMILIES", "make"]

# A configuration takes those that its class knows.
_SIZES: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_intermediate_size": 24, "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "sliding_window": 5, "vocab_size_per_layer_input":
    tiny.VOCAB, "hidden_size_per_layer_input": 8,
}  # fmt: skip
_ALTERNATE = {"layer_types": ["sliding_attention", "full_attention"]}
_ALL_HEADS = {"num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
# What a family wants otherwise; a field that is None keeps its class's default.
_OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": _ALTERNATE,
    "apertus": {},
    "axk1": _ALL_HEADS | {"head_dim": 8},
    "axk2": _ALL_HEADS,
    "bamba": _MAMBA,
    "biogpt": {},
    "bitnet": {},
    "cohere2_moe": _ALTERNATE,
    "cwm": _ALTERNATE,
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v32": _ALL_HEADS | {"index_topk": 16},
    "deepseek_v4": {},
    "diffllama": {},
    "doge": {},
    "exaone_moe": _ALTERNATE | {"is_moe_layer": [False, True]},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "falcon_mamba": {},
    "flex_olmo": {},
    "gemma3n_text": {
        "num_hidden_layers": 6, "intermediate_size": [40] * 6, "num_kv_shared_layers": 3,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, *[0.0] * 5],
    },
    "glm_moe_dsa": _ALL_HEADS | {"index_topk": 16},
    "granite_swa": _ALTERNATE,
    "granitemoehybrid": {"layer_types": ["full_attention"] * 2, **_MAMBA},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "hrm_text": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": _ALL_HEADS,
    "inkling_text": {},
    "jais2": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {},
    "laguna": _ALTERNATE,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": _ALL_HEADS | {
        "num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "zero_expert_num": 2,
        "moe_topk": 2, "num_hidden_layers": 4, "head_dim": 8,
    },
    "mamba": {},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "mellum": _ALTERNATE,
    "mimo_v2_flash": _ALTERNATE,
    "minicpm3": _ALL_HEADS | {"head_dim": None},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "minimax_m3_vl_text": {},
    "mistral4": _ALL_HEADS | {"qk_nope_head_dim": 8},
    "modernbert-decoder": _ALTERNATE,
    "nanochat": {},
    "nemotron_h": {},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "persimmon": {},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {},
    "recurrent_gemma": {},
    "rwkv": {},
    "solar_open": {},
    "vaultgemma": _ALTERNATE,
    "xglm": {"d_model": 32, "ffn_dim": 40, "num_layers": 2, "attention_heads": 4},
    "xlstm": {"num_heads": 2},
    "youtu": _ALL_HEADS | {"head_dim": 8},
    "zamba2": {
        "num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"],
        "mamba_ngroups": 1, "n_mamba_heads": 4, "num_mem_blocks": 1, "mamba_headdim": 16,
        "mamba_d_state": 8, "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

_CLASSES = {"mistral4": "Mistral4ForCausalLM"}  # which no table of transformers names


def _generic(model_type: str, own: dict[str, Any]) -> PreTrainedModel:
    kind: Any = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    fields = {
        name: value
        for name, value in _SIZES.items()
        if name not in own and (name in known or name in kind.attribute_map)
    }
    fields |= {name: value for name, value in own.items() if value is not None}
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) or _CLASSES[model_type]
    config = kind(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        model: PreTrainedModel = getattr(transformers, name)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                if parameter.dim() >= 2:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
                else:
                    parameter.add_(0.2 * noise)
    return model


def _cases() -> dict[str, tuple[str, Any]]:
    """Return by the name of a case its model_type and a function that makes its model."""
    found: dict[str, tuple[str, Any]] = {}
    for own in (tiny.CASES, tiny.DEEPSEEK_CASES, tiny.GPT2_CASES):
        for case, (config_class, _, _) in own.items():
            found[case] = (config_class.model_type, lambda case=case: tiny.make_hf(case))
    for module in (test_families, test_mixtures, test_state_families):
        for case, (name, _) in module.CASES.items():
            model_type = getattr(transformers, f"{name}ForCausalLM").config_class.model_type
            found[case] = (model_type, lambda case=case, make=module.make: make(case))
    for model_type, fields in _OTHERS.items():
        if model_type not in {have for have, _ in found.values()}:
            found[model_type] = (
                model_type,
                lambda model_type=model_type, fields=fields: _generic(model_type, fields),
            )
    return found


CASES = _cases()
"""By its name: the model_type of a case, and a function that makes its model."""
FAMILIES = tuple(sorted({model_type for model_type, _ in CASES.values()}))
"""The 119 decoder families, without encoders' and encoder-decoders' own heads."""


def make(case: str) -> PreTrainedModel:
    """Return transformers' model of a case, every parameter random and large enough to matter."""
    model: PreTrainedModel = CASES[case][1]()
    return model
