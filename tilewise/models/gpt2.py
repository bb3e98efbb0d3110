"""GPT-2: learned positions, LayerNorm before each block, biases everywhere, tied head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.weight_table import Weight
from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import MLP

__all__ = ["GPT2"]


class GPT2Layer(nn.Module):
    """A layer that computes x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(
            config.hidden_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=True,
            o_bias=True,
            softmax_scale=config.softmax_scales[layer],
        )
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor, ctx: AttentionContext | None, kv: CacheLayer | None) -> Tensor:
        """Map the residual stream (..., E) to itself."""
        x = x + self.attention(self.attention_norm(x), ctx=ctx, kv=kv)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT2(Decoder):
    """The decoder of Radford et al., 2019."""

    weight_prefix = "transformer."
    embedding_source = "transformer.wte.weight"
    ignored_weights = (r".*\.attn\.(bias|masked_bias)",)  # causal masks in old checkpoints

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(GPT2Layer(config, i) for i in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

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
            seqlen, most = self.dense_length(ids, ctx), self.config.max_position_embeddings
            if seqlen > most:
                raise ValueError(f"ids must have at most {most} tokens a row, got {seqlen}")
            positions = torch.arange(seqlen, device=ids.device)
        x = self.embed_tokens(ids) + self.embed_positions(positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, ctx, None if kv is None else kv[i])
        y: Tensor = self.norm(x)
        return y

    def weight_table(self) -> tuple[Weight, ...]:
        """Return each parameter's tensor in a checkpoint; Conv1D stores (in, out), ours is (out,
        in)."""
        modules = [
            ("embed_tokens", "transformer.wte", ("weight",), False),
            ("embed_positions", "transformer.wpe", ("weight",), False),
            ("norm", "transformer.ln_f", ("weight", "bias"), False),
        ]
        for i in range(self.config.num_layers):
            modules += [
                (f"layers.{i}.{ours}", f"transformer.h.{i}.{theirs}", ("weight", "bias"), is_conv)
                for ours, theirs, is_conv in (
                    ("attention_norm", "ln_1", False),
                    ("attention.qkv_proj", "attn.c_attn", True),
                    ("attention.o_proj", "attn.c_proj", True),
                    ("mlp_norm", "ln_2", False),
                    ("mlp.up_proj", "mlp.c_fc", True),
                    ("mlp.down_proj", "mlp.c_proj", True),
                )
            ]
        if self.lm_head is not None:
            modules.append(("lm_head", "lm_head", ("weight",), False))
        return tuple(
            Weight(
                f"{ours}.{kind}",
                (f"{theirs}.{kind}",),
                transposed=is_conv and kind == "weight",
            )
            for ours, theirs, kinds, is_conv in modules
            for kind in kinds
        )
