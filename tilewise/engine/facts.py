"""What an engine's answers depend on: its weights, files, versions and the kind of its device."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.engine.recipe import Facts
from tilewise.engine.settings import ResolvedConfig
from tilewise.nn.experts import Experts
from tilewise.nn.packed import PackedLinear
from tilewise.nn.quantised import QuantisedLinear
from tilewise.version import __version__

__all__ = ["facts_of", "order_of"]

# What a tokenizer is read from, and templates; see `tokenizer_files`.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)

_OF_PAIRS = ("avx512bf16", "amx-tiles")  # instructions that multiply pairs of bfloat16


def facts_of(model: nn.Module, config: ResolvedConfig, directory: Path) -> Facts:
    """Return the facts on which an engine's answers depend; every weight is read.

    They are digests of the weights, the model's config and the tokenizer's files, and `order_of`.
    The digest of files is "" where there are none, and the template is "".

    Args:
        model: the model as the engine holds it.
        config: the engine's config.
        directory: the folder of the tokenizer's files.
    """
    shape = getattr(model, "config", None)
    return Facts(
        weights=_weights_digest(model),
        config=hashlib.sha256(repr(shape).encode()).hexdigest(),
        tokenizer=_files_digest(directory),
        template="",
        order=order_of(config),
    )


def order_of(config: ResolvedConfig) -> dict[str, str]:
    """Return the facts that decide the order of sums, and so the bits of an answer: name to value.

    They are the versions, the kind of device, the dtypes and the block size. The number of threads,
    other requests and the length of a context change no bits (docs/guide/exact.md).
    """
    library = "triton" if config.device.type == "cuda" else "numba"
    told = {
        "tilewise": __version__,
        "torch": torch.__version__,
        library: _version_of(library),
        "device": _kind_of(config.device, torch.bfloat16 in (config.dtype, config.kv_cache_dtype)),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "weight_dtype": config.weight_dtype,
        "block_size": config.block_size,
    }
    return {name: str(value).removeprefix("torch.") for name, value in told.items()}


def _kind_of(device: torch.device, has_bfloat16: bool) -> str:
    """Return a text for the kind of a device, as far as it decides the bits of results.

    Of a GPU it is the name and compute capability, of a CPU the instruction sets of its kernels and
    torch's. Instructions for pairs of bfloat16 are named only if `has_bfloat16`.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    own = " ".join(s for s in ops.panels.instruction_sets() if has_bfloat16 or s not in _OF_PAIRS)
    return f"{platform.machine()} {own}, torch {torch.backends.cpu.get_cpu_capability()}"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of all parameters, buffers, packed panels and quantised parts.

    The layouts are those of the engine.
    """
    for name, module in model.named_modules():
        for kind, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            yield f"{name}.{kind}", tensor
        packed = []
        if isinstance(module, PackedLinear):
            packed = [module.panels]
        elif isinstance(module, Experts) and module.packed is not None:
            packed = [*module.packed.up, *module.packed.down]
        elif isinstance(module, QuantisedLinear):
            for i, part in enumerate(module.parts):
                for kind, tensor in part.tensors().items():
                    yield f"{name}.{i}.{kind}", tensor
        for i, each in enumerate(packed):
            yield f"{name}.panels.{i}", each.words
            if each.bias is not None:
                yield f"{name}.bias.{i}", each.bias


def _weights_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in _held(model):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data = tensor.detach().contiguous().cpu().reshape(-1)
        if data.numel():
            digest.update(memoryview(data.view(torch.uint8).numpy().data))
    return digest.hexdigest()


def _files_digest(directory: Path) -> str:
    digest, has_any = hashlib.sha256(), False
    for name in _TOKENIZER_FILES:
        path = directory / name
        if path.is_file():
            has_any = True
            digest.update(f"{name}\n".encode() + path.read_bytes())
    return digest.hexdigest() if has_any else ""
