"""tilewise's kernels as attention backends of vLLM, by its entry point for plugins.

With both packages installed, `vllm serve MODEL --attention-backend CUSTOM` runs attention here:
paged keys and values (`paged`), with CUDA graphs of decode steps and shared prefixes read once.
vLLM has one place for a backend of others, so latents (`latent`) take it where they are asked for:
`VLLM_PLUGINS=tilewise_latent vllm serve DEEPSEEK --attention-backend CUSTOM`.

paged.py     the backend of models with keys and values, its metadata and their builder
latent.py    the backend of models with latents (MLA), whose decode steps are computed here
"""

from __future__ import annotations

import os

__all__ = ["register", "register_latent"]


def register() -> None:
    """Give vLLM's CUSTOM backend to the paged kernels; vLLM calls this in each of its processes.

    Raises:
        ImportError: vLLM is not installed, or has no such registry.
    """
    _register("tilewise.integrations.vllm.paged.PagedBackend")


def register_latent() -> None:
    """Give vLLM's CUSTOM backend to the kernels of latents, where VLLM_PLUGINS names this plugin.

    vLLM calls every plugin unless that variable lists some: without tilewise_latent in that
    variable this function does nothing, as `register` gives the place to the paged kernels.

    Raises:
        ImportError: vLLM is not installed, or has no such registry.
    """
    if "tilewise_latent" in os.environ.get("VLLM_PLUGINS", "").split(","):
        _register("tilewise.integrations.vllm.latent.LatentBackend")


def _register(path: str) -> None:
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(
            f"tilewise.integrations.vllm needs vLLM 0.25 or newer: pip install vllm ({error})"
        ) from None
    register_backend(AttentionBackendEnum.CUSTOM, path)
