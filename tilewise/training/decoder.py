"""The decoders' forward pass for training: 16-bit products over packed documents or whole rows.

The parameters are those of `tilewise.models` in float32; each product casts its weight, and the
residual stream stays in the products' dtype. What is no matrix product and no attention is plain
torch, which torch.compile fuses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.models import Decoder
from tilewise.models.config import ModelConfig
from tilewise.models.layer_config import PRE_NORM
from tilewise.models.native import NativeDecoder, NativeLayer
from tilewise.nn import MLP, Attention, GatedDeltaNet, GatedMLP, RMSNorm
from tilewise.nn.gated_norm import unit_length
from tilewise.nn.layers import ShiftedRMSNorm

_RMS = ("rms", "shifted_rms")

__all__ = ["Documents", "attend", "hidden_states", "layer_norm", "linear"]


class Documents(NamedTuple):
    """The edges of the documents of a packed batch.

    Attributes:
        cu_seqlens: (B + 1,) int32; document b is rows cu_seqlens[b]:cu_seqlens[b + 1]. Empty ones
            may follow the last, so that all batches have one shape.
        max_seqlen: host int, an upper bound of the tokens of a document.
    """

    cu_seqlens: Tensor
    max_seqlen: int


def hidden_states(
    model: Decoder,
    ids: Tensor,
    positions: Tensor | None,
    documents: Documents | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> Tensor:
    """Return the last hidden states, normalised, in `dtype`; differentiable.

    Args:
        model: a GPT-2, a Llama or a Qwen3.5 of `tilewise.models`, of float32 parameters.
        ids: int64, (T,) packed, or (B, S) where each row is one text.
        positions: int64 (T,), each document's own; None for rows.
        documents: the documents of packed ids; None for rows.
        dtype: the dtype of products and of the residual stream.
        deterministic: True if the backward pass of attention must give the same bits each time.

    Returns:
        (T, E) or (B, S, E).

    Raises:
        ValueError: packed ids come without positions, or rows with them.
        TypeError: the model has a part that this forward pass does not compute; the message names
            it.
    """
    if (documents is None) != (positions is None):
        raise ValueError("positions and documents must come together, got one of them")
    if documents is None and ids.dim() != 2:
        raise ValueError(f"ids must be (B, S) without documents, got shape {tuple(ids.shape)}")
    if not isinstance(model, NativeDecoder):
        raise TypeError(f"model must be a NativeDecoder, got {type(model).__name__}")
    config = model.config
    reason = _why_not(config)
    if reason is not None:
        raise TypeError(f"model must be a GPT-2, a Llama or a Qwen3.5: {reason}")
    forward = _gpt2 if config.norm.kind == "layer" else _llama
    return forward(model, ids, positions, documents, dtype, deterministic)


def _why_not(config: ModelConfig) -> str | None:
    """Return a text that names the setting of `config` that these forward passes lack; None if they
    compute the model."""
    is_layer_norm = config.norm.kind == "layer"
    facts: list[tuple[str, object, object]] = [
        ("learned_positions", config.learned_positions is not None, is_layer_norm),
        ("embedding_scale", config.embedding_scale, 1.0),
        ("embedding_norm", config.embedding_norm, False),
        ("first_position", config.first_position, 0),
        ("residual_scale", config.residual_scale, 1.0),
        ("ropes", len(config.ropes), 0 if is_layer_norm else 1),
    ]
    if not is_layer_norm and config.norm.kind not in _RMS:
        return f"norm must be layer, {' or '.join(_RMS)}, got {config.norm.kind}"
    if is_layer_norm:
        facts.append(("norm.has_bias", (config.norm.has_weight, config.norm.has_bias), (True,) * 2))
    for layer in config.layers:
        attention, block = layer.attention, layer.feed_forward
        facts += [
            ("norms", layer.norms, PRE_NORM),
            ("is_parallel", layer.is_parallel, False),
            ("feed_forward", type(block).__name__, "FeedForwardConfig"),
            ("is_gated", getattr(block, "is_gated", None), not is_layer_norm),
        ]
        if attention is None and not is_layer_norm:
            facts.append(("mixer", type(layer.mixer).__name__, "GatedDeltaConfig"))
            continue
        if attention is None or layer.mixer is not None:
            return "layers must have attention or a gated delta net, got another state"
        facts += [
            ("latent", attention.latent, None),
            ("has_sinks", attention.has_sinks, False),
            ("softcap", attention.softcap, 0.0),
            ("alibi_slopes", attention.alibi_slopes, ()),
            ("qk_norm_over", attention.qk_norm_over, "head"),
            ("norms_after_rope", attention.norms_after_rope, False),
            ("rope", attention.rope, next(iter(config.ropes), None)),
        ]
        if attention.rope is not None:
            facts.append(("rope.interleaved", attention.rope.interleaved, False))
        if is_layer_norm:
            facts.append(("has_gate", attention.has_gate, False))
        if attention.qk_norm is not None and attention.qk_norm.kind not in _RMS:
            return f"qk_norm must be {' or '.join(_RMS)}, got {attention.qk_norm.kind}"
    for name, found, wanted in facts:
        if found != wanted:
            return f"{name} must be {wanted}, got {found}"
    return None


def _gpt2(
    model: NativeDecoder,
    ids: Tensor,
    positions: Tensor | None,
    documents: Documents | None,
    dtype: torch.dtype,
    deterministic: bool,
) -> Tensor:
    if positions is None:
        positions = torch.arange(ids.shape[-1], device=ids.device)
    assert model.embed_positions is not None
    x = (model.embed_tokens(ids) + model.embed_positions(positions)).to(dtype)
    for layer in model.layers:
        assert isinstance(layer, NativeLayer)
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP)
        first, second = layer.attention_norm, layer.mlp_norm
        assert isinstance(first, nn.LayerNorm)
        assert isinstance(second, nn.LayerNorm)
        q, k, v = _split(attention, linear(layer_norm(x, first), attention.qkv_proj))
        o = attend(q, k, v, documents, attention.softmax_scale, deterministic=deterministic)
        x = x + linear(o.flatten(-2), attention.o_proj)
        up = linear(layer_norm(x, second), mlp.up_proj)
        x = x + linear(mlp.activation(up), mlp.down_proj)
    assert isinstance(model.norm, nn.LayerNorm)
    return layer_norm(x, model.norm)


def _llama(
    model: NativeDecoder,
    ids: Tensor,
    positions: Tensor | None,
    documents: Documents | None,
    dtype: torch.dtype,
    deterministic: bool,
) -> Tensor:
    if positions is None:
        cos, sin = model.rotary.prefix(ids.shape[-1], ids.device)
    else:
        cos, sin = model.rotary.reserve(model.config.max_position_embeddings, ids.device)
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None], sin[:, None]
    x = model.embed_tokens(ids).to(dtype)
    for layer in model.layers:
        assert isinstance(layer, NativeLayer)
        x = _llama_layer(layer, x, cos, sin, documents, deterministic)
    return _rms_norm(x, model.norm)


def _llama_layer(
    layer: NativeLayer,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    documents: Documents | None,
    deterministic: bool,
) -> Tensor:
    """Return the residual stream (..., E) after a layer, given that before it, x."""
    mlp, first, second = layer.mlp, layer.attention_norm, layer.mlp_norm
    assert isinstance(mlp, GatedMLP)
    h = _rms_norm(x, first)
    if isinstance(layer.mixer, GatedDeltaNet):
        x = x + _gated_delta_net(layer.mixer, h, documents)
    else:
        assert isinstance(layer.attention, Attention)
        x = x + _rotated_attention(layer.attention, h, cos, sin, documents, deterministic)
    gate, up = linear(_rms_norm(x, second), mlp.gate_up_proj).chunk(2, dim=-1)
    return x + linear(mlp.activation(gate) * up, mlp.down_proj)


def _rotated_attention(
    attention: Attention,
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    documents: Documents | None,
    deterministic: bool,
) -> Tensor:
    """Return the output (..., E) of attention with rotation for h, the normalised residual stream;
    norms of q and k and an output gate included where the layer has them."""
    qkv, gate = linear(h, attention.qkv_proj), None
    if attention.has_gate:
        width = attention.num_q_heads * attention.head_dim
        gate, qkv = qkv.split([width, qkv.shape[-1] - width], dim=-1)
    q, k, v = _split(attention, qkv)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k = _rms_norm(q, attention.q_norm), _rms_norm(k, attention.k_norm)
    o = attend(
        _rotate(q, cos, sin),
        _rotate(k, cos, sin),
        v,
        documents,
        attention.softmax_scale,
        window=attention.window,
        deterministic=deterministic,
    ).flatten(-2)
    if gate is not None:
        o = o * torch.sigmoid(gate)
    return linear(o, attention.o_proj)


def _gated_delta_net(net: GatedDeltaNet, h: Tensor, documents: Documents | None) -> Tensor:
    """Return the output (..., E) of a `nn.GatedDeltaNet` for h, with products in the dtype of h;
    differentiable."""
    config, (*channels, width) = net.config, net.config.parts
    edges = None if documents is None else documents.cu_seqlens
    mixed, z = linear(h, net.qkvz_proj).split([sum(channels), width], dim=-1)
    convolved = ops.causal_conv1d(mixed, net.conv.to(h.dtype), activation="silu", cu_seqlens=edges)
    assert isinstance(convolved, Tensor)  # states are not asked for
    q, k, v = convolved.split(channels, dim=-1)
    q, k = (unit_length(part.unflatten(-1, (-1, config.key_dim))) for part in (q, k))
    v, z = (part.unflatten(-1, (-1, config.value_dim)) for part in (v, z))
    b, a = linear(h, net.ba_proj).chunk(2, dim=-1)
    beta = config.beta_scale * torch.sigmoid(b)
    g = -net.a_log.exp() * F.softplus(a.float() + net.dt_bias)
    o = ops.gated_delta(q, k, v, g, beta, cu_seqlens=edges)
    return linear(net.norm(o, z).flatten(-2), net.o_proj)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    softmax_scale: float | None,
    *,
    causal: bool = True,
    window: int | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Compute attention within each packed document, or within each row of a batch.

    Args:
        q, k, v: (T, H, D) with documents, (B, S, H, D) without.
        documents: cu_seqlens and the longest length, in tokens; None for a batch of equal rows.
        softmax_scale: the factor of q . k; None is D ** -0.5.
        window: the number of keys that a query sees, its own included; None is no bound.
        causal: True if a query sees no later key.
        deterministic: True for gradients with the same bits in each run.
    """
    if documents is None:
        o: Tensor = ops.attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            softmax_scale=softmax_scale,
            deterministic=deterministic,
        )
        return o
    cu_seqlens, longest = documents
    packed: Tensor = ops.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        deterministic=deterministic,
    )
    return packed


def linear(x: Tensor, module: nn.Linear) -> Tensor:
    """Return x W^T + b, with weight and bias, if there is one, converted to the dtype of x."""
    bias = None if module.bias is None else module.bias.to(x.dtype)
    return F.linear(x, module.weight.to(x.dtype), bias)


def layer_norm(x: Tensor, module: nn.LayerNorm) -> Tensor:
    """Return x normalised by `module`, whose parameters are cast to the dtype of x; statistics are
    float32."""
    shape = list(module.normalized_shape)
    return F.layer_norm(x, shape, module.weight.to(x.dtype), module.bias.to(x.dtype), module.eps)


def _rms_norm(x: Tensor, module: nn.Module | None) -> Tensor:
    assert isinstance(module, RMSNorm | ShiftedRMSNorm)
    wide = x if x.dtype == torch.float64 else x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.eps)
    if isinstance(module, ShiftedRMSNorm):
        return (y * (1 + module.weight)).to(x.dtype)
    return y.to(x.dtype) * module.weight.to(x.dtype)


def _split(attention: Attention, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv (..., (Hq + 2 Hk) D) into views q (..., Hq, D), k and v (..., Hk, D)."""
    hq, hk = attention.num_q_heads, attention.num_kv_heads
    q, k, v = qkv.unflatten(-1, (hq + 2 * hk, attention.head_dim)).split([hq, hk, hk], dim=-2)
    return q, k, v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head as `ops.apply_rope`, in operations that a compiler can fuse.

    Channels after the first 2 * cos.shape[-1] are unchanged.
    """
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
