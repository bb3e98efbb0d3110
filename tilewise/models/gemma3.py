"""Gemma 3 for text: windows on most layers, two rotary bases, four norms a layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.weight_table import Weight
from tilewise.nn.attention import Attention
from tilewise.nn.context import AttentionContext
from tilewise.nn.layers import GatedMLP, ShiftedRMSNorm
from tilewise.nn.rope import RotaryEmbedding

__all__ = ["Gemma3"]

_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


class Gemma3Layer(nn.Module):
    """A layer that computes x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.attention_norm = ShiftedRMSNorm(width, eps)
        self.attention = Attention(
            width,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.o_bias,
            window=config.windows[layer],
            softmax_scale=config.softmax_scales[layer],
        )
        self.attention.q_norm = ShiftedRMSNorm(config.head_dim, eps)
        self.attention.k_norm = ShiftedRMSNorm(config.head_dim, eps)
        self.attention_out_norm = ShiftedRMSNorm(width, eps)
        self.mlp_norm = ShiftedRMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size, config.hidden_act)
        self.mlp_out_norm = ShiftedRMSNorm(width, eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        ctx: AttentionContext | None,
        kv: CacheLayer | None,
    ) -> Tensor:
        """Map the residual stream (..., E) to itself."""
        attended = self.attention(self.attention_norm(x), rope, ctx=ctx, kv=kv)
        x = x + self.attention_out_norm(attended)
        y: Tensor = x + self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
        return y


class Gemma3(Decoder):
    """The decoder of the Gemma team, 2025, "Gemma 3 technical report", without its vision tower.

    Layers with a window are rotated by `config.local_rope`, the others by `config.rope`. The
    embedding is scaled by the root of its width, in the dtype of the model.
    """

    weight_prefix = "model."
    ignored_weights = (r".*rotary_emb\..*inv_freq", r".*embed_scale")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.rope is not None
        self.rotary = RotaryEmbedding(config.rope)
        self.local_rotary = RotaryEmbedding(config.local_rope or config.rope)
        self.layers = nn.ModuleList(Gemma3Layer(config, i) for i in range(config.num_layers))
        self.norm = ShiftedRMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the last hidden states, normalised; see `Decoder.forward`."""
        ropes = []
        for rotary in (self.rotary, self.local_rotary):
            if positions is None:
                ropes.append(rotary.prefix(self.dense_length(ids, ctx), ids.device))
            else:
                ropes.append(rotary(positions))
        x = self.embed_tokens(ids)
        # A number rather than a tensor, rounded to the dtype of the model as transformers does.
        x = x * float(torch.tensor(self.config.hidden_size**0.5).to(x.dtype))
        for i, layer in enumerate(self.layers):
            own = ctx if ctx is None else ctx.of_layer(i)
            rope = ropes[self.config.windows[i] is not None]
            x = layer(x, rope, own, None if kv is None else kv[i])
        y: Tensor = self.norm(x)
        return y

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return logits as `Decoder.head_logits`; with `config.logit_softcap` they are capped
        float32."""
        logits, cap = super().head_logits(hidden), self.config.logit_softcap
        if cap is None:
            return logits
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return torch.tanh(wide / cap) * cap

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw random weights as `Decoder.init_weights`; a norm's weight is stored as its excess
        over 1."""
        super().init_weights(std=std, generator=generator)
        for module in self.modules():
            if isinstance(module, ShiftedRMSNorm):
                module.weight.zero_()

    def weight_table(self) -> tuple[Weight, ...]:
        """Return for each parameter its tensors in a Hugging Face checkpoint."""
        config = self.config
        q_rows = config.num_q_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        table = [Weight.of("embed_tokens.weight", "model.embed_tokens.weight")]
        for i in range(config.num_layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            for kind in ("weight", "bias") if config.attention_bias else ("weight",):
                parts = tuple(f"{theirs}.self_attn.{x}_proj.{kind}" for x in "qkv")
                rows = (q_rows, kv_rows, kv_rows)
                table.append(Weight(f"{ours}.attention.qkv_proj.{kind}", parts, rows))
            for kind in ("weight", "bias") if config.o_bias else ("weight",):
                source = f"{theirs}.self_attn.o_proj.{kind}"
                table.append(Weight.of(f"{ours}.attention.o_proj.{kind}", source))
            gate_up = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
            inner = (config.intermediate_size,) * 2
            table.append(Weight(f"{ours}.mlp.gate_up_proj.weight", gate_up, inner))
            names = {"mlp.down_proj": "mlp.down_proj"} | _NORMS
            table += [
                Weight.of(f"{ours}.{name}.weight", f"{theirs}.{source}.weight")
                for name, source in names.items()
            ]
        table.append(Weight.of("norm.weight", "model.norm.weight"))
        if self.lm_head is not None:
            table.append(Weight.of("lm_head.weight", "lm_head.weight"))
        return tuple(table)
