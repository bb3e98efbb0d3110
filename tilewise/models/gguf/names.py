"""Which tensors of a GGUF file a tensor of Hugging Face's is made of.

llama.cpp renames tensors, stacks those of experts, reorders the rows of q and k where it pairs
neighbouring channels in rotations, adds 1 to norms that are excesses over 1, and transposes those
of GPT-2.
Source: convert_hf_to_gguf.py and gguf-py's tensor_mapping.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.errors import CheckpointError, shown
from tilewise.models.gguf.config import Fields

__all__ = ["Source", "sources_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """The parts of a GGUF file of which a tensor is made.

    Attributes:
        tensors: the names in the file; the rows of a tensor are all of its dims but the last, and
            those of several follow one another.
        shape: the shape of the tensor.
        rows: the rows that are taken, as (first, end) or as indices, int64; None for all.
        excess: True if the file holds the tensor plus 1.
        transposed: True if the file holds the transposed tensor.
        part: the half of MXFP4 that is taken, "codes" or "scales"; None for numbers.
        heads: the heads of an attention's latent key and value projections, which are to be one
            tensor; None otherwise.
        numbers: True if `rows` count single numbers and not rows.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    rows: tuple[int, int] | Tensor | None = None
    excess: bool = False
    transposed: bool = False
    part: str | None = None
    heads: int | None = None
    numbers: bool = False


_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEHIND = {"post_attention_norm": "post_attention_layernorm"}
_BLOCK_SPARSE = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.e_score_correction",
}
_C_FC = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_FUSED = {"ffn_up": "mlp.gate_up_proj"}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    **_C_FC,
}
# What an architecture names otherwise.
_OWN: dict[str, dict[str, str]] = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "olmo2": _SANDWICH,
    "exaone4": _SANDWICH,
    "seed_oss": _BEHIND,
    "glm4moe": _BEHIND,
    "gpt-oss": {**_BEHIND, "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        **_FUSED,
    },
    "phi3": _FUSED,
    "phi2": {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    "starcoder2": _C_FC,
    "gpt2": _GPT2,
    "hunyuan-dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "granitemoe": {"ffn_gate_inp": "block_sparse_moe.router.layer"},
    "minimax-m2": _BLOCK_SPARSE,
    "qwen2moe": {f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
}
# Whose rows of q and k llama.cpp reorders into pairs.
_PAIRED = frozenset(("llama", "mistral", "granite", "granitemoe", "smollm3", "arcee", "olmo"))
_EXCESS = frozenset(("gemma", "gemma2", "gemma3", "nemotron"))
# Tables of factors, which the configuration says.
_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LAYER = re.compile(r"blk\.(\d{1,5})\.([a-z0-9_.]+?)(?:\.(weight|bias))?")
_EXPERTS = re.compile(r"ffn_(gate|up|down)_exps")


def sources_of(fields: Fields) -> dict[str, Source]:
    """Return the sources of all tensors of a checkpoint, by Hugging Face's names.

    Raises:
        CheckpointError: a tensor is none that llama.cpp writes for the architecture, or of another
            shape.
    """
    own = {**_INNER, **_OWN.get(fields.name, {})}
    is_mixture = fields.name in ("llama", "mistral") and bool(fields.get("expert_count"))
    if is_mixture:
        own |= _BLOCK_SPARSE
    found: dict[str, Source] = {}
    stacks: dict[str, dict[str, str]] = {}
    for name, info in fields.file.tensors.items():
        if name in _TABLES:
            continue
        plain = Source((name,), info.shape)
        if name in _OUTER or name == "position_embd.weight":
            found[_outer(fields.name, name)] = _finished(fields, name, plain)
            continue
        at = _LAYER.fullmatch(name)
        if at is None:
            raise CheckpointError(f"tensor {shown(name)} must be one of {fields.name}, got another")
        layer, what, kind = int(at[1]), at[2], at[3]
        if layer >= fields.num_layers:
            continue  # heads that guess further tokens
        place = f"transformer.h.{layer}" if fields.name == "gpt2" else f"model.layers.{layer}"
        if _EXPERTS.fullmatch(what):
            stacks.setdefault(place, {})[f"{what[4:-5]}.{kind}"] = name
        elif what == "attn_qkv" and fields.name not in ("phi3", "gpt2"):
            found |= _apart(fields, f"{place}.self_attn", kind, plain)
        elif what in ("attn_k_b", "attn_v_b"):
            if what == "attn_k_b":
                found[f"{place}.self_attn.kv_b_proj.weight"] = _latent(fields, name)
        elif what not in own:
            raise CheckpointError(f"tensor {shown(name)} must be one of {fields.name}, got another")
        else:
            end = "" if what == "attn_sinks" else f".{kind}"
            if what == "exp_probs_b":
                end = "_bias"
            found[f"{place}.{own[what]}{end}"] = _finished(fields, name, plain)
    for place, stack in stacks.items():
        found |= _experts(fields, place, stack, is_mixture)
    return found


def _outer(architecture: str, name: str) -> str:
    if architecture == "gpt2":
        return {
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
        }.get(name) or _OUTER[name]
    if architecture == "phi2" and name.startswith("output_norm."):
        return name.replace("output_norm", "model.final_layernorm")
    if name not in _OUTER:
        raise CheckpointError(f"tensor {name} must be one of {architecture}, got another")
    return _OUTER[name]


def _finished(fields: Fields, name: str, source: Source) -> Source:
    """Return the source of a tensor, changed so that reading it undoes what llama.cpp did to it."""
    architecture, what = fields.name, name.rsplit(".", 2)[-2]
    if what.endswith("norm") and name.endswith(".weight") and architecture in _EXCESS:
        return replace(source, excess=True)
    if what in ("attn_q", "attn_k") and architecture in _PAIRED:
        heads = fields.num_heads if what == "attn_q" else fields.num_kv_heads
        rows = _unpaired(name, heads, source.shape[0])
        return replace(source, rows=rows, numbers=len(source.shape) == 1)
    if architecture == "gpt2" and what in _GPT2 and len(source.shape) == 2:
        return replace(source, transposed=True, shape=source.shape[::-1])
    if what == "ffn_gate_inp_shexp":
        return replace(source, shape=(1, source.shape[-1]))
    return source


def _unpaired(name: str, heads: int, rows: int) -> Tensor:
    """Return the places in the file of a tensor's rows in Hugging Face's order, int64 (rows,).

    llama.cpp has the two rows of a rotated pair side by side, Hugging Face the first halves of a
    head's pairs before the second.
    """
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {shown(name)} must have rows for {heads} heads, got {rows}")
    places = torch.arange(rows).view(heads, rows // heads // 2, 2)
    return places.transpose(1, 2).reshape(-1)


def _apart(fields: Fields, place: str, kind: str, source: Source) -> dict[str, Source]:
    """Return the sources of q, k and v, by name, as ranges of rows of a fused tensor."""
    q, kv = fields.num_heads * fields.head_dim, fields.num_kv_heads * fields.head_dim
    found, at = {}, 0
    if source.shape[0] != q + 2 * kv:
        raise CheckpointError(
            f"tensor {source.tensors[0]} must have {q + 2 * kv} rows, got {source.shape[0]}"
        )
    for part, size in (("q", q), ("k", kv), ("v", kv)):
        found[f"{place}.{part}_proj.{kind}"] = replace(
            source,
            rows=(at, at + size),
            shape=(size, *source.shape[1:]),
            numbers=len(source.shape) == 1,
        )
        at += size
    return found


def _latent(fields: Fields, name: str) -> Source:
    """Return the source of the up-projection of latents, kv_b_proj, from the two tensors in a file.

    They are the keys' part, transposed head by head, and the values'.
    """
    values = name.replace("attn_k_b", "attn_v_b")
    shapes = [
        fields.file.tensors[x].shape if x in fields.file.tensors else () for x in (name, values)
    ]
    k, v = shapes
    if len(k) != 3 or len(v) != 3 or k[0] != v[0] or k[1] != v[2]:
        raise CheckpointError(
            f"tensors {name} and attn_v_b must be (heads, rank, dim) and (heads, dim, rank), got "
            f"{k} and {v}"
        )
    return Source((name, values), (k[0] * (k[2] + v[1]), k[1]), heads=k[0])


def _experts(
    fields: Fields, place: str, stack: dict[str, str], is_mixture: bool
) -> dict[str, Source]:
    """Return the sources of each expert's weights, from the tensors in which llama.cpp stacks them.

    Args:
        place: the name of the block of experts in the checkpoint's terms.
        stack: the names of the stacked tensors by part: "gate.weight" ...
        is_mixture: True for the names of Mixtral.
    """
    wanted = {f"{part}.weight" for part in ("gate", "up", "down")}
    if not wanted <= stack.keys():
        raise CheckpointError(
            f"GGUF file must hold ffn_gate_exps, ffn_up_exps and ffn_down_exps "
            f"of {place}, got {sorted(stack.values())}"
        )
    infos = {part: fields.file.tensors[name] for part, name in stack.items()}
    number = infos["gate.weight"].shape[0]
    for part, info in infos.items():
        dims = 3 if part.endswith("weight") else 2
        if len(info.shape) != dims or info.shape[0] != number:
            raise CheckpointError(
                f"tensor {info.name} must have {dims} dims and {number} experts, got {info.shape}"
            )
    gate, up = infos["gate.weight"], infos["up.weight"]
    if gate.shape != up.shape:
        raise CheckpointError(f"tensor {up.name} must have shape {gate.shape}, got {up.shape}")
    if fields.name == "gpt-oss":
        return _interleaved(fields, f"{place}.mlp.experts", stack)
    if fields.name == "granitemoe":
        down = infos["down.weight"]
        inner, width = gate.shape[1:]
        rows = torch.arange(number * inner).view(number, inner)
        both = torch.cat((rows, rows + number * inner), 1).flatten()
        block = f"{place}.block_sparse_moe"
        return {
            f"{block}.input_linear.weight": Source(
                (gate.name, up.name), (number, 2 * inner, width), both
            ),
            f"{block}.output_linear.weight": Source((down.name,), down.shape),
        }
    named = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    block = f"{place}.mlp.experts"
    if is_mixture or fields.name == "minimax-m2":
        named, block = {"gate": "w1", "up": "w3", "down": "w2"}, f"{place}.block_sparse_moe.experts"
    return {
        f"{block}.{e}.{named[part]}.weight": Source(
            (info.name,), info.shape[1:], (e * info.shape[1], (e + 1) * info.shape[1])
        )
        for part, info in ((p, infos[f"{p}.weight"]) for p in named)
        for e in range(number)
    }


def _interleaved(fields: Fields, place: str, stack: dict[str, str]) -> dict[str, Source]:
    """Return the sources of gpt-oss's experts, whose rows of gate and up alternate."""
    tensors = fields.file.tensors
    number, inner, width = tensors[stack["gate.weight"]].shape
    rows = torch.arange(number * inner)
    both = torch.stack((rows, rows + number * inner), 1).flatten()
    gates, down = (stack["gate.weight"], stack["up.weight"]), stack["down.weight"]
    found: dict[str, Source] = {}
    out = tensors[down].shape
    if all(tensors[name].type.name == "MXFP4" for name in (*gates, down)):
        for end, part, more in (("blocks", "codes", (16,)), ("scales", "scales", ())):
            found[f"{place}.gate_up_proj_{end}"] = Source(
                gates, (number, 2 * inner, width // 32, *more), both, part=part
            )
            found[f"{place}.down_proj_{end}"] = Source(
                (down,), (*out[:2], out[2] // 32, *more), part=part
            )
    else:
        found[f"{place}.gate_up_proj"] = Source(
            gates, (number, width, 2 * inner), both, transposed=True
        )
        found[f"{place}.down_proj"] = Source((down,), (out[0], out[2], out[1]), transposed=True)
    if {"gate.bias", "up.bias", "down.bias"} <= stack.keys():
        biases = stack["gate.bias"], stack["up.bias"]
        found[f"{place}.gate_up_proj_bias"] = Source(
            biases, (number, 2 * inner), both, numbers=True
        )
        found[f"{place}.down_proj_bias"] = Source((stack["down.bias"],), (out[0], out[1]))
    return found
