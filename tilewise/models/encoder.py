"""An encoder as data: texts packed end to end to hidden states, in which a token sees both sides.

A family (`encoder_families`) is a reader of its config.json and a table of names; what differs
between families is a field of `EncoderConfig`, and no code here asks which family it is. Nothing is
cached: a text is computed whole, in one step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.errors import CheckpointError
from tilewise.models.vector_head import VectorHead
from tilewise.models.weight_table import Weight
from tilewise.nn.layers import ACTIVATIONS, Gate, RMSNorm, ShiftedRMSNorm
from tilewise.nn.rope import RopeConfig, RotaryEmbedding

__all__ = ["Encoder", "EncoderConfig", "EncoderShape", "Packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderShape:
    """The fields of an encoder's configuration that an engine needs.

    Attributes:
        architecture: Hugging Face's class name, e.g. "BertModel".
        hidden_size: the width of the residual stream.
        context_length: the tokens of the longest text, special tokens included.
        num_types: the rows of the table of token types; 0 for no table.
        dtype: the name of the torch dtype that the checkpoint was saved in.
        is_native: True if the layers are modules of this package.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    num_types: int = 0
    dtype: str = "float32"
    is_native: bool = True

    @property
    def can_be_captured(self) -> bool:
        """False: no step is a CUDA graph, as each has other lengths."""
        return False

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Empty: no token ends a text."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(EncoderShape):
    """The shape and arithmetic of an encoder of this package.

    Attributes:
        intermediate_size: the width of the feed-forward.
        num_positions: the rows of the table of learned positions; 0 for no table.
        position_offset: the row of the first token in that table.
        ropes: the rotary settings of each layer; None for no rotation.
        windows: the number of keys of each layer that a query sees on each side; None for all.
        num_buckets: the buckets of distances with a learned logit per head, as T5 has them; 0 for
            none.
        norm: the kind of norm; "shifted" is Gemma's.
        norm_bias: True if norms add a bias.
        order: "post" if the norm is taken of the sum behind a block, "pre" if a block reads the
            norm of the residual stream, "sandwich" if what it returns is normalised, too.
        qk_norm: True if each head of q and k is normalised before the rotation.
        softmax_scale: the factor of q . k; None is head_dim ** -0.5.
        embed_scale: the factor of the embedding.
        embeds_with_norm: True if the embedding is normalised.
        first_norm: False if the attention of the first layer reads the embedding as it is.
        is_gated: True if the feed-forward is down(act(gate) * up).
        qkv_bias, o_bias, mlp_bias: True if the projections of q, k and v, the output projection,
            and the feed-forward have biases.
    """

    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str
    ropes: tuple[RopeConfig | None, ...]
    windows: tuple[int | None, ...]
    num_positions: int = 0
    position_offset: int = 0
    num_buckets: int = 0
    norm: Literal["layer", "rms", "shifted"] = "layer"
    norm_bias: bool = True
    order: Literal["post", "pre", "sandwich"] = "post"
    qk_norm: bool = False
    softmax_scale: float | None = None
    embed_scale: float = 1.0
    embeds_with_norm: bool = True
    first_norm: bool = True
    is_gated: bool = False
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_attention_heads must be a multiple of num_key_value_heads "
                f"{self.num_kv_heads}, got {self.num_q_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act must be one of {known}, got {self.hidden_act!r}")
        if self.context_length < 1:
            raise CheckpointError(
                f"max_position_embeddings must leave room for a token, got {self.num_positions}"
            )


class Packed(NamedTuple):
    """Texts packed end to end.

    Attributes:
        ids: (T,) int64 token ids.
        positions: (T,) int64 place of each token in its text.
        types: (T,) int64 token types; None if all are 0.
        cu_seqlens: (B + 1,) int32, the first row of each text, then T.
        max_seqlen: the tokens of the longest text.
    """

    ids: Tensor
    positions: Tensor
    types: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int


def _norm(config: EncoderConfig, size: int | None = None) -> nn.Module:
    size = config.hidden_size if size is None else size
    if config.norm == "layer":
        return nn.LayerNorm(size, config.norm_eps, bias=config.norm_bias)
    return (RMSNorm if config.norm == "rms" else ShiftedRMSNorm)(size, config.norm_eps)


class EncoderAttention(nn.Module):
    """The attention of an encoder layer: heads, rotation, attention to both sides of a text,
    projection."""

    def __init__(self, config: EncoderConfig, window: int | None) -> None:
        super().__init__()
        self.heads = (config.num_q_heads, config.num_kv_heads, config.num_kv_heads)
        self.head_dim = config.head_dim
        self.window = None if window is None else (window, window)
        self.softmax_scale = config.softmax_scale
        self.q_norm = _norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = _norm(config, config.head_dim) if config.qk_norm else None
        width = config.num_q_heads * config.head_dim
        self.qkv_proj = nn.Linear(
            config.hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias
        )
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.o_bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, packed: Packed, bias: Tensor | None
    ) -> Tensor:
        """Return the attention's output (T, E) for the input x (T, E).

        Args:
            x: the input, of texts packed end to end.
            rope: the cosines and sines of the tokens' positions; None for no rotation.
            packed: the edges of the texts.
            bias: a term (1, Hq, S, S) that is added to the logits, or None.
        """
        heads = self.qkv_proj(x).unflatten(-1, (sum(self.heads), self.head_dim))
        q, k, v = heads.split_with_sizes(self.heads, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = ops.apply_rope(q, *rope), ops.apply_rope(k, *rope)
        o = ops.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_k=packed.cu_seqlens,
            max_seqlen_q=packed.max_seqlen,
            max_seqlen_k=packed.max_seqlen,
            window=self.window,
            softmax_scale=self.softmax_scale,
            bias=bias,
        )
        y: Tensor = self.o_proj(o.flatten(-2))
        return y


class EncoderMLP(nn.Module):
    """The feed-forward of an encoder layer: down(act(up(x))), or gated down(act(gate(x)) * up(x)).

    With a gate up_proj has the gate's rows first.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.intermediate_size
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate = Gate(self.activation) if config.is_gated else None
        self.up_proj = nn.Linear(
            config.hidden_size, 2 * width if config.is_gated else width, bias=config.mlp_bias
        )
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (T, E) for the input x (T, E)."""
        x = self.up_proj(x)
        x = self.activation(x) if self.gate is None else self.gate(x)
        y: Tensor = self.down_proj(x)
        return y


class EncoderLayer(nn.Module):
    """A layer of an encoder: attention and feed-forward, with norms in one of three orders.

    The norms are before the blocks, behind the sums of blocks and stream, or before and behind the
    blocks; see `EncoderConfig.order`.
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.is_post_norm = config.order == "post"
        is_sandwich = config.order == "sandwich"
        has_norm = layer > 0 or config.first_norm
        self.attention_norm = _norm(config) if has_norm else nn.Identity()
        self.attention = EncoderAttention(config, config.windows[layer])
        self.attention_out_norm = _norm(config) if is_sandwich else nn.Identity()
        self.mlp_norm = _norm(config)
        self.mlp = EncoderMLP(config)
        self.mlp_out_norm = _norm(config) if is_sandwich else nn.Identity()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, packed: Packed, bias: Tensor | None
    ) -> Tensor:
        """Return the residual stream (T, E) after the layer.

        Args:
            x: the residual stream (T, E).
            rope: the cosines and sines of the tokens' positions; None for no rotation.
            packed: the edges of the sequences.
            bias: an additive bias of the logits, (1, Hq, S, S), or None.
        """
        y: Tensor
        if self.is_post_norm:
            x = self.attention_norm(x + self.attention(x, rope, packed, bias))
            y = self.mlp_norm(x + self.mlp(x))
            return y
        block = self.attention(self.attention_norm(x), rope, packed, bias)
        x = x + self.attention_out_norm(block)
        y = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        return y


class Encoder(nn.Module):
    """Texts, packed end to end, to hidden states; and a head on the vector that they are pooled to.

    Args:
        config: the shape of the encoder.
        names: the modules of a Hugging Face checkpoint that each module here is made of; "{}"
            stands for the number of the layer.
        weight_prefix: the prefix of tensor names that a checkpoint of the bare model omits.
        ignored_weights: regular expressions of checkpoint tensors that are no parameters.

    Attributes:
        head: the layers on a pooled vector; None where the pooled states are the result.
        embedding_source: the embedding's name in a checkpoint.
        lm_head: None: no token is drawn.
        gives_vectors: False: `forward` returns a row for each token.
    """

    lm_head: None = None
    gives_vectors = False

    def __init__(
        self,
        config: EncoderConfig,
        names: Mapping[str, tuple[str, ...]],
        *,
        weight_prefix: str,
        ignored_weights: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.config, self.names = config, names
        self.weight_prefix, self.ignored_weights = weight_prefix, ignored_weights
        self.weight_renames: tuple[tuple[str, str], ...] = ()
        self.embedding_source = f"{weight_prefix}{names['embed_tokens'][0]}.weight"
        self.head: VectorHead | None = None
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_positions = (
            nn.Embedding(config.num_positions, size) if config.num_positions else None
        )
        self.embed_types = nn.Embedding(config.num_types, size) if config.num_types else None
        self.embed_norm = _norm(config) if config.embeds_with_norm else nn.Identity()
        self.distances = (
            nn.Embedding(config.num_buckets, config.num_q_heads) if config.num_buckets else None
        )
        distinct = dict.fromkeys(rope for rope in config.ropes if rope is not None)
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope) for rope in distinct)
        numbers = {rope: i for i, rope in enumerate(distinct)}
        self.rope_of = [None if rope is None else numbers[rope] for rope in config.ropes]
        self.layers = nn.ModuleList(EncoderLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.Identity() if config.order == "post" else _norm(config)

    def forward(self, packed: Packed) -> Tensor:
        """Return the last hidden states (T, E), in the dtype of the model."""
        config = self.config
        x: Tensor = self.embed_tokens(packed.ids)
        if config.embed_scale != 1.0:  # rounded to the dtype of the model, as it was trained
            x = x * float(torch.tensor(config.embed_scale).to(x.dtype))
        if self.embed_types is not None:
            types = packed.types
            x = x + (self.embed_types.weight[0] if types is None else self.embed_types(types))
        if self.embed_positions is not None:
            x = x + self.embed_positions(packed.positions + config.position_offset)
        x = self.embed_norm(x)
        ropes = [rotary(packed.positions) for rotary in self.rotaries]
        bias = self._bias(packed.max_seqlen, x)
        for number, layer in zip(self.rope_of, self.layers, strict=True):
            x = layer(x, None if number is None else ropes[number], packed, bias)
        y: Tensor = self.norm(x)
        return y

    def _bias(self, length: int, like: Tensor) -> Tensor | None:
        """Return the relative-position bias of T5, (1, Hq, S, S); None without one.

        Half of the buckets are for keys that come after the query. The first half of either half
        counts distances one by one; the rest grows as the logarithm, up to 128. Source: Raffel et
        al., 2020 (T5).
        """
        if self.distances is None:
            return None
        place = torch.arange(length, device=like.device)
        away = place[None, :] - place[:, None]
        half = self.config.num_buckets // 2
        exact, far = half // 2, away.abs()
        steps = torch.log(far.clamp(min=1).float() / exact) / math.log(128 / exact)
        large = (exact + (steps * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(far < exact, far, large) + half * (away > 0)
        bias: Tensor = F.embedding(bucket, self.distances.weight)
        return bias.permute(2, 0, 1).unsqueeze(0).to(like.dtype).contiguous()

    def weight_table(self) -> tuple[Weight, ...]:
        """Return for each parameter its tensors in a Hugging Face checkpoint."""
        config, table = self.config, list[Weight]()
        kv_rows = config.num_kv_heads * config.head_dim
        qkv_rows = (config.num_q_heads * config.head_dim, kv_rows, kv_rows)
        for name, _ in self.named_parameters():
            module, _, kind = name.rpartition(".")
            layer = re.search(r"\d+", module)
            theirs = self.names[re.sub(r"\d+", "{}", module)]
            number = "" if layer is None else layer.group()
            sources = tuple(f"{self.weight_prefix}{x.format(number)}.{kind}" for x in theirs)
            rows = None
            if len(sources) > 1:
                rows = qkv_rows if len(sources) == 3 else (config.intermediate_size,) * 2
            table.append(Weight(name, sources, rows))
        return tuple(table)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.embed_tokens.weight.device

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fill the parameters: matrices from normal(0, std), norms so that they multiply by 1,
        biases with 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std, generator=generator)
            else:
                is_zero = name.endswith("bias") or self.config.norm == "shifted"
                parameter.fill_(0.0 if is_zero else 1.0)
