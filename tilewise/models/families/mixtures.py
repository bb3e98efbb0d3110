"""Llama's kin with mixtures: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, GLM-4.5, dots.llm1, MiniMax M2,
ERNIE 4.5, Phi-3.5-MoE.

Layers are a Llama's but for the feed-forward block, which in the first or in named layers may be
dense. A checkpoint has a tensor for each projection of each expert. Sources: Jiang et al., 2024,
"Mixtral of experts"; Muennighoff et al., 2024, "OLMoE"; Qwen team, 2025, "Qwen3 technical report";
GLM team, 2025, "GLM-4.5".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    count_or,
    flag,
    number,
    object_of,
    positive,
    whole,
)
from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.families.family import LLAMA_NAMES, Family, Names
from tilewise.models.families.llama import write_llama_like
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import LayerConfig, NormConfig
from tilewise.models.layer_fields import Sizes, layer_types, windows_of_types
from tilewise.models.unread_fields import must_be
from tilewise.nn.experts import ExpertsConfig

__all__ = [
    "FAMILIES",
    "expert_names",
    "experts_of",
    "first_dense",
    "grouped_experts",
    "named_dense",
]

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _layers(
    config: Json,
    sizes: Sizes,
    experts: ExpertsConfig,
    *,
    is_dense: Callable[[int], bool] = lambda _: False,
    windows: tuple[int | None, ...] | None = None,
    qk_norm_over: str | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    theta: float = 10_000.0,
    part: float | None = None,
    interleaved: bool = False,
    mlp_bias: bool = False,
    norm: NormConfig | None = None,
    softmax_scale: float | None = None,
    tied: bool = False,
) -> dict[str, Any]:
    """Return the arguments of `DecoderConfig` for a Llama with mixtures.

    Args:
        config, sizes: the contents of config.json, and the sizes that were read from it.
        experts: the mixture of the layers that are not dense.
        is_dense: a function that returns whether a layer has a dense block instead.
        windows: the window of each layer; None for none.
        qk_norm_over, qkv_bias, o_bias, softmax_scale: see `AttentionConfig`; None for no norm and
            for the usual scale.
        theta, part, interleaved: see `read_rope`.
        mlp_bias: True if the dense blocks have biases.
        norm: the norm of the residual stream; None for an RMS norm.
        tied: True if the output head is tied where the file does not say so.
    """
    scale = sizes.head_dim**-0.5 if softmax_scale is None else softmax_scale
    norm = NormConfig("rms", sizes.eps) if norm is None else norm
    rope = read_rope(
        config, sizes.head_dim, sizes.positions, theta=theta, part=part, interleaved=interleaved
    )
    dense = sizes.feed_forward(bias=mlp_bias)
    layers = (
        LayerConfig(
            sizes.attention(
                window=window,
                rope=rope,
                softmax_scale=scale,
                qkv_bias=qkv_bias,
                o_bias=o_bias,
                qk_norm=None if qk_norm_over is None else norm,
                qk_norm_over=qk_norm_over or "head",
            ),
            dense if is_dense(layer) else experts,
        )
        for layer, window in enumerate(windows or (None,) * sizes.num_layers)
    )
    return {
        **sizes.model,
        "layers": tuple(layers),
        "norm": norm,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", tied),
    }


def experts_of(config: Json, sizes: Sizes, active: int, **options: Any) -> ExpertsConfig:
    """Return the configuration of a mixture of experts by the usual fields.

    The number of experts has several names in configs; all that are present must agree.

    Args:
        active: the experts of a token, if the config does not say.
        options: further arguments of `ExpertsConfig`.

    Raises:
        CheckpointError: a field is missing, or breaks a rule.
    """
    name = next((name for name in _COUNTS if config.get(name) is not None), _COUNTS[0])
    num_experts = count(config, name)
    for other in _COUNTS:
        if config.get(other) not in (None, num_experts):
            raise CheckpointError(f"{other} must be {name} {num_experts}, got {config[other]!r}")
    try:
        return ExpertsConfig(
            num_experts,
            count_or(config, "num_experts_per_tok", active),
            activation=sizes.activation,
            **options,
        )
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def grouped_experts(config: Json, sizes: Sizes, **options: Any) -> ExpertsConfig:
    """Return the mixture of DeepSeek-V3 and its kin.

    It chooses experts by sigmoids and a correction, first among groups, and has shared experts.
    `options` replace arguments of `ExpertsConfig`.
    """
    shared, inner = count_or(config, "n_shared_experts", 1), count(config, "moe_intermediate_size")
    groups, active_groups = count_or(config, "n_group", 1), count_or(config, "topk_group", 1)
    return experts_of(
        config,
        sizes,
        8,
        **{
            "intermediate_size": inner,
            "scores": "sigmoid",
            "normalised": flag(config, "norm_topk_prob", True),
            "norm_eps": 1e-20,
            "weight_scale": float(number(config, "routed_scaling_factor", 1.0)),
            "has_correction_bias": True,
            "num_groups": groups,
            "num_active_groups": active_groups,
            "best_in_group": 2 if groups > 1 else 1,
            "routes_in_float32": True,
            "shared_size": inner * shared,
            **options,
        },
    )


def first_dense(config: Json, default: int) -> Callable[[int], bool]:
    """Return a function from a layer's number to whether it is among the first, dense ones.

    Their number is first_k_dense_replace, or `default`.
    """
    first = whole(config, "first_k_dense_replace", default)
    return lambda layer: layer < first


def named_dense(config: Json) -> Callable[[int], bool]:
    """Return a function from a layer's number to whether it is dense, by Qwen's fields.

    Dense are the layers in mlp_only_layers and those between every decoder_sparse_step-th.
    """
    step, named = count_or(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise CheckpointError(f"mlp_only_layers must be a list of layers, got {named!r}")
    return lambda layer: layer in named or (layer + 1) % step != 0


def _window(config: Json, default: int | None) -> int | None:
    """Return the field sliding_window: the default where it is absent, None where it is null."""
    value = config.get("sliding_window", default)
    return None if value is None else count({"sliding_window": value}, "sliding_window")


def _qwen3(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    normalised = flag(config, "norm_topk_prob", False)
    inner = count_or(config, "moe_intermediate_size", 768)
    experts = experts_of(config, sizes, 8, intermediate_size=inner, normalised=normalised)
    has_bias, slides = flag(config, "attention_bias", False), _slides(config)
    return _layers(
        config,
        sizes,
        experts,
        is_dense=named_dense(config),
        windows=(_window(config, 4096) if slides else None,) * sizes.num_layers,
        qk_norm_over="head",
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


def _qwen3_vl(config: Json) -> dict[str, Any]:
    usual = {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "norm_topk_prob": True}
    must_be(config, "norm_topk_prob", True)
    found = _qwen3({**usual, **{name: config[name] for name in config if config[name] is not None}})
    return found | {"tie_word_embeddings": flag(config, "tie_word_embeddings", True)}


def _slides(config: Json) -> bool:
    config.get("sliding_window"), config.get("max_window_layers")  # known, whether used or not
    return flag(config, "use_sliding_window", False)


def _qwen2(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    experts = experts_of(
        config,
        sizes,
        4,
        intermediate_size=count_or(config, "moe_intermediate_size", 1408),
        normalised=flag(config, "norm_topk_prob", False),
        shared_size=count_or(config, "shared_expert_intermediate_size", 5632),
        shared_is_gated=True,
    )
    first = count_or(config, "max_window_layers", 28)
    slides = _slides(config)
    window = count_or(config, "sliding_window", 4096) if slides else None
    usual = [
        "sliding_attention" if slides and layer % 2 == 0 and layer < first else "full_attention"
        for layer in range(sizes.num_layers)
    ]
    windows = windows_of_types(layer_types(config, sizes.num_layers, usual), window)
    qkv_bias = flag(config, "qkv_bias", True)
    is_dense = named_dense(config)
    return _layers(config, sizes, experts, is_dense=is_dense, windows=windows, qkv_bias=qkv_bias)


def _mixtral(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    experts = experts_of(config, sizes, 2, intermediate_size=sizes.intermediate_size)
    windows = (_window(config, None),) * sizes.num_layers
    return _layers(config, sizes, experts, windows=windows, theta=1e6)


def _olmoe(config: Json) -> dict[str, Any]:
    must_be(config, "clip_qkv", None)
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    normalised = flag(config, "norm_topk_prob", False)
    inner = sizes.intermediate_size
    experts = experts_of(config, sizes, 8, intermediate_size=inner, normalised=normalised)
    has_bias = flag(config, "attention_bias", False)
    return _layers(config, sizes, experts, qk_norm_over="heads", qkv_bias=has_bias, o_bias=has_bias)


def _glm4(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, eps=("rms_norm_eps", 1e-5))
    return _layers(
        config,
        sizes,
        grouped_experts(config, sizes),
        is_dense=first_dense(config, 1),
        qk_norm_over="head" if flag(config, "use_qk_norm", False) else None,
        qkv_bias=flag(config, "attention_bias", False),
        part=0.5,
    )


def _dots1(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    window, first = _window(config, 4096), count_or(config, "max_window_layers", 62)
    usual = [
        "full_attention" if window is None or layer < first else "sliding_attention"
        for layer in range(sizes.num_layers)
    ]
    types = layer_types(config, sizes.num_layers, usual)
    has_bias = flag(config, "attention_bias", False)
    return _layers(
        config,
        sizes,
        grouped_experts(config, sizes, normalised=flag(config, "norm_topk_prob", False)),
        is_dense=first_dense(config, 0),
        windows=windows_of_types(types, window),
        qk_norm_over="head",
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


def _minimax_m2(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, head_dim=128)
    experts = experts_of(
        config,
        sizes,
        8,
        intermediate_size=sizes.intermediate_size,
        scores="sigmoid",
        has_correction_bias=True,
    )
    must_be(config, "use_qk_norm", True)
    must_be(config, "qk_norm_type", "per_layer")
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "use_routing_bias", True)
    must_be(config, "shared_intermediate_size", 0)
    rotated = count_or(config, "rotary_dim", sizes.head_dim)
    part = rotated / sizes.head_dim
    return _layers(config, sizes, experts, qk_norm_over="heads", theta=5e6, part=part)


def _ernie(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, num_kv_heads=4, positions=131_072, eps=("rms_norm_eps", 1e-5))
    inner, has_bias = (
        count_or(config, "moe_intermediate_size", 1536),
        flag(config, "use_bias", False),
    )
    shared = whole(config, "moe_num_shared_experts", 2)
    config.get("moe_norm_min")  # below any sum of a few probabilities, the largest ones
    experts = experts_of(
        {
            "num_experts": config.get("moe_num_experts", 64),
            "num_experts_per_tok": config.get("moe_k"),
        },
        sizes,
        6,
        intermediate_size=inner,
        has_correction_bias=True,
        routes_in_float32=True,
        shared_size=inner * shared,
        shared_bias=has_bias,
    )
    first, last = whole(config, "moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    if type(last) is not int or last < -1:
        raise CheckpointError(f"moe_layer_end_index must be a layer or -1, got {last!r}")
    last = sizes.num_layers - 1 if last == -1 else last
    every = count_or(config, "moe_layer_interval", 1)
    found = _layers(
        config,
        sizes,
        experts,
        is_dense=lambda layer: (layer + 1) % every != 0 or not first <= layer <= last,
        qkv_bias=has_bias,
        o_bias=has_bias,
        theta=500_000.0,
        interleaved=True,
        mlp_bias=has_bias,
        tied=True,
    )
    if has_bias and found["tie_word_embeddings"]:
        raise UnknownModelError("use_bias must be false with a tied output head, got true")
    return found | {"head_bias": has_bias}


def _phi(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config, num_kv_heads=8, positions=131_072, eps=("rms_norm_eps", 1e-5))
    rope = object_of(config, "rope_parameters") or object_of(config, "rope_scaling")
    if (rope.get("rope_type") or rope.get("type") or "default") != "default":
        # Factors of cos and sin of its own, and other angles for the whole of a longer text.
        raise UnknownModelError(
            f"rope_type must be default in {config['model_type']}, got longrope"
        )
    config.get("original_max_position_embeddings")
    experts = experts_of(
        config,
        sizes,
        2,
        intermediate_size=sizes.intermediate_size,
        scores="sparse_mixer",
        jitter=float(number(config, "router_jitter_noise", 0.01)),
    )
    has_bias = flag(config, "attention_bias", False)
    found = _layers(
        config,
        sizes,
        experts,
        windows=(_window(config, None),) * sizes.num_layers,
        qkv_bias=has_bias,
        o_bias=has_bias,
        theta=1e6,
        norm=NormConfig("layer", sizes.eps, has_bias=True),
    )
    return found | {"head_bias": flag(config, "lm_head_bias", False)}


def _granite(config: Json) -> dict[str, Any]:
    sizes = Sizes.of(config)
    experts = experts_of(config, sizes, 2, intermediate_size=sizes.intermediate_size)
    has_bias, scale = flag(config, "attention_bias", False), "attention_multiplier"
    found = _layers(
        config,
        sizes,
        experts,
        qkv_bias=has_bias,
        o_bias=has_bias,
        softmax_scale=float(number(config, scale, 1.0)),
    )
    return found | {
        "embedding_scale": float(number(config, "embedding_multiplier", 1.0)),
        "residual_scale": float(number(config, "residual_multiplier", 1.0)),
        "logit_scale": 1 / positive(config, "logits_scaling", 1.0),
    }


def _write_ernie(config: DecoderConfig) -> dict[str, Any]:
    experts, has_bias = config.experts, config.attentions[0].qkv_bias
    assert experts is not None
    mixed = [i for i, x in enumerate(config.layers) if isinstance(x.feed_forward, ExpertsConfig)]
    every = mixed[1] - mixed[0] if len(mixed) > 1 else 1
    if mixed != [i for i in range(mixed[0], mixed[-1] + 1) if (i + 1) % every == 0]:
        raise CheckpointError(f"layers with experts must follow at one distance, got {mixed}")
    dense = (x for x in config.feed_forwards if not isinstance(x, ExpertsConfig))
    return write_llama_like(config) | {
        "intermediate_size": next((x.intermediate_size for x in dense), experts.intermediate_size),
        "use_bias": has_bias,
        "moe_intermediate_size": experts.intermediate_size,
        "moe_num_experts": experts.num_experts,
        "moe_k": experts.num_active,
        "moe_num_shared_experts": experts.shared_size // experts.intermediate_size,
        "moe_layer_start_index": mixed[0],
        "moe_layer_end_index": mixed[-1],
        "moe_layer_interval": every,
    }


def _write_phi(config: DecoderConfig) -> dict[str, Any]:
    attention, experts = config.attentions[0], config.experts
    assert experts is not None
    return write_llama_like(config) | {
        "intermediate_size": experts.intermediate_size,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_active,
        "router_jitter_noise": experts.jitter,
        "attention_bias": attention.qkv_bias,
        "lm_head_bias": config.head_bias,
        "sliding_window": attention.window,
    }


def expert_names(
    config: DecoderConfig,
    names: Names,
    block: str = "mlp",
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts",
    correction_bias: str = "gate.e_score_correction_bias",
) -> Names:
    """Return `names` with those of a mixture added, where each projection of each expert is a
    tensor.

    Args:
        config: the configuration of the model.
        names: the names of all other tensors.
        block: the name of the feed-forward block.
        parts: the names of an expert's gate, of its factor and of the projection back.
        shared: the name of the block that all tokens use.
        correction_bias: the name of the correction within the block.
    """
    experts = range(0 if config.experts is None else config.experts.num_experts)
    gate, up, down = parts

    def each(*kinds: str) -> tuple[str, ...]:
        return tuple(f"{block}.experts.{e}.{kind}.weight" for e in experts for kind in kinds)

    # Layers behind the last are heads that guess further tokens.
    further = rf"model\.layers\.{config.num_layers}\..*"
    return names.but(
        {
            "mlp.router": f"{block}.gate",
            "mlp.correction_bias": f"{block}.{correction_bias}",
            "mlp.up": each(gate, up),
            "mlp.down": each(down),
            "mlp.shared.gate_up_proj": (f"{block}.{shared}.{gate}", f"{block}.{shared}.{up}"),
            "mlp.shared.down_proj": f"{block}.{shared}.{down}",
            "mlp.shared_gate": f"{block}.shared_expert_gate",
        },
        ignored=(*names.ignored, further),
    )


def _names(config: DecoderConfig) -> Names:
    return expert_names(config, LLAMA_NAMES)


def _qwen2_names(config: DecoderConfig) -> Names:
    return expert_names(config, LLAMA_NAMES, shared="shared_expert")


def _mixtral_names(config: DecoderConfig) -> Names:
    return expert_names(
        config,
        LLAMA_NAMES,
        "block_sparse_moe",
        parts=("w1", "w3", "w2"),
        correction_bias="e_score_correction_bias",
    )


def _ernie_names(config: DecoderConfig) -> Names:
    names = expert_names(config, LLAMA_NAMES, correction_bias="moe_statics.e_score_correction_bias")
    return replace(
        names,
        unit_dims={"mlp.correction_bias": (0,)},
        ignored=(*names.ignored, r"model\.mtp_.*"),  # heads that guess further tokens
    )


# The experts of a layer are one tensor each way.
_QWEN3_VL_NAMES = LLAMA_NAMES.but(
    {
        "mlp.router": "mlp.gate",
        "mlp.up": "mlp.experts.gate_up_proj",
        "mlp.down": "mlp.experts.down_proj",
    },
    transposed=frozenset(("mlp.up", "mlp.down")),
    either=frozenset(("mlp.up", "mlp.down")),  # Qwen stores (in, out), transformers may not
)
_GRANITE_NAMES = LLAMA_NAMES.but(
    {
        "mlp.router": "block_sparse_moe.router.layer",
        "mlp.up": "block_sparse_moe.input_linear.weight",
        "mlp.down": "block_sparse_moe.output_linear.weight",
    }
)
_TRAINING = "router_jitter_noise num_nextn_predict_layers"

FAMILIES = (
    Family("MixtralForCausalLM", "mixtral", _mixtral, _mixtral_names, harmless=_TRAINING),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2, _qwen2_names),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3, _names),
    # No file names this class: it is the text part of Qwen3VLMoeForConditionalGeneration.
    Family("Qwen3VLMoeForCausalLM", "qwen3_vl_moe_text", _qwen3_vl, _QWEN3_VL_NAMES),
    Family("GraniteMoeForCausalLM", "granitemoe", _granite, _GRANITE_NAMES),
    Family("OlmoeForCausalLM", "olmoe", _olmoe, _names),
    Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        _ernie,
        _ernie_names,
        _write_ernie,
        harmless=_TRAINING,
    ),
    Family(
        "PhimoeForCausalLM",
        "phimoe",
        _phi,
        _mixtral_names,
        _write_phi,
        harmless=_TRAINING + " input_jitter_noise",
    ),
    Family("Glm4MoeForCausalLM", "glm4_moe", _glm4, _names, harmless=_TRAINING),
    Family("Dots1ForCausalLM", "dots1", _dots1, _names, harmless="scoring_func topk_method"),
    Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        _minimax_m2,
        _mixtral_names,
        # Heads that guess further tokens, which are not loaded, and how long layers are.
        harmless=_TRAINING + " use_mtp num_mtp_modules mtp_transformer_layers attn_type_list",
    ),
)
