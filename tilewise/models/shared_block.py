"""A block of attention and a feed-forward block that several layers of a decoder share.

It reads the residual stream beside the embedding of the token, and what a layer of its own projects
from its output is added to what that layer's mixer reads; to the stream it adds nothing. Each layer
has adapters of low rank beside the products that it shares.
Source: Zyphra, 2024, "The Zamba2 suite", section 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.cache.spec import KVLayer
from tilewise.models.layer_config import AttentionConfig, FeedForwardConfig, SharedBlockConfig
from tilewise.nn.attention import Attention, KeysAndValues
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import GatedMLP, RMSNorm, project

__all__ = ["SharedBlock", "SharedBlockTurn"]


class SharedBlock(nn.Module):
    """The modules that several layers share: norm, attention, norm, feed-forward block.

    Args:
        hidden_size: the width E of the model.
        eps: the epsilon of the norms.
        attention: the attention of the block, which reads 2 E channels and gives E.
        feed_forward: the feed-forward block.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        attention: AttentionConfig,
        feed_forward: FeedForwardConfig,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(2 * hidden_size, eps)
        self.attention = Attention(
            2 * hidden_size,
            attention.num_q_heads,
            attention.num_kv_heads,
            attention.head_dim,
            softmax_scale=attention.softmax_scale,
        )
        self.attention.o_proj = nn.Linear(
            attention.num_q_heads * attention.head_dim, hidden_size, bias=False
        )
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.mlp = GatedMLP(
            hidden_size,
            feed_forward.intermediate_size,
            feed_forward.activation,
            bias=feed_forward.bias,
        )

    def forward(
        self,
        stream: Tensor,
        embedded: Tensor,
        turn: SharedBlockTurn,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext | None,
        kv: KVLayer | None,
        read: KeysAndValues | None = None,
    ) -> Tensor:
        """Return the rows (..., E) that are added to what a layer's mixer reads.

        They are the layer's projection of the block's output, whose input is stream and embedded
        side by side, 2 E channels. The residual stream itself is not changed.

        Args:
            stream, embedded: (..., E), the residual stream and the embedded tokens.
            turn: the layer's own parts: its adapters beside the shared products, and a projection.
            rope, ctx, kv, read: see `nn.Attention`.

        Raises:
            ValueError: ctx has adapters of a request, which shared products do not support.
        """
        if ctx is not None and ctx.adapters is not None:
            raise ValueError("adapters must be None for blocks that layers share, got some")
        x = self.norm(torch.cat((stream, embedded), dim=-1))
        o = self.attention(x, rope, ctx=ctx, kv=kv, read=read, added=turn.of_heads(x))
        assert isinstance(o, Tensor)
        h = self.mlp_norm(o)
        fed = self.mlp(h, added=turn.of_gate_up(h))
        assert isinstance(fed, Tensor)
        return project(turn.proj, fed)


class SharedBlockTurn(nn.Module):
    """The modules of one of the layers that share a block: adapters and the output's projection.

    Args:
        hidden_size: the width E of the model.
        config: the number of the block, and the rank of the adapters.
        attention, feed_forward: the configurations of the block.
    """

    def __init__(
        self,
        hidden_size: int,
        config: SharedBlockConfig,
        attention: AttentionConfig,
        feed_forward: FeedForwardConfig,
    ) -> None:
        super().__init__()
        rank, inner = config.rank, 2 * feed_forward.intermediate_size
        self.rank = rank
        self.proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate_up_down = nn.Linear(hidden_size, rank, bias=False)
        self.gate_up_up = nn.Linear(rank, inner, bias=False)
        self.qkv_down: nn.Linear | None = None
        if config.has_attention_adapters:
            heads = (attention.num_q_heads, attention.num_kv_heads, attention.num_kv_heads)
            self.qkv_down = nn.Linear(2 * hidden_size, 3 * rank, bias=False)
            self.q_up, self.k_up, self.v_up = (
                nn.Linear(rank, count * attention.head_dim, bias=False) for count in heads
            )

    def of_heads(self, x: Tensor) -> Tensor | None:
        """Return the term (..., (Hq + 2 Hk) D) that the layer's adapters add to queries, keys and
        values.

        None if the layer has no such adapters.

        Args:
            x: the block's normalised input, (..., 2 E).
        """
        if self.qkv_down is None:
            return None
        q, k, v = project(self.qkv_down, x).split_with_sizes((self.rank,) * 3, -1)
        up = ((self.q_up, q), (self.k_up, k), (self.v_up, v))
        return torch.cat([project(linear, part.contiguous()) for linear, part in up], dim=-1)

    def of_gate_up(self, h: Tensor) -> Tensor:
        """Return the term (..., 2 I) that the layer's adapter adds to gate and up.

        Args:
            h: the normalised input of the feed-forward block, (..., E).
        """
        return project(self.gate_up_up, project(self.gate_up_down, h))
