"""An adapter that is trained beside a decoder of this process, whose own weights stay."""

from __future__ import annotations

import torch
from torch import nn

from tilewise.models.adapters import MAX_RANK, AdapterTensors, adapter_sites, sites_by_module
from tilewise.models.decoder import Decoder
from tilewise.nn.adapted_linear import AdaptedLinear, LowRankWeights
from tilewise.ops.low_rank import TILE

__all__ = ["adapted_linears", "adapter_tensors", "train_adapter"]


def train_adapter(
    model: Decoder, *, rank: int = 16, alpha: float = 32.0, dtype: torch.dtype | None = None
) -> list[nn.Parameter]:
    """Put an adapter beside each linear layer of a decoder that may have one, in place.

    W x becomes W x + alpha / rank B A x, with A drawn and B zero. The model's own parameters need
    no gradient from then on. Call it before `Decoder.use_inference_bits` and before `LLM(model)`.

    Args:
        model: a decoder of load_model or build_model, not packed.
        rank: the rank R, a multiple of 16, at most 512.
        alpha: the numerator of the products' factor.
        dtype: the dtype of A and B; None for that of the model, in which an engine shares them.

    Returns:
        The parameters of the adapter, which an optimizer may change.

    Raises:
        ValueError: the rank is another, or the model has an adapter or inference bits already, or
            no layer that may have an adapter.

    Source: Hu et al., 2021 (LoRA).

    Example:
        >>> optimizer = torch.optim.Adam(train_adapter(model, rank=16), lr=1e-4)
    """
    if type(rank) is not int or not 0 < rank <= MAX_RANK or rank % TILE:
        raise ValueError(
            f"rank must be a multiple of {TILE} in {TILE} ... {MAX_RANK}, as kernels take so many "
            f"at once, got {rank!r}"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating point, got {dtype}")
    by_module = sites_by_module(adapter_sites(model))
    linears = {name: model.get_submodule(name) for name in by_module}
    if not linears:
        raise ValueError("model must have linear layers that may have adapters, got none")
    for name, linear in linears.items():
        if type(linear) is not nn.Linear:
            raise ValueError(
                "model must have plain linear layers, without an adapter or inference bits, got "
                f"{type(linear).__name__} as {name}"
            )
    model.requires_grad_(False)
    found: list[nn.Parameter] = []
    for name, sites in by_module.items():
        linear = linears[name]
        assert isinstance(linear, nn.Linear)
        weight = linear.weight
        linear.__class__ = AdaptedLinear
        linear.adapter = LowRankWeights(
            linear.in_features,
            [0, *(site.first + site.out_features for _, site in sites)],
            rank=rank,
            scale=alpha / rank,
            dtype=dtype or weight.dtype,
            device=weight.device,
        )
        found += linear.adapter.parameters()
    return found


def adapted_linears(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers beside which an adapter is trained, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, AdaptedLinear)}


def adapter_tensors(model: Decoder) -> AdapterTensors:
    """Return the adapter of a model as PEFT's files would hold it.

    The tensors are copies, in main memory; `LLM.load_lora_adapter` takes them, and
    `safetensors.torch.save_file` writes them as adapter_model.safetensors.

    Raises:
        ValueError: no adapter is trained beside the model.
    """
    linears, tensors, ranks = adapted_linears(model), {}, {}
    if not linears:
        raise ValueError("model must have an adapter, see train_adapter, got none")
    sites = adapter_sites(model)
    for module, parts in sites_by_module(sites).items():
        own = linears[module].adapter
        for part, (name, site) in enumerate(parts):
            b = own.b.detach()[:, own.edges[part] : own.edges[part + 1]].T.cpu()
            whole = torch.empty_like(b, memory_format=torch.contiguous_format)
            whole[torch.cat([torch.arange(first, end) for first, end in site.spans])] = b
            a = own.a.detach()[part].to("cpu", copy=True)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = whole
        ranks[own.rank] = own.scale * own.rank
    [(rank, alpha)] = ranks.items()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(sites),
    }
    return AdapterTensors(config, tensors)
