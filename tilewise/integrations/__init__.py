"""The calling conventions of other libraries, on tilewise's kernels: one module for each library.

Each module is imported when it is first used, by its name or as an attribute.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = frozenset(
    [
        "diffusers",
        "evoformer",
        "flash_attn",
        "flash_attn_interface",
        "sglang",
        "torch_flash",
        "torch_sdpa",
        "transformers",
        "vllm",
        "xformers_ops",
    ]
)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")  # the import sets the attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
