"""Families whose layers remember by a state equal transformers: logits, tokens, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.models.tiny import VOCAB, save_hf
from tilewise.models import load_model
from tilewise.models.native import NativeDecoder

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_OF_ATTENTION = {"intermediate_size", "num_attention_heads", "num_key_value_heads"}
_TYPES = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = {
    "layer_types": _TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 24, "head_dim": 32,
    "linear_conv_kernel_dim": 3, "attention_bias": True,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
}  # fmt: skip
_BIASES = {"attention_bias": True, "mlp_bias": True}
_SCALES = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}  # fmt: skip
_FALCON = {
    "lm_head_multiplier": 0.7, "embedding_multiplier": 3.0, "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.6, "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.1,
    "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9], "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 1.2,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA | _EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", _DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA | _EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", {n: x for n, x in _DELTA.items() if n != "head_dim"}),
    "kimi_linear": (
        "KimiLinear",
        {
            "layer_types": _TYPES,
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "linear_conv_kernel_dim": 3,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "num_key_value_heads": 6,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "time_step_limit": (0.3, 2.0),
        },
    ),
    "bamba": (
        "Bamba",
        _MAMBA | _BIASES | {"attn_layer_indices": [1], "mamba_proj_bias": True, "mamba_d_conv": 3},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _MAMBA
        | _SCALES
        | {
            "layer_types": _TYPES,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "time_step_limit": (0.4, 1.5),
        },
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybrid",
        _MAMBA
        | _SCALES
        | {
            "layer_types": _TYPES,
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1": ("FalconH1", _MAMBA | _BIASES | _FALCON | {"mamba_d_ssm": 96}),
    "falcon_h1_norm": (
        "FalconH1",
        _MAMBA
        | _FALCON
        | {
            "mamba_d_ssm": None,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.5,
        },
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 8,
            "conv_L_cache": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
}


def make(case: str, seed: int = 7) -> Any:
    """Build transformers' model with every parameter random, large enough to matter."""
    name, own = CASES[case]
    kind = getattr(transformers, f"{name}ForCausalLM")
    config_class = kind.config_class
    shape = {n: x for n, x in _SHAPE.items() if name != "Mamba2" or n not in _OF_ATTENTION}
    config = config_class(**shape | own)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = kind(config).eval()
    draw = torch.Generator().manual_seed(seed)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for place, tensor in held.items():
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.dim() >= 2 and "A_log" not in place and "mup" not in place:
                tensor.copy_(noise / tensor[0].numel() ** 0.5)
            elif "A_log" in place:
                tensor.copy_(0.5 * noise)
            elif "inv_freq" not in place and "mup" not in place:
                tensor.add_(0.2 * noise)
    return model


@pytest.fixture(params=CASES, scope="module")
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    """transformers' model and ours, from the same files."""
    hf = make(request.param)
    return hf, load_model(save_hf(hf, tmp_path_factory.mktemp(request.param)))


def test_log_probabilities_and_gradients_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    assert isinstance(ours, NativeDecoder)
    ids = torch.randint(0, VOCAB, (2, 90), generator=torch.Generator().manual_seed(1))
    logits = hf(ids, use_cache=False).logits, ours.compute_logits(ours(ids))
    want, got = (x.log_softmax(-1) for x in logits)
    assert (got - want).abs().max() < 2e-4
    for x in (want, got):
        x.gather(-1, ids.roll(-1, 1)[..., None]).sum().backward()
    theirs = hf.get_input_embeddings().weight.grad
    scale = theirs.abs().max().item()
    torch.testing.assert_close(ours.embed_tokens.weight.grad, theirs, rtol=1e-3, atol=1e-4 * scale)
    assert all(p.grad is not None for p in ours.parameters() if p.requires_grad)
