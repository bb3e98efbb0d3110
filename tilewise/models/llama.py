"""Llama 2 and 3, Mistral, Qwen2, Qwen3: one decoder, told apart by its configuration alone."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.weights import Weight
from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import GatedMLP, RMSNorm
from tilewise.nn.rope import RotaryEmbedding

__all__ = ["Llama"]


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    The residual stream travels as two terms, so that their addition and the norm that follows are
    one kernel: the last block's output, and the sum of all before it.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(
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


class Llama(Decoder):
    """The decoder of Touvron et al., 2023: RMSNorm, rotary positions, gated feed-forward, GQA."""

    weight_prefix = "model."
    ignored_weights = (r".*rotary_emb\.inv_freq",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None
        self.rotary = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(LlamaLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the last hidden states, normalised; see `Decoder.forward`."""
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

    def weight_table(self) -> tuple[Weight, ...]:
        """Return where each parameter comes from in a Hugging Face checkpoint."""
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
