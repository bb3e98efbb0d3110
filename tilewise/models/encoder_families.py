"""The families of encoders: how each one's config.json is read, and how its tensors are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    count_or,
    flag,
    num_layers_of,
    number,
    positive,
    text_or_none,
)
from tilewise.models.encoder import Encoder, EncoderConfig
from tilewise.models.hf_rope import read_gemma_rope, read_rope
from tilewise.models.unread_fields import ReadFields, must_be, tell_unread
from tilewise.models.vector_head import Stage, head_activation
from tilewise.nn.rope import RopeConfig

__all__ = ["Classifier", "build_encoder", "encoder_family", "read_classifier", "read_encoder"]


@dataclass(frozen=True, slots=True)
class Classifier:
    """How a classifier reads an encoder's states.

    Attributes:
        pooling: the way in which the states of a text become one vector.
        stages: the layers on that vector; the last one has a row for each label.
    """

    pooling: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """A family of encoders: how its config.json is read, and how its tensors are named.

    Attributes:
        prefix: the prefix of tensor names in a checkpoint with a head.
        read: the reader of the family's config.json, which returns arguments of `EncoderConfig`.
        names: the modules in a checkpoint of each module of `Encoder`.
        classify: a function of a config.json and a number of labels, which returns the
            `Classifier`.
        heads: regular expressions of the tensors of the family's heads, which are not read here.
    """

    prefix: str
    read: Callable[[Json], dict[str, Any]]
    names: Mapping[str, tuple[str, ...]]
    classify: Callable[[Json, int], Classifier]
    heads: tuple[str, ...]


# The classes of a family that are served, behind its name; the last one has a classifier.
_KINDS = ("Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification")


def encoder_family(config: Json) -> tuple[str, str] | None:
    """Return (family, kind) of the class that a config.json names, such as ("Bert", "ForMaskedLM").

    The kind is an entry of _KINDS. None if the class is no encoder that is built.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name is None:
        kind = config.get("model_type")
        name = f"{_TYPES[kind]}Model" if isinstance(kind, str) and kind in _TYPES else None
    if not isinstance(name, str):
        return None
    for kind in _KINDS:
        family = name.removesuffix(kind)
        if family == name or family not in _FAMILIES:
            continue
        # Gemma's decoders have the same class names.
        if family.startswith("Gemma") and config.get("use_bidirectional_attention") is not True:
            return None
        return family, kind
    return None


def read_encoder(config: Json) -> EncoderConfig:
    """Return the configuration of an encoder from the contents of a config.json.

    Unknown fields are named in a warning.

    Raises:
        CheckpointError: a setting is not supported, or a field is missing; UnknownModelError if the
            class is no encoder that is built.
    """
    fields = ReadFields(config)
    found, names = encoder_family(fields), fields.get("architectures")
    if found is None:
        known = ", ".join(_FAMILIES)
        raise UnknownModelError(
            f"architectures must name an encoder of {known}, got {shown(names)}"
        )
    family, kind = found
    must_be(fields, "model_type", *_TYPES, "gemma3_text")
    for name, allowed in {"is_decoder": False, "add_cross_attention": False}.items():
        must_be(fields, name, allowed)
    must_be(fields, "quantization_config")
    dtype = text_or_none(fields, "dtype") or text_or_none(fields, "torch_dtype") or "float32"
    read = EncoderConfig(
        architecture=f"{family}{kind}",
        vocab_size=count(fields, "vocab_size"),
        dtype=dtype,
        **_FAMILIES[family].read(fields),
    )
    tell_unread("config.json", fields.unread("config.json", "encoders"))
    return read


def build_encoder(config: EncoderConfig) -> Encoder:
    """Construct an encoder with the tensor names of its family, uninitialised."""
    family, _ = encoder_family(
        {"architectures": [config.architecture], "use_bidirectional_attention": True}
    ) or ("", "")
    found = _FAMILIES[family]
    ignored = (*found.heads, r".*position_ids", r".*rotary.*inv_freq")
    return Encoder(config, found.names, weight_prefix=found.prefix, ignored_weights=ignored)


def read_classifier(config: Json, num_labels: int) -> Classifier:
    """Return how the classifier of an encoder's checkpoint makes logits of the hidden states.

    Raises:
        CheckpointError: the classifier has settings that are not supported.
    """
    found = encoder_family(config)
    assert found is not None, "the checkpoint is one of an encoder"
    return _FAMILIES[found[0]].classify(config, num_labels)


def _linear(name: str, size: int | None = None, activation: str = "identity") -> Stage:
    return Stage("linear", f"{name}.weight", f"{name}.bias", size, activation)


def _even(config: Json, size: int, num_heads: int) -> int:
    if size % num_heads:
        raise CheckpointError(
            f"hidden_size must be a multiple of num_attention_heads {num_heads}, got {size}"
        )
    return size // num_heads


def _read_bert(config: Json, *, is_offset: bool = False) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` for BERT, RoBERTa and MPNet.

    Args:
        config: the contents of config.json.
        is_offset: True if positions begin behind the padding token's id, as RoBERTa's.
    """
    must_be(config, "position_embedding_type", "absolute")
    must_be(config, "embedding_size")
    size, num_layers = count(config, "hidden_size"), num_layers_of(config, "num_hidden_layers")
    num_heads = count(config, "num_attention_heads")
    positions = count_or(config, "max_position_embeddings", 512)
    offset = 0
    if is_offset:
        pad = config.get("pad_token_id", 1)
        if type(pad) is not int or pad < 0:
            raise CheckpointError(f"pad_token_id must be a token id, got {shown(pad)}")
        offset = pad + 1
    num_buckets = 0
    if config.get("relative_attention_num_buckets") is not None:
        num_buckets = count(config, "relative_attention_num_buckets")
        if num_buckets % 4:
            raise CheckpointError(
                f"relative_attention_num_buckets must be a multiple of 4, got {num_buckets}"
            )
    return {
        "hidden_size": size,
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": _even(config, size, num_heads),
        "num_positions": positions,
        "position_offset": offset,
        "context_length": positions - offset,
        "num_types": count_or(config, "type_vocab_size", 2) if num_buckets == 0 else 0,
        "num_buckets": num_buckets,
        "norm_eps": positive(config, "layer_norm_eps", 1e-12),
        "hidden_act": text_or_none(config, "hidden_act") or "gelu",
        "ropes": (None,) * num_layers,
        "windows": (None,) * num_layers,
    }


def _read_distilbert(config: Json) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` for DistilBERT."""
    size, num_layers = count(config, "dim"), num_layers_of(config, "n_layers")
    num_heads = count(config, "n_heads")
    positions = count_or(config, "max_position_embeddings", 512)
    return {
        "hidden_size": size,
        "intermediate_size": count(config, "hidden_dim"),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": _even(config, size, num_heads),
        "num_positions": positions,
        "context_length": positions,
        "norm_eps": 1e-12,
        "hidden_act": text_or_none(config, "activation") or "gelu",
        "ropes": (None,) * num_layers,
        "windows": (None,) * num_layers,
    }


def _layer_types(config: Json, num_layers: int, default: list[str]) -> list[str]:
    types = config.get("layer_types")
    types = default if types is None else types
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or any(kind not in known for kind in types)
    ):
        raise CheckpointError(
            f"layer_types must be {' or '.join(known)} for each of {num_layers} layers, "
            f"got {shown(types)}"
        )
    return types


def _by_type(
    config: Json, head_dim: int, positions: int, types: list[str], bases: dict[str, float]
) -> tuple[RopeConfig, ...]:
    """Return the rotary settings of each layer, by whether it has full or local attention.

    Args:
        positions: the largest number of positions.
        types: each layer's entry in layer_types.
        bases: the config's key of theta and its default, for full and then for local attention.
    """
    full, local = (
        read_gemma_rope(config, head_dim, positions, kind, base, theta)
        for (base, theta), kind in zip(
            bases.items(), ("full_attention", "sliding_attention"), strict=True
        )
    )
    return tuple(full if kind == "full_attention" else local for kind in types)


def _read_modernbert(config: Json) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` for ModernBERT; absent fields default as in
    transformers' configuration class."""
    size, num_layers = count(config, "hidden_size"), num_layers_of(config, "num_hidden_layers")
    num_heads = count(config, "num_attention_heads")
    head_dim = _even(config, size, num_heads)
    positions = count_or(config, "max_position_embeddings", 8192)
    every = count_or(config, "global_attn_every_n_layers", 3)
    types = _layer_types(
        config,
        num_layers,
        ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)],
    )
    window = count_or(config, "local_attention", 128) // 2
    has_bias = flag(config, "attention_bias", False)
    bases = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    return {
        "hidden_size": size,
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "context_length": positions,
        "norm_eps": positive(config, "norm_eps", 1e-5),
        "norm_bias": flag(config, "norm_bias", False),
        "hidden_act": text_or_none(config, "hidden_activation") or "gelu",
        "ropes": _by_type(config, head_dim, positions, types, bases),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in types),
        "order": "pre",
        "first_norm": False,
        "is_gated": True,
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": flag(config, "mlp_bias", False),
    }


def _read_nomic(config: Json) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` for NomicBert, whose fields have transformers' names
    or those of its first files."""
    old = config.get("n_embd") is not None
    for name, allowed in {
        "prenorm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "use_rms_norm": False,
        "parallel_block": False,
        "causal": False,
    }.items():
        must_be(config, name, allowed, *((1,) if allowed == 1.0 else ()))
    must_be(config, "rotary_emb_scale_base")
    if old:
        must_be(config, "activation_function", "swiglu")
    size = count(config, "n_embd" if old else "hidden_size")
    num_layers = num_layers_of(config, "n_layer" if old else "num_hidden_layers")
    num_heads = count(config, "n_head" if old else "num_attention_heads")
    head_dim = count_or(config, "head_dim", _even(config, size, num_heads))
    # The positions that it was trained on: beyond them its own code rescales the rotation.
    trained = count_or(config, "max_trained_positions", 2048)
    positions = trained if old else count_or(config, "max_position_embeddings", 2048)
    theta = positive(config, "rotary_emb_base", 1000.0)
    rope = read_rope(config, head_dim, positions, theta=theta)
    eps = "layer_norm_epsilon" if old else "layer_norm_eps"
    return {
        "hidden_size": size,
        "intermediate_size": count(config, "n_inner" if old else "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "context_length": positions,
        "num_types": count_or(config, "type_vocab_size", 2),
        "norm_eps": positive(config, eps, 1e-12),
        "hidden_act": "silu" if old else text_or_none(config, "hidden_act") or "silu",
        "ropes": (rope,) * num_layers,
        "windows": (None,) * num_layers,
        "is_gated": True,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
    }


def _read_eurobert(config: Json) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` for EuroBERT: Llama with attention to both sides."""
    size, num_layers = count(config, "hidden_size"), num_layers_of(config, "num_hidden_layers")
    num_heads = count(config, "num_attention_heads")
    head_dim = count_or(config, "head_dim", _even(config, size, num_heads))
    positions = count_or(config, "max_position_embeddings", 8192)
    has_bias = flag(config, "attention_bias", False)
    rope = read_rope(config, head_dim, positions, theta=10_000.0)
    return {
        "hidden_size": size,
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_heads,
        "num_kv_heads": count_or(config, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "context_length": positions,
        "norm_eps": number(config, "rms_norm_eps", 1e-5),
        "norm": "rms",
        "hidden_act": text_or_none(config, "hidden_act") or "silu",
        "ropes": (rope,) * num_layers,
        "windows": (None,) * num_layers,
        "order": "pre",
        "embeds_with_norm": False,
        "is_gated": True,
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": flag(config, "mlp_bias", False),
    }


def _read_gemma3(config: Json) -> dict[str, Any]:
    """Return the arguments of `EncoderConfig` for EmbeddingGemma: Gemma 3 with attention to both
    sides."""
    must_be(config, "use_bidirectional_attention", True)
    must_be(config, "attn_logit_softcapping")
    size, num_layers = count(config, "hidden_size"), num_layers_of(config, "num_hidden_layers")
    head_dim = count_or(config, "head_dim", 256)
    positions = count_or(config, "max_position_embeddings", 131_072)
    every = count_or(config, "sliding_window_pattern", 6)
    types = _layer_types(
        config,
        num_layers,
        ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)],
    )
    # The file's number counts both sides.
    window = count_or(config, "sliding_window", 4096) // 2
    has_bias = flag(config, "attention_bias", False)
    bases = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    return {
        "hidden_size": size,
        "intermediate_size": count(config, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": count(config, "num_attention_heads"),
        "num_kv_heads": count_or(config, "num_key_value_heads", 4),
        "head_dim": head_dim,
        "context_length": positions,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "norm": "shifted",
        "hidden_act": text_or_none(config, "hidden_activation") or "gelu_pytorch_tanh",
        "ropes": _by_type(config, head_dim, positions, types, bases),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in types),
        "order": "sandwich",
        "qk_norm": True,
        "softmax_scale": positive(config, "query_pre_attn_scalar", 256) ** -0.5,
        "embed_scale": size**0.5,
        "embeds_with_norm": False,
        "is_gated": True,
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "mlp_bias": False,
    }


def _pooled(config: Json, num_labels: int, *, pooler: str) -> Classifier:
    """Return BERT's classifier: the first token's state, the pooler (a layer with tanh), a linear
    layer."""
    return Classifier("cls", (_linear(pooler, None, "tanh"), _linear("classifier", num_labels)))


def _first_state(config: Json, num_labels: int) -> Classifier:
    """Return RoBERTa's classifier: the first token's state, a layer with tanh, a linear layer."""
    stages = _linear("classifier.dense", None, "tanh"), _linear("classifier.out_proj", num_labels)
    return Classifier("cls", stages)


def _distilled(config: Json, num_labels: int) -> Classifier:
    stages = _linear("pre_classifier", None, "relu"), _linear("classifier", num_labels)
    return Classifier("cls", stages)


def _modern(config: Json, num_labels: int) -> Classifier:
    pooling = text_or_none(config, "classifier_pooling") or "cls"
    if pooling not in ("cls", "mean"):
        raise CheckpointError(f"classifier_pooling must be cls or mean, got {pooling!r}")
    activation = text_or_none(config, "classifier_activation") or "gelu"
    bias = "head.dense.bias" if flag(config, "classifier_bias", False) else None
    norm_bias = "head.norm.bias" if flag(config, "norm_bias", False) else None
    activation = head_activation(activation, "classifier_activation")
    dense = Stage("linear", "head.dense.weight", bias, None, activation)
    eps = positive(config, "norm_eps", 1e-5)
    norm = Stage("norm", "head.norm.weight", norm_bias, None, eps=eps)
    return Classifier(pooling, (dense, norm, _linear("classifier", num_labels)))


def _euro(config: Json, num_labels: int) -> Classifier:
    pooling = text_or_none(config, "classifier_pooling") or "late"
    if pooling not in ("bos", "mean"):  # "late" classifies each token first
        raise CheckpointError(f"classifier_pooling must be bos or mean, got {pooling!r}")
    stages = _linear("dense", None, "gelu"), _linear("classifier", num_labels)
    return Classifier("cls" if pooling == "bos" else "mean", stages)


def _scored(config: Json, num_labels: int) -> Classifier:
    """Return the classifier of decoders: the last token's state and one linear layer without
    bias."""
    return Classifier("last", (Stage("linear", "score.weight", None, num_labels),))


def _bert_names(
    layer: str, q: str, o: str, attention_norm: str, up: str, down: str, mlp_norm: str
) -> dict[str, tuple[str, ...]]:
    """Return the checkpoint's modules of each module of `Encoder`, in a family with BERT's
    embeddings.

    Args:
        layer: the prefix of a layer.
        q, o, attention_norm, up, down, mlp_norm: the names of a layer's parts in the checkpoint.
    """
    parts = {
        "attention.qkv_proj": tuple(q.format(x) for x in _QKV[q]),
        "attention.o_proj": (o,),
        "attention_norm": (attention_norm,),
        "mlp.up_proj": (up,),
        "mlp.down_proj": (down,),
        "mlp_norm": (mlp_norm,),
    }
    return {
        "embed_tokens": ("embeddings.word_embeddings",),
        "embed_positions": ("embeddings.position_embeddings",),
        "embed_types": ("embeddings.token_type_embeddings",),
        "embed_norm": ("embeddings.LayerNorm",),
        "distances": ("encoder.relative_attention_bias",),
        **{
            f"layers.{{}}.{ours}": tuple(f"{layer}.{{}}.{x}" for x in theirs)
            for ours, theirs in parts.items()
        },
    }


# How the three projections are told apart, by the pattern of their names.
_QKV = {
    "attention.self.{}": ("query", "key", "value"),
    "attention.{}_lin": ("q", "k", "v"),
    "attention.attn.{}": ("q", "k", "v"),
}
_BERT = _bert_names(
    "encoder.layer",
    "attention.self.{}",
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT = _bert_names(
    "transformer.layer",
    "attention.{}_lin",
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)
_MPNET = _bert_names(
    "encoder.layer",
    "attention.attn.{}",
    "attention.attn.o",
    "attention.LayerNorm",
    "intermediate.dense",
    "output.dense",
    "output.LayerNorm",
)
_MODERNBERT = {
    "embed_tokens": ("embeddings.tok_embeddings",),
    "embed_norm": ("embeddings.norm",),
    "norm": ("final_norm",),
    "layers.{}.attention_norm": ("layers.{}.attn_norm",),
    "layers.{}.attention.qkv_proj": ("layers.{}.attn.Wqkv",),
    "layers.{}.attention.o_proj": ("layers.{}.attn.Wo",),
    "layers.{}.mlp_norm": ("layers.{}.mlp_norm",),
    "layers.{}.mlp.up_proj": ("layers.{}.mlp.Wi",),
    "layers.{}.mlp.down_proj": ("layers.{}.mlp.Wo",),
}
_NOMIC = {
    "embed_tokens": ("embeddings.word_embeddings",),
    "embed_types": ("embeddings.token_type_embeddings",),
    "embed_norm": ("emb_ln",),
    "layers.{}.attention.qkv_proj": ("encoder.layers.{}.attn.Wqkv",),
    "layers.{}.attention.o_proj": ("encoder.layers.{}.attn.out_proj",),
    "layers.{}.attention_norm": ("encoder.layers.{}.norm1",),
    "layers.{}.mlp.up_proj": ("encoder.layers.{}.mlp.fc12", "encoder.layers.{}.mlp.fc11"),
    "layers.{}.mlp.down_proj": ("encoder.layers.{}.mlp.fc2",),
    "layers.{}.mlp_norm": ("encoder.layers.{}.norm2",),
}
_LLAMA = {
    "embed_tokens": ("embed_tokens",),
    "norm": ("norm",),
    "layers.{}.attention_norm": ("layers.{}.input_layernorm",),
    "layers.{}.attention.qkv_proj": tuple(f"layers.{{}}.self_attn.{x}_proj" for x in "qkv"),
    "layers.{}.attention.o_proj": ("layers.{}.self_attn.o_proj",),
    "layers.{}.mlp_norm": ("layers.{}.post_attention_layernorm",),
    "layers.{}.mlp.up_proj": ("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
    "layers.{}.mlp.down_proj": ("layers.{}.mlp.down_proj",),
}
_GEMMA3 = _LLAMA | {
    "layers.{}.attention.q_norm": ("layers.{}.self_attn.q_norm",),
    "layers.{}.attention.k_norm": ("layers.{}.self_attn.k_norm",),
    "layers.{}.attention_out_norm": ("layers.{}.post_attention_layernorm",),
    "layers.{}.mlp_norm": ("layers.{}.pre_feedforward_layernorm",),
    "layers.{}.mlp_out_norm": ("layers.{}.post_feedforward_layernorm",),
}
_BERT_HEADS = (r"(bert\.)?pooler\..*", r"classifier\..*", r"cls\..*")
_ROBERTA_HEADS = (r"(\w+\.)?pooler\..*", r"classifier\..*", r"lm_head\..*")
_ROBERTA = _Family(
    "roberta.", partial(_read_bert, is_offset=True), _BERT, _first_state, _ROBERTA_HEADS
)
_FAMILIES = {
    "Bert": _Family(
        "bert.", _read_bert, _BERT, partial(_pooled, pooler="bert.pooler.dense"), _BERT_HEADS
    ),
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "DistilBert": _Family(
        "distilbert.",
        _read_distilbert,
        _DISTILBERT,
        _distilled,
        (r"pre_classifier\..*", r"classifier\..*", r"vocab_\w+\..*"),
    ),
    "MPNet": _Family(
        "mpnet.", partial(_read_bert, is_offset=True), _MPNET, _first_state, _ROBERTA_HEADS
    ),
    "ModernBert": _Family(
        "model.",
        _read_modernbert,
        _MODERNBERT,
        _modern,
        (r"head\..*", r"classifier\..*", r"decoder\..*"),
    ),
    "NomicBert": _Family(
        "nomic_bert.",
        _read_nomic,
        _NOMIC,
        partial(_pooled, pooler="nomic_bert.pooler.dense"),
        (r"(nomic_bert\.)?pooler\..*", r"classifier\..*", r"cls\..*"),
    ),
    "EuroBert": _Family(
        "model.", _read_eurobert, _LLAMA, _euro, (r"dense\..*", r"classifier\..*", r"lm_head\..*")
    ),
    "Gemma3Text": _Family("model.", _read_gemma3, _GEMMA3, _scored, (r"score\..*",)),
}
_TYPES = {
    "bert": "Bert",
    "camembert": "Camembert",
    "distilbert": "DistilBert",
    "eurobert": "EuroBert",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "nomic_bert": "NomicBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
}
"""The family of each model_type, for a file without architectures."""
