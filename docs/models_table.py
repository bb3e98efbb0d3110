"""Write the table of native decoders into docs/models.md, from the families and their defaults.

python docs/models_table.py    # needs transformers, whose configuration classes have the defaults
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise.distributed.shards import check_shards
from tilewise.errors import CheckpointError
from tilewise.models.config import ModelConfig
from tilewise.models.families import FAMILIES, Family
from tilewise.models.native import NativeDecoder
from tilewise.nn.experts import ExpertsConfig

PAGE = Path(__file__).resolve().parent / "models.md"
HEAD = (
    "| class | `model_type` | positions | attention | feed-forward | saved | quantised formats |"
    " tensor parallel | compiled step on a CPU |\n|---|---|---|---|---|---|---|---|---|\n"
)
BEGIN, END = (
    "<!-- begin of the native decoders: python docs/models_table.py -->\n",
    "<!-- end -->\n",
)
# Fields that the defaults of transformers lack or that ask for something else than most files do.
CHANGES: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GPTNeoForCausalLM": {"intermediate_size": 64},
}
SIZE = 8  # layers are enough to have one of each kind


def default_config(family: Family) -> ModelConfig:
    """Return the configuration of a family by transformers' defaults, in few layers."""
    from transformers import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = CONFIG_MAPPING[family.model_type]().to_dict()
        fields |= CHANGES.get(family.architecture, {})
        config = ModelConfig.from_hf(fields | {"architectures": [family.architecture]})
    return replace(config, layers=config.layers[:SIZE])


def row(family: Family) -> str:
    """Return the row of a family."""
    config = default_config(family)
    attentions = config.attentions
    first, block = attentions[0], config.layers[0].feed_forward
    positions = "rotary" if config.ropes else "none"
    if config.learned_positions is not None:
        positions = "learned"
    elif first.alibi_slopes:
        positions = "ALiBi"
    elif len(config.ropes) > 1:
        positions = "rotary, two bases"
    elif any(attention.rope is None for attention in attentions):
        positions = "rotary, none on some layers"
    seen = ["latents" if first.latent is not None else "heads"]
    if any(config.windows):
        seen.append("windows")
    if first.has_sinks:
        seen.append("sinks")
    if first.softcap:
        seen.append("soft cap")
    if first.qk_norm is not None:
        seen.append("norms of q and k")
    fed = "experts" if isinstance(block, ExpertsConfig) else "gated" if block.is_gated else "plain"
    if fed != "experts" and config.experts is not None:
        fed = f"{fed}, then experts"
    cells = [
        f"`{family.architecture}`",
        f"`{family.model_type}`",
        positions,
        ", ".join(seen),
        fed,
        "yes" if family.write is not None else "no",
        ", ".join(family.formats) or "none",
        _reason_of_shards(config) or "yes",
        _reason_of_cpu(config) or "yes",
    ]
    return f"| {' | '.join(cells)} |\n"


def _reason_of_shards(config: ModelConfig) -> str | None:
    try:
        check_shards(config, 2)
    except ValueError as error:
        said = str(error)
        if "must be 1" in said:
            return f"no ({said.partition('must be 1 ')[2].partition(', got')[0]})"
    return None


def _reason_of_cpu(config: ModelConfig) -> str | None:
    with torch.device("meta"):
        reason = NativeDecoder(config).why_no_cpu_program()
    if reason is None or "must be packed" in reason:
        return None
    return f"no ({reason.partition(' must be')[0]})"


def table() -> str:
    """Return the table in Markdown, a row for each family."""
    rows = []
    for family in sorted(FAMILIES.values(), key=lambda x: x.architecture.lower()):
        try:
            rows.append(row(family))
        except CheckpointError as error:
            raise CheckpointError(f"{family.architecture}: {error}") from error
    return HEAD + "".join(rows)


def written(page: str) -> str:
    """Return a page with the table between its two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END, 1)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
