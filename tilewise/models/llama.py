"""Llama 2 and 3, Mistral, Qwen2, Qwen3: one decoder, whose variants differ in configuration
only."""

from __future__ import annotations

from tilewise.models.config import ModelConfig
from tilewise.models.pre_norm import PreNormDecoder, PreNormLayer
from tilewise.models.weights import Weight
from tilewise.nn.attention import Attention
from tilewise.nn.layers import GatedMLP

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
