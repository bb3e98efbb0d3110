"""Decoders whose layers normalise before attention and before a gated feed-forward block."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import GatedMLP, Parts, RankPart, RMSNorm
from tilewise.nn.rope import RotaryEmbedding

__all__ = ["PreNormDecoder", "PreNormLayer"]


class PreNormLayer(nn.Module):
    """A layer that computes x + attention(norm(x)), then x + mlp(norm(x)).

    The residual stream is passed as two terms, the last block's output and the sum of all before
    it, so that their addition and the next norm are one kernel.
    """

    def __init__(
        self, config: ModelConfig, attention: nn.Module, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: nn.Module = mlp or GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, bias=config.mlp_bias
        )
        for block in (attention, self.mlp):
            if isinstance(block, Attention | GatedMLP):
                block.leaves_parts = True  # the norm that follows adds the parts

    def forward(
        self,
        x: Tensor | Parts | RankPart,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        ctx: AttentionContext | None,
        kv: CacheLayer | None,
    ) -> tuple[Tensor | Parts | RankPart, Tensor]:
        """Map the residual stream x + residual (..., E) to itself; residual is None in the first
        layer.

        Returns the two terms, not yet added: the output of the feed-forward block, and the rest.
        """
        if residual is None:
            assert isinstance(x, Tensor)
            residual, x = x, self.attention_norm(x)
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.attention(x, rope, ctx=ctx, kv=kv)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class PreNormDecoder(Decoder):
    """Layers over one rotary embedding, then a norm; a subclass defines the layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None
        self.rotary = RotaryEmbedding(config.rope)
        self.layers = nn.ModuleList(self.new_layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def new_layer(self, config: ModelConfig, layer: int) -> PreNormLayer:
        """Return the layer of this index."""
        raise NotImplementedError

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
        return self.through_layers(self.embed_tokens(ids), rope, ctx=ctx, kv=kv)

    def through_layers(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the last hidden states of embedded tokens x (..., E); `forward` embeds them
        first."""
        residual = None
        for i, layer in enumerate(self.layers):
            own = ctx if ctx is None else ctx.of_layer(i)
            x, residual = layer(x, residual, rope, own, None if kv is None else kv[i])
        y: Tensor = self.norm(x) if residual is None else self.norm.add(x, residual)[0]
        return y
