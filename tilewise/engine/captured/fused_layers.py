"""A Llama whose layers run as one kernel, for decode steps of a few rows on a GPU.

Between two kernels of a small model's step the device waits longer than it computes: a launch takes
a few microseconds, the weights of a product are read in one or two. One kernel that stays on the
device for all layers has no launches, and reads the next product's weights while it waits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.cache.storage import KVStorage
from tilewise.engine.steps.runner import CausalModel
from tilewise.models.llama import Llama, LlamaLayer
from tilewise.nn.context import AttentionContext
from tilewise.ops import decode_layers

__all__ = ["FUSED_ROWS", "FusedLayers", "why_not"]

FUSED_ROWS = (1, 2)


def why_not(model: CausalModel, storage: KVStorage) -> str | None:
    """Say why `FusedLayers` cannot run a model over a cache, or return None when it can."""
    if not isinstance(model, Llama):
        return f"the model must be a Llama, got {type(model).__name__}"
    config = model.config
    if config.hidden_act not in ("silu", "swish"):
        return f"hidden_act must be silu, got {config.hidden_act}"
    if any(window is not None for window in config.windows):
        return f"no layer may have a window, got {config.windows}"
    if len(set(config.softmax_scales)) > 1:
        return f"layers must have one softmax_scale, got {config.softmax_scales}"
    if config.o_bias or config.mlp_bias:
        return "o_proj and the feed-forward block must have no bias"
    if config.rope is None or config.rope.rotary_dim != config.head_dim:
        return "all channels of a head must rotate"
    if any(type(m) is not nn.Linear for layer in _layers(model) for m in _linears(layer)):
        return "the weights must not be packed"
    if any(not p.is_contiguous() for p in model.parameters()):
        return "the parameters must be contiguous"
    at, kv = storage.layers[0][0].device, storage.spec.kv
    reason: str | None = decode_layers.why_not(model.dtype, kv.dtype, at, **_shape(model))
    return reason


class FusedLayers:
    """Computes what `model` computes, for exactly `rows` rows that decode.

    Args:
        model: see `why_not`; its weights are shared, not copied.
        storage: the paged cache.
        rows: of FUSED_ROWS.
    """

    def __init__(self, model: Llama, storage: KVStorage, rows: int) -> None:
        self._model = model
        tensors = [
            (*_tensors(layer), kv[0], kv[1])
            for layer, kv in zip(_layers(model), storage.layers, strict=True)
        ]
        self._layers = decode_layers.new_layers(tensors, rows, **_shape(model))

    @torch.inference_mode()
    def __call__(self, ids: Tensor, positions: Tensor, *, ctx: AttentionContext) -> Tensor:
        """Return the last hidden states (rows, E), normalised; see `Decoder.forward`."""
        model = self._model
        return self.through_layers(model.embed_tokens(ids), model.rotary(positions), ctx=ctx)

    @torch.inference_mode()
    def through_layers(
        self, x: Tensor, rope: tuple[Tensor, Tensor], *, ctx: AttentionContext
    ) -> Tensor:
        """Likewise of embedded tokens x (rows, E); see `PreNormDecoder.through_layers`."""
        cos, sin = rope
        x, residual = self._layers.run(
            x,
            cos=cos,
            sin=sin,
            slot_mapping=ctx.slot_mapping,
            seqlens_k=ctx.seqlens_k,
            block_table=ctx.block_table,
        )
        return self._model.norm.add(x, residual)[0]


def _layers(model: Llama) -> list[LlamaLayer]:
    return [layer for layer in model.layers if isinstance(layer, LlamaLayer)]


def _linears(layer: LlamaLayer) -> tuple[nn.Module, ...]:
    attention, mlp = layer.attention, layer.mlp
    return (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)


def _tensors(layer: LlamaLayer) -> tuple[Tensor | None, ...]:
    attention, mlp = layer.attention, layer.mlp
    norms = (attention.q_norm, attention.k_norm)
    q_norm, k_norm = (None if norm is None else norm.weight for norm in norms)
    return (
        layer.attention_norm.weight,
        attention.qkv_proj.weight,
        attention.qkv_proj.bias,
        q_norm,
        k_norm,
        attention.o_proj.weight,
        layer.mlp_norm.weight,
        mlp.gate_up_proj.weight,
        mlp.down_proj.weight,
    )


def _shape(model: Llama) -> dict[str, Any]:
    config = model.config
    return {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "num_q_heads": config.num_q_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "has_qk_norm": config.qk_norm,
        "has_qkv_bias": config.attention_bias,
        "eps": config.norm_eps,
        "qk_eps": config.norm_eps if config.qk_norm else 0.0,
        "softmax_scale": config.softmax_scales[0],
    }
