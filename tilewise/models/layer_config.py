"""The configuration of one decoder layer: norms, attention or a state (or both), feed-forward
block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.errors import CheckpointError
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.gated_delta_net import GatedDeltaConfig
from tilewise.nn.kimi_delta import KimiDeltaConfig
from tilewise.nn.layers import ACTIVATIONS
from tilewise.nn.mamba2 import Mamba2Config
from tilewise.nn.mla import LatentConfig
from tilewise.nn.rope import RopeConfig
from tilewise.nn.short_conv import ShortConvConfig

__all__ = [
    "PARALLEL",
    "POST_NORM",
    "PRE_NORM",
    "SANDWICH",
    "AttentionConfig",
    "FeedForwardConfig",
    "LayerConfig",
    "MixerConfig",
    "NormConfig",
    "QueryGrowth",
    "SharedBlockConfig",
]

NORM_KINDS = ("rms", "shifted_rms", "layer", "shifted_layer")
PRE_NORM = ("attention_norm", "mlp_norm")
POST_NORM = ("attention_out_norm", "mlp_out_norm")
SANDWICH = ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
PARALLEL = ("attention_norm",)
"""The norms of a layer, by the usual names of their orders; see `LayerConfig.norms`."""

MixerConfig = GatedDeltaConfig | KimiDeltaConfig | Mamba2Config | ShortConvConfig
"""What a layer has that remembers by a state, beside attention or in place of it."""


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A norm over channels.

    Attributes:
        kind: one of NORM_KINDS: a root mean square or a mean and a variance, with a weight that is
            a factor or, shifted, its excess over 1.
        eps: the number that is added to the mean square or the variance.
        has_weight, has_bias: whether the normalised channels are multiplied by a learned weight,
            and whether a bias is added.
    """

    kind: str = "rms"
    eps: float = 1e-6
    has_weight: bool = True
    has_bias: bool = False

    def __post_init__(self) -> None:
        if self.kind not in NORM_KINDS:
            raise CheckpointError(f"norm must be one of {', '.join(NORM_KINDS)}, got {self.kind!r}")
        if not 0 <= self.eps < math.inf:
            raise CheckpointError(f"norm_eps must be finite and at least 0, got {self.eps}")


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """The growth of queries with their position p: 1 + beta ln(1 + floor((p + first) / length)).

    Source: Nakanishi, 2025, "Scalable-softmax is superior for attention", as Llama 4 uses it.

    Attributes:
        beta: the factor of the logarithm.
        length: the tokens of a step of the growth.
        first: the term that is added to a position, 0 or 1.
    """

    beta: float
    length: int
    first: int = 0

    def __post_init__(self) -> None:
        if type(self.length) is not int or self.length < 1:
            raise CheckpointError(
                f"length of query_growth must be a positive integer, got {self.length!r}"
            )
        if not math.isfinite(self.beta):
            raise CheckpointError(f"beta of query_growth must be finite, got {self.beta}")


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The attention of one layer.

    Attributes:
        num_q_heads, num_kv_heads: Hq and Hk.
        head_dim: D, the channels of a query and a key; Dn + Dr with latents.
        v_head_dim: Dv, the channels of a value; None for D.
        softmax_scale: the factor of q . k.
        window: the number of keys that a query sees, its own included; None for all before it.
        rope: the rotary settings; None for no rotation.
        qkv_bias, o_bias: whether the projections of q, k and v, and of the output, have biases.
        qk_norm: the norm of q and k; None for none.
        qk_norm_over: the channels that norm averages over: "head" for those of a head, "heads" for
            those of all heads.
        norms_after_rope: True if q and k are normalised after the rotation.
        has_sinks: True if every head has a learned logit in its softmax denominator.
        softcap: c of the softcap c tanh(logits / c) of attention; 0 for none.
        alibi_slopes: the slope of each query head, by which logits fall with the distance of the
            key (ALiBi); empty for none.
        latent: the sizes of latent attention; None for ordinary keys and values.
        v_norm: True if values are divided by the root mean square of their head, with the eps of
            `qk_norm`.
        v_is_k: True if the projection of the keys, before their norm and rotation, is the values'.
        kv_layer: the number, among all layers of the model, of the earlier layer whose keys and
            values this layer reads; None if it has its own.
        is_chunked: True if the window begins anew at each multiple of its size: a query sees the
            keys of its own chunk up to its own.
        query_growth: the growth of queries with their position; None for none.
        has_gate: True if the output of each head is multiplied by the sigmoid of a projection.
        input_scale, output_scale: factors of what the layer reads and of what it gives.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    v_head_dim: int | None = None
    window: int | None = None
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormConfig | None = None
    qk_norm_over: str = "head"
    norms_after_rope: bool = False
    has_sinks: bool = False
    softcap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    latent: LatentConfig | None = None
    v_norm: bool = False
    v_is_k: bool = False
    kv_layer: int | None = None
    is_chunked: bool = False
    query_growth: QueryGrowth | None = None
    has_gate: bool = False
    input_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("num_q_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_q_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
                f"got {self.num_q_heads}"
            )
        if not 0 <= self.softcap < math.inf:
            raise CheckpointError(
                f"softcap must be at least 0 and finite (0 is off), got {self.softcap}"
            )
        if self.is_chunked and self.window is None:
            raise CheckpointError("window must be the size of the chunks, got None")
        if self.v_norm and self.qk_norm is None:
            raise CheckpointError("qk_norm must be given with v_norm, got None")
        if self.has_gate and (self.latent is not None or self.kv_parts != 2):
            raise CheckpointError(
                "has_gate must be false without keys and values of the layer's own"
            )

    @property
    def heads(self) -> tuple[range, range]:
        """The numbers of the query heads and of the key heads, as ranges from 0."""
        return range(self.num_q_heads), range(self.num_kv_heads)

    @property
    def kv_parts(self) -> int:
        """The number of projections to key heads: 2 for keys and values, 1 where values are keys, 0
        where another layer's are read."""
        return 0 if self.kv_layer is not None else 1 if self.v_is_k else 2

    @property
    def cached_head(self) -> tuple[int, int, int]:
        """Hk, D and Dv of the keys and values in the cache."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """The feed-forward block of one layer.

    Attributes:
        intermediate_size: I, the width of the block.
        activation: a key of `nn.layers.ACTIVATIONS`.
        is_gated: True for down(act(gate(x)) * up(x)), False for down(act(up(x))).
        bias: whether the projections have biases.
        gate_scale, output_scale: factors of the gate, before its activation, and of the output.
    """

    intermediate_size: int
    activation: str = "silu"
    is_gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        size = self.intermediate_size
        if type(size) is not int or size < 1:
            raise CheckpointError(f"intermediate_size must be a positive integer, got {size!r}")
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act must be one of {known}, got {self.activation!r}")


@dataclass(frozen=True, slots=True)
class SharedBlockConfig:
    """The place of a layer among those that share their attention and feed-forward block.

    Attributes:
        index: the number of the shared block that the layer uses, among those of the model.
        rank: the rank of the layer's own adapters.
        has_attention_adapters: whether queries, keys and values have adapters, too.
    """

    index: int
    rank: int
    has_attention_adapters: bool = False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise CheckpointError(f"adapter_rank must be a positive integer, got {self.rank!r}")


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer: attention, a state or both, and a feed-forward block, added to the residual
    stream.

    Attributes:
        attention: the attention, or latent attention, of the layer; None for none.
        feed_forward: the feed-forward block, or the mixture of several; None for none.
        norms: the norms that the layer has, of SANDWICH: before attention or the mixer, of its
            output, before the feed-forward block, of its output.
        is_parallel: True if both blocks read the same stream and are added at once. Without an
            `mlp_norm` the feed-forward block then reads what attention reads.
        experts: a mixture beside the feed-forward block, which reads the stream by a norm of its
            own, and whose router reads the stream itself; the outputs of both have norms, and are
            added before `mlp_out_norm`. None for none.
        has_scale: True if the residual stream behind the layer has a factor that is learnt.
        token_input_size: the channels of an embedding of the token for this layer, which gates
            what is added behind the blocks; 0 for none. See `DecoderConfig.token_inputs`.
        mixer: the block that remembers by a state; it reads what attention reads, where there are
            both, and their outputs are added. None for none.
        shared: the settings of an attention and a feed-forward block that several layers share.
            They come before the mixer, which reads their output besides the stream; see
            `models.shared_block`. None for blocks of the layer's own.
    """

    attention: AttentionConfig | None
    feed_forward: FeedForwardConfig | ExpertsConfig | None
    norms: tuple[str, ...] = PRE_NORM
    is_parallel: bool = False
    experts: ExpertsConfig | None = None
    has_scale: bool = False
    token_input_size: int = 0
    mixer: MixerConfig | None = None
    shared: SharedBlockConfig | None = None

    def __post_init__(self) -> None:
        if self.attention is None and self.mixer is None and self.feed_forward is None:
            raise CheckpointError("a layer must have a block, got none")
