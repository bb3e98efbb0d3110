"""Write the table of native decoders into docs/guide/models.md, from families and defaults.

python -m tools.site.models    # needs transformers, whose configuration classes have the defaults
"""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import replace
from typing import Any

import torch

from tilewise.distributed.shards import check_shards
from tilewise.errors import CheckpointError
from tilewise.models.config import ModelConfig
from tilewise.models.families import FAMILIES, Family
from tilewise.models.layer_config import FeedForwardConfig
from tilewise.models.native import NativeDecoder
from tilewise.nn import GatedDeltaConfig, KimiDeltaConfig, Mamba2Config, ShortConvConfig
from tilewise.nn.experts import ExpertsConfig
from tools.site import marks

PAGE = marks.ROOT / "docs" / "guide" / "models.md"
RESULTS = marks.ROOT / "lab" / "results" / "models_cpu.json"
HEAD = (
    "| class | `model_type` | positions | attention | feed-forward | saved | own format |"
    " tensor parallel | states | CUDA graphs | compiled step on a CPU | tested how |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
)
MARK = marks.begin("the native decoders", "models")
# Fields that the defaults of transformers lack or that ask for something else than most files do.
CHANGES: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GPTNeoForCausalLM": {"intermediate_size": 64},
}
# What a refusal says, and what a family needs.
_NEEDS = {
    "cache_params": "a recurrence keeps a state",
    "get_linear_cache": "a recurrence keeps a state",
    "get_conv_state": "a convolution keeps a state",
    "indexer": "an indexer chooses the keys",
    "cache.layers": "compressed keys are cached beside the others",
    "its mask is one of its own": "a mask is computed by the keys",
    "reads cache": "something is computed by what the cache holds",
    "attend by themselves": "layers attend by themselves and call no attention function",
    "no causal language model of that name": "transformers names no class for texts",
    "takes no position_ids": "no positions are taken: a recurrence, or positions counted inside",
}
_STATES = {
    GatedDeltaConfig: "gated delta",
    KimiDeltaConfig: "Kimi's delta",
    Mamba2Config: "Mamba-2",
    ShortConvConfig: "a convolution",
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
    positions = "rotary" if config.ropes else "none"
    if config.learned_positions is not None:
        positions = "learned"
    elif any(attention.alibi_slopes for attention in attentions):
        positions = "ALiBi"
    elif len(config.ropes) > 1:
        positions = "rotary, two bases"
    elif config.ropes and any(attention.rope is None for attention in attentions):
        positions = "rotary, none on some layers"
    seen = ["latents" if config.latent is not None else "heads"] if attentions else ["none"]
    if any(config.windows):
        seen.append("chunks" if any(x.is_chunked for x in attentions) else "windows")
    if config.kv_sources:
        seen.append("keys of other layers")
    if any(attention.v_is_k for attention in attentions):
        seen.append("keys as values")
    if any(attention.query_growth is not None for attention in attentions):
        seen.append("queries that grow")
    if any(attention.has_sinks for attention in attentions):
        seen.append("sinks")
    if any(attention.softcap for attention in attentions):
        seen.append("soft cap")
    if any(attention.qk_norm is not None for attention in attentions[:1]):
        seen.append("norms of q and k")
    if any(attention.has_gate for attention in attentions):
        seen.append("a gate")
    block = config.feed_forwards[0] if config.feed_forwards else None
    fed = "experts" if isinstance(block, ExpertsConfig) else "none"
    if isinstance(block, FeedForwardConfig):
        fed = "gated" if block.is_gated else "plain"
    if fed not in ("experts", "none") and config.experts is not None:
        fed = f"{fed}, then experts"
    states = dict.fromkeys(_STATES[type(x.mixer)] for x in config.layers if x.mixer is not None)
    cells = [
        f"`{family.architecture}`",
        f"`{family.model_type}`",
        positions,
        ", ".join(seen),
        fed,
        "no" if any(layer.shared is not None for layer in config.layers) else "yes",
        ", ".join(family.formats) or "none",
        _reason_of_shards(config) or "yes",
        ", ".join(states) or "none",
        "yes" if config.can_be_captured else "no",
        _reason_of_cpu(config) or "yes",
        _tested(family),
    ]
    return f"| {' | '.join(cells)} |\n"


@functools.cache
def _results() -> dict[str, list[str]]:
    """Return the cases of each family that `lab/models.py` found right, natively, by model_type."""
    found: dict[str, list[str]] = {}
    for case in json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]:
        if case["is_right"] and case["way"] == "tilewise":
            found.setdefault(case["architecture"], []).append(case["case"])
    return found


def _tested(family: Family) -> str:
    """Return how a family is compared with transformers."""
    cases = len(_results().get(family.architecture, []))
    engine = "engine" if cases == 1 else f"engine ({cases} cases)"
    return f"logits, {engine}" if cases else "logits"


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
    return f"no ({reason.partition(', got')[0]})"


def table() -> str:
    """Return the table in Markdown, a row for each family."""
    rows = []
    for family in sorted(FAMILIES.values(), key=lambda x: x.architecture.lower()):
        try:
            rows.append(row(family))
        except CheckpointError as error:
            raise CheckpointError(f"{family.architecture}: {error}") from error
    return HEAD + "".join(rows)


def summary() -> str:
    """Return how many families serve by the results, and what the others need."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    ways: dict[str, dict[str, str]] = {"tilewise": {}, "transformers": {}, "refused": {}}
    for case in results["cases"]:
        way = case["way"] if case["is_right"] else "refused"
        ways[way][case["family"]] = case.get("refused", "")
    native, other = ways["tilewise"], {**ways["transformers"]}
    other = {name: "" for name in other if name not in native}
    refused = {n: why for n, why in ways["refused"].items() if n not in {*native, *other}}
    total = len(native) + len(other) + len(refused)
    needs: dict[str, list[str]] = {}
    for name, why in refused.items():
        needs.setdefault(_need(why), []).append(f"`{name}`")
    lines = [
        f"\nOf the {total} decoder families of transformers {results['transformers']}, "
        f"{len(native) + len(other)} serve: {len(native)} natively, {len(other)} through "
        "transformers. `lab/results/models_cpu.json` has what each of them gave.\n\n",
        "| the others are refused, as | families |\n|---|---|\n",
        *(f"| {need} | {', '.join(sorted(names))} |\n" for need, names in sorted(needs.items())),
        f"\nThrough transformers: {', '.join(f'`{name}`' for name in sorted(other))}.\n",
    ]
    return "".join(lines)


def _need(why: str) -> str:
    """Return what a refusal is about, in the words of the table."""
    for said, need in _NEEDS.items():
        if said in why:
            return need
    return "another reason: " + why


def written(page: str) -> str:
    """Return a page with the table between its two marks."""
    return marks.replaced(page, MARK, table() + summary())


if __name__ == "__main__":
    marks.write(PAGE, written)
