"""The part of vLLM's Python interface that its attention backends meet, recorded, as modules.

`vllm_0_25_1.json` has the names of methods, parameters and fields of vLLM 0.25.1, and
`vllm_0_33_0.json` those of 0.33.0. `install` puts stand-ins of the first's form where the imports
of `tilewise.integrations.vllm` look for them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

RECORDS: dict[str, dict[str, Any]] = {
    version: json.loads(Path(__file__).with_name(f"vllm_{version}.json").read_text())
    for version in ("0_25_1", "0_33_0")
}
RECORDED = RECORDS["0_25_1"]
_BASES = ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder")


def _base(name: str) -> type:
    """A class whose builder takes what vLLM's takes, and whose other methods are its children's."""

    def begin(self, *given):
        if name == "AttentionMetadataBuilder":
            names = RECORDED[name]["__init__"]
            self.__dict__.update(zip(names, given, strict=True))

    return type(name, (), {"__init__": begin, "is_mla": classmethod(lambda cls: False)})


class _LatentImpl:
    """What MLACommonImpl keeps of its arguments, as far as a decode step reads it."""

    def __init__(self, num_heads, head_size, scale, *beside, kv_lora_rank, **more):
        assert len(beside) == len(RECORDED["MLAAttentionImpl"]["__init__"][3:10])
        self.num_heads, self.scale, self.kv_lora_rank = num_heads, scale, kv_lora_rank


def install(monkeypatch) -> dict[str, str]:
    """Install the modules; returns what is registered, by the backend's name."""
    registered: dict[str, str] = {}
    backend = ModuleType("vllm.v1.attention.backend")
    for name in _BASES:
        setattr(backend, name, _base(name))
    backend.AttentionCGSupport = Enum("AttentionCGSupport", RECORDED["AttentionCGSupport"])
    backend.AttentionType = Enum("AttentionType", RECORDED["AttentionType"], type=str)
    fields = [(name, Any, None) for name in RECORDED["CommonAttentionMetadata"]]
    backend.CommonAttentionMetadata = make_dataclass("CommonAttentionMetadata", fields)
    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = Enum("AttentionBackendEnum", {"CUSTOM": None})

    def register_backend(backend, class_path=None, is_mamba=False):
        registered[backend.name] = class_path

    registry.register_backend = register_backend
    envs = ModuleType("vllm.envs")
    envs.VLLM_BATCH_INVARIANT = False
    latent = ModuleType("vllm.model_executor.layers.attention.mla_attention")
    latent.MLACommonBackend = _base("AttentionBackend")
    latent.MLACommonMetadataBuilder = _base("AttentionMetadataBuilder")
    latent.MLACommonImpl = _LatentImpl
    for module in (backend, registry, envs, latent):
        *folders, _ = module.__name__.split(".")
        for end in range(1, len(folders) + 1):
            package = ".".join(folders[:end])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent = sys.modules[".".join(folders)]
        monkeypatch.setattr(parent, module.__name__.rpartition(".")[2], module, raising=False)
    for name in ("paged", "latent"):
        monkeypatch.delitem(sys.modules, f"tilewise.integrations.vllm.{name}", raising=False)
    return registered
