"""Llama 2 and 3, Mistral, Qwen2, Qwen3: one decoder, whose variants differ in configuration
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from tilewise.cache.spec import KVLayer
from tilewise.models.config import ModelConfig
from tilewise.models.cpu_program import CpuProgram, panels_of, weight_of
from tilewise.models.pre_norm import PreNormDecoder, PreNormLayer
from tilewise.models.weight_table import Weight
from tilewise.nn.attention import Attention
from tilewise.nn.layers import GatedMLP
from tilewise.nn.packed import PackedEmbedding, PackedLinear
from tilewise.ops import cpu_step as step

__all__ = ["Llama"]


class LlamaLayer(PreNormLayer):
    """A layer with grouped-query attention and a gated feed-forward block."""

    attention: Attention
    mlp: GatedMLP

    def __init__(self, config: ModelConfig, layer: int) -> None:
        attention = Attention(
            config.hidden_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            window=config.windows[layer],
            softmax_scale=config.softmax_scales[layer],
        )
        super().__init__(config, attention)


class Llama(PreNormDecoder):
    """The decoder of Touvron et al., 2023: RMSNorm, rotary positions, gated feed-forward, GQA."""

    weight_prefix = "model."
    ignored_weights = (r".*rotary_emb\.inv_freq",)

    def new_layer(self, config: ModelConfig, layer: int) -> LlamaLayer:
        """Return the layer of this index."""
        return LlamaLayer(config, layer)

    def why_no_cpu_program(self) -> str | None:
        """Say why there is no `cpu_program` of this model, or return None where there is one."""
        config = self.config
        if config.hidden_act not in ("silu", "swish"):
            return f"hidden_act must be silu, got {config.hidden_act}"
        if config.head_dim % 2:
            return f"head_dim must be even, got {config.head_dim}"
        linears = [m for m in self.modules() if isinstance(m, (nn.Linear, PackedLinear))]
        if not linears or not all(isinstance(m, PackedLinear) for m in linears):
            return "the weights must be packed, see Decoder.pack_for_inference"
        return None

    def cpu_program(self, caches: Sequence[KVLayer], *, batch_invariant: bool) -> CpuProgram:
        """Return a step as a list of operations for a CPU."""
        config = self.config
        assert config.rope is not None
        eps = config.norm_eps
        qkv_width = (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim
        program = step.new_program(
            self.dtype,
            caches[0],
            num_q_heads=config.num_q_heads,
            num_layers=config.num_layers,
            half=config.rope.rotary_dim // 2,
            batch_invariant=batch_invariant,
        )
        x = program.buffer("x", config.hidden_size)
        h = program.buffer("h", config.hidden_size)
        qkv = program.buffer("qkv", qkv_width)
        o = program.buffer("o", config.num_q_heads * config.head_dim)
        act = program.buffer("act", config.intermediate_size)
        final = program.buffer("final", config.hidden_size)
        logits = program.buffer("logits", config.vocab_size, torch.float32)
        table = self.embed_tokens
        assert isinstance(table, nn.Embedding | PackedEmbedding)
        program.embed(table.panels if isinstance(table, PackedEmbedding) else weight_of(table), x)
        places = list[int]()
        for i, (module, kv) in enumerate(zip(self.layers, caches, strict=True)):
            layer = cast(LlamaLayer, module)
            attention, mlp = layer.attention, layer.mlp
            program.norm(x, h, weight_of(layer.attention_norm), eps)
            program.product(h, qkv, panels_of(attention.qkv_proj), step.STORE)
            norms = None
            if config.qk_norm:
                norms = weight_of(attention.q_norm), weight_of(attention.k_norm)
            program.rotate(qkv, i, kv, eps, norms)
            places.append(len(program))
            scale, window = config.softmax_scales[i], config.windows[i]
            program.attend(qkv, o, i, kv, scale=scale, window=window)
            program.product(o, x, panels_of(attention.o_proj), step.ADD)
            program.norm(x, h, weight_of(layer.mlp_norm), eps)
            program.product(h, act, panels_of(mlp.gate_up_proj), step.GATE)
            program.product(act, x, panels_of(mlp.down_proj), step.ADD)
        program.norm(x, final, weight_of(self.norm), eps, is_sampled=True)
        head = self.lm_head if self.packed_head is None else self.packed_head
        program.product(final, logits, panels_of(head), step.LOGITS, is_sampled=True)
        return CpuProgram(program, places, self.rotary.reserve)

    def weight_table(self) -> tuple[Weight, ...]:
        """Return for each parameter its tensors in a Hugging Face checkpoint."""
        config = self.config
        q_rows = config.num_q_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        table = [Weight.of("embed_tokens.weight", "model.embed_tokens.weight")]
        for i in range(config.num_layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            projections = [
                ("attention.qkv_proj", "self_attn", ("q_proj", "k_proj", "v_proj")),
                ("attention.o_proj", "self_attn", ("o_proj",)),
                ("mlp.gate_up_proj", "mlp", ("gate_proj", "up_proj")),
                ("mlp.down_proj", "mlp", ("down_proj",)),
            ]
            biases = (config.attention_bias, config.o_bias, config.mlp_bias, config.mlp_bias)
            splits = ((q_rows, kv_rows, kv_rows), None, (config.intermediate_size,) * 2, None)
            for (name, owner, parts), has_bias, rows in zip(
                projections, biases, splits, strict=True
            ):
                for kind in ("weight", "bias") if has_bias else ("weight",):
                    sources = tuple(f"{theirs}.{owner}.{part}.{kind}" for part in parts)
                    table.append(Weight(f"{ours}.{name}.{kind}", sources, rows))
            norms = {
                "attention_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
            }
            if config.qk_norm:
                norms |= {
                    "attention.q_norm": "self_attn.q_norm",
                    "attention.k_norm": "self_attn.k_norm",
                }
            table += [
                Weight.of(f"{ours}.{name}.weight", f"{theirs}.{source}.weight")
                for name, source in norms.items()
            ]
        table.append(Weight.of("norm.weight", "model.norm.weight"))
        if self.lm_head is not None:
            table.append(Weight.of("lm_head.weight", "lm_head.weight"))
        return tuple(table)
