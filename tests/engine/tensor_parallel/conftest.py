"""A small checkpoint that four ranks can share, and an LLM of each size for all tests of a run."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests import warm
from tests.engine.checkpoint import VOCAB, write_tokenizer
from tests.models.test_gpt_oss import save_mxfp4
from tests.models.tiny import save_hf
from tilewise.engine.llm import LLM
from tilewise.errors import EngineClosedError

# Few tokens a step and few blocks: prompts come in chunks, and sequences lose their blocks.
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "max_model_len": 128,
    "swap_space_gib": 0.001,
}


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_nothing_stays(workers) -> None:
    assert not workers._folder.exists()
    assert not any(map(exists, workers.pids))
    assert all(member.line.fileno() == -1 for member in workers._members)


def write_model(path, head_dim: int = 8):
    """Save a random model of eight query heads and two key heads, with a tokenizer."""
    return write(
        Qwen3ForCausalLM,
        Qwen3Config,
        path,
        hidden_size=8 * head_dim,
        intermediate_size=16 * head_dim,
        num_key_value_heads=2,
        head_dim=head_dim,
        attention_bias=True,
    )


def write_gelu(path):
    """Save one whose feed-forward blocks have a gelu, with heads of 64 as GPUs like them."""
    return write(
        LlamaForCausalLM, LlamaConfig, path, hidden_act="gelu_pytorch_tanh", hidden_size=512,
        intermediate_size=1024, num_key_value_heads=4, head_dim=64,
    )  # fmt: skip


def write_windows(path):
    """Save one whose layers have a window, none, and the window again."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return write(
        Qwen2ForCausalLM, Qwen2Config, path, num_hidden_layers=3, num_key_value_heads=2,
        use_sliding_window=True, sliding_window=11, layer_types=kinds,
    )  # fmt: skip


def write_latents(path):
    """Save one whose layers keep latents."""
    return write(
        DeepseekV2ForCausalLM, DeepseekV2Config, path, first_k_dense_replace=2, kv_lora_rank=24,
        q_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        attention_bias=True,
    )  # fmt: skip


_EXPERTS = {"num_experts_per_tok": 3, "num_key_value_heads": 2}
_MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 8, "head_dim": 8, "moe_intermediate_size": 32},
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
            "n_shared_experts": 1, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 8,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_local_experts": 6, "head_dim": 8, "sliding_window": 11, "intermediate_size": 96},
    ),
}  # fmt: skip


def write_mixture(path, name):
    """Save a mixture of experts; gpt-oss's are MXFP4, three groups for two ranks."""
    model_class, config_class, own = _MIXTURES[name]
    write(model_class, config_class, path, **_EXPERTS | own)
    if name == "gpt_oss":
        save_mxfp4(model_class.from_pretrained(path), path)
    return path


def write(model_class, config_class, path, **fields):
    """Save a random model of eight query heads, each parameter large enough to matter."""
    shape = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 8, "max_position_embeddings": 256, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    model = model_class(config_class(**(shape | fields))).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    save_hf(model, path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="package", autouse=True)
def warm_workers():
    """Start workers with torch imported; those of a server are new interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", warm.Popen)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="session")
def llms(checkpoint):
    """LLMs by their size, started when they are first asked for."""
    made: dict[int, LLM] = {}

    def of(size: int) -> LLM:
        if size not in made:
            made[size] = LLM(checkpoint, tensor_parallel_size=size, **SETTINGS)
        return made[size]

    yield of
    for size, llm in made.items():
        assert llm.close()
        with pytest.raises(EngineClosedError):
            llm.generate({"prompt_token_ids": [1]})
        if size > 1:
            assert_nothing_stays(llm.engine.runner.workers)
