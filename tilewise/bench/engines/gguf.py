"""A checkpoint of Llama, Gemma 3 or Qwen3.5 as a GGUF file for llama.cpp, without a tokenizer.

    python -m tilewise.bench.engines.gguf DIRECTORY FILE bf16|f16

Runs in llama.cpp's environment: it needs numpy and the package gguf, neither torch nor safetensors.
The products keep 16 bits and norms become float32. Llama's rows of q and k are reordered from
Hugging Face's rotary halves to llama.cpp's pairs; norms of Gemma and Qwen3.5 get the 1 that is
added to them.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["write_gguf"]

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OWN = {
    "llama": {},
    "gemma3": {
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "qwen35": {
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
    },
}
# Tensors whose names llama.cpp does not end in ".weight".
_UNNAMED = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Gemma3ForCausalLM": "gemma3",
    "Qwen3_5ForCausalLM": "qwen35",
}
_OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(directory: Path, file: Path, dtype: str) -> None:
    """Write a GGUF file of a Llama, Gemma 3 or Qwen3.5 checkpoint in model.safetensors.

    Args:
        directory: a folder with config.json and model.safetensors, in bfloat16, float16 or float32.
        file: the path of the file to write.
        dtype: "bf16" or "f16", the dtype of the matrices of products.

    Raises:
        ImportError: gguf or numpy is missing.
        ValueError: the checkpoint is of another model, or has a scaled rope that llama.cpp reads
            from no field written here, or is a Qwen3.5 with more value heads than key heads, whose
            rows llama.cpp orders in another way.
    """
    try:
        import gguf
        import numpy as np
    except ImportError as error:
        raise ImportError("writing GGUF needs: pip install gguf numpy") from error
    config = json.loads((directory / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["architectures"][0], "")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10_000.0)}
    rope = rope.get("full_attention", rope)
    if not architecture or rope.get("rope_type", "default") != "default":
        raise ValueError(
            "the checkpoint must be a Llama, a Gemma 3 or a Qwen3.5 with a plain rope to become "
            f"GGUF, got {config['architectures'][0]}"
        )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    writer: Any = gguf.GGUFWriter(str(file), architecture)
    if architecture == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(d)
    writer.add_value_length(d)
    writer.add_rope_dimension_count(int(d * rope.get("partial_rotary_factor", 1.0)))
    if architecture == "qwen35":
        _add_states(writer, config)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kinds = gguf.GGMLQuantizationType
    for name, values in _tensors(directory / "model.safetensors", np):
        theirs = _name(name, _LAYER | _OWN[architecture])
        if theirs is None or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else kv_heads
            halves = values.reshape(count, 2, d // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if name.endswith("A_log"):
            writer.add_tensor(theirs, -np.exp(values))
        elif values.ndim == 1:
            is_shifted = architecture in ("gemma3", "qwen35") and name.endswith("norm.weight")
            is_shifted = is_shifted and not name.endswith("linear_attn.norm.weight")
            writer.add_tensor(theirs, values + 1 if is_shifted else values)
        elif name.endswith("conv1d.weight"):
            writer.add_tensor(theirs, np.ascontiguousarray(values.squeeze(1)))
        elif dtype == "f16":
            writer.add_tensor(theirs, values.astype(np.float16))
        else:
            # The checkpoint's own bits where it is bfloat16; else rounded to nearest even.
            bits = values.astype(np.float32).view(np.uint32)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            raw = np.ascontiguousarray(bits.astype(np.uint16)).view(np.uint8)
            writer.add_tensor(theirs, raw, raw_shape=raw.shape, raw_dtype=kinds.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_states(writer: Any, config: dict[str, Any]) -> None:
    """Write the sizes of Qwen3.5's gated delta layers into the file's header.

    Raises:
        ValueError: the layers have more value heads than key heads.
    """
    heads = config["linear_num_value_heads"]
    if heads != config["linear_num_key_heads"]:
        raise ValueError(
            "linear_num_value_heads must be linear_num_key_heads to become GGUF, "
            f"got {heads} and {config['linear_num_key_heads']}"
        )
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _name(name: str, layer_names: dict[str, str]) -> str | None:
    """Return llama.cpp's name of a tensor; None for one that llama.cpp computes itself.

    Args:
        name: the name in the checkpoint.
        layer_names: llama.cpp's names of a layer's tensors, by their names in the checkpoint.
    """
    if name in _OUTER:
        return _OUTER[name]
    if name.endswith("inv_freq"):
        return None
    _, _, layer, rest = name.split(".", 3)
    if rest in _UNNAMED:
        return f"blk.{layer}.{_UNNAMED[rest]}"
    return f"blk.{layer}.{layer_names[rest.removesuffix('.weight')]}.weight"


def _tensors(path: Path, np: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor in float32) for each tensor of a safetensors file: eight bytes of length,
    JSON, the data. `np` is numpy."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        raw = np.frombuffer(data[begin:end].tobytes(), dtype=np.uint8)
        if entry["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            kind = {"F16": np.float16, "F32": np.float32}[entry["dtype"]]
            values = raw.view(kind).astype(np.float32)
        yield name, values.reshape(entry["shape"])


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
