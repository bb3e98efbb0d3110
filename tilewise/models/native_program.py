"""A native decoder as a list of operations over fixed buffers, for one compiled call on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer, KVLayer, LatentLayer
from tilewise.models.cpu_program import CpuAttention, CpuProgram
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.layer_config import (
    PRE_NORM,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
)
from tilewise.nn.attention import Attention, attention_over
from tilewise.nn.context import AttentionContext
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.nn.gated_delta_net import GatedDeltaNet
from tilewise.nn.gated_norm import UNIT_EPS, GatedRMSNorm
from tilewise.nn.kimi_delta import KimiDeltaAttention
from tilewise.nn.layers import (
    MLP,
    GatedMLP,
    LayerNorm,
    RMSNorm,
    ShiftedRMSNorm,
    UnitRMSNorm,
    name_of,
)
from tilewise.nn.mamba2 import Mamba2, Mamba2Config
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.packed import PackedEmbedding, PackedLinear
from tilewise.nn.rope import RotaryEmbedding
from tilewise.nn.short_conv import ShortConv
from tilewise.nn.states import LayerStates, StateLayer
from tilewise.ops import cpu_step as step
from tilewise.ops.panels import Panels

__all__ = ["program_of", "why_no_program"]


def why_no_program(model: Any) -> str | None:
    """Say why there is no program of a `NativeDecoder`, or return None where there is one.

    Its weights must be packed, and each layer one that `_Writer` can write.
    """
    for layer in model.config.layers:
        reason = _why_not_layer(model.config, layer)
        if reason is not None:
            return reason
    linears = [m for m in model.modules() if isinstance(m, (nn.Linear, PackedLinear))]
    if not linears or not all(isinstance(m, PackedLinear) for m in linears):
        return "the weights must be packed, see Decoder.pack_for_inference"
    return None


def _why_not_layer(config: DecoderConfig, layer: LayerConfig) -> str | None:
    attention, block, mixer = layer.attention, layer.feed_forward, layer.mixer
    if layer.shared is not None:
        return "attention and feed-forward block must be the layer's own, got shared ones"
    scales = [
        1.0 if attention is None else attention.output_scale,
        block.output_scale if isinstance(block, FeedForwardConfig) else 1.0,
        mixer.output_scale if isinstance(mixer, Mamba2Config) else 1.0,
    ]
    if any(scale != 1 for scale in scales) and (
        config.residual_scale != 1 or layer.is_parallel or set(layer.norms) - set(PRE_NORM)
    ):
        return f"blocks whose output has a factor must be added as they are, got {scales}"
    if (
        isinstance(block, ExpertsConfig)
        and block.latent_size
        and (config.residual_scale != 1 or "mlp_out_norm" in layer.norms or block.shared_is_gated)
    ):
        return (
            "experts that read latents must be added as they are, got "
            f"residual_scale {config.residual_scale}, shared_is_gated {block.shared_is_gated}"
        )
    if (
        mixer is not None
        and attention is not None
        and (config.residual_scale != 1 or layer.is_parallel or set(layer.norms) - set(PRE_NORM))
    ):
        return "a state beside attention must be added to it, got norms or factors between them"
    has_own_end = layer.experts is not None or layer.has_scale or layer.token_input_size > 0
    if attention is None or block is None:
        if layer.is_parallel or has_own_end:
            return "a layer without attention or a feed-forward block must have no more than one"
        return None
    if attention.v_is_k and not attention.v_norm:
        return "keys that are values must have a norm as such, got v_norm False"
    if attention.kv_parts != 2 and attention.qk_norm_over == "heads":
        return "queries must have a norm of each head beside shared keys, got one of all heads"
    if attention.query_growth is not None and attention.latent is not None:
        return f"queries of latents must not grow, got {attention.query_growth}"
    if has_own_end and (layer.is_parallel or "mlp_out_norm" not in layer.norms):
        return (
            "a layer with a mixture beside its block, a factor or embeddings of tokens must end "
            f"with a norm, got {', '.join(layer.norms)}"
        )
    if layer.experts is not None and (
        isinstance(block, ExpertsConfig) or not layer.experts.are_gated_tokens
    ):
        return "experts beside a feed-forward block must have gates, and that block be no mixture"
    if attention.latent is None and attention.head_dim % 2:
        return f"head_dim must be even, got {attention.head_dim}"
    if not layer.is_parallel or block is None:
        return None
    if config.residual_scale != 1:
        return f"residual_scale must be 1 in parallel blocks, got {config.residual_scale}"
    if isinstance(block, ExpertsConfig):
        return "a block parallel to attention must be no mixture, got experts"
    for name in ("attention_out_norm", "mlp_out_norm"):
        if name in layer.norms:
            return f"norms of parallel blocks must precede them, got {name}"
    return None


def program_of(
    model: Any,
    caches: Sequence[CacheLayer],
    states: Mapping[int, LayerStates],
    *,
    batch_invariant: bool,
) -> CpuProgram:
    """Return a step of a `NativeDecoder` on the CPU as a program.

    Args:
        model: the decoder, packed.
        caches: each layer's cache tensors.
        states: the states of recurrent layers, by the layer's number.
        batch_invariant: True if a token's bits may not depend on the batch.
    """
    return _Writer(model, caches, states, batch_invariant).write()


class _Writer:
    """Appends the operations of a decoder's step to a program over fixed buffers, layer by layer.

    Buffer x holds the residual stream.
    """

    def __init__(
        self,
        model: Any,
        caches: Sequence[CacheLayer],
        states: Mapping[int, LayerStates],
        batch_invariant: bool,
    ) -> None:
        self.model, config = model, model.config
        self.caches, self.states = [_parts_of(cache) for cache in caches], states
        self.size = model.dtype.itemsize
        # Without attention nothing is cached: any cache will do.
        cache = self.caches[0] if self.caches else (torch.empty((0, 1, 1, 1), dtype=model.dtype),)
        self.program = step.new_program(model.dtype, cache, batch_invariant=batch_invariant)
        rotaries = [cast(RotaryEmbedding, rotary) for rotary in model.rotaries]
        # The first column of each rotary setting among the angles of all, side by side.
        self.angles = dict[object, int]()
        column = 0
        for rope in config.ropes:
            self.angles[rope] = column
            column += rope.rotary_dim // 2
        self.reserve_angles = partial(_angles_of, rotaries)
        width, buffer = config.hidden_size, self.program.buffer
        self.x, self.h = buffer("x", width), buffer("h", width)
        self.y = buffer("y", width)  # what a block writes before it is added to x
        self.qkv = buffer("qkv", max(map(_qkv_columns, config.attentions), default=1))
        self.o = buffer("o", max(map(_o_columns, config.attentions), default=1))
        inner = [
            block.shared_size if isinstance(block, ExpertsConfig) else block.intermediate_size
            for block in config.feed_forwards
        ]
        self.act = buffer("act", max(inner, default=1) or 1)
        self.token_size = max(layer.token_input_size for layer in config.layers)
        self.token_inputs: step.Buffer | None = None
        self.final = buffer("final", width, is_sampled=True)
        self.logits = buffer("logits", config.vocab_size, torch.float32, is_sampled=True)
        self.attention = list[CpuAttention]()

    def write(self) -> CpuProgram:
        """Append the operations of the whole decoder, from the embedding to the logits; return the
        program."""
        model, config, program = self.model, self.model.config, self.program
        table = model.embed_tokens
        assert isinstance(table, nn.Embedding | PackedEmbedding)
        scale = float(torch.tensor(config.embedding_scale).to(model.dtype))
        positions, first = model.embed_positions, config.first_position
        program.embed(
            table.panels if isinstance(table, PackedEmbedding) else _weight_of(table),
            self.x,
            factor=scale,
            positions=None if positions is None else lambda: positions.weight[first:],
        )
        if config.token_inputs:
            self._token_inputs()
        if model.embed_norm is not None:
            norm_of = _norm_of(model.embed_norm, model.dtype)
            program.norm(self.x, self.x, norm_of, is_shared=True)
        for index, module in enumerate(model.layers):
            self._layer(module, config.layers[index], index)
        program.norm(self.x, self.final, _norm_of(model.norm, model.dtype), is_sampled=True)
        head = model.lm_head if model.packed_head is None else model.packed_head
        program.product(
            self.final,
            self.logits,
            _panels_of(head),
            step.LOGITS,
            factor=config.logit_scale,
            cap=config.logit_softcap or 0.0,
            is_sampled=True,
        )
        return CpuProgram(program, self.attention, self.reserve_angles)

    def _token_inputs(self) -> None:
        """Append the operations that fill the buffer `token_inputs`: the embeddings of tokens for
        the layers, side by side."""
        model, config, program = self.model, self.model.config, self.program
        size, columns = self.token_size, sum(layer.token_input_size for layer in config.layers)
        # A product that reads the last layer's reads a whole group of columns.
        inputs = self.token_inputs = program.buffer("inputs of tokens", columns + step.WIDTH)
        seen = program.buffer("inputs seen", columns)
        factor, root = torch.tensor(size**0.5).to(model.dtype), torch.tensor([2.0**-0.5])
        program.embed(_weight_of(model.token_table), inputs, factor=float(factor))
        weight, scale = _panels_of(model.token_model_proj), config.hidden_size**-0.5
        program.product(self.x, seen, weight, step.STORE, factor=scale)
        norm = _norm_of(model.token_model_norm, model.dtype)
        program.norm(seen, inputs, norm, adds=True, parts=columns // size, scale=lambda: root)

    def _layer(self, layer: Any, config: LayerConfig, index: int) -> None:
        """Append the operations of one layer, which read the residual stream x and add to it.

        Args:
            layer, config: the layer and its config.
            index: the number of the layer.
        """
        reads_h = layer.is_parallel and layer.mlp_norm is None
        h = self.x
        if layer.attention is not None or layer.mixer is not None:
            is_latent = isinstance(layer.attention, MultiheadLatentAttention)
            is_shared = reads_h or is_latent or layer.mixer is not None
            h = self._normalised(layer.attention_norm, is_shared=is_shared)
            self._mixed(layer, config, h, index)
        if layer.mlp is None:
            return
        if not reads_h:
            is_mixture = isinstance(layer.mlp, Experts)
            h = self._normalised(layer.mlp_norm, is_shared=is_mixture)
        # The factor of the stream belongs to what is added last.
        scale = None if layer.scale is None else _parameter(layer, "scale")
        own = None if layer.token_gate is not None else scale
        if isinstance(layer.mlp, Experts):
            self._experts(layer.mlp, h, layer.mlp_out_norm, scale=own)
            self._token_block(layer, index, scale)
            return
        self._fill_act(layer.mlp, h)
        down = _panels_of(layer.mlp.down_proj)
        if layer.is_parallel:
            self.program.product(self.act, self.x, down, step.ADD, extra=self.y)
        elif layer.experts is not None:
            self._add_both(layer, down, scale=own)
        else:
            self._add(self.act, down, layer.mlp_out_norm, layer.fed_scale, scale=own)
        self._token_block(layer, index, scale)

    def _add_both(self, layer: Any, down: Panels, *, scale: step.Held | None) -> None:
        """Append the operations of a layer with a dense block beside a mixture of experts.

        They are the dense block's last product, the mixture, and the sum of both, each normalised,
        which is added to the residual stream.

        Args:
            layer: the layer with the norms and the experts.
            down: the weight of the dense block's last product.
            scale: the factor of the residual stream afterwards; None for 1.
        """
        program, dtype, width = self.program, self.model.dtype, self.model.config.hidden_size
        both = program.buffer("both blocks", width)
        program.product(self.act, self.y, down, step.STORE)
        norm_of = _norm_of(layer.dense_out_norm, dtype)
        program.norm(self.y, both, norm_of, is_shared=True)
        h = self._normalised(layer.experts_norm, is_shared=True)
        self._experts(layer.experts, h, layer.experts_out_norm, chosen_by=self.x, into=both)
        self._add_normalised(both, layer.mlp_out_norm, scale=scale)

    def _token_block(self, layer: Any, index: int, scale: step.Held | None) -> None:
        """Append the operations that add a projection of the token's own embedding for this layer
        to the residual stream.

        Args:
            layer: the layer; one without a token_gate gets none.
            index: the number of the layer.
            scale: a function that returns the factor of the stream afterwards; None for 1.
        """
        if layer.token_gate is None:
            return
        program, size = self.program, self.token_size
        assert self.token_inputs is not None
        gated = program.buffer("gated inputs of tokens", size)
        program.product(
            self.x,
            gated,
            _panels_of(layer.token_gate),
            step.STORE,
            function=name_of(layer.token_act.function),
            extra=self.token_inputs.at(index * size, self.size),
            outputs=size,
        )
        program.product(gated, self.y, _panels_of(layer.token_proj), step.STORE)
        self._add_normalised(self.y, layer.token_norm, scale=scale)

    def _mixed(self, layer: Any, config: LayerConfig, h: step.Buffer, index: int) -> None:
        """Append the operations of attention, the recurrent mixer or both, and of adding their
        outputs.

        Args:
            layer, config: the layer and its config.
            h: the normalised input.
            index: the number of the layer.
        """
        program, scale = self.program, 1.0
        if layer.mixer is not None:
            o = self._mix(layer.mixer, h, self.states[index])
            o_proj = _panels_of(layer.mixer.o_proj)
            if isinstance(layer.mixer, Mamba2):
                scale = layer.mixer.config.output_scale
            if layer.attention is None:
                self._add(o, o_proj, layer.attention_out_norm, scale)
                return
            program.product(o, self.y, o_proj, step.STORE)
            if scale != 1:
                program.multiply(self.y, self.y, self.model.config.hidden_size, factor=scale)
        place = self.model.place_of(index)
        before, behind = layer.attention_scales
        if before != 1:
            scaled = program.buffer("scaled", self.model.config.hidden_size)
            program.multiply(h, scaled, self.model.config.hidden_size, factor=before)
            h = scaled
        if isinstance(layer.attention, MultiheadLatentAttention):
            self._latents(layer.attention, h, index, place)
        else:
            assert config.attention is not None
            self._heads(cast(Attention, layer.attention), config.attention, h, place)
        o_proj = _panels_of(layer.attention.o_proj)
        if layer.mixer is not None:
            program.product(self.o, self.x, o_proj, step.ADD, factor=behind, extra=self.y)
        elif layer.is_parallel:
            program.product(self.o, self.y, o_proj, step.STORE)
        else:
            self._add(self.o, o_proj, layer.attention_out_norm, behind)

    def _normalised(self, norm: nn.Module | None, *, is_shared: bool) -> step.Buffer:
        """Append a norm of the residual stream; return the buffer with its result: h, or x without
        a norm."""
        if norm is None:
            return self.x
        self.program.norm(self.x, self.h, _norm_of(norm, self.model.dtype), is_shared=is_shared)
        return self.h

    def _add(
        self,
        source: step.Buffer,
        weight: Panels,
        norm: nn.Module | None,
        factor: float = 1.0,
        *,
        scale: step.Held | None = None,
    ) -> None:
        """Append a block's last product, and the addition of its result to the residual stream.

        Args:
            factor: the factor of the result; with a norm it is not used.
            scale: a function that returns the factor of the stream after the addition, or None;
                without a norm it is not used.
        """
        if norm is None:
            factor *= self.model.config.residual_scale
            self.program.product(source, self.x, weight, step.ADD, factor=factor)
            return
        self.program.product(source, self.y, weight, step.STORE)
        self._add_normalised(self.y, norm, scale=scale)

    def _add_normalised(
        self, source: step.Buffer, norm: nn.Module, *, scale: step.Held | None = None
    ) -> None:
        """Append the operation that normalises a block's output, adds it to the residual stream,
        and scales the sum.

        Args:
            scale: a function that returns the factor of the sum; None leaves the sum as it is.
        """
        norm_of, factor = _norm_of(norm, self.model.dtype), self.model.config.residual_scale
        self.program.norm(source, self.x, norm_of, adds=True, factor=factor, scale=scale)

    def _fill_act(self, block: nn.Module, h: step.Buffer) -> None:
        """Append the products of a feed-forward block but for the last one; they read h and fill
        `act`."""
        assert isinstance(block, GatedMLP | MLP)
        function = name_of(block.activation)
        if isinstance(block, GatedMLP):
            weight, factor = _panels_of(block.gate_up_proj), block.gate_scale
            self.program.product(h, self.act, weight, step.GATE, function=function, factor=factor)
        else:
            weight = _panels_of(block.up_proj)
            self.program.product(h, self.act, weight, step.STORE, function=function)

    def _experts(
        self,
        block: Experts,
        h: step.Buffer,
        out_norm: nn.Module | None,
        *,
        chosen_by: step.Buffer | None = None,
        into: step.Buffer | None = None,
        scale: step.Held | None = None,
    ) -> None:
        """Append the operations of a mixture of experts, whose last adds its result to the residual
        stream.

        Args:
            block: the mixture of experts.
            h: the rows that the experts read.
            out_norm: the norm of the result before it is added; None adds the result as it is.
            chosen_by: the rows that the router reads; None for h.
            into: the rows to which the normalised result is added; None for the residual stream;
                without out_norm it is not used.
            scale: a function that returns the factor of the stream after the addition, or None;
                without out_norm or with `into` it is not used.
        """
        program, dtype = self.program, self.model.dtype
        source = h if chosen_by is None else chosen_by
        if block.router_norm is not None:
            read, source = source, program.buffer("routed", self.model.config.hidden_size)
            program.norm(read, source, _norm_of(block.router_norm, dtype), is_shared=True)
        router = _panels_of(block.router)
        is_wide = router.dtype != dtype
        count = block.config.num_experts
        logits = program.buffer("router", count, torch.float32 if is_wide else dtype)
        if is_wide:
            program.wide_product(source, logits, router)
        else:
            program.product(source, logits, router, step.STORE)
        shared: step.Buffer | None = None
        gate: step.Buffer | None = None
        if block.shared is not None:
            shared = program.buffer("shared", self.model.config.hidden_size)
            self._fill_act(block.shared, h)
            program.product(self.act, shared, _panels_of(block.shared.down_proj), step.STORE)
        if block.shared_gate is not None:
            gate = program.buffer("gate", 1)
            program.product(h, gate, _panels_of(block.shared_gate), step.STORE)
        assert block.packed is not None
        if block.latent_proj is not None:
            size = block.config.latent_size
            rows, mixed = (
                program.buffer(f"{name} of experts", size) for name in ("latents", "sums")
            )
            program.product(h, rows, _panels_of(block.latent_proj), step.STORE)
            program.mix(rows, logits, mixed, block.packed, has_wide_logits=is_wide)
            out_proj = _panels_of(block.latent_out_proj)
            program.product(mixed, self.x, out_proj, step.ADD, extra=shared)
            return
        program.mix(
            h,
            logits,
            self.x if out_norm is None else self.y,
            block.packed,
            has_wide_logits=is_wide,
            adds=out_norm is None,
            factor=self.model.config.residual_scale,
            shared=shared,
            shared_gate=gate,
        )
        if out_norm is None:
            return
        if into is not None:
            program.norm(self.y, into, _norm_of(out_norm, dtype), adds=True)
            return
        self._add_normalised(self.y, out_norm, scale=scale)

    def _heads(
        self, attention: Attention, own: AttentionConfig, h: step.Buffer, index: int
    ) -> None:
        """Append the operations of attention from its input h to the heads' outputs in `o`; note
        them in `attention`.

        Args:
            attention, own: the layer's attention module, and its configuration.
            h: the normalised input.
            index: the place of the layer's cache.
        """
        program, kv = self.program, self.caches[index]
        dtype, rope = self.model.dtype, own.rope
        num_q, num_kv, dim = attention.num_q_heads, attention.num_kv_heads, attention.head_dim
        width = num_q * dim
        first = width if attention.has_gate else 0  # the column of q, behind the gate
        options: dict[str, Any] = {
            "first": first,
            "half": 0 if rope is None else rope.rotary_dim // 2,
            "angles": 0 if rope is None else self.angles[rope],
            "is_interleaved": rope is not None and rope.interleaved,
        }
        heads = step.Heads.side_by_side(kv, num_q, **options)
        program.product(h, self.qkv, _panels_of(attention.qkv_proj), step.STORE)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        growth = own.query_growth
        also: dict[str, Any] = {
            "v_is_k": own.v_is_k,
            "v_norm": None if attention.v_norm is None else _norm_of(attention.v_norm, dtype),
            "growth": None
            if growth is None
            else step.Growth(growth.beta, growth.length, growth.first),
        }
        if own.kv_layer is not None:
            program.rotate(
                self.qkv,
                step.Heads.queries(kv, num_q, **options),
                q_rounded=None if q_norm is None else _norm_of(q_norm, dtype),
                is_after=attention.norms_after_rope,
                **also,
            )
        elif q_norm is None or k_norm is None:
            program.rotate(self.qkv, heads, **also)
        elif attention.norms_all_heads:
            places = [self.qkv.at(at, self.size) for at in (heads.q_at, heads.k_at)]
            for norm, place in zip((q_norm, k_norm), places, strict=True):
                program.norm(place, place, _norm_of(norm, dtype), parts=1)
            program.rotate(self.qkv, heads, **also)
        elif attention.norms_fuse and rope is not None:
            assert isinstance(q_norm, RMSNorm)
            held = _weight_of(q_norm), _weight_of(k_norm)
            program.rotate(self.qkv, heads, eps=q_norm.eps, q_norm=held[0], k_norm=held[1], **also)
        else:
            program.rotate(
                self.qkv,
                heads,
                q_rounded=_norm_of(q_norm, dtype),
                k_rounded=_norm_of(k_norm, dtype),
                is_after=attention.norms_after_rope,
                **also,
            )
        begin = len(program)
        slopes = torch.tensor(own.alibi_slopes) if own.alibi_slopes else None
        program.attend(
            self.qkv,
            self.o,
            heads,
            scale=own.softmax_scale,
            window=own.window,
            is_chunked=own.is_chunked,
            softcap=own.softcap,
            sinks=None if attention.sinks is None else _parameter(attention, "sinks"),
            slopes=slopes,
        )
        v_dim = kv[1].shape[-1]

        def attend(ctx: AttentionContext, cache: CacheLayer, rows: int) -> None:
            buffers = program.buffers
            q = buffers["qkv"][:rows, first : first + width].unflatten(-1, (num_q, dim))
            over = attention_over(
                cast(KVLayer, cache),
                window=own.window,
                softmax_scale=own.softmax_scale,
                softcap=own.softcap,
                sinks=attention.sinks,
                alibi_slopes=slopes,
                is_chunked=own.is_chunked,
            )
            buffers["o"][:rows, : num_q * v_dim] = over(q, ctx).flatten(-2)

        self.attention.append(CpuAttention(begin - 1, begin, len(program), attend))
        assert num_kv == heads.num_kv
        if attention.has_gate:
            program.multiply(self.o, self.o, num_q * v_dim, other=self.qkv, function="sigmoid")

    def _mix(self, mixer: StateLayer, h: step.Buffer, states: LayerStates) -> step.Buffer:
        """Append the operations of a recurrent layer up to its last projection; return that
        projection's input."""
        if isinstance(mixer, GatedDeltaNet):
            return self._gated_delta(mixer, h, states)
        if isinstance(mixer, KimiDeltaAttention):
            return self._kimi_delta(mixer, h, states)
        if isinstance(mixer, Mamba2):
            return self._mamba2(mixer, h, states)
        assert isinstance(mixer, ShortConv)
        return self._short_conv(mixer, h, states)

    def _gated_delta(
        self, mixer: GatedDeltaNet, h: step.Buffer, states: LayerStates
    ) -> step.Buffer:
        program, config, size = self.program, mixer.config, self.size
        channels, heads = sum(config.parts[:3]), config.num_value_heads
        rows = program.buffer("projected rows", sum(config.parts))
        ba = program.buffer("strengths and decays", 2 * heads)
        mixed = program.buffer("convolved rows", channels)
        program.product(h, rows, _panels_of(mixer.qkvz_proj), step.STORE)
        program.product(h, ba, _panels_of(mixer.ba_proj), step.STORE)
        self._convolve(mixer, rows, mixed, states, "silu")
        self._to_unit_length(mixed, 2 * config.num_key_heads, config.key_dim)
        recurrence = self._recurrence(states, "delta", config.key_dim**-0.5)
        gates, betas = self._weights_of(heads, heads)
        program.weigh(
            ba.at(heads, size),
            ba,
            gates,
            betas,
            recurrence,
            a_log=_parameter(mixer, "a_log"),
            dt_bias=_parameter(mixer, "dt_bias"),
            factor=config.beta_scale,
        )
        keys = config.parts[0]
        q, k, v = (mixed.at(column, size) for column in (0, keys, 2 * keys))
        o = program.buffer("recurrent rows", config.parts[2])
        program.recur(q, k, v, gates, betas, o, recurrence)
        self._gate(mixer.norm, o, rows.at(channels, size), config.parts[2])
        return o

    def _kimi_delta(
        self, mixer: KimiDeltaAttention, h: step.Buffer, states: LayerStates
    ) -> step.Buffer:
        program, size = self.program, self.size
        heads, dim = mixer.config.num_heads, mixer.config.head_dim
        width = heads * dim
        rows, mixed = (
            program.buffer(name, 3 * width) for name in ("projected rows", "convolved rows")
        )
        low = program.buffer("strengths and low ranks", heads + 2 * dim)
        f, z = (program.buffer(name, width) for name in ("decays of channels", "gates of channels"))
        program.product(h, rows, _panels_of(mixer.qkv_proj), step.STORE)
        program.product(h, low, _panels_of(mixer.a_proj), step.STORE)
        program.product(low.at(heads, size), f, _panels_of(mixer.f_proj), step.STORE)
        program.product(low.at(heads + dim, size), z, _panels_of(mixer.z_proj), step.STORE)
        self._convolve(mixer, rows, mixed, states, "silu")
        self._to_unit_length(mixed, 2 * heads, dim)
        recurrence = self._recurrence(states, "channels", dim**-0.5)
        gates, betas = self._weights_of(width, heads)
        program.weigh(
            f,
            low,
            gates,
            betas,
            recurrence,
            a_log=_parameter(mixer, "a_log"),
            dt_bias=_parameter(mixer, "dt_bias"),
        )
        q, k, v = (mixed.at(column, size) for column in (0, width, 2 * width))
        o = program.buffer("recurrent rows", width)
        program.recur(q, k, v, gates, betas, o, recurrence)
        self._gate(mixer.norm, o, z, width)
        return o

    def _mamba2(self, mixer: Mamba2, h: step.Buffer, states: LayerStates) -> step.Buffer:
        program, config, size = self.program, mixer.config, self.size
        heads, (width, _, groups, _, _) = config.num_heads, config.parts
        if config.input_scale != 1:
            scaled = program.buffer("scaled", self.model.config.hidden_size)
            program.multiply(h, scaled, self.model.config.hidden_size, factor=config.input_scale)
            h = scaled
        columns = sum(config.parts)
        rows = program.buffer("projected rows", columns)
        mixed = program.buffer("convolved rows", width + 2 * groups)
        program.product(h, rows, _panels_of(mixer.in_proj), step.STORE)
        if any(scale != 1 for scale in config.part_scales):
            factors = mixer.factors_like(torch.empty(0, dtype=self.model.dtype))
            program.multiply(rows, rows, columns, factors=lambda: factors)
        self._convolve(mixer, rows.at(width, size), mixed, states, "silu")
        recurrence = self._recurrence(states, "time steps", 1.0)
        gates, betas = self._weights_of(heads, heads)
        program.weigh(
            rows.at(columns - heads, size),
            None,
            gates,
            betas,
            recurrence,
            a_log=_parameter(mixer, "a_log"),
            dt_bias=_parameter(mixer, "dt_bias"),
            limits=config.dt_limits,
        )
        u, b, c = (mixed.at(column, size) for column in (0, width, width + groups))
        o = program.buffer("recurrent rows", width)
        program.recur(c, b, u, gates, betas, o, recurrence)
        skip: dict[str, Any] = {"skipped": u, "skip": _parameter(mixer, "d")}
        self._gate(mixer.norm, o, rows, width, head_dim=config.head_dim, **skip)
        return o

    def _short_conv(self, mixer: ShortConv, h: step.Buffer, states: LayerStates) -> step.Buffer:
        program, width = self.program, mixer.config.width
        rows = program.buffer("projected rows", 3 * width)
        b, c, u = (rows.at(part * width, self.size) for part in range(3))
        product, o = (program.buffer(name, width) for name in ("convolved rows", "recurrent rows"))
        program.product(h, rows, _panels_of(mixer.in_proj), step.STORE)
        program.multiply(b, product, width, other=u)
        self._convolve(mixer, product, o, states, "identity")
        program.multiply(o, o, width, other=c)
        return o

    def _convolve(
        self,
        mixer: Any,
        source: step.Buffer,
        target: step.Buffer,
        states: LayerStates,
        function: str,
    ) -> None:
        bias = getattr(mixer, "conv_bias", None)
        self.program.convolve(
            source,
            target,
            _parameter(mixer, "conv"),
            None if bias is None else _parameter(mixer, "conv_bias"),
            states.convolution,
            function=function,
        )

    def _to_unit_length(self, rows: step.Buffer, num_heads: int, dim: int) -> None:
        """Append the operation that divides each head by its length, in place; heads are the first
        num_heads * dim columns of `rows`.

        The operation is an RMS norm whose weight is dim ** -0.5.
        """
        zeros = torch.zeros(dim, dtype=self.model.dtype)
        norm = step.Norm(lambda: zeros, UNIT_EPS / dim, shift=dim**-0.5)
        self.program.norm(rows, rows, norm, parts=num_heads)

    def _recurrence(self, states: LayerStates, rule: str, q_scale: float) -> step.Recurrence:
        assert states.recurrence is not None
        return step.Recurrence(rule, [x for x in states.recurrence if x is not None], q_scale)

    def _weights_of(self, num_gates: int, num_heads: int) -> tuple[step.Buffer, step.Buffer]:
        """Declare two float32 buffers of a recurrence, and return both: decays, and strengths.

        A row of the first holds num_gates logarithms of decays: factors by which a token shrinks
        the state. A row of the second holds num_heads strengths, not logarithms: factors of the
        token's own update (beta of a delta rule, the time step of Mamba-2).
        """
        gates = self.program.buffer("logs of decays", num_gates, torch.float32)
        return gates, self.program.buffer("strengths", num_heads, torch.float32)

    def _gate(
        self,
        norm: GatedRMSNorm | None,
        o: step.Buffer,
        gates: step.Buffer,
        columns: int,
        **skip: Any,
    ) -> None:
        """Append the gated norm of a recurrence's output `o`, in place.

        Args:
            norm: the norm; None multiplies by silu(gates) only.
            gates: the gates, which go through silu.
            columns: the channels of a row.
            skip: the term that is added to o first, if any.
        """
        if norm is None:
            self.program.gate(o, gates, o, columns, function="silu", **skip)
            return
        self.program.gate(
            o,
            gates,
            o,
            columns,
            function=norm.activation,
            norm=step.Norm(_weight_of(norm), norm.eps, rounds=norm.rounds_first),
            parts=columns // norm.group_size,
            gate_first=norm.gate_first,
            **skip,
        )

    def _latents(
        self, attention: MultiheadLatentAttention, h: step.Buffer, index: int, place: int
    ) -> None:
        """Append the operations of attention over latents from its input h to the heads' outputs in
        `o`; note them in `attention`.

        Args:
            attention: the layer's attention module.
            h: the normalised input.
            index: the number of the layer.
            place: the place of the layer's cache.
        """
        program, dtype, kv = self.program, self.model.dtype, self.caches[place]
        rank, num_heads = attention.kv_rank, attention.num_heads
        nope, rotated, v_dim = attention.nope_dim, attention.rope_dim, attention.v_head_dim
        dim, start, wide = nope + rotated, _whole(num_heads * (nope + rotated)), _whole(rank)
        c_q = h
        if attention.q_a_proj is not None:
            assert attention.q_rank is not None
            raw = program.buffer("latent of queries", attention.q_rank)
            c_q = program.buffer("normalised latent of queries", attention.q_rank)
            program.product(h, raw, _panels_of(attention.q_a_proj), step.STORE)
            program.norm(raw, c_q, _norm_of(attention.q_a_norm, dtype))
        program.product(c_q, self.qkv, _panels_of(attention.q_b_proj), step.STORE)
        latent = self.qkv.at(start, self.size)
        program.product(h, latent, _panels_of(attention.kv_a_proj), step.STORE)
        program.norm(latent, latent, _norm_of(attention.kv_a_norm, dtype), parts=1)
        cache, *scales = kv
        keys = [cache[..., rank:].unsqueeze(2), *(scale[..., 1:] for scale in scales)]
        values = [cache[..., :rank].unsqueeze(2), *(scale[..., :1] for scale in scales)]
        parts = [part for pair in zip(keys, values, strict=True) for part in pair]
        rope = self.model.config.layers[index].attention.rope
        heads = step.Heads(
            parts,
            num_heads,
            1,
            q_at=nope,
            k_at=start + rank,
            v_at=start,
            q_step=dim,
            half=0 if rope is None else rotated // 2,
            angles=0 if rope is None else self.angles[rope],
            is_interleaved=attention.rope_interleaved,
        )
        program.rotate(self.qkv, heads)
        writes = len(program) - 1
        q_latent = program.buffer("latent queries", num_heads * wide)
        o_latent = program.buffer("latent outputs", num_heads * wide)
        assert attention.packed_uk is not None
        assert attention.packed_uv is not None
        program.products_of_heads(
            self.qkv,
            q_latent,
            [_panels_of(each) for each in attention.packed_uk],
            source_step=dim,
            target_step=wide,
        )
        first = len(program)
        latents = step.Latents(kv, num_heads, rank, attention.softmax_scale)
        program.attend_latents(
            q_latent, self.qkv.at(nope, self.size), o_latent, latents, rope_step=dim
        )
        end = len(program)
        program.products_of_heads(
            o_latent,
            self.o,
            [_panels_of(each) for each in attention.packed_uv],
            source_step=wide,
            target_step=v_dim,
            outputs=v_dim,
        )

        def attend(ctx: AttentionContext, cache: CacheLayer, rows: int) -> None:
            buffers = program.buffers
            q, o = (
                buffers[held.name][:rows, : num_heads * wide].unflatten(-1, (num_heads, wide))
                for held in (q_latent, o_latent)
            )
            q_rope = buffers["qkv"][:rows, : num_heads * dim].unflatten(-1, (num_heads, dim))
            found = attention.attend_latents(
                q[..., :rank], q_rope[..., nope:], ctx, cast(LatentLayer, cache)
            )
            o[..., :rank] = found

        self.attention.append(CpuAttention(writes, first, end, attend))


def _whole(columns: int) -> int:
    """Return `columns` rounded up to whole groups of a product's outputs."""
    return -(-columns // step.WIDTH) * step.WIDTH


def _qkv_columns(attention: AttentionConfig) -> int:
    width = attention.num_q_heads * attention.head_dim * (1 + attention.has_gate)
    if attention.kv_layer is not None:
        return width
    if attention.latent is not None:
        return _whole(width) + attention.latent.kv_rank + attention.latent.rope_dim
    _, dim, v_dim = attention.cached_head
    return width + attention.num_kv_heads * (dim + v_dim)


def _o_columns(attention: AttentionConfig) -> int:
    latent = attention.latent
    dim = attention.cached_head[2] if latent is None else latent.v_head_dim
    return attention.num_q_heads * dim


def _parts_of(cache: CacheLayer) -> tuple[Tensor, ...]:
    return (cache,) if isinstance(cache, Tensor) else tuple(cache)


def _angles_of(
    rotaries: Sequence[RotaryEmbedding], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of at least `count` positions, (positions, columns), side by
    side for all rotary settings."""
    if not rotaries:
        nothing = torch.empty((count, 0))
        return nothing, nothing
    tables = [rotary.reserve(count, device) for rotary in rotaries]
    if len(tables) == 1:
        return tables[0]
    most = min(len(cos) for cos, _ in tables)
    return (
        torch.cat([cos[:most] for cos, _ in tables], -1),
        torch.cat([sin[:most] for _, sin in tables], -1),
    )


def _norm_of(module: nn.Module | None, dtype: torch.dtype) -> step.Norm:
    """Return the `step.Norm` that describes a norm module to the program; it reads the module's
    present weight."""
    if isinstance(module, UnitRMSNorm):
        ones = torch.ones(module.dim, dtype=dtype)
        return step.Norm(lambda: ones, module.eps, rounds=True)
    if isinstance(module, RMSNorm):
        return step.Norm(_weight_of(module), module.eps, rounds=True)
    if isinstance(module, ShiftedRMSNorm):
        return step.Norm(_weight_of(module), module.eps, shift=1.0)
    assert isinstance(module, LayerNorm)
    ones = torch.ones(module.normalized_shape, dtype=dtype)
    weight = (lambda: ones) if module.weight is None else _weight_of(module)
    bias = None if module.bias is None else _parameter(module, "bias")
    shift = 1.0 if module.is_shifted else 0.0
    return step.Norm(weight, module.eps, bias=bias, shift=shift, centres=True)


def _panels_of(linear: nn.Module | None) -> Panels:
    """Return the packed weight of a PackedLinear."""
    assert isinstance(linear, PackedLinear)
    return linear.panels


def _weight_of(module: nn.Module | None) -> step.Held:
    """Return a function that returns a module's current weight."""
    return _parameter(module, "weight")


def _parameter(module: nn.Module | None, name: str) -> step.Held:
    """Return a function that returns a module's current parameter of this name."""
    assert module is not None
    parameters = module._parameters

    def find() -> Tensor:
        found = parameters.get(name)  # a tenth of the time of an attribute access
        return cast(Tensor, getattr(module, name)) if found is None else found

    return find
