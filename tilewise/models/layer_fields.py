"""Readers of what most families say in config.json: sizes, windows, kinds of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import Json, count, count_or, num_layers_of, number
from tilewise.models.layer_config import (
    PRE_NORM,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    NormConfig,
)
from tilewise.nn.rope import RopeConfig

__all__ = [
    "Sizes",
    "layer_types",
    "layers_that_attend",
    "mixer_of",
    "types_of_windows",
    "windows_of_types",
]

# Kinds of layers by the names that they have in older files.
_FORMER_TYPES = {
    "mamba": "linear_attention",
    "conv": "linear_attention",
    "attention": "full_attention",
}
_Mixer = TypeVar("_Mixer", bound=MixerConfig)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that all decoders have, as read from a config.json.

    Attributes:
        positions: max_position_embeddings, in tokens.
        eps: the epsilon of the norms.
        activation: the name of the feed-forward block's activation, not yet checked.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    positions: int
    eps: float
    activation: Any

    @classmethod
    def of(
        cls,
        config: Json,
        *,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        positions: int | None = None,
        eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
        activation: tuple[str, str] = ("hidden_act", "silu"),
    ) -> Sizes:
        """Return the sizes of a config.json that has the usual names for them.

        Args:
            config: the contents of config.json.
            head_dim: the default of head_dim; None divides the width by the query heads.
            num_kv_heads: the default of num_key_value_heads; None for all query heads.
            positions: the default of max_position_embeddings; None requires the field.
            eps, activation: the field's name, and its default.

        Raises:
            CheckpointError: a size is missing, or no positive integer.
        """
        hidden_size = count(config, "hidden_size")
        num_layers = num_layers_of(config, "num_hidden_layers")
        num_q_heads = count(config, "num_attention_heads")
        head_dim = hidden_size // num_q_heads if head_dim is None else head_dim
        head_dim = count_or(config, "head_dim", head_dim)
        if head_dim < 1:
            raise CheckpointError(
                f"num_attention_heads must be at most hidden_size, got {num_q_heads}"
            )
        named, default = "max_position_embeddings", positions
        found = config.get(activation[0])
        return cls(
            hidden_size=hidden_size,
            intermediate_size=count(config, "intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=count_or(config, "num_key_value_heads", num_kv_heads or num_q_heads),
            head_dim=head_dim,
            positions=count(config, named) if default is None else count_or(config, named, default),
            eps=number(config, *eps),
            activation=activation[1] if found is None else found,
        )

    @property
    def model(self) -> dict[str, Any]:
        """The keyword arguments of `ModelConfig` for the width and the positions."""
        return {"hidden_size": self.hidden_size, "max_position_embeddings": self.positions}

    def wider(self, factor: int) -> Sizes:
        """Return the sizes with feed-forward blocks that are `factor` times as wide."""
        return replace(self, intermediate_size=factor * self.intermediate_size)

    def attention(self, **options: Any) -> AttentionConfig:
        """Return the attention of these heads with further options of `AttentionConfig`."""
        options.setdefault("softmax_scale", self.head_dim**-0.5)
        return AttentionConfig(self.num_q_heads, self.num_kv_heads, self.head_dim, **options)

    def feed_forward(self, **options: Any) -> FeedForwardConfig:
        """Return the feed-forward block of this width with further options."""
        return FeedForwardConfig(self.intermediate_size, self.activation, **options)

    def decoder(
        self,
        norm: NormConfig,
        rope: RopeConfig | Sequence[RopeConfig | None] | None,
        *,
        windows: Sequence[int | None] | None = None,
        attention: Mapping[str, Any] | None = None,
        feed_forward: FeedForwardConfig | None = None,
        norms: tuple[str, ...] = PRE_NORM,
        is_parallel: bool = False,
        **model: Any,
    ) -> dict[str, Any]:
        """Return the keyword arguments of `ModelConfig` of a decoder of like layers.

        Args:
            norm: the norm of the residual stream.
            rope: the rotary settings of all layers, or of each.
            windows: the window of each layer; None for none.
            attention: further options of `AttentionConfig`.
            feed_forward: the feed-forward block; None for a gated one without biases.
            norms, is_parallel: see `LayerConfig`.
            model: further keyword arguments of `ModelConfig`.
        """
        each = rope if isinstance(rope, Sequence) else (rope,) * self.num_layers
        block = self.feed_forward() if feed_forward is None else feed_forward
        layers = (
            LayerConfig(
                self.attention(rope=own, window=window, **(attention or {})),
                block,
                norms,
                is_parallel,
            )
            for own, window in zip(each, windows or (None,) * self.num_layers, strict=True)
        )
        return {**self.model, "layers": tuple(layers), "norm": norm, **model}


def mixer_of(kind: type[_Mixer], *sizes: Any, **options: Any) -> _Mixer:
    """Return kind(*sizes, **options), the configuration of a block that remembers by a state.

    Raises:
        CheckpointError: a size breaks a rule of the class.
    """
    try:
        return kind(*sizes, **options)
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def layer_types(config: Json, num_layers: int, default: list[str] | None = None) -> list[str]:
    """Return the type of each layer, from the config's layer_types or from `default`.

    Raises:
        CheckpointError: there is no list with an entry for each layer.
    """
    types = config.get("layer_types")
    types = default if types is None else types
    if not isinstance(types, list):
        raise CheckpointError(f"layer_types must be a list of names, got {types!r}")
    if len(types) != num_layers:
        raise CheckpointError(
            f"layer_types must have one entry per layer ({num_layers}), got {len(types)}"
        )
    return types


def layers_that_attend(
    config: Json, num_layers: int, usual: Sequence[bool], name: str = "layer_types"
) -> list[bool]:
    """Return for each layer whether it has attention; the others remember by a state.

    Args:
        config: the contents of config.json.
        num_layers: the number of layers.
        usual: whether the layers have attention in a file that does not say so.
        name: the field with the layers' kinds.

    Raises:
        CheckpointError: the field has another number of layers, or an unknown kind.
    """
    kinds = ("linear_attention", "full_attention")
    default = [kinds[attends] for attends in usual]
    types = layer_types({"layer_types": config.get(name)}, num_layers, default)
    current = [_FORMER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    unknown = [kind for kind in current if kind not in kinds]
    if unknown:
        raise CheckpointError(f"{name} must be among {', '.join(kinds)}, got {unknown[0]!r}")
    return [kind == "full_attention" for kind in current]


def windows_of_types(types: list[Any], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer: `window` for "sliding_attention", None for "full_attention".

    Raises:
        CheckpointError: a type is another, or a layer needs a window and there is none.
    """
    known = {"full_attention": None, "sliding_attention": window}
    unknown = [name for name in types if not isinstance(name, str) or name not in known]
    if unknown:
        raise CheckpointError(f"layer_types must be among {', '.join(known)}, got {unknown[0]!r}")
    if window is None and "sliding_attention" in types:
        raise CheckpointError(
            "sliding_window must be given (and use_sliding_window be true) where layer_types has "
            "sliding_attention, got none"
        )
    return tuple(known[name] for name in types)


def types_of_windows(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return the fields sliding_window and layer_types of config.json that say these windows.

    All windows must be equal; sliding_window is None if there are none.
    """
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [
            "full_attention" if window is None else "sliding_attention" for window in windows
        ],
    }
