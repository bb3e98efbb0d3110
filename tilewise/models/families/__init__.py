"""The families of checkpoints that are decoders of this package, one file for each kind."""

from tilewise.models.families import deepseek, gemma3, gpt2, gpt_oss, llama, mixtures
from tilewise.models.families.family import Family

__all__ = ["FAMILIES", "Family"]

_MODULES = (gpt2, gemma3, gpt_oss, llama, deepseek, mixtures)
FAMILIES: dict[str, Family] = {
    family.architecture: family for module in _MODULES for family in module.FAMILIES
}
"""By the class in config.json."""
