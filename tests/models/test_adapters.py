"""Adapters in PEFT's files: what they add to a model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tilewise.engine.settings import model_directory
from tilewise.errors import CheckpointError
from tilewise.models.adapters import adapter_sites, read_adapter
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model, load_model

SITES = adapter_sites(empty_model(read_config(model_directory("story")), "float32", "meta"))
NAMES = [name for name in SITES if ".layers.0." in name]
Q, K, GATE, UP, DOWN = (
    next(name for name in NAMES if name.endswith(end))
    for end in ("q_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
)


def write(folder: Path, names: list[str], rank: int = 4, **fields: Any) -> dict[str, torch.Tensor]:
    """Write a random adapter of these layers; return its tensors."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    for name in names:
        site = SITES[name]
        for half, shape in ("A", (rank, site.in_features)), ("B", (site.out_features, rank)):
            tensor = torch.randn(shape, generator=generator) / 16
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": names} | fields
    save(folder, config, tensors)
    return tensors


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write the two files of an adapter."""
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def test_an_adapter_of_one_part_of_a_fused_product_is_a_part(tmp_path: Path) -> None:
    tensors = write(tmp_path, [K, UP])
    parts = read_adapter(tmp_path, SITES).parts
    [k], [up] = parts["layers.0.attention.qkv_proj"], parts["layers.0.mlp.gate_up_proj"]
    assert k.first == SITES[Q].out_features
    assert up.first == SITES[GATE].out_features
    assert torch.equal(k.b, tensors[f"base_model.model.{K}.lora_B.weight"])
    assert k.scale == 2.0


def test_merged_parts_compute_what_the_layers_and_their_products_of_low_rank_do(
    tmp_path: Path,
) -> None:
    tensors = write(tmp_path, [Q, K])
    model = load_model(model_directory("story"), dtype="float32")
    linear = model.get_submodule("layers.0.attention.qkv_proj")
    assert isinstance(linear, torch.nn.Linear)
    weight = linear.weight.detach().double()
    x = torch.randn(3, weight.shape[1], dtype=torch.float64)
    expected = x @ weight.T
    for name in (Q, K):
        a, b = (tensors[f"base_model.model.{name}.lora_{half}.weight"].double() for half in "AB")
        site = SITES[name]
        expected[:, site.first : site.first + site.out_features] += 2.0 * (x @ a.T) @ b.T
    for part in read_adapter(tmp_path, SITES).parts["layers.0.attention.qkv_proj"]:
        weight[part.first : part.first + len(part.b)] += part.delta()
    torch.testing.assert_close(x @ weight.T, expected)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"target_modules": "all-linear"}, list(SITES)),
        ({"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [0]}, [Q, K]),
        ({"target_modules": [Q], "layers_to_transform": [1]}, [Q]),
        ({"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}, [Q]),
        ({"target_modules": r".*\.layers\.0\..*(q|down)_proj"}, [Q, DOWN]),
        ({"target_modules": r".*\.layers\.0\..*_proj", "exclude_modules": ["o_proj"]},
         [name for name in NAMES if not name.endswith("o_proj")]),
    ],
)  # fmt: skip
def test_layers_are_selected_as_peft_selects_them(
    tmp_path: Path, fields: dict[str, Any], names: list[str]
) -> None:
    write(tmp_path, names, **fields)
    parts = read_adapter(tmp_path, SITES).parts
    assert set(parts) == {SITES[name].module for name in names}


def test_ranks_and_alphas_of_single_layers_and_rslora(tmp_path: Path) -> None:
    tensors = write(tmp_path, [Q], rank=4) | {}
    tensors |= write(tmp_path, [DOWN], rank=16)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [Q, DOWN]}
    config |= {"rank_pattern": {"down_proj": 16}, "alpha_pattern": {"down_proj": 2}}
    save(tmp_path, config | {"use_rslora": True}, tensors)
    adapter = read_adapter(tmp_path, SITES)
    scales = {module: part.scale for module, (part,) in adapter.parts.items()}
    assert scales == {"layers.0.attention.qkv_proj": 4.0, "layers.0.mlp.down_proj": 0.5}
    assert adapter.rank == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora must be False, as DoRA"),
        ({"bias": "all"}, "bias must be none"),
        ({"lora_bias": True}, "lora_bias must be False"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save must be empty.*lm_head"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters must be empty, as experts"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights must be one that leaves"),
        ({"target_modules": ["conv"]}, r"target_modules must name linear layers.*conv"),
        ({"target_modules": "("}, "target_modules must be a regular expression"),
        ({"r": 513}, "r must be in 1 ... 512, got 513"),
        ({"lora_alpha": "8"}, "lora_alpha must be a finite number"),
        ({"layers_to_transform": "0"}, "layers_to_transform must be integers"),
        (
            {"target_modules": ".*q_proj", "layers_to_transform": [0]},
            "layers_to_transform must be null where target_modules is a pattern",
        ),
        ({"r": 8}, r"q_proj.lora_A.weight' must have shape \(8, 256\), got \(4, 256\)"),
        ({"target_modules": [Q, K]}, "adapter must hold '.*k_proj.lora_A.weight', got none"),
        ({"target_modules": [K]}, "q_proj.lora_A.weight' must belong to one of target_modules"),
    ],
)
def test_a_config_that_says_something_else_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    write(tmp_path, [Q], **fields)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path, SITES)


def test_a_rank_above_the_limit_is_refused_with_its_tensor(tmp_path: Path) -> None:
    write(tmp_path, [Q], rank=32)
    with pytest.raises(CheckpointError, match="q_proj.lora_.*rank of at most 16, got 32"):
        read_adapter(tmp_path, SITES, max_rank=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "must hold '.*lora_B.weight"),
        (lambda t: {k: v * float("nan") for k, v in t.items()}, "lora_.*must be finite"),
        (lambda t: {k: v.double() for k, v in t.items()}, "must be float32, float16 or bfloat16"),
        (lambda t: {k: v[:, :-1].clone() for k, v in t.items()}, "lora_.*must have shape"),
        (lambda t: {k.replace("q_proj", "w1"): v for k, v in t.items()}, "linear layer of the mod"),
        (lambda t: t | {"base_model.model.x.lora_magnitude_vector": torch.ones(1)},
         "lora_magnitude_vector' must be lora_A.weight or"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused_by_its_name(tmp_path: Path, change: Any, message: str) -> None:
    tensors = change(write(tmp_path, [Q]))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    save(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path, SITES)


def test_a_missing_or_torn_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [Q])
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="must be a whole safetensors file"):
        read_adapter(tmp_path, SITES)
    file.unlink()
    with pytest.raises(CheckpointError, match="must hold adapter_model.safetensors"):
        read_adapter(tmp_path, SITES)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="must hold adapter_config.json"):
        read_adapter(tmp_path, SITES)
