"""What a token's cache would cost under each kind of attention, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise import cost
from tilewise.errors import CheckpointError

__all__ = ["CacheShape", "cache_table", "read_latent_shape"]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a model that decide how many bytes its cache keeps of a token, in all layers.

    Attributes:
        num_layers: the number of layers, each with a cache.
        num_q_heads: Hq, the number of query heads.
        head_dim, v_head_dim: D and Dv of a head; D is Dn + Dr for latent attention.
        num_kv_heads: Hk; Hq for latent attention, whose heads all have keys of their own.
        latent_dim, rope_dim: R and Dr of latent attention, None for others.
        dtype: name of the torch dtype of the checkpoint.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_dim: int | None = None
    rope_dim: int | None = None
    dtype: str = "bfloat16"


def read_latent_shape(directory: str | Path) -> CacheShape | None:
    """Read the sizes of a latent-attention model, any with a kv_lora_rank, from its config.json.

    Returns:
        None where there is no such file or field: another kind of model, or an error that
        `read_config` tells better.

    Raises:
        CheckpointError: a size is missing or no positive integer, or the dtype is unknown.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None
    if not isinstance(config, dict) or config.get("kv_lora_rank") is None:
        return None
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    rope_dim = _size(config, "qk_rope_head_dim")
    heads = _size(config, "num_attention_heads")
    return CacheShape(
        num_layers=_size(config, "num_hidden_layers"),
        num_q_heads=heads,
        num_kv_heads=heads,
        head_dim=_size(config, "qk_nope_head_dim") + rope_dim,
        v_head_dim=_size(config, "v_head_dim"),
        latent_dim=_size(config, "kv_lora_rank"),
        rope_dim=rope_dim,
        dtype=dtype,
    )


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
    return value


def cache_table(shape: CacheShape, itemsize: float) -> str:
    """Return a text that compares the bytes of a token for MHA, GQA, MQA and MLA, one kind a line.

    Each line has the bytes in all layers, their share of MHA's, and the channels of a layer. The
    model's own kind is marked. GQA has the model's key heads, or an eighth of its query heads where
    it has no groups; MLA has its latents, or DeepSeek-V2's proportions, R = 4 D, Dr = D / 2.

    Args:
        shape: the sizes of the model.
        itemsize: the bytes of a cached number.
    """
    heads, dim, v_dim = shape.num_q_heads, shape.head_dim, shape.v_head_dim
    sizes = cost.cache_bytes_by_kind(
        heads,
        dim,
        v_head_dim=v_dim,
        num_kv_heads=shape.num_kv_heads,
        latent_dim=shape.latent_dim,
        rope_dim=shape.rope_dim,
        num_layers=shape.num_layers,
        itemsize=itemsize,
    )
    own = "MLA"
    if shape.latent_dim is None:
        own = {heads: "MHA", 1: "MQA"}.get(shape.num_kv_heads, "GQA")
    groups = cost.grouped_heads(heads, shape.num_kv_heads)
    latent_dim, rope_dim = cost.latent_dims(dim, shape.latent_dim, shape.rope_dim)
    channels = f"({dim} + {v_dim})"
    terms = {
        "MHA": f"{heads} x {channels}",
        "GQA": f"{groups} x {channels}",
        "MQA": f"1 x {channels}",
        "MLA": f"({latent_dim} + {rope_dim})",
    }
    most = sizes["MHA"]
    rows = ["one token would take"]
    for kind, size in sizes.items():
        mark = "  (this model)" if kind == own else ""
        rows.append(
            f"  {kind:<16}{size:>12,} B {size / most:>7.1%}  "
            f"{shape.num_layers} x {terms[kind]} channels{mark}"
        )
    return "\n".join(rows)
