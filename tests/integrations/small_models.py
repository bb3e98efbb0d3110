"""Small random models of transformers, their inputs, and eager attention in exact float64."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
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
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tilewise.integrations.transformers.mask import _without_interface

VOCAB, LENGTH = 61, 11
# What the newest transformers calls the argument past_key_values.
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ENCODER = {k: v for k, v in _SHAPE.items() if k != "num_key_value_heads"}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
_GEMMA = {**_SHAPE, **_ALTERNATING, "head_dim": 16, "query_pre_attn_scalar": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, _SHAPE),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**_SHAPE, "head_dim": 16}),
    "mistral": (MistralConfig, MistralForCausalLM, {**_SHAPE, "sliding_window": 5}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, _GEMMA),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {
            **_SHAPE,
            **_ALTERNATING,
            "head_dim": 16,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "rope_parameters": _ROPE,
        },
    ),
    "gpt2": (
        GPT2Config,
        GPT2LMHeadModel,
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "bert": (BertConfig, BertForMaskedLM, _ENCODER),
    "modernbert": (
        ModernBertConfig,
        ModernBertForMaskedLM,
        {
            **_ENCODER,
            "num_hidden_layers": 4,
            "local_attention": 6,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "bart": (
        BartConfig,
        BartForConditionalGeneration,
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 40,
            "max_position_embeddings": 64,
            "forced_eos_token_id": None,
        },
    ),
    "t5": (
        T5Config,
        T5ForConditionalGeneration,
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 40,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}
DECODERS = ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2"]
ENCODERS = ["bert", "modernbert"]
ENCODER_DECODERS = ["bart", "t5"]


def build(name: str, attention: str, **changes: Any) -> PreTrainedModel:
    """Return the model in float32, the same weights for every attention."""
    config_class, model_class, settings = MODELS[name]
    config = config_class(**copy.deepcopy(settings) | changes)
    config._attn_implementation = attention
    config._experts_implementation = "eager"  # the grouped product of others is not for float64
    if name == "t5" and attention == "tilewise" and _without_interface(config_class):
        pytest.skip("T5 attends by itself in this version of transformers")
    model: PreTrainedModel = model_class(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise * scale)
    return model


def with_cache(function: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """Return a cache as the argument that this version of transformers calls it."""
    is_new = "cache" in inspect.signature(function).parameters
    return {"cache" if is_new else "past_key_values": cache}


def checkpoint(model: PreTrainedModel, reentrant: bool) -> None:
    """Keep no activations for the backward pass: by the name that this version gives it."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


def tokens(batch: int = 3, length: int = LENGTH) -> Tensor:
    """Return ids without special tokens."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def padding(side: str) -> Tensor:
    """Return a 2-D mask (3, LENGTH) with 4, 1 and 0 places of padding on one side."""
    places = torch.arange(LENGTH)
    if side == "left":
        return (places >= torch.tensor([[4], [1], [0]])).long()
    return (places < LENGTH - torch.tensor([[4], [1], [0]])).long()


class Exact(TorchFunctionMode):
    """Compute in float64 where models ask for float32, so that eager attention can be the truth."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.to:
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def results(
    model: nn.Module, inputs: dict[str, Tensor], rows: Tensor | None, do: Tensor
) -> dict[str, Tensor]:
    """Return the logits of the rows that are not padding, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(**inputs).logits
    keep = torch.ones_like(logits[..., 0], dtype=torch.bool) if rows is None else rows.bool()
    (logits[keep] * do[:, : logits.shape[1]][keep].to(logits.dtype)).sum().backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return {"logits": logits.detach()[keep], **grads}


def truth(name: str, inputs: dict[str, Tensor], rows: Tensor | None, do: Tensor):
    """Return the same of eager attention, all in float64."""
    model = build(name, "eager").double()
    with Exact():
        return results(model, inputs, rows, do)
