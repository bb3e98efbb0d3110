"""tilewise's kernels as an attention backend of SGLang, by its entry point for plugins.

With both packages installed, `sglang serve MODEL --attention-backend tilewise --page-size 64` runs
attention here: over keys and values, or over latents where the model has them (MLA).

step.py      what all layers of a step need of its batch, eager and in CUDA graphs
paged.py     models with keys and values
latent.py    models with latents
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

_NAME = "tilewise"


def register() -> None:
    """Give SGLang the backend "tilewise"; SGLang calls this in each of its processes.

    Raises:
        ImportError: SGLang is not installed, or has no such registry.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
    except ImportError as error:
        raise ImportError(
            f"tilewise.integrations.sglang needs SGLang 0.5.23: pip install sglang ({error})"
        ) from None
    if _NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    choices.add_attention_backend_choices([_NAME])
    choices.add_deterministic_attention_backend_choices([_NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([_NAME])
    register_attention_backend(_NAME)(_made)


def _made(runner: Any) -> Any:
    """Return the attention backend of SGLang's model runner: a LatentBackend for MLA, else a
    PagedBackend."""
    if runner.use_mla_backend:
        from tilewise.integrations.sglang.latent import LatentBackend

        return LatentBackend(runner)
    from tilewise.integrations.sglang.paged import PagedBackend

    return PagedBackend(runner)
