"""A GGUF file of each architecture is the model of transformers that it was made of."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import test_families, test_mixtures, tiny
from tests.models.gguf.writer import MXFP4, Raw, encoded, llama_pairs, random_blocks, write
from tilewise.errors import CheckpointError
from tilewise.models import load_model
from tilewise.models.config import read_config
from tilewise.models.gguf.file import read_gguf
from tilewise.models.gguf.types import TYPES, repack
from tilewise.models.hub import checkpoint_folder
from tilewise.nn.rope import RopeConfig, inverse_frequencies

# Hugging Face's names within a layer, and llama.cpp's.
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.dense": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
}
_OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BEHIND = {"post_attention_layernorm": "post_attention_norm"}
_OWN = {
    **dict.fromkeys(("gemma2", "gemma3", "olmo2", "exaone4"), _SANDWICH),
    **dict.fromkeys(("seed_oss", "glm4moe", "gpt-oss"), _BEHIND),
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
_PAIRED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "olmo")
_SHARED = ("mlp.shared_expert.", "mlp.shared_experts.")


def _stacked(arch: str, place: str, parts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Add the stacks of experts."""
    for kind, name in (("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
        tensors[f"{place}.{name}.weight"] = torch.stack([x for _, x in sorted(parts[kind].items())])


def converted(arch: str, state: dict[str, Tensor], config: Any) -> dict[str, Raw]:
    """Return a model's tensors as llama.cpp's converter writes them, in F32."""
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[str, dict[int, Tensor]]] = {}
    own = {**_LAYER, **_OWN.get(arch, {})}
    for name, value in state.items():
        if "rotary_emb" in name or name.endswith((".attn.bias", "masked_bias")):
            continue
        module, _, kind = name.rpartition(".")
        if module in _OUTER:
            if module == "lm_head" and config.tie_word_embeddings:
                continue
            tensors[f"{_OUTER[module]}.{kind}"] = _with_one(arch, name, value)
            continue
        _, _, layer, rest = name.split(".", 3)
        place, inner = f"blk.{layer}", rest.rpartition(".")[0]
        if ".experts." in rest:
            _collect(experts.setdefault(place, {}), rest, value, arch, tensors, place)
        elif rest.startswith(_SHARED):
            part = rest.split(".")[2].removesuffix("_proj")
            tensors[f"{place}.ffn_{part}_shexp.weight"] = value
        elif "input_linear" in rest:
            inner_size = value.shape[1] // 2
            tensors[f"{place}.ffn_gate_exps.weight"] = value[:, :inner_size]
            tensors[f"{place}.ffn_up_exps.weight"] = value[:, inner_size:]
        elif "output_linear" in rest:
            tensors[f"{place}.ffn_down_exps.weight"] = value
        elif rest in own:
            tensors[f"{place}.{own[rest]}"] = value
        else:
            if own[inner] in ("attn_q", "attn_k") and arch in _PAIRED:
                heads = config.num_attention_heads
                heads = heads if own[inner] == "attn_q" else config.num_key_value_heads
                value = llama_pairs(value, heads)
            if arch == "gpt2" and value.dim() == 2:
                value = value.mT
            tensors[f"{place}.{own[inner]}.{kind}"] = _with_one(arch, name, value)
    for place, parts in experts.items():
        if parts:
            _stacked(arch, place, parts, tensors)
    return {name: encoded(value) for name, value in tensors.items()}


def _with_one(arch: str, name: str, value: Tensor) -> Tensor:
    is_norm = name.endswith("norm.weight")
    return value + 1 if is_norm and arch in ("gemma", "gemma2", "gemma3", "nemotron") else value


def _collect(
    parts: dict[str, dict[int, Tensor]],
    rest: str,
    value: Tensor,
    arch: str,
    tensors: dict[str, Tensor],
    place: str,
) -> None:
    """Sort an expert's tensor, or the stacks that transformers 5 or gpt-oss have."""
    end = rest.split(".experts.")[1]
    if arch == "gpt-oss":
        if end == "gate_up_proj":
            tensors[f"{place}.ffn_gate_exps.weight"] = value[..., ::2].mT
            tensors[f"{place}.ffn_up_exps.weight"] = value[..., 1::2].mT
        elif end == "gate_up_proj_bias":
            tensors[f"{place}.ffn_gate_exps.bias"] = value[..., ::2]
            tensors[f"{place}.ffn_up_exps.bias"] = value[..., 1::2]
        elif end == "down_proj":
            tensors[f"{place}.ffn_down_exps.weight"] = value.mT
        else:
            tensors[f"{place}.ffn_down_exps.bias"] = value
        return
    if end == "gate_up_proj":
        for e, both in enumerate(value):
            for kind, half in zip(("gate", "up"), both.chunk(2), strict=True):
                parts.setdefault(kind, {})[e] = half
        return
    if end == "down_proj":
        parts["down"] = dict(enumerate(value))
        return
    number, kind = end.split(".")[:2]
    kind = {"w1": "gate", "w3": "up", "w2": "down"}.get(kind, kind.removesuffix("_proj"))
    parts.setdefault(kind, {})[int(number)] = value


def metadata_of(arch: str, config: Any) -> dict[str, Any]:
    """Return what all converters write of a configuration."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    found = {
        "general.architecture": arch,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.dimension_count": head_dim,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    found[f"{arch}.feed_forward_length"] = inner or 4 * config.hidden_size
    for field in ("rms_norm_eps",):
        if getattr(config, field, None) is not None:
            found[f"{arch}.attention.layer_norm_rms_epsilon"] = float(getattr(config, field))
    for field in ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"):
        if getattr(config, field, None) is not None:
            found[f"{arch}.attention.layer_norm_epsilon"] = float(getattr(config, field))
    if rope.get("rope_theta"):
        found[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("partial_rotary_factor"):
        part = rope["partial_rotary_factor"]
        found[f"{arch}.rope.dimension_count"] = int(head_dim * part)
    if rope.get("rope_type") == "yarn":
        found[f"{arch}.rope.scaling.type"] = "yarn"
        found[f"{arch}.rope.scaling.factor"] = float(rope["factor"])
        original = rope["original_max_position_embeddings"]
        found[f"{arch}.rope.scaling.original_context_length"] = original
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if getattr(config, name, None):
            found[f"{arch}.expert_count"] = getattr(config, name)
            found[f"{arch}.expert_used_count"] = config.num_experts_per_tok
    if getattr(config, "moe_intermediate_size", None):
        found[f"{arch}.expert_feed_forward_length"] = config.moe_intermediate_size
    return found


def _window(config: Any) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _grouped(config: Any) -> dict[str, Any]:
    return {
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": bool(config.norm_topk_prob),
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_group_count": config.n_group or 1,
        "expert_group_used_count": config.topk_group or 1,
    }


def _deepseek(config: Any) -> dict[str, Any]:
    found = _grouped(config) if getattr(config, "n_routed_experts", None) else {}
    return found | {
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        **({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}),
    }


def _granite(config: Any) -> dict[str, Any]:
    return {
        "attention.scale": float(config.attention_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier),
        "logit_scale": float(config.logits_scaling),
    }


_F, _M, _T = test_families, test_mixtures, tiny
# The case of another test, llama.cpp's name, changes of the configuration, further metadata.
CASES: dict[str, tuple[Any, str, str, dict[str, Any], Any]] = {
    "llama": (_T, "llama", "llama", {}, None),
    "llama_tied": (_T, "llama_mha_tied", "llama", {}, None),
    "llama_biases": (_T, "llama_mqa_biases", "llama", {}, None),
    "llama_yarn": (_T, "llama_yarn", "llama", {}, None),
    "mixtral": (_M, "mixtral", "llama", {"sliding_window": None}, None),
    "qwen2": (_T, "qwen2_bias_tied", "qwen2", {}, None),
    "qwen3": (_T, "qwen3_norm_wide_heads", "qwen3", {}, None),
    "qwen2_moe": (
        _M,
        "qwen2_moe",
        "qwen2moe",
        {"use_sliding_window": False, "layer_types": None, "norm_topk_prob": False,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        lambda c: {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size},
    ),
    "qwen3_moe": (
        _M, "qwen3_moe", "qwen3moe",
        {"norm_topk_prob": True, "attention_bias": False, "use_sliding_window": False,
         "decoder_sparse_step": 1, "mlp_only_layers": []},
        None,
    ),
    "olmoe": (_M, "olmoe", "olmoe", {"norm_topk_prob": False, "attention_bias": False}, None),
    "granitemoe": (_M, "granitemoe", "granitemoe", {"attention_bias": False}, _granite),
    "glm4_moe": (_M, "glm4_moe", "glm4moe", {}, _grouped),
    "dots1": (
        _M, "dots1", "dots1",
        {"attention_bias": False, "layer_types": None, "sliding_window": None, "n_group": 1,
         "topk_group": 1},
        _grouped,
    ),
    "minimax_m2": (
        _M, "minimax_m2", "minimax-m2", {},
        lambda c: {"expert_feed_forward_length": c.intermediate_size},
    ),
    "deepseek_v3": (
        _M, "deepseek_v3", "deepseek2", {"attention_bias": False},
        lambda c: {**_deepseek(c), "expert_gating_func": 2},
    ),
    "deepseek_v2": (
        _M, "deepseek_v2_greedy", "deepseek2", {"attention_bias": False, "mlp_bias": False},
        lambda c: {**_deepseek(c), "expert_group_count": 1},
    ),
    "gemma": (_F, "gemma", "gemma", {}, None),
    "gemma2": (
        _F, "gemma2", "gemma2", {"query_pre_attn_scalar": 16},
        lambda c: {
            **_window(c),
            "attn_logit_softcapping": c.attn_logit_softcapping,
            "final_logit_softcapping": c.final_logit_softcapping,
        },
    ),
    "gemma3": (
        _T, "gemma3", "gemma3", {"query_pre_attn_scalar": 16},
        lambda c: {
            **_window(c),
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "seed_oss": (_F, "seed_oss", "seed_oss", {}, None),
    "granite": (_F, "granite", "granite", {}, _granite),
    "smollm3": (
        _F, "smollm3", "smollm3",
        {"use_sliding_window": False, "layer_types": None, "no_rope_layers": None,
         "no_rope_layer_interval": 4, "num_hidden_layers": 5, "sliding_window": None,
         "mlp_bias": False, "attention_bias": False},
        None,
    ),
    "ernie4_5": (_F, "ernie4_5", "ernie4_5", {"use_bias": False}, None),
    "arcee": (_F, "arcee", "arcee", {"attention_bias": False, "mlp_bias": False}, None),
    "hunyuan": (_F, "hunyuan", "hunyuan-dense", {"attention_bias": False}, None),
    "phi3": (_F, "phi3", "phi3", {}, _window),
    "olmo2": (_F, "olmo2", "olmo2", {"attention_bias": False}, None),
    "exaone4": (_F, "exaone4_full", "exaone4", {}, None),
    "glm4": (_F, "glm4", "glm4", {}, None),
    "cohere": (
        _F, "cohere", "command-r", {"attention_bias": False},
        lambda c: {"logit_scale": c.logit_scale},
    ),
    "cohere2": (
        _F, "cohere2", "cohere2",
        {"attention_bias": False, "num_hidden_layers": 5,
         "layer_types": [*["sliding_attention"] * 3, "full_attention", "sliding_attention"]},
        lambda c: {**_window(c), "logit_scale": c.logit_scale},
    ),
    "starcoder2": (_F, "starcoder2", "starcoder2", {"sliding_window": None}, None),
    "phi2": (_F, "phi", "phi2", {}, None),
    "stablelm": (_F, "stablelm", "stablelm", {}, None),
    "nemotron": (_F, "nemotron", "nemotron", {"attention_bias": False, "mlp_bias": False}, None),
    "olmo": (_F, "olmo", "olmo", {"attention_bias": False}, None),
    "gpt2": (_T, "gpt2", "gpt2", {}, None),
    "gpt_oss": (
        _T, "gpt_oss", "gpt-oss", {},
        lambda c: {**_window(c), "expert_feed_forward_length": c.intermediate_size},
    ),
}  # fmt: skip


def made(module: Any, case: str, changes: dict[str, Any]) -> Any:
    """Return the other test's model with a changed configuration."""
    if module is tiny:
        return tiny.make_hf(case, **changes)
    name, fields = module.CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CASES, case, (name, fields | changes))
        return module.make(case)


def file_of(theirs: Any, folder: Path, arch: str, more: Any) -> Path:
    """Write a model of transformers as a GGUF file."""
    from safetensors.torch import load_file

    theirs.save_pretrained(folder / "hf")
    state = load_file(folder / "hf" / "model.safetensors")
    metadata = metadata_of(arch, theirs.config)
    extra = {} if more is None else more(theirs.config)
    metadata |= {f"{arch}.{name}": value for name, value in extra.items() if value is not None}
    return write(folder / "m.gguf", metadata, converted(arch, state, theirs.config))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_logits_of_the_model_that_it_was_made_of(case, tmp_path):
    module, name, arch, changes, more = CASES[case]
    theirs = made(module, name, changes)
    path = file_of(theirs, tmp_path, arch, more)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no field of the configuration may be unread
        ours = load_model(path)
    ids = torch.randint(0, tiny.VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = theirs(ids, use_cache=False).logits[0]
        got = ours.compute_logits(ours(ids))[0]
    torch.testing.assert_close(got, want, rtol=3e-4, atol=3e-4)


def small_llama(folder: Path, **tensors: Raw) -> tuple[Any, Path]:
    """Write the Llama of another test with further tensors; return it and the file."""
    theirs = tiny.make_hf("llama")
    metadata = metadata_of("llama", theirs.config) | {"llama.rope.freq_base": 500_000.0}
    held = converted("llama", dict(theirs.state_dict()), theirs.config) | tensors
    return theirs, write(folder / "m.gguf", metadata, held)


def test_a_table_of_llama_3_is_its_rule_and_any_other_one_is_taken_as_it_is(tmp_path):
    rule = RopeConfig(8, theta=5e5, rope_type="llama3", factor=32.0, original_max_positions=8192)
    plain = inverse_frequencies(RopeConfig(8, theta=5e5))[0]
    table = (plain / inverse_frequencies(rule)[0]).float()
    _, path = small_llama(tmp_path, **{"rope_freqs.weight": encoded(table)})
    found = load_model(path).config.layers[0].attention.rope
    assert (found.rope_type, found.original_max_positions) == ("llama3", 8192)
    assert found.factor == pytest.approx(32.0)
    other = torch.tensor([1.0, 1.5, 2.0, 7.0])
    _, path = small_llama(tmp_path, **{"rope_freqs.weight": encoded(other)})
    found = load_model(path).config.layers[0].attention.rope
    torch.testing.assert_close(inverse_frequencies(found)[0], plain / other)
    _, path = small_llama(tmp_path, **{"rope_freqs.weight": encoded(torch.ones(4))})
    assert load_model(path).config.layers[0].attention.rope.rope_type == "default"


def test_the_halves_of_a_projection_from_the_latent_are_joined(tmp_path):
    module, name, arch, changes, more = CASES["deepseek_v2"]
    theirs = made(module, name, changes)
    config = theirs.config
    path = file_of(theirs, tmp_path, arch, more)
    held = read_gguf(path)
    tensors, rank = {}, config.kv_lora_rank
    for key, info in held.tensors.items():
        values = info.data.clone().view(torch.float32).view(info.shape)
        if "attn_kv_b" in key:
            heads = values.view(config.num_attention_heads, -1, rank)
            k, v = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            tensors[key.replace("kv_b", "k_b")] = encoded(k.mT.contiguous())
            tensors[key.replace("kv_b", "v_b")] = encoded(v.contiguous())
        else:
            tensors[key] = encoded(values)
    absorbed = {
        "deepseek2.attention.key_length": rank + config.qk_rope_head_dim,
        "deepseek2.attention.value_length": rank,
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "deepseek2.attention.value_length_mla": config.v_head_dim,
    }
    again = write(tmp_path / "absorbed.gguf", {**held.metadata, **absorbed}, tensors)
    ids = torch.arange(3, 15)[None]
    first, second = load_model(path), load_model(again)
    with torch.no_grad():
        torch.testing.assert_close(
            second.compute_logits(second(ids)), first.compute_logits(first(ids))
        )


def test_experts_of_gpt_oss_in_mxfp4_stay_packed_and_are_the_same_values(tmp_path):
    module, name, arch, changes, more = CASES["gpt_oss"]
    path = file_of(made(module, name, changes), tmp_path, arch, more)
    held, rng = read_gguf(path), np.random.default_rng(4)
    narrow, wide = {}, {}
    for key, info in held.tensors.items():
        wide[key] = narrow[key] = encoded(info.data.clone().view(torch.float32).view(info.shape))
        if key.endswith("_exps.weight"):
            narrow[key] = random_blocks(info.shape, MXFP4, rng)
            raw = torch.frombuffer(bytearray(narrow[key][2]), dtype=torch.uint8)
            rows = raw.view(-1, info.shape[-1] // 32 * 17)
            wide[key] = encoded(repack(rows, TYPES[MXFP4]).dequantise().view(info.shape))
    models = [
        load_model(write(tmp_path / f"{i}.gguf", dict(held.metadata), tensors), dtype="float32")
        for i, tensors in enumerate((narrow, wide))
    ]
    for i, is_packed in enumerate((True, False)):  # on a CPU they are unpacked at the start
        experts = read_config(checkpoint_folder(tmp_path / f"{i}.gguf")).experts
        assert experts is not None
        assert experts.is_packed == is_packed
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = [model.compute_logits(model(ids)) for model in models]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_tensor_that_is_unknown_missing_or_of_another_shape_is_named(tmp_path):
    extra = encoded(torch.ones(4))
    with pytest.raises(CheckpointError, match="'blk.0.ssm_a.weight' must be one of llama"):
        load_model(small_llama(tmp_path, **{"blk.0.ssm_a.weight": extra})[1])
    with pytest.raises(CheckpointError, match=r"norm.weight of m.gguf must have shape \(48,\)"):
        load_model(small_llama(tmp_path, **{"output_norm.weight": extra})[1])
    theirs = tiny.make_hf("llama")
    held = converted("llama", dict(theirs.state_dict()), theirs.config)
    del held["blk.1.ffn_up.weight"]
    path = write(tmp_path / "x.gguf", metadata_of("llama", theirs.config), held)
    with pytest.raises(CheckpointError, match=r"must hold tensor model.layers.1.mlp.up_proj.weig"):
        load_model(path)
