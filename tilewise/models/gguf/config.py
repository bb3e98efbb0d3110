"""The metadata of a GGUF file as the config.json of the checkpoint that it was made of.

Readers of `models.families` then read it as any other. Source: llama.cpp's convert_hf_to_gguf.py,
which writes the metadata, and its llama-model.cpp, which reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import UnknownModelError
from tilewise.models.gguf.file import GgufFile

__all__ = ["ARCHITECTURES", "Fields", "config_of"]

_LLAMA3_LENGTH = 8192  # tokens, of which all Llamas of version 3 were stretched
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


class Fields:
    """The metadata of a GGUF file, by keys without the architecture's name before them."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.metadata = file, file.metadata
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            raise CheckpointError(
                f"{file.paths[0].name} must hold a model, got general.type {shown(kind)}"
            )
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise CheckpointError(
                f"general.architecture of {file.paths[0].name} must be a text, got {shown(name)}"
            )
        self.name = name

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if the file has none; of an array that is the same for all
        layers, its element.

        Raises:
            UnknownModelError: an array is not the same for all layers.
            CheckpointError: a number is not finite.
        """
        value = self.metadata.get(f"{self.name}.{name}", default)
        if isinstance(value, np.ndarray):
            if not value.size or (value != value[0]).any():
                raise UnknownModelError(
                    f"{self.name}.{name} must be the same for all layers, "
                    f"got {shown(value.tolist())}"
                )
            value = value[0].item()
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{self.name}.{name} must be finite, got {value}")
        return value

    def count(self, name: str) -> int:
        """Return a positive integer; raise CheckpointError if there is none."""
        value = self.get(name)
        if type(value) is not int or not 0 < value < 2**31:
            raise CheckpointError(
                f"{self.name}.{name} must be a positive integer, got {shown(value)}"
            )
        return value

    def count_or(self, name: str, default: int) -> int:
        """Return a positive integer, or the default where the file has no such field."""
        return default if self.get(name) is None else self.count(name)

    def number(self, name: str, default: float | None = None) -> float | None:
        """Return a field's number, or the default, which may be None, if the file has none.

        Raises:
            CheckpointError: the field is no number.
        """
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self.name}.{name} must be a number, got {shown(value)}")
        return value

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor."""
        return tensor in self.file.tensors

    def table(self, tensor: str) -> list[float] | None:
        """Return the numbers of a float32 tensor of one dim; None if the file has no such
        tensor."""
        found = self.file.tensors.get(tensor)
        if found is None:
            return None
        if found.type.name != "F32" or len(found.shape) != 1:
            raise CheckpointError(f"tensor {tensor} must be F32 in one dim, got {found.type.name}")
        return [float(x) for x in np.frombuffer(found.data.numpy().tobytes(), "<f4")]

    @property
    def num_layers(self) -> int:
        """The number of layers, without the last ones that guess further tokens."""
        return self.count("block_count") - (self.get("nextn_predict_layers") or 0)

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        return self.count("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """The number of key heads; that of query heads if the file has none."""
        return self.count_or("attention.head_count_kv", self.num_heads)

    @property
    def head_dim(self) -> int:
        """The channels of a head; the width divided by the query heads if the file has none."""
        return self.count_or(
            "attention.key_length", self.count("embedding_length") // self.num_heads
        )


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that a file's metadata and tensors say.

    Raises:
        CheckpointError: the architecture is none that is read, or a value is missing or wrong.
    """
    fields = Fields(file)
    if fields.name not in ARCHITECTURES:
        raise UnknownModelError(
            f"general.architecture must be one of {', '.join(ARCHITECTURES)}, got "
            f"{shown(fields.name)}"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("GGUF file must hold tensor token_embd.weight of 2 dims, got none")
    config = ARCHITECTURES[fields.name](fields)
    ids = {
        name: file.metadata.get(f"tokenizer.ggml.{name}")
        for name in ("bos_token_id", "eos_token_id")
    }
    return {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **{name: value for name, value in ids.items() if value is not None},
        **config,
    }


def _dtype(file: GgufFile) -> str:
    """Return the name of the dtype to compute in, by the types of weights that are no norms.

    It is "float32" if all are F32, "float16" if all are F32 or F16, else "bfloat16".
    """
    names = {
        info.type.name
        for name, info in file.tensors.items()
        if len(info.shape) > 1 and "norm" not in name
    }
    if names <= {"F32"}:
        return "float32"
    return "float16" if names <= {"F32", "F16"} else "bfloat16"


def _usual(fields: Fields, architecture: str, **more: Any) -> dict[str, Any]:
    """Return the fields of config.json that most families have, changed and extended by `more`.

    A value of None leaves a field out.
    """
    eps = fields.number("attention.layer_norm_rms_epsilon")
    found = {
        "architectures": [architecture],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count_or(
            "feed_forward_length", fields.get("expert_feed_forward_length") or 1
        ),
        "num_hidden_layers": fields.num_layers,
        "num_attention_heads": fields.num_heads,
        "num_key_value_heads": fields.num_kv_heads,
        "head_dim": fields.head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "rope_parameters": _rope(fields),
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


def _rope(fields: Fields, **more: Any) -> dict[str, Any]:
    """Return rope_parameters: the metadata's scaling by a rule, or by tables of factors.

    `more` are further or other fields; a value of None leaves a field out.

    Raises:
        UnknownModelError: the kind of scaling is not known.
    """
    theta = fields.number("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind, factor = fields.get("rope.scaling.type", "none"), fields.number("rope.scaling.factor")
    original = fields.get("rope.scaling.original_context_length")
    if fields.get("rope.scale_linear") is not None:  # files of 2023
        kind, factor = "linear", fields.number("rope.scale_linear")
    if kind == "linear" and factor not in (None, 0, 1):
        # The context length is that of the scaled model.
        rope |= {"rope_type": "linear", "factor": factor}
        rope["original_max_position_embeddings"] = max(
            int(fields.count("context_length") / factor), 1
        )
    elif kind == "yarn":
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            rope[name] = fields.number(f"rope.scaling.yarn_{name}")
        rope["attention_factor"] = fields.number("rope.scaling.attn_factor")
    elif kind == "longrope" or fields.has("rope_factors_short.weight"):
        rope |= {
            "rope_type": "longrope",
            "short_factor": fields.table("rope_factors_short.weight"),
            "long_factor": fields.table("rope_factors_long.weight"),
            "original_max_position_embeddings": original or fields.count("context_length"),
            "attention_factor": fields.number("rope.scaling.attn_factor"),
        }
    elif kind not in ("none", "linear"):
        raise UnknownModelError(f"rope.scaling.type must be one that is known, got {shown(kind)}")
    table = fields.table("rope_freqs.weight")
    if table is not None and rope["rope_type"] == "default":
        rope |= _by_table(fields, table, float(theta or 0))
    return {name: value for name, value in (rope | more).items() if value is not None}


def _by_table(fields: Fields, table: list[float], theta: float) -> dict[str, Any]:
    """Return the rope settings that say a table of frequency divisors.

    They are {} if all divisors are 1, Llama 3's rule if it gives the table, else the table itself
    as longrope.

    Args:
        fields: the metadata of the file.
        table: the divisor of each frequency.
        theta: the base of the frequencies.

    Raises:
        CheckpointError: a divisor is not positive.
    """
    if any(not 0 < x < math.inf for x in table):
        raise CheckpointError("tensor rope_freqs.weight must be of positive numbers, got others")
    if all(x == 1 for x in table):
        return {}
    factor = max(table)
    low, high = _LLAMA3_LENGTH / 1.0, _LLAMA3_LENGTH / 4.0
    for place, divisor in enumerate(table):
        wave = 2 * math.pi * theta ** (place / len(table))
        smooth = (_LLAMA3_LENGTH / wave - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - smooth) / factor + smooth)
        wanted = 1.0 if wave < high else factor if wave > low else middle
        if abs(divisor / wanted - 1) > 1e-4:
            break
    else:
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": _LLAMA3_LENGTH,
        }
    return {
        "rope_type": "longrope",
        "short_factor": table,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": fields.count("context_length"),
    }


def _llama(fields: Fields) -> dict[str, Any]:
    if fields.get("expert_count"):
        return _usual(fields, "MixtralForCausalLM", **_active(fields, "num_local_experts"))
    has_bias = fields.has("blk.0.attn_q.bias")
    mlp = fields.has("blk.0.ffn_gate.bias")
    return _usual(fields, "LlamaForCausalLM", attention_bias=has_bias, mlp_bias=mlp)


def _active(fields: Fields, name: str = "num_experts") -> dict[str, Any]:
    return {
        name: fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
    }


def _plain(architecture: str, **more: Any) -> Callable[[Fields], dict[str, Any]]:
    return lambda fields: _usual(fields, architecture, **more)


def _biased(architecture: str, **more: Any) -> Callable[[Fields], dict[str, Any]]:
    """Return a reader of the metadata of a family whose attention may have biases, as a tensor
    shows."""

    def read(fields: Fields) -> dict[str, Any]:
        bias = fields.has("blk.0.attn_q.bias")
        return _usual(fields, architecture, attention_bias=bias, **more)

    return read


def _seed_oss(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "SeedOssForCausalLM",
        attention_bias=fields.has("blk.0.attn_q.bias"),
        attention_out_bias=fields.has("blk.0.attn_output.bias"),
        mlp_bias=fields.has("blk.0.ffn_gate.bias"),
    )


def _qwen2_moe(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "Qwen2MoeForCausalLM",
        moe_intermediate_size=fields.count("expert_feed_forward_length"),
        shared_expert_intermediate_size=fields.count("expert_shared_feed_forward_length"),
        norm_topk_prob=False,
        qkv_bias=fields.has("blk.0.attn_q.bias"),
        head_dim=None,
        **_active(fields),
    )


def _qwen3_moe(fields: Fields) -> dict[str, Any]:
    inner = fields.count("expert_feed_forward_length")
    return _usual(
        fields,
        "Qwen3MoeForCausalLM",
        moe_intermediate_size=inner,
        norm_topk_prob=True,
        **_active(fields),
    )


def _gemma(fields: Fields) -> dict[str, Any]:
    return _usual(fields, "GemmaForCausalLM", hidden_act="gelu_pytorch_tanh")


def _gemma_scale(fields: Fields, largest: int) -> int:
    """Return query_pre_attn_scalar, which is the channels of a head but in the 27B models.

    Args:
        fields: the metadata of the file.
        largest: the number of layers of the 27B model, by which it is known.
    """
    if fields.num_layers == largest:
        return fields.count("embedding_length") // fields.num_heads
    return fields.head_dim


def _gemma2(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "Gemma2ForCausalLM",
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.count("attention.sliding_window"),
        attn_logit_softcapping=fields.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=fields.number("final_logit_softcapping", 30.0),
        query_pre_attn_scalar=_gemma_scale(fields, 46),
    )


def _gemma3(fields: Fields) -> dict[str, Any]:
    full = _rope(fields, rope_theta=fields.number("rope.freq_base", 1_000_000.0))
    local = fields.number("rope.freq_base_swa", 10_000.0)
    return _usual(
        fields,
        "Gemma3ForCausalLM",
        hidden_act=None,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=fields.count("attention.sliding_window"),
        final_logit_softcapping=fields.number("final_logit_softcapping"),
        query_pre_attn_scalar=_gemma_scale(fields, 62),
        layer_types=_types(fields, 6),
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    )


def _types(fields: Fields, every: int) -> list[str]:
    """Return each layer's type, "sliding_attention" or "full_attention".

    The file's own list decides; else every `every`-th layer is full, or every n-th if the file has
    a number.
    """
    pattern = fields.metadata.get(f"{fields.name}.attention.sliding_window_pattern")
    if isinstance(pattern, list | np.ndarray):
        slides = [bool(x) for x in pattern][: fields.num_layers]
    else:
        every = pattern if type(pattern) is int and pattern > 0 else every
        slides = [(layer + 1) % every != 0 for layer in range(fields.num_layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _phi3(fields: Fields) -> dict[str, Any]:
    part = fields.count_or("rope.dimension_count", fields.head_dim) / fields.head_dim
    return _usual(
        fields,
        "Phi3ForCausalLM",
        head_dim=None,
        sliding_window=fields.get("attention.sliding_window") or None,
        original_max_position_embeddings=fields.get("rope.scaling.original_context_length"),
        partial_rotary_factor=None if part == 1 else part,
    )


def _phi2(fields: Fields) -> dict[str, Any]:
    part = fields.count("rope.dimension_count") / fields.head_dim
    return _usual(
        fields,
        "PhiForCausalLM",
        head_dim=None,
        hidden_act="gelu_new",
        layer_norm_eps=fields.number("attention.layer_norm_epsilon"),
        partial_rotary_factor=part,
    )


def _granite(architecture: str) -> Callable[[Fields], dict[str, Any]]:
    def read(fields: Fields) -> dict[str, Any]:
        experts = _active(fields, "num_local_experts") if fields.get("expert_count") else {}
        return _usual(
            fields,
            architecture,
            attention_multiplier=fields.number("attention.scale"),
            embedding_multiplier=fields.number("embedding_scale"),
            residual_multiplier=fields.number("residual_scale"),
            logits_scaling=fields.number("logit_scale"),
            attention_bias=fields.has("blk.0.attn_q.bias"),
            mlp_bias=True if fields.has("blk.0.ffn_gate.bias") else None,
            **experts,
        )

    return read


def _starcoder2(fields: Fields) -> dict[str, Any]:
    eps = fields.number("attention.layer_norm_epsilon")
    return _usual(
        fields,
        "Starcoder2ForCausalLM",
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=eps,
        use_bias=fields.has("blk.0.attn_q.bias"),
    )


def _cohere(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "CohereForCausalLM",
        layer_norm_eps=fields.number("attention.layer_norm_epsilon"),
        logit_scale=fields.number("logit_scale"),
        use_qk_norm=fields.has("blk.0.attn_q_norm.weight"),
    )


def _cohere2(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "Cohere2ForCausalLM",
        layer_norm_eps=fields.number("attention.layer_norm_epsilon"),
        logit_scale=fields.number("logit_scale"),
        sliding_window=fields.count("attention.sliding_window"),
        layer_types=_types(fields, 4),
    )


def _olmo(fields: Fields) -> dict[str, Any]:
    return _usual(fields, "OlmoForCausalLM", clip_qkv=fields.number("attention.clamp_kqv") or None)


def _olmo2(fields: Fields) -> dict[str, Any]:
    window = fields.get("attention.sliding_window")
    if not window:
        return _usual(fields, "Olmo2ForCausalLM")
    rope = _rope(fields)
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return _usual(
        fields,
        "Olmo3ForCausalLM",
        sliding_window=window,
        layer_types=_types(fields, 4),
        rope_parameters={"full_attention": rope, "sliding_attention": plain},
    )


def _olmoe(fields: Fields) -> dict[str, Any]:
    return _usual(fields, "OlmoeForCausalLM", norm_topk_prob=False, **_active(fields))


def _gpt2(fields: Fields) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": fields.count("embedding_length"),
        "n_head": fields.num_heads,
        "n_layer": fields.num_layers,
        "n_positions": fields.count("context_length"),
        "n_inner": fields.count("feed_forward_length"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon", 1e-5),
    }


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    exps = [fields.file.tensors.get(f"blk.0.ffn_{x}_exps.weight") for x in ("gate", "up", "down")]
    is_packed = all(info is not None and info.type.name == "MXFP4" for info in exps)
    return _usual(
        fields,
        "GptOssForCausalLM",
        intermediate_size=fields.count("expert_feed_forward_length"),
        sliding_window=fields.count("attention.sliding_window"),
        rope_parameters=_rope(fields, truncate=False),  # OpenAI's own rule
        quantization_config={"quant_method": "mxfp4"} if is_packed else None,
        **_active(fields, "num_local_experts"),
    )


def _glm4(fields: Fields) -> dict[str, Any]:
    part = fields.count("rope.dimension_count") / fields.head_dim
    bias = fields.has("blk.0.attn_q.bias") or fields.has("blk.0.attn_qkv.bias")
    return _usual(fields, "Glm4ForCausalLM", attention_bias=bias, partial_rotary_factor=part)


def _grouped(fields: Fields) -> dict[str, Any]:
    """Return the fields of config.json for mixtures with shared experts, as DeepSeek's kin has
    them."""
    return {
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "n_routed_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "n_shared_experts": fields.count_or("expert_shared_count", 1),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": bool(fields.get("expert_weights_norm", False)),
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
    }


def _groups(fields: Fields) -> dict[str, Any]:
    return {
        "n_group": fields.get("expert_group_count"),
        "topk_group": fields.get("expert_group_used_count"),
    }


def _glm4_moe(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "Glm4MoeForCausalLM",
        attention_bias=fields.has("blk.0.attn_q.bias"),
        use_qk_norm=fields.has("blk.0.attn_q_norm.weight"),
        partial_rotary_factor=fields.count("rope.dimension_count") / fields.head_dim,
        **_grouped(fields),
        **_groups(fields),
    )


def _dots1(fields: Fields) -> dict[str, Any]:
    return _usual(fields, "Dots1ForCausalLM", sliding_window=None, **_grouped(fields))


def _deepseek2(fields: Fields) -> dict[str, Any]:
    rope_dim = fields.count("rope.dimension_count")
    key = fields.get("attention.key_length_mla") or fields.count("attention.key_length")
    value = fields.get("attention.value_length_mla") or fields.count("attention.value_length")
    gating = fields.get("expert_gating_func") or _SOFTMAX
    is_v3 = gating == _SIGMOID
    rope = _rope(fields)
    multiplier = fields.number("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and multiplier:
        rope |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
        rope.pop("attention_factor", None)
    experts: dict[str, Any] = {}
    if fields.get("expert_count"):
        experts = _grouped(fields) | _groups(fields)
        grouped = (experts["n_group"] or 1) > 1
        experts["topk_method"] = (
            "noaux_tc" if is_v3 else "group_limited_greedy" if grouped else "greedy"
        )
        experts["scoring_func"] = "sigmoid" if is_v3 else "softmax"
    return _usual(
        fields,
        "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM",
        head_dim=None,
        num_key_value_heads=fields.num_heads,
        q_lora_rank=fields.get("attention.q_lora_rank"),
        kv_lora_rank=fields.count("attention.kv_lora_rank"),
        qk_rope_head_dim=rope_dim,
        qk_nope_head_dim=key - rope_dim,
        v_head_dim=value,
        rope_parameters=rope,
        **experts,
    ) | {"q_lora_rank": fields.get("attention.q_lora_rank") or None}


def _stablelm(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "StableLmForCausalLM",
        head_dim=None,
        layer_norm_eps=fields.number("attention.layer_norm_epsilon"),
        partial_rotary_factor=fields.count("rope.dimension_count") / fields.head_dim,
        use_qkv_bias=fields.has("blk.0.attn_q.bias"),
        use_parallel_residual=fields.get("use_parallel_residual", False),
        qk_layernorm=fields.has("blk.0.attn_q_norm.weight"),
    )


def _nemotron(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "NemotronForCausalLM",
        hidden_act="relu2",
        norm_eps=fields.number("attention.layer_norm_epsilon"),
        partial_rotary_factor=fields.count("rope.dimension_count") / fields.head_dim,
    )


def _ernie(fields: Fields) -> dict[str, Any]:
    return _usual(fields, "Ernie4_5ForCausalLM", use_bias=fields.has("blk.0.attn_q.bias"))


def _exaone4(fields: Fields) -> dict[str, Any]:
    window = fields.get("attention.sliding_window")
    found = _usual(fields, "Exaone4ForCausalLM", layer_types=_types(fields, 4) if window else None)
    return found | {"sliding_window": window or None}


def _smollm3(fields: Fields) -> dict[str, Any]:
    # llama.cpp has no field for the layers that rotate nothing: every fourth.
    return _usual(fields, "SmolLM3ForCausalLM", attention_bias=fields.has("blk.0.attn_q.bias"))


def _minimax_m2(fields: Fields) -> dict[str, Any]:
    return _usual(
        fields,
        "MiniMaxM2ForCausalLM",
        intermediate_size=fields.count("expert_feed_forward_length"),
        rotary_dim=fields.count("rope.dimension_count"),
        **_active(fields, "num_local_experts"),
    )


ARCHITECTURES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "phi2": _phi2,
    "granite": _granite("GraniteForCausalLM"),
    "granitemoe": _granite("GraniteMoeForCausalLM"),
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "gpt2": _gpt2,
    "gpt-oss": _gpt_oss,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
    "dots1": _dots1,
    "stablelm": _stablelm,
    "nemotron": _nemotron,
    "seed_oss": _seed_oss,
    "arcee": _biased("ArceeForCausalLM", hidden_act="relu2"),
    "hunyuan-dense": _biased("HunYuanDenseV1ForCausalLM"),
    "ernie4_5": _ernie,
    "exaone4": _exaone4,
    "minimax-m2": _minimax_m2,
}
"""Readers of the metadata, by general.architecture."""
