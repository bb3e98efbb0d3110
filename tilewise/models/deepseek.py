"""DeepSeek-V2 with dense feed-forward blocks: a Llama with latent attention."""

from __future__ import annotations

from tilewise.models.config import ModelConfig
from tilewise.models.pre_norm import PreNormDecoder, PreNormLayer
from tilewise.models.weight_table import Weight
from tilewise.nn.mla import MultiheadLatentAttention

__all__ = ["DeepseekV2"]


class DeepseekLayer(PreNormLayer):
    """A layer with latent attention."""

    attention: MultiheadLatentAttention

    def __init__(self, config: ModelConfig, layer: int) -> None:
        latent = config.latent
        assert latent is not None
        attention = MultiheadLatentAttention(
            config.hidden_size,
            config.num_q_heads,
            kv_rank=latent.kv_rank,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            v_head_dim=latent.v_head_dim,
            q_rank=latent.q_rank,
            softmax_scale=config.softmax_scales[layer],
            qkv_bias=config.attention_bias,
            q_bias=False,
            o_bias=config.o_bias,
        )
        super().__init__(config, attention)


class DeepseekV2(PreNormDecoder):
    """The decoder of DeepSeek-AI, 2024, "DeepSeek-V2", with dense feed-forward blocks in all
    layers.

    Its cache has R + Dr channels a token and layer: the normalised latent, and the rotated key that
    all heads share; an 8-bit cache has scales, too. Channels that rotate are paired as (2i, 2i +
    1).
    """

    weight_prefix = "model."
    ignored_weights = (r".*rotary_emb\.inv_freq",)

    @property
    def hands_attention_over(self) -> bool:  # type: ignore[override]
        """Whether all layers call attention by the context: False with products folded in by
        `absorb`."""
        return all(
            layer.attention.e is None and layer.attention.f is None
            for layer in self.layers
            if isinstance(layer, DeepseekLayer)
        )

    def new_layer(self, config: ModelConfig, layer: int) -> DeepseekLayer:
        """Return the layer of this index."""
        return DeepseekLayer(config, layer)

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Replace the weights by the layout that this CPU reads fastest; see `Decoder`.

        Raises:
            ValueError: `is_int8`, which the up-projections of latents do not support.
        """
        if is_int8:
            raise ValueError(
                "weight_dtype must be auto with latent attention: its up-projections are not held "
                "as int8, got int8"
            )
        for module in self.modules():
            if isinstance(module, MultiheadLatentAttention):
                module.pack_up_projections()
        super().pack_for_inference()

    def weight_table(self) -> tuple[Weight, ...]:
        """Return for each parameter its tensors in a Hugging Face checkpoint."""
        config, latent = self.config, self.config.latent
        assert latent is not None
        inner = (config.intermediate_size,) * 2
        table = [Weight.of("embed_tokens.weight", "model.embed_tokens.weight")]
        for i in range(config.num_layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            names = {
                "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
                "attention.kv_a_norm": "self_attn.kv_a_layernorm",
                "attention.kv_b_proj": "self_attn.kv_b_proj",
                "attention.o_proj": "self_attn.o_proj",
                "mlp.down_proj": "mlp.down_proj",
                "attention_norm": "input_layernorm",
                "mlp_norm": "post_attention_layernorm",
            }
            if latent.q_rank is None:
                names["attention.q_b_proj"] = "self_attn.q_proj"
            else:
                names |= {
                    "attention.q_a_proj": "self_attn.q_a_proj",
                    "attention.q_a_norm": "self_attn.q_a_layernorm",
                    "attention.q_b_proj": "self_attn.q_b_proj",
                }
            biased = ["attention.kv_a_proj", "attention.o_proj"] if config.attention_bias else []
            if config.attention_bias and latent.q_rank is not None:
                biased.append("attention.q_a_proj")
            if config.mlp_bias:
                biased.append("mlp.down_proj")
            for name, source in names.items():
                for kind in ("weight", "bias") if name in biased else ("weight",):
                    table.append(Weight.of(f"{ours}.{name}.{kind}", f"{theirs}.{source}.{kind}"))
            for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
                parts = (f"{theirs}.mlp.gate_proj.{kind}", f"{theirs}.mlp.up_proj.{kind}")
                table.append(Weight(f"{ours}.mlp.gate_up_proj.{kind}", parts, inner))
        table.append(Weight.of("norm.weight", "model.norm.weight"))
        if self.lm_head is not None:
            table.append(Weight.of("lm_head.weight", "lm_head.weight"))
        return tuple(table)
