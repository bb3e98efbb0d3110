"""The decoder of this package: its layers are whatever a `ModelConfig` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.cpu_program import CpuProgram
from tilewise.models.decoder import Decoder
from tilewise.models.families import FAMILIES
from tilewise.models.layer_config import (
    PRE_NORM,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
    NormConfig,
    QueryGrowth,
)
from tilewise.models.native_program import program_of, why_no_program
from tilewise.models.shared_block import SharedBlock, SharedBlockTurn
from tilewise.models.weight_table import Weight
from tilewise.nn.attention import Attention, KeysAndValues
from tilewise.nn.context import AttentionContext
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.nn.gated_delta_net import GatedDeltaConfig, GatedDeltaNet
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.kimi_delta import KimiDeltaAttention, KimiDeltaConfig
from tilewise.nn.layers import (
    ACTIVATIONS,
    MLP,
    Gate,
    GatedMLP,
    LayerNorm,
    Parts,
    RankPart,
    RMSNorm,
    ShiftedRMSNorm,
    UnitRMSNorm,
    activate,
)
from tilewise.nn.mamba2 import Mamba2, Mamba2Config
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.packed import PackedLinear
from tilewise.nn.quantised import QuantisedLinear
from tilewise.nn.rope import RotaryEmbedding
from tilewise.nn.short_conv import ShortConv
from tilewise.nn.states import LayerStates, StateLayer

__all__ = ["NativeDecoder", "NativeLayer", "for_device", "new_norm", "rows_of_sources"]

# Random expert weights are random bytes, with magnitudes of 2 and more on average, times 2 ** -7.
_DRAWN_SCALE = 127 - 7

Norm = RMSNorm | UnitRMSNorm | ShiftedRMSNorm | LayerNorm


def new_norm(config: NormConfig, dim: int) -> Norm:
    """Return a new norm module of `dim` channels, of the class that the configuration describes."""
    if config.kind == "rms":
        return RMSNorm(dim, config.eps) if config.has_weight else UnitRMSNorm(dim, config.eps)
    if config.kind == "shifted_rms":
        return ShiftedRMSNorm(dim, config.eps)
    return LayerNorm(
        dim,
        config.eps,
        has_weight=config.has_weight,
        has_bias=config.has_bias,
        is_shifted=config.kind == "shifted_layer",
    )


class NativeLayer(nn.Module):
    """A layer of a decoder: attention, a block with a state or both, and a feed-forward block.

    The residual stream is passed as two terms, the last block's output and the sum of all before
    it, so that their addition and the next norm are one kernel.

    Args:
        config: the configuration of the model.
        layer: the index of the layer.
        shared: the attention and feed-forward block that the layer shares with others; None
            without.

    Attributes:
        attention, mlp: the two blocks.
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm: the norms before and after them;
            None for those that the layer has not.
        experts, experts_norm, experts_out_norm, dense_out_norm: the mixture beside `mlp`, the norms
            before and after it, and the one after `mlp`; None without.
        token_gate, token_act, token_proj, token_norm: the projection to the gate of the token's
            embedding, its function, the projection back, and the norm of what it adds; None
            without.
        scale: (1,), the factor of the residual stream behind the layer; None without.
        mixer: the block that remembers by a state, beside attention or in place of it; None
            without.
        shared, turn: the attention and feed-forward block of several layers, and the modules of
            this layer's own beside them; None without.
    """

    attention: Attention | MultiheadLatentAttention | None
    mixer: StateLayer | None
    mlp: GatedMLP | MLP | Experts | None
    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    scale: nn.Parameter | None
    shared: SharedBlock | None
    turn: SharedBlockTurn | None

    def __init__(self, config: ModelConfig, layer: int, shared: SharedBlock | None = None) -> None:
        super().__init__()
        own = config.layers[layer]
        self.shared, self.turn = shared, None
        if own.shared is not None:
            assert own.attention is not None
            assert isinstance(own.feed_forward, FeedForwardConfig)
            self.turn = SharedBlockTurn(
                config.hidden_size, own.shared, own.attention, own.feed_forward
            )
            own = replace(own, attention=None, feed_forward=None, shared=None)
        self.is_parallel, self.residual_scale = own.is_parallel, config.residual_scale
        self.layer = layer
        norms = {
            name: new_norm(config.norm, config.hidden_size) if name in own.norms else None
            for name in ("attention_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
        }
        self.attention_norm = norms["attention_norm"]
        self.attention = None if own.attention is None else _attention(config, layer)
        self.mixer = None if own.mixer is None else new_mixer(config.hidden_size, own.mixer)
        self.attention_out_norm = norms["attention_out_norm"]
        self.mlp_norm = norms["mlp_norm"]
        self.mlp = _feed_forward(config, own)
        block = own.feed_forward
        self.fed_scale = block.output_scale if isinstance(block, FeedForwardConfig) else 1.0
        scales = own.attention
        self.attention_scales = (
            (1.0, 1.0) if scales is None else (scales.input_scale, scales.output_scale)
        )
        self.mlp_out_norm = norms["mlp_out_norm"]
        self.experts: Experts | None = None
        self.experts_norm = self.experts_out_norm = self.dense_out_norm = None
        if own.experts is not None:
            self.experts = Experts(config.hidden_size, own.experts)
            for name in ("experts_norm", "experts_out_norm", "dense_out_norm"):
                setattr(self, name, new_norm(config.norm, config.hidden_size))
        self.token_gate = self.token_proj = self.token_norm = self.token_act = None
        size = own.token_input_size
        if size:
            self.token_gate = nn.Linear(config.hidden_size, size, bias=False)
            self.token_proj = nn.Linear(size, config.hidden_size, bias=False)
            self.token_norm = new_norm(config.norm, config.hidden_size)
            assert own.feed_forward is not None
            self.token_act = Gate(ACTIVATIONS[own.feed_forward.activation])
        self.register_parameter("scale", nn.Parameter(torch.ones(1)) if own.has_scale else None)
        is_added_by_a_norm = (
            own.norms == PRE_NORM
            and not size
            and self.scale is None
            and own.experts is None
            and isinstance(self.mlp_norm, RMSNorm | ShiftedRMSNorm)
            and not own.is_parallel
            and self.residual_scale == self.fed_scale == 1
        )
        for module in (self.attention, self.mlp):
            if isinstance(module, Attention | GatedMLP):
                module.leaves_parts = is_added_by_a_norm and self.mixer is None
        if self.mixer is not None:
            self.mixer.leaves_parts = is_added_by_a_norm and self.attention is None

    def forward(
        self,
        x: Tensor | Parts | RankPart,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext | None,
        kv: CacheLayer | None,
        *,
        growth: Tensor | None = None,
        token_input: Tensor | None = None,
        read: KeysAndValues | None = None,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor | Parts | RankPart, Tensor | None]:
        """Map the residual stream x + residual (..., E) to itself; residual is None in the first
        layer.

        Args:
            x, residual: the residual stream.
            rope, ctx, kv, growth, read: see `nn.Attention`.
            token_input: (..., size), the embedding of the token for this layer.
            embedded: (..., E), the embedded tokens, which a shared block reads.

        Returns the two terms, not yet added: the output of the feed-forward block, and the rest,
        None where they are added.
        """
        if (
            growth is None
            and residual is not None
            and ctx is not None
            and kv is not None
            and not ctx.batch_invariant
            and ctx.adapters is None
            and self._is_one_row(residual)
        ):
            return self._one_row(x, residual, rope, ctx, kv)
        if self.attention is None and self.mixer is None:
            assert self.mlp is not None
            h, residual = _read_stream(self.mlp_norm, x, residual)
            return self._written(self._fed(h, ctx), self.mlp_out_norm), residual
        if self.shared is not None:
            return self._after_shared(x, residual, rope, ctx, kv, embedded, read)
        h, residual = _read_stream(self.attention_norm, x, residual)
        options: dict[str, Any] = {}
        if growth is not None or read is not None:
            options = {"growth": growth, "read": read}
        attended = self._written(self._mixed(h, rope, ctx, kv, options), self.attention_out_norm)
        if self.mlp is None:
            return attended, residual
        if self.is_parallel:
            own = h if self.mlp_norm is None else self.mlp_norm(residual)
            fed = self._written(self._fed(own, ctx), self.mlp_out_norm)
            assert isinstance(attended, Tensor)
            assert isinstance(fed, Tensor)
            return attended + fed, residual
        h, residual = _read_stream(self.mlp_norm, attended, residual)
        fed = self._fed(h, ctx)
        if self.experts is not None:
            assert self.experts_norm is not None
            assert self.experts_out_norm is not None
            assert self.dense_out_norm is not None
            mixed = self.experts(self.experts_norm(residual), residual)
            fed = self.dense_out_norm(fed) + self.experts_out_norm(mixed)
        fed = self._written(fed, self.mlp_out_norm)
        if self.token_gate is None and self.scale is None:
            return fed, residual
        assert isinstance(fed, Tensor)
        stream = residual + fed
        if token_input is not None:
            assert self.token_gate is not None
            assert self.token_proj is not None
            assert self.token_act is not None
            assert self.token_norm is not None
            gated = self.token_act(self.token_gate(stream), token_input)
            stream = stream + self.token_norm(self.token_proj(gated))
        return stream if self.scale is None else stream * self.scale, None

    def _after_shared(
        self,
        x: Tensor | Parts | RankPart,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext | None,
        kv: CacheLayer | None,
        embedded: Tensor | None,
        read: KeysAndValues | None,
    ) -> tuple[Tensor | Parts | RankPart, Tensor]:
        """Compute `forward` of a layer with a shared block, whose output the mixer reads besides
        the stream.

        Returns:
            The mixer's output, which is still to be added, and the residual stream.
        """
        assert self.shared is not None
        assert self.turn is not None
        assert self.attention_norm is not None
        assert embedded is not None
        assert not isinstance(kv, Tensor)
        _, stream = _read_stream(None, x, residual)
        beside = self.shared(stream, embedded, self.turn, rope, ctx, kv, read)
        h = self.attention_norm(stream + beside)
        return self._written(self._mixed(h, None, ctx, None, {}), None), stream

    def _mixed(
        self,
        h: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext | None,
        kv: CacheLayer | None,
        options: dict[str, Any],
    ) -> Tensor | Parts | RankPart:
        """Return the output of attention, of the recurrent mixer, or the sum of both.

        Args:
            h: the normalised input (B, S, E) or (T, E).
            rope: cosines and sines, None for no rotation.
            ctx, kv: the context and the layer's cache or states; None for a dense batch.
            options: further arguments of the attention layer.
        """
        mixed: Tensor | Parts | RankPart | None = None
        if self.mixer is not None and ctx is None:
            mixed = self.mixer(h)
        elif self.mixer is not None:
            assert ctx is not None
            if ctx.states is None:
                raise ValueError("ctx.states must be given for layers with a state, got None")
            mixed = self.mixer.step(
                h,
                ctx.states.layers[self.layer],
                slots=ctx.states.slots,
                starts=ctx.states.starts,
                cu_seqlens=ctx.cu_seqlens_q,
                adapters=ctx.adapters,
            )
        if self.attention is None:
            assert mixed is not None
            return mixed
        before, behind = self.attention_scales
        o: Tensor | Parts | RankPart = self.attention(
            h if before == 1 else h * before, rope, ctx=ctx, kv=kv, **options
        )
        if mixed is None and behind == 1:
            return o
        assert isinstance(o, Tensor)  # nothing but a norm right behind it adds up parts
        assert mixed is None or isinstance(mixed, Tensor)
        o = o if behind == 1 else o * behind
        return o if mixed is None else mixed + o

    def _fed(self, h: Tensor, ctx: AttentionContext | None) -> Tensor | Parts | RankPart:
        """Return the output of the feed-forward block or mixture for its normalised input h, with
        its factor.

        Adapters of requests are added, except to a mixture of experts.
        """
        fed: Tensor | Parts | RankPart
        assert self.mlp is not None
        if ctx is None or ctx.adapters is None or isinstance(self.mlp, Experts):
            fed = self.mlp(h)
        else:
            fed = self.mlp(h, ctx.adapters)
        if self.fed_scale == 1:
            return fed
        assert isinstance(fed, Tensor)  # nothing but a norm right behind it adds up parts
        return fed * self.fed_scale

    def _is_one_row(self, residual: Tensor) -> bool:
        """Return whether `_one_row` computes the step of this row, in fewer kernels."""
        attention, mlp = self.attention, self.mlp
        if residual.numel() != residual.shape[-1] or torch.is_grad_enabled():
            return False
        if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP):
            return False
        if not mlp.leaves_parts or mlp.activation is not F.silu or attention.has_gate:
            return False
        if not isinstance(self.mlp_norm, RMSNorm):
            return False
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
        if attention.o_proj.bias is not None or mlp.down_proj.bias is not None:
            return False
        return all(ops.row_linear_pays(linear.weight) for linear in linears)

    def _one_row(
        self,
        x: Tensor | Parts | RankPart,
        residual: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        ctx: AttentionContext,
        kv: CacheLayer,
    ) -> tuple[Parts, Tensor]:
        """Compute `forward` for one token, with norms and activations fused into the products.

        Returns:
            The parts of the output, whose sum is still to be added, and the residual stream.
        """
        attention, mlp = self.attention, self.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, GatedMLP)
        assert isinstance(self.attention_norm, RMSNorm)
        assert isinstance(self.mlp_norm, RMSNorm)
        assert not isinstance(x, RankPart)
        qkv, gate_up = attention.qkv_proj, mlp.gate_up_proj
        heads, residual = ops.add_rms_norm_linear(
            x.sums if isinstance(x, Parts) else x,
            residual,
            self.attention_norm.weight,
            self.attention_norm.eps,
            qkv.weight,
            qkv.bias,
        )
        assert not isinstance(kv, Tensor)
        o = attention.attend(heads, rope, ctx, kv)
        h, residual = ops.add_rms_norm_linear(
            ops.row_linear_parts(o, attention.o_proj.weight),
            residual,
            self.mlp_norm.weight,
            self.mlp_norm.eps,
            gate_up.weight,
            gate_up.bias,
            is_gated=True,
        )
        return Parts(ops.row_linear_parts(h, mlp.down_proj.weight)), residual

    def _written(
        self, x: Tensor | Parts | RankPart, norm: Norm | None
    ) -> Tensor | Parts | RankPart:
        """Return a block's output as it is added to the residual stream: normalised and scaled."""
        if norm is None and self.residual_scale == 1:
            return x
        assert isinstance(x, Tensor)  # a block leaves parts for a norm right behind it alone
        y: Tensor = x if norm is None else norm(x)
        return y if self.residual_scale == 1 else y * self.residual_scale


def _read_stream(
    norm: Norm | None, x: Tensor | Parts | RankPart, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream; return the norm of the sum, which a block reads, and the sum.

    Without a norm both are the sum; without a residual the sum is x.
    """
    if residual is not None and norm is not None:
        return norm.add(x, residual)
    assert isinstance(x, Tensor)
    stream = x if residual is None else residual + x
    return stream if norm is None else norm(stream), stream


def new_mixer(hidden_size: int, config: MixerConfig) -> StateLayer:
    """Return a new module for the recurrent block that a configuration describes."""
    if isinstance(config, GatedDeltaConfig):
        return GatedDeltaNet(hidden_size, config)
    if isinstance(config, KimiDeltaConfig):
        return KimiDeltaAttention(hidden_size, config)
    if isinstance(config, Mamba2Config):
        return Mamba2(hidden_size, config)
    return ShortConv(hidden_size, config)


def _attention(config: ModelConfig, layer: int) -> Attention | MultiheadLatentAttention:
    attention = config.layers[layer].attention
    assert attention is not None
    latent = attention.latent
    interleaved = attention.rope is not None and attention.rope.interleaved
    if latent is not None:
        return MultiheadLatentAttention(
            config.hidden_size,
            attention.num_q_heads,
            kv_rank=latent.kv_rank,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            v_head_dim=latent.v_head_dim,
            q_rank=latent.q_rank,
            rope_interleaved=interleaved,
            softmax_scale=attention.softmax_scale,
            qkv_bias=attention.qkv_bias,
            q_bias=False,
            o_bias=attention.o_bias,
        )
    module = Attention(
        config.hidden_size,
        attention.num_q_heads,
        attention.num_kv_heads,
        attention.head_dim,
        qkv_bias=attention.qkv_bias,
        o_bias=attention.o_bias,
        window=attention.window,
        softmax_scale=attention.softmax_scale,
        has_sinks=attention.has_sinks,
        softcap=attention.softcap,
        alibi_slopes=attention.alibi_slopes,
        rope_interleaved=interleaved,
        kv_parts=attention.kv_parts,
        has_gate=attention.has_gate,
    )
    module.layer, module.kv_layer = layer, attention.kv_layer
    module.is_read = any(other.kv_layer == layer for other in config.attentions)
    module.is_chunked = attention.is_chunked
    if attention.v_norm and attention.qk_norm is not None and attention.kv_parts:
        module.v_norm = UnitRMSNorm(attention.head_dim, attention.qk_norm.eps)
    if attention.qk_norm is not None:
        module.norms_after_rope = attention.norms_after_rope
        module.norms_all_heads = attention.qk_norm_over == "heads"
        heads = (attention.num_q_heads, attention.num_kv_heads)
        module.q_norm, module.k_norm = (
            new_norm(
                attention.qk_norm,
                attention.head_dim * (count if module.norms_all_heads else 1),
            )
            for count in heads
        )
        if not attention.kv_parts:
            module.k_norm = None
    return module


def _feed_forward(config: ModelConfig, own: LayerConfig) -> GatedMLP | MLP | Experts | None:
    block, width = own.feed_forward, config.hidden_size
    if block is None:
        return None
    if isinstance(block, ExpertsConfig):
        return Experts(width, block)
    sizes = (width, block.intermediate_size, block.activation)
    if not block.is_gated:
        return MLP(*sizes, bias=block.bias)
    gated = GatedMLP(*sizes, bias=block.bias)
    gated.gate_scale = block.gate_scale
    return gated


def _shared_blocks(config: ModelConfig) -> dict[int, SharedBlock]:
    """Return a new module for each block that layers share, by its number."""
    found = {}
    for layer in config.layers:
        if layer.shared is not None and layer.shared.index not in found:
            assert layer.attention is not None
            assert isinstance(layer.feed_forward, FeedForwardConfig)
            found[layer.shared.index] = SharedBlock(
                config.hidden_size, config.norm.eps, layer.attention, layer.feed_forward
            )
    return found


class NativeDecoder(Decoder):
    """The decoder of this package: embedding, the layers that a `ModelConfig` describes, and a last
    norm."""

    residual_projections = ("o_proj.weight", "down_proj.weight", "mlp.down")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.names = FAMILIES[config.architecture].names_of(config)
        self.weight_prefix, self.weight_renames = self.names.prefix, self.names.renames
        self.embedding_source = self.names.embedding
        self.ignored_weights = self.names.ignored
        self.embed_positions: nn.Embedding | None = None
        if config.learned_positions is not None:
            self.embed_positions = nn.Embedding(config.learned_positions, config.hidden_size)
        self.embed_norm: Norm | None = None
        if config.embedding_norm:
            self.embed_norm = new_norm(config.norm, config.hidden_size)
        self.token_table: nn.Embedding | None = None
        self.token_model_proj: nn.Linear | None = None
        self.token_model_norm: Norm | None = None
        sizes = [layer.token_input_size for layer in config.layers]
        if config.token_inputs:
            self.token_table = nn.Embedding(config.token_inputs, sum(sizes))
            self.token_model_proj = nn.Linear(config.hidden_size, sum(sizes), bias=False)
            self.token_model_norm = new_norm(config.norm, max(sizes))
        self.growths = tuple(
            dict.fromkeys(
                attention.query_growth
                for attention in config.attentions
                if attention.query_growth is not None
            )
        )
        self.reads_keys = bool(config.kv_sources)
        self.rotaries = nn.ModuleList(RotaryEmbedding(rope) for rope in config.ropes)
        places = {rope: i for i, rope in enumerate(config.ropes)}
        self._rope_of = [
            None if own is None or own.rope is None else places[own.rope]
            for own in (layer.attention for layer in config.layers)
        ]
        has_keys = [layer.attention is not None for layer in config.layers]
        # The place of each layer with attention among those: of its keys, values and their group.
        self._place_of = [sum(has_keys[:i]) if has else None for i, has in enumerate(has_keys)]
        shared = _shared_blocks(config)
        self.has_shared = bool(shared)
        self.layers = nn.ModuleList(
            NativeLayer(config, i, None if own.shared is None else shared[own.shared.index])
            for i, own in enumerate(config.layers)
        )
        self.norm = new_norm(config.norm, config.hidden_size)

    @property
    def rotary(self) -> RotaryEmbedding:
        """The rotary embedding of a model with the same rotary settings in all layers; ValueError
        for others."""
        (only,) = self.rotaries
        assert isinstance(only, RotaryEmbedding)
        return only

    def place_of(self, layer: int) -> int:
        """Return the place of a layer with attention, by its number, among the layers with
        attention."""
        place = self._place_of[layer]
        assert place is not None
        return place

    @property
    def begins_with_look_ups(self) -> bool:
        """Whether `forward` before the layers only looks up rows of the embedding and of one table
        of angles.

        So it is without learned positions, a factor or norm of the embedding, inputs of tokens,
        growing queries, and with the same rotary settings in all layers.
        """
        config = self.config
        ropes = {attention.rope for attention in config.attentions} or {None}
        is_plain = config.learned_positions is None and config.embedding_scale == 1
        is_plain = is_plain and not (config.embedding_norm or config.token_inputs or self.growths)
        return is_plain and len(ropes) == 1 and None not in ropes

    @property
    def hands_attention_over(self) -> bool:  # type: ignore[override]
        """Whether all layers call attention by the context: False with products folded in by
        `MultiheadLatentAttention.absorb`."""
        latents = [m for m in self.modules() if isinstance(m, MultiheadLatentAttention)]
        return all(latent.e is None and latent.f is None for latent in latents)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the hidden states of all tokens after the last layer and the final norm.

        Args:
            ids: int64 token ids, (B, S) dense, or (T,) packed with ctx and kv.
            positions: int64, the position of each token; None means 0 ... S - 1 for each row of a
                dense batch. Packed rows need positions.
            ctx: the AttentionContext, which says to which sequences packed rows belong; None for a
                dense batch.
            kv: the cache of each layer with attention; None for a dense batch.

        Returns:
            (B, S, E) or (T, E), in the dtype of the model.

        Raises:
            ValueError: packed rows come without positions, or a row is longer than the table of
                learned positions.
        """
        seqlen = self.dense_length(ids, ctx) if positions is None else 0
        ropes: list[tuple[Tensor, Tensor]] = []
        for rotary in self.rotaries:
            assert isinstance(rotary, RotaryEmbedding)
            ropes.append(
                rotary.prefix(seqlen, ids.device) if positions is None else rotary(positions)
            )
        x = self.embed_tokens(ids)
        if self.config.embedding_scale != 1:
            # A number rather than a tensor, rounded to the dtype of the model as transformers does.
            x = x * float(torch.tensor(self.config.embedding_scale).to(x.dtype))
        token_inputs = self._token_inputs(ids, x) if self.config.token_inputs else None
        growths = self._growths(positions, seqlen, ids.device, ctx, kv)
        if self.embed_positions is not None:
            if positions is None:
                most = self.config.max_position_embeddings
                if seqlen > most:
                    raise ValueError(f"ids must have at most {most} tokens a row, got {seqlen}")
                positions = torch.arange(seqlen, device=ids.device)
            x = x + self.embed_positions(positions + self.config.first_position)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return self.through_layers(
            x,
            ropes,
            ctx=ctx,
            kv=kv,
            growths=growths,
            token_inputs=token_inputs,
        )

    def _token_inputs(self, ids: Tensor, x: Tensor) -> Tensor:
        """Return the embeddings of tokens for each layer (..., layers, size), from a table and from
        the embedding x (..., E) of the model."""
        table, project = self.token_table, self.token_model_proj
        assert table is not None
        assert project is not None
        assert self.token_model_norm is not None
        size = self.config.layers[0].token_input_size
        own = table(ids) * float(torch.tensor(size**0.5).to(x.dtype))
        seen = (project(x) * self.config.hidden_size**-0.5).unflatten(-1, (-1, size))
        inputs: Tensor = (self.token_model_norm(seen) + own.unflatten(-1, (-1, size))) * 2.0**-0.5
        return inputs

    def _growths(
        self,
        positions: Tensor | None,
        seqlen: int,
        device: torch.device,
        ctx: AttentionContext | None,
        kv: Sequence[CacheLayer] | None,
    ) -> dict[QueryGrowth, Tensor]:
        """Return the factors (..., 1, 1) of queries by their position, for each such rule.

        A rule is left out if its factors are 1 for every position that the block tables can hold.
        A context of no sequences, as of a step that is captured, tells nothing of later ones.
        """
        found = {}
        for growth in self.growths:
            if ctx is not None and kv is not None and ctx.block_table.shape[0] > 0:
                longest = ctx.block_table.shape[1] * kv[0][0].shape[1]
                if longest - 1 + growth.first < growth.length:
                    continue
            if positions is None:
                positions = torch.arange(seqlen, device=device)
            steps = torch.div(positions + growth.first, growth.length, rounding_mode="floor")
            # In float64 a row's bits do not depend on the place that it has among others.
            factor = 1 + growth.beta * torch.log1p(steps.double())
            found[growth] = factor.float()[..., None, None]
        return found

    def through_layers(
        self,
        x: Tensor,
        ropes: Sequence[tuple[Tensor, Tensor]],
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
        growths: Mapping[QueryGrowth, Tensor] | None = None,
        token_inputs: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states of embedded tokens x (..., E); `forward` embeds them
        first.

        Args:
            x: the embedded tokens.
            ropes: cos and sin of the rows, of each of `rotaries`.
            ctx, kv: see `Decoder.forward`.
            growths: the factors of the rows' queries by the layers' growths with position.
            token_inputs: (..., layers, size), the embeddings of the tokens for the layers.
        """
        residual, embedded = None, x
        read: KeysAndValues | None = {} if self.reads_keys and kv is None else None
        for i, layer in enumerate(self.layers):
            place, turn = self._place_of[i], self._rope_of[i]
            own = ctx if ctx is None or place is None else ctx.of_layer(place)
            rope = None if turn is None else ropes[turn]
            cache = None if kv is None or place is None else kv[place]
            if not (growths or self.has_shared) and token_inputs is None and read is None:
                x, residual = layer(x, residual, rope, own, cache)
                continue
            attention = self.config.layers[i].attention
            growth = None if attention is None else attention.query_growth
            x, residual = layer(
                x,
                residual,
                rope,
                own,
                cache,
                growth=None if growth is None or not growths else growths.get(growth),
                token_input=None if token_inputs is None else token_inputs[..., i, :],
                read=read,
                embedded=embedded,
            )
        y: Tensor = self.norm(x) if residual is None else self.norm.add(x, residual)[0]
        return y

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return logits as `Decoder.head_logits`; with a factor or a softcap they are float32."""
        config, logits = self.config, super().head_logits(hidden)
        if config.logit_scale == 1 and config.logit_softcap is None:
            return logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if config.logit_scale != 1:
            wide = wide * config.logit_scale
        cap = config.logit_softcap
        if cap is None:
            return wide
        head = self.lm_head if self.packed_head is None else self.packed_head
        is_as_steps = self.has_inference_bits or isinstance(head, PackedLinear)
        return activate(torch.tanh, wide / cap, on_cpu=is_as_steps) * cap

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Replace the weights by the layout that this CPU reads fastest; see `Decoder`.

        Raises:
            ValueError: `is_int8`, which experts and the up-projections of latents do not support.
        """
        modules = list(self.modules())
        if is_int8 and any(isinstance(module, Experts) for module in modules):
            raise ValueError("weight_dtype must be auto with mixtures of experts, got int8")
        if is_int8 and self.config.latent is not None:
            raise ValueError(
                "weight_dtype must be auto with latent attention: its up-projections are not held "
                "as int8, got int8"
            )
        for module in modules:
            if isinstance(module, Experts):
                module.pack_for_inference()
            if isinstance(module, MultiheadLatentAttention):
                module.pack_up_projections()
        super().pack_for_inference(is_int8=is_int8)

    @torch.no_grad()
    def place_on_gpu(self) -> None:
        """Rearrange the weights of experts, in place, into the order that this GPU's kernels read;
        see `Decoder`."""
        for module in self.modules():
            if isinstance(module, Experts):
                module.place_on_gpu()

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw random weights as `Decoder.init_weights`.

        Weights that are stored as their excess over 1, and sinks, are 0; packed experts are random
        bytes.
        """
        super().init_weights(std=std, generator=generator)
        for module in self.modules():
            if isinstance(module, ShiftedRMSNorm) or (
                isinstance(module, LayerNorm) and module.is_shifted
            ):
                module.weight.zero_()
            if isinstance(module, Attention) and module.sinks is not None:
                module.sinks.zero_()
            if isinstance(module, Experts) and module.config.is_packed:
                for weight, scale in (
                    (module.up, module.up_scale),
                    (module.down, module.down_scale),
                ):
                    assert isinstance(weight, nn.Parameter)
                    assert scale is not None
                    weight.random_(0, 256, generator=generator)
                    scale.fill_(_DRAWN_SCALE)

    def weight_table(self) -> tuple[Weight, ...]:
        """Return for each parameter its tensors in a Hugging Face checkpoint; an adapter that is
        trained beside the model has none there.

        Raises:
            ValueError: the weights are packed.
        """
        if any(isinstance(m, PackedLinear | InvariantLinear) for m in self.modules()):
            raise ValueError("model must have its parameters, got one packed for inference")
        return tuple(
            self.names.weight(
                name, self._rows_of(name, tuple(parameter.shape)), self._sources_of(name)
            )
            for name, parameter in self.named_parameters()
            if ".adapter." not in name
        )

    def source_of(self, name: str, linear: QuantisedLinear) -> Weight:
        """Return the sources of a quantised weight; see `Decoder.source_of`."""
        above = name.removesuffix(".weight").rpartition(".")[0]
        if isinstance(self.get_submodule(above), Experts):
            name = name.removesuffix(".weight")
        shape = (linear.out_features, linear.in_features)
        return self.names.weight(name, self._rows_of(name, shape), self._sources_of(name))

    def _sources_of(self, name: str) -> int | None:
        """Return the number of checkpoint tensors of which a qkv projection is made; None for other
        parameters.

        They are 3, or fewer where keys are values or another layer's are read.
        """
        if ".attention.qkv_proj." not in name:
            return None
        attention = self.config.layers[int(name.split(".")[1])].attention
        assert attention is not None
        return 1 + attention.kv_parts

    def _rows_of(self, name: str, shape: tuple[int, ...]) -> Callable[[int], tuple[int, ...]]:
        """Return the function of `rows_of_sources` for a parameter of this model, by its name and
        shape."""
        layer = self.config.layers[int(name.split(".")[1])] if name.startswith("layers.") else None
        return rows_of_sources(layer, name, shape)

    def why_no_cpu_program(self) -> str | None:
        """Say why there is no `cpu_program` of this model, or return None where there is one."""
        return why_no_program(self)

    def cpu_program(
        self,
        caches: Sequence[CacheLayer],
        states: Mapping[int, LayerStates],
        *,
        batch_invariant: bool,
    ) -> CpuProgram:
        """Return the list of operations that computes a step of this model on a CPU.

        Args:
            caches: the caches of the layers.
            states: the slots of each layer with a state, by its number.
            batch_invariant: True if a row's bits must not depend on other rows.
        """
        return program_of(self, caches, states, batch_invariant=batch_invariant)


def rows_of_sources(
    layer: LayerConfig | None, name: str, shape: tuple[int, ...]
) -> Callable[[int], tuple[int, ...]]:
    """Return a function of a number of checkpoint tensors, which returns how many rows of a
    parameter each of them fills, in order.

    Args:
        layer: the layer of the parameter; None for one outside of the layers.
        name: the name of the parameter.
        shape: the shape of the parameter.
    """
    heads = None if layer is None else layer.attention
    parts = None
    if layer is not None and layer.mixer is not None and ".mixer." in name:
        parts = layer.mixer.rows(name.partition(".mixer.")[2].partition(".")[0])

    def rows(count: int) -> tuple[int, ...]:
        if parts is not None:  # the first source may hold several
            several = len(parts) - count + 1
            return (sum(parts[:several]), *parts[several:])
        if heads is not None and ".attention.qkv_proj." in name:
            kv = (heads.num_kv_heads,) * heads.kv_parts
            queries = heads.num_q_heads * (2 if heads.has_gate else 1)
            return tuple(number * heads.head_dim for number in (queries, *kv))
        # Of experts one after another, whose weights are (N, rows, columns).
        size = shape[0] * shape[1] if len(shape) == 3 else shape[0]
        return (size // count,) * count

    return rows


def for_device(config: ModelConfig, device: torch.device) -> ModelConfig:
    """Return the configuration for loading a model on a device: no packed experts unless it is a
    GPU."""
    if config.experts is None or not config.experts.is_packed or device.type == "cuda":
        return config
    layers = []
    for layer in config.layers:
        block = layer.feed_forward
        if isinstance(block, ExpertsConfig):
            block = replace(block, is_packed=False)
        beside = layer.experts
        if beside is not None:
            beside = replace(beside, is_packed=False)
        layers.append(replace(layer, feed_forward=block, experts=beside))
    return replace(config, layers=tuple(layers))
