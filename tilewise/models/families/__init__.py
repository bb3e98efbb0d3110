"""The families of checkpoints that are decoders of this package, one file for each kind."""

from tilewise.models.families import (
    bamba,
    deepseek,
    falcon_h1,
    gemma,
    gemma3,
    gemma4,
    gpt2,
    gpt_oss,
    kimi_linear,
    layer_norm,
    lfm2,
    llama,
    llama4,
    llama_like,
    mamba2,
    mixtures,
    nemotron_h,
    older,
    olmo_hybrid,
    post_norm,
    qwen3_next,
    zamba2,
)
from tilewise.models.families.family import Family

__all__ = ["FAMILIES", "Family"]

_MODULES = (
    gpt2,
    gemma,
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    llama4,
    llama_like,
    post_norm,
    layer_norm,
    older,
    deepseek,
    mixtures,
    qwen3_next,
    olmo_hybrid,
    kimi_linear,
    mamba2,
    bamba,
    falcon_h1,
    lfm2,
    nemotron_h,
    zamba2,
)
FAMILIES: dict[str, Family] = {
    family.architecture: family for module in _MODULES for family in module.FAMILIES
}
"""By the class in config.json."""
