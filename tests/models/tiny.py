"""Small random checkpoints made by transformers, their float64 truth, and a hand-driven cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from tilewise.models import Decoder, load_model, save_model
from tilewise.nn import AttentionContext

logging.disable_progress_bar()

VOCAB = 101  # no tile or vector divides it
PROMPTS = [[5, 17, 3, 88, 41, 9, 60, 22, 71, 13, 2], [7], [31, 4, 19, 99, 8]]

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_mha_tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "llama_mqa_biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3_ROPE}),
    "llama_yarn": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _YARN_ROPE}),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen2_bias_tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2_second_layer_window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2_layer_types": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ),
    "qwen3_norm_wide_heads": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3_biases": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
CASES |= {
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 9,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 12,
            "rope_parameters": _GEMMA_ROPE,
        },
    ),
    "gemma3_biases_softcap": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_bias": True,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
}
CASES |= {
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "hidden_size": 64,  # multiples of 32, so that its experts can be MXFP4
            "intermediate_size": 32,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "rope_parameters": _YARN_ROPE | {"truncate": False, "rope_theta": 150_000.0},
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        },
    ),
    "gpt_oss_tied_no_biases": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "attn_implementation": "eager",
            "experts_implementation": "eager",
        },
    ),
}
_DEEPSEEK_SHAPE = {
    **{name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"},
    "first_k_dense_replace": 2,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK_YARN = _YARN_ROPE | {"mscale": 0.707, "mscale_all_dim": 0.9, "factor": 4.0}
DEEPSEEK_CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "deepseek": (DeepseekV2Config, DeepseekV2ForCausalLM, {}),
    "deepseek_q_rank_biases": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {"q_lora_rank": 20, "attention_bias": True, "mlp_bias": True},
    ),
    "deepseek_biases": (DeepseekV2Config, DeepseekV2ForCausalLM, {"attention_bias": True}),
    "deepseek_yarn": (
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        {"rope_parameters": _DEEPSEEK_YARN, "tie_word_embeddings": True},
    ),
}
_GPT2_SHAPE = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_CASES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, {}),
    "gpt2_untied": (GPT2Config, GPT2LMHeadModel, {"tie_word_embeddings": False, "n_inner": 56}),
    "gpt2_scaled_by_layer": (
        GPT2Config,
        GPT2LMHeadModel,
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
}


def config_of(case: str) -> tuple[type, type, dict[str, Any]]:
    """Return transformers' config class, model class and the fields of a case."""
    config_class, model_class, own = {**CASES, **GPT2_CASES, **DEEPSEEK_CASES}[case]
    shape = _SHAPE if case in CASES else _GPT2_SHAPE
    shape = _DEEPSEEK_SHAPE if case in DEEPSEEK_CASES else shape
    return config_class, model_class, {**shape, **own}


def make_hf(case: str, seed: int = 7, **changes: Any) -> PreTrainedModel:
    """Build a transformers model whose every parameter is random, large enough to matter."""
    config_class, model_class, fields = config_of(case)
    model: PreTrainedModel = model_class(config_class(**(fields | changes))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms near 1, biases near 0
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def save_hf(model: PreTrainedModel, path: Path, **kwargs: Any) -> Path:
    """Write the checkpoint as transformers does."""
    model.save_pretrained(path, **kwargs)
    return path


def float64_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Run transformers' model in float64, its norms too (they are float32 as shipped)."""
    truth = copy.deepcopy(model).double()
    norms = [
        (name, module)
        for name, module in truth.named_modules()
        if type(module).__name__.endswith("RMSNorm")
    ]
    for name, module in norms:
        is_shifted = not hasattr(module, "variance_epsilon")  # Gemma's: 1 + weight
        eps = module.eps if is_shifted else module.variance_epsilon
        exact = nn.RMSNorm(module.weight.shape, eps=eps, dtype=torch.float64)
        exact.weight = nn.Parameter(1 + module.weight) if is_shifted else module.weight
        truth.set_submodule(name, exact)
    with torch.no_grad():
        return truth(ids).logits


def greedy_hf(model: PreTrainedModel, prompt: list[int], steps: int) -> list[int]:
    """Continue by argmax, without a cache."""
    ids = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def greedy_dense(model: Decoder, prompt: list[int], steps: int) -> list[int]:
    """Continue by argmax through the dense path, without a cache."""
    ids = list(prompt)
    for _ in range(steps):
        with torch.inference_mode():
            hidden = model(torch.tensor([ids]))
            ids.append(int(model.compute_logits(hidden[0, -1]).argmax()))
    return ids[len(prompt) :]


class PagedLoop:
    """An engine in miniature: blocks by hand, several sequences packed into each step."""

    def __init__(self, model: Decoder, max_tokens: int, num_seqs: int, block_size: int = 4) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        blocks_each = -(-max_tokens // block_size)
        num_blocks = num_seqs * blocks_each + 2
        dtype = model.embed_tokens.weight.dtype
        nan = float("nan")
        self.kv: list[Any] = [
            tuple(
                torch.full((num_blocks, block_size, heads, size), nan, dtype=dtype)
                for size in (dim, v_dim)
            )
            for heads, dim, v_dim in config.cached_heads
        ]
        self.kv = [self.kv[i] for i in config.kv_sources or range(config.num_layers)]
        if config.latent is not None:
            width = config.latent.kv_rank + config.latent.rope_dim
            self.kv = [
                torch.full((num_blocks, block_size, width), nan, dtype=dtype) for _ in self.kv
            ]
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
        self.tables = order[: num_seqs * blocks_each].view(num_seqs, blocks_each)
        self.lengths = [0] * num_seqs

    def step(self, work: dict[int, list[int]]) -> Tensor:
        """Compute the new tokens of some sequences; return the logits of all rows (T, vocab)."""
        positions, slots, bounds = [], [], [0]
        for row, tokens in work.items():
            first, self.lengths[row] = self.lengths[row], self.lengths[row] + len(tokens)
            for position in range(first, self.lengths[row]):
                block = int(self.tables[row, position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            bounds.append(bounds[-1] + len(tokens))
        ctx = AttentionContext(
            cu_seqlens_q=torch.tensor(bounds, dtype=torch.int32),
            max_seqlen_q=max(len(tokens) for tokens in work.values()),
            seqlens_k=torch.tensor([self.lengths[row] for row in work], dtype=torch.int32),
            block_table=self.tables[list(work)].to(torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        ids = torch.tensor([token for tokens in work.values() for token in tokens])
        with torch.inference_mode():
            hidden = self.model(ids, torch.tensor(positions), ctx=ctx, kv=self.kv)
            return self.model.compute_logits(hidden)


def greedy_paged(
    model: Decoder, prompts: list[list[int]], steps: int, chunk: int
) -> list[list[int]]:
    """Prefill in chunks, one sequence a step behind the next, and decode, all packed."""
    longest = max(len(prompt) for prompt in prompts) + steps
    loop = PagedLoop(model, longest, len(prompts))
    texts = [list(prompt) for prompt in prompts]
    tick = 0
    while any(len(text) < len(p) + steps for text, p in zip(texts, prompts, strict=True)):
        work = {
            row: text[loop.lengths[row] :][:chunk]
            for row, text in enumerate(texts)
            if row <= tick and len(text) < len(prompts[row]) + steps
        }
        logits = loop.step(work)
        last = -1
        for row, tokens in work.items():
            last += len(tokens)
            if loop.lengths[row] == len(texts[row]):
                texts[row].append(int(logits[last].argmax()))
        tick += 1
    return [text[len(p) :] for text, p in zip(texts, prompts, strict=True)]


def assert_same_gradients(hf: PreTrainedModel, ours: Decoder) -> None:
    """Compare the gradients of a loss of the dense path with transformers'."""
    ids = torch.randint(0, VOCAB, (2, 19))
    hf.zero_grad(), ours.zero_grad()
    for logits in (ours.compute_logits(ours(ids)), hf(ids).logits):
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        ).backward()
    theirs = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for weight in ours.weight_table():
        for source, part in weight.parts(ours.get_parameter(weight.name).grad):
            error = (part - theirs[source]).norm() / theirs[source].norm()
            assert error < 1e-4, (source, error.item())


def assert_saved_as_the_same_model(theirs: PreTrainedModel, folder: Path) -> None:
    """Hold what `save_model` writes of a model to the same weights, here and in transformers."""
    ours = load_model(save_hf(theirs, folder / "theirs"))
    save_model(ours, folder / "ours")
    again = load_model(folder / "ours")
    assert again.config == ours.config
    weights, read = ours.state_dict(), again.state_dict()
    assert weights.keys() == read.keys()
    assert all(torch.equal(weights[name], read[name]) for name in weights)
    given = theirs.state_dict()
    read = type(theirs).from_pretrained(folder / "ours").state_dict()
    assert not [name for name in given if not torch.equal(given[name], read[name])]
