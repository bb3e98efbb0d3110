"""gpt-oss: attention sinks, windows on every second layer, mixtures of experts in MXFP4."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tilewise.models.config import ModelConfig
from tilewise.models.pre_norm import PreNormDecoder, PreNormLayer
from tilewise.models.weight_table import Weight
from tilewise.nn.attention import Attention
from tilewise.nn.experts import Experts

__all__ = ["GptOss", "for_device"]

# Random expert weights are random bytes, with magnitudes of 2 and more on average, times 2 ** -7.
_DRAWN_SCALE = 127 - 7


class GptOssLayer(PreNormLayer):
    """A layer with attention sinks and a mixture of experts."""

    attention: Attention
    mlp: Experts

    def __init__(self, config: ModelConfig, layer: int) -> None:
        assert config.experts is not None
        attention = Attention(
            config.hidden_size,
            config.num_q_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.o_bias,
            window=config.windows[layer],
            softmax_scale=config.softmax_scales[layer],
            has_sinks=config.attention_sinks,
        )
        mlp = Experts(config.hidden_size, config.experts)
        super().__init__(config, attention, mlp)


class GptOss(PreNormDecoder):
    """The decoder of OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b model card".

    A checkpoint's experts are MXFP4 or plain tensors. MXFP4 stays packed on a GPU and is unpacked
    when it is loaded on a CPU, whose kernels multiply panels.
    """

    weight_prefix = "model."
    ignored_weights = (r".*rotary_emb\.inv_freq",)
    residual_projections = ("o_proj.weight", "mlp.down")

    def new_layer(self, config: ModelConfig, layer: int) -> GptOssLayer:
        """Return the layer of this index."""
        return GptOssLayer(config, layer)

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Replace the weights by the layout that this CPU reads fastest; see `Decoder`.

        Raises:
            ValueError: `is_int8`, which experts do not support.
        """
        if is_int8:
            raise ValueError("weight_dtype must be auto with mixtures of experts, got int8")
        for module in self.modules():
            if isinstance(module, Experts):
                module.pack_for_inference()
        super().pack_for_inference()

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw random weights as `Decoder.init_weights`; sinks are 0, packed experts random
        bytes."""
        super().init_weights(std=std, generator=generator)
        for module in self.modules():
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
        """Return for each parameter its tensors in a Hugging Face checkpoint."""
        config = self.config
        assert config.experts is not None
        q_rows = config.num_q_heads * config.head_dim
        kv_rows = config.num_kv_heads * config.head_dim
        kinds = ("weight", "bias") if config.attention_bias else ("weight",)
        table = [Weight.of("embed_tokens.weight", "model.embed_tokens.weight")]
        for i in range(config.num_layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            for kind in kinds:
                sources = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
                name = f"{ours}.attention.qkv_proj.{kind}"
                table.append(Weight(name, sources, (q_rows, kv_rows, kv_rows)))
            names = {f"attention.o_proj.{kind}": f"self_attn.o_proj.{kind}" for kind in kinds} | {
                "attention.sinks": "self_attn.sinks",
                "attention_norm.weight": "input_layernorm.weight",
                "mlp_norm.weight": "post_attention_layernorm.weight",
                "mlp.router.weight": "mlp.router.weight",
                "mlp.router.bias": "mlp.router.bias",
                "mlp.up_bias": "mlp.experts.gate_up_proj_bias",
                "mlp.down_bias": "mlp.experts.down_proj_bias",
            }
            for part, source in (("up", "gate_up_proj"), ("down", "down_proj")):
                if config.experts.is_packed:
                    names[f"mlp.{part}"] = f"mlp.experts.{source}_blocks"
                    names[f"mlp.{part}_scale"] = f"mlp.experts.{source}_scales"
                else:
                    whole = (f"{theirs}.mlp.experts.{source}",)
                    table.append(Weight(f"{ours}.mlp.{part}", whole, transposed=True))
            table += [
                Weight.of(f"{ours}.{name}", f"{theirs}.{source}") for name, source in names.items()
            ]
        table.append(Weight.of("norm.weight", "model.norm.weight"))
        if self.lm_head is not None:
            table.append(Weight.of("lm_head.weight", "lm_head.weight"))
        return tuple(table)


def for_device(config: ModelConfig, device: torch.device) -> ModelConfig:
    """Return the configuration for loading a model on a device: experts are unpacked on a CPU."""
    if config.experts is None or not config.experts.is_packed or device.type == "cuda":
        return config
    return replace(config, experts=replace(config.experts, is_packed=False))
