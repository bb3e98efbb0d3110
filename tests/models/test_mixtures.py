"""Families with mixtures of experts equal transformers: logits, tokens, gradients, panels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.tiny import (
    PROMPTS,
    VOCAB,
    assert_saved_as_the_same_model,
    greedy_dense,
    greedy_hf,
    greedy_paged,
    save_hf,
)
from tilewise import LLM, SamplingParams
from tilewise.cost.model import read_sizes
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, load_model
from tilewise.models.native import NativeDecoder
from tilewise.nn.experts import Experts

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 3, "pad_token_id": 0,
}  # fmt: skip
_MOE: dict[str, Any] = {"moe_intermediate_size": 24}
_GROUPED = _MOE | {
    "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "n_shared_experts": 2, "norm_topk_prob": True,
}  # fmt: skip
_LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "num_key_value_heads": 6,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 7}),
    "qwen2_moe": (
        "Qwen2Moe",
        _MOE | {"num_experts": 8, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", _MOE | {"num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_dense_layer": (
        "Qwen3Moe", _MOE | {"num_experts": 8, "mlp_only_layers": [0], "attention_bias": True}),
    "olmoe": ("Olmoe", {"num_experts": 8}),
    "glm4_moe": ("Glm4Moe", _GROUPED | {"use_qk_norm": True, "attention_bias": True}),
    "dots1": ("Dots1", _GROUPED),
    "deepseek_v2": (
        "DeepseekV2",
        _LATENT | _GROUPED | {"q_lora_rank": None, "topk_method": "group_limited_greedy",
                              "norm_topk_prob": False},
    ),
    "deepseek_v2_greedy": ("DeepseekV2", _LATENT | _MOE | {"n_routed_experts": 8}),
    "deepseek_v3": ("DeepseekV3", _LATENT | _GROUPED),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        _LATENT | {n: x for n, x in _GROUPED.items() if n != "first_k_dense_replace"}),
    "granitemoe": (
        "GraniteMoe",
        {"num_local_experts": 5, "attention_multiplier": 0.3, "embedding_multiplier": 2.0,
         "residual_multiplier": 0.7, "logits_scaling": 3.0},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        _MOE | {"moe_num_experts": 8, "use_bias": True, "tie_word_embeddings": False,
                "moe_layer_start_index": 1},
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True,
         "lm_head_bias": True, "sliding_window": 7, "router_jitter_noise": 0.05},
    ),
    "minimax_m2": ("MiniMaxM2", {"num_local_experts": 8, "head_dim": 16}),
}  # fmt: skip


def make(case: str, seed: int = 7) -> Any:
    """Build transformers' model with every parameter random, large enough to matter."""
    name, own = CASES[case]
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = getattr(transformers, f"{name}Config")(
        **_SHAPE | own, attn_implementation="eager", experts_implementation="eager"
    )
    model = kind(config).eval()
    draw = torch.Generator().manual_seed(seed)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for place, tensor in held.items():
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.dim() >= 2:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            elif "inv_freq" not in place:
                tensor.add_(0.2 * noise)
    return model


@pytest.fixture(params=CASES, scope="module")
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    """transformers' model and ours, from the same files."""
    hf = make(request.param)
    return hf, load_model(save_hf(hf, tmp_path_factory.mktemp(request.param)))


def test_logits_and_gradients_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    assert isinstance(ours, NativeDecoder)
    ids = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    expected, got = hf(ids).logits, ours.compute_logits(ours(ids))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for logits in (expected, got):
        logits.logsumexp(-1).sum().backward()
    theirs = {name: p.grad for name, p in hf.named_parameters()}
    router = next(n for n in ours.state_dict() if n.endswith("router.weight"))
    ours_grad = ours.get_parameter(router).grad
    [their_grad] = [
        grad for name, grad in theirs.items()
        if name.startswith(f"model.{router.split('.mlp')[0]}.")
        and name.endswith(("gate.weight", "router.weight", "router.layer.weight"))
        and "shared" not in name
    ]  # fmt: skip
    torch.testing.assert_close(ours_grad, their_grad, rtol=1e-3, atol=1e-4)


def test_greedy_tokens_are_those_of_transformers_also_by_panels(pair: tuple[Any, Any]) -> None:
    hf, ours = pair
    told = [greedy_hf(hf, prompt, 8) for prompt in PROMPTS]
    assert greedy_dense(ours, PROMPTS[0], 8) == told[0]
    ours.pack_for_inference()
    assert greedy_paged(ours, PROMPTS, steps=8, chunk=3) == told


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_that_is_saved_is_the_same_model_to_transformers(
    case: str, tmp_path: Path
) -> None:
    assert_saved_as_the_same_model(make(case), tmp_path)


@pytest.mark.parametrize("case", ["qwen3_moe_dense_layer", "deepseek_v3"])
def test_an_engine_serves_a_mixture_whose_router_stays_wide(case: str, tmp_path: Path) -> None:
    """In chunks, beside other requests, and in bfloat16 with a float32 correction."""
    hf = make(case)
    save_hf(hf, tmp_path)
    told = [greedy_hf(hf, prompt, 6) for prompt in PROMPTS]
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 8}
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(tmp_path, **options) as llm:
        assert [list(out.outputs[0].token_ids) for out in llm.generate(given, params)] == told
    model = load_model(tmp_path, dtype="bfloat16")
    mixture = next(m for m in model.modules() if isinstance(m, Experts))
    wide = case == "deepseek_v3"
    assert mixture.up.dtype == torch.bfloat16
    assert mixture.router.weight.dtype == (torch.float32 if wide else torch.bfloat16)
    assert not wide or mixture.correction_bias.dtype == torch.float32


REFUSED = {
    "too many experts of a token": ({"num_experts_per_tok": 9}, "num_active must be in 1"),
    "numbers that differ": ({"num_local_experts": 3}, "num_local_experts must be num_experts 8"),
    "no experts": ({"num_experts": None}, "config.json must hold num_experts"),
    "an unknown activation": ({"hidden_act": "tanh"}, "activation must be one of silu"),
    "layers that are none": ({"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    change, match = REFUSED[case]
    config = {**_SHAPE, **_MOE, "num_experts": 8, "architectures": ["Qwen3MoeForCausalLM"]}
    ModelConfig.from_hf(config)
    with pytest.raises(ValueError, match="must have dense feed-forward blocks, got num_experts 8"):
        read_sizes(config)
    with pytest.raises(CheckpointError, match=match):
        ModelConfig.from_hf(config | change)
