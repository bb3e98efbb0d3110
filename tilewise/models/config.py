"""What a checkpoint's config.json says, in this package's own words; frozen once read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models import hf_config
from tilewise.models.config_fields import read_object
from tilewise.models.naming import not_a_checkpoint
from tilewise.nn.experts import ExpertsConfig
from tilewise.nn.layers import ACTIVATIONS
from tilewise.nn.mla import LatentConfig
from tilewise.nn.rope import RopeConfig

__all__ = ["ModelConfig", "read_config"]

_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides a decoder's shape and arithmetic.

    Attributes:
        architecture: Hugging Face's class name, e.g. "LlamaForCausalLM".
        hidden_size, intermediate_size: width of the residual stream and of the feed-forward.
        head_dim: D; num_q_heads * head_dim need not be hidden_size.
        max_position_embeddings: longest sequence that the file names, in tokens; see
            `context_length`.
        windows: per layer, keys that a query sees, its own included; None is all before it.
        softmax_scales: per layer, what multiplies q . k.
        rope: None when the model learns its positions (GPT-2).
        local_rope: of layers with a window, where it is another (Gemma 3).
        attention_bias, o_bias, mlp_bias: of q, k, v; of the output projection; of the feed-forward.
        qk_norm: each head of q and k is normalised before the rotation.
        latent: of latent attention (DeepSeek-V2), whose head_dim is that of a query, Dn + Dr; None
            keeps keys and values.
        experts: of feed-forward blocks that are mixtures (gpt-oss); None has one block a layer.
        attention_sinks: every head has a learned logit in its denominator.
        logit_softcap: c of c tanh(logits / c), by which logits are drawn in; None does not.
        eos_token_ids: any of them ends a text.
        dtype: name of the torch dtype that the checkpoint was saved in.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    hidden_act: str
    windows: tuple[int | None, ...]
    softmax_scales: tuple[float, ...]
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_q_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_q_heads must be a multiple of num_kv_heads {self.num_kv_heads}, "
                f"got {self.num_q_heads}"
            )
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise CheckpointError(f"hidden_act must be one of {known}, got {self.hidden_act!r}")
        if self.dtype not in _DTYPES:
            raise CheckpointError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        if not 0 <= self.norm_eps < math.inf:
            raise CheckpointError(f"norm_eps must be finite and at least 0, got {self.norm_eps}")
        cap = self.logit_softcap
        if cap is not None and not 0 < cap < math.inf:
            raise CheckpointError(f"logit_softcap must be positive and finite, got {cap}")
        for name in ("windows", "softmax_scales"):
            if len(getattr(self, name)) != self.num_layers:
                raise CheckpointError(
                    f"{name} must have one entry per layer ({self.num_layers}), "
                    f"got {len(getattr(self, name))}"
                )

    @property
    def context_length(self) -> int:
        """Tokens of the longest sequence: the file's positions, or more where it stretches them."""
        stretched = 0 if self.rope is None else self.rope.max_positions
        return max(self.max_position_embeddings, stretched)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Translate the contents of a Hugging Face config.json.

        Both spellings of the rotary settings are read: `rope_parameters` (transformers 5) and
        `rope_theta` with `rope_scaling` (before).

        Raises:
            CheckpointError: the architecture or a setting is not supported, or a field is missing.
        """
        return cls(**hf_config.read(config))

    def to_hf(self) -> dict[str, Any]:
        """Return a config.json that transformers, and `from_hf`, read as this model."""
        return hf_config.write(self)


# Files of tools that quantise a checkpoint and say so there alone.
_QUANTISED = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


def read_config(directory: str | Path) -> ModelConfig:
    """Read config.json, and the end tokens that generation_config.json adds, of a checkpoint.

    Raises:
        CheckpointError: the file is missing or no JSON object, or see `ModelConfig.from_hf`.
    """
    directory = Path(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(not_a_checkpoint(directory))
    config = read_object(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ends = (hf_config.eos_token_ids(part) for part in (config, read_object(generation)))
        config["eos_token_id"] = list(dict.fromkeys(itertools.chain(*ends)))
    found = ModelConfig.from_hf(config)
    for name in _QUANTISED:
        if (directory / name).is_file():
            raise CheckpointError(f"checkpoint must be of float weights, got {name} beside them")
    return found
