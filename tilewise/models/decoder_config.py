"""A decoder as data: its layers, and what is before and after them; frozen once made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from tilewise.cache.spec import StateSpec
from tilewise.errors import CheckpointError
from tilewise.models.layer_config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.mla import LatentConfig
from tilewise.nn.rope import RopeConfig

__all__ = ["DecoderConfig"]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape and arithmetic of a decoder.

    Attributes:
        architecture: Hugging Face's class name, e.g. "LlamaForCausalLM".
        hidden_size: the width of the residual stream.
        max_position_embeddings: the longest sequence that the file names, in tokens; see
            `context_length`.
        layers: the layers, from the first to the last.
        norm: the norm of the residual stream: of every layer, and the last one.
        learned_positions: the rows of a learned table of positions; None for no table.
        first_position: the row of the first position in that table.
        embedding_norm: True if the embedding is normalised first.
        tie_word_embeddings: True if the embedding is the output head, too.
        embedding_scale: the factor of the embedding, rounded to the dtype of the model.
        residual_scale: the factor of what a block adds to the residual stream.
        logit_scale: the factor of the logits.
        logit_softcap: c of the softcap c tanh(logits / c), after the factor; None for no softcap.
        head_bias: True if the output head has a bias.
        token_inputs: the rows of a table of embeddings of the tokens, of all layers that read one
            (`LayerConfig.token_input_size`); 0 for none.
        can_be_captured: False if a step looks at numbers on the host and can be no CUDA graph.
        is_native: False if the layers are modules of transformers; then only what the engine and
            the cache need of a model is here.
        eos_token_ids: the tokens each of which ends a text.
        dtype: the name of the torch dtype that the checkpoint was saved in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = field(default_factory=NormConfig)
    learned_positions: int | None = None
    first_position: int = 0
    embedding_norm: bool = False
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    head_bias: bool = False
    token_inputs: int = 0
    is_native: bool = True
    can_be_captured: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
        if not self.layers:
            raise CheckpointError("layers must be at least one, got none")
        if self.dtype not in _DTYPES:
            raise CheckpointError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        cap = self.logit_softcap
        if cap is not None and not 0 < cap < math.inf:
            raise CheckpointError(f"logit_softcap must be positive and finite, got {cap}")

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer that has one, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def feed_forwards(self) -> tuple[FeedForwardConfig | ExpertsConfig, ...]:
        """The feed-forward block of each layer that has one, in order."""
        return tuple(x.feed_forward for x in self.layers if x.feed_forward is not None)

    @property
    def has_states(self) -> bool:
        """Whether a layer keeps a recurrent state of each sequence."""
        return any(layer.mixer is not None for layer in self.layers)

    def states(self, dtype: torch.dtype) -> tuple[tuple[int, StateSpec], ...]:
        """Return (number of the layer, spec of the state) of each layer that keeps a state.

        Args:
            dtype: the dtype of what a state keeps of tokens.
        """
        mixers = ((i, layer.mixer) for i, layer in enumerate(self.layers))
        return tuple((i, mixer.state(dtype)) for i, mixer in mixers if mixer is not None)

    @property
    def num_q_heads(self) -> int:
        """The largest number of query heads of a layer; 0 without attention."""
        return max((attention.num_q_heads for attention in self.attentions), default=0)

    @property
    def num_kv_heads(self) -> int:
        """The largest number of key heads of a layer; 0 without attention."""
        return max((attention.num_kv_heads for attention in self.attentions), default=0)

    @property
    def head_dim(self) -> int:
        """The channels of a query, of the layer with the most; 0 without attention."""
        return max((attention.head_dim for attention in self.attentions), default=0)

    @property
    def intermediate_size(self) -> int:
        """The width of a feed-forward block, of the widest layer; 0 without any."""
        return max((block.intermediate_size for block in self.feed_forwards), default=0)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The number of keys that a query sees, its own included, in each layer with attention;
        None for all."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def softmax_scales(self) -> tuple[float, ...]:
        """The factor of q . k in each layer with attention."""
        return tuple(attention.softmax_scale for attention in self.attentions)

    @property
    def cached_heads(self) -> tuple[tuple[int, int, int], ...]:
        """The sizes (Hk, D, Dv) of each layer with attention in the cache."""
        return tuple(attention.cached_head for attention in self.attentions)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """The source of the keys and values of each layer with attention: its own place or that of
        an earlier layer; empty if each layer has its own.

        Places are counted among the layers with attention, as those of caches are;
        `AttentionConfig.kv_layer` is counted among all layers.
        """
        if all(attention.kv_layer is None for attention in self.attentions):
            return ()
        numbers = [i for i, layer in enumerate(self.layers) if layer.attention is not None]
        return tuple(
            place if attention.kv_layer is None else numbers.index(attention.kv_layer)
            for place, attention in enumerate(self.attentions)
        )

    @property
    def latent(self) -> LatentConfig | None:
        """The sizes of latent attention, or None.

        Either all layers with attention have latent attention, or none has.
        """
        return self.attentions[0].latent if self.attentions else None

    @property
    def experts(self) -> ExpertsConfig | None:
        """The sizes of the first mixture of experts; None for a model without any."""
        found = (block for layer in self.layers for block in (layer.feed_forward, layer.experts))
        return next((block for block in found if isinstance(block, ExpertsConfig)), None)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary settings of the layers, each once, in the order of the layers."""
        found = (attention.rope for attention in self.attentions)
        return tuple(dict.fromkeys(rope for rope in found if rope is not None))

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence: the file's positions, or more if rotary scaling extends
        them, or less if it has other angles for all of a longer text (LongRoPE)."""
        if self.learned_positions is not None:
            return self.max_position_embeddings
        stretched = max((rope.max_positions for rope in self.ropes), default=0)
        bounds = [rope.max_positions for rope in self.ropes if rope.rope_type == "longrope"]
        return min([max(self.max_position_embeddings, stretched), *bounds])

    def with_windows(self, windows: tuple[int | None, ...]) -> Self:
        """Return the configuration with other windows, one for each layer with attention; None for
        all keys."""
        return self._with_attentions(
            replace(attention, window=window)
            for attention, window in zip(self.attentions, windows, strict=True)
        )

    def with_kv_heads(self, num_kv_heads: int | Sequence[int]) -> Self:
        """Return the configuration with other numbers of key heads: one for all layers with
        attention, or one for each of them."""
        counts = num_kv_heads
        if isinstance(counts, int):
            counts = (counts,) * len(self.attentions)
        return self._with_attentions(
            replace(attention, num_kv_heads=count)
            for attention, count in zip(self.attentions, counts, strict=True)
        )

    def _with_attentions(self, attentions: Iterable[AttentionConfig]) -> Self:
        given = iter(attentions)
        layers = (
            layer if layer.attention is None else replace(layer, attention=next(given))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))
