"""Adapters of low rank (LoRA) as PEFT writes them: y += scale (x A^T) B^T for linear layers.

A folder holds adapter_config.json and adapter_model.safetensors. All that can be wrong is found
here, against the table of a model's weights, before any part of an engine knows of the adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import read_object
from tilewise.models.decoder import Decoder
from tilewise.models.hub import ADAPTER_FILES, adapter_folder
from tilewise.models.native import NativeDecoder
from tilewise.nn.attention import Attention
from tilewise.nn.layers import MLP, GatedMLP
from tilewise.nn.mla import MultiheadLatentAttention

__all__ = [
    "MAX_RANK",
    "Adapter",
    "AdapterPart",
    "AdapterSite",
    "AdapterTensors",
    "adapter_sites",
    "read_adapter",
    "sites_by_module",
]

MAX_RANK = 512  # the largest rank that any option allows

_PREFIX = "base_model.model."
_BLOCKS = (Attention, MultiheadLatentAttention, GatedMLP, MLP)
_OF_A_BLOCK = re.compile(
    r"layers\.\d+\.(attention\.(qkv|o|q_a|q_b|kv_a)_proj|mlp\.(gate_up|up|down)_proj)"
)
_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
# Initialisations that change the weights of the base model: an adapter that was saved without being
# converted belongs to other weights. `True`, "gaussian", "eva" and "orthogonal" leave them alone.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


class AdapterSite(NamedTuple):
    """A linear layer of a checkpoint, and its place among the parameters of the model.

    Attributes:
        module: the name of the model's own module, which may be the product of several layers.
        spans: (first, end) of the rows of the checkpoint's layer, in the order in which the module
            has them.
        first: the row of the module at which the layer's rows begin.
        in_features, out_features: the sizes of the layer.
    """

    module: str
    spans: tuple[tuple[int, int], ...]
    first: int
    in_features: int
    out_features: int


class AdapterPart(NamedTuple):
    """The matrices of an adapter for outputs first ... first + out - 1 of a module.

    Attributes:
        first: the first row.
        a: (rank, in), as stored.
        b: (out, rank), as stored, with the rows in the order of the module.
        scale: the factor of the product, alpha / rank, or alpha / sqrt(rank) for rsLoRA.
    """

    first: int
    a: Tensor
    b: Tensor
    scale: float

    def delta(self) -> Tensor:
        """Return scale B A (out, in) in float64, which a merged weight has in addition."""
        return self.scale * (self.b.double() @ self.a.double())


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits a model.

    Attributes:
        parts: the products that it adds, by the names of the model's modules.
        rank: the largest rank of its layers.
    """

    parts: Mapping[str, tuple[AdapterPart, ...]]
    rank: int


def sites_by_module(
    sites: Mapping[str, AdapterSite],
) -> dict[str, list[tuple[str, AdapterSite]]]:
    """Return the named layers that each module is made of, in the order of its rows."""
    found: dict[str, list[tuple[str, AdapterSite]]] = {}
    for name, site in sorted(sites.items(), key=lambda item: item[1].first):
        found.setdefault(site.module, []).append((name, site))
    return found


def adapter_sites(model: Decoder) -> dict[str, AdapterSite]:
    """Return the linear layers of a decoder of this package, by their names in a checkpoint.

    Those are the projections of attention and of feed-forward blocks, but for the up-projection of
    latents (kv_b_proj), which is multiplied into queries and outputs. The embedding, the output
    head and mixtures of experts are not among them.

    Args:
        model: a decoder whose weights are not packed; those on "meta" will do.

    Raises:
        ValueError: the model has no table of weights, or is packed.
    """
    if not isinstance(model, NativeDecoder):
        raise ValueError(
            "model must be a decoder of this package to have adapters, got "
            f"{type(model).__name__}: set model_impl to tilewise"
        )
    sites = {}
    for weight in model.weight_table():
        module, _, kind = weight.name.rpartition(".")
        parameter = model.get_parameter(weight.name)
        if kind != "weight" or _OF_A_BLOCK.fullmatch(module) is None:
            continue
        if not isinstance(model.get_submodule(module.rpartition(".")[0]), _BLOCKS):
            continue
        first = 0
        for place, source in enumerate(weight.sources):
            size = parameter.shape[0] if weight.rows is None else weight.rows[place]
            spans: tuple[tuple[int, int], ...] = ((0, size),)
            if weight.order is not None and place == 0:
                spans = weight.rows_in_order(model.config.layers[weight.layer])
            name = source.removesuffix(".weight")
            sites[name] = AdapterSite(module, spans, first, parameter.shape[1], size)
            first += size
    return sites


class AdapterTensors(NamedTuple):
    """An adapter that no file holds yet.

    Attributes:
        config: the fields of adapter_config.json.
        tensors: the tensors of adapter_model.safetensors by name.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_adapter(
    path: str | Path | AdapterTensors,
    sites: Mapping[str, AdapterSite],
    *,
    max_rank: int = MAX_RANK,
) -> Adapter:
    """Read an adapter, checked against a model; its tensors stay in main memory.

    Args:
        path: a folder with adapter_config.json and adapter_model.safetensors, or a hub name; or
            what they would hold, of which the tensors are copied.
        sites: the linear layers of the model, see `adapter_sites`.
        max_rank: the largest rank that is accepted.

    Raises:
        CheckpointError: a file is missing or broken, the adapter is of another kind or another
            model, or a tensor is missing, unknown, too large or not finite; the message names it.

    Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rsLoRA); the files are PEFT's.
    """
    config: Mapping[str, Any]
    if isinstance(path, AdapterTensors):
        config, given = path.config, _copies(path.tensors)
    else:
        folder = adapter_folder(path)
        config_file, tensor_file = (_file(folder, name) for name in ADAPTER_FILES)
        config, given = read_object(config_file), _tensors(tensor_file)
    _check_kind(config)
    terms = _Terms.of(config)
    wanted = [name for name in sites if terms.selects(name)]
    if not wanted:
        raise CheckpointError(
            "target_modules must name linear layers of the model, got "
            f"{shown(config.get('target_modules'))}"
        )
    pairs: dict[str, dict[str, Tensor]] = {name: {} for name in wanted}
    for tensor_name, tensor in given:
        module, half = _split(tensor_name, sites)
        if module not in pairs:
            raise CheckpointError(
                f"adapter tensor {tensor_name!r} must belong to one of target_modules, "
                f"got {module!r}"
            )
        _check_tensor(tensor_name, tensor, half, sites[module], terms.rank(module), max_rank)
        pairs[module][half] = tensor
    parts: dict[str, list[AdapterPart]] = {}
    for name, halves in pairs.items():
        for half in "AB":
            if half not in halves:
                raise CheckpointError(
                    f"adapter must hold {f'{_PREFIX}{name}.lora_{half}.weight'!r}, got none"
                )
        site, b = sites[name], halves["B"]
        if len(site.spans) > 1:
            b = torch.cat([b[first:end] for first, end in site.spans])
        own = AdapterPart(site.first, halves["A"], b, terms.scale(name))
        parts.setdefault(site.module, []).append(own)
    largest = max(part.a.shape[0] for own in parts.values() for part in own)
    return Adapter({module: tuple(own) for module, own in parts.items()}, largest)


def _file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise CheckpointError(f"adapter {str(folder)!r} must hold {name}, got none")
    return folder / name


def _check_kind(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless an adapter adds products of low rank to layers, and nothing
    else."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"peft_type must be LORA, got {shown(config.get('peft_type'))}")
    refused = (
        ("use_dora", "False, as DoRA's norm of the merged weight cannot be added to a product"),
        ("lora_bias", "False, as biases of adapters are not added"),
        ("modules_to_save", "empty, as whole modules are not replaced: merge them into the model"),
        ("layer_replication", "empty, as layers are not repeated"),
        ("target_parameters", "empty, as experts have no adapters"),
        ("trainable_token_indices", "empty, as rows of the embedding are not replaced"),
        ("alora_invocation_tokens", "empty, as an adapter is added to all tokens of a request"),
        ("use_qalora", "False, as inputs are not pooled"),
    )
    for name, rule in refused:
        if config.get(name):
            raise CheckpointError(f"{name} must be {rule}, got {shown(config[name])}")
    if config.get("bias", "none") != "none":
        raise CheckpointError(
            f"bias must be none, as biases belong to all requests, got {shown(config['bias'])}"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise CheckpointError(
            "init_lora_weights must be one that leaves the base model's weights alone, or the "
            f"adapter be converted when it is saved, got {shown(start)}"
        )


@dataclass(frozen=True, slots=True)
class _Terms:
    """The settings of an adapter's config for all layers; the fields have PEFT's names."""

    r: int
    alpha: float
    uses_rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: re.Pattern[str] | tuple[str, ...]
    excluded: re.Pattern[str] | tuple[str, ...]
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Terms:
        targets = config.get("target_modules")
        if targets == "all-linear":
            found: re.Pattern[str] | tuple[str, ...] = re.compile(".*")
        else:
            found = _names("target_modules", targets)
        layers = config.get("layers_to_transform")
        if type(layers) is int:
            layers = [layers]
        if layers is not None and not (
            isinstance(layers, list) and all(type(layer) is int for layer in layers)
        ):
            raise CheckpointError(
                f"layers_to_transform must be integers or null, got {shown(layers)}"
            )
        if layers is not None and isinstance(targets, str):
            raise CheckpointError(
                f"layers_to_transform must be null where target_modules is a pattern, got {layers}"
            )
        patterns = config.get("layers_pattern") or ()
        return cls(
            _rank("r", config.get("r", 8)),
            _alpha("lora_alpha", config.get("lora_alpha", 8)),
            bool(config.get("use_rslora")),
            {k: _rank("rank_pattern", v) for k, v in _patterns(config, "rank_pattern")},
            {k: _alpha("alpha_pattern", v) for k, v in _patterns(config, "alpha_pattern")},
            found,
            _names("exclude_modules", config.get("exclude_modules") or []),
            None if layers is None else frozenset(layers),
            (patterns,) if isinstance(patterns, str) else tuple(map(str, patterns)),
        )

    def selects(self, name: str) -> bool:
        """Whether the layer of this name has an adapter."""
        if _is_among(name, self.excluded) or not _is_among(name, self.targets):
            return False
        # PEFT takes a layer that is named whole wherever it is.
        if self.layers is None or not isinstance(self.targets, tuple) or name in self.targets:
            return True
        patterns = [rf".*\.{re.escape(each)}\.(\d+)\." for each in self.layers_patterns]
        found = (re.match(pattern, name) for pattern in patterns or [r".*\.[^.]*\.(\d+)\."])
        return any(match is not None and int(match[1]) in self.layers for match in found)

    def rank(self, name: str) -> int:
        """Return the rank of the adapter of a layer, by its name."""
        return next((v for k, v in self.ranks.items() if _ends(k, name)), self.r)

    def scale(self, name: str) -> float:
        """Return the factor of a layer's product: alpha / rank, or alpha / sqrt(rank) for
        rsLoRA."""
        alpha = next((v for k, v in self.alphas.items() if _ends(k, name)), self.alpha)
        rank = self.rank(name)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def _patterns(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    found = config.get(name) or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} must be an object, got {shown(found)}")
    for pattern, value in found.items():
        _compiled(name, rf"(?:.*\.)?(?:{pattern})")
        yield pattern, value


def _names(name: str, value: Any) -> re.Pattern[str] | tuple[str, ...]:
    """Return the layers that a field selects: a pattern of whole names for a text, or ends of names
    for a list."""
    if isinstance(value, str):
        return _compiled(name, value)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise CheckpointError(f"{name} must be a list of names or a pattern, got {shown(value)}")
    return tuple(value)


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise CheckpointError(
            f"{name} must be a regular expression, got {shown(pattern)}: {error}"
        ) from error


def _is_among(name: str, names: re.Pattern[str] | tuple[str, ...]) -> bool:
    if isinstance(names, tuple):
        return any(name == each or name.endswith(f".{each}") for each in names)
    return names.fullmatch(name) is not None


def _ends(pattern: str, name: str) -> bool:
    return re.fullmatch(rf"(?:.*\.)?(?:{pattern})", name) is not None


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(f"{name} must be in 1 ... {MAX_RANK}, got {shown(value)}")
    return value


def _alpha(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise CheckpointError(f"{name} must be a finite number, got {shown(value)}")
    return float(value)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} must be a whole safetensors file: {error}") from error


def _copies(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"adapter tensor {name!r} must be a tensor, got {shown(tensor)}")
        yield name, tensor.detach().to("cpu", copy=True).contiguous()


def _split(name: str, sites: Mapping[str, AdapterSite]) -> tuple[str, str]:
    """Return the layer's name and "A" or "B" of the name of an adapter's tensor.

    Raises:
        CheckpointError: the name is of another form, or of no layer that may have an adapter.
    """
    found = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
    if found is None:
        raise CheckpointError(
            f"adapter tensor {name!r} must be lora_A.weight or lora_B.weight of a linear layer"
        )
    if found[1] not in sites:
        raise CheckpointError(
            f"adapter tensor {name!r} must belong to a linear layer of the model that may have an "
            f"adapter, got {found[1]!r}"
        )
    return found[1], found[2]


def _check_tensor(
    name: str, tensor: Tensor, half: str, site: AdapterSite, rank: int, max_rank: int
) -> None:
    if rank > max_rank:
        raise CheckpointError(
            f"adapter tensor {name!r} must have a rank of at most {max_rank}, got {rank}"
        )
    shape = (rank, site.in_features) if half == "A" else (site.out_features, rank)
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"adapter tensor {name!r} must have shape {shape}, got {tuple(tensor.shape)}"
        )
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise CheckpointError(
            f"adapter tensor {name!r} must be float32, float16 or bfloat16, got {tensor.dtype}"
        )
    if not tensor.isfinite().all():
        raise CheckpointError(f"adapter tensor {name!r} must be finite, got NaN or infinity")
