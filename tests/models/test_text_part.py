"""Checkpoints with pictures beside the text: their text part says what it says in transformers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, load_model
from tilewise.models.text_part import renamed, text_part

_TEXT: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_MARKS: dict[str, int] = {
    "image_token_id": 290,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
}


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sizes)}


# The model's class, its text part's class here, and the fields of its configuration.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        "Gemma3ForCausalLM",
        {
            "text_config": {
                **_TEXT,
                "head_dim": 16,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "image_token_index": 290,
            "boi_token_index": 291,
            "eoi_token_index": 292,
        },
    ),
    "llava": (
        "Llava",
        "LlamaForCausalLM",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": 290,
        },
    ),
    "mistral3": (
        "Mistral3",
        "MistralForCausalLM",
        {
            "text_config": {
                **_TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16,
            },
            "vision_config": {**_TOWER, "model_type": "pixtral"},
            "image_token_index": 290,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        "Qwen2ForCausalLM",
        {
            "text_config": {**_TEXT, "rope_parameters": _sections(1, 1, 2)},
            "vision_config": _QWEN_TOWER,
            **_MARKS,
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        "Qwen3ForCausalLM",
        {
            "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": _sections(2, 3, 3)},
            "vision_config": {
                **_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            **_MARKS,
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        "Qwen3VLMoeForCausalLM",
        {
            "text_config": {
                **_TEXT, "head_dim": 16, "rope_parameters": _sections(2, 3, 3), "num_experts": 4,
                "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1,
            },
            "vision_config": {
                **_QWEN_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
            },
            **_MARKS,
        },
    ),
    "kimi-k2.5": (
        "Kimi_K25",
        "DeepseekV3ForCausalLM",
        {
            "text_config": {
                **_TEXT, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 16,
                "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
            },
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                "num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4,
            },
            "projection_hidden_size": 64,
            "image_token_id": 290,
        },
    ),
}  # fmt: skip


def _name_as_published(file: Path) -> None:
    """Call the layers of Kimi K2.5's text layers, which transformers 5.17 writes as blocks."""
    tensors = load_file(file)
    old, new = "language_model.model.blocks.", "language_model.model.layers."
    if any(name.startswith(old) for name in tensors):
        save_file({name.replace(old, new): x for name, x in tensors.items()}, file)


@pytest.mark.parametrize("case", CASES)
def test_a_text_part_has_the_logits_of_the_whole_model(case: str, tmp_path: Path) -> None:
    family, architecture, fields = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    _name_as_published(tmp_path / "model.safetensors")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with pytest.warns(UserWarning, match=f"runs as {architecture}, its text part"):
        own = load_model(tmp_path)
    assert own.config.architecture == architecture
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        logits = own.compute_logits(own(ids))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_text_part_that_is_not_known_is_refused_by_the_whole_model(tmp_path: Path) -> None:
    config = {
        "architectures": ["NovelForConditionalGeneration"],
        "text_config": {**_TEXT, "model_type": "novel_text"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="got 'NovelForConditionalGeneration'"):
        load_model(tmp_path, random_weights=True)


def test_fields_of_an_older_file_stand_at_its_top() -> None:
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_TEXT,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "vision_config": _QWEN_TOWER,
        **_MARKS,
    }
    with pytest.warns(UserWarning, match="what vision_config describes is left out"):
        part = text_part(config)
    assert part["architectures"] == ["Qwen2ForCausalLM"]
    assert part["rope_scaling"] == {"type": "default"}
    assert not {"vision_config", "image_token_id", "model_type"} & set(part)


def test_tensors_have_the_names_of_a_model_of_text_alone() -> None:
    files = {
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "mtp.fc.weight": "mtp.fc.weight",
        "model.visual.patch_embed.proj.weight": None,
        "visual.merger.mlp.0.weight": None,
        "vision_tower.ln_pre.weight": None,
        "model.multi_modal_projector.linear_1.weight": None,
    }
    expected = {new: old for old, new in files.items() if new is not None}
    assert renamed(files) == expected


def test_kimi_k2_is_a_deepseek_v3_of_another_name() -> None:
    """As its file says; transformers 5 has no class for the name either."""
    fields = {
        "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 300,
        "num_key_value_heads": 4, "num_hidden_layers": 3, "max_position_embeddings": 4096,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
        "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "rope_theta": 50_000.0,
        "rope_scaling": {
            "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kimi, deepseek = (
            ModelConfig.from_hf(
                fields | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": name}
            )
            for name in ("kimi_k2", "deepseek_v3")
        )
    assert kimi == deepseek
    assert kimi.context_length == 131_072
    assert kimi.experts is not None
    assert kimi.experts.weight_scale == 2.827
