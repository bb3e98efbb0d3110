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
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _DELTA | _EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", _DELTA | {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", _DELTA | _EXPERTS),
}


def make(case: str, seed: int = 7) -> Any:
    """Build transformers' model with every parameter random, large enough to matter."""
    name, own = CASES[case]
    kind = getattr(transformers, f"{name}ForCausalLM")
    config_class = kind.config_class
    config = config_class(**_SHAPE | own)
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
