"""Older families: BLOOM and MPT with ALiBi, Falcon, StarCoder, OPT, GPT-Neo, CodeGen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import (
    Json,
    UnknownModelError,
    count,
    count_or,
    flag,
    num_layers_of,
    number,
    object_of,
    text_or_none,
)
from tilewise.models.families.family import Family, Names
from tilewise.models.families.gpt2 import NAMES as GPT2_NAMES
from tilewise.models.families.layer_norm import GPTJ_NAMES, read_gptj
from tilewise.models.hf_rope import read_rope
from tilewise.models.layer_config import (
    PARALLEL,
    PRE_NORM,
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    NormConfig,
)
from tilewise.models.unread_fields import must_be
from tilewise.models.weight_table import grouped_rows

__all__ = ["FAMILIES"]


def _heads(config: Json, width: str, heads: str) -> tuple[int, int, int]:
    """Return the width, the number of query heads, and the channels of a head, from two named
    fields.

    Raises:
        CheckpointError: the width is no multiple of the heads.
    """
    size, num_heads = count(config, width), count(config, heads)
    if size % num_heads:
        raise CheckpointError(f"{width} must be a multiple of {heads} {num_heads}, got {size}")
    return size, num_heads, size // num_heads


def _slopes(num_heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Return the slope of ALiBi for each head: 2 ** (-most * i / power) for i = 1 ... power.

    `power` is the largest power of two up to num_heads; the heads beyond it have every second slope
    of the series for twice as many. Source: Press et al., 2021, "Train short, test long".
    """

    def series(power: int, length: int, step: int = 1) -> list[float]:
        return [2.0 ** (-most * (step * i + 1) / power) for i in range(length)]

    power = 1 << (num_heads.bit_length() - 1)
    return (*series(power, power), *series(2 * power, num_heads - power, 2))


def _bloom(config: Json) -> dict[str, Any]:
    must_be(config, "apply_residual_connection_post_layernorm", False)
    width_name = "hidden_size" if config.get("hidden_size") is not None else "n_embed"
    heads_name = "n_head" if config.get("n_head") is not None else "num_attention_heads"
    width, heads, dim = _heads(config, width_name, heads_name)
    attention = AttentionConfig(
        heads,
        heads,
        dim,
        softmax_scale=dim**-0.5,
        qkv_bias=True,
        o_bias=True,
        alibi_slopes=_slopes(heads),
    )
    block = FeedForwardConfig(4 * width, "gelu_pytorch_tanh", is_gated=False, bias=True)
    return {
        "hidden_size": width,
        "max_position_embeddings": count_or(config, "seq_length", 2048),
        "layers": (LayerConfig(attention, block),) * num_layers_of(config, "n_layer"),
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5), has_bias=True),
        "embedding_norm": True,
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


def _mpt(config: Json) -> dict[str, Any]:
    own = object_of(config, "attn_config")
    for name, wanted in (
        ("attn_type", "multihead_attention"),
        ("prefix_lm", False),
        ("qk_ln", False),
        ("alibi", True),
    ):
        if own.get(name, wanted) != wanted:
            raise UnknownModelError(f"attn_config.{name} must be {wanted}, got {own[name]!r}")
    for name in ("clip_qkv", "logit_scale"):
        value = config.get(name) if name == "logit_scale" else own.get(name)
        if value is not None:
            raise UnknownModelError(f"{name} must be null, got {value!r}")
    must_be(config, "no_bias", True)
    width, heads, dim = _heads(config, "d_model", "n_heads")
    # Of heads that are no power of two, MPT takes every second of the finer series first.
    finer = _slopes(1 << (heads - 1).bit_length(), number(own, "alibi_bias_max", 8.0))
    slopes = finer if len(finer) == heads else (*finer[1::2], *finer[::2])[:heads]
    attention = AttentionConfig(
        heads,
        heads,
        dim,
        softmax_scale=number(own, "softmax_scale", dim**-0.5),
        alibi_slopes=slopes,
    )
    block = FeedForwardConfig(
        count_or(config, "expansion_ratio", 4) * width, "gelu", is_gated=False
    )
    return {
        "hidden_size": width,
        "max_position_embeddings": count_or(config, "max_seq_len", 2048),
        "layers": (LayerConfig(attention, block),) * num_layers_of(config, "n_layers"),
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5)),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


def _falcon(config: Json) -> dict[str, Any]:
    if flag(config, "alibi", False):
        raise UnknownModelError("alibi must be false, got true")  # there its sums are of bfloat16
    width, heads, dim = _heads(config, "hidden_size", "num_attention_heads")
    is_new = flag(config, "new_decoder_architecture", False)
    is_parallel = flag(config, "parallel_attn", True) or is_new
    kv_heads = 1 if flag(config, "multi_query", True) else heads
    kv_heads = count_or(config, "num_kv_heads", heads) if is_new else kv_heads
    num_norms = count_or(config, "num_ln_in_parallel_attn", 2 if is_new else 1)
    has_bias, positions = (
        flag(config, "bias", False),
        count_or(config, "max_position_embeddings", 2048),
    )
    attention = AttentionConfig(
        heads,
        kv_heads,
        dim,
        softmax_scale=dim**-0.5,
        rope=read_rope(config, dim, positions),
        qkv_bias=has_bias,
        o_bias=has_bias,
    )
    block = FeedForwardConfig(
        count_or(config, "ffn_hidden_size", 4 * width),
        text_or_none(config, "activation") or "gelu",
        is_gated=False,
        bias=has_bias,
    )
    norms = PARALLEL if is_parallel and num_norms == 1 else PRE_NORM
    layer = LayerConfig(attention, block, norms, is_parallel=is_parallel)
    return {
        "hidden_size": width,
        "max_position_embeddings": positions,
        "layers": (layer,) * num_layers_of(config, "num_hidden_layers"),
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5), has_bias=True),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


def _starcoder(config: Json) -> dict[str, Any]:
    width, heads, dim = _heads(config, "n_embd", "n_head")
    positions = count(config, "n_positions")
    attention = AttentionConfig(
        heads,
        1 if flag(config, "multi_query", True) else heads,
        dim,
        softmax_scale=dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
    )
    block = FeedForwardConfig(
        count_or(config, "n_inner", 4 * width),
        config.get("activation_function", "gelu_pytorch_tanh"),
        is_gated=False,
        bias=True,
    )
    return {
        "hidden_size": width,
        "max_position_embeddings": positions,
        "learned_positions": positions,
        "layers": (LayerConfig(attention, block),) * num_layers_of(config, "n_layer"),
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5), has_bias=True),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


def _opt(config: Json) -> dict[str, Any]:
    width, heads, dim = _heads(config, "hidden_size", "num_attention_heads")
    for name, wanted in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if flag(config, name, wanted) != wanted:
            raise UnknownModelError(f"{name} must be {wanted}, got {config[name]}")
    if count_or(config, "word_embed_proj_dim", width) != width:
        raise UnknownModelError(
            f"word_embed_proj_dim must be hidden_size {width}, got {config['word_embed_proj_dim']}"
        )
    positions, has_bias = (
        count(config, "max_position_embeddings"),
        flag(config, "enable_bias", True),
    )
    attention = AttentionConfig(
        heads, heads, dim, softmax_scale=dim**-0.5, qkv_bias=has_bias, o_bias=has_bias
    )
    block = FeedForwardConfig(
        count(config, "ffn_dim"),
        config.get("activation_function", "relu"),
        is_gated=False,
        bias=has_bias,
    )
    return {
        "hidden_size": width,
        "max_position_embeddings": positions,
        "learned_positions": positions + 2,  # the first two rows are of padding
        "first_position": 2,
        "layers": (LayerConfig(attention, block),) * num_layers_of(config, "num_hidden_layers"),
        "norm": NormConfig("layer", 1e-5, has_bias=True),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


def _gpt_neo(config: Json) -> dict[str, Any]:
    width, heads, dim = _heads(config, "hidden_size", "num_heads")
    num_layers = num_layers_of(config, "num_layers")
    kinds = config.get("attention_types") or [[["global", "local"], num_layers // 2]]
    try:
        types = [kind for names, times in kinds for _ in range(times) for kind in names]
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"attention_types must be pairs of names and times, got {kinds!r}"
        ) from error
    if len(types) != num_layers or not {*types} <= {"global", "local"}:
        raise CheckpointError(
            f"attention_types must be global or local for {num_layers} layers, got {kinds!r}"
        )
    window, positions = (
        count_or(config, "window_size", 256),
        count(config, "max_position_embeddings"),
    )
    attention = AttentionConfig(heads, heads, dim, softmax_scale=1.0, o_bias=True)
    block = FeedForwardConfig(
        count_or(config, "intermediate_size", 4 * width),
        config.get("activation_function", "gelu_new"),
        is_gated=False,
        bias=True,
    )
    return {
        "hidden_size": width,
        "max_position_embeddings": positions,
        "learned_positions": positions,
        "layers": tuple(
            LayerConfig(replace(attention, window=window if kind == "local" else None), block)
            for kind in types
        ),
        "norm": NormConfig("layer", number(config, "layer_norm_epsilon", 1e-5), has_bias=True),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", True),
    }


_CODEGEN_PARTS = 4  # in which CodeGen's projection was computed: queries, values, keys of each


def _codegen_rows(
    attention: AttentionConfig, q_heads: range, kv_heads: range
) -> tuple[tuple[int, int], ...]:
    """Return the (first, end) ranges of rows of the given heads in CodeGen's fused projection.

    They are in the order queries, keys, values; a `RowOrder`.
    """
    share = attention.num_q_heads // _CODEGEN_PARTS
    places = [
        (head // share) * 3 * share + which * share + head % share
        for heads, which in ((q_heads, 0), (kv_heads, 2), (kv_heads, 1))
        for head in heads
    ]
    dim = attention.head_dim
    return tuple((place * dim, (place + 1) * dim) for place in places)


def _codegen(config: Json) -> dict[str, Any]:
    found = read_gptj(config)
    heads = count(config, "n_head")
    if heads % _CODEGEN_PARTS:
        raise CheckpointError(f"n_head must be a multiple of {_CODEGEN_PARTS}, got {heads}")
    return found


_BLOOM_INNER = {
    "attention_norm": "input_layernorm",
    "attention.qkv_proj": "self_attention.query_key_value",
    "attention.o_proj": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_BLOOM_NAMES = Names(
    prefix="transformer.",
    layer="transformer.h.{}",
    outer={
        "embed_tokens": "transformer.word_embeddings",
        "embed_norm": "transformer.word_embeddings_layernorm",
        "norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    inner=_BLOOM_INNER,
    ignored=(),
    orders={"attention.qkv_proj": grouped_rows},
)
_FALCON_NAMES = replace(_BLOOM_NAMES, ignored=(r".*rotary_emb\.inv_freq",))
_FALCON_TWO_NORMS = _FALCON_NAMES.but({"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"})


def _falcon_names(config: Any) -> Names:
    layer = config.layers[0]
    has_two = layer.is_parallel and layer.norms == PRE_NORM
    return _FALCON_TWO_NORMS if has_two else _FALCON_NAMES


_MPT_NAMES = Names(
    prefix="transformer.",
    layer="transformer.blocks.{}",
    outer={
        "embed_tokens": "transformer.wte",
        "norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    inner={
        "attention_norm": "norm_1",
        "attention.qkv_proj": "attn.Wqkv",
        "attention.o_proj": "attn.out_proj",
        "mlp_norm": "norm_2",
        "mlp.up_proj": "ffn.up_proj",
        "mlp.down_proj": "ffn.down_proj",
    },
    ignored=(),
)
_STARCODER_NAMES = replace(GPT2_NAMES, transposed=frozenset())


def _starcoder_names(config: Any) -> Names:
    attention = config.attentions[0]
    is_grouped = attention.num_kv_heads > 1
    orders = {"attention.qkv_proj": grouped_rows} if is_grouped else None
    return replace(_STARCODER_NAMES, orders=orders)


_OPT_NAMES = Names(
    prefix="model.",
    layer="model.decoder.layers.{}",
    outer={
        "embed_tokens": "model.decoder.embed_tokens",
        "embed_positions": "model.decoder.embed_positions",
        "norm": "model.decoder.final_layer_norm",
        "lm_head": "lm_head",
    },
    inner={
        "attention_norm": "self_attn_layer_norm",
        "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.o_proj": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    },
    ignored=(),
)
_NEO_NAMES = replace(
    GPT2_NAMES.but(
        {
            "attention.qkv_proj": tuple(f"attn.attention.{x}_proj" for x in "qkv"),
            "attention.o_proj": "attn.attention.out_proj",
        }
    ),
    transposed=frozenset(),
    ignored=(r".*\.attn\.attention\.(bias|masked_bias)",),
)
_CODEGEN_NAMES = replace(
    GPTJ_NAMES.but({"attention.qkv_proj": "attn.qkv_proj"}),
    ignored=(r".*\.attn\.(causal_mask|masked_bias|bias)",),
    orders={"attention.qkv_proj": _codegen_rows},
)

FAMILIES = (
    Family(
        "BloomForCausalLM",
        "bloom",
        _bloom,
        _BLOOM_NAMES,
        harmless="slow_but_exact masked_softmax_fusion attention_softmax_in_fp32 "
        "bias_dropout_fusion offset_alibi skip_bias_add skip_bias_add_qkv unk_token_id",
    ),
    Family(
        "MptForCausalLM",
        "mpt",
        _mpt,
        _MPT_NAMES,
        harmless="resid_pdrop emb_pdrop learned_pos_emb init_device embedding_fraction norm_type "
        "verbose init_config",
    ),
    # Its class writes a number of key heads that it does not use.
    Family("FalconForCausalLM", "falcon", _falcon, _falcon_names, harmless="num_kv_heads"),
    Family(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        _starcoder,
        _starcoder_names,
        harmless="num_key_value_heads attention_softmax_in_fp32 scale_attention_softmax_in_fp32 "
        "inference_runner max_batch_size max_sequence_length pad_key_length "
        "pre_allocate_kv_cache validate_runner_input",
    ),
    Family("OPTForCausalLM", "opt", _opt, _OPT_NAMES, harmless="layerdrop init_std"),
    Family(
        "GPTNeoForCausalLM",
        "gpt_neo",
        _gpt_neo,
        _NEO_NAMES,
        harmless="attention_layers resid_dropout embed_dropout",
    ),
    Family("CodeGenForCausalLM", "codegen", _codegen, _CODEGEN_NAMES, harmless="n_ctx"),
)
