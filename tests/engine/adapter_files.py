"""Adapters of the story model, and the checkpoint that each of them makes when it is merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tilewise.engine.settings import packaged_model
from tilewise.models.adapters import AdapterSite, adapter_sites
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model

SITES = adapter_sites(empty_model(read_config(packaged_model()), "float32", "meta"))


def write_adapter(
    folder: Path,
    seed: int = 0,
    *,
    rank: int = 4,
    names: list[str] | None = None,
    sites: Mapping[str, AdapterSite] = SITES,
    **fields: Any,
) -> Path:
    """Write a random adapter of these layers, or of all of a model; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    names = list(sites) if names is None else names
    for name in names:
        site = sites[name]
        for half, shape in ("A", (rank, site.in_features)), ("B", (site.out_features, rank)):
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = (
                torch.randn(shape, generator=generator) / shape[1] ** 0.5
            )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank / 2, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(adapter: Path, folder: Path) -> Path:
    """Write the story model with W + alpha / r B A in place of each W, in float32."""
    source = packaged_model()
    shutil.copytree(source, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    low = load_file(adapter / "adapter_model.safetensors")
    for file in folder.glob("*.safetensors"):
        weights = {name: tensor.float() for name, tensor in load_file(file).items()}
        for name in {key.split(".lora_")[0] for key in low}:
            a, b = (low[f"{name}.lora_{half}.weight"].double() for half in "AB")
            weight = f"{name.removeprefix('base_model.model.')}.weight"
            if weight in weights:
                weights[weight] = (weights[weight].double() + scale * b @ a).float()
        save_file(weights, file, {"format": "pt"})
    return folder
