"""DeepSeek-V2 with dense feed-forward blocks: a Llama whose attention keeps latents."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.weights import Weight
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import GatedMLP, RMSNorm
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.rope import RotaryEmbedding

__all__ = ["DeepseekV2"]


class DeepseekLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); see `LlamaLayer` for the two terms of x."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = MultiheadLatentAttention(
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
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        ctx: AttentionContext | None,
        kv: CacheLayer | None,
    ) -> tuple[Tensor, Tensor]:
        """Map the residual stream x + residual (..., E) to itself; before the first layer it is x.

        Returns its two terms, not yet added: what the feed-forward block gives, and the rest.
        """
        if residual is None:
            residual, x = x, self.attention_norm(x)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, rope, ctx=ctx, kv=kv)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class DeepseekV2(Decoder):
    """The decoder of DeepSeek-AI, 2024, "DeepSeek-V2", of which every layer is dense.

    A cache of it holds R + Dr channels a token and layer: the normalised latent and the rotated
    key that all heads share. Channels that rotate pair as (2i, 2i + 1).
    """

    weight_prefix = "model."
    ignored_weights = (r".*rotary_emb\.inv_freq",)

    hands_attention_over = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None
        self.rotary = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(DeepseekLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the last hidden states, normalised; see `Decoder.forward`.

        `kv` holds the latent cache of each layer, with its scales where it is an 8-bit one.
        """
        if positions is None:
            rope = self.rotary.prefix(self.dense_length(ids, ctx), ids.device)
        else:
            rope = self.rotary(positions)
        x, residual = self.embed_tokens(ids), None
        for i, layer in enumerate(self.layers):
            own = ctx if ctx is None else ctx.of_layer(i)
            x, residual = layer(x, residual, rope, own, None if kv is None else kv[i])
        y: Tensor = self.norm(x) if residual is None else self.norm.add(x, residual)[0]
        return y

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Lay the weights out as this CPU reads them fastest; see `Decoder.pack_for_inference`.

        Raises:
            ValueError: `is_int8`, which the up-projections of latents are not held in.
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
        """Return where each parameter comes from in a Hugging Face checkpoint."""
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
